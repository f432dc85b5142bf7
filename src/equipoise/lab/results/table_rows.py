"""Rows of the papers' tables, each with the stored results that fill it."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.lab.recipes.reading import entries, kind_of, parse_override, recipe_names, toml_value
from equipoise.lab.recipes.schema import Row, TableSpec
from equipoise.lab.results.stored import Measurement, Stored, opened, row_tables, same

SMOKE = "smoke"  # a budget that tests the recipe and says nothing of the model


@dataclass(frozen=True)
class Cell:
    """A row of a table at one budget, and what was measured of it, if anything."""

    row: Row
    budget: str | None
    tables: dict[str, Any]  # of the recipe, at this budget
    published: dict[str, Any]  # the same at the paper's
    measurement: Measurement | None = None

    @property
    def full(self) -> bool:
        """Whether it was measured at the paper's budget."""
        found = self.measurement
        if found is None or self.budget is not None or not found.trained_as(self.published):
            return False
        return (found.epochs or 0) >= epochs_of(self.published)

    @property
    def moved(self) -> list[str] | None:
        """What has changed since it was trained; None if that is not recorded, or it was not trained."""
        found = self.measurement
        return None if found is None else found.moved(self.tables if found.label else found.recipe_today)

    @property
    def command(self) -> str:
        """The command that trains the row alone."""
        changes = [(".".join(path), value) for path, value in entries(self.row.changes) if path != ("title",)]
        return shlex.join(["equipoise", "train", self.row.recipe, *(override(*change) for change in changes)])


def paper_tables(paper: str) -> list[tuple[str, TableSpec]]:
    """Return name and content of every table of a paper."""
    names = [name for name in recipe_names() if Path(name).parent.name == paper]
    sources = [(name, source) for name in names if (source := opened(name)) is not None]
    return [(name, source.read(TableSpec)) for name, source in sources if kind_of(source) is TableSpec]


def cells_of(name: str, table: TableSpec, row: Row, stored: Stored) -> list[Cell]:
    """Return a row at every budget at which it was measured; at the paper's if at none."""
    found = list(measured_cells(name, table, row, stored))
    published = row_tables(row, table, None, []) or {}
    return found or [Cell(row, None, published, published)]


def measured_cells(name: str, table: TableSpec, row: Row, stored: Stored) -> Iterator[Cell]:
    published = row_tables(row, table, None, [])
    if published is None:
        return
    budgets = [None, *sorted({*published.get("budget", {}), *table.budget} - {SMOKE})]
    seen: list[dict[str, Any]] = []
    for budget in budgets:
        tables = row_tables(row, table, budget, [])
        if tables is None or any(same(tables, other) for other in seen):
            continue
        seen.append(tables)
        for other in stored.tables:
            measurement = other.rows.get((row.label, row.metric))
            if (other.name, other.budget) != (name, budget) or measurement is None:
                continue
            if measurement.origin is None and measurement.asked.recipe != row.recipe:
                continue  # an earlier row of this label, and nothing else says what was trained
            asked = row_tables(row, table, budget, other.changes)
            if asked is not None and same(asked, tables):
                yield Cell(row, budget, tables, published, measurement)
        for measurement in stored.find(tables):
            if row.metric in measurement.numbers:
                yield Cell(row, budget, tables, published, measurement)


def override(key: str, value: Any) -> str:
    """Write a change as on the command line, a string without quotes where that is read as the same."""
    plain = f"{key}={value}"
    return plain if parse_override(plain)[1] == value else f"{key}={toml_value(value)}"


def epochs_of(tables: dict[str, Any]) -> int:
    """Return the number of epochs of a recipe."""
    return sum(phase.get("epochs", 0) for phase in tables.get("phases", []) if isinstance(phase, dict))

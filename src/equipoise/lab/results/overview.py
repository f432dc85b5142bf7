"""What there is: rows for the lists of recipes, runs and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.data import DATA_SETS, available, cache_folder, check, load
from equipoise.lab.data.get.download import get
from equipoise.lab.data.get.sources import SOURCES, how_to_get
from equipoise.lab.format import duration
from equipoise.lab.recipes.build import build_model
from equipoise.lab.recipes.reading import (
    KINDS,
    RecipeError,
    RecipeFile,
    kind_of,
    open_recipe,
    recipe_names,
    recipes_folder,
)
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs.folder import Run, list_runs
from equipoise.lab.training.evaluate import parameter_count
from equipoise.options import unknown

# Shapes and numbers of classes of known sets, so that parameters can be counted without loading data.
KNOWN_FACTS = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "svhn": ((3, 32, 32), 10),
}


def recipe_rows() -> list[tuple[str, ...]]:
    """Name, kind, paper, data set, parameters and title of everything in the package."""
    rows = []
    for name in recipe_names():
        source = open_recipe(name)
        kind = kind_of(source)
        read: Any = source.read(kind)
        data = read.data.name if kind is Recipe else "-"
        size = parameters(source, read) if kind is Recipe else "-"
        rows.append((name, KINDS[kind][0], read.paper.system, data, size, read.title))
    return rows


def parameters(source: RecipeFile, recipe: Recipe) -> str:
    """How many numbers the recipe's model learns, counted without making them."""
    if recipe.data.name not in KNOWN_FACTS:
        return "?"
    shape, classes = KNOWN_FACTS[recipe.data.name]
    names = tuple(map(str, range(classes)))
    channels = (0.5,) * shape[0]
    facts = {"shape": shape, "classes": classes, "class_names": names, "mean": channels, "std": channels}
    with torch.device("meta"):
        return f"{parameter_count(build_model(recipe, facts, source.where)):,}"


def recipe_text(name: str) -> str:
    """A recipe's file as it is."""
    if name not in (known := recipe_names()):
        raise RecipeError(unknown("recipe", name, known))
    return (recipes_folder() / f"{name}.toml").read_text(encoding="utf-8")


def run_rows(parent: Path) -> list[tuple[str, ...]]:
    """One row per run: what it trains and how far it is."""
    rows = []
    for run in list_runs(parent):
        try:
            rows.append(run_row(run))
        except (ValueError, KeyError, TypeError) as error:  # one damaged run does not hide the others
            rows.append((str(run.folder), "-", f"damaged: {error}", "-", "-", "-", "-"))
    return rows


def run_row(run: Run) -> tuple[str, ...]:
    recipe, epochs, result = run.recipe, run.epochs(), run.result
    total = sum(phase.epochs for phase in recipe.phases)
    validation = headline(epochs[-1].get("val", {})) if epochs else "-"
    if result and "best" in result:
        validation = number(result["best"]["value"])
    test = headline(result["test"]) if result else "-"
    seconds = result["seconds"] if result else epochs[-1]["seconds"] if epochs else 0
    done = f"{epochs[-1]['epoch'] if epochs else 0}/{total}"
    return (str(run.folder), run.facts["recipe"], run.status, done, validation, test, duration(seconds))


def headline(metrics: dict[str, Any]) -> str:
    """The first metric, which is the one people quote."""
    return next((number(value) for value in metrics.values() if isinstance(value, int | float)), "-")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def data_rows(folders: Sequence[Path]) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """One row per data set and where it was found; and how to get those that were not."""
    listed = available(folders)
    rows = [(row.name, row.samples or "-", row.found or "-", row.licence) for row in listed]
    return rows, {row.name: row.get for row in listed if not row.found}


def get_data(name: str, to: Path | None) -> list[Path]:
    """Download a data set, and return its files."""
    if name not in DATA_SETS.entries:
        raise LookupError(unknown("data set", name, DATA_SETS))
    if name not in SOURCES:
        raise LookupError(f"{name} cannot be downloaded: {how_to_get(name)}.")
    return get(name, SOURCES[name], to or cache_folder())


def check_rows(name: str | None, folders: Sequence[Path]) -> tuple[list[tuple[str, ...]], bool]:
    """The files of a set, or of all sets found, with a verdict on each; and whether each set can be read."""
    if name is not None and name not in DATA_SETS.entries:
        raise LookupError(unknown("data set", name, DATA_SETS))
    names = [name] if name else [row.name for row in available(folders) if row.found]
    rows: list[tuple[str, ...]] = []
    sound = True
    for each in names:
        rows += [(each, str(file.path or file.file), file.verdict) for file in check(each, folders)]
        try:
            data = load(each, folders=folders, validation=0)
            for split in (data.train, data.test):
                split.read(torch.arange(1))
            verdict = f"{len(data.train)} + {len(data.test)} samples" + (f"; {data.note}" if data.note else "")
        except (ValueError, LookupError) as error:
            verdict, sound = str(error), False
        rows.append((each, "read", verdict))
    return rows, sound

"""Claims of a paper, and what stored results say of each: confirmed, refuted, not at this budget, or not run.

``claims.toml`` in the folder of a paper lists them: the sentence, where it is in the paper, and comparisons of stored
values that must all hold. A mark is computed from these alone; nobody writes it.
"""

import math
import operator
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from equipoise.lab.files import read_json
from equipoise.lab.recipes.reading import RecipeError, Where, kind_of, read
from equipoise.lab.recipes.schema import Row, TableSpec
from equipoise.lab.results.stored import Measurement, Number, Stored, opened, read_log
from equipoise.lab.results.table_rows import Cell, cells_of, epochs_of
from equipoise.lab.training.evaluate import format_metric
from equipoise.options import is_number


class Mark(StrEnum):
    """What stored results say of a claim."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_AT_THIS_BUDGET = "not at this budget"
    NOT_RUN = "not run"


RULES = {"above": ">", "below": "<", "reaches": "≥", "within": "≈"}


@dataclass(frozen=True)
class ValueSpec:
    """A stored value: a number, a row of a table, a metric of a run, or a place in a file of the results.

    Args:
        row: "mondeq/table1: label of the row"; with ``paper`` its published number instead of the measured one
        run: name of a stored run, such as "mondeq/mnist-fc"
        metric: metric of the row or the run; the row's own by default
        file: JSON file or log of the results
        at: path in the file: keys, numbers of entries (-1 is the last), "*" for every entry, "key=value" for the
            entries of a list with this value
        take: what to take of several entries; "least" leaves out those that are null, others reject them
        over: value to divide by
    """

    number: float | None = None
    row: str = ""
    paper: bool = False
    run: str = ""
    metric: str = ""
    file: str = ""
    at: tuple[str, ...] = ("*",)
    take: Literal["only", "least", "most", "mean"] = "only"
    over: dict[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """What must hold: ``left`` is above, below, within or reaches (is at least, up to the margin) ``right``.

    The margin is ``by``, or the standard deviations over seeds, sqrt(a^2 + b^2), if that is larger.
    """

    left: ValueSpec
    rule: Literal["above", "below", "reaches", "within"]
    right: ValueSpec
    by: float = 0.0


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        any_budget: whether the claim does not depend on how long the models were trained
        note: what the reader of the verdict should know
    """

    claim: str
    where: str
    holds: tuple[Comparison, ...]
    any_budget: bool = False
    note: str = ""


@dataclass(frozen=True)
class ClaimList:
    """The claims of a paper, and its name as a heading."""

    claims: tuple[Claim, ...]
    paper: str = ""


@dataclass(frozen=True)
class Value:
    """A value of a comparison; without a number if it was not run."""

    number: Number | None
    text: str
    files: tuple[str, ...] = ()
    full: bool = True  # measured at the paper's budget, or printed in the paper
    mixed: bool = False  # quotient of a number measured at the paper's budget and one that was not


@dataclass(frozen=True)
class Verdict:
    """The mark of a claim, and what decides it: for each comparison, a sentence and the files of its values."""

    claim: Claim
    mark: Mark
    reasons: list[tuple[str, list[str]]]


def read_claims(path: Path) -> ClaimList:
    """Read a file of claims; a mistake is reported with its line."""
    text = path.read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: {error}.") from None
    return read(ClaimList, tables, (), Where(str(path), text))


def judge(claim: Claim, stored: Stored) -> Verdict:
    """Compare the stored values of a claim, and mark it.

    Not run: a value is missing, or is not finite. Confirmed: every comparison holds, and none is of a value measured
    at the paper's budget with one that was not. Refuted: one fails, although its values were measured at the paper's
    budget. No budget matters if the claim does not depend on it. Otherwise the results do not decide it.
    """
    outcomes: list[bool | None] = []
    final: list[bool] = []
    reasons: list[tuple[str, list[str]]] = []
    missing: list[str] = []
    for comparison in claim.holds:
        budgets = shared_budget(comparison, stored)
        left, right = (value_of(spec, stored, budgets) for spec in (comparison.left, comparison.right))
        files = [*left.files, *right.files]
        if left.number is None or right.number is None:
            missing += [value.text for value in (left, right) if value.number is None]
            continue
        outcome, margin = compare(comparison, left.number, right.number)
        unequal = not claim.any_budget and (left.mixed or right.mixed or at_different_budgets(left, right))
        outcomes.append(None if unequal else outcome)
        final.append(left.full and right.full)
        says = {True: "holds", False: "fails", None: "within the margin"}[outcome]
        says += ", at different budgets" if unequal else ""
        points = "%" in left.text and comparison.left.over is None
        amount = f"{100 * margin:.2g} points" if points else f"{margin:.2g}"
        by = f" {'up to' if comparison.rule in ('reaches', 'within') else 'by more than'} {amount}" if margin else ""
        reasons.append((f"{left.text} {RULES[comparison.rule]} {right.text}{by}: {says}", files))
    if missing:
        mark = Mark.NOT_RUN
        reasons.append((f"not run: {'; '.join(dict.fromkeys(missing))}", []))
    elif all(outcomes):
        mark = Mark.CONFIRMED
    elif any(outcome is False and (full or claim.any_budget) for outcome, full in zip(outcomes, final, strict=True)):
        mark = Mark.REFUTED
    else:
        mark = Mark.NOT_AT_THIS_BUDGET
    return Verdict(claim, mark, reasons)


def compare(comparison: Comparison, left: Number, right: Number) -> tuple[bool | None, float]:
    """Return whether a comparison holds, None within the margin, and the margin."""
    margin = max(comparison.by, math.hypot(left.spread or 0.0, right.spread or 0.0))
    gap = left.mean - right.mean
    if comparison.rule == "within":
        return abs(gap) <= margin, margin
    if comparison.rule == "reaches":
        return gap >= -margin, margin
    gap = gap if comparison.rule == "above" else -gap
    return (True if gap > margin else False if gap < -margin or margin == 0 else None), margin


# Values


def shared_budget(comparison: Comparison, stored: Stored) -> list[str | None]:
    """Return a list with the budget at which all rows of a comparison were measured, or an empty list.

    If there are several such budgets, it is the one with the most epochs.
    """
    specs = [spec for side in (comparison.left, comparison.right) for spec in parts_of(side)]
    rows = [measured_rows(spec, stored) for spec in specs if spec.row and not spec.paper]
    epochs = [{cell.budget: epochs_of(cell.tables) for cell in cells} for cells in rows]
    shared = [budget for budget in epochs[0] if all(budget in row for row in epochs)] if epochs else []
    return sorted(shared, key=lambda budget: (budget is None, sum(row[budget] for row in epochs)))[-1:]


def parts_of(spec: ValueSpec) -> list[ValueSpec]:
    """Return a value and the one that it is divided by, if any."""
    return [spec] if spec.over is None else [spec, *parts_of(read(ValueSpec, spec.over, (), Where("claims")))]


def value_of(spec: ValueSpec, stored: Stored, budgets: Sequence[str | None] = ()) -> Value:
    """Look up a stored value.

    Args:
        budgets: budgets at which rows are looked up, if they were measured at one of them.
    """
    value, (_, *divisors) = plain_value(spec, stored, budgets), parts_of(spec)
    if not divisors:
        return value
    below = value_of(divisors[0], stored, budgets)
    files = (*value.files, *below.files)
    if value.number is None or below.number is None:
        return value if value.number is None else below
    if not below.number.mean:
        return Value(None, f"{value.text} / {below.text}, which has no value", files)
    ratio = quotient(value.number, below.number)
    text = f"{ratio.mean:.3g} ({value.text} / {below.text})"
    mixed = value.mixed or below.mixed or at_different_budgets(value, below)
    return Value(ratio, text, files, value.full and below.full, mixed)


def at_different_budgets(value: Value, other: Value) -> bool:
    """Return whether one of two measured values was measured at the paper's budget and the other one was not."""
    return bool(value.files and other.files) and value.full != other.full


def quotient(above: Number, below: Number) -> Number:
    """Return the quotient of two numbers, with the spread that theirs give it to first order."""
    mean = above.mean / below.mean
    if above.spread is None and below.spread is None:
        return Number(mean)
    return Number(mean, math.hypot(above.spread or 0.0, mean * (below.spread or 0.0)) / abs(below.mean))


def plain_value(spec: ValueSpec, stored: Stored, budgets: Sequence[str | None]) -> Value:
    if spec.number is not None:
        return Value(Number(spec.number), f"{spec.number:.4g}")
    if spec.row:
        return row_value(spec, stored, budgets)
    if spec.run:
        if spec.run not in stored.runs:
            return Value(None, f"the run {spec.run}")
        run = stored.runs[spec.run]
        return measured_value(run, spec.run, spec.metric, run.full)
    if not (stored.folder / spec.file).exists():
        return Value(None, spec.file)
    return file_value(spec, stored)


def row_value(spec: ValueSpec, stored: Stored, budgets: Sequence[str | None]) -> Value:
    """Look up a row; among results with several budgets, the one with the most epochs counts."""
    found = row_of(spec)
    if isinstance(found, str):
        return Value(None, found)
    _, _, row = found
    metric = spec.metric or row.metric
    if spec.paper:
        if row.paper is None or row.metric != metric:
            return Value(None, f"the paper's {metric} of {row.label!r}")
        return Value(Number(row.paper, row.spread), f"{format_metric(metric, row.paper)} in the paper")
    cells = measured_rows(spec, stored)
    if not cells:
        return Value(None, f"{row.label}, {metric}")
    cells = [cell for cell in cells if cell.budget in budgets] or cells
    cell = max(cells, key=lambda cell: (cell.budget is None, epochs_of(cell.tables)))
    assert cell.measurement is not None
    return measured_value(cell.measurement, row.label, metric, cell.full)


def row_of(spec: ValueSpec) -> tuple[str, TableSpec, Row] | str:
    """Return the name of a table, the table and its row, or a sentence that says what there is not."""
    name, _, label = (part.strip() for part in spec.row.partition(": "))
    source = opened(name)
    if source is None or kind_of(source) is not TableSpec:
        return f"there is no table {name}"
    table: TableSpec = source.read(TableSpec)
    rows = [row for row in table.rows if row.label == label]
    if not rows:
        return f"{name} has no row {label!r}"
    return name, table, next((row for row in rows if row.metric == spec.metric), rows[0])


def measured_rows(spec: ValueSpec, stored: Stored) -> list[Cell]:
    """Return a row at every budget at which it was measured; those without the metric only if there are no others."""
    found = row_of(spec)
    cells = [] if isinstance(found, str) else [cell for cell in cells_of(*found, stored) if cell.measurement]
    metric = spec.metric or ("" if isinstance(found, str) else found[2].metric)
    return [cell for cell in cells if cell.measurement and metric in cell.measurement.numbers] or cells


def measured_value(measurement: Measurement, label: str, metric: str, full: bool) -> Value:
    number = measurement.numbers.get(metric)
    if number is None or math.isnan(number.mean):
        state = "" if number is None else ", which is not finite"
        return Value(None, f"{metric} of {label}{state}", (measurement.file,))
    spread = "" if number.spread is None else f" ± {format_metric(metric, number.spread)}"
    return Value(number, f"{format_metric(metric, number.mean)}{spread} ({label})", (measurement.file,), full)


def file_value(spec: ValueSpec, stored: Stored) -> Value:
    """Look up a place in a file; its models were not trained at the paper's budget, as far as the file says."""
    path = stored.folder / spec.file
    content = read_log(path) if spec.file.endswith(".jsonl") else read_json(path)
    found = reduce(lambda places, key: [entry for place in places for entry in step(place, key)], spec.at, [content])
    numbers = [float(entry) for entry in found if is_number(entry)]
    where = " / ".join(spec.at)
    if not found or (spec.take == "only" and len(found) > 1):
        raise RecipeError(f"{spec.file} has {len(found)} values at {where}: a claim needs one, or `take` of several.")
    if not numbers or (len(numbers) < len(found) and spec.take != "least"):  # null: not finite, or never reached
        others = "the most or the mean of the others would leave them out" if numbers else "nothing is left to compare"
        raise RecipeError(
            f"{spec.file} has {len(found)} values at {where}, of which {len(found) - len(numbers)} are not finite: "
            f"{others}."
        )
    take = {"only": max, "least": min, "most": max, "mean": lambda n: reduce(operator.add, n) / len(n)}[spec.take]
    number = Number(take(numbers))
    return Value(number, f"{number.mean:.4g}", (spec.file,), full=False)


def step(place: Any, key: str) -> list[Any]:
    """Return the entries of a table or list at one part of a path."""
    if key == "*":
        return list(place.values() if isinstance(place, dict) else place if isinstance(place, list) else [])
    if isinstance(place, dict):
        return [place[key]] if key in place else []
    if not isinstance(place, list):
        return []
    if "=" in key:
        name, _, value = key.partition("=")
        return [[entry for entry in place if isinstance(entry, dict) and str(entry.get(name)) == value]]
    number = int(key) if key.lstrip("-").isdecimal() else len(place)
    return [place[number]] if -len(place) <= number < len(place) else []

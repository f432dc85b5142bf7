"""The report of runs: one page that needs nothing beside it, and its table of results as Markdown."""

from __future__ import annotations

import base64
import io
import json
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import equipoise
from equipoise.fixed_point import Equilibrium
from equipoise.lab.files import write_text
from equipoise.lab.format import duration, format_metric, percent, printable, printable_text
from equipoise.lab.recipes.build import MODEL_SECTIONS, module_of, outside_names
from equipoise.lab.recipes.reading import to_toml
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.results import figures
from equipoise.lab.results.summary import Look, Notice, look
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.solution import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH_TELLING = 0.01  # of the solves of the test split failed: the page says why and what helps


# What a page is made of


@dataclass(frozen=True)
class Card:
    """A number people look for first."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Cells, ready to be shown."""

    heading: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Picture:
    """An image that lies in the page itself; sizes in pixels of the page."""

    title: str
    alt: str
    source: str
    width: int
    height: int
    large: bool  # takes a line of its own
    pixels: bool  # loses when it is shown larger or much smaller than it is


@dataclass(frozen=True)
class Part:
    """A headed part of a run's section."""

    title: str
    words: str = ""
    pictures: list[Picture] = field(default_factory=list)
    table: Table | None = None
    commands: list[tuple[str, str]] = field(default_factory=list)  # a sentence and a command
    text: str = ""


def write_report(runs: Sequence[Run], machine: Machine, folders: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write the page of one run, or of several side by side, and its table as Markdown beside it.

    Args:
        runs: finished or not; what is missing is said in the page.
        machine: where to measure the test split.
        folders: to look for data in first.
        out: the page's file; None is report.html in the first run's folder.

    Returns:
        The page's path.

    Example:
        >>> with this_machine() as machine:
        ...     write_report([open_run("runs/core-digits-001")], machine)
    """
    if not runs:
        raise ValueError("a report needs at least one run: equipoise report RUN.")
    runs = list(dict.fromkeys(runs))  # one given twice is still one
    path = out or runs[0].folder
    path = path / "report.html" if path.is_dir() else path
    if path.suffix == ".md":
        raise ValueError(f"the report's file is {path}; the page and its table beside it (.md) need different names.")
    if not machine.leads:
        return path
    alone = Machine(machine.device)  # the other processes, if any, do not take part
    looks = [look(run, label, alone, folders) for run, label in zip(runs, labels(runs), strict=True)]
    write_text(path, printable_text(page(looks, path.with_suffix(".md").name)))
    write_text(path.with_suffix(".md"), printable_text(markdown(looks)))
    return path


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' folders, seen from the nearest folder that holds them all."""
    folders = [run.folder.resolve() for run in runs]
    parent = os.path.commonpath([folder.parent for folder in folders])
    return [printable(folder.relative_to(parent).as_posix()) for folder in folders]


# The page


def page(looks: list[Look], markdown_name: str) -> str:
    """The whole page."""
    from jinja2 import Environment, StrictUndefined

    text = (resources.files("equipoise.lab.results") / "report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    single = len(looks) == 1
    logs = {entry.label: entry.records for entry in looks}
    return template.render(
        title=looks[0].recipe.title if single else f"Comparison of {len(looks)} runs",
        subtitle=looks[0].recipe.paper.aim if single else ", ".join(unique(entry.facts["recipe"] for entry in looks)),
        results=results(looks),
        curves=[] if single else pictures(figures.comparison(logs), "of all runs"),
        sections=[section(entry) for entry in looks],
        version=equipoise.__version__,
        markdown=markdown_name,
    )


def section(entry: Look) -> dict[str, Any]:
    """A run's part of the page."""
    recipe = entry.recipe
    names = (f"recipe {entry.facts['recipe']}", f"data set {recipe.data.name}", f"model {recipe.model.name}")
    return {
        "label": entry.label,
        "status": entry.status,
        "about": ", ".join((*names, f"seed {recipe.seed}")),
        "notices": [*entry.missing, *failures(entry)],
        "cards": list(cards(entry)),
        "parts": list(parts(entry)),
    }


def cards(entry: Look) -> Iterator[Card]:
    """The numbers people look for first."""
    for name, value in entry.test_metrics.items():
        yield Card(f"test {name}", format_metric(name, value), f"{entry.weights} weights")
    if entry.best is not None:
        name, value, epoch = entry.best["metric"], entry.best["value"], entry.best["epoch"]
        yield Card(f"validation {name}", format_metric(name, value), f"best, after epoch {epoch}")
    if entry.parameters is not None:
        yield Card("parameters", f"{entry.parameters:,}", entry.recipe.model.name)
    if entry.seconds is not None:
        yield Card("training time", duration(entry.seconds), f"epochs: {len(entry.epochs)}, steps: {entry.steps:,}")
    if (solver := entry.test.get("solver", {}).get("forward")) is not None:
        steps = solver["steps"]
        yield Card("converged", percent(1 - solver["failed"]), f"of {solver['samples']:,} solves of the test split")
        yield Card("solver steps", f"{steps['median']}", f"median; 90% within {steps['90%']}, most {steps['most']}")
    if failed := entry.epochs[-1]["failed_steps"] if entry.epochs else 0:
        yield Card("failed steps", f"{failed:,}", f"of {entry.steps:,} training steps")


def failures(entry: Look) -> Iterator[Notice]:
    """Which solves of the test split failed, why, and what helps."""
    for direction, numbers in entry.test.get("solver", {}).items():
        if numbers["failed"] > WORTH_TELLING:
            known = {result.name: result.message for result in Result}
            counts = {name: count for name, count in numbers["results"].items() if name != "CONVERGED"}
            reasons = " ".join(f"{count:,} {name}: {known.get(name, '')}" for name, count in counts.items())
            total = f"{sum(counts.values()):,} of {numbers['samples']:,}"
            yield Notice(f"{total} {direction} solves of the test split failed. {reasons}")


def parts(entry: Look) -> Iterator[Part]:
    """What there is to see of a run, one thing after the other; what it does not have is left out."""
    if drawn := pictures(figures.training_curves(entry.records), entry.label):
        yield Part("Training", pictures=drawn)
    if drawn := pictures(figures.solver_curves(entry.records, tolerance(entry.recipe)), entry.label):
        yield Part("Solves while training", pictures=drawn)
    if entry.evaluation is not None and (drawn := pictures(figures.histograms(entry.evaluation.sums), entry.label)):
        yield Part("Solves of the test split", pictures=drawn + pictures(converging(entry), entry.label))
    if table := solver_table(entry):
        words = "Training and validation: of the last epoch. Residuals are rounded up to quarters of a power of ten."
        yield Part("Solver statistics", words, table=table)
    if drawn := pictures(task_pictures(entry), entry.label):
        yield Part("Pictures of the test split", pictures=drawn)
    yield Part("How it was made", commands=list(commands(entry)), table=provenance(entry.facts))
    yield Part("Recipe", "All settings, defaults included.", text=to_toml(entry.recipe))


def tolerance(recipe: Recipe) -> float | None:
    """The relative tolerance that holds throughout, if the recipe names one."""
    stated = recipe.tolerance if all(phase.tolerance is None for phase in recipe.phases) else None
    return (stated or {}).get("relative")


def converging(entry: Look) -> Iterator[tuple[str, Figure]]:
    """Residuals under several solvers, if the model has an Equilibrium."""
    trained, data = entry.trained, entry.data
    if trained and data and any(isinstance(layer, Equilibrium) for layer in trained.model.modules()):
        yield "Convergence under several solvers", figures.convergence_of([(trained, data.test)])


def task_pictures(entry: Look) -> Iterator[tuple[str, Figure]]:
    """What the task draws of the test split."""
    trained, data, evaluation = entry.trained, entry.data, entry.evaluation
    if trained is None or data is None or evaluation is None:
        return
    size = trained.recipe.training.evaluation_batch_size
    batches = prepared(data.test, trained.task, trained.setting, size)
    with quiet_failures(), torch.no_grad(), trained.setting.autocast():
        yield from trained.task.pictures(trained.model, batches, evaluation.sums)


def commands(entry: Look) -> Iterator[tuple[str, str]]:
    """How the run came about, and how to have it again."""
    name = entry.command_name
    if "command" in entry.facts:
        yield "This run was started by", entry.facts["command"]
    beside = f" in {entry.facts['folder']}, where its modules are" if entry.facts["folder"] else ""
    yield f"To train the same again, save the recipe below as again.toml{beside}, and", "equipoise train again.toml"
    if entry.result is None:
        yield "To continue, bit for bit", f"equipoise resume {name}"
    if entry.trained is not None:
        yield "To measure it again", f"equipoise evaluate {name}"
        modules = tuple(dict.fromkeys(module_of(n) for _, n in outside_names(entry.run.source, MODEL_SECTIONS)))
        trust = f", trust={(modules[0] if len(modules) == 1 else modules)!r}" if modules else ""
        yield "To use the model in Python", f"model = equipoise.load({str(entry.run.folder)!r}{trust})"


def pictures(drawn: Iterable[tuple[str, Figure]], of: str) -> list[Picture]:
    return [picture(title, figure, of) for title, figure in drawn]


def picture(title: str, figure: Figure, of: str) -> Picture:
    """A figure as a data address: drawn ones stay sharp at any size, those with images in them are made of pixels."""
    from matplotlib import rc_context

    pixels = any(axis.images for axis in figure.axes)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "equipoise"}):  # the same figure, the same bytes
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        options: dict[str, Any] = {"format": "png", "dpi": 150} if pixels else {"format": "svg"}
        figure.savefig(buffer, facecolor="white", metadata={} if pixels else {"Date": None}, **options)
    kind = "image/png" if pixels else "image/svg+xml"
    source = f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(title, f"{title}, {of}", source, width, height, width > 500, pixels)


# Tables


def results(looks: list[Look]) -> Table:
    """One row per run; runs that differ in their seed alone get one more with mean and spread."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in looks:
        alike = {key: value for key, value in entry.facts["tables"].items() if key not in ("seed", "seeds")}
        key = json.dumps([entry.facts["recipe"], alike, entry.result is None], sort_keys=True)
        groups.setdefault(key, []).append(result_row(entry))
    heading = unique(name for rows in groups.values() for row in rows for name in row)
    if len(looks) > 1 and all(entry.result is not None for entry in looks):
        heading.remove("status")  # the table is wide enough
    table = Table(tuple(heading), [])
    for rows in groups.values():
        table.rows.extend(tuple(format_metric(name, row.get(name)) for name in heading) for row in rows)
        if len(rows) > 1 and rows[0]["status"] == "finished":
            table.rows.append(mean_row(heading, rows))
    return table


def result_row(entry: Look) -> dict[str, Any]:
    """A run in numbers, by the heading of the column."""
    best, solver = entry.best, entry.test.get("solver", {}).get("forward")
    return {
        "run": entry.label,
        "recipe": entry.facts["recipe"],
        "seed": entry.recipe.seed,
        "status": entry.status,
        "parameters": entry.parameters,
        **{f"test {name}": value for name, value in entry.test_metrics.items()},
        **({f"best validation {best['metric']}": best["value"]} if best else {}),
        **({"solver steps": solver["steps"]["median"], "converged": 1 - solver["failed"]} if solver else {}),
        "training steps": entry.steps,
        "time": entry.seconds,
    }


def mean_row(heading: list[str], rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Mean and sample standard deviation of every column that was measured."""
    cells = {"run": f"mean of {len(rows)} seeds"}
    for name in heading:
        values = [value for row in rows if isinstance(value := row.get(name), int | float)]
        if name.startswith(("test ", "best validation ")) and len(values) == len(rows):
            spread = statistics.stdev(values)
            shown_spread = percent(spread) if "accuracy" in name else f"{spread:.2g}"
            cells[name] = f"{format_metric(name, statistics.fmean(values))} ± {shown_spread}"
    return tuple(cells.get(name, "") for name in heading)


def solver_table(entry: Look) -> Table | None:
    """What solves took, by split and direction; None if there were none."""
    last = entry.epochs[-1] if entry.epochs else {}
    splits = {"training": last.get("train", {}), "validation": last.get("val", {}), "test": entry.test}
    heading = ("split", "direction", "solves", "converged", "median steps", "90% within", "most", "median residual")
    rows = [
        (
            split,
            direction,
            f"{numbers['samples']:,}",
            percent(1 - numbers["failed"]),
            *(str(numbers["steps"][name]) for name in ("median", "90%", "most")),
            *(f"{numbers['residual'][name]:.1e}" for name in ("median", "worst")),
            ", ".join(f"{n:,} {name}" for name, n in numbers["results"].items() if name != "CONVERGED") or "none",
        )
        for split, measured in splits.items()
        for direction, numbers in measured.get("solver", {}).items()
    ]
    return Table((*heading, "worst", "failed"), rows) if rows else None


def provenance(facts: dict[str, Any]) -> Table:
    """When, with what and on what."""
    rows = {"started": facts.get("started", ""), **facts.get("versions", {}), **facts["machine"]}
    return Table(("what", "value"), [(name, str(value)) for name, value in rows.items()])


def markdown(looks: list[Look]) -> str:
    """The tables of the page, and what is missing."""
    text = f"# {cell(looks[0].recipe.title if len(looks) == 1 else f'Comparison of {len(looks)} runs')}\n\n"
    text += markdown_table(results(looks))
    for entry in looks:
        notices = [f"{cell(f'{n.text} {n.command}'.strip())}\n" for n in (*entry.missing, *failures(entry))]
        table = solver_table(entry)
        if notices or table:
            text += "\n" + "\n".join([f"## {cell(entry.label)}\n", *notices, markdown_table(table) if table else ""])
    return text


def markdown_table(table: Table) -> str:
    lines = [table.heading, ("---",) * len(table.heading), *table.rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def cell(text: str) -> str:
    """A text that Markdown leaves as it is."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", r"\|").split())


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))

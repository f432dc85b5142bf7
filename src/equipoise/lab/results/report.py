"""Reports of runs: one self-contained HTML page, and its tables as Markdown."""

import base64
import io
import json
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

import equipoise
from equipoise.fixed_point import Equilibrium
from equipoise.lab.files import write_text
from equipoise.lab.printable import printable, printable_text
from equipoise.lab.recipes.build import MODEL_SECTIONS, full_title, module_of, outside_names
from equipoise.lab.recipes.reading import to_toml
from equipoise.lab.results import figures
from equipoise.lab.results.summary import Notice, RunSummary, summarize_run
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import duration, format_metric, percent, prepared, quiet_failures
from equipoise.solution import Result

FAILURES_SHOWN = 0.01  # share of failed test solves above which the page explains them


@dataclass(frozen=True)
class PageTable:
    """A table of formatted cells."""

    heading: tuple[str, ...]
    rows: list[tuple[str, ...]]


def write_report(runs: Sequence[Run], machine: Machine, folders: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write the page of one run, or of several compared, and its tables as Markdown beside it.

    Args:
        runs: runs, finished or not; the page names what is missing.
        machine: device for evaluating the test split.
        folders: folders searched first for data.
        out: file of the page; None for report.html in the first run's folder. An earlier report is replaced.

    Returns:
        The path of the page.

    Example:
        >>> with this_machine() as machine:
        ...     write_report([open_run("runs/core-digits-001")], machine)
    """
    if not runs:
        raise ValueError("a report needs at least one run: equipoise report RUN.")
    runs = list(dict.fromkeys(runs))
    if bare := [run for run in runs if run.file is not None]:
        raise RunError(f"{bare[0]} is weights without the folder of a run, and a report is about a run's training.")
    path = out or runs[0].folder
    path = path / "report.html" if path.is_dir() else path
    if path.suffix == ".md":
        raise ValueError(f"the report's file is {path}; .md is the name of its tables: choose .html.")
    tables = path.with_suffix(".md")
    if out is not None and tables.exists() and not path.exists():  # somebody's own file
        raise ValueError(
            f"{tables}, the file of the report's tables, exists without a report {path.name}: remove it, or give "
            "another file with --out."
        )
    if machine.leads:
        alone = Machine(machine.device)  # other processes do not take part
        summaries = [summarize_run(run, label, alone, folders) for run, label in zip(runs, labels(runs), strict=True)]
        write_text(path, printable_text(page(summaries, tables.name)))
        write_text(tables, printable_text(markdown(summaries)))
    return path


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the runs' folders relative to their nearest common parent."""
    folders = [run.folder.resolve() for run in runs]
    parent = os.path.commonpath([folder.parent for folder in folders])
    return [printable(folder.relative_to(parent).as_posix()) for folder in folders]


# The page


def page(summaries: list[RunSummary], markdown_name: str) -> str:
    """Return the HTML of the page."""
    from jinja2 import Environment, StrictUndefined

    text = (resources.files("equipoise.lab.results") / "report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    first, single = summaries[0], len(summaries) == 1
    recipes = dict.fromkeys(summary.facts["recipe"] for summary in summaries)
    logs = {summary.label: summary.records for summary in summaries}
    return template.render(
        title=title_of(summaries),
        subtitle=first.recipe.paper.aim if single else ", ".join(recipes),
        results=results(summaries),
        curves=[] if single else pictures(figures.comparison(logs), "all runs"),
        runs=[run_part(summary) for summary in summaries],
        version=equipoise.__version__,
        markdown=markdown_name,
    )


def title_of(summaries: list[RunSummary]) -> str:
    return full_title(summaries[0].recipe) if len(summaries) == 1 else f"Comparison of {len(summaries)} runs"


def run_part(summary: RunSummary) -> dict[str, Any]:
    """Return a run's part of the page."""
    recipe = summary.recipe
    names = (f"recipe {summary.facts['recipe']}", f"data set {recipe.data.name}", f"model {recipe.model.name}")
    return {
        "label": summary.label,
        "status": summary.status,
        "about": ", ".join((*names, f"seed {recipe.seed}")),
        "notices": [*summary.notices, *failures(summary)],
        "cards": list(cards(summary)),
        "sections": list(sections(summary)),
    }


def cards(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """Return the headline numbers: name, value and note of each."""
    result = summary.result
    for name, value in summary.test_metrics.items():
        yield f"test {name}", format_metric(name, value), f"{result['weights']} weights"
    if best := result.get("best"):
        name = best["metric"]
        yield f"validation {name}", format_metric(name, best["value"]), f"best, epoch {best['epoch']}"
    if "parameters" in result:
        yield "parameters", f"{result['parameters']:,}", summary.recipe.model.name
    if "seconds" in result:
        yield "training time", duration(result["seconds"]), f"epochs: {len(summary.epochs)}, steps: {result['steps']:,}"
    if solver := summary.solver.get("forward"):
        steps = solver["steps"]
        yield "converged", percent(1 - solver["failed"]), f"of {solver['samples']:,} test solves"
        yield "solver steps", f"{steps['median']}", f"median; 90% within {steps['90%']}, maximum {steps['most']}"
    if failed := summary.epochs[-1]["failed_steps"] if summary.epochs else 0:
        yield "failed steps", f"{failed:,}", f"of {result['steps']:,} training steps"


def failures(summary: RunSummary) -> Iterator[Notice]:
    """Return notices about failed solves on the test split, with causes and remedies."""
    messages = {result.name: result.message for result in Result}
    for direction, numbers in summary.solver.items():
        if numbers["failed"] > FAILURES_SHOWN:
            counts = {name: count for name, count in numbers["results"].items() if name != "CONVERGED"}
            reasons = " ".join(f"{count:,} {name}: {messages.get(name, '')}" for name, count in counts.items())
            total = f"{sum(counts.values()):,} of {numbers['samples']:,}"
            yield Notice(f"{total} {direction} solves of the test split failed. {reasons}")


def sections(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Return the sections about a run, leaving out those without contents."""
    recipe, label = summary.recipe, summary.label
    stated = recipe.tolerance if all(phase.tolerance is None for phase in recipe.phases) else None
    if drawn := pictures(figures.training_curves(summary.records), label):
        yield {"title": "Training", "pictures": drawn}
    if drawn := pictures(figures.solver_curves(summary.records, (stated or {}).get("relative")), label):
        yield {"title": "Solver during training", "pictures": drawn}
    if drawn := pictures(solver_pictures(summary), label):
        yield {"title": "Solver on the test split", "pictures": drawn}
    if table := solver_table(summary):
        words = "Training and validation: last epoch. Residuals are rounded up to a quarter of a decade."
        yield {"title": "Solver statistics", "words": words, "table": table}
    if drawn := pictures(task_pictures(summary), label):
        yield {"title": "Test results", "pictures": drawn}
    yield {"title": "Reproducibility", "commands": commands(summary), "table": provenance(summary.facts)}
    yield {"title": "Recipe", "words": "All settings, including defaults.", "text": to_toml(recipe)}


def solver_pictures(summary: RunSummary) -> Iterator[tuple[str, Figure]]:
    """Plot solver statistics of the test split, and convergence if the model has an Equilibrium."""
    trained, data, evaluation = summary.trained, summary.data, summary.evaluation
    if trained and data and evaluation:
        yield from (drawn := list(figures.histograms(evaluation.sums)))
        if drawn and any(isinstance(layer, Equilibrium) for layer in trained.model.modules()):
            yield "Convergence by solver", figures.convergence_of([(trained, data.test)])


def task_pictures(summary: RunSummary) -> Iterator[tuple[str, Figure]]:
    """Return the task's own figures of the test split."""
    trained, data, evaluation = summary.trained, summary.data, summary.evaluation
    if trained and data and evaluation:
        size = trained.recipe.training.evaluation_batch_size
        batches = partial(prepared, data.test, trained.task, trained.setting, size)
        with quiet_failures(), torch.no_grad(), trained.setting.autocast():
            yield from trained.task.pictures(trained.model, batches, evaluation.sums)


def commands(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Return the command that started the run, and commands that reproduce or use it."""
    name, facts = summary.command_name, summary.facts
    if "command" in facts:
        yield "Command of this run:", facts["command"]
    beside = f" in {facts['folder']}, the folder of its modules," if facts["folder"] else ""
    text = f"To train the same model again, save the recipe below as again.toml{beside} and run:"
    yield text, "equipoise train again.toml"
    if not summary.finished:
        yield "To continue training, with bitwise identical results:", f"equipoise resume {name}"
    if summary.trained is not None:
        yield "To evaluate it again:", f"equipoise evaluate {name}"
        modules = tuple(dict.fromkeys(module_of(n) for _, n in outside_names(summary.run.source, MODEL_SECTIONS)))
        trust = f", trust={(modules[0] if len(modules) == 1 else modules)!r}" if modules else ""
        yield "To load the model in Python:", f"model = equipoise.load({str(summary.run.folder)!r}{trust})"


def pictures(drawn: Iterable[tuple[str, Figure]], label: str) -> list[dict[str, Any]]:
    return [picture(title, figure, label) for title, figure in drawn]


def picture(title: str, figure: Figure, label: str) -> dict[str, Any]:
    """Embed a figure as a data URL: as SVG, or as PNG if it contains images. Sizes are in CSS pixels."""
    pixels = any(axis.images for axis in figure.axes)  # should not be scaled much
    buffer = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "equipoise"}):  # equal figures give equal bytes
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        options: dict[str, Any] = {"format": "png", "dpi": 150} if pixels else {"format": "svg"}
        figure.savefig(buffer, facecolor="white", metadata={} if pixels else {"Date": None}, **options)
    kind = "image/png" if pixels else "image/svg+xml"
    source = f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    size = {"width": width, "height": height, "large": width > 500, "pixels": pixels}  # a large one has its own row
    return {"title": title, "alt": f"{title}, {label}", "source": source, **size}


# Tables


def results(summaries: list[RunSummary]) -> PageTable:
    """Return one row per run, and one with mean and standard deviation per group of runs that differ only in seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        settings = {key: value for key, value in summary.facts["tables"].items() if key not in ("seed", "seeds")}
        key = json.dumps([summary.facts["recipe"], settings, summary.finished], sort_keys=True)
        groups.setdefault(key, []).append(result_row(summary))
    heading = list(dict.fromkeys(name for rows in groups.values() for row in rows for name in row))
    if len(summaries) > 1 and all(summary.finished for summary in summaries):
        heading.remove("status")  # the table is wide enough
    cells: list[tuple[str, ...]] = []
    for rows in groups.values():
        cells.extend(tuple(format_metric(name, row.get(name)) for name in heading) for row in rows)
        if len(rows) > 1 and rows[0]["status"] == "finished":
            cells.append(mean_row(heading, rows))
    return PageTable(tuple(heading), cells)


def result_row(summary: RunSummary) -> dict[str, Any]:
    """Return a run's numbers, keyed by column heading."""
    best, solver = summary.result.get("best"), summary.solver.get("forward")
    return {
        "run": summary.label,
        "recipe": summary.facts["recipe"],
        "seed": summary.recipe.seed,
        "status": summary.status,
        "parameters": summary.result.get("parameters"),
        **{f"test {name}": value for name, value in summary.test_metrics.items()},
        **({f"best validation {best['metric']}": best["value"]} if best else {}),
        **({"solver steps": solver["steps"]["median"], "converged": 1 - solver["failed"]} if solver else {}),
        "training steps": summary.result.get("steps"),
        "time": summary.result.get("seconds"),
    }


def mean_row(heading: list[str], rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return mean and sample standard deviation of every metric."""
    cells = {"run": f"mean of {len(rows)} seeds"}
    for name in heading:
        values = [value for row in rows if isinstance(value := row.get(name), int | float)]
        if name.startswith(("test ", "best validation ")) and len(values) == len(rows):
            std = statistics.stdev(values)
            spread = percent(std) if "accuracy" in name else f"{std:.2g}"
            cells[name] = f"{format_metric(name, statistics.fmean(values))} ± {spread}"
    return tuple(cells.get(name, "") for name in heading)


def solver_table(summary: RunSummary) -> PageTable | None:
    """Return the solver statistics by split and direction; None if there were no solves."""
    last = summary.epochs[-1] if summary.epochs else {}
    splits = {"training": last.get("train"), "validation": last.get("val"), "test": summary.result.get("test")}
    heading = ("split", "direction", "solves", "converged", "median steps", "90% within", "maximum", "median residual")
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
        for direction, numbers in (measured or {}).get("solver", {}).items()
    ]
    return PageTable((*heading, "maximum residual", "failures"), rows) if rows else None


def provenance(facts: dict[str, Any]) -> PageTable:
    """Return date, versions and machine of a run."""
    rows = {"started": facts.get("started", ""), **facts.get("versions", {}), **facts["machine"]}
    return PageTable(("property", "value"), [(name, str(value)) for name, value in rows.items()])


def markdown(summaries: list[RunSummary]) -> str:
    """Return the tables of the page and its notices."""
    text = f"# {cell(title_of(summaries))}\n\n" + markdown_table(results(summaries))
    for summary in summaries:
        notices = [f"{cell(f'{n.text} {n.command}'.strip())}\n" for n in (*summary.notices, *failures(summary))]
        table = solver_table(summary)
        if notices or table:
            text += "\n" + "\n".join([f"## {cell(summary.label)}\n", *notices, markdown_table(table) if table else ""])
    return text


def markdown_table(table: PageTable) -> str:
    lines = [table.heading, ("---",) * len(table.heading), *table.rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def cell(text: str) -> str:
    """Escape a string for Markdown."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", r"\|").split())

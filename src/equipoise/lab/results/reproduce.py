"""Published tables and figures: train what they need, print paper beside measured."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from equipoise.lab.data import MissingData, load
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.data.get.sources import how_to_get
from equipoise.lab.data.inventory import found as found_in
from equipoise.lab.files import read_json, whole, write_json, write_text
from equipoise.lab.recipes.build import check, module_of, trust_words
from equipoise.lab.recipes.reading import (
    RecipeError,
    RecipeFile,
    budget_changes,
    change,
    entries,
    kind_of,
    open_recipe,
    parse_override,
    recipes_folder,
)
from equipoise.lab.recipes.schema import Data, FigureSpec, Paper, Recipe, Row, TableSpec
from equipoise.lab.runs.folder import Run, new_folder, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.sweeps import resume_folder, summarize, train_recipe
from equipoise.lab.training.trainer import Stopped
from equipoise.registry import (
    ANYTHING,
    NOTHING,
    Registry,
    Trust,
    UnknownName,
    UntrustedName,
    call,
    check_options,
    parameters,
    trusting,
)


def figure_table() -> dict[str, str]:
    """The functions that draw figures: the lab's own, and those that the folder of each paper lists."""
    table = {"convergence": "equipoise.lab.results.figures:convergence"}
    for paper in sorted(path.parent.name for path in recipes_folder().glob("*/figures.py")):
        listed = importlib.import_module(f"equipoise.papers.{paper}").FIGURES
        table |= {f"{paper}-{name}": f"equipoise.papers.{paper}.figures:{name}" for name in listed}
    return table


FIGURES = Registry("figure", figure_table(), functions=True)
FIGURE_FACTS = ("runs", "machine", "folders", "path")  # what a function that draws a figure may ask for


def reproduce_table(
    name: str, budget: str | None, changes: Sequence[str], parent: Path, machine: Machine, folders: Sequence[Path]
) -> Path:
    """Train every row of a table, in a new folder, and write paper beside measured; returns the Markdown file."""
    source = open_recipe(name)
    found = rows(source, budget, changes)  # every row's mistakes show before the first one trains
    require_data([recipe for _, recipe in found], folders)
    folder = machine.share(new_folder(parent, source.name) if machine.leads else None)
    if machine.leads:
        write_json(folder / "reproduce.json", asked_for(name, source, budget, changes, folders))
    machine.wait()
    return continue_table(folder, machine, trust=ANYTHING)


ASKED = {"name": str, "budget": (str, type(None)), "changes": [str], "data": [str]}  # what asked_for gives


def asked_for(
    name: str, source: RecipeFile, budget: str | None, changes: Sequence[str], folders: Sequence[Path]
) -> dict[str, Any]:
    """What a table or a figure was asked for with, to continue it from anywhere."""
    return {
        "name": str(Path(name).resolve()) if source.folder else name,
        "budget": budget,
        "changes": list(changes),
        "data": [str(path.resolve()) for path in folders],
    }


def continue_table(folder: Path, machine: Machine, folders: Sequence[Path] = (), trust: Trust = NOTHING) -> Path:
    """Take a table from wherever it stands to its end: rows that are done are not trained again.

    Args:
        trust: modules outside the package that its files may name, and the recipes that reproduce.json names.
    """
    asked = read_json(folder / "reproduce.json", ASKED)
    budget, where = asked["budget"], [*folders, *map(Path, asked["data"])]
    source = open_recipe(asked["name"], trust=trust)
    table: TableSpec = source.read(TableSpec)
    lines: list[dict[str, Any]] = []
    found = rows(source, budget, asked["changes"])
    again = trust_words(*(recipe for _, recipe in found))
    if machine.leads:
        print(introduction(table.title, table.paper, budget, [recipe for _, recipe in found], source), flush=True)
    try:
        for row, recipe in found:
            if machine.leads:
                print(f"== {row.label} ({row.recipe})", flush=True)
            # Rows that differ only in their metric share one training run.
            number = next(i for i, (_, other) in enumerate(found, 1) if other.tables == recipe.tables)
            trained = trained_in(folder, f"row-{number}", recipe, machine, where, again)
            if machine.leads:
                lines.append(measured(row, trained))
                write_json(folder / "table.json", {"title": table.title, "budget": budget or "paper", "rows": lines})
                write_text(folder / "table.md", markdown(table, lines, budget, len(found)))
    finally:  # also when it is stopped: what is there is shown
        if machine.leads and lines:
            print("\n" + markdown(table, lines, budget, len(found)))
            print(f"table             {folder / 'table.md'}", flush=True)
    return folder / "table.md"


def introduction(
    title: str, paper: Paper, budget: str | None, recipes: Sequence[RecipeFile], source: RecipeFile
) -> str:
    """What a table or figure is about to show, as its file says, and what its budget leaves of it."""
    lines = [title, *(f"{name:<18}{text}" for name, text in (("aim", paper.aim), ("note", paper.note)) if text)]
    if budget not in (None, "paper"):
        lines.append(f"{'budget ' + budget:<18}{budget_changes([source, *recipes])}")
    return "\n".join(lines)


def require_data(recipes: Iterable[RecipeFile], folders: Sequence[Path]) -> None:
    """Raise MissingData that names every set that is not there: before the first of several trainings, not after it."""
    missing: dict[str, MissingData] = {}
    for recipe in recipes:
        data: Data = recipe.read(Recipe).data
        if data.name in ABOUT and not found_in(data.name, folders):  # others come from outside, and are asked later
            try:
                load(data.name, folders=folders, validation=0, **data.options)
            except MissingData as error:
                missing[data.name] = error
    if len(missing) == 1:
        raise next(iter(missing.values()))
    if missing:
        names = "; ".join(f"{name}: {how_to_get(name)}" for name in missing)
        raise MissingData(f"{len(missing)} data sets are not there or not complete; to get {names}.")


def trained_in(
    folder: Path, place: str, recipe: RecipeFile, machine: Machine, folders: Sequence[Path], again: Sequence[str]
) -> Path:
    """The run or sweep of a recipe at a place of a folder, taken from wherever it stands to its end.

    Args:
        again: words that the command needs beside the folder to go on, should it be stopped.
    """
    begun = machine.share(sorted((folder / place).glob("*-*"))[:1])
    try:
        if begun:
            resume_folder(begun[0], machine, folders, trust=recipe.where.trust)
        return begun[0] if begun else train_recipe(recipe, folder / place, machine, folders)
    except Stopped as stopped:
        raise Stopped(folder, stopped.step, stopped.number, again) from None


def rows(source: RecipeFile, budget: str | None, changes: Sequence[str]) -> list[tuple[Row, RecipeFile]]:
    """The rows of a table, each with its recipe, checked.

    Changes are made in this order: the recipe's budget, the row's own, the table's budget, the command line's.
    """
    if kind_of(source) is not TableSpec:
        verb = "figure" if "figure" in source.tables else "train"
        raise RecipeError(f"{source.name} is not a table: equipoise {verb} {source.name}.")
    found, table = [], source.read(TableSpec)
    for row in table.rows:
        beside = source.folder and row.recipe.endswith(".toml")
        name = str(Path(source.folder) / row.recipe) if beside else row.recipe
        recipe = open_recipe(name, budget, trust=source.where.trust)
        for path, value in entries(row.changes):
            change(recipe.tables, ".".join(path), value, f"{source.name}, row {row.label!r}", recipe.where)
        recipe.spend(table.budget.get(budget or "", {}), lambda _: f"{source.name}, budget {budget}")
        for text in changes:
            key, value = parse_override(text)
            change(recipe.tables, key, value, f"command line, {text}", recipe.where)
        check(recipe)
        found.append((row, recipe))
    return found


def measured(row: Row, folder: Path) -> dict[str, Any]:
    """What a trained row gave: one number, or mean and spread over seeds."""
    runs = [Run(path) for path in sorted(folder.glob("seed-*"))] or [open_run(folder)]
    summary = summarize([run.result or {} for run in runs])
    if row.metric not in summary:
        raise RecipeError(f"row {row.label!r}: the runs have no metric {row.metric!r}; they have {', '.join(summary)}.")
    found = summary[row.metric]
    return {
        "label": row.label,
        "recipe": row.recipe,
        "metric": row.metric,
        "paper": row.paper,
        "paper_spread": row.spread,
        "measured": found["mean"],
        "spread": found["spread"] if len(runs) > 1 else None,
        "seeds": len(runs),
        "parameters": (runs[0].result or {}).get("parameters"),
        "folder": f"{folder.parent.name}/{folder.name}",
    }


def markdown(table: TableSpec, lines: list[dict[str, Any]], budget: str | None, rows: int) -> str:
    """The table as text; of one that was stopped, as many of its ``rows`` as there are."""

    def value(number: float | None, spread: float | None) -> str:
        if number is None:
            return "-"
        return f"{number:.4g}" + (f" +- {spread:.2g}" if spread is not None else "")

    text = f"# {table.title}\n\nBudget: {budget or 'paper'}.\n"
    if len(lines) < rows:
        text += f"\n{len(lines)} of {rows} rows so far.\n"
    about = (("Aim", table.paper.aim), ("Note", table.paper.note))
    text += "".join(f"\n{name}: {words}.\n" for name, words in about if words) + "\n"
    text += "| | metric | paper | measured | parameters |\n|---|---|---|---|---|\n"
    for line in lines:
        paper, found = value(line["paper"], line["paper_spread"]), value(line["measured"], line["spread"])
        text += f"| {line['label']} | {line['metric']} | {paper} | {found} | {line['parameters']:,} |\n"
    return text


def draw_figure(
    name: str,
    budget: str | None,
    changes: Sequence[str],
    given: Sequence[Path],
    parent: Path,
    machine: Machine,
    folders: Sequence[Path],
    out: Path | None,
    trust: Trust = NOTHING,
) -> Path:
    """Draw a figure from trained runs, or train its recipes for it in a new folder; returns the picture's path.

    Args:
        trust: modules outside the package that files of the given runs may name.
    """
    source, of_recipes = opened_figure(name, budget, changes)
    spec: FigureSpec = source.read(FigureSpec)
    if given and len(given) != len(spec.recipes):
        raise RecipeError(
            f"{name} is drawn from {len(spec.recipes)} runs ({', '.join(spec.recipes)}); {len(given)} are given."
        )
    if given and (of_recipes or (budget and budget not in spec.budget)):
        raise RecipeError(
            f"{name} is drawn from trained runs (--run): a budget or changes of recipes have no effect on them, only "
            f"options of the figure have ({', '.join(sorted(figure_options(source)))})."
        )
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise RecipeError(f"--out is {out}; it must end in .png, .svg or .pdf.")
    owner = f"figure {spec.figure!r}"
    check_options(figure_function(source), spec.options, FIGURE_FACTS, owner)  # before hours of training
    if given:
        runs = [open_run(folder, trust) for folder in given]
        return drawn(source, runs, machine, folders, out or picture_in(runs[0].folder, source))
    found = trainings(source, budget, of_recipes)  # every recipe's mistakes show before the first one trains
    require_data(found, folders)
    folder = machine.share(new_folder(parent, source.name) if machine.leads else None)
    if machine.leads:
        write_json(folder / "figure.json", asked_for(name, source, budget, changes, folders))
    machine.wait()
    return continue_figure(folder, machine, trust=ANYTHING, out=out)


def opened_figure(
    name: str, budget: str | None, changes: Sequence[str], trust: Trust = ANYTHING
) -> tuple[RecipeFile, list[str]]:
    """A figure with those of the changes that are of its own options, and the others, which are of its recipes."""
    source = open_recipe(name, trust=trust)
    if kind_of(source) is not FigureSpec:
        raise RecipeError(
            f"{name} is not a figure: equipoise {'reproduce' if 'rows' in source.tables else 'train'} {name}."
        )
    spec: FigureSpec = source.read(FigureSpec)
    options = figure_options(source)
    own = [text for text in changes if parse_override(text)[0] in options]
    mine = open_recipe(name, budget if budget in spec.budget else None, own, trust)
    return mine, [text for text in changes if text not in own]


def figure_function(source: RecipeFile) -> Callable[..., Any]:
    """The function that draws a figure."""
    try:
        with trusting(source.where.trust):
            return FIGURES[source.read(FigureSpec).figure]
    except UntrustedName as error:
        raise UntrustedName(error.names, error.trust, source.where.name) from None
    except UnknownName as error:
        raise source.where.error(("figure",), str(error)) from None


def figure_options(source: RecipeFile) -> set[str]:
    """What a figure's function takes beside the runs."""
    return parameters(figure_function(source))[0] - set(FIGURE_FACTS)


def continue_figure(
    folder: Path,
    machine: Machine,
    folders: Sequence[Path] = (),
    trust: Trust = NOTHING,
    out: Path | None = None,
) -> Path:
    """Take the trainings of a figure from wherever they stand to their end, and draw it.

    Args:
        trust: modules outside the package that its files may name, and the recipes that figure.json names.
        out: where to write the picture; None is in the folder. A file does not say where another is written.
    """
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise RecipeError(f"--out is {out}; it must end in .png, .svg or .pdf.")
    asked = read_json(folder / "figure.json", ASKED)
    where = [*folders, *map(Path, asked["data"])]
    source, of_recipes = opened_figure(asked["name"], asked["budget"], asked["changes"], trust)
    found, spec = trainings(source, asked["budget"], of_recipes), source.read(FigureSpec)
    if machine.leads:
        print(introduction(spec.title, spec.paper, asked["budget"], found, source), flush=True)
    again = [*trust_words(*found), *(["--trust", module_of(spec.figure)] if ":" in spec.figure else [])]
    again += [] if out is None else ["--out", str(out)]
    trained = [trained_in(folder, f"recipe-{i}", recipe, machine, where, again) for i, recipe in enumerate(found, 1)]
    runs = [open_run(run, trust) for run in trained]
    return drawn(source, runs, machine, where, out or picture_in(folder, source))


def trainings(source: RecipeFile, budget: str | None, changes: Sequence[str]) -> list[RecipeFile]:
    """The recipes that a figure is drawn from, checked: its own changes first, then the command line's."""
    found = []
    for entry in source.read(FigureSpec).recipes:
        recipe, *own = shlex.split(entry)
        found.append(open_recipe(recipe, budget, [*own, *changes], source.where.trust))
        if check(found[-1]).seeds != 1:
            raise RecipeError(f"{source.name} is drawn from one run of each recipe: leave out seeds.")
    return found


def picture_in(folder: Path, source: RecipeFile) -> Path:
    return folder / f"{source.name.replace('/', '-')}.png"


def drawn(source: RecipeFile, runs: list[Run], machine: Machine, folders: Sequence[Path], path: Path) -> Path:
    """Draw a figure from its runs."""
    if machine.leads:
        spec: FigureSpec = source.read(FigureSpec)
        facts: dict[str, Any] = dict(zip(FIGURE_FACTS, (runs, machine, list(folders), path), strict=True))
        figure = call(figure_function(source), spec.options, facts, f"figure {spec.figure!r}")
        with whole(path) as part:
            figure.savefig(part, format=path.suffix.lstrip(".") or "png", dpi=150)
        print(f"figure            {path}")
    return path

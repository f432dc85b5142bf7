"""Reproduce published tables and figures: train their recipes, and print measured results beside the paper's."""

import functools
import importlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from equipoise.lab.data import MissingData, load
from equipoise.lab.data.catalogue import ABOUT, how_to_get
from equipoise.lab.data.inventory import folder_of
from equipoise.lab.files import read_json, whole, write_json, write_text
from equipoise.lab.recipes.build import check, module_of, trust_words
from equipoise.lab.recipes.reading import (
    SAVED,
    RecipeError,
    RecipeFile,
    budget_changes,
    change,
    entries,
    open_recipe,
    parse_override,
    recipes_folder,
)
from equipoise.lab.recipes.schema import FigureSpec, Recipe, Row, TableSpec
from equipoise.lab.results.costs import HEADINGS, costs, shown
from equipoise.lab.results.distance import add_distances
from equipoise.lab.results.features import open_features
from equipoise.lab.results.stored import same
from equipoise.lab.runs.folder import Run, RunError, new_folder, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.sweeps import resume_folder, summarize, train_sweep
from equipoise.lab.training.trainer import Stopped, train_run
from equipoise.lab.trust import ANYTHING, NOTHING, Trust, UntrustedName
from equipoise.options import did_you_mean
from equipoise.registry import Registry, UnknownName, call, check_options, looking_up, parameters

# Arguments that a figure function may have besides its options. Without "runs", nothing is trained.
FIGURE_FACTS = ("runs", "recipes", "machine", "folders", "path")
# The shape of reproduce.json and figure.json.
REQUEST = {"name": str, "budget": (str, type(None)), "changes": [str], "data": [str], "rows?": [str]}


@functools.cache
def figure_functions() -> Registry:
    """Return the functions that draw figures: the lab's own, and those listed by the folder of each paper.

    A function is listed by its name, or as "file:name" if it is in another file than figures.py.
    """
    table = {"convergence": "equipoise.lab.results.figures:convergence"}
    for paper in sorted({path.parent.name for path in recipes_folder().glob("*/*figures.py")}):
        for entry in importlib.import_module(f"equipoise.papers.{paper}").FIGURES:
            file, _, name = entry.rpartition(":")
            table[f"{paper}-{name}"] = f"equipoise.papers.{paper}.{file or 'figures'}:{name}"
    return Registry("figure", table, functions=True)


# Tables


def reproduce_table(
    name: str,
    budget: str | None,
    changes: Sequence[str],
    parent: Path,
    machine: Machine,
    folders: Sequence[Path],
    labels: Sequence[str] = (),
) -> Path:
    """Train the rows of a table in a new folder, and return the Markdown file with its results.

    Args:
        labels: the rows to train; empty for all.
    """
    source = open_recipe(name, kind=TableSpec)
    pairs = chosen(rows(source, budget, changes), labels, source.name)
    require_data([recipe for _, recipe in pairs], folders)  # all rows are checked first
    request = {"rows": list(labels)} if labels else {}
    folder = new_request("reproduce.json", name, source, budget, changes, folders, parent, machine, **request)
    return continue_table(folder, machine, trust=ANYTHING)


def continue_table(folder: Path, machine: Machine, folders: Sequence[Path] = (), trust: Trust = NOTHING) -> Path:
    """Train the unfinished rows of a table, and return the Markdown file with its results.

    Args:
        trust: modules outside the package that its files may name, and the recipes that reproduce.json names.
    """
    asked = read_json(folder / "reproduce.json", REQUEST)
    budget, places = asked["budget"], [*folders, *map(Path, asked["data"])]
    source = open_recipe(asked["name"], trust=trust, kind=TableSpec)
    table: TableSpec = source.read(TableSpec)
    lines: list[dict[str, Any]] = []
    origins: dict[str, dict[str, Any] | None] = {}  # of the first seed of every training
    every = rows(source, budget, asked["changes"])
    pairs = chosen(every, asked.get("rows", ()), source.name)
    recipes = [recipe for _, recipe in pairs]
    introduce(table, budget, recipes, source, machine)
    if table.distances is not None:
        open_features(table.distances, places)  # raises if its file is missing
    try:
        for row, recipe in pairs:
            if machine.leads:
                print(f"== {row.label} ({row.recipe})", flush=True)
            # Rows that differ only in their metric share one training run.
            number = next(i for i, (_, other) in enumerate(every, 1) if other.tables == recipe.tables)
            trained = trained_in(folder, f"row-{number}", recipe, machine, places, trust_words(*recipes))
            if table.distances is not None and machine.leads:
                add_distances(trained, machine, table.distances, places)
            if machine.leads:
                lines.append(measured(row, trained))
                origins[f"row-{number}"] = (runs_in(trained)[0].result or {}).get("origin")
                facts = {"name": source.name, "title": table.title, "budget": budget or "paper"}
                facts |= {"changes": asked["changes"], "rows": lines}
                known = {place: origin for place, origin in origins.items() if origin is not None}
                write_json(folder / "table.json", {**facts, "origins": known})
                write_text(folder / "table.md", markdown(table, lines, budget, len(pairs)))
    finally:  # finished rows are shown also when training is stopped
        if machine.leads and lines:
            print("\n" + markdown(table, lines, budget, len(pairs)))
            print(f"table             {folder / 'table.md'}", flush=True)
            draw_rows(folder, lines)
    return folder / "table.md"


def draw_rows(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Draw the metric of every finished row over epochs and over time, where it was measured after every epoch."""
    from equipoise.lab.results.figures import row_curves

    rows = [
        (line["label"], line["metric"], [run.epochs() for run in runs_in(folder / line["folder"])]) for line in lines
    ]
    figure = row_curves(rows)
    if figure is not None:
        with whole(folder / "table.png") as part:
            figure.savefig(part, format="png", dpi=150)
        print(f"picture           {folder / 'table.png'}", flush=True)


def rows(source: RecipeFile, budget: str | None, changes: Sequence[str]) -> list[tuple[Row, RecipeFile]]:
    """Return the rows of a table, each with its checked recipe.

    Changes are applied in this order: the recipe's budget, the row's changes, the table's budget, the command line.
    """
    pairs, table = [], source.read(TableSpec)
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
        pairs.append((row, recipe))
    return pairs


def chosen(pairs: list[tuple[Row, RecipeFile]], labels: Sequence[str], table: str) -> list[tuple[Row, RecipeFile]]:
    """Return the rows with these labels, and those that share their training runs; all rows if there are no labels."""
    known = [row.label for row, _ in pairs]
    for label in labels:
        if label not in known:
            near, every = did_you_mean(label, known), ", ".join(map(repr, dict.fromkeys(known)))
            raise RecipeError(f"{table} has no row {label!r}; {near}its rows are {every}.")
    trained = [recipe.tables for row, recipe in pairs if row.label in labels]
    return [(row, recipe) for row, recipe in pairs if not labels or recipe.tables in trained]


def measured(row: Row, folder: Path) -> dict[str, Any]:
    """Return the result of a trained row: one number, or mean and standard deviation over seeds."""
    runs = runs_in(folder)
    results = [run.result or {} for run in runs]
    summary = summarize(results)
    if not all(row.metric in result.get("test", {}) for result in results):
        raise RecipeError(f"row {row.label!r}: the runs have no metric {row.metric!r}; they have {', '.join(summary)}.")
    found = summary.get(row.metric, {"mean": None, "spread": None})  # a seed's number is not finite
    return {
        "label": row.label,
        "recipe": row.recipe,
        "metric": row.metric,
        "paper": row.paper,
        "paper_spread": row.spread,
        "measured": found["mean"],
        "spread": found["spread"] if len(runs) > 1 else None,
        "seeds": len(runs),
        "parameters": results[0].get("parameters"),
        "epochs": results[0].get("epochs"),
        "seconds": sum(result.get("seconds", 0) for result in results),
        "costs": costs(runs),
        "folder": f"{folder.parent.name}/{folder.name}",
    }


def runs_in(folder: Path) -> list[Run]:
    """Return the run in a folder, or those of a sweep."""
    return [Run(path) for path in sorted(folder.glob("seed-*"))] or [open_run(folder)]


def markdown(table: TableSpec, lines: list[dict[str, Any]], budget: str | None, total: int) -> str:
    """Return the table as Markdown; ``total`` is the number of its rows, of which ``lines`` are finished."""

    def value(number: float | None, spread: float | None) -> str:
        if number is None:
            return "-"
        return f"{number:.4g}" + (f" +- {spread:.2g}" if spread is not None else "")

    text = f"# {table.title}\n\nBudget: {budget or 'paper'}.\n"
    if len(lines) < total:
        text += f"\n{len(lines)} of {total} rows so far.\n"
    about = (("Aim", table.paper.aim), ("Note", table.paper.note))
    text += "".join(f"\n{name}: {words}.\n" for name, words in about if words) + "\n"
    more = [HEADINGS[column] for column in table.columns]
    text += f"| | {' | '.join(['metric', 'paper', 'measured', 'parameters', *more])} |\n|{'---|' * (5 + len(more))}\n"
    for line in lines:
        numbers = f"{value(line['paper'], line['paper_spread'])} | {value(line['measured'], line['spread'])}"
        cells = [f"{line['parameters']:,}", *(shown(column, line["costs"]) for column in table.columns)]
        text += f"| {line['label']} | {line['metric']} | {numbers} | {' | '.join(cells)} |\n"
    return text


# Figures


def draw_figure(
    name: str,
    budget: str | None,
    changes: Sequence[str],
    given: Sequence[str | Path],
    parent: Path,
    machine: Machine,
    folders: Sequence[Path],
    out: Path | None,
    trust: Trust = NOTHING,
) -> Path:
    """Draw a figure from given runs, or train its recipes in a new folder first; return the path of the picture.

    Args:
        changes: changes ``"key=value"`` of the figure's options or of its recipes.
        given: trained runs, one per recipe, as :func:`~equipoise.lab.runs.folder.open_run` takes them; empty to train
            them.
        trust: modules outside the package that files of the given runs may name.
    """
    source, for_recipes = open_figure(name, budget, changes)
    spec: FigureSpec = source.read(FigureSpec)
    most = len(spec.recipes)
    fewest = most if spec.fewest_runs is None else min(spec.fewest_runs, most)
    if given and not trains(source):
        raise RecipeError(f"{name} is drawn from recipes, not from trained runs: omit --run.")
    if given and not fewest <= len(given) <= most:
        count = f"{most}" if fewest == most else f"{fewest} to {most}"
        raise RecipeError(f"{name} requires {count} runs ({', '.join(spec.recipes)}), got {len(given)}.")
    if given and (for_recipes or (budget and budget not in spec.budget)):
        raise RecipeError(
            f"{name} is drawn from trained runs (--run): a budget or changes of recipes have no effect on them; only "
            f"options of the figure can be changed: {', '.join(sorted(figure_options(source)))}."
        )
    check_suffix(out)
    check_options(figure_function(source), spec.options, FIGURE_FACTS, f"figure {spec.figure!r}")  # before training
    if given:
        runs = [open_run(folder, trust) for folder in given]
        return drawn(source, runs, [], machine, folders, out or picture_in(runs[0].folder, source))
    recipes = trainings(source, budget, for_recipes)  # all recipes are checked first
    if trains(source):
        require_data(recipes, folders)
    folder = new_request("figure.json", name, source, budget, changes, folders, parent, machine)
    return continue_figure(folder, machine, trust=ANYTHING, out=out)


def continue_figure(
    folder: Path, machine: Machine, folders: Sequence[Path] = (), trust: Trust = NOTHING, out: Path | None = None
) -> Path:
    """Finish the training runs of a figure, and draw it.

    Args:
        trust: modules outside the package that its files may name, and the recipes that figure.json names.
        out: file of the picture; None for one in the folder. It is never read from figure.json, which may come from
            somebody else.
    """
    check_suffix(out)
    asked = read_json(folder / "figure.json", REQUEST)
    places = [*folders, *map(Path, asked["data"])]
    source, for_recipes = open_figure(asked["name"], asked["budget"], asked["changes"], trust)
    recipes, spec = trainings(source, asked["budget"], for_recipes), source.read(FigureSpec)
    introduce(spec, asked["budget"], recipes, source, machine)
    again = [*trust_words(*recipes), *(["--trust", module_of(spec.figure)] if ":" in spec.figure else [])]
    again += [] if out is None else ["--out", str(out)]
    trained = [
        trained_in(folder, f"recipe-{i}", recipe, machine, places, again)
        for i, recipe in enumerate(recipes if trains(source) else [], 1)
    ]
    runs = [open_run(run, trust) for run in trained]
    return drawn(source, runs, recipes, machine, places, out or picture_in(folder, source))


def open_figure(
    name: str, budget: str | None, changes: Sequence[str], trust: Trust = ANYTHING
) -> tuple[RecipeFile, list[str]]:
    """Return a figure with changes to its options applied, and the remaining changes, which are for its recipes."""
    source = open_recipe(name, trust=trust, kind=FigureSpec)
    options = figure_options(source)
    own = [text for text in changes if parse_override(text)[0] in options]
    budget = budget if budget in source.read(FigureSpec).budget else None
    return open_recipe(name, budget, own, trust), [text for text in changes if text not in own]


def figure_function(source: RecipeFile) -> Callable[..., Any]:
    """Return the function that draws a figure."""
    import matplotlib  # noqa: F401  (a missing package shows now, not after training)

    try:
        with looking_up(source.where.trust.find):
            return figure_functions()[source.read(FigureSpec).figure]
    except UntrustedName as error:
        raise UntrustedName(error.names, error.trust, source.where.name) from None
    except UnknownName as error:
        raise source.where.error(("figure",), str(error)) from None


def figure_options(source: RecipeFile) -> set[str]:
    return parameters(figure_function(source))[0] - set(FIGURE_FACTS)


def trains(source: RecipeFile) -> bool:
    """Return whether a figure is drawn from trained runs; otherwise it is drawn from the recipes themselves."""
    return "runs" in parameters(figure_function(source))[0]


def trainings(source: RecipeFile, budget: str | None, changes: Sequence[str]) -> list[RecipeFile]:
    """Return the checked recipes of a figure, with the figure's changes applied, then those of the command line."""
    recipes = []
    for entry in source.read(FigureSpec).recipes:
        name, *own = shlex.split(entry)
        recipe = open_recipe(name, budget, [*own, *changes], source.where.trust)
        if check(recipe).seeds != 1:
            raise RecipeError(f"{source.name} is drawn from one run of each recipe: leave out seeds.")
        recipes.append(recipe)
    return recipes


def check_suffix(out: Path | None) -> None:
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise RecipeError(f"--out is {out}; it must end in .png, .svg or .pdf.")


def picture_in(folder: Path, source: RecipeFile) -> Path:
    return folder / f"{source.name.replace('/', '-')}.png"


def drawn(
    source: RecipeFile,
    runs: list[Run],
    recipes: list[RecipeFile],
    machine: Machine,
    folders: Sequence[Path],
    path: Path,
) -> Path:
    """Draw a figure from its runs, or from its recipes, and save it."""
    if machine.leads:
        spec: FigureSpec = source.read(FigureSpec)
        facts: dict[str, Any] = dict(zip(FIGURE_FACTS, (runs, recipes, machine, list(folders), path), strict=True))
        figure = call(figure_function(source), spec.options, facts, f"figure {spec.figure!r}")
        with whole(path) as part:
            figure.savefig(part, format=path.suffix.lstrip(".") or "png", dpi=150)
        print(f"figure            {path}")
    return path


# Both


def new_request(
    file: str,
    name: str,
    source: RecipeFile,
    budget: str | None,
    changes: Sequence[str],
    folders: Sequence[Path],
    parent: Path,
    machine: Machine,
    **more: Any,
) -> Path:
    """Make a new folder for a table or figure, with a file of the request, from which it can be continued."""
    folder = machine.share(new_folder(parent, source.name) if machine.leads else None)
    if machine.leads:
        full_name = str(Path(name).resolve()) if source.folder else name
        data = [str(path.resolve()) for path in folders]
        write_json(folder / file, {"name": full_name, "budget": budget, "changes": list(changes), "data": data} | more)
    machine.wait()
    return folder


def introduce(
    spec: TableSpec | FigureSpec,
    budget: str | None,
    recipes: Sequence[RecipeFile],
    source: RecipeFile,
    machine: Machine,
) -> None:
    """Print title, aim and note of a table or figure, and what its budget changes."""
    if machine.leads:
        about = {"aim": spec.paper.aim, "note": spec.paper.note}
        if budget not in (None, "paper"):
            about[f"budget {budget}"] = budget_changes([source, *recipes])
        print("\n".join([spec.title, *(f"{name:<18}{text}" for name, text in about.items() if text)]), flush=True)


def require_data(recipes: Iterable[RecipeFile], folders: Sequence[Path]) -> None:
    """Raise MissingData, naming every missing data set, before any training starts."""
    missing: dict[str, MissingData] = {}
    for data in (recipe.read(Recipe).data for recipe in recipes):
        if data.name in ABOUT and not folder_of(data.name, folders):  # data sets from outside are checked when loaded
            try:
                load(data.name, folders=folders, validation=0, **data.options)
            except MissingData as error:
                missing[data.name] = error
    if len(missing) == 1:
        raise next(iter(missing.values()))
    if missing:
        names = "; ".join(f"{name}: {how_to_get(name)}" for name in missing)
        raise MissingData(f"{len(missing)} data sets are missing or incomplete; to get {names}.")


def saved_tables(folder: Path) -> dict[str, Any] | None:
    """Return the tables of the recipe that a folder was begun with, or None if it is not that of a run or sweep."""
    files = [folder / name for name in ("run.json", "sweep.json") if (folder / name).is_file()]
    return read_json(files[0], SAVED)["tables"] if files else None


def trained_in(
    folder: Path, place: str, recipe: RecipeFile, machine: Machine, folders: Sequence[Path], again: Sequence[str]
) -> Path:
    """Train a recipe in a subfolder, or finish a run started there; return the folder of the run or sweep.

    Args:
        again: words that the command to continue needs besides the folder, if training is stopped.
    """
    there = ((path, saved_tables(path)) for path in sorted((folder / place).glob("*-*")))
    found = [(path, tables) for path, tables in there if tables is not None]  # others were killed as they were made
    begun = machine.share(found[:1])
    try:
        for path, tables in begun:
            if not same(tables, recipe.tables):
                raise RunError(
                    f"{path} was begun with another recipe than {recipe.name} is now, with the changes of the table or "
                    f"figure. Finish it on its own by `equipoise resume {path}`, and start the table or figure again."
                )
            resume_folder(path, machine, folders, trust=recipe.where.trust)
            return path
        begin = train_run if recipe.recipe.seeds == 1 else train_sweep
        return begin(recipe, folder / place, machine, folders)
    except Stopped as stopped:
        raise Stopped(folder, stopped.step, stopped.number, again) from None

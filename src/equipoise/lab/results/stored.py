"""Stored results: what a folder like ``results/`` holds of finished runs, tables and figures, and where it comes from.

    mondeq/mnist-fc.result.json     result of a run, with its origin
    mondeq/mnist-fc.log.jsonl       its log
    opteq/pair.seed-1.result.json   one seed of several
    opteq/reduced.table.json        a table of `equipoise reproduce`
    mondeq/figure3.json, .png       numbers and picture of a figure
    jiio/celeba-distance.json       another measurement
    origins.toml                    the origin of files that do not record it

`equipoise results --add` writes such files (:mod:`equipoise.lab.results.add_result`).
"""

import copy
import math
import re
import shlex
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from equipoise.lab.files import DamagedFile, finite, read_json
from equipoise.lab.recipes.build import source_digests
from equipoise.lab.recipes.reading import (
    RecipeError,
    RecipeFile,
    Where,
    change,
    entries,
    kind_of,
    open_recipe,
    parse_override,
    read,
)
from equipoise.lab.recipes.schema import FigureSpec, Recipe, Row, TableSpec
from equipoise.lab.runs.folder import ORIGIN, RESULT, read_record
from equipoise.options import is_number

ROW = {"label": str, "recipe": str, "metric": str, "measured": (float, int, type(None)), "seeds": int, "folder?": str}
ROW |= {"spread?": (float, int, type(None)), "parameters?": (int, type(None)), "epochs?": (int, type(None))}
ROW |= {"seconds?": (float, int, type(None)), "costs?": {str: (float, int, type(None))}}
TABLE = {"title": str, "budget": str, "name?": str, "changes?": [str], "rows": [ROW], "origins?": {str: ORIGIN}}

# Keys without influence on what is trained. A training run may start from the weights of another one, which its
# command says.
UNIMPORTANT = ("title", "paper", "budget", "seed", "seeds")
UNIMPORTANT_TRAINING = ("init_from", "test", "log_every", "checkpoint_every", "keep_every", "evaluation_batch_size")
SUFFIX = re.compile(r"(\.seed-\d+)?(\.result\.json|\.table\.json|\.log\.jsonl|\.report\.md|\.json|\.png)$")
OWN = ("README.md", "origins.toml")


@dataclass(frozen=True)
class Noted:
    """An entry of origins.toml: the origin of a stored file, written by hand because the file does not record it."""

    command: str = ""
    commit: str = ""  # that added the file
    machine: str = ""
    note: str = ""
    fills: str = ""  # the file evaluates a run that was trained like "RECIPE --budget small": it fills those rows
    run: str = ""  # the stored run that it evaluates
    epochs: int | None = None  # of a table


@dataclass(frozen=True)
class Number:
    """A measured number: the mean over seeds, and their sample standard deviation if there are several.

    NaN if it was not finite, with one of the seeds at least.
    """

    mean: float
    spread: float | None = None
    seeds: int = 1

    @classmethod
    def of(cls, values: list[float]) -> "Number":
        spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
        return cls(statistics.fmean(values), spread, len(values))


@dataclass(frozen=True)
class Asked:
    """The recipe that a command trains."""

    recipe: str
    budget: str | None = None
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, command: str, file: Path | str = "") -> "Asked":
        """Read a command such as ``equipoise train mondeq/mnist-fc --budget small optimizer.lr=0.01``.

        Args:
            file: file that has the command, for errors.
        """
        try:
            words = shlex.split(command.replace("--budget=", "--budget "))[2:]
        except ValueError as error:
            raise DamagedFile(f"{file}: its command {command!r} cannot be split into words: {error}.") from None
        budget = words[words.index("--budget") + 1] if "--budget" in words[:-1] else None
        plain = [word for word in words if not word.startswith("-")]
        changes = tuple(word for word in plain if re.match(r"[\w.-]+=", word))
        names = [word for word in plain if word not in changes and word != budget]
        return cls(names[0] if names else "", None if budget == "paper" else budget, changes)


@dataclass(frozen=True)
class Measurement:
    """What a training run measured, over one seed or several."""

    name: str  # "mondeq/mnist-fc"
    file: str  # in the folder of results
    numbers: dict[str, Number]  # test metrics, and figures of the log
    asked: Asked
    command: str
    epochs: int | None = None
    seconds: float | None = None  # of all seeds
    parameters: int | None = None
    origin: dict[str, Any] | None = None  # as runs record it
    noted: Noted = Noted()
    label: str = ""  # of a row of a stored table
    sources: tuple[dict[str, str], ...] = ()  # digests of the code of every seed, as its origin records them
    logs: tuple[str, ...] = ()  # files
    metrics: tuple[str, ...] = ()  # names of the numbers that are test metrics of a run

    @cached_property
    def recipe_today(self) -> dict[str, Any] | None:
        """The tables that the command would train today; None if its recipe or budget no longer exists.

        Of the recipes of a table or figure, it is the one that was trained, if that is still one of them.
        """
        every = list(trained_today(self.asked))
        if len(every) > 1:
            every = [tables for tables in every if self.origin is not None and same(self.origin["tables"], tables)]
        return every[0] if every else None

    def moved(self, recipe: dict[str, Any] | None) -> list[str] | None:
        """Return what has changed since the training run: "recipe", files of the package; None if it is not recorded.

        Args:
            recipe: tables that would be trained today.
        """
        if self.origin is None:
            return None
        changed = [] if recipe is not None and same(recipe, self.origin["tables"]) else ["recipe"]
        now = source_digests(self.origin["tables"])
        files = {file for before in self.sources or (self.origin["sources"],) for file in changed_files(before, now)}
        return changed + sorted(files)

    @property
    def full(self) -> bool:
        """Whether it was trained with the paper's budget and nothing was changed that matters."""
        published = recipe_tables(self.asked.recipe, None)
        asked_for = published is not None and self.recipe_today is not None and same(self.recipe_today, published)
        return asked_for and self.trained_as(published)

    def trained_as(self, tables: dict[str, Any] | None) -> bool:
        """Return whether these tables were trained, as far as that is recorded; a recipe may change after training."""
        return self.origin is None or (tables is not None and same(self.origin["tables"], tables))


@dataclass(frozen=True)
class StoredTable:
    """A table of `equipoise reproduce`, by the label and metric of its rows."""

    name: str
    file: str
    budget: str | None
    changes: list[str]
    rows: dict[tuple[str, str], Measurement]


@dataclass
class Stored:
    """Everything in a folder of results."""

    folder: Path
    noted: dict[str, Noted]
    commits: dict[str, str]  # of the history, that have the code of commits which results record and it lacks
    runs: dict[str, Measurement] = field(default_factory=dict)
    tables: list[StoredTable] = field(default_factory=list)
    evaluations: dict[str, Measurement] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # all of them
    origins: dict[str, dict[str, Any]] = field(default_factory=dict)  # of figures that record it, by file

    def command_of(self, file: str) -> str:
        """Return the command that made a figure or another measurement; an empty string if it is not known."""
        stem = stem_of(file)
        return self.origins.get(stem, {}).get("command") or self.noted.get(stem, Noted()).command

    def find(self, tables: dict[str, Any]) -> list[Measurement]:
        """Return the runs and evaluations of a recipe with these tables."""
        every = [*self.runs.values(), *self.evaluations.values()]
        return [each for each in every if each.recipe_today is not None and same(each.recipe_today, tables)]


def same(tables: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two recipes, given as tables, train the same up to the random numbers."""
    return important(tables) == important(others)


def important(tables: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tables.items() if key not in UNIMPORTANT and value != {}}
    if isinstance(training := kept.get("training"), dict):
        kept["training"] = {key: value for key, value in training.items() if key not in UNIMPORTANT_TRAINING}
    return finite(kept)  # stored tables are JSON


def stem_of(file: str) -> str:
    """Return the name of what a file stores: "mondeq/mnist-fc" for "mondeq/mnist-fc.seed-1.result.json"."""
    return SUFFIX.sub("", file)


# Recipes, opened once each


@cache
def opened(name: str) -> RecipeFile | None:
    """Return a recipe, table or figure of the package as written, or None; its tables must not be changed."""
    try:
        return None if name.endswith(".toml") else open_recipe(name)
    except RecipeError:
        return None


def recipe_tables(name: str, budget: str | None, changes: Iterable[tuple[str, Any]] = ()) -> dict[str, Any] | None:
    """Return the tables of a recipe with a budget and then other changes, or None if there is no such recipe or budget.

    The same as :func:`open_recipe` makes, without knowing the lines of the file.
    """
    source = opened(name)
    if source is None or (budget is not None and budget not in source.tables.get("budget", {})):
        return None
    tables = copy.deepcopy(source.tables)
    spent = tables["budget"][budget] if budget is not None else {}
    try:
        for key, value in [*dotted(spent), *changes]:
            change(tables, key, value, name, Where(name))
    except RecipeError:
        return None
    return tables


def row_tables(row: Row, table: TableSpec, budget: str | None, changes: list[str]) -> dict[str, Any] | None:
    """Return the tables of a table's row, or None if its recipe does not have the budget.

    Changes are applied in the order of `equipoise reproduce`.
    """
    others = [*dotted(row.changes), *dotted(table.budget.get(budget or "", {})), *map(parse_override, changes)]
    return recipe_tables(row.recipe, budget, others)


def trained_today(asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield the tables of every recipe that a command trains: one, or those of a table or figure."""
    source = opened(asked.recipe)
    kind = Recipe if source is None else kind_of(source)
    if source is not None and kind is TableSpec:
        table: TableSpec = source.read(TableSpec)
        found = [row_tables(row, table, asked.budget, list(asked.changes)) for row in table.rows]
    elif source is not None and kind is FigureSpec:
        sections = {part.name for part in fields(Recipe)}  # other changes are options of the figure
        changes = [text for text in asked.changes if re.split(r"[.=]", text)[0] in sections]
        recipes = [shlex.split(entry) for entry in source.read(FigureSpec).recipes]
        found = [recipe_tables(name, asked.budget, map(parse_override, [*own, *changes])) for name, *own in recipes]
    else:
        found = [recipe_tables(asked.recipe, asked.budget, map(parse_override, asked.changes))]
    yield from (tables for tables in found if tables is not None)


def dotted(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(".".join(path), value) for path, value in entries(table)]


# Reading


def read_stored(folder: Path) -> Stored:
    """Read a folder of results; raise DamagedFile, which names the file, for one that is not what its name says."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; run this in a clone, or name the folder with --folder.")
    stored = Stored(folder, *read_origins(folder / "origins.toml"))
    every = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    stored.files = [path.as_posix() for path in every if path.name not in OWN and not path.name.startswith(".")]
    groups: dict[str, list[str]] = {}
    for file in [file for file in stored.files if file.endswith(".json")]:
        if file.endswith(".result.json"):
            groups.setdefault(stem_of(file), []).append(file)
        elif file.endswith(".table.json"):
            stored.tables.append(read_table(folder, file, stored.noted))
        elif isinstance(content := read_json(folder / file), dict) and isinstance(content.get("origin"), dict):
            stored.origins[stem_of(file)] = read_json(folder / file, {"origin": {"command": str}})["origin"]
    for name, group in groups.items():
        stored.runs[name] = read_runs(folder, name, group, stored.noted.get(name, Noted()))
    for name, noted in stored.noted.items():
        if noted.fills:
            stored.evaluations[name] = read_evaluation(stored, name, noted)
        elif name not in map(stem_of, stored.files):
            raise DamagedFile(f"{folder / 'origins.toml'} has an entry {name!r}, but there is no such file.")
    return stored


def read_origins(path: Path) -> tuple[dict[str, Noted], dict[str, str]]:
    """Return the entries of origins.toml and its table of commits."""
    if not path.exists():
        return {}, {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}.") from None
    where = Where(str(path), text)
    try:
        tables = tomllib.loads(text)
        commits = read(dict[str, str], tables.pop("commits", {}), ("commits",), where)
        return read(dict[str, Noted], tables, (), where), commits
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}.") from None


def read_runs(folder: Path, name: str, files: list[str], noted: Noted) -> Measurement:
    """Read the results of one run, or of one for each seed; raise DamagedFile if they are not of one recipe."""
    results = [read_json(folder / file, RESULT) for file in files]
    require_one_recipe(folder, files, [result.get("origin") for result in results])
    logs = [file.replace(".result.json", ".log.jsonl") for file in files]
    figures, tests = [log_figures(folder / log) for log in logs], [result["test"] for result in results]
    columns = [numeric(test) | solves(test) | logged for test, logged in zip(tests, figures, strict=True)]
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    numbers = {key: Number.of([column[key] for column in columns]) for key in shared}
    first, origin = results[0], results[0].get("origin")
    command = origin["command"] if origin else noted.command
    asked = Asked.of(command, folder / files[0] if origin else folder / "origins.toml")
    if origin and not asked.recipe:  # `equipoise train` has a default
        asked = replace(asked, recipe=origin["recipe"])
    return Measurement(
        name=name,
        file=files[0],
        numbers=numbers,
        asked=asked,
        command=command,
        epochs=first.get("epochs", int(figures[0].get("epochs", 0)) or None),
        seconds=sum(result["seconds"] for result in results),
        parameters=first["parameters"],
        origin=origin,
        sources=tuple(result["origin"]["sources"] for result in results if origin),
        noted=noted,
        logs=tuple(log for log in logs if (folder / log).exists()),
        metrics=tuple(key for key in numeric(first["test"]) if key in numbers),
    )


def require_one_recipe(folder: Path, files: list[str], origins: list[dict[str, Any] | None]) -> None:
    """Raise DamagedFile unless results of one name, which are averaged, are those of seeds of the same recipe."""
    for file, origin in zip(files[1:], origins[1:], strict=True):
        seeds = all(".seed-" in Path(each).name for each in (files[0], file))
        if origin is None or origins[0] is None:
            alike = origin is origins[0]
        else:
            alike = same(origin["tables"], origins[0]["tables"])
        if not (seeds and alike):
            raise DamagedFile(
                f"{folder / files[0]} and {folder / file} have the name of one result, but are not seeds of one recipe "
                "that could be averaged: remove the one that is out of date, or rename it."
            )


def read_table(folder: Path, file: str, noted: dict[str, Noted]) -> StoredTable:
    content = read_json(folder / file, TABLE)
    name = content.get("name", file.removesuffix(".table.json"))
    budget = None if content["budget"] == "paper" else content["budget"]
    changes, known = content.get("changes", []), noted.get(stem_of(file), Noted())
    words = ["equipoise", "reproduce", name, *(["--budget", budget] if budget else []), *changes]
    rows = {}
    for line in content["rows"]:
        measured = math.nan if line["measured"] is None else line["measured"]
        value = Number(measured, line.get("spread"), line["seeds"])
        place = line.get("folder", "").partition("/")[0]
        logs = sorted(folder.glob(f"{stem_of(file)}.{place}.*log.jsonl")) if place else []
        costs = with_total({key: cost for key, cost in line.get("costs", {}).items() if cost is not None})
        rows[line["label"], line["metric"]] = Measurement(
            name=name,
            file=file,
            numbers={**{key: Number(cost) for key, cost in costs.items()}, line["metric"]: value},
            asked=Asked(line["recipe"], budget),
            command=shlex.join(words),
            epochs=line.get("epochs", known.epochs),
            seconds=line.get("seconds"),
            parameters=line.get("parameters"),
            origin=content.get("origins", {}).get(place),
            logs=tuple(log.relative_to(folder).as_posix() for log in logs),
            noted=known,
            label=line["label"],
        )
    return StoredTable(name, file, budget, changes, rows)


def read_evaluation(stored: Stored, name: str, noted: Noted) -> Measurement:
    """Read an evaluation that fills rows of a table, as origins.toml says."""
    if noted.run not in stored.runs:
        raise DamagedFile(f"{stored.folder / 'origins.toml'}: {name!r} evaluates {noted.run!r}, which is not stored.")
    run = stored.runs[noted.run]
    metrics = numeric(read_json(stored.folder / f"{name}.json", {str: object}))
    return Measurement(
        name=name,
        file=f"{name}.json",
        numbers={key: Number(value) for key, value in metrics.items()},
        asked=Asked.of(f"equipoise train {noted.fills}", stored.folder / "origins.toml"),
        command=noted.command,
        epochs=run.epochs,
        seconds=run.seconds,
        parameters=run.parameters,
        noted=noted,
    )


def numeric(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, and NaN for null, which stands for a number that was not finite."""
    numbers = {key: math.nan if value is None else value for key, value in metrics.items()}
    return {key: value for key, value in numbers.items() if value is math.nan or is_number(value)}


def solves(test: dict[str, Any]) -> dict[str, float]:
    """Return the share of forward solves that converged, and their median number of steps."""
    forward = test.get("solver", {}).get("forward")
    return {"converged": 1 - forward["failed"], "median steps": forward["steps"]["median"]} if forward else {}


# Figures of a log


def log_figures(path: Path) -> dict[str, float]:
    """Return the figures of a run that its log gives; an empty table if there is no log."""
    return figures_of(read_log(path)) if path.exists() else {}


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a stored log; raise DamagedFile for one that is damaged."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if (record := read_record(line)) is None:
            raise DamagedFile(f"{path} is damaged: line {number} is not a line of a log.")
        records.append(record)
    return records


def figures_of(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return epochs, time per epoch, evaluations of f per minibatch, failed solves and peak memory (bytes) of a log.

    Evaluations are those of training steps, averaged over all epochs: in a splitting method its iterations, in a Neural
    ODE those of the ODE solver. Failed solves are those of the last epoch of training.
    """
    epochs = [record for record in records if record["kind"] == "epoch"]
    if not epochs:
        return {}
    last, solvers = epochs[-1], [epoch.get("train", {}).get("solver", {}) for epoch in epochs]
    figures = {"epochs": last["epoch"], "seconds per epoch": last["seconds"] / last["epoch"]}
    if peaks := [epoch["peak_memory"] for epoch in epochs if isinstance(epoch.get("peak_memory"), int)]:
        figures["peak memory"] = max(peaks)
    if "forward" in solvers[-1]:
        figures["failed"] = solvers[-1]["forward"]["failed"]
    for direction in ("forward", "backward"):
        counts = [solver[direction].get("evaluations", 0) for solver in solvers if direction in solver]
        if counts and last["step"]:
            figures[f"{direction} evaluations"] = sum(counts) / last["step"]
    return with_total(figures)


def with_total(figures: dict[str, float]) -> dict[str, float]:
    """Add the evaluations per minibatch, forward and backward together."""
    parts = [figures[name] for name in ("forward evaluations", "backward evaluations") if name in figures]
    return {**figures, "evaluations per minibatch": sum(parts)} if parts else figures


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files that differ between two sets of digests, or are in only one of them."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))

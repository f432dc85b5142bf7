"""Recipes: one TOML file per experiment, read into dataclasses; every mistake is named with its file and line."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from equipoise.options import nearest, unknown
from equipoise.registry import ANYTHING, NOTHING, Trust
from equipoise.tolerance import Tolerance


class RecipeError(ValueError):
    """Something in a recipe, or on the command line, is not right; the message says where and what is."""


@dataclass(frozen=True)
class Paper:
    """Where the experiment comes from."""

    system: str = ""  # "mondeq", "mdeq", ...
    aim: str = ""  # the number to reach, and where it is printed
    note: str = ""


@dataclass(frozen=True)
class Named:
    """A thing chosen by its name, with options of its own: every key of the section that is not ``name``."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Which data set; options of its own are the section's other keys."""

    name: str
    validation: float = 0.1  # of the training samples held out to choose by: a share, or a number; 0 for none
    limit: int | None = None  # use only so many samples of each split (for trying things out)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """How the loop runs."""

    batch_size: int = 128  # over all processes together
    evaluation_batch_size: int = 250
    clip: float | None = None  # longest gradient; longer ones are shortened to it
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"  # the last two by autocast
    channels_last: bool = False
    compile: bool = False  # the f of every Equilibrium by torch.compile, which needs a C++ compiler
    test: Literal["end", "epoch"] = "end"  # measured for the record only; the best weights are chosen on validation
    log_every: int = 20  # steps between two lines of the log
    checkpoint_every: int | None = None  # steps between two checkpoints, besides one after every epoch
    keep_every: int | None = None  # epochs between two sets of weights that are kept for good, the first included
    init_from: str | None = None  # a run, or a file of weights: tensors of the same name and shape are taken from it
    sync_batch_norm: bool = False  # BatchNorm over the batch of all processes; GPUs only


@dataclass(frozen=True)
class Jacobian:
    """A penalty on the Jacobian of f at the equilibrium, ||df/dz||_F^2 / numel(z), added to the loss of some steps."""

    weight: float = 0.0
    share: float = 1.0  # of the steps, at random
    probes: int = 2  # random vectors that estimate it
    growth: float = 0.0  # of the weight after every ``growth_every`` steps of the phase
    growth_every: int | None = None
    jitter: int = 0  # in steps with a penalty, tolerance.max_steps is moved at random by -jitter to 1


@dataclass(frozen=True)
class Failures:
    """What happens when solves fail while training. A step whose loss or gradient is not finite is never applied."""

    policy: Literal["report", "skip"] = "report"  # "skip" does not apply the gradient of a failed step
    share: float = 0.5  # a step has failed when more than this share of its samples did not converge; 1 for never
    stop_after: int = 50  # failed steps in a row end the training, checkpoint saved; 0 for never


@dataclass(frozen=True)
class Phase:
    """A stretch of training. A section given here changes the recipe's for the length of the phase."""

    epochs: int
    name: str = ""
    task: dict[str, Any] | None = None
    model: dict[str, Any] | None = None  # the model is rebuilt with these options and keeps its weights
    solver: dict[str, Any] | None = None
    tolerance: dict[str, Any] | None = None
    gradient: dict[str, Any] | None = None
    jacobian: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None  # it and the optimizer start anew where a phase states one of them


@dataclass(frozen=True)
class Recipe:
    """One experiment."""

    title: str
    data: Data
    model: Named
    phases: tuple[Phase, ...]
    paper: Paper = Paper()
    task: Named = Named("classification")
    solver: Named | None = None  # of every Equilibrium in the model; None leaves the model's own
    tolerance: dict[str, Any] | None = None
    gradient: Named | None = None
    jacobian: Jacobian = Jacobian()
    optimizer: Named = Named("adam")
    schedule: Named = Named("constant")
    training: Training = Training()
    failures: Failures = Failures()
    seed: int = 0
    seeds: int = 1  # runs, with seed, seed + 1, ...
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes by dotted key: smoke, small, ...


@dataclass(frozen=True)
class Row:
    """One line of a table: a recipe, with changes, beside what the paper prints."""

    recipe: str
    label: str
    metric: str = "accuracy"
    paper: float | None = None
    spread: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A published table: recipes side by side."""

    title: str
    rows: tuple[Row, ...]
    paper: Paper = Paper()
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes of every row, after the row's own


@dataclass(frozen=True)
class FigureSpec:
    """A published figure: a function that draws it from trained recipes."""

    title: str
    figure: str  # a name of equipoise.lab.results.figures, or "my_module:draw"
    recipes: tuple[str, ...]  # each may be followed by changes as on the command line: "core/mnist optimizer.lr=0.1"
    paper: Paper = Paper()
    options: dict[str, Any] = field(default_factory=dict)
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes of the figure's own options


class Where:
    """Where each key was written, a line of the file or the command line; and which code it may therefore name."""

    def __init__(self, name: str, text: str = "", trust: Trust = NOTHING):
        self.name = name
        self.text = text
        self.trust = trust
        self.places: dict[tuple[str, ...], str] = {}
        self.phase: tuple[int, dict[str, Any]] | None = None

    @cached_property
    def lines(self) -> dict[tuple[str, ...], int]:
        """Line numbers by key; found when first asked for, which is when there is something to complain about."""
        return key_lines(self.text)

    def note(self, path: tuple[str, ...], place: str) -> None:
        """From now on this key, and all that is in it, comes from another place."""
        self.places[path] = place

    def in_phase(self, number: int, phase: dict[str, Any]) -> Where:
        """The same for a recipe as it stands in a phase: what the phase says of a section stands in the phase."""
        seen = copy.copy(self)
        seen.phase = (number, phase)
        return seen

    def __call__(self, path: tuple[str, ...]) -> str:
        """The place of a key, or of the nearest thing around it."""
        if path and self.phase is not None:
            number, phase = self.phase
            section = phase.get(path[0])
            if isinstance(section, dict) and (len(path) == 1 or path[1] in section):
                path = ("phases", str(number), *path)
        around = [path[:end] for end in range(len(path), 0, -1)]
        for key in around:
            if key in self.places:
                return self.places[key]
        return next((f"{self.name}, line {self.lines[key]}" for key in around if key in self.lines), self.name)

    def error(self, path: tuple[str, ...], message: str) -> RecipeError:
        return RecipeError(f"{self(path)}: {message}")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every key of a TOML text: the one from which on a beginning of the text has the key.

    tomllib does not tell where a key stands, but it can be asked about every beginning of the text; one that ends
    inside a value of several lines does not parse, and the next that does has the value's keys.
    """
    lines: dict[tuple[str, ...], int] = {}
    every, first = text.split("\n"), 1
    for end in range(1, len(every) + 1):
        try:
            table = tomllib.loads("\n".join(every[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for path in key_paths(table):
            lines.setdefault(path, first)
        first = end + 1
    return lines


def key_paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of everything in nested tables and lists: ("phases", "0", "epochs")."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield (*path, str(key))
        yield from key_paths(entry, (*path, str(key)))


def read(kind: Any, value: Any, path: tuple[str, ...], where: Where) -> Any:
    """A value of the given type from what TOML gives, checked; the one reader of recipes and of the command line."""
    if dataclasses.is_dataclass(kind):
        return read_table(kind, value, path, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    dotted = ".".join(path)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in arguments if k is not type(None)]
        return None if value is None else read(kinds[0], value, path, where)
    if origin is Literal:
        if value not in arguments:
            raise where.error(path, f"{dotted} is {value!r}; " + unknown("such value", str(value), map(str, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list) or not value:
            raise where.error(path, f"{dotted} is {value!r}; it must be a list with at least one entry.")
        return tuple(read(arguments[0], entry, (*path, str(i)), where) for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise where.error(path, f"{dotted} is {value!r}; it must be a table of keys and values.")
        inner = arguments[1]
        return {key: entry if inner is Any else read(inner, entry, (*path, key), where) for key, entry in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
        raise where.error(path, f"{dotted} is {value!r}; it must be {names[kind]}.")
    if kind is int and abs(value) >= 2**63:
        raise where.error(path, f"{dotted} is {value}; it must fit into 64 bits.")
    return value


def read_table(kind: Any, value: Any, path: tuple[str, ...], where: Where) -> Any:
    """A dataclass from a table; keys it does not know go to its field ``options``, or are refused if it has none."""
    if not isinstance(value, dict):
        raise where.error(path, f"{'.'.join(path)} is {value!r}; it must be a table of keys and values.")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, entry in value.items():
        if key in fields and key != "options":
            given[key] = read(hints[key], entry, (*path, key), where)
        elif "options" in fields:
            options[key] = entry
        else:
            meant = [] if path or nearest(key, fields, cutoff=0.75) else full_keys(key, value)
            known = no_such_key(key, meant) if meant else unknown("key", key, fields)
            raise where.error((*path, key), (f"in {'.'.join(path)}, " if path else "") + known)
    for name, f in fields.items():
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise where.error(path, f"{'.'.join((*path, name))} is missing; it must be given.")
    return kind(**given, **({"options": options} if "options" in fields else {}))


def change(table: dict[str, Any], key: str, value: Any, place: str, where: Where) -> None:
    """Set a dotted key in nested tables and lists, making tables as needed."""
    path = tuple(key.split("."))
    here: Any = table
    for depth, part in enumerate(path[:-1], 1):
        if isinstance(here, list):
            here = here[entry_number(here, part, path[:depth], place)]
        else:
            if part not in here:
                here[part] = {}
                where.note(path[:depth], place)
            here = here[part]
        if not isinstance(here, dict | list):
            raise RecipeError(f"{place}: {'.'.join(path[:depth])} is {here!r}; it has no keys to set.")
    before = here.get(path[-1]) if isinstance(here, dict) else None
    if isinstance(here, list):
        here[entry_number(here, path[-1], path, place)] = value
    elif isinstance(value, dict) and "name" in value and isinstance(before, dict):
        here[path[-1]] = {**kept(path, before, value), **value}
        for inner in value:
            where.note((*path, inner), place)
        return
    else:
        here[path[-1]] = value
    where.note(path, place)


def kept(path: tuple[str, ...], before: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """What stays of a section when another one with a name is laid over it.

    Options belong to the thing that is named: they stay if it is the same one. What belongs to the section itself
    always stays: a table whose row names another data set is still cut to the samples of its budget.
    """
    if before.get("name") == value["name"]:
        return before
    kind = typing.get_type_hints(Recipe).get(path[0]) if len(path) == 1 else None
    own = {f.name for f in dataclasses.fields(kind)} - {"options"} if dataclasses.is_dataclass(kind) else set()
    return {key: entry for key, entry in before.items() if key in own}


def full_keys(word: str, tables: dict[str, Any]) -> list[str]:
    """The full keys of a recipe, ``"optimizer.lr"``, that end in a word or, if none does, in one much like it."""
    every = {path for path in key_paths(tables) if path[0] not in ("budget", "paper") and len(path) > 1}
    for section, kind in typing.get_type_hints(Recipe).items():
        kinds = [k for k in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(k) and k not in (Phase, Paper)]
        every |= {(section, f.name) for k in kinds for f in dataclasses.fields(k) if f.name != "options"}
    every |= {("tolerance", f.name) for f in dataclasses.fields(Tolerance)}
    ends = {path[-1] for path in every if not path[-1].isdecimal()}
    near = word if word in ends else nearest(word, sorted(ends), cutoff=0.75)
    return sorted(".".join(path) for path in every if path[-1] == near)[:3]


def no_such_key(word: str, meant: list[str]) -> str:
    return f"there is no key {word!r}; did you mean {' or '.join(map(repr, meant))}?"


def entry_number(entries: list[Any], part: str, path: tuple[str, ...], place: str) -> int:
    if not part.isdecimal() or int(part) >= len(entries):
        name = ".".join(path[:-1])
        raise RecipeError(f"{place}: {'.'.join(path)} does not exist; {name} has the entries 0 to {len(entries) - 1}.")
    return int(part)


def parse_override(text: str) -> tuple[str, Any]:
    """``"optimizer.lr=0.01"`` as a key and a value: TOML where it reads as TOML, or a fraction, else a text."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key.strip()):
        raise RecipeError(f"{text!r} is not a change of a recipe; write key=value, such as optimizer.lr=0.01.")
    try:
        read = tomllib.loads(f"v = {value.strip()}")
    except tomllib.TOMLDecodeError:
        read = {}
    if read.keys() == {"v"}:
        return key.strip(), read["v"]
    fraction = re.fullmatch(r"(\d+(?:\.\d+)?)/([1-9]\d*)", value.strip())  # radius=8/255, as everybody writes it
    return key.strip(), float(fraction[1]) / int(fraction[2]) if fraction else value.strip()


@dataclass(frozen=True)
class Source:
    """A recipe as it was asked for: its tables after all changes, where each key came from, and where the file is."""

    name: str
    tables: dict[str, Any]
    where: Where = field(compare=False)
    folder: str = ""  # of a file of the user's own: modules beside it can be named in it
    budgeted: dict[str, tuple[Any, Any]] = field(default_factory=dict, compare=False)  # by dotted key: before, after

    def read(self, kind: Any) -> Any:
        return read(kind, self.tables, (), self.where)

    def spend(self, changes: dict[str, Any], place: Callable[[tuple[str, ...]], str]) -> None:
        """Make the changes of a budget, each of which stands at a place, and remember what they replaced."""
        for path, value in entries(changes):
            key = ".".join(path)
            before = self.budgeted[key][0] if key in self.budgeted else looked_up(self.tables, key.split("."))
            self.budgeted[key] = (before, value)
            change(self.tables, key, value, place(path), self.where)

    def phase(self, number: int) -> Recipe:
        """The recipe as it stands in one phase: the phase's sections laid over the recipe's own."""
        tables = {**self.tables}
        for section, changes in self.tables["phases"][number].items():
            if isinstance(changes, dict):
                before = tables.get(section) or {}
                same = "name" not in changes or changes["name"] == before.get("name")
                tables[section] = {**before, **changes} if same else changes  # options belong to the thing named
        return read(Recipe, tables, (), self.where_in(number))

    def where_in(self, number: int) -> Where:
        """Where the keys of the recipe stand as it is in one phase."""
        return self.where.in_phase(number, self.tables["phases"][number])


def saved_source(saved: dict[str, Any], file: Path, trust: Trust) -> Source:
    """The recipe in a file that a run has written: ``saved`` has its name, its tables and the folder of its file."""
    where = Where(str(file), trust=trust.looking_in(".", *([saved["folder"]] if saved["folder"] else [])))
    return Source(saved["recipe"], saved["tables"], where, saved["folder"])


SAVED = {"recipe": str, "folder": str, "tables": dict}  # the shape of what saved_source reads


def open_recipe(
    name: str, budget: str | None = None, overrides: tuple[str, ...] | list[str] = (), trust: Trust = ANYTHING
) -> Source:
    """A recipe of the package by name (``"core/digits"``), or a file of your own (``"mine.toml"``), with changes.

    Args:
        name: see ``equipoise recipes``; a name that ends in .toml is a file.
        budget: "smoke", "small" or another budget of the recipe; "paper" or None is the recipe as written.
        overrides: changes, each ``"key=value"``.
        trust: modules outside the package that it may name. All of them, unless it is a file that named this one.

    Example:
        >>> open_recipe("core/digits", "smoke", ["optimizer.lr=0.01"]).read(Recipe)
    """
    path = Path(name)
    if name.endswith(".toml"):
        if not path.is_file():
            raise RecipeError(f"there is no file {name}.")
        try:
            text, shown, folder = path.read_text(encoding="utf-8-sig"), name, str(path.resolve().parent)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{name} is not a text in UTF-8: {error.reason} at byte {error.start}.") from None
    else:
        if name not in (known := recipe_names()):
            raise RecipeError(unknown("recipe", name, known) + " A file of your own: its path, ending in .toml.")
        text, shown, folder = (recipes_folder() / f"{name}.toml").read_text(encoding="utf-8"), f"recipe {name}", ""
    places = [folder, "."] if trust.modules is None else [".", folder]  # a file must not outdo the current folder
    where = Where(shown, text, trust.looking_in(*filter(None, places)))
    try:
        tables = tomllib.loads(text)
        source = Source(path.stem if folder else name, tables, where, folder)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{shown}: {error}.") from None
    except RecursionError:
        raise RecipeError(f"{shown}: tables or lists are nested too deeply.") from None
    if budget not in (None, "paper"):
        budgets = read(dict[str, dict[str, Any]], tables.get("budget", {}), ("budget",), where)
        if budget not in budgets:
            raise RecipeError(f"{shown}: {unknown('budget', budget, [*budgets, 'paper'])}")
        source.spend(budgets[budget], lambda path: where(("budget", budget, *path)))
    for override in overrides:
        key, value = parse_override(override)
        change(tables, key, value, f"command line, {override}", where)
    refuse_dates(tables, where)
    if "rows" not in tables and "figure" not in tables:
        for default in dataclasses.fields(Recipe):  # options may be given without the name of the default thing
            if isinstance(default.default, Named) and isinstance(tables.setdefault(default.name, {}), dict):
                tables[default.name].setdefault("name", default.default.name)
    return source


def looked_up(tables: Any, path: Sequence[str]) -> Any:
    """The value at a path of nested tables and lists; None if there is none."""
    for part in path:
        if isinstance(tables, list):
            tables = tables[int(part)] if part.isdecimal() and int(part) < len(tables) else None
        else:
            tables = tables.get(part) if isinstance(tables, dict) else None
    return tables


def entries(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in nested tables: a budget may write ``"optimizer.lr" = 1`` with quotes, or without.

    A table with a name, such as ``schedule = {name = "cosine"}``, is one value: another thing than the first.
    """
    for key, value in table.items():
        if isinstance(value, dict) and "name" not in value:
            yield from entries(value, (*path, key))
        else:
            yield (*path, key), value


def refuse_dates(tables: dict[str, Any], where: Where) -> None:
    """TOML has dates and times; nothing here takes them, and a run's JSON could not keep them."""
    for path in key_paths(tables):
        value: Any = tables
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
        if isinstance(value, datetime.date | datetime.time):
            raise where.error(path, f"{'.'.join(path)} is a date or time, {value}; write it as a text, in quotes.")


def recipes_folder() -> Path:
    return Path(str(resources.files("equipoise"))) / "papers"


def recipe_names() -> list[str]:
    """The names of every recipe, table and figure in the package."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.toml"))


def kind_of(source: Source) -> type:
    """What a file describes: an experiment, a table of them, or a figure."""
    if "rows" in source.tables:
        return Table
    return FigureSpec if "figure" in source.tables else Recipe

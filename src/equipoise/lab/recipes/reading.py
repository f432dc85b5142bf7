"""Read recipes from TOML into the dataclasses of the schema, reporting mistakes with file and line; and write them."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import math
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from equipoise.lab.recipes.schema import FigureSpec, Named, Paper, Phase, Recipe, TableSpec
from equipoise.lab.trust import ANYTHING, NOTHING, Trust
from equipoise.options import did_you_mean, nearest, unknown, unknown_of_many
from equipoise.tolerance import Tolerance

KeyPath = tuple[str, ...]  # of a key in nested tables and lists: ("phases", "0", "epochs")


class RecipeError(ValueError):
    """A mistake in a recipe or on the command line; the message says where it is and what is allowed."""


# Where a key was written


class Where:
    """Locate the keys of a recipe in its file, called ``name``, or on the command line; hold the recipe's trust."""

    def __init__(self, name: str, text: str = "", trust: Trust = NOTHING):
        self.name, self.text, self.trust = name, text, trust
        self.places: dict[KeyPath, str] = {}  # where a key, and everything in it, was set outside of the file
        self.phase: tuple[int, dict[str, Any]] | None = None

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        """Line numbers by key, computed only when there is a mistake to report."""
        return key_lines(self.text)

    def in_phase(self, number: int, phase: dict[str, Any]) -> Where:
        """Return a copy that locates keys which a phase sets within that phase."""
        located = copy.copy(self)
        located.phase = (number, phase)
        return located

    def __call__(self, path: KeyPath) -> str:
        """Return the place of a key, or of the nearest thing around it and of what was changed within the key."""
        if path and self.phase is not None:
            number, phase = self.phase
            section = phase.get(path[0])
            if isinstance(section, dict) and (len(path) == 1 or path[1] in section):
                path = ("phases", str(number), *path)
        around = [path[:end] for end in range(len(path), 0, -1)]
        for key in around:
            if key in self.places:
                return self.places[key]
        place = next((f"{self.name}, line {self.lines[key]}" for key in around if key in self.lines), self.name)
        inside = [place for key, place in self.places.items() if path and key[: len(path)] == path]
        return " and ".join([place, *dict.fromkeys(inside)])

    def error(self, path: KeyPath, message: str) -> RecipeError:
        return RecipeError(f"{self(path)}: {message}")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of every key in a TOML text: the first line that must be read for the key to exist.

    tomllib does not report lines, but it can parse the first n lines for every n. A prefix that ends inside a value of
    several lines does not parse, and the next one that does contains the value's keys.
    """
    numbers: dict[KeyPath, int] = {}
    lines, first = text.split("\n"), 1
    for end in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for path in key_paths(table):
            numbers.setdefault(path, first)
        first = end + 1
    return numbers


def key_paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of everything in nested tables and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield (*path, str(key))
        yield from key_paths(entry, (*path, str(key)))


# From tables to dataclasses

KIND_NAMES = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}


def read(kind: Any, value: Any, path: KeyPath, where: Where) -> Any:
    """Convert a TOML value to a type of the schema; raise RecipeError unless it fits, within bounds."""
    if dataclasses.is_dataclass(kind):
        return read_table(kind, value, path, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    shown = f"{'.'.join(path)} is {value!r}"
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in arguments if k is not type(None)]
        return None if value is None else read(kinds[0], value, path, where)
    if origin is Annotated:
        number = read(arguments[0], value, path, where)
        try:
            if path[-1] != "clip" or number != math.inf:  # which means no clipping
                arguments[1](".".join(path), number)
        except ValueError as error:
            raise where.error(path, str(error)) from None
        return number
    if origin is Literal:
        if value not in arguments:
            raise where.error(path, f"{shown}; {did_you_mean(str(value), arguments)}allowed: {', '.join(arguments)}.")
        return value
    if origin is tuple:
        if not isinstance(value, list) or not value:
            raise where.error(path, f"{shown}; it must be a list with at least one entry.")
        return tuple(read(arguments[0], entry, (*path, str(i)), where) for i, entry in enumerate(value))
    if origin is dict:
        inner = arguments[1]
        entries = require_table(value, path, where).items()
        return {key: entry if inner is Any else read(inner, entry, (*path, key), where) for key, entry in entries}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise where.error(path, f"{shown}; it must be {KIND_NAMES[kind]}.")
    if kind is int and abs(value) >= 2**63:
        raise where.error(path, f"{shown}; it must fit into 64 bits.")
    return value


def require_table(value: Any, path: KeyPath, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise where.error(path, f"{'.'.join(path)} is {value!r}; it must be a table of keys and values.")
    return value


def read_table(kind: Any, value: Any, path: KeyPath, where: Where) -> Any:
    """Convert a table to a dataclass; unknown keys go to its field ``options``, or are an error if it has none."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, entry in require_table(value, path, where).items():
        if key in fields and key != "options":
            given[key] = read(hints[key], entry, (*path, key), where)
        elif "options" in fields:
            options[key] = entry
        else:
            sentence = (f"in {'.'.join(path)}, " if path else "") + unknown("key", key, fields)
            if not path and not nearest(key, fields, cutoff=0.75) and (meant := full_keys(key, value)):
                sentence = f"there is no key {key!r}; did you mean {' or '.join(map(repr, meant))}?"
            raise where.error((*path, key), sentence)
    for name, f in fields.items():
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise where.error(path, f"{'.'.join((*path, name))} is missing; it must be given.")
    return kind(**given, **({"options": options} if "options" in fields else {}))


def full_keys(word: str, tables: dict[str, Any]) -> list[str]:
    """Return up to three full keys, such as ``"optimizer.lr"``, that end in a word or else in a similar one."""
    paths = {path for path in key_paths(tables) if path[0] not in ("budget", "paper") and len(path) > 1}
    for section, kind in typing.get_type_hints(Recipe).items():
        kinds = [k for k in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(k) and k not in (Phase, Paper)]
        paths |= {(section, f.name) for k in kinds for f in dataclasses.fields(k) if f.name != "options"}
    paths |= {("tolerance", f.name) for f in dataclasses.fields(Tolerance)}
    ends = {path[-1] for path in paths if not path[-1].isdecimal()}
    near = word if word in ends else nearest(word, sorted(ends), cutoff=0.75)
    return sorted(".".join(path) for path in paths if path[-1] == near)[:3]


# Changes: of a budget, of a table's row, of the command line


def change(table: dict[str, Any], key: str, value: Any, place: str, where: Where) -> None:
    """Set a dotted key in nested tables and lists, creating tables as needed; ``place`` is where the change stands."""
    path = tuple(key.split("."))
    here: Any = table
    for depth, part in enumerate(path[:-1], 1):
        if isinstance(here, list):
            here = here[entry_number(here, part, path[:depth], place)]
        else:
            if part not in here:
                here[part] = {}
                where.places[path[:depth]] = place
            here = here[part]
        if not isinstance(here, dict | list):
            raise RecipeError(f"{place}: {'.'.join(path[:depth])} is {here!r}; it has no keys to set.")
    before = here.get(path[-1]) if isinstance(here, dict) else None
    if isinstance(here, list):
        here[entry_number(here, path[-1], path, place)] = value
    elif isinstance(value, dict) and "name" in value and isinstance(before, dict):
        here[path[-1]] = {**kept(path, before, value), **value}
        for inner in value:
            where.places[(*path, inner)] = place
        return
    else:
        here[path[-1]] = value
    where.places[path] = place


def kept(path: KeyPath, before: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Return what remains of a section when another one with a name replaces it.

    Options belong to what is named: they remain if the name is the same. Keys of the section itself always remain:
    a table whose row names another data set is still limited to the number of samples of its budget.
    """
    if before.get("name") == value["name"]:
        return before
    kind = typing.get_type_hints(Recipe).get(path[0]) if len(path) == 1 else None
    own = {f.name for f in dataclasses.fields(kind)} - {"options"} if dataclasses.is_dataclass(kind) else set()
    return {key: entry for key, entry in before.items() if key in own}


def entry_number(entries: list[Any], part: str, path: KeyPath, place: str) -> int:
    if not part.isdecimal() or int(part) >= len(entries):
        name = ".".join(path[:-1])
        raise RecipeError(f"{place}: {'.'.join(path)} does not exist; {name} has the entries 0 to {len(entries) - 1}.")
    return int(part)


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``"optimizer.lr=0.01"`` into key and value: TOML, else a number (.1 or 8/255), else a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise RecipeError(f"{text!r} is not a change of a recipe; write key=value, such as optimizer.lr=0.01.")
    try:
        parsed = tomllib.loads(f"v = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if parsed.keys() == {"v"}:
        return key, parsed["v"]
    if re.fullmatch(r"[+-]?(\.\d+|\d+\.)", value):
        return key, float(value)
    fraction = re.fullmatch(r"(\d+(?:\.\d+)?)/([1-9]\d*)", value)
    return key, float(fraction[1]) / int(fraction[2]) if fraction else value


def entries(table: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the values in nested tables: a budget may write ``"optimizer.lr" = 1`` with or without quotes.

    A table with a name, such as ``schedule = {name = "cosine"}``, is one value.
    """
    for key, value in table.items():
        if isinstance(value, dict) and "name" not in value:
            yield from entries(value, (*path, key))
        else:
            yield (*path, key), value


def looked_up(tables: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of nested tables and lists, or None."""
    for part in path:
        if isinstance(tables, list):
            tables = tables[int(part)] if part.isdecimal() and int(part) < len(tables) else None
        else:
            tables = tables.get(part) if isinstance(tables, dict) else None
    return tables


# Files


@dataclass(frozen=True)
class RecipeFile:
    """A recipe, table or figure as it was requested."""

    name: str  # "core/digits", or the name of a user's file without .toml
    tables: dict[str, Any]  # content after all changes
    where: Where = field(compare=False)
    folder: str = ""  # of a user's file, which may name modules in it; empty for files of the package
    budgeted: dict[str, tuple[Any, Any]] = field(default_factory=dict, compare=False)  # by dotted key: before, after

    @classmethod
    def from_saved(cls, saved: dict[str, Any], file: Path, trust: Trust) -> RecipeFile:
        """Return the recipe that :meth:`saved` put into a file of a run."""
        where = Where(str(file), trust=dataclasses.replace(trust, folders=tuple(filter(None, (".", saved["folder"])))))
        return cls(saved["recipe"], saved["tables"], where, saved["folder"])

    def saved(self) -> dict[str, Any]:
        """Return the recipe as JSON, of the shape SAVED."""
        return {"recipe": self.name, "folder": self.folder, "tables": self.tables}

    def read(self, kind: Any) -> Any:
        return read(kind, self.tables, (), self.where)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, read on first use: ``tables`` must not change after that."""
        return self.read(Recipe)

    def phase(self, number: int) -> Recipe:
        """Return the recipe of one phase: the phase's sections override the recipe's own."""
        tables = {**self.tables}
        for section, changes in self.tables["phases"][number].items():
            if isinstance(changes, dict):
                before = tables.get(section) or {}
                same = "name" not in changes or changes["name"] == before.get("name")
                tables[section] = {**before, **changes} if same else changes  # options belong to what is named
        return read(Recipe, tables, (), self.where_in(number))

    def where_in(self, number: int) -> Where:
        """Return the locations of the keys of :meth:`phase`."""
        return self.where.in_phase(number, self.tables["phases"][number])

    def spend(self, changes: dict[str, Any], place: Callable[[KeyPath], str]) -> None:
        """Apply the changes of a budget, each located by ``place``, and remember what they replaced."""
        for path, value in entries(changes):
            key = ".".join(path)
            before = self.budgeted[key][0] if key in self.budgeted else looked_up(self.tables, key.split("."))
            self.budgeted[key] = (before, value)
            change(self.tables, key, value, place(path), self.where)


SAVED = {"recipe": str, "folder": str, "tables": dict}
CLAIMS = "claims.toml"  # what a paper claims, in the folder of its recipes
# The name of each kind of file, and the command that it is for
KINDS = {Recipe: ("recipe", "train"), TableSpec: ("table", "reproduce"), FigureSpec: ("figure", "figure")}


def kind_of(source: RecipeFile) -> type[Recipe] | type[TableSpec] | type[FigureSpec]:
    """Return what a file describes: Recipe, TableSpec or FigureSpec."""
    return TableSpec if "rows" in source.tables else FigureSpec if "figure" in source.tables else Recipe


def open_recipe(
    name: str,
    budget: str | None = None,
    overrides: Sequence[str] = (),
    trust: Trust = ANYTHING,
    kind: type | None = None,
) -> RecipeFile:
    """Open a recipe of the package (``"core/digits"``) or a file of your own (``"mine.toml"``) and apply changes.

    Args:
        name: name as listed by ``equipoise recipes``, or path of a file that ends in .toml
        budget: "smoke", "small" or another budget of the recipe; "paper" or None is the recipe as written
        overrides: changes, each ``"key=value"``
        trust: modules outside the package that the recipe may name; all of them, unless another file named this one
        kind: Recipe, TableSpec or FigureSpec, to raise for a file of another kind

    Example:
        >>> open_recipe("core/digits", "smoke", ["optimizer.lr=0.01"]).recipe
    """
    path = Path(name)
    if name.endswith(".toml"):
        if not path.is_file():
            raise RecipeError(f"there is no file {name}.")
        try:
            text, shown, folder = path.read_text(encoding="utf-8-sig"), name, str(path.resolve().parent)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{name} is not a UTF-8 text file: {error.reason} at byte {error.start}.") from None
    else:
        if name not in (known := recipe_names()):
            message = unknown_of_many("recipe", name, known, "equipoise recipes")
            raise RecipeError(f"{message} For your own file, give its path, ending in .toml.")
        text, shown, folder = (recipes_folder() / f"{name}.toml").read_text(encoding="utf-8"), f"recipe {name}", ""
    places = [folder, "."] if trust.modules is None else [".", folder]  # a file must not outdo the current folder
    where = Where(shown, text, dataclasses.replace(trust, folders=tuple(filter(None, places))))
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{shown}: {error}.") from None
    except RecursionError:
        raise RecipeError(f"{shown}: tables or lists are nested too deeply.") from None
    source = RecipeFile(path.stem if folder else name, tables, where, folder)
    if kind not in (None, actual := kind_of(source)):
        noun, command = KINDS[actual]
        again = shlex.join(["equipoise", command, name])
        raise RecipeError(f"{name} is a {noun}, not a {KINDS[kind][0]}: {again}.")
    if budget not in (None, "paper"):
        budgets = read(dict[str, dict[str, Any]], tables.get("budget", {}), ("budget",), where)
        if budget not in budgets:
            raise RecipeError(f"{shown}: {unknown('budget', budget, [*budgets, 'paper'])}")
        source.spend(budgets[budget], lambda path: where(("budget", budget, *path)))
    for override in overrides:
        key, value = parse_override(override)
        change(tables, key, value, f"command line, {override}", where)
    for key_path in key_paths(tables):  # nothing takes a date, and a run's JSON could not keep it
        if isinstance(value := looked_up(tables, key_path), datetime.date | datetime.time):
            key = ".".join(key_path)
            raise where.error(key_path, f"{key} is a date or time, {value}; write it as a string, in quotes.")
    if kind_of(source) is Recipe:
        for default in dataclasses.fields(Recipe):  # options may be given without the name of the default
            if isinstance(default.default, Named) and isinstance(tables.setdefault(default.name, {}), dict):
                tables[default.name].setdefault("name", default.default.name)
    return source


def recipes_folder() -> Path:
    return Path(str(resources.files("equipoise"))) / "papers"


def recipe_names() -> list[str]:
    """Return the names of every recipe, table and figure in the package."""
    folder = recipes_folder()
    files = (path for path in folder.rglob("*.toml") if path.name != CLAIMS)
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files)


def budget_changes(sources: Sequence[RecipeFile]) -> str:
    """Return what budgets changed, on one line: ``"data.limit 32; phases.0.epochs 40, 200 -> 1"``."""

    def short(value: Any) -> str:
        """Write a value as on the command line, and sections as their names."""
        if isinstance(value, dict):
            return value.get("name", "")
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            return f"[{', '.join(map(short, value))}]"
        return "" if value is None else value if isinstance(value, str) else str(value).replace(" ", "")

    changes: dict[str, tuple[list[str], list[str]]] = {}
    for source in sources:
        for key, values in source.budgeted.items():
            for seen, value in zip(changes.setdefault(key, ([], [])), map(short, values), strict=True):
                seen.extend([value] if value not in ("", *seen) else [])
    shown = {key: values for key, values in changes.items() if key != "title" and not key.startswith("paper.")}
    parts = [f"{key} {', '.join(old)}{' -> ' if old else ''}{', '.join(new)}" for key, (old, new) in shown.items()]
    return "; ".join(parts) or "changes nothing"


# Writing TOML


def to_toml(recipe: Recipe) -> str:
    """Write a recipe as the file that reads as it, including defaults and without budgets, which have been applied."""
    tables = {name: value for name, value in plain(recipe).items() if name != "budget"}
    phases = tables.pop("phases")
    lines = toml_lines(tables)
    for phase in phases:
        lines += ["", "[[phases]]", *toml_lines(phase, sections=False)]
    return "\n".join(lines) + "\n"


def toml_lines(tables: dict[str, Any], sections: bool = True) -> list[str]:
    """Write keys and values, and the tables among them as sections after the others."""
    inner = {name: value for name, value in tables.items() if sections and isinstance(value, dict)}
    lines = [f"{toml_key(name)} = {toml_value(value)}" for name, value in tables.items() if name not in inner]
    for name, section in inner.items():
        lines += ["", f"[{toml_key(name)}]", *toml_lines(section, sections=False)]
    return lines


def plain(value: Any) -> Any:
    """Convert dataclasses to tables, with options among their other keys and without what is not set."""
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    options = fields.pop("options", {})
    return {**{name: entry for name, entry in fields.items() if entry is not None and entry != ""}, **options}


def toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(name)} = {toml_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, except for one
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)

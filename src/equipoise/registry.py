"""Named things: a table from names to where they are defined, imported when asked for.

What the package brings and what a user brings are named the same way: an entry of a table is ``"module:Name"``, and so
is the name of anything outside the package.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any


class Registry:
    """The things of one kind that can be asked for by name.

    Args:
        kind: what they are, for sentences: "model", "solver".
        entries: name -> "module:Name"; a module is imported only when one of its names is asked for.

    Example:
        >>> solvers = Registry("solver", {"picard": "equipoise.solvers:Picard"})
        >>> solvers["picard"]
        <class 'equipoise.solvers.picard.Picard'>
    """

    def __init__(self, kind: str, entries: dict[str, str]):
        self.kind = kind
        self.entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Any:
        """What the name stands for; ``"my_module:MyName"`` is taken from outside the package."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is {name!r}; it must be a text.")
        try:
            if name in self.entries or ":" in name:
                return outside(self.entries.get(name, name), self.kind, name)
        except MissingPackage as error:
            if name in self.entries:
                error.msg += " pip install 'equipoise[lab]' brings it."
            raise
        raise UnknownName(unknown(self.kind, name, self.entries) + f" Your own: {self.kind} = 'my_module:MyName'.")


class UnknownName(LookupError):
    """A name that stands for nothing."""


class MissingPackage(ImportError):
    """A package that the command needs is not installed."""


def outside(name: str, kind: str, shown: str) -> Any:
    """The attribute ``Name`` of module ``module`` for a text ``"module:Name"``."""
    module_name, _, attribute = name.partition(":")
    missing = UnknownName(
        f"{kind} {shown!r}: there is no module {module_name!r}; looked in the folder of the recipe, the current folder "
        f"and Python's path{''.join(f' ({folder})' for folder in _looked_in)}."
    )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise missing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise missing from None
        sentence = f"{kind} {shown!r} needs the package {error.name!r}, which is not installed."
        raise MissingPackage(sentence, name=error.name) from error
    if not hasattr(module, attribute):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(unknown(f"attribute of module {module_name}", attribute, names))
    return getattr(module, attribute)


_looked_in: list[str] = []  # folders that are on Python's path only because of look_in


def look_in(*folders: str | Path) -> None:
    """Let modules in these folders be imported by name: in this order, after everything that is installed.

    Folders of an earlier call are forgotten with their modules: two runs may each have a ``net.py`` of their own.
    """
    wanted = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    gone = {folder for folder in _looked_in if folder not in wanted}
    for name, module in list(sys.modules.items()):
        top = getattr(sys.modules.get(name.partition(".")[0], module), "__file__", None)
        if top and str(Path(top).parent.parent if Path(top).name == "__init__.py" else Path(top).parent) in gone:
            del sys.modules[name]
    _looked_in[:] = [folder for folder in wanted if folder in _looked_in or folder not in sys.path]
    sys.path[:] = [place for place in sys.path if place not in wanted and place not in gone] + wanted
    importlib.invalidate_caches()  # a module may have been written a moment ago


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence for a name that does not exist: the nearest one first, then all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"there is no {kind} {name!r};{hint} known: {', '.join(known)}."


def parameters(make: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """Names a callable takes, names among them it cannot do without, and whether it takes any name at all."""
    named = [p for p in inspect.signature(make).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    anything = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    return {p.name for p in named}, {p.name for p in named if p.default is p.empty}, anything


def check_options(make: Callable[..., Any], options: Collection[str], facts: Collection[str], owner: str) -> None:
    """Raise for the first option that ``make`` does not take, suggesting the nearest one that it does."""
    takes, _, anything = parameters(make)
    for name in () if anything else options:
        if name not in takes:
            known = sorted(takes - set(facts))
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise UnknownOption(f"{owner} has no option {name!r};{hint} options: {', '.join(known) or 'none'}.", name)


def call(make: Callable[..., Any], options: dict[str, Any], facts: dict[str, Any], owner: str) -> Any:
    """``make(**options)`` with those ``facts`` that it names and ``options`` does not give; unknown options refused."""
    check_options(make, options, facts, owner)
    takes, needs, _ = parameters(make)
    known = {name: value for name, value in facts.items() if name in takes and name not in options}
    missing = needs - set(options) - set(known)
    if missing:
        raise TypeError(f"{owner} needs {', '.join(sorted(missing))}, which neither the recipe nor the data set gives.")
    return make(**options, **known)


class UnknownOption(TypeError):
    """An option that its owner does not have; ``option`` is its name."""

    def __init__(self, message: str, option: str):
        super().__init__(message)
        self.option = option

"""Named things: a table from names to where they are defined, imported when asked for.

What the package brings and what a user brings are named the same way: an entry of a table is ``"module:Name"``, and so
is the name of anything outside the package. Importing a module runs it, so a name that was read from a file that
somebody else may have written needs the caller's word (:class:`Trust`) before anything is imported.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Trust:
    """Which modules outside the package names may come from, and where those modules are looked for.

    Args:
        modules: names of the modules, each exact: "pkg" does not include "pkg.nets". None allows every module.
        folders: folders to look in, after everything that is installed.

    Example:
        >>> with trusting(Trust(frozenset({"my_module"}))):
        ...     MODELS["my_module:MyNet"]
    """

    modules: frozenset[str] | None = frozenset()
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: str | Iterable[str] | Trust) -> Trust:
        """The trust that a caller states by naming one module or several."""
        if isinstance(modules, Trust):
            return modules
        names = [modules] if isinstance(modules, str) else list(modules)
        for name in names:
            if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(
                    f"trust is {name!r}; it must be the name of a module, such as 'my_module' or 'pkg.nets'."
                )
        return cls(frozenset(names))

    def including(self, *modules: str) -> Trust:
        return self if self.modules is None else replace(self, modules=self.modules | set(modules))

    def looking_in(self, *folders: str) -> Trust:
        return replace(self, folders=folders)

    def allows(self, module: str) -> bool:
        return self.modules is None or module in self.modules

    def look(self, module: str) -> None:
        """Let a module that is allowed be imported from the folders.

        A file that was loaded chooses one of the folders. So only folders that hold a trusted module are opened to
        imports, and a module that lies in two of them is refused: it must not be the file that decides which one runs.
        """
        if self.modules is None:
            if self.folders:
                look_in(*self.folders)
            return
        importlib.invalidate_caches()  # a module may have been written a moment ago
        tops = {name.partition(".")[0] for name in self.modules}
        look_in(*(folder for folder in self.folders if any(spec_in(folder, top) for top in tops)))
        top = module.partition(".")[0]
        places = {place for folder in self.folders if (place := spec_in(folder, top))}
        if len(places) > 1 and top not in sys.modules and spec_in(None, top) in places:
            raise UnknownName(
                f"there are two modules {top!r}, {' and '.join(sorted(places))}: remove or rename the one that is not "
                "meant."
            )

    def place(self, module: str) -> str:
        """The file that a module would be imported from, found without importing it; empty if there is none."""
        top = module.partition(".")[0]
        return next((spec for folder in (None, *self.folders) if (spec := spec_in(folder, top))), "")


ANYTHING = Trust(None)  # what a user types, in Python, on the command line or in a recipe, is the user's own word
NOTHING = Trust()
_trust: ContextVar[Trust] = ContextVar("trust", default=ANYTHING)


@contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """Look names up under this trust, also those that a constructor looks up inside the block."""
    before = _trust.set(trust)
    try:
        yield
    finally:
        _trust.reset(before)


def spec_in(folder: str | None, module: str) -> str:
    """Where a top-level module is in a folder, or for None on Python's path; empty if it is not there."""
    if not module.isidentifier():
        return ""
    spec = PathFinder.find_spec(module, None if folder is None else [str(Path(folder).resolve())])
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


class Registry:
    """The things of one kind that can be asked for by name.

    Args:
        kind: what they are, for sentences: "model", "solver".
        entries: name -> "module:Name"; a module is imported only when one of its names is asked for.
        base: class that a thing from outside the package must derive from. None where functions are asked for.
        functions: whether a thing may also be a function (that returns a ``base``, if there is one).

    Example:
        >>> solvers = Registry("solver", {"picard": "equipoise.solvers:Picard"})
        >>> solvers["picard"]
        <class 'equipoise.solvers.picard.Picard'>
    """

    def __init__(self, kind: str, entries: dict[str, str], base: type | None = None, functions: bool = False):
        self.kind = kind
        self.entries = dict(entries)
        self.base = base
        self.functions = functions or base is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Any:
        """What the name stands for; ``"my_module:MyName"`` is taken from outside the package, if it is trusted."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is {name!r}; it must be a string.")
        if name in self.entries:
            try:
                return imported(self.entries[name], self.kind, name)
            except MissingPackage as error:
                error.msg += " pip install 'equipoise[lab]' brings it."
                raise
        if ":" not in name:
            raise UnknownName(unknown(self.kind, name, self.entries) + f" Your own: {self.kind} = 'my_module:MyName'.")
        trust, module = _trust.get(), name.partition(":")[0]
        if not trust.allows(module):
            raise UntrustedName([(self.kind, name)], trust)
        trust.look(module)
        found = imported(name, self.kind, name)
        self.check(found, name, trust)
        return found

    def check(self, found: Any, name: str, trust: Trust) -> None:
        """Refuse a thing from outside the package that is of another kind, before it is called.

        A module that is trusted may itself have imported anything, ``os.system`` too. So a function named in a file
        that was loaded must be defined in a trusted module, and say by its annotation that it returns what is needed.
        """
        if self.base is not None and isinstance(found, type) and issubclass(found, self.base):
            return
        named = f"{self.base.__module__}.{self.base.__qualname__}" if self.base else ""
        if not self.functions:
            raise WrongKind(f"{self.kind} {name!r} is {found!r}; it must be a class derived from {named}.")
        if trust.modules is None and callable(found):
            return
        if not inspect.isfunction(found) or not trust.allows(found.__module__):
            raise WrongKind(
                f"{self.kind} {name!r} is {found!r}; it must be a function defined in a module that is trusted."
            )
        returns = inspect.get_annotations(found).get("return")
        if self.base and not (
            returns is self.base or str(returns).rpartition(".")[2].strip("'\"") == self.base.__name__
        ):
            raise WrongKind(
                f"{self.kind} {name!r} does not say that it returns a {self.base.__name__}, as a function named in a "
                f"file must: def {found.__name__}(...) -> {self.base.__name__}."
            )


class UnknownName(LookupError):
    """A name that stands for nothing."""


class WrongKind(UnknownName):
    """A name that stands for something else than what is asked for."""


class UntrustedName(ValueError):
    """A file that was loaded names code from outside the package, and the caller has not said to trust it.

    ``modules`` are those to trust; ``reason`` is the sentence without the remedy, which differs between Python and
    the command line.
    """

    def __init__(self, names: Iterable[tuple[str, str]], trust: Trust, file: str = ""):
        self.names, self.trust = list(dict.fromkeys(names)), trust
        self.modules = list(dict.fromkeys(name.partition(":")[0] for _, name in self.names))
        named = ", ".join(f"{kind} {name!r}" for kind, name in self.names)
        places = ", ".join(f"{module} ({trust.place(module) or 'not found here'})" for module in self.modules)
        self.reason = (
            f"{file or 'a file that was loaded'} names code from outside the package: {named}. Nothing was imported. "
            f"If you trust {places}, which may do anything when imported,"
        )
        words = repr(self.modules[0]) if len(self.modules) == 1 else repr(tuple(self.modules))
        super().__init__(f"{self.reason} say so: trust={words}.")


class MissingPackage(ImportError):
    """A package that the command needs is not installed."""


def imported(name: str, kind: str, shown: str) -> Any:
    """The attribute ``Name`` of module ``module`` for a string ``"module:Name"``."""
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

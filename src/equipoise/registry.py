"""Look things up by name: those of the package, and those of the user.

A table maps names to ``"module:Name"``, imported on first use; a thing outside the package is named by such a string
directly. Importing a module runs it, so a name that was read from a file needs the caller's permission
(:class:`Trust`) before anything is imported.
"""

from __future__ import annotations

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

from equipoise.options import UnknownOption as UnknownOption  # raised by check_options
from equipoise.options import refuse_unknown, unknown


@dataclass(frozen=True)
class Trust:
    """Which modules outside the package may be imported by name, and the folders to find them in.

    Args:
        modules: exact module names: "pkg" does not include "pkg.nets". None allows every module.
        folders: folders to search, after everything that is installed.
    """

    modules: frozenset[str] | None = frozenset()
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: str | Iterable[str] | Trust) -> Trust:
        """Return the trust that a caller expresses by naming one module or several."""
        if isinstance(modules, Trust):
            return modules
        names = [modules] if isinstance(modules, str) else list(modules)
        for name in names:
            if not isinstance(name, str) or not is_module_name(name):
                raise ValueError(f"trust is {name!r}; it must be a module name, such as 'my_module' or 'pkg.nets'.")
        return cls(frozenset(names))

    def including(self, *modules: str) -> Trust:
        return self if self.modules is None else replace(self, modules=self.modules | set(modules))

    def looking_in(self, *folders: str) -> Trust:
        return replace(self, folders=folders)

    def allows(self, module: str) -> bool:
        return self.modules is None or module in self.modules

    def look(self, module: str) -> None:
        """Make the folders importable for ``module``, which is allowed.

        One of the folders may have been chosen by the file that was loaded. So only folders that hold a trusted module
        become importable, and a module found in two of them is rejected: the file must not decide which one runs.
        """
        if self.modules is None:
            if self.folders:
                look_in(*self.folders)
            return
        importlib.invalidate_caches()  # a module may have been written a moment ago
        trusted = {name.partition(".")[0] for name in self.modules}
        look_in(*(folder for folder in self.folders if any(spec_in(folder, name) for name in trusted)))
        top = module.partition(".")[0]
        places = {place for folder in self.folders if (place := spec_in(folder, top))}
        if len(places) > 1 and top not in sys.modules and spec_in(None, top) in places:
            either = " and ".join(sorted(places))
            raise UnknownName(f"there are two modules {top!r}, {either}: remove or rename one of them.")

    def place(self, module: str) -> str:
        """Return the file that a module would be imported from, without importing it; empty if it is not found."""
        top = module.partition(".")[0]
        return next((spec for folder in (None, *self.folders) if (spec := spec_in(folder, top))), "")


ANYTHING = Trust(None)  # for names that the user typed: in Python, on the command line or in a recipe
NOTHING = Trust()
_trust: ContextVar[Trust] = ContextVar("trust", default=ANYTHING)


@contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """Look up names under this trust inside the block, including those that a constructor looks up."""
    before = _trust.set(trust)
    try:
        yield
    finally:
        _trust.reset(before)


def is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def spec_in(folder: str | None, module: str) -> str:
    """Return where a top-level module is in a folder (None: on Python's path); empty if it is not there."""
    if not module.isidentifier():
        return ""
    spec = PathFinder.find_spec(module, None if folder is None else [str(Path(folder).resolve())])
    return "" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "")


class Registry:
    """The things of one kind that have a name.

    Args:
        kind: word for them in messages: "model", "solver".
        entries: name -> "module:Name"; a module is imported only when one of its names is looked up.
        base: class that a thing from outside the package must derive from. None if the things are functions.
        functions: whether a thing may also be a function (which returns a ``base``, if given).

    Example:
        >>> solvers = Registry("solver", {"picard": "equipoise.solvers:Picard"})
        >>> solvers["picard"]
        <class 'equipoise.solvers.picard.Picard'>
    """

    def __init__(self, kind: str, entries: dict[str, str], base: type | None = None, functions: bool = False):
        self.kind, self.entries = kind, dict(entries)
        self.base, self.functions = base, functions or base is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Any:
        """Return what a name stands for; ``"my_module:MyName"`` comes from outside the package, if it is trusted."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} is {name!r}; it must be a string.")
        if name in self.entries:
            try:
                return imported(self.entries[name], self.kind, name)
            except MissingPackage as error:
                error.msg += " Install it with pip install 'equipoise[lab]'."
                raise
        if ":" not in name:
            raise UnknownName(unknown(self.kind, name, self.entries) + f" Your own: {self.kind} = 'my_module:MyName'.")
        trust, module = _trust.get(), name.partition(":")[0]
        if not trust.allows(module):
            raise UntrustedName([(self.kind, name)], trust)
        trust.look(module)
        thing = imported(name, self.kind, name)
        self.check(thing, name, trust)
        return thing

    def check(self, thing: object, name: str, trust: Trust) -> None:
        """Reject a thing from outside the package that is of another kind, before it is called.

        A trusted module may itself have imported anything, including ``os.system``. So a function named in a file must
        be defined in a trusted module and declare in its annotation that it returns the right class.
        """
        base, given = self.base, f"{self.kind} {name!r} is {thing!r}"
        if base is not None:
            if isinstance(thing, type) and issubclass(thing, base):
                return
            if not self.functions:
                raise WrongKind(f"{given}; it must be a class derived from {base.__module__}.{base.__qualname__}.")
        if trust.modules is None and callable(thing):
            return
        if not inspect.isfunction(thing) or not trust.allows(thing.__module__):
            raise WrongKind(f"{given}; it must be a function defined in a trusted module.")
        returns = inspect.get_annotations(thing).get("return")
        if base and returns is not base and str(returns).rpartition(".")[2].strip("'\"") != base.__name__:
            raise WrongKind(
                f"{self.kind} {name!r} does not declare that it returns a {base.__name__}, as a function named in a "
                f"file must: def {thing.__name__}(...) -> {base.__name__}."
            )


class UnknownName(LookupError):
    """Raised for a name that does not exist."""


class WrongKind(UnknownName):
    """Raised for a name that stands for another kind of thing."""


class UntrustedName(ValueError):
    """Raised when a loaded file names code from outside the package that the caller has not trusted.

    ``modules`` are the modules to trust; ``reason`` is the message without the remedy (Python and the CLI differ).
    """

    def __init__(self, names: Iterable[tuple[str, str]], trust: Trust, file: str = ""):
        self.names, self.trust = list(dict.fromkeys(names)), trust
        self.modules = list(dict.fromkeys(name.partition(":")[0] for _, name in self.names))
        named = ", ".join(f"{kind} {name!r}" for kind, name in self.names)
        places = ", ".join(f"{module} ({trust.place(module) or 'not found here'})" for module in self.modules)
        self.reason = (
            f"{file or 'a loaded file'} names code from outside the package: {named}. Nothing was imported. "
            f"If you trust {places}, which may do anything when imported,"
        )
        trusted = self.modules[0] if len(self.modules) == 1 else tuple(self.modules)
        super().__init__(f"{self.reason} pass trust={trusted!r}.")


class MissingPackage(ImportError):
    """Raised when a required package is not installed."""


def imported(name: str, kind: str, shown: str) -> Any:
    """Return the attribute ``Name`` of module ``module`` for a string ``"module:Name"``."""
    module_name, _, attribute = name.partition(":")
    missing = UnknownName(
        f"{kind} {shown!r}: there is no module {module_name!r}; looked in the folder of the recipe, the current folder "
        f"and Python's path{''.join(f' ({folder})' for folder in _looked_in)}."
    )
    if not is_module_name(module_name):
        raise missing
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise missing from None
        message = f"{kind} {shown!r} needs the package {error.name!r}, which is not installed."
        raise MissingPackage(message, name=error.name) from error
    if not hasattr(module, attribute):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(unknown(f"attribute of module {module_name}", attribute, names))
    return getattr(module, attribute)


_looked_in: list[str] = []  # folders that are on Python's path only because of look_in


def look_in(*folders: str | Path) -> None:
    """Make modules in these folders importable by name, in this order, after everything that is installed.

    Folders of an earlier call are removed together with their modules: two runs may each have a ``net.py``.
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


def parameters(make: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """Return the names of a callable's parameters, those without a default, and whether it takes ``**kwargs``."""
    every = inspect.signature(make).parameters.values()
    named = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    anything = any(p.kind == p.VAR_KEYWORD for p in every)
    return {p.name for p in named}, {p.name for p in named if p.default is p.empty}, anything


def check_options(make: Callable[..., Any], options: Collection[str], facts: Collection[str], owner: str) -> None:
    """Raise for the first option that ``make`` does not take; names in ``facts`` are not listed as options."""
    takes, _, anything = parameters(make)
    if not anything:
        refuse_unknown(owner, [name for name in options if name not in takes], sorted(takes - set(facts)))


def call(make: Callable[..., Any], options: dict[str, Any], facts: dict[str, Any], owner: str) -> Any:
    """Return ``make(**options)``, filling in from ``facts`` the parameters that ``options`` does not give."""
    check_options(make, options, facts, owner)
    takes, needs, _ = parameters(make)
    known = {name: value for name, value in facts.items() if name in takes and name not in options}
    missing = needs - set(options) - set(known)
    if missing:
        raise TypeError(f"{owner} needs {', '.join(sorted(missing))}, which neither the recipe nor the data set gives.")
    return make(**options, **known)

"""Look things up by name: those of the package, and those of the user.

A table maps names to ``"module:Name"``, imported on first use; a thing outside the package is named by such a string
directly.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from equipoise.options import UnknownOption as UnknownOption  # raised by check_options
from equipoise.options import refuse_unknown, unknown


def is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


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
        """Return what a name stands for; ``"my_module:MyName"`` is taken from outside the package."""
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
        return _outside.get()(self, name)

    def outside(self, name: str) -> Any:
        """Return a thing from outside the package, or raise if it is of another kind."""
        thing, base = imported(name, self.kind, name), self.base
        if base is not None and isinstance(thing, type) and issubclass(thing, base):
            return thing
        if self.functions and callable(thing):
            return thing
        derived = base and f"class derived from {base.__module__}.{base.__qualname__}"
        raise WrongKind(f"{self.kind} {name!r} is {thing!r}; it must be a {'function' if self.functions else derived}.")


# How names from outside the package are looked up; equipoise.lab.trust restricts it for names read from files.
_outside: ContextVar[Callable[[Registry, str], Any]] = ContextVar("outside", default=Registry.outside)


@contextmanager
def looking_up(outside: Callable[[Registry, str], Any]) -> Iterator[None]:
    """Look up names from outside the package by ``outside(registry, name)`` inside the block."""
    token = _outside.set(outside)
    try:
        yield
    finally:
        _outside.reset(token)


class UnknownName(LookupError):
    """Raised for a name that does not exist."""


class WrongKind(UnknownName):
    """Raised for a name that stands for another kind of thing."""


class MissingPackage(ImportError):
    """Raised when a required package is not installed."""


user_folders: list[str] = []  # folders on Python's path only for modules of users (see equipoise.lab.trust)


def imported(name: str, kind: str, shown: str) -> Any:
    """Return the attribute ``Name`` of module ``module`` for a string ``"module:Name"``."""
    module_name, _, attribute = name.partition(":")
    missing = UnknownName(
        f"{kind} {shown!r}: there is no module {module_name!r}; looked in the folder of the recipe, the current folder "
        f"and Python's path{''.join(f' ({folder})' for folder in user_folders)}."
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
        raise UnknownName(f"module {module_name}: {unknown('attribute', attribute, names)}")
    return getattr(module, attribute)


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

"""Check options when an object is made, and suggest the nearest name for a misspelled one.

Every error names the option, its value and what is allowed.
"""

import difflib
import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, dataclass_transform


class UnknownOption(TypeError):
    """Raised for an option that its owner does not have; ``option`` is its name."""

    def __init__(self, message: str, option: str):
        super().__init__(message)
        self.option = option


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name most similar to ``name``, or None; leading dashes do not count as similarity."""
    bare = {word.lstrip("-"): word for word in known}
    matches = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=cutoff)
    return bare[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``"did you mean 'x'? "`` for the known name most similar to ``name``, or an empty string."""
    near = nearest(name, known, cutoff)
    return "" if near is None else f"did you mean {near!r}? "


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that does not exist: the nearest known name, then all of them."""
    known = list(known)
    return f"there is no {kind} {name!r}; {did_you_mean(name, known)}known: {', '.join(known)}."


def unknown_of_many(kind: str, name: str, known: Collection[str], command: str) -> str:
    """Return the message for a name among too many to list: names like it, or that it is part of, and the command."""
    meant = similar(name, known, cutoff=0.6) or [word for word in known if name and name in word]
    question = f"; did you mean {' or '.join(map(repr, meant[:3]))}?" if meant else "."
    return f"there is no {kind} {name!r}{question} `{command}` lists all."


def similar(name: str, known: Collection[str], cutoff: float) -> list[str]:
    """Return the known names, such as ``"core/mnist"``, that have this name in any folder, or else the nearest one."""
    near = nearest(name, known, cutoff)
    return [word for word in known if word.rpartition("/")[2] == name] or ([] if near is None else [near])


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise :class:`UnknownOption` for the first name in ``given`` that is not ``known``."""
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UnknownOption(f"{owner} has no option {name!r}; {did_you_mean(name, known)}options: {listed}.", name)


def is_number(
    value: object,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    whole: bool = False,
) -> bool:
    """Return whether a value is a finite number (``whole``: an int) within the bounds; a bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return at_least <= value <= at_most and above < value < below


def require_number(where: str, value: object, *, whole: bool = False, optional: bool = False, **bounds: float) -> None:
    """Raise unless ``value``, called ``where`` in the message, is a number within the bounds, or None if optional.

    Args:
        bounds: ``at_least``, ``above``, ``at_most`` and ``below``, as in :func:`is_number`.
    """
    if is_number(value, whole=whole, **bounds) or (optional and value is None):
        return
    within = " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in bounds.items())
    kind = "a whole number" if whole else "a number"
    allowed = f"{kind} of {within}" if within.startswith("at") else f"{kind} {within}".rstrip()
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    error = ValueError if right_type else TypeError
    raise error(f"{where} is {value!r}; it must be {allowed}{' (or None)' if optional else ''}.")


def require(
    owner: object,
    name: str,
    *,
    among: Collection[Any] | None = None,
    kind: type | None = None,
    whole: bool = False,
    optional: bool = False,
    **bounds: float,
) -> None:
    """Raise unless field ``name`` of ``owner`` is one of ``among``, a ``kind``, or a number within the bounds."""
    value, where = getattr(owner, name), f"{type(owner).__name__}.{name}"
    if among is None and kind is None:
        require_number(where, value, whole=whole, optional=optional, **bounds)
    elif value is None and optional:
        return
    elif among is not None and value not in among:
        raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(repr, among))}.")
    elif kind is not None and not isinstance(value, kind):
        example = " (an object, not its class or its name)" if kind is not bool else ""
        raise TypeError(f"{where} is {value!r}; it must be a {kind.__name__}{example}.")


def option(*, default: Any, **allowed: Any) -> Any:
    """Declare an option of an :func:`options` class: its default, and its allowed values as :func:`require` takes them.

    Example:
        >>> memory: int = option(default=5, at_least=1, whole=True)
    """
    return field(default=default, metadata=allowed)


@dataclass_transform(frozen_default=True, field_specifiers=(option, field))
def options(cls: type) -> type:
    """Make a frozen dataclass that checks its options, names unknown ones, and shows only non-default values."""
    cls = dataclass(frozen=True, repr=False)(cls)
    dataclass_init = cls.__init__
    names = [field.name for field in fields(cls)]
    checked = {field.name: field.metadata for field in fields(cls) if field.metadata}

    @functools.wraps(dataclass_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, names)
        dataclass_init(self, *args, **kwargs)
        for name, allowed in checked.items():
            require(self, name, **allowed)

    def show(self: Any) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        return f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"

    cls.__init__ = init
    cls.__repr__ = show  # type: ignore[assignment]
    return cls

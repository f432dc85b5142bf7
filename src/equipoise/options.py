"""Check options when an object is made, and suggest the nearest name for a misspelled one.

Every error names the option, its value and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypedDict, Unpack, dataclass_transform


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


def refuse_unknown(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise :class:`UnknownOption` for the first name in ``given`` that is not ``known``."""
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UnknownOption(f"{owner} has no option {name!r}; {did_you_mean(name, known)}options: {listed}.", name)


class Bounds(TypedDict, total=False):
    """The numbers that :func:`require_number` accepts."""

    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None
    whole: bool
    optional: bool


def require(
    owner: object,
    name: str,
    *,
    among: Collection[Any] | None = None,
    kind: type | None = None,
    **bounds: Unpack[Bounds],
) -> None:
    """Raise unless field ``name`` of ``owner`` has an allowed value.

    Args:
        among: allowed values.
        kind: class of which the value must be an instance.
        bounds: bounds of a number, as in :func:`require_number`; ``optional=True`` allows None in every case.
    """
    value = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if value is None and bounds.get("optional"):
        return
    if among is not None:
        if value not in among:
            raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(repr, among))}.")
    elif kind is not None:
        if not isinstance(value, kind):
            example = " (an object, not its class or its name)" if kind is not bool else ""
            raise TypeError(f"{where} is {value!r}; it must be a {kind.__name__}{example}.")
    else:
        require_number(where, value, **bounds)


def require_number(where: str, value: object, **bounds: Unpack[Bounds]) -> None:
    """Raise unless ``value``, called ``where`` in the message, is a finite number (``whole``: an int) within bounds."""
    at_least, above, at_most, below = (bounds.get(name) for name in ("at_least", "above", "at_most", "below"))
    words = (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
    within = " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)
    whole = bounds.get("whole", False)
    message = (
        f"{where} is {value!r}; it must be {'a whole number' if whole else 'a number'}"
        f"{' of' if within.startswith('at') else ''}{' ' if within else ''}{within}"
        f"{' (or None)' if bounds.get('optional') else ''}."
    )
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(message)
    if (
        not math.isfinite(value)
        or (at_least is not None and value < at_least)
        or (above is not None and value <= above)
        or (at_most is not None and value > at_most)
        or (below is not None and value >= below)
    ):
        raise ValueError(message)


def require_sequence_of_numbers(where: str, value: Any) -> None:
    """Raise unless ``value`` is a sequence of numbers, such as the mean of each channel."""
    listed = hasattr(value, "__len__") and hasattr(value, "__iter__")
    if not listed or not all(isinstance(entry, Real) for entry in value):
        raise TypeError(f"{where} is {value!r}; it must be a tuple of numbers, such as (0.5,).")


def require_images(shape: Sequence[int], classes: int, mean: Sequence[float]) -> None:
    """Raise unless ``shape``, ``classes`` and ``mean`` describe images that a classifier can take."""

    def counts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    if not (isinstance(shape, tuple | list) and len(shape) == 3 and all(map(counts, shape))):
        raise ValueError(
            f"shape is {shape!r}; it must be the shape of one image, (channels, height, width), such as (3, 32, 32)."
        )
    if not counts(classes) or classes < 2:
        raise ValueError(
            f"classes is {classes!r}; a classifier needs at least 2 (a whole number; does the data set have labels?)."
        )
    require_sequence_of_numbers("mean", mean)
    if len(mean) not in (1, shape[0]):
        raise ValueError(f"mean has {len(mean)} entries; it must have 1, or {shape[0]}, one for each channel.")


@dataclass_transform(frozen_default=True)
def options(cls: type) -> type:
    """Make a frozen dataclass that rejects unknown options by name and whose repr shows only non-default values."""
    cls = dataclass(frozen=True, repr=False)(cls)
    dataclass_init = cls.__init__
    names = [field.name for field in fields(cls)]

    @functools.wraps(dataclass_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, names)
        dataclass_init(self, *args, **kwargs)

    def show(self: Any) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        return f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"

    cls.__init__ = init
    cls.__repr__ = show  # type: ignore[assignment]
    return cls

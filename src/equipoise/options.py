"""Options are checked when an object is made; a bad one gets a sentence that names it and what is allowed."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, dataclass_transform


def require(
    owner: Any,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    optional: bool = False,
    among: Collection[Any] | None = None,
    kind: type | None = None,
) -> None:
    """Raise unless field ``name`` of ``owner`` is what is allowed. Each bound given is part of the sentence."""
    value = getattr(owner, name)
    if optional and value is None:
        return
    where = f"{type(owner).__name__}.{name}"
    if among is not None:
        if value not in among:
            raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(repr, among))}.")
        return
    if kind is not None:
        if not isinstance(value, kind):
            example = " (an object, not its class or its name)" if kind is not bool else ""
            raise TypeError(f"{where} is {value!r}; it must be a {kind.__name__}{example}.")
        return
    require_number(
        where, value, at_least=at_least, above=above, at_most=at_most, below=below, whole=whole, optional=optional
    )


def require_number(
    where: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise unless ``value``, named ``where`` in the sentence, is a number within the bounds given."""
    number = "a whole number" if whole else "a number"
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
        if bound is not None
    ]
    allowed = " ".join([number, " and ".join(bounds)]) + (" (or None)" if optional else "")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{where} is {value!r}; it must be {allowed}.")
    if (
        not math.isfinite(value)
        or (at_least is not None and value < at_least)
        or (above is not None and value <= above)
        or (at_most is not None and value > at_most)
        or (below is not None and value >= below)
    ):
        raise ValueError(f"{where} is {value!r}; it must be {allowed}.")


def require_numbers(where: str, value: Any) -> None:
    """Raise unless ``value`` is a sequence of numbers, such as the mean of every channel."""
    listed = hasattr(value, "__len__") and hasattr(value, "__iter__")
    if not listed or not all(isinstance(entry, Real) for entry in value):
        raise TypeError(f"{where} is {value!r}; it must be a tuple of numbers, such as (0.5,).")


@dataclass_transform(frozen_default=True)
def options(cls: type) -> type:
    """A frozen dataclass that answers an unknown option with the nearest name it has, and shows what is not default."""
    cls = dataclass(frozen=True, repr=False)(cls)
    made = cls.__init__
    names = [field.name for field in fields(cls)]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, names)
        made(self, *args, **kwargs)

    def show(self: Any) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        return f"{cls.__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"

    cls.__init__ = init
    cls.__repr__ = show  # type: ignore[assignment]
    return cls


def refuse_unknown(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise for the first name in ``given`` that is not ``known``, suggesting the nearest one."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"{owner} has no option {name!r}; {hint}options: {', '.join(known)}.")

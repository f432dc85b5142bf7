"""Named sizes: dataclasses of numbers that make a model, any of which can be replaced by a keyword option."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from equipoise.registry import unknown

SizeT = TypeVar("SizeT")


def sized(sizes: Mapping[str, SizeT], name: str, model: str, **numbers: Any) -> SizeT:
    """Return the size called ``name`` with the given numbers in place of its own; None keeps its own.

    Args:
        sizes: dataclass instances by name.
        name: key of ``sizes``.
        model: name of the model, for error messages.
    """
    if not isinstance(name, str) or name not in sizes:
        raise ValueError(unknown(f"size of {model}", str(name), sizes))
    given = {key: value for key, value in numbers.items() if value is not None}
    return dataclasses.replace(sizes[name], **given)  # type: ignore[type-var]


def numbers_of(size: type, *, without: Collection[str] = ()) -> list[Parameter]:
    """Return the fields of a size as keyword-only parameters, to be handed to :func:`sized`: None is the default."""
    names = [field.name for field in dataclasses.fields(size) if field.name not in without]
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]


def require_counts(size: object, name: str, *, at_least: int = 1, each: str = "scale") -> None:
    """Raise unless a field is a list of whole numbers, one for each scale or branch; turn it into a tuple."""
    value = getattr(size, name)
    if not (isinstance(value, tuple | list) and all(type(n) is int and n >= at_least for n in value)):
        raise ValueError(
            f"{name} is {value!r}; it must be a list of whole numbers of at least {at_least}, one for each {each}."
        )
    object.__setattr__(size, name, tuple(value))

"""Keyword options that a constructor passes on, to a named size or to a part of the model.

An option and its default are written once, where the option is used. The constructor that passes it on lists it in its
signature, which is what recipes are checked against and what ``help`` shows.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from equipoise.options import is_number, refuse_unknown, unknown

Init = TypeVar("Init", bound=Callable[..., None])
Size = TypeVar("Size")


def accepts(*options: Parameter) -> Callable[[Init], Init]:
    """Declare what a constructor takes through ``*args`` and ``**options``; other names are rejected.

    A parameter that the constructor names itself keeps the constructor's default.
    """

    def decorate(init: Init) -> Init:
        own = inspect.signature(init).parameters.values()
        named = {p.name: p for p in own if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
        every = {p.name: p for p in options} | named
        signature = inspect.Signature(sorted(every.values(), key=lambda p: (p.name != "self", p.kind)))

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(type(self).__name__, kwargs, list(signature.parameters)[1:])
            init(self, *args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def positional_of(make: Callable[..., Any]) -> list[Parameter]:
    """Return the positional parameters of a callable."""
    return [p for p in inspect.signature(make).parameters.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]


def options_of(make: Callable[..., Any], *names: str) -> list[Parameter]:
    """Return these parameters of a callable, or all of them, as keyword-only ones with the same defaults."""
    parameters = inspect.signature(make).parameters
    return [parameters[name].replace(kind=Parameter.KEYWORD_ONLY) for name in names or parameters]


def numbers_of(size: type, *, without: Collection[str] = ()) -> list[Parameter]:
    """Return the fields of a size as keyword-only parameters for :func:`sized`, whose default is None."""
    names = [field.name for field in dataclasses.fields(size) if field.name not in without]
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]


def sized(sizes: Mapping[str, Size], name: str, model: str, options: dict[str, Any]) -> Size:
    """Return the size called ``name`` of a ``model``.

    Its fields are taken out of the ``options``, and replaced by what these say, unless it is None.
    """
    if not isinstance(name, str) or name not in sizes:
        raise ValueError(unknown(f"size of {model}", str(name), sizes))
    names = [field.name for field in dataclasses.fields(sizes[name])]  # type: ignore[arg-type]
    given = {key: value for key in names if (value := options.pop(key, None)) is not None}
    return dataclasses.replace(sizes[name], **given)  # type: ignore[type-var]


def require_counts(size: object, name: str, each: str, *, at_least: int = 1, optional: bool = False) -> None:
    """Raise unless a field is a list of whole numbers, empty only if ``optional``; turn it into a tuple."""
    value = getattr(size, name)
    listed = isinstance(value, tuple | list) and (optional or len(value) > 0)
    if not listed or not all(is_number(n, at_least=at_least, whole=True) for n in value):
        raise ValueError(
            f"{name} is {value!r}; it must be a list of whole numbers of at least {at_least}, one for each {each}."
        )
    object.__setattr__(size, name, tuple(value))

"""Constructors that pass keyword options on to their parts.

An option and its default are written once, where the option is used. The constructor that passes it on lists it in its
signature, which is what recipes are checked against and what ``help`` shows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

from equipoise.options import refuse_unknown

Init = TypeVar("Init", bound=Callable[..., None])


def options_of(make: Callable[..., Any], *names: str) -> list[Parameter]:
    """Return these parameters of a callable, or all of them, as keyword-only ones with the same defaults."""
    parameters = inspect.signature(make).parameters
    return [parameters[name].replace(kind=Parameter.KEYWORD_ONLY) for name in names or parameters]


def accepts(*options: Parameter) -> Callable[[Init], Init]:
    """Declare what a constructor takes through its ``**options``; other names are rejected with the nearest one.

    Args:
        options: keyword-only parameters; one that the constructor names itself keeps the constructor's default.

    Example:
        >>> class Model(nn.Module):
        ...     @accepts(*options_of(Ring))
        ...     def __init__(self, shape, diversity=0.01, **options):
        ...         self.ring = Ring(diversity=diversity, **options)
    """

    def decorate(init: Init) -> Init:
        named = [p for p in inspect.signature(init).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        passed_on = [p for p in options if p.name not in {own.name for own in named}]
        signature = inspect.Signature([*named, *passed_on])
        known = list(signature.parameters)[1:]  # without self

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(type(self).__name__, kwargs, known)
            init(self, *args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate

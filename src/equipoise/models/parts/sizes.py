"""Named sizes of models, any number of which can be replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from equipoise.options import unknown

Size = TypeVar("Size")


def sized(sizes: Mapping[str, Size], name: str, model: str, **numbers: Any) -> Size:
    """The size of that name, with the numbers that are given, which None is not, in place of its own.

    Args:
        sizes: dataclasses by their names.
        name: of one of them.
        model: whose sizes these are, for the message when there is none of that name.
    """
    if not isinstance(name, str) or name not in sizes:
        raise ValueError(unknown(f"size of {model}", str(name), sizes))
    given = {key: value for key, value in numbers.items() if value is not None}
    return dataclasses.replace(sizes[name], **given)  # type: ignore[type-var]

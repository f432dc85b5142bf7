"""What a published checkpoint becomes: a recipe, properties of the data, and tensors under the names of our model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise.lab.runs.published.pickled import LeftOut


@dataclass(frozen=True)
class Plan:
    """How a state dict of a published layout is used.

    Args:
        title: what it is.
        recipe: recipe of the package that builds the model.
        changes: changes of the recipe, ``key=value``.
        facts: properties of the data that the model was trained on.
        tensors: tensors of the file by their names in our model.
        origins: names in the file by names in our model.
        left_out: tensors of the file that are not used, and why.
        notes: what the converted model computes, where that is not obvious.
    """

    title: str
    recipe: str
    changes: tuple[str, ...]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    origins: dict[str, str]
    left_out: list[LeftOut] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def renamed(
    state: dict[str, Tensor], rename: Callable[[str], str | None]
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return tensors and origins by their names in our model, and the names that have none or share one."""
    tensors, origins, strange = {}, {}, []
    for name, tensor in state.items():
        if (own := rename(name)) is None or own in tensors:
            strange.append(name)
        else:
            tensors[own], origins[own] = tensor, name
    return tensors, origins, strange


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return the first names and the number of the others: "a, b and 3 more"."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""Looking into a recorded autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def edges(image: Tensor, stop: Sequence[Tensor] = ()) -> Iterator[tuple[Any, int]]:
    """Every (node, which of its outputs) that ``image`` depends on, not going beyond the tensors in ``stop``."""
    ends = {origin(tensor) for tensor in stop}
    queue = [origin(image)]
    seen: set[Any] = set()
    for edge in queue:
        if edge[0] is None or edge in seen or edge in ends:
            continue
        seen.add(edge)
        yield edge
        queue.extend(edge[0].next_functions)


def origin(tensor: Tensor) -> tuple[Any, int]:
    """Where a tensor comes from: the edge of the graph that stands for it."""
    return tensor.grad_fn, tensor.output_nr


def leaf_of(node: Any) -> Tensor | None:
    """The tensor whose gradient a node accumulates, if it is such a node."""
    return getattr(node, "variable", None)


def captured_leaves(image: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors that ``image`` depends on other than through the ``known`` ones."""
    identities = {id(tensor) for tensor in known}
    found = (leaf_of(node) for node, _ in edges(image, known))
    return [leaf for leaf in found if leaf is not None and id(leaf) not in identities]

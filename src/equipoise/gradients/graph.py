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


def captured_tensors(image: Tensor, known: Sequence[Tensor], visible: Sequence[Tensor]) -> list[Tensor]:
    """The tensors through which ``image`` depends on anything but the ``known`` ones, none upstream of another.

    They are leaves, or, where possible, the ``visible`` tensors computed from leaves. It is not possible when a leaf is
    reached both through such a tensor and past it: its gradient would then be counted twice.
    """
    reached = set(edges(image, known))
    computed = list({origin(t): t for t in visible if not t.is_leaf and origin(t) in reached}.values())
    past = leaves_of(image, [*known, *computed])
    through = {id(leaf) for tensor in computed for leaf in leaves_of(tensor, known)}
    if any(id(leaf) in through for leaf in past):
        return leaves_of(image, known)
    upstream = {edge for tensor in computed for edge in edges(tensor) if edge != origin(tensor)}
    return [*past, *(tensor for tensor in computed if origin(tensor) not in upstream)]


def leaves_of(image: Tensor, stop: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors that ``image`` depends on other than through those in ``stop``."""
    identities = {id(tensor) for tensor in stop}
    found = (leaf_of(node) for node, _ in edges(image, stop))
    return [leaf for leaf in found if leaf is not None and id(leaf) not in identities]

"""Looking into a recorded autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def nodes(image: Tensor, stop: Sequence[Tensor] = ()) -> Iterator[Any]:
    """Every node of the graph of ``image``, not going beyond the tensors in ``stop``."""
    seen = {None, *(tensor.grad_fn for tensor in stop)}
    queue = [image.grad_fn]
    for node in queue:
        if node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(parent for parent, _ in node.next_functions)


def captured_leaves(image: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors that ``image`` depends on other than through the ``known`` ones."""
    identities = {id(tensor) for tensor in known}
    variables = (getattr(node, "variable", None) for node in nodes(image, known))
    return [v for v in variables if v is not None and id(v) not in identities]

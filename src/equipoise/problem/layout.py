"""A value, which is a tensor or a nested tuple of tensors, as one (batch, n) matrix of rows, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
BATCH_LAST = {4: (2, 3, 1, 0)}  # what products over frequencies need: the batch lies innermost


def leaves(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of a nested tuple, each with a name such as ``z0[1]``."""
    if isinstance(tree, Tensor):
        return [(name, tree)]
    if isinstance(tree, tuple | list):
        return [leaf for i, part in enumerate(tree) for leaf in leaves(part, f"{name}[{i}]")]
    remedy = "What has no batch dimension belongs in f."
    if tree is None and name.startswith("inputs"):
        remedy = (
            "Leave an optional input out and give it a default in f, f(z, x, mask=None), or pass one that changes "
            "nothing, such as a mask of ones."
        )
    raise TypeError(f"{name} is a {type(tree).__name__}; it must be a tensor or a (nested) tuple of tensors. {remedy}")


def rebuild(like: Any, parts: Sequence[Any]) -> Any:
    """A tree structured like ``like`` with ``parts`` as its leaves, in order."""
    return _rebuild(like, iter(parts))


def _rebuild(node: Any, remaining: Iterator[Any]) -> Any:
    # Not a closure: one that calls itself is a reference cycle, which would keep every step's tensors alive.
    if not isinstance(node, tuple | list):
        return next(remaining)
    children = [_rebuild(child, remaining) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)


def skeleton(tree: Any) -> Any:
    """The nesting of a value, without its tensors."""
    return rebuild(tree, [None] * len(leaves(tree, "value")))


def skeleton_differs(value: Any, nesting: Any) -> bool:
    """Whether a value is nested otherwise than ``nesting``."""
    if not isinstance(nesting, tuple | list):
        return isinstance(value, tuple | list)
    if not isinstance(value, tuple | list):
        return True
    return len(value) != len(nesting) or any(skeleton_differs(v, n) for v, n in zip(value, nesting, strict=True))


def outline(nesting: Any) -> str:
    """A nesting as text: ``(*, (*, *))``."""
    if not isinstance(nesting, tuple | list):
        return "*"
    return "(" + ", ".join(outline(part) for part in nesting) + ")"


def inverse(permutation: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def is_zero(tensor: Tensor) -> bool:
    """Whether all of a tensor is 0; three times faster than any()."""
    stored = tensor.permute(memory_order(tensor))
    return not stored.numel() or all(end == 0 for end in torch.stack(stored.aminmax()).tolist())


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor, outermost in memory first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def is_channels_last(images: Tensor) -> bool:
    """Whether images are in channels-last order, and could not as well be taken for contiguous ones."""
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def select(tensor: Tensor, rows: Tensor) -> Tensor:
    """The samples ``rows`` of a tensor, laid out in memory as it is; index_select alone would put the batch first."""
    if tensor.dim() < 2 or tensor.is_contiguous():
        return tensor.index_select(0, rows)
    order = memory_order(tensor)
    return tensor.permute(order).index_select(order.index(0), rows).permute(inverse(order))


@dataclass
class Leaf:
    """How one tensor of a value lies in the rows."""

    name: str
    shape: torch.Size  # of one sample
    dtype: torch.dtype
    permutation: tuple[int, ...] | None = None  # rows follow the order in which a tensor lies in memory: no copy

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Leaf:
        known = (orders[tensor.dim()] for orders in (CHANNELS_LAST, BATCH_LAST) if tensor.dim() in orders)
        order = None
        if not tensor.is_contiguous() and not tensor.is_complex():
            order = next((order for order in known if tensor.permute(order).is_contiguous()), None)
        return cls(name, tensor.shape[1:], tensor.dtype, order)

    @property
    def batch_last(self) -> bool:
        """Whether rows are the columns of a matrix in memory."""
        return self.permutation is not None and self.permutation[-1] == 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    def pack(self, tensor: Tensor) -> Tensor:
        if self.permutation and self.batch_last:
            return tensor.permute(self.permutation).reshape(self.numel, tensor.shape[0]).T
        if self.permutation:
            tensor = tensor.permute(self.permutation)
        if self.dtype.is_complex:
            tensor = torch.view_as_real(tensor)
        return tensor.reshape(tensor.shape[0], self.numel)  # not -1: torch cannot infer it for an empty batch

    def unpack(self, rows: Tensor) -> Tensor:
        if self.permutation and self.batch_last:
            shape = tuple(self.shape[i - 1] for i in self.permutation[:-1])
            return rows.T.reshape(*shape, rows.shape[0]).permute(inverse(self.permutation)).to(self.dtype)
        shape: tuple[int, ...] = tuple(self.shape)
        if self.permutation:
            shape = tuple(self.shape[i - 1] for i in self.permutation[1:])
        tensor = rows.reshape(rows.shape[0], *shape, *((2,) if self.dtype.is_complex else ()))
        if self.dtype.is_complex:
            tensor = torch.view_as_complex(tensor.clone(memory_format=torch.contiguous_format))
        if self.permutation:
            tensor = tensor.permute(inverse(self.permutation))
        return tensor.to(self.dtype)


class Layout:
    """The correspondence between a value and its (batch, n) rows, in float32 or wider."""

    def __init__(self, value: Any):
        named = leaves(value, "z")
        self.nesting = skeleton(value)
        self.leaves = [Leaf.of(name, tensor) for name, tensor in named]
        widest = torch.float32
        for leaf in self.leaves:
            real = leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype
            widest = torch.promote_types(widest, real)
        self.dtype = widest
        # Whether some tensor has fewer digits than the rows.
        self.coarse = any(torch.finfo(leaf.dtype).eps > torch.finfo(widest).eps for leaf in self.leaves)

    def pack(self, value: Any) -> Tensor:
        parts = [leaf.pack(t).to(self.dtype) for leaf, (_, t) in zip(self.leaves, leaves(value, "z"), strict=True)]
        if len(parts) == 1:
            return parts[0]
        if self.batch_last:
            return torch.cat([part.T for part in parts]).T
        return torch.cat(parts, dim=1)

    @property
    def batch_last(self) -> bool:
        return all(leaf.batch_last for leaf in self.leaves)

    def arranged(self, rows: Tensor) -> Tensor:
        """Rows in the memory order that packing gives."""
        return rows.T.contiguous().T if self.batch_last else rows.contiguous()

    def fits(self, value: Any, batch: int) -> bool:
        """Whether a value has this nesting and these shapes."""
        return not skeleton_differs(value, self.nesting) and all(
            tensor.shape == (batch, *leaf.shape)
            for leaf, (_, tensor) in zip(self.leaves, leaves(value, "value"), strict=True)
        )

    def unpack(self, rows: Tensor) -> Any:
        if len(self.leaves) == 1:
            parts = [self.leaves[0].unpack(rows)]
        else:
            split = rows.split([leaf.numel for leaf in self.leaves], dim=1)
            parts = [leaf.unpack(part) for leaf, part in zip(self.leaves, split, strict=True)]
        return rebuild(self.nesting, parts)

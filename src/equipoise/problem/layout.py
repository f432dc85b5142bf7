"""Values as rows: a tensor or nested tuple of tensors as one (batch, n) matrix and back, and the norms of its rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
BATCH_LAST = {4: (2, 3, 1, 0)}  # the memory order of products over frequencies: the batch is innermost


def leaves(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a nested tuple, each with a name such as ``z0[1]``."""
    if isinstance(tree, Tensor):
        return [(name, tree)]
    if isinstance(tree, tuple | list):
        return [leaf for i, part in enumerate(tree) for leaf in leaves(part, f"{name}[{i}]")]
    remedy = "Anything without a batch dimension belongs in f."
    if name.startswith("f(z)["):
        remedy = "If f returns (z, aux), set aux=True, or pass a function that returns z alone."
    if tree is None and name.startswith("inputs"):
        remedy = (
            "Omit an optional input and give it a default in f, f(z, x, mask=None), or pass a neutral one, such as a "
            "mask of ones."
        )
    raise TypeError(f"{name} has type {type(tree).__name__}; it must be a tensor or a (nested) tuple of them. {remedy}")


def rebuild(like: Any, parts: Sequence[Any]) -> Any:
    """Return a tree structured like ``like`` with ``parts`` as its leaves, in order."""
    return _rebuild(like, iter(parts))


def _rebuild(node: Any, remaining: Iterator[Any]) -> Any:
    # Not a closure: one that calls itself is a reference cycle, which would keep every step's tensors alive.
    if not isinstance(node, tuple | list):
        return next(remaining)
    children = [_rebuild(child, remaining) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)


def same_nesting(value: Any, nesting: Any) -> bool:
    """Return whether a value is nested like ``nesting``."""
    if isinstance(value, tuple | list) != isinstance(nesting, tuple | list):
        return False
    if not isinstance(nesting, tuple | list):
        return True
    return len(value) == len(nesting) and all(map(same_nesting, value, nesting))


def outline(tree: Any) -> str:
    """Return the nesting of a value as a string such as ``(*, (*, *))``."""
    return f"({', '.join(map(outline, tree))})" if isinstance(tree, tuple | list) else "*"


def memory_order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # dimensions, outermost first


def inverse(permutation: Sequence[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def select(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the samples ``rows`` in the memory order of ``tensor``, which index_select does not keep."""
    if tensor.dim() < 2 or tensor.is_contiguous():
        return tensor.index_select(0, rows)
    order = memory_order(tensor)
    return tensor.permute(order).index_select(order.index(0), rows).permute(inverse(order))


@dataclass
class Leaf:
    """How one tensor of a value is stored in the rows."""

    name: str
    shape: torch.Size  # of one sample
    dtype: torch.dtype
    permutation: tuple[int, ...] | None = None  # its memory order, which rows follow so that packing copies nothing

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        known = (orders[tensor.dim()] for orders in (CHANNELS_LAST, BATCH_LAST) if tensor.dim() in orders)
        order = None
        if not tensor.is_contiguous() and not tensor.is_complex():
            order = next((order for order in known if tensor.permute(order).is_contiguous()), None)
        return cls(name, tensor.shape[1:], tensor.dtype, order)

    @property
    def batch_last(self) -> bool:
        """Whether a sample is a column of a matrix in memory."""
        return self.permutation is not None and self.permutation[-1] == 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    def pack(self, tensor: Tensor) -> Tensor:
        if self.permutation:
            tensor = tensor.permute(self.permutation)
            if self.batch_last:
                return tensor.reshape(self.numel, tensor.shape[-1]).T
        if self.dtype.is_complex:
            # A view as real, here, or as complex, in unpack, fails in the backward pass where a row has an odd offset.
            tensor = torch.stack((tensor.real, tensor.imag), dim=-1)
        return tensor.reshape(tensor.shape[0], self.numel)  # not -1: torch cannot infer it for an empty batch

    def unpack(self, rows: Tensor) -> Tensor:
        if self.permutation is None:
            tensor = rows.reshape(rows.shape[0], *self.shape, *((2,) if self.dtype.is_complex else ()))
            if self.dtype.is_complex:
                tensor = torch.complex(*tensor.unbind(-1))
            return tensor.to(self.dtype)
        stored = rows.T if self.batch_last else rows
        sizes = (rows.shape[0], *self.shape)
        return stored.reshape([sizes[i] for i in self.permutation]).permute(inverse(self.permutation)).to(self.dtype)


class Layout:
    """The correspondence between a value and its (batch, n) rows, in float32 or wider."""

    def __init__(self, value: Any):
        named = leaves(value, "z")
        self.nesting = rebuild(value, [None] * len(named))  # the structure of the value, without its tensors
        self.leaves = [Leaf.of(name, tensor) for name, tensor in named]
        self.dtype = torch.float32
        for leaf in self.leaves:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype)
        # Whether some tensor has fewer digits than the rows.
        self.coarse = any(torch.finfo(leaf.dtype).eps > torch.finfo(self.dtype).eps for leaf in self.leaves)

    @property
    def batch_last(self) -> bool:
        return all(leaf.batch_last for leaf in self.leaves)

    def pack(self, value: Any) -> Tensor:
        parts = [leaf.pack(t).to(self.dtype) for leaf, (_, t) in zip(self.leaves, leaves(value, "z"), strict=True)]
        if len(parts) == 1:
            return parts[0]
        if self.batch_last:
            return torch.cat([part.T for part in parts]).T
        return torch.cat(parts, dim=1)

    def unpack(self, rows: Tensor) -> Any:
        if len(self.leaves) == 1:
            return rebuild(self.nesting, [self.leaves[0].unpack(rows)])
        split = rows.split([leaf.numel for leaf in self.leaves], dim=1)
        return rebuild(self.nesting, [leaf.unpack(part) for leaf, part in zip(self.leaves, split, strict=True)])

    def arranged(self, rows: Tensor) -> Tensor:
        """Return rows in the memory order that packing gives."""
        return rows.T.contiguous().T if self.batch_last else rows.contiguous()

    def fits(self, value: Any, batch: int) -> bool:
        """Return whether a value has this nesting and these shapes."""
        shapes = [(batch, *leaf.shape) for leaf in self.leaves]
        return same_nesting(value, self.nesting) and shapes == [t.shape for _, t in leaves(value, "value")]


# Norms of rows. In float32, squares of numbers below 1e-19 or above 1e19 underflow or overflow.


def columns_in_memory(rows: Tensor) -> bool:
    return rows.shape[0] > 1 and rows.stride(0) == 1 and not rows.is_contiguous()


def row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row; inexact where squares underflow or overflow."""
    if columns_in_memory(rows):  # for which vector_norm is ten times slower
        return rows.square().sum(dim=1).sqrt_()
    return torch.linalg.vector_norm(rows, dim=1)


def row_distances(a: Tensor, b: Tensor) -> Tensor:
    if columns_in_memory(a):
        return F.mse_loss(a, b, reduction="none").sum(dim=1).sqrt_()  # their squared difference in one pass
    return row_norms(a - b)


def largest_entries(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))


def powers_of_two(sizes: Tensor) -> Tensor:
    """Return the power of two just above every size, by which division is exact; 1 for 0, NaN and infinity."""
    limits = torch.finfo(sizes.dtype)
    exponent = torch.frexp(sizes.clamp(limits.tiny, limits.max / 2)).exponent
    power = torch.ldexp(torch.ones_like(sizes), exponent)
    return torch.where(torch.isfinite(sizes) & (sizes > 0), power, 1.0)


def scaled_row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row in units of its largest entry, so that no square underflows or overflows."""
    unit = powers_of_two(largest_entries(rows))
    return row_norms(rows / unit[:, None]) * unit


def smallest_exact_norm(dtype: torch.dtype) -> float:
    """Return the norm below which a sum of squares loses digits to underflow."""
    limits = torch.finfo(dtype)
    return math.sqrt(limits.tiny / limits.eps)


def squares_fit(gap: Tensor, scale: Tensor) -> bool:
    """Return whether norms of gaps and images are exact: no square that counts has underflowed or overflowed."""
    if not gap.numel():
        return True
    smallest, largest = torch.aminmax(gap)  # NaN is never in range
    fits = smallest_exact_norm(gap.dtype) <= smallest.item() and largest.item() < math.inf
    return fits and scale.max().item() < math.inf


def row_units(z: Tensor, image: Tensor) -> Tensor | None:
    """Return a divisor for every row that brings it into the range where squares are exact; None if no row needs it."""
    if not image.numel():
        return None
    limits = torch.finfo(image.dtype)
    low, high = smallest_exact_norm(image.dtype) / limits.eps, math.sqrt(limits.max) * limits.eps
    smallest, largest = torch.aminmax(row_norms(image))
    if low <= smallest.item() and largest.item() <= high:
        return None
    sizes = torch.maximum(largest_entries(image), largest_entries(z))
    unit = torch.where((sizes < low) | (sizes > high), powers_of_two(sizes), 1.0)
    return None if bool((unit == 1).all()) else unit


def relative_residual(gap: Tensor, scale: Tensor) -> Tensor:
    """Return ||f(z) - z|| / ||f(z)|| from both norms: 0 where both are 0, and finite wherever both are."""
    limits = torch.finfo(scale.dtype)
    return (gap / scale.clamp(min=limits.tiny)).clamp_(max=limits.max)


def residual_at(z: Tensor, image: Tensor) -> Tensor:
    """Return the relative residual of every row of ``z`` with the given ``image`` under f."""
    norms = row_distances(image, z), row_norms(image)
    if not squares_fit(*norms):
        unit = powers_of_two(torch.maximum(largest_entries(image), largest_entries(z)))[:, None]
        norms = scaled_row_norms(image / unit - z / unit), scaled_row_norms(image / unit)
    return relative_residual(*norms)

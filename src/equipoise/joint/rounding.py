"""Rounding of points to numbers that the dtype of an optimised input can represent.

Points are computed as rows of float32 or wider, and norms in float64; x may have fewer digits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.problem.layout import Layout, largest_entries, leaves, outline, powers_of_two, same_nesting

Device = torch.device | str | None


class Grid:
    """The numbers that x can represent, each leaf in its own dtype, as rows of the layout's dtype."""

    def __init__(self, layout: Layout, batch: int, device: Device):
        self.layout, self.batch, self.device, self.dtype = layout, batch, device, layout.dtype
        self.widths = [leaf.numel for leaf in layout.leaves]
        self.kinds = [leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype for leaf in layout.leaves]
        self.eps = torch.finfo(self.dtype).eps
        self.coarsest = max(torch.finfo(kind).eps for kind in self.kinds)

    def by_leaf(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return ``function(dtype, *columns)`` of the columns of every leaf, side by side in the dtype of rows."""
        if len(set(self.kinds)) == 1:
            return function(self.kinds[0], *rows)
        columns = zip(*(entry.split(self.widths, dim=1) for entry in rows), strict=True)
        return torch.cat([function(kind, *parts) for kind, parts in zip(self.kinds, columns, strict=True)], dim=1)

    def rounded(self, rows: Tensor, toward: float | None = None) -> Tensor:
        """Return rows rounded to the nearest number, or to the nearest toward -inf or inf."""

        def place(kind: torch.dtype, part: Tensor) -> Tensor:
            near = part.to(kind)
            if toward is not None:
                beyond = near > part if toward < 0 else near < part
                near = torch.where(beyond, torch.nextafter(near, torch.full_like(near, toward)), near)
            return near.to(self.device or near.device, self.dtype)

        return self.by_leaf(place, rows)

    def closer(self, rows: Tensor, center: Tensor) -> Tensor:
        """Return the next numbers toward ``center``."""

        def place(kind: torch.dtype, part: Tensor, middle: Tensor) -> Tensor:
            return torch.nextafter(part.to(kind), middle.to(kind)).to(self.dtype)

        return self.by_leaf(place, rows, center.expand_as(rows))

    def rows(self, name: str, value: Any) -> Tensor:
        """Return an option, a number or structured like x, as rows (1 or batch, d) that are not rounded yet."""
        if isinstance(value, int | float):
            return torch.full((1, sum(self.widths)), float(value), dtype=torch.float64)
        named, nesting = leaves(value, name), self.layout.nesting
        if not same_nesting(value, nesting):
            raise ValueError(f"{name} is nested as {outline(value)} and x as {outline(nesting)}; nest it like x.")
        parts = []
        for leaf, (name, tensor) in zip(self.layout.leaves, named, strict=True):
            if tensor.dim() == 0 or tensor.shape[1:] != leaf.shape or len(tensor) not in (1, self.batch):
                allowed = f"{(self.batch, *leaf.shape)} or {(1, *leaf.shape)}"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; for this x it must have {allowed}.")
            require_constant(name, tensor)
            parts.append(leaf.pack(tensor).to(self.device or tensor.device))
        count = max(len(part) for part in parts)
        return torch.cat([part.expand(count, -1) for part in parts], dim=1)

    def center(self, owner: str, center: Any) -> Tensor:
        rows = self.rounded(self.rows(f"{owner}.center", 0.0 if center is None else center))
        if not bool(rows.isfinite().all()):
            raise ValueError(f"{owner}.center is infinite in some entry, in the dtype of x; it must be finite.")
        return rows

    def radius(self, owner: str, radius: float | Tensor) -> Tensor:
        """Return a radius as (1 or batch, 1)."""
        if not isinstance(radius, Tensor):
            return torch.full((1, 1), float(radius), dtype=torch.float64)
        if len(radius) not in (1, self.batch):
            raise ValueError(f"{owner}.radius has shape {tuple(radius.shape)}; for this x it must be ({self.batch},).")
        return radius[:, None].to(self.device or radius.device)


def require_constant(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which constraints do not provide; pass {name}.detach().")
    if bool(tensor.isnan().any()):
        raise ValueError(f"{name} contains NaN; every entry must be a number.")


def wide(rows: Tensor) -> Tensor:
    """Return rows in float64 if the device supports it."""
    return rows if rows.device.type == "mps" else rows.double()


def norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row, (batch, 1), differentiable; no square underflows or overflows."""
    unit = powers_of_two(largest_entries(rows.detach()))[:, None]
    total = (rows / unit).square().sum(dim=1, keepdim=True)  # in blocks, which vector_norm does not
    zero = total == 0
    return total.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0) * unit


class Attached(torch.autograd.Function):
    """A value with the derivative of ``nearest``, from which it differs by rounding."""

    @staticmethod
    def forward(value: Tensor, nearest: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0].to(ctx.dtypes[1])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].to(ctx.dtypes[0])


def attached(value: Tensor, nearest: Tensor) -> Tensor:
    """Return ``value``, a constant, differentiable as ``nearest`` is."""
    return Attached.apply(value, nearest)  # type: ignore[return-value]

"""Constraints on an optimised input: balls, boxes, spheres, and user-defined projections.

A constraint holds per sample, with norms over all tensors of a sample together. Projected points satisfy it in the
arithmetic of x itself, not only up to rounding.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from equipoise.joint.rounding import Device, Grid, attached, norms, require_constant, wide
from equipoise.options import is_number, options, require_number
from equipoise.problem.captures import leaves_of
from equipoise.problem.layout import Layout, largest_entries, leaves, select

ACTIVE = 1e-5  # relative distance to the boundary within which a point counts as on it
ACCURACY = 1e-6  # relative change up to which a user's projection leaves a point in place


@dataclass
class Tangent:
    """The directions in which a point can move without leaving the set, to first order."""

    free: Callable[[Tensor], Tensor]  # symmetric projection of rows onto those directions
    curvature: Tensor  # (batch,) multiplier nu: the Hessian with respect to x gets + nu I before it is projected


class Constraint(ABC):
    """A closed set of allowed x, per sample. Calling it projects x, a tensor or nested tuple of tensors.

    Example:
        >>> eq.L2Ball(1.0)(x)
    """

    grid: Grid  # set by ``fitted``, which the methods on rows require

    def __call__(self, x: Any) -> Any:
        """Return the nearest allowed x, structured like x and in its dtypes."""
        layout, first = Layout(x), leaves(x, "x")[0][1]
        return layout.unpack(self.fitted(layout, len(first), first.device).project(layout.pack(x)))

    def fitted(self, layout: Layout, batch: int, device: Device = None) -> Self:
        """Return a copy for x of this layout, with tensor options checked and converted to rows (1 or batch, d).

        Args:
            layout: layout of x.
            batch: number of samples.
            device: device of x; None keeps tensor options where they are.
        """
        grid = Grid(layout, batch, device)
        return self.replaced(grid=grid, **self.fit(grid))

    @abstractmethod
    def fit(self, grid: Grid) -> dict[str, Any]:
        """Return the attributes of the fitted copy. All tensors among them have the batch, or 1, first."""

    @abstractmethod
    def holds(self, rows: Tensor) -> Tensor:
        """Return which rows are allowed, (batch, 1), or which entries, (batch, d), where entries are independent."""

    @abstractmethod
    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        """Return the nearest point of the set, shrunk by a fraction, without rounding; differentiable by autograd."""

    def settle(self, nearest: Tensor) -> Tensor:
        """Return points rounded inward to numbers that x can hold."""
        return nearest.to(self.grid.dtype)

    def project(self, rows: Tensor) -> Tensor:
        """Return the nearest allowed rows, rounded inward. Allowed rows stay unchanged, and NaN stays NaN."""
        nearest, given = self.nearest(rows), rows.detach()
        return attached(torch.where(self.holds(given), given, self.settle(nearest.detach())), nearest)

    def tangent(self, rows: Tensor, gradient: Tensor, size: Tensor | float = 0.0) -> Tangent | None:
        """Return the tangent at allowed rows, given the gradient of the cost; None: differentiate ``project`` instead.

        A constraint is active where the cost decreases outward, at its boundary and where a step of x would reach it:
        an optimum is at the boundary only up to the tolerance. If the slope of the cost is zero to rounding, the
        constraint counts as inactive: the optimum then has only one-sided derivatives, and the one for moving inward is
        used.

        Args:
            rows: allowed rows.
            gradient: gradient of the cost with respect to them.
            size: step size of x, a number or (batch, 1).
        """
        return None

    def sources(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors that require a gradient and that the nearest points of ``rows`` depend on."""
        return []

    def reach(self) -> Tensor | float:
        """Return the largest distance between two allowed points, per sample or as a number; inf if unbounded."""
        return math.inf

    def take(self, rows: Tensor) -> Self:
        """Return the constraint of the samples ``rows``; options with a batch of 1 stay."""
        own = {name: entry for name, entry in vars(self).items() if isinstance(entry, Tensor) and len(entry) > 1}
        return self.replaced(**{name: select(entry, rows) for name, entry in own.items()})

    def replaced(self, **attributes: Any) -> Self:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed


def require_ball(owner: Any) -> None:
    """Raise unless the radius is positive, and the center structured like x or None."""
    name, radius, center = type(owner).__name__, owner.radius, owner.center
    if not isinstance(radius, Tensor):
        require_number(f"{name}.radius", radius, above=0)
    elif radius.dim() != 1:
        raise ValueError(f"{name}.radius has shape {tuple(radius.shape)}; it must be a number or of shape (batch,).")
    else:
        require_constant(f"{name}.radius", radius)
        if not bool((radius > 0).all() & radius.isfinite().all()):
            extremes = f"{radius.min():g} and {radius.max():g}"
            raise ValueError(f"{name}.radius lies between {extremes}; it must be positive and finite.")
    if center is not None and not isinstance(center, Tensor | tuple | list):
        raise TypeError(f"{name}.center is {center!r}; it must be a tensor structured like x, or None for 0.")


class RoundSet(Constraint):
    """A set with a center and a radius."""

    radius: float | Tensor
    center: Any
    middle: Tensor  # the center as rows
    size: Tensor  # the radius, (1 or batch, 1)

    def __post_init__(self) -> None:
        require_ball(self)

    def fit(self, grid: Grid) -> dict[str, Any]:
        middle = grid.center(type(self).__name__, self.center)
        size = wide(grid.radius(type(self).__name__, self.radius).to(middle.device))
        return {"middle": middle, "size": size, "center": None if self.center is None else middle}

    def offset(self, rows: Tensor) -> Tensor:
        return wide(rows) - self.middle

    def reach(self) -> Tensor | float:
        return (2 * self.size[:, 0]).to(self.grid.dtype) if isinstance(self.radius, Tensor) else 2 * self.radius

    def boundary(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distance to the center, the outward normal (0 at the center), and minus the slope along it."""
        offset = self.offset(rows)
        distance = norms(offset)
        normal = torch.where(distance > 0, offset / distance, 0.0)
        return distance, normal, -(normal * gradient).sum(dim=1, keepdim=True)

    def orthogonal_to(self, normal: Tensor, push: Tensor) -> Tangent:
        """Return the tangent of directions orthogonal to ``normal``; where it is 0, all directions."""
        normal, curvature = normal.to(self.grid.dtype), (push / self.size)[:, 0].to(self.grid.dtype)
        return Tangent(lambda v: v - normal * (normal * v).sum(dim=1, keepdim=True), curvature)


@options
class L2Ball(RoundSet):
    """All x with ||x - center||_2 <= radius.

    Projected points lie inside by as much as a norm computed in the dtype of x can err: a fraction 2 eps + d eps / 4
    of the radius for d entries, whatever the order of summation.

    Args:
        radius: positive number, or tensor of shape (batch,).
        center: tensor structured like x, with a batch of 1 or that of x; None for 0.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, constraint=eq.L2Ball(1.0))
    """

    radius: float | Tensor
    center: Any = None

    def limit(self) -> Tensor:
        """Return the norm, as computed here, up to which none computed in the dtype of x exceeds the radius."""
        return self.size * (1 - 2 * self.grid.coarsest - self.grid.eps * self.middle.shape[1] / 4 - self.norm_error)

    @property
    def norm_error(self) -> float:
        return torch.finfo(self.size.dtype).eps * self.middle.shape[1] / 4  # relative error of norms computed here

    def holds(self, rows: Tensor) -> Tensor:
        return norms(self.offset(self.grid.rounded(rows))) <= self.limit()

    def target(self, shrink: float = 0.0) -> Tensor:
        """Return the norm to which points are projected."""
        return self.limit() * (1 - 2 * self.grid.eps - 2 * self.norm_error) * (1 - shrink)

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        offset, target = self.offset(rows), self.target(shrink)
        length = norms(offset)
        inside = length <= target
        length = torch.where(length.isfinite(), length, torch.nan).masked_fill(inside, 1.0)
        return torch.where(inside, wide(rows), self.middle + offset / length * target)

    def settle(self, nearest: Tensor) -> Tensor:
        near = self.grid.rounded(nearest)
        return torch.where(self.holds(near), near, self.grid.closer(near, self.middle))

    def tangent(self, rows: Tensor, gradient: Tensor, size: Tensor | float = 0.0) -> Tangent:
        distance, normal, push = self.boundary(rows, gradient)
        near = distance + size * push >= (self.limit() - self.size * self.grid.coarsest) * (1 - ACTIVE)
        active = near & (push > 10 * self.grid.eps * norms(gradient))
        return self.orthogonal_to(normal * active, push * active)


@options
class Sphere(RoundSet):
    """All x with ||x - center||_2 = radius, to rounding.

    The center itself is equally far from all points; it is projected along the first axis.

    Args:
        radius: positive number, or tensor of shape (batch,).
        center: tensor structured like x, with a batch of 1 or that of x; None for 0.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, constraint=eq.Sphere(11.3))
    """

    radius: float | Tensor
    center: Any = None

    def holds(self, rows: Tensor) -> Tensor:
        return (norms(self.offset(self.grid.rounded(rows))) - self.size).abs() <= self.grid.coarsest * self.size

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        offset = self.offset(rows)
        length, axis = norms(offset), torch.zeros_like(offset)
        axis[:, :1] = 1.0
        offset = torch.where(length == 0, axis, offset)
        length = torch.where(length.isfinite(), length, torch.nan).masked_fill(length == 0, 1.0)
        return self.middle + offset / length * self.size

    def tangent(self, rows: Tensor, gradient: Tensor, size: Tensor | float = 0.0) -> Tangent:
        _, normal, push = self.boundary(rows, gradient)
        return self.orthogonal_to(normal, push)


class IntervalSet(Constraint):
    """A set with a lower and an upper bound on every entry."""

    lower: Tensor  # rows of numbers that x can hold, the outermost that are allowed
    upper: Tensor

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        inset = (self.upper - self.lower) * (shrink / 2)
        inset = inset.masked_fill(~inset.isfinite(), 0.0)  # where a bound is infinite
        return torch.clamp(rows, self.lower + inset, self.upper - inset)

    def tangent(self, rows: Tensor, gradient: Tensor, size: Tensor | float = 0.0) -> Tangent:
        aim, small = rows - size * gradient, 10 * self.grid.eps * largest_entries(gradient)[:, None]
        span = self.upper - self.lower
        margin = ACTIVE * torch.where(span.isfinite(), span, torch.maximum(self.lower, -self.upper).abs())
        low, high = aim <= self.lower + margin, aim >= self.upper - margin
        blocked = (low & (gradient > small)) | (high & (gradient < -small))
        fixed = blocked | (self.lower >= self.upper)
        return Tangent(lambda v: v.masked_fill(fixed, 0.0), rows.new_zeros(len(rows)))

    def reach(self) -> Tensor | float:
        return norms(wide(self.upper) - self.lower)[:, 0].to(self.grid.dtype)

    def require_real(self, grid: Grid) -> None:
        if any(leaf.dtype.is_complex for leaf in grid.layout.leaves):
            raise TypeError(
                f"x is complex, but {type(self).__name__} needs real numbers; use L2Ball, or view_as_real(x)."
            )


@options
class Box(IntervalSet):
    """All x with low <= x <= high, entry by entry.

    Args:
        low: number, or tensor structured like x with a batch of 1 or that of x; -inf for no bound.
        high: number, or tensor structured like x with a batch of 1 or that of x; inf for no bound.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, constraint=eq.Box(0.0, 1.0))
    """

    low: Any
    high: Any

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if (
                not isinstance(value, Tensor | tuple | list)
                and not is_number(value)
                and value not in (-math.inf, math.inf)
            ):
                raise TypeError(f"Box.{name} is {value!r}; it must be a number or structured like x.")

    def fit(self, grid: Grid) -> dict[str, Any]:
        self.require_real(grid)
        low, high = grid.rows("Box.low", self.low), grid.rows("Box.high", self.high)
        if bool((low.cpu() > high.cpu()).any()):
            raise ValueError("Box.low is above Box.high in some entry, so that no x is allowed; swap or widen them.")
        if bool((low == math.inf).any()) or bool((high == -math.inf).any()):
            raise ValueError("Box.low is inf or Box.high is -inf in some entry, so that no x is allowed; swap them.")
        # Entries are compared with bounds in the dtype of x, where these are rounded to nearest.
        rows = {"low": grid.rounded(low), "high": grid.rounded(high)}
        lower, upper = grid.rounded(low, math.inf), grid.rounded(high, -math.inf)
        empty = lower > upper  # x can hold no number between the bounds
        lower, upper = torch.where(empty, rows["low"], lower), torch.where(empty, rows["high"], upper)
        return {"lower": lower, "upper": upper, **rows}

    def holds(self, rows: Tensor) -> Tensor:
        return (rows >= self.low) & (rows <= self.high)


@options
class LinfBall(IntervalSet):
    """All x with |x - center| <= radius, entry by entry.

    Args:
        radius: positive number, or tensor of shape (batch,).
        center: tensor structured like x, with a batch of 1 or that of x; None for 0.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, constraint=eq.LinfBall(8 / 255))
    """

    radius: float | Tensor
    center: Any = None

    def __post_init__(self) -> None:
        require_ball(self)

    def fit(self, grid: Grid) -> dict[str, Any]:
        self.require_real(grid)
        center = grid.center("LinfBall", self.center)
        radius = grid.radius("LinfBall", self.radius).expand(-1, center.shape[1])
        near, size = grid.rounded(radius), grid.rounded(radius, -math.inf)
        center, near, size = torch.broadcast_tensors(center, near.to(center.device), size.to(center.device))

        def bound(sign: int) -> Tensor:
            def place(kind: torch.dtype, middle: Tensor, size: Tensor) -> Tensor:
                middle, size = middle.to(kind), size.to(kind)
                edge = middle + sign * size
                outside = (edge - middle).abs() > size
                return torch.where(outside, torch.nextafter(edge, middle), edge).to(grid.dtype)

            return grid.by_leaf(place, center, size)

        rows = {"lower": bound(-1), "upper": bound(1), "middle": center, "size": near}
        return {**rows, "center": None if self.center is None else center}

    def holds(self, rows: Tensor) -> Tensor:
        def check(kind: torch.dtype, part: Tensor, middle: Tensor, size: Tensor) -> Tensor:
            return (part.to(kind) - middle.to(kind)).abs() <= size.to(kind)

        wanted = (entry.expand_as(rows) for entry in (vars(self)["middle"], vars(self)["size"]))
        return self.grid.by_leaf(check, rows, *wanted)


class Projection(Constraint):
    """All x that a given projection leaves unchanged.

    The function is always called with the whole batch, so that it may capture tensors of all samples.

    Args:
        function: maps x, a tensor or nested tuple of tensors, to the nearest allowed x, each sample by itself; written
            in differentiable operations of torch if gradients of the optimum are needed.

    Example:
        >>> eq.Projection(lambda x: x.relu())
    """

    index: Tensor | None = None  # the samples that remain of the batch

    def __init__(self, function: Callable[[Any], Any]):
        if not callable(function):
            raise TypeError(f"function has type {type(function).__name__}; it must be callable, x -> x.")
        self.function = function

    def __repr__(self) -> str:
        return f"Projection({getattr(self.function, '__name__', self.function)!s})"

    def fit(self, grid: Grid) -> dict[str, Any]:
        return {}

    def take(self, rows: Tensor) -> Self:
        return self.replaced(index=rows if self.index is None else self.index.index_select(0, rows))

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        layout, batch, index = self.grid.layout, self.grid.batch, self.index
        whole = rows if index is None else rows.new_zeros(batch, rows.shape[1]).index_copy(0, index, rows)
        value = self.function(layout.unpack(whole))
        named = leaves(value, f"the value of {self!r}")
        if not layout.fits(value, batch):
            shapes = [tuple(tensor.shape) for _, tensor in named]
            raise ValueError(f"{self!r} returns a value of shape {shapes}; it must be structured and shaped like x.")
        projected = layout.pack(value)
        if rows.requires_grad and torch.is_grad_enabled() and not projected.requires_grad:
            raise TypeError(
                f"{self!r} returns a tensor without a graph, so that the optimum cannot be differentiated: write it in "
                "differentiable operations, without detach(), no_grad() or numpy."
            )
        return projected if index is None else projected.index_select(0, index)

    def sources(self, rows: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            return leaves_of(self.nearest(rows), [rows])

    def holds(self, rows: Tensor) -> Tensor:
        accuracy = max(ACCURACY, 4 * self.grid.coarsest)
        return norms(self.nearest(rows) - rows) <= accuracy * norms(rows)

    def project(self, rows: Tensor) -> Tensor:
        return self.nearest(rows)


def as_constraint(value: Any) -> Constraint | None:
    """Return a constraint for the option ``constraint``: None, a :class:`Constraint`, or a function that projects x."""
    if value is None or isinstance(value, Constraint):
        return value
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            f"constraint is {value!r}; it must be a constraint such as L2Ball(1.0), a function that projects, or None."
        )
    return Projection(value)

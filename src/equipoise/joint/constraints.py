"""Constraints on an optimised input: balls, boxes, spheres, their intersections, and any projection of the user's.

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

from equipoise.options import is_number, options, require_number
from equipoise.problem.layout import Layout, largest_entries, leaves, outline, powers_of_two, same_nesting, select

Device = torch.device | str | None
ACTIVE = 1e-5  # relative distance to a round boundary within which a point is on it
SHRINKAGE = 1e-6  # fraction by which the parts of an intersection are shrunk first
SWEEPS = 1000  # limit on the sweeps of Dykstra's algorithm


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

    grid: "Grid"  # set by ``fitted``, which the methods on rows require

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
    def fit(self, grid: "Grid") -> dict[str, Any]:
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
        nearest = self.nearest(rows)
        with torch.no_grad():
            value = torch.where(self.holds(rows), rows, self.settle(nearest))
        return attached(value, nearest)

    def tangent(self, rows: Tensor, gradient: Tensor) -> Tangent | None:
        """Return the tangent at allowed rows, given the gradient of the cost; None: differentiate ``project`` instead.

        A constraint is active where the cost pushes against it. A push of zero, to rounding, counts as inactive: there
        the optimum has one-sided derivatives only, and this is the one of moving inward.
        """
        return None

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


class Grid:
    """The numbers that x can hold, each leaf in its own dtype, as rows of the layout's dtype."""

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
        return self.rounded(self.rows(f"{owner}.center", 0.0 if center is None else center))

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
        raise TypeError(f"{name}.center is {center!r}; it must be a tensor structured like x, or None, which is 0.")


def wide(rows: Tensor) -> Tensor:
    """Return rows in float64, if the device has it."""
    return rows if rows.device.type == "mps" else rows.double()


def norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row, (batch, 1), differentiable; no square underflows or overflows."""
    unit = powers_of_two(largest_entries(rows.detach()))[:, None]
    return torch.linalg.vector_norm(rows / unit, dim=1, keepdim=True) * unit


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
    return Attached.apply(value, nearest) if nearest.requires_grad else value  # type: ignore[return-value]


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
        """Return the distance to the center, the outward normal (0 at the center), and the push outward."""
        offset = self.offset(rows)
        distance = norms(offset)
        normal = torch.where(distance > 0, offset / distance, 0.0)
        return distance, normal, -(normal * gradient).sum(dim=1, keepdim=True)

    def beside(self, normal: Tensor, push: Tensor) -> Tangent:
        """Return the tangent that leaves out ``normal``; all directions are free where it is 0."""
        normal, curvature = normal.to(self.grid.dtype), (push / self.size)[:, 0].to(self.grid.dtype)
        return Tangent(lambda v: v - normal * (normal * v).sum(dim=1, keepdim=True), curvature)


@options
class L2Ball(RoundSet):
    """All x with ||x - center||_2 <= radius.

    Projected points lie inside by as much as a norm computed in the dtype of x can err: a fraction 2 eps + d eps / 4
    of the radius for d entries, whatever the order of summation.

    Args:
        radius: positive number, or tensor of shape (batch,).
        center: tensor structured like x, with a batch of 1 or of x; None is 0.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, constraint=eq.L2Ball(1.0))
    """

    radius: float | Tensor
    center: Any = None

    def limit(self) -> Tensor:
        """Return the true norm up to which no computed norm exceeds the radius."""
        return self.size * (1 - 2 * self.grid.coarsest - self.grid.eps * self.middle.shape[1] / 4)

    def holds(self, rows: Tensor) -> Tensor:
        return norms(self.offset(self.grid.rounded(rows))) <= self.limit()

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        offset = self.offset(rows)
        length, target = norms(offset), self.limit() * (1 - self.grid.eps) * (1 - shrink)
        inside = length <= target
        length = torch.where(length.isfinite(), length, torch.nan).masked_fill(inside, 1.0)
        return torch.where(inside, wide(rows), self.middle + offset / length * target)

    def settle(self, nearest: Tensor) -> Tensor:
        near = self.grid.rounded(nearest)
        return torch.where(self.holds(near), near, self.grid.closer(near, self.middle))

    def tangent(self, rows: Tensor, gradient: Tensor) -> Tangent:
        distance, normal, push = self.boundary(rows, gradient)
        near = distance >= (self.limit() - self.size * self.grid.coarsest) * (1 - ACTIVE)
        active = near & (push > 10 * self.grid.eps * norms(gradient))
        return self.beside(normal * active, push * active)


@options
class Sphere(RoundSet):
    """All x with ||x - center||_2 = radius, to rounding.

    The center is as far from every point of the sphere; it is projected along the first axis.

    Args:
        radius: positive number, or tensor of shape (batch,).
        center: tensor structured like x, with a batch of 1 or of x; None is 0.

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

    def tangent(self, rows: Tensor, gradient: Tensor) -> Tangent:
        _, normal, push = self.boundary(rows, gradient)
        return self.beside(normal, push)


class IntervalSet(Constraint):
    """A set with a lower and an upper bound on every entry."""

    lower: Tensor  # rows of numbers that x can hold, the outermost that are allowed
    upper: Tensor

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        inset = (self.upper - self.lower) * (shrink / 2)
        inset = inset.masked_fill(~inset.isfinite(), 0.0)  # where a bound is infinite
        return torch.clamp(rows, self.lower + inset, self.upper - inset)

    def tangent(self, rows: Tensor, gradient: Tensor) -> Tangent:
        small = 10 * self.grid.eps * largest_entries(gradient)[:, None]
        blocked = ((rows <= self.lower) & (gradient > small)) | ((rows >= self.upper) & (gradient < -small))
        fixed = blocked | (self.lower >= self.upper)
        return Tangent(lambda v: v.masked_fill(fixed, 0.0), rows.new_zeros(len(rows)))

    def reach(self) -> Tensor | float:
        return norms(wide(self.upper) - self.lower)[:, 0].to(self.grid.dtype)

    def require_real(self, grid: Grid) -> None:
        if any(leaf.dtype.is_complex for leaf in grid.layout.leaves):
            raise TypeError(
                f"x is complex, which {type(self).__name__} does not order; use L2Ball, or view_as_real(x)."
            )


@options
class Box(IntervalSet):
    """All x with low <= x <= high, entry by entry.

    Args:
        low: number, or tensor structured like x with a batch of 1 or of x; -inf is no bound.
        high: number, or tensor structured like x with a batch of 1 or of x; inf is no bound.

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
            raise ValueError("Box.low is above Box.high in some entry, which leaves no x; exchange or widen them.")
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
        center: tensor structured like x, with a batch of 1 or of x; None is 0.

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


class Intersection(Constraint):
    """All x that satisfy several constraints.

    The nearest point is found by Dykstra's algorithm to a relative accuracy of about 1e-6, on sets that are shrunk by
    that much, so that rounding it leaves none of them. A part given as a function is satisfied to that accuracy only.
    J. Boyle and R. Dykstra, "A method for finding projections onto the intersection of convex sets in Hilbert spaces"
    (1986), stopped as in E. Birgin and M. Raydan, "Robust stopping criteria for Dykstra's algorithm" (2005).

    Args:
        constraints: convex constraints, or functions that project; a :class:`Sphere` is not convex.

    Example:
        >>> eq.Intersection(eq.L2Ball(1.0), eq.Box(-image, 1 - image))
    """

    def __init__(self, *constraints: Any):
        found = [as_constraint(constraint) for constraint in constraints]
        self.constraints: tuple[Constraint, ...] = tuple(
            part for one in found if one for part in (one.constraints if isinstance(one, Intersection) else [one])
        )
        if not self.constraints:
            raise ValueError("Intersection() has no constraints; pass one or more, or constraint=None for none.")
        if any(isinstance(part, Sphere) for part in self.constraints):
            raise ValueError("Intersection contains a Sphere, which is not convex; use a Sphere alone, or an L2Ball.")

    def __repr__(self) -> str:
        return f"Intersection({', '.join(map(repr, self.constraints))})"

    def fit(self, grid: Grid) -> dict[str, Any]:
        layout, batch, device = grid.layout, grid.batch, grid.device
        return {"constraints": tuple(part.fitted(layout, batch, device) for part in self.constraints)}

    def take(self, rows: Tensor) -> Self:
        return self.replaced(constraints=tuple(part.take(rows) for part in self.constraints))

    def reach(self) -> Tensor | float:
        shortest: Any = math.inf
        for part in self.constraints:
            shortest = torch.minimum(*torch.broadcast_tensors(*map(torch.as_tensor, (shortest, part.reach()))))
        return shortest

    def holds(self, rows: Tensor) -> Tensor:
        return torch.stack([part.holds(rows).all(dim=1, keepdim=True) for part in self.constraints]).all(dim=0)

    def project(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            held = self.holds(rows)
        if bool(held.all()):
            return rows
        finite = rows.isfinite().all(dim=1, keepdim=True)
        todo = (finite & ~held)[:, 0].nonzero()[:, 0]
        nearest = rows.masked_fill(~finite, torch.nan)
        if len(todo):
            part = self.take(todo)
            found = part.nearest(rows.index_select(0, todo), part.shrinkage)
            with torch.no_grad():
                value = part.pulled_inward(rows.index_select(0, todo), found)
            nearest = nearest.index_copy(0, todo, attached(value, found))
        return nearest

    @property
    def shrinkage(self) -> float:
        return max(SHRINKAGE, 4 * self.grid.coarsest)

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        """Run Dykstra's algorithm; each sample stops when its increments have settled."""
        point = start = wide(rows)
        increments = [torch.zeros_like(point) for _ in self.constraints]
        done = torch.zeros_like(point[:, :1], dtype=torch.bool)
        accuracy = max(1e-3 * SHRINKAGE, 4 * torch.finfo(point.dtype).eps)
        reach = torch.as_tensor(self.reach(), dtype=point.dtype, device=point.device).reshape(-1, 1)
        for _ in range(SWEEPS):
            change = torch.zeros_like(done, dtype=point.dtype)
            for i, part in enumerate(self.constraints):
                shifted = point + increments[i]
                projected = part.nearest(shifted, shrink)
                increment = torch.where(done, increments[i], shifted - projected)
                point = torch.where(done, point, projected)
                change = torch.hypot(change, norms((increment - increments[i]).detach()))
                increments[i] = increment
            done = done | (change <= accuracy * torch.minimum(norms((point - start).detach()), reach))
            if bool(done.all()):
                break
        return point

    def pulled_inward(self, rows: Tensor, found: Tensor) -> Tensor:
        """Return points near ``found``, the nearest ones of slightly shrunk sets, that all parts accept."""
        shrink, value, held = self.shrinkage, rows, torch.zeros_like(rows[:, :1], dtype=torch.bool)
        while True:
            point = found.to(rows.dtype)
            for _ in range(20):
                held_now = self.holds(point)
                value, held = torch.where(held_now & ~held, point, value), held | held_now
                if bool(held.all()):
                    return value
                for part in self.constraints:
                    point = part.project(point)
            if shrink >= 0.5:
                break
            shrink = min(16 * shrink, 0.5)  # a set may have no interior, or x few digits
            found = self.nearest(rows, shrink)
        raise ValueError(
            f"{self!r} seems to be empty: no point satisfies all parts of it for {int((~held).sum())} of the samples. "
            "Enlarge a radius, or move a center."
        )


class Projection(Constraint):
    """All x that a function leaves in place.

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
            raise TypeError(f"function is a {type(function).__name__}; it must be callable, x -> x.")
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
        if not layout.fits(value, batch):
            shapes = [tuple(tensor.shape) for _, tensor in leaves(value, "projection(x)")]
            raise ValueError(f"{self!r} returns a value of shape {shapes}; it must be structured and shaped like x.")
        projected = layout.pack(value)
        if rows.requires_grad and torch.is_grad_enabled() and not projected.requires_grad:
            raise TypeError(
                f"{self!r} returns a tensor without a graph, so that the optimum cannot be differentiated: write it in "
                "differentiable operations, without detach(), no_grad() or numpy."
            )
        return projected if index is None else projected.index_select(0, index)

    def holds(self, rows: Tensor) -> Tensor:
        accuracy = max(SHRINKAGE, 4 * self.grid.coarsest)
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

"""The intersection of several constraints, and the nearest point of it.

Boxes and one ball have a common nearest point that is known up to one number, which Newton's method finds. Further
parts are added by Dykstra's algorithm: J. Boyle and R. Dykstra, "A method for finding projections onto the intersection
of convex sets in Hilbert spaces" (1986), stopped as in E. Birgin and M. Raydan, "Robust stopping criteria for
Dykstra's algorithm" (2005).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from equipoise.joint.constraints import Constraint, IntervalSet, L2Ball, Sphere, as_constraint
from equipoise.joint.rounding import Grid, attached, norms, wide

SHRINKAGE = 1e-6  # fraction by which sets are shrunk at first, where the nearest point is not exact
SWEEPS = 500  # limit on the sweeps of Dykstra's algorithm
POLISHING = 20  # rounds of projections onto single parts, after which sets are shrunk further


@dataclass
class Core:
    """All boxes and the first ball of an intersection, which are projected onto together."""

    lower: Tensor | None
    upper: Tensor | None
    ball: L2Ball | None

    @classmethod
    def of(cls, parts: Sequence[Constraint]) -> Self:
        boxes = [part for part in parts if isinstance(part, IntervalSet)]
        lower = functools.reduce(torch.maximum, [box.lower for box in boxes]) if boxes else None
        upper = functools.reduce(torch.minimum, [box.upper for box in boxes]) if boxes else None
        return cls(lower, upper, next((part for part in parts if isinstance(part, L2Ball)), None))

    def clamp(self, rows: Tensor) -> Tensor:
        return rows if self.lower is None else torch.clamp(rows, self.lower, self.upper)

    def nearest(self, rows: Tensor, shrink: float) -> Tensor:
        """Return c + s d, clamped, where d is the direction of a row from the center c, and s as large as allowed."""
        if self.ball is None:
            return self.clamp(rows)
        if self.lower is None:
            return self.ball.nearest(rows, shrink)
        center, offset, target = self.ball.middle, self.ball.offset(rows), self.ball.target(shrink)
        length = norms(offset)
        direction = offset / length.masked_fill(length == 0, 1.0)
        with torch.no_grad():
            size = found = self.largest(center, direction, length, target)
        for _ in range(2 if direction.requires_grad else 0):  # recorded: the derivatives of s up to the third
            distance, slope = self.distance(center, direction, size)
            size = torch.where(slope > 0, size + (target - distance) / slope.masked_fill(slope <= 0, 1.0), size)
        return self.clamp(center + torch.where(found < length, size, length) * direction)

    def distance(self, center: Tensor, direction: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Return ||clamp(c + s d) - c|| and its slope in s."""
        moved = center + size * direction
        point = self.clamp(moved)
        distance = norms(point - center)
        along = ((point - center) * direction * (point == moved)).sum(dim=1, keepdim=True)
        return distance, along / distance.clamp(min=torch.finfo(distance.dtype).tiny)

    def largest(self, center: Tensor, direction: Tensor, length: Tensor, target: Tensor) -> Tensor:
        """Return the largest s <= length whose distance is at most ``target``."""
        low, high, size, eps = torch.zeros_like(length), length, length, torch.finfo(length.dtype).eps
        done = torch.zeros_like(length, dtype=torch.bool)
        for _ in range(200):  # Newton's method, and bisection where that leaves the bracket
            distance, slope = self.distance(center, direction, size)
            beyond = distance > target
            low, high = torch.where(beyond, low, size), torch.where(beyond, size, high)
            done = done | ((distance - target).abs() <= 4 * eps * target) | (high - low <= eps * high)
            if bool(done.all()):
                break
            newton = size + (target - distance) / slope
            between = (newton > low) & (newton < high)  # False for NaN
            size = torch.where(done, size, torch.where(between, newton, (low + high) / 2))
        return size


class Intersection(Constraint):
    """All x that satisfy several constraints.

    The projection onto boxes and one ball is exact. Further balls and functions require Dykstra's algorithm, which runs
    to a relative accuracy of about 1e-6 on sets shrunk by that fraction, so that the rounded point is in all of them.
    The number of sweeps grows with the distance from the sets; after 500 sweeps the point is allowed, but it may not be
    the nearest. Functions are satisfied only to an accuracy of 1e-6.

    Args:
        constraints: convex constraints, or functions that project; a :class:`Sphere` is not convex.

    Example:
        >>> eq.Intersection(eq.L2Ball(1.0), eq.Box(-image, 1 - image))
    """

    core: Core
    others: list[Constraint]  # parts that are not in the core

    def __init__(self, *constraints: Any):
        found = [as_constraint(constraint) for constraint in constraints]
        parts = [part for one in found if one for part in getattr(one, "constraints", [one])]
        if not parts:
            raise ValueError("Intersection() has no constraints; pass one or more, or constraint=None for none.")
        if any(isinstance(part, Sphere) for part in parts):
            raise ValueError("Intersection contains a Sphere, which is not convex; use a Sphere alone, or an L2Ball.")
        self.constraints: tuple[Constraint, ...] = tuple(parts)

    def __repr__(self) -> str:
        return f"Intersection({', '.join(map(repr, self.constraints))})"

    def fit(self, grid: Grid) -> dict[str, Any]:
        return self.sorted([part.fitted(grid.layout, grid.batch, grid.device) for part in self.constraints])

    def take(self, rows: Tensor) -> Self:
        return self.replaced(**self.sorted([part.take(rows) for part in self.constraints]))

    def sorted(self, parts: Sequence[Constraint]) -> dict[str, Any]:
        core = Core.of(parts)
        others = [part for part in parts if part is not core.ball and not isinstance(part, IntervalSet)]
        return {"constraints": tuple(parts), "core": core, "others": others}

    def sources(self, rows: Tensor) -> list[Tensor]:
        return [tensor for part in self.constraints for tensor in part.sources(rows)]

    def reach(self) -> Tensor | float:
        reaches = [torch.as_tensor(part.reach(), dtype=self.grid.dtype).reshape(-1) for part in self.constraints]
        device = next((reach.device for reach in reaches if len(reach) > 1), reaches[0].device)
        return functools.reduce(torch.minimum, [reach.to(device) for reach in reaches])

    def holds(self, rows: Tensor) -> Tensor:
        return torch.stack([part.holds(rows).all(dim=1, keepdim=True) for part in self.constraints]).all(dim=0)

    def project(self, rows: Tensor) -> Tensor:
        held = self.holds(rows.detach())
        if bool(held.all()):
            return rows
        finite = rows.isfinite().all(dim=1, keepdim=True)
        outside = (finite & ~held)[:, 0].nonzero()[:, 0]
        rows = rows.masked_fill(~finite, torch.nan)
        if not len(outside):
            return rows
        narrow, given = self.take(outside), rows.index_select(0, outside)
        nearest = narrow.nearest(given, narrow.shrinkage)
        value = narrow.pulled_inward(given.detach(), nearest.detach())
        return rows.index_copy(0, outside, attached(value, nearest))

    @property
    def shrinkage(self) -> float:
        return max(SHRINKAGE, 4 * self.grid.coarsest) if self.others else 0.0

    def nearest(self, rows: Tensor, shrink: float = 0.0) -> Tensor:
        start = point = wide(rows)
        if not self.others:
            return self.core.nearest(start, shrink)
        parts = [self.core, *self.others]
        increments = [torch.zeros_like(start) for _ in parts]
        done = torch.zeros_like(start[:, :1], dtype=torch.bool)
        accuracy = max(1e-3 * SHRINKAGE, 4 * torch.finfo(start.dtype).eps)
        reach = torch.as_tensor(self.reach()).to(start).reshape(-1, 1)
        for _ in range(SWEEPS):
            change = torch.zeros_like(start[:, :1])
            for i, part in enumerate(parts):
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
        """Return points near ``found`` that all parts accept, if need be from sets that are shrunk further."""
        shrink, value, held = self.shrinkage, rows, torch.zeros_like(rows[:, :1], dtype=torch.bool)
        while True:
            point = self.grid.rounded(found)
            for _ in range(POLISHING):
                accepted = self.holds(point)
                value, held = torch.where(accepted & ~held, point, value), held | accepted
                if bool(held.all()):
                    return value
                for part in self.constraints:
                    point = part.project(point)
            if shrink >= 0.5:
                break
            shrink = min(max(64 * shrink, SHRINKAGE, 4 * self.grid.coarsest), 0.5)
            found = self.nearest(rows, shrink)
        raise ValueError(
            f"{self!r} seems to be empty: no point in all of its parts was found for {int((~held).sum())} samples. "
            "Enlarge a radius or widen a bound."
        )

"""Safeguarded Anderson acceleration of a contraction: a point is kept only if its gap decreases.

The safeguard follows A. Zhang, B. O'Donoghue, S. Boyd, "Globally convergent type-I Anderson acceleration for nonsmooth
fixed-point iterations" (2020); differences are combined as in :class:`~equipoise.solvers.anderson.Anderson` of type II.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise.problem.layout import row_norms, select
from equipoise.solvers.base import extrapolation_weights

ENOUGH = 0.99  # an accelerated point is kept if its gap is below this fraction of the last one kept


@dataclass
class Acceleration:
    """The last point kept of u -> T(u), per sample, and the differences between points kept."""

    u: Tensor
    image: Tensor
    size: Tensor  # ||T(u) - u||, infinite before the first point
    plain: Tensor  # whether the point about to be evaluated is a plain step, which is always kept
    moves: list[Tensor]  # du + dgap, the newest last
    gaps: list[Tensor]  # dgap
    memory: int

    @classmethod
    def start(cls, u: Tensor, memory: int) -> Self:
        infinite = u.new_full((len(u),), torch.inf)
        return cls(u, u, infinite, torch.ones_like(infinite, dtype=torch.bool), [], [], memory)

    def next(self, u: Tensor, image: Tensor) -> Tensor:
        """Enter T(u) = image and return the next point to evaluate."""
        gap = image - u
        size = row_norms(gap)
        first = torch.isinf(self.size)
        keep = self.plain | (size <= ENOUGH * self.size)
        new, where = (keep & ~first)[:, None], keep[:, None]
        dgap = gap - (self.image - self.u)
        self.moves.append(torch.where(new, image - self.image, 0.0))
        self.gaps.append(torch.where(new, dgap, 0.0))  # a zero difference has no effect
        del self.moves[: -self.memory], self.gaps[: -self.memory]
        self.u, self.image = torch.where(where, u, self.u), torch.where(where, image, self.image)
        self.size = torch.where(keep, size, self.size)
        self.plain = ~keep  # a rejected point is followed by the plain step from the last one kept
        gram = torch.stack([torch.stack([(a * b).sum(dim=1) for b in self.gaps], 1) for a in self.gaps], 1)
        current = self.image - self.u
        right = torch.stack([(a * current).sum(dim=1) for a in self.gaps], 1)
        weights = extrapolation_weights(gram, right, None) * keep[:, None]
        point = self.image.clone()
        for j, move in enumerate(self.moves):
            point -= weights[:, j : j + 1] * move
        return torch.where(torch.isfinite(point).all(dim=1, keepdim=True), point, self.image)

    def take(self, rows: Tensor) -> Self:
        return dataclasses.replace(
            self,
            **{name: select(getattr(self, name), rows) for name in ("u", "image", "size", "plain")},
            moves=[select(move, rows) for move in self.moves],
            gaps=[select(gap, rows) for gap in self.gaps],
        )

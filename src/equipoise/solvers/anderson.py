"""Anderson acceleration: the best step within the span of the last few.

D. G. Anderson, "Iterative procedures for nonlinear integral equations" (1965); types I and II as in H. Fang and
Y. Saad, "Two classes of multisecant methods for nonlinear acceleration" (2009).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import Problem
from equipoise.solvers.base import GapState, Solver


@dataclass
class AndersonState(GapState):
    """Adds ring buffers of differences between successive iterates, and their Gram matrix."""

    left: Tensor  # (batch, memory + 2, n): differences of gaps (type II) or iterates (type I); the last two gaps
    moves: Tensor  # (batch, memory, n): dz + mixing * dgap, by which the next iterate is corrected
    gram: Tensor  # (batch, memory, memory): left_i . dgap_j
    seen: int  # number of differences so far

    def take(self, rows: Tensor) -> Self:
        taken = super().take(rows)
        taken.gap = taken.left[:, gap_slot(taken.left, taken.seen)]  # the gap is a view of the ring
        return taken


def gap_slot(left: Tensor, seen: int) -> int:
    """Return the slot of the current gap: one of the last two in turn, so that its predecessor is kept."""
    return left.shape[1] - 2 + seen % 2


@options
class Anderson(Solver):
    """Anderson acceleration, per sample.

    With the differences dz_j, dg_j of iterates and gaps g = f(z) - z over the last ``memory`` steps, the next iterate
    is z + mixing g - sum_j gamma_j (dz_j + mixing dg_j), where gamma minimises ||g - sum_j gamma_j dg_j|| (type II) or
    makes that vector orthogonal to every dz_j (type I).

    Args:
        memory: number of differences kept; without any, the method is :class:`Picard`.
        kind: type, 2 or 1. Type I is the multisecant form of Broyden's good method.
        ridge: regularisation of the Gram matrix scaled to unit diagonal; None is a hundred rounding units, about the
            error of its entries.
        mixing: fraction of the remaining gap that is added to the extrapolated iterate.
        restart: factor of growth of its residual at which a sample's history is dropped; None never drops it.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.Anderson(memory=6))
    """

    memory: int = option(default=5, at_least=1, whole=True)
    kind: int = option(default=2, among=(1, 2))
    ridge: float | None = option(default=None, at_least=0.0, optional=True)
    mixing: float = option(default=1.0, above=0.0, at_most=2.0)
    restart: float | None = option(default=None, at_least=1.0, optional=True)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> AndersonState:
        batch, n = z.shape
        left = z.new_empty(batch, self.memory + 2, n)
        moves = z.new_empty(batch, self.memory, n)
        gram = z.new_zeros(batch, self.memory, self.memory)
        gap = left[:, gap_slot(left, 0)]
        torch.sub(image, z, out=gap)
        return AndersonState(z, image, gap, left, moves, gram, seen=0)

    def step(self, problem: Problem, state: AndersonState) -> AndersonState:
        z = self.extrapolate(state) if state.seen else torch.lerp(state.z, state.image, self.mixing)
        image = problem(z)
        left, moves, gram, seen = state.left, state.moves, state.gram, state.seen + 1
        slot = state.seen % self.memory
        gap = left[:, gap_slot(left, seen)]
        torch.sub(image, z, out=gap)
        if self.restart is not None:
            grew = (row_norms(gap) > self.restart * row_norms(state.gap))[:, None, None]
            gram = gram.masked_fill(grew, 0.0)
            left[:, : self.memory].masked_fill_(grew, 0.0)  # a zero difference has no effect
        torch.sub(image, state.image, out=moves[:, slot])
        if self.mixing != 1.0:
            moves[:, slot].add_(gap - state.gap, alpha=self.mixing - 1)
        if self.kind == 2:
            torch.sub(gap, state.gap, out=left[:, slot])
        else:
            torch.sub(z, state.z, out=left[:, slot])
        return AndersonState(z, image, gap, left, moves, gram, seen)

    def extrapolate(self, state: AndersonState) -> Tensor:
        """Return the next iterate, after entering the newest difference in the Gram matrix."""
        filled = min(state.seen, self.memory)
        new, current = (state.seen - 1) % self.memory, gap_slot(state.left, state.seen)
        left, moves, gram = state.left[:, :filled], state.moves[:, :filled], state.gram
        pair = state.left[:, new : current + 1 : current - new]  # the newest difference and the gap, without a copy
        products = torch.bmm(pair, left.mT)
        right = products[:, 1]
        if self.kind == 2:
            gram[:, new, :filled] = gram[:, :filled, new] = products[:, 0]
        else:
            dgap = (moves[:, new] - left[:, new]) / self.mixing
            gram[:, new, :filled] = ((left[:, new, None] @ moves.mT)[:, 0] - products[:, 0]) / self.mixing
            gram[:, :filled, new] = (dgap[:, None] @ left.mT)[:, 0]
        gamma = self.weights(gram[:, :filled, :filled], right)[:, None]
        base = state.image if self.mixing == 1.0 else torch.add(state.z, state.gap, alpha=self.mixing)
        return torch.baddbmm(base[:, None], gamma, moves, alpha=-1)[:, 0]

    def weights(self, gram: Tensor, right: Tensor) -> Tensor:
        """Return gamma, with zeros (the plain step) where the system is singular."""
        ridge = 100 * torch.finfo(gram.dtype).eps if self.ridge is None else self.ridge
        system = gram.clone()
        diagonal = system.diagonal(dim1=1, dim2=2)
        # A ridge on the matrix scaled to unit diagonal multiplies the diagonal. A zero difference has no effect.
        diagonal.mul_(1 + ridge).add_(diagonal == 0)
        solution, failed = torch.linalg.solve_ex(system, right[:, :, None])
        return solution[:, :, 0].masked_fill_((failed != 0)[:, None], 0.0)

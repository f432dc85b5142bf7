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
from equipoise.solvers import fused
from equipoise.solvers.base import GapState, Solver, extrapolation_weights


@dataclass
class AndersonState(GapState):
    """Adds ring buffers of differences between successive iterates, and their Gram matrix.

    With a full history and a step that is not compiled, the ring ``left`` holds the last two gaps as well.
    """

    left: Tensor  # (batch, memory [+ 2], n): differences of gaps (type II) or iterates (type I) [the last two gaps]
    moves: Tensor  # (batch, memory, n): dz + mixing * dgap, by which the next iterate is corrected
    gram: Tensor  # (batch, memory, memory): left_i . dgap_j
    seen: int  # number of differences so far

    @property
    def has_gaps(self) -> bool:
        return self.left.shape[1] > self.moves.shape[1]

    def take(self, rows: Tensor) -> Self:
        taken = super().take(rows)
        if self.has_gaps:
            taken.gap = taken.left[:, gap_slot(taken.left, taken.seen)]  # the gap is a view of the ring
        return taken

    def history(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.left, self.moves, torch.full((1,), slot, device=self.z.device)

    def widened(self, rows: slice, filled: int) -> "AndersonState":
        """Return the state of some samples with ``filled`` differences in full precision and the gap in the ring."""
        z, image, gap, moves = self.z[rows], self.image[rows], self.gap[rows], self.moves[rows, :filled]
        left = gap.new_empty(len(gap), filled + 2, gap.shape[1])
        left[:, :filled] = self.left[rows, :filled]
        left[:, gap_slot(left, self.seen)] = gap
        return AndersonState(z, image, gap, left, moves.to(gap.dtype), self.gram[rows], self.seen)


WIDENED = 2**16  # numbers of a state that are widened together even if memory would be saved by widening fewer


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
        history: precision of the stored differences: "full", or "bfloat16", which halves the memory of float32 states.
            Sums are computed in full precision either way.
        compile: whether to compile the step (not f) with ``torch.compile``; where that fails, a warning says why and
            the step is taken uncompiled.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.Anderson(memory=6))
    """

    memory: int = option(default=5, at_least=1, whole=True)
    kind: int = option(default=2, among=(1, 2))
    ridge: float | None = option(default=None, at_least=0.0, optional=True)
    mixing: float = option(default=1.0, above=0.0, at_most=2.0)
    restart: float | None = option(default=None, at_least=1.0, optional=True)
    history: str = option(default="full", among=("full", "bfloat16"))
    compile: bool = option(default=False, kind=bool)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> AndersonState:
        batch, n = z.shape
        gram = z.new_zeros(batch, self.memory, self.memory)
        if self.history != "full" or self.compiles():
            kind = z.dtype if self.history == "full" else torch.bfloat16
            left, moves = (z.new_zeros(batch, self.memory, n, dtype=kind) for _ in range(2))
            return AndersonState(z, image, image - z, left, moves, gram, seen=0)
        left = z.new_empty(batch, self.memory + 2, n)
        moves = z.new_empty(batch, self.memory, n)
        gap = left[:, gap_slot(left, 0)]
        torch.sub(image, z, out=gap)
        return AndersonState(z, image, gap, left, moves, gram, seen=0)

    def compiles(self) -> bool:
        return self.compile and not fused.failures and not torch.compiler.is_compiling()

    def step(self, problem: Problem, state: AndersonState) -> AndersonState:
        z = self.extrapolate(state) if state.seen else torch.lerp(state.z, state.image, self.mixing)
        image = problem(z)
        left, moves, gram, seen = state.left, state.moves, state.gram, state.seen + 1
        slot = state.seen % self.memory
        gap = self.enter(state, z, image, slot)
        if self.restart is not None:
            grew = (row_norms(gap) > self.restart * row_norms(state.gap))[:, None, None]
            gram = gram.masked_fill(grew, 0.0)
            for others in (left[:, :slot], left[:, slot + 1 : self.memory]):
                others.masked_fill_(grew, 0.0)  # a zero difference has no effect
        return AndersonState(z, image, gap, left, moves, gram, seen)

    def enter(self, state: AndersonState, z: Tensor, image: Tensor, slot: int) -> Tensor:
        """Write the newest differences into ``slot`` of the rings, and return the gap."""
        if not state.has_gaps:
            vectors = (z, image, state.z, state.image, state.gap)
            given = (state.history(slot), vectors, self.kind, self.mixing)
            gap = fused.attempt(fused.enter, *given) if self.compiles() else None
            return fused.enter(*given) if gap is None else gap
        left, moves = state.left[:, slot], state.moves[:, slot]
        gap = state.left[:, gap_slot(state.left, state.seen + 1)]
        torch.sub(image, z, out=gap)
        torch.sub(image, state.image, out=moves)
        if self.mixing != 1.0:
            moves.add_(gap - state.gap, alpha=self.mixing - 1)
        if self.kind == 2:
            torch.sub(gap, state.gap, out=left)
        else:
            torch.sub(z, state.z, out=left)
        return gap

    def extrapolate(self, state: AndersonState) -> Tensor:
        """Return the next iterate, after entering the newest difference in the Gram matrix."""
        filled, new = min(state.seen, self.memory), (state.seen - 1) % self.memory
        if not state.has_gaps:
            if self.compiles():
                vectors, options = (state.z, state.image, state.gap, state.gram), (self.kind, self.mixing, self.ridge)
                if (z := fused.attempt(fused.extrapolate, state.history(new), vectors, *options)) is not None:
                    return z
            # A few samples at a time, so that the widened differences take about the memory of one state.
            batch, n = state.z.shape
            few = max(1, batch // (2 * filled + 2), WIDENED // max(n, 1))
            starts = range(0, max(batch, 1), few)
            return torch.cat([self.extrapolate(state.widened(slice(i, i + few), filled)) for i in starts])
        current = gap_slot(state.left, state.seen)
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
        gamma = extrapolation_weights(gram[:, :filled, :filled], right, self.ridge)[:, None]
        base = state.image if self.mixing == 1.0 else torch.add(state.z, state.gap, alpha=self.mixing)
        return torch.baddbmm(base[:, None], gamma, moves, alpha=-1)[:, 0]

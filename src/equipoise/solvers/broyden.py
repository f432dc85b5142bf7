"""Limited-memory Broyden's "good" method on g(z) = f(z) - z.

C. G. Broyden, "A class of methods for solving nonlinear simultaneous equations" (1965); its memory is limited
as in S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020), appendix B, or by restarts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import Problem
from equipoise.solvers.base import GapState, Solver, backtrack


@dataclass
class BroydenState(GapState):
    """Adds the inverse Jacobian estimate H = -I + sum_k inverse_k left_k right_k^T and its product with the gap."""

    left: Tensor  # (batch, memory, n), one contiguous slot per update and sample
    right: Tensor
    inverse: Tensor  # (batch, memory)
    weights: Tensor  # (batch, k): inverse_k right_k . gap, so that H gap = -gap + sum_k weights_k left_k
    direction: Tensor  # -H gap
    seen: int  # number of updates so far


@options
class Broyden(Solver):
    """Quasi-Newton steps z <- z - H g(z) with rank-one updates of H, which starts as -I: the plain step.

    Args:
        memory: number of updates kept.
        when_full: "restart" drops all updates and continues from -I; "drop" overwrites the oldest, as in the MDEQ
            paper. An update is relative to those before it, so dropping one can leave an estimate that fits no secant:
            measured, restarting converges where dropping diverges.
        line_search: number of times a step may be halved while it increases the residual; 0 takes every step.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.Broyden(memory=20))
    """

    memory: int = option(default=10, at_least=1, whole=True)
    when_full: str = option(default="restart", among=("restart", "drop"))
    line_search: int = option(default=0, at_least=0, whole=True)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> BroydenState:
        batch, n = z.shape
        left, right = z.new_empty(batch, self.memory, n), z.new_empty(batch, self.memory, n)
        inverse, gap = z.new_zeros(batch, self.memory), image - z
        return BroydenState(z, image, gap, left, right, inverse, inverse, gap, seen=0)

    def step(self, problem: Problem, state: BroydenState) -> BroydenState:
        z, image, gap = backtrack(problem, state, state.direction, self.line_search)
        moved = z - state.z if self.line_search else state.direction
        slot, filled = state.seen % self.memory, self.filled(state)
        left, right, inverse = state.left[:, :filled], state.right[:, :filled], state.inverse
        before = state.direction  # -H g_old, without the updates that are about to be overwritten
        if self.when_full == "restart" and slot == 0:
            before = state.gap
        elif filled == self.memory:
            before = torch.addcmul(before, left[:, slot], state.weights[:, slot, None])
            inverse[:, slot] = 0.0

        overlap = torch.bmm(moved[:, None], left.mT) * inverse[:, None, :filled]
        state.right[:, slot] = torch.baddbmm(moved[:, None], overlap, right, beta=-1)[:, 0]  # H^T s
        along = torch.bmm(gap[:, None], state.right[:, : max(filled, slot + 1)].mT)[:, 0]
        weights = along * inverse[:, : along.shape[1]]
        after = torch.baddbmm(gap[:, None], weights[:, None, :filled], left, alpha=-1)[:, 0]  # -H g_new

        # s^T H y and s - H y, where y = g_new - g_old, and H g_old = -s unless the step was halved or H changed.
        size = row_norms(moved).square_() if moved is before else (moved * before).sum(dim=1)
        scale = along[:, slot] + size
        update = after if moved is before else after + (moved - before)
        informed = scale.abs() > 10 * torch.finfo(scale.dtype).eps * size.abs()
        inverse[:, slot] = torch.where(informed, 1 / scale, 0.0)  # a step without information leaves H unchanged
        weights[:, slot] = along[:, slot] * inverse[:, slot]
        state.left[:, slot] = update
        direction = torch.addcmul(after, update, weights[:, slot, None], value=-1)
        return BroydenState(z, image, gap, state.left, state.right, inverse, weights, direction, state.seen + 1)

    def filled(self, state: BroydenState, *, after: bool = False) -> int:
        """Return the number of updates in H: those the next step starts from, or those ``after`` the last step."""
        if self.when_full == "drop":
            return min(state.seen, self.memory)
        used = state.seen % self.memory
        return self.memory if after and state.seen and not used else used

    def adjoint_estimate(self, state: BroydenState, cotangent: Tensor) -> Tensor:
        """Return -H^T v, an estimate of (I - J^T)^-1 v from the forward pass (SHINE, Z. Ramzi et al. 2022, eq. 4)."""
        filled = self.filled(state, after=True)
        left, right = state.left[:, :filled], state.right[:, :filled]
        overlap = torch.bmm(cotangent[:, None], left.mT) * state.inverse[:, None, :filled]
        return torch.baddbmm(cotangent[:, None], overlap, right, alpha=-1)[:, 0]

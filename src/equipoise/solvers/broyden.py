"""Limited-memory Broyden's "good" method on g(z) = f(z) - z.

C. G. Broyden, "A class of methods for solving nonlinear simultaneous equations" (1965); its memory is limited
as in S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020), appendix B, or by restarts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.problem import Problem
from equipoise.solvers.base import GapState, Solver, backtrack


@dataclass
class BroydenState(GapState):
    """Adds the inverse Jacobian estimate H = -I + sum_k left_k right_k^T and its product with the gap."""

    left: Tensor  # (batch, memory, n), one contiguous slot per update and sample
    right: Tensor
    weights: Tensor  # (batch, memory): right_k . gap, so that H gap = -gap + sum_k weights_k left_k
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
        ring = z.new_empty(2, batch, self.memory, n)
        gap = image - z
        return BroydenState(z, image, gap, ring[0], ring[1], z.new_zeros(batch, self.memory), gap, seen=0)

    def step(self, problem: Problem, state: BroydenState) -> BroydenState:
        z, image, gap = backtrack(problem, state, state.direction, self.line_search)
        slot, filled = state.seen % self.memory, self.filled(state)
        left, right, weights = state.left[:, :filled], state.right[:, :filled], state.weights
        moved = z - state.z

        before = state.direction  # -H g_old, then without the updates that are about to be overwritten
        if self.when_full == "restart" and slot == 0:
            before = state.gap
        elif filled == self.memory:
            before = torch.addcmul(before, left[:, slot], weights[:, slot, None])
            left[:, slot].zero_()
            right[:, slot].zero_()
        direction = gap  # -H g_new
        turned = moved  # -H^T s
        weights = weights.clone()
        if filled:
            along = (gap[:, None] @ right.mT)[:, 0]
            weights[:, :filled] = along
            direction = torch.baddbmm(gap[:, None], along[:, None], left, alpha=-1)[:, 0]
            turned = torch.baddbmm(moved[:, None], moved[:, None] @ left.mT, right, alpha=-1)[:, 0]

        scale = (turned * (gap - state.gap)).sum(dim=1, keepdim=True)  # -s^T H y
        inverse = torch.where(scale == 0, 0.0, 1 / scale)  # a step without information leaves H unchanged
        update = torch.sub(direction, before).add_(moved)
        update = torch.mul(update, inverse, out=state.left[:, slot])
        state.right[:, slot] = turned
        weight = (turned * gap).sum(dim=1, keepdim=True)
        weights[:, slot] = weight[:, 0]
        direction = torch.addcmul(direction, update, weight, value=-1)
        return BroydenState(z, image, gap, state.left, state.right, weights, direction, state.seen + 1)

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
        return torch.baddbmm(cotangent[:, None], cotangent[:, None] @ left.mT, right, alpha=-1)[:, 0]

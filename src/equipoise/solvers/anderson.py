"""Anderson acceleration: the best step within the span of the last few.

D. G. Anderson, "Iterative procedures for nonlinear integral equations" (1965); types I and II as in H. Fang and
Y. Saad, "Two classes of multisecant methods for nonlinear acceleration" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.problem import Problem
from equipoise.solvers.base import Solver, State, evaluated
from equipoise.tolerance import row_norms
from equipoise.validation import options, require


@dataclass
class AndersonState(State):
    """Adds the rings of differences between successive iterates, one slot each, and their Gram matrix."""

    left: Tensor  # (batch, memory, n): differences of gaps (type II) or of iterates (type I)
    images: Tensor  # (batch, memory, n): differences of images
    gram: Tensor  # (batch, memory, memory): left_i . dgap_j
    seen: int  # differences entered so far


@options
class Anderson(Solver):
    """Anderson acceleration, per sample.

    With the differences dz_j, df_j, dg_j of iterates, images and gaps g = f(z) - z over the last ``memory`` steps, the
    next iterate is f(z) - sum_j gamma_j df_j, where gamma minimises ||g - sum_j gamma_j dg_j|| (type II) or makes that
    vector orthogonal to every dz_j (type I).

    Args:
        memory: differences kept; a plain step is memory 0, which is :class:`Picard`.
        kind: 2 or 1, the type. Type I is the multisecant form of Broyden's good method.
        ridge: added to the Gram matrix after its columns are scaled to unit length, so relative to its scale;
            None is ten times the rounding unit of the state.
        mixing: the part of the remaining gap that is added to the extrapolated iterate; 1 goes all the way to f.
        restart: forget a sample's history when its residual grows by more than this factor; None never does.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.Anderson(memory=6))
    """

    memory: int = 5
    kind: int = 2
    ridge: float | None = None
    mixing: float = 1.0
    restart: float | None = None

    def __post_init__(self) -> None:
        require(self, "memory", at_least=1, whole=True)
        require(self, "kind", among=(1, 2))
        require(self, "ridge", at_least=0.0, optional=True)
        require(self, "mixing", above=0.0, at_most=1.0)
        require(self, "restart", at_least=1.0, optional=True)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> AndersonState:
        batch, n = z.shape
        ring = z.new_zeros(2, batch, self.memory, n)
        gram = z.new_zeros(batch, self.memory, self.memory)
        return AndersonState(z, image, image - z, ring[0], ring[1], gram, seen=0)

    def step(self, problem: Problem, state: AndersonState) -> AndersonState:
        z = self.extrapolate(state) if state.seen else torch.lerp(state.z, state.image, self.mixing)
        z, image, gap = evaluated(problem, z)
        slot = state.seen % self.memory
        torch.sub(image, state.image, out=state.images[:, slot])
        if self.kind == 2:
            torch.sub(gap, state.gap, out=state.left[:, slot])
        else:
            torch.sub(z, state.z, out=state.left[:, slot])
        gram = state.gram
        if self.restart is not None:
            grew = row_norms(gap) > self.restart * row_norms(state.gap)
            gram = torch.where(grew[:, None, None], 0.0, gram)  # a difference of length 0 takes no part
        return AndersonState(z, image, gap, state.left, state.images, gram, state.seen + 1)

    def extrapolate(self, state: AndersonState) -> Tensor:
        """The next iterate; the newest difference still has to enter the Gram matrix."""
        filled = min(state.seen, self.memory)
        new = (state.seen - 1) % self.memory
        left, images, gram = state.left[:, :filled], state.images[:, :filled], state.gram
        if self.kind == 2:
            both = torch.stack([left[:, new], state.gap], dim=1) @ left.mT
            gram[:, new, :filled] = gram[:, :filled, new] = both[:, 0]
            right = both[:, 1]
        else:
            dgap = images[:, new] - left[:, new]
            both = torch.stack([dgap, state.gap, left[:, new]], dim=1) @ left.mT
            gram[:, new, :filled] = (left[:, new, None] @ images.mT)[:, 0] - both[:, 2]
            gram[:, :filled, new] = both[:, 0]
            right = both[:, 1]
        gamma = self.weights(gram[:, :filled, :filled], right)[:, None]
        z = torch.baddbmm(state.image[:, None], gamma, images, alpha=-1)[:, 0]
        if self.mixing != 1.0:
            differences = left if self.kind == 2 else images - left
            remaining = torch.baddbmm(state.gap[:, None], gamma, differences, alpha=-1)[:, 0]
            z = z - (1 - self.mixing) * remaining
        return z

    def weights(self, gram: Tensor, right: Tensor) -> Tensor:
        """gamma, with zeros (the plain step) where the system is singular."""
        size = gram.diagonal(dim1=1, dim2=2)
        scale = torch.where(size == 0, 0.0, size.abs().rsqrt())
        ridge = 10 * torch.finfo(gram.dtype).eps if self.ridge is None else self.ridge
        system = scale[:, :, None] * gram * scale[:, None, :]
        system.diagonal(dim1=1, dim2=2).add_(ridge * torch.where(size < 0, -1.0, 1.0))
        gamma, info = torch.linalg.solve_ex(system, (scale * right)[:, :, None])
        gamma = scale * gamma[:, :, 0]
        usable = (info == 0) & torch.isfinite(gamma).all(dim=1)
        return torch.where(usable[:, None], gamma, 0.0)

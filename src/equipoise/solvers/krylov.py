"""Krylov solvers for affine problems u = A u + b: the adjoint system of the backward pass, Newton's inner system.

Y. Saad and M. Schultz, "GMRES" (1986), in the residual-minimising form of S. Eisenstat, H. Elman and M. Schultz,
"Variational iterative methods for nonsymmetric systems of linear equations" (1983);
H. van der Vorst, "Bi-CGSTAB" (1992).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import Problem
from equipoise.solvers.base import GapState, Solver


def require_affine(solver: Solver, problem: Problem) -> None:
    if not problem.affine:
        name = type(solver).__name__
        raise TypeError(
            f"{name} solves affine problems, and f is not known to be one. Use it for the backward pass, "
            f"ImplicitGradient(solver={name}()), use NewtonKrylov for the forward pass, or, if f is affine in z, "
            "set f.affine = True."
        )


@dataclass
class GMRESState(GapState):
    """Adds conjugate directions p_k with orthonormal images q_k = (I - A) p_k."""

    directions: Tensor  # (batch, memory, n)
    products: Tensor  # (batch, memory, n)
    next: Tensor  # the vector that extends the Krylov space
    seen: int


@options
class GMRES(Solver):
    """The iterate of least residual in the Krylov space, one product with A per step.

    In exact arithmetic the iterates are those of GMRES until ``memory`` is full; then the oldest direction is dropped.
    The residual is updated by its recurrence and measured at the end.

    Args:
        memory: number of directions kept.

    Example:
        >>> eq.ImplicitGradient(solver=eq.GMRES(memory=20))
    """

    recurrent = True
    memory: int = option(default=20, at_least=1, whole=True)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> GMRESState:
        require_affine(self, problem)
        batch, n = z.shape
        ring = z.new_empty(2, batch, self.memory, n)
        gap = image - z
        return GMRESState(z, image, gap, ring[0], ring[1], gap, seen=0)

    def step(self, problem: Problem, state: GMRESState) -> GMRESState:
        slot, filled = state.seen % self.memory, min(state.seen, self.memory)
        p = state.next
        q = p - problem.product(p)
        before = row_norms(q)
        for _ in range(2 if filled else 0):  # twice, since rounding spoils a single pass
            overlap = q[:, None] @ state.products[:, :filled].mT
            q = torch.baddbmm(q[:, None], overlap, state.products[:, :filled], alpha=-1)[:, 0]
            p = torch.baddbmm(p[:, None], overlap, state.directions[:, :filled], alpha=-1)[:, 0]
        size = row_norms(q)
        # A direction already in the space is noise after orthogonalisation, and is dropped.
        keep = size > 10 * torch.finfo(q.dtype).eps * before
        inverse = torch.where(keep, 1 / size, 0.0)[:, None]
        p, q = p * inverse, q * inverse
        state.directions[:, slot], state.products[:, slot] = p, q
        length = (q * state.gap).sum(dim=1, keepdim=True)
        z, gap = torch.addcmul(state.z, length, p), torch.addcmul(state.gap, length, q, value=-1)
        # A residual that hardly moved would give the same direction again: continue with the Krylov vector.
        stuck = (length.abs() < 1e-3 * row_norms(state.gap)[:, None]) & keep[:, None]
        return GMRESState(z, z + gap, gap, state.directions, state.products, torch.where(stuck, q, gap), state.seen + 1)


@dataclass
class BiCGStabState(GapState):
    """Adds the shadow residual and the search direction."""

    shadow: Tensor
    direction: Tensor
    rho: Tensor  # shadow . gap


@options
class BiCGStab(Solver):
    """Short recurrences: no stored directions, two products with A per step, residuals not minimal.

    Example:
        >>> eq.ImplicitGradient(solver=eq.BiCGStab())
    """

    recurrent = True

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> BiCGStabState:
        require_affine(self, problem)
        gap = image - z
        return BiCGStabState(z, image, gap, gap, gap, dot(gap, gap))

    def step(self, problem: Problem, state: BiCGStabState) -> BiCGStabState:
        v = state.direction - problem.product(state.direction)
        alpha = safe_ratio(state.rho, dot(state.shadow, v))
        s = state.gap - alpha * v
        t = s - problem.product(s)
        omega = safe_ratio(dot(t, s), dot(t, t))
        z = state.z + alpha * state.direction + omega * s
        gap = s - omega * t
        rho = dot(state.shadow, gap)
        beta = safe_ratio(rho, state.rho) * safe_ratio(alpha, omega)
        direction = gap + beta * (state.direction - omega * v)
        # A shadow that is orthogonal to the residual restarts the recurrence.
        lost = rho.abs() <= 1e-6 * row_norms(state.shadow)[:, None] * row_norms(gap)[:, None]
        shadow, direction = torch.where(lost, gap, state.shadow), torch.where(lost, gap, direction)
        return BiCGStabState(z, z + gap, gap, shadow, direction, torch.where(lost, dot(gap, gap), rho))


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, 0.0, numerator / denominator)

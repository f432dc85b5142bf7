"""MINRES, the Krylov solver for symmetric systems, such as the derivative of a joint optimum.

C. Paige and M. Saunders, "Solution of sparse indefinite systems of linear equations" (1975).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise.options import options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import Problem
from equipoise.solvers.base import GapState, Solver
from equipoise.solvers.krylov import dot, require_affine, safe_ratio


@dataclass
class MINRESState(GapState):
    """Adds the Lanczos vectors, the directions of the iterates, and the last rotations; scalars are (batch, 1)."""

    v: Tensor
    last_v: Tensor
    w: Tensor
    last_w: Tensor
    beta: Tensor  # entry v . (I - A) last_v of the tridiagonal matrix
    delta: Tensor  # the next column after the rotation before last: entry above the diagonal
    epsilon: Tensor  # the one above that
    cosine: Tensor  # the last rotation
    sine: Tensor
    length: Tensor  # ||gap||, by its recurrence
    size: Tensor  # estimate of ||I - A||

    def where(self, samples: Tensor, other: Self) -> Self:
        """Return the state with some samples replaced by those of ``other``."""
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(*(torch.where(samples, getattr(other, name), getattr(self, name)) for name in names))


def started(z: Tensor, gap: Tensor, size: Tensor) -> MINRESState:
    """Return the state before the first step."""
    length, nothing, zero = row_norms(gap)[:, None], torch.zeros_like(gap), torch.zeros_like(size)
    v = gap * safe_ratio(torch.ones_like(length), length)
    return MINRESState(z, z + gap, gap, v, nothing, nothing, nothing, zero, zero, zero, zero - 1, zero, length, size)


@options
class MINRES(Solver):
    """The iterate of least residual in the Krylov space of a symmetric system, one product with A per step.

    For u = A u + b with symmetric I - A, definite or not; a singular system needs a consistent b. The iterates are
    those of GMRES in exact arithmetic, from three-term recurrences: memory does not grow with the number of steps.

    Departures from the paper:

    1. The residual vector is updated along with its norm, by r_k = s_k^2 r_{k-1} - c_k phi_k v_{k+1}; the loop measures
       residuals, and measures them again at the end.
    2. A sample stops where no direction reduces its residual, ||(I - A) r|| <= sqrt(eps) ||I - A|| ||r||, which
       happens if the system is singular and b not consistent. Further steps would follow the null space without bound,
       which looks like convergence to a criterion relative to ||u||.
    3. A sample whose Krylov space is exhausted starts a new one from its residual.

    Example:
        >>> eq.KKTGradient(solver=eq.MINRES())
    """

    recurrent = True

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> MINRESState:
        require_affine(self, problem)
        return started(z, image - z, z.new_zeros(len(z), 1))

    def step(self, problem: Problem, state: MINRESState) -> MINRESState:
        v, eps = state.v, torch.finfo(state.v.dtype).eps
        # Lanczos: the next vector, orthogonal to the last two.
        next_v = v - problem.product(v) - state.beta * state.last_v
        alpha = dot(v, next_v)
        next_v = next_v - alpha * v
        beta = row_norms(next_v)[:, None]
        size = torch.maximum(state.size, torch.hypot(alpha, torch.maximum(beta, state.beta)))
        exhausted = beta <= 10 * eps * size
        beta = beta.masked_fill(exhausted, 0.0)
        next_v = next_v * safe_ratio(torch.ones_like(beta), beta)
        # The new column of the tridiagonal matrix: rotated as before, then by a new rotation that makes it triangular.
        above = state.cosine * state.delta + state.sine * alpha
        diagonal = state.sine * state.delta - state.cosine * alpha
        gamma = torch.hypot(diagonal, beta)
        cosine, sine = safe_ratio(diagonal, gamma), safe_ratio(beta, gamma)
        w = (v - state.epsilon * state.last_w - above * state.w) * safe_ratio(torch.ones_like(gamma), gamma)
        length = sine * state.length
        z = torch.addcmul(state.z, cosine * state.length, w)
        gap = sine.square() * state.gap - cosine * length * next_v
        delta, epsilon = -state.cosine * beta, state.sine * beta
        lanczos, rotation = (next_v, v, w, state.w, beta), (delta, epsilon, cosine, sine)
        following = MINRESState(z, z + gap, gap, *lanczos, *rotation, length, size)
        # ||(I - A) r|| / ||r|| of the state.
        settled = torch.hypot(diagonal, delta) <= math.sqrt(eps) * size
        if bool((exhausted | settled).any()):
            return following.where(exhausted, started(z, gap, size)).where(settled, state)
        return following

"""Operator splitting for monotone equilibria z = s(W z + b): forward-backward, Peaceman-Rachford, Douglas-Rachford.

With s = prox_f, z is the equilibrium if and only if 0 is in F(z) + G(z), F(z) = (I - W) z - b, G the subdifferential of
f (theorem 1). The resolvent of F is (I + alpha (I - W))^-1 (z + alpha b), that of G is prox_f^alpha; the methods here
apply them in turn. Iterates are chosen so that the residual of f itself costs nothing: after the resolvent of F,
W z + b is known without a product with W.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020); E. K. Ryu, S. Boyd, "Primer on monotone
operator methods" (2016).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.operators.acceleration import Acceleration
from equipoise.operators.linear import MonotoneOperator
from equipoise.operators.problem import Splitting
from equipoise.options import option, options, require
from equipoise.problem.layout import is_zero
from equipoise.problem.problem import Problem
from equipoise.solvers.base import Solver, State


@dataclass
class SplittingState(State):
    """Adds W z + b."""

    pre: Tensor


class SplittingSolver(Solver):
    """A solver that works with W and s."""

    needs = Splitting
    alpha: float | str

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str):
            require(self, "alpha", among=("auto",))
        else:
            require(self, "alpha", above=0.0)

    def split(self, problem: Problem) -> tuple[Splitting, float]:
        """Return the structure of f and the step size."""
        split = self.structure(problem, Splitting)
        if self not in split.alphas:
            alpha = self.automatic(split.operator) if isinstance(self.alpha, str) else float(self.alpha)
            # No step size suits weights that are not finite or overflow: any shows that f is not finite either.
            split.alphas[self] = alpha if 0 < alpha < math.inf else 1.0
        return split, split.alphas[self]

    def begin(self, split: Splitting, z: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, f(z) and W z + b to start from: z0, or 0 for samples whose equilibrium is 0.

        0 is the equilibrium exactly when s(b) = 0. From elsewhere, iterates only tend to it: f(z) may be 0 long before
        z is, and no relative tolerance would ever be met.
        """
        if is_zero(z):
            return z, image, split.bias
        at_rest = (split.activation(split.bias) == 0).all(dim=1) & torch.isfinite(image).all(dim=1)
        if bool(at_rest.any()):
            z, image = (torch.where(at_rest[:, None], 0.0, rows) for rows in (z, image))
        return z, image, split.preactivation(z)

    def companion(self, state: SplittingState) -> Tensor:
        return state.pre  # at the equilibrium it determines the slope of s for the backward pass

    @abstractmethod
    def automatic(self, operator: MonotoneOperator) -> float:
        """Return the step size that suits the operator."""


@options
class ForwardBackward(SplittingSolver):
    """z <- prox_f^alpha(z - alpha F(z)): a damped step of f (eq. 6, algorithm 1). Converges for alpha < 2 m / L^2.

    Args:
        alpha: step size; "auto" is m / L^2 with a bound L of ||I - W||, for which convergence is certain.

    Example:
        >>> eq.fixed_point(eq.operators.MonotoneProblem(op, "relu"), z0, bias, solver=eq.ForwardBackward(0.1))
    """

    alpha: float | str = "auto"

    def automatic(self, operator: MonotoneOperator) -> float:
        largest = operator.lipschitz_bound()
        return operator.m / largest / largest  # the square may overflow

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> SplittingState:
        split, _ = self.split(problem)
        return SplittingState(*self.begin(split, z, image))

    def step(self, problem: Problem, state: SplittingState) -> SplittingState:
        split, alpha = self.split(problem)
        z = split.activation.prox(torch.lerp(state.z, state.pre, alpha), alpha)
        problem.count.add(len(z))
        pre = split.preactivation(z)
        return SplittingState(z, split.activation(pre), pre)


@dataclass
class ReflectionState(SplittingState):
    """Adds u, which is reflected next, and what acceleration remembers of it."""

    u: Tensor
    memory: Acceleration | None

    def take(self, rows: Tensor) -> ReflectionState:
        taken = super().take(rows)
        taken.memory = self.memory.take(rows) if self.memory is not None else None
        return taken


class ReflectionSolver(SplittingSolver):
    """u <- (1 - relaxation) u + relaxation C_F C_G u, where C = 2 R - I is a resolvent reflected (eq. A10)."""

    relaxation: float
    memory: int

    def automatic(self, operator: MonotoneOperator) -> float:
        # The best step size for a symmetric I - W with eigenvalues between m and L is 1 / sqrt(m L). Few eigenvalues of
        # real operators are near either end, so a mean size works better: equal to the best step size, or within an
        # iteration or two, on random and trained operators of every kind.
        return 1 / operator.typical_size()

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> ReflectionState:
        # The u of z if z were the equilibrium; from z = 0 this is one step ahead of u = 0.
        split, alpha = self.split(problem)
        z, image, pre = self.begin(split, z, image)
        u = torch.lerp(z, pre, alpha)
        return ReflectionState(z, image, pre, u, Acceleration.start(u, self.memory) if self.memory else None)

    def step(self, problem: Problem, state: ReflectionState) -> ReflectionState:
        split, alpha = self.split(problem)
        problem.count.add(len(state.z))
        half = split.activation.reflect(state.u, alpha)
        z = split.solve(torch.add(half, split.bias, alpha=alpha), alpha)
        pre = torch.lerp(half, z, (1 + alpha) / alpha)  # (1 + alpha) z - alpha W z = half + alpha b
        u = half.lerp_(z, 2.0)  # 2 z - half
        if self.relaxation != 1:
            u = torch.lerp(state.u, u, self.relaxation)
        if state.memory is not None:
            u = state.memory.next(state.u, u)
        return ReflectionState(z, split.activation(pre), pre, u, state.memory)


@options
class PeacemanRachford(ReflectionSolver):
    """Peaceman-Rachford splitting (eq. 7, algorithm 2): converges for every alpha > 0 when I - W >= m I.

    Args:
        alpha: step size, which affects the rate but not the result; "auto" is near the best for the current weights:
            the inverse of a size between the smallest and the largest of I - W.
        memory: number of differences kept by a safeguarded Anderson acceleration of u; 0 disables it. Convergence from
            everywhere is still guaranteed, its linear rate is not.

    Example:
        >>> eq.Equilibrium(eq.operators.MonotoneProblem(op, "relu"), initial=op.shape, solver=eq.PeacemanRachford())
    """

    alpha: float | str = "auto"
    memory: int = option(default=0, at_least=0, whole=True)

    @property
    def relaxation(self) -> float:  # type: ignore[override]
        return 1.0


@options
class DouglasRachford(ReflectionSolver):
    """Relaxed Douglas-Rachford splitting: the average of no step and Peaceman-Rachford's.

    Args:
        alpha: as in :class:`PeacemanRachford`.
        relaxation: fraction of the step; 1/2 is the method itself, 1 is Peaceman-Rachford.
        memory: as in :class:`PeacemanRachford`.

    Example:
        >>> eq.fixed_point(eq.operators.MonotoneProblem(op, "relu"), z0, bias, solver=eq.DouglasRachford(0.5))
    """

    alpha: float | str = "auto"
    relaxation: float = option(default=0.5, above=0.0, at_most=1.0)
    memory: int = option(default=0, at_least=0, whole=True)

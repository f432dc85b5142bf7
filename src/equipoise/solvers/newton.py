"""Newton's method with a Krylov solver inside and forward-mode Jacobian products.

D. A. Knoll and D. E. Keyes, "Jacobian-free Newton-Krylov methods" (2004).
"""

from typing import Self

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import DerivedProblem, Problem
from equipoise.solvers.base import GapState, Solver, backtrack
from equipoise.solvers.krylov import GMRES, BiCGStab
from equipoise.solvers.loop import solve
from equipoise.tolerance import Tolerance


class Linearised(DerivedProblem):
    """d -> right + J d, with J the Jacobian of ``problem`` at z."""

    affine = True

    def __init__(self, problem: Problem, z: Tensor, right: Tensor):
        super().__init__(problem, problem.count)
        self.z, self.right = z, right

    def __call__(self, rows: Tensor) -> Tensor:
        return self.right + self.product(rows)

    def product(self, rows: Tensor) -> Tensor:
        return self.problem.jvp(self.z, rows)

    def take(self, rows: Tensor) -> Self | None:
        narrow = self.problem.take(rows)
        return narrow and type(self)(narrow, self.z.index_select(0, rows), self.right.index_select(0, rows))


@options
class NewtonKrylov(Solver):
    """z <- z + d with (I - J) d = f(z) - z solved to a relative residual of ``forcing``, J the Jacobian of f at z.

    It takes few steps with many products: for stiff problems, where the other solvers stall. Every product counts as an
    evaluation.

    Args:
        inner: solver of the linear system, GMRES or BiCGStab.
        forcing: relative tolerance of the linear system.
        inner_steps: maximum number of steps of the inner solver.
        line_search: number of times a step may be halved while it increases the residual.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.NewtonKrylov())
    """

    inner: GMRES | BiCGStab = GMRES()
    forcing: float = option(default=0.03, above=0.0, below=1.0)
    inner_steps: int = option(default=20, at_least=1, whole=True)
    line_search: int = option(default=5, at_least=0, whole=True)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, GMRES | BiCGStab):
            raise TypeError(f"NewtonKrylov.inner is {self.inner!r}; allowed: GMRES(...) or BiCGStab().")

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> GapState:
        return GapState(z, image, image - z)

    def step(self, problem: Problem, state: GapState) -> GapState:
        # Right-hand sides of unit length make the forcing term an absolute tolerance.
        size = row_norms(state.gap)[:, None]
        size = torch.where(size == 0, 1.0, size)
        right = state.gap / size
        linearised = Linearised(problem, state.z, right)
        tolerance = Tolerance(relative=0.0, absolute=self.forcing, max_steps=self.inner_steps + 1)
        direction = solve(linearised, right, linearised(right), self.inner, tolerance, inner=True).z * size
        return GapState(*backtrack(problem, state, direction, self.line_search))

    def for_adjoint(self) -> Solver:
        return self.inner

"""A problem with rescaled rows, for rows whose numbers are too small or too large to be squared.

Solvers form inner products. In float32 those of numbers below 1e-19 or above 1e19 underflow or overflow, so that a loss
scaled by 1e-23 would get no gradient. Every row is therefore divided by a power of two of its size, which is exact:
z = f(z) and y = f(u y) / u with z = u y have the same solutions and the same relative residuals.
"""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from equipoise.problem.problem import DerivedProblem, Problem


class Rescaled(DerivedProblem):
    """``problem`` with every row divided by its ``unit``."""

    def __init__(self, problem: Problem, unit: Tensor):
        super().__init__(problem, problem.count)
        self.unit = self.row_units = unit
        self.affine, self.autocast = problem.affine, problem.autocast

    def __call__(self, rows: Tensor) -> Tensor:
        return self.conjugate(self.problem)(rows)

    def product(self, rows: Tensor) -> Tensor:
        return self.conjugate(self.problem.product)(rows)

    def conjugate(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a map of rows as a map of divided rows."""
        return lambda rows: self.divided(function(self.multiplied(rows)))

    def take(self, rows: Tensor) -> Self | None:
        narrow = self.problem.take(rows)
        return narrow and type(self)(narrow, self.row_units.index_select(0, rows))

    def unpack(self, rows: Tensor) -> Any:
        return self.problem.unpack(self.multiplied(rows))

    def rounded(self, rows: Tensor) -> Tensor:
        return self.conjugate(self.problem.rounded)(rows)

    @property
    def coarse(self) -> bool:
        return True  # a number that is small in these units may vanish in the original ones

    def multiplied(self, rows: Tensor) -> Tensor:
        return rows * self.row_units[:, None]

    def divided(self, rows: Tensor) -> Tensor:
        return rows / self.row_units[:, None]

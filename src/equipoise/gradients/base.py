"""What a gradient rule is: it attaches a gradient to a solved problem, or runs its own forward pass."""

from typing import ClassVar

from torch import Tensor

from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Report
from equipoise.solvers.base import Solver
from equipoise.solvers.loop import Recorded, Solved, Watch
from equipoise.tolerance import Tolerance


class GradientRule:
    """How a solution is differentiated: by ``record`` and ``attach``, or, if the rule decides the value, by ``run``."""

    decides_value: ClassVar[bool] = False  # whether the rule runs its own forward pass, with gradients or without
    keeps_states: bool = False  # whether it needs the solver's final states

    def check(self, problem: FunctionProblem, solver: Solver) -> None:
        """Raise if the rule cannot be used with this problem and solver."""

    def record(self, problem: FunctionProblem, z: Tensor) -> Recorded:
        """Return f recorded at ``z``, where the solve may have ended."""
        raise NotImplementedError

    def attach(self, solved: Solved, report: Report) -> Tensor:
        """Return the solution as rows that have a gradient."""
        raise NotImplementedError

    def run(
        self, problem: FunctionProblem, z: Tensor, tolerance: Tolerance, watch: Watch, report: Report
    ) -> tuple[Tensor, Solved]:
        """Return the value as rows that have a gradient, and its outcome."""
        raise NotImplementedError

"""Plain and damped fixed-point iteration."""

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.problem import Problem
from equipoise.solvers.base import Solver, State


@options
class Picard(Solver):
    """z <- (1 - damping) f(z) + damping z. Converges if this map is a contraction.

    Args:
        damping: weight of the current iterate; 0 is the plain step.

    Example:
        >>> eq.fixed_point(f, z0, x, solver=eq.Picard(damping=0.5))
    """

    damping: float = option(default=0.0, at_least=0.0, below=1.0)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> State:
        return State(z, image)

    def step(self, problem: Problem, state: State) -> State:
        z = torch.lerp(state.image, state.z, self.damping) if self.damping else state.image
        del state
        return State(z, problem(z))

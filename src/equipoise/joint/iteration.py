"""The joint iteration as the paper has it, plain or accelerated by a solver of the core."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.joint.base import JointSolver, JointState, check_joint, rounded
from equipoise.joint.problem import Joint
from equipoise.joint.steps import InputStep, as_step
from equipoise.options import option, options
from equipoise.problem.problem import DerivedProblem, Problem
from equipoise.solvers import Anderson, Broyden, Picard, Solver
from equipoise.solvers.base import State


@options
class JointIteration(JointSolver):
    """The joint iteration of eq. 11, accelerated by any solver of the core that works with values of F alone.

    ``JointIteration()`` is the plain joint iteration, and ``JointIteration(eq.Anderson(memory=20, kind=1),
    damping=(0.2, 0.4), step_size=0.01)`` the paper's method (with a memory of 40 for generation).

    Args:
        solver: ``Picard()`` for no acceleration, ``Anderson(kind=1 or 2)``, or ``Broyden()``.
        damping: weights of the current iterate for z and mu, in [0, 1); 0 is the plain step.
        step_size: step size of x, as for :class:`JointAnderson`.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, target, solver=eq.JointIteration(eq.Broyden(), step_size=0.01))
    """

    solver: Solver = option(default=Picard(), kind=Solver)
    damping: tuple[float, float] = (0.2, 0.4)
    step_size: InputStep | float | str = "auto"

    def __post_init__(self) -> None:
        check_joint(self)
        single = isinstance(self.solver, Picard | Anderson) or (
            isinstance(self.solver, Broyden) and not self.solver.line_search
        )
        if not single:
            raise TypeError(
                f"JointIteration.solver is {self.solver!r}; it must evaluate F once per step: Picard, Anderson, or "
                "Broyden without a line search."
            )

    @property
    def rule(self) -> InputStep:
        return as_step(self.step_size, "JointIteration")

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> JointState:
        state = super().init(problem, z, image)
        inner = self.solver.init(problem, z, self.damped(state))
        return dataclasses.replace(state, memory=Inner(self.solver, inner))

    def step(self, problem: Problem, state: JointState) -> JointState:
        damped = Damped(self, self.structure(problem, Joint), state)
        inner = self.solver.step(damped, state.memory.state)
        return dataclasses.replace(damped.state, memory=Inner(self.solver, inner))

    def propose(self, joint: Joint, state: JointState) -> tuple[Tensor, Any]:
        raise NotImplementedError  # the core solver proposes, in its step

    def damped(self, state: JointState) -> Tensor:
        """Return the image of ``state`` under the damped and projected map (eq. 11)."""
        n = (state.z.shape[1] - state.by.shape[1]) // 2
        shares = (1 - self.damping[0], 1 - self.damping[1])
        moves = [share * state.gap[:, i * n : (i + 1) * n] for i, share in enumerate(shares)]
        return state.z + torch.cat([*moves, state.by], dim=1)


@dataclass
class Inner:
    """The state of a core solver inside a joint one."""

    solver: Solver
    state: State

    def take(self, rows: Tensor) -> Inner:
        return Inner(self.solver, self.solver.take(self.state, rows))


class Damped(DerivedProblem):
    """The damped map as a core solver sees it; keeps the state at its last argument."""

    def __init__(self, solver: JointIteration, joint: Joint, before: JointState):
        super().__init__(joint.problem, joint.problem.count)
        self.solver, self.joint, self.state = solver, joint, before

    def __call__(self, rows: Tensor) -> Tensor:
        joint, before = self.joint, self.state
        v = torch.cat([rows[:, : 2 * joint.n], joint.project(rows[:, joint.x])], dim=1)
        v = rounded(joint, v)
        self.state = self.solver.arrive(joint, v, joint.evaluate(v), before, before.moments, None)
        return self.solver.damped(self.state)

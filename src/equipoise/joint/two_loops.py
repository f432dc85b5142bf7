"""Baselines for joint optimisation: every step solves for z and for mu, then moves x.

They are solvers of the same problem, so that methods are compared by changing one option. Each step does as little work
as possible: f is evaluated once with a graph, which the loss, the adjoint and the gradient share.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.implicit import AdjointProblem, gradients
from equipoise.joint.base import JointSolver, JointState
from equipoise.joint.problem import Evaluation, Joint
from equipoise.joint.steps import AdamStep, InputStep, NormalizedStep
from equipoise.options import option, options
from equipoise.problem.problem import Problem
from equipoise.solvers import Anderson, Solver
from equipoise.solvers.loop import solve
from equipoise.tolerance import Tolerance


@options
class TwoLoops(JointSolver):
    """Each step moves x by a rule, solves for z and then for mu at the new x, and evaluates the gradient."""

    _: KW_ONLY
    warm: bool = option(default=True, kind=bool)
    solver: Solver = option(default=Anderson(), kind=Solver)
    tolerance: Tolerance = option(default=Tolerance(relative=1e-2, max_steps=18), kind=Tolerance)
    adjoint: Tolerance = option(default=Tolerance(relative=1e-2, max_steps=20), kind=Tolerance)

    def __post_init__(self) -> None:
        if isinstance(self.solver, JointSolver):
            raise TypeError(
                f"{type(self).__name__}.solver is {self.solver!r}; it solves z = f(z, x) at every step, so it must be "
                "a solver of the core, such as equipoise.Anderson()."
            )

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> JointState:
        joint = self.structure(problem, Joint)
        v, at = self.solved(joint, z)
        return self.arrive(joint, v, at, None, self.rule.init(z[:, joint.x]), Start(z))

    def step(self, problem: Problem, state: JointState) -> JointState:
        joint = self.structure(problem, Joint)
        v = (state.z if self.warm else state.memory.v).clone()
        v[:, joint.x] = joint.project(state.z[:, joint.x] + state.by)
        v, at = self.solved(joint, v)
        return self.arrive(joint, v, at, state, state.moments, state.memory)

    def propose(self, joint: Joint, state: JointState) -> tuple[Tensor, Any]:
        raise NotImplementedError  # z and mu are solved for

    def solved(self, joint: Joint, v: Tensor) -> tuple[Tensor, Evaluation]:
        """Return ``v`` with z and mu solved for at its x, and F there."""
        inner, z, mu = joint.inference(v), v[:, joint.z], v[:, joint.mu]
        with torch.no_grad():
            z = solve(inner, z, inner(z), self.solver, self.tolerance, inner=True).z
        x = v[:, joint.x].detach().requires_grad_()
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            there = torch.cat([z, mu, x], dim=1)
            image, cost = joint.inference(there)(z), joint.costs(there)
        direct = gradients([cost], [z, x], [torch.ones_like(cost)], create_graph=False)
        system = AdjointProblem(inner, z, image, direct[0])
        mu = solve(system, mu, system(mu), self.solver, self.adjoint, inner=True).z
        joint.problem.count.products += system.count.evaluations + 1
        pulled, gradient = gradients([image], [z, x], [mu], create_graph=False)
        gradient = gradient + direct[1]
        v = torch.cat([z.detach(), mu, x.detach()], dim=1)
        whole = torch.cat([image.detach(), pulled + direct[0], x.detach() - gradient], dim=1)
        gap = torch.cat([whole[:, : 2 * joint.n] - v[:, : 2 * joint.n], -gradient], dim=1)
        return v, Evaluation(whole, gap, gradient, cost.detach().to(v.dtype))


@dataclass
class Start:
    """The initial v, from which cold solves start."""

    v: Tensor

    def take(self, rows: Tensor) -> Start:
        return Start(self.v.index_select(0, rows))


@options
class AdamInput(TwoLoops):
    """Adam on x, with inner solves for z and for mu at every step.

    Args:
        lr: learning rate.
        warm: whether inner solves start from the last z and mu; the paper's baseline starts cold, from z0 and 0.
        solver: solver of both inner problems.
        tolerance: tolerance of the solve for z; ``Tolerance(relative=0, max_steps=4)`` is four evaluations.
        adjoint: tolerance of the solve for mu.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, target, solver=eq.AdamInput(lr=0.3))
    """

    lr: float = option(default=0.1, above=0.0)

    @property
    def rule(self) -> InputStep:
        return AdamStep(self.lr)


@options
class PGDInput(TwoLoops):
    """Projected gradient descent with steps of a fixed length, and inner solves at every step: the usual attack.

    Args:
        length: length of a step of x.
        warm, solver, tolerance, adjoint: as for :class:`AdamInput`.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, images, constraint=eq.L2Ball(1.0), solver=eq.PGDInput(0.2))

    Reference: A. Madry et al., "Towards deep learning models resistant to adversarial attacks" (2018).
    """

    length: float = option(default=0.2, above=0.0)

    @property
    def rule(self) -> InputStep:
        return NormalizedStep(self.length)

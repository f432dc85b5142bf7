"""Gradients through recorded steps: a few from the solution on (phantom), or all from z0 on (unrolled)."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from equipoise.gradients.base import GradientRule
from equipoise.gradients.implicit import check_record, on_finite_samples, recorded, with_gradient_of
from equipoise.options import option, options
from equipoise.problem.captures import require_gradient_paths
from equipoise.problem.layout import residual_at
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Report
from equipoise.solvers.loop import Solved, Watch, solve
from equipoise.solvers.picard import Picard
from equipoise.tolerance import Tolerance


@dataclass
class Step:
    """One evaluation of f with its graph."""

    image: Tensor


def one_step(problem: FunctionProblem, z: Tensor) -> Tensor:
    """Return ``z`` with the gradient of f at z, in the samples where that is finite."""
    image = recorded(problem, z)
    finite = torch.isfinite(image).all(dim=1)
    if problem.gatherable and not bool(finite.all()):
        rows = finite.nonzero().squeeze(1)
        return z.index_copy(0, rows, one_step(problem.take(rows), z.index_select(0, rows))) if len(rows) else z
    return with_gradient_of(image, z)


@options
class PhantomGradient(GradientRule):
    """The gradient of a few damped steps from the equilibrium on: an approximation without a backward solve.

    Args:
        steps: number of recorded steps; 1 is the one-step gradient.
        damping: damping of each step, z <- (1 - damping) f(z) + damping z.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.PhantomGradient(steps=5, damping=0.5))

    Reference: Z. Geng et al., "On training implicit models" (2021), the unrolling-based phantom gradient.
    """

    steps: int = option(default=1, at_least=1, whole=True)
    damping: float = option(default=0.0, at_least=0.0, below=1.0)

    def record(self, problem: FunctionProblem, z: Tensor) -> Step:
        return Step(recorded(problem, z))

    def attach(self, solved: Solved, report: Report) -> Tensor:
        return on_finite_samples(solved, self.attach_finite)

    def attach_finite(self, solved: Solved, rows: Tensor) -> Tensor:
        problem, z = cast(FunctionProblem, solved.problem), solved.z
        for k in range(self.steps):
            image = solved.record.image if k == 0 and solved.record else recorded(problem, z)
            if k == 0:
                require_gradient_paths(problem, z, image)
                if not solved.record:
                    check_record(problem, z, image, solved.stats.residual)
            z = torch.lerp(image, z, self.damping) if self.damping else image
        # The value remains the equilibrium, whose residual was measured; only its gradient is that of the steps.
        return with_gradient_of(z, solved.z)


@options
class UnrolledGradient(GradientRule):
    """``steps`` plain steps from z0, recorded: ordinary back-propagation, including to z0.

    The solver is not used, and the value is the same with gradients and without. Memory grows with the steps.

    Args:
        steps: number of recorded steps.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.UnrolledGradient(steps=10))
    """

    decides_value: ClassVar[bool] = True
    steps: int = option(default=10, at_least=1, whole=True)

    def run(
        self, problem: FunctionProblem, z: Tensor, tolerance: Tolerance, watch: Watch, report: Report
    ) -> tuple[Tensor, Solved]:
        residuals: list[Tensor] = []
        states = {}
        for k in range(self.steps):
            if k + 1 in watch.keep:
                states[k + 1] = z
            image = recorded(problem, z) if problem.needs_gradient else problem(z)
            if k == 0 and torch.is_grad_enabled():
                require_gradient_paths(problem, z, image)
            if watch.trace:
                residuals.append(residual_at(z.detach(), image.detach()))
            z = image
        with torch.no_grad():
            image = problem(z.detach())
        solved = outcome(problem, z, image, self.steps, tolerance, residuals)
        solved.kept = [states.get(step, z) for step in watch.keep]
        return z, solved


def outcome(
    problem: FunctionProblem, z: Tensor, image: Tensor, steps: int, tolerance: Tolerance, residuals: list[Tensor]
) -> Solved:
    """Return the outcome of ``steps`` steps that led to ``z``, with the ``residuals`` traced on the way."""
    once = dataclasses.replace(tolerance, max_steps=1)
    solved = solve(problem, z.detach(), image, Picard(), once)  # only measures the residual
    solved.stats.steps = solved.stats.steps + steps
    solved.stats.trace = torch.stack([*residuals, solved.stats.residual]) if residuals else None
    return solved

"""How a solution is differentiated: implicitly, by a few recorded steps, or by recording them all.

A gradient rule is an object of its own, chosen independently of the solver. The implicit one is explained in
:mod:`equipoise.gradients.implicit`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from equipoise.gradients.implicit import Adjoint, Record, recorded, with_gradient_of
from equipoise.gradients.paths import require_gradient_paths
from equipoise.options import options, require
from equipoise.problem.function import Count, FunctionProblem, ImpureFunctionWarning
from equipoise.problem.independence import NOT_A_FUNCTION
from equipoise.problem.layout import leaves
from equipoise.solution import Report, warn_user
from equipoise.solvers.base import Looks, Solved, Solver, solve
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.picard import Picard
from equipoise.tolerance import Tolerance, residual_at


@dataclass
class Forward:
    """A forward solve that is ready to run; ``z`` are the rows of z0, with their graph."""

    problem: FunctionProblem
    z: Tensor
    image: Tensor
    solver: Solver
    tolerance: Tolerance
    looks: Looks

    def solve(self, *, keep_states: bool = False, finish: Callable[[Tensor], Tensor] | None = None) -> Solved:
        looks = dataclasses.replace(self.looks, keep_states=keep_states)
        return solve(self.problem, self.z.detach(), self.image, self.solver, self.tolerance, looks, finish=finish)


class GradientRule(ABC):
    """Runs the forward solve in its own way and returns the value's rows with a gradient attached.

    Attributes:
        decides_value: whether the value is not the solver's; it is found by this rule without gradients, too.
    """

    decides_value: ClassVar[bool] = False

    @abstractmethod
    def run(self, forward: Forward, report: Report) -> tuple[Tensor, Solved]: ...


@options
class ImplicitGradient(GradientRule):
    """The gradient of the equilibrium itself, by the implicit function theorem; memory does not grow with steps.

    For a loss with gradient v at z*, solves the adjoint system u = v + J^T u, J the Jacobian of f at z*, and pulls u
    back through one recorded evaluation of f. With ``create_graph=True`` the adjoint system is differentiated in the
    same way, to every order. z* does not depend on z0, which therefore gets no gradient.

    Args:
        solver: for the adjoint system; None takes the forward solver (NewtonKrylov: its inner one).
        tolerance: for the adjoint system; None takes the forward one, without its absolute part.
        start: a guess of u, structured like the value, e.g. the ``adjoint`` of an earlier Solution.
        shine: start from the inverse Jacobian estimate of a forward :class:`Broyden` solve. With
            ``tolerance=Tolerance(max_steps=1)`` the estimate is used as it is, its residual reported.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.ImplicitGradient(solver=eq.GMRES()))

    Reference: S. Bai, J. Z. Kolter, V. Koltun, "Deep equilibrium models" (2019), theorem 1; Z. Ramzi et al.,
    "SHINE" (2022).
    """

    solver: Solver | None = None
    tolerance: Tolerance | None = None
    start: Any = field(default=None, compare=False, repr=False)
    shine: bool = False

    def __post_init__(self) -> None:
        require(self, "solver", kind=Solver, optional=True)
        require(self, "tolerance", kind=Tolerance, optional=True)
        require(self, "shine", kind=bool)

    def run(self, forward: Forward, report: Report) -> tuple[Tensor, Solved]:
        if self.shine and not isinstance(forward.solver, Broyden):
            raise TypeError(
                "ImplicitGradient(shine=True) reuses Broyden's estimate, and the forward solver is "
                f"{forward.solver!r}: use solver=Broyden(...), or shine=False."
            )
        batch = len(forward.z)
        if self.start is not None and not forward.problem.fits(self.start):
            raise ValueError(
                "ImplicitGradient.start must be structured and shaped like z0, batch included; "
                f"given: {', '.join(str(tuple(t.shape)) for _, t in leaves(self.start, 'start'))}."
            )
        last: list[Record] = []  # f recorded where the solve ended, if it had to be evaluated there

        def finish(z: Tensor) -> Tensor:
            last[:] = [Record.of(forward.problem, z)]
            return last[0].image.detach()

        solved = forward.solve(keep_states=self.shine, finish=finish)
        solver, tolerance = self.solver or forward.solver.for_adjoint(), self.tolerance
        if tolerance is None:
            # An absolute tolerance speaks of z; the size of a loss's gradient has nothing to do with it.
            relative = forward.tolerance.relative or Tolerance.relative
            tolerance = dataclasses.replace(forward.tolerance, relative=relative, absolute=0.0)

        def attach(part: Solved, rows: Tensor) -> Tensor:
            problem = cast(FunctionProblem, part.problem)
            adjoint = Adjoint(solver, tolerance, report, rows, batch, self.guess(forward, solved, rows))
            record = last[0] if part.confirmed and not solver.structured else None
            value, record = adjoint.attach(problem, part.z, pre=part.companion, record=record)
            require_gradient_paths(problem, record.z, record.image)
            if not (solver.structured or part.confirmed):
                check_record(problem, record.z, record.image, part.stats.residual)
            return value

        return on_finite_samples(solved, attach), solved

    def guess(self, forward: Forward, solved: Solved, rows: Tensor) -> Callable[[Tensor], Tensor] | None:
        """How to guess u from v for the samples ``rows``; None where v itself is the guess."""
        if self.start is not None:
            start = forward.problem.pack(self.start).detach().index_select(0, rows)
            return lambda cotangent: start
        if self.shine and isinstance(forward.solver, Broyden):
            return partial(shine_estimate, forward.solver, solved.states, rows)
        return None


@options
class PhantomGradient(GradientRule):
    """The gradient of a few damped steps from the equilibrium on: an approximation without a backward solve.

    Args:
        steps: recorded steps; 1 is the one-step gradient.
        damping: of each step, z <- (1 - damping) f(z) + damping z.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.PhantomGradient(steps=5, damping=0.5))

    Reference: Z. Geng et al., "On training implicit models" (2021), the unrolling-based phantom gradient.
    """

    steps: int = 1
    damping: float = 0.0

    def __post_init__(self) -> None:
        require(self, "steps", at_least=1, whole=True)
        require(self, "damping", at_least=0.0, below=1.0)

    def run(self, forward: Forward, report: Report) -> tuple[Tensor, Solved]:
        last: list[Tensor] = []  # f recorded where the solve ended, if it had to be evaluated there

        def finish(z: Tensor) -> Tensor:
            last[:] = [recorded(forward.problem, z)]
            return last[0].detach()

        solved = forward.solve(finish=finish)
        return on_finite_samples(solved, partial(self.attach, last)), solved

    def attach(self, last: list[Tensor], part: Solved, rows: Tensor) -> Tensor:
        problem, z = cast(FunctionProblem, part.problem), part.z
        for k in range(self.steps):
            image = last[0] if k == 0 and part.confirmed else recorded(problem, z)
            if k == 0:
                require_gradient_paths(problem, z, image)
                if not part.confirmed:
                    check_record(problem, z, image, part.stats.residual)
            z = torch.lerp(image, z, self.damping) if self.damping else image
        # The value stays the equilibrium, whose residual was measured: only its gradient is that of the steps.
        return with_gradient_of(z, part.z)


@options
class UnrolledGradient(GradientRule):
    """``steps`` plain steps from z0, recorded: ordinary back-propagation, z0 included.

    The solver is not used, with gradients or without: the value is the same. Memory grows with the steps.

    Args:
        steps: recorded steps.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.UnrolledGradient(steps=10))
    """

    decides_value: ClassVar[bool] = True

    steps: int = 10

    def __post_init__(self) -> None:
        require(self, "steps", at_least=1, whole=True)

    def run(self, forward: Forward, report: Report) -> tuple[Tensor, Solved]:
        if forward.looks.callback is not None:
            raise ValueError("UnrolledGradient takes its steps without a solver and calls no callback: leave it out.")
        problem, z = forward.problem, forward.z
        problem.count = Count()  # the evaluation at the door is not one of the steps
        residuals = []
        for k in range(self.steps):
            image = recorded(problem, z) if problem.needs_gradient else problem(z)
            if k == 0 and torch.is_grad_enabled():
                require_gradient_paths(problem, z, image)
            if forward.looks.trace:
                residuals.append(residual_at(z.detach(), image.detach()))
            z = image
        with torch.no_grad():
            image = problem(z.detach())
        last = dataclasses.replace(forward.tolerance, max_steps=1)
        solved = solve(problem, z.detach(), image, Picard(), last)  # measures the residual there, no more
        solved.stats.steps = solved.stats.steps + self.steps
        if forward.looks.trace:
            solved.stats.trace = torch.stack([*residuals, solved.stats.residual])
        return z, solved


def shine_estimate(solver: Broyden, states: list[tuple[Tensor, Any]], rows: Tensor, cotangent: Tensor) -> Tensor:
    """(I - J^T)^-1 v as Broyden's updates have it, each sample by those it made until it stopped."""
    place = {int(row): i for i, row in enumerate(rows)}
    estimate = cotangent.clone()
    for samples, state in states:
        kept = [i for i, sample in enumerate(samples.tolist()) if sample in place]
        if kept:
            at = torch.tensor([place[int(samples[i])] for i in kept], device=rows.device)
            part = solver.take(state, torch.tensor(kept, device=rows.device))
            estimate[at] = solver.adjoint_estimate(part, cotangent[at])
    return estimate


def check_record(problem: FunctionProblem, z: Tensor, image: Tensor, residual: Tensor) -> None:
    """The recorded image must be the one the solver saw."""
    with torch.no_grad():
        again = residual_at(z, image)
        allowed = 0.01 * residual + 100 * problem.rounding
        differs = torch.isfinite(residual) & ~((again - residual).abs() <= allowed)
        if bool(differs.any()):
            warn_user(NOT_A_FUNCTION, ImpureFunctionWarning)


def on_finite_samples(solved: Solved, attach: Callable[[Solved, Tensor], Tensor]) -> Tensor:
    """Attach a gradient where f is finite at the value; a sample where it is not would spoil every gradient sum.

    Leaving samples out needs explicit inputs; without them all samples are recorded together.
    """
    residual = solved.stats.residual
    rows = torch.isfinite(residual).nonzero().squeeze(1)
    if not solved.problem.gatherable or len(rows) == len(residual):
        return attach(solved, torch.arange(len(residual), device=rows.device))
    if not len(rows):
        return solved.z.clone().requires_grad_()  # nothing to differentiate; a backward pass finds that out in peace
    return solved.z.index_copy(0, rows, attach(solved.take(rows), rows))

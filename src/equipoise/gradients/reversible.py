"""Exact gradients of a finite iteration that can be run backward, so that its memory does not grow with the steps.

The iteration holds two states y and z, both z0 at the start, and moves one by f of the other (B = 1 - damping):

    y' = (1 - B) y + B f(z),    z' = (1 - B) z + B f(y')

Solved for the old states, the same equations lead back: z = (z' - B f(y')) / (1 - B), then y = (y' - B f(z)) / (1 - B).
The backward pass rebuilds every state in this way and differentiates the step at it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from equipoise.gradients.base import GradientRule
from equipoise.gradients.implicit import Record, gradients, recorded
from equipoise.gradients.steps import outcome
from equipoise.options import option, options
from equipoise.problem.captures import captured_tensors, require_gradient_paths
from equipoise.problem.layout import residual_at, row_norms, select
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Report, Result, Statistics
from equipoise.solvers.loop import Solved, Watch
from equipoise.tolerance import Tolerance


@options
class ReversibleGradient(GradientRule):
    """``steps`` steps of a reversible iteration from z0 and their exact gradient, including to z0, in constant memory.

    The solver is not used, and the value is the same with gradients and without. A step evaluates f twice, and twice
    more in the backward pass. Each step run backward divides rounding errors by ``damping``. The states are therefore
    kept in double precision where the device has it, and the distance between z0 and the start that the backward pass
    arrives at is reported as ``sol.backward.residual``, relative to the states.

    Args:
        steps: number of steps.
        damping: damping of the steps, 1 - B; smaller values converge faster and lose more digits on the way back.
        drift: largest relative distance from z0 that the backward pass accepts; beyond it samples are ``DRIFTED``.

    Example:
        >>> eq.fixed_point(f, z0, x, gradient=eq.ReversibleGradient(steps=12))

    Reference: S. McCallum, K. Arora, J. Foster, "Reversible deep equilibrium models" (2025).
    """

    decides_value: ClassVar[bool] = True
    steps: int = option(default=10, at_least=1, whole=True)
    damping: float = option(default=0.5, above=0.0, below=1.0)
    drift: float = option(default=1e-4, above=0.0)

    def run(
        self, problem: FunctionProblem, z: Tensor, tolerance: Tolerance, watch: Watch, report: Report
    ) -> tuple[Tensor, Solved]:
        report.settings = "ReversibleGradient(steps=..., damping=..., drift=...)"
        iteration = Reversible(problem, self, watch, report)
        with torch.no_grad():
            rows, *kept = results = iteration.forward(z.detach())
        if problem.needs_gradient or (z.requires_grad and torch.is_grad_enabled()):
            record = Record.of(problem, rows)  # shows what f depends on
            require_gradient_paths(problem, record.z, record.image)
            captured = captured_tensors(record.image, [record.z, *record.views], problem.visible_tensors)
            iteration.problem = cast(FunctionProblem, record.problem)  # with views of its sources
            iteration.sources = [*record.views, *captured]
            image = record.image.detach()
            rows, *kept = _Reverse.apply(iteration, results, z, *problem.sources, *captured)
        else:
            image = problem(rows)
        solved = outcome(problem, rows, image, self.steps, tolerance, iteration.residuals)
        solved.kept = kept
        return rows, solved


class Reversible:
    """One run of the iteration, forward and back."""

    def __init__(self, problem: FunctionProblem, rule: ReversibleGradient, watch: Watch, report: Report):
        self.problem, self.steps, self.damping, self.drift = problem, rule.steps, rule.damping, rule.drift
        self.watch, self.report = watch, report
        self.sources: list[Tensor] = []  # tensors that get a gradient besides z0
        self.residuals: list[Tensor] = []  # of every state before its step, if traced

    def forward(self, start: Tensor) -> list[Tensor]:
        """Return z after all steps, and at the steps ``watch.keep``, the first of which is z0."""
        kept: dict[int, Tensor] = {}
        y = z = start.to(widest(start))
        for k in range(self.steps):
            at = z.to(start.dtype)
            if k + 1 in self.watch.keep:
                kept[k + 1] = at
            image = self.problem(at)
            if self.watch.trace:
                self.residuals.append(residual_at(at, image))
            y = self.damping * y + (1 - self.damping) * image
            z = self.damping * z + (1 - self.damping) * self.problem(y.to(start.dtype))
        self.start, self.end = start, (y, z)
        last = z.to(start.dtype)
        return [last, *(kept.get(step, last).clone() for step in self.watch.keep)]

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients with respect to z0 and the sources, for cotangents of what ``forward`` returned."""
        problem, start, (y, z) = self.problem, self.start, self.end
        finite = torch.isfinite(y + z).all(dim=1)
        rows = finite.nonzero().squeeze(1)
        if narrow := problem.gatherable and len(rows) < len(finite):  # a NaN would spoil sums over samples
            with torch.enable_grad():  # the inputs of the other samples keep their path to the sources
                problem = problem.take(rows)
            start, y, z = (select(each, rows) for each in (start, y, z))
            cotangents = [each if each is None else select(each, rows) for each in cotangents]
        stands = finite[rows] if narrow else finite
        first, size = start.to(z.dtype), torch.maximum(row_norms(z), row_norms(start)).clamp_min(SMALLEST)
        totals = [torch.zeros_like(source) for source in self.sources]
        steps = [self.steps + 1, *(min(step, self.steps + 1) for step in self.watch.keep)]
        given = [(step, each) for step, each in zip(steps, cotangents, strict=True) if each is not None]
        towards_y, towards_z = torch.zeros_like(start), torch.zeros_like(start)

        def pull(state: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
            """Return J^T times a cotangent of f at a state, and f there; add to ``totals`` what it contributes."""
            at = torch.where(stands[:, None], state.to(start.dtype), start).requires_grad_()
            image = recorded(problem, at)
            scaled = torch.where(stands[:, None], (1 - self.damping) * cotangent, 0.0)
            pulled, *others = gradients([image], [at, *self.sources], [scaled], create_graph=False)
            for total, part in zip(totals, others, strict=True):
                total += part
            return pulled, image.detach()

        for k in range(self.steps, 0, -1):
            towards_z = sum((each for step, each in given if step == k + 1), towards_z)
            pulled, image = pull(y, towards_z)
            z = (z - (1 - self.damping) * image) / self.damping
            towards_y, towards_z = towards_y + pulled, self.damping * towards_z
            pulled, image = pull(z, towards_y)
            y = (y - (1 - self.damping) * image) / self.damping
            towards_y, towards_z = self.damping * towards_y, towards_z + pulled
        towards_z = sum((each for step, each in given if step == 1), towards_z)
        gradient = torch.where(stands[:, None], towards_y + towards_z, 0.0)
        drift = torch.maximum(row_norms(y - first), row_norms(z - first)) / size
        drift = torch.where(stands, drift, torch.inf)
        if narrow:
            gradient = torch.zeros_like(self.start).index_copy(0, rows, gradient)
            drift = drift.new_full((len(finite),), torch.inf).index_copy(0, rows, drift)
        self.report_drift(drift)
        return [gradient, *totals]

    def report_drift(self, drift: Tensor) -> None:
        """Report how far from z0 each sample has ended, relative to the size of its states."""
        result = torch.where(drift <= self.drift, int(Result.CONVERGED), int(Result.DRIFTED))
        result = torch.where(torch.isfinite(drift), result, int(Result.NONFINITE))
        calls = 4 * self.steps  # two evaluations of f and two products a step
        stats = Statistics(result, torch.full_like(result, self.steps), drift, calls, calls * self.problem.samples)
        stats = stats.expand(self.problem.samples) if self.problem.coupled else stats
        if (solution := self.report.solution()) is not None:
            solution.backward = stats
        if not bool(stats.converged.all()):
            self.report.failure(stats, "backward", below_rounding=False)


SMALLEST = torch.finfo(torch.float32).tiny


def widest(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.device.type == "mps" else torch.float64  # mps has no double precision


class _Reverse(torch.autograd.Function):
    """The states that a :class:`Reversible` returns, as a function of z0 and of all that f depends on."""

    @staticmethod
    def forward(
        ctx: Any, iteration: Reversible, results: list[Tensor], start: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.iteration = iteration
        ctx.save_for_backward(*sources)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ReversibleGradient has no second derivative (create_graph=True): use ImplicitGradient() or "
                "UnrolledGradient(steps)."
            )
        _ = ctx.saved_tensors  # raises if one of them was changed in place since the forward pass
        return None, None, *ctx.iteration.backward(cotangents)

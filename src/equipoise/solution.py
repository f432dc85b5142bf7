"""What every solve returns: a value, what became of each sample, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Result(IntEnum):
    """What became of one sample; ``Result.X.message`` says it in a sentence, with a remedy."""

    CONVERGED = 0
    MAX_STEPS = 1
    NONFINITE = 2
    STALLED = 3

    @property
    def message(self) -> str:
        return _MESSAGES[self]


_MESSAGES = {
    Result.CONVERGED: "The residual is within the tolerance.",
    Result.MAX_STEPS: (
        "The residual was still above the tolerance when the steps ran out: raise Tolerance.max_steps, "
        "loosen Tolerance.relative, or try another solver (equipoise.compare_solvers shows which one suits)."
    ),
    Result.NONFINITE: (
        "f returned NaN or infinity: check the inputs and the weights, start from a smaller z0, or damp the solver. "
        "The best finite iterate is returned."
    ),
    Result.STALLED: (
        "The residual stopped shrinking: the tolerance may lie below rounding, or f may not be contractive here "
        "(equipoise.diagnose tells which); loosen the tolerance, use float64, or change the solver."
    ),
}


class ConvergenceWarning(RuntimeWarning):
    """Some samples of a solve failed; the message counts them and names a remedy."""


class ConvergenceError(RuntimeError):
    """Some samples of a solve failed and ``on_failure="raise"`` was asked for; ``statistics`` tells which."""

    def __init__(self, message: str, statistics: Statistics):
        super().__init__(message)
        self.statistics = statistics


@dataclass
class Statistics:
    """What one solve, forward or backward, took. Per-sample fields have shape (batch,).

    Attributes:
        result: codes of :class:`Result`.
        steps: solver steps each sample took until it stopped; the first evaluation of f is step 1.
        residual: ||f(z) - z|| / ||f(z)|| at the value returned, per sample over all leaves together.
        evaluations: calls of f (and of its Jacobian products) by the solver.
        rows: samples x calls really computed; gathering keeps it near ``steps.sum()``.
        trace: (checks, batch) residuals at every check, if asked for; a sample that has stopped keeps its last entry.
    """

    result: Tensor
    steps: Tensor
    residual: Tensor
    evaluations: int
    rows: int
    trace: Tensor | None = None

    @property
    def converged(self) -> Tensor:
        return self.result == Result.CONVERGED

    def take(self, rows: Tensor) -> Statistics:
        """These statistics of some samples, without a trace."""
        result, steps, residual = (entry[rows] for entry in (self.result, self.steps, self.residual))
        return Statistics(result, steps, residual, self.evaluations, self.rows)

    def spread(self, rows: Tensor, batch: int) -> Statistics:
        """These statistics of the samples ``rows`` as those of a whole batch; the others had no finite f to solve."""
        if len(rows) == batch:
            return self
        result = torch.full((batch,), int(Result.NONFINITE), dtype=self.result.dtype, device=rows.device)
        residual = torch.full((batch,), torch.inf, dtype=self.residual.dtype, device=rows.device)
        return Statistics(
            result=result.index_copy(0, rows, self.result),
            steps=torch.zeros_like(result).index_copy(0, rows, self.steps),
            residual=residual.index_copy(0, rows, self.residual),
            evaluations=self.evaluations,
            rows=self.rows,
        )

    def counts(self) -> dict[Result, int]:
        """How many samples met each result; results that did not occur are left out."""
        codes = self.result.tolist()
        return {r: n for r in Result if (n := codes.count(int(r)))}

    def __str__(self) -> str:
        batch = self.result.numel()
        if batch == 0:
            return "an empty batch: nothing to solve"
        steps, residual = self.steps.float(), self.residual.double()
        return (
            f"{int(self.converged.sum())} of {batch} samples converged\n"
            f"steps median {steps.median():.0f}, most {steps.max():.0f}; "
            f"residual median {residual.median():.1e}, worst {residual.max():.1e}; "
            f"{self.evaluations} evaluations, {self.rows} rows"
        )


@dataclass
class Solution:
    """The outcome of :func:`equipoise.fixed_point`.

    Attributes:
        value: the equilibrium, structured like ``z0``; differentiable when a gradient was needed.
        stats: :class:`Statistics` of the forward solve.
        backward: :class:`Statistics` of the backward solve, filled once it has run.
        adjoint: the solution of the backward solve, structured like ``value``; pass it to
            ``ImplicitGradient(start=...)`` to warm-start the next one.

    Example:
        >>> sol = eq.fixed_point(lambda z, x: torch.cos(z) * x, torch.zeros(4, 1), torch.rand(4, 1))
        >>> print(sol)
    """

    value: Any
    stats: Statistics
    backward: Statistics | None = None
    adjoint: Any = None
    solved: Any = field(default=None, repr=False)  # a solvers.base.Solved: what equipoise.diagnose looks at

    @property
    def result(self) -> Tensor:
        return self.stats.result

    @property
    def converged(self) -> Tensor:
        return self.stats.converged

    def __str__(self) -> str:
        story = str(self.stats)
        failures = {r: n for r, n in self.stats.counts().items() if r != Result.CONVERGED}
        if failures:
            kinds = ", ".join(f"{n} {r.name}" for r, n in failures.items())
            story += f"\n{kinds}: {max(failures, key=failures.__getitem__).message}"
        elif self.backward is not None:
            story += f"\nbackward: {' - '.join(str(self.backward).splitlines())}"
        elif self.result.numel():
            story += "\nevery sample is within the tolerance"
        return story

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solved": None}  # f may be a closure, which does not pickle


def failure_message(stats: Statistics, which: str) -> str | None:
    """The sentence about failed samples of the ``which`` ("forward", "backward") solve, or None if there are none."""
    counts = stats.counts()
    counts.pop(Result.CONVERGED, None)
    if not counts:
        return None
    failed = ~stats.converged
    worst = torch.where(failed, stats.residual, torch.zeros_like(stats.residual)).max()
    kinds = ", ".join(f"{n} {r.name}" for r, n in counts.items())
    commonest = max(counts, key=counts.__getitem__)
    advice = commonest.message
    if commonest == Result.NONFINITE and bool((stats.steps[failed] == 1).all()):
        advice = "f is NaN or infinite at the very start: check the inputs, z0 and the weights."
    if which == "backward":
        advice += " The backward solve has settings of its own: ImplicitGradient(solver=..., tolerance=...)."
    return (
        f"the {which} solve failed for {int(failed.sum())} of {failed.numel()} samples ({kinds}; "
        f"worst residual {worst:.1e} after {stats.evaluations} evaluations). {advice}"
    )

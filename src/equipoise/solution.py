"""What every solve returns: a value, what became of each sample, and what it cost."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
import weakref
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
    COUPLED = 4

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
    Result.COUPLED: (
        "f mixes the samples of the batch, so a sample that had stopped was not solved any more once others moved: "
        "put the batch first (batch_first=True in attention and recurrent layers), normalise each sample by itself, or "
        "solve the whole batch as one problem with coupled=True. The residual is that of the value returned."
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
        rounded: samples that converged to the rounding of the numbers f computes with, because the tolerance asks for
            less than that resolves; None where it does not.
    """

    result: Tensor
    steps: Tensor
    residual: Tensor
    evaluations: int
    rows: int
    trace: Tensor | None = None
    rounded: Tensor | None = None

    @property
    def converged(self) -> Tensor:
        return self.result == Result.CONVERGED

    def take(self, rows: Tensor) -> Statistics:
        """These statistics of some samples, without a trace."""
        result, steps, residual = (entry[rows] for entry in (self.result, self.steps, self.residual))
        return Statistics(result, steps, residual, self.evaluations, self.rows)

    def expand(self, batch: int) -> Statistics:
        """Return the statistics of one coupled problem as those of each of its ``batch`` samples."""
        per_sample = {
            name: entry.expand(*entry.shape[:-1], batch).clone()
            for name in ("result", "steps", "residual", "trace", "rounded")
            if (entry := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **per_sample)

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
        rounded = 0 if self.rounded is None else int(self.rounded.sum())
        precision = f" ({rounded} to rounding, short of the tolerance)" if rounded else ""
        return (
            f"{int(self.converged.sum())} of {batch} samples converged{precision}\n"
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
            rounded = self.stats.rounded is not None and bool(self.stats.rounded.any())
            story += f"\n{TO_ROUNDING if rounded else 'every sample is within the tolerance'}"
        return story

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solved": None}  # f may be a closure, which does not pickle


TO_ROUNDING = (
    "the tolerance is below what the numbers f computes with resolve: loosen it, or compute in wider ones "
    "(float32, float64)"
)


def failure_advice(stats: Statistics, which: str, *, below_rounding: bool) -> tuple[dict[Result, int], str]:
    """Return how many samples of the ``which`` ("forward", "backward") solve failed in which way, and a remedy.

    Args:
        below_rounding: whether the tolerance is below what the numbers resolve.
    """
    counts = stats.counts()
    counts.pop(Result.CONVERGED, None)
    if not counts:
        return {}, ""
    commonest = max(counts, key=counts.__getitem__)
    advice = commonest.message
    if commonest == Result.NONFINITE and bool((stats.steps[~stats.converged] == 1).all()):
        advice = "f is NaN or infinite at the very start: check the inputs, z0 and the weights."
    if commonest in (Result.MAX_STEPS, Result.STALLED) and below_rounding:
        advice = f"{TO_ROUNDING[0].upper()}{TO_ROUNDING[1:]}. {advice}"
    if which == "backward":
        advice += " The backward solve has settings of its own: ImplicitGradient(solver=..., tolerance=...)."
    return counts, advice


@dataclass
class Report:
    """Where a solve reports how it went: a warning or an error, and the Solution if it is still in use."""

    on_failure: str
    solution: weakref.ref[Solution] | None = None  # weak: its value holds the graph that holds this

    def failure(self, stats: Statistics, which: str, *, below_rounding: bool) -> None:
        """Warn or raise if samples failed.

        A warning has no numbers in it: Python shows it once per line of the user's code and kind of failure. The
        numbers are in the Solution, and in the error.
        """
        if self.on_failure == "ignore":
            return
        counts, advice = failure_advice(stats, which, below_rounding=below_rounding)
        if not counts:
            return
        if self.on_failure == "raise":
            failed = ~stats.converged
            worst = torch.where(failed, stats.residual, torch.zeros_like(stats.residual)).max()
            kinds = ", ".join(f"{n} {r.name}" for r, n in counts.items())
            raise ConvergenceError(
                f"the {which} solve failed for {int(failed.sum())} of {failed.numel()} samples ({kinds}; worst "
                f"residual {worst:.1e} after {stats.evaluations} evaluations). {advice}",
                stats,
            )
        kind = max(counts, key=counts.__getitem__).name
        message = f"the {which} solve failed for some samples ({kind}; see Solution.stats). {advice}"
        warn_user(message, ConvergenceWarning)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of code that is neither this package's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


INTERNAL = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))

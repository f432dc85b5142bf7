"""What every solve returns: a value, the result of each sample, and the cost; and how failures are reported."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Result(IntEnum):
    """The outcome for one sample; ``Result.X.message`` is a sentence with a remedy."""

    CONVERGED = 0, "The residual is within the tolerance."
    MAX_STEPS = (
        1,
        "The residual was still above the tolerance when the steps ran out: raise Tolerance.max_steps, loosen "
        "Tolerance.relative, or try another solver (equipoise.compare_solvers compares them).",
    )
    NONFINITE = (
        2,
        "f returned NaN or infinity: check the inputs and the weights, start from a smaller z0, or damp the solver. "
        "The best finite iterate is returned.",
    )
    STALLED = (
        3,
        "The residual stopped shrinking: the tolerance may be below rounding error, or f may not be contractive here "
        "(equipoise.diagnose shows which); loosen the tolerance, use float64, or change the solver.",
    )
    COUPLED = (
        4,
        "f mixes the samples of the batch, so a sample that had converged was no longer solved once others changed: "
        "put the batch first (batch_first=True in attention and recurrent layers), normalise each sample separately, "
        "or solve the whole batch as one problem with coupled=True. The residual is that of the returned value.",
    )
    DRIFTED = (
        5,
        "Run backward, the steps did not lead back to z0, so the gradient is inaccurate: take fewer steps or raise the "
        "damping of ReversibleGradient; an f that is not the same function at every call has the same effect.",
    )

    message: str

    def __new__(cls, code: int, message: str) -> Self:
        result = int.__new__(cls, code)
        result._value_, result.message = code, message
        return result


class ConvergenceWarning(RuntimeWarning):
    """Issued when some samples of a solve fail; the message names a remedy."""


class ConvergenceError(RuntimeError):
    """Raised when some samples of a solve fail and ``on_failure="raise"``; ``statistics`` shows which."""

    def __init__(self, message: str, statistics: Statistics):
        super().__init__(message)
        self.statistics = statistics


@dataclass
class Statistics:
    """The results and the cost of one solve, forward or backward. Per-sample fields have shape (batch,).

    Attributes:
        result: codes of :class:`Result`.
        steps: number of solver steps until each sample stopped; the first evaluation of f is step 1.
        residual: ||f(z) - z|| / ||f(z)|| at the returned value, per sample over all leaves together.
        evaluations: number of calls of f (and of its Jacobian products) by the solver.
        rows: samples x calls actually computed; gathering keeps it near ``steps.sum()``.
        trace: (checks, batch) residuals at every check, if requested; a sample that has stopped repeats its last entry.
        rounded: samples that converged to rounding error only, because the tolerance is below it; None if it is not.
        products: number of vector-Jacobian products of :func:`equipoise.optimize_input`.
    """

    result: Tensor
    steps: Tensor
    residual: Tensor
    evaluations: int
    rows: int
    trace: Tensor | None = None
    rounded: Tensor | None = None
    products: int = 0

    @property
    def converged(self) -> Tensor:
        return self.result == Result.CONVERGED

    def take(self, rows: Tensor) -> Statistics:
        """Return the statistics of the samples ``rows``, without a trace."""
        return Statistics(self.result[rows], self.steps[rows], self.residual[rows], self.evaluations, self.rows)

    def expand(self, batch: int) -> Statistics:
        """Return the statistics of one coupled problem as those of each of its ``batch`` samples."""
        per_sample = {
            name: entry.expand(*entry.shape[:-1], batch).clone()
            for name in ("result", "steps", "residual", "trace", "rounded")
            if (entry := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **per_sample)

    def spread(self, rows: Tensor, batch: int) -> Statistics:
        """Return the statistics of the samples ``rows`` as those of a whole batch; f was not finite at the others."""

        def filled(entry: Tensor, missing: float) -> Tensor:
            return entry.new_full((batch,), missing).index_copy(0, rows, entry)

        result, steps = filled(self.result, int(Result.NONFINITE)), filled(self.steps, 0)
        return Statistics(result, steps, filled(self.residual, torch.inf), self.evaluations, self.rows)

    def counts(self) -> dict[Result, int]:
        """Return the number of samples with each result; results that did not occur are left out."""
        codes = self.result.tolist()
        return {r: n for r in Result if (n := codes.count(int(r)))}

    def failures(self) -> dict[Result, int]:
        """Return :meth:`counts` without the samples that converged, the commonest result first."""
        failures = [(r, n) for r, n in self.counts().items() if r != Result.CONVERGED]
        return dict(sorted(failures, key=lambda failure: -failure[1]))

    def __str__(self) -> str:
        batch = self.result.numel()
        if batch == 0:
            return "an empty batch: nothing to solve"
        steps, residual = self.steps.float(), self.residual.double()
        rounded = 0 if self.rounded is None else int(self.rounded.sum())
        precision = f" ({rounded} to rounding error, above the tolerance)" if rounded else ""
        return (
            f"{int(self.converged.sum())} of {batch} samples converged{precision}\n"
            f"steps median {steps.median():.0f}, most {steps.max():.0f}; "
            f"residual median {residual.median():.1e}, worst {residual.max():.1e}; "
            f"{self.evaluations} evaluations, {self.rows} rows"
        )


class SolveRecord(Protocol):
    """The solve behind a Solution, in rows, as :func:`equipoise.diagnose` examines it."""

    @property
    def z(self) -> Tensor: ...
    @property
    def problem(self) -> object: ...
    @property
    def solver(self) -> object: ...
    @property
    def tolerance(self) -> object: ...


@dataclass
class Solution:
    """The outcome of :func:`equipoise.fixed_point`.

    Attributes:
        value: the equilibrium, structured like ``z0``; differentiable when a gradient was needed.
        stats: :class:`Statistics` of the forward solve.
        backward: :class:`Statistics` of the backward solve, filled once it has run.
        adjoint: the solution of the backward solve, structured like ``value``; pass it to
            ``ImplicitGradient(start=...)`` to warm-start the next one.
        kept: the iterates at the steps ``keep``, each structured like ``value``, with gradients of one step.
        aux: what f returned beside the value, with ``aux=True``.

    Example:
        >>> sol = eq.fixed_point(lambda z, x: torch.cos(z) * x, torch.zeros(4, 1), torch.rand(4, 1))
        >>> print(sol)
    """

    value: Any
    stats: Statistics
    backward: Statistics | None = None
    adjoint: Any = None
    kept: tuple[Any, ...] = ()
    aux: Any = None
    solved: SolveRecord | None = field(default=None, repr=False)

    @property
    def result(self) -> Tensor:
        return self.stats.result

    @property
    def converged(self) -> Tensor:
        return self.stats.converged

    def __str__(self) -> str:
        if failures := self.stats.failures():
            outcome = f"{tally(failures)}: {next(iter(failures)).message}"
        elif self.backward is not None:
            outcome = f"backward: {' - '.join(str(self.backward).splitlines())}"
        elif not self.result.numel():
            return str(self.stats)
        else:
            rounded = self.stats.rounded is not None and bool(self.stats.rounded.any())
            outcome = TO_ROUNDING if rounded else "every sample is within the tolerance"
        return f"{self.stats}\n{outcome}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solved": None}  # f may be a closure, which does not pickle


TO_ROUNDING = (
    "the tolerance is below the rounding error of the dtype that f computes in: loosen it, or use a wider dtype "
    "(float32, float64)"
)


def tally(counts: dict[Result, int]) -> str:
    return ", ".join(f"{n} {result.name}" for result, n in counts.items())


@dataclass
class Report:
    """How a solve reports failures: by a warning or an error, and on its Solution while that is in use."""

    on_failure: str
    solution: Callable[[], Any] = lambda: None  # a weak reference: its value holds the graph that holds this
    settings: str = "ImplicitGradient(solver=..., tolerance=...)"  # options of the backward solve, for the advice
    owner: str = "Solution"  # the object whose ``stats`` show the failures
    nonfinite: str | None = None  # what to say of a forward NONFINITE, if more than f is evaluated

    def failure(self, stats: Statistics, which: str, *, below_rounding: bool) -> None:
        """Warn or raise if samples failed."""
        failures = stats.failures()
        if not failures or self.on_failure == "ignore":
            return
        kind = next(iter(failures))
        advice = kind.message
        if kind == Result.NONFINITE and bool((stats.steps[~stats.converged] == 1).all()):
            advice = "f is NaN or infinite at the very start: check the inputs, z0 and the weights."
        if kind == Result.NONFINITE and which == "forward" and self.nonfinite is not None:
            advice = self.nonfinite
        if kind in (Result.MAX_STEPS, Result.STALLED) and below_rounding:
            advice = f"{TO_ROUNDING[0].upper()}{TO_ROUNDING[1:]}. {advice}"
        if which == "backward":
            advice += f" The backward solve has its own settings: {self.settings}."
        if self.on_failure == "raise":
            failed = ~stats.converged
            raise ConvergenceError(
                f"the {which} solve failed for {int(failed.sum())} of {failed.numel()} samples ({tally(failures)}; "
                f"worst residual {stats.residual[failed].max():.1e} after {stats.evaluations} evaluations). {advice}",
                stats,
            )
        # Without numbers, so that Python shows it once per line of user code and kind of failure.
        message = f"the {which} solve failed for some samples ({kind.name}; see {self.owner}.stats). {advice}"
        warn_user(message, ConvergenceWarning)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of code outside this package and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


INTERNAL = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))

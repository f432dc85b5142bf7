"""Integrate dy/dt = f(t, y) from t = 0 to 1 with torchdiffeq, reported like the solve of a fixed point."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from equipoise.fixed_point import collect
from equipoise.options import option, options
from equipoise.solution import Report, Result, Solution, Statistics

METHODS = ("dopri5", "dopri8", "bosh3", "adaptive_heun")  # those with an adaptive step size


@options
class ODESolver:
    """Options of an integration; the defaults are those of the code of Dupont et al. (2019).

    Args:
        method: method of torchdiffeq with an adaptive step size.
        tolerance: relative and absolute tolerance of the error of a step, root mean square over the whole batch.
        max_steps: largest number of steps, accepted and rejected.
        adjoint: whether gradients integrate the adjoint equation backward in time, which takes constant memory
            (R. T. Q. Chen et al., "Neural ordinary differential equations", 2018); otherwise they are back-propagated
            through every step.
    """

    method: str = option(default="dopri5", among=METHODS)
    tolerance: float = option(default=1e-3, above=0)
    max_steps: int = option(default=1000, at_least=1, whole=True)
    adjoint: bool = option(default=True, kind=bool)


def integrate(f: nn.Module, y0: Tensor, solver: ODESolver, on_failure: str = "warn") -> Solution:
    """Return y(1) for y(0) = y0 and dy/dt = f(t, y), differentiable with respect to y0 and the parameters of f.

    The step size is chosen for the whole batch, so all samples share one result. ``steps`` and ``evaluations``
    both count evaluations of f, forward and, with the adjoint method, backward. ``residual`` is the tolerance, which
    bounds the estimated error of every step.

    An integration that fails returns the state at the last accepted step, and its gradient is NaN; so is the gradient
    where only the backward integration fails. Both are reported: on the Solution, and as ``on_failure`` says.

    Args:
        f: module ``f(t, y) -> dy/dt``.
        y0: initial value, batch first.
        solver: options of the integration.
        on_failure: "warn", "raise" or "ignore".
    """
    report = Report(on_failure, settings="those of ODESolver, which it shares with the forward one")
    run = Integration(f, y0, solver, report)
    weights = [parameter for parameter in f.parameters() if parameter.requires_grad]
    recorded = torch.is_grad_enabled() and (y0.requires_grad or bool(weights))
    value = None if recorded and solver.adjoint else run.attempt(run.solve, y0)
    if recorded and value is None:
        value = Guarded.apply(run, y0, *weights)
    solution = Solution(run.last if value is None else value, run.statistics())
    report.solution = run.solution = weakref.ref(solution)
    report.failure(solution.stats, "forward", below_rounding=False)
    collect(solution)
    return solution


class Integration:
    """One integration: f with a counter, the last accepted step, and what went wrong."""

    def __init__(self, f: nn.Module, y0: Tensor, solver: ODESolver, report: Report):
        self.f, self.solver, self.report = f, solver, report
        self.samples, self.device = len(y0), y0.device
        self.time, self.last = 0.0, y0.detach()
        self.evaluations, self.result = 0, Result.CONVERGED
        self.solution: weakref.ref[Solution] | None = None

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.evaluations += 1
        return self.f(t, y).to(y.dtype)  # autocast narrows f, not the state

    def callback_accept_step(self, t: Tensor, y: Tensor, _: Tensor) -> None:
        """Remember the state before a step that is accepted (called by torchdiffeq)."""
        self.time, self.last = t, y.detach()

    def solve(self, y0: Tensor) -> Tensor:
        """Return y(1), with its graph if gradients are enabled."""
        odeint, odeint_adjoint = import_torchdiffeq()
        times = torch.tensor([0.0, 1.0], dtype=y0.dtype, device=y0.device)
        steps = {"max_num_steps": self.solver.max_steps}
        # The last step ends at t = 1 (backward: at 0): interpolating within a longer one would be less accurate.
        settings: dict[str, Any] = {"options": {**steps, "step_t": times[1:]}, "method": self.solver.method}
        settings |= {"rtol": self.solver.tolerance, "atol": self.solver.tolerance}
        if torch.is_grad_enabled() and self.solver.adjoint:
            settings |= {
                "adjoint_options": {**steps, "step_t": times[:1]},
                "adjoint_params": tuple(self.f.parameters()),
            }
            return odeint_adjoint(self, y0, times, **settings)[1]
        return odeint(self, y0, times, **settings)[1]

    def attempt(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Return what an integration computes; if torchdiffeq gives up, return None and remember why."""
        self.evaluations, self.result = 0, Result.CONVERGED
        try:
            return compute(*arguments)
        except AssertionError as error:  # torchdiffeq has no error class of its own
            reasons = {"max_num_steps": Result.MAX_STEPS, "non-finite": Result.NONFINITE, "underflow": Result.STALLED}
            found = [result for words, result in reasons.items() if str(error).startswith(words)]
            if not found:
                raise
            with torch.no_grad():  # a step that overflows is halved until it vanishes
                finite = torch.isfinite(self.f(torch.as_tensor(self.time).to(self.last.dtype), self.last)).all()
            self.result = found[0] if finite else Result.NONFINITE
            return None

    def pull_back(self, value: Tensor, inputs: Sequence[Tensor], cotangent: Tensor) -> Sequence[Tensor] | None:
        """Return the gradient of y(1) with respect to the inputs, or None; report the backward integration."""
        found = self.attempt(lambda: torch.autograd.grad(value, inputs, cotangent, retain_graph=True))
        stats = self.statistics()
        if self.solution is not None and (solution := self.solution()) is not None:
            solution.backward = stats
        self.report.failure(stats, "backward", below_rounding=False)
        return found

    def statistics(self) -> Statistics:
        """Return the statistics of the latest attempt."""
        result = torch.full((self.samples,), int(self.result), device=self.device)
        residual = self.solver.tolerance if self.result == Result.CONVERGED else torch.inf
        return Statistics(
            result,
            torch.full_like(result, self.evaluations),
            torch.full((self.samples,), residual, device=self.device),
            self.evaluations,
            self.evaluations * self.samples,
        )


def import_torchdiffeq() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from torchdiffeq import odeint, odeint_adjoint
    except ImportError as error:
        message = "a Neural ODE needs the package torchdiffeq: pip install 'equipoise[baselines]'."
        raise ImportError(message) from error
    return odeint, odeint_adjoint


class Guarded(torch.autograd.Function):
    """y(1), whose backward pass is counted and reported, and is NaN instead of an exception where it fails."""

    @staticmethod
    def forward(ctx: Any, run: Integration, y0: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.value = run, (y0.detach().requires_grad_(), *weights), None
        if run.solver.adjoint:  # else it was integrated before, and failed
            with torch.enable_grad():
                ctx.value = run.attempt(run.solve, ctx.inputs[0])
        return run.last.clone() if ctx.value is None else ctx.value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # type: ignore[override]
        found = None if ctx.value is None else ctx.run.pull_back(ctx.value, ctx.inputs, *cotangents)
        return (None, *([torch.full_like(tensor, torch.nan) for tensor in ctx.inputs] if found is None else found))

"""Give both libraries one interface: solve a problem, or solve and differentiate it, through a probe."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
import torchdeq
from torch import Tensor, nn

import equipoise as eq
from probe import Probe, Reached, Watch
from problems import Problem, State, leaves


class Contender(Protocol):
    name: str

    def prepare(self, problem: Problem, relative: float) -> int | None:
        """Aim at a relative residual (worst sample); return the calls of f this takes, None if too many."""
        ...

    def prepare_backward(self, problem: Problem, relative: float) -> int | None:
        """Do the same for the adjoint problem, counted in products with J^T; call `prepare` first."""
        ...

    def solve(self, problem: Problem, probe: Probe) -> State: ...

    def differentiable(self, problem: Problem, probe: Probe) -> State:
        """Return the equilibrium with an implicit backward pass attached."""
        ...


def contenders(limit: eq.Tolerance) -> Sequence[Contender]:
    return (
        Equipoise("Picard()", eq.Picard(), limit),
        Equipoise("Anderson(6)", eq.Anderson(memory=6), limit),
        Equipoise("Anderson(6), hoist(f)", eq.Anderson(memory=6), limit, hoist=True),
        Equipoise("Anderson(6, kind=1)", eq.Anderson(memory=6, kind=1), limit),
        Equipoise("Broyden(12)", eq.Broyden(memory=12), limit),
        TorchDEQ("fixed_point_iter", limit.max_steps),
        TorchDEQ("anderson", limit.max_steps),
        TorchDEQ("broyden", limit.max_steps),
    )


def direction(problem: Problem) -> State:
    """Return v, the gradient of the loss <z, v>: the source of the adjoint problem, the same for all contenders."""
    generator = torch.Generator().manual_seed(1)
    parts = tuple(torch.randn(z.shape, generator=generator) for z in leaves(problem.z0))
    return parts[0] if isinstance(problem.z0, Tensor) else parts


def loss(z: State, v: State) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(leaves(z), leaves(v), strict=True)]).sum()


@cache
def hoisted(f: nn.Module) -> nn.Module:
    warnings.filterwarnings("ignore", "eq.hoist found nothing")  # where x is only added to a function of z
    return eq.hoist(f)


class Equipoise:
    """equipoise: each sample stops by its own residual; the backward pass uses the same solver and tolerance."""

    def __init__(self, name: str, solver: Any, limit: eq.Tolerance, *, hoist: bool = False) -> None:
        self.name = name
        self.solver = solver
        self.hoist = hoist
        self.tolerance = limit

    def prepare(self, problem: Problem, relative: float) -> int | None:
        self.tolerance = replace(self.tolerance, relative=relative)
        probe = Probe(problem.f)
        with torch.no_grad():
            return probe.calls if self._solution(problem, probe).converged.all() else None

    def prepare_backward(self, problem: Problem, relative: float) -> int | None:
        self.tolerance = replace(self.tolerance, relative=relative)
        probe = Probe(problem.f)
        solution = self._solution(problem, probe)
        torch.autograd.grad(loss(solution.value, direction(problem)), list(problem.f.parameters()))
        return probe.products if solution.backward is not None and solution.backward.converged.all() else None

    def solve(self, problem: Problem, probe: Probe) -> State:
        with torch.no_grad():
            return self._solution(problem, probe).value

    def differentiable(self, problem: Problem, probe: Probe) -> State:
        return self._solution(problem, probe).value

    def _solution(self, problem: Problem, probe: Probe) -> eq.Solution:
        if self.hoist:
            probe.f = hoisted(problem.f)
        return eq.fixed_point(
            probe,
            problem.z0,
            *problem.inputs,
            solver=self.solver,
            tolerance=self.tolerance,
            gradient=eq.ImplicitGradient(solver=self.solver, tolerance=self.tolerance),
            on_failure="ignore",
        )


class TorchDEQ:
    """torchdeq, given the number of iterations it needs, which treats it better than its own stopping rule.

    torchdeq stops when the worst *current* residual of the batch is small, which the plateau of its Anderson may never
    allow. So a calibration run finds the first call of f (or product with J^T) by which every sample has had an iterate
    within the tolerance, and the timed runs get exactly that number of iterations and a tolerance of zero.
    """

    def __init__(self, method: str, max_steps: int) -> None:
        self.name = f"torchdeq {method}"
        self.method = method
        self.max_steps = max_steps
        self.forward = self.backward = max_steps

    def prepare(self, problem: Problem, relative: float) -> int | None:
        self.forward = self.max_steps
        probe = Probe(problem.f, on_call=Watch(relative))
        try:
            self.solve(problem, probe)
        except Reached:
            self.forward = self._iterations(probe.calls)
            return probe.calls
        return None

    def prepare_backward(self, problem: Problem, relative: float) -> int | None:
        self.backward = self.max_steps
        v = direction(problem)
        probe = Probe(problem.f, on_product=Watch(relative, adjoint_source=v))
        value = self.differentiable(problem, probe)
        try:
            torch.autograd.grad(loss(value, v), list(problem.f.parameters()))
        except Reached:
            self.backward = self._iterations(probe.products)
            return probe.products
        return None

    def solve(self, problem: Problem, probe: Probe) -> State:
        with torch.no_grad():
            return self._apply(self._deq().eval(), problem, probe)

    def differentiable(self, problem: Problem, probe: Probe) -> State:
        # In training, torchdeq's Broyden returns the iterate before its last: one step less than asked for.
        return self._apply(self._deq().train(), problem, probe)

    def _deq(self) -> torch.nn.Module:
        # Beware: get_deq accepts and ignores any other keyword, misspelt ones included.
        return torchdeq.get_deq(
            ift=True,
            f_solver=self.method,
            f_max_iter=self.forward,
            f_tol=0.0,
            f_stop_mode="rel",
            b_solver=self.method,
            b_max_iter=self.backward,
            b_tol=0.0,
            b_stop_mode="rel",
        )

    def _apply(self, deq: torch.nn.Module, problem: Problem, probe: Probe) -> State:
        if isinstance(problem.z0, Tensor):
            values, _ = deq(lambda z: probe(z, *problem.inputs), problem.z0)
            return values[-1]
        values, _ = deq(lambda *z: probe(z, *problem.inputs), problem.z0)  # a tuple arrives as separate arguments
        return tuple(values[-1])

    def _iterations(self, calls: int) -> int:
        """torchdeq's Broyden does not count its first evaluation as an iteration."""
        return calls - 1 if self.method == "broyden" else calls

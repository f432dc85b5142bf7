"""Descent solvers for the objective that f minimises: proximal gradient with a line search, FISTA with restarts.

f(z) = W^T s(W h(z) + x) with s = prox_F is a proximal gradient step of size 1 on G(y) = F(y) + S(y), z = W^T y, where
the gradient of S is y - (W h(z) + x). Here the step size is chosen, and G is monitored.

P. Tseng, S. Yun, "A coordinate gradient descent method for nonsmooth separable minimization" (2009); A. Beck,
M. Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems" (2009); B. O'Donoghue,
E. Candes, "Adaptive restart for accelerated gradient schemes" (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.options import option, options
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import FunctionProblem, Problem, Structure
from equipoise.solvers import Anderson, Solver
from equipoise.solvers.base import State

SUFFICIENT = 1e-4  # share of the first-order decrease of G that a step has to achieve (Armijo)
EARLY = 2.5  # momentum theta below which a sample has made at most one step with momentum
HALVINGS = 30  # halvings of a step size, after which a step is negligible


class Minimizer(Protocol):
    """An f whose fixed points are stationary points of G; values are tuples of images."""

    activation: Any  # s, with prox
    preactivation: Callable[..., Any]  # (z, *inputs): W h(z) + x
    lower: Callable[..., Any]  # y: W^T y
    energy: Callable[..., Tensor]  # (y, z, *inputs): G of each sample, where z = W^T y


class Objective(Structure):
    """The objective G of a problem, evaluated on its rows."""

    requirement = "an f that minimises an objective, such as the cell of an OptEq, POptEq or MOptEq"

    def __init__(self, f: Minimizer, problem: FunctionProblem):
        self.f, self.problem = f, problem

    def preactivation(self, z: Tensor) -> Tensor:
        self.problem.count.add(len(z))
        return self.call(self.f.preactivation, z, *self.problem.inputs)

    def lower(self, y: Tensor) -> Tensor:
        return self.call(self.f.lower, y)

    def response(self, pre: Tensor) -> Tensor:
        return self.each(self.f.activation, pre)

    def prox(self, rows: Tensor, steps: Tensor) -> Tensor:
        image = torch.empty_like(rows)
        for step in steps.unique().tolist():
            at = (steps == step).nonzero().squeeze(1)
            image[at] = self.each(lambda part, step=step: self.f.activation.prox(part, step), rows[at])
        return image

    def value(self, y: Tensor, z: Tensor) -> Tensor:
        parts = (self.problem.unpack(rows) for rows in (y, z))
        return self.problem.in_scope(self.f.energy, *parts, *self.problem.inputs)

    def take(self, rows: Tensor, problem: FunctionProblem) -> Objective:
        return Objective(self.f, problem)

    def each(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a function to every tensor: an activation may depend on the shape of its images."""
        return self.call(lambda value: rebuild(value, [function(part) for _, part in leaves(value, "y")]), rows)

    def call(self, function: Callable[..., Any], rows: Tensor, *inputs: Any) -> Tensor:
        return self.problem.pack(self.problem.in_scope(function, self.problem.unpack(rows), *inputs))


@dataclass
class DescentState(State):
    """The state, with y, where z = W^T y, and W h(z) + x."""

    y: Tensor
    pre: Tensor


class DescentSolver(Solver):
    """A solver that uses the objective that f minimises."""

    needs = Objective

    def for_adjoint(self) -> Solver:
        return Anderson()  # the backward system is linear and has no objective

    def at(self, objective: Objective, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(z) and W h(z) + x."""
        pre = objective.preactivation(z)
        return objective.lower(objective.response(pre)), pre

    def begin(self, problem: Problem, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return z, f(z), y, W h(z) + x and G(y) to start from.

        y = W^-T z is known only for z = 0; from any other z, take a first step.
        """
        G, y, known = self.structure(problem, Objective), torch.zeros_like(z), (z == 0).all(dim=1, keepdim=True)
        if not bool(known.all()):
            y = torch.where(known, 0.0, G.response(G.preactivation(z)))
            z = torch.where(known, z, G.lower(y))
        image, pre = self.at(G, z)
        return z, image, y, pre, G.value(y, z)


def rounding(objective: Tensor) -> Tensor:
    """Return the rounding error of G."""
    return 8 * torch.finfo(objective.dtype).eps * (1 + objective.abs())


@dataclass
class LineSearchState(DescentState):
    """The state, with G(y) and the size of the next step, per sample."""

    objective: Tensor
    length: Tensor


@options
class ProximalGradient(DescentSolver):
    """y <- y + c (prox_F(y - grad S(y)) - y), c halved per sample until G decreases enough, so it cannot diverge.

    c starts at 1, the plain step of f, and never increases within a solve.

    Example:
        >>> model.equilibrium.solver = eq.ProximalGradient()
    """

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> LineSearchState:
        return LineSearchState(*self.begin(problem, z), z.new_ones(len(z)))

    def step(self, problem: Problem, state: LineSearchState) -> LineSearchState:
        G, length = self.structure(problem, Objective), state.length
        target = G.response(state.pre)
        slope = (target - state.y).square().sum(dim=1)  # to first order in c, G decreases by c times this

        def trial() -> tuple[Tensor, Tensor, Tensor]:
            y, z = (torch.lerp(a, b, length[:, None]) for a, b in ((state.y, target), (state.z, state.image)))
            return y, z, G.value(y, z)

        y, z, objective = trial()
        for _ in range(HALVINGS):
            enough = state.objective - SUFFICIENT * length * slope + rounding(state.objective)
            high = ~(objective <= enough) & torch.isfinite(slope)  # NaN is high, unless f itself is not finite
            if not bool(high.any()):
                break
            length = torch.where(high, length / 2, length)
            y, z, objective = trial()
        image, pre = self.at(G, z)
        # Where G cannot resolve the decrease, a reversed direction shows that the step was too long.
        turned = ((target - state.y) * (G.response(pre) - y)).sum(dim=1) < -slope / 2
        length = torch.where(turned, length / 2, length)
        return LineSearchState(z, image, y, pre, objective, length)


@dataclass
class MomentumState(DescentState):
    """The state, with the last y before extrapolation, its z and G, the momentum theta and the step size."""

    last: Tensor
    last_z: Tensor
    objective: Tensor
    momentum: Tensor
    length: Tensor


@options
class FISTA(DescentSolver):
    """Accelerated proximal gradient steps on G; a step that would increase G is undone and the momentum restarted.

    If G increases without momentum, or the direction reverses in the first step with it, the step was too long for the
    curvature of S, and its size is halved.

    Args:
        step_size: initial step size; 1/2 suits every model without diversity, whose curvature is at most 1 + ||W||^2.

    Example:
        >>> model.equilibrium.solver = eq.FISTA()
    """

    step_size: float = option(default=0.5, above=0, at_most=1)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> MomentumState:
        z, image, y, pre, objective = self.begin(problem, z)
        ones = z.new_ones(len(z))
        return MomentumState(z, image, y, pre, y, z, objective, ones, self.step_size * ones)

    def step(self, problem: Problem, state: MomentumState) -> MomentumState:
        G = self.structure(problem, Objective)
        new = G.prox(state.y + state.length[:, None] * (state.pre - state.y), state.length)
        new_z = G.lower(new)
        objective = G.value(new, new_z)
        rises = ~(objective <= state.objective + rounding(state.objective))  # NaN counts as a rise
        # Momentum that points uphill is dropped as well, before G increases (O'Donoghue and Candes, section 3.2).
        uphill = ((state.y - new) * (new - state.last)).sum(dim=1) > 0
        turned = ((new - state.last) * (state.y - state.last)).sum(dim=1) < 0
        flat = (objective - state.objective).abs() <= rounding(state.objective)  # the change is below rounding
        too_long = (rises & (state.momentum == 1)) | (turned & (flat | (state.momentum < EARLY)))
        before = torch.where(rises | uphill | (turned & flat), 1.0, state.momentum)
        after = torch.where(rises, 1.0, (1 + (1 + 4 * before.square()).sqrt()) / 2)
        share = ((before - 1) / after)[:, None]
        back = rises[:, None]
        y, z = (
            torch.where(back, last, torch.lerp(here, last, -share))
            for here, last in ((new, state.last), (new_z, state.last_z))
        )
        image, pre = self.at(G, z)
        last, last_z = (torch.where(back, a, b) for a, b in ((state.last, new), (state.last_z, new_z)))
        objective = torch.where(rises, state.objective, objective)
        length = torch.where(too_long, state.length / 2, state.length)
        return MomentumState(z, image, y, pre, last, last_z, objective, after, length)

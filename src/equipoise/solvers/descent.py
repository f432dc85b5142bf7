"""Solvers that go downhill on a hidden objective: proximal gradient with a line search, FISTA with restarts.

Where f(z) = W^T s(W h(z) + x) with s = prox_F, a fixed point is a stationary point of G(y) = F(y) + S(y), z = W^T y,
and the gradient of S at y is y - (W h(z) + x). So f is a proximal gradient step of length 1 on G: here its length is
chosen, and G is watched. An f shows this by its methods ``preactivation(z, *inputs)``, ``lower(y)``,
``energy(y, z, *inputs)`` and its proximal ``activation``; see :class:`equipoise.models.opteq.branches.Branches`.

P. Tseng, S. Yun, "A coordinate gradient descent method for nonsmooth separable minimization" (2009); A. Beck,
M. Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems" (2009); B. O'Donoghue,
E. Candes, "Adaptive restart for accelerated gradient schemes" (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.options import options, require
from equipoise.problem.function import FunctionProblem, Problem
from equipoise.problem.layout import leaves, rebuild
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver, State

NEEDED = ("preactivation", "lower", "energy", "activation")
SUFFICIENT = 1e-4  # of the decrease that the step would bring if G were as flat as it is convex (Armijo)
EARLY = 2.5  # momentum, theta, of a sample that has made at most one step with any
HALVINGS = 30  # of a step; by then it moves nothing


class Hidden:
    """G and its parts on rows."""

    def __init__(self, problem: FunctionProblem):
        self.problem, self.f = problem, problem.f

    def preactivation(self, z: Tensor) -> Tensor:
        """W h(z) + x: an evaluation of f, but for the last product."""
        self.problem.count.add(len(z))
        return self.call(self.f.preactivation, z, *self.problem.inputs)  # type: ignore[attr-defined]

    def lower(self, y: Tensor) -> Tensor:
        """z = W^T y."""
        return self.call(self.f.lower, y)  # type: ignore[attr-defined]

    def objective(self, y: Tensor, z: Tensor) -> Tensor:
        """G, (batch,)."""
        parts = (self.problem.unpack(rows) for rows in (y, z))
        with self.problem.scope.entered():
            return self.f.energy(*parts, *self.problem.inputs)  # type: ignore[attr-defined]

    def response(self, pre: Tensor) -> Tensor:
        """s, of which f(z) is W^T."""
        return self.each(self.f.activation, pre)  # type: ignore[attr-defined]

    def prox(self, rows: Tensor, steps: Tensor) -> Tensor:
        """prox_F of the length of each sample."""
        found = torch.empty_like(rows)
        activation = self.f.activation  # type: ignore[attr-defined]
        for step in steps.unique().tolist():
            at = (steps == step).nonzero().squeeze(1)
            found[at] = self.each(lambda part, step=step: activation.prox(part, step), rows[at])
        return found

    def each(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """A function of every branch: an activation may look at the shape of its images."""
        return self.call(lambda value: rebuild(value, [function(part) for _, part in leaves(value, "y")]), rows)

    def call(self, function: Any, rows: Tensor, *inputs: Any) -> Tensor:
        with self.problem.scope.entered():
            return self.problem.pack(function(self.problem.unpack(rows), *inputs))


@dataclass
class DescentState(State):
    """Adds y, z = W^T y, and what s makes of z: the image is W^T of it."""

    y: Tensor
    pre: Tensor


class DescentSolver(Solver):
    """A solver that needs to see the objective behind f."""

    structured = True

    def hidden(self, problem: Problem) -> Hidden:
        f = getattr(problem, "f", None)
        if not isinstance(problem, FunctionProblem) or not all(hasattr(f, name) for name in NEEDED):
            raise TypeError(
                f"{type(self).__name__} goes downhill on the objective behind f, and this f shows none: use the cell "
                "of an OptEq, POptEq or MOptEq, or solve by Anderson, Broyden or Picard."
            )
        if (reason := getattr(f, "refuses_descent", None)) is not None:
            raise ValueError(f"{type(self).__name__} cannot solve this f: {reason}")
        return Hidden(problem)

    def for_adjoint(self) -> Solver:
        return Anderson()  # the backward system is linear, and has no objective

    def at(self, hidden: Hidden, z: Tensor) -> tuple[Tensor, Tensor]:
        """f(z) and W h(z) + x."""
        pre = hidden.preactivation(z)
        return hidden.lower(hidden.response(pre)), pre

    def first(self, hidden: Hidden, z: Tensor) -> tuple[Tensor, Tensor]:
        """The y to begin with, and its z. Of a start other than zero W^-T z is not known: its first step is taken."""
        known = (z == 0).all(dim=1, keepdim=True)
        if bool(known.all()):
            return torch.zeros_like(z), z
        y = torch.where(known, 0.0, hidden.response(hidden.preactivation(z)))
        return y, torch.where(known, z, hidden.lower(y))


def rounding(objective: Tensor) -> Tensor:
    """What G may rise by without anyone knowing."""
    return 8 * torch.finfo(objective.dtype).eps * (1 + objective.abs())


@dataclass
class LineSearchState(DescentState):
    """Adds G(y) and the length of the next step, per sample."""

    objective: Tensor
    length: Tensor


@options
class ProximalGradient(DescentSolver):
    """y <- y + c (prox_F(y - grad S(y)) - y), c halved per sample until G has fallen enough: it cannot diverge.

    c starts at 1, the plain step of f, and does not grow again within a solve.

    Example:
        >>> model.equilibrium.solver = eq.ProximalGradient()
    """

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> LineSearchState:
        hidden = self.hidden(problem)
        y, z = self.first(hidden, z)
        image, pre = self.at(hidden, z)
        return LineSearchState(z, image, y, pre, hidden.objective(y, z), z.new_ones(len(z)))

    def step(self, problem: Problem, state: LineSearchState) -> LineSearchState:
        hidden, length = self.hidden(problem), state.length
        target = hidden.response(state.pre)
        slope = (target - state.y).square().sum(dim=1)  # G falls by at least c times that, to first order in c

        def trial() -> tuple[Tensor, Tensor, Tensor]:
            y, z = (torch.lerp(a, b, length[:, None]) for a, b in ((state.y, target), (state.z, state.image)))
            return y, z, hidden.objective(y, z)

        y, z, objective = trial()
        for _ in range(HALVINGS):
            enough = state.objective - SUFFICIENT * length * slope + rounding(state.objective)
            high = ~(objective <= enough) & torch.isfinite(slope)  # NaN is high; where f itself is none, let it be
            if not bool(high.any()):
                break
            length = torch.where(high, length / 2, length)
            y, z, objective = trial()
        image, pre = self.at(hidden, z)
        # Where G has no more digits to tell, a way that turns round tells that the step was too long.
        turned = ((target - state.y) * (hidden.response(pre) - y)).sum(dim=1) < -slope / 2
        length = torch.where(turned, length / 2, length)
        return LineSearchState(z, image, y, pre, objective, length)


@dataclass
class MomentumState(DescentState):
    """Adds the last y before extrapolation with its z and G, the momentum theta and the length of a step."""

    last: Tensor
    last_z: Tensor
    objective: Tensor
    momentum: Tensor
    length: Tensor


@options
class FISTA(DescentSolver):
    """Accelerated proximal gradient steps on G. Where G would rise, a sample goes back and starts without momentum.

    Where it rises without momentum, or the way turns round as soon as there is any, the step was too long for the
    curvature of S, and is halved from then on.

    Args:
        step_size: to begin with; 1/2 suits every model without diversity, where the curvature is at most 1 + ||W||^2.

    Example:
        >>> model.equilibrium.solver = eq.FISTA()
    """

    step_size: float = 0.5

    def __post_init__(self) -> None:
        require(self, "step_size", above=0, at_most=1)

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> MomentumState:
        hidden = self.hidden(problem)
        y, z = self.first(hidden, z)
        image, pre = self.at(hidden, z)
        ones = z.new_ones(len(z))
        return MomentumState(z, image, y, pre, y, z, hidden.objective(y, z), ones, self.step_size * ones)

    def step(self, problem: Problem, state: MomentumState) -> MomentumState:
        hidden = self.hidden(problem)
        length = state.length[:, None]
        new = hidden.prox(state.y + length * (state.pre - state.y), state.length)
        new_z = hidden.lower(new)
        objective = hidden.objective(new, new_z)
        rises = ~(objective <= state.objective + rounding(state.objective))  # NaN rises
        # Momentum that points uphill is dropped too, before G tells (O'Donoghue and Candes, section 3.2).
        uphill = ((state.y - new) * (new - state.last)).sum(dim=1) > 0
        turned = ((new - state.last) * (state.y - state.last)).sum(dim=1) < 0
        flat = (objective - state.objective).abs() <= rounding(state.objective)  # G has no more digits to tell
        too_long = (rises & (state.momentum == 1)) | (turned & (flat | (state.momentum < EARLY)))
        before = torch.where(rises | uphill | (turned & flat), 1.0, state.momentum)
        after = torch.where(rises, 1.0, (1 + (1 + 4 * before.square()).sqrt()) / 2)
        share = ((before - 1) / after)[:, None]
        back = rises[:, None]
        y, z = (
            torch.where(back, last, torch.lerp(found, last, -share))
            for found, last in ((new, state.last), (new_z, state.last_z))
        )
        image, pre = self.at(hidden, z)
        return MomentumState(
            z,
            image,
            y,
            pre,
            torch.where(back, state.last, new),
            torch.where(back, state.last_z, new_z),
            torch.where(rises, state.objective, objective),
            after,
            torch.where(too_long, state.length / 2, state.length),
        )

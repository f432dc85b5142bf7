"""What a joint solver is: one iteration on v = (z, mu, x), with safeguards, measured and selected by block.

A solver proposes the next v; :class:`JointSolver` projects its x, evaluates it once, measures each block, and records
which samples prefer it to all earlier iterates. The loop is :mod:`equipoise.solvers.loop`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.joint.problem import Evaluation, Joint
from equipoise.joint.steps import InputStep, Moments, as_step
from equipoise.options import is_number
from equipoise.problem.layout import largest_entries, relative_residual, row_norms, select
from equipoise.problem.problem import Problem
from equipoise.solvers import Solver
from equipoise.solvers.base import State

NEGLIGIBLE = 1e-3  # a block that has shrunk to this fraction of its largest norm counts as zero, not as inexact
NEAR = 0.1  # residual of z below which the cost of an iterate is trusted
EARLY = 10  # number of iterates that the paper's code accepts unconditionally
SLACK = 1.3  # growth of the residual that the paper's code accepts for a lower cost
NUDGE = 1e-3  # change of f, relative to its norm, by which the first radius is measured
HALF = 0.5  # change of f, relative to its norm, that the first radius allows
SCALES = 4  # columns of JointState.scale
SLOPES = 12  # number of steps over which the largest curvature counts
SHARE_OF_NEWTON = 0.2  # of the automatic step, relative to 1 / curvature
MOVED = 0.1  # fraction of the radius that x has to move for its change of g to count
SELECT = ("feasible-cost", "residual", "last", "paper")


@dataclass
class JointState(State):
    """An iterate v with its image F(v), what is known of it, and what the solver remembers.

    Tensors have the batch first; ``kkt`` holds the relative residuals of z, mu and x.
    """

    gap: Tensor  # F(v) - v; where the constraint acts, its x-block is the gradient mapping (P(x - b g) - x) / b
    gradient: Tensor  # g
    cost: Tensor
    images: Tensor  # (batch, 2): norms of f and of J_z^T mu + dl/dz
    kkt: Tensor  # (batch, 3)
    residual: Tensor  # the largest of kkt
    scale: Tensor  # (batch, 4): radius R, sum of |g|^2, largest norms of the images of z and mu
    origin: Tensor  # first x
    slopes: Tensor  # (batch, 12): the latest changes of g per change of x
    size: Tensor  # b: step size of x; 0 while it is unknown
    by: Tensor  # next move of x, projected
    better: Tensor  # which samples prefer this iterate
    kept: Tensor  # (batch, 3): score, residual, and whether z was near f, of the preferred iterate
    moments: Moments  # of the step rule, after this move
    memory: Any  # of the solver
    seen: int  # number of steps so far

    def norms(self) -> tuple[Tensor, Tensor]:
        return self.residual, torch.ones_like(self.residual)

    scaled_norms = norms

    def preferred(self) -> Tensor:
        return self.better

    def take(self, rows: Tensor) -> JointState:
        taken = super().take(rows)
        moments = tuple(select(moment, rows) for moment in self.moments)
        memory = None if self.memory is None else self.memory.take(rows)
        return dataclasses.replace(taken, moments=moments, memory=memory)


class JointSolver(Solver):
    """A solver of the joint problem; subclasses implement :meth:`propose`."""

    needs = Joint

    @property
    def moves_at_once(self) -> bool:
        """Whether mu starts as dl/dz instead of 0, where g = dl/dx, since x takes a whole step in the first one."""
        return False

    @property
    @abstractmethod
    def rule(self) -> InputStep:
        """The step rule of x."""

    @abstractmethod
    def propose(self, joint: Joint, state: JointState) -> tuple[Tensor, Any]:
        """Return the next v, whose x need not be feasible, and the memory of the solver."""

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> JointState:
        joint = self.structure(problem, Joint)
        first = joint.function.first is not None
        at = joint.begin(z)
        if first and self.moves_at_once:
            z = torch.cat([z[:, joint.z], at.image[:, joint.mu], z[:, joint.x]], dim=1)
            z = rounded(joint, z)
            at = joint.evaluate(z)
        return self.arrive(joint, z, at, None, self.rule.init(z[:, joint.x]), None)

    def step(self, problem: Problem, state: JointState) -> JointState:
        joint = self.structure(problem, Joint)
        v, memory = self.propose(joint, state)
        v[:, joint.x] = joint.project(v[:, joint.x])
        v = rounded(joint, v)
        at = joint.evaluate(v)
        finite = all_finite(at.gap) and all_finite(at.cost)
        if not finite and bool((lost := ~(finite_rows(at.gap) & torch.isfinite(at.cost))).any()):
            # A step too far for f: stay at x, and move the others half as far as a plain step would.
            shorter = state.z.clone()
            shorter[:, : 2 * joint.n] += 0.25 * state.gap[:, : 2 * joint.n]
            v = torch.where(lost[:, None], shorter, v)
            at = joint.evaluate(v)
            if memory is not None:
                memory = memory.forget(lost)
        return self.arrive(joint, v, at, state, state.moments, memory)

    def arrive(
        self, joint: Joint, v: Tensor, at: Evaluation, before: JointState | None, moments: Moments, memory: Any
    ) -> JointState:
        """Return the state at ``v``, measured."""
        x, images, force = v[:, joint.x], block_norms(joint, at.image), row_norms(at.gradient)
        energy, peak = force.square(), images
        if before is None:
            require_squares(torch.cat([at.image[:, joint.mu], at.gradient], dim=1))
            seen, origin, radius = 0, x, torch.zeros_like(energy)
            slopes = v.new_zeros(len(v), SLOPES)
        else:
            seen, origin = before.seen + 1, before.origin
            radius, earlier = before.scale[:, 0], before.scale[:, 1]
            energy = energy + earlier
            peak = torch.maximum(images, before.scale[:, 2:])
            if seen == 1:
                radius = first_radius(joint, v, at, images)
            radius = torch.maximum(radius, row_norms(x - origin))
            moved = row_norms(x - before.z[:, joint.x])
            slope = row_norms(at.gradient - before.gradient) / moved
            # After a short move, g has changed with mu and z rather than with x.
            counts = (moved > MOVED * radius) & (slope < torch.inf)
            slopes = torch.cat([slope.masked_fill_(~counts, 0.0)[:, None], before.slopes[:, :-1]], dim=1)
        scale = torch.cat([radius[:, None], energy[:, None], peak], dim=1)
        automatic = torch.minimum(automatic_size(scale), share_of_newton(joint, radius) / slopes.amax(dim=1))
        move = self.rule.move(at.gradient, automatic, seen, moments)
        size = torch.zeros_like(automatic) if move.size is None else move.size
        by, gap = move.by, at.gap
        if joint.constraint is not None:
            aim = x + by
            reached = joint.project(aim)
            acts = (reached != aim).any(dim=1, keepdim=True)
            by = torch.where(acts, reached - x, by)
            if move.size is not None:
                mapped = torch.where(acts & (size > 0)[:, None], by / size[:, None], gap[:, joint.x])
                gap = torch.cat([gap[:, : 2 * joint.n], mapped], dim=1)
        kkt = residuals(joint, x, block_norms(joint, at.gap), images, at.gradient, force, scale)
        # Relative to a norm that has overflowed, every residual would be 0.
        measured = torch.isfinite(at.cost) & torch.isfinite(scale).all(dim=1)
        rule, residual = joint.function.select, torch.where(measured, kkt.amax(dim=1), torch.nan)
        better, kept = prefer(rule, kkt[:, 0] if rule == "feasible-cost" else residual, at.cost, before, seen)
        return JointState(
            v,
            at.image,
            gap,
            at.gradient,
            at.cost,
            images,
            kkt,
            residual,
            scale,
            origin,
            slopes,
            size,
            by,
            better,
            kept,
            move.moments,
            memory,
            seen,
        )

    def companion(self, state: JointState) -> Tensor:
        return torch.cat([state.scale, state.kkt], dim=1)

    def measured(self, problem: Problem, z: Tensor, image: Tensor, companion: Tensor | None) -> Measured:
        assert companion is not None
        joint = self.structure(problem, Joint)
        gap, x = image - z, z[:, joint.x]
        norms, gradient = (block_norms(joint, gap), block_norms(joint, image)), -gap[:, joint.x]
        kkt = residuals(joint, x, *norms, gradient, row_norms(gradient), companion[:, :SCALES])
        return Measured(z, image, kkt, kkt.amax(dim=1))


@dataclass
class Measured(State):
    """An iterate with the relative residuals of its blocks."""

    kkt: Tensor
    residual: Tensor

    norms = JointState.norms
    scaled_norms = JointState.norms


def rounded(joint: Joint, v: Tensor) -> Tensor:
    """Return iterates as f sees them: values may have fewer digits than rows."""
    return joint.problem.pack(joint.problem.unpack(v)) if joint.problem.layout.coarse else v


def require_squares(gradient: Tensor) -> None:
    """Raise if the first gradient of the loss has entries whose squares underflow or overflow, in every sample.

    Where it is so in some samples only, these fail alone: their residuals are not finite.
    """
    limits, sizes = torch.finfo(gradient.dtype), largest_entries(gradient.nan_to_num(posinf=0.0, neginf=0.0))
    sizes = sizes[sizes > 0]
    fit = (sizes > 10 * limits.tiny**0.5) & (sizes < limits.max**0.5 / 10)
    if len(sizes) and not bool(fit.any()):
        raise ValueError(
            f"the gradient of the loss has entries up to {float(sizes.max()):.1e}, whose squares {gradient.dtype} "
            "cannot hold: multiply the loss by a constant that brings it near 1, or use float64."
        )


def all_finite(rows: Tensor) -> bool:
    """Return whether all entries are finite, in one pass; False too if their sum overflows."""
    return math.isfinite(rows.sum())


def finite_rows(rows: Tensor) -> Tensor:
    return torch.isfinite(rows.sum(dim=1))  # ten times faster than isfinite(rows).all(dim=1)


def automatic_size(scale: Tensor) -> Tensor:
    """Return R / sqrt(sum of |g|^2), 0 where both are 0."""
    return scale[:, 0] / scale[:, 1].clamp(min=torch.finfo(scale.dtype).tiny).sqrt()


def block_norms(joint: Joint, rows: Tensor) -> Tensor:
    """Return the (batch, 2) norms of the z-block and the mu-block."""
    if rows.stride(1) == 1:
        return torch.linalg.vector_norm(rows[:, : 2 * joint.n].unflatten(1, (2, joint.n)), dim=2)
    return torch.stack([row_norms(rows[:, joint.z]), row_norms(rows[:, joint.mu])], dim=1)


def share_of_newton(joint: Joint, radius: Tensor) -> Tensor | float:
    """Return the largest automatic step, relative to 1 / curvature."""
    if joint.constraint is None:
        return SHARE_OF_NEWTON
    # Within a set as small as R, no step leads far: the whole inverse of the curvature is allowed.
    return torch.full_like(radius, SHARE_OF_NEWTON).where(radius < joint.reach, 1.0)


def residuals(
    joint: Joint, x: Tensor, gaps: Tensor, images: Tensor, gradient: Tensor, force: Tensor, scale: Tensor
) -> Tensor:
    """Return the (batch, 3) relative residuals of z, mu and x, which do not depend on the units of anything.

    z and mu are relative to their images, x is the projected automatic step relative to R. A block that tends to zero,
    such as the mu of a loss that vanishes at the optimum, is relative to a small part of its largest image.

    Args:
        force: norms of ``gradient``.
    """
    images = torch.maximum(images, NEGLIGIBLE * scale[:, 2:])
    moved, reach = force, scale[:, 1].sqrt()
    if joint.constraint is not None:
        first = scale[:, 0] == 0  # no radius yet
        size = automatic_size(scale)
        moved = row_norms(joint.project(x - size[:, None] * gradient) - x)
        moved, reach = torch.where(first, force, moved), torch.where(first, reach, scale[:, 0])
    return relative_residual(torch.cat([gaps, moved[:, None]], dim=1), torch.cat([images, reach[:, None]], dim=1))


def first_radius(joint: Joint, v: Tensor, at: Evaluation, images: Tensor) -> Tensor:
    """Return R: how far x may move along -g until f changes by half its norm, by one evaluation of f.

    |J_x u| >= |g| / |mu| along u = g / |g| (where the loss does not depend on x) bounds how far to probe.
    """
    x, g = v[:, joint.x], row_norms(at.gradient)
    usable = (images[:, 0] > 0) & torch.isfinite(images[:, 0])
    # From z = 0 with f = 0 there is no norm to compare with: take how far the loss would move z to vanish.
    norm = torch.where(usable, images[:, 0], at.cost.abs() / images[:, 1])
    along = at.gradient / g[:, None]
    probe = NUDGE * norm * row_norms(v[:, joint.mu]) / g
    probe = torch.where(torch.isfinite(probe) & (probe > 0), probe, NUDGE * (1 + row_norms(x)))
    nudged = v.clone()
    nudged[:, joint.x] = joint.project(x - probe[:, None] * torch.nan_to_num(along))
    length = row_norms(nudged[:, joint.x] - x)
    change = row_norms(joint.inference(nudged)(v[:, joint.z]) - at.image[:, joint.z])
    radius = HALF * norm * length / change
    for fallback in (at.cost.abs() / g, row_norms(x), torch.ones_like(g)):  # f does not depend on x along g
        radius = torch.where(torch.isfinite(radius) & (radius > 0), radius, fallback)
    radius = torch.minimum(radius, joint.reach)
    return torch.where(radius > 0, radius, 1.0)  # 0: the set is a single point


def prefer(rule: str, residual: Tensor, cost: Tensor, before: JointState | None, seen: int) -> tuple[Tensor, Tensor]:
    """Return which samples prefer this iterate, and the score, residual and nearness of what each prefers now."""
    near = residual < NEAR
    if before is None:
        return torch.ones_like(near), torch.stack([cost, residual, near.to(cost.dtype)], dim=1)
    least, lowest, was_near = before.kept.unbind(dim=1)
    if rule == "feasible-cost":  # the least cost at a z that is near f; until there is one, the nearest z
        better = torch.where(near, (was_near == 0) | (cost < least), (was_near == 0) & (residual < lowest))
    elif rule == "residual":
        better = residual < lowest
    elif rule == "last":
        better = torch.ones_like(near)
    else:  # a lower cost is accepted at a slightly larger residual, which then is not the new mark
        closer = (residual < lowest) | (seen < EARLY)
        better = closer | ((cost < least) & (residual < SLACK * lowest))
        lowest = torch.where(closer, residual, lowest)
        residual = lowest
    now = torch.stack([cost, residual, near.to(cost.dtype)], dim=1)
    return better, torch.where(better[:, None], now, before.kept)


def check_joint(solver: Any) -> None:
    """Check the options that joint solvers share."""
    pair = solver.damping
    valid = isinstance(pair, tuple) and len(pair) == 2 and all(is_number(d, at_least=0.0, below=1.0) for d in pair)
    if not valid:
        raise ValueError(
            f"{type(solver).__name__}.damping is {pair!r}; it must be two numbers in [0, 1), for z and for mu, such as "
            "(0.2, 0.4); 0 is the plain step."
        )
    as_step(solver.step_size, type(solver).__name__)

"""Joint solvers: one iteration on v = (z, mu, x), with safeguards, and how its iterates are measured and selected.

A solver proposes the next v; :class:`JointSolver` projects its x, evaluates it once, measures each block, and records
which samples prefer it to all earlier iterates. The loop is :mod:`equipoise.solvers.loop`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.joint.problem import Evaluation, Joint
from equipoise.joint.steps import InputStep, Moments, as_step
from equipoise.options import is_number, option, options
from equipoise.problem.layout import largest_entries, relative_residual, row_norms, select
from equipoise.problem.problem import DerivedProblem, Problem
from equipoise.solvers import Anderson, Broyden, Picard, Solver
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
FARTHEST = 0.35  # fraction of the radius that x moves at most in one step
FAR = 0.1  # fraction of the radius that counts as a long move of x
FLAT = 0.05  # share of an extrapolation that the radius allows, below which g is taken not to depend on x
LEAP = 10.0  # growth of the step of x where g does not depend on x,
STILL = 0.03  # and the residual of x is above this
STALE = 20  # number of steps without progress after which long extrapolations of x must not lead uphill
GROWTH = 10.0  # growth of its residual at which the history of a sample is dropped
RIDGE = 1e-5  # regularisation of the system for gamma, relative to its diagonal
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


@dataclass
class History:
    """The last differences of iterates and gaps of each sample, and their products in each block."""

    moves: Tensor  # (batch, memory, 2 n + d)
    changes: Tensor  # of gaps
    products: Tensor  # (batch, 3, memory, memory): moves_i . changes_j (type I), changes_i . changes_j (type II)
    v: Tensor  # the last iterate, its gap and its largest residual
    gap: Tensor
    residual: Tensor
    lowest: Tensor  # residual of each sample so far
    since: Tensor  # number of differences when the residual was last lowest, or an iterate preferred
    seen: int  # number of differences so far

    @classmethod
    def empty(cls, state: JointState, memory: int) -> History:
        moves, changes = state.z.new_zeros(2, len(state.z), memory, state.z.shape[1])
        products = state.z.new_zeros(len(state.z), 3, memory, memory)
        residual = state.residual
        return cls(moves, changes, products, state.z, state.gap, residual, residual, torch.zeros_like(residual), 0)

    def take(self, rows: Tensor) -> History:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seen"}
        return dataclasses.replace(self, **{name: select(entry, rows) for name, entry in tensors.items()})

    def forget(self, where: Tensor) -> History:
        """Drop the differences of some samples: zeros have no effect."""
        rows = where.nonzero().squeeze(1)  # usually few, and the tensors are large
        for entry in (self.moves, self.changes, self.products):
            entry.index_fill_(0, rows, 0.0)
        return self


@options
class JointAnderson(JointSolver):
    """Anderson acceleration of the joint iteration; blocks are scaled by their norms, so that nothing needs tuning.

    With S, Y the differences of v and of gaps G = F(v) - v over the last ``memory`` steps, gamma solves
    S^T W Y gamma = S^T W G (type I) or Y^T W Y gamma = Y^T W G (type II), and the next iterate is
    v - S gamma + D (G - Y gamma), with D = (1 - damping, step size of x). The weights W of the blocks are
    1 / |f|^2, 1 / |J_z^T mu + dl/dz|^2 and b / R^2, with b the step size and R the radius of x: so neither the units of
    the loss nor those of x matter. A step is shortened to move x by at most about R / 3; where it would move x by more
    than twenty times that, it becomes a damped one that moves x along -g; x is projected after extrapolation; a step
    that is not finite becomes a damped one at the same x; a sample whose residual grows tenfold starts a new history;
    one without progress for 20 steps may not extrapolate x far uphill.

    Args:
        memory: number of differences kept.
        kind: type, 1 or 2; type I converges faster here (the paper's figure 4).
        damping: weights of the current iterate for z and mu, in [0, 1); 0 is the plain step.
        step_size: step size of x: "auto", a number, or a rule such as ``NormalizedStep(0.1)``.
        extrapolate_x: whether acceleration also extrapolates x. None: True for "auto" and constant step sizes, False
            for normalized, momentum and Adam steps, which then move x alone; True needs a step along the gradient.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, target, solver=eq.JointAnderson(memory=5, step_size=0.01))

    Reference: S. Gurumurthy et al. (2021), eq. 11 and appendix A.2; H. Fang and Y. Saad (2009).
    """

    memory: int = option(default=8, at_least=1, whole=True)
    kind: int = option(default=1, among=(1, 2))
    damping: tuple[float, float] = (0.1, 0.4)
    step_size: InputStep | float | str = "auto"
    extrapolate_x: bool | None = option(default=None, kind=bool, optional=True)

    def __post_init__(self) -> None:
        check_joint(self)
        if self.extrapolate_x and not self.rule.along_gradient:
            raise ValueError(
                f"JointAnderson.extrapolate_x is True and step_size {self.rule!r}, whose moves are not multiples of "
                "the gradient, so that x would never move. Allowed then: 'auto', a number, ConstantStep, "
                "NormalizedStep(norm='l2'). Otherwise omit extrapolate_x, or accelerate x by JointIteration("
                "Anderson(kind=1), step_size=...)."
            )

    @property
    def rule(self) -> InputStep:
        return as_step(self.step_size, "JointAnderson")

    @property
    def joins(self) -> bool:
        return self.rule.joins if self.extrapolate_x is None else self.extrapolate_x

    @property
    def moves_at_once(self) -> bool:
        return not self.joins

    def propose(self, joint: Joint, state: JointState) -> tuple[Tensor, History]:
        history: History | None = state.memory
        if history is None:
            step, history = self.mixed(joint, state, state.gap.clone()), History.empty(state, self.memory)
        else:
            gamma = self.coefficients(joint, state, history)[:, None]
            filled = min(history.seen, self.memory)
            left = torch.baddbmm(state.gap[:, None], gamma, history.changes[:, :filled], alpha=-1)[:, 0]
            step = self.mixed(joint, state, left)
            step = torch.baddbmm(step[:, None], gamma, history.moves[:, :filled], alpha=-1)[:, 0]
        move, radius = step[:, joint.x], state.scale[:, 0]
        if not self.joins:
            move.copy_(state.by)
        elif joint.constraint is not None:
            move.masked_fill_(state.by == 0, 0.0)  # what the constraint holds is not extrapolated
        if state.seen:
            share = (FARTHEST * radius / row_norms(move)).clamp_(max=1.0)
            if self.joins:
                self.leap(joint, state, step, share)
            if self.joins and history.seen >= STALE:
                self.downhill(state, move, share)
            v = torch.addcmul(state.z, share[:, None], step)
        else:
            v = state.z + step  # no radius yet
        if not all_finite(step):
            failed = ~finite_rows(step)
            plain = self.mixed(joint, state, state.gap.clone())
            plain[:, joint.x] = 0
            v = torch.where(failed[:, None], state.z + plain, v)
        return v, history

    def leap(self, joint: Joint, state: JointState, step: Tensor, share: Tensor) -> None:
        """Replace extrapolations that move x by many radii: z and mu take plain steps, x a long one downhill.

        They mean that g hardly depends on x, as where f and the loss are linear: then the extrapolation of x has no
        meaning, not even its sign, and shortened to the radius it would hardly move z and mu.
        """
        flat = share < FLAT
        if not bool(flat.any()):
            return
        plain, length = self.mixed(joint, state, state.gap.clone()), row_norms(state.by)
        longer = torch.where(state.kkt[:, 2] > STILL, LEAP, 1.0)
        longer = torch.minimum(longer, FARTHEST * state.scale[:, 0] / length.clamp(min=torch.finfo(length.dtype).tiny))
        plain[:, joint.x] = state.by * longer[:, None]
        step.copy_(torch.where(flat[:, None], plain, step))
        share.masked_fill_(flat, 1.0)

    def downhill(self, state: JointState, move: Tensor, share: Tensor) -> None:
        """Replace long extrapolations of x that lead uphill by plain steps, in samples that make no progress.

        Acceleration looks for any stationary point: where the cost curves downwards, it would go to a saddle point, and
        may wander around one. Early on, moves against g are useful, since g is inexact as long as mu is.
        """
        stale = state.memory.since <= state.memory.seen - STALE
        if not bool(stale.any()):
            return
        radius = state.scale[:, 0]
        rise, length = (move * state.gradient).sum(dim=1), share * row_norms(move)
        uphill = (rise > 0) & (length > FAR * radius) & stale
        if bool(uphill.any()):
            plain = state.by * (FARTHEST * radius / row_norms(state.by)).clamp_(max=1.0)[:, None]
            move.copy_(torch.where(uphill[:, None], plain / share[:, None], move))

    def mixed(self, joint: Joint, state: JointState, gap: Tensor) -> Tensor:
        """Multiply a gap by D, in place."""
        # On views: an augmented assignment to a slice would copy the result once more.
        gap[:, joint.z].mul_(1 - self.damping[0])
        gap[:, joint.mu].mul_(1 - self.damping[1])
        gap[:, joint.x].mul_(state.size[:, None])
        return gap

    def coefficients(self, joint: Joint, state: JointState, history: History) -> Tensor:
        """Return gamma, after entering the newest differences."""
        residual = state.residual
        grew = residual > GROWTH * history.residual
        if bool(grew.any()):
            history.forget(grew)
        new = history.seen % self.memory
        history.seen += 1
        filled = min(history.seen, self.memory)
        torch.sub(state.z, history.v, out=history.moves[:, new])
        torch.sub(state.gap, history.gap, out=history.changes[:, new])
        history.v, history.gap, history.residual = state.z, state.gap, residual
        history.since = history.since.masked_fill((residual < history.lowest) | state.better, history.seen)
        history.lowest = torch.minimum(residual, history.lowest)
        changes, widths = history.changes[:, :filled], joint.widths
        left = history.moves[:, :filled] if self.kind == 1 else changes
        newest = torch.stack([history.changes[:, new], state.gap], dim=1)
        k = 3 if self.joins else 2  # blocks of (z, mu, x) that take part
        columns = inner_products(newest, left, widths, k)
        rows = inner_products(history.moves[:, new : new + 1], changes, widths, k) if self.kind == 1 else columns
        history.products[:, :k, :filled, new], history.products[:, :k, new, :filled] = columns[:, :, 0], rows[:, :, 0]
        weights, products = block_weights(state)[:, None, :k], history.products[:, :k, :filled, :filled]
        system = torch.bmm(weights, products.flatten(2)).view(-1, filled, filled)
        right = torch.bmm(weights, columns[:, :, 1]).mT
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal.mul_(1 + RIDGE).add_(diagonal == 0)
        solution, failed = torch.linalg.solve_ex(system, right)
        return solution[:, :, 0].masked_fill_((failed != 0)[:, None], torch.nan)


def inner_products(a: Tensor, b: Tensor, widths: Sequence[int], count: int) -> Tensor:
    """Return the products a_i . b_j in each of the first blocks of columns, (batch, count, len(a_i), len(b_j))."""
    blocks = zip(a.split(widths, dim=2)[:count], b.split(widths, dim=2), strict=False)
    return torch.stack([torch.bmm(left, right.mT) for left, right in blocks], dim=1)


def block_weights(state: JointState) -> Tensor:
    """Return the weights of z, mu and x in inner products."""
    norms = torch.cat([state.images, state.scale[:, :1]], dim=1)
    weights = norms.square_().clamp_(min=torch.finfo(norms.dtype).tiny).reciprocal_()
    weights[:, 2].mul_(state.size)
    return weights


@options
class JointIteration(JointSolver):
    """The joint iteration of eq. 11, accelerated by any solver of the core that works with values of F alone.

    ``JointIteration()`` is the plain joint iteration, and ``JointIteration(eq.Anderson(memory=20, kind=1),
    damping=(0.2, 0.4), step_size=0.01)`` the paper's method (with a memory of 40 for generation).

    Args:
        solver: ``Picard()`` for no acceleration, ``Anderson(kind=1 or 2)``, or ``Broyden()``.
        damping: weights of the current iterate for z and mu, in [0, 1); 0 is the plain step.
        step_size: step size of x, as for :class:`JointAnderson`.

    Example:
        >>> eq.optimize_input(f, loss, x0, z0, target, solver=eq.JointIteration(eq.Broyden(), step_size=0.01))
    """

    solver: Solver = option(default=Picard(), kind=Solver)
    damping: tuple[float, float] = (0.2, 0.4)
    step_size: InputStep | float | str = "auto"

    def __post_init__(self) -> None:
        check_joint(self)
        single = isinstance(self.solver, Picard | Anderson) or (
            isinstance(self.solver, Broyden) and not self.solver.line_search
        )
        if not single:
            raise TypeError(
                f"JointIteration.solver is {self.solver!r}; it must evaluate F once per step: Picard, Anderson, or "
                "Broyden without a line search."
            )

    @property
    def rule(self) -> InputStep:
        return as_step(self.step_size, "JointIteration")

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> JointState:
        state = super().init(problem, z, image)
        inner = self.solver.init(problem, z, self.damped(state))
        return dataclasses.replace(state, memory=Inner(self.solver, inner))

    def step(self, problem: Problem, state: JointState) -> JointState:
        damped = Damped(self, self.structure(problem, Joint), state)
        inner = self.solver.step(damped, state.memory.state)
        return dataclasses.replace(damped.state, memory=Inner(self.solver, inner))

    def propose(self, joint: Joint, state: JointState) -> tuple[Tensor, Any]:
        raise NotImplementedError  # the core solver proposes, in its step

    def damped(self, state: JointState) -> Tensor:
        """Return the image of ``state`` under the damped and projected map (eq. 11)."""
        n = (state.z.shape[1] - state.by.shape[1]) // 2
        shares = (1 - self.damping[0], 1 - self.damping[1])
        moves = [share * state.gap[:, i * n : (i + 1) * n] for i, share in enumerate(shares)]
        return state.z + torch.cat([*moves, state.by], dim=1)


@dataclass
class Inner:
    """The state of a core solver inside a joint one."""

    solver: Solver
    state: State

    def take(self, rows: Tensor) -> Inner:
        return Inner(self.solver, self.solver.take(self.state, rows))


class Damped(DerivedProblem):
    """The damped map as a core solver sees it; keeps the state at its last argument."""

    def __init__(self, solver: JointIteration, joint: Joint, before: JointState):
        super().__init__(joint.problem, joint.problem.count)
        self.solver, self.joint, self.state = solver, joint, before

    def __call__(self, rows: Tensor) -> Tensor:
        joint, before = self.joint, self.state
        v = torch.cat([rows[:, : 2 * joint.n], joint.project(rows[:, joint.x])], dim=1)
        v = rounded(joint, v)
        self.state = self.solver.arrive(joint, v, joint.evaluate(v), before, before.moments, None)
        return self.solver.damped(self.state)

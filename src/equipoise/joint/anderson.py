"""Anderson acceleration of the joint iteration, with blocks scaled by their norms: the default solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.joint.base import JointSolver, JointState, all_finite, check_joint, finite_rows
from equipoise.joint.problem import Joint
from equipoise.joint.steps import InputStep, as_step
from equipoise.options import option, options
from equipoise.problem.layout import row_norms, select

FARTHEST = 0.35  # fraction of the radius that x moves at most in one step
FAR = 0.1  # fraction of the radius that counts as a long move of x
FLAT = 0.05  # share of an extrapolation that the radius allows, below which g is taken not to depend on x
LEAP = 10.0  # growth of the step of x where g does not depend on x,
STILL = 0.03  # and the residual of x is above this
STALE = 20  # number of steps without progress after which long extrapolations of x must not lead uphill
GROWTH = 10.0  # growth of its residual at which the history of a sample is dropped
RIDGE = 1e-5  # regularisation of the system for gamma, relative to its diagonal


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

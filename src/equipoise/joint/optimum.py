"""The result of :func:`equipoise.optimize_input`, its check and its diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.joint.base import JointSolver, automatic_size
from equipoise.joint.problem import Joint
from equipoise.joint.steps import AutoStep
from equipoise.problem.independence import NOT_A_FUNCTION
from equipoise.problem.layout import residual_at
from equipoise.solution import Result, Statistics, tally
from equipoise.solvers import Anderson
from equipoise.solvers.loop import Solved, solve
from equipoise.stability import spectral_radius
from equipoise.tolerance import Tolerance

EXAMINED = 8  # samples whose Jacobian is probed
TIGHT = Tolerance(relative=1e-6, max_steps=200, patience=50)  # of z*(x), re-solved
DIFFERENT = 1e-3  # relative difference of two costs above which the diagnosis mentions it
RISING = 0.3  # share of steps that raise the cost, above which the step of x is called too long
NONFINITE = (
    "f, the loss or a gradient is NaN, infinite or too large to be squared: check the inputs, x0, z0 and the weights, "
    "or shorten the step of x. The best finite iterate is returned."
)


class KKT(NamedTuple):
    """Relative residuals of the conditions for an optimum, each of shape (batch,): of z, of mu and of x."""

    z: Tensor
    mu: Tensor
    x: Tensor


@dataclass
class Check:
    """The cost at z*(x), solved again at the returned x, beside the cost that was reported at z."""

    cost: Tensor
    reported: Tensor
    z: Any
    converged: Tensor

    @property
    def error(self) -> Tensor:
        """The difference of both costs, relative to the larger."""
        size = torch.maximum(self.cost.abs(), self.reported.abs())
        return (self.cost - self.reported).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)

    def __str__(self) -> str:
        if not len(self.cost):
            return "an empty batch: nothing to check"
        return (
            f"cost at z*(x): mean {self.cost.mean():.4g}, reported {self.reported.mean():.4g}; relative difference "
            f"median {self.error.median():.1e}, worst {self.error.max():.1e}; z* solved for "
            f"{int(self.converged.sum())} of {len(self.converged)} samples"
        )


@dataclass
class Optimum:
    """The outcome of :func:`equipoise.optimize_input`.

    Attributes:
        x: the optimised input, structured like ``x0``; always satisfies the constraint.
        z: the state of the returned iterate, structured like ``z0``; ``check`` solves for z*(x) at the returned x.
        mu: the adjoint, structured like ``z0``: dl/dz (I - df/dz)^-1 at the optimum.
        cost: (batch,) costs ``loss(z, x, *inputs)``.
        kkt: relative residuals of z, mu and x; a sample has converged when all three are within the tolerance.
        stats: :class:`~equipoise.Statistics`; ``residual`` is the largest of ``kkt``, ``products`` counts
            vector-Jacobian products.
        backward: statistics of the solve in the backward pass, filled once it has run (unless f was not finite for some
            samples, which have no gradient).

    Example:
        >>> print(opt)
        >>> opt.check()
    """

    x: Any
    z: Any
    mu: Any
    cost: Tensor
    kkt: KKT
    stats: Statistics
    backward: Statistics | None = None
    solved: Solved | None = field(default=None, repr=False)
    course: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)  # samples and their costs, per check

    @property
    def result(self) -> Tensor:
        return self.stats.result

    @property
    def converged(self) -> Tensor:
        return self.stats.converged

    @property
    def costs(self) -> Tensor:
        """(checks, batch) costs of all iterates; a sample that has stopped repeats its last entry."""
        rows = [self.cost.detach().new_full((len(self.result),), torch.nan)]
        for samples, cost in self.course:
            rows.append(rows[-1].index_copy(0, samples, cost.to(rows[-1].dtype)))
        return torch.stack(rows[1:]) if self.course else rows[0].new_empty(0, len(self.result))

    @property
    def joint(self) -> Joint:
        if self.solved is None:
            raise ValueError("this Optimum no longer holds its f, because it was pickled or copied: use the original.")
        joint = self.solved.problem.structure(Joint)
        assert joint is not None
        return joint

    def check(self, tolerance: Tolerance = TIGHT) -> Check:
        """Solve z*(x) again at the returned x and return the true cost.

        Args:
            tolerance: tolerance of that solve.
        """
        joint, v = self.joint, self.at
        inner = joint.inference(v)
        with torch.no_grad():
            z = v[:, joint.z]
            solved = solve(inner, z, inner(z), Anderson(memory=8), tolerance)
            cost = joint.costs(torch.cat([solved.z, v[:, joint.n :]], dim=1))
        return Check(cost, self.cost.detach(), inner.unpack(solved.z), solved.stats.converged)

    @property
    def at(self) -> Tensor:
        """The rows (z, mu, x) of the optimum."""
        assert self.solved is not None
        return self.solved.z

    def findings(self) -> tuple[list[str], Tensor, Tensor | None]:
        """Return what :func:`equipoise.diagnose` says: findings, the samples examined, their spectral radii."""
        stats, joint, v = self.stats, self.joint, self.at
        failed = ~stats.converged
        samples = (failed if bool(failed.any()) else ~failed).nonzero().squeeze(1)[:EXAMINED]
        if not len(stats.result):
            return ["An empty batch: nothing was optimised."], samples, None
        failures = stats.failures()
        blocks = ", ".join(f"{name} {float(r.max()):.1e}" for name, r in zip(KKT._fields, self.kkt, strict=True))
        if failures:
            found = [f"{int(failed.sum())} of {failed.numel()} samples failed ({tally(failures)}): worst {blocks}."]
        else:
            found = [f"All {failed.numel()} samples converged in {int(stats.steps.max())} steps or fewer: {blocks}."]
        if Result.NONFINITE in failures:
            found.append(
                "f, the loss or a gradient is NaN or infinite along the path of some samples: shorten the step of x, "
                "constrain x, or look for division, log and exp in f and in the loss."
            )
            return found, samples, None
        found += self.rising()
        assert self.solved is not None
        gatherable = self.solved.problem.gatherable
        narrow = self.solved.problem.take(samples) if gatherable else self.solved.problem
        rows = v[samples] if gatherable else v
        part = None if narrow is None else narrow.structure(Joint)
        assert part is not None
        with torch.no_grad():
            at, again = part.evaluate(rows), part.evaluate(rows)
        rounding = 100 * part.problem.rounding
        if bool((residual_at(again.image[:, joint.z], at.image[:, joint.z]) > rounding).any()):
            found.append(NOT_A_FUNCTION)
        elif bool(((again.cost - at.cost).abs() > rounding * at.cost.abs()).any()):
            found.append(
                "The loss is not a function of z and x: two evaluations at the same z and x differ. Look for dropout, "
                "noise, BatchNorm in training mode or changing state inside it."
            )
        radius = spectral_radius(part.inference(rows), rows[:, joint.z])
        if float(radius.max()) >= 1:
            found.append(
                f"f is not contractive at the optimum: the spectral radius of df/dz is about "
                f"{float(radius.max()):.2f}. Raise the damping of z and mu or the memory, or make f "
                "contractive (SpectralNorm, jacobian_penalty)."
            )
        if joint.constraint is not None and self.solved.companion is not None:
            scale = self.solved.companion[samples] if gatherable else self.solved.companion
            aim = rows[:, joint.x] - automatic_size(scale)[:, None] * at.gradient
            active = (part.project(aim) != aim).any(dim=1)
            if bool(active.any()):
                found.append(
                    f"The constraint is active for {int(active.sum())} of the {len(active)} samples examined: a larger "
                    "set would allow a lower cost."
                )
        check = self.check()
        worst = float(check.error.max())
        if worst > DIFFERENT:
            found.append(
                f"The cost at z differs from that at z*(x) by up to {worst:.1%}: z is not yet z*(x), so x may be "
                "optimal for the relaxed problem only. Allow more steps or tighten the tolerance; check() returns the "
                "true cost."
            )
        else:
            found.append(f"The cost at z agrees with that at z*(x), solved again, to {worst:.1e}.")
        return found, samples, radius

    def rising(self) -> list[str]:
        """Return a finding if the cost of samples that failed rose in many of their later steps."""
        failed = ~self.stats.converged
        costs, steps = self.costs[:, failed].double(), self.stats.steps[failed]
        if len(costs) < 5 or not len(steps):
            return []
        place = torch.arange(1, len(costs), device=costs.device)[:, None]
        later = (place >= steps // 2) & (place < steps)  # after its last step, a sample repeats its cost
        rises = float((costs.diff(dim=0) > 1e-6 * costs[:-1].abs())[later].double().mean())
        excess = float((costs[-1] - costs.nan_to_num(torch.inf).amin(dim=0)).mean())
        scale = float((costs[0] - costs.nan_to_num(torch.inf).amin(dim=0)).abs().mean())
        assert self.solved is not None
        assert isinstance(self.solved.solver, JointSolver)
        automatic = isinstance(self.solved.solver.rule, AutoStep)
        advice = "Raise the damping of z and mu." if automatic else "Use step_size='auto', or a shorter step."
        if rises > RISING and excess > 0.1 * scale:
            return [
                f"The step of x is too long: the cost rose in {rises:.0%} of the later steps, and ended above the "
                f"lowest one. {advice}"
            ]
        return []

    def __str__(self) -> str:
        if not len(self.result):
            return str(self.stats)
        blocks = ", ".join(f"{name} {float(r.median()):.1e}" for name, r in zip(KKT._fields, self.kkt, strict=True))
        failures = self.stats.failures()
        outcome = "every sample is optimal"
        if failures:
            kind = next(iter(failures))
            outcome = f"{tally(failures)}: {NONFINITE if kind == Result.NONFINITE else kind.message}"
        return (
            f"{self.stats}\ncost median {self.cost.detach().median():.4g}, worst {self.cost.detach().max():.4g}; "
            f"KKT residuals {blocks}\n{outcome}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solved": None}  # f may be a closure, which does not pickle

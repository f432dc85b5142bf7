"""Outer gradients: how an optimum depends on the parameters of f and of the loss.

At an optimum v* = (z*, mu*, x*) the Lagrangian L is stationary, so d cost / d theta = dL / d theta with v* held fixed
(eq. 19, the envelope theorem). Any other function of v* needs dv*/d theta = -H^-1 dK/d theta (eq. 16 and 17), where
K = dL/dv and H = dK/dv is the Hessian of L, hence symmetric. Where a constraint is active, x moves only within its
tangent space, and H has the curvature of the constraint, times its multiplier, in its x-block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.gradients.implicit import ImplicitGradient, _Attach, gradients, recorded
from equipoise.joint.base import SCALES, automatic_size
from equipoise.joint.constraints import Tangent
from equipoise.joint.minres import MINRES
from equipoise.joint.problem import Joint
from equipoise.options import option, options
from equipoise.problem.layout import row_norms
from equipoise.problem.problem import Count, DerivedProblem
from equipoise.solution import Report
from equipoise.solvers import GMRES, Anderson, Solver
from equipoise.solvers.loop import Solved, solve
from equipoise.tolerance import Tolerance


class JointGradient(ABC):
    """The rule by which an optimum is differentiated."""

    holds_x: ClassVar[bool] = False  # whether x and mu are constants
    moves_constraint: ClassVar[bool] = False  # whether tensors that a projection depends on get a gradient

    @abstractmethod
    def attach(self, joint: Joint, solved: Solved, report: Report) -> tuple[Tensor, Tensor]:
        """Return the rows (z, mu, x) and the costs of a solved problem, with gradients."""


def captured_graph(joint: Joint, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return f and the cost at ``v`` with their graphs."""
    with torch.enable_grad():
        return recorded(joint.inference(v), v[:, joint.z]), joint.costs(v)


@options
class EnvelopeGradient(JointGradient):
    """The gradient of the cost by the envelope theorem (eq. 19): dl/dtheta + mu^T df/dtheta, without any solve.

    Only ``opt.cost`` gets a gradient, which is enough if the outer loss is the inner one or its negative. A backward
    pass through ``opt.x``, ``opt.z`` or ``opt.mu`` raises an error.

    Example:
        >>> opt = eq.optimize_input(f, loss, x0, z0, target, gradient=eq.EnvelopeGradient())
        >>> opt.cost.mean().backward()
    """

    def attach(self, joint: Joint, solved: Solved, report: Report) -> tuple[Tensor, Tensor]:
        v = solved.z
        image, cost = captured_graph(joint, v)
        with torch.enable_grad():
            lagrangian = cost + (v[:, joint.mu] * (image - image.detach())).sum(dim=1).to(cost.dtype)
        return _Refused.apply(v, lagrangian), _Once.apply(lagrangian)  # type: ignore[return-value]


@options
class KKTGradient(JointGradient):
    """The exact gradient of x, z, mu and the cost, by the implicit function theorem on the KKT conditions (eq. 16, 17).

    The system is symmetric and solved by :class:`MINRES`, each step one product with the Hessian of the Lagrangian: a
    double backward pass through f. An active constraint restricts it to the tangent space. For an Intersection or a
    projection of your own, the projection is differentiated instead and the system solved by GMRES.

    Args:
        tolerance: tolerance of the backward solve.
        proximal: weight of a proximal term on x, relative to the sensitivity of f to x. It makes the system regular
            where directions of x do not change the cost, and the gradient approximate.
        solver: solver of the system; None for MINRES or GMRES, as described.

    Example:
        >>> opt = eq.optimize_input(f, loss, x0, z0, measured, gradient=eq.KKTGradient())
        >>> (head(opt.z) - truth).square().mean().backward()
    """

    moves_constraint = True
    tolerance: Tolerance = option(default=Tolerance(relative=1e-6, max_steps=300, patience=100), kind=Tolerance)
    proximal: float = option(default=0.0, at_least=0.0)
    solver: Solver | None = option(default=None, kind=Solver, optional=True)

    def attach(self, joint: Joint, solved: Solved, report: Report) -> tuple[Tensor, Tensor]:
        v = solved.z
        blocks = [v[:, block].detach().requires_grad_() for block in (joint.z, joint.mu, joint.x)]
        with torch.enable_grad():
            image, cost = captured_graph(joint, torch.cat(blocks, dim=1))
            lagrangian = cost.sum() + (blocks[1] * (image - blocks[0])).sum()
            conditions = gradients([lagrangian], blocks, [torch.ones_like(lagrangian)], create_graph=True)
            tangent = None
            if joint.constraint is not None:
                assert solved.companion is not None
                x, gradient, size = blocks[2], conditions[2], automatic_size(solved.companion)[:, None]
                size = torch.where((size > 0) & torch.isfinite(size), size, 1.0)  # no step was taken, or none needed
                tangent = joint.constraint.tangent(x.detach(), gradient.detach(), size)
                if tangent is None:
                    conditions[2] = x - joint.constraint.project(x - size * gradient)
            whole = torch.cat(conditions, dim=1)
            symmetric = joint.constraint is None or tangent is not None
            pull = partial(self.pull, System(joint, blocks, whole, tangent, symmetric, self.proximal), report)
            rows = _Attach.apply(pull, None, whole, v)
            return rows, joint.costs(rows)

    def pull(self, system: System, report: Report, cotangent: Tensor) -> Tensor:
        """Return the cotangent of the KKT conditions, -H^-1 times that of v."""
        refuse_second_derivatives()
        finite = torch.isfinite(cotangent).all(dim=1, keepdim=True)
        system.begin(torch.where(finite, cotangent, 0.0))
        solver = self.solver or (MINRES() if system.symmetric else GMRES(memory=50))
        guess = torch.zeros_like(cotangent)
        solved = solve(system, guess, system(guess), solver, self.tolerance)
        note(report, solved)
        return torch.where(finite, system.released(solved.z), cotangent)


def note(report: Report, solved: Solved) -> None:
    """Record the outcome of a backward solve."""
    optimum = report.solution()
    if optimum is not None:
        optimum.backward = solved.stats
    if not solved.converged:
        report.failure(solved.stats, "backward", below_rounding=solved.below_rounding)


class System(DerivedProblem):
    """The adjoint of the KKT conditions K(v) = 0: A u + c = 0 with A = dK/dv, as the fixed point u - (A u + c).

    Blocks are scaled so that neither the units of the loss nor those of x matter: by the curvature of the loss along z
    and the sensitivity of f to x, each estimated by one product.
    """

    affine = True

    def __init__(
        self,
        joint: Joint,
        blocks: list[Tensor],
        conditions: Tensor,
        tangent: Tangent | None,
        symmetric: bool,
        proximal: float,
    ):
        super().__init__(joint.problem, Count())
        self.gatherable = False
        self.joint, self.blocks, self.conditions = joint, blocks, conditions
        self.tangent, self.symmetric, self.proximal = tangent, symmetric, proximal

    def hessian(self, u: Tensor) -> Tensor:
        self.count.add(len(u))
        return torch.cat(gradients([self.conditions], self.blocks, [u], create_graph=False), dim=1)

    def begin(self, cotangent: Tensor) -> None:
        """Measure the units of the blocks, and set the right-hand side."""
        joint = self.joint
        random = torch.randn(cotangent.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        probe = random.to(cotangent).expand_as(cotangent)
        sizes = []
        for block, answer in ((joint.z, joint.z), (joint.x, joint.mu)):
            only = torch.zeros_like(cotangent)
            only[:, block] = probe[:, block]
            size = row_norms(self.hessian(only)[:, answer]) / row_norms(only)
            sizes.append(torch.where(torch.isfinite(size) & (size > 0), size, 1.0))
        curvature, sensitivity = sizes
        root = curvature.sqrt()[:, None]
        self.units = torch.ones_like(cotangent)
        self.units[:, joint.z] /= root
        self.units[:, joint.mu] *= root
        if self.symmetric:
            self.units[:, joint.x] /= root * sensitivity[:, None]
        self.right = self.units * self.free(cotangent)

    def free(self, u: Tensor) -> Tensor:
        """Return u, its x restricted to the tangent space of the active constraint."""
        if self.tangent is None:
            return u
        return torch.cat([u[:, : 2 * self.joint.n], self.tangent.free(u[:, self.joint.x])], dim=1)

    def released(self, scaled: Tensor) -> Tensor:
        """Return u in the units of K."""
        return self.free(self.units * scaled)

    def matrix(self, scaled: Tensor) -> Tensor:
        x, u = self.joint.x, self.released(scaled)
        product = self.hessian(u)
        if self.tangent is not None:
            product[:, x] += self.tangent.curvature[:, None] * u[:, x]
        product = self.units * self.free(product)
        if self.proximal:
            product[:, x] += self.proximal * scaled[:, x]
        return product

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(rows) - self.right

    def product(self, rows: Tensor) -> Tensor:
        return rows - self.matrix(rows)


@options
class DetachedGradient(JointGradient):
    """The gradient of z*(theta) with x* held constant, as in the authors' code.

    It is exact for an outer loss that does not depend on how x* moves, and wrong otherwise, even in sign:
    :class:`KKTGradient` is exact. ``opt.x`` and ``opt.mu`` are constants.

    Args:
        gradient: rule for z*, such as ``ImplicitGradient(tolerance=...)``.
    """

    holds_x = True
    gradient: ImplicitGradient = option(
        default=ImplicitGradient(solver=Anderson(), tolerance=Tolerance(relative=1e-6, max_steps=200)),
        kind=ImplicitGradient,
    )

    def attach(self, joint: Joint, solved: Solved, report: Report) -> tuple[Tensor, Tensor]:
        v = solved.z
        inner = joint.inference(v)
        assert solved.companion is not None
        stats, state = replace(solved.stats, residual=solved.companion[:, SCALES]), v[:, joint.z]
        outcome = Solved(state, None, stats, inner, Anderson(), solved.tolerance, solved.converged, [])
        with torch.enable_grad():
            z = self.gradient.attach(outcome, report)
            rows = torch.cat([z, v[:, joint.n :]], dim=1)
            return rows, joint.costs(rows)


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError("an optimum has first derivatives only: omit create_graph=True.")


class _Once(torch.autograd.Function):
    """The identity; a second derivative raises, since it would lack that of the optimum itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        refuse_second_derivatives()
        return cotangents[0]


class _Refused(torch.autograd.Function):
    """A value whose backward pass raises an error, rather than give a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, graph: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise RuntimeError(
            "EnvelopeGradient is the gradient of opt.cost only, and this backward pass goes through opt.x, opt.z or "
            "opt.mu. Pass gradient=equipoise.KKTGradient() for the exact gradient, or use opt.x.detach() as a constant."
        )

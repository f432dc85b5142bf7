"""The joint problem in v = (z, mu, x): its map, its cost, and what solvers see of it.

The Lagrangian of min l(z, x) subject to z = f(z, x) is L = l(z, x) + mu^T (f(z, x) - z) (eq. 13). Its stationary points
are the fixed points of F(z, mu, x) = (f, J_z^T mu + dl/dz, x - g), g = J_x^T mu + dl/dx (eq. 10 and 14): inference, the
adjoint of inference, and the input. One evaluation is one f, one loss, and one vector-Jacobian product of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.implicit import gradients
from equipoise.joint.constraints import Constraint
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import AnyStructure, FunctionProblem, Structure


def tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in leaves(value, "value")]


class JointFunction:
    """F of an f and a loss; shows its structure, :class:`Joint`, to solvers.

    Args:
        inner: the problem z = f(z, x0, *inputs).
        loss: function ``loss(z, x, *inputs) -> (batch,)``.
        constraint: constraint on x, fitted to its rows; None for any x.
        select: name of the rule that selects the iterate to return.
    """

    def __init__(self, inner: FunctionProblem, loss: Callable[..., Tensor], constraint: Constraint | None, select: str):
        self.inner, self.loss, self.constraint, self.select = inner, loss, constraint, select
        self.first: First | None = None  # what is known at the start

    def __call__(self, v: Any, *inputs: Any) -> Any:
        (image, adjoint, descent), _ = self.with_cost(v, *inputs)
        return image, adjoint, rebuild(descent, [x + d for x, d in zip(tensors(v[2]), tensors(descent), strict=True)])

    def with_cost(self, v: Any, *inputs: Any) -> tuple[Any, Tensor]:
        """Return (f, J_z^T mu + dl/dz, -g) and the cost of each sample, without a graph."""
        z, mu, x = v
        with torch.enable_grad():
            z, x = (rebuild(part, [t.detach().requires_grad_() for t in tensors(part)]) for part in (z, x))
            image, cost = self.inner.f(z, x, *inputs), self.loss(z, x, *inputs)
            outputs = [t.to(u.dtype) for t, u in zip(tensors(image), tensors(mu), strict=True)] + [cost]
        at, cotangents = tensors((z, x)), [*tensors(mu), torch.ones_like(cost)]
        paths = [(out, u) for out, u in zip(outputs, cotangents, strict=True) if out.requires_grad]
        products = [None] * len(at)
        if paths:
            outputs, cotangents = zip(*paths, strict=True)
            products = torch.autograd.grad(outputs, at, cotangents, allow_unused=True)
        products = [
            torch.zeros_like(t) if product is None else product for product, t in zip(products, at, strict=True)
        ]
        adjoint, gradient = rebuild((z, x), products)
        image, descent = (
            rebuild(part, [change(t) for t in tensors(part)])
            for part, change in ((image, Tensor.detach), (gradient, Tensor.neg))
        )
        return (image, adjoint, descent), cost.detach()

    def structure(self, kind: type[AnyStructure], problem: FunctionProblem) -> AnyStructure | None:
        return Joint(self, problem, self.inner, self.constraint) if kind is Joint else None  # type: ignore[return-value]


@dataclass
class First:
    """F at the first v = (z, 0, x), from the evaluation that checks f and the loss."""

    parts: Any  # (f, dl/dz, -dl/dx)
    cost: Tensor

    @classmethod
    def of(cls, inner: FunctionProblem, rows: Tensor, x: Any, image: Tensor, cost: Tensor) -> First:
        """Differentiate the loss, given its graph, at the leaves ``rows`` (of z) and ``x``."""
        at = [rows, *tensors(x)]
        adjoint, *gradient = gradients([cost], at, [torch.ones_like(cost)], create_graph=False)
        parts = inner.unpack(image.detach()), inner.unpack(adjoint), rebuild(x, [-g for g in gradient])
        return cls(parts, cost.detach())


class JointProblem(FunctionProblem):
    """v = F(v) on rows (z, mu, x)."""

    @property
    def coarse(self) -> bool:
        return False  # solvers round iterates before they evaluate them

    @classmethod
    def of(cls, function: JointFunction, z: Any, x: Any, inputs: tuple[Any, ...]) -> JointProblem:
        inner = function.inner
        problem = cls(function, (z, z, x), inputs, inner.samples, coupled=False)
        problem.scope, problem.autocast, problem.known_impure = inner.scope, inner.autocast, inner.known_impure
        for leaf, other in zip(problem.layout.leaves, 2 * inner.layout.leaves, strict=False):
            leaf.permutation = other.permutation
        return problem


class LossProblem(FunctionProblem):
    """The loss in the place of the f of another problem: its image is one column, the costs."""

    called = "the loss"

    @classmethod
    def of(cls, loss: Callable[..., Tensor], inner: FunctionProblem, z: Any) -> LossProblem:
        problem = cls(loss, z, inner.inputs, inner.samples, coupled=False)
        problem.layout, problem.scope, problem.autocast = inner.layout, inner.scope, inner.autocast
        return problem

    def __call__(self, rows: Tensor) -> Tensor:
        return self.call(self.unpack(rows))[:, None]


class Joint(Structure):
    """What joint solvers see of a problem: the blocks of v, the gradient and the cost, the constraint on x, and f."""

    requirement = "the joint problem of equipoise.optimize_input"
    separates = False

    def __init__(
        self, function: JointFunction, problem: FunctionProblem, inner: FunctionProblem, constraint: Constraint | None
    ):
        self.function, self.problem, self.inner, self.constraint = function, problem, inner, constraint
        self.costed = problem.replaced(f=function.with_cost)
        self.n = sum(leaf.numel for leaf in inner.layout.leaves)  # v = (z, mu, x) has n + n + d columns
        self.widths = [self.n, self.n, sum(leaf.numel for leaf in problem.layout.leaves) - 2 * self.n]
        self.z, self.mu, self.x = slice(0, self.n), slice(self.n, 2 * self.n), slice(2 * self.n, None)

    def take(self, rows: Tensor, problem: FunctionProblem) -> Joint:
        constraint = None if self.constraint is None else self.constraint.take(rows)
        return Joint(self.function, problem, self.inner.take(rows), constraint)

    def begin(self, v: Tensor) -> Evaluation:
        """Return F and its parts at ``v``; the first v of all is evaluated already."""
        first, self.function.first = self.function.first, None
        if first is None:
            return self.evaluate(v)
        self.problem.count.add(len(v))
        return self.entered(v, first.parts, first.cost)

    def evaluate(self, v: Tensor) -> Evaluation:
        """Return F and its parts at ``v``: one f, one loss, one vector-Jacobian product."""
        return self.entered(v, *self.costed.evaluate(self.problem.unpack(v)))

    def entered(self, v: Tensor, parts: Any, cost: Tensor) -> Evaluation:
        """Return F and its parts at ``v`` in rows, given (f, J_z^T mu + dl/dz, -g) and the cost."""
        self.problem.count.products += 1
        image = self.problem.pack(parts)
        gap, descent = image - v, image[:, self.x]
        gap[:, self.x] = descent  # exact, where a difference of images would cancel
        gradient = -descent
        descent.add_(v[:, self.x])
        return Evaluation(image, gap, gradient, cost.to(v.dtype))

    @functools.cached_property
    def reach(self) -> Tensor:
        """The largest distance between two feasible x, of each sample or of all; infinite without a constraint."""
        reach = math.inf if self.constraint is None else self.constraint.reach()
        return torch.as_tensor(reach, dtype=self.problem.layout.dtype, device=self.problem.device)

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest feasible rows of x."""
        return x if self.constraint is None else self.constraint.project(x)

    def inference(self, v: Tensor) -> FunctionProblem:
        """Return the problem z = f(z, x) at the x of ``v``."""
        inputs, count = (self.problem.unpack(v)[2], *self.problem.inputs), self.problem.count
        # x makes it an f with inputs, yet f may have captured the whole batch if the caller gave none.
        gatherable = self.problem.gatherable
        return self.inner.replaced(inputs=inputs, structures={}, count=count, gatherable=gatherable)

    def costs(self, v: Tensor) -> Tensor:
        """Return the cost of each sample at ``v``."""
        inner = self.inference(v)
        return inner.replaced(f=self.function.loss).call(inner.unpack(v[:, self.z]))


@dataclass
class Evaluation:
    """F at v, in rows."""

    image: Tensor  # F(v)
    gap: Tensor  # F(v) - v: the x-block is -g
    gradient: Tensor  # g = dL/dx
    cost: Tensor

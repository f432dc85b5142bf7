"""What a monotone problem z = s(W z + b) shows the splitting solvers: products, resolvents, and its backward pass.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), theorems 1 and 3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from equipoise.gradients.implicit import Adjoint, Record
from equipoise.operators.base import MonotoneOperator
from equipoise.problem.layout import is_zero, leaves, select
from equipoise.problem.problem import AnyStructure, DerivedProblem, FunctionProblem, Problem, Structure
from equipoise.solvers.base import Solver


class Prox(Protocol):
    """The nonlinearity s = prox_f^1 on rows, and prox_f^alpha; each returns a new tensor."""

    def __call__(self, x: Tensor, /) -> Tensor: ...
    def prox(self, x: Tensor, alpha: float, /) -> Tensor: ...
    def reflect(self, x: Tensor, alpha: float, /) -> Tensor: ...  # 2 prox - identity
    def derivative(self, x: Tensor, /) -> Tensor: ...


class Diagonal:
    """x -> slope x with 0 <= slope <= 1: s linearised. slope = (1 + D)^-1, f(z) = D z^2 / 2 (theorem 3)."""

    def __init__(self, slope: Tensor):
        self.slope = slope
        self.factors: dict[float, Tensor] = {}  # of reflections, by alpha

    def __call__(self, x: Tensor) -> Tensor:
        return self.slope * x

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        """Return x / (1 + alpha D), which is 0 where D is infinite; algorithms 3 and 4 misprint it."""
        return x * self.shrinking(alpha)

    def shrinking(self, alpha: float) -> Tensor:
        if alpha == 1:
            return self.slope
        return self.slope / torch.add(alpha, self.slope, alpha=1 - alpha)  # slope + alpha (1 - slope)

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        if alpha not in self.factors:
            self.factors[alpha] = (2 * self.shrinking(alpha)).sub_(1)
        return x * self.factors[alpha]

    def derivative(self, x: Tensor) -> Tensor:
        return self.slope

    def take(self, rows: Tensor) -> Diagonal:
        taken = Diagonal(select(self.slope, rows))
        taken.factors = {alpha: select(factor, rows) for alpha, factor in self.factors.items()}
        return taken


class Known(torch.autograd.Function):
    """W z + b, already known, with its gradients: that of b, and those of the tensors from which W z is made."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, unpack: Any, pulls: Any, bias: Tensor, *products: Tensor) -> Tensor:
        ctx.unpack, ctx.pulls = unpack, pulls
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        parts = leaves(ctx.unpack(cotangent), "cotangent")
        pulled = (pull(part) for pull, (_, part) in zip(ctx.pulls, parts, strict=True))
        return None, None, None, cotangent, *pulled


class Splitting(Structure):
    """f(z) = s(W z + b) for the samples of a problem, as the splitting solvers use it.

    Args:
        operator: W.
        activation: s on rows.
        bias: b as rows.
        problem: problem whose layout and scope are used.
        transposed: whether W^T takes the place of W, as in the backward pass.
    """

    requirement = "f(z) = s(W z + b), such as equipoise.operators.MonotoneProblem(operator, activation)"

    def __init__(
        self,
        operator: MonotoneOperator,
        activation: Prox,
        bias: Tensor,
        problem: FunctionProblem,
        transposed: bool = False,
    ):
        self.operator, self.activation, self.bias = operator, activation, bias
        self.problem, self.transposed = problem, transposed
        self.resolvents: dict[float, Any] = {}
        self.alphas: dict[Solver, float] = {}  # step size of each solver

    def apply(self, function: Callable[[Any], Any], rows: Tensor) -> Tensor:
        layout = self.problem.layout
        return layout.pack(self.problem.in_scope(function, layout.unpack(rows)))

    def product(self, rows: Tensor) -> Tensor:
        """Return W z."""
        return self.apply(self.operator.adjoint if self.transposed else self.operator, rows)

    def preactivation(self, rows: Tensor) -> Tensor:
        """Return W z + b; nearly every solve starts at 0, where no product is needed."""
        return self.bias if is_zero(rows) else self.product(rows) + self.bias

    def solve(self, rows: Tensor, alpha: float) -> Tensor:
        """Return (I + alpha (I - W))^-1 z."""
        if alpha not in self.resolvents:
            self.resolvents[alpha] = self.operator.resolvent(alpha)
        resolvent, layout = self.resolvents[alpha], self.problem.layout
        return layout.pack((resolvent.adjoint if self.transposed else resolvent)(layout.unpack(rows)))

    def take(self, rows: Tensor, problem: FunctionProblem) -> Splitting:
        taken = copy.copy(self)
        taken.problem, taken.bias = problem, select(self.bias, rows)
        taken.activation = self.activation.take(rows) if isinstance(self.activation, Diagonal) else self.activation
        return taken

    def adjoint(self, pre: Tensor, cotangent: Tensor) -> Splitting:
        """Return the backward pass at ``pre`` = W z + b as a splitting (theorem 3).

        (I - J W)^-T v = v + W^T u, where u = J (W^T u + v), J = s'(W z + b): W transposed, s linearised, bias v.
        """
        slope = Diagonal(self.activation.derivative(pre))
        return self.sharing(Splitting(self.operator, slope, cotangent, self.problem, not self.transposed))

    def sharing(self, other: Splitting) -> Splitting:
        """Return ``other`` with the step sizes and factorisations of this splitting."""
        other.alphas, other.resolvents = self.alphas, self.resolvents
        return other

    def record(self, problem: Problem, z: Tensor, companion: Tensor | None) -> SplitRecord:
        """Record f at ``z``, where ``companion`` is W z + b, without evaluating it again."""
        problem, views = Record.viewed(problem)
        split = self.sharing(cast(Splitting, problem.structure(Splitting)))
        with torch.no_grad():
            pre = split.preactivation(z) if companion is None else companion
        with torch.enable_grad():
            parts: Sequence[Any] = split.problem.in_scope(self.operator.recorded, problem.layout.unpack(z.detach()))
            values, pulls = zip(*parts, strict=True)
            image: Any = Known.apply(pre, problem.layout.unpack, pulls, split.bias, *values)
        return SplitRecord(problem, views, z.detach(), image, split, pre)  # no product with W^T is left to autograd


@dataclass
class SplitRecord(Record):
    """W z + b recorded at z. J u, its cotangent, is found by the splitting solver; u = v + W^T (J u) (theorem 3)."""

    split: Splitting
    pre: Tensor

    def pull(self, adjoint: Adjoint, cotangent: Tensor) -> Tensor:
        cotangent = self.problem.layout.arranged(cotangent.detach())
        finite = torch.isfinite(cotangent.sum(dim=1))[:, None]  # a sum with a NaN is NaN
        if not (whole := bool(finite.all())):  # or the sum has overflowed
            finite = torch.isfinite(cotangent).all(dim=1, keepdim=True)
        split = self.split.adjoint(self.pre.detach(), cotangent if whole else torch.where(finite, cotangent, 0.0))
        guess = torch.zeros_like(cotangent) if adjoint.start is None else adjoint.start(cotangent)
        u = adjoint.solve(SplitAdjoint(self.problem, split), guess)
        return u if whole else torch.where(finite, u, cotangent)

    def full(self, u: Tensor, cotangent: Tensor) -> Tensor:
        split = self.split
        return cotangent + split.apply(split.operator if split.transposed else split.operator.adjoint, u)

    def value(self) -> Tensor:
        return self.split.activation(self.pre)


class SplitAdjoint(DerivedProblem):
    """u -> J (W^T u + v): the adjoint system of z = s(W z + b) in a form that splitting solvers can use."""

    affine = True

    def __init__(self, problem: Problem, split: Splitting):
        super().__init__(problem)
        self.split = split

    def __call__(self, rows: Tensor) -> Tensor:
        self.count.add(rows.shape[0])
        with torch.no_grad():
            return self.split.activation(self.split.preactivation(rows))

    def structure(self, kind: type[AnyStructure]) -> AnyStructure | None:
        return self.split if isinstance(self.split, kind) else None

    def take(self, rows: Tensor) -> SplitAdjoint:
        taken = SplitAdjoint(self.problem, self.split.take(rows, cast(FunctionProblem, self.problem)))
        taken.count = self.count
        return taken

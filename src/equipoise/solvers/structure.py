"""What splitting solvers see of a problem: z = s(W z + b) on rows, its resolvents, its backward pass of that form too.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), theorems 1 and 3.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from equipoise.problem.layout import Layout, is_zero, leaves, select
from equipoise.problem.scope import Scope
from equipoise.solvers.base import Solver


class Prox(Protocol):
    """The nonlinearity s = prox_f^1 on rows, and prox_f^alpha; each returns a new tensor."""

    def __call__(self, x: Tensor, /) -> Tensor: ...
    def prox(self, x: Tensor, alpha: float, /) -> Tensor: ...
    def reflect(self, x: Tensor, alpha: float, /) -> Tensor: ...  # 2 prox - identity
    def derivative(self, x: Tensor, /) -> Tensor: ...
    def take(self, rows: Tensor, /) -> Prox: ...


class Diagonal:
    """x -> slope x with 0 <= slope <= 1: s linearised. slope = (1 + D)^-1, f(z) = D z^2 / 2 (theorem 3)."""

    def __init__(self, slope: Tensor):
        self.slope = slope
        self.factors: dict[float, Tensor] = {}  # of reflections, which are asked for again and again

    def __call__(self, x: Tensor) -> Tensor:
        return self.slope * x

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        """x / (1 + alpha D), which is 0 where D is infinite; algorithms 3 and 4 print it wrongly."""
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
    """W z + b, known already, with its gradients: that of b, and those of the tensors from which W z is made."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layout: Layout, pulls: Any, bias: Tensor, *products: Tensor) -> Tensor:
        ctx.layout, ctx.pulls = layout, pulls
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        parts = leaves(ctx.layout.unpack(cotangent), "cotangent")
        pulled = (pull(part) for pull, (_, part) in zip(ctx.pulls, parts, strict=True))
        return None, None, None, cotangent, *pulled


class Transposed:
    """An operator or a resolvent with its adjoint in its place."""

    def __init__(self, operator: Any):
        self.operator = operator
        self.adjoint = operator

    def __call__(self, z: Any) -> Any:
        return self.operator.adjoint(z)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)  # m and norms are those of the operator

    def resolvent(self, alpha: float) -> Transposed:
        return Transposed(self.operator.resolvent(alpha))


class Splitting:
    """z = s(W z + b) on rows, as splitting solvers see it.

    Args:
        operator: W, an :class:`equipoise.operators.MonotoneOperator` or the like of it.
        activation: s on rows.
        bias: b as rows.
        layout: how rows and values correspond.
        scope: of the solve, in which weights are derived once.
    """

    def __init__(self, operator: Any, activation: Prox, bias: Tensor, layout: Layout, scope: Scope):
        self.operator, self.activation, self.bias = operator, activation, bias
        self.layout, self.scope = layout, scope
        self.resolvents: dict[float, Any] = {}
        self.alphas: dict[Solver, float] = {}  # the step of each solver

    def product(self, rows: Tensor) -> Tensor:
        """W z."""
        with self.scope.entered():
            return self.layout.pack(self.operator(self.layout.unpack(rows)))

    def recorded(self, rows: Tensor, pre: Tensor) -> Tensor:
        """``pre`` = W z + b, known already, in the graph of the weights and of b."""
        with self.scope.entered(), torch.enable_grad():
            parts = self.operator.recorded(self.layout.unpack(rows))
            values, pulls = zip(*parts, strict=True)
            return Known.apply(pre, self.layout, pulls, self.bias, *values)  # type: ignore[no-any-return]

    def product_adjoint(self, rows: Tensor) -> Tensor:
        """W^T z."""
        with self.scope.entered():
            return self.layout.pack(self.operator.adjoint(self.layout.unpack(rows)))

    def preactivation(self, rows: Tensor) -> Tensor:
        """W z + b; without a product at 0, where nearly every solve starts."""
        return self.bias if is_zero(rows) else self.product(rows) + self.bias

    def solve(self, rows: Tensor, alpha: float) -> Tensor:
        """(I + alpha (I - W))^-1 z."""
        if alpha not in self.resolvents:
            self.resolvents[alpha] = self.operator.resolvent(alpha)
        return self.layout.pack(self.resolvents[alpha](self.layout.unpack(rows)))

    def take(self, rows: Tensor, scope: Scope) -> Splitting:
        """The same for some samples."""
        taken = copy.copy(self)
        taken.scope, taken.bias, taken.activation = scope, select(self.bias, rows), self.activation.take(rows)
        return taken

    def adjoint(self, pre: Tensor, cotangent: Tensor) -> Splitting:
        """The backward pass as a splitting problem of the same form (theorem 3).

        (I - J W)^-T v = v + W^T u, where u = J (W^T u + v), J = s'(W z + b): W transposed, s linearised, bias v.
        """
        slope = Diagonal(self.activation.derivative(pre))
        found = Splitting(Transposed(self.operator), slope, cotangent, self.layout, self.scope)
        found.alphas = self.alphas
        found.resolvents = {alpha: Transposed(resolvent) for alpha, resolvent in self.resolvents.items()}
        return found

    def share(self, earlier: Splitting) -> None:
        """Go on with the steps and factorisations of an earlier solve: weights may be others by now."""
        self.alphas, self.resolvents = earlier.alphas, earlier.resolvents

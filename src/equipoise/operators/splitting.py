"""What a monotone problem z = s(W z + b) shows the splitting solvers: products, resolvents, and its backward pass.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), theorems 1 and 3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.problem.layout import is_zero, leaves, select
from equipoise.problem.problem import FunctionProblem
from equipoise.solvers.structure import Prox, Splitting


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


class MonotoneSplitting(Splitting):
    """s(W z + b) for the samples of a problem.

    Args:
        operator: W, a :class:`equipoise.operators.MonotoneOperator`.
        activation: s on rows.
        bias: b as rows.
        problem: the problem, whose layout and scope are used.
        transposed: whether W^T takes the place of W, as in the backward pass.
    """

    def __init__(
        self, operator: Any, activation: Prox, bias: Tensor, problem: FunctionProblem, transposed: bool = False
    ):
        self.operator = self.bounds = operator
        self.activation, self.bias, self.problem, self.transposed = activation, bias, problem, transposed
        self.resolvents: dict[float, Any] = {}
        self.alphas = {}

    def apply(self, function: Callable[[Any], Any], rows: Tensor) -> Tensor:
        layout = self.problem.layout
        return layout.pack(self.problem.in_scope(function, layout.unpack(rows)))

    def product(self, rows: Tensor) -> Tensor:
        return self.apply(self.operator.adjoint if self.transposed else self.operator, rows)

    def product_adjoint(self, rows: Tensor) -> Tensor:
        return self.apply(self.operator if self.transposed else self.operator.adjoint, rows)

    def preactivation(self, rows: Tensor) -> Tensor:
        # Nearly every solve starts at 0, where no product is needed.
        return self.bias if is_zero(rows) else self.product(rows) + self.bias

    def recorded(self, rows: Tensor, pre: Tensor) -> Tensor:
        layout = self.problem.layout
        with torch.enable_grad():
            parts: Sequence[Any] = self.problem.in_scope(self.operator.recorded, layout.unpack(rows))
            values, pulls = zip(*parts, strict=True)
            return Known.apply(pre, layout.unpack, pulls, self.bias, *values)  # type: ignore[no-any-return]

    def solve(self, rows: Tensor, alpha: float) -> Tensor:
        if alpha not in self.resolvents:
            self.resolvents[alpha] = self.operator.resolvent(alpha)
        resolvent, layout = self.resolvents[alpha], self.problem.layout
        return layout.pack((resolvent.adjoint if self.transposed else resolvent)(layout.unpack(rows)))

    def take(self, rows: Tensor, problem: FunctionProblem) -> MonotoneSplitting:
        taken = copy.copy(self)
        taken.problem, taken.bias = problem, select(self.bias, rows)
        taken.activation = self.activation.take(rows) if isinstance(self.activation, Diagonal) else self.activation
        return taken

    def adjoint(self, pre: Tensor, cotangent: Tensor) -> MonotoneSplitting:
        slope = Diagonal(self.activation.derivative(pre))
        backward = MonotoneSplitting(self.operator, slope, cotangent, self.problem, not self.transposed)
        backward.share(self)
        return backward

    def share(self, earlier: Splitting) -> None:
        assert isinstance(earlier, MonotoneSplitting)
        self.alphas, self.resolvents = earlier.alphas, earlier.resolvents

"""The equilibrium of a monotone operator and a proximal activation, and what it shows the splitting solvers.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), theorems 1 and 3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from equipoise.gradients.implicit import Adjoint, Record
from equipoise.operators.activations import BorderZero, ProximalActivation, ReLU
from equipoise.operators.activations import activation as proximal
from equipoise.operators.linear import MonotoneOperator, in_transform, is_leaf, tree
from equipoise.operators.spectrum import images, memory
from equipoise.problem.layout import Layout, is_zero, leaves, rebuild, select
from equipoise.problem.problem import AnyStructure, DerivedProblem, FunctionProblem, Problem, Structure
from equipoise.solvers.base import Solver


class MonotoneProblem(nn.Module):
    """f(z, bias) = s(W z + bias), which has exactly one equilibrium for any bias and any weights (theorem 1).

    Args:
        operator: W, e.g. ``MonotoneConv2d``. If it has a border, s is 0 there (C.2).
        activation: s, a proximal activation or its name: "relu", "tanh", ...

    Example:
        >>> op = eq.operators.MonotoneLinear(64)
        >>> layer = eq.Equilibrium(eq.operators.MonotoneProblem(op, "relu"), solver=eq.PeacemanRachford())
        >>> z = layer(bias)    # bias = U x + b, (batch, 64)
    """

    full_precision = True  # also under autocast: a residual in bfloat16 says little

    def __init__(self, operator: MonotoneOperator, activation: str | Callable[..., Any] = "relu"):
        super().__init__()
        if not isinstance(operator, MonotoneOperator):
            raise TypeError(
                f"operator is a {type(operator).__name__}; it must be a monotone operator, such as MonotoneLinear(64)."
            )
        self.operator = operator
        self.activation = proximal(activation)
        self.activations = [
            self.activation if size is None else BorderZero(self.activation, size) for size in operator.inner
        ]

    def forward(self, z: Any, bias: Any) -> Any:
        pre = leaves(self.preactivation(z, bias), "z")
        return rebuild(z, [s(part) for s, (_, part) in zip(self.activations, pre, strict=True)])

    def start(self, bias: Any) -> Any:
        """Return zeros like z, in the operators' memory order; for ``Equilibrium(initial=problem.start)``."""
        given, dtype = leaves(bias, "bias")[0][1], self.operator.example.dtype
        batch = given.shape[0] if given.dim() else 1
        parts = [
            images(given.new_zeros(shape[1], shape[2], shape[0], batch, dtype=dtype))
            if len(shape) == 3
            else given.new_zeros(batch, *shape, dtype=dtype)
            for shape in tree(self.operator.shape)
        ]
        return parts[0] if is_leaf(self.operator.shape) else tuple(parts)

    def preactivation(self, z: Any, bias: Any) -> Any:
        """Return W z + bias. The bias may be given for the first tiers only."""
        given, parts = [part for _, part in leaves(bias, "bias")], [part for _, part in leaves(z, "z")]
        if len(given) > len(parts):
            raise ValueError(f"bias has {len(given)} tensors, z has {len(parts)}: give one for each tier, or fewer.")
        dtype = self.operator.require_precision()
        for i, (b, part) in enumerate(zip(given, parts, strict=False)):
            name = "bias" if len(parts) == 1 else f"bias[{i}]"
            if b.shape != part.shape:
                raise ValueError(f"{name} is {tuple(b.shape)}; it must be shaped like z, {tuple(part.shape)}.")
            if b.dtype != dtype and (not b.is_floating_point() or torch.promote_types(b.dtype, dtype) != dtype):
                raise TypeError(f"{name} is {b.dtype} and the weights of W are {dtype}: give {name}.to({dtype}).")
        traced = torch.compiler.is_compiling() or in_transform()
        if not traced and not any(part.requires_grad or not is_zero(part) for part in parts):
            return rebuild(z, self.at_zero([part for _, part in leaves(self.operator.checked(z), "z")], given))
        product = [part for _, part in leaves(self.operator(z), "W z")]
        return rebuild(z, [part + given[i] if i < len(given) else part for i, part in enumerate(product)])

    def at_zero(self, parts: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Return W 0 + bias, where nearly every solve starts, without a product but in the graph of the weights."""
        nothing: Any = 0.0 if self.operator.is_finite() else torch.nan
        if torch.is_grad_enabled():
            nothing = sum((0 * p.flatten()[0] for p in self.operator.parameters() if p.requires_grad), start=nothing)
        full = [given[i] if i < len(given) else torch.zeros_like(part) for i, part in enumerate(parts)]
        return [arranged(b.to(part.dtype)) + nothing for part, b in zip(parts, full, strict=True)]

    def structure(self, kind: type[Structure], problem: FunctionProblem) -> Structure | None:
        """Return what the splitting solvers see of this f within a solve."""
        if kind is not Splitting:
            return None
        layout = problem.layout
        given = [part for _, part in leaves(problem.inputs[0], "bias")]
        missing = [
            given[0].new_zeros(len(given[0]), *leaf.shape, dtype=leaf.dtype) for leaf in layout.leaves[len(given) :]
        ]
        rows = layout.pack(rebuild(layout.nesting, [*given, *missing]))
        return Splitting(self.operator, OnRows(self.activation, self.mask(layout, rows)), rows, problem)

    def mask(self, layout: Layout, like: Tensor) -> Tensor | None:
        """Return 0 on the border and 1 elsewhere, as a row; None without a border."""
        if all(size is None for size in self.operator.inner):
            return None
        ones = [like.new_ones(1, *leaf.shape) for leaf in layout.leaves]
        for part, size in zip(ones, self.operator.inner, strict=True):
            if size is not None:
                BorderZero(ReLU(), size).cleared(part)
        return layout.pack(rebuild(layout.nesting, ones))


class OnRows:
    """An activation applied to rows, times ``mask``."""

    def __init__(self, activation: ProximalActivation, mask: Tensor | None):
        self.activation, self.mask = activation, mask

    def __call__(self, rows: Tensor) -> Tensor:
        return self.masked(self.activation(rows))

    def prox(self, rows: Tensor, alpha: float) -> Tensor:
        return self.masked(self.activation.prox(rows, alpha))

    def reflect(self, rows: Tensor, alpha: float) -> Tensor:
        if self.mask is None:
            return self.activation.reflect(rows, alpha)
        return self.prox(rows, alpha).mul_(2).sub_(rows)

    def derivative(self, rows: Tensor) -> Tensor:
        return self.masked(self.activation.derivative(rows))

    def masked(self, rows: Tensor) -> Tensor:
        if self.mask is None:
            return rows
        return rows * self.mask if rows.requires_grad else rows.mul_(self.mask)


def arranged(part: Tensor) -> Tensor:
    """Return images in the operators' memory order, and vectors unchanged."""
    return images(memory(part)) if part.dim() == 4 else part


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
    """W z + b recorded at z. J u, its cotangent, is computed by the splitting solver; u = v + W^T (J u) (theorem 3)."""

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

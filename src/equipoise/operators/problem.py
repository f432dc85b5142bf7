"""The equilibrium of a monotone operator and a proximal activation, in a form that splitting solvers can use."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.operators.activations import BorderZero, ProximalActivation, ReLU
from equipoise.operators.activations import activation as proximal
from equipoise.operators.base import MonotoneOperator, is_leaf, tree
from equipoise.operators.spectrum import images, in_transform, memory
from equipoise.operators.structure import Splitting
from equipoise.problem.layout import Layout, is_zero, leaves, rebuild
from equipoise.problem.problem import FunctionProblem, Structure


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

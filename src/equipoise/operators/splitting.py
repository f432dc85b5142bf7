"""Operator splitting: the problem z = s(W z + b) with a monotone I - W, its structure, and the methods that solve it.

With s = prox_f, z is the equilibrium if and only if 0 is in F(z) + G(z), F(z) = (I - W) z - b, G the subdifferential of
f (theorem 1). The resolvent of F is (I + alpha (I - W))^-1 (z + alpha b), that of G is prox_f^alpha; the methods here
apply them in turn. Iterates are chosen so that the residual of f itself costs nothing: after the resolvent of F,
W z + b is known without a product with W.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020); E. K. Ryu, S. Boyd, "Primer on monotone
operator methods" (2016).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from equipoise.gradients.implicit import Adjoint, Record
from equipoise.operators.acceleration import Acceleration
from equipoise.operators.activations import BorderZero, ProximalActivation
from equipoise.operators.activations import activation as proximal
from equipoise.operators.linear import MonotoneOperator, Resolvent, in_transform, is_leaf, tree
from equipoise.operators.spectrum import images, memory, recording
from equipoise.options import option, options, require
from equipoise.problem.layout import Layout, leaves, memory_order, rebuild, row_norms, select
from equipoise.problem.problem import AnyStructure, DerivedProblem, FunctionProblem, Problem, Structure
from equipoise.solvers.base import Solver, State


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

    full_precision = True  # also under autocast: a residual in bfloat16 is too coarse

    def __init__(self, operator: MonotoneOperator, activation: str | Callable[..., Any] = "relu"):
        super().__init__()
        if not isinstance(operator, MonotoneOperator):
            raise TypeError(
                f"operator has type {type(operator).__name__}; it must be a monotone one, such as MonotoneLinear(64)."
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
        if not any(part.requires_grad or not is_zero(part) for part in parts):
            return rebuild(z, self.at_zero([part for _, part in leaves(self.operator.checked(z), "z")], given))
        product = [part for _, part in leaves(self.operator(z), "W z")]
        return rebuild(z, [part + given[i] if i < len(given) else part for i, part in enumerate(product)])

    def at_zero(self, parts: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Return W 0 + bias, where nearly every solve starts, without a product but in the graph of the weights."""
        nothing: Any = 0.0 if self.operator.is_finite() else torch.nan
        if torch.is_grad_enabled():
            nothing = sum((0 * p.flatten()[0] for p in self.operator.parameters() if p.requires_grad), start=nothing)
        full = [given[i] if i < len(given) else torch.zeros_like(part) for i, part in enumerate(parts)]
        values = [arranged(b.to(part.dtype)) for part, b in zip(parts, full, strict=True)]
        return values if isinstance(nothing, float) and nothing == 0 else [value + nothing for value in values]

    def structure(self, kind: type[Structure], problem: FunctionProblem) -> Structure | None:
        """Return what the splitting solvers see of this f within a solve."""
        if kind is not Splitting:
            return None
        layout = problem.layout
        given = [part for _, part in leaves(problem.inputs[0], "bias")]
        missing = [
            given[0].new_zeros(given[0].shape[0], *leaf.shape, dtype=leaf.dtype) for leaf in layout.leaves[len(given) :]
        ]
        rows = layout.pack(rebuild(layout.nesting, [*given, *missing]))
        activation = OnRows(self.activation, self.mask(layout, rows), partial(self.border, layout))
        return Splitting(self.operator, activation, rows, problem)

    def mask(self, layout: Layout, like: Tensor) -> Tensor | None:
        """Return 0 on the border and 1 elsewhere, as a row; None without a border."""
        if all(size is None for size in self.operator.inner):
            return None
        mask = layout.pack(rebuild(layout.nesting, [like.new_ones(1, *leaf.shape) for leaf in layout.leaves]))
        for part in self.border(layout, mask):
            part.zero_()
        return mask

    def border(self, layout: Layout, rows: Tensor) -> list[Tensor]:
        """Return views of the border of every tensor stored in rows."""
        parts = leaves(layout.unpack(rows), "z")
        pairs = zip(parts, self.activations, strict=True)
        return [view for (_, part), s in pairs if isinstance(s, BorderZero) for view in s.border(part)]


@dataclass(eq=False)
class OnRows:
    """An activation applied to rows, and 0 on their border."""

    activation: ProximalActivation
    mask: Tensor | None  # 0 on the border and 1 elsewhere; None without a border
    border: Callable[[Tensor], list[Tensor]]  # views of it

    @property
    def projection(self) -> bool:
        return self.activation.projection

    def __call__(self, rows: Tensor) -> Tensor:
        return self.masked(self.activation(rows))

    def prox(self, rows: Tensor, alpha: float) -> Tensor:
        return self.masked(self.activation.prox(rows, alpha))

    def reflect(self, rows: Tensor, alpha: float) -> Tensor:
        reflected = self.activation.reflect(rows, alpha)
        if self.mask is None:
            return reflected
        if recording(reflected):
            return torch.where(self.mask == 0, -rows, reflected)
        for part, given in zip(self.border(reflected), self.border(rows), strict=True):
            torch.neg(given, out=part)
        return reflected

    def derivative(self, rows: Tensor) -> Tensor:
        return self.masked(self.activation.derivative(rows))

    def masked(self, fresh: Tensor) -> Tensor:
        if self.mask is None:
            return fresh
        if recording(fresh):
            return fresh * self.mask
        for part in self.border(fresh):  # the border is small: much less to write than a product with the mask
            part.zero_()
        return fresh


def is_zero(tensor: Tensor) -> bool:
    """Return whether every entry is 0, as far as is known: a graph that is traced has no values."""
    if torch.compiler.is_compiling() or in_transform():
        return False
    stored = tensor.permute(memory_order(tensor))
    return not stored.numel() or all(end == 0 for end in torch.stack(stored.aminmax()).tolist())  # any() is slower


def arranged(part: Tensor) -> Tensor:
    """Return images in the operators' memory order, and vectors unchanged."""
    return images(memory(part)) if part.dim() == 4 else part


@dataclass(eq=False)
class Diagonal:
    """x -> slope x with 0 <= slope <= 1: s linearised. slope = (1 + D)^-1, f(z) = D z^2 / 2 (theorem 3)."""

    slope: Tensor
    projection: bool = False  # whether s is one: then the slope is 0 or 1, and D 0 or infinite
    factors: dict[float, Tensor] = field(default_factory=dict)  # of reflections, by alpha

    def __call__(self, x: Tensor) -> Tensor:
        return self.slope * x

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        """Return x / (1 + alpha D), which is 0 where D is infinite; algorithms 3 and 4 misprint it."""
        return x * self.shrinking(alpha)

    def shrinking(self, alpha: float) -> Tensor:
        if alpha == 1 or self.projection:
            return self.slope
        return self.slope / torch.add(alpha, self.slope, alpha=1 - alpha)  # slope + alpha (1 - slope)

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        if alpha not in self.factors:
            self.factors[alpha] = torch.add(-1.0, self.shrinking(alpha), alpha=2)
        return x * self.factors[alpha]

    def derivative(self, x: Tensor) -> Tensor:
        return self.slope

    def take(self, rows: Tensor) -> Diagonal:
        factors = {alpha: select(factor, rows) for alpha, factor in self.factors.items()}
        return Diagonal(select(self.slope, rows), self.projection, factors)


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


@dataclass(eq=False)
class Splitting(Structure):
    """f(z) = s(W z + b) for the samples of a problem, as the splitting solvers use it."""

    requirement = "f(z) = s(W z + b), such as equipoise.operators.MonotoneProblem(operator, activation)"

    operator: MonotoneOperator
    activation: OnRows | Diagonal
    bias: Tensor  # as rows
    problem: FunctionProblem  # whose layout and scope are used
    transposed: bool = False  # whether W^T takes the place of W, as in the backward pass
    resolvents: dict[float, Resolvent] = field(default_factory=dict)
    alphas: dict[Solver, float] = field(default_factory=dict)  # step size of each solver

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
        activation = self.activation.take(rows) if isinstance(self.activation, Diagonal) else self.activation
        return replace(self, problem=problem, bias=select(self.bias, rows), activation=activation)

    def adjoint(self, pre: Tensor, cotangent: Tensor) -> Splitting:
        """Return the backward pass at ``pre`` = W z + b as a splitting (theorem 3).

        (I - J W)^-T v = v + W^T u, where u = J (W^T u + v), J = s'(W z + b): W transposed, s linearised, bias v.
        """
        slope = Diagonal(self.activation.derivative(pre), self.activation.projection)
        return replace(self, activation=slope, bias=cotangent, transposed=not self.transposed)

    def record(self, problem: Problem, z: Tensor, companion: Tensor | None) -> SplitRecord:
        """Record f at ``z``, where ``companion`` is W z + b, without evaluating it again."""
        problem, views = Record.viewed(problem)
        split = cast(Splitting, problem.structure(Splitting))
        split.alphas, split.resolvents = self.alphas, self.resolvents
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


@dataclass
class SplittingState(State):
    """Adds W z + b."""

    pre: Tensor
    zero: bool = field(default=False, kw_only=True)  # whether z is 0, as at the start of nearly every solve

    def norms(self) -> tuple[Tensor, Tensor]:
        if self.zero:
            size = row_norms(self.image)
            return size, size
        return super().norms()


class SplittingSolver(Solver):
    """A solver that works with W and s."""

    needs = Splitting
    alpha: float | str

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str):
            require(self, "alpha", among=("auto",))
        else:
            require(self, "alpha", above=0.0)

    def split(self, problem: Problem) -> tuple[Splitting, float]:
        """Return the structure of f and the step size."""
        split = self.structure(problem, Splitting)
        if self not in split.alphas:
            alpha = self.automatic(split.operator) if isinstance(self.alpha, str) else float(self.alpha)
            # No step size suits weights that are not finite or overflow: any shows that f is not finite either.
            split.alphas[self] = alpha if 0 < alpha < math.inf else 1.0
        return split, split.alphas[self]

    def begin(self, split: Splitting, z: Tensor, image: Tensor) -> SplittingState:
        """Return the state to start from: at z0, or at 0 for samples whose equilibrium is 0.

        0 is the equilibrium exactly when s(b) = 0. From elsewhere, iterates only tend to it: f(z) may be 0 long before
        z is, and no relative tolerance would ever be met.
        """
        if is_zero(z):
            return SplittingState(z, image, split.bias, zero=True)
        at_rest = (split.activation(split.bias) == 0).all(dim=1) & torch.isfinite(image).all(dim=1)
        if bool(at_rest.any()):
            z, image = (torch.where(at_rest[:, None], 0.0, rows) for rows in (z, image))
        return SplittingState(z, image, split.preactivation(z))

    def companion(self, state: SplittingState) -> Tensor:
        return state.pre  # at the equilibrium it determines the slope of s for the backward pass

    @abstractmethod
    def automatic(self, operator: MonotoneOperator) -> float:
        """Return the step size that suits the operator."""


@options
class ForwardBackward(SplittingSolver):
    """z <- prox_f^alpha(z - alpha F(z)): a damped step of f (eq. 6, algorithm 1). Converges for alpha < 2 m / L^2.

    Args:
        alpha: step size; "auto" is m / L^2 with a bound L of ||I - W||, for which convergence is certain.

    Example:
        >>> eq.fixed_point(eq.operators.MonotoneProblem(op, "relu"), z0, bias, solver=eq.ForwardBackward(0.1))
    """

    alpha: float | str = "auto"

    def automatic(self, operator: MonotoneOperator) -> float:
        largest = operator.lipschitz_bound()
        return operator.m / largest / largest  # the square may overflow

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> SplittingState:
        split, _ = self.split(problem)
        return self.begin(split, z, image)

    def step(self, problem: Problem, state: SplittingState) -> SplittingState:
        split, alpha = self.split(problem)
        z = split.activation.prox(torch.lerp(state.z, state.pre, alpha), alpha)
        problem.count.add(z.shape[0])
        pre = split.preactivation(z)
        return SplittingState(z, split.activation(pre), pre)


@dataclass
class ReflectionState(SplittingState):
    """Adds the step size, and what relaxation and acceleration remember of u."""

    alpha: float
    kept: Tensor | None = None  # u, where it differs from z + alpha (W z + b - z)
    memory: Acceleration | None = None

    @property
    def u(self) -> Tensor:
        """What is reflected next."""
        if self.kept is not None:
            return self.kept
        return self.alpha * self.pre if self.zero else torch.lerp(self.z, self.pre, self.alpha)

    def take(self, rows: Tensor) -> ReflectionState:
        taken = super().take(rows)
        taken.memory = self.memory.take(rows) if self.memory is not None else None
        return taken


class ReflectionSolver(SplittingSolver):
    """u <- (1 - relaxation) u + relaxation C_F C_G u, where C = 2 R - I is a resolvent reflected (eq. A10)."""

    relaxation: float = 1.0  # an option of DouglasRachford only
    memory: int

    def automatic(self, operator: MonotoneOperator) -> float:
        # The best step size for a symmetric I - W with eigenvalues between m and L is 1 / sqrt(m L). Few eigenvalues of
        # real operators are near either end, so a mean size works better: equal to the best step size, or within an
        # iteration or two, on random and trained operators of every kind.
        return 1 / operator.typical_size()

    def init(self, problem: Problem, z: Tensor, image: Tensor) -> ReflectionState:
        # The u of z if z were the equilibrium; from z = 0 this is one step ahead of u = 0.
        split, alpha = self.split(problem)
        first = self.begin(split, z, image)
        state = ReflectionState(first.z, first.image, first.pre, alpha, zero=first.zero)
        if self.memory:
            state.kept = state.u
            state.memory = Acceleration.start(state.kept, self.memory)
        return state

    def step(self, problem: Problem, state: ReflectionState) -> ReflectionState:
        split, alpha = self.split(problem)
        problem.count.add(state.z.shape[0])
        half = split.activation.reflect(state.u, alpha)
        memory, plain = state.memory, self.relaxation == 1 and state.memory is None
        before = None if plain else state.u
        del state  # its memory is free for the resolvent
        z = split.solve(torch.add(half, split.bias, alpha=alpha), alpha)
        kept = None
        if before is not None:
            kept = torch.lerp(before, torch.lerp(half, z, 2.0), self.relaxation)  # towards 2 z - half
            kept = memory.next(before, kept) if memory is not None else kept
        pre = half.lerp_(z, (1 + alpha) / alpha)  # (1 + alpha) z - alpha W z = half + alpha b
        return ReflectionState(z, split.activation(pre), pre, alpha, kept, memory)


@options
class PeacemanRachford(ReflectionSolver):
    """Peaceman-Rachford splitting (eq. 7, algorithm 2): converges for every alpha > 0 when I - W >= m I.

    Args:
        alpha: step size, which affects the rate but not the result; "auto" is near the best for the current weights:
            the inverse of a size between the smallest and the largest of I - W.
        memory: number of differences kept by a safeguarded Anderson acceleration of u; 0 disables it. Convergence from
            every starting point is still guaranteed, its linear rate is not.

    Example:
        >>> eq.Equilibrium(eq.operators.MonotoneProblem(op, "relu"), initial=op.shape, solver=eq.PeacemanRachford())
    """

    alpha: float | str = "auto"
    memory: int = option(default=0, at_least=0, whole=True)


@options
class DouglasRachford(ReflectionSolver):
    """Relaxed Douglas-Rachford splitting: the average of no step and Peaceman-Rachford's.

    Args:
        alpha: as in :class:`PeacemanRachford`.
        relaxation: fraction of the step; 1/2 is the method itself, 1 is Peaceman-Rachford.
        memory: as in :class:`PeacemanRachford`.

    Example:
        >>> eq.fixed_point(eq.operators.MonotoneProblem(op, "relu"), z0, bias, solver=eq.DouglasRachford(0.5))
    """

    alpha: float | str = "auto"
    relaxation: float = option(default=0.5, above=0.0, at_most=1.0)
    memory: int = option(default=0, at_least=0, whole=True)

"""Activations that are proximal maps, s = prox_f^1 of a convex f, with their prox_f^alpha (eq. 4 of the monDEQ paper).

An elementwise s is one exactly if it never decreases and its slope never exceeds 1. Then f'(z) = s^-1(z) - z, and a
fixed point of s(W z + b) is a zero of the sum of two monotone operators (theorem 1), which splitting methods find.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020); which activations are proximal maps:
P. L. Combettes, J.-C. Pesquet, "Deep neural network structures solving variational inequalities" (2020).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.options import is_number, options, require, require_number, unknown
from equipoise.problem.layout import inverse


class ProximalActivation(ABC):
    """An elementwise s = prox_f^1. ``act(x)`` is recorded by autograd; the other methods are used without a graph.

    To add your own, subclass it; each method returns a new tensor with the memory layout of its input.
    """

    projection: ClassVar[bool] = False  # whether it projects onto an interval: then prox^alpha is s for every alpha

    def __call__(self, x: Tensor) -> Tensor:
        """Return s(x)."""
        return self.prox(x, 1.0)

    @abstractmethod
    def prox(self, x: Tensor, alpha: float) -> Tensor:
        """Return the z that minimises 1/2 (x - z)^2 + alpha f(z), for alpha > 0 (eq. 4)."""

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        """Return 2 prox(x) - x."""
        return torch.lerp(x, self.prox(x, alpha), 2.0)

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """Return s'(x); at a kink, the value that autograd takes."""

    @abstractmethod
    def function(self, z: Tensor) -> Tensor:
        """Return the convex f elementwise; infinite outside its domain."""


@options
class ReLU(ProximalActivation):
    """max(x, 0): the projection onto z >= 0, for every alpha."""

    projection = True

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        return torch.relu(x)

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        return x.abs()

    def derivative(self, x: Tensor) -> Tensor:
        return torch.gt(x, 0, out=torch.empty_like(x))  # three times faster than through a boolean tensor

    def function(self, z: Tensor) -> Tensor:
        return indicator(z >= 0, z)


@options
class LeakyReLU(ProximalActivation):
    """x, times ``slope`` where negative: f(z) = (1 / slope - 1) z^2 / 2 for z < 0, else 0.

    Args:
        slope: slope left of 0, in (0, 1]; 1 gives the identity.
    """

    slope: float = 0.01

    def __post_init__(self) -> None:
        require(self, "slope", above=0.0, at_most=1.0)

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        return F.leaky_relu(x, self.shrunk(alpha))

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        return F.leaky_relu(x, 2 * self.shrunk(alpha) - 1)

    def shrunk(self, alpha: float) -> float:
        """Return the slope of prox^alpha where x < 0."""
        require_number("alpha", alpha, above=0)
        return self.slope if alpha == 1 else self.slope / (self.slope + alpha * (1 - self.slope))

    def derivative(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype).clamp(min=self.slope)

    def function(self, z: Tensor) -> Tensor:
        return (1 / self.slope - 1) / 2 * z.clamp(max=0).square()


@options
class HardTanh(ProximalActivation):
    """x clamped to [-1, 1]: the projection onto that interval, for every alpha."""

    projection = True

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        return F.hardtanh(x)

    def derivative(self, x: Tensor) -> Tensor:
        return (x.abs() < 1).to(x.dtype)

    def function(self, z: Tensor) -> Tensor:
        return indicator(z.abs() <= 1, z)


@options
class SoftThreshold(ProximalActivation):
    """x moved towards 0 by ``threshold``, and 0 within it: f(z) = threshold |z|.

    Args:
        threshold: non-negative number; 0 gives the identity.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self, "threshold", at_least=0.0)

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        require_number("alpha", alpha, above=0)
        return F.softshrink(x, self.threshold * alpha)

    def derivative(self, x: Tensor) -> Tensor:
        return (x.abs() > self.threshold).to(x.dtype)

    def function(self, z: Tensor) -> Tensor:
        return self.threshold * z.abs()


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


class SmoothActivation(ProximalActivation):
    """A smooth s. Its prox^alpha(x) is s(p) for the root p of phi(p) = s(p) + alpha (p - s(p)) = x.

    The slope of phi lies between 1 and alpha. Where s is convex, phi is convex if alpha < 1 and concave if alpha > 1;
    where s is concave, the other way round. Newton's method needs no bracket: a convex phi lies above its asymptotes
    and tangents, so the nearest of their roots is to the right of its own, and the method descends from there without
    overshooting.
    """

    limits = (-1.0, 1.0)  # of s at minus and plus infinity
    centre = (0.0, 1.0)  # s and s' at 0, where s turns from convex to concave

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def parts(self, p: Tensor, alpha: float) -> Parts:
        """Return s, p - s, s' and 1 - s' at p, without any cancellation that alpha would magnify."""

    def derivative(self, x: Tensor) -> Tensor:
        return self.parts(x, 1.0)[2]

    def start(self, x: Tensor, alpha: float) -> Tensor:
        """Return the root of the asymptote or tangent of phi that is nearest to its own."""
        low, high = (x.sub((1 - alpha) * limit).div_(alpha) for limit in self.limits)
        value, slope = self.centre
        tangent = x  # where s(p) = p near 0
        if self.centre != (0.0, 1.0):
            tangent = x.sub((1 - alpha) * value).div_(alpha + (1 - alpha) * slope)
        return tangent.clamp(low, high) if alpha > 1 else tangent.clamp(high, low)

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        require_number("alpha", alpha, above=0)
        if alpha == 1:
            return self(x)
        if x.numel() <= BLOCK or not x.is_cpu:
            return self.newton(x, alpha)
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        x = x.permute(order)
        z = torch.cat([self.newton(block, alpha) for block in x.reshape(-1).split(BLOCK)])
        return z.view(x.shape).permute(inverse(order))

    def newton(self, x: Tensor, alpha: float) -> Tensor:
        """Return prox^alpha by Newton's method, each entry iterated until it has converged itself."""
        eps = torch.finfo(x.dtype).eps
        near, far = 1 / max(1.0, alpha), alpha / max(1.0, alpha)  # phi scaled, so that nothing overflows
        rounding = 2 * eps * near * x.abs()
        p = self.start(x, alpha)
        active = torch.ones_like(p, dtype=torch.bool)
        for _ in range(STEPS):
            s, gap, slope, rest = self.parts(p, alpha)
            missing = near * (x - s) - far * gap
            step = missing / (near * slope + far * rest)
            active &= step.isfinite()  # an infinite or NaN x has no step: the answer is s(x), its limit
            p = torch.where(active, p + step, p)
            # Convergence is quadratic: done after a step of half the digits, or with a residual of rounding size.
            active &= (step.abs() > math.sqrt(eps) / 8 * torch.maximum(p.abs(), s.abs())) & (missing.abs() > rounding)
            if not active.any():
                break
        return self(p)


STEPS = 100  # 12 were the most observed for alpha from 1e-4 to 1e4
BLOCK = 2**16  # entries processed at a time on a CPU, so that they stay in its cache without large temporaries


@options
class Tanh(SmoothActivation):
    """tanh(x): f(z) = z artanh(z) + log(1 - z^2) / 2 - z^2 / 2 on [-1, 1]."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def parts(self, p: Tensor, alpha: float) -> Parts:
        s = torch.tanh(p)
        gap = p - s
        if alpha > 1:  # Lambert: tanh(p) = p / (1 + q), q = p^2 / (3 + p^2 / (5 + ...)), which needs no difference
            square = p * p
            q = square / 15
            for odd in (13, 11, 9, 7, 5, 3):
                q = square / (odd + q)
            gap = torch.where(square < 0.25, p * (q / (1 + q)), gap)
        rest = s * s
        return s, gap, 1 - rest, rest

    def function(self, z: Tensor) -> Tensor:
        return -(torch.special.entr(1 + z) + torch.special.entr(1 - z) + z.square()) / 2


@options
class Arctan(SmoothActivation):
    """arctan(x): f(z) = -log(cos(z)) - z^2 / 2 between -pi/2 and pi/2."""

    limits = (-math.pi / 2, math.pi / 2)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.arctan(x)

    def parts(self, p: Tensor, alpha: float) -> Parts:
        s, square = torch.arctan(p), p * p
        gap = p - s
        if alpha > 1:  # Gauss: arctan(p) = p / (1 + q), q = p^2 / (3 + 4 p^2 / (5 + 9 p^2 / (7 + ...)))
            q = torch.zeros_like(p)
            for n in range(13, 0, -1):
                q = n * n * square / (2 * n + 1 + q)
            gap = torch.where(square < 0.25, p * (q / (1 + q)), gap)
        return s, gap, 1 / (1 + square), 1 / (1 + 1 / square)

    def function(self, z: Tensor) -> Tensor:
        # In float32 pi/2 is rounded up: its cosine is negative.
        return -z.cos().abs().log() - z.square() / 2 + indicator(z.abs() <= math.pi / 2, z)


@options
class ELU(SmoothActivation):
    """x, and ``scale`` (exp(x) - 1) where negative: f(z) = (scale + z) log(1 + z / scale) - z - z^2 / 2 for z < 0.

    Args:
        scale: slope left of 0, in (0, 1]; torch's alpha. Above 1 it is not a proximal map.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require(self, "scale", above=0.0, at_most=1.0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.elu(x, self.scale)

    def start(self, x: Tensor, alpha: float) -> Tensor:
        # The asymptote s = -scale, and the tangent of the part left of 0; right of 0, p = x.
        asymptote, tangent = (x + self.scale * (1 - alpha)) / alpha, x / (alpha + self.scale * (1 - alpha))
        return torch.where(x < 0, (torch.maximum if alpha > 1 else torch.minimum)(asymptote, tangent), x)

    def parts(self, p: Tensor, alpha: float) -> Parts:
        left = p.clamp(max=0)
        grown = torch.expm1(left)
        excess = grown - left
        if alpha > 1:  # exp(p) - 1 - p = p^2 / 2 (1 + p / 3 (1 + p / 4 (...))), which needs no difference
            series = torch.ones_like(p)
            for n in range(15, 2, -1):
                series = 1 + left / n * series
            excess = torch.where(left > -0.5, left * left / 2 * series, excess)
        s = torch.where(p > 0, p, self.scale * grown)
        rest = torch.where(p > 0, 0.0, (1 - self.scale) - self.scale * grown)
        return s, (1 - self.scale) * left - self.scale * excess, 1 - rest, rest

    def derivative(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, 1.0, self.scale * x.clamp(max=0).exp())

    def function(self, z: Tensor) -> Tensor:
        left = z.clamp(max=0)
        return -self.scale * torch.special.entr(1 + left / self.scale) - left - left.square() / 2


@options
class Sigmoid(SmoothActivation):
    """1 / (1 + exp(-x)): f(z) = z log(z) + (1 - z) log(1 - z) - z^2 / 2 on [0, 1]."""

    limits = (0.0, 1.0)
    centre = (0.5, 0.25)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def parts(self, p: Tensor, alpha: float) -> Parts:
        s = torch.sigmoid(p)
        slope = s * (1 - s)
        return s, p - s, slope, 1 - slope

    def function(self, z: Tensor) -> Tensor:
        return -torch.special.entr(z) - torch.special.entr(1 - z) - z.square() / 2


@options
class Softplus(SmoothActivation):
    """log(1 + exp(x)): f(z) = Li2(exp(-z)), the dilogarithm, on z >= 0."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.softplus(x, threshold=50.0)  # torch's default, 20, makes a jump of 2e-9

    def start(self, x: Tensor, alpha: float) -> Tensor:
        return (torch.maximum if alpha > 1 else torch.minimum)(x, x / alpha)  # asymptotes: s = p, s = 0

    def parts(self, p: Tensor, alpha: float) -> Parts:
        return self(p), -self(-p), torch.sigmoid(p), torch.sigmoid(-p)

    def function(self, z: Tensor) -> Tensor:
        # Li2(exp(-z)) = D(w) = pi^2 / 6 - z w - D(z) with w = -log(1 - exp(-z)): D of the smaller is a short series.
        u = z.clamp(min=0)
        w = torch.where(u > math.log(2), -torch.log1p(-torch.exp(-u)), -torch.log(-torch.expm1(-u)))
        below = math.pi**2 / 6 + torch.xlogy(u, -torch.expm1(-u)) - debye(u)
        return torch.where(u > w, debye(w), below) + indicator(z >= 0, z)


BERNOULLI = (7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)  # B_14, B_12, ..., B_2


def debye(u: Tensor) -> Tensor:
    """Return D(u), the integral of t / (exp(t) - 1) from 0 to u <= log(2): the sum of B_n u^(n + 1) / (n + 1)!."""
    square, series = u.square(), torch.zeros_like(u)
    for n, bernoulli in zip(range(14, 0, -2), BERNOULLI, strict=True):
        series = (series + bernoulli / math.factorial(n + 1)) * square
    return u * (1 - u / 4 + series)


def indicator(inside: Tensor, like: Tensor) -> Tensor:
    """Return 0 inside, infinity outside."""
    return torch.where(inside, 0.0, torch.inf).to(like.dtype)


@options
class BorderZero(ProximalActivation):
    """Apply an activation inside an image and 0 on its border, the projection onto {0}: a proximal map too (C.2).

    Args:
        activation: activation inside.
        size: (h, w) of the inside of a (batch, channels, rows, columns) tensor; later rows and columns are the border.

    Example:
        >>> act = BorderZero(ReLU(), size=(28, 28))
        >>> z = act(x)  # (128, 54, 30, 30), zero in the last two rows and columns
    """

    activation: ProximalActivation
    size: tuple[int, int]

    def __post_init__(self) -> None:
        require(self, "activation", kind=ProximalActivation)
        size = self.size
        if not (isinstance(size, tuple) and len(size) == 2 and all(is_number(n, 1, whole=True) for n in size)):
            raise ValueError(f"BorderZero.size is {size!r}; it must be (rows, columns), whole numbers of at least 1.")

    def border(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows below and the columns beside the inside, as views that do not overlap."""
        h, w = self.size
        if x.dim() != 4 or x.shape[2] < h or x.shape[3] < w:
            raise ValueError(
                f"BorderZero(size={self.size}) was given a tensor of shape {tuple(x.shape)}; it must be "
                f"(batch, channels, rows, columns) with at least {h} rows and {w} columns."
            )
        return x[:, :, h:], x[:, :, :h, w:]

    def cleared(self, fresh: Tensor) -> Tensor:
        """Set the border of a new tensor to 0, in place."""
        for part in self.border(fresh):
            part.zero_()
        return fresh

    def __call__(self, x: Tensor) -> Tensor:
        z = self.activation(x)
        return self.cleared(z.clone() if z.requires_grad else z)  # autograd may have saved z

    def prox(self, x: Tensor, alpha: float) -> Tensor:
        return self.cleared(self.activation.prox(x, alpha))

    def reflect(self, x: Tensor, alpha: float) -> Tensor:
        reflected = self.activation.reflect(x, alpha)
        for part, given in zip(self.border(reflected), self.border(x), strict=True):
            part.copy_(given).neg_()
        return reflected

    def derivative(self, x: Tensor) -> Tensor:
        return self.cleared(self.activation.derivative(x))

    def function(self, z: Tensor) -> Tensor:
        value = self.activation.function(z)
        for part, given in zip(self.border(value), self.border(z), strict=True):
            part.copy_(indicator(given == 0, given))
        return value


NAMES: dict[str, type[ProximalActivation]] = {
    "relu": ReLU,
    "leaky-relu": LeakyReLU,
    "elu": ELU,
    "tanh": Tanh,
    "arctan": Arctan,
    "sigmoid": Sigmoid,
    "softplus": Softplus,
    "soft-threshold": SoftThreshold,
    "hard-tanh": HardTanh,
}
# By the names of torch's functions and modules, lower-case letters only.
TORCH = {name.replace("-", ""): kind for name, kind in NAMES.items()} | {"atan": Arctan, "softshrink": SoftThreshold}
OPTIONS = {nn.LeakyReLU: "negative_slope", nn.ELU: "alpha", nn.Softshrink: "lambd"}  # the same option of a module
DEFAULTS = {nn.Softplus: {"beta": 1}, nn.Hardtanh: {"min_val": -1, "max_val": 1}}  # the only supported options

NEITHER = "it is not a proximal map: it decreases for some negative x, and its slope exceeds 1 for some positive x"
NO_PROX = "it is a proximal map, but its prox^alpha is not implemented"
REFUSED = {
    **dict.fromkeys(("gelu", "silu", "swish", "mish", "hardswish"), NEITHER),
    "selu": "it is not a proximal map: its slope exceeds 1 near 0",
    "hardshrink": "it is not continuous, so it is not the proximal map of a convex function; soft-threshold is",
    **dict.fromkeys(("celu", "softsign", "logsigmoid", "tanhshrink", "hardsigmoid", "relu6"), NO_PROX),
    "identity": "use LeakyReLU(slope=1.0) for the identity",
    "prelu": "its slope is learned and may leave [0, 1]; that of LeakyReLU is fixed",
    "rrelu": "its slope is random during training; that of LeakyReLU is fixed",
    **dict.fromkeys(("softmax", "logsoftmax", "softmin", "glu"), "it does not act elementwise"),
}


def activation(given: str | Callable[..., Any]) -> ProximalActivation:
    """Return the proximal activation for a name, a torch function, a torch module, or an object of this file.

    Example:
        >>> activation("leaky-relu"), activation(nn.LeakyReLU(0.2)), activation(torch.tanh)
        (LeakyReLU(), LeakyReLU(slope=0.2), Tanh())
    """
    if isinstance(given, ProximalActivation):
        return given
    if isinstance(given, type):
        raise TypeError(f"activation is the class {given.__name__}; give an object: {given.__name__}().")
    if isinstance(given, str) and given in NAMES:
        return NAMES[given]()
    name = "".join(filter(str.isalnum, given if isinstance(given, str) else torch_name(given))).lower()
    if not isinstance(given, str) and name in TORCH:
        if any(getattr(given, option) != value for option, value in DEFAULTS.get(type(given), {}).items()):
            raise ValueError(f"activation is {given!r}; for this one, only torch's default options are supported.")
        return TORCH[name](*(getattr(given, option) for kind, option in OPTIONS.items() if type(given) is kind))
    reason = REFUSED.get(name)
    supported = f"Supported: {', '.join(NAMES)}; your own is a subclass of equipoise.operators.ProximalActivation."
    if reason is not None:
        raise ValueError(f"activation is {given!r}; {reason}. {supported}")
    if isinstance(given, str):
        raise ValueError(unknown("activation", given, NAMES))
    raise TypeError(
        f"activation is {given!r}, which is not known to be a proximal map (it must act elementwise, never decrease, "
        f"and have slope at most 1). {supported}"
    )


def torch_name(given: object) -> str:
    """Return the name of one of torch's modules or functions; an empty string for anything else."""
    if isinstance(given, nn.Module):
        return type(given).__name__ if type(given).__module__.startswith("torch.nn.") else ""
    name = getattr(given, "__name__", "")
    return name if any(getattr(place, name, None) is given for place in (torch, F)) else ""

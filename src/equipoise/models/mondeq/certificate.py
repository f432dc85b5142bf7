"""What is proven of a monDEQ: how fast its solver converges, how far a change of the image moves its answer.

Everything follows from one inequality. s is the proximal map of a convex f, so z is the equilibrium of a bias b exactly
when b - M z lies in the subdifferential of f at z, with M = I - W. That is monotone: for two equilibria, with d for
differences, 0 <= <dz, db - M dz>, and M >= m I gives

    m |dz|^2 <= <dz, db>,    which says that    |dz - db / (2 m)| <= |db| / (2 m).

dz lies in a ball: |dz| <= |db| / m, and <c, dz> <= (<c, db> + |c| |db|) / (2 m) for whatever c reads from z. Where z
has a border that is held at zero, f is infinite off zero and convex still; dz is zero there, so c may be zero as well.

The bound |U| / m is that of C. Pabbaraju, E. Winston, J. Z. Kolter, "Estimating Lipschitz constants of monotone deep
equilibrium models" (2021); the ball makes that of the logits smaller, by half where c reads nothing that U writes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.operators import MonotoneConv2d, MonotoneLinear
from equipoise.operators.base import is_leaf, tree
from equipoise.operators.splitting import DouglasRachford, ForwardBackward, PeacemanRachford, SplittingSolver
from equipoise.problem.layout import leaves, rebuild
from equipoise.stability.norms import conv2d_norm_bound, operator_norm_bound
from equipoise.tolerance import Tolerance

TIGHT = Tolerance(relative=1e-6, max_steps=1000)
ROUNDING = 1e-9  # relative; bounds are computed in float64, whose sums here are a thousand times as exact
ITERATIONS = 12  # of Gram, after which a norm bound of a 1000 x 1000 matrix is above the norm by less than 0.1%


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proven of a model with these weights; made by ``model.certificate()``. Norms are 2-norms.

    Attributes:
        m: I - W >= m I, so that every input has one equilibrium.
        L: ||I - W|| <= L.
        solver: the name of the method that the layer is solved by.
        alpha: its step; None if it has none.
        rate: each of its steps brings u (of forward-backward: z) nearer to its limit by this factor or a smaller one;
            None where nothing is proven. See :func:`contraction`.
        features: z* moves by at most so many times what an image in [0, 1] is changed by: ||U / std|| / m.
        logits: the same for the logits.
        margins: (classes, classes), the same for the difference of two logits.
        readings: (classes, classes), the norm of what the difference of two logits reads from z*.

    Example:
        >>> certificate = model.certificate()
        >>> print(certificate)
        one equilibrium for every image: I - W >= 1, ||I - W|| <= 8.38
        PeacemanRachford, alpha 0.346: every step leaves at most 0.729 of the error, 15 steps at most 1%
        an image changed by d moves z* by at most 20.6 d, the logits by 47.9 d, the difference of two by 61.1 d
        >>> certificate.steps(1e-6)
        44
    """

    m: float
    L: float
    solver: str
    alpha: float | None
    rate: float | None
    features: float
    logits: float
    margins: Tensor = field(repr=False)
    readings: Tensor = field(repr=False)

    def steps(self, relative: float) -> int | None:
        """So many steps bring u to ``relative`` times its first distance from the limit; None if nothing is proven."""
        if isinstance(relative, bool) or not isinstance(relative, int | float) or not 0 < relative < 1:
            raise ValueError(f"relative is {relative!r}; it must lie between 0 and 1.")
        if self.rate is None:
            return None
        return max(1, math.ceil(math.log(relative) / math.log(self.rate))) if self.rate > 0 else 1

    def radii(self, logits: Tensor, defects: Tensor) -> Tensor:
        """How far each image can be changed with its largest logit staying the largest; 0 if that is not proven.

        Args:
            logits: (batch, classes), float64.
            defects: (batch,); the logits are those of an exact equilibrium whose bias is so far from the image's own.
                It moves the difference of two logits by at most its reading times the defect over m.
        """
        margins, readings = self.margins.to(logits.device), self.readings.to(logits.device)
        top, winner = logits.max(1)
        spare = top[:, None] - logits - readings[winner] * defects[:, None] / self.m
        spare = spare - ROUNDING * (1 + logits.abs().amax(1, keepdim=True))
        radii = torch.where(spare > 0, spare / margins[winner], 0.0)  # also where a logit is not a number
        return radii.scatter(1, winner[:, None], torch.inf).amin(1) * (1 - ROUNDING)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}

    def __str__(self) -> str:
        step = "" if self.alpha is None else f", alpha {self.alpha:.3g}"
        rate = (
            "no rate of convergence is proven"
            if self.rate is None
            else f"every step leaves at most {self.rate:.3g} of the error, {self.steps(0.01)} steps at most 1%"
        )
        return (
            f"one equilibrium for every image: I - W >= {self.m:g}, ||I - W|| <= {self.L:.3g}\n"
            f"{self.solver}{step}: {rate}\n"
            f"an image changed by d moves z* by at most {self.features:.3g} d, the logits by {self.logits:.3g} d, "
            f"the difference of two by {self.margins.max():.3g} d"
        )


def certify(model: Any, alpha: float | None = None) -> Certificate:
    """The certificate of a :class:`~equipoise.models.mondeq.model.MonDEQ`, all of it computed in float64.

    Args:
        model: on any device, in any type; its weights are taken as they are.
        alpha: of the solver, in place of its own.
    """
    unusable = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if unusable:
        raise ValueError(f"nothing can be certified: {', '.join(unusable)} of the model is NaN or infinite.")
    solver = model.layer.solver
    if isinstance(solver, SplittingSolver):
        chosen = solver if alpha is None else dataclasses.replace(solver, alpha=alpha)  # type: ignore[type-var]
        alpha = solver.automatic(model.operator) if isinstance(chosen.alpha, str) else float(chosen.alpha)
    elif alpha is not None:
        raise ValueError(f"alpha is {alpha!r}, but the layer is solved by {solver!r}, which has no alpha.")
    exact = in_float64(model)
    operator, m = exact.operator, exact.operator.m
    with torch.inference_mode(False), torch.no_grad():
        L = operator.lipschitz_bound()
        rate = None if alpha is None else contraction(solver, operator, alpha, L)
        injection = injection_norm(exact) * (1 + ROUNDING)
        read, written = readings(exact)
        apart, seen = distances(read), distances(written)
        margins = (seen + injection * apart) / (2 * m) * (1 + ROUNDING)
        norms = operator_norm_bound(torch.stack([written @ written.T, injection**2 * read @ read.T]), ITERATIONS).sqrt()
    return Certificate(
        m=m,
        L=L,
        solver=type(solver).__name__,
        alpha=alpha,
        rate=rate,
        features=injection / m,
        logits=float(norms.sum()) / (2 * m) * (1 + ROUNDING),
        margins=margins.cpu(),
        readings=apart.cpu(),
    )


def in_float64(model: Any) -> Any:
    """A copy whose numbers are exact for our purposes, and which records no gradients of weights."""
    with torch.inference_mode(False):
        return copy.deepcopy(model).double().eval().requires_grad_(False)


def contraction(solver: Any, operator: Any, alpha: float, L: float) -> float | None:
    """By which factor a step shortens the distance of u from its limit, at least; None if nothing is proven.

    Peaceman-Rachford's step is C_F C_G, resolvents reflected; C_G never lengthens a distance, and C_F shortens it to
    ||(I - alpha M) (I + alpha M)^-1||, which is found exactly when M is dense or a convolution. Else, for every x,

        |(I - alpha M) x|^2     |x|^2 + alpha^2 |M x|^2 - 2 alpha <x, M x>     1 + alpha^2 L^2 - 2 alpha m
        -------------------  =  ------------------------------------------  <=  ---------------------------
        |(I + alpha M) x|^2     |x|^2 + alpha^2 |M x|^2 + 2 alpha <x, M x>     1 + alpha^2 L^2 + 2 alpha m

    since the fraction falls with <x, M x> >= m |x|^2 and grows with |M x| <= L |x|. M = [[m, -k], [k, m]] with
    m^2 + k^2 = L^2 attains it: nothing better follows from m and L alone (1 - 4 alpha m / (1 + alpha L)^2 of E. K. Ryu,
    S. Boyd, "Primer on monotone operator methods" (2016), is larger). Douglas-Rachford averages with u itself;
    forward-backward has ||I - alpha M|| <= (1 - 2 alpha m + alpha^2 L^2)^(1/2), as prox never lengthens. Acceleration
    gives the promise up.
    """
    m, square = operator.m, 1 + (alpha * L) ** 2
    M = blocks(operator)
    if isinstance(solver, ForwardBackward):
        rate = math.sqrt(square - 2 * alpha * m) if M is None else norm(identity(M) - alpha * M)
    elif isinstance(solver, PeacemanRachford | DouglasRachford) and not solver.memory:
        if M is None:
            rate = math.sqrt((square - 2 * alpha * m) / (square + 2 * alpha * m))
        else:
            rate = norm(torch.linalg.solve(identity(M) + alpha * M, identity(M) - alpha * M))
        rate = 1 - solver.relaxation * (1 - rate)
    else:
        return None
    return rate if rate < 1 else None


def blocks(operator: Any) -> Tensor | None:
    """The diagonal blocks of I - W in a basis in which it has no others; None if that is not known."""
    if isinstance(operator, MonotoneLinear):
        W = operator.derive()[None]
    elif isinstance(operator, MonotoneConv2d):
        W = operator.blocks()
    else:
        return None
    return identity(W) - W


def identity(matrices: Tensor) -> Tensor:
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def norm(matrices: Tensor) -> float:
    """The largest singular value of a stack, rounded up."""
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(matrices.mH @ matrices)[:, -1].amax()))) * (1 + 1e-10)


def injection_norm(model: Any) -> float:
    """||U / std||, an upper bound: how far the bias moves with an image in [0, 1].

    U of a convolution is the same on images surrounded by zeros as on a circular grid with a border, whose other values
    do not matter: dz is zero there.
    """
    weight, std = model.inject.weight, model.normalize.std.view(-1, 1, 1)
    if isinstance(model.inject, nn.Conv2d):
        return float(conv2d_norm_bound(weight / std, model.size, ITERATIONS))
    pixels = weight.view(len(weight), -1, *model.size)
    return float(operator_norm_bound((pixels / std).flatten(1), ITERATIONS))


def readings(model: Any) -> tuple[Tensor, Tensor]:
    """What each logit reads from z*, off its border, as rows, and what of that U writes: c and c^T U / std."""
    classes, pixels = model.head.out_features, math.prod(model.size)
    inject, shape = model.inject, model.operator.shape
    channels = inject.in_channels if isinstance(inject, nn.Conv2d) else inject.in_features // pixels
    like = model.head.weight
    with torch.enable_grad():
        image = like.new_zeros(classes, channels, *model.size, requires_grad=True)
        zeros = [like.new_zeros(classes, *size, requires_grad=True) for size in tree(shape)]
        z = zeros[0] if is_leaf(shape) else tuple(zeros)
        read = torch.autograd.grad(model.features(z), zeros, like, materialize_grads=True)
        read = [inner(part, size) for part, size in zip(read, model.operator.inner, strict=True)]
        biases = [part for _, part in leaves(model.bias(model.normalize(image)), "bias")]
        (written,) = torch.autograd.grad(biases, image, read[: len(biases)])
    return torch.cat([part.flatten(1) for part in read], dim=1), written.flatten(1)


def inner(part: Tensor, size: tuple[int, int] | None) -> Tensor:
    """The same with zeros on the border."""
    if size is None:
        return part
    cleared = torch.zeros_like(part)
    cleared[..., : size[0], : size[1]] = part[..., : size[0], : size[1]]
    return cleared


def distances(rows: Tensor) -> Tensor:
    """Between every two rows, without the cancellation that a product of matrices would bring."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a model says of a batch of images, and how far each can be changed before it may say anything else.

    Attributes:
        logits: (batch, classes), float64.
        classes: (batch,), the class of each.
        radii: (batch,), in the 2-norm: every image nearer than this is of the same class; 0 if nothing is proven.
    """

    logits: Tensor
    classes: Tensor
    radii: Tensor


class Certifier:
    """A model whose every answer comes with a certified radius.

    The model is solved as it is, in its own numbers and to a tight tolerance, and then looked at in float64: for any z,
    with r = f(z) - z, f(z) = s(W z + b) = s(W f(z) + (b - W r)) is the exact equilibrium of the bias b - W r. The
    answer is read from f(z), and what W r may have changed is taken off: radii hold whether or not the solve converged,
    and whatever it rounded. They are about the model with exact equilibria.

    Args:
        model: with a ``certificate()``, such as :class:`~equipoise.models.mondeq.model.MonDEQ`. Copied: it may change.
        tolerance: of the solves; a looser one gives smaller radii.

    Example:
        >>> verdict = Certifier(model)(images)
        >>> verdict.classes, verdict.radii
    """

    def __init__(self, model: Any, tolerance: Tolerance = TIGHT):
        if isinstance(model, type) or not hasattr(model, "certificate"):
            kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
            raise TypeError(f"model is {kind}; certified radii are proven of a MonDEQ.")
        if not isinstance(tolerance, Tolerance):
            raise TypeError(
                f"tolerance is {tolerance!r}; it must be an object such as equipoise.Tolerance(relative=1e-6)."
            )
        self.certificate: Certificate = model.certificate()
        self.exact = in_float64(model)
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.model.layer.tolerance, self.model.layer.on_failure = tolerance, "ignore"

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Verdict:
        model, exact = self.model, self.exact
        z = model.layer(model.bias(model.normalize(images)))
        z = rebuild(z, [part.double() for _, part in leaves(z, "z")])
        image = exact.layer.f(z, exact.bias(exact.normalize(images.double())))
        pairs = zip(leaves(image, "z"), leaves(z, "z"), strict=True)
        residual = rebuild(z, [after - before for (_, after), (_, before) in pairs])
        moved = torch.cat([part.flatten(1) for _, part in leaves(exact.operator(residual), "W r")], dim=1)
        logits = exact.head(exact.features(image))
        return Verdict(logits, logits.argmax(1), self.certificate.radii(logits, torch.linalg.vector_norm(moved, dim=1)))

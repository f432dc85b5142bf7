"""Proven bounds for a monDEQ: how fast its solver converges, and how far a change of the image moves its output.

Everything follows from one inequality. s is the proximal map of a convex f, so z is the equilibrium of a bias b exactly
when b - M z lies in the subdifferential of f at z, with M = I - W. That is monotone: for two equilibria, with d for
differences, 0 <= <dz, db - M dz>, and M >= m I gives

    m |dz|^2 <= <dz, db>,    that is,    |dz - db / (2 m)| <= |db| / (2 m).

So dz lies in a ball: |dz| <= |db| / m, and <c, dz> <= (<c, db> + |c| |db|) / (2 m) for any linear reading c of z. Where
z has a border that is held at zero, f is infinite off zero and still convex; dz is zero there, so c may be zero too.

The bound |U| / m is that of C. Pabbaraju, E. Winston, J. Z. Kolter, "Estimating Lipschitz constants of monotone deep
equilibrium models" (2021); the ball gives a smaller bound for the logits, by half where c reads nothing that U writes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from equipoise.operators import BorderZero, MonotoneConv2d, MonotoneLinear
from equipoise.operators.linear import MonotoneOperator, identity_like, is_leaf, tree
from equipoise.operators.splitting import DouglasRachford, ForwardBackward, PeacemanRachford, SplittingSolver
from equipoise.options import require_number
from equipoise.problem.layout import leaves, rebuild
from equipoise.solvers.base import Solver
from equipoise.stability.norms import conv2d_norm_bound, operator_norm_bound
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from equipoise.models.mondeq.model import MonDEQ

TIGHT = Tolerance(relative=1e-6, max_steps=1000)
ROUNDING = 1e-9  # relative; the float64 sums here are a thousand times more accurate
ITERATIONS = 12  # Gram iterations: the norm bound of a 1000 x 1000 matrix exceeds its norm by less than 0.1%


@dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds proven for a model with its current weights; made by ``model.certificate()``. Norms are 2-norms.

    Attributes:
        m: I - W >= m I, so every input has exactly one equilibrium.
        L: ||I - W|| <= L.
        solver: name of the layer's solver.
        alpha: step size of the solver; None if it has none.
        rate: factor by which each step at least reduces the distance of u (forward-backward: z) from its limit; None
            where nothing is proven. See :func:`contraction`.
        features: Lipschitz constant of z* as a function of an image in [0, 1]: ||U / std|| / m.
        logits: Lipschitz constant of the logits.
        margins: (classes, classes), Lipschitz constants of the difference of two logits.
        readings: (classes, classes), norms of the difference of two logits as linear maps of z*.

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
        """Return the steps that reduce the distance of u from its limit to ``relative`` times the first; or None."""
        require_number("relative", relative, above=0, below=1)
        if self.rate is None:
            return None
        return max(1, math.ceil(math.log(relative) / math.log(self.rate))) if self.rate > 0 else 1

    def radii(self, logits: Tensor, defects: Tensor) -> Tensor:
        """Return how far each image can be changed while its largest logit stays the largest; 0 if nothing is proven.

        ``defects``, (batch,), are the distances of the images' biases from those whose exact equilibria give the
        logits. They move the difference of two logits by at most its reading times the defect over m.
        """
        margins, readings = self.margins.to(logits.device), self.readings.to(logits.device)
        top, winner = logits.max(1)
        spare = top[:, None] - logits - readings[winner] * defects[:, None] / self.m
        spare = spare - ROUNDING * (1 + logits.abs().amax(1, keepdim=True))
        radii = torch.where(spare > 0, spare / margins[winner], 0.0)  # also where a logit is NaN
        return radii.scatter(1, winner[:, None], torch.inf).amin(1) * (1 - ROUNDING)

    def record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        step = "" if self.alpha is None else f", alpha {self.alpha:.3g}"
        rate = "no rate of convergence is proven"
        if self.rate is not None:
            rate = f"every step leaves at most {self.rate:.3g} of the error, {self.steps(0.01)} steps at most 1%"
        return (
            f"one equilibrium for every image: I - W >= {self.m:g}, ||I - W|| <= {self.L:.3g}\n"
            f"{self.solver}{step}: {rate}\n"
            f"an image changed by d moves z* by at most {self.features:.3g} d, the logits by {self.logits:.3g} d, "
            f"the difference of two by {self.margins.max():.3g} d"
        )


def certify(model: MonDEQ, alpha: float | None = None) -> Certificate:
    """Return the certificate of a model on any device and of any dtype, computed in float64."""
    bad = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if bad:
        raise ValueError(f"nothing can be certified: {', '.join(bad)} of the model is NaN or infinite.")
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
        injection = injection_norm(exact) * (1 + ROUNDING)
        read, written = readings(exact)
        apart, seen = distances(read), distances(written)
        norms = operator_norm_bound(torch.stack([written @ written.T, injection**2 * read @ read.T]), ITERATIONS).sqrt()
        return Certificate(
            m=m,
            L=L,
            solver=type(solver).__name__,
            alpha=alpha,
            rate=None if alpha is None else contraction(solver, operator, alpha, L),
            features=injection / m,
            logits=float(norms.sum()) / (2 * m) * (1 + ROUNDING),
            margins=((seen + injection * apart) / (2 * m) * (1 + ROUNDING)).cpu(),
            readings=apart.cpu(),
        )


def in_float64(model: MonDEQ) -> MonDEQ:
    """Return a copy in float64 and evaluation mode whose weights record no gradients."""
    with torch.inference_mode(False):
        return copy.deepcopy(model).double().eval().requires_grad_(False)


def contraction(solver: Solver, operator: MonotoneOperator, alpha: float, L: float) -> float | None:
    """Return a factor below 1 by which a step at least reduces the distance of u from its limit; None if not proven.

    Peaceman-Rachford's step is C_F C_G, reflected resolvents; C_G never lengthens a distance, and C_F shortens it to
    ||(I - alpha M) (I + alpha M)^-1||, which is computed exactly when M is dense or a convolution. Else, for every x,

        |(I - alpha M) x|^2     |x|^2 + alpha^2 |M x|^2 - 2 alpha <x, M x>     1 + alpha^2 L^2 - 2 alpha m
        -------------------  =  ------------------------------------------  <=  ---------------------------
        |(I + alpha M) x|^2     |x|^2 + alpha^2 |M x|^2 + 2 alpha <x, M x>     1 + alpha^2 L^2 + 2 alpha m

    since the fraction falls with <x, M x> >= m |x|^2 and grows with |M x| <= L |x|. M = [[m, -k], [k, m]] with
    m^2 + k^2 = L^2 attains it: nothing better follows from m and L alone (1 - 4 alpha m / (1 + alpha L)^2 of E. K. Ryu,
    S. Boyd, "Primer on monotone operator methods" (2016), is larger). Douglas-Rachford averages with u itself;
    forward-backward has ||I - alpha M|| <= (1 - 2 alpha m + alpha^2 L^2)^(1/2), as prox never lengthens. Nothing is
    proven with acceleration.
    """
    forward = isinstance(solver, ForwardBackward)
    if not forward and not (isinstance(solver, PeacemanRachford | DouglasRachford) and not solver.memory):
        return None
    M = blocks(operator)
    if M is None:
        square, inner = 1 + (alpha * L) ** 2, 2 * alpha * operator.m
        rate = math.sqrt(square - inner) if forward else math.sqrt((square - inner) / (square + inner))
    else:
        I = identity_like(M)
        rate = norm(I - alpha * M if forward else torch.linalg.solve(I + alpha * M, I - alpha * M))
    if isinstance(solver, PeacemanRachford | DouglasRachford):
        rate = 1 - solver.relaxation * (1 - rate)
    return rate if rate < 1 else None


def blocks(operator: MonotoneOperator) -> Tensor | None:
    """Return the blocks of I - W in a basis that makes it block-diagonal; None if none is known."""
    if isinstance(operator, MonotoneLinear):
        W = operator.derive()[None]
    elif isinstance(operator, MonotoneConv2d):
        W = operator.blocks()
    else:
        return None
    return identity_like(W) - W


def norm(matrices: Tensor) -> float:
    """Return the largest singular value of a stack of matrices, rounded up."""
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(matrices.mH @ matrices)[:, -1].amax()))) * (1 + 1e-10)


def injection_norm(model: MonDEQ) -> float:
    """Return an upper bound of ||U / std||, the Lipschitz constant of the bias as a function of an image in [0, 1].

    A convolution U is the same on zero-padded images as on a circular grid with a border, whose values do not matter
    since dz is zero there.
    """
    weight, std = model.inject.weight, model.normalize.std.view(-1, 1, 1)
    if isinstance(model.inject, nn.Conv2d):
        return float(conv2d_norm_bound(weight / std, model.size, ITERATIONS))
    pixels = weight.view(len(weight), -1, *model.size)
    return float(operator_norm_bound((pixels / std).flatten(1), ITERATIONS))


def readings(model: MonDEQ) -> tuple[Tensor, Tensor]:
    """Return c and c^T U / std as rows, where c is the linear map by which a logit reads z*, zero on the border."""
    like, shape = model.head.weight, model.operator.shape
    with torch.enable_grad():
        image = like.new_zeros(len(like), *model.shape, requires_grad=True)
        zeros = [like.new_zeros(len(like), *size, requires_grad=True) for size in tree(shape)]
        z = zeros[0] if is_leaf(shape) else tuple(zeros)
        read = torch.autograd.grad(model.features(z), zeros, like, materialize_grads=True)
        for part, s in zip(read, model.layer.f.activations, strict=True):  # type: ignore[arg-type]
            if isinstance(s, BorderZero):
                s.cleared(part)
        biases = [part for _, part in leaves(model.bias(model.normalize(image)), "bias")]
        (written,) = torch.autograd.grad(biases, image, read[: len(biases)])
    return torch.cat([part.flatten(1) for part in read], dim=1), written.flatten(1)


def distances(rows: Tensor) -> Tensor:
    """Return the distance between every two rows, without the cancellation of a matrix product."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True, eq=False)
class Verdict:
    """Predictions for a batch of images, with radii within which every image gets the same class."""

    logits: Tensor  # (batch, classes), float64
    classes: Tensor  # (batch,)
    radii: Tensor  # (batch,), in the 2-norm; 0 where nothing is proven


class Certifier:
    """Predicts with a certified radius for every image.

    The model is solved in its own dtype, to a tight tolerance, and then evaluated in float64: for any z, with
    r = f(z) - z, f(z) = s(W z + b) = s(W f(z) + (b - W r)) is the exact equilibrium of the bias b - W r. The logits are
    those of f(z), and the effect of W r is subtracted from the radii. So they hold whether or not the solve converged
    and however it rounded. They are about the model with exact equilibria.

    Args:
        model: model with a ``certificate()``, such as :class:`~equipoise.models.mondeq.model.MonDEQ`; it is copied.
        tolerance: tolerance of the solves; a looser one gives smaller radii.

    Example:
        >>> verdict = Certifier(model)(images)
        >>> verdict.classes, verdict.radii
    """

    def __init__(self, model: nn.Module, tolerance: Tolerance = TIGHT):
        if isinstance(model, type) or not hasattr(model, "certificate"):
            given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
            raise TypeError(f"model is {given}; certified radii are available for a MonDEQ instance.")
        if not isinstance(tolerance, Tolerance):
            raise TypeError(
                f"tolerance is {tolerance!r}; it must be an object such as equipoise.Tolerance(relative=1e-6)."
            )
        self.model = cast("MonDEQ", copy.deepcopy(model).eval().requires_grad_(False))
        self.certificate, self.exact = self.model.certificate(), in_float64(self.model)
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

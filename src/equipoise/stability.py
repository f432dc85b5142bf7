"""Keeping an equilibrium solvable: how contractive f is, penalties and constraints that make it so, dropout that fits.

Layers here derive their weight or mask once per solve (:mod:`equipoise.scope`). Nothing that depends on a weight is
used again when that has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.implicit import gradients, isolated, recorded
from equipoise.norms import conv2d_norm_bound, frequency_grid, largest_block, operator_norm_bound
from equipoise.problem import FunctionProblem
from equipoise.scope import once_per_solve
from equipoise.validation import require, require_number


def jacobian_penalty(
    f: Callable[..., Any], z: Any, *inputs: Any, probes: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """An unbiased estimate of ||df/dz||_F^2 / numel(z): a scalar to add to the loss, differentiable in everything.

    Args:
        f: the function of the fixed point.
        z: where; the equilibrium or any iterate. Pass it detached to leave it alone.
        probes: Gaussian vectors averaged over.
        generator: for the probes.

    Example:
        >>> loss = loss + 0.5 * eq.jacobian_penalty(layer.f, z.detach(), x, probes=2)

    Reference: S. Bai, V. Koltun, J. Z. Kolter, "Stabilizing equilibrium models by Jacobian regularization" (2021).
    """
    require_number("probes", probes, at_least=1, whole=True)
    require_generator(generator)
    with torch.enable_grad():
        rows, image = recorded_rows(f, z, inputs)
        total = image.new_zeros(())
        for _ in range(probes):
            probe = torch.randn(image.shape, dtype=image.dtype, device=image.device, generator=generator)
            (product,) = gradients([image], [rows], [probe], create_graph=True)
            total = total + product.square().sum()
    return total / (probes * max(rows.numel(), 1))


def spectral_radius(
    f: Callable[..., Any], z: Any, *inputs: Any, steps: int = 40, generator: torch.Generator | None = None
) -> Tensor:
    """The largest |eigenvalue| of df/dz per sample: below 1, plain iteration converges near z.

    By ``steps`` steps of Arnoldi's method, which sees complex pairs, unlike power iteration; exact when ``steps``
    reaches the size of z, otherwise close from below; NaN where f or its derivative is not finite. Memory: ``steps``
    vectors like z.

    Example:
        >>> eq.spectral_radius(layer.f, layer(x), x)
    """
    require_number("steps", steps, at_least=1, whole=True)
    require_generator(generator)
    with torch.enable_grad():
        rows, image = recorded_rows(f, z, inputs)
    with torch.no_grad():
        batch, n = rows.shape
        steps = min(steps, n)
        if batch == 0 or n == 0:
            return rows.new_zeros(batch)
        start = torch.randn(rows.shape, dtype=rows.dtype, device=rows.device, generator=generator)
        basis = [normalised(start)[0]]
        hessenberg = rows.new_zeros(batch, steps, steps)
        for k in range(steps):
            (w,) = gradients([image], [rows], [basis[-1]], create_graph=False)  # J^T has the eigenvalues of J
            before = torch.linalg.vector_norm(w, dim=1)
            V = torch.stack(basis, dim=1)
            for _ in range(2):  # once more, since rounding spoils a single pass
                overlap = (w[:, None] @ V.mT)[:, 0]
                w = w - (overlap[:, None] @ V)[:, 0]
                hessenberg[:, : k + 1, k] += overlap
            w, size = normalised(w)
            closed = size <= 10 * torch.finfo(w.dtype).eps * before  # the space is invariant: start a new block
            if k + 1 < steps:
                hessenberg[:, k + 1, k] = torch.where(closed, 0.0, size)
                basis.append(torch.where(closed[:, None], fresh_direction(V, generator), w))
        finite = hessenberg.isfinite().all(dim=2).all(dim=1)  # LAPACK may crash on what is not
        radius = rows.new_full((batch,), torch.nan)
        radius[finite] = torch.linalg.eigvals(hessenberg[finite]).abs().amax(dim=1)
        return radius


def require_generator(generator: Any) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is {generator!r}; it must be a torch.Generator, or None.")


def recorded_rows(f: Callable[..., Any], z: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """z as rows at which gradients can be asked for, and f there with its graph."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a Jacobian needs derivatives, which inference_mode does not have: use torch.no_grad().")
    problem, _, _ = FunctionProblem.start(f, z, inputs)
    rows = isolated(problem.layout.pack(z))
    return rows, recorded(problem.uncompiled(), rows)  # compiled graphs have no second derivative


def normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of unit length (zero rows stay), and what their lengths were."""
    size = torch.linalg.vector_norm(rows, dim=1)
    return rows / torch.where(size == 0, 1.0, size)[:, None], size


def fresh_direction(V: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random unit vector orthogonal to the orthonormal rows of V, per sample."""
    w = torch.randn(V.shape[0], V.shape[2], dtype=V.dtype, device=V.device, generator=generator)
    for _ in range(2):
        w = w - ((w[:, None] @ V.mT) @ V)[:, 0]
    return normalised(w)[0]


class VariationalDropout(nn.Module):
    """Dropout with one mask per solve, so that f stays a function of z; identity in eval mode.

    A mask entry covers a whole channel, (batch, channels, 1, ...); outside a solve every call draws a new one.

    Args:
        p: probability of a channel being zeroed; the others are scaled by 1 / (1 - p).

    Reference: Y. Gal and Z. Ghahramani, "A theoretically grounded application of dropout in recurrent neural networks"
    (2016); in equilibrium models, Bai et al. (2020), section 3.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = p
        require(self, "p", at_least=0, below=1)

    def forward(self, z: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return z
        shape = (*z.shape[:2], *(1 for _ in z.shape[2:]))

        def draw() -> Tensor:
            keep = torch.full(shape, 1 - self.p, dtype=z.dtype, device=z.device)
            return torch.bernoulli(keep) / (1 - self.p)

        return z * once_per_solve((id(self), shape[1:]), draw, per_sample=True)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WeightNorm(nn.Module):
    """A linear or convolutional layer with weight ``scale * v / ||v||`` per output, derived once per solve.

    ``layer.weight`` holds v. A row of v that is zero gives a zero weight, not NaN.

    Args:
        layer: ``nn.Linear`` or ``nn.Conv1d/2d/3d`` (not transposed).

    Example:
        >>> conv = eq.WeightNorm(nn.Conv2d(8, 8, 3, padding=1))

    Reference: T. Salimans and D. Kingma, "Weight normalization" (2016), eq. 2.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = supported(layer)
        self.scale = nn.Parameter(row_lengths(self.layer.weight).detach())

    @property
    def weight(self) -> Tensor:
        return once_per_solve(id(self), self.derive)

    def derive(self) -> Tensor:
        v = self.layer.weight
        length = row_lengths(v)
        return v * (self.scale / torch.where(length == 0, 1.0, length))

    def forward(self, x: Tensor) -> Tensor:
        return apply_layer(self.layer, x, self.weight)


class SpectralNorm(nn.Module):
    """A linear or 2-d convolutional layer whose operator norm never exceeds ``bound``, derived once per solve.

    The weight is divided by an upper bound of its norm (:func:`operator_norm_bound`) where that exceeds ``bound``; for
    a convolution the norm is that of the operator on images of the size at hand, not of the reshaped kernel.

    Args:
        layer: ``nn.Linear``, or ``nn.Conv2d`` with stride 1, dilation 1, one group and zero padding.
        bound: the largest norm allowed.
        always: scale up to ``bound`` as well as down.

    Example:
        >>> cell = eq.SpectralNorm(nn.Linear(64, 64), bound=0.9)
    """

    def __init__(self, layer: nn.Module, bound: float = 1.0, *, always: bool = False):
        super().__init__()
        self.layer = supported(layer)
        if isinstance(layer, nn.Conv2d):
            if layer.stride != (1, 1) or layer.dilation != (1, 1) or layer.groups != 1 or layer.padding_mode != "zeros":
                raise ValueError("SpectralNorm takes an nn.Conv2d with stride 1, dilation 1, one group, zero padding.")
        elif not isinstance(layer, nn.Linear):
            raise TypeError(f"SpectralNorm takes nn.Linear or nn.Conv2d, not {type(layer).__name__}.")
        self.bound, self.always = bound, always
        require(self, "bound", above=0)
        require(self, "always", kind=bool)
        self.known: tuple[Tensor, tuple[int, int], Tensor] | None = None  # a kernel, a size, their largest block

    def weight(self, size: tuple[int, int] | None = None) -> Tensor:
        """The constrained weight; a convolution needs the ``size`` of its images."""
        return once_per_solve((id(self), size), lambda: self.derive(size))

    def derive(self, size: tuple[int, int] | None) -> Tensor:
        raw = self.layer.weight
        if raw.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"the weight is {raw.dtype}, too coarse for a bound of its norm: keep the model in float32 and use "
                "torch.autocast."
            )
        with torch.autocast(raw.device.type, enabled=False):  # a bound in low precision is none
            norm = operator_norm_bound(raw) if size is None else conv2d_norm_bound(raw, size, angles=self.angles(size))
        if self.always:
            return raw * (self.bound / torch.where(norm == 0, 1.0, norm))
        return raw * (self.bound / norm.clamp(min=self.bound))

    def angles(self, size: tuple[int, int]) -> Tensor:
        """Those of the largest block; searched for, which takes most of the time, only if the kernel has changed."""
        kernel = self.layer.weight
        if self.known is None or self.known[1] != size or not same(self.known[0], kernel):
            found = largest_block(kernel, frequency_grid(kernel, size)[0])
            self.known = (kernel.detach().clone(), size, found)
        return self.known[2]

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1]) if isinstance(self.layer, nn.Conv2d) else None
        return apply_layer(self.layer, x, self.weight(size))

    def adjoint(self, y: Tensor) -> Tensor:
        """The transpose of the linear part, so without a bias: <layer(x), y> = <x, layer.adjoint(y)>.

        A convolution must keep the size of its images, as with a padding of half an odd kernel: its weight depends on
        the size of x, which y then tells.
        """
        if not isinstance(self.layer, nn.Conv2d):
            return y @ self.weight()
        half = tuple(k // 2 for k in self.layer.kernel_size)
        if self.layer.padding not in ("same", half) or not all(k % 2 for k in self.layer.kernel_size):
            raise ValueError(
                "adjoint needs a convolution that keeps the size of images, and this one has kernel "
                f"{self.layer.kernel_size} and padding {self.layer.padding}: use an odd kernel, half of it as padding."
            )
        return F.conv_transpose2d(y, self.weight((y.shape[-2], y.shape[-1])), padding=half)

    def extra_repr(self) -> str:
        return f"bound={self.bound}, always={self.always}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every number, which takes no time beside what it saves; a counter of changes can be gone around."""
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def supported(layer: Any) -> Any:
    """Refuse a layer whose weight cannot be replaced."""
    if isinstance(layer, type):
        raise TypeError(f"layer is the class {layer.__name__}; give an object, such as nn.Linear(64, 64).")
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(f"layer is a {type(layer).__name__}; it must be nn.Linear or nn.Conv1d, 2d or 3d.")
    return layer


def row_lengths(weight: Tensor) -> Tensor:
    """||weight_i|| for every output i, shaped to divide the weight."""
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return torch.linalg.vector_norm(weight.flatten(1), dim=1).view(shape)


def apply_layer(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The layer with another weight."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return layer._conv_forward(x, weight, layer.bias)

"""Linear measurements of images, y = noise(A x), with exact adjoints, in deepinv's conventions.

An operator has ``A(x)`` and ``A_adjoint(y)``, both batch first, and ``physics(x)`` measures: it applies A and then the
``noise_model``. Functions that take a physics use only these, so that an object of deepinv passes unchanged.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.options import require_number


class Physics(Protocol):
    """The interface of a linear measurement operator."""

    def A(self, x: Tensor) -> Tensor: ...

    def A_adjoint(self, y: Tensor) -> Tensor: ...


class GaussianNoise:
    """Add independent Gaussian noise.

    Args:
        sigma: standard deviation, in units of the measurements.
        rng: source of the random numbers; None for torch's global one.

    Example:
        >>> GaussianNoise(0.2, torch.Generator().manual_seed(0))(measured)
    """

    def __init__(self, sigma: float, rng: torch.Generator | None = None):
        require_number("GaussianNoise.sigma", sigma, at_least=0)
        if rng is not None and not isinstance(rng, torch.Generator):
            raise TypeError(f"GaussianNoise.rng is {rng!r}; it must be a torch.Generator (or None).")
        self.sigma, self.rng = sigma, rng

    def __call__(self, y: Tensor) -> Tensor:
        device = y.device if self.rng is None else self.rng.device
        noise = torch.randn(y.shape, generator=self.rng, dtype=y.dtype, device=device)
        return y + self.sigma * noise.to(y.device)


class LinearPhysics(ABC):
    """A linear operator on images (batch, channels, height, width), and the noise of its measurements.

    Args:
        noise_model: function from exact to noisy measurements; None for exact ones.
    """

    def __init__(self, noise_model: Callable[[Tensor], Tensor] | None = None):
        if noise_model is not None and not callable(noise_model):
            name = type(self).__name__
            raise TypeError(f"{name}.noise_model is {noise_model!r}; it must be a function such as GaussianNoise(0.1).")
        self.noise_model = noise_model

    @abstractmethod
    def A(self, x: Tensor) -> Tensor:
        """Return exact measurements of images."""

    @abstractmethod
    def A_adjoint(self, y: Tensor) -> Tensor:
        """Return the adjoint applied to measurements: <A x, y> = <x, A_adjoint y>."""

    def take(self, rows: Tensor) -> LinearPhysics:
        """Return the operators of some samples; an operator that is the same for all samples returns itself."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        y = self.A(x)
        return y if self.noise_model is None else self.noise_model(y)

    def __matmul__(self, inner: Physics) -> Compose:
        """Return ``self`` after ``inner``, with the noise of ``self``."""
        return Compose(self, inner)


class Identity(LinearPhysics):
    """Measure every pixel; with noise, this is denoising.

    Example:
        >>> Identity(GaussianNoise(0.2))(images)
    """

    def A(self, x: Tensor) -> Tensor:
        return x

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y


class Mask(LinearPhysics):
    """Multiply every pixel by a number, 1 where it is known and 0 where it is hidden.

    Args:
        mask: tensor that broadcasts over (batch, channels, height, width): (height, width) for all images, or
            (batch, 1, height, width) for one mask per image.
        noise_model: see :class:`LinearPhysics`.

    Example:
        >>> mask = square_masks(8, (3, 64, 64), side=20, generator=torch.Generator().manual_seed(0))
        >>> Mask(mask)(images)
    """

    def __init__(self, mask: Tensor, noise_model: Callable[[Tensor], Tensor] | None = None):
        super().__init__(noise_model)
        if not isinstance(mask, Tensor) or not 2 <= mask.dim() <= 4:
            given = tuple(mask.shape) if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(f"Mask.mask is {given}; it must be a tensor (height, width), or one that broadcasts.")
        self.mask = mask

    def A(self, x: Tensor) -> Tensor:
        shape = tuple(self.mask.shape)
        if any(m not in (1, n) for m, n in zip(shape[::-1], tuple(x.shape)[::-1], strict=False)):
            raise ValueError(
                f"the mask has shape {shape}, the images {tuple(x.shape)}; a mask must have the height and width of "
                "the images, and 1 or all of their channels."
            )
        return x * self.mask.to(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.A(y)  # a real diagonal

    def take(self, rows: Tensor) -> Mask:
        own = self.mask.dim() == 4 and len(self.mask) > 1
        return Mask(self.mask[rows.to(self.mask.device)], self.noise_model) if own else self


def square_masks(samples: int, shape: Sequence[int], side: int, generator: torch.Generator) -> Tensor:
    """Return masks (samples, 1, height, width), each of which hides a square at a random place inside the image.

    The centre is uniform in [side/2, S - side/2) along each axis of length S (the paper's inpainting).

    Args:
        samples: number of masks.
        shape: shape of the images; the last two entries are height and width.
        side: side of the hidden square, in pixels.
        generator: source of the random numbers, on the CPU.
    """
    height, width = shape[-2:]
    require_number("side", side, at_least=1, below=min(height, width), whole=True)
    known = torch.ones(samples, 2, max(height, width), dtype=torch.bool)
    for axis, length in enumerate((height, width)):
        start = torch.randint(length - side, (samples, 1), generator=generator)
        place = torch.arange(known.shape[2])
        known[:, axis] = (place < start) | (place >= start + side)
    return (known[:, 0, :height, None] | known[:, 1, None, :width])[:, None].float()


class GaussianBlur(LinearPhysics):
    """Average each pixel with its neighbours, with weights exp(-d^2 / 2 sigma^2) of their distance; edges wrap around.

    Args:
        sigma: standard deviation of the kernel, in pixels.
        noise_model: see :class:`LinearPhysics`.
    """

    def __init__(self, sigma: float, noise_model: Callable[[Tensor], Tensor] | None = None):
        super().__init__(noise_model)
        require_number("GaussianBlur.sigma", sigma, above=0)
        self.sigma = sigma

    def A(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        wide = x.float() if x.dtype.itemsize < 4 else x  # there is no transform in half precision
        rows, columns = (self.transfer(length).to(wide) for length in (height, width))
        spectrum = torch.fft.rfft2(wide) * (rows[:, None] * columns[: width // 2 + 1])
        return torch.fft.irfft2(spectrum, s=(height, width)).to(x.dtype)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.A(y)  # the kernel is symmetric

    def transfer(self, length: int) -> Tensor:
        """Return the Fourier coefficients of the kernel along one axis, which are real, in float64."""
        sigma = min(self.sigma, 4 * length)  # a wider kernel, wrapped around, is the same to rounding: uniform
        turns = math.ceil(9 * sigma / length)  # beyond 9 sigma, weights are below rounding
        place = torch.arange(length, dtype=torch.float64) + length * torch.arange(-turns, turns + 1)[:, None]
        kernel = torch.exp(-(place / sigma).square() / 2).sum(dim=0)
        return torch.fft.fft(kernel / kernel.sum()).real


class Downsampling(LinearPhysics):
    """Average blocks of ``factor`` x ``factor`` pixels: anti-aliased down-sampling; A A_adjoint = 1 / factor^2.

    Args:
        factor: factor by which height and width shrink; they must be multiples of it.
        noise_model: see :class:`LinearPhysics`.
    """

    def __init__(self, factor: int, noise_model: Callable[[Tensor], Tensor] | None = None):
        super().__init__(noise_model)
        require_number("Downsampling.factor", factor, at_least=1, whole=True)
        self.factor = factor

    def A(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.factor or width % self.factor:
            raise ValueError(f"images are {height} x {width}; height and width must be multiples of {self.factor}.")
        return functional.avg_pool2d(x, self.factor)

    def A_adjoint(self, y: Tensor) -> Tensor:
        repeated = y.repeat_interleave(self.factor, -1).repeat_interleave(self.factor, -2)
        return repeated / self.factor**2


class MatrixOperator(LinearPhysics):
    """Multiply each image, flattened, by a matrix: measurements (batch, m).

    Args:
        matrix: real matrix (m, channels * height * width).
        shape: shape of the images, (channels, height, width).
        noise_model: see :class:`LinearPhysics`.

    Example:
        >>> MatrixOperator(torch.randn(100, 3 * 32 * 32) / 100**0.5, (3, 32, 32))(images)
    """

    def __init__(self, matrix: Tensor, shape: Sequence[int], noise_model: Callable[[Tensor], Tensor] | None = None):
        super().__init__(noise_model)
        if not isinstance(matrix, Tensor):
            raise TypeError(f"MatrixOperator.matrix has type {type(matrix).__name__}; it must be a tensor (m, pixels).")
        if matrix.dim() != 2 or not matrix.is_floating_point() or matrix.shape[1] != math.prod(shape):
            raise ValueError(
                f"MatrixOperator.matrix is {tuple(matrix.shape)}, {matrix.dtype}; it must be a real matrix with "
                f"{math.prod(shape)} columns, one per number of an image {tuple(shape)}."
            )
        self.matrix, self.shape = matrix, tuple(shape)

    def A(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"images have shape {tuple(x.shape[1:])}; the matrix is for {self.shape}.")
        return x.flatten(1) @ self.matrix.to(x).mT

    def A_adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.matrix.to(y)).view(-1, *self.shape)


class Compose(LinearPhysics):
    """Apply ``inner`` and then ``outer``, whose noise is that of the measurements; also written ``outer @ inner``.

    Args:
        outer: operator that is applied last.
        inner: operator that is applied first; it must be without noise, which would not be Gaussian after ``outer``.

    Example:
        >>> Downsampling(2, GaussianNoise(0.01)) @ GaussianBlur(1.0)
    """

    def __init__(self, outer: Physics, inner: Physics):
        for physics in (outer, inner):
            require_physics(physics)
        noise = getattr(inner, "noise_model", None)
        if noise is not None and type(noise).__name__ != "ZeroNoise":  # deepinv's for exact measurements
            raise ValueError(
                f"the inner operator {type(inner).__name__} has noise, which the composition would leave out: attach "
                "the noise to the outer operator."
            )
        super().__init__(getattr(outer, "noise_model", None))
        self.outer, self.inner = outer, inner

    def A(self, x: Tensor) -> Tensor:
        return self.outer.A(self.inner.A(x))

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.inner.A_adjoint(self.outer.A_adjoint(y))

    def take(self, rows: Tensor) -> Compose:
        taken = copy.copy(self)
        parts = (self.outer, self.inner)
        taken.outer, taken.inner = (part.take(rows) if isinstance(part, LinearPhysics) else part for part in parts)
        return taken


def require_physics(physics: Any) -> None:
    """Raise unless an object has the methods of a :class:`Physics`."""
    if isinstance(physics, type) or not all(callable(getattr(physics, name, None)) for name in ("A", "A_adjoint")):
        raise TypeError(
            f"physics is {physics!r}; it must be an object with the methods A(x) and A_adjoint(y), such as "
            "equipoise.tasks.physics.GaussianBlur(2.0) or a physics of deepinv."
        )


def gathers(physics: Any) -> bool:
    """Return whether the operators of some samples can be taken from those of a batch."""
    if isinstance(physics, Compose):
        return gathers(physics.outer) and gathers(physics.inner)
    return isinstance(physics, LinearPhysics)


def adjoint_error(physics: Physics, x: Tensor, generator: torch.Generator | None = None) -> float:
    """Return |<A x, y> - <x, A_adjoint y>| / (|A x| |y|) for a random y: rounding, if the adjoint is right.

    Example:
        >>> adjoint_error(my_physics, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    """
    measured = physics.A(x)
    y = torch.randn(measured.shape, generator=generator, dtype=measured.dtype).to(measured.device)
    difference = (measured * y).sum() - (x * physics.A_adjoint(y)).sum()
    size = (torch.linalg.vector_norm(measured) * torch.linalg.vector_norm(y)).clamp(min=torch.finfo(y.dtype).tiny)
    return float((difference / size).abs())

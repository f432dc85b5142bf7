"""Restoration without a model: the plain methods that a generator is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.options import require_number
from equipoise.tasks.degradations import Degradation
from equipoise.tasks.physics import LinearPhysics, Mask, Physics

# Weights of total variation:
EXACT_WEIGHT = 0.001  # without noise; chosen on 32 test faces of 16 x 16, blur of 1, which favours this baseline
NOISE_WEIGHT = 0.6  # per standard deviation of the noise; chosen on 24 training faces of 32 x 32, noise of 0.2 and 0.4


def restore_plainly(y: Tensor, physics: LinearPhysics, degradation: Degradation, shape: Sequence[int]) -> Tensor:
    """Restore by the plain method for a degradation.

    That is bicubic interpolation for "upscale", the median of known neighbours for "inpaint", else total variation.

    Args:
        y: measurements of images in [-1, 1].
        physics: operator that made them.
        degradation: kind and amount of the degradation.
        shape: shape of the images, (channels, height, width).
    """
    if degradation.problem == "upscale":
        return bicubic(y, shape)
    if degradation.problem == "reconstruct":
        return y
    if degradation.problem == "inpaint":
        return median_filter(y, physics)
    sigma = float(degradation.amount or 0) if degradation.problem == "denoise" else 0.0
    return total_variation(y, physics, shape, weight=NOISE_WEIGHT * sigma or EXACT_WEIGHT)


def bicubic(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Enlarge images in [-1, 1] to a shape (channels, height, width) by bicubic interpolation."""
    return functional.interpolate(y, tuple(shape[1:]), mode="bicubic", align_corners=False).clamp(-1, 1)


def median_filter(images: Tensor, physics: Physics | None = None, side: int = 3) -> Tensor:
    """Replace every pixel by the median of its neighbourhood, or only hidden ones if a mask is given.

    With a mask, hidden pixels are filled from the border inwards: each by the median of those neighbours that are known
    or already filled.

    Args:
        images: (batch, channels, height, width).
        physics: :class:`~equipoise.tasks.physics.Mask` that hides pixels; None filters all.
        side: side of the neighbourhood, odd.
    """
    if not isinstance(side, int) or side < 1 or side % 2 == 0:
        raise ValueError(f"side is {side!r}; it must be an odd whole number of at least 1.")
    if not isinstance(physics, Mask):
        edge = [side // 2] * 4
        padded = functional.pad(images, edge, mode="replicate")
        return patches(padded, side).median(dim=2).values.view_as(images)
    known = (physics.mask.to(images).expand_as(images) != 0).clone()
    images = torch.where(known, images, torch.nan)
    while not bool(known.all()):
        padded = functional.pad(images, [side // 2] * 4, value=torch.nan)
        filled = patches(padded, side).nanmedian(dim=2).values.view_as(images)
        images = torch.where(known, images, filled)
        now = ~images.isnan()
        if torch.equal(now, known):  # a channel of which nothing is known
            return images.nan_to_num(0.0)
        known = now
    return images


def patches(padded: Tensor, side: int) -> Tensor:
    """Return the neighbourhood of each pixel, (batch, channels, side^2, pixels)."""
    batch, channels = padded.shape[:2]
    return functional.unfold(padded.flatten(0, 1)[:, None], side).unflatten(0, (batch, channels))


@torch.no_grad()
def total_variation(y: Tensor, physics: Physics, shape: Sequence[int], weight: float, steps: int = 300) -> Tensor:
    """Minimise ||A x - y||^2 / 2 + weight * TV(x) over images, TV the sum of the lengths of all pixel gradients.

    Solved by the primal-dual method of A. Chambolle and T. Pock, "A first-order primal-dual algorithm for convex
    problems with applications to imaging" (2011), algorithm 1, with A and the gradient as one operator.

    Args:
        y: measurements, batch first.
        physics: linear operator with A and A_adjoint.
        shape: shape of the images, (channels, height, width).
        weight: weight of the total variation.
        steps: number of steps.
    """
    require_number("weight", weight, at_least=0)
    require_number("steps", steps, at_least=1, whole=True)
    x = physics.A_adjoint(y)
    size = 0.95 / (squared_norm(physics, x) + 8) ** 0.5  # |gradient|^2 <= 8
    misfit, slope, ahead = torch.zeros_like(y), torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device), x
    for _ in range(steps):
        misfit = (misfit + size * (physics.A(ahead) - y)) / (1 + size)
        slope = slope + size * differences(ahead)
        slope = slope / (torch.linalg.vector_norm(slope, dim=0) / max(weight, 1e-30)).clamp(min=1)
        before = x
        x = x - size * (physics.A_adjoint(misfit) + differences_adjoint(slope))
        ahead = 2 * x - before
    return x.clamp(-1, 1)


def squared_norm(physics: Physics, x: Tensor, steps: int = 30) -> float:
    """Return an estimate of ||A||^2 by power iteration, from a fixed random image, with a margin of 5%."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    size = 0.0
    for _ in range(steps):
        noise = noise / torch.linalg.vector_norm(noise).clamp(min=1e-30)
        noise = physics.A_adjoint(physics.A(noise))
        size = float(torch.linalg.vector_norm(noise))
    return 1.05 * size


def differences(x: Tensor) -> Tensor:
    """Return differences to the next row and column, (2, batch, channels, height, width); 0 at the last ones."""
    down = functional.pad(x.diff(dim=2), (0, 0, 0, 1))
    right = functional.pad(x.diff(dim=3), (0, 1))
    return torch.stack([down, right])


def differences_adjoint(slope: Tensor) -> Tensor:
    """Return the adjoint of :func:`differences`."""
    down, right = slope[0, :, :, :-1], slope[1, :, :, :, :-1]
    rows = functional.pad(down, (0, 0, 1, 0)) - functional.pad(down, (0, 0, 0, 1))
    return rows + functional.pad(right, (1, 0)) - functional.pad(right, (0, 1))

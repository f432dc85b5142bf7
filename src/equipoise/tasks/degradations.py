"""Named degradations of images: their operators, with all random choices determined by one seed per image."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.options import option, options, require_number
from equipoise.tasks.physics import (
    Downsampling,
    GaussianBlur,
    GaussianNoise,
    Identity,
    LinearPhysics,
    Mask,
    square_masks,
)


@dataclass(frozen=True)
class Kind:
    """The meaning of a degradation's amount, its default, and its bounds as arguments of ``require_number``."""

    amount: str
    default: float
    bounds: dict[str, Any]
    whole: bool = False


KINDS = {
    "reconstruct": Kind("unused", 0, {"at_least": 0, "at_most": 0}),
    "inpaint": Kind("side of the hidden square, in pixels", 20, {"at_least": 1}, whole=True),
    "denoise": Kind("standard deviation of the noise, for pixels in [-1, 1]", 0.2, {"at_least": 0}),
    "deblur": Kind("standard deviation of the blur, in pixels", 2.0, {"above": 0}),
    "upscale": Kind("factor by which the image was shrunk", 2, {"at_least": 2}, whole=True),
}


@options
class Degradation:
    """A kind of degradation and its amount.

    Args:
        problem: "inpaint" (a random square is hidden), "denoise", "deblur" (Gaussian blur, edges wrap around),
            "upscale" (blocks of pixels were averaged) or "reconstruct" (nothing is lost).
        amount: see ``KINDS``; None for 20 pixels, noise of 0.2, a blur of 2 pixels, a factor of 2.

    Example:
        >>> measured, physics = Degradation("inpaint", 10).measure(images, seeds_of(images))
    """

    problem: str = option(default="inpaint", among=tuple(KINDS))
    amount: float | None = None

    def __post_init__(self) -> None:
        kind = KINDS.get(self.problem)
        if kind is None:
            return  # named by the check of the option
        amount = kind.default if self.amount is None else self.amount
        if kind.whole and isinstance(amount, float) and amount.is_integer():
            amount = int(amount)
        where = f"the amount for {self.problem!r} ({kind.amount})"
        require_number(where, amount, whole=kind.whole, **kind.bounds)
        object.__setattr__(self, "amount", amount)

    def physics(self, shape: Sequence[int], seeds: Tensor) -> LinearPhysics:
        """Return the operator for images of a shape (channels, height, width), without noise.

        Args:
            seeds: (batch,) whole numbers; each decides what is random about one image.
        """
        amount, height, width = self.amount, *shape[-2:]
        assert amount is not None
        if self.problem == "inpaint":
            if amount >= min(height, width):
                raise ValueError(
                    f"a hidden square of side {amount} does not fit into images of {height} x {width}: choose at most "
                    f"{min(height, width) - 1}."
                )
            return Mask(torch.cat([square_masks(1, shape, int(amount), source) for source in sources(seeds)]))
        if self.problem == "deblur":
            return GaussianBlur(amount)
        if self.problem == "upscale":
            if height % amount or width % amount:
                raise ValueError(
                    f"images of {height} x {width} cannot be shrunk by {amount}: choose a factor that divides height "
                    "and width."
                )
            return Downsampling(int(amount))
        return Identity()

    def measure(self, truth: Tensor, seeds: Tensor) -> tuple[Tensor, LinearPhysics]:
        """Return measurements of images in [-1, 1], and the operator that made them."""
        physics = self.physics(truth.shape[1:], seeds)
        measured = physics.A(truth)
        if self.problem == "denoise":
            assert self.amount is not None
            rows = zip(measured, sources(seeds), strict=True)
            measured = torch.stack([GaussianNoise(self.amount, source)(row) for row, source in rows])
        return measured, physics


def sources(seeds: Tensor) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]


def seeds_of(images: Tensor) -> Tensor:
    """Return a seed for each image in [-1, 1], computed from its pixels.

    An image is degraded in the same way whichever batch, process or model it is evaluated with.
    """
    levels = (127.5 * (images.detach().double() + 1)).round().clamp(0, 255).to("cpu", torch.uint8)
    return torch.tensor([zlib.crc32(image.contiguous().numpy().tobytes()) for image in levels], dtype=torch.int64)


def random_seeds(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return random seeds, from torch's global generator by default."""
    return torch.randint(2**32, (count,), generator=generator)

"""Random variations of whole batches of images; every random number comes from the given generator."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Move each image by up to ``pixels`` in each direction, filling with zeros: a random crop of the padded image."""
    moves = torch.randint(2 * pixels + 1, (2, len(images), 1), generator=generator) - pixels
    height, width = images.shape[2:]
    return View(torch.arange(height) + moves[0], torch.arange(width) + moves[1]).of_images(images)


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2."""
    mirrored = torch.randint(2, (len(images),), generator=generator, dtype=torch.bool).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


@dataclass(frozen=True)
class View:
    """Where each pixel of a new image lies in the old one. Applied to images and label maps, it keeps them aligned.

    Args:
        rows: (batch, new height), in pixels of the old image, whose first row is 0; other values lie outside.
        columns: (batch, new width).
    """

    rows: Tensor
    columns: Tensor

    def of_images(self, images: Tensor, fill: Sequence[float] = (0.0,)) -> Tensor:
        """Resample images bilinearly, as torch's interpolate does; ``fill``, a number per channel, lies outside."""
        seen = between(between(images, 2, self.rows), 3, self.columns)
        color = torch.tensor(fill, dtype=images.dtype, device=images.device).view(-1, 1, 1)
        return torch.where(self.inside(images)[:, None], seen, color)

    def of_label_maps(self, label_maps: Tensor, fill: int) -> Tensor:
        """Resample label maps, (batch, height, width), by the nearest pixel; ``fill`` lies outside."""
        seen = taken(taken(label_maps, 1, (self.rows + 0.5).floor()), 2, (self.columns + 0.5).floor())
        return torch.where(self.inside(label_maps), seen, fill)

    def inside(self, images: Tensor) -> Tensor:
        """Return which pixels come from within the old image, (batch, new height, new width)."""
        height, width = images.shape[-2:]
        rows = (self.rows > -0.5) & (self.rows < height - 0.5)
        columns = (self.columns > -0.5) & (self.columns < width - 0.5)
        return (rows[:, :, None] & columns[:, None, :]).to(images.device)


def random_view(
    samples: int,
    old: Sequence[int],
    new: Sequence[int],
    generator: torch.Generator,
    *,
    scale: Sequence[float] = (1.0, 1.0),
    flip: bool = False,
) -> View:
    """Scale each image, crop it to the new size at a random place, and perhaps mirror it.

    An image that is smaller than the new size is placed in it at random.

    Args:
        samples: number of images.
        old, new: (height, width).
        generator: source of all random numbers.
        scale: smallest and largest factor; each image's is drawn uniformly.
        flip: whether to mirror each image left to right with probability 1/2.

    Example:
        >>> view = random_view(8, (360, 480), (256, 256), torch.Generator().manual_seed(0), scale=(0.5, 2.0))
        >>> view.of_images(images), view.of_label_maps(label_maps, fill=255)
    """
    draws = torch.rand(3, samples, 1, generator=generator, dtype=torch.float64)
    factor = scale[0] + (scale[1] - scale[0]) * draws[0]
    places = []
    for old_length, new_length, draw in zip(old, new, draws[1:], strict=True):
        scaled = (old_length * factor).round().clamp(min=1)
        spare = scaled - new_length  # to be cut off; if negative, to be filled
        start = torch.minimum((draw * (spare.abs() + 1)).floor(), spare.abs()) * spare.sign()
        # The middle of a pixel is half a pixel from its edge, in the old image as in the scaled one.
        places.append((start + torch.arange(new_length) + 0.5) * (old_length / scaled) - 0.5)
    rows, columns = places
    if flip:
        mirrored = torch.randint(2, (samples, 1), generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
    return View(rows, columns)


def between(images: Tensor, dim: int, places: Tensor) -> Tensor:
    """Interpolate linearly between pixels along one dimension."""
    places = places.clamp(0, images.shape[dim] - 1)
    before = places.floor()
    first = taken(images, dim, before)
    if torch.equal(before, places):
        return first
    weight = along(dim, places - before, images.dim()).to(images.device, images.dtype)
    return first.lerp(taken(images, dim, before + 1), weight)


def taken(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return each sample's rows (or columns) with these indices, which are clamped to the image.

    One gather along one dimension moves whole rows: several times faster than indexing every pixel.
    """
    index = along(dim, places.clamp(0, x.shape[dim] - 1).long(), x.dim()).to(x.device)
    return x.gather(dim, index.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def along(dim: int, values: Tensor, dims: int) -> Tensor:
    """Reshape values (batch, length) to ``dims`` dimensions, with the length in dimension ``dim``."""
    return values.view(len(values), *[1] * (dim - 1), -1, *[1] * (dims - dim - 1))

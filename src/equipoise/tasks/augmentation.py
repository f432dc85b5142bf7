"""Random variations of whole batches of images; every random number comes from the generator that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def shift(images: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Each image moved by up to ``pixels`` either way, zeros coming in: the random crop of a padded image.

    Example:
        >>> shift(torch.rand(128, 3, 32, 32), 4, torch.Generator().manual_seed(0))
    """
    n, channels, height, width = images.shape
    padded = functional.pad(images, (pixels,) * 4)
    moves = torch.randint(2 * pixels + 1, (2, n, 1), generator=generator)
    rows = (torch.arange(height) + moves[0]).to(images.device)
    columns = (torch.arange(width) + moves[1]).to(images.device)
    # Two gathers along one axis each move whole rows, several times faster than one index of every pixel.
    taller = padded.gather(2, rows[:, None, :, None].expand(n, channels, height, padded.shape[3]))
    return taller.gather(3, columns[:, None, None, :].expand(n, channels, height, width))


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every other image, on average, mirrored left to right."""
    mirrored = torch.randint(2, (len(images),), generator=generator, dtype=torch.bool).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


@dataclass(frozen=True)
class View:
    """Where each pixel of a new image lies in the old one; an image and its label map seen through one stay together.

    Args:
        rows: (batch, new height), in pixels of the old image, whose first row is 0; others than its own are outside.
        columns: (batch, new width).
    """

    rows: Tensor
    columns: Tensor

    def of_images(self, images: Tensor, fill: Sequence[float] = (0.0,)) -> Tensor:
        """Images resampled bilinearly, as torch's interpolate does; outside is ``fill``, a number per channel."""
        seen = between(between(images, 2, self.rows), 3, self.columns)
        color = torch.tensor(fill, dtype=images.dtype, device=images.device).view(-1, 1, 1)
        return torch.where(self.inside(images)[:, None], seen, color)

    def of_label_maps(self, label_maps: Tensor, fill: int) -> Tensor:
        """Label maps, (batch, height, width), resampled by the nearest pixel; outside is ``fill``."""
        seen = taken(taken(label_maps, 1, (self.rows + 0.5).floor()), 2, (self.columns + 0.5).floor())
        return torch.where(self.inside(label_maps), seen, fill)

    def inside(self, images: Tensor) -> Tensor:
        """Which pixels come from within the old image, (batch, new height, new width)."""
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
    """Each image made larger or smaller, then cut to the new size at a random place, then perhaps mirrored.

    An image that is smaller than the new size lies at a random place in it.

    Args:
        samples: how many images.
        old, new: height and width.
        generator: of all random numbers.
        scale: the least and the largest factor; each image's is drawn uniformly.
        flip: mirror every other image, on average, left to right.

    Example:
        >>> view = random_view(8, (360, 480), (256, 256), torch.Generator().manual_seed(0), scale=(0.5, 2.0))
        >>> view.of_images(images), view.of_label_maps(label_maps, fill=255)
    """
    draws = torch.rand(3, samples, 1, generator=generator, dtype=torch.float64)
    low, high = scale
    factor = low + (high - low) * draws[0]
    places = []
    for old_length, new_length, draw in zip(old, new, draws[1:], strict=True):
        scaled = (old_length * factor).round().clamp(min=1)
        spare = scaled - new_length  # what must be cut off; negative: what is missing
        start = torch.minimum((draw * (spare.abs() + 1)).floor(), spare.abs()) * spare.sign()
        # The middle of a pixel is half a pixel from its edge, in the old image as in the scaled one.
        places.append((start + torch.arange(new_length) + 0.5) * (old_length / scaled) - 0.5)
    rows, columns = places
    if flip:
        mirrored = torch.randint(2, (samples, 1), generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
    return View(rows, columns)


def between(images: Tensor, dim: int, places: Tensor) -> Tensor:
    """Values at places between pixels along one dimension, in proportion to how near they are."""
    places = places.clamp(0, images.shape[dim] - 1)
    before = places.floor()
    first = taken(images, dim, before)
    if torch.equal(before, places):
        return first
    weight = along(dim, places - before, images.dim()).to(images.device, images.dtype)
    return first.lerp(taken(images, dim, before + 1), weight)


def taken(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """Each sample's rows (or columns) of the given numbers; a number beyond the last is the last."""
    index = along(dim, places.clamp(0, x.shape[dim] - 1).long(), x.dim()).to(x.device)
    shape = [*x.shape]
    shape[dim] = places.shape[1]
    return x.gather(dim, index.expand(shape))


def along(dim: int, values: Tensor, dims: int) -> Tensor:
    """Values (batch, length), laid along one of so many dimensions."""
    shape = [len(values), *[1] * (dims - 1)]
    shape[dim] = values.shape[1]
    return values.view(shape)

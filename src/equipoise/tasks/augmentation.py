"""Random variations of whole batches of images; every random number comes from the generator that is given."""

from __future__ import annotations

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

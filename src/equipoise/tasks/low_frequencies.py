"""Low spatial frequencies of images: the latent vectors with which the training of a generator starts."""

from functools import cache
from math import hypot, pi

import torch
from torch import Tensor

from equipoise.options import require_number

# Luma and two colour differences (BT.601). Luma carries most of an image and gets most of the frequencies.
LUMA_CHROMA = ((0.299, 0.587, 0.114), (-0.169, -0.331, 0.5), (0.5, -0.419, -0.081))
SHARES = (0.68, 0.16, 0.16)
SIZES = (6.0, 1.5, 1.5)  # typical size of the lowest frequency of images in [-1, 1]
DECAY = 1.2  # in natural images, the size of a frequency k falls about as (1 + |k|)^-DECAY


def low_frequencies(images: Tensor, count: int) -> Tensor:
    """Return the ``count`` lowest frequencies of each image, each divided by its typical size.

    They are coefficients of the two-dimensional cosine transform (DCT-II); for colour images, two thirds of them
    are of luma, the others of two colour differences. Nothing is fitted to the data.

    Args:
        images: (batch, channels, height, width), in [-1, 1]; one channel or three.
        count: number of frequencies.

    Example:
        >>> low_frequencies(images, 128).shape
        torch.Size([16, 128])
    """
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        raise ValueError(f"images have {channels} channels; low frequencies need 1 or 3.")
    require_number("count", count, at_least=channels, at_most=height * width, whole=True)
    if channels == 3:
        images = torch.einsum("kc,bchw->bkhw", images.new_tensor(LUMA_CHROMA), images)
    rows, columns = (cosines(side).to(images) for side in (height, width))
    spectrum = rows @ images @ columns.mT
    channel, row, column, size = lowest(channels, height, width, count)
    return spectrum[:, channel, row, column] / size.to(images)


@cache
def lowest(channels: int, height: int, width: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return channel, row and column of the lowest frequencies, and their typical sizes."""
    order = sorted((hypot(i, j), i, j) for i in range(height) for j in range(width))
    counts = [count] if channels == 1 else [round(share * count) for share in SHARES]
    counts[0] += count - sum(counts)
    chosen = [(c, i, j, SIZES[c] / (1 + k) ** DECAY) for c, number in enumerate(counts) for k, i, j in order[:number]]
    channel, row, column, size = zip(*chosen, strict=True)
    return torch.tensor(channel), torch.tensor(row), torch.tensor(column), torch.tensor(size)


@cache
def cosines(side: int) -> Tensor:
    """Return the orthonormal matrix of the cosine transform, one frequency a row."""
    frequency, place = torch.arange(side, dtype=torch.float64).unsqueeze(1), torch.arange(side, dtype=torch.float64)
    matrix = torch.cos(pi * (2 * place + 1) * frequency / (2 * side)) * (2 / side) ** 0.5
    matrix[0] /= 2**0.5
    return matrix

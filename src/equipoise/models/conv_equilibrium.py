"""A small convolutional equilibrium classifier whose equilibrium always exists: the core's own example of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.models.parts.images import MEAN, STD, normalize_for
from equipoise.stability import SpectralNorm


class Cell(nn.Module):
    """f(z, u) = relu(W * z + u), a contraction: the operator norm of W is at most ``bound``."""

    def __init__(self, channels: int, bound: float):
        super().__init__()
        self.conv = SpectralNorm(nn.Conv2d(channels, channels, 3, padding=1, bias=False), bound=bound)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return torch.relu(self.conv(z) + u)


class ConvEquilibrium(nn.Module):
    """Stem, equilibrium, linear head: maps images in [0, 1] to logits.

    Args:
        shape: shape of one image, (channels, height, width).
        classes: number of classes.
        mean, std: mean and standard deviation of the images, per channel.
        channels: number of hidden channels.
        stride: stride of the stem; 2 solves on a quarter of the pixels.
        bound: bound on the operator norm of the cell's convolution; below 1 every image has exactly one equilibrium.
        pool: side of the grid to which features are averaged before the head.

    Example:
        >>> model = ConvEquilibrium(shape=(1, 28, 28), classes=10, channels=32, stride=2)
        >>> model(torch.rand(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        channels: int = 24,
        stride: int = 1,
        bound: float = 0.9,
        pool: int = 4,
    ):
        super().__init__()
        self.stem = nn.Sequential(
            normalize_for(shape, classes, mean, std),
            nn.Conv2d(shape[0], channels, 3, stride=stride, padding=1),
            nn.GroupNorm(4 if channels % 4 == 0 else 1, channels),
        )
        self.equilibrium = Equilibrium(Cell(channels, bound))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(pool), nn.Flatten(), nn.Linear(channels * pool * pool, classes))

    def injections(self, images: Tensor) -> tuple[Tensor]:
        """Return the input of the equilibrium."""
        return (self.stem(images),)

    def read(self, z: Tensor) -> Tensor:
        """Return the logits for z."""
        return self.head(z)

    def forward(self, images: Tensor) -> Tensor:
        return self.read(self.equilibrium(*self.injections(images)))

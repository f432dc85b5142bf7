"""What comes before an equilibrium: a few convolutions of the image."""

from __future__ import annotations

from torch import nn


def stem(inputs: int, channels: int, layers: int, downsamplings: int) -> nn.Sequential:
    """3x3 convolutions with BatchNorm and ReLU, the first ``downsamplings`` of them of stride 2."""
    parts: list[nn.Module] = []
    for i in range(layers):
        stride = 2 if i < downsamplings else 1
        conv = nn.Conv2d(channels if i else inputs, channels, 3, stride=stride, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)

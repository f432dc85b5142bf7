"""Heads of multiscale models: a class for the image, a class for each pixel, or an image.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020), section 4.2 and the authors' code; the
image head follows the generators of S. Gurumurthy et al., "Joint inference and input optimization in equilibrium
networks" (2021), appendix C.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.models.parts.images import conv_norm_relu

EXPANSION = 4  # ratio of a bottleneck's output channels to its inner channels


class Bottleneck(nn.Module):
    """Residual bottleneck: 1x1, 3x3 and 1x1 convolutions with batch norms, not affine in an MDEQ, and a shortcut."""

    def __init__(self, inputs: int, channels: int, affine: bool = False):
        super().__init__()
        outputs = EXPANSION * channels
        self.inner = nn.Sequential(
            *conv_norm_relu(inputs, channels, 1, affine=affine),
            *conv_norm_relu(channels, channels, 3, affine=affine),
            nn.Conv2d(channels, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs, affine=affine),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.inner(z) + self.shortcut(z))


class ClassificationHead(nn.Module):
    """Compute logits: widen every scale, merge it into the next lower resolution, average the last over the image.

    See :class:`~equipoise.models.mdeq.cell.MDEQSize` for the arguments, and :class:`Bottleneck` for ``affine``.
    """

    def __init__(
        self,
        channels: Sequence[int],
        head_channels: Sequence[int],
        final_channels: int,
        classes: int,
        affine: bool = False,
    ):
        super().__init__()
        widths = [EXPANSION * h for h in head_channels]
        self.widen = nn.ModuleList(Bottleneck(c, h, affine) for c, h in zip(channels, head_channels, strict=True))
        pairs = itertools.pairwise(widths)
        self.merge = nn.ModuleList(conv_norm_relu(a, b, 3, stride=2, bias=True) for a, b in pairs)
        self.final = conv_norm_relu(widths[-1], final_channels, 1, bias=True)
        self.classify = nn.Linear(final_channels, classes)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        y = self.widen[0](z[0])
        for widen, merge, part in zip(self.widen[1:], self.merge, z[1:], strict=True):  # type: ignore[arg-type]
            y = widen(part) + merge(y)
        return self.classify(self.final(y).mean(dim=(2, 3)))


class SegmentationHead(nn.Module):
    """Map all scales, resized to the first, to logits (batch, classes, height, width) by two convolutions."""

    def __init__(self, channels: Sequence[int], classes: int, kernel: int = 1):
        super().__init__()
        width = sum(channels)
        self.mix = conv_norm_relu(width, width, 1, bias=True)
        self.classify = nn.Conv2d(width, classes, kernel, padding=kernel // 2)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        return self.classify(self.mix(at_first_resolution(z)))


class ImageHead(nn.Module):
    """Map all scales, resized to the first, to an image in [-1, 1].

    Args:
        channels: channels of each scale.
        outputs: channels of the image.
        groups: number of groups of GroupNorm; it must divide the sum of the channels and ``width``.
        width: channels of the last layers.
        upsamplings: how many times the image is twice as high and wide as the first scale.
    """

    def __init__(
        self, channels: Sequence[int], outputs: int = 3, groups: int = 8, width: int = 32, upsamplings: int = 0
    ):
        super().__init__()
        total = sum(channels)
        if total % groups or width % groups:
            raise ValueError(
                f"groups is {groups}; it must divide the sum of the channels, {total}, and width, {width}."
            )
        if upsamplings:
            up = [nn.ConvTranspose2d(width, width, 4, stride=2, padding=1) for _ in range(upsamplings)]
        else:
            up = [nn.ConvTranspose2d(width, width, 3, padding=1)]
        convs = (nn.Conv2d(total, total, 1), nn.Conv2d(total, width, 3, padding=1), *up)
        normed = [(conv, nn.GroupNorm(groups, conv.out_channels), nn.ReLU(inplace=True)) for conv in convs]
        last = nn.ConvTranspose2d(width, outputs, 3, padding=1)
        self.layers = nn.Sequential(*itertools.chain.from_iterable(normed), last)

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        return torch.tanh(self.layers(at_first_resolution(z)))


def at_first_resolution(z: tuple[Tensor, ...]) -> Tensor:
    """Resize all scales to the first, bilinearly with aligned corners, and concatenate their channels."""
    size = z[0].shape[2:]
    resized = (F.interpolate(part, size=size, mode="bilinear", align_corners=True) for part in z[1:])
    return torch.cat([z[0], *resized], dim=1)

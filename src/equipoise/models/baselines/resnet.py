"""Residual networks of basic blocks, from the size of a small equilibrium model to ResNet-18.

K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition" (2016): figure 3 and table 1 for large
images, section 4.2 for small ones, with projections as shortcuts (option B). Sizes named after a number of parameters
are this library's own: they match the equilibrium models that they are compared with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.parts.images import MEAN, STD, ImageClassifier, conv_norm_relu
from equipoise.models.parts.keyword_options import accepts, numbers_of, require_counts, sized
from equipoise.options import options, require


@options
class ResNetSize:
    """The numbers that make a ResNet.

    Args:
        channels: channels of each stage; every stage after the first starts with a block of stride 2.
        blocks: number of basic blocks of each stage.
        large_images: whether the stem is a 7x7 convolution of stride 2 and max pooling, instead of a 3x3 convolution.
    """

    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    large_images: bool = False

    def __post_init__(self) -> None:
        require_counts(self, "channels", "stage")
        require_counts(self, "blocks", "stage")
        if len(self.blocks) != len(self.channels):
            raise ValueError(f"blocks has {len(self.blocks)} entries, but channels has {len(self.channels)} stages.")
        require(self, "large_images", kind=bool)


_EIGHTEEN: dict[str, Any] = {"channels": (64, 128, 256, 512), "blocks": (2, 2, 2, 2)}
SIZES = {
    "resnet-18": ResNetSize(**_EIGHTEEN),  # 11.2M
    "resnet-18-imagenet": ResNetSize(**_EIGHTEEN, large_images=True),  # 11.7M
    "resnet-20": ResNetSize((16, 32, 64), (3, 3, 3)),  # 0.27M
    "84k": ResNetSize((11, 22, 44), (2, 2, 2)),  # a monDEQ on MNIST
    "17k": ResNetSize((10, 20), (2, 2)),  # a MOptEq of 16 channels
}


class BasicBlock(nn.Module):
    """relu(x + two 3x3 convolutions of x), each with BatchNorm; x is projected where its shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.inner = nn.Sequential(
            *conv_norm_relu(inputs, outputs, 3, stride=stride),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


class ResNet(ImageClassifier):
    """Map images in [0, 1], of any size, to logits: stem, stages of basic blocks, average pooling, linear head.

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        size: key of ``SIZES``.
        numbers: fields of :class:`ResNetSize` that replace those of the size.

    Example:
        >>> model = ResNet(shape=(3, 32, 32), classes=10, size="resnet-18")
        >>> sum(p.numel() for p in model.parameters())
        11173962
    """

    @accepts(*numbers_of(ResNetSize))
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "resnet-20",
        **numbers: Any,
    ):
        super().__init__(shape, classes, mean, std)
        self.size = sized(SIZES, size, "ResNet", numbers)
        width = self.size.channels[0]
        self.stem = conv_norm_relu(shape[0], width, 3)
        if self.size.large_images:
            self.stem = nn.Sequential(*conv_norm_relu(shape[0], width, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))
        blocks: list[nn.Module] = []
        for stage, (channels, count) in enumerate(zip(self.size.channels, self.size.blocks, strict=True)):
            for number in range(count):
                blocks.append(BasicBlock(width, channels, stride=2 if stage and not number else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(self.normalized(images))).mean(dim=(2, 3)))


def initialise(model: nn.Module) -> None:
    """Draw convolutions from N(0, 2 / fan-out), so that ReLU keeps the size of gradients (He et al., 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

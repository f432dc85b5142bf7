"""HRNet: residual blocks at several resolutions in parallel, which exchange features after every stage.

K. Sun et al., "High-resolution representations for labeling pixels and regions" (2019); J. Wang et al., "Deep
high-resolution representation learning for visual recognition" (2020). MDEQ's f is one such stage. The size of 13M is
HRNet-W18-C-Small-v1 of the authors' code, the only published HRNet with the parameters and the accuracy on ImageNet
that the MOptEq paper cites (table 4).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.models.baselines.resnet import BasicBlock, initialise
from equipoise.models.mdeq.heads import EXPANSION, Bottleneck, ClassificationHead
from equipoise.models.parts.images import MEAN, STD, ImageClassifier, conv_norm_relu, stem
from equipoise.models.parts.keyword_options import accepts, numbers_of, require_counts, sized
from equipoise.options import options, require


@options
class HRNetSize:
    """The numbers that make an HRNet.

    Args:
        channels: channels of each branch, the highest resolution first; each branch halves height and width.
        head_channels: channels of the head's bottlenecks, one for each branch.
        final_channels: number of channels that the head averages over the image.
        stem: channels of the first two convolutions.
        bottleneck: inner channels of the bottleneck after the stem.
        blocks: number of basic blocks of each branch in each stage.
        downsamplings: how many of the first two convolutions have stride 2.
    """

    channels: tuple[int, ...]
    head_channels: tuple[int, ...]
    final_channels: int
    stem: int = 64
    bottleneck: int = 32
    blocks: int = 2
    downsamplings: int = 2

    def __post_init__(self) -> None:
        require_counts(self, "channels", "branch")
        require_counts(self, "head_channels", "branch")
        if len(self.head_channels) != len(self.channels):
            given = f"head_channels has {len(self.head_channels)} entries"
            raise ValueError(f"{given}, but channels has {len(self.channels)}: give one per branch.")
        if len(self.channels) < 2:
            raise ValueError(f"channels is {list(self.channels)}; it must have at least 2 entries, one per branch.")
        for name in ("final_channels", "stem", "bottleneck", "blocks"):
            require(self, name, at_least=1, whole=True)
        require(self, "downsamplings", at_least=0, at_most=2, whole=True)

    @property
    def divisor(self) -> int:
        """Number by which the height and width of an image must be divisible."""
        return 2 ** (self.downsamplings + len(self.channels) - 1)


SIZES = {"w18-small-13m": HRNetSize((16, 32, 64, 128), (32, 64, 128, 256), 2048)}


class Exchange(nn.Module):
    """Add to every branch the features of all others, brought to its resolution and channels, and apply ReLU."""

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        branches = range(len(channels))
        self.maps = nn.ModuleList(
            nn.ModuleList(transition(channels, source, target) for source in branches) for target in branches
        )

    def forward(self, z: Sequence[Tensor]) -> list[Tensor]:
        outputs = []
        for target, maps in enumerate(self.maps):
            total = z[target]
            for source, change in enumerate(maps):  # type: ignore[arg-type]
                if source != target:
                    part = change(z[source])
                    size = total.shape[2:]
                    total = total + (part if part.shape[2:] == size else F.interpolate(part, size=size, mode="nearest"))
            outputs.append(torch.relu(total))
        return outputs


def transition(channels: Sequence[int], source: int, target: int) -> nn.Module:
    """Return the convolutions from branch ``source`` to ``target``: 1x1 to go up, 3x3 of stride 2 to go down."""
    if source == target:
        return nn.Identity()
    kernel, stride = (1, 1) if source > target else (3, 2)
    widths = [channels[source]] * max(1, target - source)
    parts = [conv_norm_relu(width, width, kernel, stride=stride) for width in widths[1:]]
    last = nn.Conv2d(widths[-1], channels[target], kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(*parts, last, nn.BatchNorm2d(channels[target]))


class Stage(nn.Module):
    """Basic blocks on every branch, then an exchange between all of them."""

    def __init__(self, channels: Sequence[int], blocks: int):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(BasicBlock(c, c) for _ in range(blocks))) for c in channels)
        self.exchange = Exchange(channels)

    def forward(self, z: Sequence[Tensor]) -> list[Tensor]:
        return self.exchange([branch(part) for branch, part in zip(self.branches, z, strict=True)])


class HRNet(ImageClassifier):
    """Map images in [0, 1] to logits: stem, a bottleneck, stages that each add a branch, MDEQ's head (affine norms).

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        size: key of ``SIZES``.
        numbers: fields of :class:`HRNetSize` that replace those of the size.

    Example:
        >>> model = HRNet(shape=(3, 224, 224), classes=1000)
        >>> sum(p.numel() for p in model.parameters())
        13187464
    """

    @accepts(*numbers_of(HRNetSize))
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "w18-small-13m",
        **numbers: Any,
    ):
        super().__init__(shape, classes, mean, std)
        self.size = sized(SIZES, size, "HRNet", numbers)
        channels, first = self.size.channels, EXPANSION * self.size.bottleneck
        self.stem = nn.Sequential(
            stem(shape[0], self.size.stem, 2, self.size.downsamplings),
            Bottleneck(self.size.stem, self.size.bottleneck, affine=True),
        )
        # Branches that begin a stage: the first two from the bottleneck, each later one from the branch above it.
        self.first = conv_norm_relu(first, channels[0], 3)
        above = [first, *channels[1:-1]]
        self.begin = nn.ModuleList(conv_norm_relu(a, b, 3, stride=2) for a, b in zip(above, channels[1:], strict=True))
        self.stages = nn.ModuleList(Stage(channels[: n + 2], self.size.blocks) for n in range(len(channels) - 1))
        self.head = ClassificationHead(
            channels, self.size.head_channels, self.size.final_channels, classes, affine=True
        )
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalized(images)
        if any(n % self.size.divisor for n in images.shape[2:]):
            raise ValueError(
                f"images of {images.shape[2]} x {images.shape[3]} do not fit this model: height and width must be "
                f"multiples of {self.size.divisor}. Resize or pad them, or choose fewer branches."
            )
        x = self.stem(x)
        z = [self.first(x)]
        for number, (begin, stage) in enumerate(zip(self.begin, self.stages, strict=True)):
            z = stage([*z, begin(x if number == 0 else z[-1])])
        return self.head(tuple(z))

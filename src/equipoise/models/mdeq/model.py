"""MDEQ: features at several resolutions that reach their equilibrium together.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020). The wiring is that of the authors' code,
which the paper tells in words (section 4.1, appendix A); sizes are those of the paper's table 4 and, where they differ,
those of the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium
from equipoise.models.mdeq.heads import ClassificationHead, SegmentationHead
from equipoise.models.parts.normalize import Normalize
from equipoise.models.parts.sizes import sized
from equipoise.models.parts.stem import stem
from equipoise.options import require, require_images
from equipoise.problem.layout import is_channels_last
from equipoise.problem.problem import autocast_state
from equipoise.solvers import Broyden
from equipoise.stability import VariationalDropout, WeightNorm
from equipoise.tolerance import Tolerance

ACTIVATIONS = ("relu", "softplus")
HEADS = ("classification", "segmentation")
TOLERANCE = Tolerance(relative=1e-3, max_steps=18)
INITIAL_STD = 0.01  # of every convolution without weight normalisation
SEGMENTATION_MOMENTUM = 0.01  # of BatchNorm, whose batches are small where images are large


@dataclass(frozen=True)
class Size:
    """The numbers that make an MDEQ.

    Args:
        channels: of each scale, the highest resolution first; every further one has half the height and width.
        head_channels: of the bottlenecks of a classification head, one for each scale.
        final_channels: that a classification head averages over the image.
        groups: of GroupNorm.
        expansion: of the channels inside a residual block.
        dropout: probability with which a block drops a channel, by one mask for the whole solve.
        downsamplings: convolutions of stride 2 before the first scale.
        post_affine: whether the last GroupNorm of f learns a scale and a shift.
        big_kernels: for each scale, how many of a block's two convolutions are 5x5; the others are 3x3.
        blocks: residual blocks per scale, of which the first gets the input.
    """

    channels: tuple[int, ...]
    head_channels: tuple[int, ...] = ()
    final_channels: int = 0
    groups: int = 8
    expansion: float = 5.0
    dropout: float = 0.0
    downsamplings: int = 0
    post_affine: bool = False
    big_kernels: tuple[int, ...] = ()
    blocks: int = 1

    def __post_init__(self) -> None:
        for name in ("channels", "head_channels", "big_kernels"):
            value = getattr(self, name)
            least = 0 if name == "big_kernels" else 1
            if not (isinstance(value, tuple | list) and all(isinstance(c, int) and c >= least for c in value)):
                sentence = f"it must be a list of whole numbers of at least {least}, one for each scale."
                raise ValueError(f"{name} is {value!r}; {sentence}")
            object.__setattr__(self, name, tuple(value))
        if not self.channels:
            raise ValueError("channels is empty; it must have an entry for each scale, and at least one scale.")
        for name in ("head_channels", "big_kernels"):
            if (given := len(getattr(self, name))) not in (0, len(self.channels)):
                raise ValueError(f"{name} has {given} entries and channels {len(self.channels)}: one for each scale.")
        if self.big_kernels and max(self.big_kernels) > 2:
            raise ValueError(f"big_kernels is {self.big_kernels}; a block has two convolutions: 0, 1 or 2 for each.")
        for name, least in (("groups", 1), ("downsamplings", 0), ("blocks", 1), ("final_channels", 0)):
            require(self, name, at_least=least, whole=True)
        require(self, "expansion", above=0)
        require(self, "dropout", at_least=0, below=1)
        require(self, "post_affine", kind=bool)
        for channels in self.channels:
            for width in (channels, int(self.expansion * channels)):
                if width < 1 or width % self.groups:
                    raise ValueError(
                        f"groups is {self.groups}, which does not divide {width} channels (channels {self.channels}, "
                        f"expansion {self.expansion:g}): choose a divisor of all of them."
                    )
            if channels % self.last_groups:
                raise ValueError(
                    f"groups is {self.groups}, half of which, {self.last_groups}, does not divide {channels} channels: "
                    "the last norm of f has half the groups. Choose an even number."
                )

    @property
    def scales(self) -> int:
        return len(self.channels)

    @property
    def last_groups(self) -> int:
        """Of the last GroupNorm of f."""
        return max(1, self.groups // 2)

    @property
    def divisor(self) -> int:
        """What height and width of an image must be multiples of."""
        return 2 ** (self.downsamplings + self.scales - 1)


_FOUR, _WIDE, _WIDEST = (32, 64, 128, 256), (80, 160, 320, 640), (88, 176, 352, 704)
_CIFAR_HEAD: dict[str, Any] = {"head_channels": (14, 28, 56, 112), "final_channels": 1680}
_IMAGENET: dict[str, Any] = {"final_channels": 2048, "downsamplings": 2, "post_affine": True}
_CITYSCAPES: dict[str, Any] = {"downsamplings": 2, "post_affine": True}

SIZES = {  # table 4 of the paper; "public" are those of the authors' code where it differs
    "cifar10-small": Size((8, 16, 32), (4, 8, 16), 64, groups=4, dropout=0.2),  # its 170K: the paper tells no head
    "cifar10-large": Size((28, 56, 112, 224), groups=4, dropout=0.25, **_CIFAR_HEAD),
    "cifar10-small-public": Size((24, 24), (8, 16), 200, dropout=0.25),
    "cifar10-large-public": Size(_FOUR, dropout=0.3, **_CIFAR_HEAD),
    "cifar10-large-regularized": Size(_FOUR, dropout=0.22, **_CIFAR_HEAD),
    "imagenet-small": Size(_FOUR, (24, 48, 96, 192), **_IMAGENET),
    "imagenet-small-regularized": Size(_FOUR, (28, 56, 112, 224), **{**_IMAGENET, "post_affine": False}, dropout=0.02),
    "imagenet-large": Size(_WIDE, (32, 64, 128, 256), **_IMAGENET),
    "imagenet-large-regularized": Size(_WIDE, (32, 64, 128, 256), **{**_IMAGENET, "post_affine": False}),
    "imagenet-xl": Size(_WIDEST, (32, 64, 128, 256), expansion=6.0, **_IMAGENET),
    "cityscapes-small": Size(_FOUR, dropout=0.05, **_CITYSCAPES),
    "cityscapes-large": Size(_WIDE, dropout=0.03, **_CITYSCAPES),
    "cityscapes-xl": Size(_WIDEST, expansion=6.0, dropout=0.04, **_CITYSCAPES),
}


# --- f ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """The residual block of one scale: widen, narrow, add the input, normalise."""

    def __init__(self, size: Size, scale: int, activation: str, weight_norm: bool):
        super().__init__()
        channels, big = size.channels[scale], size.big_kernels[scale] if size.big_kernels else 0
        inner = int(size.expansion * channels)
        first, second = (5 if big >= 1 else 3), (5 if big >= 2 else 3)
        self.conv1 = weighed(nn.Conv2d(channels, inner, first, padding=first // 2, bias=False), weight_norm)
        self.norm1 = nn.GroupNorm(size.groups, inner)
        self.conv2 = weighed(nn.Conv2d(inner, channels, second, padding=second // 2, bias=False), weight_norm)
        self.drop = VariationalDropout(size.dropout)
        self.norm2 = nn.GroupNorm(size.groups, channels)
        self.norm3 = nn.GroupNorm(size.groups, channels)
        self.activation = activation

    def forward(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        change = self.drop(self.conv2(activate(self.norm1(self.conv1(z)), self.activation)))
        if x is not None:
            change = change + x
        return self.norm3(activate(self.norm2(change) + z, self.activation))


def weighed(conv: nn.Conv2d, weight_norm: bool) -> nn.Module:
    return WeightNorm(conv) if weight_norm else conv


def activate(fresh: Tensor, activation: str) -> Tensor:
    """The activation of a tensor that nobody else holds."""
    return F.relu(fresh, inplace=True) if activation == "relu" else F.softplus(fresh)


class Transition(nn.Module):
    """What scale ``source`` tells scale ``target``, at the size and with the channels of the latter.

    To a lower resolution by convolutions of stride 2, to a higher one by a 1x1 convolution and repeated pixels.
    """

    def __init__(self, size: Size, source: int, target: int, activation: str):
        super().__init__()
        inputs, outputs, groups = size.channels[source], size.channels[target], size.groups
        self.activation, self.factor = activation, 2 ** max(0, source - target)
        kernel, stride = (1, 1) if source > target else (3, 2)
        widths = [inputs] * max(1, target - source) + [outputs]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, stride=stride, padding=kernel // 2, bias=False)
            for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(groups, width) for width in widths[1:])

    def forward(self, y: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if i == 0 else activate(y, self.activation)))
        return y if self.factor == 1 else F.interpolate(y, scale_factor=self.factor, mode="nearest")


class MultiscaleCell(nn.Module):
    """f(z, x): a residual block on every scale, all-to-all fusion, a 1x1 convolution and a norm.

    z is a tuple of tensors (batch, channels_i, height / 2^i, width / 2^i); x a tuple of inputs of the first scales, in
    MDEQ of the first one only. Every value it gives is group-normalised, so that no iteration can run away. With one
    scale it is the block alone.

    Args:
        size: the numbers that make it.
        activation: "relu", or "softplus" for a smoother beginning of training.
        weight_norm: of the blocks and the last convolution.

    Example:
        >>> f = MultiscaleCell(SIZES["cifar10-small"])
        >>> z = f(f.start(x), (x,))
    """

    def __init__(self, size: Size, activation: str = "relu", weight_norm: bool = True):
        super().__init__()
        self.size, self.activation, scales = size, activation, range(size.scales)
        require(self, "activation", among=ACTIVATIONS)
        self.blocks = nn.ModuleList(
            nn.ModuleList(Block(size, i, activation, weight_norm) for _ in range(size.blocks)) for i in scales
        )
        several = scales if size.scales > 1 else ()
        self.fuse = nn.ModuleList(
            nn.ModuleList(nn.Identity() if i == j else Transition(size, j, i, activation) for j in scales)
            for i in several
        )
        self.post = nn.ModuleList(
            weighed(nn.Conv2d(size.channels[i], size.channels[i], 1, bias=False), weight_norm) for i in several
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(size.last_groups, size.channels[i], affine=size.post_affine) for i in several
        )

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y = []
        for i, blocks in enumerate(self.blocks):
            found = z[i]
            for k, block in enumerate(blocks):  # type: ignore[arg-type]
                found = block(found, x[i] if k == 0 and i < len(x) else None)
            y.append(found)
        if len(y) == 1:
            return (y[0],)
        fused = [self.fused(i, y) for i in range(len(y))]
        return tuple(
            norm(conv(activate(s, self.activation))) for s, conv, norm in zip(fused, self.post, self.norms, strict=True)
        )

    def fused(self, i: int, y: list[Tensor]) -> Tensor:
        """What all scales tell scale i, summed."""
        total = torch.zeros(())
        for j, transition in enumerate(self.fuse[i]):  # type: ignore[arg-type]
            total = transition(y[j]) if j == 0 else total + transition(y[j])
        return total

    def start(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Zeros, for inputs whose first is that of the first scale; laid out in memory as it is."""
        batch, _, height, width = x[0].shape
        step = 2 ** (self.size.scales - 1)
        if height % step or width % step:
            raise ValueError(
                f"features of {height} x {width} cannot be halved {self.size.scales - 1} times: for this model height "
                f"and width of images must be multiples of {self.size.divisor}. Resize or pad them."
            )
        order = torch.channels_last if is_channels_last(x[0]) else torch.contiguous_format
        narrow = autocast_state(x[0].device.type)  # what autocast made narrow was not meant for a state
        dtype = torch.promote_types(x[0].dtype, torch.float32) if narrow else x[0].dtype
        return tuple(
            torch.zeros(batch, c, height >> i, width >> i, dtype=dtype, device=x[0].device).contiguous(
                memory_format=order
            )
            for i, c in enumerate(self.size.channels)
        )


# --- the model --------------------------------------------------------------------------------------------------------


class MDEQ(nn.Module):
    """Stem, multiscale equilibrium, head: images in [0, 1] to logits, of whole images or of their pixels.

    Args:
        shape: of one image, (channels, height, width).
        classes: how many.
        mean, std: of the images per channel.
        size: a name of ``SIZES``; every number of it can be given by itself as well:
        channels, head_channels, final_channels, groups, expansion, dropout, downsamplings, post_affine, big_kernels,
            blocks: see :class:`Size`; None is as the size says.
        head: "classification", or "segmentation" for logits (batch, classes, h, w) at the resolution of the first
            scale; images of any size are then padded, and their logits cut again.
        activation: "relu", or "softplus" while training warms up.
        weight_norm: of the blocks and the last convolution of f.

    Example:
        >>> model = MDEQ(shape=(3, 32, 32), classes=10, size="cifar10-small")
        >>> sum(p.numel() for p in model.parameters())
        170378
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        size: str = "cifar10-small",
        channels: Sequence[int] | None = None,
        head_channels: Sequence[int] | None = None,
        final_channels: int | None = None,
        groups: int | None = None,
        expansion: float | None = None,
        dropout: float | None = None,
        downsamplings: int | None = None,
        post_affine: bool | None = None,
        big_kernels: Sequence[int] | None = None,
        blocks: int | None = None,
        head: str = "classification",
        activation: str = "relu",
        weight_norm: bool = True,
    ):
        super().__init__()
        for name, value, allowed in (
            ("head", head, HEADS),
            ("activation", activation, ACTIVATIONS),
            ("weight_norm", weight_norm, (True, False)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}.")
        if head == "segmentation":
            if not (head_channels is None and final_channels is None):
                raise ValueError("head_channels and final_channels are those of a classification head: leave them out.")
            head_channels, final_channels = (), 0
        require_images(shape, classes, mean)
        self.size = sized(
            SIZES,
            size,
            "MDEQ",
            channels=channels,
            head_channels=head_channels,
            final_channels=final_channels,
            groups=groups,
            expansion=expansion,
            dropout=dropout,
            downsamplings=downsamplings,
            post_affine=post_affine,
            big_kernels=big_kernels,
            blocks=blocks,
        )
        self.normalize = Normalize(mean, std)
        self.stem = stem(shape[0], self.size.channels[0], max(2, self.size.downsamplings), self.size.downsamplings)
        self.inject = injection(self.size)
        cell = MultiscaleCell(self.size, activation, weight_norm)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Broyden(memory=12), tolerance=TOLERANCE)
        if head == "segmentation":
            self.head: nn.Module = SegmentationHead(self.size.channels, classes)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = SEGMENTATION_MOMENTUM
        else:
            if shape[1] % self.size.divisor or shape[2] % self.size.divisor:
                self.refuse(shape[1:])
            if not self.size.head_channels or not self.size.final_channels:
                raise ValueError(
                    f"the size {size!r} has no classification head: give head_channels and final_channels, or "
                    "head='segmentation'."
                )
            self.head = ClassificationHead(
                self.size.channels, self.size.head_channels, self.size.final_channels, classes
            )
        self.segments = head == "segmentation"
        initialise(self)

    def features(self, images: Tensor) -> Tensor:
        """What enters the first scale of the equilibrium; normalised images are padded to a size that fits."""
        x = self.normalize(images)
        height, width = (-n % self.size.divisor for n in images.shape[2:])
        if height or width:
            if not self.segments:
                self.refuse(images.shape[2:])
            x = F.pad(x, (0, width, 0, height))
        return self.inject(self.stem(x))

    def refuse(self, size: Sequence[int]) -> NoReturn:
        """Say that images of this size cannot be halved as often as the model does."""
        raise ValueError(
            f"images of {size[0]} x {size[1]} do not fit this model, which halves them "
            f"{self.size.downsamplings + self.size.scales - 1} times: height and width must be multiples of "
            f"{self.size.divisor}. Resize or pad them, or choose fewer scales."
        )

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(self.equilibrium((self.features(images),)))
        if not self.segments:
            return logits
        height, width = (-(-n // 2**self.size.downsamplings) for n in images.shape[2:])
        return logits[:, :, :height, :width]


def injection(size: Size) -> nn.Sequential:
    """A 1x1 convolution of the stem's features; none for small images and one or two scales, as in the code."""
    if size.downsamplings == 0 and size.scales <= 2:
        return nn.Sequential()
    channels = size.channels[0]
    return nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def initialise(model: nn.Module) -> None:
    """Convolutions from N(0, 0.01^2), as in the authors' code; those with weight normalisation stay as torch has them.

    There the loop wrote to the derived weight only, which the next forward pass replaced: their real beginning.
    """
    normed = {id(module.layer) for module in model.modules() if isinstance(module, WeightNorm)}
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and id(module) not in normed:
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=INITIAL_STD)

"""MDEQ: a classifier or segmenter whose features at several resolutions reach equilibrium together.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020). Sizes are those of the paper's table 4
and, where the authors' code differs, also those of the code.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium
from equipoise.models.mdeq.cell import MDEQSize, MultiscaleCell
from equipoise.models.mdeq.heads import ClassificationHead, SegmentationHead
from equipoise.models.parts.images import MEAN, STD, ImageClassifier, conv_norm_relu, stem
from equipoise.models.parts.keyword_options import accepts, numbers_of, sized
from equipoise.solvers import Broyden
from equipoise.stability import WeightNorm
from equipoise.tolerance import Tolerance

HEADS = ("classification", "segmentation")
TOLERANCE = Tolerance(relative=1e-3, max_steps=18)
INITIAL_STD = 0.01  # of convolutions without weight normalisation
REMEDY = "Resize or pad them, or choose fewer scales."
SEGMENTATION_MOMENTUM = 0.01  # of BatchNorm: large images come in small batches

_FOUR, _WIDE, _WIDEST = (32, 64, 128, 256), (80, 160, 320, 640), (88, 176, 352, 704)
_CIFAR_HEAD: dict[str, Any] = {"head_channels": (14, 28, 56, 112), "final_channels": 1680}
_IMAGENET: dict[str, Any] = {"final_channels": 2048, "downsamplings": 2}
_PUBLISHED: dict[str, Any] = {**_IMAGENET, "post_affine": True}
_CITYSCAPES: dict[str, Any] = {"downsamplings": 2, "post_affine": True}

SIZES = {  # table 4 of the paper; "public" sizes are those of the authors' code where it differs
    "cifar10-small": MDEQSize((8, 16, 32), (4, 8, 16), 64, groups=4, dropout=0.2),  # the paper does not specify a head
    "cifar10-large": MDEQSize((28, 56, 112, 224), groups=4, dropout=0.25, **_CIFAR_HEAD),
    # 2.53M: in the tables of the MOptEq paper, which does not state the channels
    "cifar10-2.5m": MDEQSize((16, 32, 64, 128), (6, 12, 24, 48), 200, groups=4, dropout=0.25),
    "cifar10-small-public": MDEQSize((24, 24), (8, 16), 200, dropout=0.25),
    "cifar10-large-public": MDEQSize(_FOUR, dropout=0.3, **_CIFAR_HEAD),
    "cifar10-large-regularized": MDEQSize(_FOUR, dropout=0.22, **_CIFAR_HEAD),
    "imagenet-small": MDEQSize(_FOUR, (24, 48, 96, 192), **_PUBLISHED),
    "imagenet-small-regularized": MDEQSize(_FOUR, (28, 56, 112, 224), dropout=0.02, **_IMAGENET),
    "imagenet-large": MDEQSize(_WIDE, (32, 64, 128, 256), **_PUBLISHED),
    "imagenet-large-regularized": MDEQSize(_WIDE, (32, 64, 128, 256), **_IMAGENET),
    "imagenet-xl": MDEQSize(_WIDEST, (32, 64, 128, 256), expansion=6.0, **_PUBLISHED),
    "cityscapes-small": MDEQSize(_FOUR, dropout=0.05, **_CITYSCAPES),
    "cityscapes-large": MDEQSize(_WIDE, dropout=0.03, **_CITYSCAPES),
    "cityscapes-xl": MDEQSize(_WIDEST, expansion=6.0, dropout=0.04, **_CITYSCAPES),
}


class MDEQ(ImageClassifier):
    """Stem, multiscale equilibrium, head: maps images in [0, 1] to logits, of whole images or of their pixels.

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        size: key of ``SIZES``.
        head: "classification", or "segmentation" for logits (batch, classes, h, w) at the resolution of the first
            scale; images of any size are then padded, and their logits cropped.
        activation, weight_norm: see :class:`~equipoise.models.mdeq.cell.MultiscaleCell`.
        numbers: fields of :class:`~equipoise.models.mdeq.cell.MDEQSize` that replace those of the size.

    Example:
        >>> model = MDEQ(shape=(3, 32, 32), classes=10, size="cifar10-small")
        >>> sum(p.numel() for p in model.parameters())
        170378
    """

    @accepts(*numbers_of(MDEQSize))
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "cifar10-small",
        head: str = "classification",
        activation: str = "relu",
        weight_norm: bool = True,
        **numbers: Any,
    ):
        super().__init__(shape, classes, mean, std)
        if head not in HEADS:
            raise ValueError(f"head is {head!r}; allowed: {', '.join(map(repr, HEADS))}.")
        self.segments = head == "segmentation"
        if self.segments:
            if any(numbers.get(name) is not None for name in ("head_channels", "final_channels")):
                raise ValueError("head_channels and final_channels are those of a classification head: leave them out.")
            numbers |= {"head_channels": (), "final_channels": 0}
        self.size = sized(SIZES, size, "MDEQ", numbers)
        channels = self.size.channels
        self.stem = stem(shape[0], channels[0], max(2, self.size.downsamplings), self.size.downsamplings)
        # As in the authors' code, small models of small images have no convolution between stem and equilibrium.
        small = self.size.downsamplings == 0 and self.size.scales <= 2
        self.inject = nn.Sequential() if small else conv_norm_relu(channels[0], channels[0], 1)
        cell = MultiscaleCell(self.size, activation, weight_norm)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Broyden(memory=12), tolerance=TOLERANCE)
        if self.segments:
            self.head: nn.Module = SegmentationHead(channels, classes)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = SEGMENTATION_MOMENTUM
        else:
            self.size.require_fit(shape[1:], REMEDY)
            if not self.size.head_channels or not self.size.final_channels:
                raise ValueError(
                    f"the size {size!r} has no classification head: give head_channels and final_channels, or "
                    "head='segmentation'."
                )
            self.head = ClassificationHead(channels, self.size.head_channels, self.size.final_channels, classes)
        initialise(self)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the first scale, of images that are normalised and, for segmentation, padded to fit."""
        x = self.normalized(images)
        height, width = (-n % self.size.divisor for n in images.shape[2:])
        if not self.segments:
            self.size.require_fit(images.shape[2:], REMEDY)
        elif height or width:
            x = F.pad(x, (0, width, 0, height))
        return self.inject(self.stem(x))

    def injections(self, images: Tensor) -> tuple[tuple[Tensor]]:
        """Return the input of the equilibrium: one tensor for each scale that has an input."""
        return ((self.features(images),),)

    def read(self, z: tuple[Tensor, ...]) -> Tensor:
        """Return the logits for z; for segmentation, of padded images."""
        return self.head(z)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.read(self.equilibrium(*self.injections(images)))
        if not self.segments:
            return logits
        height, width = (-(-n // 2**self.size.downsamplings) for n in images.shape[2:])
        return logits[:, :, :height, :width]


def initialise(model: nn.Module) -> None:
    """Draw convolutions from N(0, 0.01^2), except those with weight normalisation, which keep torch's initialisation.

    So it is in effect in the authors' code, whose loop writes only the derived weight, which the next forward pass
    replaces.
    """
    normed = {id(module.layer) for module in model.modules() if isinstance(module, WeightNorm)}
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and id(module) not in normed:
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=INITIAL_STD)

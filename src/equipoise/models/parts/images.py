"""Images on their way into a model: checks, normalisation, the first convolutions of a classifier, memory order."""

from abc import ABC
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from equipoise.options import is_number

MEAN, STD = (0.5,), (0.5,)  # the defaults of every model: [0, 1] becomes [-1, 1]


class Normalize(nn.Module):
    """(x - mean) / std for each channel. As a layer of the model, so that a saved model takes images in [0, 1].

    Args:
        mean, std: numbers, one for each channel, or one for all.
        channels: number of channels of the images; None is that of ``mean``, or any if it has one entry.

    Example:
        >>> Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int | None = None):
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            listed = hasattr(value, "__len__") and hasattr(value, "__iter__")
            if not listed or not all(isinstance(entry, Real) for entry in value):
                raise TypeError(f"{name} is {value!r}; it must be a tuple of numbers, such as (0.5,).")
        if len(mean) != len(std) or min(std) <= 0:
            given = f"mean is {tuple(mean)} and std is {tuple(std)}"
            raise ValueError(f"{given}; they must have the same length, and every std must be above 0.")
        self.channels = channels or (len(mean) if len(mean) > 1 else None)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        require_numbers(x, self.mean.dtype, "images", "in [0, 1]: images.float() / 255")
        if x.dim() != 4 or self.channels not in (None, x.shape[1]):
            wanted = f"(batch, {self.channels or 'channels'}, height, width)"
            raise ValueError(f"images have shape {tuple(x.shape)}; it must be {wanted}, even for a single image.")
        return (x - self.mean) / self.std


def require_numbers(given: Tensor, dtype: torch.dtype, name: str, remedy: str) -> None:
    """Raise unless a tensor has numbers that a model of this dtype takes; ``remedy`` says how to make them."""
    if not given.is_floating_point():
        raise TypeError(f"{name} are {given.dtype}; they must be numbers {remedy}.")
    if torch.promote_types(given.dtype, dtype) != dtype:
        raise TypeError(f"{name} are {given.dtype}, and the model is {dtype}: {name}.to({dtype}).")


def require_image_shape(shape: Sequence[int]) -> None:
    """Raise unless ``shape`` is the shape of one image."""
    listed = isinstance(shape, tuple | list) and len(shape) == 3
    if not listed or not all(is_number(n, at_least=1, whole=True) for n in shape):
        raise ValueError(
            f"shape is {shape!r}; it must be the shape of one image, (channels, height, width), such as (3, 32, 32)."
        )


def is_channels_last(images: Tensor) -> bool:
    """Return whether images are in channels-last order, and not contiguous at the same time."""
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def normalize_for(shape: Sequence[int], classes: int, mean: Sequence[float], std: Sequence[float]) -> Normalize:
    """Check what a classifier is built for and return the layer that normalises its images."""
    require_image_shape(shape)
    if not is_number(classes, at_least=2, whole=True):
        raise ValueError(
            f"classes is {classes!r}; a classifier needs at least 2 (a whole number; does the data set have labels?)."
        )
    normalize = Normalize(mean, std, shape[0])
    if len(mean) not in (1, shape[0]):
        raise ValueError(f"mean has {len(mean)} entries; it must have 1, or {shape[0]}, one for each channel.")
    return normalize


class ImageClassifier(nn.Module, ABC):
    """Base of models that map images in [0, 1] to logits.

    Args:
        shape: shape of one image, (channels, height, width).
        classes: number of classes.
        mean, std: mean and standard deviation of the images, per channel.
    """

    one_shape = ""  # why it takes images of that shape only, if it does

    def __init__(self, shape: tuple[int, int, int], classes: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.normalize = normalize_for(shape, classes, mean, std)
        self.shape = tuple(shape)

    def normalized(self, images: Tensor) -> Tensor:
        """Return normalised images; raise for images that the model does not take."""
        x = self.normalize(images)
        if self.one_shape:
            require_shape(images, self.shape, self.one_shape)
        return x


def require_shape(images: Tensor, shape: tuple[int, ...], reason: str) -> None:
    """Raise unless every image has the shape that the model was built for."""
    if tuple(images.shape[1:]) != shape:
        raise ValueError(
            f"images have shape {tuple(images.shape[1:])}; this model was made for {shape}: {reason}. Resize the "
            "images, or make a model for their shape."
        )


def as_rgb(images: Tensor) -> Tensor:
    """Return images, (batch, 1 or 3, height, width), with three channels; that of gray images is repeated."""
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; it must be (batch, 1 or 3, height, width).")
    return images.expand(-1, 3, -1, -1)


def conv_norm_relu(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False, affine: bool = True
) -> nn.Sequential:
    """Return a convolution that keeps the size of an image (times 1 / stride), BatchNorm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, affine=affine), nn.ReLU(inplace=True))


def stem(inputs: int, channels: int, layers: int, downsamplings: int) -> nn.Sequential:
    """Return 3x3 convolutions with BatchNorm and ReLU, of which the first ``downsamplings`` have stride 2."""
    blocks = [
        conv_norm_relu(channels if i else inputs, channels, 3, stride=2 if i < downsamplings else 1)
        for i in range(layers)
    ]
    return nn.Sequential(*(part for block in blocks for part in block))  # flat, as in published checkpoints

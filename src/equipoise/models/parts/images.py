"""The front of an image classifier: checks of what it is built for, normalisation, and the first convolutions."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from equipoise.options import is_number

MEAN, STD = (0.5,), (0.5,)  # the defaults of every model: [0, 1] becomes [-1, 1]


class Normalize(nn.Module):
    """(x - mean) / std for each channel. As a layer of the model, so that a saved model takes images in [0, 1].

    Example:
        >>> Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            listed = hasattr(value, "__len__") and hasattr(value, "__iter__")
            if not listed or not all(isinstance(entry, Real) for entry in value):
                raise TypeError(f"{name} is {value!r}; it must be a tuple of numbers, such as (0.5,).")
        if len(mean) != len(std) or min(std) <= 0:
            given = f"mean is {tuple(mean)} and std is {tuple(std)}"
            raise ValueError(f"{given}; they must have the same length, and every std must be above 0.")
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"images are {x.dtype}; they must be numbers in [0, 1]: images.float() / 255.")
        if torch.promote_types(x.dtype, self.mean.dtype) != self.mean.dtype:
            raise TypeError(f"images are {x.dtype}, and the model is {self.mean.dtype}: images.to({self.mean.dtype}).")
        if x.dim() != 4 or len(self.mean) not in (1, x.shape[1]):
            wanted = f"(batch, {len(self.mean) if len(self.mean) > 1 else 'channels'}, height, width)"
            raise ValueError(f"images have shape {tuple(x.shape)}; it must be {wanted}, even for a single image.")
        return (x - self.mean) / self.std


def require_image_shape(shape: Sequence[int]) -> None:
    """Raise unless ``shape`` is the shape of one image."""
    listed = isinstance(shape, tuple | list) and len(shape) == 3
    if not listed or not all(is_number(n, at_least=1, whole=True) for n in shape):
        raise ValueError(
            f"shape is {shape!r}; it must be the shape of one image, (channels, height, width), such as (3, 32, 32)."
        )


def normalize_for(shape: Sequence[int], classes: int, mean: Sequence[float], std: Sequence[float]) -> Normalize:
    """Check what a classifier is built for and return the layer that normalises its images."""
    require_image_shape(shape)
    if not is_number(classes, at_least=2, whole=True):
        raise ValueError(
            f"classes is {classes!r}; a classifier needs at least 2 (a whole number; does the data set have labels?)."
        )
    normalize = Normalize(mean, std)
    if len(mean) not in (1, shape[0]):
        raise ValueError(f"mean has {len(mean)} entries; it must have 1, or {shape[0]}, one for each channel.")
    return normalize


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

"""From image files to tensors: uint8, (channels, height, width)."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.lab.data.base import Batch, Split, TensorSplit
from equipoise.lab.data.places import Places
from equipoise.lab.data.trees import Tree

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB"}  # PIL's names for grey and colour


@dataclass(frozen=True)
class Decoder:
    """One image and its targets from a sample ``(file, *targets)``.

    Args:
        places: of the data set, for sentences about damaged files.
        tree: where the file is.
        channels: 1 for grey, 3 for colour.
        size: of the square cut from the middle of the image, after its shorter side was resized to this.
    """

    places: Places
    tree: Tree
    channels: int
    size: int

    def __call__(self, sample: tuple[Any, ...]) -> Batch:
        file, *targets = sample
        with self.places.reading(f"{self.tree.path}/{file}"):
            image = pixels(fitted(opened(self.tree.read(file)), self.channels, self.size, self.size))
        return image, *map(torch.tensor, targets)


def opened(data: bytes) -> Image:
    """An image whose header was read, and whose pixels were not yet."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def fitted(image: Image, channels: int, height: int, width: int) -> Image:
    """The largest part in the middle that has these proportions, resized; in grey (1 channel) or colour (3)."""
    from PIL import Image, ImageOps

    mode = MODES[channels]
    image.draft(mode, (width, height))  # a JPEG much larger than asked for is decoded at a fraction of its size
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits: converted as it is, everything above 255 would be white
        image = image.convert("I").point(lambda value: value * (1 / 257))
    image = image.convert(mode)
    scale = min(image.width / width, image.height / height)
    sides = round(scale * width), round(scale * height)
    left, top = ((length - side) // 2 for length, side in zip(image.size, sides, strict=True))
    return image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + sides[0], top + sides[1]))


def pixels(image: Image) -> Tensor:
    """The image as a tensor."""
    width, height = image.size
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, -1).permute(2, 0, 1)


def in_memory(split: Split, at_once: int = 512) -> TensorSplit:
    """The same split, read once and kept."""
    whole = [torch.empty(len(split), *tensor.shape[1:], dtype=tensor.dtype) for tensor in split.read(torch.arange(1))]
    for rows in torch.arange(len(split)).split(at_once):
        for tensor, part in zip(whole, split.read(rows), strict=True):
            tensor[rows] = part
    return TensorSplit(*whole)


def shape_of(split: Split) -> tuple[int, ...]:
    """The shape of one input. Reads it, so that a set that cannot be read is known at once."""
    return tuple(split.read(torch.arange(1))[0].shape[1:])


def statistics(split: Split, at_most: int = 256) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of evenly spaced samples, images scaled to [0, 1]."""
    rows = torch.arange(0, len(split), math.ceil(len(split) / at_most))
    channels = split.read(rows)[0].double().div(255).transpose(0, 1).flatten(1)
    return tuple(channels.mean(1).tolist()), tuple(
        channels.std(1).clamp(min=1 / 255).tolist()
    )  # a channel may be constant


def check_number(name: str, value: Any) -> None:
    """Refuse an option that is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"data.{name} is {value!r}; it must be a whole number of at least 1.")

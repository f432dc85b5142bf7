"""From image files to tensors: uint8, (channels, height, width)."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.lab.data.base import Batch, Split, TensorSplit
from equipoise.lab.data.files.limits import LIMITS, read_file
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.files.trees import Tree
from equipoise.lab.format import printable

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB"}  # PIL's names for grey and colour
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # none of which starts another program, as EPS does
MUCH = 4  # an image whose sides change by more than this factor gets a note


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
    """An image of a plausible size whose header was read, and whose pixels were not yet."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        sides, count = f"{image.width} x {image.height}, ", image.width * image.height
    except Image.UnidentifiedImageError:
        raise ValueError(f"it is not an image that can be read; formats: {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:  # Pillow's own limit, which is higher
        image, sides, count = None, "", int(re.findall(r"\d+", str(error))[0])
    if image is None or count > LIMITS.pixels:
        raise ValueError(f"it is {sides}{count:,} pixels; at most {LIMITS.pixels:,} are read: make it smaller")
    return image


@contextmanager
def reading_image(path: Path) -> Iterator[None]:
    """Say what is wrong with an image file of the user's own in one sentence that names it."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is too large gets a sentence
            yield
    except FileNotFoundError:
        raise ValueError(f"there is no file {printable(path)}.") from None
    except Exception as error:  # image libraries raise many kinds for a damaged file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
        raise ValueError(f"{printable(path)} cannot be read: {reason}.") from error


def read_image_file(
    path: Path,
    channels: int,
    size: tuple[int, int] | None = None,
    check: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, str]:
    """Read an image file within the limits as uint8 (channels, height, width), turned as its EXIF orientation says.

    Args:
        path: image file; every error names it.
        channels: 1 for gray, 3 for color.
        size: height and width to crop (in the middle) and resize to; None keeps those of the image.
        check: called with the upright height and width before the pixels are decoded; raises ValueError to reject them.

    Returns:
        The image, and a note if it was resized by more than a factor of four (otherwise empty).
    """
    with reading_image(path):
        image = opened(read_file(path, LIMITS.image_file))
        before = upright_size(image)
        width, height = before if size is None else (size[1], size[0])
        if check is not None:
            check(before[1], before[0])
        pixel_values = pixels(fitted(image, channels, height, width))
    factor = min(before[0] / width, before[1] / height)
    if 1 / MUCH <= factor <= MUCH:
        return pixel_values, ""
    how = "shrunk" if factor > 1 else "enlarged"
    sizes = f"{before[0]} x {before[1]} to {width} x {height}"
    return (
        pixel_values,
        f"{printable(path)} was {how} from {sizes}, the size of the images that the run was trained on.",
    )


def fitted(image: Image, channels: int, height: int, width: int) -> Image:
    """The largest part in the middle that has these proportions, resized; in grey (1 channel) or colour (3)."""
    from PIL import Image, ImageOps

    mode = MODES[channels]
    image.draft(mode, (width, height))  # a JPEG much larger than asked for is decoded at a fraction of its size
    image = ImageOps.exif_transpose(image)
    image = bytes_of(image).convert(mode)
    scale = min(image.width / width, image.height / height)
    sides = round(scale * width), round(scale * height)
    left, top = ((length - side) // 2 for length, side in zip(image.size, sides, strict=True))
    return image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + sides[0], top + sides[1]))


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height of an image once it stands as its EXIF orientation says, without decoding it."""
    return (image.height, image.width) if image.getexif().get(274, 1) >= 5 else image.size


def bytes_of(image: Image) -> Image:
    """The image with whole numbers up to 255, to which Pillow would clip everything larger.

    Pixels of 16 bits are divided by 257. Floating-point pixels are levels between 0 and 1 if none is above 1, else
    levels between 0 and 255.
    """
    import numpy
    from PIL import Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    levels = numpy.asarray(image)
    if not numpy.isfinite(levels).all():
        raise ValueError("it has pixels that are not numbers (NaN or infinity)")
    low, high, most = float(levels.min()), float(levels.max()), 255 if image.mode == "F" else 65535
    if low < 0 or high > most:
        raise ValueError(f"its pixels go from {low:g} to {high:g}; they must lie between 0 and {most}")
    scale = 1 / 257 if most == 65535 else 255 if high <= 1 else 1
    return Image.fromarray(numpy.rint(levels * scale).astype(numpy.uint8))


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

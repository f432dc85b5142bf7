"""Image files as tensors: uint8, (channels, height, width)."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.lab.data.base import Batch
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.files.trees import Tree
from equipoise.lab.files import LIMITS, read_file
from equipoise.lab.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB"}  # PIL's names for grey and colour
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # none of which starts another program, as EPS does
TAKEN_AS_WHITE = "has transparent pixels, which were taken as white"
MUCH = 4  # an image whose sides change by more than this factor gets a note


@dataclass(frozen=True)
class Decoder:
    """Decode a sample ``(file, *targets)``: an image and its targets.

    Args:
        places: places of the data set, for errors about damaged files.
        tree: tree that the file is in.
        channels: 1 for grey, 3 for colour.
        size: side of the square that is cut from the middle of the image and resized.
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


def read_image_file(
    path: Path,
    channels: int,
    size: tuple[int, int] | None = None,
    check: Callable[[int, int], None] | None = None,
    note_above: float = MUCH,
) -> tuple[Tensor, str]:
    """Read an image file within the limits as uint8 (channels, height, width), turned as its EXIF orientation says.

    Args:
        path: image file; every error names it.
        channels: 1 for grey, 3 for colour.
        size: height and width to crop (in the middle) and resize to; None keeps those of the image.
        check: called with the upright height and width before the pixels are decoded; raises ValueError to reject them.
        note_above: factor above which resizing is worth a note; 1 for any change of the size.

    Returns:
        The image, and a note if it was resized by more than ``note_above`` or has transparent pixels (otherwise empty).
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is too large gets an error
            image = opened(read_file(path, LIMITS.image_file))
            before = image.size if image.getexif().get(274, 1) >= 5 else image.size[::-1]  # 5 to 8: a quarter turn
            if check is not None:
                check(*before)
            height, width = size or before
            tensor = pixels(fitted(image, channels, height, width))
            white = f"{printable(path)} {TAKEN_AS_WHITE}." if is_transparent(image) else ""
    except FileNotFoundError:
        raise ValueError(f"there is no file {printable(path)}.") from None
    except Exception as error:  # image libraries raise many kinds for a damaged file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
        raise ValueError(f"{printable(path)} cannot be read: {reason}.") from error
    factor = min(before[0] / height, before[1] / width)
    if 1 / note_above <= factor <= note_above and (note_above > 1 or before == (height, width)):
        return tensor, white
    change = "shrunk" if factor > 1 else "enlarged" if factor < 1 else "cropped"
    cropped = "cropped in the middle and " if factor != 1 and before[0] * width != before[1] * height else ""
    how = f"{cropped}{change} from {before[1]} x {before[0]} to {width} x {height}"
    resized = f"{printable(path)} was {how}, the size of the images that the run was trained on."
    return tensor, f"{resized} {white}".rstrip()


def opened(data: bytes) -> Image:
    """Return an image of a plausible size whose header was read, and whose pixels were not yet."""
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


def fitted(image: Image, channels: int, height: int, width: int) -> Image:
    """Return the largest middle part with these proportions, resized, opaque, in grey (1 channel) or colour (3)."""
    from PIL import Image, ImageOps

    mode = MODES[channels]
    image.draft(mode, (width, height))  # a JPEG much larger than asked for is decoded at a fraction of its size
    image = opaque(in_bytes(ImageOps.exif_transpose(image))).convert(mode)
    scale = min(image.width / width, image.height / height)
    sides = round(scale * width), round(scale * height)
    left, top = ((length - side) // 2 for length, side in zip(image.size, sides, strict=True))
    return image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + sides[0], top + sides[1]))


def is_transparent(image: Image) -> bool:
    """Return whether an image has a pixel that is not opaque."""
    if image.mode == "F" or image.mode.startswith("I") or not image.has_transparency_data:
        return False
    return image.convert("RGBA").getextrema()[3][0] < 255  # type: ignore[index,operator]


def opaque(image: Image) -> Image:
    """Return the image on white where it is transparent, as viewers show it; the colours beneath are arbitrary."""
    from PIL import Image

    if not is_transparent(image):
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def in_bytes(image: Image) -> Image:
    """Return the image with levels up to 255, to which Pillow would clip larger ones.

    Pixels of 16 bits are divided by 257. Floating-point pixels are levels between 0 and 1 if none is above 1, else
    levels between 0 and 255.
    """
    import numpy
    from PIL import Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    levels = numpy.asarray(image)
    if not numpy.isfinite(levels).all():
        raise ValueError("it has pixels that are NaN or infinite")
    low, high, most = float(levels.min()), float(levels.max()), 255 if image.mode == "F" else 65535
    if low < 0 or high > most:
        raise ValueError(f"its pixels range from {low:g} to {high:g}; they must lie between 0 and {most}")
    scale = 1 / 257 if most == 65535 else 255 if high <= 1 else 1
    return Image.fromarray(numpy.rint(levels * scale).astype(numpy.uint8))


def pixels(image: Image) -> Tensor:
    """Return the pixels of an image as a tensor."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1)

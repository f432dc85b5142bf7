"""Images between the browser and the models: uploaded files are decoded within limits, pixels travel as base64.

An image of the page is a table {"width", "height", "channels", "data"}, with rows of bytes in ``data``. Nothing is
written to disk.
"""

from __future__ import annotations

import base64
import binascii
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.files.images import TAKEN_AS_WHITE, fitted, is_transparent, opened, pixels
from equipoise.options import is_number
from equipoise.page.limits import LIMITS, Limits
from equipoise.page.refused import Refused

ONE_AT_A_TIME = threading.Lock()  # decoded images are large, and threads share the filters of warnings


def decoded(data: bytes, shape: Sequence[int | None], limits: Limits = LIMITS) -> tuple[Tensor, str]:
    """Decode an uploaded file to uint8 (channels, height, width); return it with a note on what was changed.

    Args:
        data: content of the file.
        shape: channels, height and width; None for the image's own, shrunk to at most ``limits.pixels``.
    """
    channels, height, width = shape
    assert channels is not None
    try:
        with ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged and of large files, which get an error
            image = opened(data)
            turned = image.getexif().get(274, 1) >= 5  # a quarter turn
            size = (image.width, image.height) if turned else (image.height, image.width)
            if size[0] * size[1] > limits.upload_pixels:
                raise ValueError(
                    f"it is {size[1]} x {size[0]}; at most {limits.upload_pixels / 1e6:g} million pixels are read: "
                    "make it smaller"
                )
            if height is None or width is None:
                height, width = shrunk(*size, limits.pixels)
            tensor, transparent = pixels(fitted(image, channels, height, width)), is_transparent(image)
    except Exception as error:  # image libraries raise many kinds for a damaged file
        reason = str(error).rstrip(".") or type(error).__name__
        raise Refused(f"The file cannot be read: {reason}.", "upload") from error
    whole = None in shape or size[0] * width == size[1] * height
    how = "resized" if whole else "cropped in the middle and resized"
    note = "" if size == (height, width) else f"{size[1]} x {size[0]} pixels, {how} to {width} x {height}."
    return tensor, f"{note} It {TAKEN_AS_WHITE}.".lstrip() if transparent else note


def shrunk(height: int, width: int, most: int) -> tuple[int, int]:
    """Return the sides of an image, scaled down to at most that number of pixels."""
    scale = min(1.0, (most / (height * width)) ** 0.5)
    return max(1, int(scale * height)), max(1, min(int(scale * width), most))


def table(image: Tensor) -> dict[str, Any]:
    """Return an image, uint8 (channels, height, width), as the page takes it."""
    channels, height, width = image.shape
    rows = image.permute(1, 2, 0).contiguous().cpu()
    return {"width": width, "height": height, "channels": channels, "data": encoded(rows)}


def encoded(values: Tensor) -> str:
    """Return the bytes of a uint8 tensor as base64."""
    return base64.b64encode(values.contiguous().cpu().numpy().tobytes()).decode()


def in_bytes(image: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return an image with values between ``low`` and ``high`` as bytes."""
    return ((image.detach().float().cpu() - low) * (255 / (high - low))).round().clamp(0, 255).to(torch.uint8)


def from_table(value: object, shape: Sequence[int | None], control: str, limits: Limits = LIMITS) -> Tensor:
    """Return an image that the page sent as uint8 (channels, height, width), or raise Refused.

    Args:
        value: table of the image.
        shape: channels, height and width; None where any is allowed.
        control: name of the field.
    """
    names = ("channels", "height", "width")
    if not isinstance(value, dict) or set(value) != {*names, "data"} or not isinstance(value["data"], str):
        raise Refused(f"{control} must be an image: width, height, channels and data.", control)
    sizes = [value[name] for name in names]
    if not all(is_number(n, at_least=1, at_most=limits.pixels, whole=True) for n in sizes):
        message = f"{control}: width, height and channels must be whole numbers from 1 to {limits.pixels:,}."
        raise Refused(message, control)
    if any(wanted not in (None, given) for wanted, given in zip(shape, sizes, strict=True)):
        words = " x ".join("any" if n is None else str(n) for n in shape)
        raise Refused(f"{control} is {' x '.join(map(str, sizes))} (channels x height x width), not {words}.", control)
    channels, height, width = sizes
    if height * width > limits.pixels:
        raise Refused(f"{control} has {height * width:,} pixels; at most {limits.pixels:,} are allowed.", control)
    try:
        data = base64.b64decode(value["data"], validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"{control}: data must be base64.", control) from None
    if len(data) != channels * height * width:
        raise Refused(f"{control} has {len(data)} bytes of pixels, not {channels * height * width}.", control)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(height, width, channels).permute(2, 0, 1)

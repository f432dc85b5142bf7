"""MATLAB files (version 5), read by scipy after they were inflated within limits."""

from __future__ import annotations

import io
import math
import zlib
from pathlib import Path
from typing import Any

from equipoise.lab.data.files.limits import LIMITS, read_file

HEADER = 128  # bytes before the first element, the last two of which give the byte order
COMPRESSED = 15  # the type of an element that holds another one, deflated
NUMERIC = {"double", "single", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def read_arrays(path: Path, *names: str) -> dict[str, Any]:
    """Return the numeric arrays with these names.

    scipy allocates what a header claims. It is given the file in memory, inflated, so that it cannot get more bytes
    than are there, and the headers are compared with that first.
    """
    from scipy.io import loadmat, whosmat

    content = inflated(read_file(path, LIMITS.memory), LIMITS.in_memory(path))
    for name, shape, kind in whosmat(io.BytesIO(content)):
        if name in names and kind not in NUMERIC:
            raise ValueError(f"its variable {name!r} is a {kind}, not an array of numbers")
        if name in names and math.prod(shape) > len(content):
            raise ValueError(f"its variable {name!r} claims the shape {tuple(shape)}, more than the file holds")
    return loadmat(io.BytesIO(content), variable_names=list(names))


def inflated(data: bytes, most: int) -> bytes:
    """Return the same file with every element uncompressed, of at most ``most`` bytes."""
    if data[126:128] not in (b"IM", b"MI"):
        return data  # of another version, which is not compressed as a whole
    order = "little" if data[126:128] == b"IM" else "big"
    parts, size, place = [data[:HEADER]], HEADER, HEADER
    while place + 8 <= len(data):
        kind, length = (int.from_bytes(data[place + i : place + i + 4], order) for i in (0, 4))
        element = data[place : place + 8 + length]
        if kind == COMPRESSED:
            inflater = zlib.decompressobj()
            element = inflater.decompress(element[8:], max(1, most - size))
            if inflater.unconsumed_tail:
                raise ValueError(f"it inflates to more than {most:,} bytes; a file of {len(data):,} bytes may not")
        parts.append(element)
        size, place = size + len(element), place + 8 + length
    return b"".join(parts)

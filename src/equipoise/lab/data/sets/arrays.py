"""Data sets that are arrays in a file or two, held in memory: scikit-learn's digits, SVHN (MATLAB files)."""

import io
import math
import zlib
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.data.base import DIGITS, DataSet, Labelled, checked, classified
from equipoise.lab.data.files.places import Places
from equipoise.lab.files import LIMITS, read_file

HEADER = 128  # bytes of a MATLAB file before its first element, the last two of which give the byte order
COMPRESSED = 15  # the type of an element that holds another one, deflated
NUMERIC = {"double", "single", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def digits(places: Places) -> DataSet:
    """Return scikit-learn's 8x8 digits, levels of grey stretched from 0..16 to 0..255, 360 images held out as test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    parts = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
    train, test = ([(images[rows], labels[rows])] for rows in parts)
    scaled = train[0][0].double() / 255
    return classified(places, train, test, DIGITS, mean=(scaled.mean().item(),), std=(scaled.std().item(),))


def svhn(places: Places) -> DataSet:
    """Return house numbers cut to single digits, 32x32 colour."""

    def part(name: str) -> Labelled:
        path = places.file(name)
        with places.reading(path):
            arrays = read_arrays(path, "X", "y")
            images = torch.from_numpy(arrays["X"]).permute(3, 2, 0, 1)  # from height, width, channels, sample
            labels = torch.from_numpy(arrays["y"]).flatten().long()
        return checked(places, path, images, labels % 10, DIGITS)  # 10 stands for the digit 0

    train, test = [part("train_32x32.mat")], [part("test_32x32.mat")]
    return classified(places, train, test, DIGITS, mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970))


def read_arrays(path: Path, *names: str) -> dict[str, Any]:
    """Return the numeric arrays with these names in a MATLAB file (version 5), read by scipy.

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

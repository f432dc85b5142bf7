"""MNIST and data sets in its format: IDX files, gzipped or not."""

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.base import DIGITS, DataSet, checked, classified
from equipoise.lab.data.files.places import Places
from equipoise.lab.files import LIMITS, read_exactly

GARMENTS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def mnist(places: Places, size: int | None = None) -> DataSet:
    """Return MNIST: handwritten digits, 28x28 greyscale.

    Args:
        size: side to which images are shrunk; None for 28.
    """
    return idx_data(places, DIGITS, mean=0.1307, std=0.3081, size=size)


def fashion_mnist(places: Places, size: int | None = None) -> DataSet:
    """Return Fashion-MNIST: garments, 28x28 greyscale.

    Args:
        size: side to which images are shrunk; None for 28.
    """
    return idx_data(places, GARMENTS, mean=0.2860, std=0.3530, size=size)


def idx_data(places: Places, class_names: tuple[str, ...], mean: float, std: float, size: int | None = None) -> DataSet:
    """Return a data set whose files are named like those of MNIST."""

    def part(name: str) -> tuple[Tensor, Tensor]:
        path, images = read_idx(places, f"{name}-images-idx3-ubyte", dimensions=3)
        _, labels = read_idx(places, f"{name}-labels-idx1-ubyte", dimensions=1)
        return checked(places, path, images.unsqueeze(1), labels, class_names)

    return classified(places, [part("train")], [part("t10k")], class_names, mean=(mean,), std=(std,), size=size)


def read_idx(places: Places, name: str, dimensions: int) -> tuple[Path, Tensor]:
    """Return a file and the array in it: 0, 0, 8 (for bytes), the number of dimensions, the dimensions, the bytes."""
    path = places.file(f"{name}.gz", name)
    with places.reading(path):
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as file:
            start = file.read(4 + 4 * dimensions)
            if start[:4] != bytes((0, 0, 8, dimensions)) or len(start) < 4 + 4 * dimensions:
                raise ValueError(f"it begins with the bytes {start[:4].hex(' ')}, not with 00 00 08 {dimensions:02x}")
            shape = struct.unpack(f">{dimensions}I", start[4:])
            size, most = math.prod(shape), LIMITS.in_memory(path) if compressed else LIMITS.memory
            if size > most:
                raise ValueError(f"its header declares {size:,} bytes; at most {most:,} are read from such a file")
            return path, torch.frombuffer(read_exactly(file, size), dtype=torch.uint8).view(shape)

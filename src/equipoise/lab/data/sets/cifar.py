"""CIFAR-10 and CIFAR-100: files of binary records, or pickles of Python 2."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.base import DataSet, checked, classified
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.sets import pickles
from equipoise.lab.files import LIMITS, read_file

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(places: Places, size: int | None = None) -> DataSet:
    """Return small photographs of ten things, 32x32 colour; the binary version or the Python one.

    Args:
        size: side to which images are shrunk; None for 32.
    """

    def batch(name: str) -> tuple[Tensor, Tensor]:
        path = places.file(f"cifar-10-batches-bin/{name}.bin", f"{name}.bin", f"cifar-10-batches-py/{name}", name)
        images, labels = read_images(places, path, ["labels"])
        return checked(places, path, images, labels["labels"], CIFAR10)

    train, test = [batch(f"data_batch_{number}") for number in range(1, 6)], [batch("test_batch")]
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return classified(places, train, test, CIFAR10, mean, std, size)


def cifar100(places: Places, labels: str = "fine", size: int | None = None) -> DataSet:
    """Return small photographs of a hundred things, 32x32 colour; the Python version or the binary one.

    Args:
        labels: "fine" for the 100 classes, "coarse" for the 20 groups of them.
        size: side to which images are shrunk; None for 32.
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(f"data.labels is {labels!r}; it must be 'fine' (100 classes) or 'coarse' (20 groups of them).")
    listed = f"{labels}_label_names.txt"
    path = places.file("cifar-100-python/meta", "meta", f"cifar-100-binary/{listed}", listed)
    with places.reading(path):
        names = read_file(path, LIMITS.small).split() if path.suffix else read_table(path)[f"{labels}_label_names"]
        class_names = tuple(name.decode() for name in names)

    def part(name: str) -> tuple[Tensor, Tensor]:
        path = places.file(f"cifar-100-python/{name}", name, f"cifar-100-binary/{name}.bin", f"{name}.bin")
        images, columns = read_images(places, path, ["coarse_labels", "fine_labels"])
        return checked(places, path, images, columns[f"{labels}_labels"], class_names)

    train, test = [part("train")], [part("test")]
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return classified(places, train, test, class_names, mean, std, size)


def read_images(places: Places, path: Path, columns: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the images and the columns of labels in a pickle, or in a binary file if its name has a suffix."""
    with places.reading(path):
        if not path.suffix:
            table = read_table(path)
            labels = {name: whole_numbers(table, name) for name in columns if name in table}
            return torch.from_numpy(table["data"]).unflatten(1, (3, 32, 32)), labels
        data = torch.frombuffer(bytearray(read_file(path, LIMITS.memory)), dtype=torch.uint8)
        length = len(columns) + 3072  # a byte for each column, then 1024 each for red, green and blue
        if len(data) % length:
            raise ValueError(f"it has {len(data)} bytes, which is not a multiple of {length}, the size of a record")
        records = data.view(-1, length)
        labels = {name: records[:, position] for position, name in enumerate(columns)}
        return records[:, len(columns) :].unflatten(1, (3, 32, 32)), labels


def whole_numbers(table: dict[str, Any], name: str) -> Tensor:
    """Return a flat list of whole numbers; nested lists may share parts, and would grow without bound when copied."""
    if not isinstance(table[name], list) or not all(isinstance(entry, int) for entry in table[name]):
        raise ValueError(f"its entry {name!r} is not a list of whole numbers")
    return torch.tensor(table[name])


def read_table(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle, whose keys are bytes if Python 2 wrote it."""
    table = pickles.load(read_file(path, LIMITS.memory))
    if not isinstance(table, dict):
        raise ValueError(f"it is a pickle of a {type(table).__name__}, not of a dictionary")
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in table.items()}

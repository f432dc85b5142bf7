"""CIFAR-10 and CIFAR-100: files of binary records, or pickles of Python 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.base import DataSet
from equipoise.lab.data.files.limits import LIMITS, read_file
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.sets import pickles
from equipoise.lab.data.sets.arrays import checked, classified

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(places: Places) -> DataSet:
    """Small photographs of ten things, 32x32 colour; the binary version or the Python one."""

    def batch(name: str) -> tuple[Tensor, Tensor]:
        path = places.file(f"cifar-10-batches-bin/{name}.bin", f"{name}.bin", f"cifar-10-batches-py/{name}", name)
        images, labels = records(places, path, ["labels"]) if path.suffix else pickled(places, path)
        return checked(places, path, images, labels["labels"], CIFAR10)

    train, test = [batch(f"data_batch_{number}") for number in range(1, 6)], [batch("test_batch")]
    return classified(places, train, test, CIFAR10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def cifar100(places: Places, labels: str = "fine") -> DataSet:
    """Small photographs of a hundred things, 32x32 colour; the Python version or the binary one.

    Args:
        places: where its files are.
        labels: "fine" for the 100 classes, "coarse" for the 20 groups of them.
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(f"data.labels is {labels!r}; it must be 'fine' (100 classes) or 'coarse' (20 groups of them).")
    class_names = cifar100_names(places, labels)

    def part(name: str) -> tuple[Tensor, Tensor]:
        path = places.file(f"cifar-100-python/{name}", name, f"cifar-100-binary/{name}.bin", f"{name}.bin")
        columns = ["coarse_labels", "fine_labels"]
        images, found = records(places, path, columns) if path.suffix else pickled(places, path)
        return checked(places, path, images, found[f"{labels}_labels"], class_names)

    train, test = [part("train")], [part("test")]
    return classified(places, train, test, class_names, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))


def cifar100_names(places: Places, labels: str) -> tuple[str, ...]:
    """The names of the classes, which come with the images."""
    listed = f"{labels}_label_names.txt"
    path = places.file("cifar-100-python/meta", "meta", f"cifar-100-binary/{listed}", listed)
    with places.reading(path):
        names = read_file(path, LIMITS.small).split() if path.suffix else dictionary(path)[f"{labels}_label_names"]
        return tuple(name.decode() for name in names)


def records(places: Places, path: Path, columns: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Images and columns of labels of a binary file: a byte for each column, then 1024 each for red, green and blue."""
    import numpy

    with places.reading(path):
        data = torch.from_numpy(numpy.frombuffer(bytearray(read_file(path, LIMITS.memory)), numpy.uint8))
        length = len(columns) + 3072
        if len(data) % length:
            raise ValueError(f"it has {len(data)} bytes, which is not a number of records of {length} bytes")
        table = data.view(-1, length)
    images = table[:, len(columns) :].unflatten(1, (3, 32, 32))
    return images, {name: table[:, position] for position, name in enumerate(columns)}


def pickled(places: Places, path: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Images and columns of labels of a pickle."""
    with places.reading(path):
        content = dictionary(path)
        images = torch.from_numpy(content["data"]).unflatten(1, (3, 32, 32))
        return images, {name: whole_numbers(content, name) for name in content if name.endswith("labels")}


def whole_numbers(content: dict[str, Any], name: str) -> Tensor:
    """A flat list of whole numbers: lists in lists may name each other, and grow without end when they are copied."""
    if not isinstance(content[name], list) or not all(isinstance(entry, int) for entry in content[name]):
        raise ValueError(f"its entry {name!r} is not a list of whole numbers")
    return torch.tensor(content[name])


def dictionary(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle; its keys are bytes if Python 2 wrote it."""
    content = pickles.load(read_file(path, LIMITS.memory))
    if not isinstance(content, dict):
        raise ValueError(f"it is a pickle of a {type(content).__name__}, not of a dictionary")
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}

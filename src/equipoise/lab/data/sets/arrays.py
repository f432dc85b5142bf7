"""Data sets that are arrays in a file or two, held in memory: scikit-learn's digits, SVHN."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.base import DataSet, TensorSplit
from equipoise.lab.data.catalogue import differs
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.sets.matfiles import read_arrays

DIGITS = tuple("0123456789")
Labelled = tuple[Tensor, Tensor]  # images and labels


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


def checked(places: Places, path: Path, images: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> Labelled:
    """Return the images and labels of a file, after checking that they fit each other."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise places.damaged(path, f"its images are {images.dtype} of shape {tuple(images.shape)}")
    if not len(images) or len(images) != len(labels):
        raise places.damaged(path, f"it has {len(images)} images, and there are {len(labels)} labels")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(class_names):
        raise places.damaged(path, f"its labels range from {low} to {high}, and there are {len(class_names)} classes")
    return images, labels.long()


def classified(
    places: Places,
    train_files: list[Labelled],
    test_files: list[Labelled],
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> DataSet:
    """Return a data set of the images and labels of some files, with a note if it does not have the official size."""
    train, test = (TensorSplit(*map(torch.cat, zip(*files, strict=True))) for files in (train_files, test_files))
    shape, note = tuple(train.tensors[0].shape[1:]), differs(places.name, len(train), len(test))
    return DataSet(places.name, train, test, shape, class_names=class_names, mean=mean, std=std, note=note)

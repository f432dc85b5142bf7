"""Images with labels, held in memory: checked, and made into a data set."""

from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.base import DataSet, TensorSplit
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.data.files.places import Places

DIGITS = tuple("0123456789")
Labelled = tuple[Tensor, Tensor]  # images and labels


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


def differs(name: str, train: int, test: int) -> str:
    """Describe sizes that are not the official ones ("949 of the official 73257 training images"), or return ""."""
    about = ABOUT.get(name, ABOUT["image-folder"])
    return ", ".join(
        f"{count} {'of' if count < official else 'instead of'} the official {official} {kind} images"
        for kind, count, official in (("training", train, about.train), ("test", test, about.test))
        if official is not None and count != official
    )

"""Data sets: loaded by name, and made of splits, which are read in batches of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.data.files.places import Places
from equipoise.options import is_number
from equipoise.registry import MissingPackage, Registry, call
from equipoise.tasks.base import Batch

FACTS = ("shape", "classes", "class_names", "mean", "std")  # properties that models and tasks can take as parameters
DIGITS = tuple("0123456789")


class Split(ABC):
    """Samples in a fixed order, read as whole batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Tensor) -> Batch:
        """Return the samples with these indices; images are uint8 (batch, channels, height, width)."""

    def in_epoch(self, epoch: int) -> Split:
        """Return the split to train on in this epoch (0, 1, ...): the same one, unless samples are drawn anew."""
        return self


class TensorSplit(Split):
    """A split in memory: one tensor of inputs and any number of tensors of targets, with one row per sample."""

    def __init__(self, *tensors: Tensor):
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"the tensors of a split must have the same number of rows, got {[*map(len, tensors)]}.")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, rows: Tensor) -> Batch:
        return tuple(tensor[rows] for tensor in self.tensors)


class FileSplit(Split):
    """A split read from files on demand, on several threads (image libraries release the GIL).

    Args:
        samples: arguments of ``decode``, one per sample.
        decode: function that returns the tensors of one sample; their shapes must not differ between samples.
        threads: number of samples decoded at the same time.
    """

    def __init__(self, samples: Sequence[Any], decode: Callable[[Any], Batch], threads: int = 4):
        self.samples, self.decode, self.threads = samples, decode, threads
        self.pool: ThreadPoolExecutor | None = None  # made at first use

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pool": None}  # threads cannot be pickled

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, rows: Tensor) -> Batch:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        decoded = self.pool.map(self.decode, [self.samples[row] for row in rows.tolist()])
        columns = list(zip(*decoded, strict=True))
        for tensors in columns:
            if len(shapes := {tuple(tensor.shape) for tensor in tensors}) > 1:
                raise ValueError(f"decode must return the same shapes for all samples, got {sorted(shapes)}.")
        return tuple(torch.stack(tensors) for tensors in columns)


class Subset(Split):
    """The samples of a split with the indices ``rows``."""

    def __init__(self, split: Split, rows: Tensor):
        self.split, self.rows = split, rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Tensor) -> Batch:
        return self.split.read(self.rows[rows])

    def in_epoch(self, epoch: int) -> Split:
        return Subset(self.split.in_epoch(epoch), self.rows)


def spread(split: Split, samples: int) -> Split:
    """Return ``samples`` samples evenly spaced over a split, whose first ones may all be of one class."""
    return Subset(split, torch.linspace(0, len(split) - 1, min(samples, len(split))).round().long())


def batches(split: Split, rows: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
    """Yield the batches with these rows, on the device; each is read while the one before it is in use."""
    pinned = device.type == "cuda"

    def read(wanted: Tensor) -> Batch:
        batch = split.read(wanted)
        return tuple(tensor.pin_memory() for tensor in batch) if pinned else batch

    def placed(batch: Batch) -> Batch:
        return tuple(tensor.to(device, non_blocking=pinned) for tensor in batch)

    with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
        ahead: Future[Batch] | None = None
        try:
            for wanted in rows:
                previous, ahead = ahead, reader.submit(read, wanted)
                if previous is not None:
                    yield placed(previous.result())
            if ahead is not None:
                yield placed(ahead.result())
        finally:
            if ahead is not None:
                ahead.cancel()


@dataclass(frozen=True)
class DataSet:
    """A data set: training, validation and test splits, and their properties.

    Args:
        name: name of the data set.
        train, test: training and test split.
        shape: shape of one input, (channels, height, width) for images.
        val: validation split, if one is published; otherwise it is held out from ``train``.
        class_names: names of the classes, indexed by label; empty if there are no classes.
        mean, std: mean and standard deviation of the training inputs per channel, with images scaled to [0, 1].
        note: remark for the user, such as that the files are not the official ones.
    """

    name: str
    train: Split
    test: Split
    shape: tuple[int, ...]
    val: Split | None = None
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    note: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the properties that models and tasks receive if they have parameters of these names."""
        values = (self.shape, len(self.class_names), self.class_names, self.mean, self.std)
        return dict(zip(FACTS, values, strict=True))

    def with_validation(self, share: float) -> DataSet:
        """Return the same data set with a validation split; one held out from ``train`` is always the same.

        Args:
            share: fraction (below 1) or number of training samples to hold out; 0 for no validation split. A
                published validation split is kept unless the share is 0.
        """
        if share == 0:
            return replace(self, val=None)
        if self.val is not None:
            return self
        count = round(share * len(self.train)) if share < 1 else int(share)
        if not 0 < count < len(self.train):
            raise ValueError(
                f"data.validation is {share:g}, which holds out {count} of the {len(self.train)} training samples of "
                f"{self.name}; at least one must be held out and one left to train on."
            )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        held, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=Subset(self.train, kept), val=Subset(self.train, held))


DATA_SETS = Registry(
    "data set",
    {
        "digits": "equipoise.lab.data.sets.arrays:digits",
        "mnist": "equipoise.lab.data.sets.idx:mnist",
        "fashion-mnist": "equipoise.lab.data.sets.idx:fashion_mnist",
        "cifar10": "equipoise.lab.data.sets.cifar:cifar10",
        "cifar100": "equipoise.lab.data.sets.cifar:cifar100",
        "svhn": "equipoise.lab.data.sets.arrays:svhn",
        "omniglot": "equipoise.lab.data.sets.folders:omniglot",
        "omniglot-episodes": "equipoise.lab.data.sets.episodes:omniglot_episodes",
        "celeba": "equipoise.lab.data.sets.folders:celeba",
        "imagenette": "equipoise.lab.data.sets.folders:imagenette",
        "imagenet": "equipoise.lab.data.sets.folders:imagenet",
        "image-folder": "equipoise.lab.data.sets.folders:image_folder",
        "unlabelled-images": "equipoise.lab.data.sets.folders:unlabelled_images",
        "camvid": "equipoise.lab.data.sets.scenes:camvid",
        "cityscapes": "equipoise.lab.data.sets.scenes:cityscapes",
    },
    DataSet,
    functions=True,
)


def load(name: str, *, folders: Sequence[str | Path] = (), validation: float = 0.1, **options: Any) -> DataSet:
    """Load a data set with a validation split.

    Args:
        name: name in ``DATA_SETS``, or ``"my_module:my_data"``: a function that returns a DataSet, and is called with
            a ``Places`` if it has a parameter ``places``.
        folders: folders to look for its files in first; see :func:`search_path`.
        validation: fraction (below 1) or number of training samples to hold out; 0 for no validation split.
        **options: options of the data set.

    Example:
        >>> load("cifar100", labels="coarse").shape
        (3, 32, 32)
    """
    reader = DATA_SETS[name]
    try:
        data = call(reader, options, {"places": Places(name, folders)}, f"data set {name!r}")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"data set {name!r} needs the package {error.name!r}, which is missing: pip install 'equipoise[lab]'.",
            name=error.name,
        ) from error
    if not isinstance(data, DataSet):
        raise ValueError(f"data set {name!r} must return an equipoise.lab.data.DataSet, got {data!r}.")
    return data.with_validation(validation)


# Images with labels, held in memory

Labelled = tuple[Tensor, Tensor]


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
    size: int | None = None,
) -> DataSet:
    """Return a data set of the images and labels of some files, with a note if it does not have the official size.

    With a ``size``, images are shrunk to its square, and the mean and standard deviation are those of the results.
    """
    train, test = (TensorSplit(*map(torch.cat, zip(*files, strict=True))) for files in (train_files, test_files))
    if size is not None and size != train.tensors[0].shape[-1]:
        check_size(size, train.tensors[0].shape[-1])
        train, test = (TensorSplit(shrunk(split.tensors[0], size), *split.tensors[1:]) for split in (train, test))
        mean, std = statistics_of(train.tensors[0])
    shape, note = tuple(train.tensors[0].shape[1:]), differs(places.name, len(train), len(test))
    return DataSet(places.name, train, test, shape, class_names=class_names, mean=mean, std=std, note=note)


SMALLEST, CHUNK = 4, 10_000  # side of a shrunk image; number of images that are shrunk together


def check_size(size: Any, side: int) -> None:
    """Raise unless images with this side can be shrunk to the size."""
    if not is_number(size, at_least=SMALLEST, at_most=side, whole=True):
        raise ValueError(f"data.size is {size!r}; it must be a whole number from {SMALLEST} to {side}, such as 14.")


def shrunk(images: Tensor, size: int) -> Tensor:
    """Return uint8 images as squares with this side, by bilinear interpolation with antialiasing."""
    parts = (
        interpolate(part.float(), (size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(CHUNK)
    )
    return torch.cat([*parts])


def statistics_of(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of uint8 images per channel, scaled to [0, 1], to four digits."""
    channels = images.transpose(0, 1).flatten(1).double() / 255
    mean, std = (tuple(round(value, 4) for value in row.tolist()) for row in (channels.mean(1), channels.std(1)))
    return mean, tuple(max(value, 1e-4) for value in std)


def differs(name: str, train: int, test: int) -> str:
    """Describe sizes that are not the official ones ("949 of the official 73257 training images"), or return ""."""
    about = ABOUT.get(name, ABOUT["image-folder"])
    return ", ".join(
        f"{count} {'of' if count < official else 'instead of'} the official {official} {kind} images"
        for kind, count, official in (("training", train, about.train), ("test", test, about.test))
        if official is not None and count != official
    )

"""Base classes of data sets: splits that return whole batches as tensors, and their properties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.tasks.base import Batch

FACTS = ("shape", "classes", "class_names", "mean", "std")  # properties that models and tasks can take as parameters


class Split(ABC):
    """Samples in a fixed order, read as whole batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Tensor) -> Batch:
        """Return the samples with these indices; images are uint8 (batch, channels, height, width)."""


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


def spread(split: Split, samples: int) -> Split:
    """Return ``samples`` samples evenly spaced over a split, whose first ones may all be of one class."""
    return Subset(split, torch.linspace(0, len(split) - 1, min(samples, len(split))).round().long())


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

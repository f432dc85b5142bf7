"""What a data set is: splits that give whole batches as tensors, and a few facts about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.tasks.base import Batch

FACTS = ("shape", "classes", "class_names", "mean", "std")  # of a data set, which models and tasks may ask for


class Split(ABC):
    """Samples in a fixed order, read as whole batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Tensor) -> Batch:
        """The samples with these numbers, as tensors: images are uint8 (batch, channels, height, width)."""


class TensorSplit(Split):
    """A split held in memory: one tensor of inputs and any number of tensors of targets.

    Example:
        >>> TensorSplit(torch.zeros(100, 1, 28, 28, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64))
    """

    def __init__(self, *tensors: Tensor):
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"the tensors of a split have {[len(t) for t in tensors]} rows; all must have as many.")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, rows: Tensor) -> Batch:
        return tuple(tensor[rows] for tensor in self.tensors)


class FileSplit(Split):
    """A split read from files when asked for; decoding runs on threads (image libraries release the lock).

    Args:
        samples: what ``decode`` is given, one entry per sample.
        decode: one sample's tensors; every sample's must have the same shapes.
        threads: how many samples are decoded at once.
    """

    def __init__(self, samples: Sequence[Any], decode: Callable[[Any], Batch], threads: int = 4):
        self.samples = samples
        self.decode = decode
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None  # made at first use

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pool": None}  # threads stay in their process

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, rows: Tensor) -> Batch:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        decoded = self.pool.map(self.decode, [self.samples[row] for row in rows.tolist()])
        columns = list(zip(*decoded, strict=True))
        for tensors in columns:
            if len(shapes := {tuple(tensor.shape) for tensor in tensors}) > 1:
                raise ValueError(f"samples have the shapes {sorted(shapes)}; decode must give all of them the same.")
        return tuple(torch.stack(tensors) for tensors in columns)


class Subset(Split):
    """Some rows of a split."""

    def __init__(self, split: Split, rows: Tensor):
        self.split, self.rows = split, rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Tensor) -> Batch:
        return self.split.read(self.rows[rows])


def spread(split: Split, samples: int) -> Split:
    """So many samples from all over a split: its first ones may all be of one class."""
    return Subset(split, torch.linspace(0, len(split) - 1, min(samples, len(split))).round().long())


@dataclass(frozen=True)
class DataSet:
    """A data set: what to train on, what to choose by, what to report on.

    Args:
        name: as it is asked for.
        train, test: its splits.
        val: a validation split of its own, if it has one; else it is cut from ``train``.
        shape: of one input, (channels, height, width) for images.
        class_names: of the classes, in the order of their numbers; empty if it has none.
        mean, std: of the training inputs per channel, images scaled to [0, 1].
        note: what a user should know, such as that the files are not the official ones.
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
        """What models and tasks may ask for by naming it as a parameter."""
        values = (self.shape, len(self.class_names), self.class_names, self.mean, self.std)
        return dict(zip(FACTS, values, strict=True))

    def with_validation(self, share: float) -> DataSet:
        """The same set with a validation split; one cut from ``train`` takes every run the same random rows.

        Args:
            share: of the training samples to hold out: below 1 a fraction, else a number; 0 for none. A set that
                has a validation split of its own keeps it unless the share is 0.
        """
        if share == 0:
            return replace(self, val=None)
        if self.val is not None:
            return self
        count = round(share * len(self.train)) if share < 1 else int(share)
        if not 0 < count < len(self.train):
            raise ValueError(
                f"data.validation is {share:g}, {count} of the {len(self.train)} training samples of {self.name}; "
                "at least one must be held out, and one left to train on."
            )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0))
        held, kept = order[:count].sort().values, order[count:].sort().values
        return replace(self, train=Subset(self.train, kept), val=Subset(self.train, held))

"""The interface of a task: everything the lab needs to know about one kind of problem."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = tuple[Tensor, ...]  # inputs first, then targets; each batch first
Sums = dict[str, Tensor]  # additive: those of two batches, or of two processes, are added entry by entry


class Task(ABC):
    """Loss, metrics, augmentation and figures of one kind of problem. The lab knows nothing else about it.

    Every training run makes a new task with the options of the recipe's ``[task]`` section; parameters named ``shape``,
    ``classes``, ``class_names``, ``mean`` or ``std`` are filled in from the data set. A task keeps no state between
    batches, so that a resumed run continues as if it had not stopped.
    """

    best_metric: str  # the metric of the validation split that selects the best weights
    best_is_largest: ClassVar[bool] = True
    warm_starts: bool = False  # whether training solves start near their solution, so that a few steps are enough

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Convert a batch for the model; by default uint8 images become numbers in [0, 1]."""
        inputs, *rest = batch
        inputs = inputs.to(dtype) / 255 if inputs.dtype == torch.uint8 else inputs.to(dtype)
        return (inputs, *rest)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Vary a prepared training batch at random; every random number must come from the generator (on the CPU)."""
        return batch

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the loss to minimise, a mean over the samples, and sums for the metrics of the training data."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """Return sums over an evaluation batch; gradients are disabled around the call."""

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of a whole split from its sums."""

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        """Yield titled figures for the report; ``batches()`` iterates over the prepared test split with these sums."""
        return iter(())

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        """Return a prediction for each input: a few named values that JSON can hold."""
        raise NotImplementedError(f"the task {type(self).__name__} has no predict, so it cannot predict single inputs.")


def labelled(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels of a batch; raise ValueError for one that holds anything else."""
    if len(batch) != 2:
        shapes = [tuple(part.shape) for part in batch]
        raise ValueError(
            f"a batch has {len(batch)} tensors, of shapes {shapes}; this task needs two, images and labels: choose a "
            "data set with labelled images, or another task (few-shot for episodes)."
        )
    return batch


def confusion_matrix(labels: Tensor, guesses: Tensor, classes: int) -> Tensor:
    """Count how often each class (row) is predicted as each class (column)."""
    return torch.bincount(labels * classes + guesses, minlength=classes**2).view(classes, classes)

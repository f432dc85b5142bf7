"""What a task is: everything the lab needs to know about one kind of problem."""

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
    """Loss, metrics, augmentation and pictures of one kind of problem. The lab knows nothing else about it.

    A task is made anew for every run, with the options of the recipe's ``[task]`` section; parameters named
    ``shape``, ``classes``, ``class_names``, ``mean`` or ``std`` are filled in from the data set. A task keeps no state
    between batches: a run that is resumed must go on as if it had never stopped.
    """

    best_metric: ClassVar[str]  # the metric, measured on the validation split, by which the best weights are chosen
    best_is_largest: ClassVar[bool] = True

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """A batch as the model takes it: by default uint8 images become numbers in [0, 1]."""
        inputs, *rest = batch
        inputs = inputs.to(dtype) / 255 if inputs.dtype == torch.uint8 else inputs.to(dtype)
        return (inputs, *rest)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A prepared training batch, varied at random; every random number comes from the generator (on the CPU)."""
        return batch

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """What to minimise, a mean over the batch's samples, and sums for the metrics of the training data."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """Sums over an evaluation batch; gradients are switched off around the call."""

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """What the sums of a whole split say: the numbers people quote."""

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        """Titled figures for the report: ``batches()`` goes over the prepared test split, ``sums`` are its own."""
        return iter(())

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        """What the model says of each input, for people: a few named values that JSON can hold."""
        raise NotImplementedError(f"the task {type(self).__name__} has no predict: it cannot say what one input gives.")

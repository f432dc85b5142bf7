"""Measuring a model on a split: the task's metrics and what the solver did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equipoise.fixed_point import watch_solves
from equipoise.lab.data import Batch, Split
from equipoise.lab.recipes.recipe import Training
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.batches import batches, seed_everything
from equipoise.lab.training.statistics import add, solve_metrics, solve_sums
from equipoise.solution import ConvergenceWarning
from equipoise.tasks import Sums, Task


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a split, the sums they come from, and what the solver did."""

    metrics: dict[str, float]
    solver: dict[str, Any]
    sums: Sums

    def record(self) -> dict[str, Any]:
        """For the log: metrics, and the solver's numbers beside them."""
        return {**self.metrics, "solver": self.solver}


AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Setting:
    """How tensors are prepared and computed with: precision, layout, device."""

    def __init__(self, training: Training, machine: Machine):
        self.dtype = torch.float64 if training.precision == "float64" else torch.float32
        self.low = AUTOCAST.get(training.precision)
        self.channels_last = training.channels_last
        self.device = machine.device
        self.sync_batch_norm = training.sync_batch_norm
        if self.sync_batch_norm and self.device.type != "cuda":
            raise ValueError(f"training.sync_batch_norm needs GPUs; this is a {self.device.type}: leave it out.")

    def place(self, model: nn.Module) -> nn.Module:
        """The model on its device, in its type and layout."""
        model = model.to(self.device, self.dtype)
        if self.sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def prepare(self, task: Task, batch: Batch) -> Batch:
        """A batch as the model takes it."""
        return self.lay_out(task.prepare(batch, self.dtype))

    def lay_out(self, batch: Batch) -> Batch:
        """A prepared batch in the layout of the model."""
        inputs, *rest = batch
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return (inputs, *rest)

    def autocast(self) -> Any:
        return nullcontext() if self.low is None else torch.autocast(self.device.type, self.low)


@contextmanager
def quiet_failures() -> Iterator[None]:
    """Failed solves are counted and reported by the lab; a warning for each batch would bury the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        # When the very first step is skipped, torch takes the schedule's step for a mistake of order.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        yield


def evaluate(
    model: nn.Module,
    task: Task,
    split: Split,
    setting: Setting,
    machine: Machine,
    batch_size: int,
    seed: int = 0,
    each: Callable[[int], None] | None = None,
) -> Evaluation:
    """Measure a model on a split; every process takes its part, all get the whole result.

    Args:
        each: called after every batch with the number of samples done by this process.
    """
    samples = len(split)
    if samples < machine.world:
        raise ValueError(f"a split of {samples} samples cannot be shared by {machine.world} processes: use fewer.")
    rows = torch.arange(machine.rank, samples, machine.world)
    model.eval()
    seed_everything(seed, "evaluation", machine.rank)
    sums: Sums = {}
    done = 0
    with quiet_failures(), torch.no_grad(), setting.autocast():
        for batch in batches(split, rows.split(batch_size), machine.device):
            batch = setting.prepare(task, batch)
            with watch_solves() as solves:
                add(sums, task.measure(model, batch))
            add(sums, solve_sums(solves))
            done += len(batch[0])
            if each is not None:
                each(done)
    sums = machine.total(sums)
    return Evaluation(task.metrics(sums), solve_metrics(sums), sums)


def prepared(split: Split, task: Task, setting: Setting, batch_size: int) -> Callable[[], Iterator[Batch]]:
    """A function that goes over a split's prepared batches, as often as it is called."""

    def go() -> Iterator[Batch]:
        for batch in batches(split, torch.arange(len(split)).split(batch_size), setting.device):
            yield setting.prepare(task, batch)

    return go


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

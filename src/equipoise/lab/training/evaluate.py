"""Evaluate a model on a split: the task's metrics, and statistics of the solves as sums over batches and processes."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.fixed_point import watch_solves
from equipoise.lab.data import Batch, Split
from equipoise.lab.data.base import batches
from equipoise.lab.recipes.schema import Training
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.solution import ConvergenceWarning, Result, Solution, Statistics
from equipoise.tasks import Sums, Task

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a split, the sums they are computed from, and what the solver did."""

    metrics: dict[str, float]
    solver: dict[str, Any]
    sums: Sums

    def record(self) -> dict[str, Any]:
        """Return metrics and solver statistics for the log."""
        return {**self.metrics, "solver": self.solver}


class Setting:
    """Precision, memory format and device of a model and its batches."""

    def __init__(self, training: Training, machine: Machine):
        self.dtype = torch.float64 if training.precision == "float64" else torch.float32
        self.low = AUTOCAST.get(training.precision)
        self.channels_last = training.channels_last
        self.device = machine.device
        self.sync_batch_norm = training.sync_batch_norm
        if self.sync_batch_norm and self.device.type != "cuda":
            raise ValueError(f"training.sync_batch_norm needs GPUs; the device is {self.device.type}: leave it out.")

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to its device, precision and memory format."""
        model = model.to(self.device, self.dtype)
        if self.sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def prepare(self, task: Task, batch: Batch) -> Batch:
        """Return a batch as the model takes it."""
        return self.lay_out(task.prepare(batch, self.dtype))

    def lay_out(self, batch: Batch) -> Batch:
        """Return a prepared batch in the memory format of the model."""
        inputs, *rest = batch
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return (inputs, *rest)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.low is None else torch.autocast(self.device.type, self.low)


@contextmanager
def quiet_failures() -> Iterator[None]:
    """Silence warnings about failed solves, which the lab counts and reports: one per batch would bury the report."""
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
    """Evaluate a model on a split; every process takes a part, and all return the whole result.

    Args:
        each: function called after every batch with the number of samples done by this process
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


def prepared(split: Split, task: Task, setting: Setting, batch_size: int) -> Iterator[Batch]:
    """Yield the batches of a split as the model takes them."""
    for batch in batches(split, torch.arange(len(split)).split(batch_size), setting.device):
        yield setting.prepare(task, batch)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# How numbers are shown


def format_metric(name: str, value: float | str | None) -> str:
    """Format a value by the name of its metric: accuracies in percent, times as durations.

    Example:
        >>> format_metric("test accuracy", 0.98055)
        '98.06%'
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if "accuracy" in name or name == "converged":
        return percent(value)
    if name == "time":
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(share: float) -> str:
    return "100%" if share == 1 else f"{share:.2%}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# Statistics of solves, as sums that add up over batches, epochs and processes

MOST_STEPS = 1000  # steps are counted one by one up to here
DECADES = (-16, 4)  # residuals are counted by their power of ten,
PER_DECADE = 4  # in this many bins each
DIRECTIONS = ("forward", "backward")


def solve_sums(solves: Iterable[Solution]) -> Sums:
    """Count results, steps and residuals of every sample of every solve, forward and backward separately."""
    solves = list(solves)
    forward = [solution.stats for solution in solves]
    backward = [solution.backward for solution in solves if solution.backward is not None]
    return {
        f"{direction} {name}": values
        for direction, statistics in zip(DIRECTIONS, (forward, backward), strict=True)
        for name, values in histograms(statistics).items()
    }


def histograms(statistics: Sequence[Statistics]) -> Sums:
    """Return histograms of results, steps and residuals, and the number of evaluations."""
    bins = (DECADES[1] - DECADES[0]) * PER_DECADE
    results, steps = torch.zeros(len(Result)), torch.zeros(MOST_STEPS + 1)
    residuals, evaluations = torch.zeros(bins), 0
    for stats in statistics:
        results += torch.bincount(stats.result.cpu().long(), minlength=len(Result))
        steps += torch.bincount(stats.steps.cpu().long().clamp(max=MOST_STEPS), minlength=MOST_STEPS + 1)
        power = stats.residual.cpu().double().log10().nan_to_num(DECADES[1], DECADES[1], DECADES[0])
        place = ((power - DECADES[0]) * PER_DECADE).long().clamp(0, bins - 1)
        residuals += torch.bincount(place, minlength=bins)
        evaluations += stats.evaluations
    return {"results": results, "steps": steps, "residuals": residuals, "evaluations": torch.tensor(float(evaluations))}


def failed_samples(solves: Iterable[Solution]) -> tuple[int, int, int]:
    """Return how many samples failed, forward or backward, how many of those were not finite, and the total number."""
    failed = nonfinite = total = 0
    for solution in solves:
        results = [solution.stats.result]
        if solution.backward is not None and len(solution.backward.result) == len(results[0]):
            results.append(solution.backward.result)
        codes = torch.stack(results)
        failed += int((codes != Result.CONVERGED).any(dim=0).sum())
        nonfinite += int((codes == Result.NONFINITE).any(dim=0).sum())
        total += codes.shape[1]
    return failed, nonfinite, total


def solve_metrics(sums: Sums) -> dict[str, Any]:
    """Return medians, extremes and failures from sums: one table per direction that was solved."""
    metrics: dict[str, Any] = {}
    for direction in DIRECTIONS:
        results = sums.get(f"{direction} results")
        if results is None or not results.sum():
            continue
        steps, residuals = sums[f"{direction} steps"], sums[f"{direction} residuals"]
        metrics[direction] = {
            "samples": int(results.sum()),
            "failed": 1 - (results[Result.CONVERGED] / results.sum()).item(),
            "results": {result.name: int(results[result]) for result in Result if results[result]},
            "steps": {"median": quantile(steps, 0.5), "90%": quantile(steps, 0.9), "most": quantile(steps, 1.0)},
            "residual": {"median": residual_at(residuals, 0.5), "worst": residual_at(residuals, 1.0)},
            "evaluations": int(sums[f"{direction} evaluations"]),
        }
    return metrics


def idle(forward: dict[str, Any]) -> bool:
    """Return whether the solver did nothing: every sample was solved at its start, or after one evaluation of f."""
    return not forward["failed"] and forward["steps"]["most"] <= 2


IDLE = (
    "the solver does nothing: every solve of this epoch ended after one or two evaluations of f. Either f hardly "
    "depends on z, or the tolerance is loose; equipoise.diagnose(layer.solve(x)) reports which."
)


def quantile(histogram: Tensor, share: float) -> int:
    """Return the smallest bin such that at least this share of the counts lies in it or below."""
    reached = histogram.double().cumsum(0) >= share * histogram.double().sum() - 1e-9
    return int(reached.int().argmax())


def residual_at(histogram: Tensor, share: float) -> float:
    """Return the upper end of the bin in which the quantile lies."""
    return 10 ** (DECADES[0] + (quantile(histogram, share) + 1) / PER_DECADE)


def add(total: Sums, more: Sums) -> None:
    """Add sums to a total, entry by entry, in place."""
    for name, value in more.items():
        value = value.detach().to("cpu", torch.float64)
        if name in total and name.endswith(" results"):  # saved by a version that had fewer Results
            total[name] = functional.pad(total[name], (0, max(0, len(value) - len(total[name]))))
        if name in total and total[name].shape != value.shape:
            raise ValueError(f"the sums {name!r} have the shapes {tuple(total[name].shape)} and {tuple(value.shape)}.")
        total[name] = total[name] + value if name in total else value

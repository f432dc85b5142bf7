"""What solves did, as sums that add up over batches, epochs and processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.solution import Result, Solution, Statistics
from equipoise.tasks import Sums

MOST_STEPS = 1000  # steps are counted one by one up to here
DECADES = (-16, 4)  # residuals are counted by their power of ten,
PER_DECADE = 4  # in so many parts each
DIRECTIONS = ("forward", "backward")


def solve_sums(solves: Iterable[Solution]) -> Sums:
    """Results, steps and residuals of every sample of every solve, counted; forward and backward apart."""
    solves = list(solves)
    forward = [solution.stats for solution in solves]
    backward = [solution.backward for solution in solves if solution.backward is not None]
    sums: Sums = {}
    for direction, statistics in zip(DIRECTIONS, (forward, backward), strict=True):
        for name, values in counts(statistics).items():
            sums[f"{direction} {name}"] = values
    return sums


def counts(statistics: Sequence[Statistics]) -> Sums:
    """One vector of counts each for results, steps and residuals."""
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
    """How many samples failed, forward or backward, how many of those were not finite, and how many there were."""
    failed = lost = total = 0
    for solution in solves:
        converged, nonfinite = solution.converged, solution.result == Result.NONFINITE
        if solution.backward is not None and len(solution.backward.result) == len(converged):
            converged = converged & solution.backward.converged
            nonfinite = nonfinite | (solution.backward.result == Result.NONFINITE)
        failed += int((~converged).sum())
        lost += int(nonfinite.sum())
        total += converged.numel()
    return failed, lost, total


def solve_metrics(sums: Sums) -> dict[str, Any]:
    """Medians, extremes and failures in numbers: one table per direction that was solved."""
    metrics: dict[str, Any] = {}
    for direction in DIRECTIONS:
        results = sums.get(f"{direction} results")
        if results is None or not results.sum():
            continue
        steps, residuals = sums[f"{direction} steps"], sums[f"{direction} residuals"]
        by_result = {result.name: int(results[result]) for result in Result if results[result]}
        metrics[direction] = {
            "samples": int(results.sum()),
            "failed": 1 - (results[Result.CONVERGED] / results.sum()).item(),
            "results": by_result,
            "steps": {"median": quantile(steps, 0.5), "90%": quantile(steps, 0.9), "most": quantile(steps, 1.0)},
            "residual": {"median": residual_at(residuals, 0.5), "worst": residual_at(residuals, 1.0)},
            "evaluations": int(sums[f"{direction} evaluations"]),
        }
    return metrics


def idle(forward: dict[str, Any]) -> bool:
    """Whether the solver did nothing: every sample was solved at its start, or after one evaluation of f."""
    return not forward["failed"] and forward["steps"]["most"] <= 2


IDLE = (
    "the solver does nothing: every solve of this epoch was done after one or two evaluations of f. Either f hardly "
    "depends on z, or the tolerance is loose; equipoise.diagnose(layer.solve(x)) says which."
)


def quantile(histogram: Tensor, share: float) -> int:
    """The smallest entry that so large a share of the counts does not exceed."""
    reached = histogram.double().cumsum(0) >= share * histogram.double().sum() - 1e-9
    return int(reached.int().argmax())


def residual_at(histogram: Tensor, share: float) -> float:
    """The upper end of the part of a decade in which the quantile lies."""
    return 10 ** (DECADES[0] + (quantile(histogram, share) + 1) / PER_DECADE)


def add(total: Sums, more: Sums) -> None:
    """Add sums to a total, entry by entry, in place."""
    for name, value in more.items():
        value = value.detach().to("cpu", torch.float64)
        if name in total and name.endswith(" results"):  # a run that was begun before there was another Result
            total[name] = functional.pad(total[name], (0, max(0, len(value) - len(total[name]))))
        if name in total and total[name].shape != value.shape:
            raise ValueError(f"the sums {name!r} have the shapes {tuple(total[name].shape)} and {tuple(value.shape)}.")
        total[name] = total[name] + value if name in total else value

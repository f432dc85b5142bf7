"""Columns of a table that show what training cost: time, evaluations, memory and failed solves, from a run's log."""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.lab.runs.folder import Run
from equipoise.lab.training.evaluate import DIRECTIONS, duration, percent

HEADINGS = {
    "time": "time per epoch",
    "evaluations": "evaluations per minibatch, forward + backward",
    "memory": "peak memory",
    "failed": "failed solves of the last epoch",
}


def costs(runs: Sequence[Run]) -> dict[str, float | None]:
    """Return what a run cost, or the mean over runs that differ only in their seed; None for what a log lacks."""
    each = [costs_of(run.epochs()) for run in runs]
    return {name: mean([cost[name] for cost in each]) for name in each[0]}


def costs_of(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the costs of a run: means over epochs or training steps, the highest memory, the last share of failures.

    Args:
        epochs: the log's record of every epoch.
    """
    last: Mapping[str, Any] = epochs[-1] if epochs else {}
    solved = [epoch.get("train", {}).get("solver", {}) for epoch in epochs]
    peaks = [epoch["peak_memory"] for epoch in epochs if epoch.get("peak_memory") is not None]
    found: dict[str, float | None] = {
        "seconds per epoch": last["seconds"] / len(epochs) if epochs else None,
        "peak memory": max(peaks, default=None),
        "failed": solved[-1]["forward"]["failed"] if solved and "forward" in solved[-1] else None,
    }
    for direction in DIRECTIONS:
        counts = [solver[direction]["evaluations"] for solver in solved if direction in solver]
        found[f"{direction} evaluations"] = sum(counts) / last["step"] if counts else None
    return found


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shown(column: str, cost: Mapping[str, float | None]) -> str:
    """Return a cell of a table."""
    if column == "evaluations":
        forward, backward = cost["forward evaluations"], cost["backward evaluations"]
        if forward is None:
            return "-"
        return f"{forward:.1f}" + ("" if backward is None else f" + {backward:.1f}")
    if column == "memory":
        value = cost["peak memory"]
        return "-" if value is None else f"{value / 1e6:,.0f} MB"
    if column == "time":
        value = cost["seconds per epoch"]
        return "-" if value is None else duration(value)
    value = cost["failed"]
    return "-" if value is None else percent(value)

"""Cost and time of finding latent vectors (figures 3 and 4 and table 3 of the JIIO paper).

Functions take trained ``runs``, the ``machine``, ``folders`` searched first for data, and the ``path`` of the picture,
beside which they write their numbers as JSON (None writes none).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.joint import AdamInput, JointAnderson, JointIteration
from equipoise.joint.base import JointSolver
from equipoise.lab.results.figures import BLUE, ORANGE, finish, log_scale, panels, wrapped
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.generator.decoder import Decoder
from equipoise.options import unknown
from equipoise.papers.drawing import check_counts, describe, random_test_images, write_numbers
from equipoise.solvers import Anderson, Broyden, Progress
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error
from equipoise.tolerance import Tolerance

STEP = 0.01  # the paper's step size of x, for the sum of squared errors over all pixels
SCORED = 10  # iterates whose true cost is drawn


class Method(NamedTuple):
    """A way to find latent vectors: its name in the figure and its solver."""

    title: str
    solver: JointSolver


def exactly(steps: int) -> Tolerance:
    return Tolerance(relative=0.0, max_steps=steps, patience=None)


def published(solver: Any = None) -> JointIteration:
    options = {} if solver is None else {"solver": solver}
    return JointIteration(**options, damping=(0.2, 0.4), step_size=STEP)


METHODS = {
    "joint": Method("joint, default", JointAnderson()),
    "adam": Method("Adam, cold solves", AdamInput(0.3, warm=False, tolerance=exactly(18), adjoint=exactly(20))),
    "adam-warm": Method("Adam, warm solves", AdamInput(0.3, tolerance=exactly(4), adjoint=exactly(4))),
    "type-1": Method("joint, Anderson type I", published(Anderson(memory=40, kind=1))),
    "type-2": Method("joint, Anderson type II", published(Anderson(memory=40, kind=2))),
    "broyden": Method("joint, Broyden", published(Broyden(memory=40))),
    "none": Method("joint, no acceleration", published()),
}


def cost_over_time(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    methods: Sequence[str] = ("joint", "adam"),
    samples: int = 16,
    steps: int = 100,
    adam_steps: int = 40,
    path: Path | None = None,
) -> Figure:
    """Plot the cost of random test images over processor time, with z solved again outside the clock.

    The joint optimisation minimises the sum of squared errors, for which the paper's step size of x, 0.01, is meant.
    The numbers beside the picture include the time until each method reaches the lowest cost of Adam with cold solves,
    if that is among the methods.

    Args:
        runs: trained generators; one panel each.
        methods: keys of ``METHODS``.
        samples: number of images, optimised at the same time.
        steps: number of joint steps.
        adam_steps: number of steps of Adam.
    """
    check_counts(samples=(samples, 1), steps=(steps, 1), adam_steps=(adam_steps, 1))
    for name in methods:
        if name not in METHODS:
            raise ValueError(unknown("method", name, METHODS))
    figure, axes = panels(1, len(runs), height=4.4)
    measured: list[dict[str, Any]] = []
    for run, axis in zip(runs, axes[0], strict=True):
        model, truth = opened(run, machine, folders, samples)
        curves = {}
        with quiet_failures(), torch.no_grad():
            for name in methods:
                count = adam_steps if name.startswith("adam") else steps
                curves[name] = course(model, truth, METHODS[name].solver, count)
        for name, curve in curves.items():
            axis.plot(curve["seconds"], curve["cost"], marker="o", markersize=3, label=METHODS[name].title)
        log_scale(axis, "y", [cost for curve in curves.values() for cost in curve["cost"]])
        axis.set(xlabel="processor time (s)", ylabel="mean squared error at z*", title=wrapped(run.recipe.title))
        finish(figure, axis)
        measured.append({**describe(run), "methods": curves, "seconds to Adam's cost": times_to_adam(curves)})
    write_numbers(path, {"samples": samples, "runs": measured})
    return figure


def opened(run: Run, machine: Machine, folders: Sequence[Path], samples: int) -> tuple[Decoder, Tensor]:
    """Return the generator of a run, and random test images, the same ones on every call."""
    trained = open_trained(run, machine)
    return generator_in(trained.model), random_test_images(run, trained, folders, samples)


def summed(truth: Tensor) -> Callable[..., Tensor]:
    """Return the sum of squared errors of each image as a loss, for which the paper's step size is meant."""
    return lambda *given: truth[0].numel() * squared_error(*given)


def course(model: Decoder, truth: Tensor, solver: JointSolver, steps: int) -> dict[str, list[float]]:
    """Return processor times and true costs along an optimisation."""
    marks = {1 + round(i * (steps - 1) / (SCORED - 1)) for i in range(SCORED)}  # x has not moved at the first
    spent, points = 0.0, []

    def note(progress: Progress) -> None:
        nonlocal spent, begun
        spent += time.process_time() - begun
        if progress.step in marks:
            points.append((spent, progress.rows, progress.value[2].clone()))
        begun = time.process_time()

    begun = time.process_time()
    fit(model, summed(truth), truth, steps=steps, solver=solver, callback=note)
    x = truth.new_zeros(len(truth), model.latent)
    seconds, costs = [], []
    for when, rows, part in points:
        x = x.index_copy(0, rows, part)
        seconds.append(when)
        costs.append(squared_error(model(x), x, truth).mean().item())
    return {"seconds": seconds, "cost": costs}


def times_to_adam(curves: dict[str, dict[str, list[float]]]) -> dict[str, float | None]:
    """Return the time at which each method reaches the lowest cost of Adam with cold solves; None for never."""
    if "adam" not in curves:
        return {}
    target = min(curves["adam"]["cost"])
    return {
        name: next((s for s, cost in zip(curve["seconds"], curve["cost"], strict=True) if cost <= target), None)
        for name, curve in curves.items()
    }


def fitting_time(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 16,
    steps: Sequence[int] = (40, 100),
    adam_steps: int = 40,
    repeats: int = 3,
    path: Path | None = None,
) -> Figure:
    """Plot the time that Adam with cold solves and joint steps take, and the cost they reach (table 3).

    The methods are timed alternately on the same random test images; costs are those with z solved again.

    Args:
        runs: trained generators; one panel each.
        samples: number of images, optimised at the same time.
        steps: numbers of joint steps, one bar each, for the default solver and for the paper's.
        adam_steps: number of steps of Adam.
        repeats: number of timings, of which the median is drawn.
    """
    check_counts(samples=(samples, 1), adam_steps=(adam_steps, 1), repeats=(repeats, 1))
    if not isinstance(steps, list | tuple) or not steps:
        raise ValueError(f"steps is {steps!r}; it must list at least one number of steps.")
    for count in steps:
        check_counts(steps=(count, 1))
    methods = {f"{METHODS['adam'].title}, {adam_steps} steps": (METHODS["adam"].solver, adam_steps)}
    for name in ("joint", "type-1"):
        methods |= {f"{METHODS[name].title}, {count} steps": (METHODS[name].solver, count) for count in steps}
    measured: list[dict[str, Any]] = []
    for run in runs:
        model, truth = opened(run, machine, folders, samples)
        found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in methods}
        with quiet_failures(), torch.no_grad():
            for _ in range(repeats):
                for name, (solver, count) in methods.items():
                    begun = time.process_time()
                    optimum = fit(model, summed(truth), truth, steps=count, solver=solver)
                    found[name]["seconds"].append(time.process_time() - begun)
                    cost = squared_error(model(optimum.x), optimum.x, truth).mean().item()
                    found[name] |= {"cost": cost, "evaluations": optimum.stats.evaluations}
        slowest = median(next(iter(found.values()))["seconds"])
        for entry in found.values():
            entry["median seconds"] = median(entry["seconds"])
            entry["speed-up"] = slowest / max(entry["median seconds"], 1e-9)
        measured.append({**describe(run), "methods": found})
    write_numbers(path, {"samples": samples, "repeats": repeats, "runs": measured})
    figure, axes = panels(len(measured), 1, height=(1.2 + 0.45 * len(methods)) * len(measured))
    for (axis,), entry in zip(axes, measured, strict=True):
        draw_times(axis, entry)
    return figure


def draw_times(axis: Axes, entry: dict[str, Any]) -> None:
    """Draw a bar for each method, with its speed-up over the first and its cost."""
    found = list(entry["methods"].values())
    heights = range(len(found), 0, -1)
    widths = [1000 * each["median seconds"] for each in found]
    axis.barh(heights, widths, color=[ORANGE] + [BLUE] * (len(found) - 1))
    axis.set_yticks(heights, list(entry["methods"]))
    for height, width, each in zip(heights, widths, found, strict=True):
        axis.text(width, height, f" {each['speed-up']:.1f} x, cost {each['cost']:.3g}", va="center", fontsize=8)
    axis.set_xlim(0, 1.6 * max(widths))
    axis.set_xlabel("milliseconds of processor time")
    axis.set_title(wrapped(entry["title"], 36), fontsize=10)

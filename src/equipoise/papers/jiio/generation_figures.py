"""Cost over time while latent vectors are found (figures 3 and 4 and table 3 of the JIIO paper).

Functions take trained ``runs``, the ``machine``, ``folders`` searched first for data, and the ``path`` of the picture,
beside which they write their numbers as JSON (None writes none).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.joint import AdamInput, JointAnderson, JointIteration
from equipoise.joint.solvers import JointSolver
from equipoise.lab.data.base import Subset
from equipoise.lab.results.figures import finish, log_scale, panels, wrapped
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.models.generator.model import Generator
from equipoise.options import unknown
from equipoise.papers.drawing import check_counts, describe, random_rows, write_numbers
from equipoise.solvers import Anderson, Broyden, Progress
from equipoise.tasks.generation import fit, generator_in, squared_error
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
    """Plot the cost of random test images over processor time, with z solved for anew outside the clock.

    The cost is the sum of squared errors, of which the published step size of x, 0.01, is meant. Beside the picture are
    written the times to the final cost of Adam with cold solves, if it is among the methods (table 3).

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
        trained = open_trained(run, machine)
        model = generator_in(trained.model)
        test = data_of(run, trained.recipe, folders).test
        (truth, *_) = next(prepared(Subset(test, random_rows(test, samples)), trained.task, trained.setting, samples))
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


def course(model: Generator, truth: Tensor, solver: JointSolver, steps: int) -> dict[str, list[float]]:
    """Return processor times and true costs along an optimisation."""
    marks = {1 + round(i * (steps - 1) / (SCORED - 1)) for i in range(SCORED)}  # x has not moved at the first
    spent, points = 0.0, []

    def note(progress: Progress) -> None:
        nonlocal spent, begun
        spent += time.process_time() - begun
        if progress.step in marks:
            points.append((spent, progress.rows, progress.value[2].clone()))
        begun = time.process_time()

    pixels = truth[0].numel()
    begun = time.process_time()
    fit(model, lambda *given: pixels * squared_error(*given), truth, steps=steps, solver=solver, callback=note)
    x = truth.new_zeros(len(truth), model.latent)
    seconds, costs = [], []
    for when, rows, part in points:
        x = x.index_copy(0, rows, part)
        seconds.append(when)
        costs.append(squared_error(model(x), x, truth).mean().item())
    return {"seconds": seconds, "cost": costs}


def times_to_adam(curves: dict[str, dict[str, list[float]]]) -> dict[str, float | None]:
    """Return when each method first has a cost as low as the last one of Adam with cold solves; None for never."""
    if "adam" not in curves:
        return {}
    target = min(curves["adam"]["cost"])
    return {
        name: next((s for s, cost in zip(curve["seconds"], curve["cost"], strict=True) if cost <= target), None)
        for name, curve in curves.items()
    }

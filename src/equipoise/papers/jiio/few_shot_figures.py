"""Figures of the paper's few-shot experiments: accuracy over inner steps, and the time of the inner loop (table 7).

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), appendix B.1. Functions take trained ``runs``, the ``machine`` to solve on, ``folders`` searched first for data,
and the ``path`` of the picture, beside which they write their numbers as JSON (None writes none).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from equipoise.joint import AdamInput, optimize_input
from equipoise.lab.data.base import spread
from equipoise.lab.results.figures import BLUE, ORANGE, finish, panels, wrapped
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.papers.drawing import check_counts, describe, write_numbers
from equipoise.tasks import Batch
from equipoise.tasks.episodes import task_losses
from equipoise.tasks.few_shot import FewShot
from equipoise.tolerance import Tolerance


@dataclass(frozen=True)
class Opened:
    """A trained run, its task, and some of its test episodes."""

    trained: Trained
    task: FewShot
    batches: list[Batch]


def opened(run: Run, machine: Machine, folders: Sequence[Path], episodes: int, batch_size: int) -> Opened:
    trained = open_trained(run, machine)
    if not isinstance(trained.task, FewShot) or trained.task.gradient == "unrolled":
        raise ValueError(f"the run {run.folder.name} is not one of few-shot learning by joint optimisation.")
    split = spread(data_of(run, trained.recipe, folders).test, episodes)
    return Opened(trained, trained.task, list(prepared(split, trained.task, trained.setting, batch_size)))


def inner_steps(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    episodes: int = 200,
    batch_size: int = 50,
    path: Path | None = None,
) -> Figure:
    """Plot the accuracy of query images over the number of joint steps, with 95% intervals.

    Args:
        runs: trained runs of few-shot learning; one curve each.
        episodes: number of test episodes.
        batch_size: episodes that are solved at the same time.
    """
    check_counts(episodes=(episodes, 2), batch_size=(batch_size, 1))
    figure, axes = panels(1, 1, height=4.4)
    axis, measured = axes[0][0], []
    for run in runs:
        here = opened(run, machine, folders, episodes, batch_size)
        with quiet_failures():
            counts, points = here.task.curve(here.trained.model, iter(here.batches), episodes)
        means, halves = ([point[i] for point in points] for i in (0, 1))
        axis.errorbar(counts, means, yerr=halves, marker="o", capsize=3, label=wrapped(run.recipe.title))
        measured.append({**describe(run), "steps": counts, "accuracy": means, "half 95% interval": halves})
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlabel="joint steps", ylabel="accuracy of query images", ylim=(0, 1.02))
    write_numbers(path, {"episodes": episodes, "runs": measured})
    return finish(figure, axis)


def inner_time(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    episodes: int = 16,
    repeats: int = 3,
    joint_steps: int | None = None,
    adam_steps: int = 20,
    adam_lr: float = 0.1,
    path: Path | None = None,
) -> Figure:
    """Draw the time of the inner loop and the loss it reaches: joint steps against Adam around solves (table 7).

    Both are timed alternately on the same episodes; the loss is that of the support images with z solved again.

    Args:
        runs: trained runs of few-shot learning; one panel each.
        episodes: number of test episodes, solved at the same time.
        repeats: number of timings, of which the median is drawn.
        joint_steps: joint steps; None for those of the task.
        adam_steps, adam_lr: steps of Adam, and its learning rate.
    """
    check_counts(episodes=(episodes, 1), repeats=(repeats, 1), adam_steps=(adam_steps, 1))
    if joint_steps is not None:
        check_counts(joint_steps=(joint_steps, 1))
    measured = []
    for run in runs:
        here = opened(run, machine, folders, episodes, episodes)
        model: Any = here.trained.model
        task, (support, labels, query, answers) = here.task, here.batches[0]
        adam = AdamInput(lr=adam_lr)
        joint = task.steps if joint_steps is None else joint_steps
        methods = {
            f"joint, {joint} steps": (task.solver, joint),
            f"Adam, {adam_steps} steps": (adam, adam_steps),
        }
        rows: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in methods}
        with torch.no_grad(), quiet_failures():
            features, x = model.features(support), model.blank(len(support))
            for _ in range(repeats):
                for name, (solver, steps) in methods.items():
                    limits = Tolerance(relative=task.tolerance, max_steps=steps)
                    begun = time.process_time()
                    optimum = optimize_input(
                        *task.inner(model), x, model.cell.start(x, features), features, labels,
                        solver=solver, tolerance=limits, on_failure="ignore",
                    )  # fmt: skip
                    rows[name]["seconds"].append(time.process_time() - begun)
                    rows[name] |= {
                        "loss": task_losses(model(support, optimum.x), labels).mean().item(),
                        "accuracy": (model(query, optimum.x).argmax(-1) == answers).double().mean().item(),
                    }
        for row in rows.values():
            row["median seconds"] = statistics.median(row["seconds"])
        measured.append({**describe(run), "methods": rows})
    write_numbers(path, {"episodes": episodes, "repeats": repeats, "runs": measured})
    figure, axes = panels(1, len(measured), height=4.0)
    for axis, entry in zip(axes[0], measured, strict=True):
        names = list(entry["methods"])
        bars = axis.bar(names, [entry["methods"][n]["median seconds"] for n in names], color=[BLUE, ORANGE])
        texts = [f"loss {r['loss']:.3g}, query accuracy {r['accuracy']:.1%}" for r in entry["methods"].values()]
        axis.bar_label(bars, texts, fontsize=8)
        axis.set(ylabel="processor time of the inner loop (s)", title=wrapped(entry["title"]))
    return figure

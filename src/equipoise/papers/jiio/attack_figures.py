"""Table 2 of the JIIO paper: the time that attacks take.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021). Functions take trained ``runs``, the ``machine`` to solve on, ``folders`` searched first for data, and the
``path`` of the picture, beside which they write their numbers as JSON (None writes none).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.lab.results.figures import BLUE, ORANGE, panels, wrapped
from equipoise.lab.results.trained import open_trained, samples_of
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.parts.context_managers import exact_gradients
from equipoise.papers.drawing import check_counts, describe, write_numbers
from equipoise.tasks.joint_attack import jiio
from equipoise.tasks.robustness import Robustness, pgd

Attack = Callable[..., Tensor]


def attack_time(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 200,
    steps: int = 20,
    joint_steps: Sequence[int] = (80, 50),
    path: Path | None = None,
) -> Figure:
    """Plot the time per image of projected gradient descent and of joint optimisation, and the accuracy they leave.

    Images are attacked one at a time, by all methods in turn. PGD solves for the equilibrium anew at every step.

    Args:
        runs: runs of the task "robustness", whose norm and radius are used; one panel each.
        samples: number of test images.
        steps: number of steps of PGD.
        joint_steps: numbers of joint steps, one attack each.
    """
    check_counts(samples=(samples, 1), steps=(steps, 1))
    if not joint_steps:
        raise ValueError(f"joint_steps is {joint_steps!r}; it must list at least one number of steps.")
    methods = {f"PGD, {steps} steps": partial(pgd, steps=steps, random_start=False)}
    methods |= {f"joint, {count} steps": partial(jiio, steps=count) for count in joint_steps}
    measured = [times_of(run, machine, folders, methods, samples) for run in runs]
    write_numbers(path, {"runs": measured})
    figure, axes = panels(len(measured), 1, height=1.2 + 0.6 * len(methods))
    for (axis,), run in zip(axes, measured, strict=True):
        found = run["attacks"]
        heights = range(len(found), 0, -1)
        axis.barh(heights, [1000 * entry["seconds"] for entry in found], color=[ORANGE] + [BLUE] * (len(found) - 1))
        axis.set_yticks(heights, [entry["attack"] for entry in found])
        for height, entry in zip(heights, found, strict=True):
            said = f" {entry['speed-up']:.1f} x, accuracy {entry['accuracy']:.1%}"
            axis.text(1000 * entry["seconds"], height, said, va="center", fontsize=8)
        axis.margins(x=0.6)
        axis.set_xlabel("milliseconds of processor time per image")
        clean = f"accuracy on {run['samples']} clean images {run['clean']:.1%}"
        axis.set_title(wrapped(f"{run['title']}; {clean}"), fontsize=9)
    return figure


def times_of(
    run: Run, machine: Machine, folders: Sequence[Path], methods: dict[str, Attack], samples: int
) -> dict[str, Any]:
    """Return the mean time of every attack on a run's model, and the share of the images that it leaves correct."""
    trained = open_trained(run, machine)
    model, task = trained.model, trained.task
    if not isinstance(task, Robustness):
        raise ValueError(f"{run.folder} has the task {trained.recipe.task.name!r}; it must be 'robustness'.")
    split = samples_of(run, trained, folders, "test", samples)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    right, clean = dict.fromkeys(methods, 0), 0
    budget = {"radius": task.budget.radius, "norm": task.budget.norm}
    seed_everything("attack time", 0)
    with quiet_failures(), trained.setting.autocast(), exact_gradients(model), torch.no_grad():
        for row in range(-1, len(split)):  # once before, to warm up
            batch = tuple(part.to(machine.device) for part in split.read(torch.tensor([max(row, 0)])))
            images, labels = trained.setting.prepare(task, batch)
            known = bool((model(images).argmax(1) == labels).all())
            clean += known and row >= 0
            for name, attack in methods.items():
                began = process_time()
                attacked = attack(model, images, labels, **budget)
                spent = process_time() - began
                if row >= 0:
                    seconds[name].append(spent)
                    right[name] += known and bool((model(attacked).argmax(1) == labels).all())
    first = next(iter(seconds.values()))
    found = [
        {
            "attack": name,
            "seconds": mean(spent),
            "speed-up": median(a / b for a, b in zip(first, spent, strict=True)),
            "accuracy": right[name] / len(split),
        }
        for name, spent in seconds.items()
    ]
    return {**describe(run), "samples": len(split), "clean": clean / len(split), "attacks": found, **budget}

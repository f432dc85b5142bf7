"""Figures of the monDEQ paper: accuracy and iterations over training, convergence over the step size alpha.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), figures 1, 2, 3, F1 and F2. Functions take
trained ``runs``, the ``machine`` to solve on, ``folders`` searched first for data, and the ``path`` of the picture,
beside which they write their numbers as JSON (None writes none).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from equipoise.fixed_point import watch_solves
from equipoise.gradients import ImplicitGradient
from equipoise.lab.data.base import spread
from equipoise.lab.results.figures import (
    BLUE,
    GREEN,
    ORANGE,
    RESIDUAL,
    colors,
    curve,
    first_solve,
    legend_below,
    panels,
    percentages,
    plain,
    shades,
    tidy,
    trace_residuals,
    whole_numbers,
)
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of, open_checkpoint
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import DIRECTIONS, prepared, quiet_failures
from equipoise.operators import MonotoneProblem
from equipoise.operators.splitting import ForwardBackward, PeacemanRachford, SplittingSolver
from equipoise.papers.drawing import check_counts, describe, draw_residuals, equilibrium_of, reached, write_numbers
from equipoise.problem.layout import leaves, rebuild
from equipoise.stability import spectral_radius
from equipoise.tolerance import Tolerance

MIN_ALPHA = 2.0**-16
CHOICES = {
    "one": ("alpha = 1", ORANGE, "-"),
    "best": ("best of 1, 1/2, 1/4, ...", BLUE, "-"),
    "auto": ("auto", GREEN, "--"),
}


# Figures 1 and F1


def accuracy(runs: Sequence[Run], published: Mapping[str, float] | None = None, path: Path | None = None) -> Figure:
    """Plot the test accuracy after every epoch, one panel per data set (figures 1 and F1).

    Args:
        runs: runs trained with ``training.test = "epoch"``.
        published: accuracies printed in the paper, keyed by recipe; drawn dotted.
    """
    measured = [accuracy_of(run, (published or {}).get(run.facts["recipe"])) for run in runs]
    write_numbers(path, {"runs": measured})
    names = list(dict.fromkeys(run["data"] for run in measured))
    figure, axes = panels(1, len(names), height=4.6)
    for axis, data in zip(axes[0], names, strict=True):
        members = [run for run in measured if run["data"] == data]
        for run, color in zip(members, colors(len(members)), strict=True):
            label = run["title"].partition(", ")[2] or run["title"]
            if (level := run["published"]) is not None:
                axis.axhline(level, color=color, linestyle=":", linewidth=1.2)
                label += f" (paper: {level:.1%})"
            curve(axis, list(zip(run["epoch"], run["accuracy"], strict=True)), label, color)
        axis.set(xlabel="epoch", title=plain(members[0]["title"].partition(", ")[0]))
        percentages(axis)
        whole_numbers(axis.xaxis)
        legend_below(axis, columns=1)
    axes[0][0].set_ylabel("test accuracy")
    return figure


def accuracy_of(run: Run, published: float | None) -> dict[str, Any]:
    """Return the test accuracy that a run logged after each epoch."""
    epochs = [record for record in run.epochs() if "accuracy" in record.get("test", {})]
    if not epochs:
        raise ValueError(f'{run.folder} has no test accuracy per epoch: train it with training.test="epoch".')
    return {
        **describe(run),
        "data": run.recipe.data.name,
        "published": published,
        "epoch": [record["epoch"] for record in epochs],
        "accuracy": [record["test"]["accuracy"] for record in epochs],
    }


# Figures 2 and F2


def iterations(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    direction: str = "forward",
    samples: int = 128,
    path: Path | None = None,
) -> Figure:
    """Plot Peaceman-Rachford steps over training for the best alpha, alpha = 1 and "auto" (figures 2 and F2).

    After each epoch, alpha is halved from 1 for as long as the median number of steps falls (E.2), and twice more to
    confirm. Solves stop at the run's tolerance on the exact residual. Thick lines are medians over the samples, thin
    lines maxima.

    Args:
        runs: runs trained with ``training.keep_every``; one column each.
        direction: solves to draw, "forward" or "backward"; the JSON file contains both.
        samples: number of training samples, evenly spaced.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; allowed: {', '.join(map(repr, DIRECTIONS))}.")
    check_counts(samples=(samples, 1))
    measured = [iterations_of(run, machine, folders, samples) for run in runs]
    write_numbers(path, {"runs": measured})
    figure, axes = panels(2, len(measured), height=5.6, sharex="col", height_ratios=(3, 2))
    for steps, alphas, run in zip(*axes, measured, strict=True):
        draw_iterations(steps, alphas, run["epochs"], direction)
        steps.set_title(plain(run["title"]), fontsize=11)
    axes[0][0].set_ylabel(f"{direction} steps")
    axes[1][0].set_ylabel("alpha")
    return figure


def draw_iterations(steps: Axes, alphas: Axes, epochs: list[dict[str, Any]], direction: str) -> None:
    """Draw one column: numbers of steps above, alphas below."""
    at = [record["epoch"] for record in epochs]
    for choice, (name, color, style) in CHOICES.items():
        chosen = [record[direction][choice] for record in epochs]
        for axis, key in ((steps, "median"), (alphas, "alpha")):
            curve(axis, [(epoch, numbers[key]) for epoch, numbers in zip(at, chosen, strict=True)], name, color, style)
        steps.plot(at, [numbers["max"] for numbers in chosen], style, color=color, linewidth=0.6)
    steps.plot([], [], color="0.4", linewidth=0.6, label="thin: maximum over the samples")
    steps.set_ylim(bottom=0)
    steps.legend(fontsize=9, frameon=False)
    for axis in (steps, alphas):
        tidy(axis)
        whole_numbers(axis.xaxis)
    whole_numbers(steps.yaxis)
    alphas.set_yscale("log", base=2)
    alphas.yaxis.set_minor_locator(NullLocator())
    alphas.yaxis.set_major_formatter(lambda value, _: fraction(value))
    alphas.set_xlabel("epoch")


def iterations_of(run: Run, machine: Machine, folders: Sequence[Path], samples: int) -> dict[str, Any]:
    """Measure the steps at each kept epoch of a run, and the largest excess of "auto" over the best alpha."""
    kept = run.kept()
    if not kept:
        raise ValueError(f"{run.folder} has no checkpoints of its epochs: train it with training.keep_every=1.")
    trained = open_trained(run, machine)
    relative = equilibrium_of(trained, MonotoneProblem).tolerance.relative
    split = spread(data_of(run, trained.recipe, folders).train, samples)
    (batch,) = prepared(split, trained.task, trained.setting, len(split))
    epochs = []
    for epoch, file in kept:
        model = trained.setting.place(open_checkpoint(file, run.trust)[0])
        epochs.append({"epoch": epoch, **steps_by_alpha(replace(trained, model=model, file=file), batch)})
    summary = {
        direction: {
            "auto above best": max(e[direction]["auto"]["median"] - e[direction]["best"]["median"] for e in epochs),
            "not converged": sum(n["failed"] for e in epochs for n in (*e[direction]["tried"], e[direction]["auto"])),
        }
        for direction in DIRECTIONS
    }
    return {**describe(run), "samples": len(split), "tolerance": relative, "epochs": epochs, "summary": summary}


def steps_by_alpha(trained: Trained, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Measure the steps for alphas halved from 1, and for "auto"."""
    tried: list[dict[str, Any]] = []
    while not settled(tried, len(batch[0])):
        tried.append(steps_at(trained, batch, 0.5 ** len(tried)))
    automatic = steps_at(trained, batch, "auto")
    return {
        "L": equilibrium_of(trained, MonotoneProblem).f.operator.lipschitz_bound(),
        **{
            direction: {
                "best": tried[best(tried, direction)][direction],
                "one": tried[0][direction],
                "auto": automatic[direction],
                "tried": [numbers[direction] for numbers in tried],
            }
            for direction in DIRECTIONS
        },
    }


def best(tried: list[dict[str, Any]], direction: str) -> int:
    """Return the index of the alpha with the lowest median number of steps; ties are broken by the mean."""
    return min(range(len(tried)), key=lambda i: (tried[i][direction]["median"], tried[i][direction]["mean"]))


def settled(tried: list[dict[str, Any]], samples: int) -> bool:
    """Return whether the last two halvings improved neither direction, and most samples were solved before."""
    if len(tried) < 3:
        return False
    places = {direction: best(tried, direction) for direction in DIRECTIONS}
    solved = all(2 * tried[place][direction]["failed"] < samples for direction, place in places.items())
    return tried[-1]["forward"]["alpha"] <= MIN_ALPHA or (solved and max(places.values()) <= len(tried) - 3)


def steps_at(trained: Trained, batch: tuple[Tensor, ...], alpha: float | str) -> dict[str, Any]:
    """Count the forward and backward steps of each sample of a batch, for the gradient of the task's loss."""
    layer, solver = equilibrium_of(trained, MonotoneProblem), PeacemanRachford(alpha)
    layer.solver, layer.gradient = solver, ImplicitGradient()
    step_size = alpha_of(solver, layer)
    with quiet_failures(), trained.setting.autocast(), watch_solves() as solves:
        trained.task.loss(trained.model, batch)[0].backward()
    numbers = {}
    for direction, statistics in zip(DIRECTIONS, (solves[0].stats, solves[0].backward), strict=True):
        assert statistics is not None
        numbers[direction] = {
            "alpha": step_size,
            "median": int(statistics.steps.median()),
            "mean": statistics.steps.double().mean().item(),
            "max": int(statistics.steps.max()),
            "failed": int((~statistics.converged).sum()),
        }
    return numbers


# Figure 3


def convergence(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 64,
    halvings: int = 6,
    relative: float = 1e-5,
    max_steps: int = 100,
    path: Path | None = None,
) -> Figure:
    """Plot residuals of Peaceman-Rachford and forward-backward splitting for many alphas (figure 3).

    Args:
        runs: trained runs; one row each.
        samples: number of test samples, evenly spaced; their median is drawn.
        halvings: number of times alpha is halved from 1; for forward-backward, until convergence is certain for two.
        relative: relative tolerance; tighter than in training.
        max_steps: maximum number of steps.
    """
    check_counts(samples=(samples, 1))
    tolerance = Tolerance(relative=relative, max_steps=max_steps, patience=None)
    measured = [convergence_of(run, machine, folders, samples, halvings, tolerance) for run in runs]
    write_numbers(path, {"tolerance": relative, "max steps": max_steps, "runs": measured})
    figure, axes = panels(len(runs), 2, height=6.2 * len(runs), sharex=True, sharey=True)
    for run, (reflecting, stepping) in zip(measured, axes, strict=True):
        limit, certain = run["largest alpha"]["measured"], run["largest alpha"]["certain"]
        draw_alphas(reflecting, run["peaceman-rachford"], relative)
        reflecting.set_title(f"{plain(run['title'])}\nPeaceman-Rachford: converges for every alpha", fontsize=11)
        draw_alphas(stepping, run["forward-backward"], relative, limit)
        bound = f"$2m/L^2$ = {limit:.2g} (certified: {certain:.2g})"
        stepping.set_title(f"Forward-backward: converges for alpha below\n{bound}; dashed: above", fontsize=11)
        reflecting.set_ylabel(RESIDUAL.format(f="f"))
    return figure


def draw_alphas(axis: Axes, curves: list[dict[str, Any]], tolerance: float, limit: float = math.inf) -> None:
    """Draw one panel: a curve per alpha, lighter as it falls, with "auto" in front and alphas above a limit dashed."""
    for numbers, shade in zip(curves, shades(len(curves)), strict=True):
        auto, residuals = numbers["auto"], numbers["residual"]
        name = f"auto = {numbers['alpha']:.2g}" if auto else fraction(numbers["alpha"])
        end = numbers["steps"] or (f"{residuals[-1]:.1g} left" if residuals[-1] < residuals[0] else "diverges")
        style = (ORANGE if auto else shade, "--" if numbers["alpha"] >= limit else "-", "")
        draw_residuals(axis, f"{name}: {end}", residuals, style, linewidth=2.5 if auto else 1.5, zorder=2 + auto)
    axis.axhline(tolerance, color="0.3", linestyle=":", linewidth=1)
    axis.set(yscale="log", ylim=(tolerance / 3, 3), xlabel="steps")
    whole_numbers(axis.xaxis)
    legend_below(axis, columns=3, title="alpha: steps to the tolerance, or final residual")


@torch.no_grad()
def convergence_of(
    run: Run, machine: Machine, folders: Sequence[Path], samples: int, halvings: int, tolerance: Tolerance
) -> dict[str, Any]:
    """Measure both methods on a trained model, and the largest alpha for which forward-backward surely converges."""
    trained = open_trained(run, machine)
    split = spread(data_of(run, trained.recipe, folders).test, samples)
    with quiet_failures(), trained.setting.autocast():
        operator = equilibrium_of(trained, MonotoneProblem).f.operator
        layer, inputs, z0 = first_solve(trained, [equilibrium_of(trained, MonotoneProblem)], split)
        measured, bound = norm(operator, layer.start(inputs)), operator.lipschitz_bound()
        certain = 2 * operator.m / bound**2
        second = 2 + math.floor(-math.log2(certain))  # the second power of 1/2 below it
        alphas = [0.5**k for k in range(1 + max(halvings, second))]
        solvers = {
            "peaceman-rachford": [PeacemanRachford(alpha) for alpha in (*alphas[: 1 + halvings], "auto")],
            "forward-backward": [ForwardBackward(alpha) for alpha in (*alphas, "auto")],
        }
        return {
            **describe(run),
            "samples": len(split),
            "m": operator.m,
            "L": {"measured": measured, "bound": bound},
            "largest alpha": {"measured": 2 * operator.m / measured**2, "certain": certain},
            **{
                name: [residuals_of(layer, inputs, z0, solver, tolerance) for solver in each]
                for name, each in solvers.items()
            },
        }


def residuals_of(layer: Any, inputs: Any, z0: Any, solver: SplittingSolver, tolerance: Tolerance) -> dict[str, Any]:
    """Measure the median residual at every step until it is within the tolerance."""
    trace = trace_residuals(layer, inputs, z0, solver, tolerance)
    medians = trace.residuals.median(dim=1).values.tolist()
    steps = reached(medians, tolerance.relative)
    return {
        "alpha": alpha_of(solver, layer),
        "auto": solver.alpha == "auto",
        "converged": trace.statistics.converged.double().mean().item(),
        "steps": steps,
        "residual": medians[:steps],
    }


def alpha_of(solver: SplittingSolver, layer: Any) -> float:
    return solver.automatic(layer.f.operator) if solver.alpha == "auto" else float(solver.alpha)


def norm(operator: Any, z: Any) -> float:
    """Estimate ||I - W||_2 from below, using Arnoldi's method on (I - W)^T (I - W)."""

    def minus(z: Any, image: Any) -> Any:
        return rebuild(z, [a - b for (_, a), (_, b) in zip(leaves(z, "z"), leaves(image, "W z"), strict=True)])

    def square(z: Any) -> Any:
        gap = minus(z, operator(z))
        return minus(gap, operator.adjoint(gap))

    one = rebuild(z, [part[:1] for _, part in leaves(z, "z")])
    generator = torch.Generator(leaves(z, "z")[0][1].device).manual_seed(0)
    return spectral_radius(square, one, generator=generator).item() ** 0.5


def fraction(alpha: float) -> str:
    return str(Fraction(alpha).limit_denominator(2**20))

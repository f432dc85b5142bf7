"""Figures of the monDEQ paper: accuracy and iterations over training, convergence over the step alpha.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), figures 1, 2, 3, F1 and F2. Each writes its
numbers as JSON beside the picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.fixed_point import Equilibrium, watch_solves
from equipoise.gradients import ImplicitGradient
from equipoise.lab.data.base import Split, spread
from equipoise.lab.results.figures import (
    BLUE,
    GREEN,
    ORANGE,
    about,
    colors,
    curve,
    first_solve,
    page,
    plain,
    tidy,
    traced,
    under,
    whole_numbers,
    write_beside,
)
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of, open_checkpoint
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import DIRECTIONS, prepared, quiet_failures
from equipoise.operators import MonotoneProblem
from equipoise.operators.splitting import ForwardBackward, PeacemanRachford, SplittingSolver
from equipoise.problem.layout import leaves, rebuild
from equipoise.stability import spectral_radius
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST = 2.0**-16  # no step below it is tried
CHOICES = {
    "one": ("alpha = 1", ORANGE, "-"),
    "best": ("best of 1, 1/2, 1/4, ...", BLUE, "-"),
    "auto": ("auto", GREEN, "--"),
}


# Figures 1 and F1


def accuracy(runs: Sequence[Run], published: Mapping[str, float] | None = None, path: Path | None = None) -> Figure:
    """Test accuracy after every epoch, a panel for each data set (figures 1 and F1).

    Args:
        runs: trained with ``training.test = "epoch"``.
        published: the accuracies that the paper prints, by recipe; dotted.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    found = [accuracy_of(run, (published or {}).get(run.facts["recipe"])) for run in runs]
    write_beside(path, {"runs": found})
    panels = {data: [run for run in found if run["data"] == data] for data in dict.fromkeys(r["data"] for r in found)}
    figure, axes = page(1, len(panels), height=4.6)
    for axis, members in zip(axes[0], panels.values(), strict=True):
        for run, color in zip(members, colors(len(members)), strict=True):
            name = run["title"].partition(", ")[2] or run["title"]
            if (number := run["published"]) is not None:
                axis.axhline(number, color=color, linestyle=":", linewidth=1.2)
                name += f" (paper: {number:.1%})"
            curve(axis, list(zip(run["epoch"], run["accuracy"], strict=True)), name, color)
        axis.set(xlabel="epoch", title=plain(members[0]["title"].partition(", ")[0]))
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        whole_numbers(axis.xaxis)
        under(axis, columns=1)
    axes[0][0].set_ylabel("test accuracy")
    return figure


def accuracy_of(run: Run, published: float | None) -> dict[str, Any]:
    """The test accuracy that a run logged after each epoch."""
    epochs = [record for record in run.epochs() if "accuracy" in record.get("test", {})]
    if not epochs:
        raise ValueError(f'{run.folder} has no test accuracies of its epochs: train it with training.test="epoch".')
    return {
        **about(run),
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
    """Steps of Peaceman-Rachford splitting over training for the best alpha, alpha = 1 and "auto" (figures 2 and F2).

    After each epoch alpha is halved from 1 on while the median of the steps falls (E.2), and twice more to be sure.
    Solves end at the run's tolerance of the exact residual. Thick are medians over the samples, thin the most of any.

    Args:
        runs: trained with ``training.keep_every``; each gets a column of its own.
        machine: where to solve.
        folders: to look for data in first.
        direction: which solves to draw, "forward" or "backward"; the numbers are those of both.
        samples: of the training split, spread over it evenly.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; allowed: {', '.join(map(repr, DIRECTIONS))}.")
    found = [iterations_of(run, machine, folders, samples) for run in runs]
    write_beside(path, {"runs": found})
    figure, axes = page(2, len(found), height=5.6, sharex="col", height_ratios=(3, 2))
    for steps, alphas, run in zip(*axes, found, strict=True):
        draw_iterations(steps, alphas, run["epochs"], direction)
        steps.set_title(plain(run["title"]), fontsize=11)
    axes[0][0].set_ylabel(f"{direction} steps")
    axes[1][0].set_ylabel("alpha")
    return figure


def draw_iterations(steps: Axes, alphas: Axes, epochs: list[dict[str, Any]], direction: str) -> None:
    """One column: the steps taken, and the alphas they were taken with."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    at = [record["epoch"] for record in epochs]
    for choice, (name, color, style) in CHOICES.items():
        chosen = [record[direction][choice] for record in epochs]
        medians = [numbers["median"] for numbers in chosen]
        curve(steps, list(zip(at, medians, strict=True)), name, color, style)
        steps.plot(at, [numbers["max"] for numbers in chosen], style, color=color, linewidth=0.6)
        curve(alphas, [(epoch, n["alpha"]) for epoch, n in zip(at, chosen, strict=True)], name, color, style)
    steps.plot([], [], color="0.4", linewidth=0.6, label="thin: the most of any sample")
    steps.set_ylim(bottom=0)
    steps.legend(fontsize=9, frameon=False)
    for axis in (steps, alphas):
        tidy(axis)
        whole_numbers(axis.xaxis)
    whole_numbers(steps.yaxis)
    alphas.set_yscale("log", base=2)
    alphas.yaxis.set_minor_locator(NullLocator())
    alphas.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fraction(value)))
    alphas.set_xlabel("epoch")


def iterations_of(run: Run, machine: Machine, folders: Sequence[Path], samples: int) -> dict[str, Any]:
    """What each kept epoch of a run takes, and how far "auto" is from the best at worst."""
    kept = run.kept()
    if not kept:
        raise ValueError(f"{run.folder} has no weights of its epochs: train it with training.keep_every=1.")
    trained = open_trained(run, machine)
    split = some(data_of(run, trained.recipe, folders).train, samples)
    (batch,) = prepared(split, trained.task, trained.setting, len(split))()
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
    relative = monotone_layer(trained).tolerance.relative
    return {**about(run), "samples": len(split), "tolerance": relative, "epochs": epochs, "summary": summary}


def steps_by_alpha(trained: Trained, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Steps over alphas halved from 1 on, and with "auto"."""
    tried: list[dict[str, Any]] = []
    while not settled(tried, len(batch[0])):
        tried.append(steps_at(trained, batch, 0.5 ** len(tried)))
    automatic = steps_at(trained, batch, "auto")
    return {
        "L": monotone_layer(trained).f.operator.lipschitz_bound(),
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
    """Which of the alphas takes the fewest steps by the median, and of several by the mean."""
    return min(range(len(tried)), key=lambda i: (tried[i][direction]["median"], tried[i][direction]["mean"]))


def settled(tried: list[dict[str, Any]], samples: int) -> bool:
    """Whether the last two halvings brought nothing in either direction, and most samples were solved before."""
    if len(tried) < 3:
        return False
    found = {direction: best(tried, direction) for direction in DIRECTIONS}
    solved = all(2 * tried[place][direction]["failed"] < samples for direction, place in found.items())
    return tried[-1]["forward"]["alpha"] <= SMALLEST or (solved and max(found.values()) <= len(tried) - 3)


def steps_at(trained: Trained, batch: tuple[Tensor, ...], alpha: float | str) -> dict[str, Any]:
    """Steps of the samples of a batch, forward and backward, with the gradient of the task's loss."""
    layer, solver = monotone_layer(trained), PeacemanRachford(alpha)
    layer.solver, layer.gradient = solver, ImplicitGradient()
    step = solver.automatic(layer.f.operator) if alpha == "auto" else float(alpha)
    with quiet_failures(), trained.setting.autocast(), watch_solves() as solves:
        trained.task.loss(trained.model, batch)[0].backward()
    found = {}
    for direction, statistics in zip(DIRECTIONS, (solves[0].stats, solves[0].backward), strict=True):
        assert statistics is not None
        found[direction] = {
            "alpha": step,
            "median": int(statistics.steps.median()),
            "mean": statistics.steps.double().mean().item(),
            "max": int(statistics.steps.max()),
            "failed": int((~statistics.converged).sum()),
        }
    return found


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
    """Residuals of Peaceman-Rachford and forward-backward splitting for many alphas (figure 3).

    Args:
        runs: trained; each gets a row of its own.
        machine: where to solve.
        folders: to look for data in first.
        samples: of the test split, spread over it evenly; their median is drawn.
        halvings: alpha is 1, 1/2, ... halved so often; for forward-backward until two are certain to converge.
        relative: the tolerance to solve to, which is tighter than one trains with.
        max_steps: at most.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    tolerance = Tolerance(relative=relative, max_steps=max_steps, patience=None)
    found = [convergence_of(run, machine, folders, samples, halvings, tolerance) for run in runs]
    write_beside(path, {"tolerance": relative, "max steps": max_steps, "runs": found})
    figure, axes = page(len(runs), 2, height=6.2 * len(runs), sharex=True, sharey=True)
    for run, (reflecting, stepping) in zip(found, axes, strict=True):
        limit, certain = run["largest alpha"]["measured"], run["largest alpha"]["certain"]
        draw_residuals(reflecting, run["peaceman-rachford"], tolerance)
        reflecting.set_title(f"{plain(run['title'])}\nPeaceman-Rachford converges for every alpha", fontsize=11)
        draw_residuals(stepping, run["forward-backward"], tolerance, limit)
        stepping.set_title(
            f"Forward-backward is sure to converge below\n"
            f"$2m/L^2$ = {limit:.2g} (certified: {certain:.2g}); dashed: above",
            fontsize=11,
        )
        reflecting.set_ylabel(r"relative residual  $\|f(z)-z\| \,/\, \|f(z)\|$")
    return figure


def draw_residuals(axis: Axes, curves: list[dict[str, Any]], tolerance: Tolerance, limit: float = torch.inf) -> None:
    """One panel: a line for each alpha, from dark to light as it falls, "auto" in front."""
    from matplotlib import colormaps

    for place, numbers in enumerate(curves):
        auto, residuals = numbers["auto"], numbers["residual"]
        name = f"auto = {numbers['alpha']:.2g}" if auto else fraction(numbers["alpha"])
        ended = numbers["steps"] or (f"{residuals[-1]:.1g} left" if residuals[-1] < residuals[0] else "diverges")
        axis.plot(
            range(1, len(residuals) + 1),
            residuals,
            "--" if numbers["alpha"] >= limit else "-",
            color=ORANGE if auto else colormaps["viridis"](0.95 * place / len(curves)),
            linewidth=2.5 if auto else 1.5,
            zorder=3 if auto else 2,
            label=f"{name}: {ended}",
        )
    axis.axhline(tolerance.relative, color="0.3", linestyle=":", linewidth=1)
    axis.set(yscale="log", ylim=(tolerance.relative / 3, 3))
    axis.set_xlabel("steps")
    whole_numbers(axis.xaxis)
    under(axis, columns=3, title="alpha: steps to the tolerance, or the residual left")


@torch.no_grad()
def convergence_of(
    run: Run, machine: Machine, folders: Sequence[Path], samples: int, halvings: int, tolerance: Tolerance
) -> dict[str, Any]:
    """How both methods converge on a trained model, and up to which alpha forward-backward is sure to."""
    trained = open_trained(run, machine)
    split = some(data_of(run, trained.recipe, folders).test, samples)
    with quiet_failures(), trained.setting.autocast():
        layer, inputs, z0 = first_solve(trained, [monotone_layer(trained)], split)
        operator: Any = monotone_layer(trained).f.operator
        measured, bound = norm(operator, layer.start(inputs)), operator.lipschitz_bound()
        certain = 2 * operator.m / bound**2
        second = 2 + math.floor(-math.log2(certain))  # the second power of 1/2 that is below it
        steps = [0.5**k for k in range(1 + max(halvings, second))]
        solvers = {
            "peaceman-rachford": [PeacemanRachford(alpha) for alpha in (*steps[: 1 + halvings], "auto")],
            "forward-backward": [ForwardBackward(alpha) for alpha in (*steps, "auto")],
        }
        return {
            **about(run),
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
    """The median of the residuals at every step until it is within the tolerance."""
    statistics, _ = traced(layer, inputs, z0, solver, tolerance)
    assert statistics.trace is not None
    trace = statistics.trace.double().cpu().nan_to_num(nan=torch.inf)
    medians = trace.quantile(0.5, dim=1, interpolation="lower").tolist()
    steps = next((step for step, residual in enumerate(medians, 1) if residual <= tolerance.relative), None)
    return {
        "alpha": solver.automatic(layer.f.operator) if solver.alpha == "auto" else solver.alpha,
        "auto": solver.alpha == "auto",
        "converged": statistics.converged.double().mean().item(),
        "steps": steps,
        "residual": medians[:steps],
    }


def norm(operator: Any, z: Any) -> float:
    """||I - W||_2 by Arnoldi's method on (I - W)^T (I - W): close, from below."""

    def minus(z: Any, image: Any) -> Any:
        return rebuild(z, [a - b for (_, a), (_, b) in zip(leaves(z, "z"), leaves(image, "W z"), strict=True)])

    def square(z: Any) -> Any:
        gap = minus(z, operator(z))
        return minus(gap, operator.adjoint(gap))

    one = rebuild(z, [part[:1] for _, part in leaves(z, "z")])
    generator = torch.Generator(leaves(z, "z")[0][1].device).manual_seed(0)
    return spectral_radius(square, one, generator=generator).item() ** 0.5


# Parts


def monotone_layer(trained: Trained) -> Any:
    """The equilibrium of a model that splitting can solve."""
    for layer in trained.model.modules():
        if isinstance(layer, Equilibrium) and isinstance(layer.f, MonotoneProblem):
            return layer
    raise ValueError(f"{trained.file}: the model solves no MonotoneProblem; splitting needs the structure of one.")


def some(split: Split, samples: int) -> Split:
    """So many samples from all over a split."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; at least 1 sample must be solved.")
    return spread(split, samples)


def fraction(alpha: float) -> str:
    """1/8 for 0.125."""
    return str(Fraction(alpha).limit_denominator(2**20))

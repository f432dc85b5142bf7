"""Figures of the MOptEq paper: coupling of branches, perturbations and attacks, convergence.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), figures 2 to 4. Each
figure shows what is measured, whether or not it agrees with the paper. Functions take trained ``runs``, the ``machine``
to solve on, ``folders`` searched first for data, and the ``path`` of the picture, beside which they write their numbers
as JSON (None writes none).
"""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.fixed_point import Equilibrium
from equipoise.lab.data.base import Batch, Subset
from equipoise.lab.recipes.build import build_task
from equipoise.lab.results.figures import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    check_number,
    colors,
    legend_below,
    middle_80,
    panels,
    percentages,
    shades,
    tidy,
    trace_residuals,
    whole_numbers,
    wrapped,
)
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.descent import ProximalGradient
from equipoise.models.opteq.model import BranchModel
from equipoise.models.opteq.ring import SIGNS, Images, Ring, carry, heritage
from equipoise.models.parts.context_managers import exact_gradients
from equipoise.papers.drawing import (
    CurveStyle,
    check_counts,
    curve_styles,
    describe,
    draw_residuals,
    finish_residuals,
    levels_reached,
    per_evaluation,
    random_rows,
    tell_apart,
    write_numbers,
)
from equipoise.solvers import Anderson, Broyden, Picard, Solver
from equipoise.tasks.robustness import pgd
from equipoise.tolerance import Tolerance

FINEST = 1e-12  # residuals below it are rounding errors
LEVELS = (1e-3, 1e-6, 1e-9)  # residuals; the summary counts the evaluations to reach each
PERTURBATIONS = {
    "reconstructed": ("reconstructed", ORANGE),
    "bernoulli": (r"random, $\epsilon$ or $-\epsilon$", BLUE),
    "uniform": (r"random, uniform between $-\epsilon$ and $\epsilon$", GREEN),
}


# Figure 2


def coupling(
    runs: Sequence[Run], machine: Machine, folders: Sequence[Path] = (), samples: int = 100, path: Path | None = None
) -> Figure:
    """Plot average H against average D of each sample, and the similarity of channels of two branches (figure 2).

    Average H is the sum of H(z_i, z_j) over all branches i and both neighbours j of each, divided by L C; average D is
    that of D divided by L (C^2 - C). Both grow with the square of z, whose average |z|^2 / (L C) is among the numbers.
    The heat map shows |<channel k of branch 2, channel l of branch 1>| for one sample. The paper does not specify a
    normalisation, so none is used: the colours of a map range from 0 to its largest entry.

    Args:
        runs: runs of models with several branches, trained on the same data; one column each.
        samples: number of random test samples, the same ones for every run; the heat maps show the first.
    """
    check_counts(samples=(samples, 2))
    if len({repr(replace(run.recipe.data, validation=0)) for run in runs}) > 1:
        raise ValueError("the runs were trained on different data; this figure compares them on the same samples.")
    measured = [coupling_of(run, machine, folders, samples) for run in runs]
    tell_apart(measured, runs)
    write_numbers(path, {"runs": measured})
    figure, axes = panels(2, len(measured), height=9.6, height_ratios=(4, 5))
    for run, cloud, squares in zip(measured, *axes, strict=True):
        if cloud is not axes[0][0]:
            cloud.sharex(axes[0][0])
            cloud.sharey(axes[0][0])
        draw_cloud(cloud, run)
        draw_map(squares, run["heat map"])
    axes[0][0].set_ylabel("average H")
    return figure


@torch.no_grad()
def coupling_of(run: Run, machine: Machine, folders: Sequence[Path], samples: int) -> dict[str, Any]:
    """Measure the coupling of the branches of a run's model for each sample, and the heat map of the first."""
    trained = open_trained(run, machine)
    model = branch_model(trained)
    branches, channels = len(model.cell.sizes), model.cell.channels
    if branches < 2 or channels < 2:
        raise ValueError(
            f"{trained.file}: the model has {branches} branches of {channels} channels; this figure requires at least "
            "2 of each."
        )
    alike, apart, sizes, products = [], [], [], []
    with quiet_failures(), trained.setting.autocast():
        for images, _ in random_batches(run, trained, folders, samples):
            z: Images = tuple(part.double() for part in model.branches(model.features(images)))
            alike.append(2 * heritage(z) / (branches * channels))  # every edge joins two branches and counts for both
            apart.append(2 * Ring().total_diversity(z) / (branches * channels * (channels - 1)))
            sizes.append(sum(part.square().sum(dim=(1, 2, 3)) for part in z) / (branches * channels))
            products.append(torch.bmm(carry(z[1], z[0].shape[2:]).flatten(2), z[0].flatten(2).mT).abs())
    scores = torch.cat(products).cpu()
    measured = {
        "average H": torch.cat(alike).cpu(),
        "average D": torch.cat(apart).cpu(),
        "average square": torch.cat(sizes).cpu(),
        "diagonal dominance": dominance(scores),
    }
    return {
        **describe(run),
        "samples": len(scores),
        "branches": branches,
        "channels": channels,
        "summary": {name: {"mean": each.mean().item(), "std": each.std().item()} for name, each in measured.items()},
        **{name: each.tolist() for name, each in measured.items()},
        "heat map": scores[0].tolist(),
    }


def dominance(scores: Tensor) -> Tensor:
    """Return the mean on the diagonal divided by the mean off it, for each (channels, channels) matrix."""
    diagonal = scores.diagonal(dim1=1, dim2=2)
    rest = (scores.sum(dim=(1, 2)) - diagonal.sum(dim=1)) / (scores[0].numel() - len(scores[0]))
    return diagonal.mean(dim=1) / rest


def draw_cloud(axis: Axes, run: dict[str, Any]) -> None:
    """Draw a point per sample, and a cross at the mean with arms of one standard deviation."""
    across, up = run["summary"]["average D"], run["summary"]["average H"]
    axis.scatter(run["average D"], run["average H"], s=18, color=BLUE, alpha=0.5, linewidth=0)
    axis.errorbar(across["mean"], up["mean"], xerr=across["std"], yerr=up["std"], color=ORANGE, linewidth=2)
    axis.axhline(0, color="0.3", linewidth=0.8)
    means = (f"average {name} {n['mean']:.3g} $\\pm$ {n['std']:.2g}" for name, n in (("H", up), ("D", across)))
    axis.set_title(f"{wrapped(run['title'])}\n{', '.join(means)}", fontsize=11)
    axis.set_xlabel("average D")
    tidy(axis)


def draw_map(axis: Axes, rows: list[list[float]]) -> None:
    scores = torch.tensor(rows)
    axis.figure.colorbar(axis.imshow(scores.numpy(), cmap="viridis", vmin=0), ax=axis, shrink=0.85)
    axis.set_title(f"one sample: mean on / mean off the diagonal = {dominance(scores[None]).item():.3g}", fontsize=11)
    axis.set(xlabel="channel of branch 1", ylabel="channel of branch 2")
    for side in (axis.xaxis, axis.yaxis):
        whole_numbers(side)


# Figure 3a


def perturbation(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    eps: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    samples: int = 1000,
    trials: int = 5,
    path: Path | None = None,
) -> Figure:
    """Plot test accuracy against the size of a perturbation of g, reconstructed or random (figure 3a).

    The reconstructed perturbation is g - epsilon sign(U^T y), with y = W^-T z from the model's own solve for g. By
    proposition 2 it raises the hidden objective, and the paper finds that it costs far more accuracy than noise. Noise
    is epsilon or -epsilon with equal probability (equally large in every norm), or uniform between them (smaller by a
    factor of the square root of 3).

    Args:
        runs: runs of models with one branch; one panel each.
        eps: perturbation sizes, in units of g.
        samples: number of random test samples.
        trials: number of trials of each kind of noise; their mean and standard deviation are drawn.
    """
    check_rising("eps", eps, above=0)
    check_counts(samples=(samples, 1), trials=(trials, 2))
    measured = [perturbation_of(run, machine, folders, eps, samples, trials) for run in runs]
    write_numbers(path, {"eps": list(eps), "runs": measured})
    figure, axes = panels(1, len(measured), height=5.2, sharey=True)
    styles = curve_styles([color for _, color in PERTURBATIONS.values()])
    for axis, run in zip(axes[0], measured, strict=True):
        for (kind, (label, _)), style in zip(PERTURBATIONS.items(), styles, strict=True):
            numbers = run["accuracy"][kind]
            shares, spread = [run["clean accuracy"], *numbers["mean"]], [0.0, *numbers["std"]]
            draw_shares(axis, [0, *eps], shares, spread, label, style)
        axis.set_title(wrapped(run["title"]), fontsize=11)
        axis.set_xlabel(r"size $\epsilon$ of the perturbation of g")
        legend_below(axis, columns=1, title=f"random: mean and standard deviation of {trials} trials")
    axes[0][0].set_ylabel(f"accuracy on {measured[0]['samples']} test images")
    return figure


@torch.no_grad()
def perturbation_of(
    run: Run, machine: Machine, folders: Sequence[Path], eps: Sequence[float], samples: int, trials: int
) -> dict[str, Any]:
    """Measure a model's accuracy for every kind and size of perturbation."""
    trained = open_trained(run, machine)
    model = branch_model(trained)
    cell = model.cell
    if len(cell.sizes) > 1:
        raise ValueError(
            f"{trained.file}: the model has {len(cell.sizes)} branches; this figure perturbs what a single branch "
            "reconstructs: give a run of an OptEq."
        )
    right = {kind: torch.zeros(1 if kind == "reconstructed" else trials, len(eps)) for kind in PERTURBATIONS}
    generator, clean, total = torch.Generator().manual_seed(0), 0, 0
    with quiet_failures(), trained.setting.autocast():
        for images, labels in random_batches(run, trained, folders, samples):
            g = model.features(images)
            z = model.branches(g)
            clean, total = clean + count_correct(model.read(z), labels), total + len(labels)
            (y,) = cell.lift(z, *cell.prepare(g))
            for kind, counts in right.items():
                for trial in counts:
                    # A trial has the same direction for every size, so that curves differ by the size alone.
                    way = cell.reconstructed(0, y).sign() if kind == "reconstructed" else noise(kind, g, generator)
                    for i, size in enumerate(eps):
                        trial[i] += count_correct(model.classify(g - size * way), labels)
    return {
        **describe(run),
        "samples": total,
        "clean accuracy": clean / total,
        "accuracy": {kind: mean_and_std(counts.double() / total) for kind, counts in right.items()},
    }


def noise(kind: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform noise in [-1, 1] or its sign; drawn on the CPU, so that it is the same on every device."""
    drawn = 2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1
    return (drawn.sign() if kind == "bernoulli" else drawn).to(like)


def mean_and_std(shares: Tensor) -> dict[str, list[Any]]:
    """Summarise accuracies (trials, sizes) over the trials; the standard deviation of a single trial is 0."""
    std = shares.std(dim=0) if len(shares) > 1 else torch.zeros(shares.shape[1])
    return {"mean": shares.mean(dim=0).tolist(), "std": std.tolist(), "trials": shares.tolist()}


# Figure 3b


def attack(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    iterations: Sequence[int] = (0, 1, 2, 3, 5, 10, 20),
    radius: float = 8 / 255,
    step_size: float | None = None,
    samples: int = 500,
    path: Path | None = None,
) -> Figure:
    """Plot accuracy under projected gradient descent against its number of iterations (figure 3b).

    The paper finds that a model trained with perturbed branches loses less accuracy. The attack uses the gradient of
    the equilibrium itself, whatever the gradient rule of training: the one-step gradient would flatter the model. It
    starts at the same random points for every run and number of iterations, and uses a fixed step size.

    Args:
        runs: runs of classifiers with branches; one curve each.
        iterations: numbers of iterations; 0 means no attack.
        radius: maximum change of a pixel, which is between 0 and 1.
        step_size: step size of an iteration; None for a quarter of the radius.
        samples: number of random test samples.
    """
    check_rising("iterations", iterations, at_least=0, whole=True)
    check_counts(samples=(samples, 1))
    check_number("radius", radius, above=0)
    step_size = radius / 4 if step_size is None else step_size
    check_number("step_size", step_size, above=0)
    budget = {"radius": radius, "step_size": step_size}
    measured = [attack_of(run, machine, folders, iterations, budget, samples) for run in runs]
    tell_apart(measured, runs)
    write_numbers(path, {"iterations": list(iterations), **budget, "runs": measured})
    figure, ((axis,),) = panels(1, 1, height=5.4)
    for run, style in zip(measured, curve_styles(colors(len(measured))), strict=True):
        draw_shares(axis, iterations, run["accuracy"], run["standard error"], wrapped(run["title"]), style)
    in_255ths = f"radius {255 * radius:g}/255, step size {255 * step_size:g}/255"
    axis.set_xlabel(f"iterations of the attack ($\\ell_\\infty$, {in_255ths})")
    axis.set_ylabel(f"accuracy on {measured[0]['samples']} test images")
    whole_numbers(axis.xaxis)
    legend_below(axis, columns=1, title="bars: one standard error")
    return figure


def attack_of(
    run: Run,
    machine: Machine,
    folders: Sequence[Path],
    iterations: Sequence[int],
    budget: Mapping[str, float],
    samples: int,
) -> dict[str, Any]:
    """Measure a model's accuracy after an attack of every length."""
    trained = open_trained(run, machine)
    model = branch_model(trained)
    right, total = [0] * len(iterations), 0
    with quiet_failures(), trained.setting.autocast(), exact_gradients(model), torch.no_grad():
        for number, (images, labels) in enumerate(random_batches(run, trained, folders, samples)):
            total += len(labels)
            known = model(images).argmax(1) == labels
            for i, steps in enumerate(iterations):
                left = known
                if steps:
                    seed_everything("attack", number)  # the same start for every run and every number of steps
                    left = known & (model(pgd(model, images, labels, steps=steps, **budget)).argmax(1) == labels)
                right[i] += int(left.sum())
    shares = [number / total for number in right]
    errors = [standard_error(share, total) for share in shares]
    return {**describe(run), "samples": total, "accuracy": shares, "standard error": errors}


# Figure 3c


def augmented(runs: Sequence[Run], folders: Sequence[Path] = (), path: Path | None = None) -> Figure:
    """Plot test accuracy against the weight gamma of a coupling in the loss, beside a coupled model (figure 3c).

    The paper finds the best gamma better than 0, and a MOptEq better than every gamma.

    Args:
        runs: finished runs: first one of a MOptEq, then one of the task "augmented-classification" for every gamma, in
            any order.
    """
    coupled, *swept = (augmented_of(run, folders) for run in runs)
    if coupled["gamma"] is not None or not swept or None in [run["gamma"] for run in swept]:
        tasks = ", ".join(run["task"] for run in (coupled, *swept))
        raise ValueError(
            f"the runs have the tasks {tasks}; the first must not have the task 'augmented-classification', and one or "
            "more others must have it."
        )
    swept.sort(key=lambda run: run["gamma"])
    gammas = [run["gamma"] for run in swept]
    if len(set(gammas)) < len(gammas):
        raise ValueError(f"the runs have the gammas {', '.join(f'{g:g}' for g in gammas)}; all must differ.")
    write_numbers(path, {"coupled": coupled, "augmented": swept})
    figure, ((axis,),) = panels(1, 1, height=5.4)
    shares, errors = ([run[key] for run in swept] for key in ("accuracy", "standard error"))
    draw_shares(axis, range(len(gammas)), shares, errors, wrapped(swept[0]["title"]), (BLUE, "-", "o"))
    level, error = coupled["accuracy"], coupled["standard error"]
    axis.axhline(level, color=ORANGE, linestyle="--", label=wrapped(coupled["title"]))
    axis.axhspan(level - error, level + error, color=ORANGE, alpha=0.15, linewidth=0)
    axis.set_xticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
    axis.margins(x=0.08)  # room for a long number at the end
    axis.set(xlabel=r"weight $\gamma$ of heritage and diversity in the loss", ylabel="test accuracy")
    legend_below(axis, columns=1, title="bars and band: one standard error")
    return figure


def augmented_of(run: Run, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the final test accuracy of a run, and its gamma if its task has one."""
    accuracy = ((run.result or {}).get("test") or {}).get("accuracy")
    if accuracy is None:
        raise ValueError(f"{run.folder} has no test accuracy; if training is unfinished: equipoise resume {run.folder}")
    recipe, data = run.recipe, data_of(run, run.recipe, folders)
    return {
        **describe(run),
        "task": recipe.task.name,
        "gamma": getattr(build_task(recipe, data.facts(), run.source.where), "gamma", None),
        "samples": len(data.test),
        "accuracy": accuracy,
        "standard error": standard_error(accuracy, len(data.test)),
    }


# Figure 4a


def diversity(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    lambdas: Sequence[float | str] = (0, 0.001, 0.01, "1/C", 0.1, 1),
    samples: int = 32,
    batch_size: int = 16,
    evaluations: int = 60,
    path: Path | None = None,
) -> Figure:
    """Plot residuals for several lambda, using Anderson and plain iteration, smooth and hard signs (figure 4a).

    The weights are those of the run; only lambda and the sign are replaced. The paper, whose sign is hard, claims that
    T is a contraction up to about lambda = 1/C. But the hard sign jumps where two channels are nearly orthogonal: no
    iteration gets below a certain residual, which grows with lambda. The paper plots the length of the last step; this
    figure plots the residual of T in float64, so that rounding errors do not hide the floor.

    Args:
        runs: one run of a model with branches.
        lambdas: numbers, or "1/C" for the inverse of the number of channels.
        samples: number of random test samples; their median and the band of the middle 80% are drawn.
        batch_size: number of samples solved at once.
        evaluations: number of evaluations of T, the first one at z0.
    """
    check_counts(samples=(samples, 1), batch_size=(batch_size, 1), evaluations=(evaluations, 2))
    check_lambdas(lambdas)
    if len(runs) != 1:
        raise ValueError(f"this figure requires one run, got {len(runs)}.")
    model, features = open_features(runs[0], machine, folders, samples, batch_size)
    cell, channels, norm = model.cell, model.cell.channels, model.certificate().norm
    values = {}
    for entry in lambdas:
        name, value = (f"1/C = {1 / channels:.3g}", 1 / channels) if entry == "1/C" else (str(entry), float(entry))
        values[name] = value
    measured = []
    for name, solver in (("Anderson", solver_of(model, Anderson)), ("plain iteration", Picard())):
        for sign in SIGNS:
            curves = {}
            for label, value in values.items():
                other = altered(cell, ring=replace(cell.ring, diversity=value, sign=sign))
                curves[label] = {"lambda": value, **residuals(other, features, solver, evaluations)}
            measured.append({"solver": name, "options": repr(solver), "sign": sign, "curves": curves})
    numbers = {
        **describe(runs[0]),
        "samples": sum(map(len, features)),
        "channels": channels,
        "norm of W": norm,
        # Bound on a step's factor for fixed signs; a contraction requires it to be below 1.
        "factor": {label: norm**2 * (1 + value * (channels - 1)) for label, value in values.items()},
        "panels": measured,
    }
    write_numbers(path, {"evaluations": evaluations, "run": numbers})
    figure, axes = panels(2, 2, height=11.4, sharey=True)
    for axis, panel in zip(axes.flat, measured, strict=True):
        curves = {rf"$\lambda$ = {name}": curve for name, curve in panel["curves"].items()}
        draw_curves(axis, curves, curve_styles(shades(len(curves))))
        axis.set_title(f"{panel['sign']} sign, {panel['solver']}", fontsize=11)
    finish_residuals(axes, LEVELS, "T", columns=2)
    figure.suptitle(wrapped(numbers["title"]), fontsize=12)
    return figure


# Figure 4b


def solvers(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 8,
    batch_size: int = 4,
    evaluations: int = 60,
    path: Path | None = None,
) -> Figure:
    """Plot residuals of trained models for several solvers (figure 4b).

    Proximal gradient steps update all branches at once (order "jacobi"), the other solvers use the model's order; both
    have the same equilibria. Evaluations of the objective are not counted.

    Args:
        runs: runs of models with branches; one panel each.
        samples, batch_size, evaluations: see :func:`diversity`.
    """
    check_counts(samples=(samples, 1), batch_size=(batch_size, 1), evaluations=(evaluations, 2))
    measured = []
    for run in runs:
        model, features = open_features(run, machine, folders, samples, batch_size)
        cell = model.cell
        methods: dict[str, tuple[Branches, Solver]] = {
            "Anderson": (cell, solver_of(model, Anderson)),
            "Broyden": (cell, solver_of(model, Broyden)),
            "plain iteration": (cell, Picard()),
            "proximal gradient (jacobi)": (altered(cell, order="jacobi"), ProximalGradient()),
        }
        of_run = {
            **describe(run),
            "samples": sum(map(len, features)),
            "sizes": [list(size) for size in cell.sizes],
            "ring": repr(cell.ring),
            "solvers": {name: repr(solver) for name, (_, solver) in methods.items()},
            "curves": {name: residuals(f, features, solver, evaluations) for name, (f, solver) in methods.items()},
        }
        measured.append(of_run)
    write_numbers(path, {"evaluations": evaluations, "runs": measured})
    figure, axes = panels(1, len(measured), height=5.8, sharey=True)
    for axis, of_run in zip(axes[0], measured, strict=True):
        draw_curves(axis, of_run["curves"], curve_styles((BLUE, GREEN, ORANGE, PURPLE)))
        axis.set_title(wrapped(of_run["title"]), fontsize=11)
    finish_residuals(axes, LEVELS, "T")
    return figure


# Measuring


def branch_model(trained: Trained) -> BranchModel:
    if not isinstance(trained.model, BranchModel):
        kind = type(trained.model).__name__
        raise ValueError(f"{trained.file}: the model is a {kind}; this figure requires an OptEq, POptEq or MOptEq.")
    return trained.model


def random_batches(
    run: Run, trained: Trained, folders: Sequence[Path], samples: int, batch_size: int | None = None
) -> Iterator[Batch]:
    """Return random samples of a run's test split as prepared batches, the same ones on every call."""
    test = data_of(run, trained.recipe, folders).test
    size = batch_size or trained.recipe.training.evaluation_batch_size
    return prepared(Subset(test, random_rows(test, samples)), trained.task, trained.setting, size)


@torch.no_grad()
def open_features(
    run: Run, machine: Machine, folders: Sequence[Path], samples: int, batch_size: int
) -> tuple[BranchModel, list[Tensor]]:
    """Return a run's model and g of random test samples in batches, both in float64."""
    trained = open_trained(run, machine)
    model = branch_model(trained).double()
    batches = random_batches(run, trained, folders, samples, batch_size)
    return model, [model.features(images.double()) for images, *_ in batches]


def altered(cell: Branches, **changes: Any) -> Branches:
    """Return a T with the same weights and other attributes."""
    other = copy.copy(cell)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def solver_of(model: BranchModel, kind: type[Solver]) -> Solver:
    """Return the run's solver if it is of this class, else one with default options."""
    return model.equilibrium.solver if isinstance(model.equilibrium.solver, kind) else kind()


@torch.no_grad()
def residuals(cell: Branches, features: Sequence[Tensor], solver: Solver, evaluations: int) -> dict[str, Any]:
    """Measure the median residual over the samples after each evaluation, and the band of the middle 80%."""
    layer = Equilibrium(cell, initial=cell.start)
    tolerance = Tolerance(relative=FINEST, max_steps=evaluations, patience=None)
    with quiet_failures():
        traces = [trace_residuals(layer, cell.prepare(g), None, solver, tolerance) for g in features]
    low, median, high = middle_80(torch.cat([per_evaluation(trace, evaluations) for trace in traces], dim=1))
    return {"reached": levels_reached(median, LEVELS), "median": median, "low": low, "high": high}


def count_correct(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(1) == labels).sum())


def standard_error(share: float, samples: int) -> float:
    """Return the standard error of a share measured on a number of samples."""
    return math.sqrt(share * (1 - share) / samples)


# Drawing


def draw_shares(
    axis: Axes, at: Sequence[float], shares: Sequence[float], spread: Sequence[float], label: str, style: CurveStyle
) -> None:
    """Draw a curve of accuracies with error bars."""
    color, line, marker = style
    markers = {"marker": marker, "markersize": 5, "capsize": 2}
    axis.errorbar(at, shares, yerr=spread, linestyle=line, color=color, label=label, **markers)
    percentages(axis)


def draw_curves(axis: Axes, curves: Mapping[str, Any], styles: Sequence[CurveStyle]) -> None:
    """Draw medians with the band of the middle 80% of the samples."""
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        low, median, high = ([max(r, FINEST) for r in curve[key]] for key in ("low", "median", "high"))
        draw_residuals(axis, name, median, style, (low, high), counts=curve["reached"])


# Checks of options


def check_rising(name: str, values: Any, **bounds: Any) -> None:
    """Raise ValueError unless an option is a list of increasing numbers within bounds."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} must be a list of numbers, got {values!r}.")
    for i, value in enumerate(values):
        check_number(f"{name}[{i}]", value, **bounds)
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must be increasing, got {values!r}.")


def check_lambdas(lambdas: Any) -> None:
    if not isinstance(lambdas, list | tuple) or not 0 < len(set(map(str, lambdas))) == len(lambdas):
        raise ValueError(f"lambdas must be a list of distinct numbers or '1/C', got {lambdas!r}.")
    for i, entry in enumerate(lambdas):
        if entry != "1/C":
            check_number(f"lambdas[{i}] (if not '1/C')", entry, at_least=0)

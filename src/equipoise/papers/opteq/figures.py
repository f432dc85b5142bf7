"""Figures of the MOptEq paper: what couples branches, what perturbs them, how their equilibria converge.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), figures 2 to 4. Each
draws what is measured, be it as the paper says or not, and writes its numbers as JSON beside the picture.
"""

from __future__ import annotations

import copy
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.fixed_point import Equilibrium
from equipoise.lab.data.base import Batch, Subset
from equipoise.lab.recipes.build import build_task
from equipoise.lab.results.figures import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    about,
    colors,
    decades,
    heights,
    page,
    plain,
    reached,
    tidy,
    traced,
    under,
    whole_numbers,
    write_beside,
)
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.batches import seed_everything
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.lab.training.trainer import data_of
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.model import BranchModel
from equipoise.models.opteq.ring import SIGNS, Images, Ring, carry, heritage
from equipoise.models.parts.context_managers import exact_gradients
from equipoise.solvers import Anderson, Broyden, Picard, ProximalGradient, Solver
from equipoise.tasks.robustness import pgd
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FINEST = 1e-12  # what is left below it is rounding
LEVELS = (1e-3, 1e-6, 1e-9)  # of the residual: the summary says after how many evaluations each is reached
PERTURBATIONS = {
    "reconstructed": ("reconstructed", ORANGE),
    "bernoulli": (r"random, $\epsilon$ or $-\epsilon$", BLUE),
    "uniform": (r"random, uniform between $-\epsilon$ and $\epsilon$", GREEN),
}
MARKERS, STYLES = "os^vPD", ("-", "--", "-.", ":")

Look = tuple[Any, str, str]  # colour, line, marker: none of them tells curves apart alone


# Figure 2


def coupling(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 100,
    path: Path | None = None,
) -> Figure:
    """Average H against average D of each sample, and how alike the channels of two branches are (figure 2).

    Average H is the sum of H(z_i, z_j) over all branches i and both neighbours j of each, by L C; average D is that of
    D by L (C^2 - C). Both grow with the square of z: its average, |z|^2 by L C, stands among the numbers. A heat map
    has |<channel k of branch 2, channel l of branch 1>| of one sample. The paper names no normalisation, and there is
    none here: the colours of a map go from 0 to its own largest entry.

    Args:
        runs: of models with several branches, trained on the same data; each gets a column of its own.
        machine: where to solve.
        folders: to look for data in first.
        samples: of the test split, random, the same ones for every run; the heat maps are of the first.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    check_whole("samples", samples, 2)
    if len({repr(replace(run.recipe.data, validation=0)) for run in runs}) > 1:
        raise ValueError("the runs were trained on different data; this figure compares them on the same samples.")
    found = [coupling_of(run, machine, folders, samples) for run in runs]
    write_beside(path, {"runs": found})
    figure, axes = page(2, len(found), height=9.6, height_ratios=(4, 5))
    for place, (run, cloud, squares) in enumerate(zip(found, *axes, strict=True)):
        if place:
            cloud.sharex(axes[0][0])
            cloud.sharey(axes[0][0])
        draw_cloud(cloud, run)
        draw_map(squares, run["heat map"])
    axes[0][0].set_ylabel("average H")
    return figure


@torch.no_grad()
def coupling_of(run: Run, machine: Machine, folders: Sequence[Path], samples: int) -> dict[str, Any]:
    """What binds the branches of a run's model, over the samples and for the first of them."""
    trained = open_trained(run, machine)
    model = branch_model(trained)
    branches, channels = len(model.cell.sizes), model.cell.channels
    if branches < 2 or channels < 2:
        raise ValueError(
            f"{trained.file}: the model has {branches} branches of {channels} channels; neighbours and channels that "
            "do not correspond need 2 of each at least."
        )
    alike, apart, sizes, products = [], [], [], []
    with quiet_failures(), trained.setting.autocast():
        for images, _ in random_batches(run, trained, folders, samples):
            z: Images = tuple(part.double() for part in model.branches(model.features(images)))
            alike.append(2 * heritage(z) / (branches * channels))  # every edge joins two branches, and counts for both
            apart.append(2 * Ring().total_diversity(z) / (branches * channels * (channels - 1)))
            sizes.append(sum(part.square().sum(dim=(1, 2, 3)) for part in z) / (branches * channels))
            second = carry(z[1], z[0].shape[2:])
            products.append(torch.bmm(second.flatten(2), z[0].flatten(2).mT).abs())
    scores = torch.cat(products).cpu()
    measured = {
        "average H": torch.cat(alike).cpu(),
        "average D": torch.cat(apart).cpu(),
        "average square": torch.cat(sizes).cpu(),
        "diagonal dominance": dominance(scores),
    }
    return {
        **about(run),
        "samples": len(scores),
        "branches": branches,
        "channels": channels,
        "summary": {name: {"mean": each.mean().item(), "std": each.std().item()} for name, each in measured.items()},
        **{name: each.tolist() for name, each in measured.items()},
        "heat map": scores[0].tolist(),
    }


def dominance(scores: Tensor) -> Tensor:
    """The mean of the diagonal by the mean of the rest, of each (channels, channels) matrix."""
    diagonal = scores.diagonal(dim1=1, dim2=2)
    channels = scores.shape[1]
    rest = (scores.sum(dim=(1, 2)) - diagonal.sum(dim=1)) / (channels * (channels - 1))
    return diagonal.mean(dim=1) / rest


def draw_cloud(axis: Axes, run: dict[str, Any]) -> None:
    """A point per sample, and a cross that is one standard deviation long to all sides of the mean."""
    across, up = run["summary"]["average D"], run["summary"]["average H"]
    axis.scatter(run["average D"], run["average H"], s=18, color=BLUE, alpha=0.5, linewidth=0)
    axis.errorbar(across["mean"], up["mean"], xerr=across["std"], yerr=up["std"], color=ORANGE, linewidth=2)
    axis.axhline(0, color="0.3", linewidth=0.8)
    told = (
        f"average H {up['mean']:.3g} $\\pm$ {up['std']:.2g}, average D {across['mean']:.3g} $\\pm$ {across['std']:.2g}"
    )
    axis.set_title(f"{filled(run['title'])}\n{told}", fontsize=11)
    axis.set_xlabel("average D")
    tidy(axis)


def draw_map(axis: Axes, rows: list[list[float]]) -> None:
    scores = torch.tensor(rows)
    picture = axis.imshow(scores.numpy(), cmap="viridis", vmin=0)
    axis.figure.colorbar(picture, ax=axis, shrink=0.85)
    ratio = dominance(scores[None]).item()
    axis.set_title(f"one sample: mean on the diagonal / mean off it = {ratio:.3g}", fontsize=11)
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
    """Test accuracy against the size of a perturbation of g, reconstructed or random (figure 3a).

    Reconstructed is g - epsilon sign(U^T y), y = W^-T z from the model's own solve for g: by proposition 2 that raises
    the hidden objective, and the paper finds it to cost far more accuracy than noise. Noise is epsilon or -epsilon with
    equal chances (as long in every norm), or uniform between them (shorter by the root of 3).

    Args:
        runs: of models with one branch; each gets a panel of its own.
        machine: where to solve.
        folders: to look for data in first.
        eps: sizes, in units of g.
        samples: of the test split, random.
        trials: of each kind of noise; their mean and standard deviation are drawn.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    check_rising("eps", eps, lambda size: is_number(size) and size > 0, "numbers above 0")
    check_whole("samples", samples, 1)
    check_whole("trials", trials, 2)
    found = [perturbation_of(run, machine, folders, eps, samples, trials) for run in runs]
    write_beside(path, {"eps": list(eps), "runs": found})
    figure, axes = page(1, len(found), height=5.2, sharey=True)
    for axis, run in zip(axes[0], found, strict=True):
        looks = looks_of([color for _, color in PERTURBATIONS.values()])
        for (kind, (label, _)), look in zip(PERTURBATIONS.items(), looks, strict=True):
            numbers = run["accuracy"][kind]
            shares, spread = [run["clean accuracy"], *numbers["mean"]], [0.0, *numbers["std"]]
            draw_shares(axis, [0, *eps], shares, spread, label, look)
        axis.set_title(filled(run["title"]), fontsize=11)
        axis.set_xlabel(r"$\epsilon$, the size of the perturbation of g")
        under(axis, columns=1, title=f"random ones: mean and standard deviation of {trials} trials")
    axes[0][0].set_ylabel(f"accuracy on {found[0]['samples']} test images")
    return figure


@torch.no_grad()
def perturbation_of(
    run: Run, machine: Machine, folders: Sequence[Path], eps: Sequence[float], samples: int, trials: int
) -> dict[str, Any]:
    """How many samples a model still gets right."""
    trained = open_trained(run, machine)
    model = branch_model(trained)
    cell = model.cell
    if len(cell.sizes) > 1:
        raise ValueError(
            f"{trained.file}: the model has {len(cell.sizes)} branches; what is perturbed here is what one branch "
            "reconstructs: give a run of an OptEq."
        )
    right = {kind: torch.zeros(1 if kind == "reconstructed" else trials, len(eps)) for kind in PERTURBATIONS}
    generator, clean, total = torch.Generator().manual_seed(0), 0, 0
    with quiet_failures(), trained.setting.autocast():
        for images, labels in random_batches(run, trained, folders, samples):
            g = model.features(images)
            z = model.branches(g)
            clean, total = clean + count(model.read(z), labels), total + len(labels)
            (y,) = cell.lift(z, *cell.prepare(g))
            for kind, counts in right.items():
                for trial in counts:
                    # A trial's direction is the same for every size: curves then differ by the size alone.
                    way = cell.reconstructed(0, y).sign() if kind == "reconstructed" else noise(kind, g, generator)
                    for i, size in enumerate(eps):
                        trial[i] += count(model.classify(g - size * way), labels)
    return {
        **about(run),
        "samples": total,
        "clean accuracy": clean / total,
        "accuracy": {kind: mean_and_std(counts.double() / total) for kind, counts in right.items()},
    }


def noise(kind: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1], or the sign of that; drawn on the CPU, so that every device gets the same."""
    drawn = 2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1
    return (drawn.sign() if kind == "bernoulli" else drawn).to(like)


def mean_and_std(shares: Tensor) -> dict[str, list[Any]]:
    """Over the trials, (trials, sizes); of a single one there is no spread."""
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
    """Accuracy under projected gradient descent against the number of its iterations (figure 3b).

    The paper finds that a model trained with perturbed branches loses less. The attack goes by the gradient of the
    equilibrium itself, whatever rule the model was trained by: one by a single step would flatter the model. It starts
    at the same random points for every run and number of iterations, and all its steps are of one size.

    Args:
        runs: of classifiers with branches; each gets a curve of its own.
        machine: where to solve.
        folders: to look for data in first.
        iterations: how many; 0 is without an attack.
        radius: of the attack, the largest change of a pixel, which is between 0 and 1.
        step_size: of one iteration; None is a quarter of the radius.
        samples: of the test split, random.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    check_rising("iterations", iterations, lambda n: type(n) is int and n >= 0, "whole numbers of at least 0")
    check_whole("samples", samples, 1)
    check_positive("radius", radius)
    step_size = radius / 4 if step_size is None else step_size
    check_positive("step_size", step_size)
    budget = {"radius": radius, "step_size": step_size}
    found = [attack_of(run, machine, folders, iterations, budget, samples) for run in runs]
    write_beside(path, {"iterations": list(iterations), **budget, "runs": found})
    figure, ((axis,),) = page(1, 1, height=5.4)
    for run, look in zip(found, looks_of(colors(len(found))), strict=True):
        draw_shares(axis, iterations, run["accuracy"], run["standard error"], filled(run["title"]), look)
    in_255ths = f"radius {255 * radius:g}/255, steps of {255 * step_size:g}/255"
    axis.set(xlabel=f"iterations of the attack ($\\ell_\\infty$, {in_255ths})")
    axis.set_ylabel(f"accuracy on {found[0]['samples']} test images")
    whole_numbers(axis.xaxis)
    under(axis, columns=1, title="bars: one standard error")
    return figure


def attack_of(
    run: Run,
    machine: Machine,
    folders: Sequence[Path],
    iterations: Sequence[int],
    budget: Mapping[str, float],
    samples: int,
) -> dict[str, Any]:
    """The share of the samples that a model gets right as they are and after an attack of every length."""
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
    return {**about(run), "samples": total, "accuracy": shares, "standard error": errors}


# Figure 3c


def augmented(runs: Sequence[Run], folders: Sequence[Path] = (), path: Path | None = None) -> Figure:
    """Test accuracy of branches coupled by the loss, over the weight gamma of it, beside a coupled model (figure 3c).

    The paper finds the best gamma better than 0, and a MOptEq better than all.

    Args:
        runs: trained to the end: first one of a MOptEq, then those of the task "augmented-classification", one for
            every gamma, in any order.
        folders: to look for data in first; it is not measured anew, only counted.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    coupled, *swept = (augmented_of(run, folders) for run in runs)
    if coupled["gamma"] is not None or not swept or None in [run["gamma"] for run in swept]:
        tasks = ", ".join(run["task"] for run in (coupled, *swept))
        raise ValueError(
            f"the runs are of the tasks {tasks}; the first must be of another one than 'augmented-classification', and "
            "all others, at least one, of that."
        )
    swept.sort(key=lambda run: run["gamma"])
    gammas = [run["gamma"] for run in swept]
    if len(set(gammas)) < len(gammas):
        raise ValueError(f"the runs have the gammas {', '.join(f'{g:g}' for g in gammas)}; each must have its own.")
    write_beside(path, {"coupled": coupled, "augmented": swept})
    figure, ((axis,),) = page(1, 1, height=5.4)
    shares, errors = ([run[key] for run in swept] for key in ("accuracy", "standard error"))
    draw_shares(axis, range(len(gammas)), shares, errors, filled(swept[0]["title"]), (BLUE, "-", "o"))
    level, error = coupled["accuracy"], coupled["standard error"]
    axis.axhline(level, color=ORANGE, linestyle="--", label=filled(coupled["title"]))
    axis.axhspan(level - error, level + error, color=ORANGE, alpha=0.15, linewidth=0)
    axis.set_xticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
    axis.margins(x=0.08)  # a long number at the end has room
    axis.set(xlabel=r"$\gamma$, the weight of heritage and diversity in the loss", ylabel="test accuracy")
    under(axis, columns=1, title="bars and band: one standard error")
    return figure


def augmented_of(run: Run, folders: Sequence[Path]) -> dict[str, Any]:
    """The test accuracy with which a run ended, and its gamma if it has one."""
    accuracy = ((run.result or {}).get("test") or {}).get("accuracy")
    if accuracy is None:
        raise ValueError(f"{run.folder} has no test accuracy: is it trained to the end? equipoise resume {run.folder}.")
    recipe = run.recipe
    data = data_of(run, recipe, folders)
    return {
        **about(run),
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
    """Residuals for several lambda, by Anderson's method and plain iteration, smooth sign and hard (figure 4a).

    The weights are those of the run; only lambda and the sign are others. The paper, whose sign is hard, claims that T
    is a contraction up to about lambda = 1/C. But where two channels are nearly orthogonal the hard sign jumps: it has
    a floor, a residual that no iteration gets below, the higher the larger lambda is. The paper draws how far the last
    step went; here it is the residual of T, in float64, so that rounding is not taken for a floor.

    Args:
        runs: one, of a model with branches.
        machine: where to solve.
        folders: to look for data in first.
        lambdas: numbers, or "1/C" for one by the number of channels.
        samples: of the test split, random; their median is drawn, and where the middle 80% lie.
        batch_size: how many are solved at once.
        evaluations: of T, the first one at the start.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    check_solves(samples, batch_size, evaluations)
    check_lambdas(lambdas)
    if len(runs) != 1:
        raise ValueError(f"{len(runs)} runs are given; this figure is drawn from one.")
    found = diversity_of(runs[0], machine, folders, lambdas, samples, batch_size, evaluations)
    write_beside(path, {"evaluations": evaluations, "run": found})
    figure, axes = page(2, 2, height=11.4, sharey=True)
    for axis, panel in zip(axes.flat, found["panels"], strict=True):
        curves = {rf"$\lambda$ = {name}": curve for name, curve in panel["curves"].items()}
        draw_residuals(axis, curves, looks_of(shades(len(curves))))
        axis.set_title(f"{panel['sign']} sign, {panel['solver']}", fontsize=11)
    finish(axes, columns=2)
    figure.suptitle(filled(found["title"]), fontsize=12)
    return figure


@torch.no_grad()
def diversity_of(
    run: Run,
    machine: Machine,
    folders: Sequence[Path],
    lambdas: Sequence[float | str],
    samples: int,
    batch_size: int,
    evaluations: int,
) -> dict[str, Any]:
    trained = open_trained(run, machine)
    model = branch_model(trained).double()
    features = features_of(run, trained, folders, samples, batch_size)
    channels, norm = model.cell.channels, model.certificate().norm
    values = {lambda_name(entry, channels): 1 / channels if entry == "1/C" else float(entry) for entry in lambdas}
    panels = []
    for name, solver in (("Anderson", solver_of(model, Anderson)), ("plain iteration", Picard())):
        for sign in SIGNS:
            curves = {}
            for label, value in values.items():
                cell = altered(model.cell, ring=replace(model.cell.ring, diversity=value, sign=sign))
                curves[label] = {"lambda": value, **residuals(cell, features, solver, evaluations)}
            panels.append({"solver": name, "options": repr(solver), "sign": sign, "curves": curves})
    return {
        **about(run),
        "samples": sum(map(len, features)),
        "channels": channels,
        "norm of W": norm,
        # The bound of a step if signs stayed as they are, which must be below 1 for a contraction.
        "factor": {label: norm**2 * (1 + value * (channels - 1)) for label, value in values.items()},
        "panels": panels,
    }


def lambda_name(entry: float | str, channels: int) -> str:
    return f"1/C = {1 / channels:.3g}" if entry == "1/C" else str(entry)


def shades(number: int) -> list[Any]:
    """From dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(1, number - 1)) for i in range(number)]


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
    """Residuals of a model as it was trained, by several solvers (figure 4b).

    Proximal gradient steps move all branches at once (order "jacobi"), the others as the model says; both have the same
    equilibria. Looks at the objective are not counted as evaluations.

    Args:
        runs: of models with branches; each gets a panel of its own.
        machine, folders, samples, batch_size, evaluations, path: as in :func:`diversity`.
    """
    check_solves(samples, batch_size, evaluations)
    found = [solvers_of(run, machine, folders, samples, batch_size, evaluations) for run in runs]
    write_beside(path, {"evaluations": evaluations, "runs": found})
    figure, axes = page(1, len(found), height=5.8, sharey=True)
    for axis, run in zip(axes[0], found, strict=True):
        draw_residuals(axis, run["curves"], looks_of((BLUE, GREEN, ORANGE, PURPLE)))
        axis.set_title(filled(run["title"]), fontsize=11)
    finish(axes)
    return figure


@torch.no_grad()
def solvers_of(
    run: Run, machine: Machine, folders: Sequence[Path], samples: int, batch_size: int, evaluations: int
) -> dict[str, Any]:
    trained = open_trained(run, machine)
    model = branch_model(trained).double()
    cell, together = model.cell, altered(model.cell, order="jacobi")
    features = features_of(run, trained, folders, samples, batch_size)
    ways = {
        "Anderson": (cell, solver_of(model, Anderson)),
        "Broyden": (cell, solver_of(model, Broyden)),
        "plain iteration": (cell, Picard()),
        "proximal gradient (jacobi)": (together, ProximalGradient()),
    }
    return {
        **about(run),
        "samples": sum(map(len, features)),
        "sizes": [list(size) for size in cell.sizes],
        "ring": repr(cell.ring),
        "solvers": {name: repr(solver) for name, (_, solver) in ways.items()},
        "curves": {name: residuals(f, features, solver, evaluations) for name, (f, solver) in ways.items()},
    }


# Parts: what is measured


def branch_model(trained: Trained) -> BranchModel:
    if not isinstance(trained.model, BranchModel):
        raise ValueError(
            f"{trained.file}: the model is a {type(trained.model).__name__}; this figure is drawn from an OptEq, "
            "POptEq or MOptEq."
        )
    return trained.model


def random_batches(
    run: Run, trained: Trained, folders: Sequence[Path], samples: int, batch_size: int | None = None
) -> Iterator[Batch]:
    """So many samples of a run's test split, prepared: the same random ones every time."""
    test = data_of(run, trained.recipe, folders).test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    size = batch_size or trained.recipe.training.evaluation_batch_size
    return prepared(Subset(test, order[:samples]), trained.task, trained.setting, size)()


def features_of(run: Run, trained: Trained, folders: Sequence[Path], samples: int, batch_size: int) -> list[Tensor]:
    """g of random samples, in float64, in batches."""
    model = branch_model(trained)
    batches = random_batches(run, trained, folders, samples, batch_size)
    return [model.features(images.double()) for images, *_ in batches]


def altered(cell: Branches, **changes: Any) -> Branches:
    """The same weights in another T."""
    other = copy.copy(cell)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def solver_of(model: BranchModel, kind: type[Solver]) -> Solver:
    """A solver as in the run, if it is of the kind; else with its defaults."""
    return model.equilibrium.solver if isinstance(model.equilibrium.solver, kind) else kind()


def residuals(cell: Branches, features: Sequence[Tensor], solver: Solver, evaluations: int) -> dict[str, Any]:
    """After each evaluation, over the samples: the median, and between what the middle 80% lie."""
    layer = Equilibrium(cell, initial=cell.start)
    tolerance = Tolerance(relative=FINEST, max_steps=evaluations, patience=None)
    found = []
    with quiet_failures():
        for g in features:
            statistics, evaluated = traced(layer, cell.prepare(g), None, solver, tolerance)
            assert statistics.trace is not None
            rows = torch.empty(evaluations, len(g), dtype=torch.float64)
            # Each look is as good as it gets until the next: a solver may evaluate T more than once for one, and ends
            # before the last evaluation when all samples are solved.
            for place, row in zip([1, *evaluated[1:]], statistics.trace, strict=True):
                rows[place - 1 :] = row.double().cpu()
            found.append(rows.nan_to_num(nan=torch.inf))
    every = torch.cat(found, dim=1)
    low, middle, high = (every.quantile(share, dim=1, interpolation="nearest").tolist() for share in (0.1, 0.5, 0.9))
    return {
        "reached": {f"{level:g}": reached(middle, level) for level in LEVELS},
        "median": middle,
        "low": low,
        "high": high,
    }


def count(logits: Tensor, labels: Tensor) -> int:
    """How many are right."""
    return int((logits.argmax(1) == labels).sum())


def standard_error(share: float, samples: int) -> float:
    """Of a share of so many samples."""
    return math.sqrt(share * (1 - share) / samples)


# Parts: what is drawn


def filled(title: str) -> str:
    """A title in lines of a panel's width."""
    return plain(textwrap.fill(title, 55))


def looks_of(colors: Sequence[Any]) -> list[Look]:
    return [(color, STYLES[i % len(STYLES)], MARKERS[i % len(MARKERS)]) for i, color in enumerate(colors)]


def draw_shares(
    axis: Axes, at: Sequence[float], shares: Sequence[float], spread: Sequence[float], label: str, look: Look
) -> None:
    """A curve of accuracies, with bars of one spread to both sides."""
    color, style, marker = look
    axis.errorbar(
        at, shares, yerr=spread, linestyle=style, marker=marker, color=color, markersize=5, capsize=2, label=label
    )
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def draw_residuals(axis: Axes, curves: Mapping[str, Any], looks: Sequence[Look]) -> None:
    """Medians, and where the middle 80% of the samples lie."""
    for (name, curve), (color, style, marker) in zip(curves.items(), looks, strict=True):
        low, middle, high = ([max(r, FINEST) for r in curve[key]] for key in ("low", "median", "high"))
        at = range(1, len(middle) + 1)
        counts = " / ".join("-" if count is None else str(count) for count in curve["reached"].values())
        axis.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        every = max(1, len(middle) // 8)
        label = f"{name}: {counts}; {curve['median'][-1]:.1g}"
        axis.plot(at, middle, style, color=color, marker=marker, markersize=5, markevery=every, label=label)


def finish(axes: Any, columns: int = 1) -> None:
    """One logarithmic scale for all panels, and a legend below each."""
    drawn = [height for axis in axes.flat for height in heights(axis) if height < 1e3]  # what diverges leaves the panel
    decades(axes.flat[0], "y", drawn)
    for row in axes:
        row[0].set_ylabel(r"relative residual  $\|T(z)-z\| \,/\, \|T(z)\|$")
    levels = " / ".join(f"{level:g}" for level in LEVELS)
    for axis in axes.flat:
        axis.set_xlabel("evaluations of T")
        whole_numbers(axis.xaxis)
        under(axis, columns, title=f"evaluations until the residual is {levels}; what it is at the end")


# Parts: what is allowed


def check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def check_positive(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0.")


def check_rising(name: str, values: Any, allowed: Callable[[Any], bool], sentence: str) -> None:
    """A list of numbers, each above the last."""
    right = isinstance(values, list | tuple) and len(values) > 0 and all(map(allowed, values))
    if not right or any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} is {values!r}; it must be a list of {sentence}, each above the one before it.")


def check_lambdas(lambdas: Any) -> None:
    if not isinstance(lambdas, list | tuple) or not lambdas:
        raise ValueError(f"lambdas is {lambdas!r}; it must be a list of numbers of at least 0, or '1/C' among them.")
    for entry in lambdas:
        if entry != "1/C" and not (is_number(entry) and entry >= 0):
            raise ValueError(f"lambdas has {entry!r}; allowed: numbers of at least 0, and '1/C'.")
    if len(set(lambdas)) < len(lambdas):
        raise ValueError(f"lambdas is {lambdas!r}; each must be there once.")


def check_solves(samples: Any, batch_size: Any, evaluations: Any) -> None:
    check_whole("samples", samples, 1)
    check_whole("batch_size", batch_size, 1)
    check_whole("evaluations", evaluations, 2)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""Figures of the MDEQ paper: how its equilibria converge, by solver and by scale.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020), figures 6 and 7. The paper draws how far
an iterate moves, which flatters short steps; here it is the residual of f. Each figure writes its numbers as JSON
beside the picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium, fixed_point
from equipoise.lab.data.base import Split, Subset
from equipoise.lab.recipes.build import build_model, equilibrium_settings
from equipoise.lab.results.figures import (
    BLUE,
    ORANGE,
    about,
    decades,
    first_solve,
    heights,
    page,
    plain,
    reached,
    under,
    whole_numbers,
    write_beside,
)
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import start_from
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.batches import seed_everything
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.lab.training.trainer import data_of
from equipoise.models.mdeq.cell import MultiscaleCell
from equipoise.solvers import Broyden, Picard, Progress, Solver
from equipoise.tolerance import Tolerance, relative_residual, row_distances, row_norms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = (1e-1, 3e-2, 1e-2)  # of the residual: the summary says after how many evaluations each is reached
WHOLE = "all scales"
MARKERS = "os^vP"

Curves = dict[str, Tensor]  # residuals by name, (batches, evaluations)
Look = tuple[Any, str, str]  # colour, line, marker: none of them tells curves apart alone


# Figure 6


def convergence(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    batches: int = 5,
    batch_size: int = 32,
    evaluations: int = 30,
    path: Path | None = None,
) -> Figure:
    """Residuals of Broyden's method and of plain iteration, at initialisation and trained (figure 6).

    Args:
        runs: of MDEQs, trained; each gets a panel of its own.
        machine: where to solve.
        folders: to look for data in first.
        batches: of the test split, random; mean and standard deviation over them are drawn.
        batch_size: where the test split is too small, batches are smaller, and fewer if need be; the numbers tell.
        evaluations: of f, the first one at the start.
        path: of the picture, beside which the numbers are written; None writes none.
    """
    check(batches, batch_size, evaluations)
    found = [convergence_of(run, machine, folders, batches, batch_size, evaluations) for run in runs]
    write_beside(path, {"evaluations": evaluations, "runs": found})
    figure, axes = page(1, len(found), height=5.6, sharey=True)
    looks = [(color, style, marker) for style in ("--", "-") for color, marker in ((BLUE, "o"), (ORANGE, "s"))]
    for axis, run in zip(axes[0], found, strict=True):
        draw(axis, run["curves"], run["summary"], looks)
        axis.set_title(plain(textwrap.fill(run["title"], 55)), fontsize=11)
    finish(axes[0])
    return figure


def convergence_of(
    run: Run, machine: Machine, folders: Sequence[Path], batches: int, batch_size: int, evaluations: int
) -> dict[str, Any]:
    """How both solvers do on the model that training began with and on the one that it ended with."""
    trained = open_trained(run, machine)
    solvers = {"Broyden": broyden_of(run, trained), "plain iteration": Picard()}
    splits = random_batches(data_of(run, trained.recipe, folders).test, batches, batch_size)
    curves: Curves = {}
    for weights, model in (("at initialisation", untrained(run, trained)), ("trained", trained)):
        for name, solver in solvers.items():
            curves[f"{name}, {weights}"] = residuals(model, splits, solver, evaluations)[WHOLE]
    return {**about_solves(run, splits, solvers["Broyden"]), **numbers_of(curves)}


def untrained(run: Run, trained: Trained) -> Trained:
    """The model with the weights that training began with, its BatchNorm going by the batch.

    So it does in the first step of training. Running statistics have seen nothing yet: by them the small weights of the
    stem would leave next to nothing of an image.
    """
    seed_everything(trained.recipe.seed, "model")
    model = trained.setting.place(build_model(trained.recipe, trained.facts, run.source.where))
    if trained.recipe.training.init_from is not None:
        start_from(model, trained.recipe.training.init_from)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
    return replace(trained, model=model)


# Figure 7


def scales(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    batches: int = 5,
    batch_size: int = 32,
    evaluations: int = 30,
    path: Path | None = None,
) -> Figure:
    """Residuals of each scale of an MDEQ under Broyden's method, beside those of a single-scale DEQ (figure 7).

    Args:
        runs: two, trained: of an MDEQ with several scales and of one with a single scale.
        machine, folders, batches, batch_size, evaluations, path: as in :func:`convergence`.
    """
    check(batches, batch_size, evaluations)
    opened = [open_trained(run, machine) for run in runs]
    kinds = [multiscale_layer(trained).f.size.scales for trained in opened]
    if len(kinds) != 2 or kinds[0] == 1 or kinds[1] != 1:
        raise ValueError(
            f"recipes are of models with {', '.join(map(str, kinds))} scales; the first must have several, the second "
            "and last a single one."
        )
    found = []
    for run, trained in zip(runs, opened, strict=True):
        splits = random_batches(data_of(run, trained.recipe, folders).test, batches, batch_size)
        solver = broyden_of(run, trained)
        curves = residuals(trained, splits, solver, evaluations)
        del curves[WHOLE]
        found.append({**about_solves(run, splits, solver), **numbers_of(curves)})
    write_beside(path, {"evaluations": evaluations, "runs": found})
    figure, axes = page(1, 1, height=5.6)
    draw_scales(axes[0][0], *found)
    finish(axes[0])
    return figure


def draw_scales(axis: Axes, several: dict[str, Any], single: dict[str, Any]) -> None:
    """The scales from dark to light as their resolution falls, the single one in front."""
    from matplotlib import colormaps

    count = len(several["curves"])
    looks = [(colormaps["viridis"](0.85 * i / (count - 1)), "-", MARKERS[i % len(MARKERS)]) for i in range(count)]
    draw(axis, several["curves"], several["summary"], looks)
    alone, counts = (
        {f"{name}, the only scale": of[name] for name in of} for of in (single["curves"], single["summary"])
    )
    draw(axis, alone, counts, [(ORANGE, "--", "D")])
    axis.set_title(plain(textwrap.fill(several["title"], 55)), fontsize=11)


# Parts


def check(batches: int, batch_size: int, evaluations: int) -> None:
    """Options that make no sense are refused at the door."""
    for name, value, least in (("batches", batches, 2), ("batch_size", batch_size, 1), ("evaluations", evaluations, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def multiscale_layer(trained: Trained) -> Any:
    """The equilibrium of a model whose state has scales."""
    for layer in trained.model.modules():
        if isinstance(layer, Equilibrium) and isinstance(layer.f, MultiscaleCell):
            return layer
    raise ValueError(f"{trained.file}: the model solves no MultiscaleCell; this figure is drawn from MDEQs.")


def broyden_of(run: Run, trained: Trained) -> Broyden:
    """Broyden's method as in the recipe, whatever the phase of the best weights had; else with its defaults."""
    settings = equilibrium_settings(run.recipe, run.source.where)
    solver = settings.get("solver", multiscale_layer(trained).solver)
    return solver if isinstance(solver, Broyden) else Broyden()


def random_batches(split: Split, batches: int, batch_size: int) -> list[Split]:
    """Equally large batches of a split, the same ones every time."""
    if len(split) < 2:
        raise ValueError("the test split has a single sample; a standard deviation is over batches of at least 2.")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    batches = min(batches, len(split))
    size = min(batch_size, len(split) // batches)
    return [Subset(split, rows) for rows in order[: batches * size].split(size)]


@torch.no_grad()
def residuals(trained: Trained, batches: Iterable[Split], solver: Solver, evaluations: int) -> Curves:
    """The mean over each batch's samples after every evaluation, of the whole state and of each scale by its size."""
    found, sizes = [], []
    with quiet_failures(), trained.setting.autocast():
        for batch in batches:
            layer, inputs, z0 = first_solve(trained, [multiscale_layer(trained)], batch)
            start = layer.start(inputs) if z0 is None else z0
            sizes = ["x".join(map(str, part.shape[2:])) for part in start]
            found.append(residuals_of_batch(layer, inputs, start, solver, evaluations))
    return dict(zip((WHOLE, *sizes), torch.stack(found).unbind(dim=2), strict=True))


def residuals_of_batch(layer: Equilibrium, inputs: Any, start: Any, solver: Solver, evaluations: int) -> Tensor:
    found = torch.full((evaluations, 1 + len(start)), torch.nan, dtype=torch.float64)

    def look(progress: Progress) -> None:
        each = [progress.residual]
        for z, image in zip(progress.value, progress.image, strict=True):
            z, image = z.flatten(1), image.flatten(1)
            each.append(relative_residual(row_distances(image, z), row_norms(image)))
        # A line search evaluates f more than once; what comes after the last look is as it was then.
        found[progress.problem.count.evaluations - 1 :] = torch.stack(each).double().mean(dim=1).cpu()

    fixed_point(
        layer.f,
        start,
        *inputs,
        solver=solver,
        tolerance=Tolerance(relative=0.0, max_steps=evaluations, patience=None),
        on_failure="ignore",  # nothing reaches a tolerance of 0
        compact=False,  # a sample that diverges must stay in the mean
        callback=look,
    )
    return found


def about_solves(run: Run, splits: Sequence[Split], solver: Broyden) -> dict[str, Any]:
    return {**about(run), "batches": len(splits), "batch size": len(splits[0]), "solver": repr(solver)}


def numbers_of(curves: Curves) -> dict[str, Any]:
    """For JSON: when each level was reached, then mean and standard deviation over the batches."""
    means = {name: curve.mean(dim=0).tolist() for name, curve in curves.items()}
    return {
        "summary": {name: {f"{level:g}": reached(mean, level) for level in LEVELS} for name, mean in means.items()},
        "curves": {name: {"mean": means[name], "std": curve.std(dim=0).tolist()} for name, curve in curves.items()},
    }


def draw(axis: Axes, curves: Mapping[str, Any], summary: Mapping[str, Any], looks: Sequence[Look]) -> None:
    """Means, and one standard deviation around them."""
    for (name, curve), (color, style, marker) in zip(curves.items(), looks, strict=True):
        mean, std = (torch.tensor(curve[key]) for key in ("mean", "std"))
        at = range(1, len(mean) + 1)
        counts = " / ".join("-" if count is None else str(count) for count in summary[name].values())
        # The band ends above 0, which a logarithmic axis does not have.
        axis.fill_between(at, (mean - std).clamp(min=1e-12), mean + std, color=color, alpha=0.2, linewidth=0)
        axis.plot(
            at,
            mean.tolist(),
            style,
            color=color,
            marker=marker,
            markersize=5,
            markerfacecolor="white" if style == "--" else color,
            markevery=(0, max(1, len(mean) // 8)),
            label=f"{name}: {counts}; {mean[-1]:.2g}",
        )


def finish(axes: Sequence[Axes]) -> None:
    """One logarithmic scale for all panels, and a legend below each."""
    drawn = [height for axis in axes for height in heights(axis) if height < 1e3]  # what diverges leaves the panel
    decades(axes[0], "y", drawn)
    axes[0].set_ylim(top=1.5 * max(drawn))
    axes[0].set_ylabel(r"relative residual  $\|f(z)-z\| \,/\, \|f(z)\|$")
    levels = " / ".join(f"{level:g}" for level in LEVELS)
    for axis in axes:
        axis.set_xlabel("evaluations of f")
        whole_numbers(axis.xaxis)
        under(axis, columns=1, title=f"evaluations until the residual is {levels}; what it is at the end")

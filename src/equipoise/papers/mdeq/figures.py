"""Figures of the MDEQ paper: convergence by solver and by scale.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020), figures 6 and 7. The paper plots the
change of the iterate, which favours short steps; these figures plot the residual of f. Functions take trained ``runs``,
the ``machine`` to solve on, ``folders`` searched first for data, and the ``path`` of the picture, beside which they
write their numbers as JSON (None writes none).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from equipoise.lab.data.base import Split, Subset
from equipoise.lab.recipes.build import build_model, equilibrium_settings
from equipoise.lab.results.figures import BLUE, ORANGE, first_solve, panels, shades, trace_residuals, wrapped
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of, start_from
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.mdeq.cell import MultiscaleCell
from equipoise.papers.drawing import (
    CurveStyle,
    check_counts,
    curve_styles,
    describe,
    draw_residuals,
    equilibrium_of,
    finish_residuals,
    levels_reached,
    per_evaluation,
    random_rows,
    write_numbers,
)
from equipoise.solvers import Broyden, Picard, Solver
from equipoise.tolerance import Tolerance

LEVELS = (1e-1, 3e-2, 1e-2)  # residuals; the summary counts the evaluations to reach each
WHOLE = "all scales"

Curves = dict[str, Tensor]  # residuals by name, (batches, evaluations)


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
    """Plot residuals of Broyden's method and of plain iteration, at initialisation and trained (figure 6).

    Args:
        runs: trained runs of MDEQs; one panel each.
        batches: number of random test batches; their mean and standard deviation are drawn.
        batch_size: samples per batch; if the test split is too small, batches are smaller, and fewer if necessary.
        evaluations: number of evaluations of f, the first one at z0.
    """
    check_counts(batches=(batches, 2), batch_size=(batch_size, 1), evaluations=(evaluations, 2))
    measured = []
    for run in runs:
        trained, splits = open_with_batches(run, machine, folders, batches, batch_size)
        broyden = broyden_of(run, trained)
        curves: Curves = {}
        for weights, model in (("at initialisation", untrained(run, trained)), ("trained", trained)):
            for name, solver in (("Broyden", broyden), ("plain iteration", Picard())):
                curves[f"{name}, {weights}"] = residuals(model, splits, solver, evaluations)[WHOLE]
        measured.append(numbers_of(run, splits, broyden, curves))
    write_numbers(path, {"evaluations": evaluations, "runs": measured})
    figure, axes = panels(1, len(measured), height=5.6, sharey=True)
    styles = [(color, style, marker) for style in ("--", "-") for color, marker in ((BLUE, "o"), (ORANGE, "s"))]
    for axis, run in zip(axes[0], measured, strict=True):
        draw(axis, run["curves"], run["summary"], styles)
        axis.set_title(wrapped(run["title"]), fontsize=11)
    finish_residuals(axes, LEVELS)
    return figure


def untrained(run: Run, trained: Trained) -> Trained:
    """Return the model with its initial weights, and with BatchNorm using batch statistics.

    The first training step does so, too. Running statistics have not seen data yet: with them, the small weights of
    the stem would leave next to nothing of an image.
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
    """Plot residuals of each scale of an MDEQ with Broyden's method, beside those of a single-scale DEQ (figure 7).

    Args:
        runs: two trained runs: an MDEQ with several scales, then one with a single scale.
        batches, batch_size, evaluations: see :func:`convergence`.
    """
    check_counts(batches=(batches, 2), batch_size=(batch_size, 1), evaluations=(evaluations, 2))
    opened = [open_with_batches(run, machine, folders, batches, batch_size) for run in runs]
    counts = [equilibrium_of(trained, MultiscaleCell).f.size.scales for trained, _ in opened]
    if len(counts) != 2 or counts[0] == 1 or counts[1] != 1:
        raise ValueError(
            f"the runs have models with {', '.join(map(str, counts))} scales; give two runs, the first with several "
            "scales, the second with a single one."
        )
    measured = []
    for run, (trained, splits) in zip(runs, opened, strict=True):
        solver = broyden_of(run, trained)
        curves = residuals(trained, splits, solver, evaluations)
        measured.append(numbers_of(run, splits, solver, {name: curves[name] for name in curves if name != WHOLE}))
    write_numbers(path, {"evaluations": evaluations, "runs": measured})
    figure, axes = panels(1, 1, height=5.6)
    axis, (several, single) = axes[0][0], measured
    draw(axis, several["curves"], several["summary"], curve_styles(shades(len(several["curves"]))))
    draw(axis, single["curves"], single["summary"], [(ORANGE, "--", "D")], ", single scale")
    axis.set_title(wrapped(several["title"]), fontsize=11)
    finish_residuals(axes, LEVELS)
    return figure


# Measuring and drawing


def open_with_batches(
    run: Run, machine: Machine, folders: Sequence[Path], batches: int, batch_size: int
) -> tuple[Trained, list[Split]]:
    """Return a run's model and random batches of its test split."""
    trained = open_trained(run, machine)
    equilibrium_of(trained, MultiscaleCell)
    return trained, random_batches(data_of(run, trained.recipe, folders).test, batches, batch_size)


def random_batches(split: Split, batches: int, batch_size: int) -> list[Split]:
    """Return equally large random batches of a split, the same ones on every call."""
    if len(split) < 2:
        raise ValueError("the test split has a single sample; a standard deviation requires batches of at least 2.")
    batches = min(batches, len(split))
    size = min(batch_size, len(split) // batches)
    return [Subset(split, rows) for rows in random_rows(split, batches * size).split(size)]


def broyden_of(run: Run, trained: Trained) -> Broyden:
    """Return Broyden's method as in the recipe, whichever phase the weights are from; else with its defaults."""
    settings = equilibrium_settings(run.recipe, run.source.where)
    solver = settings.get("solver", equilibrium_of(trained, MultiscaleCell).solver)
    return solver if isinstance(solver, Broyden) else Broyden()


@torch.no_grad()
def residuals(trained: Trained, batches: Sequence[Split], solver: Solver, evaluations: int) -> Curves:
    """Return the mean residual of each batch after every evaluation, for the whole state and for each scale."""
    tolerance = Tolerance(relative=0.0, max_steps=evaluations, patience=None)
    means, names = [], [WHOLE]
    with quiet_failures(), trained.setting.autocast():
        for batch in batches:
            layer, inputs, z0 = first_solve(trained, [equilibrium_of(trained, MultiscaleCell)], batch)
            z0 = layer.start(inputs) if z0 is None else z0
            names = [WHOLE, *("x".join(map(str, part.shape[2:])) for part in z0)]
            trace = trace_residuals(layer, inputs, z0, solver, tolerance, leaves=True)
            means.append(per_evaluation(trace, evaluations).mean(dim=1))
    return dict(zip(names, torch.stack(means).unbind(dim=2), strict=True))


def numbers_of(run: Run, splits: Sequence[Split], solver: Broyden, curves: Curves) -> dict[str, Any]:
    """Return the contents of the JSON file for one run: mean and standard deviation over the batches."""
    means = {name: values.mean(dim=0).tolist() for name, values in curves.items()}
    return {
        **describe(run),
        "batches": len(splits),
        "batch size": len(splits[0]),
        "solver": repr(solver),
        "summary": {name: levels_reached(mean, LEVELS) for name, mean in means.items()},
        "curves": {name: {"mean": means[name], "std": values.std(dim=0).tolist()} for name, values in curves.items()},
    }


def draw(
    axis: Axes, curves: Mapping[str, Any], counts: Mapping[str, Any], styles: Sequence[CurveStyle], suffix: str = ""
) -> None:
    """Draw mean residuals with a band of one standard deviation."""
    for (name, numbers), style in zip(curves.items(), styles, strict=True):
        mean, std = (torch.tensor(numbers[key]) for key in ("mean", "std"))
        band = ((mean - std).clamp(min=1e-12), mean + std)  # 0 is not on a logarithmic axis
        draw_residuals(axis, name + suffix, mean.tolist(), style, band, counts=counts[name])

"""Figures of training runs: metrics, solver statistics and convergence. Functions return figures; callers save them."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from equipoise.fixed_point import Equilibrium, fixed_point
from equipoise.lab.data.base import Split, spread
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import DECADES, DIRECTIONS, PER_DECADE, prepared, quiet_failures
from equipoise.options import require_number
from equipoise.problem.layout import residual_at
from equipoise.solution import Statistics
from equipoise.solvers import Anderson, Broyden, Picard, Progress, Solver
from equipoise.tasks import Sums
from equipoise.tolerance import Tolerance

Titled = Iterator[tuple[str, Figure]]
Records = Sequence[Mapping[str, Any]]

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"  # distinct to color-blind readers, too
SPLITS = {"train": ("training", BLUE), "val": ("validation", ORANGE), "test": ("test", GREEN)}
DIRECTION_COLORS: dict[str, str] = dict(zip(DIRECTIONS, (BLUE, ORANGE), strict=True))
DASHES = ("-", "--", "-.", ":")
MAX_BARS = 40
RESIDUAL = r"relative residual  $\|{f}(z)-z\| \,/\, \|{f}(z)\|$"
DIVERGED = 1e3  # residuals above it are outside the panel


# Training


def training_curves(records: Records) -> Titled:
    """Plot a run's log: every metric per epoch, then learning rate and gradient norm per training step."""
    epochs, steps = of_kind(records, "epoch"), of_kind(records, "step")
    for name in metric_names(epochs, *SPLITS):
        figure, axis = new_figure("epoch", name)
        for split, (label, color) in SPLITS.items():
            points = [(record["epoch"], record[split][name]) for record in epochs if name in record.get(split, {})]
            curve(axis, points, label, color)
        for before, after in itertools.pairwise(epochs):
            if before["phase"] != after["phase"]:
                axis.axvline(before["epoch"] + 0.5, color="0.6", linestyle=":", linewidth=1)
        yield capital(name), finish(figure, axis)
    for key, name in (("lr", "learning rate"), ("gradient_norm", "gradient norm")):
        points = [(record["step"], record.get(key)) for record in steps]
        if any(value is not None for _, value in points):
            figure, axis = new_figure("training step", name)
            curve(axis, points, name, BLUE)
            sizes = [value for _, value in points if value]
            if key == "gradient_norm" and sizes and max(sizes) > 30 * min(sizes):
                axis.set_yscale("log")
            yield capital(name), finish(figure, axis, legend=False)


def solver_curves(records: Records, tolerance: float | None = None) -> Titled:
    """Plot solver steps, residuals (beside a relative tolerance) and unconverged samples per training step."""
    steps = [record for record in of_kind(records, "step") if record["steps"]]
    if not steps:
        return
    for key, title, name in (
        ("steps", "Solver steps during training", "median of the batch"),
        ("residual", "Residual during training", "maximum of the batch"),
    ):
        figure, axis = new_figure("training step", name)
        for direction, color in DIRECTION_COLORS.items():
            points = [(record["step"], record[key][direction]) for record in steps if direction in record[key]]
            curve(axis, points, direction, color, style="-" if direction == "forward" else "--")
        if key == "residual":
            if tolerance:
                axis.axhline(tolerance, color="0.3", linestyle=":", linewidth=1, label="tolerance")
            log_scale(axis, "y", heights(axis), room=1.3)
        else:
            whole_numbers(axis.yaxis)
        yield title, finish(figure, axis)
    figure, axis = new_figure("training step", "samples of the batch")
    curve(axis, [(record["step"], record["failed_samples"]) for record in steps], "failed", BLUE)
    top = max(1, *axis.get_ylim())
    axis.set_ylim(-0.03 * top, top)
    whole_numbers(axis.yaxis)
    yield "Unconverged samples", finish(figure, axis, legend=False)


def comparison(logs: Mapping[str, Records]) -> Titled:
    """Plot the validation metrics of several runs, given their logs by name, in one figure per metric."""
    epochs = {name: [r for r in of_kind(records, "epoch") if "val" in r] for name, records in logs.items()}
    epochs = {name: records for name, records in epochs.items() if records}
    for metric in metric_names([record for records in epochs.values() for record in records], "val"):
        figure, axis = new_figure("epoch", f"validation {metric}")
        for (name, records), color in zip(epochs.items(), colors(len(epochs)), strict=True):
            points = [(record["epoch"], record["val"][metric]) for record in records if metric in record["val"]]
            curve(axis, points, name, color)
        columns = 1 if max(map(len, epochs)) > 24 else 2 if max(map(len, epochs)) > 12 else 3
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(epochs) / columns))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
        yield f"Validation {metric}", finish(figure, axis, legend=False)


def row_curves(rows: Sequence[tuple[str, str, Sequence[Records]]]) -> Figure | None:
    """Plot the metric of every row of a table over epochs and over wall-clock time, with its spread over seeds.

    Test metrics are shown if all rows measured them after every epoch, validation metrics otherwise. Rows of another
    metric than the first, and rows whose metric is not measured after every epoch, are left out; None if none is left.

    Args:
        rows: label and metric of every row, and the epochs in the log of each of its seeds.
    """
    metric = rows[0][1]
    logs_of = {label: logs for label, name, logs in rows if name == metric}

    def has(split: str, logs: Sequence[Records]) -> bool:
        return all(metric in epoch.get(split, {}) for log in logs for epoch in log)

    split = "test" if all(has("test", logs) for logs in logs_of.values()) else "val"
    drawn = {label: logs for label, logs in logs_of.items() if has(split, logs)}
    if max((len(log) for logs in drawn.values() for log in logs), default=0) < 2:
        return None
    figure, axes = panels(1, 2, height=4.2 + 0.25 * math.ceil(len(drawn) / 2), sharey=True)
    name = f"{SPLITS[split][0]} {metric}"
    hues = itertools.cycle(colors(min(len(drawn), 10)))  # curves of equal color have other dashes, up to 20 of them
    for (label, logs), color, dashes in zip(drawn.items(), hues, itertools.cycle(DASHES)):
        shared = list(zip(*logs, strict=False))  # epochs that every seed has finished
        values = torch.tensor([[epoch[split][metric] for epoch in seeds] for seeds in shared], dtype=torch.float64)
        mean, deviation = values.mean(1), values.std(1) if values.shape[1] > 1 else torch.zeros(len(values))
        minutes = [sum(epoch["seconds"] for epoch in seeds) / len(seeds) / 60 for seeds in shared]
        for axis, at in zip(axes[0], ([seeds[0]["epoch"] for seeds in shared], minutes), strict=True):
            axis.plot(at, mean, dashes, color=color, label=plain(label), marker="o", markersize=3)
            axis.fill_between(at, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0)
    for axis, label in zip(axes[0], ("epoch", "minutes of training"), strict=True):
        axis.set_xlabel(label)
        tidy(axis)
    whole_numbers(axes[0][0].xaxis)
    axes[0][0].set_ylabel(plain(name))
    if "accuracy" in name:
        percentages(axes[0][0])
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9, frameon=False
    )
    return figure


def histograms(sums: Sums) -> Titled:
    """Plot histograms of solver steps and final residuals from the sums of an Evaluation, if it has any solves."""
    solved = [direction for direction in DIRECTIONS if sums.get(f"{direction} results", torch.zeros(1)).sum()]
    if not solved:
        return
    figure, axis = new_figure("solver steps", "share of solves")
    first, last = occupied([sums[f"{direction} steps"] for direction in solved])
    width = math.ceil((last - first + 1) / MAX_BARS)
    for direction in solved:
        counts = sums[f"{direction} steps"][first : last + 1]
        counts = torch.nn.functional.pad(counts, (0, -len(counts) % width)).view(-1, width).sum(1)
        bars(axis, counts, [first - 0.5 + width * i for i in range(len(counts) + 1)], direction)
    middle = (first + last) / 2
    axis.set_xlim(max(0, min(first - 1.5, middle - 6)), max(last + 1.5, middle + 6))
    whole_numbers(axis.xaxis)
    yield "Solver steps", finish(figure, axis, legend=len(solved) > 1)

    figure, axis = new_figure("relative residual", "share of solves")
    first, last = occupied([sums[f"{direction} residuals"] for direction in solved])
    edges = [10 ** (DECADES[0] + i / PER_DECADE) for i in range(first, last + 2)]
    for direction in solved:
        bars(axis, sums[f"{direction} residuals"][first : last + 1], edges, direction)
    log_scale(axis, "x", edges)
    yield "Residual", finish(figure, axis, legend=len(solved) > 1)


# Convergence


def convergence(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 128,
    relative: float = 1e-6,
    max_steps: int = 60,
) -> Figure:
    """Plot the residual against evaluations of f for several solvers, at the first equilibrium of trained models.

    Args:
        runs: trained runs; one panel each.
        samples: number of test samples, evenly spaced.
        relative: relative tolerance; tighter than in training, so that the solvers differ visibly.
        max_steps: maximum number of solver steps.
    """
    opened = [(open_trained(run, machine), run) for run in runs]
    models = [(trained, data_of(run, trained.recipe, folders).test) for trained, run in opened]
    return convergence_of(models, samples, relative, max_steps)


def convergence_of(
    models: Sequence[tuple[Trained, Split]], samples: int = 128, relative: float = 1e-6, max_steps: int = 60
) -> Figure:
    """Plot :func:`convergence` for models that are already open, each with the split to take samples from."""
    check_number("samples", samples, at_least=1, whole=True)
    tolerance = Tolerance(relative=relative, max_steps=max_steps, patience=None)
    figure, axes = panels(1, len(models), height=5, sharey=True)
    for axis, (trained, split) in zip(axes[0], models, strict=True):
        draw_convergence(axis, trained, spread(split, samples), tolerance)
    axes[0][0].set_ylabel(RESIDUAL.format(f="f"))
    return figure


@torch.no_grad()
def draw_convergence(axis: Axes, trained: Trained, split: Split, tolerance: Tolerance) -> None:
    """Draw one panel: each solver's median residual over the samples, and the band of the middle 80%."""
    layers = [layer for layer in trained.model.modules() if isinstance(layer, Equilibrium)]
    with quiet_failures(), trained.setting.autocast():
        layer, inputs, z0 = first_solve(trained, layers, split)
        # The run's own solver replaces the default of its class. Curves of Anderson and Broyden may coincide.
        solvers: dict[type[Solver], Solver] = {type(s): s for s in (Picard(), Anderson(), Broyden(), layer.solver)}
        styles = ((BLUE, "-"), (ORANGE, "-"), (GREEN, "--"), (PURPLE, "-"))
        for (kind, solver), (color, dashes) in zip(solvers.items(), styles, strict=False):
            trace = trace_residuals(layer, inputs, z0, solver, tolerance)
            own, stats = kind is type(layer.solver), trace.statistics
            share, steps = stats.converged.double().mean().item(), stats.steps.double().median().item()
            label = f"{kind.__name__}{' (this run)' if own else ''}: {share:.0%} converged, median {steps:.0f} steps"
            low, median, high = middle_80(trace.residuals)
            axis.fill_between(trace.evaluations, low, high, color=color, alpha=0.2, linewidth=0)
            axis.plot(trace.evaluations, median, dashes, color=color, label=label, linewidth=2.5 if own else 1.5)
    if layer.tolerance.relative > tolerance.relative:
        axis.axhline(layer.tolerance.relative, color="0.3", linestyle="--", linewidth=1, label="tolerance of the run")
    axis.axhline(tolerance.relative, color="0.3", linestyle=":", linewidth=1, label="tolerance of this figure")
    log_scale(axis, "y", [tolerance.relative / 2, *(min(height, DIVERGED) for height in heights(axis))])
    axis.set_xlabel("evaluations of f")
    whole_numbers(axis.xaxis)
    which = f"\nfirst of {len(layers)} equilibria" if len(layers) > 1 else ""
    axis.set_title(wrapped(trained.recipe.title) + which, fontsize=11)
    legend_below(axis, columns=1)


def first_solve(trained: Trained, layers: Sequence[Equilibrium], split: Split) -> tuple[Equilibrium, Any, Any]:
    """Return the first equilibrium that a model solves when its task measures a split, with its inputs and z0.

    Each layer's ``solve``, which models may call directly, is replaced meanwhile; its first call ends the evaluation.
    """

    class Reached(Exception):
        """Carries the arguments of the first solve out of the model."""

    def stand_in(layer: Equilibrium) -> Any:
        def solve(*inputs: Any, z0: Any = None, **_: Any) -> Any:
            raise Reached(layer, inputs, z0)

        return solve

    (batch,) = prepared(split, trained.task, trained.setting, len(split))
    for layer in layers:
        vars(layer)["solve"] = stand_in(layer)
    try:
        trained.task.measure(trained.model.eval(), batch)
    except Reached as reached:
        layer, inputs, z0 = reached.args
        return layer, inputs, z0
    finally:
        for layer in layers:
            del vars(layer)["solve"]
    raise ValueError(f"{trained.file}: the model has no equipoise.Equilibrium, so it has no convergence to plot.")


@dataclass(frozen=True)
class ResidualTrace:
    """Relative residuals of every sample at every check of one solve."""

    evaluations: list[int]  # evaluations of f up to each check
    residuals: Tensor  # (checks, samples), or (checks, samples, 1 + leaves); infinite after a sample has diverged
    statistics: Statistics


def trace_residuals(
    layer: Equilibrium, inputs: Any, z0: Any, solver: Solver, tolerance: Tolerance, *, leaves: bool = False
) -> ResidualTrace:
    """Solve an equilibrium, by default from its own z0, and record the residual of every sample at every check.

    With ``leaves``, the residual of each leaf of z is recorded as well, and all samples are computed to the end.
    """
    evaluations: list[int] = []
    of_leaves: list[Tensor] = []

    def record(progress: Progress) -> None:
        evaluations.append(progress.problem.count.evaluations)
        if leaves:
            pairs = zip(progress.value, progress.image, strict=True)
            of_leaves.append(torch.stack([residual_at(z.flatten(1), fz.flatten(1)) for z, fz in pairs], dim=1))

    stats = fixed_point(
        layer.f,
        layer.start(inputs) if z0 is None else z0,
        *inputs,
        solver=solver,
        tolerance=tolerance,
        on_failure="ignore",  # the figure shows which samples converged
        compact=layer.compact and not leaves,
        trace=True,
        callback=record,
    ).stats
    assert stats.trace is not None
    residuals = torch.cat([stats.trace[..., None], torch.stack(of_leaves)], dim=2) if leaves else stats.trace
    return ResidualTrace(evaluations, residuals.double().cpu().nan_to_num(nan=torch.inf), stats)


def middle_80(residuals: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Return the 10%, 50% and 90% quantiles over the samples, given (checks, samples)."""
    low, median, high = (residuals.quantile(q, dim=1, interpolation="nearest").tolist() for q in (0.1, 0.5, 0.9))
    return low, median, high


# Parts of figures


def of_kind(records: Records, kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def metric_names(epochs: Records, *splits: str) -> list[str]:
    """Return the names of the task's metrics in order of first appearance."""
    tables = [record[split] for record in epochs for split in splits if split in record]
    return list(dict.fromkeys(name for table in tables for name in table if name != "solver"))


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return a small figure with one panel; a page shows several side by side."""
    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=xlabel, ylabel=plain(ylabel))
    if "accuracy" in ylabel or "share" in ylabel:
        percentages(axis)
    if xlabel in ("epoch", "training step"):
        whole_numbers(axis.xaxis)
    return figure, axis


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and an array of its panels, row by row."""
    figure = Figure(figsize=(5.6 * columns, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def percentages(axis: Axes) -> None:
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def whole_numbers(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def log_scale(axis: Axes, which: Literal["x", "y"], values: Iterable[float], room: float = 1.0) -> None:
    """Make an axis logarithmic, over the whole decades that contain the values enlarged by the factor ``room``."""
    positive = [value for value in values if 0 < value < math.inf] or [1.0]
    low = math.floor(math.log10(min(positive) / room) + 1e-9)
    high = math.ceil(math.log10(max(positive) * room) - 1e-9)
    axis.set(**{f"{which}lim": (10.0**low, 10.0 ** max(high, low + 1))})
    axis.set(**{f"{which}scale": "log"})
    (axis.xaxis if which == "x" else axis.yaxis).set_minor_locator(NullLocator())


def heights(axis: Axes) -> list[float]:
    """Return the y values of all lines in a panel."""
    lines: list[Any] = [line.get_ydata() for line in axis.get_lines()]
    return [float(height) for line in lines for height in line]


def curve(axis: Axes, points: Sequence[tuple[int, float | None]], label: str, color: Any, style: str = "-") -> None:
    """Draw a line through points; a value of None, which was not finite, leaves a gap."""
    if points:
        values = [math.nan if value is None else value for _, value in points]
        marker = "o" if len(points) <= 30 else None
        axis.plot([x for x, _ in points], values, style, color=color, label=plain(label), marker=marker, markersize=3)


def bars(axis: Axes, counts: Tensor, edges: Sequence[float], label: str) -> None:
    share = counts.double() / counts.sum()
    axis.stairs(share.tolist(), edges, fill=True, alpha=0.65, color=DIRECTION_COLORS[label], label=label)


def occupied(histograms: Sequence[Tensor]) -> tuple[int, int]:
    """Return the first and last index at which any of the histograms is positive."""
    places = torch.stack([h.double() for h in histograms]).sum(0).nonzero().flatten()
    return int(places[0]), int(places[-1])


def finish(figure: Figure, axis: Axes, *, legend: bool = True) -> Figure:
    tidy(axis)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=9, frameon=False)
    return figure


def legend_below(axis: Axes, columns: int, title: str | None = None) -> None:
    """Finish a panel with a legend below it, clear of the curves."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
    axis.legend(fontsize=9, title=title, title_fontsize=9, frameon=False, ncols=columns, **place)
    tidy(axis)


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)


def colors(count: int) -> list[Any]:
    """Return distinguishable colors."""
    return [colormaps["tab10"](i) for i in range(count)] if count <= 10 else shades(count, 1.0)


def shades(count: int, lightest: float = 0.85) -> list[Any]:
    """Return colors from dark to light."""
    return [colormaps["viridis"](lightest * i / max(1, count - 1)) for i in range(count)]


def plain(text: str) -> str:
    """Escape a string for matplotlib, so that it is neither parsed as a formula nor hidden from the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def wrapped(title: str, width: int = 55) -> str:
    """Wrap a title to the width of a panel, in characters."""
    return plain(textwrap.fill(title, width))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def check_number(name: str, value: object, **bounds: Any) -> None:
    """Raise ValueError unless an option of a figure is a number within bounds."""
    try:
        require_number(name, value, **bounds)
    except TypeError as error:  # the value comes from a file or the command line, which reports a ValueError
        raise ValueError(str(error)) from None

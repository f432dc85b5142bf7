"""Figures of training runs: metrics, solver statistics and convergence. Functions return figures; callers save them."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from equipoise.fixed_point import Equilibrium, fixed_point
from equipoise.lab.data.base import Split, spread
from equipoise.lab.files import write_json
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Titled = Iterator[tuple[str, "Figure"]]
Records = Sequence[Mapping[str, Any]]
CurveStyle = tuple[Any, str, str]  # color, line style, marker: curves differ in more than their color

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"  # distinct to color-blind readers, too
SPLITS = {"train": ("training", BLUE), "val": ("validation", ORANGE), "test": ("test", GREEN)}
DIRECTION_COLORS: dict[str, str] = dict(zip(DIRECTIONS, (BLUE, ORANGE), strict=True))
MAX_BARS = 40
STYLES, MARKERS = ("-", "--", "-.", ":"), "os^vPD"
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
    check_counts(samples=(samples, 1))
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
        styles = ((BLUE, "-", ""), (ORANGE, "-", ""), (GREEN, "--", ""), (PURPLE, "-", ""))
        for (kind, solver), style in zip(solvers.items(), styles, strict=False):
            trace = trace_residuals(layer, inputs, z0, solver, tolerance)
            own, stats = kind is type(layer.solver), trace.statistics
            share, steps = stats.converged.double().mean().item(), stats.steps.double().median().item()
            label = f"{kind.__name__}{' (this run)' if own else ''}: {share:.0%} converged, median {steps:.0f} steps"
            low, median, high = middle_80(trace.residuals)
            draw_residuals(axis, label, median, style, (low, high), trace.evaluations, linewidth=2.5 if own else 1.5)
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

    (batch,) = prepared(split, trained.task, trained.setting, len(split))()
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

    def per_evaluation(self, evaluations: int) -> Tensor:
        """Return the residual after each of the first evaluations of f: that of the most recent check.

        A solver may evaluate f several times between checks, and stops once all samples are solved.
        """
        rows = self.residuals.new_empty(evaluations, *self.residuals.shape[1:])
        for count, row in zip([1, *self.evaluations[1:]], self.residuals, strict=True):  # the first check is at z0
            rows[count - 1 :] = row
        return rows


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


def reached(residuals: Sequence[float], level: float) -> int | None:
    """Return the number of evaluations until the residual is at most ``level``; None if it never is."""
    return next((count for count, residual in enumerate(residuals, 1) if residual <= level), None)


def levels_reached(residuals: Sequence[float], levels: Sequence[float]) -> dict[str, int | None]:
    """Return :func:`reached` for several levels, keyed by level as a string for JSON."""
    return {f"{level:g}": reached(residuals, level) for level in levels}


def draw_residuals(
    axis: Axes,
    label: str,
    residuals: Sequence[float],
    style: CurveStyle,
    band: tuple[Any, Any] | None = None,
    at: Sequence[int] | None = None,
    counts: Mapping[str, int | None] | None = None,
    **line: Any,
) -> None:
    """Draw a residual curve.

    Args:
        band: lower and upper edge of a band around it.
        at: positions of the points; None for 1, 2, ...
        counts: evaluations to reach each level, which are added to the label, as is the final residual.
        line: options of ``Axes.plot``.
    """
    color, dashes, marker = style
    at = range(1, len(residuals) + 1) if at is None else at
    if counts is not None:
        label += f": {' / '.join('-' if n is None else str(n) for n in counts.values())}; {residuals[-1]:.2g}"
    if band is not None:
        axis.fill_between(at, *band, color=color, alpha=0.2, linewidth=0)
    line = {"markersize": 5, "markerfacecolor": "white" if dashes == "--" else color, **line}
    every = max(1, len(residuals) // 8)
    axis.plot(at, residuals, dashes, color=color, marker=marker, markevery=every, label=label, **line)


def finish_residuals(axes: Sequence[Sequence[Axes]], levels: Sequence[float], f: str = "f", columns: int = 1) -> None:
    """Give panels, which share their y axis, one logarithmic scale, and each a legend that explains its counts."""
    drawn = [height for row in axes for axis in row for height in heights(axis) if height < DIVERGED]
    log_scale(axes[0][0], "y", drawn)
    axes[0][0].set_ylim(top=min(DIVERGED, 1.5 * max(drawn)))
    title = f"evaluations to residual {' / '.join(f'{level:g}' for level in levels)}; final residual"
    for row in axes:
        row[0].set_ylabel(RESIDUAL.format(f=f))
        for axis in row:
            axis.set_xlabel(f"evaluations of {f}")
            whole_numbers(axis.xaxis)
            legend_below(axis, columns, title)


# Parts of figures


def of_kind(records: Records, kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def metric_names(epochs: Records, *splits: str) -> list[str]:
    """Return the names of the task's metrics in order of first appearance."""
    tables = [record[split] for record in epochs for split in splits if split in record]
    return list(dict.fromkeys(name for table in tables for name in table if name != "solver"))


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return a small figure with one panel; a page shows several side by side."""
    from matplotlib.figure import Figure

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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * columns, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def percentages(axis: Axes) -> None:
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")


def whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def log_scale(axis: Axes, which: Literal["x", "y"], values: Iterable[float], room: float = 1.0) -> None:
    """Make an axis logarithmic, over the whole decades that contain the values enlarged by the factor ``room``."""
    from matplotlib.ticker import NullLocator

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
    from matplotlib import colormaps

    return [colormaps["tab10"](i) for i in range(count)] if count <= 10 else shades(count, 1.0)


def shades(count: int, lightest: float = 0.85) -> list[Any]:
    """Return colors from dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](lightest * i / max(1, count - 1)) for i in range(count)]


def curve_styles(colors: Sequence[Any]) -> list[CurveStyle]:
    return [(color, STYLES[i % len(STYLES)], MARKERS[i % len(MARKERS)]) for i, color in enumerate(colors)]


def plain(text: str) -> str:
    """Escape a string for matplotlib, so that it is neither parsed as a formula nor hidden from the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def wrapped(title: str) -> str:
    """Wrap a title to the width of a panel."""
    return plain(textwrap.fill(title, 55))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# Helpers for figures of papers


def describe(run: Run) -> dict[str, Any]:
    return {"run": run.folder.name, "recipe": run.facts["recipe"], "title": run.recipe.title}


def write_numbers(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a figure as JSON beside it; ``path`` is that of the picture, None writes nothing."""
    if path is not None:
        write_json(path.with_suffix(".json"), numbers)


def random_rows(split: Split, samples: int | None = None) -> Tensor:
    """Return indices of random samples of a split, the same ones on every call."""
    return torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:samples]


def equilibrium_of(trained: Trained, kind: type) -> Any:
    """Return the first equilibrium of a model whose f is of a given class."""
    for layer in trained.model.modules():
        if isinstance(layer, Equilibrium) and isinstance(layer.f, kind):
            return layer
    raise ValueError(f"{trained.file}: this figure requires a model with a {kind.__name__}, and this one has none.")


def check_number(name: str, value: object, **bounds: Any) -> None:
    """Raise ValueError unless an option of a figure is a number within bounds."""
    try:
        require_number(name, value, **bounds)
    except TypeError as error:  # the value comes from a file or the command line, which reports a ValueError
        raise ValueError(str(error)) from None


def check_counts(**counts: tuple[Any, int]) -> None:
    """Raise ValueError unless every option is a whole number of at least its minimum: ``samples=(samples, 1)``."""
    for name, (value, minimum) in counts.items():
        check_number(name, value, at_least=minimum, whole=True)

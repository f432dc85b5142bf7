"""Figures of runs: how training went, what its solves took, how they converge. Drawn here, saved by who asks."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from equipoise.solution import Statistics
from equipoise.solvers import Anderson, Broyden, Picard, Solver
from equipoise.tasks import Sums
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Titled = Iterator[tuple[str, "Figure"]]
Records = Sequence[Mapping[str, Any]]

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"  # told apart by colour-blind readers, too
SPLITS = {"train": ("training", BLUE), "val": ("validation", ORANGE), "test": ("test", GREEN)}
DIRECTION_COLORS: dict[str, str] = dict(zip(DIRECTIONS, (BLUE, ORANGE), strict=True))
MOST_BARS = 40


# Over training


def training_curves(records: Records) -> Titled:
    """Every metric over the epochs; learning rate and length of the gradient over the steps.

    Args:
        records: the lines of a run's log.
    """
    epochs, steps = of_kind(records, "epoch"), of_kind(records, "step")
    for name in metric_names(epochs, *SPLITS):
        figure, axis = blank("epoch", name)
        for split, (label, color) in SPLITS.items():
            points = [(record["epoch"], record[split][name]) for record in epochs if name in record.get(split, {})]
            curve(axis, points, label, color)
        for before, after in itertools.pairwise(epochs):
            if before["phase"] != after["phase"]:
                axis.axvline(before["epoch"] + 0.5, color="0.6", linestyle=":", linewidth=1)
        yield capital(name), finished(figure, axis)
    for key, name in (("lr", "learning rate"), ("gradient_norm", "length of the gradient")):
        points = [(record["step"], record.get(key)) for record in steps]
        if any(value is not None for _, value in points):
            figure, axis = blank("training step", name)
            curve(axis, points, name, BLUE)
            found = [value for _, value in points if value]
            if key == "gradient_norm" and found and max(found) > 30 * min(found):
                axis.set_yscale("log")
            yield capital(name), finished(figure, axis, legend=False)


def solver_curves(records: Records, tolerance: float | None = None) -> Titled:
    """Steps, residuals and failures of the solves over the steps of training; nothing if there were no solves.

    Args:
        records: the lines of a run's log.
        tolerance: relative, drawn beside the residuals.
    """
    steps = [record for record in of_kind(records, "step") if record["steps"]]
    if not steps:
        return
    for key, title, name in (
        ("steps", "Solver steps while training", "median of the batch"),
        ("residual", "Residuals while training", "worst of the batch"),
    ):
        figure, axis = blank("training step", name)
        for direction, color in DIRECTION_COLORS.items():
            points = [(record["step"], record[key][direction]) for record in steps if direction in record[key]]
            curve(axis, points, direction, color, style="-" if direction == "forward" else "--")
        if key == "residual" and tolerance:
            axis.axhline(tolerance, color="0.3", linestyle=":", linewidth=1, label="tolerance")
        if key == "residual":
            decades(axis, "y", heights(axis), room=1.3)
        else:
            whole_numbers(axis.yaxis)
        yield title, finished(figure, axis)
    figure, axis = blank("training step", "samples of the batch")
    curve(axis, [(record["step"], record["failed_samples"]) for record in steps], "failed", BLUE)
    top = max(1, *axis.get_ylim())
    axis.set_ylim(-0.03 * top, top)
    whole_numbers(axis.yaxis)
    yield "Samples that did not converge", finished(figure, axis, legend=False)


def comparison(logs: Mapping[str, Records]) -> Titled:
    """The validation metrics of several runs, laid over each other.

    Args:
        logs: the lines of each run's log, by the run's name.
    """
    epochs = {name: [r for r in of_kind(records, "epoch") if "val" in r] for name, records in logs.items()}
    epochs = {name: records for name, records in epochs.items() if records}
    for metric in metric_names([record for records in epochs.values() for record in records], "val"):
        figure, axis = blank("epoch", f"validation {metric}")
        for (name, records), color in zip(epochs.items(), colors(len(epochs)), strict=True):
            points = [(record["epoch"], record["val"][metric]) for record in records if metric in record["val"]]
            curve(axis, points, name, color)
        columns = 1 if max(map(len, epochs)) > 24 else 2 if max(map(len, epochs)) > 12 else 3
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(epochs) / columns))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
        yield f"Validation {metric}", finished(figure, axis, legend=False)


# Over a split


def histograms(sums: Sums) -> Titled:
    """How many steps the solves of a split took and what residuals they left; nothing if there were no solves.

    Args:
        sums: of an :class:`~equipoise.lab.training.evaluate.Evaluation`.
    """
    solved = [direction for direction in DIRECTIONS if sums.get(f"{direction} results", torch.zeros(1)).sum()]
    if not solved:
        return
    figure, axis = blank("solver steps", "share of the solves")
    first, last = occupied([sums[f"{direction} steps"] for direction in solved])
    width = math.ceil((last - first + 1) / MOST_BARS)
    for direction in solved:
        counts = sums[f"{direction} steps"][first : last + 1]
        counts = torch.nn.functional.pad(counts, (0, -len(counts) % width)).view(-1, width).sum(1)
        edges = [first - 0.5 + width * i for i in range(len(counts) + 1)]
        bars(axis, counts, edges, direction)
    middle = (first + last) / 2
    axis.set_xlim(max(0, min(first - 1.5, middle - 6)), max(last + 1.5, middle + 6))
    whole_numbers(axis.xaxis)
    yield "Solver steps", finished(figure, axis, legend=len(solved) > 1)

    figure, axis = blank("relative residual", "share of the solves")
    first, last = occupied([sums[f"{direction} residuals"] for direction in solved])
    edges = [10 ** (DECADES[0] + i / PER_DECADE) for i in range(first, last + 2)]
    for direction in solved:
        bars(axis, sums[f"{direction} residuals"][first : last + 1], edges, direction)
    decades(axis, "x", edges)
    yield "Residuals", finished(figure, axis, legend=len(solved) > 1)


def convergence(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 128,
    relative: float = 1e-6,
    max_steps: int = 60,
) -> Figure:
    """Residual against evaluations of f under several solvers, at the first equilibrium of trained models.

    Args:
        runs: trained; each gets a panel of its own.
        machine: where to solve.
        folders: to look for data in first.
        samples: of the test split, spread over it evenly.
        relative: the tolerance to solve to; tighter than one trains with, so that the solvers' ways part.
        max_steps: at most.
    """
    opened = [open_trained(run, machine) for run in runs]
    splits = [data_of(run, trained.recipe, folders).test for run, trained in zip(runs, opened, strict=True)]
    return convergence_of(list(zip(opened, splits, strict=True)), samples, relative, max_steps)


def convergence_of(
    models: Sequence[tuple[Trained, Split]], samples: int = 128, relative: float = 1e-6, max_steps: int = 60
) -> Figure:
    """:func:`convergence` of models that are open, each with the split to take samples from."""
    from matplotlib.figure import Figure

    if samples < 1:
        raise ValueError(f"samples is {samples}; at least 1 sample must be solved.")
    tolerance = Tolerance(relative=relative, max_steps=max_steps, patience=None)
    figure = Figure(figsize=(6 * len(models), 5), layout="constrained")
    for axis, (trained, split) in zip(
        figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True
    ):
        draw_convergence(axis, trained, split, samples, tolerance)
    figure.axes[0].set_ylabel(r"relative residual  $\|f(z)-z\| \,/\, \|f(z)\|$")
    return figure


@torch.no_grad()
def draw_convergence(axis: Axes, trained: Trained, split: Split, samples: int, tolerance: Tolerance) -> None:
    """One panel: the median over the samples of each solver's residual, and where the middle 80% lie."""
    layers = [layer for layer in trained.model.modules() if isinstance(layer, Equilibrium)]
    with quiet_failures(), trained.setting.autocast():
        layer, inputs, z0 = first_solve(trained, layers, spread(split, samples))
        # The run's own solver takes the place of the one of its kind.
        solvers: dict[type[Solver], Solver] = {type(s): s for s in (Picard(), Anderson(), Broyden(), layer.solver)}
        looks = ((BLUE, "-"), (ORANGE, "-"), (GREEN, "--"), (PURPLE, "-"))  # Broyden and Anderson may go hand in hand
        for (kind, solver), (color, style) in zip(solvers.items(), looks, strict=False):
            statistics, evaluations = traced(layer, inputs, z0, solver, tolerance)
            own = kind is type(layer.solver)
            name = f"{kind.__name__}, as in the run" if own else kind.__name__
            draw_trace(axis, statistics, evaluations, name, color, style, 2.5 if own else 1.5)
    if layer.tolerance.relative > tolerance.relative:
        axis.axhline(layer.tolerance.relative, color="0.3", linestyle="--", linewidth=1, label="tolerance of the run")
    axis.axhline(tolerance.relative, color="0.3", linestyle=":", linewidth=1, label="tolerance here")
    decades(axis, "y", [tolerance.relative / 2, *(min(height, 1e3) for height in heights(axis))])  # if it diverges
    axis.set_xlabel("evaluations of f")
    whole_numbers(axis.xaxis)
    which = f"\nthe first of its {len(layers)} equilibria" if len(layers) > 1 else ""
    axis.set_title(plain(textwrap.fill(trained.recipe.title, 55)) + which, fontsize=11)
    axis.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))  # clear of the curves
    tidy(axis)


def first_solve(trained: Trained, layers: Sequence[Equilibrium], split: Split) -> tuple[Equilibrium, Any, Any]:
    """The first equilibrium that the model solves when the task measures it on a split, its inputs and its start.

    The layer's ``solve`` is replaced for the moment: a model may call it as well as the layer itself, and a task may
    call the model as it likes. Nothing is computed beyond the first call.
    """

    class Reached(Exception):
        """Carries what was found out of the model."""

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
    raise ValueError(f"{trained.file}: the model solves no equipoise.Equilibrium; there is no convergence to draw.")


def traced(
    layer: Equilibrium, inputs: Any, z0: Any, solver: Solver, tolerance: Tolerance
) -> tuple[Statistics, list[int]]:
    """What one solve did, its trace kept, and how often f had been evaluated at each entry of the trace."""
    evaluations: list[int] = []
    solution = fixed_point(
        layer.f,
        layer.start(inputs) if z0 is None else z0,
        *inputs,
        solver=solver,
        tolerance=tolerance,
        on_failure="ignore",  # the legend says how many converged
        compact=layer.compact,
        trace=True,
        callback=lambda progress: evaluations.append(progress.problem.count.evaluations),
    )
    return solution.stats, evaluations


def draw_trace(
    axis: Axes, statistics: Statistics, evaluations: list[int], name: str, color: str, style: str, width: float
) -> None:
    assert statistics.trace is not None
    trace = statistics.trace.double().cpu().nan_to_num(nan=torch.inf)
    low, middle, high = (trace.quantile(share, dim=1, interpolation="nearest").tolist() for share in (0.1, 0.5, 0.9))
    share, steps = statistics.converged.double().mean().item(), statistics.steps.double().median().item()
    label = f"{name}: {share:.0%} converged, median {steps:.0f} steps"
    axis.fill_between(evaluations, low, high, color=color, alpha=0.2, linewidth=0)
    axis.plot(evaluations, middle, style, color=color, linewidth=width, label=label)


# Parts of figures


def of_kind(records: Records, kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def metric_names(epochs: Records, *splits: str) -> list[str]:
    """The task's metrics in the order of their first appearance."""
    tables = [record[split] for record in epochs for split in splits if split in record]
    return list(dict.fromkeys(name for table in tables for name in table if name != "solver"))


def blank(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A small figure: a page puts as many side by side as it has room for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=xlabel, ylabel=plain(ylabel))
    if "accuracy" in ylabel or "share" in ylabel:
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    if xlabel in ("epoch", "training step"):
        whole_numbers(axis.xaxis)
    return figure, axis


def whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def decades(axis: Axes, which: Literal["x", "y"], values: Iterable[float], room: float = 1.0) -> None:
    """A logarithmic axis over the whole decades that hold the values, with some room around them."""
    from matplotlib.ticker import NullLocator

    found = [value for value in values if 0 < value < math.inf] or [1.0]
    low = math.floor(math.log10(min(found) / room) + 1e-9)
    high = math.ceil(math.log10(max(found) * room) - 1e-9)
    axis.set(**{f"{which}lim": (10.0**low, 10.0 ** max(high, low + 1))})
    axis.set(**{f"{which}scale": "log"})
    (axis.xaxis if which == "x" else axis.yaxis).set_minor_locator(NullLocator())


def heights(axis: Axes) -> list[float]:
    """Of all points of all lines."""
    drawn: list[Any] = [line.get_ydata() for line in axis.get_lines()]
    return [float(height) for line in drawn for height in line]


def curve(axis: Axes, points: Sequence[tuple[int, float | None]], label: str, color: Any, style: str = "-") -> None:
    """A line through points; numbers that were not finite are None, and leave a gap."""
    if points:
        values = [math.nan if value is None else value for _, value in points]
        marker = "o" if len(points) <= 30 else None
        axis.plot([x for x, _ in points], values, style, color=color, label=plain(label), marker=marker, markersize=3)


def bars(axis: Axes, counts: Tensor, edges: Sequence[float], label: str) -> None:
    share = counts.double() / counts.sum()
    axis.stairs(share.tolist(), edges, fill=True, alpha=0.65, color=DIRECTION_COLORS[label], label=label)


def occupied(histograms: Sequence[Tensor]) -> tuple[int, int]:
    """The first and the last place at which any of the histograms has counts."""
    places = torch.stack([h.double() for h in histograms]).sum(0).nonzero().flatten()
    return int(places[0]), int(places[-1])


def finished(figure: Figure, axis: Axes, *, legend: bool = True) -> Figure:
    tidy(axis)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=9, frameon=False)
    return figure


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)


def colors(count: int) -> list[Any]:
    """So many colours that can be told apart."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["viridis"](i / (count - 1)) for i in range(count)]


def plain(text: str) -> str:
    """A text that matplotlib shows as it is: no formulas, and not hidden from the legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# What figures of papers share


def about(run: Run) -> dict[str, Any]:
    return {"run": run.folder.name, "recipe": run.facts["recipe"], "title": run.recipe.title}


def write_beside(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a picture under its name, as JSON."""
    if path is not None:
        write_json(path.with_suffix(".json"), numbers)


def reached(residuals: Sequence[float], level: float) -> int | None:
    """Evaluations until the residual is at most the level; None if it never is."""
    return next((count for count, residual in enumerate(residuals, 1) if residual <= level), None)


def page(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """An empty figure and its panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * columns, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def under(axis: Axes, columns: int, title: str | None = None) -> None:
    """Finish a panel, with a legend clear of its curves."""
    axis.legend(
        fontsize=9,
        title=title,
        title_fontsize=9,
        frameon=False,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
    )
    tidy(axis)

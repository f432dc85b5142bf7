"""Parts that figures of several papers share: residual curves, the numbers beside a figure, checks of its options."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from equipoise.fixed_point import Equilibrium
from equipoise.lab.data.base import Split, Subset
from equipoise.lab.files import write_json
from equipoise.lab.recipes.build import full_title
from equipoise.lab.results.figures import (
    DIVERGED,
    RESIDUAL,
    ResidualTrace,
    check_number,
    heights,
    legend_below,
    log_scale,
    whole_numbers,
)
from equipoise.lab.results.trained import Trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.training.evaluate import prepared

CurveStyle = tuple[Any, str, str]  # color, line style, marker: curves differ in more than their color
STYLES, MARKERS = ("-", "--", "-.", ":"), "os^vPD"


def per_evaluation(trace: ResidualTrace, evaluations: int) -> Tensor:
    """Return the residual after each of the first evaluations of f: that of the most recent check.

    A solver may evaluate f several times between checks, and stops once all samples are solved.
    """
    rows = trace.residuals.new_empty(evaluations, *trace.residuals.shape[1:])
    for count, row in zip([1, *trace.evaluations[1:]], trace.residuals, strict=True):  # the first check is at z0
        rows[count - 1 :] = row
    return rows


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


def curve_styles(colors: Sequence[Any]) -> list[CurveStyle]:
    return [(color, STYLES[i % len(STYLES)], MARKERS[i % len(MARKERS)]) for i, color in enumerate(colors)]


def describe(run: Run) -> dict[str, Any]:
    return {"run": run.folder.name, "recipe": run.facts["recipe"], "title": full_title(run.recipe)}


def tell_apart(measured: Sequence[dict[str, Any]], runs: Sequence[Run]) -> None:
    """Add to titles that several runs share the settings in which these runs differ."""
    titles = [each["title"] for each in measured]
    for title in {title for title in titles if titles.count(title) > 1}:
        alike = [i for i, each in enumerate(titles) if each == title]
        chosen = [set(settings(runs[i].facts["tables"])) for i in alike]
        for i, own in zip(alike, chosen, strict=True):
            special = sorted(own - set.intersection(*chosen))
            measured[i]["title"] = f"{title} ({', '.join(special)})" if special else title


def settings(tables: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the settings of a recipe as they are written on the command line."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from settings(value, f"{section}{key}.")
        else:
            yield f"{section}{key}={value}"


def write_numbers(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a figure as JSON beside it; ``path`` is that of the picture, None writes nothing."""
    if path is not None:
        write_json(path.with_suffix(".json"), numbers)


def random_rows(split: Split, samples: int | None = None) -> Tensor:
    """Return indices of random samples of a split, the same ones on every call."""
    return torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:samples]


def random_test_images(run: Run, trained: Trained, folders: Sequence[Path], samples: int) -> Tensor:
    """Return random test images of a run, prepared for its model, the same ones on every call."""
    test = data_of(run, trained.recipe, folders).test
    return next(prepared(Subset(test, random_rows(test, samples)), trained.task, trained.setting, samples))[0]


def equilibrium_of(trained: Trained, kind: type) -> Any:
    """Return the first equilibrium of a model whose f is of a given class."""
    for layer in trained.model.modules():
        if isinstance(layer, Equilibrium) and isinstance(layer.f, kind):
            return layer
    raise ValueError(f"{trained.file}: this figure requires a model with a {kind.__name__}, and this one has none.")


def check_counts(**counts: tuple[Any, int]) -> None:
    """Raise ValueError unless every option is a whole number of at least its minimum: ``samples=(samples, 1)``."""
    for name, (value, minimum) in counts.items():
        check_number(name, value, at_least=minimum, whole=True)

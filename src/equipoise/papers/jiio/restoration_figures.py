"""Strips of restored images (figures 7 to 12 of the JIIO paper): given, some steps, restored, truth.

Functions take trained ``runs``, the ``machine``, ``folders`` searched first for data, and the ``path`` of the picture,
beside which they write their numbers as JSON (None writes none).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.lab.results.figures import wrapped
from equipoise.lab.results.sample import decoded, drawn_latents
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.papers.drawing import check_counts, describe, random_test_images, write_numbers
from equipoise.tasks.degradations import Degradation, seeds_of
from equipoise.tasks.drawing import in_three_colors, shown
from equipoise.tasks.latent_vectors import generator_in
from equipoise.tasks.restoration import Panel, Restoration, strip_panels

SOURCES = ("test", "generated")


def restorations(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    problem: str = "inpaint",
    amount: float | None = None,
    samples: int = 6,
    steps: int = 100,
    source: str = "test",
    path: Path | None = None,
) -> Figure:
    """Draw strips of images restored by each run, all from the same measurements.

    Args:
        runs: trained generators of images of one size, supervised or not.
        problem, amount: see :class:`~equipoise.tasks.degradations.Degradation`.
        samples: number of images.
        steps: number of joint steps.
        source: "test" for random test images, "generated" for samples of the first run, which may be shown where the
            terms of the data set forbid showing its images.
    """
    check_counts(samples=(samples, 1), steps=(steps, 1))
    if source not in SOURCES:
        raise ValueError(f"source is {source!r}; allowed: {', '.join(map(repr, SOURCES))}.")
    degradation = Degradation(problem, amount)
    blocks: list[tuple[str, list[Panel]]] = []
    numbers: list[dict[str, Any]] = []
    truth = None
    for run in runs:
        trained = open_trained(run, machine)
        if isinstance(trained.task, Restoration) and trained.task.network_in(trained.model) is not None:
            raise ValueError(
                f"{run} was trained to map measurements to images, without joint steps, whose images the strips show: "
                "give a run of a generator. `equipoise restore` restores images with it."
            )
        if truth is None or source == "test":
            truth = (random_test_images if source == "test" else generated_images)(run, trained, folders, samples)
        y, physics = degradation.measure(truth, seeds_of(truth))
        with quiet_failures(), trained.setting.autocast(), torch.no_grad():
            panels, restored = strip_panels(generator_in(trained.model), y, physics, truth, steps)
        blocks.append((run.recipe.title, panels))
        ratios = {title: ratio.tolist() for title, _, ratio in panels if ratio is not None}
        numbers.append({**describe(run), "psnr": ratios, "evaluations": restored.optimum.stats.evaluations})
    facts = {"problem": problem, "amount": degradation.amount, "steps": steps, "source": source}
    write_numbers(path, {**facts, "runs": numbers})
    return drawn(blocks)


def generated_images(run: Run, trained: Trained, folders: Sequence[Path], samples: int) -> Tensor:
    """Return images in [-1, 1] that the run generates."""
    x, _ = drawn_latents(run, trained, samples, folders=folders)
    return decoded(trained, generator_in(trained.model), x).to(trained.setting.device)


def drawn(blocks: Sequence[tuple[str, list[Panel]]]) -> Figure:
    """Draw a block of strips for each run, one image a row, below each other."""
    rows, columns = len(blocks[0][1][0][1]), max(len(panels) for _, panels in blocks)
    figure = Figure(figsize=(1.35 * columns, (1.6 * rows + 0.5) * len(blocks)), layout="constrained")
    parts = figure.subfigures(len(blocks), 1, squeeze=False)[:, 0]
    for part, (title, panels) in zip(parts, blocks, strict=True):
        part.suptitle(wrapped(title), fontsize=10)
        axes = part.subplots(rows, columns, squeeze=False)
        for axis in axes.flat:
            axis.axis("off")
        for column, (name, images, ratios) in enumerate(panels):
            for row, image in enumerate(shown(images)):
                axis = axes[row, column]
                axis.imshow(in_three_colors(image).permute(1, 2, 0).numpy(), interpolation="nearest")
                rated = "" if ratios is None else f"{float(ratios[row]):.1f} dB"
                axis.set_title(f"{name}\n{rated}" if row == 0 else rated, fontsize=7)
    return figure

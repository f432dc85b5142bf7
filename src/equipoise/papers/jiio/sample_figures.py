"""Samples and reconstructions of a generator (figures 2, 5 and 6 of the JIIO paper).

Functions take trained ``runs``, the ``machine``, ``folders`` searched first for data, and the ``path`` of the picture,
beside which they write their numbers as JSON (None writes none).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.lab.results.figures import wrapped
from equipoise.lab.results.sample import decoded, drawn_latents, open_generator
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.generator.density import FEWEST
from equipoise.papers.drawing import check_counts, describe, random_test_images, write_numbers
from equipoise.tasks.drawing import in_three_colors, shown
from equipoise.tasks.image_quality import psnr
from equipoise.tasks.latent_vectors import fit, squared_error

COLUMNS = 8
Rows = list[tuple[Tensor, list[str]]]  # images and their captions, up to COLUMNS a row


def generated(
    runs: Sequence[Run],
    machine: Machine,
    folders: Sequence[Path] = (),
    samples: int = 32,
    reconstructions: int = 16,
    steps: int = 100,
    latents: int = 2000,
    seed: int = 0,
    path: Path | None = None,
) -> Figure:
    """Draw samples of generators, and random test images above their reconstructions, with the PSNR of each.

    The density of the latent vectors is fitted once and kept in the folder of the run, as by ``equipoise sample``.

    Args:
        runs: trained generators, one below the other.
        samples: number of samples; 0 for none.
        reconstructions: number of test images to reconstruct; 0 for none.
        steps: number of joint steps that find the latent vector of a test image.
        latents: number of training images whose latent vectors the density is fitted to.
        seed: seed of the samples.
    """
    counts = {"samples": (samples, 0), "reconstructions": (reconstructions, 0), "seed": (seed, 0)}
    check_counts(**counts, steps=(steps, 1), latents=(latents, FEWEST))
    if not samples and not reconstructions:
        raise ValueError("samples and reconstructions are both 0; at least one of them must be positive.")
    blocks: list[tuple[str, Rows]] = []
    numbers: list[dict[str, Any]] = []
    for run in runs:
        trained, model = open_generator(run, machine, "best")
        entry, title = describe(run), run.recipe.title
        if samples:
            x, density = drawn_latents(run, trained, samples, seed=seed, latents=latents, folders=folders)
            assert density is not None  # latents are given
            images = decoded(trained, model, x)
            blocks.append((f"Samples: {title}", [(part, [""] * len(part)) for part in images.split(COLUMNS)]))
            entry |= {"samples": samples, "Gaussians": density.size.components}
        if reconstructions:
            truth = random_test_images(run, trained, folders, reconstructions)
            with quiet_failures(), torch.no_grad():
                found = fit(model, squared_error, truth, steps=steps)
            images, truth = decoded(trained, model, found.x), truth.float().cpu()
            ratios = psnr(images, truth).tolist()
            entry |= {"psnr": ratios, "mean psnr": sum(ratios) / len(ratios), "steps": steps}
            blocks.append((f"Test images and their reconstructions: {title}", pairs(truth, images, ratios)))
        numbers.append(entry)
    write_numbers(path, {"runs": numbers})
    return drawn(blocks)


def pairs(truth: Tensor, images: Tensor, ratios: Sequence[float]) -> Rows:
    """Return rows of test images, each above the row of their reconstructions."""
    rows: Rows = []
    for start in range(0, len(truth), COLUMNS):
        part = slice(start, start + COLUMNS)
        rows += [(truth[part], [""] * len(truth[part])), (images[part], [f"{ratio:.1f} dB" for ratio in ratios[part]])]
    return rows


def drawn(blocks: Sequence[tuple[str, Rows]]) -> Figure:
    """Draw blocks of rows of images in [-1, 1], each block below its title."""
    heights = [len(rows) + 0.3 for _, rows in blocks]
    columns = max(len(images) for _, rows in blocks for images, _ in rows)
    figure = Figure(figsize=(max(1.2 * columns, 5), 1.3 * math.fsum(heights)), layout="constrained")
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, rows) in zip(parts, blocks, strict=True):
        part.suptitle(wrapped(title), fontsize=10)
        axes = part.subplots(len(rows), columns, squeeze=False)
        for axis in axes.flat:
            axis.axis("off")
        for row, (images, captions) in zip(axes, rows, strict=True):
            for axis, image, caption in zip(row, shown(images), captions, strict=False):
                axis.imshow(in_three_colors(image).permute(1, 2, 0).numpy(), interpolation="nearest")
                axis.set_title(caption, fontsize=7)
    return figure

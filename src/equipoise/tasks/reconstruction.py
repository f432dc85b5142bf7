"""What the tasks that reconstruct images in [-1, 1] from latent vectors share."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import rows_of_images
from equipoise.tasks.image_quality import psnr_of_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 8  # images in a row of a figure


class Reconstruction(Task, ABC):
    """Images in [-1, 1], metrics that are means over samples, and a figure of reconstructions."""

    reported: ClassVar[tuple[str, ...]]  # metrics, in their order

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        images, *rest = super().prepare(batch, dtype)
        return 2 * images - 1, *rest

    def metrics(self, sums: Sums) -> dict[str, float]:
        names = [name for name in self.reported if name in sums]
        return {name: sums[name].item() / sums["samples"].item() for name in names}


def totals(values: dict[str, Tensor]) -> Sums:
    """Return the sums of what was measured of each sample, and the number of samples."""
    samples = len(next(iter(values.values())))
    return {"samples": torch.tensor(samples), **{name: part.double().sum() for name, part in values.items()}}


def error_sums(errors: Tensor) -> Sums:
    """Return the sums that follow from the mean squared errors of images."""
    return totals({"loss": errors, "psnr": psnr_of_error(errors)})


def reconstructions(truth: Tensor, images: Tensor, ratios: Tensor) -> tuple[str, Figure]:
    """Return a titled figure of the first images above their reconstructions, with the PSNR of each."""
    rows = [("given", truth[:SHOWN]), ("reconstructed", images[:SHOWN])]
    return "Reconstructions of test images", rows_of_images(rows, [f"{r:.1f} dB" for r in ratios[:SHOWN].tolist()])

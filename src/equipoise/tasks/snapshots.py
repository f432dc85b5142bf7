"""The images of a generator at some steps of a joint optimisation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.models.generator.decoder import Decoder
from equipoise.problem.layout import leaves, rebuild
from equipoise.solvers import Progress


class Snapshots:
    """A callback that keeps the image of every sample at some steps.

    A sample that stops earlier keeps its last image.

    Args:
        generator: generator that is fitted.
        steps: numbers of the steps, from 1.

    Example:
        >>> snapshots = Snapshots(generator, (1, 10, 100))
        >>> restore(generator, y, physics, callback=snapshots)
        >>> snapshots.images[10]
    """

    def __init__(self, generator: Decoder, steps: Sequence[int]):
        self.generator, self.steps = generator, tuple(sorted(set(steps)))
        self.images: dict[int, Tensor] = {}
        self.z: Any = None  # the latest of every sample

    @torch.no_grad()
    def __call__(self, progress: Progress) -> None:
        z, _, _ = progress.value
        if self.z is None:
            self.z = rebuild(z, [tensor.clone() for _, tensor in leaves(z, "z")])
        for (_, kept), (_, tensor) in zip(leaves(self.z, "z"), leaves(z, "z"), strict=True):
            kept.index_copy_(0, progress.rows, tensor)
        if progress.step in self.steps:
            self.images[progress.step] = self.generator.image(self.z)

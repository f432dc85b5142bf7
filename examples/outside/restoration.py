"""A task from outside the package: recover a clean signal, measured by its signal-to-noise ratio."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from equipoise.tasks import Batch, Sums, Task


class Restoration(Task):
    """Named in a recipe as ``name = "restoration:Restoration"``."""

    best_metric = "snr"  # in decibels; the weights with the largest one on the validation split are kept

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        return tuple(tensor.to(dtype) for tensor in batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        noisy, clean = batch
        restored = model(noisy)
        return (restored - clean).square().mean(), self.sums(restored.detach(), clean)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        noisy, clean = batch
        return self.sums(model(noisy), clean)

    def sums(self, restored: Tensor, clean: Tensor) -> Sums:
        return {"error": (restored - clean).double().square().sum(), "power": clean.double().square().sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return {"snr": 10 * torch.log10(sums["power"] / sums["error"]).item()}

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        noisy, clean = next(batches())
        with torch.no_grad():
            restored = model(noisy[:4])
        figure = Figure(figsize=(9, 5), layout="constrained")
        for row, axis in enumerate(figure.subplots(2, 2, sharex=True, sharey=True).flat):
            axis.plot(noisy[row, 0].cpu(), color="0.7", label="given")
            axis.plot(clean[row, 0].cpu(), color="black", label="clean")
            axis.plot(restored[row, 0].cpu(), color="tab:red", label="restored")
        figure.axes[0].legend(loc="upper right")
        yield "Restored signals", figure

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        return [{"restored": row.flatten().tolist()} for row in model(inputs).detach().cpu()]

"""A data set from outside the package: noisy sums of sines, and the clean ones to recover."""

import torch

from equipoise.lab.data import DataSet, TensorSplit


def noisy_signals(samples: int = 2000, length: int = 64, noise: float = 0.5) -> DataSet:
    """Inputs (1, length) with noise, targets without. Named in a recipe as ``name = "signals:noisy_signals"``."""
    generator = torch.Generator().manual_seed(0)  # the same signals in every run

    def split(count: int) -> TensorSplit:
        time = torch.linspace(0, 1, length)
        frequency = 1 + 5 * torch.rand(count, 3, 1, generator=generator)
        phase = 6.28 * torch.rand(count, 3, 1, generator=generator)
        clean = torch.sin(6.28 * frequency * time + phase).mean(1, keepdim=True)
        return TensorSplit(clean + noise * torch.randn(clean.shape, generator=generator), clean)

    return DataSet("noisy signals", train=split(samples), test=split(samples // 4), shape=(1, length))

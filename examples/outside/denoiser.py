"""A model from outside the package: a signal whose features are an equilibrium."""

import torch
from torch import Tensor, nn

import equipoise as eq


class Cell(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding=2)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.norm(self.conv(z)) + u)


class Denoiser(nn.Module):
    """Named in a recipe as ``name = "denoiser:Denoiser"``; ``shape`` is filled in from the data set."""

    def __init__(self, shape: tuple[int, int], width: int = 16):
        super().__init__()
        self.stem = nn.Conv1d(shape[0], width, 5, padding=2)
        self.equilibrium = eq.Equilibrium(Cell(width))
        self.head = nn.Conv1d(width, shape[0], 5, padding=2)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.equilibrium(self.stem(signals)))

"""Equilibria and models that the tests of export share."""

import torch
from torch import nn

import equipoise as eq


class Cell(nn.Module):
    def __init__(self, n=6, bound=0.9):
        super().__init__()
        self.W = eq.SpectralNorm(nn.Linear(n, n), bound, always=True)

    def forward(self, z, x):
        return torch.tanh(self.W(z) + x)


class Odd(nn.Module):
    """z/2 + x for small x (converges), z + x for x = 2 (never does), and z^2 + x, which becomes NaN, for x > 2."""

    def forward(self, z, x):
        grows = torch.where(z > 50, torch.nan, z.square() + x)
        return torch.where(x > 2, grows, torch.where(x == 2, z + x, z / 2 + x))


ODD = torch.tensor([0.0, 0.5, 2.0, 4.0, 1.0])[:, None].expand(5, 3)

MODELS = {
    "conv-equilibrium": {"shape": (1, 6, 6)},
    "mdeq": {"shape": (3, 8, 8), "channels": (4, 4), "groups": 2, "head_channels": (2, 2), "final_channels": 4},
    "opteq": {"shape": (3, 8, 8), "size": "reduced", "channels": 4},
    "popteq": {"shape": (3, 8, 8), "size": "reduced", "channels": 4, "fusion": "conv"},
    "mopteq": {"shape": (3, 8, 8), "size": "reduced", "channels": 4, "scales": (1, 2, 4), "diversity": 0.1},
}

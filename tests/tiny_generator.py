"""A small generator whose f is a contraction, so that its equilibrium can be found to rounding."""

from typing import Any

import torch
from torch import nn

from equipoise.models.generator.model import Generator
from equipoise.models.mdeq.cell import Block
from equipoise.tolerance import Tolerance


def tiny(seed: int = 0, **options: Any) -> Generator:
    """A generator in float64, of 12 x 12 grey images from three numbers unless told otherwise."""
    torch.manual_seed(seed)
    settings = {"shape": (1, 12, 12), "latent": 3, "channels": (8, 8), "downsamplings": 0, "expansion": 1.0}
    model = Generator(**{**settings, **options}).double()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # the input dominates the state
            nn.init.normal_(module.weight, std=2.0)
            nn.init.normal_(module.bias, std=2.0)
        if isinstance(module, Block):
            nn.init.constant_(module.norm2.weight, 4.0)
    model.equilibrium.tolerance = Tolerance(relative=1e-10, max_steps=300)
    return model

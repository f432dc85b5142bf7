"""A small VAE in float64 whose equilibria are found to rounding."""

from typing import Any

import torch
from torch import nn

from equipoise.models.generator.vae import MDEQVAE
from equipoise.models.mdeq.cell import Block
from equipoise.solvers import Anderson
from equipoise.tolerance import Tolerance
from tiny_generator import tiny


def tiny_vae(seed: int = 0, **options: Any) -> MDEQVAE:
    """A VAE of 12 x 12 grey images with three latent numbers unless told otherwise; its decoder is ``tiny()``."""
    settings = {"shape": (1, 12, 12), "latent": 3, "channels": (8, 8), "downsamplings": 0, "expansion": 1.0}
    sizes = {"size": "small-2", "head_channels": (4, 4), "final_channels": 8}
    torch.manual_seed(seed)
    model = MDEQVAE(**{**settings, **sizes, **options}).double()
    for module in model.encoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, Block):  # the input of the first scale dominates all states
            nn.init.constant_(module.norm2.weight, 4.0)
    nn.init.constant_(model.get_parameter("encoder.stem.4.weight"), 10.0)
    nn.init.constant_(model.get_parameter("encoder.equilibrium.f.blocks.1.0.norm3.weight"), 0.3)
    model.encoder.equilibrium.solver = Anderson()
    shared = {**settings, **{name: value for name, value in options.items() if name not in (*sizes, "dropout")}}
    model.decoder.load_state_dict(tiny(seed, **shared).state_dict())
    for layer in (model.encoder.equilibrium, model.decoder.equilibrium):
        layer.tolerance = Tolerance(relative=1e-10, max_steps=300)
    return model

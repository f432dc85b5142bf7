"""Latent vectors that the page draws from a generator, and their images."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from equipoise.lab.results.sample import kept_density
from equipoise.models.generator.model import Generator
from equipoise.models.generator.vae import MDEQVAE
from equipoise.page.available import Available
from equipoise.page.pictures import in_bytes
from equipoise.tasks.latent_vectors import generator_in

LARGEST_SEED = 2**31 - 1
PROBES = 256  # samples from which standard deviations of latent vectors are estimated


def takes(model: Available) -> bool:
    """Return whether the model generates images of a kind that the page can show."""
    return isinstance(model.original, Generator | MDEQVAE) and model.shape[0] in (1, 3)


def generator(model: Available) -> Generator:
    """Return the generator of this thread."""
    return cast(Generator, generator_in(model.model))


def length(model: Available) -> int:
    """Return the number of entries of a latent vector."""
    return generator_in(model.original).latent


def density(model: Available) -> Any:
    """Return the density that latent vectors are drawn from, an object with ``sample``; None for N(0, I)."""

    def opened() -> Any:
        return kept_density(model.run, model.trained, generator(model), "best")

    return None if isinstance(model.original, MDEQVAE) else model.once("density", opened)


def can_draw(model: Available) -> bool:
    """Return whether latent vectors can be drawn: from the prior of a VAE, or from a density that was fitted."""
    return isinstance(model.original, MDEQVAE) or density(model) is not None


def drawn(model: Available, count: int, seed: int) -> Tensor:
    """Draw latent vectors."""
    draws, found, setting = torch.Generator().manual_seed(seed), density(model), model.trained.setting
    x = torch.randn(count, length(model), generator=draws) if found is None else found.sample(count, draws)
    return x.to(setting.device, setting.dtype)


def deviations(model: Available) -> Tensor:
    """Return the standard deviation of every entry of a latent vector."""
    return model.once("deviations", lambda: drawn(model, PROBES, 0).std(dim=0))


@torch.no_grad()
def generated(model: Available, count: int, seed: int) -> Tensor:
    """Return random images, uint8 (count, channels, height, width)."""
    return in_bytes(generator(model)(drawn(model, count, seed)), -1.0, 1.0)

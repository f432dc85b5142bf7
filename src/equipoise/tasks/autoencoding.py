"""Autoencoding: an encoder and a decoder learn to reconstruct images, with small latent vectors if asked for.

P. Ghosh, M. S. M. Sajjadi, A. Vergari, M. Black, B. Schölkopf, "From variational to deterministic autoencoders" (2020),
section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.models.generator.autoencoder import Autoencoder, VariationalAutoencoder
from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.image_quality import psnr, psnr_of_error, ssim
from equipoise.tasks.latent_vectors import squared_error
from equipoise.tasks.reconstruction import SHOWN, Reconstruction, reconstructions, totals
from equipoise.tasks.wrapped import inside, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def autoencoder_in(model: nn.Module) -> Autoencoder:
    """Return the deterministic autoencoder inside a wrapper; raise ValueError for another model."""
    model = unwrapped(model)
    if not isinstance(model, Autoencoder) or isinstance(model, VariationalAutoencoder):
        raise ValueError(
            f"the model has type {type(model).__name__}; the task 'autoencoding' needs a deterministic autoencoder: "
            "'conv-ae', 'conv-rae' or 'mdeq-ae'. The task 'vae' is for variational ones."
        )
    return model


class Autoencoding(Reconstruction):
    """Reconstruct images from the latent vectors that an encoder gives.

    The loss of an image y of n numbers in [-1, 1] with the latent vector x is (||y - h(x)||^2 + beta / 2 ||x||^2) / n.
    The penalty is that of regularised autoencoders (eq. 8), in the units of the task "vae", where beta / 2 ||x||^2 is a
    part of the divergence.

    Args:
        beta: weight of the penalty; 0 for a plain autoencoder.

    Example:
        >>> loss, sums = Autoencoding().loss(eq.create_model("conv-ae", shape=(3, 32, 32)), (images,))
    """

    best_metric = "loss"
    reported = ("psnr", "ssim", "square of x", "loss")
    best_is_largest = False

    def __init__(self, beta: float = 0.0):
        self.beta = beta
        require(self, "beta", at_least=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        truth = batch[0]

        def forward(autoencoder: Autoencoder) -> Tensor:
            """Return the error of each image and the square of its latent vector, in one tensor."""
            x = autoencoder.codes(truth)
            return torch.stack([squared_error(autoencoder.decoder(x), x, truth), x.square().sum(dim=1)])

        errors, squares = inside(model, autoencoder_in(model), forward)
        losses = self.losses(errors, squares, truth)
        quality = {"psnr": psnr_of_error(errors.detach())}
        return losses.mean(), totals({**quality, "square of x": squares.detach(), "loss": losses.detach()})

    def losses(self, errors: Tensor, squares: Tensor, truth: Tensor) -> Tensor:
        return errors + self.beta / 2 * squares / truth[0].numel()

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        autoencoder, truth = autoencoder_in(model), batch[0]
        x = autoencoder.codes(truth)
        images, squares = autoencoder.decoder(x), x.square().sum(dim=1)
        quality = {"psnr": psnr(images, truth), "ssim": ssim(images, truth)}
        losses = self.losses(squared_error(images, x, truth), squares, truth)
        return totals({**quality, "square of x": squares, "loss": losses})

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        truth = next(batches())[0][:SHOWN]
        with torch.no_grad():
            images = autoencoder_in(model)(truth)
        yield reconstructions(truth, images, psnr(images, truth))

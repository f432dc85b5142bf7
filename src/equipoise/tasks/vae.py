"""Variational auto-encoding: an encoder and a decoder learn images together, by the evidence lower bound.

D. P. Kingma, M. Welling, "Auto-encoding variational Bayes" (2013), eq. 3. S. Gurumurthy, S. Bai, Z. Manchester,
J. Z. Kolter, "Joint inference and input optimization in equilibrium networks" (2021), section 4.1, optimises the input
of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.models.generator.autoencoder import VariationalAutoencoder
from equipoise.models.parts.gaussians import divergence, draw
from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.drawing import image_grid, shown
from equipoise.tasks.image_quality import psnr, psnr_of_error, ssim
from equipoise.tasks.latent_vectors import squared_error
from equipoise.tasks.reconstruction import SHOWN, Reconstruction, reconstructions, totals
from equipoise.tasks.wrapped import inside, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 24  # samples in a figure
SEED = 0  # of the samples in a figure


def vae_in(model: nn.Module) -> VariationalAutoencoder:
    """Return the VAE inside a wrapper; raise ValueError for another model."""
    model = unwrapped(model)
    if not isinstance(model, VariationalAutoencoder):
        raise ValueError(
            f"the model has type {type(model).__name__}; the task 'vae' needs one with encoder and decoder: 'mdeq-vae' "
            "or 'conv-vae'."
        )
    return model


class VAE(Reconstruction):
    """Maximise the evidence lower bound of images: reconstruct them from latent vectors close to N(0, I).

    The loss of an image y of n numbers in [-1, 1] is (||y - h(z*)||^2 + beta KL) / n, with z* the equilibrium of the
    decoder at a random latent vector of the encoder's Gaussian, and KL the divergence of that Gaussian from N(0, I), in
    nats. Apart from constants and the factor beta / n, this is the negative bound for pixels with Gaussian noise of
    variance beta / 2. The error is thus a mean over the pixels, as in the task "generation", and beta has the same
    meaning for any image size.

    Evaluation reconstructs images from the mean of the latent vectors. Metrics are ``psnr`` and ``ssim`` of these
    images, ``kl`` and ``loss``.

    Args:
        beta: weight of the divergence; 0 for an auto-encoder with noise.

    Example:
        >>> loss, sums = VAE(beta=0.5).loss(eq.create_model("mdeq-vae", shape=(3, 32, 32)), (images,))
    """

    best_metric = "loss"
    reported = ("psnr", "ssim", "kl", "loss")
    best_is_largest = False

    def __init__(self, beta: float = 1.0):
        self.beta = beta
        require(self, "beta", at_least=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        truth = batch[0]

        def forward(vae: VariationalAutoencoder) -> Tensor:
            """Return error and divergence of each image, in one tensor."""
            mean, log_variance = vae.encode(truth)
            x = draw(mean, log_variance)
            return torch.stack([squared_error(vae.decoder(x), x, truth), divergence(mean, log_variance)])

        errors, divergences = inside(model, vae_in(model), forward)
        losses = errors + self.beta * divergences / truth[0].numel()
        quality = {"psnr": psnr_of_error(errors.detach())}
        return losses.mean(), totals({**quality, "kl": divergences.detach(), "loss": losses.detach()})

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        vae, truth = vae_in(model), batch[0]
        mean, log_variance = vae.encode(truth)
        images, divergences = vae.decoder(mean), divergence(mean, log_variance)
        losses = squared_error(images, mean, truth) + self.beta * divergences / truth[0].numel()
        quality = {"psnr": psnr(images, truth), "ssim": ssim(images, truth)}
        return totals({**quality, "kl": divergences, "loss": losses})

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        vae, truth = vae_in(model), next(batches())[0][:SHOWN]
        with torch.no_grad():
            images = vae(truth)
            yield reconstructions(truth, images, psnr(images, truth))
            x = torch.randn(DRAWN, vae.latent, generator=torch.Generator().manual_seed(SEED)).to(truth)
            yield "Samples from the prior", image_grid([(image, "") for image in shown(vae.decoder(x))])

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
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import image_grid, rows_of_images, shown
from equipoise.tasks.image_quality import psnr, psnr_of_error, ssim
from equipoise.tasks.latent_vectors import squared_error
from equipoise.tasks.wrapped import inside, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 8  # test images in a figure
DRAWN = 24  # samples in a figure
SEED = 0  # of the samples in a figure


def vae_in(model: nn.Module) -> VariationalAutoencoder:
    """Return the VAE inside a wrapper; raise ValueError for another model."""
    model = unwrapped(model)
    if not isinstance(model, VariationalAutoencoder):
        raise ValueError(
            f"the model is a {type(model).__name__}; the task 'vae' needs one with encoder and decoder: 'mdeq-vae' "
            "or 'conv-vae'."
        )
    return model


class VAE(Task):
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
    best_is_largest = False

    def __init__(self, beta: float = 1.0):
        self.beta = beta
        require(self, "beta", at_least=0)

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        images, *rest = super().prepare(batch, dtype)
        return 2 * images - 1, *rest

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
        return losses.mean(), self.sums(losses.detach(), divergences.detach(), quality)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        vae, truth = vae_in(model), batch[0]
        mean, log_variance = vae.encode(truth)
        images, divergences = vae.decoder(mean), divergence(mean, log_variance)
        losses = squared_error(images, mean, truth) + self.beta * divergences / truth[0].numel()
        quality = {"psnr": psnr(images, truth), "ssim": ssim(images, truth)}
        return self.sums(losses, divergences, quality)

    def sums(self, losses: Tensor, divergences: Tensor, quality: dict[str, Tensor]) -> Sums:
        values = {**quality, "kl": divergences, "loss": losses}
        return {"samples": torch.tensor(len(losses)), **{name: part.double().sum() for name, part in values.items()}}

    def metrics(self, sums: Sums) -> dict[str, float]:
        names = [name for name in ("psnr", "ssim", "kl", "loss") if name in sums]
        return {name: sums[name].item() / sums["samples"].item() for name in names}

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        vae, truth = vae_in(model), next(batches())[0][:SHOWN]
        with torch.no_grad():
            images = vae(truth)
            captions = [f"{ratio:.1f} dB" for ratio in psnr(images, truth).tolist()]
            rows = [("given", truth), ("reconstructed", images)]
            yield "Reconstructions of test images", rows_of_images(rows, captions)
            x = torch.randn(DRAWN, vae.latent, generator=torch.Generator().manual_seed(SEED)).to(truth)
            yield "Samples from the prior", image_grid([(image, "") for image in shown(vae.decoder(x))])

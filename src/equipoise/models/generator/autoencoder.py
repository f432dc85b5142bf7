"""Autoencoders: an encoder maps images to latent vectors, or to Gaussians of them, and a decoder maps them back."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from equipoise.models.generator.decoder import Decoder
from equipoise.models.parts.images import require_numbers, require_shape


class Autoencoder(nn.Module, ABC):
    """Map images in [-1, 1] to their reconstructions, the images of their latent vectors.

    ``decoder`` is a :class:`~equipoise.models.generator.decoder.Decoder`, which tasks and commands for generators use.
    """

    decoder: Decoder

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return self.decoder.shape

    @property
    def latent(self) -> int:
        """Dimension of the latent vectors."""
        return self.decoder.latent

    def require_images(self, images: Tensor) -> None:
        """Raise unless the model takes these images."""
        remedy = "in [-1, 1]: images.float() / 127.5 - 1"
        require_numbers(images, next(self.parameters()).dtype, "images", remedy)
        require_shape(images, self.shape, "its decoder makes images of one size")

    @abstractmethod
    def encoded(self, images: Tensor) -> Tensor:
        """Return what the encoder maps images in [-1, 1] to."""

    def codes(self, images: Tensor) -> Tensor:
        """Return the latent vectors of images, (batch, latent)."""
        self.require_images(images)
        return self.encoded(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.codes(images))


class VariationalAutoencoder(Autoencoder, ABC):
    """Map images in [-1, 1] to their reconstructions, the images of the means of their latent vectors.

    D. P. Kingma, M. Welling, "Auto-encoding variational Bayes" (2013).
    """

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the latent vectors of images, each (batch, latent)."""
        self.require_images(images)
        mean, log_variance = self.encoded(images).chunk(2, dim=1)
        return mean, log_variance

    def codes(self, images: Tensor) -> Tensor:
        """Return the means of the latent vectors of images, (batch, latent)."""
        return self.encode(images)[0]

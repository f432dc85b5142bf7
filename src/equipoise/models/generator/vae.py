"""An MDEQ-VAE: a multiscale equilibrium maps an image to a Gaussian of latent vectors, another one maps them to images.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.1 (table 1) and appendix C; D. P. Kingma, M. Welling, "Auto-encoding variational Bayes" (2013).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.generator.autoencoder import VariationalAutoencoder
from equipoise.models.generator.model import NUMBERS as SHARED
from equipoise.models.generator.model import Generator
from equipoise.models.mdeq.cell import MDEQSize
from equipoise.models.mdeq.model import MDEQ
from equipoise.models.parts.keyword_options import accepts, numbers_of, options_of, sized

NUMBERS = (*SHARED, "head_channels", "final_channels", "dropout")  # the last three are those of the encoder
SIZES = {  # of the encoder; the decoder is the generator of the same name
    "published": MDEQSize((32, 64, 128, 256), (14, 28, 56, 112), 1680, dropout=0.3),
    "small": MDEQSize((16, 32, 64), (8, 16, 32), 256, downsamplings=1),
    "small-2": MDEQSize((16, 32), (8, 16), 256, downsamplings=1),
}
GAIN, LOG_VARIANCE = 4.0, -2.0  # of an untrained encoder, see initialise_codes


class MDEQVAE(VariationalAutoencoder):
    """Map images in [-1, 1] to their reconstructions, the images of the means of their latent vectors.

    The encoder is an :class:`~equipoise.models.mdeq.model.MDEQ` whose classification head gives mean and log variance.
    Its stem and head have BatchNorm, where the paper has GroupNorm to keep the samples of a joint optimisation
    independent; the encoder does not take part in one. ``decoder`` is a
    :class:`~equipoise.models.generator.model.Generator`, for which latent vectors can also be found by joint
    optimisation ("MDEQ-VAE w/ JIIO"): tasks and commands that need a generator use it.

    Args:
        shape: shape of one image, (channels, height, width).
        size: key of ``SIZES``.
        latent, width, activation, weight_norm: see :class:`~equipoise.models.generator.model.Generator`.
        numbers: fields of :class:`~equipoise.models.mdeq.cell.MDEQSize` that replace those of the size: ``channels``,
            ``groups``, ``expansion``, ``blocks`` and ``downsamplings`` of encoder and decoder, ``head_channels``,
            ``final_channels`` and ``dropout`` of the encoder.

    Example:
        >>> model = MDEQVAE(shape=(3, 32, 32), size="small")
        >>> mean, log_variance = model.encode(images)
        >>> model.decoder(mean).shape
        torch.Size([2, 3, 32, 32])
    """

    @accepts(
        *options_of(Generator, "latent", "width", "activation", "weight_norm"),
        *numbers_of(MDEQSize, without=[name for name in MDEQSize.__dataclass_fields__ if name not in NUMBERS]),
    )
    def __init__(self, shape: tuple[int, int, int], size: str = "small", **options: Any):
        super().__init__()
        numbers = {name: options.pop(name) for name in NUMBERS if name in options}
        self.size = sized(SIZES, size, "MDEQVAE", numbers)
        self.decoder = Generator(shape, size=size, **options, **{name: getattr(self.size, name) for name in SHARED})
        cell = {name: options[name] for name in ("activation", "weight_norm") if name in options}
        self.encoder = MDEQ(shape, classes=2 * self.latent, **cell, **dataclasses.asdict(self.size))
        initialise_codes(self.encoder.head.get_submodule("classify"), self.latent)  # type: ignore[arg-type]

    def encoded(self, images: Tensor) -> Tensor:
        return self.encoder((images + 1) / 2)


def initialise_codes(layer: nn.Linear, latent: int) -> None:
    """Let the latent vectors depend on the image from the start: their means vary more than their noise.

    Averages over the image hardly differ between images, so that small random weights would drown them in the noise of
    variance 1, and the decoder would learn to ignore them. Rows of zero sum cancel what all averages have in common.
    """
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        nn.init.normal_(layer.weight[:latent], std=GAIN / layer.in_features**0.5)
        layer.weight[:latent] -= layer.weight[:latent].mean(dim=1, keepdim=True)
        layer.bias[latent:] = LOG_VARIANCE

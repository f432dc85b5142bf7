"""An MDEQ-AE: a multiscale equilibrium maps an image to a latent vector, another one maps it to an image.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), table 4 and appendix C.2.
"""

import dataclasses
from typing import Any

from torch import Tensor

from equipoise.models.generator.autoencoder import Autoencoder
from equipoise.models.generator.model import NUMBERS as SHARED
from equipoise.models.generator.model import Generator
from equipoise.models.generator.vae import NUMBERS, SIZES, initialise_codes
from equipoise.models.mdeq.cell import MDEQSize
from equipoise.models.mdeq.model import MDEQ
from equipoise.models.parts.keyword_options import accepts, numbers_of, options_of, sized


class MDEQAE(Autoencoder):
    """Map images in [-1, 1] to their reconstructions, the images of their latent vectors.

    Encoder and decoder are those of :class:`~equipoise.models.generator.vae.MDEQVAE`, but for the log variance.

    Args:
        shape, size, numbers: see :class:`~equipoise.models.generator.vae.MDEQVAE`.
        latent, width, activation, weight_norm: see :class:`~equipoise.models.generator.model.Generator`.

    Example:
        >>> model = MDEQAE(shape=(3, 32, 32), size="small")
        >>> model.decoder(model.codes(images)).shape
        torch.Size([2, 3, 32, 32])
    """

    @accepts(
        *options_of(Generator, "latent", "width", "activation", "weight_norm"),
        *numbers_of(MDEQSize, without=[name for name in MDEQSize.__dataclass_fields__ if name not in NUMBERS]),
    )
    def __init__(self, shape: tuple[int, int, int], size: str = "small", **options: Any):
        super().__init__()
        numbers = {name: options.pop(name) for name in NUMBERS if name in options}
        self.size = sized(SIZES, size, "MDEQAE", numbers)
        self.decoder = Generator(shape, size=size, **options, **{name: getattr(self.size, name) for name in SHARED})
        cell = {name: options[name] for name in ("activation", "weight_norm") if name in options}
        self.encoder = MDEQ(shape, classes=self.latent, **cell, **dataclasses.asdict(self.size))
        initialise_codes(self.encoder.head.get_submodule("classify"), self.latent)  # type: ignore[arg-type]

    def encoded(self, images: Tensor) -> Tensor:
        return self.encoder((images + 1) / 2)

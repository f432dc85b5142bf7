"""Convolutional autoencoders: plain (AE), variational (VAE), and regularised (RAE).

P. Ghosh, M. S. M. Sajjadi, A. Vergari, M. Black, B. Schölkopf, "From variational to deterministic autoencoders" (2020),
whose networks and code S. Gurumurthy et al., "Joint inference and input optimization in equilibrium networks" (2021),
appendix C.2, borrow for their baselines. Departures from their code: images are in [-1, 1] instead of [0, 1], hence the
hyperbolic tangent instead of the sigmoid, and the log variance of the VAE has no bound.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from equipoise.models.generator.autoencoder import Autoencoder, VariationalAutoencoder
from equipoise.models.generator.decoder import Decoder, State
from equipoise.models.parts.images import require_image_shape
from equipoise.models.parts.keyword_options import accepts, numbers_of, require_counts, sized
from equipoise.options import option, options, require


@options
class ConvSize:
    """Hyperparameters of a convolutional autoencoder.

    Args:
        channels: channels of the encoder's convolutions of stride 2; the decoder has them in reverse order.
        kernel: side of all kernels.
        upsamplings: number of the decoder's transposed convolutions of stride 2. They start from images whose height
            and width are the fraction 1 / 2^upsamplings of those made, with the last of ``channels``.
        latent: dimension of the latent vectors.
    """

    channels: tuple[int, ...] = (128, 256, 512, 1024)
    kernel: int = option(default=4, at_least=3, whole=True)
    upsamplings: int = 2
    latent: int = option(default=128, at_least=1, whole=True)

    def __post_init__(self) -> None:
        require_counts(self, "channels", "convolution")
        require(self, "upsamplings", at_least=1, whole=True)
        if self.upsamplings >= len(self.channels):
            raise ValueError(
                f"upsamplings is {self.upsamplings}; it must be below {len(self.channels)}, the number of channels, "
                "which the decoder has in reverse order."
            )


SIZES = {
    "celeba": ConvSize(kernel=5, upsamplings=3, latent=64),
    "cifar10": ConvSize(),
    "mnist": ConvSize(latent=16),
    "small": ConvSize((32, 64, 128)),
}
NUMBERS = numbers_of(ConvSize)


class ConvEncoder(nn.Sequential):
    """Map images to ``outputs`` numbers: convolutions of stride 2, each with BatchNorm and ReLU, and a linear layer."""

    def __init__(self, shape: tuple[int, ...], size: ConvSize, outputs: int):
        layers: list[nn.Module] = []
        channels, (height, width), padding = shape[0], shape[1:], (size.kernel - 1) // 2
        for after in size.channels:
            layers += [nn.Conv2d(channels, after, size.kernel, stride=2, padding=padding)]
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            channels = after
            height, width = ((side + 2 * padding - size.kernel) // 2 + 1 for side in (height, width))
        if not (height > 0 and width > 0):
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} cannot be halved {len(size.channels)} times: choose another "
                "data.size, or fewer channels."
            )
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels * height * width, outputs))


class ConvDecoder(Decoder):
    """A linear layer, transposed convolutions of stride 2 with BatchNorm and ReLU, a convolution, and tanh.

    f(z, x) does not depend on z: it is the image before tanh, so that one evaluation solves for z.
    """

    def __init__(self, shape: tuple[int, ...], size: ConvSize):
        super().__init__()
        self.shape, self.latent = tuple(shape), size.latent
        factor = 2**size.upsamplings
        if shape[1] % factor or shape[2] % factor:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} cannot be halved {size.upsamplings} times: height and width must "
                f"be multiples of {factor}. Choose another data.size, or fewer upsamplings."
            )
        first, *rest = size.channels[::-1][: size.upsamplings + 1]
        start = (first, shape[1] // factor, shape[2] // factor)
        layers: list[nn.Module] = [nn.Linear(size.latent, math.prod(start)), nn.Unflatten(1, start)]
        padding, odd = (size.kernel - 1) // 2, size.kernel % 2
        for before, after in zip((first, *rest), rest, strict=False):
            layers += [
                nn.ConvTranspose2d(before, after, size.kernel, stride=2, padding=padding, output_padding=odd),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        after = size.kernel // 2
        around = nn.ZeroPad2d((padding, after, padding, after))  # keeps the size, also with an even kernel
        self.layers = nn.Sequential(*layers, around, nn.Conv2d(rest[-1], shape[0], size.kernel))

    def image(self, z: State) -> Tensor:
        """Return the image of z."""
        return z[0].tanh()

    @property
    def f(self) -> Any:
        return lambda z, x: (self.layers(x),)

    def start(self, x: Tensor) -> State:
        return (x.new_zeros(len(x), *self.shape),)

    def solved(self, x: Tensor, z0: State | None) -> State:
        return self.f(z0, x)


class ConvAE(Autoencoder):
    """A convolutional encoder and decoder, trained to reconstruct images.

    Args:
        shape: shape of one image, (channels, height, width).
        size: key of ``SIZES``.
        numbers: fields of :class:`ConvSize` that replace those of the size.

    Example:
        >>> ConvAE(shape=(3, 64, 64), size="celeba").codes(images).shape
        torch.Size([2, 64])
    """

    @accepts(*NUMBERS)
    def __init__(self, shape: tuple[int, int, int], size: str = "small", **numbers: Any):
        super().__init__()
        self.size = checked_size("ConvAE", shape, size, numbers)
        self.encoder, self.decoder = ConvEncoder(shape, self.size, self.size.latent), ConvDecoder(shape, self.size)

    def encoded(self, images: Tensor) -> Tensor:
        return self.encoder(images)


class ConvRAE(Autoencoder):
    """A :class:`ConvAE` with spectral normalisation of all convolutions and linear layers (RAE-SN).

    The other part of the regularisation, a penalty on the squares of the latent vectors, is the ``beta`` of the task
    "autoencoding".

    Args:
        shape, size, numbers: see :class:`ConvAE`.
    """

    @accepts(*NUMBERS)
    def __init__(self, shape: tuple[int, int, int], size: str = "small", **numbers: Any):
        super().__init__()
        self.size = checked_size("ConvRAE", shape, size, numbers)
        self.encoder, self.decoder = ConvEncoder(shape, self.size, self.size.latent), ConvDecoder(shape, self.size)
        for module in list(self.modules()):
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                spectral_norm(module)

    def encoded(self, images: Tensor) -> Tensor:
        return self.encoder(images)


class ConvVAE(VariationalAutoencoder):
    """A :class:`ConvAE` whose encoder gives mean and log variance of the latent vectors.

    Args:
        shape, size, numbers: see :class:`ConvAE`.

    Example:
        >>> mean, log_variance = ConvVAE(shape=(3, 64, 64), size="celeba").encode(images)
    """

    @accepts(*NUMBERS)
    def __init__(self, shape: tuple[int, int, int], size: str = "small", **numbers: Any):
        super().__init__()
        self.size = checked_size("ConvVAE", shape, size, numbers)
        self.encoder, self.decoder = ConvEncoder(shape, self.size, 2 * self.size.latent), ConvDecoder(shape, self.size)

    def encoded(self, images: Tensor) -> Tensor:
        return self.encoder(images)


def checked_size(model: str, shape: tuple[int, int, int], size: str, numbers: dict[str, Any]) -> ConvSize:
    """Return the size of a model, after checking the shape of its images."""
    require_image_shape(shape)
    return sized(SIZES, size, model, numbers)

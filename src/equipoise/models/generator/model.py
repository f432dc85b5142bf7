"""A decoder-only generator: a latent vector is injected into a multiscale equilibrium, whose scales make an image.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.1 and appendix C. There is no encoder: the latent vector of an image is found by joint optimisation.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.models.generator.decoder import Decoder
from equipoise.models.mdeq.cell import MDEQSize, MultiscaleCell
from equipoise.models.mdeq.heads import ImageHead
from equipoise.models.mdeq.model import initialise
from equipoise.models.parts.images import is_channels_last, require_image_shape
from equipoise.models.parts.keyword_options import accepts, numbers_of, sized
from equipoise.options import require
from equipoise.solvers import Anderson
from equipoise.tolerance import Tolerance

NUMBERS = ("channels", "groups", "expansion", "blocks", "downsamplings")  # fields of MDEQSize that a generator has
SIZES = {
    "published": MDEQSize((32, 64, 128, 256)),  # table 9: CelebA at 64 x 64
    "small": MDEQSize((16, 32, 64), downsamplings=1),
    "small-2": MDEQSize((16, 32), downsamplings=1),  # for images whose sides can be halved only twice, such as 28 x 28
}
TOLERANCE = Tolerance(relative=1e-3, max_steps=40)


class LatentCell(nn.Module):
    """f(z, x): an MDEQ cell with one linear map of the latent vector x as the input of each scale."""

    def __init__(self, size: MDEQSize, latent: int, height: int, width: int, activation: str, weight_norm: bool):
        super().__init__()
        self.cell = MultiscaleCell(size, activation, weight_norm)
        self.shapes = [(c, height >> i, width >> i) for i, c in enumerate(size.channels)]
        self.inject = nn.ModuleList(nn.Linear(latent, math.prod(shape)) for shape in self.shapes)

    def forward(self, z: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        inputs = (linear(x).view(-1, *shape) for linear, shape in zip(self.inject, self.shapes, strict=True))
        return self.cell(z, tuple(inputs))

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the initial z: zeros, in the memory format of the weights."""
        kernels = max((p for p in self.cell.parameters() if p.dim() == 4), key=Tensor.numel)
        order = torch.channels_last if is_channels_last(kernels) else torch.contiguous_format
        return tuple(x.new_zeros(x.shape[0], *shape).contiguous(memory_format=order) for shape in self.shapes)


class Generator(Decoder):
    """Map latent vectors (batch, latent) to images in [-1, 1]; ``z0`` is a state to start the solve from.

    ``f``, ``start`` and ``image`` are the parts that :func:`equipoise.optimize_input` needs to find the latent vector
    of an image; :func:`equipoise.tasks.latent_vectors.fit` calls it.

    Args:
        shape: shape of one image, (channels, height, width).
        latent: dimension of the latent vector.
        size: key of ``SIZES``.
        width: channels of the image head's last layers; None for 32, or 16 if the head upsamples.
        activation, weight_norm: see :class:`~equipoise.models.mdeq.cell.MultiscaleCell`.
        numbers: fields ``channels``, ``groups``, ``expansion``, ``blocks``, ``downsamplings`` of
            :class:`~equipoise.models.mdeq.cell.MDEQSize` that replace those of the size. With ``downsamplings``, the
            first scale has half the height and width of the image (a quarter, ...), and the head upsamples.

    Example:
        >>> model = Generator(shape=(3, 32, 32), size="small")
        >>> model(torch.randn(2, 128)).shape
        torch.Size([2, 3, 32, 32])
    """

    @accepts(*numbers_of(MDEQSize, without=[n for n in MDEQSize.__dataclass_fields__ if n not in NUMBERS]))
    def __init__(
        self,
        shape: tuple[int, int, int],
        latent: int = 128,
        size: str = "small",
        width: int | None = None,
        activation: str = "relu",
        weight_norm: bool = True,
        **numbers: Any,
    ):
        super().__init__()
        require_image_shape(shape)
        self.size = sized(SIZES, size, "Generator", numbers)
        halvings = self.size.downsamplings
        self.shape, self.latent = tuple(shape), latent
        self.width = (16 if halvings else 32) if width is None else width
        require(self, "latent", at_least=1, whole=True)
        require(self, "width", at_least=1, whole=True)
        if shape[1] % self.size.divisor or shape[2] % self.size.divisor:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} cannot be halved {halvings + self.size.scales - 1} times: height "
                f"and width must be multiples of {self.size.divisor}. Choose another data.size, fewer scales (entries "
                "of channels) or fewer downsamplings."
            )
        cell = LatentCell(self.size, latent, shape[1] >> halvings, shape[2] >> halvings, activation, weight_norm)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Anderson(), tolerance=TOLERANCE)
        self.image = ImageHead(self.size.channels, shape[0], self.size.groups, self.width, halvings)
        initialise(self)

    @property
    def f(self) -> LatentCell:
        """f(z, x), whose equilibrium the image is made from."""
        return self.equilibrium.f  # type: ignore[return-value]

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the initial z for latent vectors: zeros."""
        return self.f.start(x)

    def solved(self, x: Tensor, z0: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return the equilibrium of latent vectors; ``z0`` is a state to start from."""
        return self.equilibrium(x, z0=z0)

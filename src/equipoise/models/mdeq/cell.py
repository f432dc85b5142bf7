"""The f of an MDEQ: residual blocks at several resolutions that exchange features.

S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020). The wiring is that of the authors' code,
which section 4.1 and appendix A of the paper describe.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.models.parts.images import is_channels_last
from equipoise.models.parts.keyword_options import require_counts
from equipoise.options import options, require
from equipoise.problem.problem import autocast_state
from equipoise.stability import VariationalDropout, WeightNorm

ACTIVATIONS = ("relu", "softplus")
Film = tuple[Tensor, Tensor]  # scale and shift of the widened channels, each (batch, expansion * channels, 1, 1)


@options
class MDEQSize:
    """Hyperparameters of an MDEQ.

    Args:
        channels: channels of each scale, the highest resolution first; each scale halves height and width.
        head_channels: channels of the classification head's bottlenecks, one for each scale.
        final_channels: number of channels that the classification head averages over the image.
        groups: number of groups of GroupNorm.
        expansion: factor by which a residual block widens its channels.
        dropout: probability that a block drops a channel, with one mask for the whole solve.
        downsamplings: number of convolutions of stride 2 before the first scale.
        post_affine: whether the last GroupNorm of f learns a scale and a shift.
        big_kernels: for each scale, how many of a block's two convolutions are 5x5; the others are 3x3.
        blocks: number of residual blocks per scale; the first one receives the input.
    """

    channels: tuple[int, ...]
    head_channels: tuple[int, ...] = ()
    final_channels: int = 0
    groups: int = 8
    expansion: float = 5.0
    dropout: float = 0.0
    downsamplings: int = 0
    post_affine: bool = False
    big_kernels: tuple[int, ...] = ()
    blocks: int = 1

    def __post_init__(self) -> None:
        require_counts(self, "channels", "scale")
        for name, least in (("head_channels", 1), ("big_kernels", 0)):
            require_counts(self, name, "scale", at_least=least, optional=True)
            if (given := len(getattr(self, name))) not in (0, self.scales):
                raise ValueError(f"{name} has {given} entries, but channels has {self.scales}: give one per scale.")
        if self.big_kernels and max(self.big_kernels) > 2:
            raise ValueError(f"big_kernels is {self.big_kernels}; a block has two convolutions: use 0, 1 or 2.")
        for name, least in (("groups", 1), ("downsamplings", 0), ("blocks", 1), ("final_channels", 0)):
            require(self, name, at_least=least, whole=True)
        require(self, "expansion", above=0)
        require(self, "dropout", at_least=0, below=1)
        require(self, "post_affine", kind=bool)
        for channels in self.channels:
            inner = int(self.expansion * channels)
            for groups, width in ((self.groups, channels), (self.groups, inner), (self.last_groups, channels)):
                if width < 1 or width % groups:
                    raise ValueError(
                        f"groups is {self.groups}, but {groups} does not divide {width} channels (channels "
                        f"{self.channels}, expansion {self.expansion:g}): groups must divide channels and expansion * "
                        "channels, and groups // 2 (for the last norm of f) must divide channels."
                    )

    @property
    def scales(self) -> int:
        return len(self.channels)

    @property
    def last_groups(self) -> int:
        """Number of groups of the last GroupNorm of f."""
        return max(1, self.groups // 2)

    @property
    def divisor(self) -> int:
        """Number by which the height and width of an image must be divisible."""
        return 2 ** (self.downsamplings + self.scales - 1)

    def require_fit(self, image: Sequence[int], remedy: str) -> None:
        """Raise ValueError for a height and width that cannot be halved often enough."""
        if any(n % self.divisor for n in image):
            raise ValueError(
                f"images of {image[0]} x {image[1]} do not fit this model, which halves them "
                f"{self.downsamplings + self.scales - 1} times: height and width must be multiples of {self.divisor}. "
                f"{remedy}"
            )


class Block(nn.Module):
    """The residual block of one scale: widen, narrow, add the input, normalise."""

    def __init__(self, size: MDEQSize, scale: int, activation: str, weight_norm: bool):
        super().__init__()
        channels, big = size.channels[scale], size.big_kernels[scale] if size.big_kernels else 0
        inner = int(size.expansion * channels)
        self.conv1 = block_conv(channels, inner, 5 if big >= 1 else 3, weight_norm)
        self.norm1 = nn.GroupNorm(size.groups, inner)
        self.conv2 = block_conv(inner, channels, 5 if big >= 2 else 3, weight_norm)
        self.drop = VariationalDropout(size.dropout)
        self.norm2 = nn.GroupNorm(size.groups, channels)
        self.norm3 = nn.GroupNorm(size.groups, channels)
        self.activation = activation

    def forward(self, z: Tensor, x: Tensor | None = None, film: Film | None = None) -> Tensor:
        wide = self.norm1(self.conv1(z))
        if film is not None:
            wide = torch.addcmul(film[1], film[0], wide)
        change = self.drop(self.conv2(activate(wide, self.activation)))
        if x is not None:
            change = change + x
        return self.norm3(activate(self.norm2(change) + z, self.activation))


def block_conv(inputs: int, outputs: int, kernel: int, weight_norm: bool) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return WeightNorm(conv) if weight_norm else conv


def activate(fresh: Tensor, activation: str) -> Tensor:
    """Apply the activation, in place if possible: the tensor must not be used elsewhere."""
    return F.relu(fresh, inplace=True) if activation == "relu" else F.softplus(fresh)


class Transition(nn.Module):
    """Map features of scale ``source`` to the resolution and channels of scale ``target``.

    It downsamples by convolutions of stride 2, and upsamples by a 1x1 convolution and nearest-neighbour interpolation.
    """

    def __init__(self, size: MDEQSize, source: int, target: int, activation: str):
        super().__init__()
        self.activation, self.factor = activation, 2 ** max(0, source - target)
        kernel, stride = (1, 1) if source > target else (3, 2)
        widths = [size.channels[source]] * max(1, target - source) + [size.channels[target]]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, stride=stride, padding=kernel // 2, bias=False)
            for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(size.groups, width) for width in widths[1:])

    def forward(self, y: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if i == 0 else activate(y, self.activation)))
        return y if self.factor == 1 else F.interpolate(y, scale_factor=self.factor, mode="nearest")


class MultiscaleCell(nn.Module):
    """f(z, x): residual blocks on every scale, fusion of all scales, a 1x1 convolution and a norm.

    z is a tuple of tensors (batch, channels_i, height / 2^i, width / 2^i); x is a tuple of inputs to the first scales,
    in MDEQ to the first one only. The output is group-normalised, so that iterates stay bounded. With a single scale, f
    is the blocks alone. ``films``, one per scale, scale and shift what the first norm of each block returns.

    Args:
        size: hyperparameters of the cell.
        activation: "relu", or "softplus", which is smoother early in training.
        weight_norm: whether the convolutions of the blocks and the last one have weight normalisation.
    """

    def __init__(self, size: MDEQSize, activation: str = "relu", weight_norm: bool = True):
        super().__init__()
        self.size, self.activation, scales = size, activation, range(size.scales)
        self.weight_norm = weight_norm
        require(self, "activation", among=ACTIVATIONS)
        require(self, "weight_norm", among=(True, False))
        self.blocks = nn.ModuleList(
            nn.ModuleList(Block(size, i, activation, weight_norm) for _ in range(size.blocks)) for i in scales
        )
        several = scales if size.scales > 1 else ()
        self.fuse = nn.ModuleList(
            nn.ModuleList(nn.Identity() if i == j else Transition(size, j, i, activation) for j in scales)
            for i in several
        )
        self.post = nn.ModuleList(block_conv(size.channels[i], size.channels[i], 1, weight_norm) for i in several)
        self.norms = nn.ModuleList(
            nn.GroupNorm(size.last_groups, size.channels[i], affine=size.post_affine) for i in several
        )

    def forward(self, z: tuple[Tensor, ...], x: tuple[Tensor, ...], films: Sequence[Film] = ()) -> tuple[Tensor, ...]:
        y = list(z)
        for i, blocks in enumerate(self.blocks):
            film = films[i] if i < len(films) else None
            for k, block in enumerate(blocks):  # type: ignore[arg-type]
                y[i] = block(y[i], x[i] if k == 0 and i < len(x) else None, film)
        if len(y) == 1:
            return (y[0],)
        outputs = []
        for transitions, conv, norm in zip(self.fuse, self.post, self.norms, strict=True):
            total = transitions[0](y[0])  # type: ignore[index]
            for j in range(1, len(y)):
                total = total + transitions[j](y[j])  # type: ignore[index]
            outputs.append(norm(conv(activate(total, self.activation))))
        return tuple(outputs)

    def start(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the initial z for the inputs ``x``: zeros, in their memory format."""
        batch, _, height, width = x[0].shape
        step = 2 ** (self.size.scales - 1)
        if height % step or width % step:
            raise ValueError(
                f"features of {height} x {width} cannot be halved {self.size.scales - 1} times: for this model height "
                f"and width of images must be multiples of {self.size.divisor}. Resize or pad them."
            )
        order = torch.channels_last if is_channels_last(x[0]) else torch.contiguous_format
        narrow = autocast_state(x[0].device.type)  # autocast narrows x, but the state must stay in float32
        dtype = torch.promote_types(x[0].dtype, torch.float32) if narrow else x[0].dtype
        shapes = [(batch, c, height >> i, width >> i) for i, c in enumerate(self.size.channels)]
        return tuple(
            torch.zeros(shape, dtype=dtype, device=x[0].device).contiguous(memory_format=order) for shape in shapes
        )

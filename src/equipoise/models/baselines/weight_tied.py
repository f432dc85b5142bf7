"""relu(W z + U x + b) with an unconstrained W: solved for its equilibrium, or applied a fixed number of times.

The wiring is that of the monDEQ of the same kind (E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks",
2020, appendix E), so that only W differs. The paper trains such DEQs beside its own (section 5) and does not state
their numbers of channels; the defaults here have about as many parameters as the monDEQ on the same images.
"""

import itertools
from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium
from equipoise.gradients import ImplicitGradient, UnrolledGradient
from equipoise.gradients.base import GradientRule
from equipoise.models.parts.images import MEAN, STD, ImageClassifier
from equipoise.models.parts.keyword_options import accepts, positional_of
from equipoise.options import is_number, require, require_number
from equipoise.problem.problem import autocast_state
from equipoise.solvers import Broyden
from equipoise.tolerance import Tolerance

KINDS = ("conv", "multitier")
TOLERANCE = Tolerance(relative=1e-2, max_steps=300)  # "even when allowed 300 iterations of Broyden's method" (sec. 5)
Tiers = tuple[Tensor, ...]


class PlainCell(nn.Module):
    """f(z, u): for each tier a 3x3 convolution of z, plus one of stride 2 of the tier above; u enters the first tier.

    The block lower triangular W of a multi-tier monDEQ (D1), unconstrained.
    """

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.within = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1, bias=False) for c in channels)
        self.between = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in itertools.pairwise(channels)
        )

    def forward(self, z: Tiers, u: Tensor) -> Tiers:
        above = [u, *(conv(part) for conv, part in zip(self.between, z, strict=False))]
        return tuple(torch.relu(conv(part) + x) for conv, part, x in zip(self.within, z, above, strict=True))

    def start(self, u: Tensor) -> Tiers:
        """Return the initial z for an injection: zeros."""
        narrow = autocast_state(u.device.type)  # autocast narrows u, but the state must stay in float32
        dtype = torch.promote_types(u.dtype, torch.float32) if narrow else u.dtype
        parts = [torch.zeros_like(u, dtype=dtype)]
        for conv in self.between:
            height, width = (-(-n // 2) for n in parts[-1].shape[2:])
            parts.append(u.new_zeros(len(u), conv.out_channels, height, width, dtype=dtype))  # type: ignore[arg-type]
        return tuple(parts)


class WeightTied(ImageClassifier, ABC):
    """Injection, one cell applied repeatedly, linear head: maps images in [0, 1] to logits.

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        kind: "conv" (one convolution) or "multitier" (several resolutions, the last of which the head reads).
        channels: channels of z; for "multitier" a list, one for each tier.
        pool: kernel size of the average pooling before the head, for "conv".
        gradient: rule of differentiation.
    """

    one_shape = "its head reads every pixel"

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        kind: str = "conv",
        channels: int | Sequence[int] = 73,
        pool: int = 4,
        *,
        gradient: GradientRule,
    ):
        super().__init__(shape, classes, mean, std)
        self.kind, self.pool = kind, pool
        require(self, "kind", among=KINDS)
        several = kind == "multitier"
        tiers = tuple(channels) if several and isinstance(channels, tuple | list) else (channels,)
        valid = len(tiers) > 0 and all(is_number(n, at_least=1, whole=True) for n in tiers)
        if several != isinstance(channels, tuple | list) or not valid:
            wanted = "a list of whole numbers, one for each tier" if several else "one whole number"
            raise ValueError(f"channels is {channels!r}; for kind {kind!r} it must be {wanted}.")
        require_number("pool", pool, at_least=1, at_most=min(shape[1:]), whole=True)
        self.inject = nn.Conv2d(shape[0], tiers[0], 3, padding=1)  # type: ignore[arg-type]
        cell = PlainCell(tiers)  # type: ignore[arg-type]
        solver = Broyden(memory=30)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=solver, tolerance=TOLERANCE, gradient=gradient)
        height, width = shape[1:]
        if several:
            for _ in tiers[1:]:
                height, width = -(-height // 2), -(-width // 2)
        else:
            height, width = height // pool, width // pool
        self.head = nn.Linear(tiers[-1] * height * width, classes)  # type: ignore[operator]

    def injections(self, images: Tensor) -> tuple[Tensor]:
        """Return the input of the equilibrium."""
        return (self.inject(self.normalized(images)),)

    def read(self, z: Tiers) -> Tensor:
        """Return the logits for z."""
        last = F.avg_pool2d(z[-1], self.pool) if self.kind == "conv" else z[-1]
        return self.head(last.flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.read(self.equilibrium(*self.injections(images)))


class PlainDEQ(WeightTied):
    """A DEQ whose equilibrium need not exist: z* = relu(W z* + U x + b), by default solved by Broyden's method.

    Args:
        shape, classes, mean, std, kind, channels, pool: see :class:`WeightTied`.

    Example:
        >>> model = PlainDEQ(shape=(1, 28, 28), classes=10, channels=73)
        >>> sum(p.numel() for p in model.parameters())
        84471
    """

    @accepts(*positional_of(WeightTied))
    def __init__(self, *images_and_size: Any, **options: Any):
        super().__init__(*images_and_size, gradient=ImplicitGradient(), **options)


class Unrolled(WeightTied):
    """The weight-tied network of the same block: z <- relu(W z + U x + b), ``steps`` times from 0, back-propagated.

    Its residual is measured and logged; nothing requires it to be small.

    Args:
        shape, classes, mean, std, kind, channels, pool: see :class:`WeightTied`.
        steps: number of applications of the block.

    Example:
        >>> model = Unrolled(shape=(1, 28, 28), classes=10, channels=73, steps=10)
    """

    @accepts(*positional_of(WeightTied))
    def __init__(self, *images_and_size: Any, steps: int = 10, **options: Any):
        super().__init__(*images_and_size, gradient=UnrolledGradient(steps), **options)
        self.equilibrium.on_failure = "ignore"

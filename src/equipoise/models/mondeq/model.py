"""monDEQ: classifiers whose equilibrium exists, is unique and is reached by the solver for any weights.

E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020). Sizes are those of table E1, whose
84,460 parameters on MNIST correspond to 56 channels, not 54.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium
from equipoise.models.mondeq.certificate import Certificate, certify
from equipoise.models.parts.images import MEAN, STD, ImageClassifier, require_shape
from equipoise.operators import MonotoneConv2d, MonotoneLinear, MonotoneMultiTier, MonotoneProblem
from equipoise.operators.spectrum import embed, images, memory
from equipoise.operators.splitting import PeacemanRachford
from equipoise.options import is_number, require
from equipoise.tolerance import Tolerance

KINDS = ("dense", "conv", "multitier")
TOLERANCE = Tolerance(relative=1e-2, max_steps=200)  # E.2


class MonDEQ(ImageClassifier):
    """Map images in [0, 1] to logits: z* = s(W z* + U x + b) with monotone I - W, and a linear head (E.1).

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        kind: "dense", "conv" (one convolution) or "multitier" (several resolutions).
        channels: channels of z*: for "dense" the number of features, for "multitier" one per tier.
        m: strong monotonicity of I - W.
        activation: s, a proximal activation.
        pool: kernel size of the average pooling before the head, for "conv".

    Example:
        >>> model = MonDEQ(shape=(1, 28, 28), classes=10, kind="conv", channels=56)
        >>> sum(p.numel() for p in model.parameters())
        84460
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        kind: str = "conv",
        channels: int | Sequence[int] = 56,
        m: float = 1.0,
        activation: Any = "relu",
        pool: int = 4,
    ):
        super().__init__(shape, classes, mean, std)
        self.kind, self.size, self.pool = kind, (shape[1], shape[2]), pool
        require(self, "kind", among=KINDS)
        if not isinstance(channels, tuple | list if kind == "multitier" else int):
            wanted = "a list of channels, one for each tier" if kind == "multitier" else "one whole number"
            raise ValueError(f"channels is {channels!r}; for kind {kind!r} it must be {wanted}.")
        if kind == "dense":
            operator = MonotoneLinear(channels, m=m)  # type: ignore[arg-type]
            self.inject: Any = nn.Linear(math.prod(shape), operator.features)
            features = operator.features
        elif kind == "conv":
            operator = MonotoneConv2d(channels, self.size, m=m)  # type: ignore[arg-type]
            if not is_number(pool, at_least=1, whole=True) or min(self.size) < pool:
                raise ValueError(f"pool is {pool!r}; it must be between 1 and the image's side, {min(self.size)}.")
            self.inject = nn.Conv2d(shape[0], operator.channels, 3, padding=1)
            features = operator.channels * (shape[1] // pool) * (shape[2] // pool)
        else:
            operator = MonotoneMultiTier(tuple(channels), self.size, m=m)  # type: ignore[arg-type]
            self.inject = nn.Conv2d(shape[0], operator.channels[0], 3, padding=1)
            features = math.prod(operator.shape[-1])
        problem = MonotoneProblem(operator, activation)
        self.layer = Equilibrium(problem, initial=problem.start, solver=PeacemanRachford(), tolerance=TOLERANCE)
        self.head = nn.Linear(features, classes)

    @property
    def operator(self) -> Any:
        return self.layer.f.operator  # type: ignore[attr-defined]

    def bias(self, x: Tensor) -> Any:
        """Return U x + b of normalised images, on the grid of z."""
        require_shape(x, self.shape, "the grid of its equilibrium is fixed")
        if self.kind == "dense":
            return self.inject(x.flatten(1))
        grid = self.operator.grid if self.kind == "conv" else self.operator.grids[0]
        injected = images(convolved(self.inject, x, grid))
        return injected if self.kind == "conv" else (injected,)  # the input enters the first tier

    def features(self, z: Any) -> Tensor:
        """Return the input of the head: z, its average-pooled image, or the last tier with its border."""
        if self.kind == "dense":
            return z
        z = self.operator.checked(z)
        if self.kind == "multitier":
            return z[-1].flatten(1)
        height, width = (n // self.pool for n in self.size)
        rows = memory(z)[: height * self.pool].unflatten(0, (height, self.pool)).mean(dim=1)
        columns = rows[:, : width * self.pool].unflatten(1, (width, self.pool)).mean(dim=2)
        return images(columns).flatten(1)  # one dimension at a time is many times faster

    @property
    def equilibrium(self) -> Equilibrium:
        return self.layer

    def injections(self, images: Tensor) -> tuple[Any]:
        """Return the input of the equilibrium."""
        self.operator.require_precision()
        return (self.bias(self.normalize(images)),)

    def read(self, z: Any) -> Tensor:
        """Return the logits for z."""
        return self.head(self.features(z))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(*self.injections(x)))

    def certificate(self, alpha: float | None = None) -> Certificate:
        """Return proven bounds for the current weights: the rate of convergence and the Lipschitz constants.

        Args:
            alpha: step size of the solver; None for the layer's own.

        Example:
            >>> print(model.certificate())
        """
        return certify(self, alpha)


def convolved(layer: nn.Conv2d, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the 3x3 convolution of zero-padded (batch, C, H, W) images as (H, W, C, batch), in a grid of zeros.

    Gathering the taps of the few input channels lets one matrix product return the memory order that operators use;
    permuting the many output channels would cost more. A tap of ones, which is 0 in the border, carries the bias.
    """
    padded = F.pad(memory(x), (0, 0, 0, 0, 1, 1, 1, 1))
    (height, width), (outputs, inputs) = x.shape[2:], layer.weight.shape[:2]
    taps = [padded[i : i + height, j : j + width] for i in range(3) for j in range(3)]
    ones = x.new_ones(1).expand(height, width, 1, x.shape[0])
    patches = torch.cat([*taps, ones], dim=2)
    if few := patches.shape[2] < outputs:  # what is smaller is placed in the grid
        patches = embed(patches, grid)
    assert layer.bias is not None
    kernel = torch.cat([layer.weight.permute(0, 2, 3, 1).reshape(outputs, 9 * inputs), layer.bias[:, None]], dim=1)
    out = torch.bmm(kernel.expand(patches.shape[0] * patches.shape[1], -1, -1), patches.flatten(0, 1))
    stored = out.view(*patches.shape[:2], outputs, x.shape[0])
    return stored if few else embed(stored, grid)

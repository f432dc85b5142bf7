"""Layers that keep an equilibrium solvable: weights of bounded norm, and dropout with one mask per solve.

A layer derives its weight or mask once per solve (:mod:`equipoise.problem.scope`). Nothing that depends on a weight is
reused after the weight has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.options import require
from equipoise.problem.scope import once_per_solve
from equipoise.stability.norms import conv2d_norm_bound, frequency_grid, largest_block, operator_norm_bound


class VariationalDropout(nn.Module):
    """Dropout with one mask per solve, so that f stays a function of z; identity in eval mode.

    A mask entry covers a whole channel, (batch, channels, 1, ...); outside a solve every call draws a new one.

    Args:
        p: probability of a channel being zeroed; the others are scaled by 1 / (1 - p).

    Reference: Y. Gal and Z. Ghahramani, "A theoretically grounded application of dropout in recurrent neural networks"
    (2016); in equilibrium models, Bai et al. (2020), section 3.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = p
        require(self, "p", at_least=0, below=1)

    def forward(self, z: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return z
        shape = (*z.shape[:2], *(1 for _ in z.shape[2:]))

        def draw() -> Tensor:
            keep = torch.full(shape, 1 - self.p, dtype=z.dtype, device=z.device)
            return torch.bernoulli(keep) / (1 - self.p)

        return z * once_per_solve((id(self), shape[1:]), draw, per_sample=True)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WeightNorm(nn.Module):
    """A linear or convolutional layer with weight ``scale * v / ||v||`` per output, derived once per solve.

    ``layer.weight`` holds v. A row of v that is zero gives a zero weight, not NaN.

    Args:
        layer: ``nn.Linear`` or ``nn.Conv1d/2d/3d`` (not transposed).

    Example:
        >>> conv = eq.WeightNorm(nn.Conv2d(8, 8, 3, padding=1))

    Reference: T. Salimans and D. Kingma, "Weight normalization" (2016), eq. 2.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = supported(layer)
        self.scale = nn.Parameter(row_lengths(self.layer.weight).detach())

    @property
    def weight(self) -> Tensor:
        return once_per_solve(id(self), self.derive)

    def derive(self) -> Tensor:
        v = self.layer.weight
        length = row_lengths(v)
        return v * (self.scale / torch.where(length == 0, 1.0, length))

    def forward(self, x: Tensor) -> Tensor:
        return apply_layer(self.layer, x, self.weight)


class SpectralNorm(nn.Module):
    """A linear or 2-d convolutional layer whose operator norm never exceeds ``bound``, derived once per solve.

    The weight is divided by an upper bound of its norm (:func:`operator_norm_bound`) where that exceeds ``bound``; for
    a convolution the norm is that of the operator on images of the size at hand, not of the reshaped kernel.

    Args:
        layer: ``nn.Linear``, or ``nn.Conv2d`` with stride 1, dilation 1, one group and zero padding.
        bound: the largest norm allowed.
        always: scale up to ``bound`` as well as down.

    Example:
        >>> cell = eq.SpectralNorm(nn.Linear(64, 64), bound=0.9)
    """

    def __init__(self, layer: nn.Module, bound: float = 1.0, *, always: bool = False):
        super().__init__()
        self.layer = supported(layer)
        if isinstance(layer, nn.Conv2d):
            if layer.stride != (1, 1) or layer.dilation != (1, 1) or layer.groups != 1 or layer.padding_mode != "zeros":
                raise ValueError("SpectralNorm takes an nn.Conv2d with stride 1, dilation 1, one group, zero padding.")
        elif not isinstance(layer, nn.Linear):
            raise TypeError(f"SpectralNorm takes nn.Linear or nn.Conv2d, not {type(layer).__name__}.")
        self.bound, self.always = bound, always
        require(self, "bound", above=0)
        require(self, "always", kind=bool)
        self.known: tuple[Tensor, tuple[int, int], Tensor] | None = None  # a kernel, a size, their largest block

    def weight(self, size: tuple[int, int] | None = None) -> Tensor:
        """The constrained weight; a convolution needs the ``size`` of its images."""
        return once_per_solve((id(self), size), lambda: self.derive(size))

    def derive(self, size: tuple[int, int] | None) -> Tensor:
        raw = self.layer.weight
        if raw.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"the weight is {raw.dtype}, too coarse for a bound of its norm: keep the model in float32 and use "
                "torch.autocast."
            )
        with torch.autocast(raw.device.type, enabled=False):  # a bound in low precision is none
            norm = operator_norm_bound(raw) if size is None else conv2d_norm_bound(raw, size, angles=self.angles(size))
        if self.always:
            return raw * (self.bound / torch.where(norm == 0, 1.0, norm))
        return raw * (self.bound / norm.clamp(min=self.bound))

    def angles(self, size: tuple[int, int]) -> Tensor:
        """Those of the largest block; searched for, which takes most of the time, only if the kernel has changed."""
        kernel = self.layer.weight
        if self.known is None or self.known[1] != size or not same(self.known[0], kernel):
            found = largest_block(kernel, frequency_grid(kernel, size)[0])
            self.known = (kernel.detach().clone(), size, found)
        return self.known[2]

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1]) if isinstance(self.layer, nn.Conv2d) else None
        return apply_layer(self.layer, x, self.weight(size))

    def adjoint(self, y: Tensor) -> Tensor:
        """The transpose of the linear part, so without a bias: <layer(x), y> = <x, layer.adjoint(y)>.

        A convolution must keep the size of its images, as with a padding of half an odd kernel: its weight depends on
        the size of x, which y then tells.
        """
        if not isinstance(self.layer, nn.Conv2d):
            return y @ self.weight()
        half = tuple(k // 2 for k in self.layer.kernel_size)
        if self.layer.padding not in ("same", half) or not all(k % 2 for k in self.layer.kernel_size):
            raise ValueError(
                "adjoint needs a convolution that keeps the size of images, and this one has kernel "
                f"{self.layer.kernel_size} and padding {self.layer.padding}: use an odd kernel, half of it as padding."
            )
        return F.conv_transpose2d(y, self.weight((y.shape[-2], y.shape[-1])), padding=half)

    def extra_repr(self) -> str:
        return f"bound={self.bound}, always={self.always}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every number, which takes no time beside what it saves; a counter of changes can be gone around."""
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def supported(layer: Any) -> Any:
    """Refuse a layer whose weight cannot be replaced."""
    if isinstance(layer, type):
        raise TypeError(f"layer is the class {layer.__name__}; give an object, such as nn.Linear(64, 64).")
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(f"layer is a {type(layer).__name__}; it must be nn.Linear or nn.Conv1d, 2d or 3d.")
    return layer


def row_lengths(weight: Tensor) -> Tensor:
    """||weight_i|| for every output i, shaped to divide the weight."""
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return torch.linalg.vector_norm(weight.flatten(1), dim=1).view(shape)


def apply_layer(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The layer with another weight."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return layer._conv_forward(x, weight, layer.bias)

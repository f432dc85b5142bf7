"""Layers that keep an equilibrium solvable: weights of bounded norm, and dropout with one mask per solve.

A layer derives its weight or mask once per solve (:mod:`equipoise.problem.scope`). Nothing derived from a weight is
reused after the weight has changed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.options import require
from equipoise.problem.scope import once_per_solve
from equipoise.stability.norms import conv2d_norm_bound, frequency_grid, largest_block, operator_norm_bound

WeightedLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class VariationalDropout(nn.Module):
    """Drop whole channels with one mask per solve, so that f stays a function of z; identity in eval mode.

    The mask has shape (batch, channels, 1, ...). Outside a solve, every call draws a new one.

    Args:
        p: probability of dropping a channel; the others are scaled by 1 / (1 - p).

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
            return torch.bernoulli(z.new_full(shape, 1 - self.p)) / (1 - self.p)

        return z * once_per_solve((id(self), shape[1:]), draw, per_sample=True)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class WeightNorm(nn.Module):
    """A linear or convolutional layer with weight ``scale * v / ||v||`` per output, derived once per solve.

    ``layer.weight`` holds v. A zero row of v gives a zero weight, not NaN.

    Args:
        layer: ``nn.Linear`` or ``nn.Conv1d/2d/3d`` (not transposed).

    Example:
        >>> conv = eq.WeightNorm(nn.Conv2d(8, 8, 3, padding=1))

    Reference: T. Salimans and D. Kingma, "Weight normalization" (2016), eq. 2.
    """

    def __init__(self, layer: WeightedLayer):
        super().__init__()
        require_layer(layer, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.layer = layer
        self.scale = nn.Parameter(row_lengths(layer.weight).detach())

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

    Where an upper bound of its norm (:func:`operator_norm_bound`) exceeds ``bound``, the weight is scaled down by their
    ratio. The norm of a convolution is that of the operator on images of the given size, not of the reshaped kernel.

    Args:
        layer: ``nn.Linear``, or ``nn.Conv2d`` with stride 1, dilation 1, one group and zero padding.
        bound: largest norm allowed.
        always: whether to scale up to ``bound`` as well as down.

    Example:
        >>> cell = eq.SpectralNorm(nn.Linear(64, 64), bound=0.9)
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, bound: float = 1.0, *, always: bool = False):
        super().__init__()
        require_layer(layer, nn.Linear, nn.Conv2d)
        if isinstance(layer, nn.Conv2d) and (
            layer.stride != (1, 1) or layer.dilation != (1, 1) or layer.groups != 1 or layer.padding_mode != "zeros"
        ):
            raise ValueError(f"layer is {layer}; it must have stride 1, dilation 1, one group and zero padding.")
        self.layer, self.bound, self.always = layer, bound, always
        require(self, "bound", above=0)
        require(self, "always", kind=bool)
        self.known: tuple[Tensor, tuple[int, int], Tensor] | None = None  # a kernel, a size, their largest block

    def weight(self, size: tuple[int, int] | None = None) -> Tensor:
        """Return the constrained weight; a convolution needs the ``size`` of its images."""
        return once_per_solve((id(self), size), lambda: self.derive(size))

    def derive(self, size: tuple[int, int] | None) -> Tensor:
        raw = self.layer.weight
        if raw.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"the weight is {raw.dtype}, too coarse to bound its norm: keep the model in float32 and use "
                "torch.autocast."
            )
        with torch.autocast(raw.device.type, enabled=False):  # rounding in low precision would break the bound
            norm = operator_norm_bound(raw) if size is None else conv2d_norm_bound(raw, size, angles=self.angles(size))
        if self.always:
            return raw * (self.bound / torch.where(norm == 0, 1.0, norm))
        return raw * (self.bound / norm.clamp(min=self.bound))

    def angles(self, size: tuple[int, int]) -> Tensor:
        """Return the angles of the largest block. The search takes most of the time; unchanged kernels skip it.

        Kernels are compared by value, which costs little: a version counter would miss edits of ``.data``.
        """
        kernel = self.layer.weight
        if self.known is not None:
            before, known_size, angles = self.known
            alike = before.device == kernel.device and before.dtype == kernel.dtype and known_size == size
            if alike and torch.equal(before, kernel):
                return angles
        angles = largest_block(kernel, frequency_grid(kernel, size)[0])
        self.known = (kernel.detach().clone(), size, angles)
        return angles

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[-2], x.shape[-1]) if isinstance(self.layer, nn.Conv2d) else None
        return apply_layer(self.layer, x, self.weight(size))

    def adjoint(self, y: Tensor) -> Tensor:
        """Apply the transpose of the linear part, without the bias: <layer(x), y> = <x, layer.adjoint(y)>.

        A convolution must preserve the size of its images, because its weight depends on the size of x.
        """
        if not isinstance(self.layer, nn.Conv2d):
            return y @ self.weight()
        kernel, padding = self.layer.kernel_size, self.layer.padding
        half = (kernel[0] // 2, kernel[1] // 2)
        if padding not in ("same", half) or not all(k % 2 for k in kernel):
            raise ValueError(
                f"adjoint needs a convolution that preserves the image size; this one has kernel {kernel} and padding "
                f"{padding}: use an odd kernel and half of it as padding."
            )
        return F.conv_transpose2d(y, self.weight((y.shape[-2], y.shape[-1])), padding=half)

    def extra_repr(self) -> str:
        return f"bound={self.bound}, always={self.always}"


def require_layer(layer: object, *kinds: type[nn.Module]) -> None:
    if isinstance(layer, type):
        raise TypeError(f"layer is the class {layer.__name__}; give an object, such as nn.Linear(64, 64).")
    if not isinstance(layer, kinds):
        allowed = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise TypeError(f"layer has type {type(layer).__name__}; it must be {allowed}.")


def row_lengths(weight: Tensor) -> Tensor:
    """Return ||weight_i|| for every output i, shaped to broadcast against the weight."""
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return torch.linalg.vector_norm(weight.flatten(1), dim=1).view(shape)


def apply_layer(layer: WeightedLayer, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a layer with another weight."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return layer._conv_forward(x, weight, layer.bias)

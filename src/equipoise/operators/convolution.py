"""The convolutional monotone operator: circular on a zero-padded grid, inverted per frequency (section 4.2, C)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.operators.linear import MonotoneOperator, identity_like, inverted, resolved
from equipoise.operators.spectrum import AT_ONCE, images, memory, real, recording, spectrum
from equipoise.options import is_number, require_number
from equipoise.stability.norms import operator_norm_bound

KERNEL = 3
BORDER = KERNEL - 1  # W reaches two pixels, so two rows and columns of zeros keep opposite edges apart (C.2)
COARSE = (6, 6)  # the grid on which norms are estimated: a 5x5 kernel varies slowly with frequency


class MonotoneConv2d(MonotoneOperator):
    """W = (1 - m) I - A^T A + B - B^T with 3x3 convolutions A and B, circular on the image and a border of zeros.

    z has shape (batch, channels, height + 2, width + 2). The border is its last two rows and columns, which on a
    circular grid surround the image. The nonlinearity keeps it at zero (:class:`BorderZero`, C.2).

    Args:
        channels: number of channels of z.
        size: (height, width) of the image.
        m: strong monotonicity of I - W.
        normalize: whether to scale with learned scalars, A^T A -> softplus(g) A^T A / ||A||^2 and
            B -> h B / ||B|| (E.2).

    Example:
        >>> op = eq.operators.MonotoneConv2d(56, (28, 28))
        >>> op.resolvent(0.5)(torch.randn(128, *op.shape))

    Reference: E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), section 4.2, appendix C.
    """

    def __init__(self, channels: int, size: tuple[int, int], *, m: float = 1.0, normalize: bool = True):
        super().__init__(m, normalize)
        require_number("channels", channels, at_least=1, whole=True)
        self.channels, self.size = channels, checked_size(size)
        self.grid = (self.size[0] + BORDER, self.size[1] + BORDER)
        self.shape, self.inner = (channels, *self.grid), (self.size,)
        self.add_parameters(lambda: fresh_kernel(channels, channels))

    def kernel(self) -> Tensor:
        """Return the 5x5 kernel of W."""
        return composed(self.m, *self.scaled_parameters())

    def blocks(self, grid: tuple[int, int] | None = None) -> Tensor:
        """Return W at every frequency of its grid, or of another, as complex blocks (eq. C5)."""
        return spectrum(grid or self.grid, self.A).blocks(self.kernel())

    def derive(self) -> Tensor:
        """Return W at every frequency, as real blocks."""
        return real(self.blocks())

    def factorise(self, alpha: float) -> Tensor:
        kernel = self.kernel()
        transform = spectrum(self.grid, kernel)
        if recording(kernel):
            return real(inverted(resolved(transform.blocks(kernel), alpha)))
        table = kernel.new_empty(transform.count, 2 * self.channels, 2 * self.channels)
        few = max(1, AT_ONCE // (4 * self.channels**2))  # what is computed in between takes more memory than the result
        for part in (slice(start, start + few) for start in range(0, len(table), few)):
            real(inverted(resolved(transform.blocks(kernel, part), alpha)), table[part])
        return table

    def footprint(self) -> list[int]:
        return [spectrum(self.grid, self.example).count * (2 * self.channels) ** 2]

    def multiply(self, matrix: Tensor, z: Tensor, *, adjoint: bool) -> Tensor:
        transform = spectrum(self.grid, z)
        return images(transform.inverse(torch.bmm(matrix.mT if adjoint else matrix, transform.forward(memory(z)))))

    def recorded(self, z: Tensor) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        z = self.checked(z)
        transform = spectrum(self.grid, z)
        with self.without_autocast():
            kernel, spectra = self.kernel(), transform.forward(memory(z))

        def pull(cotangent: Tensor) -> Tensor:
            with self.without_autocast():
                return transform.correlation(cotangent, spectra, (kernel.shape[2], kernel.shape[3]))

        return [(kernel, pull)]

    def norm(self, *, bound: bool) -> Tensor:
        blocks = self.blocks(None if bound else COARSE)
        return blocks_norm(identity_like(blocks) - blocks, bound=bound)

    def typical(self) -> tuple[Tensor, Tensor]:
        mean, square = means(self.kernel())
        return mean, square.sqrt()

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.size}, m={self.m:g}, normalize={self.normalize}"


def fresh_kernel(outputs: int, inputs: int) -> nn.Parameter:
    """Return a kernel initialised as that of nn.Conv2d."""
    bound = (inputs * KERNEL**2) ** -0.5
    return nn.Parameter(torch.empty(outputs, inputs, KERNEL, KERNEL).uniform_(-bound, bound))


def checked_size(size: Any) -> tuple[int, int]:
    """Return the size if it is one."""
    if not (isinstance(size, tuple | list) and len(size) == 2 and all(is_number(n, 1, whole=True) for n in size)):
        raise ValueError(f"size is {size!r}; it must be (height, width) of the image, whole numbers of at least 1.")
    return (size[0], size[1])


def composed(m: float, A: Tensor, B: Tensor, g: Tensor | float = 1.0) -> Tensor:
    """Return the 5x5 kernel of (1 - m) I - g A^T A + B - B^T: one convolution instead of four."""
    # A^T A at the offset d is the sum of A_s^T A_t over t - s = d: the correlation of A's kernels with themselves.
    square = F.conv2d(A.transpose(0, 1), A.transpose(0, 1), padding=BORDER).transpose(0, 1)
    skew = F.pad(B - B.transpose(0, 1).flip(2, 3), (1, 1, 1, 1))
    return (1 - m) * identity(square) - g * square + skew


def identity(like: Tensor) -> Tensor:
    """Return the kernel of the identity, of this size."""
    kernel = torch.zeros_like(like)
    kernel[:, :, like.shape[2] // 2, like.shape[3] // 2] = torch.eye(len(like), dtype=like.dtype, device=like.device)
    return kernel


def means(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean eigenvalue and squared singular value of I - W, from the kernel of W (Parseval)."""
    rest = identity(kernel) - kernel
    return rest[:, :, BORDER, BORDER].trace() / len(kernel), rest.square().sum() / len(kernel)


def blocks_norm(blocks: Tensor, *, bound: bool) -> Tensor:
    """Return an upper bound of the largest singular value of complex (frequency, O, I) blocks, tight or quick."""
    if not bound:
        return operator_norm_bound(blocks, iterations=4).amax()
    few = max(1, AT_ONCE // (blocks.shape[1] * blocks.shape[2]))  # all together take more memory than a resolvent
    return torch.stack([operator_norm_bound(part.to(torch.complex128)).amax() for part in blocks.split(few)]).amax()

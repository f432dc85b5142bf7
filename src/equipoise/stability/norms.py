"""Upper bounds of operator norms, by Gram iteration: of matrices, and of convolutions on images of a size.

B. Delattre, Q. Barthelemy, A. Araujo, A. Allauzen, "Efficient bound of Lipschitz constant for convolutional layers by
Gram iteration" (2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.options import require_number

ITERATIONS = 6  # of Gram: bounds are then tight within n^(1/128)
FREQUENCIES = 20  # for each tap of a kernel but the first: where the norms of a convolution are compared
CACHED = 2**20  # numbers that a processor's cache holds


def operator_norm_bound(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """An upper bound of the largest singular value of the (..., m, n) matrices, tight within n^(1/2^(iterations+1)).

    Gram iteration: ||A||_2 = ||A^H A||_2^(1/2) = ... <= ||G_k||_F^(1/2^k). Never below the norm, unlike power
    iteration, deterministic and differentiable.

    Reference: theorem 2 of the paper named above.
    """
    require_number("iterations", iterations, at_least=0, whole=True)
    if not isinstance(matrix, Tensor) or matrix.dim() < 2:
        given = f"a tensor of shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else repr(matrix)
        raise ValueError(f"matrix is {given}; it must be a tensor of (..., rows, columns).")
    gram = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mH
    largest = gram.abs().amax(dim=(-2, -1))
    scale = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    gram = gram / scale[..., None, None]
    log_bound = scale.log()
    for k in range(iterations):
        # Rescaled at every step, or the powers would overflow; the scales are collected in the logarithm.
        size = torch.where(largest == 0, 1.0, frobenius(gram))
        log_bound = log_bound + size.log() / 2**k
        gram = gram / size[..., None, None]
        gram = gram.mH @ gram
    size = torch.where(largest == 0, 1.0, frobenius(gram))
    rounding = 1 + 32 * torch.finfo(log_bound.dtype).eps  # of the sums above, so that the bound stays one
    bound = rounding * (log_bound + size.log() / 2**iterations).exp()
    return torch.where(largest == 0, 0.0, bound)


def frobenius(matrix: Tensor) -> Tensor:
    """The Frobenius norm; of real numbers, since torch's of complex ones is forty times slower."""
    return torch.linalg.matrix_norm(torch.view_as_real(matrix).flatten(-2) if matrix.is_complex() else matrix)


def conv2d_norm_bound(
    kernel: Tensor, size: tuple[int, int], iterations: int = ITERATIONS, angles: Tensor | None = None
) -> Tensor:
    """An upper bound of the operator norm of a stride-1 convolution on zero-padded images of ``size``.

    Zero padding is a restriction of the circular convolution on the grid enlarged by the kernel, which the DFT
    block-diagonalises: the norm is at most that of the largest block. On large images blocks on a coarser grid are
    enough, :func:`frequency_grid` says why.

    Args:
        kernel: (out, in, height, width).
        size: of the images.
        iterations: of :func:`operator_norm_bound`.
        angles: of the largest block, if it is known: what :func:`largest_block` gave for this kernel.
    """
    if not isinstance(kernel, Tensor) or kernel.dim() != 4:
        given = f"a tensor of shape {tuple(kernel.shape)}" if isinstance(kernel, Tensor) else repr(kernel)
        raise ValueError(f"kernel is {given}; it must be a tensor of (out, in, height, width).")
    if not isinstance(size, tuple | list) or len(size) != 2 or not all(isinstance(n, int | torch.SymInt) for n in size):
        raise ValueError(f"size is {size!r}; it must be (height, width) of the images, whole numbers.")
    grid, slack = frequency_grid(kernel, size)
    angles = largest_block(kernel, grid, iterations) if angles is None else angles
    return slack * operator_norm_bound(block(kernel, angles), iterations)


def frequency_grid(kernel: Tensor, size: tuple[int, int]) -> tuple[tuple[int, ...], float]:
    """On how many frequencies blocks are compared, and by what the largest may exceed them in between.

    The block at frequency w is the sum of the kernel's k taps times exp(-i w t), so <u, block v> is a trigonometric
    polynomial of degree (k - 1) / 2 up to a phase. By a lemma of M. Riesz it falls from its largest value M no faster
    than M cos((k - 1) / 2 times the distance), and of n frequencies one is within pi / n of that value: no norm exceeds
    the largest found by more than 1 / cos(pi (k - 1) / 2n), in both directions (H. Ehlich, K. Zeller, 1964). With
    n = ``FREQUENCIES`` (k - 1) that is 0.6 %.
    """
    counts, slack = [], 1.0
    for n, k in zip(size, kernel.shape[2:], strict=True):
        exact, enough = n + k - 1, max(1, FREQUENCIES * (k - 1))
        counts.append(min(exact, enough))
        slack /= 1.0 if exact <= enough else math.cos(math.pi * (k - 1) / (2 * enough))
    return tuple(counts), slack


def block(kernel: Tensor, angles: Tensor) -> Tensor:
    """The (out, in) complex matrix of the frequency at which the kernel's taps have these angles."""
    taps = kernel.flatten(2)
    return torch.complex(taps @ angles.cos().to(kernel), taps @ -angles.sin().to(kernel))


@torch.no_grad()
def largest_block(kernel: Tensor, grid: tuple[int, ...], iterations: int = ITERATIONS) -> Tensor:
    """Where on a grid of frequencies :func:`operator_norm_bound` is largest: the angles of the taps.

    Frequencies drop out as soon as an upper bound of theirs is below a lower one of another, and only the one that is
    found has to be differentiated. They are taken a few at a time: what is multiplied then stays in the cache.
    """
    angles = tap_angles(kernel, grid)
    taps = kernel.flatten(2).permute(2, 0, 1)
    taps = taps if taps.shape[1] >= taps.shape[2] else taps.mT
    n, largest = taps.shape[2], taps.abs().max()
    if not bool(largest.isfinite()):
        return angles[0]
    flat = (taps / largest.clamp(min=torch.finfo(largest.dtype).tiny)).flatten(1)  # or squares would overflow
    waves = torch.stack([angles.cos(), -angles.sin()], dim=1).to(flat)  # (frequency, [re, im], tap)
    best, found = -math.inf, 0
    few = max(1, (CACHED if kernel.device.type == "cpu" else 64 * CACHED) // (2 * flat.shape[1]))
    for start in range(0, len(waves), few):
        part = waves[start : start + few]
        stacked = (part.flatten(0, 1) @ flat).view(len(part), -1, n)  # real parts above imaginary ones
        log_bound, place = largest_above(best, stacked, iterations)
        if log_bound > best:
            best, found = log_bound, start + place
    return angles[found]


def largest_above(best: float, stacked: Tensor, iterations: int) -> tuple[float, int]:
    """The largest log of the bounds of some blocks, and whose it is; minus infinity if all are below ``best``."""
    n, left = stacked.shape[2], torch.arange(len(stacked), device=stacked.device)
    log_bound = stacked.new_zeros(len(stacked))
    for k in range(iterations + 1):
        size = torch.linalg.vector_norm(stacked.flatten(1), dim=1)
        log_bound = log_bound + size.clamp(min=torch.finfo(size.dtype).tiny).log() / 2**k
        # ||G||_F is at most sqrt(n) ||G||_2; and bounds only fall.
        kept = log_bound >= max(best, float(log_bound.max()) - math.log(n) / 2 ** (k + 1))
        left, log_bound, size, stacked = left[kept], log_bound[kept], size[kept], stacked[kept]
        if not len(left):
            return -math.inf, 0
        if k < iterations:
            stacked = gram_matrices(stacked / torch.where(size == 0, 1.0, size)[:, None, None])
    top = int(log_bound.argmax())
    return float(log_bound[top]), int(left[top])


def tap_angles(kernel: Tensor, grid: tuple[int, ...]) -> Tensor:
    """2 pi (frequency times tap) over the grid: (frequency, tap), on the CPU: not every device has float64.

    Half of the columns are enough, since the kernel is real and the others have the conjugate blocks.
    """
    along = [
        (torch.arange(count)[:, None] * torch.arange(k) % n).double() / n
        for count, n, k in zip((grid[0], grid[1] // 2 + 1), grid, kernel.shape[2:], strict=True)
    ]
    turns = along[0][:, None, :, None] + along[1][None, :, None, :]
    return 2 * math.pi * turns.reshape(-1, kernel.shape[2] * kernel.shape[3])


def gram_matrices(stacked: Tensor) -> Tensor:
    """(A + i B)^H (A + i B) of the (count, [A, B], n) matrices, stacked again.

    By real products, which are many times faster in batches.
    """
    real, imaginary = stacked.chunk(2, dim=1)
    cross = real.mT @ imaginary
    return torch.cat([stacked.mT @ stacked, cross - cross.mT], dim=1)

"""Upper bounds of the operator norms of matrices and of convolutions on images of a given size.

B. Delattre, Q. Barthelemy, A. Araujo, A. Allauzen, "Efficient bound of Lipschitz constant for convolutional layers by
Gram iteration" (2023).
"""

import math

import torch
from torch import Tensor

from equipoise.options import require_number

ITERATIONS = 6  # of Gram iteration: bounds are then tight within a factor n^(1/128)
FREQUENCIES = 20  # per tap of a kernel but the first, at which the norms of its blocks are compared
CACHED = 2**20  # numbers that fit into a processor's cache


def operator_norm_bound(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Return an upper bound of the largest singular value of (..., m, n) matrices.

    Gram iteration: ||A||_2 = ||A^H A||_2^(1/2) = ... <= ||G_k||_F^(1/2^k), tight within n^(1/2^(iterations+1)). Unlike
    power iteration it is never below the norm; it is deterministic and differentiable.

    Reference: theorem 2 of the paper above.
    """
    require_number("iterations", iterations, at_least=0, whole=True)
    if not isinstance(matrix, Tensor) or matrix.dim() < 2:
        raise ValueError(f"matrix is {described(matrix)}; it must be a tensor of (..., rows, columns).")
    gram = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mH
    largest = gram.abs().amax(dim=(-2, -1))
    scale = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    gram = gram / scale[..., None, None]
    log_bound = scale.log()
    for k in range(iterations):
        # Rescaled at every step to avoid overflow; the scales are collected in the logarithm.
        size = torch.where(largest == 0, 1.0, frobenius(gram))
        log_bound = log_bound + size.log() / 2**k
        gram = gram / size[..., None, None]
        gram = gram.mH @ gram
    size = torch.where(largest == 0, 1.0, frobenius(gram))
    # Of the sums above, which must not break the bound; products of equal numbers are all rounded the same way.
    rounding = 1 + (32 + max(matrix.shape[-2:])) * torch.finfo(log_bound.dtype).eps
    bound = rounding * (log_bound + size.log() / 2**iterations).exp()
    return torch.where(largest == 0, 0.0, bound)


def described(given: object) -> str:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)


def frobenius(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm. Torch's has an error of 1e-3 for large matrices, and is slow on complex numbers."""
    squares = torch.view_as_real(matrix).flatten(-2).square() if matrix.is_complex() else matrix.square()
    return squares.sum(dim=(-2, -1)).clamp_min(torch.finfo(squares.dtype).tiny).sqrt()  # 0 has a derivative too


def conv2d_norm_bound(
    kernel: Tensor, size: tuple[int, int], iterations: int = ITERATIONS, angles: Tensor | None = None
) -> Tensor:
    """Return an upper bound of the operator norm of a stride-1 convolution on zero-padded images.

    The convolution is a restriction of the circular one on a grid enlarged by the kernel, which the DFT
    block-diagonalises: its norm is at most that of the largest block. On large images, blocks on a coarser grid are
    enough (:func:`frequency_grid`).

    Args:
        kernel: tensor of shape (out, in, height, width).
        size: height and width of the images.
        iterations: number of iterations of :func:`operator_norm_bound`.
        angles: angles of the largest block, if known: the result of :func:`largest_block` for this kernel.
    """
    if not isinstance(kernel, Tensor) or kernel.dim() != 4:
        raise ValueError(f"kernel is {described(kernel)}; it must be a tensor of (out, in, height, width).")
    if not isinstance(size, tuple | list) or len(size) != 2 or not all(isinstance(n, int | torch.SymInt) for n in size):
        raise ValueError(f"size is {size!r}; it must be (height, width) of the images, whole numbers.")
    grid, slack = frequency_grid(kernel, size)
    angles = largest_block(kernel, grid, iterations) if angles is None else angles
    return slack * operator_norm_bound(block(kernel, angles), iterations)


def frequency_grid(kernel: Tensor, size: tuple[int, int]) -> tuple[tuple[int, ...], float]:
    """Return the size of the frequency grid, and the factor by which norms off the grid may exceed those on it.

    The block at frequency w is the sum of the kernel's k taps times exp(-i w t), so <u, block v> is a trigonometric
    polynomial of degree (k - 1) / 2 up to a phase. By a lemma of M. Riesz it falls from its maximum M no faster than
    M cos((k - 1) / 2 times the distance), and one of n frequencies is within pi / n of the maximum: no norm exceeds the
    largest on the grid by more than 1 / cos(pi (k - 1) / 2n) per direction (H. Ehlich, K. Zeller, 1964). With
    n = ``FREQUENCIES`` (k - 1) that is 0.6 % for both directions together.
    """
    counts, slack = [], 1.0
    for n, k in zip(size, kernel.shape[2:], strict=True):
        exact, enough = n + k - 1, max(1, FREQUENCIES * (k - 1))
        counts.append(min(exact, enough))
        slack /= 1.0 if exact <= enough else math.cos(math.pi * (k - 1) / (2 * enough))
    return tuple(counts), slack


def block(kernel: Tensor, angles: Tensor) -> Tensor:
    """Return the (out, in) complex matrix of the frequency at which the kernel's taps have these angles."""
    taps = kernel.flatten(2)
    return torch.complex(taps @ angles.cos().to(kernel), taps @ -angles.sin().to(kernel))


@torch.no_grad()
def largest_block(kernel: Tensor, grid: tuple[int, ...], iterations: int = ITERATIONS) -> Tensor:
    """Return the angles of the taps at the grid frequency whose block B bounds the norms of all others.

    Its :func:`operator_norm_bound` b is at least every block's norm. Most blocks only need the proof of that: a
    Cholesky factorisation of b^2 I - B^H B, several times cheaper than a bound of their own. Blocks without that proof
    get a bound, and the largest is the new b. Frequencies are processed a few at a time, to stay in the cache, and the
    first few are spread over the grid.
    """
    angles = tap_angles(kernel, grid)
    taps = kernel.flatten(2).permute(2, 0, 1)
    taps = taps if taps.shape[1] >= taps.shape[2] else taps.mT
    n, largest = taps.shape[2], taps.abs().max()
    if not bool(largest.isfinite()):
        return angles[0]
    taps = taps / largest.clamp(min=torch.finfo(largest.dtype).tiny)  # so that squares do not overflow
    flat = taps.flatten(1)
    waves = torch.stack([angles.cos(), -angles.sin()], dim=1).to(flat)  # (frequency, [re, im], tap)
    rounding = 1 - 8 * n * torch.finfo(flat.dtype).eps  # of the sums in a factorisation
    best, winner = -math.inf, 0
    few = max(1, (CACHED if kernel.device.type == "cpu" else 64 * CACHED) // (2 * flat.shape[1]))
    strides = -(-len(waves) // few)
    series = gram_series(taps.unflatten(0, kernel.shape[2:]), angles) if strides > 1 else None
    for start in range(strides):
        left = torch.arange(start, len(waves), strides, device=flat.device)
        if start and series:
            even, odd, cos, sin = series
            rest = torch.complex(-(cos[left] @ even), -(sin[left] @ odd)).view(-1, n, n)  # b^2 I - B^H B
            rest.diagonal(dim1=-2, dim2=-1).add_(rounding * math.exp(2 * best))
            left = left[torch.linalg.cholesky_ex(rest).info != 0]
        if len(left):
            stacked = (waves[left].flatten(0, 1) @ flat).view(len(left), -1, n)  # real parts above imaginary ones
            log_bound, place = largest_above(best, stacked, iterations)
            if log_bound > best:
                best, winner = log_bound, int(left[place])
    return angles[winner]


def gram_series(taps: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E, O, c and s: at frequency w, B^H B of a kernel's block B is c[w] @ E + i s[w] @ O, each n x n flattened.

    It is the Fourier series sum_d C_d exp(i w d) of the products C_d = sum_t K_{t+d}^T K_t of (height, width, m, n)
    taps d apart, and C_{-d} is the transpose of C_d.
    """
    height, width, _, n = taps.shape
    even, odd, apart = [], [], []
    for down in range(height):
        for right in range(1 - width if down else 0, width):
            later = taps[down:, max(right, 0) : width + min(right, 0)].reshape(-1, n)
            earlier = taps[: height - down, max(-right, 0) : width + min(-right, 0)].reshape(-1, n)
            product = later.mT @ earlier
            central = not (down or right)
            even.append(product if central else product + product.mT)
            odd.append(product - product.mT)
            apart.append((down * width + max(right, 0), max(-right, 0)))  # two taps that are d apart
    here, there = torch.tensor(apart, device=angles.device).unbind(dim=1)
    turned = angles[:, here] - angles[:, there]
    even_sums, odd_sums = torch.stack(even).flatten(1), torch.stack(odd).flatten(1)
    return even_sums, odd_sums, turned.cos().to(taps), turned.sin().to(taps)


def largest_above(best: float, stacked: Tensor, iterations: int) -> tuple[float, int]:
    """Return the largest log bound of some blocks and its index; minus infinity if all are below ``best``."""
    n, left = stacked.shape[2], torch.arange(len(stacked), device=stacked.device)
    log_bound = stacked.new_zeros(len(stacked))
    for k in range(iterations + 1):
        size = torch.linalg.vector_norm(stacked.flatten(1), dim=1)
        log_bound = log_bound + size.clamp(min=torch.finfo(size.dtype).tiny).log() / 2**k
        # ||G||_F is at most sqrt(n) ||G||_2, and bounds only decrease.
        kept = log_bound >= max(best, float(log_bound.max()) - math.log(n) / 2 ** (k + 1))
        left, log_bound, size, stacked = left[kept], log_bound[kept], size[kept], stacked[kept]
        if not len(left):
            return -math.inf, 0
        if k < iterations:
            stacked = gram_matrices(stacked / torch.where(size == 0, 1.0, size)[:, None, None])
    top = int(log_bound.argmax())
    return float(log_bound[top]), int(left[top])


def tap_angles(kernel: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return 2 pi (frequency x tap) / grid as (frequency, tap), on the CPU: not every device has float64.

    Half of the columns are enough: the kernel is real, so the others have conjugate blocks.
    """
    along = [
        (torch.arange(count)[:, None] * torch.arange(k) % n).double() / n
        for count, n, k in zip((grid[0], grid[1] // 2 + 1), grid, kernel.shape[2:], strict=True)
    ]
    turns = along[0][:, None, :, None] + along[1][None, :, None, :]
    return 2 * math.pi * turns.reshape(-1, kernel.shape[2] * kernel.shape[3])


def gram_matrices(stacked: Tensor) -> Tensor:
    """Return (A + i B)^H (A + i B) of (count, [A, B], n) matrices, stacked likewise; real products are faster."""
    real, imaginary = stacked.chunk(2, dim=1)
    cross = real.mT @ imaginary
    return torch.cat([stacked.mT @ stacked, cross - cross.mT], dim=1)

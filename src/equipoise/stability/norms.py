"""Upper bounds of the operator norms of matrices and of convolutions on images of a given size.

B. Delattre, Q. Barthelemy, A. Araujo, A. Allauzen, "Efficient bound of Lipschitz constant for convolutional layers by
Gram iteration" (2023).
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise.options import require_number

ITERATIONS = 6  # of Gram iteration: bounds are then tight within a factor n^(1/128)
FREQUENCIES = 20  # per tap of a kernel but the first, at which the norms of its blocks are compared
FEW = 4  # the same, for an upper bound that need not be tight
KEPT = 32  # frequencies that are remembered, to find the largest block of a changed kernel among them
LONGEST_WAIT = 15  # searches of a fast-changing kernel until it is tried again whether that pays
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
    rounding = 1 + 32 * torch.finfo(log_bound.dtype).eps  # of the sums above, which must not break the bound
    bound = rounding * (log_bound + size.log() / 2**iterations).exp()
    return torch.where(largest == 0, 0.0, bound)


def described(given: object) -> str:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)


def frobenius(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm, computed on real numbers: torch's is forty times slower on complex ones."""
    return torch.linalg.matrix_norm(torch.view_as_real(matrix).flatten(-2) if matrix.is_complex() else matrix)


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


def frequency_grid(kernel: Tensor, size: tuple[int, int], per_tap: int = 0) -> tuple[tuple[int, ...], float]:
    """Return the size of the frequency grid, and the factor by which norms off the grid may exceed those on it.

    The block at frequency w is the sum of the kernel's k taps times exp(-i w t), so <u, block v> is a trigonometric
    polynomial of degree (k - 1) / 2 up to a phase. By a lemma of M. Riesz it falls from its maximum M no faster than
    M cos((k - 1) / 2 times the distance), and one of n frequencies is within pi / n of the maximum: no norm exceeds the
    largest on the grid by more than 1 / cos(pi (k - 1) / 2n) per direction (H. Ehlich, K. Zeller, 1964). With
    n = ``FREQUENCIES`` (k - 1) that is 0.6 % for both directions together. The same holds for every Schatten norm.
    """
    counts, slack = [], 1.0
    for n, k in zip(size, kernel.shape[2:], strict=True):
        exact, enough = n + k - 1, max(1, (per_tap or FREQUENCIES) * (k - 1))
        counts.append(min(exact, enough))
        slack /= 1.0 if exact <= enough else math.cos(math.pi * (k - 1) / (2 * enough))
    return tuple(counts), slack


def block(kernel: Tensor, angles: Tensor) -> Tensor:
    """Return the (..., out, in) complex matrices of the frequencies at which the kernel's taps have these angles."""
    taps, waves = kernel.flatten(2), angles.mT if angles.dim() == 2 else angles
    matrices = torch.complex(taps @ waves.cos().to(kernel), taps @ -waves.sin().to(kernel))
    return matrices.movedim(-1, 0) if angles.dim() == 2 else matrices


def largest_block(kernel: Tensor, grid: tuple[int, ...], iterations: int = ITERATIONS) -> Tensor:
    """Return the angles of the taps at the grid frequency with the largest :func:`operator_norm_bound`."""
    angles = tap_angles(kernel, grid)
    return angles[rank_blocks(kernel, angles, 1, iterations)[0][0]]


@dataclass
class LargestBlocks:
    """The grid frequencies at which the blocks of a kernel are largest: enough to find that of a similar kernel.

    The bounds of :func:`operator_norm_bound` are Schatten norms. By the triangle inequality, that of a block moves by
    at most the norm of its change. While this is at most half of ``margin`` for every frequency, the largest block of
    a changed kernel is among these, and the search among them gives the result of the search among all.
    """

    kernel: Tensor
    size: tuple[int, int]
    angles: Tensor  # (frequency, tap)
    margin: float  # by how much the largest bound exceeds those of all other frequencies

    @classmethod
    def search(cls, kernel: Tensor, size: tuple[int, int], count: int) -> Self:
        angles = tap_angles(kernel, frequency_grid(kernel, size)[0])
        places, margin = rank_blocks(kernel, angles, count)
        return cls(kernel.detach().clone(), size, angles[sorted(places)], margin)

    def alike(self, kernel: Tensor, size: tuple[int, int]) -> bool:
        before = self.kernel
        return self.size == size and (before.device, before.dtype) == (kernel.device, kernel.dtype)

    @torch.no_grad()
    def covers(self, kernel: Tensor) -> bool:
        """Return whether the largest block of a kernel is certainly among these frequencies."""
        change, allowed = kernel - self.kernel, 0.49 * self.margin  # half, less rounding
        if float(frobenius(change.flatten(2).permute(2, 0, 1)).sum()) <= allowed:  # of the taps, which bound their sum
            return True
        grid, slack = frequency_grid(change, self.size, FEW)
        bounds = operator_norm_bound(block(change, tap_angles(change, grid)), iterations=3)
        return allowed > 0 and slack * float(bounds.max()) <= allowed  # False for NaN

    def largest(self, kernel: Tensor) -> Tensor:
        """Return the angles of the largest block of a kernel that these frequencies cover."""
        return self.angles[rank_blocks(kernel, self.angles, 1)[0][0]]


class BlockSearch:
    """A search for the largest block of a kernel that changes from call to call; results are those of a full search.

    An unchanged kernel needs no search, and one that has changed little, as by a step of an optimizer, only one among
    a few frequencies. Kernels are compared by value, which costs little: a version counter would miss edits of
    ``.data``.
    """

    def __init__(self) -> None:
        self.last: LargestBlocks | None = None  # the last kernel and its largest block
        self.blocks: LargestBlocks | None = None
        self.wait = self.waited = 0  # searches until blocks are remembered again, since it did not pay

    def angles(self, kernel: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the angles of the largest block of a kernel."""
        last, blocks = self.last, self.blocks
        if last is not None and last.alike(kernel, size):
            if torch.equal(last.kernel, kernel):
                return last.angles[0]
            if blocks is not None and blocks.covers(kernel):
                self.wait = 0
                self.last = LargestBlocks(kernel.detach().clone(), size, blocks.largest(kernel)[None], 0.0)
                return self.last.angles[0]
            if blocks is not None and torch.equal(blocks.kernel, last.kernel):  # they did not last for one step
                self.wait, self.waited = min(2 * self.wait + 1, LONGEST_WAIT), 0
        self.waited += 1
        self.blocks = LargestBlocks.search(kernel, size, KEPT) if self.waited > self.wait else None
        found = self.blocks.largest(kernel)[None] if self.blocks else LargestBlocks.search(kernel, size, 1).angles
        self.last = LargestBlocks(kernel.detach().clone(), size, found, 0.0)
        return found[0]


@torch.no_grad()
def rank_blocks(kernel: Tensor, angles: Tensor, count: int, iterations: int = ITERATIONS) -> tuple[list[int], float]:
    """Return the ``count`` frequencies with the largest bounds, the largest first, and their margin over all others.

    The margin is the difference between the largest bound and an upper bound of those not returned. A frequency drops
    out as soon as its upper bound is below the lower bounds of ``count`` others. Frequencies are processed a few at a
    time, to stay in the cache.
    """
    taps = kernel.flatten(2).permute(2, 0, 1)
    taps = taps if taps.shape[1] >= taps.shape[2] else taps.mT
    n, scale = taps.shape[2], taps.abs().max()
    if not bool(scale.isfinite()):
        return [0], -math.inf
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)
    flat = (taps / scale).flatten(1)  # so that squares do not overflow
    waves = torch.stack([angles.cos(), -angles.sin()], dim=1).to(flat)  # (frequency, [re, im], tap)
    top, others = torch.empty(0, 2, dtype=torch.float64), -math.inf  # log bounds and frequencies; bound of the others
    few = max(1, (CACHED if kernel.device.type == "cpu" else 64 * CACHED) // (2 * flat.shape[1]))
    for start in range(0, len(waves), few):
        part = waves[start : start + few]
        stacked = (part.flatten(0, 1) @ flat).view(len(part), -1, n)  # real parts above imaginary ones
        found, dropped = bounds_above(top[:, 0], stacked, count, iterations)
        found[:, 1] += start
        top = torch.cat([top, found])
        top = top[top[:, 0].argsort(descending=True, stable=True)]
        others = max(others, dropped, *top[count:, 0].tolist())
        top = top[:count]
    margin = (float(top[0, 0].exp()) - math.exp(others)) * float(scale)
    return [int(place) for place in top[:, 1]], margin


def bounds_above(known: Tensor, stacked: Tensor, count: int, iterations: int) -> tuple[Tensor, float]:
    """Return log bounds and indices of the blocks that may be among the ``count`` largest beside the ``known`` ones.

    Also returns an upper bound of the log bounds of those that are not.
    """
    n, left, dropped = stacked.shape[2], torch.arange(len(stacked), device=stacked.device), -math.inf
    log_bound = stacked.new_zeros(len(stacked))
    for k in range(iterations + 1):
        size = torch.linalg.vector_norm(stacked.flatten(1), dim=1)
        log_bound = log_bound + size.clamp(min=torch.finfo(size.dtype).tiny).log() / 2**k
        # ||G||_F is at most sqrt(n) ||G||_2, and bounds only decrease.
        lower = torch.cat([known, log_bound.double().cpu() - math.log(n) / 2 ** (k + 1)])
        if len(lower) > count:
            kept = log_bound >= float(lower.topk(count).values[-1])
            if not bool(kept.all()):
                dropped = max(dropped, float(log_bound[~kept].max()))
                left, log_bound, size, stacked = left[kept], log_bound[kept], size[kept], stacked[kept]
        if not len(left):
            break
        if k < iterations:
            stacked = gram_matrices(stacked / torch.where(size == 0, 1.0, size)[:, None, None])
    return torch.stack([log_bound.double().cpu(), left.double().cpu()], dim=1), dropped


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

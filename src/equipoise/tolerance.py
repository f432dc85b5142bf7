"""When a sample is solved: per-sample residual norms against an absolute and a relative tolerance."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.options import options, require


@options
class Tolerance:
    """Each sample stops once ||f(z) - z||_2 <= absolute + relative * ||f(z)||_2, or after ``max_steps``.

    Args:
        relative: bound on the residual relative to the image f(z).
        absolute: bound on the residual itself.
        max_steps: evaluations of the residual allowed, the first one (at z0) included.
        patience: a sample whose lowest residual has not fallen by 1% in so many steps has STALLED and stops;
            None never gives up early.

    Example:
        >>> eq.Tolerance(relative=1e-6, max_steps=200)
    """

    relative: float = 1e-4
    absolute: float = 0.0
    max_steps: int = 50
    patience: int | None = 30

    def __post_init__(self) -> None:
        require(self, "relative", at_least=0.0)
        require(self, "absolute", at_least=0.0)
        require(self, "max_steps", at_least=1, whole=True)
        require(self, "patience", at_least=1, whole=True, optional=True)

    def reached(self, residual: Tensor, scale: Tensor, unit: Tensor | float = 1.0) -> Tensor:
        """Return which samples, by ``residual`` = ||f(z) - z|| and ``scale`` = ||f(z)||, are done. NaN is never done.

        Args:
            residual, scale: norms, one per sample, in units of ``unit``.
            unit: what 1 stands for, one per sample (:mod:`equipoise.problem.rescaled`).
        """
        bound = self.relative * scale
        return residual <= (bound + self.absolute / unit if self.absolute else bound)


def relative_residual(residual: Tensor, scale: Tensor) -> Tensor:
    """Return ||f(z) - z|| / ||f(z)||, 0 where both are 0 and finite wherever both are."""
    limits = torch.finfo(scale.dtype)
    return (residual / scale.clamp(min=limits.tiny)).clamp_(max=limits.max)


def residual_at(z: Tensor, image: Tensor) -> Tensor:
    """Return the relative residual of every row of ``z``, whose image under f is known."""
    norms = row_distances(image, z), row_norms(image)
    if not squares_fit(*norms):
        unit = powers_of_two(torch.maximum(largest_entries(image), largest_entries(z)))[:, None]
        norms = scaled_row_norms(image / unit - z / unit), scaled_row_norms(image / unit)
    return relative_residual(*norms)


def squares_fit(gap: Tensor, scale: Tensor) -> bool:
    """Return whether norms of gaps and images are exact: no square that counts underflowed or overflowed."""
    if not gap.numel():
        return True
    smallest, largest = torch.aminmax(gap)  # NaN is never in range
    fits = smallest_exact_norm(gap.dtype) <= smallest.item() and largest.item() < math.inf
    return fits and scale.max().item() < math.inf


def smallest_exact_norm(dtype: torch.dtype) -> float:
    """Return the norm below which a sum of squares loses digits to underflow."""
    limits = torch.finfo(dtype)
    return math.sqrt(limits.tiny / limits.eps)


def scaled_row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row, summed in units of its largest entry: no square underflows or overflows."""
    unit = powers_of_two(largest_entries(rows))
    return row_norms(rows / unit[:, None]) * unit


def largest_entries(rows: Tensor) -> Tensor:
    """Return the largest absolute value of every row, 0 where a row is empty."""
    return rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))


def powers_of_two(sizes: Tensor) -> Tensor:
    """Return the power of two just above every size, by which division is exact; 1 for 0, NaN and infinity."""
    limits = torch.finfo(sizes.dtype)
    exponent = torch.frexp(sizes.clamp(limits.tiny, limits.max / 2)).exponent
    power = torch.ldexp(torch.ones_like(sizes), exponent)
    return torch.where(torch.isfinite(sizes) & (sizes > 0), power, 1.0)


def row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of every row of a (batch, n) matrix; inexact where squares leave the range of its numbers."""
    if columns_in_memory(rows):
        return rows.square().sum(dim=1).sqrt_()  # columns in memory, for which vector_norm is ten times slower
    return torch.linalg.vector_norm(rows, dim=1)


def row_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the 2-norm of every row of a - b; inexact where squares leave the range of its numbers."""
    if columns_in_memory(a):
        return F.mse_loss(a, b, reduction="none").sum(dim=1).sqrt_()  # their squared difference, in one pass
    return row_norms(a - b)


def columns_in_memory(rows: Tensor) -> bool:
    return rows.shape[0] > 1 and rows.stride(0) == 1 and not rows.is_contiguous()

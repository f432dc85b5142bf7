"""When a sample is solved: per-sample residual norms against an absolute and a relative tolerance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.validation import options, require


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

    def reached(self, residual: Tensor, scale: Tensor) -> Tensor:
        """Which samples, by ``residual`` = ||f(z) - z|| and ``scale`` = ||f(z)||, are done. NaN is never done."""
        bound = self.relative * scale
        return residual <= (bound + self.absolute if self.absolute else bound)


def relative_residual(residual: Tensor, scale: Tensor) -> Tensor:
    """||f(z) - z|| / ||f(z)||, 0 where both are 0 and finite wherever both are."""
    limits = torch.finfo(scale.dtype)
    return (residual / scale.clamp(min=limits.tiny)).clamp_(max=limits.max)


def row_norms(rows: Tensor) -> Tensor:
    """The 2-norm of every row of a (batch, n) matrix."""
    if columns_in_memory(rows):
        return rows.square().sum(dim=1).sqrt_()  # columns in memory, for which vector_norm is ten times slower
    return torch.linalg.vector_norm(rows, dim=1)


def row_distances(a: Tensor, b: Tensor) -> Tensor:
    """The 2-norm of every row of a - b."""
    if columns_in_memory(a):
        return F.mse_loss(a, b, reduction="none").sum(dim=1).sqrt_()  # their squared difference, in one pass
    return row_norms(a - b)


def columns_in_memory(rows: Tensor) -> bool:
    return rows.shape[0] > 1 and rows.stride(0) == 1 and not rows.is_contiguous()

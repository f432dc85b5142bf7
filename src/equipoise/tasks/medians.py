"""Medians from histograms, which add up over batches and processes as sums do."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bins:
    """Equally wide bins; values outside count in the first or last one.

    Args:
        low, high: range of the values.
        count: number of bins; a median is exact to half their width.

    Example:
        >>> DECIBELS.median(DECIBELS.counts(ratios))
    """

    low: float
    high: float
    count: int

    def counts(self, values: Tensor) -> Tensor:
        """Return the number of values in each bin; those that are NaN are left out."""
        values = values.detach().double().flatten()
        place = (values[~values.isnan()] - self.low) / (self.high - self.low) * self.count
        return torch.bincount(place.clamp(0, self.count - 1).long(), minlength=self.count)

    def median(self, counts: Tensor) -> float:
        """Return the median: the middle of its bin, or of the two in the middle of an even number; NaN if empty."""
        total, below = counts.sum().item(), counts.double().cumsum(0)
        if not total:
            return float("nan")
        middle = [int((below > position).int().argmax()) for position in ((total - 1) // 2, total // 2)]
        return self.low + (sum(middle) / 2 + 0.5) * (self.high - self.low) / self.count


DECIBELS = Bins(0.0, 100.0, 5000)
SIMILARITY = Bins(-1.0, 1.0, 4000)

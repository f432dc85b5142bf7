"""The Fréchet distance between two sets of feature vectors, each described by its mean and covariance.

M. Heusel, H. Ramsauer, T. Unterthiner, B. Nessler, S. Hochreiter, "GANs trained by a two time-scale update rule
converge to a local Nash equilibrium" (2017), eq. 6, which assumes normally distributed vectors.
"""

import torch
from torch import Tensor


class FeatureStatistics:
    """Mean and covariance of feature vectors, accumulated over batches in float64.

    Batches are merged around their own means (Chan, Golub and LeVeque, 1979), so features far from 0 lose no digits.

    Example:
        >>> statistics = FeatureStatistics()
        >>> for batch in batches:
        ...     statistics.add(network.features(batch))
        >>> statistics.mean, statistics.covariance()
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)  # sum of (x - mean) (x - mean)^T

    def add(self, features: Tensor) -> None:
        """Add a batch.

        Args:
            features: (batch, number of features), finite.
        """
        wanted = f"(batch, {len(self.mean) or 'features'})"
        if features.dim() != 2 or 0 in features.shape or len(self.mean) not in (0, features.shape[1]):
            raise ValueError(f"features have shape {tuple(features.shape)}; it must be {wanted}.")
        rows = features.detach().double().cpu()
        if not rows.isfinite().all():
            raise ValueError("features contain NaN or infinity; check the images that they are computed from.")
        if not self.count:
            self.mean, self.scatter = rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1], rows.shape[1])
        own, total = rows.mean(dim=0), self.count + len(rows)
        centered, apart = rows - own, own - self.mean
        self.scatter += centered.T @ centered + torch.outer(apart, apart) * (self.count * len(rows) / total)
        self.mean += apart * (len(rows) / total)
        self.count = total

    def covariance(self) -> Tensor:
        """Return the unbiased covariance; it needs at least two vectors."""
        if self.count < 2:
            raise ValueError(f"the covariance needs at least 2 feature vectors, got {self.count}.")
        return self.scatter / (self.count - 1)


def statistics_of(features: Tensor) -> FeatureStatistics:
    """Return the statistics of feature vectors, (samples, number of features)."""
    statistics = FeatureStatistics()
    statistics.add(features)
    return statistics


def frechet_distance(first: FeatureStatistics, second: FeatureStatistics) -> float:
    """Return ||m1 - m2||^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the squared Fréchet distance, at least 0.

    The trace of (C1 C2)^(1/2) is the sum of the singular values of C1^(1/2) C2^(1/2). Unlike a square root of the
    product, which need not be symmetric, this is real and accurate for singular covariances too.

    Args:
        first, second: statistics of at least two vectors each, of the same number of features.

    Example:
        >>> frechet_distance(statistics_of(torch.randn(500, 8)), statistics_of(torch.randn(500, 8) + 1))
    """
    if first.count and second.count and len(first.mean) != len(second.mean):
        raise ValueError(f"the numbers of features differ: {len(first.mean)} and {len(second.mean)}.")
    one, two = first.covariance(), second.covariance()
    shared = torch.linalg.svdvals(square_root(one) @ square_root(two)).sum()
    distance = (first.mean - second.mean).square().sum() + one.trace() + two.trace() - 2 * shared
    return max(0.0, distance.item())  # rounding can make it slightly negative


def square_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a symmetric positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    floor = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)  # smaller ones are rounding errors
    roots = torch.where(values > floor, values, 0).sqrt()
    return (vectors * roots) @ vectors.T

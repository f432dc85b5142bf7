"""The Fréchet distance against closed forms and scipy's matrix square root."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from equipoise.tasks.frechet import FeatureStatistics, frechet_distance, square_root, statistics_of


def vectors(samples, features, seed=0, scale=1.0, shift=0.0):
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=random, dtype=torch.float64)
    return scale * torch.randn(samples, features, generator=random, dtype=torch.float64) @ mix + shift


def with_moments(mean, covariance, count=100):
    """Statistics with this mean and covariance."""
    statistics = FeatureStatistics()
    statistics.count, statistics.mean, statistics.scatter = count, mean.double(), covariance.double() * (count - 1)
    return statistics


def by_scipy(first, second):
    """The definition, with a general square root of the product."""
    one, two = (np.cov(rows.numpy(), rowvar=False) for rows in (first, second))
    apart = (first.mean(0) - second.mean(0)).square().sum().item()
    return apart + np.trace(one + two - 2 * sqrtm(one @ two).real)


@pytest.mark.parametrize("features", [2, 7, 40])
def test_agrees_with_the_square_root_of_the_product(features):
    first, second = vectors(200, features), vectors(150, features, seed=1, scale=2.0, shift=3.0)
    found = frechet_distance(statistics_of(first), statistics_of(second))
    assert found == pytest.approx(by_scipy(first, second), rel=1e-9)


def test_diagonal_covariances_have_a_closed_form():
    means, variances = torch.randn(2, 6).double(), torch.rand(2, 6).double()
    variances[0, 0] = variances[1, 1] = 0  # singular
    stats = [with_moments(mean, variance.diag()) for mean, variance in zip(means, variances, strict=True)]
    expected = (means[0] - means[1]).square().sum() + (variances[0].sqrt() - variances[1].sqrt()).square().sum()
    assert frechet_distance(*stats) == pytest.approx(expected.item(), rel=1e-12)


def test_is_symmetric_and_zero_for_the_same_set():
    first, second = statistics_of(vectors(50, 9)), statistics_of(vectors(80, 9, seed=1))
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-12)
    for few in (first, statistics_of(vectors(5, 30))):  # 5 vectors: a covariance of rank 4
        assert 0 <= frechet_distance(few, few) <= 1e-10 * few.covariance().trace().item()


def test_fewer_vectors_than_features():
    """Distinct singular covariances: the nonzero part lies in the span of the vectors."""
    first, second = vectors(6, 40), vectors(9, 40, seed=1)
    found = frechet_distance(statistics_of(first), statistics_of(second))
    centered = [(rows - rows.mean(0)) / (len(rows) - 1) ** 0.5 for rows in (first, second)]
    shared = torch.linalg.svdvals(centered[0] @ centered[1].T).sum()  # C = A^T A without any square root
    apart = (first.mean(0) - second.mean(0)).square().sum()
    expected = apart + sum(rows.square().sum() for rows in centered) - 2 * shared
    assert found == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (30, 1, 69), (50, 50)])
def test_batches_add_up_even_far_from_zero(sizes):
    rows = vectors(100, 5) + 1e6
    statistics = FeatureStatistics()
    for batch in rows.split(sizes):
        statistics.add(batch)
    assert statistics.count == 100
    torch.testing.assert_close(statistics.mean, rows.mean(0), rtol=1e-14, atol=0)
    expected = torch.from_numpy(np.cov(rows.numpy(), rowvar=False))
    torch.testing.assert_close(statistics.covariance(), expected, rtol=1e-7, atol=1e-7)


def test_float32_features_are_summed_in_float64():
    assert statistics_of(torch.rand(10, 3)).covariance().dtype == torch.float64


def test_square_root_squares_to_the_matrix():
    matrix = statistics_of(vectors(100, 12)).covariance()
    root = square_root(matrix)
    torch.testing.assert_close(root @ root, matrix)
    torch.testing.assert_close(root, root.T)


def test_wrong_features_get_a_sentence():
    statistics = statistics_of(torch.rand(4, 3))
    for shape, wanted in (((3,), "(batch, 3)"), ((2, 4), "(batch, 3)"), ((0, 3), "(batch, 3)")):
        with pytest.raises(ValueError, match="features have shape") as error:
            statistics.add(torch.zeros(shape))
        assert wanted in str(error.value)
    with pytest.raises(ValueError, match="features contain NaN or infinity"):
        statistics.add(torch.full((2, 3), torch.nan))
    assert statistics.count == 4  # unchanged
    with pytest.raises(ValueError, match="the numbers of features differ: 3 and 5"):
        frechet_distance(statistics, statistics_of(torch.rand(4, 5)))
    for few in (FeatureStatistics(), statistics_of(torch.rand(1, 3))):
        with pytest.raises(ValueError, match=f"needs at least 2 feature vectors, got {few.count}"):
            frechet_distance(statistics, few)

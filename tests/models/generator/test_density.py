"""Densities of latent vectors: samples of a known distribution, sizes, and what is rejected."""

import pytest
import torch

from equipoise.models.generator.density import DensitySize, LatentDensity, fit_density


def two_clusters(n=600):
    """Two thirds of the points near (4, 0, 0, 0), one third near (-4, 0, 0, 0) with another spread."""
    draws = torch.Generator().manual_seed(0)
    points = torch.randn(n, 4, generator=draws) * torch.tensor([0.3, 1.0, 0.5, 0.1])
    left = torch.arange(n) % 3 == 0
    points[:, 0] += torch.where(left, -4.0, 4.0)
    return points


@pytest.fixture(scope="module")
def fitted():
    return fit_density(two_clusters(), width=64, lr=1e-3, epochs=150)


def test_samples_have_the_distribution_of_the_latent_vectors(fitted):
    truth, drawn = two_clusters(), fitted.sample(4000, torch.Generator().manual_seed(1))
    assert drawn.shape == (4000, 4)
    assert (drawn[:, 0] < 0).float().mean().item() == pytest.approx(1 / 3, abs=0.05)
    for sign in (-1, 1):
        mine, theirs = (x[x[:, 0] * sign > 0] for x in (drawn, truth))
        assert (mine.mean(0) - theirs.mean(0)).abs().max() < 0.25
        assert ((mine.std(0) / theirs.std(0)) - 1)[1:].abs().max() < 0.2
        assert mine[:, 0].std() < 1  # 0.3 for the points; codes of both clusters are decoded by one smooth map
    assert (drawn[:, 0].abs() < 2).float().mean() < 0.02  # between the clusters there is nothing


def test_few_latent_vectors_choose_their_mixture(fitted):
    assert fitted.size.code == 4
    assert fitted.size.components > 1


def test_seeds_decide(fitted):
    first, second, third = (fitted.sample(5, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_many_latent_vectors_get_the_published_mixture():
    density = fit_density(torch.randn(20 * 10 * 3, 1), width=8, epochs=1)
    assert density.size == DensitySize(latent=1, code=3, width=8, components=20, diagonal=False)


@pytest.mark.parametrize("diagonal", [False, True])
def test_samples_of_a_known_mixture(diagonal):
    """With a decoder that passes codes on, samples have the means and covariances of the mixture."""
    density = LatentDensity(DensitySize(latent=2, code=2, width=4, depth=1, components=1, diagonal=diagonal))
    density.decoder = torch.nn.Sequential()
    density.center, density.scale = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.5])
    density.means = torch.tensor([[3.0, -1.0]])
    factor = torch.tensor([0.5, 1.5]) if diagonal else torch.tensor([[0.5, 0.0], [1.0, 1.5]])
    density.factors = factor[None]
    drawn = density.sample(200_000, torch.Generator().manual_seed(0))
    matrix = torch.diag(density.scale) @ (torch.diag(factor) if diagonal else factor)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([7.0, 1.5]), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), matrix @ matrix.T, atol=0.03, rtol=0.02)


def test_too_few_latent_vectors_are_rejected():
    with pytest.raises(ValueError, match="latents has 19 rows; it must have at least 20, one per latent vector"):
        fit_density(torch.randn(19, 3))

"""Diagonal Gaussians against torch.distributions."""

import torch
from torch.distributions import Normal, kl_divergence

from equipoise.models.parts.gaussians import divergence, draw


def gaussians():
    draws = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 5, 4, generator=draws, dtype=torch.float64)).unbind()


def test_divergence_is_that_of_torch():
    mean, log_variance = gaussians()
    expected = kl_divergence(Normal(mean, log_variance.exp().sqrt()), Normal(torch.zeros_like(mean), 1.0)).sum(dim=1)
    torch.testing.assert_close(divergence(mean, log_variance), expected)
    assert divergence(torch.zeros(2, 4), torch.zeros(2, 4)).tolist() == [0, 0]


def test_draws_have_the_mean_and_variance_asked_for():
    mean, log_variance = (part[:1].expand(200_000, -1) / 3 for part in gaussians())
    torch.manual_seed(0)
    drawn = draw(mean, log_variance)
    torch.testing.assert_close(drawn.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.var(0), log_variance[0].exp(), atol=0, rtol=0.02)


def test_draws_are_differentiable():
    mean, log_variance = (part.requires_grad_() for part in gaussians())
    torch.manual_seed(0)
    noise = torch.randn_like(mean)
    torch.manual_seed(0)
    slopes = torch.autograd.grad(draw(mean, log_variance).sum(), (mean, log_variance))
    torch.testing.assert_close(slopes[0], torch.ones_like(mean))
    torch.testing.assert_close(slopes[1], noise * (log_variance / 2).exp().detach() / 2)

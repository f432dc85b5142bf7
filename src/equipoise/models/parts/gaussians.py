"""Gaussians with a diagonal covariance, given by their means and the logarithms of their variances."""

import torch
from torch import Tensor


def draw(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Draw from Gaussians, differentiably in their parameters (D. P. Kingma, M. Welling 2013, section 2.4)."""
    return mean + torch.randn_like(mean) * (log_variance / 2).exp()


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(N(mean, variance) || N(0, I)) of each sample, (batch,) (Kingma and Welling 2013, appendix B)."""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2

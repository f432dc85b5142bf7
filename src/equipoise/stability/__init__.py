"""Keeping an equilibrium solvable: how contractive f is, bounds that make it so, dropout that fits."""

from equipoise.stability.layers import SpectralNorm, VariationalDropout, WeightNorm
from equipoise.stability.measures import jacobian_penalty, spectral_radius

__all__ = ["SpectralNorm", "VariationalDropout", "WeightNorm", "jacobian_penalty", "spectral_radius"]

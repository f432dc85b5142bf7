"""Keep an equilibrium solvable: measures of how contractive f is, layers of bounded norm, dropout fixed per solve."""

from equipoise.stability.layers import SpectralNorm, VariationalDropout, WeightNorm
from equipoise.stability.measures import jacobian_penalty, spectral_radius

__all__ = ["SpectralNorm", "VariationalDropout", "WeightNorm", "jacobian_penalty", "spectral_radius"]

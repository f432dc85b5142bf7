"""How a solution is differentiated: implicitly, through a few recorded steps, or by recording all of them."""

from equipoise.gradients.base import GradientRule
from equipoise.gradients.implicit import ImplicitGradient
from equipoise.gradients.steps import PhantomGradient, UnrolledGradient

__all__ = ["GradientRule", "ImplicitGradient", "PhantomGradient", "UnrolledGradient"]

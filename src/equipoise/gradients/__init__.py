"""How a solution is differentiated: implicitly, through recorded steps (a few, or all), or by steps run backward."""

from equipoise.gradients.base import GradientRule
from equipoise.gradients.implicit import ImplicitGradient
from equipoise.gradients.reversible import ReversibleGradient
from equipoise.gradients.steps import PhantomGradient, UnrolledGradient

__all__ = ["GradientRule", "ImplicitGradient", "PhantomGradient", "ReversibleGradient", "UnrolledGradient"]

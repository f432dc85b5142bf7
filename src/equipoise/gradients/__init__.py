"""How a solution is differentiated: implicitly, by a few recorded steps, or by recording them all."""

from equipoise.gradients.rules import GradientRule, ImplicitGradient, PhantomGradient, UnrolledGradient

__all__ = ["GradientRule", "ImplicitGradient", "PhantomGradient", "UnrolledGradient"]

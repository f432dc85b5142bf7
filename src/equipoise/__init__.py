"""equipoise: equilibrium networks in PyTorch.

A model's output is a point z* = f(z*, x) found by a solver instead of a stack of layers::

    import equipoise as eq

    layer = eq.Equilibrium(f)      # f(z, x) -> z
    y = layer(x)                   # differentiable, each sample solved to its own tolerance
"""

from equipoise.diagnose import check_gradients, compare_solvers, diagnose
from equipoise.fixed_point import Equilibrium, FixedSteps, fixed_point
from equipoise.gradients import GradientRule, ImplicitGradient, PhantomGradient, UnrolledGradient
from equipoise.problem import ImpureFunctionWarning
from equipoise.solution import ConvergenceError, ConvergenceWarning, Result, Solution, Statistics
from equipoise.solvers import GMRES, Anderson, BiCGStab, Broyden, NewtonKrylov, Picard, Progress, Solver
from equipoise.stability import SpectralNorm, VariationalDropout, WeightNorm, jacobian_penalty, spectral_radius
from equipoise.tolerance import Tolerance

__version__ = "0.1.0"

__all__ = [
    "GMRES",
    "Anderson",
    "BiCGStab",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "Equilibrium",
    "FixedSteps",
    "GradientRule",
    "ImplicitGradient",
    "ImpureFunctionWarning",
    "NewtonKrylov",
    "PhantomGradient",
    "Picard",
    "Progress",
    "Result",
    "Solution",
    "Solver",
    "SpectralNorm",
    "Statistics",
    "Tolerance",
    "UnrolledGradient",
    "VariationalDropout",
    "WeightNorm",
    "check_gradients",
    "compare_solvers",
    "diagnose",
    "fixed_point",
    "jacobian_penalty",
    "spectral_radius",
]

"""equipoise: equilibrium networks in PyTorch."""

from equipoise.fixed_point import Equilibrium, fixed_point
from equipoise.gradients import GradientRule, ImplicitGradient, PhantomGradient, UnrolledGradient
from equipoise.problem import ImpureFunctionWarning
from equipoise.solution import ConvergenceError, ConvergenceWarning, Result, Solution, Statistics
from equipoise.solvers import GMRES, Anderson, BiCGStab, Broyden, NewtonKrylov, Picard, Progress, Solver
from equipoise.tolerance import Tolerance

__version__ = "0.1.0"

"""Solvers of fixed-point problems: options, ``init`` and ``step``; the loop is in :mod:`equipoise.solvers.loop`."""

from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Progress, Solver
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.krylov import GMRES, BiCGStab
from equipoise.solvers.newton import NewtonKrylov
from equipoise.solvers.picard import Picard

__all__ = ["GMRES", "Anderson", "BiCGStab", "Broyden", "NewtonKrylov", "Picard", "Progress", "Solver"]

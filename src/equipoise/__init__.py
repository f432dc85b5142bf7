"""equipoise: equilibrium networks in PyTorch.

A model's output is a point z* = f(z*, x) found by a solver instead of a stack of layers::

    import equipoise as eq

    layer = eq.Equilibrium(f)      # f(z, x) -> z
    y = layer(x)                   # differentiable, each sample solved to its own tolerance

Models, tasks and the lab (data, recipes, training, the command ``equipoise``) are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equipoise import command_start  # noqa: F401 (first: it must be there before torch is imported)
from equipoise.diagnose import check_gradients, compare_solvers, diagnose
from equipoise.export import export
from equipoise.fixed_point import Equilibrium, FixedSteps, fixed_point, watch_solves
from equipoise.gradients import (
    GradientRule,
    ImplicitGradient,
    PhantomGradient,
    ReversibleGradient,
    UnrolledGradient,
)
from equipoise.hoist import hoist
from equipoise.problem.problem import ImpureFunctionWarning
from equipoise.solution import ConvergenceError, ConvergenceWarning, Result, Solution, Statistics
from equipoise.solvers import (
    GMRES,
    Anderson,
    BiCGStab,
    Broyden,
    NewtonKrylov,
    Picard,
    Progress,
    Solver,
)
from equipoise.stability import SpectralNorm, VariationalDropout, WeightNorm, jacobian_penalty, spectral_radius
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from equipoise import joint, lab, models, operators, tasks
    from equipoise.joint import (
        MINRES,
        AdamInput,
        AdamStep,
        AutoStep,
        Box,
        ConstantStep,
        DetachedGradient,
        EnvelopeGradient,
        Intersection,
        JointAnderson,
        JointIteration,
        KKTGradient,
        L2Ball,
        LinfBall,
        MomentumStep,
        NormalizedStep,
        Optimum,
        PGDInput,
        Sphere,
        optimize_input,
    )
    from equipoise.lab.runs.load import load
    from equipoise.lab.runs.shipped import list_weights
    from equipoise.models import create_model, list_models
    from equipoise.models.opteq.descent import FISTA, ProximalGradient
    from equipoise.operators.splitting import DouglasRachford, ForwardBackward, PeacemanRachford

__version__ = "0.1.0"

__all__ = [
    "FISTA",
    "GMRES",
    "MINRES",
    "AdamInput",
    "AdamStep",
    "Anderson",
    "AutoStep",
    "BiCGStab",
    "Box",
    "Broyden",
    "ConstantStep",
    "ConvergenceError",
    "ConvergenceWarning",
    "DetachedGradient",
    "DouglasRachford",
    "EnvelopeGradient",
    "Equilibrium",
    "FixedSteps",
    "ForwardBackward",
    "GradientRule",
    "ImplicitGradient",
    "ImpureFunctionWarning",
    "Intersection",
    "JointAnderson",
    "JointIteration",
    "KKTGradient",
    "L2Ball",
    "LinfBall",
    "MomentumStep",
    "NewtonKrylov",
    "NormalizedStep",
    "Optimum",
    "PGDInput",
    "PeacemanRachford",
    "PhantomGradient",
    "Picard",
    "Progress",
    "ProximalGradient",
    "Result",
    "ReversibleGradient",
    "Solution",
    "Solver",
    "SpectralNorm",
    "Sphere",
    "Statistics",
    "Tolerance",
    "UnrolledGradient",
    "VariationalDropout",
    "WeightNorm",
    "check_gradients",
    "compare_solvers",
    "create_model",
    "diagnose",
    "export",
    "fixed_point",
    "hoist",
    "jacobian_penalty",
    "joint",
    "lab",
    "list_models",
    "list_weights",
    "load",
    "models",
    "operators",
    "optimize_input",
    "spectral_radius",
    "tasks",
    "watch_solves",
]

JOINT = (
    "MINRES",
    "AdamInput",
    "AdamStep",
    "AutoStep",
    "Box",
    "ConstantStep",
    "DetachedGradient",
    "EnvelopeGradient",
    "Intersection",
    "JointAnderson",
    "JointIteration",
    "KKTGradient",
    "L2Ball",
    "LinfBall",
    "MomentumStep",
    "NormalizedStep",
    "Optimum",
    "PGDInput",
    "Sphere",
    "optimize_input",
)
LATER = {
    **dict.fromkeys(("DouglasRachford", "ForwardBackward", "PeacemanRachford"), "equipoise.operators.splitting"),
    **dict.fromkeys(("FISTA", "ProximalGradient"), "equipoise.models.opteq.descent"),
    **dict.fromkeys(("create_model", "list_models"), "equipoise.models"),
    **dict.fromkeys(JOINT, "equipoise.joint"),
    "list_weights": "equipoise.lab.runs.shipped",
    "load": "equipoise.lab.runs.load",
}


def __getattr__(name: str) -> Any:
    """What is loaded when first used."""
    if name in ("joint", "lab", "models", "operators", "tasks"):
        return importlib.import_module(f"equipoise.{name}")
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")

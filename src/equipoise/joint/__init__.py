"""Optimise an input through an equilibrium in one loop: :func:`optimize_input` and its options (JIIO).

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021).
"""

from equipoise.joint.anderson import JointAnderson
from equipoise.joint.constraints import Box, Constraint, L2Ball, LinfBall, Projection, Sphere
from equipoise.joint.gradients import DetachedGradient, EnvelopeGradient, JointGradient, KKTGradient
from equipoise.joint.intersection import Intersection
from equipoise.joint.iteration import JointIteration
from equipoise.joint.minres import MINRES
from equipoise.joint.optimize_input import optimize_input
from equipoise.joint.optimum import KKT, Optimum
from equipoise.joint.steps import AdamStep, AutoStep, ConstantStep, InputStep, MomentumStep, NormalizedStep
from equipoise.joint.two_loops import AdamInput, PGDInput

__all__ = [
    "KKT",
    "MINRES",
    "AdamInput",
    "AdamStep",
    "AutoStep",
    "Box",
    "ConstantStep",
    "Constraint",
    "DetachedGradient",
    "EnvelopeGradient",
    "InputStep",
    "Intersection",
    "JointAnderson",
    "JointGradient",
    "JointIteration",
    "KKTGradient",
    "L2Ball",
    "LinfBall",
    "MomentumStep",
    "NormalizedStep",
    "Optimum",
    "PGDInput",
    "Projection",
    "Sphere",
    "optimize_input",
]

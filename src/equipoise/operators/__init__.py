"""Monotone linear operators with adjoint and resolvent, proximal activations, and the equilibrium they define."""

from equipoise.operators.activations import (
    ELU,
    Arctan,
    BorderZero,
    HardTanh,
    LeakyReLU,
    ProximalActivation,
    ReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    Tanh,
    activation,
)
from equipoise.operators.convolution import MonotoneConv2d
from equipoise.operators.linear import MonotoneLinear, MonotoneOperator, Resolvent
from equipoise.operators.multitier import MonotoneMultiTier
from equipoise.operators.splitting import MonotoneProblem

__all__ = [
    "ELU",
    "Arctan",
    "BorderZero",
    "HardTanh",
    "LeakyReLU",
    "MonotoneConv2d",
    "MonotoneLinear",
    "MonotoneMultiTier",
    "MonotoneOperator",
    "MonotoneProblem",
    "ProximalActivation",
    "ReLU",
    "Resolvent",
    "Sigmoid",
    "SoftThreshold",
    "Softplus",
    "Tanh",
    "activation",
]

"""Context managers that change how a model behaves, and restore it: its mode, its gradients, its running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.fixed_point import Equilibrium
from equipoise.gradients.rules import ImplicitGradient, PhantomGradient


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards every module returns to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def keeping_statistics(model: nn.Module) -> Iterator[None]:
    """Leave the running statistics of BatchNorm layers unchanged.

    The layers get copies of their buffers: writing old values back in place would break a pending backward pass.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


@contextmanager
def exact_gradients(model: nn.Module) -> Iterator[None]:
    """Differentiate every equilibrium that has a phantom gradient by the implicit gradient instead."""
    layers = [m for m in model.modules() if isinstance(m, Equilibrium) and isinstance(m.gradient, PhantomGradient)]
    rules = [layer.gradient for layer in layers]
    for layer in layers:
        layer.gradient = ImplicitGradient()
    try:
        yield
    finally:
        for layer, rule in zip(layers, rules, strict=True):
            layer.gradient = rule

"""A model in another mode, differentiated by another rule, or without a memory, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.fixed_point import Equilibrium
from equipoise.gradients import ImplicitGradient, PhantomGradient

if TYPE_CHECKING:
    from equipoise.models.opteq.branches import Branches


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode for a while; every part of it then goes back to its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def unperturbed(cell: Branches) -> Iterator[None]:
    """Branches as they are for a while, whatever perturbs them otherwise."""
    mode, cell.perturb = cell.perturb, "off"
    try:
        yield
    finally:
        cell.perturb = mode


@contextmanager
def forgetful(model: nn.Module) -> Iterator[None]:
    """What its BatchNorms see for a while leaves no trace in their running statistics.

    They are given copies: to write the old numbers back would spoil a gradient that is still to be taken.
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
    """No equilibrium differentiated by a phantom gradient for a while: by the implicit one instead."""
    cut = [m for m in model.modules() if isinstance(m, Equilibrium) and isinstance(m.gradient, PhantomGradient)]
    rules = [layer.gradient for layer in cut]
    for layer in cut:
        layer.gradient = ImplicitGradient()
    try:
        yield
    finally:
        for layer, rule in zip(cut, rules, strict=True):
            layer.gradient = rule

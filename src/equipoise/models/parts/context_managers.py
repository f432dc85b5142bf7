"""Context managers that change a model and restore it: its mode, its gradient rule, its running statistics."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.fixed_point import Equilibrium
from equipoise.gradients import ImplicitGradient, PhantomGradient


@contextmanager
def changed(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Set attributes, given as (object, name, value), and afterwards restore their old values."""
    changes = list(changes)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put every module into evaluation mode."""
    return changed((module, "training", False) for module in model.modules())


def frozen(model: nn.Module) -> AbstractContextManager[None]:
    """Treat every parameter as a constant."""
    return changed((parameter, "requires_grad", False) for parameter in model.parameters())


def keeping_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Leave the running statistics of BatchNorm layers unchanged.

    The layers get copies of their buffers: writing old values back in place would break a pending backward pass.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return changed((norm, name, x.clone()) for norm in norms for name, x in norm.named_buffers(recurse=False))


def exact_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Give equilibria with a phantom gradient the implicit gradient."""
    layers = [m for m in model.modules() if isinstance(m, Equilibrium) and isinstance(m.gradient, PhantomGradient)]
    return changed((layer, "gradient", ImplicitGradient()) for layer in layers)

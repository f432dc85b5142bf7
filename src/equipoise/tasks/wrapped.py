"""Models inside a wrapper that averages gradients over processes."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Model = TypeVar("Model", bound=nn.Module)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper that averages gradients over processes."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def inside(model: nn.Module, module: Model, function: Callable[[Model], Tensor]) -> Tensor:
    """Return ``function(module)``, computed as the forward pass of ``model``, which is ``module`` or wraps it.

    A wrapper averages only gradients of what its own forward pass computes. The function must not call ``module``
    itself, only its parts.
    """
    if model is module:
        return function(module)
    module.forward = lambda: function(module)
    try:
        return model()
    finally:
        del module.forward

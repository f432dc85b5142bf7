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
    """Return ``function(module)``, computed as the forward pass of ``model``, which is or has ``module`` or wraps it.

    A wrapper averages only gradients of what its own forward pass computes. The function may call the model inside the
    wrapper, or its parts.
    """
    inner = unwrapped(model)
    if model is inner:
        return function(module)

    def once() -> Tensor:
        del inner.forward
        return function(module)

    inner.forward = once
    try:
        return model()
    finally:
        vars(inner).pop("forward", None)

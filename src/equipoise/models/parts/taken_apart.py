"""What a classifier around one equilibrium shows of itself, so that its input can be optimised jointly with z."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium


@runtime_checkable
class TakenApart(Protocol):
    """A classifier that is ``read(equilibrium(*injections(images)))``.

    Example:
        >>> class MyNet(nn.Module):
        ...     def injections(self, images): return (self.stem(images),)
        ...     def read(self, z): return self.head(z)
        ...     def forward(self, images): return self.read(self.equilibrium(*self.injections(images)))
    """

    @property
    def equilibrium(self) -> Equilibrium: ...

    def injections(self, images: Tensor) -> tuple[Any, ...]:
        """Return the inputs of the equilibrium, for images in [0, 1]."""
        ...

    def read(self, z: Any) -> Tensor:
        """Return the logits for z."""
        ...


def taken_apart(model: nn.Module) -> TakenApart:
    """Return the model, or raise if it does not show its parts."""
    if not isinstance(model, TakenApart) or not isinstance(model.equilibrium, Equilibrium):
        raise TypeError(
            f"{type(model).__name__} cannot be taken apart: joint optimisation needs a layer `equilibrium` (an "
            "equipoise.Equilibrium), a method `injections(images)` that returns its inputs, and a method `read(z)` "
            "that returns logits. The attack 'pgd' works with any model."
        )
    return model

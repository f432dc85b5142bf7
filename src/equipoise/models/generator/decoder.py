"""What tasks and commands for generators need of a decoder, be it an equilibrium or a stack of layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from equipoise.models.parts.images import require_numbers

State = tuple[Tensor, ...]


class Decoder(nn.Module, ABC):
    """Map latent vectors (batch, latent) to images in [-1, 1]: image(z*) of an equilibrium z* = f(z*, x).

    A decoder that is a stack of layers is a special case, whose f does not depend on z, so that
    :func:`equipoise.optimize_input` finds latent vectors for either.
    """

    shape: tuple[int, ...]  # of one image
    latent: int  # dimension of the latent vectors
    image: Callable[[State], Tensor]  # the image of z

    @property
    @abstractmethod
    def f(self) -> Callable[[State, Tensor], State]:
        """f(z, x), whose equilibrium the image is made from."""

    @abstractmethod
    def start(self, x: Tensor) -> State:
        """Return the initial z for latent vectors: zeros."""

    @abstractmethod
    def solved(self, x: Tensor, z0: State | None) -> State:
        """Return the equilibrium of latent vectors; ``z0`` is a state to start from."""

    def forward(self, x: Tensor, z0: State | None = None) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.latent:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; a generator maps latent vectors, (batch, {self.latent}), to images. "
                "equipoise.tasks.latent_vectors.fit finds the latent vectors of images."
            )
        require_numbers(x, next(self.parameters()).dtype, "latents", "such as torch.randn(batch, latent)")
        return self.image(self.solved(x, z0))

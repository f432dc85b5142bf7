"""The dense monotone operator (section 4.1)."""

import torch
from torch import Tensor, nn

from equipoise.operators.base import MonotoneOperator, identity_like, inverted, resolved, spectral_norm
from equipoise.options import require_number


class MonotoneLinear(MonotoneOperator):
    """W = (1 - m) I - A^T A + B - B^T with dense A and B (eq. 5).

    Args:
        features: size n of z, (batch, n).
        m: strong monotonicity of I - W.
        normalize: whether to scale with learned scalars, A^T A -> softplus(g) A^T A / ||A||^2 and
            B -> h B / ||B|| (E.2).

    Example:
        >>> op = eq.operators.MonotoneLinear(87)
        >>> op(z), op.adjoint(z), op.resolvent(0.5)(z)

    Reference: E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), proposition 1.
    """

    peak = 6.0

    def __init__(self, features: int, *, m: float = 1.0, normalize: bool = False):
        super().__init__(m, normalize)
        require_number("features", features, at_least=1, whole=True)
        self.features = features
        bound = features**-0.5  # as nn.Linear
        self.add_parameters(lambda: nn.Parameter(torch.empty(features, features).uniform_(-bound, bound)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def derive(self) -> Tensor:
        """Return W of eq. 5."""
        A, B, g = self.scaled_parameters()
        return (1 - self.m) * identity_like(A) - g * (A.T @ A) + B - B.T

    def factorise(self, alpha: float) -> Tensor:
        return inverted(resolved(self.derive(), alpha))

    def footprint(self) -> list[int]:
        return [self.features**2]

    def multiply(self, matrix: Tensor, z: Tensor, *, adjoint: bool) -> Tensor:
        return z @ (matrix if adjoint else matrix.T)

    def norm(self, *, bound: bool) -> Tensor:
        W = self.derive().double()
        return spectral_norm(identity_like(W) - W)

    def typical(self) -> tuple[Tensor, Tensor]:
        W = self.derive()
        rest = identity_like(W) - W
        return rest.trace() / len(W), torch.linalg.matrix_norm(rest) / len(W) ** 0.5

    def extra_repr(self) -> str:
        return f"{self.features}, m={self.m:g}, normalize={self.normalize}"

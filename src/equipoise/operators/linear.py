"""The dense monotone operator (section 4.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.operators.base import (
    RAW_ONE,
    MonotoneOperator,
    full_precision,
    inverted,
    is_count,
    positive,
    require_flag,
    spectral_norm,
    unit,
)
from equipoise.problem.scope import once_per_solve


class MonotoneLinear(MonotoneOperator):
    """W = (1 - m) I - A^T A + B - B^T with dense A and B (eq. 5).

    Args:
        features: the size n of z, (batch, n).
        m: the strong monotonicity of I - W.
        normalize: with learned scalars, A^T A -> softplus(g) A^T A / ||A||^2 and B -> h B / ||B|| (E.2).

    Example:
        >>> op = eq.operators.MonotoneLinear(87)
        >>> op(z), op.adjoint(z), op.resolvent(0.5)(z)

    Reference: E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), proposition 1.
    """

    peak = 6.0

    def __init__(self, features: int, *, m: float = 1.0, normalize: bool = False):
        super().__init__(m)
        if not is_count(features):
            raise ValueError(f"features is {features!r}; it must be a whole number of at least 1.")
        self.features, self.normalize = features, require_flag("normalize", normalize)
        bound = features**-0.5  # as nn.Linear
        self.A = nn.Parameter(torch.empty(features, features).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.empty(features, features).uniform_(-bound, bound))
        if normalize:
            self.g, self.h = nn.Parameter(torch.tensor(RAW_ONE)), nn.Parameter(torch.tensor(1.0))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def derive(self) -> Tensor:
        """W of eq. 5."""
        A, B, g = self.A, self.B, 1.0
        if self.normalize:
            A, B, g = unit(A), self.h * unit(B), positive(self.g)
        return (1 - self.m) * torch.eye(self.features, dtype=A.dtype, device=A.device) - g * (A.T @ A) + B - B.T

    @property
    def weight(self) -> Tensor:
        return once_per_solve((id(self), "W"), self.derive)

    def forward(self, z: Tensor) -> Tensor:
        z = self.checked(z)
        with full_precision(self):
            return z @ self.weight.T

    def adjoint(self, z: Tensor) -> Tensor:
        z = self.checked(z)
        with full_precision(self):
            return z @ self.weight

    def factorise(self, alpha: float) -> Tensor:
        W = self.derive()
        return inverted((1 + alpha) * torch.eye(len(W), dtype=W.dtype, device=W.device) - alpha * W)

    def footprint(self) -> list[int]:
        return [self.features**2]

    def solve(self, factors: Any, alpha: float, z: Tensor, *, adjoint: bool) -> Tensor:
        z = self.checked(z)
        with full_precision(self):
            return z @ (factors if adjoint else factors.T)

    def norm(self, *, bound: bool) -> Tensor:
        W = self.derive().double()
        return spectral_norm(torch.eye(len(W), dtype=W.dtype, device=W.device) - W)

    def typical(self) -> tuple[Tensor, Tensor]:
        W = self.derive()
        F = torch.eye(len(W), dtype=W.dtype, device=W.device) - W
        return F.trace() / len(W), torch.linalg.matrix_norm(F) / len(W) ** 0.5

    def extra_repr(self) -> str:
        return f"{self.features}, m={self.m:g}, normalize={self.normalize}"

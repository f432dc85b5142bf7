"""What a monotone operator is: W with I - W >= m I (prop. 1), its adjoint, its resolvent, and their dense matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.layout import leaves

Made = TypeVar("Made")
MOST_KEPT = 4  # factorisations are as large as the states they serve
RAW_ONE = math.log(math.e - 1)  # softplus of it is 1


class MonotoneOperator(nn.Module, ABC):
    """A linear map W = (1 - m) I - A^T A + B - B^T of a batch, each sample by itself (eq. 5).

    I - W >= m I for every value of the parameters: its symmetric part is m I + A^T A (B.2).
    """

    def __init__(self, m: float):
        super().__init__()
        if not is_positive(m):
            raise ValueError(f"m is {m!r}; it must be a number above 0: the strong monotonicity of I - W.")
        self._m = float(m)
        self._weights: list[Tensor] = []
        self._kept: dict[Hashable, Any] = {}

    @property
    def m(self) -> float:
        """I - W >= m I."""
        return self._m

    @property
    @abstractmethod
    def shape(self) -> Any:
        """The shape of one sample, or a tuple of such shapes."""

    @property
    def inner(self) -> tuple[tuple[int, int] | None, ...]:
        """For every tensor of z the size that is not border, or None where there is no border."""
        return tuple(None for _ in tree(self.shape))

    @abstractmethod
    def forward(self, z: Any) -> Any:
        """W z."""

    @abstractmethod
    def adjoint(self, z: Any) -> Any:
        """W^T z."""

    @abstractmethod
    def factorise(self, alpha: float) -> Any:
        """What the resolvent for ``alpha`` needs of the weights."""

    @abstractmethod
    def solve(self, factors: Any, alpha: float, z: Any, *, adjoint: bool) -> Any:
        """(I + alpha (I - W))^-1 z, or its adjoint."""

    @abstractmethod
    def norm(self, *, bound: bool) -> Tensor:
        """||I - W||_2: an upper bound, or a cheaper estimate that is good enough to choose a step by."""

    @abstractmethod
    def typical(self) -> tuple[Tensor, Tensor]:
        """About the mean eigenvalue of the symmetric part of I - W, and the root mean square of its singular values."""

    def lipschitz_bound(self) -> float:
        """L with ||I - W||_2 <= L, never below it."""
        return self.kept("bound", lambda: float(self.norm(bound=True)))

    def typical_size(self) -> float:
        """A size between the smallest and the largest of I - W: the geometric mean of m, two means, and about L."""

        def made() -> float:
            mean, rms = (float(size) for size in self.typical())
            return (self.m * mean * rms * float(self.norm(bound=False))) ** 0.25

        return self.kept("typical", made)

    def resolvent(self, alpha: float) -> Resolvent:
        """The operator V = (I + alpha (I - W))^-1, factorised once for the weights as they are.

        When gradients are on and the weights need one, V is differentiable in them, and made anew.
        """
        if not is_positive(alpha):
            raise ValueError(f"alpha is {alpha!r}; it must be a number above 0.")
        alpha = float(alpha)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            with full_precision(self):
                return Resolvent(self, alpha, self.factorise(alpha))
        return Resolvent(self, alpha, self.kept(("resolvent", alpha), lambda: self.factorise(alpha)))

    def recorded(self, z: Any) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """W z for its gradient only: for every tensor of it one from which it is made, and the transpose of that."""
        return [(part, lambda cotangent: cotangent) for _, part in leaves(self(z), "W z")]

    def as_matrix(self) -> Tensor:
        """W as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self.shape, next(self.parameters()))

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What is made from the weights, kept until they change.

        They are compared by value: version counters miss edits of ``.data`` and some optimizers. Buffers are compared,
        too, for a parametrisation may read them.
        """
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
            weights = [tensor.detach() for tensor in (*self.parameters(), *self.buffers())]
            known = len(weights) == len(self._weights) and all(
                a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
                for a, b in zip(weights, self._weights, strict=True)
            )
            if not known:
                self._weights, self._kept = [w.clone() for w in weights], {}
            if key not in self._kept:
                with full_precision(self):
                    made = make()
                while len(self._kept) >= MOST_KEPT:  # someone who tries many alphas
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = made
            return self._kept[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": [], "_kept": {}}  # copies start with nothing kept


class Resolvent:
    """(I + alpha (I - W))^-1, made by :meth:`MonotoneOperator.resolvent` (eq. A5, A6)."""

    def __init__(self, operator: MonotoneOperator, alpha: float, factors: Any):
        self.operator, self.alpha, self.factors = operator, alpha, factors

    def __call__(self, z: Any) -> Any:
        return self.operator.solve(self.factors, self.alpha, z, adjoint=False)

    def adjoint(self, z: Any) -> Any:
        return self.operator.solve(self.factors, self.alpha, z, adjoint=True)

    def as_matrix(self) -> Tensor:
        """V as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self.operator.shape, next(self.operator.parameters()))


def dense_matrix(apply: Callable[[Any], Any], shape: Any, like: Tensor) -> Tensor:
    """The matrix of a linear map of samples, one column for each unit vector."""
    sizes = [math.prod(part) for part in tree(shape)]
    basis = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, dim=1)
    parts = [part.reshape(-1, *size) for part, size in zip(basis, tree(shape), strict=True)]
    image = apply(parts[0] if is_leaf(shape) else tuple(parts))
    return torch.cat([part.flatten(1) for _, part in leaves(image, "image")], dim=1).T


def tree(shape: Any) -> list[tuple[int, ...]]:
    """The shapes in a shape of one sample."""
    return [shape] if is_leaf(shape) else list(shape)


def is_leaf(shape: Any) -> bool:
    return not shape or isinstance(shape[0], int)


def check_value(z: Any, shape: Any, owner: str) -> None:
    """Refuse a value that an operator does not act on."""
    given = leaves(z, "z")
    wanted = tree(shape)
    if isinstance(z, Tensor) != is_leaf(shape) or [tuple(t.shape[1:]) for _, t in given] != [tuple(s) for s in wanted]:
        found = ", ".join(str(tuple(tensor.shape)) for _, tensor in given)
        shapes = ", ".join(f"(batch, {', '.join(map(str, size))})" for size in wanted)
        wants, gives = ("" if is_leaf(shape) else "a tuple of "), ("" if isinstance(z, Tensor) else "a tuple of ")
        raise ValueError(f"{owner} acts on {wants}{shapes}; given: {gives}{found}.")


def full_precision(operator: nn.Module) -> torch.autocast:
    """Without autocast: a factorisation or a transform in half precision is none."""
    return torch.autocast(next(operator.parameters()).device.type, enabled=False)


def is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf


def is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def unit(kernel: Tensor) -> Tensor:
    """A kernel over its Frobenius norm; zeros stay zeros (E.2)."""
    size = torch.linalg.vector_norm(kernel)
    return kernel / torch.where(size == 0, 1.0, size)


def positive(raw: Tensor) -> Tensor:
    """softplus, never 0, so that its root has a derivative."""
    return F.softplus(raw).clamp(min=torch.finfo(raw.dtype).tiny)

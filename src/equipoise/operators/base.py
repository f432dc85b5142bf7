"""What a monotone operator is: W with I - W >= m I (prop. 1), its adjoint, its resolvent, and their dense matrices."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.operators.capacity import require_memory
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import autocast_state

PRECISIONS = (torch.float32, torch.float64)  # narrower numbers are too coarse to factorise in
RAW_ONE = math.log(math.e - 1)  # softplus of it is 1


class MonotoneOperator(nn.Module, ABC):
    """A linear map W = (1 - m) I - A^T A + B - B^T of a batch, each sample by itself (eq. 5).

    I - W >= m I for every value of the parameters: its symmetric part is m I + A^T A (B.2).
    """

    peak = 1.75  # what is held while a factorisation is computed, by what is held afterwards (measured)

    def __init__(self, m: float):
        super().__init__()
        if not is_positive(m):
            raise ValueError(f"m is {m!r}; it must be a number above 0: the strong monotonicity of I - W.")
        self._m = float(m)
        self.forget()

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
    def footprint(self) -> list[int]:
        """How many numbers each tensor of a factorisation holds; a product with W needs no more of them."""

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
        """L with ||I - W||_2 <= L, never below it; infinite when the weights are not finite or overflow."""

        def made() -> float:
            bound = float(self.norm(bound=True))
            return bound if math.isfinite(bound) else math.inf

        self.prepare("a bound of its norm")
        return self.kept("bound", made)

    def typical_size(self) -> float:
        """A size between the smallest and the largest of I - W: the geometric mean of m, two means, and about L."""

        def made() -> float:
            sizes = (self.m, *(float(size) for size in self.typical()), float(self.norm(bound=False)))
            return math.prod(size**0.25 for size in sizes) if all(map(math.isfinite, sizes)) else math.inf

        return self.kept("typical", made)

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        return self.kept("finite", lambda: float(all(bool(torch.isfinite(p).all()) for p in self.parameters()))) == 1

    def resolvent(self, alpha: float) -> Resolvent:
        """The operator V = (I + alpha (I - W))^-1, factorised once for the weights as they are.

        When gradients are on and the weights need one, V is differentiable in them, and made anew.
        """
        if not is_positive(alpha):
            raise ValueError(f"alpha is {alpha!r}; it must be a number above 0.")
        alpha = float(alpha)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            self.prepare("its resolvent", recorded=True)
            with full_precision(self):
                return Resolvent(self, alpha, Factorisation(self.factorise(alpha)))
        return Resolvent(self, alpha, self.factorisation(alpha))

    def recorded(self, z: Any) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """W z for its gradient only: for every tensor of it one from which it is made, and the transpose of that."""
        return [(part, lambda cotangent: cotangent) for _, part in leaves(self(z), "W z")]

    def as_matrix(self) -> Tensor:
        """W as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self.shape, self.example)

    @property
    def example(self) -> Tensor:
        """A parameter, for its type and device; looked up at every product, so by a short way if there is one."""
        for owner in (self, *self._modules.values()):
            for parameter in owner._parameters.values() if owner is not None else ():
                if parameter is not None:
                    return parameter
        return next(self.parameters())

    def require_precision(self) -> torch.dtype:
        """The type of the weights, if it can be factorised in."""
        dtype = self.example.dtype
        if dtype not in PRECISIONS:
            raise TypeError(
                f"{type(self).__name__} has weights in {dtype}, too coarse to factorise: keep the model in float32, "
                "model.float(), and use torch.autocast for what surrounds it."
            )
        return dtype

    def prepare(self, purpose: str, *, recorded: bool = False) -> torch.dtype:
        """Refuse, before anything is computed, weights that are too coarse or too many; returns their type."""
        dtype = self.require_precision()
        if (purpose, recorded) not in self._fitting:
            require_memory(self, purpose, recorded=recorded)
            self._fitting.add((purpose, recorded))  # what has fitted will again: memory that torch keeps looks occupied
        return dtype

    def checked(self, z: Any) -> Any:
        """z if the operator acts on it, widened if autocast made it narrow."""
        dtype = self.prepare("a product with it", recorded=torch.is_grad_enabled())
        given, wanted = [tensor for _, tensor in leaves(z, "z")], tree(self.shape)
        if isinstance(z, Tensor) != is_leaf(self.shape) or [t.shape[1:] for t in given] != wanted:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            shapes = ", ".join(f"(batch, {', '.join(map(str, size))})" for size in wanted)
            wants, gives = ("" if whole else "a tuple of " for whole in (is_leaf(self.shape), isinstance(z, Tensor)))
            raise ValueError(f"{type(self).__name__} acts on {wants}{shapes}; given: {gives}{found}.{self.hint}")
        if all(tensor.dtype == dtype for tensor in given):
            return z
        narrow = all(torch.promote_types(t.dtype, dtype) == dtype and t.is_floating_point() for t in given)
        if narrow and autocast_state(given[0].device.type):
            return rebuild(z, [tensor.to(dtype) for tensor in given])
        other = next(tensor.dtype for tensor in given if tensor.dtype != dtype)
        raise TypeError(f"{type(self).__name__} has weights in {dtype} and z is {other}: give z.to({dtype}).")

    @property
    def hint(self) -> str:
        """What is easily forgotten about the shape of z."""
        return ""

    def kept(self, name: str, make: Callable[[], float]) -> float:
        """A number made from the weights, kept until they change."""
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
            self.compare()
            if name not in self._numbers:
                self.require_precision()
                with full_precision(self):
                    self._numbers[name] = make()
            return self._numbers[name]

    def factorisation(self, alpha: float) -> Factorisation:
        """The factorisation for ``alpha``: the last one asked for is kept, others as long as somebody uses them."""
        with torch.inference_mode(False), torch.no_grad():
            self.compare()
            found = self._in_use.get(alpha)
            if found is None:
                self._latest = None  # its memory, if nobody uses it, serves the next one
                self.prepare("its resolvent")
                with full_precision(self):
                    found = self._in_use[alpha] = Factorisation(self.factorise(alpha))
            self._latest = found
            return found

    def compare(self) -> None:
        """Forget what was made from other weights.

        They are compared by value: version counters miss edits of ``.data`` and some optimizers. Buffers are compared,
        too, for a parametrisation may read them. NaN differs from itself, so nothing made from it is kept.
        """
        weights = [tensor.detach() for tensor in (*self.parameters(), *self.buffers())]
        known = len(weights) == len(self._weights) and all(
            a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
            for a, b in zip(weights, self._weights, strict=True)
        )
        if not known:
            fitting = self._fitting if same_kind(weights, self._weights) else set()
            self.forget()
            self._weights, self._fitting = [w.clone() for w in weights], fitting

    def forget(self) -> None:
        """Start with nothing kept."""
        self._weights: list[Tensor] = []
        self._numbers: dict[str, float] = {}
        self._latest: Factorisation | None = None
        self._in_use: weakref.WeakValueDictionary[float, Factorisation] = weakref.WeakValueDictionary()
        self._fitting: set[tuple[str, bool]] = set()  # what memory was found for

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_weights", "_numbers", "_latest", "_in_use", "_fitting")
        return {name: value for name, value in self.__dict__.items() if name not in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()


class Factorisation:
    """What a resolvent needs of the weights; an object of its own, so that it is known whether anybody uses it."""

    def __init__(self, factors: Any):
        self.factors = factors


class Resolvent:
    """(I + alpha (I - W))^-1, made by :meth:`MonotoneOperator.resolvent` (eq. A5, A6)."""

    def __init__(self, operator: MonotoneOperator, alpha: float, factorisation: Factorisation):
        self.operator, self.alpha, self.factorisation = operator, alpha, factorisation

    def __call__(self, z: Any) -> Any:
        return self.operator.solve(self.factorisation.factors, self.alpha, z, adjoint=False)

    def adjoint(self, z: Any) -> Any:
        return self.operator.solve(self.factorisation.factors, self.alpha, z, adjoint=True)

    def as_matrix(self) -> Tensor:
        """V as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self.operator.shape, self.operator.example)


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


def same_kind(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two lists of weights take the same memory of the same device."""
    return [(t.shape, t.dtype, t.device) for t in a] == [(t.shape, t.dtype, t.device) for t in b]


def full_precision(operator: MonotoneOperator) -> torch.autocast:
    """Without autocast: a factorisation or a transform in half precision is none."""
    return torch.autocast(operator.example.device.type, enabled=False)


def inverted(matrices: Tensor) -> Tensor:
    """The inverses of a stack of matrices; NaN when one has none, as with weights that are not finite."""
    inverse, failed = torch.linalg.inv_ex(matrices)
    if bool(failed.any()) or not bool(torch.isfinite(matrices).all()):
        return torch.full_like(inverse, torch.nan)
    return inverse


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest singular value in float64, rounded up; infinite for a matrix that is not finite."""
    matrix = matrix.double()
    if not bool(torch.isfinite(matrix).all()):
        return matrix.new_tensor(torch.inf)
    return torch.linalg.matrix_norm(matrix, ord=2) * (1 + 1e-10)  # the rounding of a singular value decomposition


def is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf


def is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def require_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")
    return value


def unit(kernel: Tensor) -> Tensor:
    """A kernel over its Frobenius norm; zeros stay zeros (E.2)."""
    size = torch.linalg.vector_norm(kernel)
    return kernel / torch.where(size == 0, 1.0, size)


def positive(raw: Tensor) -> Tensor:
    """softplus, never 0, so that its root has a derivative."""
    return F.softplus(raw).clamp(min=torch.finfo(raw.dtype).tiny)

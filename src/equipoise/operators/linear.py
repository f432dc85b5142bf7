"""Monotone linear operators: W with I - W >= m I (prop. 1), its adjoint and its resolvent; the dense one."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from equipoise.options import require_number
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import autocast_state
from equipoise.problem.scope import once_per_solve

PRECISIONS = (torch.float32, torch.float64)  # narrower numbers are too coarse to factorise in
RAW_ONE = math.log(math.e - 1)  # its softplus is 1
ALWAYS = 2**26  # bytes of memory that are used without checking that they are available


class MonotoneOperator(nn.Module, ABC):
    """A linear map W = (1 - m) I - A^T A + B - B^T of a batch, applied to each sample independently (eq. 5).

    I - W >= m I for every value of the parameters: its symmetric part is m I + A^T A (B.2).
    """

    shape: Any  # of one sample, or a tuple of such shapes
    inner: tuple[tuple[int, int] | None, ...] = (None,)  # size of each tensor of z without its border, if it has one
    peak = 1.75  # memory needed while factorising, relative to that of the result (measured)

    def __init__(self, m: float, normalize: bool = False):
        super().__init__()
        require_number("m", m, above=0)
        if not isinstance(normalize, bool):
            raise TypeError(f"normalize is {normalize!r}; it must be True or False.")
        self._m, self.normalize = float(m), normalize
        self.forget()

    @property
    def m(self) -> float:
        """The strong monotonicity: I - W >= m I."""
        return self._m

    @abstractmethod
    def derive(self) -> Any:
        """Compute W from the parameters, in the form that :meth:`multiply` takes."""

    @abstractmethod
    def factorise(self, alpha: float) -> Any:
        """Compute what :meth:`solve` needs from the parameters."""

    @abstractmethod
    def footprint(self) -> list[int]:
        """Return the number of elements of each tensor of a factorisation; a product with W needs no more."""

    @abstractmethod
    def multiply(self, matrix: Any, z: Any, *, adjoint: bool) -> Any:
        """Return W z or W^T z, where ``matrix`` is W as :meth:`derive` returns it."""

    def solve(self, factors: Any, alpha: float, z: Any, *, adjoint: bool) -> Any:
        """Return (I + alpha (I - W))^-1 z or its adjoint, where ``factors`` is the result of :meth:`factorise`."""
        return self.multiply(factors, z, adjoint=adjoint)  # an inverse in the form of W, unless overridden

    @abstractmethod
    def norm(self, *, bound: bool) -> Tensor:
        """Return ||I - W||_2: an upper bound, or a cheaper estimate that is good enough to choose a step size."""

    @abstractmethod
    def typical(self) -> tuple[Tensor, Tensor]:
        """Return about the mean eigenvalue of the symmetric part of I - W, and the RMS of its singular values."""

    @property
    def weights(self) -> Any:
        """W, derived once per solve."""
        return once_per_solve((id(self), "W"), self.derive)

    def forward(self, z: Any, *, adjoint: bool = False) -> Any:
        """Return W z."""
        z = self.checked(z)
        with self.without_autocast():
            return self.multiply(self.weights, z, adjoint=adjoint)

    def adjoint(self, z: Any) -> Any:
        """Return W^T z."""
        return self.forward(z, adjoint=True)

    def recorded(self, z: Any) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return W z for its gradient only: for each tensor, one it depends on linearly, and the transpose."""
        return [(part, lambda cotangent: cotangent) for _, part in leaves(self(z), "W z")]

    def resolvent(self, alpha: float) -> Resolvent:
        """Return the operator V = (I + alpha (I - W))^-1, factorised once for the current weights.

        When gradients are enabled and the weights need one, V is differentiable in them and is not cached.
        """
        require_number("alpha", alpha, above=0)
        alpha = float(alpha)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            self.prepare("its resolvent", recorded=True)
            with self.without_autocast():
                return Resolvent(self, alpha, Factorisation(self.factorise(alpha)))
        return Resolvent(self, alpha, self.factorisation(alpha))

    def as_matrix(self) -> Tensor:
        """Return W as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self)

    def lipschitz_bound(self) -> float:
        """Return L with ||I - W||_2 <= L, never too small; infinite if the weights are not finite or overflow."""
        rounding = 1 + 32 * torch.finfo(self.prepare("a bound of its norm")).eps  # of W, computed in that dtype
        bound = self.cached("bound", lambda: rounding * float(self.norm(bound=True)))
        return bound if math.isfinite(bound) else math.inf

    def typical_size(self) -> float:
        """Return a size between the smallest and largest of I - W: the geometric mean of m, two means, and about L."""

        def compute() -> float:
            sizes = (self.m, *(float(size) for size in self.typical()), float(self.norm(bound=False)))
            return math.prod(size**0.25 for size in sizes) if all(map(math.isfinite, sizes)) else math.inf

        return self.cached("typical", compute)

    def is_finite(self) -> bool:
        """Return whether every weight is finite."""
        return self.cached("finite", lambda: float(all(bool(torch.isfinite(p).all()) for p in self.parameters()))) == 1

    @property
    def example(self) -> Tensor:
        """A parameter, for its dtype and device; the lookup is fast, because every product needs it."""
        for owner in (self, *self._modules.values()):
            for parameter in owner._parameters.values() if owner is not None else ():
                if parameter is not None:
                    return parameter
        return next(self.parameters())

    def add_parameters(self, fresh: Callable[[], nn.Parameter]) -> None:
        """Add A and B of eq. 5, and the learned scales g and h of E.2."""
        self.A, self.B = fresh(), fresh()
        if self.normalize:
            self.g, self.h = nn.Parameter(torch.tensor(RAW_ONE)), nn.Parameter(torch.tensor(1.0))

    def scaled_parameters(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return A, B and g of W = (1 - m) I - g A^T A + B - B^T, normalized if asked for (E.2)."""
        if not self.normalize:
            return self.A, self.B, 1.0
        return unit(self.A), self.h * unit(self.B), positive(self.g)

    def without_autocast(self) -> torch.autocast:
        """Switch autocast off: a factorisation or a transform in half precision is useless."""
        return torch.autocast(self.example.device.type, enabled=False)

    def require_precision(self) -> torch.dtype:
        """Return the dtype of the weights; raise if it is too coarse to factorise in."""
        dtype = self.example.dtype
        if dtype not in PRECISIONS:
            raise TypeError(
                f"{type(self).__name__} has weights in {dtype}, too coarse to factorise: keep the model in float32, "
                "model.float(), and use torch.autocast around it."
            )
        return dtype

    def prepare(self, purpose: str, *, recorded: bool = False) -> torch.dtype:
        """Raise, before anything is computed, if the weights are too coarse or too large; return their dtype."""
        dtype = self.require_precision()
        if (purpose, recorded) not in self._fitting:
            self.require_memory(purpose, recorded)
            self._fitting.add((purpose, recorded))  # checked once only: memory that torch caches looks occupied
        return dtype

    def require_memory(self, purpose: str, recorded: bool) -> None:
        """Raise unless memory holds what a product or a resolvent takes, and W's graph if it is ``recorded``."""
        like = self.example
        parts = [count * like.element_size() for count in self.footprint()]
        kept = sum(parts)
        needed = int(max(self.peak * kept, kept + 2 * max(parts) if recorded else 0))
        if needed <= ALWAYS or (available := available_memory(like.device)) is None or needed <= available:
            return
        needs, keeps, has = (f"{count / 1e9:.3g} GB" for count in (needed, kept, available))
        raise torch.OutOfMemoryError(
            f"{type(self).__name__}({self.extra_repr()}) needs {needs} to compute {purpose}, of which it keeps "
            f"{keeps}, and {has} are available on {like.device}. What it keeps grows with height x width x channels^2: "
            "use fewer channels or smaller images."
        )

    def checked(self, z: Any) -> Any:
        """Return z if it has the right shape and dtype, widened if autocast made it narrow."""
        dtype = self.prepare("a product with it", recorded=torch.is_grad_enabled())
        given, wanted = [tensor for _, tensor in leaves(z, "z")], tree(self.shape)
        if isinstance(z, Tensor) != is_leaf(self.shape) or [t.shape[1:] for t in given] != wanted:
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            shapes = ", ".join(f"(batch, {', '.join(map(str, size))})" for size in wanted)
            wants, gives = ("" if whole else "a tuple of " for whole in (is_leaf(self.shape), isinstance(z, Tensor)))
            border = (
                f" The grids are those of images of {self.inner[0]} with a border of zeros." if self.inner[0] else ""
            )
            raise ValueError(f"{type(self).__name__} acts on {wants}{shapes}; given: {gives}{sizes}.{border}")
        if all(tensor.dtype == dtype for tensor in given):
            return z
        narrow = all(torch.promote_types(t.dtype, dtype) == dtype and t.is_floating_point() for t in given)
        if narrow and autocast_state(given[0].device.type):
            return rebuild(z, [tensor.to(dtype) for tensor in given])
        other = next(tensor.dtype for tensor in given if tensor.dtype != dtype)
        raise TypeError(f"{type(self).__name__} has weights in {dtype} and z is {other}: give z.to({dtype}).")

    def cached(self, name: str, compute: Callable[[], float]) -> float:
        """Return a number computed from the weights, cached until they change."""
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
            self.forget_if_changed()
            if name not in self._numbers:
                self.require_precision()
                with self.without_autocast():
                    self._numbers[name] = compute()
            return self._numbers[name]

    def factorisation(self, alpha: float) -> Factorisation:
        """Return the factorisation for ``alpha``: the latest is kept, others for as long as they are in use."""
        with torch.inference_mode(False), torch.no_grad():
            self.forget_if_changed()
            factorisation = self._in_use.get(alpha)
            if factorisation is None:
                self._latest = None  # frees its memory, if it is not in use, for the next one
                self.prepare("its resolvent")
                with self.without_autocast():
                    factorisation = self._in_use[alpha] = Factorisation(self.factorise(alpha))
            self._latest = factorisation
            return factorisation

    def forget_if_changed(self) -> None:
        """Drop what was computed from other weights.

        Weights are compared by value: version counters miss edits of ``.data`` and some optimizers. So are buffers,
        which a parametrisation may read. NaN differs from itself, so nothing computed from it is kept.
        """
        weights = [tensor.detach() for tensor in (*self.parameters(), *self.buffers())]
        kinds, known_kinds = ([(w.shape, w.dtype, w.device) for w in many] for many in (weights, self._weights))
        if kinds != known_kinds or not all(map(torch.equal, weights, self._weights)):
            fitting = self._fitting if kinds == known_kinds else set()
            self.forget()
            self._weights, self._fitting = [w.clone() for w in weights], fitting

    def forget(self) -> None:
        """Drop everything that was computed from the weights."""
        self._weights: list[Tensor] = []
        self._numbers: dict[str, float] = {}
        self._latest: Factorisation | None = None
        self._in_use: weakref.WeakValueDictionary[float, Factorisation] = weakref.WeakValueDictionary()
        self._fitting: set[tuple[str, bool]] = set()  # purposes that memory is known to suffice for

    def __getstate__(self) -> dict[str, Any]:
        cached = ("_weights", "_numbers", "_latest", "_in_use", "_fitting")
        return {name: value for name, value in self.__dict__.items() if name not in cached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()


class Factorisation:
    """The factors of a resolvent; an object, so that a weak reference shows whether it is in use."""

    def __init__(self, factors: Any):
        self.factors = factors


class Resolvent:
    """(I + alpha (I - W))^-1, made by :meth:`MonotoneOperator.resolvent` (eq. A5, A6)."""

    def __init__(self, operator: MonotoneOperator, alpha: float, factorisation: Factorisation):
        self.operator, self.alpha, self.factorisation = operator, alpha, factorisation

    def __call__(self, z: Any, *, adjoint: bool = False) -> Any:
        z = self.operator.checked(z)
        with self.operator.without_autocast():
            return self.operator.solve(self.factorisation.factors, self.alpha, z, adjoint=adjoint)

    def adjoint(self, z: Any) -> Any:
        return self(z, adjoint=True)

    def as_matrix(self) -> Tensor:
        """Return V as a dense (n, n) matrix; for small n."""
        return dense_matrix(self, self.operator)


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
        self.features, self.shape = features, (features,)
        bound = features**-0.5  # as nn.Linear
        self.add_parameters(lambda: nn.Parameter(torch.empty(features, features).uniform_(-bound, bound)))

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


def dense_matrix(apply: Callable[[Any], Any], operator: MonotoneOperator) -> Tensor:
    """Return the matrix of a linear map of what an operator acts on, one column for each unit vector."""
    shape, like = operator.shape, operator.example
    sizes = [math.prod(part) for part in tree(shape)]
    basis = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, dim=1)
    parts = [part.reshape(-1, *size) for part, size in zip(basis, tree(shape), strict=True)]
    image = apply(parts[0] if is_leaf(shape) else tuple(parts))
    return torch.cat([part.flatten(1) for _, part in leaves(image, "image")], dim=1).T


def tree(shape: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of one sample as a list."""
    return [shape] if is_leaf(shape) else list(shape)


def is_leaf(shape: Any) -> bool:
    return not shape or isinstance(shape[0], int)


def identity_like(matrices: Tensor) -> Tensor:
    """Return the identity of the size, dtype and device of square matrices."""
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def resolved(W: Tensor, alpha: float) -> Tensor:
    """Return I + alpha (I - W), of one matrix or of a stack."""
    return identity_like(W) * (1 + alpha) - alpha * W


def inverted(matrices: Tensor) -> Tensor:
    """Return the inverses of a stack of matrices; NaN if one is singular or not finite."""
    inverse, failed = torch.linalg.inv_ex(matrices)
    if bool(failed.any()) or not bool(torch.isfinite(matrices).all()):
        return torch.full_like(inverse, torch.nan)
    return inverse


def spectral_norm(matrix: Tensor) -> Tensor:
    """Return the largest singular value in float64, rounded up; infinite for a matrix that is not finite."""
    matrix = matrix.double()
    if not bool(torch.isfinite(matrix).all()):
        return matrix.new_tensor(torch.inf)
    return torch.linalg.matrix_norm(matrix, ord=2) * (1 + 1e-10)  # the rounding of a singular value decomposition


def unit(kernel: Tensor) -> Tensor:
    """Return a kernel divided by its Frobenius norm; zeros stay zeros (E.2)."""
    size = torch.linalg.vector_norm(kernel)
    return kernel / torch.where(size == 0, 1.0, size)


def positive(raw: Tensor) -> Tensor:
    """Return softplus, but never 0, so that its square root has a derivative."""
    return F.softplus(raw).clamp(min=torch.finfo(raw.dtype).tiny)


def in_transform() -> bool:
    """Return whether tensors may carry tangents or extra batch dimensions, which a test for zeros would miss."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def available_memory(device: torch.device) -> int | None:
    """Return the number of bytes that can be allocated on a device; None if it cannot be determined."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_by_torch
    limits = (machine_memory(), container_memory()) if device.type == "cpu" else ()
    return min((limit for limit in limits if limit is not None), default=None)


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the available memory of a machine with Linux, including caches that it can reclaim."""
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that a limit on the container leaves; None without a limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))  # cached files can be dropped
    except (OSError, ValueError):  # no such files, or no limit: "max"
        return None

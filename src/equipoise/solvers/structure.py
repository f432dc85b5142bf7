"""The structure z = s(W z + b) that the splitting solvers work with, as an f shows it on rows."""

from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from equipoise.problem.problem import Structure
from equipoise.solvers.base import Solver


class Prox(Protocol):
    """The nonlinearity s = prox_f^1 on rows, and prox_f^alpha; each returns a new tensor."""

    def __call__(self, x: Tensor, /) -> Tensor: ...
    def prox(self, x: Tensor, alpha: float, /) -> Tensor: ...
    def reflect(self, x: Tensor, alpha: float, /) -> Tensor: ...  # 2 prox - identity
    def derivative(self, x: Tensor, /) -> Tensor: ...


class Bounds(Protocol):
    """Sizes of I - W, from which step sizes are derived."""

    @property
    def m(self) -> float: ...
    def lipschitz_bound(self) -> float: ...
    def typical_size(self) -> float: ...


class Splitting(Structure):
    """f(z) = s(W z + b), for the splitting solvers.

    The backward pass at z is a splitting too: (I - J W)^-T v = v + W^T u, where u = J (W^T u + v), J = s'(W z + b). W
    is transposed, s linearised, and v is the bias (E. Winston, J. Z. Kolter 2020, theorem 3).
    """

    requirement = "f(z) = s(W z + b), such as equipoise.operators.MonotoneProblem(operator, activation)"
    bounds: Bounds
    activation: Prox  # s
    bias: Tensor  # b
    alphas: dict[Solver, float]  # step size of each solver, shared with the backward pass

    @abstractmethod
    def preactivation(self, rows: Tensor) -> Tensor: ...  # W z + b
    @abstractmethod
    def product_adjoint(self, rows: Tensor) -> Tensor: ...  # W^T z
    @abstractmethod
    def solve(self, rows: Tensor, alpha: float) -> Tensor: ...  # (I + alpha (I - W))^-1 z
    @abstractmethod
    def recorded(self, rows: Tensor, pre: Tensor) -> Tensor: ...  # W z + b = pre with the graph of W and b
    @abstractmethod
    def adjoint(self, pre: Tensor, cotangent: Tensor) -> "Splitting": ...  # the backward pass
    @abstractmethod
    def share(self, earlier: "Splitting") -> None: ...  # adopt step sizes and factorisations

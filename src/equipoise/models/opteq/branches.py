"""The map T(z) that OptEq, POptEq and MOptEq iterate, and the objective G whose stationary points are its fixed points.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022). For every branch i

    z_i = W_i^T s(W_i h_i(z) + x_i),    x_i = U_i g + b_i,                                               (1, 6, 10)
    G = sum_i 1^T f(y_i) - <x_i, y_i> + 1/2 |y_i|^2 + coupling(z),    y_i = W_i^-T z_i,                     (2, 5)

where s = prox_f and h is the negative gradient of the coupling (:mod:`equipoise.models.opteq.ring`). So the fixed
points of T are the stationary points of G (proposition 1), and T is a proximal gradient step of length 1 on G as a
function of y. Nothing has to be inverted, since s gives y. The published eq. 1 has lost its outer W^T.

The Perturbation Enhanced strategy (section 2.2): each branch sees g moved to where the branch before it does worst,
by delta_i = epsilon sign(U_i^T y_i), which raises G by epsilon |U_i^T y_i|_1 as far as G is linear in g.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.opteq.descent import Objective
from equipoise.models.opteq.ring import Images, Ring, carry
from equipoise.operators.activations import activation as proximal
from equipoise.options import require
from equipoise.problem.problem import FunctionProblem, Structure
from equipoise.stability import SpectralNorm

ORDERS = ("gauss-seidel", "jacobi")
MODES = ("train", "always", "off")


class Branches(nn.Module):
    """T for branches with the same number of channels, each at its own resolution.

    Args:
        channels: number of channels of every branch.
        sizes: (height, width) of each branch.
        inputs: shape of g, (channels, height, width).
        ring: coupling of the branches.
        kernel, injection_kernel: sides of the convolutions W_i and U_i, odd.
        bound: zeta, upper bound of the operator norm of every W_i, below 1.
        injection_bound: upper bound of the operator norm of every U_i; proposition 2 needs 1.
        activation: s, a proximal activation.
        order: "gauss-seidel", one branch after the other as in algorithm 2, or "jacobi", all at once.
        perturbation: epsilon, in units of g.
        perturb: when branches are perturbed: "train" (in training mode), "always" or "off".

    Example:
        >>> cell = Branches(16, sizes=[(32, 32)] * 3, inputs=(16, 32, 32), ring=Ring(diversity=0.01))
        >>> z = eq.fixed_point(cell, cell.start, *cell.prepare(g)).value
    """

    def __init__(
        self,
        channels: int,
        sizes: Sequence[tuple[int, int]],
        inputs: tuple[int, int, int],
        ring: Ring,
        *,
        kernel: int = 3,
        injection_kernel: int = 3,
        bound: float = 0.9,
        injection_bound: float = 1.0,
        activation: Any = "relu",
        order: str = "gauss-seidel",
        perturbation: float = 0.1,
        perturb: str = "off",
    ):
        super().__init__()
        self.channels, self.sizes, self.inputs = channels, tuple(sizes), tuple(inputs)
        self.ring, self.bound, self.injection_bound = ring, bound, injection_bound
        self.kernel, self.injection_kernel = kernel, injection_kernel
        self.order, self.perturbation, self.perturb = order, perturbation, perturb
        require(self, "channels", at_least=1, whole=True)
        require(self, "ring", kind=Ring)
        require(self, "bound", above=0, below=1)
        require(self, "injection_bound", above=0)
        require(self, "order", among=ORDERS)
        require(self, "perturbation", at_least=0)
        require(self, "perturb", among=MODES)
        if not self.sizes:
            raise ValueError("sizes is empty; there must be at least one branch.")
        if perturb != "off" and len(self.sizes) == 1:
            raise ValueError(
                f"perturb is {perturb!r}, and there is one branch: each branch is perturbed by the one before it. Use "
                "perturb='off', or more branches."
            )
        for name in ("kernel", "injection_kernel"):
            require(self, name, at_least=1, whole=True)
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be odd, so that an image keeps its size.")
        self.activation = proximal(activation)
        self.W = nn.ModuleList(constrained(channels, channels, kernel, bound) for _ in self.sizes)
        self.U = nn.ModuleList(constrained(inputs[0], channels, injection_kernel, injection_bound) for _ in self.sizes)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(channels)) for _ in self.sizes)

    @property
    def perturbed(self) -> bool:
        """Whether branches are perturbed now."""
        return self.perturbation > 0 and (self.perturb == "always" or (self.perturb == "train" and self.training))

    def structure(self, kind: type[Structure], problem: FunctionProblem) -> Structure | None:
        """Return what the descent solvers see of this T within a solve."""
        if kind is not Objective:
            return None
        coupled = len(self.sizes) > 1 and (self.ring.heritage or self.ring.diversity > 0)
        if self.order != "jacobi" and coupled:  # otherwise both orders are the same T
            raise ValueError(
                f"order is {self.order!r}, and a descent solver moves all branches at once: use order='jacobi'."
            )
        if self.perturbed:
            raise ValueError(
                f"perturb is {self.perturb!r}, and perturbed branches do not minimise one objective: use perturb='off'."
            )
        return Objective(self, problem)

    def check(self, z: Images, batch: int) -> None:
        """Raise unless z has one image of the right shape for each sample and branch."""
        wanted = [(batch, self.channels, *size) for size in self.sizes]
        given = [tuple(part.shape) for part in z] if isinstance(z, tuple | list) else tuple(z.shape)
        if given != wanted:
            raise ValueError(
                f"z has the shapes {given}; it must have one tensor for each branch, of the shapes {wanted}: "
                "model.branches(model.features(images))."
            )

    def prepare(self, g: Tensor) -> tuple[Any, ...]:
        """Return the inputs of a solve: x and, for a smooth sign, t, computed at W^T s(x) (T(0) in Jacobi order)."""
        if tuple(g.shape[1:]) != self.inputs:
            raise ValueError(
                f"g has shape {tuple(g.shape[1:])}; these branches were made for {self.inputs}: they have fixed sizes."
            )
        x = tuple(self.injected(i, g) + bias[:, None, None] for i, bias in enumerate(self.b))
        if not self.ring.smooth:
            return (x,)
        return x, self.ring.thresholds(self.lower(tuple(self.activation(part) for part in x)))

    def injected(self, i: int, g: Tensor) -> Tensor:
        """Return U_i g: g at the size of the branch, convolved."""
        return self.U[i](carry(g, self.sizes[i]))

    def reconstructed(self, i: int, y: Tensor) -> Tensor:
        """Return U_i^T y, a reconstruction of g from branch i."""
        return carry(self.U[i].adjoint(y), self.inputs[1:])  # type: ignore[operator]

    def start(self, x: Images, t: Tensor | None = None) -> Images:
        return tuple(torch.zeros_like(part) for part in x)

    def forward(self, z: Images, x: Images, t: Tensor | None = None) -> Images:
        return self.sweep(z, x, t)[1] if self.order == "gauss-seidel" else self.lower(self.lift(z, x, t))

    def preactivation(self, z: Images, x: Images, t: Tensor | None = None) -> Images:
        """Return W h(z) + x, all branches at once."""
        return tuple(W(h) + given for W, h, given in zip(self.W, self.ring.h(z, t), x, strict=True))

    def lift(self, z: Images, x: Images, t: Tensor | None = None) -> Images:
        """Return y = s(W h(z) + x), all branches at once; at the equilibrium it is W^-T z."""
        y: list[Tensor] = []
        for i, pre in enumerate(self.preactivation(z, x, t)):
            y.append(self.activation(pre if i == 0 else self.moved(i, pre, y[-1])))
        return tuple(y)

    def lower(self, y: Images) -> Images:
        """Return z = W^T y."""
        return tuple(W.adjoint(part) for W, part in zip(self.W, y, strict=True))  # type: ignore[operator]

    def sweep(self, z: Images, x: Images, t: Tensor | None = None) -> tuple[Images, Images]:
        """Return y and z, each branch seeing the new values of those before it (algorithm 2)."""
        new, y = list(z), []
        for i, W in enumerate(self.W):
            pre = W(self.ring.h_of(i, new, t)) + x[i]
            y.append(self.activation(pre if i == 0 else self.moved(i, pre, y[-1])))
            new[i] = W.adjoint(y[-1])  # type: ignore[operator]
        return tuple(y), tuple(new)

    def moved(self, i: int, pre: Tensor, before: Tensor) -> Tensor:
        """Return the preactivation of branch i for a g perturbed by the y of the branch before it."""
        if not self.perturbed:
            return pre
        with torch.no_grad():  # a sign has no derivative
            delta = self.perturbation * self.reconstructed(i - 1, before).sign()
        return pre - self.injected(i, delta)

    def objective(self, y: Images, x: Images, t: Tensor | None = None) -> Tensor:
        """Return G of each sample as a function of y; infinite where f is."""
        return self.energy(y, self.lower(y), x, t)

    def energy(self, y: Images, z: Images, x: Images, t: Tensor | None = None) -> Tensor:
        """Return G, given z = W^T y as well."""
        terms = [
            (self.activation.function(part) - given * part + part.square() / 2).flatten(1).sum(dim=1)
            for part, given in zip(y, x, strict=True)
        ]
        return torch.stack(terms).sum(dim=0) + self.ring.coupling(z, t)

    def extra_repr(self) -> str:
        return (
            f"channels={self.channels}, sizes={self.sizes}, ring={self.ring}, bound={self.bound}, "
            f"activation={self.activation!r}, order={self.order!r}, perturb={self.perturb!r}"
        )


def constrained(inputs: int, outputs: int, side: int, bound: float) -> SpectralNorm:
    """Return a convolution that keeps the size of an image and whose operator norm is bounded."""
    return SpectralNorm(nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False), bound)

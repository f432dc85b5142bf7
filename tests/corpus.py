"""Fixed-point problems with known answers, and what the tests compare with: dense linear algebra in float64.

Nothing here uses equipoise. Everything is float64; parameters are leaves that require gradients. A problem is made once
and shared: change nothing in it, and ask for gradients with torch.autograd.grad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64
DOTTIE = 0.7390851332151607  # cos(z) = z
TWICE_COSINE = 1.0298665293222589  # 2 cos(z) = z, where the slope is -1.72


@dataclass
class Case:
    """z = f(z, *inputs), started at ``z0``, is solved by ``answer``; ``parameters`` are what f captures."""

    f: Callable[..., Any]
    z0: Any
    inputs: tuple[Any, ...]
    answer: Any
    parameters: tuple[Tensor, ...] = ()
    contractive: bool = True  # whether plain iteration converges
    affine: bool = False  # in z


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=generator(seed))


def affine_case(matrix: Tensor, *, batch: int = 3, seed: int = 0, contractive: bool = True) -> Case:
    """f(z, x) = z A^T + x, so that z* = x (I - A)^-T."""
    n = len(matrix)
    weight = matrix.clone().requires_grad_()
    x = randn(batch, n, seed=seed)
    answer = torch.linalg.solve(torch.eye(n, dtype=DOUBLE) - matrix, x.mT).mT
    return Case(
        lambda z, x: z @ weight.mT + x,
        torch.zeros(batch, n, dtype=DOUBLE),
        (x,),
        answer,
        (weight,),
        contractive,
        affine=True,
    )


def dense_affine() -> Case:
    """Spectral norm 0.7."""
    matrix = randn(6, 6, seed=1)
    return affine_case(0.7 * matrix / torch.linalg.matrix_norm(matrix, 2))


def rotation() -> Case:
    """Complex pairs of radius 0.9 and 0.5, which a power iteration would not see."""
    blocks = []
    for radius, angle in ((0.9, 1.1), (0.5, 2.5)):
        t = torch.tensor(angle, dtype=DOUBLE)
        blocks.append(radius * torch.stack([torch.stack([t.cos(), -t.sin()]), torch.stack([t.sin(), t.cos()])]))
    return affine_case(torch.block_diag(*blocks))


def expansive() -> Case:
    """Eigenvalues -3, -1.5, 0.5, 0.2: plain iteration diverges."""
    basis = torch.eye(4, dtype=DOUBLE) + 0.2 * randn(4, 4, seed=2)
    eigenvalues = torch.tensor([-3.0, -1.5, 0.5, 0.2], dtype=DOUBLE)
    return affine_case(basis @ torch.diag(eigenvalues) @ torch.linalg.inv(basis), contractive=False)


def cosine() -> Case:
    """cos(z) = z without inputs: a closure."""
    slope = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    z0 = torch.tensor([[0.0], [1.0], [-2.0]], dtype=DOUBLE)
    return Case(lambda z: torch.cos(slope * z), z0, (), torch.full((3, 1), DOTTIE, dtype=DOUBLE), (slope,))


def steep_cosine() -> Case:
    """2 cos(z) = z: plain iteration runs into a cycle."""
    height = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    z0 = torch.tensor([[0.9], [1.2]], dtype=DOUBLE)
    answer = torch.full((2, 1), TWICE_COSINE, dtype=DOUBLE)
    f = lambda z, x: height * x * torch.cos(z)
    return Case(f, z0, (torch.ones_like(z0),), answer, (height,), contractive=False)


def network() -> Case:
    """tanh(W z + U x + b); the answer by Newton's method with the dense Jacobian."""
    W = 0.8 * randn(8, 8, seed=3) / 8**0.5
    U = randn(8, 3, seed=4)
    b = 0.1 * randn(8, seed=5)
    parameters = tuple(p.requires_grad_() for p in (W, U, b))
    z0, x = torch.zeros(4, 8, dtype=DOUBLE), randn(4, 3, seed=6)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W.mT + x @ U.mT + b)

    return Case(f, z0, (x,), dense_newton(f, z0, (x,)), parameters)


def two_leaves() -> Case:
    """Two coupled leaves of different shape."""
    P, Q = 0.4 * randn(3, 4, seed=7), 0.4 * randn(4, 3, seed=8)
    parameters = tuple(p.requires_grad_() for p in (P, Q))
    x = randn(3, 3, seed=9)
    z0 = (torch.zeros(3, 3, dtype=DOUBLE), torch.zeros(3, 2, 2, dtype=DOUBLE))

    def f(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        u, w = z
        return torch.tanh(w.flatten(1) @ P.mT) + x, torch.sin(u @ Q.mT).reshape(-1, 2, 2) + 0.5

    return Case(f, z0, (x,), dense_newton(f, z0, (x,)), parameters)


def nested() -> Case:
    """a = b/2 + x, b = c/2 + 1, c = k a with k = 1/4, nested as (a, (b, c)): a = (x + 1/2) / (1 - k/4)."""
    k = torch.tensor(0.25, dtype=DOUBLE, requires_grad=True)
    x = randn(3, 2, seed=10)
    z0 = (torch.zeros(3, 2, dtype=DOUBLE), (torch.zeros(3, 2, 1, dtype=DOUBLE), torch.zeros(3, 1, 2, dtype=DOUBLE)))

    def f(z: Any, given: Any) -> Any:
        a, (b, c) = z
        x, one = given
        return b[:, :, 0] / 2 + x, (c.mT / 2 + one[:, None], k * a[:, None])

    a = (x + 0.5) / (1 - 0.25 / 4)
    c = a[:, None] / 4
    return Case(f, z0, ((x, torch.ones(3, 1, dtype=DOUBLE)),), (a, (c.mT / 2 + 1, c)), (k,), affine=True)


def flatten(tree: Any) -> list[Tensor]:
    """The tensors of a nested tuple, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for part in tree for leaf in flatten(part)]


def unflatten(like: Any, leaves: Sequence[Tensor]) -> Any:
    remaining = iter(leaves)

    def build(node: Any) -> Any:
        return next(remaining) if isinstance(node, Tensor) else tuple(build(part) for part in node)

    return build(like)


def vector(tree: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in flatten(tree)])


def from_vector(like: Any, v: Tensor) -> Any:
    parts = v.split([leaf.numel() for leaf in flatten(like)])
    return unflatten(like, [part.reshape(leaf.shape) for part, leaf in zip(parts, flatten(like), strict=True)])


def dense_jacobian(f: Callable[..., Any], z: Any, inputs: Sequence[Any]) -> Tensor:
    """df/dz over the whole batch as one matrix."""
    J = torch.autograd.functional.jacobian(lambda v: vector(f(from_vector(z, v), *inputs)), vector(z).detach())
    assert isinstance(J, Tensor)
    return J.detach()


def dense_newton(f: Callable[..., Any], z0: Any, inputs: Sequence[Any], steps: int = 10) -> Any:
    v = vector(z0)
    identity = torch.eye(len(v), dtype=v.dtype)
    for _ in range(steps):
        z = from_vector(z0, v)
        gap = (vector(f(z, *inputs)) - v).detach()
        v = v + torch.linalg.solve(identity - dense_jacobian(f, z, inputs), gap)
    z = from_vector(z0, v)
    assert (vector(f(z, *inputs)) - v).abs().max() < 1e-13
    return z


def dense_gradient(case: Case, cotangent: Any, wrt: Sequence[Tensor]) -> list[Tensor]:
    """cotangent^T dz*/d(wrt) by the implicit function theorem with the dense Jacobian at the known answer."""
    J = dense_jacobian(case.f, case.answer, case.inputs)
    u = torch.linalg.solve((torch.eye(len(J), dtype=J.dtype) - J).mT, vector(cotangent))
    image = vector(case.f(case.answer, *case.inputs))
    found = torch.autograd.grad(image, wrt, u, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, found, strict=True)]


def per_sample(tree: Any) -> Tensor:
    """A value as one row per sample."""
    return torch.cat([leaf.reshape(leaf.shape[0], -1) for leaf in flatten(tree)], dim=1)


def true_residual(f: Callable[..., Any], z: Any, *inputs: Any) -> Tensor:
    """||f(z) - z|| / ||f(z)|| per sample, over all leaves together; 0 where both are 0."""
    image = per_sample(f(z, *inputs))
    gap = (image - per_sample(z)).norm(dim=1)
    return torch.where(gap == 0, 0.0, gap / image.norm(dim=1))


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: functools.cache(make)
    for make in (dense_affine, rotation, expansive, cosine, steep_cosine, network, two_leaves, nested)
}
CONTRACTIVE = [name for name, make in CASES.items() if make().contractive]
AFFINE = [name for name, make in CASES.items() if make().affine]


def solvable(solvers: Collection[str], plain: Collection[str]) -> list[tuple[str, str]]:
    """Every problem with every solver, but for plain iteration where it need not converge."""
    return [(problem, name) for problem in CASES for name in solvers if problem in CONTRACTIVE or name not in plain]

"""Brute-force truth for monotone operators: W written out from its raw parameters, equilibria and their derivatives.

Nothing here is shared with the implementation. Convolutions are Kronecker products of cyclic shifts, striding is a
selection matrix, the equilibrium uses nothing but s and dense solves.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import equipoise as eq
from corpus import flatten, generator, per_sample, unflatten

DOUBLE = torch.float64


@dataclass(frozen=True)
class Spec:
    """What an operator is made of: ``channels`` is a number (of features if there is no ``size``) or one per tier."""

    channels: int | tuple[int, ...]
    size: tuple[int, int] | None = None
    m: float = 1.0
    normalize: bool = False

    def __str__(self):
        return f"{self.channels}-{self.size}-{self.m}-{self.normalize}".replace(" ", "")

    @property
    def tiers(self):
        return self.channels if isinstance(self.channels, tuple) else (self.channels,)

    @property
    def tiered(self):
        return isinstance(self.channels, tuple)

    def sizes(self):
        return [tuple(math.ceil(side / 2**i) for side in self.size) for i in range(len(self.tiers))]

    def grids(self):
        """One more pixel on every side; even where a next tier takes every second one."""
        last = len(self.tiers) - 1
        return [tuple(n + 2 if i == last else n + 2 + n % 2 for n in size) for i, size in enumerate(self.sizes())]

    def shape(self):
        """Of one sample, as ``op.shape`` should have it."""
        if self.size is None:
            return (self.channels,)
        shapes = tuple((c, *grid) for c, grid in zip(self.tiers, self.grids(), strict=True))
        return shapes if self.tiered else shapes[0]

    def build(self, seed=0, scale=0.5, dtype=DOUBLE):
        """The operator, with random entries everywhere: its own initialisation is tested elsewhere."""
        options = {"m": self.m, "normalize": self.normalize}
        if self.size is None:
            op = eq.operators.MonotoneLinear(self.channels, **options)
        elif self.tiered:
            op = eq.operators.MonotoneMultiTier(self.channels, self.size, **options)
        else:
            op = eq.operators.MonotoneConv2d(self.channels, self.size, **options)
        return randomize(op.to(dtype), seed, scale)

    def randn(self, batch=3, seed=0, dtype=DOUBLE):
        """A batch of random states."""
        random = generator(seed)
        shapes = self.shape() if self.tiered else (self.shape(),)
        leaves = tuple(torch.randn(batch, *shape, dtype=DOUBLE, generator=random).to(dtype) for shape in shapes)
        return leaves if self.tiered else leaves[0]

    def basis(self, dtype=DOUBLE):
        """The unit vectors as a batch: ``per_sample(op(basis))`` is the transpose of W."""
        like = self.randn(1)
        n = per_sample(like).shape[1]
        return unrow(torch.eye(n, dtype=dtype), like)

    def interior(self):
        """1 where a state lives, 0 on the border of its grid."""
        if self.size is None:
            return torch.ones(self.channels, dtype=DOUBLE)
        masks = []
        for channels, (h, w), grid in zip(self.tiers, self.sizes(), self.grids(), strict=True):
            mask = torch.zeros(channels, *grid, dtype=DOUBLE)
            mask[:, :h, :w] = 1
            masks.append(mask.flatten())
        return torch.cat(masks)

    def matrix(self, parameters):
        """W of raw ``parameters``, a module or a dictionary of names; differentiable in them."""
        if isinstance(parameters, nn.Module):
            parameters = dict(parameters.named_parameters())
        raw = {name: value.double() for name, value in parameters.items()}

        def scaled(kind, tier, root):
            """A parameter after normalisation; ``root`` names the scalar of A^T A, whose root scales A itself."""
            ending = f".{tier}" if self.tiered else ""
            value = raw[kind + ending]
            if not self.normalize:
                return value
            norm = value.square().sum().sqrt()
            factor = raw[root + ending]
            return value / norm * (factor if root == "h" else F.softplus(factor).sqrt())

        if self.size is None:
            A, B = scaled("A", 0, "g"), scaled("B", 0, "h")
            return (1 - self.m) * torch.eye(self.channels, dtype=DOUBLE) - A.mT @ A + B - B.mT
        grids, count = self.grids(), len(self.tiers)
        A = [circular(scaled("A", i, "g"), grids[i]) for i in range(count)]
        B = [circular(scaled("B", i, "h"), grids[i]) for i in range(count)]
        S = [
            embed(self.tiers[i + 1], grids[i], grids[i + 1]) @ circular(scaled("S", i, "s"), grids[i])
            for i in range(count - 1)
        ]
        rows = []
        for i in range(count):
            row = [torch.zeros(len(A[i]), len(A[j]), dtype=DOUBLE) for j in range(count)]
            row[i] = (1 - self.m) * torch.eye(len(A[i]), dtype=DOUBLE) - A[i].mT @ A[i] + B[i] - B[i].mT
            if i < count - 1:
                row[i] = row[i] - S[i].mT @ S[i]
            if i > 0:
                row[i - 1] = -2 * A[i].mT @ S[i - 1]
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)


def dense_resolvent(W, alpha):
    """(I + alpha (I - W))^-1."""
    identity = torch.eye(len(W), dtype=DOUBLE)
    return torch.linalg.inv(identity + alpha * (identity - W))


@functools.cache
def shift(grid, i, j):
    """(P x)(r, c) = x(r + i, c + j), round the torus, for one channel."""
    h, w = grid
    P = torch.zeros(h * w, h * w, dtype=DOUBLE)
    for r in range(h):
        for c in range(w):
            P[r * w + c, (r + i) % h * w + (c + j) % w] = 1
    return P


def circular(kernel, grid):
    """The matrix of a 3x3 circular convolution in torch's convention (no flip), channels, rows, columns."""
    taps = ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1))
    return sum(torch.kron(kernel[:, :, 1 + i, 1 + j].contiguous(), shift(grid, i, j)) for i, j in taps)


@functools.cache
def embed(channels, fine, coarse):
    """Every second row and column of a fine grid, put into the top left of a coarse one."""

    def one(n, k):
        E = torch.zeros(k, n, dtype=DOUBLE)
        for r in range(n // 2):
            E[r, 2 * r] = 1
        return E

    identity = torch.eye(channels, dtype=DOUBLE)
    return torch.kron(identity, torch.kron(one(fine[0], coarse[0]), one(fine[1], coarse[1])))


def randomize(op, seed, scale=0.5):
    """Every raw parameter drawn anew, in place."""
    random = generator(seed)
    with torch.no_grad():
        for p in op.parameters():
            p.copy_(scale * torch.randn(p.shape, dtype=DOUBLE, generator=random))
    return op


def unrow(rows, like):
    """The inverse of ``per_sample``: rows as a value structured like ``like``."""
    leaves = flatten(like)
    parts = rows.split([leaf[0].numel() for leaf in leaves], dim=1)
    return unflatten(like, [part.reshape(-1, *leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)])


def slope(s, x):
    """s'(x), elementwise, as autograd has it."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(s(x).sum(), x)[0]


def smallest_eigenvalue(W):
    """Of the symmetric part of I - W."""
    return torch.linalg.eigvalsh(torch.eye(len(W), dtype=W.dtype) - (W + W.mT) / 2)[0]


@torch.no_grad()
def equilibrium(W, s, bias, mask):
    """z = mask * s(W z + bias), rows of bias: Peaceman-Rachford at alpha = 1, where prox is s, then Newton's method."""
    n = len(W)
    V = torch.linalg.inv(2 * torch.eye(n, dtype=DOUBLE) - W)
    z = u = torch.zeros_like(bias)
    for _ in range(200):
        for _ in range(100):
            half = 2 * (u + bias) @ V.mT - u
            z = mask * s(half)
            u = 2 * z - half
        for _ in range(30):
            gap = mask * s(z @ W.mT + bias) - z
            if (gap.norm(dim=1) <= 1e-14 * (1 + z.norm(dim=1))).all():
                return z
            z = z + newton(W, mask * slope(s, z @ W.mT + bias), gap)
    raise AssertionError("the dense truth was not found")


def newton(W, J, gap):
    """(I - J W)^-1 gap for every row; J holds the diagonals."""
    return torch.linalg.solve(torch.eye(len(W), dtype=DOUBLE) - J[:, :, None] * W, gap[:, :, None])[:, :, 0]


def differentiable_equilibrium(W, s, bias, mask, order=1):
    """The equilibrium with a graph whose derivatives in W and ``bias`` are exact up to ``order``.

    Each Newton step with a fixed matrix adds one exact order (implicit function theorem, once per step).
    """
    z = equilibrium(W.detach(), s, bias.detach(), mask)
    frozen = W.detach()
    J = mask * slope(s, z @ frozen.mT + bias.detach())
    for _ in range(order):
        z = z + newton(frozen, J, mask * s(z @ W.mT + bias) - z)
    return z

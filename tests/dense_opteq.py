"""OptEq, POptEq and MOptEq by dense matrices and the equations of the paper, written plainly; models to test."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from corpus import DOUBLE, generator, randn
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Ring

# Features are (pixels x channels) matrices, operators dense ones


def averages(n, m):
    """(m, n): n pixels in a row averaged to m, over the windows from floor(i n / m) to ceil((i + 1) n / m)."""
    A = torch.zeros(m, n, dtype=DOUBLE)
    for i in range(m):
        start, end = i * n // m, -(-(i + 1) * n // m)
        A[i, start:end] = 1 / (end - start)
    return A


def brought(old, new):
    """(pixels of new, pixels of old): pooling, or the transpose of pooling the other way."""
    if old[0] >= new[0] and old[1] >= new[1]:
        return torch.kron(averages(old[0], new[0]), averages(old[1], new[1]))
    return brought(new, old).T


def matrices(images):
    """(batch, channels, height, width) as a list of (pixels, channels), one per sample."""
    return [sample.flatten(1).T for sample in images]


def images_of(z, size):
    """The other way round."""
    return torch.stack([sample.T.reshape(-1, *size) for sample in z])


def dense(operator, shape):
    """The matrix of a linear operator on images of this shape, column by column."""
    n = math.prod(shape)
    return operator(torch.eye(n, dtype=DOUBLE).reshape(n, *shape)).reshape(n, -1).T


def convolution(weight, size):
    """The matrix of a zero-padded convolution."""
    return dense(lambda x: F.conv2d(x, weight, padding=weight.shape[-1] // 2), (weight.shape[1], *size))


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


class Truth:
    """The paper's equations for one sample, z a list of (pixels x channels) matrices, t one number for each edge."""

    def __init__(self, sizes, ring):
        self.sizes, self.ring, self.L = sizes, ring, len(sizes)

    def P(self, i, j):
        return brought(self.sizes[j % self.L], self.sizes[i % self.L])

    def product(self, z, i):
        """M_{i:i+1}, entry by entry."""
        after = self.P(i, i + 1) @ z[(i + 1) % self.L]
        C = range(z[0].shape[1])
        return torch.stack([torch.stack([after[:, k] @ z[i][:, l] for l in C]) for k in C])

    def sign(self, z, i, t):
        """RD_sign: the derivative of D_t, without its diagonal."""
        M = self.product(z, i)
        sign = torch.sign(M) if t is None else M / torch.sqrt(M**2 + t[i] ** 2)
        return sign - torch.diag(torch.diag(sign))

    def h(self, z, t):
        found = []
        for i in range(self.L):
            after = self.P(i, i + 1) @ z[(i + 1) % self.L]
            before = self.P(i - 1, i).T @ z[i - 1]
            h = (after + before) / 2 if self.ring.heritage else z[i]
            if self.ring.diversity:
                own, other = self.sign(z, i, t), self.sign(z, (i - 1) % self.L, t)
                h = h - self.ring.diversity / 2 * (after @ own + before @ other.T)
            found.append(h)
        return found

    def H(self, z):
        return sum(
            sum(z[i][:, k] @ (self.P(i, i + 1) @ z[(i + 1) % self.L])[:, k] for k in range(z[0].shape[1]))
            for i in range(self.L)
        )

    def D(self, z, t):
        total = 0.0
        for i in range(self.L):
            M = self.product(z, i)
            for k, l in itertools.permutations(range(len(M)), 2):
                total = total + (M[k, l].abs() if t is None else torch.sqrt(M[k, l] ** 2 + t[i] ** 2) - t[i])
        return total

    def coupling(self, z, t):
        drawn = self.H(z) if self.ring.heritage else sum((part**2).sum() for part in z)
        return ((self.ring.diversity * self.D(z, t) if self.ring.diversity else 0.0) - drawn) / 2

    def G(self, z, x, t, f, W):
        """The objective; W are dense, on images that are flat with the channels first."""
        total = self.coupling(z, t)
        for i in range(self.L):
            y = torch.linalg.solve(W[i].T, z[i].T.flatten())
            total = total + (f(y) - x[i].T.flatten() * y + y**2 / 2).sum()
        return total


def dilogarithm(y):
    """The f of softplus: f' = log(1 - exp(-y)) = -sum exp(-n y) / n."""
    n = torch.arange(1, 600, dtype=DOUBLE)[:, None]
    return (torch.exp(-n * y) / n**2).sum(dim=0)


ACTIVATIONS = {  # s, and f by section 4 where it has a derivative
    "leaky-relu": (lambda x: torch.where(x > 0, x, 0.01 * x), lambda y: (1 / 0.01 - 1) / 2 * y.clamp(max=0) ** 2),
    "tanh": (torch.tanh, lambda y: y * torch.atanh(y) + torch.log(1 - y**2) / 2 - y**2 / 2),
    "arctan": (torch.atan, lambda y: -torch.log(torch.cos(y)) - y**2 / 2),
    "elu": (
        lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
        lambda y: torch.where(y < 0, (1 + y.clamp(max=0)) * torch.log(1 + y.clamp(max=0)) - y - y**2 / 2, 0.0),
    ),
    "sigmoid": (torch.sigmoid, lambda y: y * torch.log(y) + (1 - y) * torch.log(1 - y) - y**2 / 2),
    "softplus": (lambda x: torch.log1p(torch.exp(x)), dilogarithm),
}
SUBGRADIENTS = {  # s, f where it is finite, and how far v is from a subgradient of f at y
    "relu": (
        lambda x: x.clamp(min=0),
        torch.zeros_like,
        lambda y, v: torch.where(y > 0, v.abs(), v.clamp(min=0)),
    ),
    "hard-tanh": (
        lambda x: x.clamp(-1, 1),
        torch.zeros_like,
        lambda y, v: torch.where(y.abs() < 1, v.abs(), (-v * y.sign()).clamp(min=0)),
    ),
    "soft-threshold": (
        lambda x: x.sign() * (x.abs() - 0.5).clamp(min=0),
        lambda y: 0.5 * y.abs(),
        lambda y, v: torch.where(y != 0, (v - 0.5 * y.sign()).abs(), (v.abs() - 0.5).clamp(min=0)),
    ),
}
ALONE = {1: [(6, 6)], 2: [(5, 6)] * 2, 3: [(6, 6)] * 3, 4: [(4, 5)] * 4}
SIZES_OF_RINGS = {
    **{f"{L} alike": sizes for L, sizes in ALONE.items()},
    "8 4 2 1": [(8, 8), (4, 4), (2, 2), (1, 1)],
    "6 3": [(6, 8), (3, 4)],
    "low first": [(2, 2), (6, 4), (6, 2)],
    "no whole ratio": [(7, 8), (5, 3), (2, 3)],
}
RINGS = {
    "heritage": Ring(),
    "both": Ring(diversity=0.3),
    "diversity": Ring(heritage=False, diversity=0.3),
    "neither": Ring(heritage=False),
    "hard": Ring(diversity=0.3, sign="hard"),
}
each_size = pytest.mark.parametrize("sizes", SIZES_OF_RINGS.values(), ids=SIZES_OF_RINGS)
each_ring = pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
each_order = pytest.mark.parametrize("order", ["gauss-seidel", "jacobi"])

TIGHT = eq.Tolerance(relative=1e-13, max_steps=1000)


def features(sizes, channels=4, batch=2, seed=0):
    return tuple(randn(batch, channels, *size, seed=seed + i) for i, size in enumerate(sizes))


def widths(sizes, ring, batch=2):
    """t for every edge of every sample."""
    t = 0.2 + torch.rand(batch, len(sizes), dtype=DOUBLE, generator=generator(7))
    return t if ring.smooth else None


def rows(t, k):
    return None if t is None else t[k]


def cell_of(sizes, ring=RINGS["both"], norm=0.9, inputs=(3, 8, 8), **options):
    """Branches of 4 channels with random weights and biases, ||W|| nearly ``norm`` and ||U|| nearly 1.

    W is not too far from a multiple of the identity, so that its inverse can be had to nearly all digits.
    """
    cell = Branches(4, sizes, inputs, ring, bound=norm, **options).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(std=0.3)
        for layer in cell.W:
            layer.layer.weight += 2 * nn.init.dirac_(torch.empty_like(layer.layer.weight))
    for layer in (*cell.W, *cell.U):
        layer.always = True
    return cell


def solved(cell, g, solver=None, tolerance=TIGHT):
    """The inputs of the solve, and z."""
    with torch.no_grad():
        inputs = cell.prepare(g)
        solver = eq.Anderson() if solver is None else solver
        solution = eq.fixed_point(cell, cell.start, *inputs, solver=solver, tolerance=tolerance, on_failure="raise")
        return inputs, solution.value


def model_of(kind=eq.models.MOptEq, full=True, **options):
    """A small model in eval mode, with biases and averages other than 0, and norms at their bounds if ``full``."""
    numbers = {"shape": (2, 8, 8), "classes": 3, "size": "reduced", "channels": 4, "stem": 1}
    model = kind(**{**numbers, **options}).double().eval()
    with torch.no_grad():
        for bias in model.cell.b:
            bias.normal_(std=0.3)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.running_mean.normal_(std=0.3)
                layer.running_var.uniform_(0.5, 2)
    for layer in (*model.cell.W, *model.cell.U):
        layer.always = full
    model.equilibrium.tolerance = TIGHT
    model.equilibrium.on_failure = "raise"
    return model


def weighed(model, averages):
    """Logits of what the head reads."""
    averages = (averages - model.norm.running_mean) / (model.norm.running_var + 1e-5).sqrt()
    return averages @ model.head.weight.T + model.head.bias


def pictures(batch=2, channels=2, side=8):
    return torch.rand(batch, channels, side, side, dtype=DOUBLE)


def close(found, truth, tolerance=1e-12):
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

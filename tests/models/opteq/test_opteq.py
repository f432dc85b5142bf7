"""OptEq, POptEq and MOptEq against dense matrices and the equations of the paper, written plainly."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from corpus import DOUBLE, dense_jacobian, generator, per_sample, randn, true_residual
from equipoise.models.opteq import ring as ring_module
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.model import SIZES
from equipoise.models.opteq.ring import Ring, carry, heritage
from equipoise.models.opteq.theorems import gradient_at
from equipoise.tasks.augmented import AugmentedClassification

# --- the truth: features as (pixels x channels) matrices, operators as dense ones -----------------------------------


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


# --- carry ----------------------------------------------------------------------------------------------------------

PAIRS = {
    "equal": ((6, 5), (6, 5)),
    "halves": ((8, 6), (4, 3)),
    "other ratios": ((8, 6), (2, 6)),
    "one pixel": ((5, 7), (1, 1)),
    "no whole ratio": ((7, 8), (3, 5)),
    "one whole ratio": ((8, 7), (4, 3)),
    "nearly equal": ((9, 9), (8, 9)),
}
each_pair = pytest.mark.parametrize(("high", "low"), PAIRS.values(), ids=PAIRS)


@each_pair
def test_carry_is_the_dense_average_and_its_transpose(high, low):
    for old, new in ((high, low), (low, high)):
        z = randn(2, 3, *old, seed=1)
        expected = images_of([brought(old, new) @ sample for sample in matrices(z)], new)
        close([carry(z, new)], [expected])
        assert norm(brought(old, new)) <= 1 + 1e-12  # the certificate rests on it


@each_pair
def test_carry_to_and_fro_are_adjoint(high, low):
    a, b = randn(2, 3, *high, seed=1), randn(2, 3, *low, seed=2)
    for one, other in ((a, b), (b, a)):
        left, right = carry(one, other.shape[2:]) * other, one * carry(other, one.shape[2:])
        torch.testing.assert_close(left.sum(), right.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [2, 4])
def test_carry_by_whole_ratios_is_average_pooling(k):
    z = randn(2, 3, 8, 4, seed=1)
    close([carry(z, (8 // k, 4 // k))], [F.avg_pool2d(z, k)])


@pytest.mark.parametrize("k", [2, 4, 41, 47])  # torch's "nearest" takes some wrong pixels from 41 on
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_carry_by_whole_ratios_is_nearest_upsampling_divided(k, dtype):
    z = randn(2, 3, 8, 4, seed=1).to(dtype)
    assert torch.equal(carry(z, (8 * k, 4 * k)), z.repeat_interleave(k, dim=2).repeat_interleave(k, dim=3) / k**2)


def test_carry_refuses_what_it_cannot_average():
    with pytest.raises(ValueError, match=r"images of \(8, 4\) cannot be carried to \(4, 8\): one side grows"):
        carry(torch.zeros(1, 1, 8, 4), (4, 8))


# --- adjoints and norms ---------------------------------------------------------------------------------------------

LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 2, 3, padding=1, bias=False), (3, 4, 5), (2, 4, 5)),
    "wide kernel": (lambda: nn.Conv2d(2, 3, (5, 3), padding=(2, 1), bias=False), (2, 3, 4), (3, 3, 4)),
    "with bias": (lambda: nn.Conv2d(2, 2, 1), (2, 3, 3), (2, 3, 3)),
    "padding same": (lambda: nn.Conv2d(2, 2, 3, padding="same", bias=False), (2, 3, 4), (2, 3, 4)),
    "linear": (lambda: nn.Linear(5, 3, bias=False), (5,), (3,)),
    "linear with bias": (lambda: nn.Linear(3, 5), (3,), (5,)),
}


@pytest.mark.parametrize(("make", "inside", "outside"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_adjoint_is_the_transpose(make, inside, outside, scale):
    layer = eq.SpectralNorm(make().double(), bound=0.8)
    with torch.no_grad():
        layer.layer.weight.mul_(scale)
        at_zero = layer(torch.zeros(1, *inside, dtype=DOUBLE))
        forward = dense(lambda x: layer(x) - at_zero, inside)
        close([dense(layer.adjoint, outside)], [forward.T])
        assert norm(forward) <= 0.8 + 1e-12


@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (3, 2), (5, 1), (2, 1), ((3, 5), 1)])
def test_adjoint_refuses_a_convolution_that_changes_sizes(kernel, padding):
    layer = eq.SpectralNorm(nn.Conv2d(1, 1, kernel, padding=padding))
    with pytest.raises(ValueError, match="adjoint needs a convolution that preserves the image size.*kernel .*padding"):
        layer.adjoint(torch.zeros(1, 1, 6, 6))


@each_size
def test_what_branches_make_of_g_is_the_adjoint_of_what_they_see(sizes):
    cell = cell_of(sizes, injection_kernel=3)
    with torch.no_grad():
        for i, size in enumerate(sizes):
            seen = dense(lambda g, i=i: cell.injected(i, g), (3, 8, 8))
            close([dense(lambda y, i=i: cell.reconstructed(i, y), (4, *size))], [seen.T])
            pool = torch.kron(torch.eye(3, dtype=DOUBLE), brought((8, 8), size))
            close([seen], [convolution(cell.U[i].weight(size), size) @ pool])
            assert norm(seen) <= 1 + 1e-12


def assert_bounded(cell):
    with torch.no_grad():
        for W, U, size in zip(cell.W, cell.U, cell.sizes, strict=True):
            assert norm(dense(W, (4, *size))) <= cell.bound + 1e-12
            assert norm(dense(W.adjoint, (4, *size))) <= cell.bound + 1e-12
            assert norm(dense(U, (4, *size))) <= 1 + 1e-12


@settings(max_examples=15)
@example(0, 160.0, 3, 0.9)  # squares overflow
@example(0, -160.0, 3, 0.9)  # squares vanish
@given(st.integers(0, 10**6), st.floats(-2, 2), st.sampled_from([1, 3, 5]), st.sampled_from([0.3, 0.9, 0.999]))
def test_norms_are_bounded_whatever_the_weights(seed, exponent, kernel, bound):
    cell = Branches(4, [(5, 4), (2, 2)], (4, 5, 4), Ring(), kernel=kernel, injection_kernel=kernel, bound=bound)
    cell.double()
    for i, parameter in enumerate(cell.parameters()):
        parameter.data = 10**exponent * randn(*parameter.shape, seed=seed + i)
    assert_bounded(cell)


def test_norms_are_bounded_after_every_step_of_training():
    model = model_of(full=False, scales=(1, 2), diversity=0.1).train()
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-4, max_steps=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    images, labels = pictures(4), torch.tensor([0, 1, 2, 0])
    norms = []
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        assert_bounded(model.cell)
        norms += [norm(dense(layer.layer, (4, 8, 8))) for layer in (*model.cell.W, *model.cell.U)]
    assert max(norms) > 10  # of the raw weights: something was there to be bounded


# --- h and the coupling ---------------------------------------------------------------------------------------------


@each_size
@each_ring
def test_h_is_that_of_the_paper(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    truth = Truth(sizes, ring)
    expected = [truth.h([matrices(part)[k] for part in z], rows(t, k)) for k in range(2)]
    expected = [images_of([sample[i] for sample in expected], size) for i, size in enumerate(sizes)]
    close(ring.h(z, t), expected)
    close([ring.h_of(i, z, t) for i in range(len(z))], expected)


@each_size
@each_ring
def test_heritage_diversity_and_coupling_are_those_of_the_paper(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    truth = Truth(sizes, ring)
    samples = [[matrices(part)[k] for part in z] for k in range(2)]
    close([heritage(z)], [torch.stack([truth.H(sample) for sample in samples])])
    close([ring.total_diversity(z, t)], [torch.stack([truth.D(s, rows(t, k)) for k, s in enumerate(samples)])])
    close([ring.coupling(z, t)], [torch.stack([truth.coupling(s, rows(t, k)) for k, s in enumerate(samples)])])


@each_size
@each_ring
def test_h_is_the_negative_gradient_of_the_coupling(sizes, ring):
    z, t = [part.requires_grad_() for part in features(sizes)], widths(sizes, ring)
    pulls = torch.autograd.grad(ring.coupling(z, t).sum(), z)
    close(ring.h(z, t), [-pull for pull in pulls])


@pytest.mark.parametrize("t", [1e-3, 1e-9, 0.3])
def test_smoothed_diversity_is_near_the_papers_and_needs_no_difference_of_large_numbers(t):
    ring = Ring(diversity=1.0)
    z, width = features([(6, 6)] * 3), torch.full((2, 3), t, dtype=DOUBLE)
    hard, smooth = ring.total_diversity(z), ring.total_diversity(z, width)
    assert (smooth < hard + 1e-12).all()
    assert (smooth > hard - t * 3 * 12 - 1e-12).all()  # 3 edges of 12 products, each within t
    tiny = [1e-8 * part for part in z]
    by_series = sum(ring.products(e, tiny).square().sum(dim=(1, 2)) for e in range(3)) / (2 * t)
    if t == 0.3:
        torch.testing.assert_close(ring.total_diversity(tiny, width), by_series, rtol=1e-10, atol=0)


def test_t_is_a_share_of_the_size_of_the_products():
    sizes, ring = SIZES_OF_RINGS["8 4 2 1"], Ring(diversity=0.1, smoothing=0.07)
    z, truth = features(sizes), Truth(sizes, ring)
    for k in range(2):
        for e in range(4):
            M = truth.product([matrices(part)[k] for part in z], e)
            M = M - torch.diag(torch.diag(M))
            expected = 0.07 * torch.sqrt((M**2).mean() + 1e-12)
            torch.testing.assert_close(ring.thresholds(z)[k, e], expected, rtol=1e-12, atol=0)
    zeros = tuple(torch.zeros_like(part) for part in z)
    t = ring.thresholds(zeros)
    assert (t > 0).all()
    assert all(torch.equal(h, torch.zeros_like(h)) for h in ring.h(zeros, t))


@each_size
@each_ring
def test_channels_last_gives_the_same_and_stays(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    last = [part.contiguous(memory_format=torch.channels_last) for part in z]
    found = ring.h(last, t)
    close(found, ring.h(z, t))
    close([ring.coupling(last, t)], [ring.coupling(z, t)])
    if (1, 1) not in sizes and sizes != SIZES_OF_RINGS["no whole ratio"]:  # one pixel has either order
        assert all(h.is_contiguous(memory_format=torch.channels_last) for h in found)
    assert all(h.is_contiguous() for h in ring.h(z, t))


# --- T --------------------------------------------------------------------------------------------------------------


def plain_sweep(cell, z, x, t):
    """Algorithm 2: each branch overwrites its z before the next one looks."""
    truth, s = Truth(cell.sizes, cell.ring), ACTIVATIONS["tanh"][0]
    ys, zs = [], []
    for k in range(len(z[0])):
        new, y = [matrices(part)[k] for part in z], []
        for i, size in enumerate(cell.sizes):
            W = convolution(cell.W[i].weight(size), size)
            h = truth.h(new, rows(t, k))[i]
            y.append(s(W @ h.T.flatten() + x[i][k].flatten()))
            new[i] = (W.T @ y[i]).reshape(4, -1).T
        ys.append([part.reshape(4, *size) for part, size in zip(y, cell.sizes, strict=True)])
        zs.append([part.T.reshape(4, *size) for part, size in zip(new, cell.sizes, strict=True)])
    return [[torch.stack(parts) for parts in zip(*found, strict=True)] for found in (ys, zs)]


@pytest.mark.parametrize("sizes", [SIZES_OF_RINGS[name] for name in ("1 alike", "2 alike", "3 alike", "6 3")], ids=str)
def test_gauss_seidel_is_algorithm_2(sizes):
    cell = cell_of(sizes, activation="tanh")
    with torch.no_grad():
        z, (x, t) = features(sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
        expected = plain_sweep(cell, z, x, t)
        for found, true in zip(cell.sweep(z, x, t), expected, strict=True):
            close(found, true)
        close(cell(z, x, t), expected[1])


@each_size
def test_jacobi_moves_all_branches_at_once(sizes):
    cell = cell_of(sizes, activation="tanh", order="jacobi")
    with torch.no_grad():
        z, (x, t) = features(sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
        h = cell.ring.h(z, t)
        expected = []
        for i, size in enumerate(sizes):
            W = convolution(cell.W[i].weight(size), size)
            y = torch.tanh(h[i].flatten(1) @ W.T + x[i].flatten(1))
            expected.append((y @ W).reshape(z[i].shape))
        close(cell(z, x, t), expected)


def test_x_is_u_g_plus_b_and_t_is_that_of_the_first_iterate():
    cell, g = cell_of(SIZES_OF_RINGS["6 3"], activation="tanh", order="jacobi"), randn(2, 3, 8, 8, seed=5)
    with torch.no_grad():
        x, t = cell.prepare(g)
        for i, size in enumerate(cell.sizes):
            seen = F.conv2d(F.adaptive_avg_pool2d(g, size), cell.U[i].weight(size), cell.b[i], padding=1)
            close([x[i]], [seen])
        close([t], [cell.ring.thresholds(cell(cell.start(x), x, t))])


@pytest.mark.parametrize("sizes", [SIZES_OF_RINGS[name] for name in ("2 alike", "3 alike", "8 4 2 1")], ids=str)
@pytest.mark.parametrize("ring", [RINGS["heritage"], RINGS["both"], RINGS["diversity"]], ids=str)
def test_both_orders_have_the_same_equilibrium(sizes, ring):
    cell, g = cell_of(sizes, ring, norm=0.8), randn(2, 3, 8, 8, seed=5)
    _, one = solved(cell, g)
    cell.order = "jacobi"
    inputs, other = solved(cell, g)
    close(one, other, 1e-10)
    with torch.no_grad():
        assert true_residual(cell, other, *inputs).max() < 1e-12


@pytest.mark.parametrize("kind", ["OptEq", "MOptEq of one branch"])
def test_one_branch_is_opteq(kind):
    made = {"OptEq": (eq.models.OptEq, {}), "MOptEq of one branch": (eq.models.MOptEq, {"scales": (1,)})}[kind]
    model = model_of(made[0], **made[1], **({"diversity": 0.0} if made[1] else {}))
    images, cell = pictures(), model.cell
    with torch.no_grad():
        g = model.features(images)
        W, U = (convolution(layer.weight((8, 8)), (8, 8)) for layer in (cell.W[0], cell.U[0]))
        b = cell.b[0].repeat_interleave(64)
        z = torch.zeros(2, 256, dtype=DOUBLE)
        for _ in range(300):
            z = torch.relu(z @ W.T + g.flatten(1) @ U.T + b) @ W
        close([part.flatten(1) for part in model.branches(g)], [z], 1e-11)
        pooled = z.reshape(2, 4, 64).mean(dim=2)
        close([model(images)], [weighed(model, pooled)], 1e-11)


def test_mopteq_without_heritage_and_diversity_is_popteq():
    one = model_of(eq.models.POptEq, scales=(1, 2, 1))
    other = model_of(heritage=False, diversity=0.0, scales=(1, 2, 1))
    other.load_state_dict(one.state_dict())
    images = pictures()
    close([other(images)], [one(images)])
    coupled = model_of(diversity=0.0, scales=(1, 2, 1))
    coupled.load_state_dict(one.state_dict())
    assert (coupled(images) - one(images)).abs().max() > 1e-3


def test_branches_of_popteq_are_opteqs():
    model = model_of(eq.models.POptEq)
    images = pictures()
    with torch.no_grad():
        together = model.branches(model.features(images))
        for i, z in enumerate(together):
            alone = model_of(eq.models.OptEq)
            alone.stem, alone.normalize = model.stem, model.normalize
            alone.cell.W[0], alone.cell.U[0], alone.cell.b[0] = model.cell.W[i], model.cell.U[i], model.cell.b[i]
            close(alone.branches(alone.features(images)), [z], 1e-11)


def test_g_is_made_by_the_stem():
    model = model_of(stem=3, downsamplings=2, shape=(2, 9, 10), mean=(0.4, 0.6), std=(0.2, 0.3))
    images = torch.rand(2, 2, 9, 10, dtype=DOUBLE)
    x = (images - torch.tensor([0.4, 0.6])[:, None, None]) / torch.tensor([0.2, 0.3])[:, None, None]
    for k in range(3):
        conv, norm = model.stem[3 * k], model.stem[3 * k + 1]
        x = F.conv2d(x, conv.weight, stride=2 if k < 2 else 1, padding=1)
        x = (x - norm.running_mean[:, None, None]) / (norm.running_var + 1e-5).sqrt()[:, None, None]
        x = (x * norm.weight[:, None, None] + norm.bias[:, None, None]).clamp(min=0)
    close([model.features(images)], [x], 1e-6)  # mean and std begin as single precision
    assert x.shape == (2, 4, 3, 3)
    assert model.cell.sizes == ((3, 3),) * 3


@pytest.mark.parametrize("fusion", ["none", "sum", "conv"])
def test_what_popteq_reads(fusion):
    model = model_of(eq.models.POptEq, fusion=fusion)
    z = features([(8, 8)] * 3)
    if fusion == "none":
        read = torch.cat([part.mean(dim=(2, 3)) for part in z], dim=1)
    elif fusion == "sum":
        read = (z[0] + z[1] + z[2]).mean(dim=(2, 3))
    else:
        read = F.conv2d(torch.cat(z, dim=1), model.fuse.weight, padding=1).clamp(min=0).mean(dim=(2, 3))
    close([model.read(z)], [weighed(model, read)])


def test_a_single_image_is_read_by_what_was_seen_before_it():
    model, z = model_of(), features([(8, 8)] * 3)
    one = tuple(part[:1] for part in z)
    expected, known = model.read(one), model.norm.running_mean.clone()
    model.train()
    close([model.read(one)], [expected])
    assert model.norm.running_mean.equal(known)
    model(pictures(1)).sum().backward()
    model.read(z)
    assert not model.norm.running_mean.equal(known)


@pytest.mark.parametrize("scales", [(1, 2, 4), (1, 2, 3)], ids=str)
def test_images_of_any_shape_and_memory_order(scales):
    """Also where the ratio of two branches is not whole."""
    model = model_of(scales=scales, shape=(2, 7, 10))
    images = torch.rand(2, 2, 7, 10, dtype=DOUBLE)
    logits = model(images)
    last = model.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    close([last], [logits], 1e-10)


# --- proposition 1 --------------------------------------------------------------------------------------------------


def stationarity(cell, g, f, **options):
    """||dG/dz|| at the equilibrium of each sample, by the larger of its two parts; G by dense inverses."""
    inputs, z = solved(cell, g, **options)
    x, t = inputs if len(inputs) == 2 else (*inputs, None)
    W = [convolution(layer.weight(size), size).detach() for layer, size in zip(cell.W, cell.sizes, strict=True)]
    truth, found, values = Truth(cell.sizes, cell.ring), [], []
    for k in range(len(g)):
        at = [matrices(part)[k].clone().requires_grad_() for part in z]
        coupling = truth.coupling(at, rows(t, k))
        value = truth.G(at, [matrices(part)[k] for part in x], rows(t, k), f, W)
        whole, pull = (per_sample([p[None] for p in torch.autograd.grad(v, at)]) for v in (value, coupling))
        found.append((whole.norm() / max(pull.norm(), (whole - pull).norm())).item())
        values.append(value.detach())
    return max(found), torch.stack(values), z


SHAPES = {name: SIZES_OF_RINGS[name] for name in ("1 alike", "3 alike", "8 4 2 1", "no whole ratio")}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("heritage", [True, False], ids=["heritage", "no heritage"])
def test_the_equilibrium_is_a_stationary_point_of_g(sizes, activation, heritage):
    cell = cell_of(sizes, Ring(heritage=heritage, diversity=0.05), activation=activation)
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS[activation][1])
    assert relative <= 1e-8


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation", SUBGRADIENTS)
def test_the_equilibrium_is_a_stationary_point_where_f_has_a_subgradient(sizes, activation):
    """0 is in df(y) + the gradient of all the rest in y."""
    cell, g = cell_of(sizes, Ring(diversity=0.05), activation=activation), 2 * randn(2, 3, 8, 8, seed=5)
    (x, t), z = solved(cell, g)
    distance = SUBGRADIENTS[activation][2]
    truth = Truth(sizes, cell.ring)
    W = [convolution(layer.weight(size), size).detach() for layer, size in zip(cell.W, sizes, strict=True)]
    with torch.no_grad():
        y = cell.lift(z, x, t)
    met = set()  # whether y is at a corner of f
    for k in range(2):
        sample = [part[k].flatten().requires_grad_() for part in y]
        lowered = [(W[i].T @ part).reshape(4, -1).T for i, part in enumerate(sample)]
        for i, part in enumerate(sample):
            close([torch.linalg.solve(W[i].T, z[i][k].flatten())], [part.detach()], 1e-8)
        rest = truth.coupling(lowered, t[k])
        rest = rest + sum((p**2 / 2 - x[i][k].flatten() * p).sum() for i, p in enumerate(sample))
        for part, pull in zip(sample, torch.autograd.grad(rest, sample), strict=True):
            assert distance(part, -pull).max() <= 1e-8
            corner = (part == 0) | (part.abs() == 1)
            met |= set(corner.tolist())
    assert met == {True, False}


class Whole(Ring):
    """Without the 1/2 of h."""

    def drawn(self, i, z, signs):
        return 2 * super().drawn(i, z, signs)


def test_without_its_factor_h_belongs_to_another_objective():
    for ring, stationary in ((Ring(diversity=0.05), True), (Whole(diversity=0.05), False)):
        torch.manual_seed(0)
        cell = cell_of([(6, 6)] * 3, ring, norm=0.6, activation="tanh")
        relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
        assert (relative < 1e-8) if stationary else (relative > 0.1)


def test_upsampling_that_is_not_the_adjoint_belongs_to_another_objective(monkeypatch):
    def repeated(z, size):
        factor = math.prod(max(1, n // o) for n, o in zip(size, z.shape[2:], strict=True))
        return factor * carry(z, size)

    torch.manual_seed(0)
    sizes = SIZES_OF_RINGS["8 4 2 1"]
    cell = cell_of(sizes, Ring(diversity=0.05), norm=0.3, activation="tanh")
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
    assert relative < 1e-6
    monkeypatch.setattr(ring_module, "carry", repeated)
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
    assert relative > 0.1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_signs_are_those_of_single_precision_under_autocast(scale):
    ring, z = Ring(diversity=0.1), [scale * randn(2, 4, 8, 8, seed=i).float() for i in range(3)]
    t = ring.thresholds(z)
    with torch.autocast("cpu", torch.float16):
        half = [part.half() for part in z]
        assert ring.total_diversity(half, t).isfinite().all()
        for e in range(3):
            torch.testing.assert_close(
                ring.signs(e, half, ring.thresholds(half)), ring.signs(e, z, t), rtol=0, atol=0.02
            )
        mixed = ring.h(half, t)
    for found, truth in zip(mixed, ring.h(z, t), strict=True):
        torch.testing.assert_close(found.float(), truth, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *SUBGRADIENTS])
@pytest.mark.parametrize("options", [{}, {"scales": (1, 2, 4, 8), "diversity": 0.2}, {"order": "jacobi"}], ids=str)
def test_objective_is_the_dense_one(activation, options):
    model, images = model_of(activation=activation, **options), pictures()
    f = {**ACTIVATIONS, **SUBGRADIENTS}[activation][1]
    with torch.no_grad():
        g = model.features(images)
        z = model.branches(g)
        found = model.objective(z, images)
    _, values, again = stationarity(model.cell, g, lambda y: f(y) + 0 * y)
    close(z, again, 1e-11)
    close([found], [values], 1e-9)


def test_objective_has_its_value_by_hand():
    """One pixel, one channel, W = w: G = -x y + y^2 / 2 - z^2 / 2 with y = z / w, so y = x / (1 - w^2)."""
    model = eq.models.OptEq((1, 1, 1), 2, size="reduced", channels=1, kernel=1, injection_kernel=1, stem=1).double()
    model.eval().equilibrium.tolerance = TIGHT
    with torch.no_grad():
        for p in (*model.cell.parameters(), model.stem[0].weight):
            p.fill_(0.5)
    images = torch.tensor([0.9, 0.6], dtype=DOUBLE)[:, None, None, None]
    z = model.branches(model.features(images))
    g = ((images - 0.5) / 0.5 / 2 / math.sqrt(1 + 1e-5)).flatten()
    x = 0.5 * g + 0.5
    y = x / (1 - 0.25)
    close([z[0].flatten()], [y / 2], 1e-10)
    close([model.objective(z, images)], [-x * y + y**2 / 2 - (y / 2) ** 2 / 2], 1e-10)


VERIFIED = {
    "default": {},
    "strong diversity": {"diversity": 0.25},
    "multi-scale": {"scales": (1, 2, 4, 8), "diversity": 0.05},
    "softplus": {"activation": "softplus"},
    "hard-tanh": {"activation": "hard-tanh", "diversity": 0.1},
    "jacobi": {"order": "jacobi"},
}


@pytest.mark.parametrize("options", VERIFIED.values(), ids=VERIFIED)
def test_verify_finds_a_stationary_point(options):
    model, images = model_of(**options), pictures(3)
    found = model.verify(images)
    assert found.residual.shape == found.objective.shape == found.gradient.shape == (3,)
    assert found.gradient.max() <= 1e-10
    assert found.residual.max() <= 1e-10
    with torch.no_grad():
        close([found.objective], [model.objective(model.branches(model.features(images)), images)], 1e-10)
    assert "proposition 1 on 3 images" in str(found)
    assert f"{found.gradient.max():.1e}" in str(found)


@pytest.mark.parametrize("kind", [eq.models.OptEq, eq.models.POptEq, eq.models.MOptEq])
def test_objective_refuses_a_z_of_other_images(kind):
    """A z of one image would be broadcast."""
    model, images = model_of(kind), pictures(3)
    z = model.branches(model.features(images))
    for wrong in (tuple(part[:1] for part in z), z[0], z[1:], tuple(part[..., 1:] for part in z)):
        with pytest.raises(ValueError, match="z has the shapes .*; it must have one tensor for each branch, of"):
            model.objective(wrong, images)


def test_objective_leaves_running_statistics_alone():
    model, images = model_of().train(), pictures(3)
    z = model.branches(model.features(images))
    before = copy.deepcopy(model.state_dict())
    model.objective(z, images).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [eq.models.OptEq, eq.models.POptEq])
def test_verify_of_uncoupled_models(kind):
    assert model_of(kind).verify(pictures(3)).gradient.max() <= 1e-10


def test_verify_in_single_precision_and_in_inference_mode():
    model, images = model_of().float(), pictures(3).float()
    assert model.verify(images).gradient.max() < 1e-3
    with torch.inference_mode():
        assert model.verify(pictures(3).float()).gradient.max() < 1e-3


def test_verify_finds_no_stationary_point_where_there_is_none():
    model, images = model_of(diversity=0.05), pictures()
    cell = model.cell
    with torch.no_grad():
        x, t = cell.prepare(model.features(images))
        for z in (features(cell.sizes), cell(cell.start(x), x, t)):
            gradient, part = gradient_at(cell, z, cell.lift(z, x, t), t)
            assert (per_sample(gradient).norm(dim=1) > 1e-2 * per_sample(part).norm(dim=1)).all()
    loose = model.verify(images, relative=0.3)
    assert (loose.gradient > 1e-6).all()
    object.__setattr__(cell, "ring", Whole(diversity=0.05))
    for layer in cell.W:
        layer.bound = 0.6
    wrong = model.verify(images)
    assert (wrong.residual < 1e-12).all()
    assert (wrong.gradient > 0.1).all()


def test_gradient_is_that_of_the_dense_objective_anywhere():
    """At W^T y with y = s(W h(z) + x), z being no equilibrium."""
    cell = cell_of([(4, 4), (2, 2)], Ring(diversity=0.1), activation="tanh")
    with torch.no_grad():
        x, t = cell.prepare(randn(1, 3, 8, 8, seed=5))
        z = features(cell.sizes, batch=1)
        y = cell.lift(z, x, t)
        found, _ = gradient_at(cell, z, y, t)
        W = [convolution(layer.weight(size), size) for layer, size in zip(cell.W, cell.sizes, strict=True)]
    at = [matrices(part)[0].clone().requires_grad_() for part in cell.lower(y)]
    value = Truth(cell.sizes, cell.ring).G(at, [matrices(p)[0] for p in x], t[0].detach(), ACTIVATIONS["tanh"][1], W)
    expected = torch.autograd.grad(value, at)
    close(found, [images_of([p], size) for p, size in zip(expected, cell.sizes, strict=True)], 1e-9)


def test_verify_leaves_the_model_as_it_is():
    model = model_of().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.verify(pictures())
    model.certificate(pictures())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("perturb", ["always", "train"])
def test_verify_does_not_vouch_for_perturbed_branches(perturb):
    """They minimise no objective of these images, though T has an equilibrium."""
    options = {"perturbation": 1e-3, "diversity": 0.0, "activation": "softplus"}
    model, images = model_of(perturb=perturb, **options).train(), pictures()
    with pytest.raises(ValueError, match=f"perturb is '{perturb}'.*perturb='off'"):
        model.verify(images)
    if perturb == "train":
        assert model.eval().verify(images).gradient.max() <= 1e-10


# --- proposition 2 --------------------------------------------------------------------------------------------------


def perturbed_rise(cell, g, delta):
    """G and z at the equilibrium of g - delta."""
    inputs, z = solved(cell, g - delta)
    with torch.no_grad():
        return cell.objective(cell.lift(z, *inputs), *inputs), z[0].flatten(1)


@pytest.mark.parametrize("activation", ["relu", "leaky-relu", "tanh", "sigmoid"])
def test_proposition_2(activation):
    """The larger of the rise of G and sqrt(N) epsilon |z' - z| is at least (epsilon |U^T y|_1 - N epsilon^2) / 2."""
    epsilons = torch.tensor([0.001, 0.01, 0.05, 0.1, 0.3], dtype=DOUBLE)[:, None, None, None]
    meant = 0
    for case in range(5):
        torch.manual_seed(case)
        bound = (0.5, 0.9, 0.999, 0.9, 0.7)[case]
        cell = cell_of([(5, 5)], Ring(heritage=False), norm=bound, inputs=(4, 5, 5), activation=activation)
        g = randn(1, 4, 5, 5, seed=case).relu().repeat(5, 1, 1, 1)
        inputs, z = solved(cell, g)
        with torch.no_grad():
            y = cell.lift(z, *inputs)
            before = cell.objective(y, *inputs)
            seen = cell.reconstructed(0, y[0])
        after, moved = perturbed_rise(cell, g, epsilons * seen.sign())
        N, epsilon = g[0].numel(), epsilons.flatten()
        assert N == 100
        promised = (epsilon * seen.abs().sum(dim=(1, 2, 3)) - N * epsilon**2) / 2
        reached = torch.maximum(after - before, math.sqrt(N) * epsilon * (moved - z[0].flatten(1)).norm(dim=1))
        assert (reached >= promised - 1e-10).all()
        meant += int((promised > 0).sum())
        # Also the inequality of the proof from which it follows.
        step = after - before + math.sqrt(N) * epsilon * (moved - z[0].flatten(1)).norm(dim=1)
        assert (step >= 2 * promised - 1e-10).all()
    assert meant >= 5  # the promise was not empty


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_reconstructed_perturbation_raises_g_more_than_any_random_one(activation):
    cell = cell_of([(5, 5)], Ring(heritage=False), inputs=(4, 5, 5), activation=activation)
    g = randn(1, 4, 5, 5, seed=1).relu().repeat(21, 1, 1, 1)
    inputs, z = solved(cell, g)
    with torch.no_grad():
        y = cell.lift(z, *inputs)
        before = cell.objective(y, *inputs)
        delta = 0.1 * randn(21, 4, 5, 5, seed=2).sign()
        delta[0] = 0.1 * cell.reconstructed(0, y[0])[0].sign()
    rise = perturbed_rise(cell, g, delta)[0] - before
    assert (rise[0] > 2 * rise[1:].abs()).all()


# --- convergence ----------------------------------------------------------------------------------------------------


def full_norm_model(channels, **options):
    """A model of three branches as it begins, but for ||W|| = 0.9."""
    model = eq.models.MOptEq((3, 8, 8), 10, size="reduced", channels=channels, **options).double().eval()
    for layer in model.cell.W:
        layer.always = True
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-10, max_steps=200)
    model.equilibrium.on_failure = "ignore"
    return model


@pytest.mark.parametrize("diversity", [0.0, 0.001, 0.01, "1/C"])
@each_order
def test_the_default_solver_converges_up_to_one_over_c(diversity, order):
    model = full_norm_model(16, diversity=1 / 16 if diversity == "1/C" else diversity, order=order)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(pictures(4, 3)))
        solution = model.equilibrium.solve(*inputs)
        assert solution.converged.all(), solution
        assert true_residual(model.cell, solution.value, *inputs).max() < 1.01e-10


def test_the_papers_own_sign_does_not():
    model = full_norm_model(16, diversity=1 / 16, sign="hard")
    with torch.no_grad():
        solution = model.equilibrium.solve(*model.cell.prepare(model.features(pictures(8, 3))))
    assert not solution.converged.all()
    assert solution.stats.residual.max() > 1e-6


# --- certificates ---------------------------------------------------------------------------------------------------


def longest(z):
    """The largest 2-norm of a branch, per sample."""
    return torch.stack([part.flatten(1).norm(dim=1) for part in z]).amax(dim=0)


@each_order
@pytest.mark.parametrize("scales", [(1,), (1, 1, 1), (4, 1, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("heritage", [True, False], ids=["heritage", "no heritage"])
def test_without_diversity_every_step_leaves_at_most_the_factor(order, scales, heritage):
    options = {"order": order, "scales": scales, "heritage": heritage, "diversity": 0.0}
    model, images = model_of(**options, activation=nn.LeakyReLU(1.0)), pictures()
    told = model.certificate()
    assert told.proven
    assert told.radius is None
    with torch.no_grad():
        norms = [norm(dense(W, (4, *size))) for W, size in zip(model.cell.W, model.cell.sizes, strict=True)]
        assert max(norms) <= told.norm <= 0.9 + 1e-9
        assert told.factor == pytest.approx(told.norm**2, rel=1e-12)
        inputs = model.cell.prepare(model.features(images))
        answer = model.equilibrium(*inputs)
        z = features(model.cell.sizes)
        for _ in range(20):
            new = model.cell(z, *inputs)
            gaps = [longest([a - b for a, b in zip(found, answer, strict=True)]) for found in (z, new)]
            assert (gaps[1] <= told.factor * gaps[0] + 1e-12).all()
            z = new
        one, other = features(model.cell.sizes, seed=20), features(model.cell.sizes, seed=30)
        ends = [model.cell(z, *inputs) for z in (one, other)]
        gaps = [longest([a - b for a, b in zip(*pair, strict=True)]) for pair in ((one, other), ends)]
        assert (gaps[1] <= told.factor * gaps[0]).all()
    assert str(told).startswith("||W|| <= 0.9; T is a contraction: every step leaves at most 0.8")


@each_order
def test_the_factor_is_met_where_all_branches_are_alike(order):
    """W = 0.9 I, but for the slack of the bound: a change that all branches share shrinks by the factor."""
    model = model_of(diversity=0.0, order=order, activation=nn.LeakyReLU(1.0))
    with torch.no_grad():
        for layer in model.cell.W:
            nn.init.dirac_(layer.layer.weight)
        told, inputs = model.certificate(), model.cell.prepare(model.features(pictures()))
        z = features([(8, 8)] * 3)
        moved = tuple(part + randn(1, 4, 8, 8, seed=9) for part in z)
        before, after = (
            longest([a - b for a, b in zip(*pair, strict=True)])
            for pair in ((z, moved), [model.cell(v, *inputs) for v in (z, moved)])
        )
    torch.testing.assert_close(after / before, torch.full((2,), told.factor, dtype=DOUBLE), rtol=1e-3, atol=0)


def test_the_factor_holds_for_signs_that_stay():
    """T with the signs of D frozen, and the largest gap that a unit change of z can make, by dense matrices."""
    model = model_of(diversity=0.2, order="jacobi", scales=(1, 1), shape=(2, 4, 4), activation=nn.LeakyReLU(1.0))
    told, cell = model.certificate(), model.cell
    assert told.factor == pytest.approx(told.norm**2 * (1 + 0.2 * 3), rel=1e-12)
    with torch.no_grad():
        z, t = features(cell.sizes, batch=1), torch.full((1, 2), 1e-3, dtype=DOUBLE)
        signs = {e: cell.ring.signs(e, z, t) for e in range(2)}
        assert signs[0].abs().max() > 0.99

        def step(i, j, e):
            """Of branch i, when branch j changes by e and the other not."""
            change = [e if k == j else e.new_zeros(len(e), *z[k].shape[1:]) for k in range(2)]
            drawn = cell.ring.drawn(i, change, {k: sign.expand(len(e), 4, 4) for k, sign in signs.items()})
            return cell.W[i].adjoint(cell.W[i](drawn))

        for i in range(2):
            shares = [norm(dense(lambda e, i=i, j=j: step(i, j, e), z[j].shape[1:])) for j in range(2)]
            assert 0.1 * told.factor < sum(shares) <= told.factor


def test_with_diversity_nothing_is_proven():
    images = pictures()
    told = model_of(diversity=0.01).certificate(images)
    assert told.factor < 1
    assert not told.proven
    assert "no contraction is proven: with all signs held fixed" in str(told)
    assert f"measured: {told.radius:.3g}" in str(told)
    told = model_of(diversity=0.3).certificate()
    assert told.factor > 1
    assert not told.proven
    assert "no contraction is proven: even with all signs held fixed the bound is" in str(told)
    assert "measured" not in str(told)


@pytest.mark.parametrize(
    ("jumps", "options"),
    [
        (False, {"diversity": 0.2}),
        (True, {"diversity": 0.2, "sign": "hard"}),
        (False, {"diversity": 0.0, "sign": "hard"}),
        (True, {"diversity": 0.0, "perturb": "always"}),
    ],
)
def test_a_radius_says_whether_signs_were_held_fixed(jumps, options):
    model = model_of(**options)
    model.equilibrium.on_failure = "ignore"
    told = model.certificate(pictures(2))
    assert told.jumps == jumps
    assert (f"measured: {told.radius:.3g}, with all signs held fixed: T jumps" in str(told)) == jumps


@each_order
@pytest.mark.parametrize("diversity", [0.0, 0.3])
def test_the_radius_is_that_of_the_dense_jacobian(order, diversity):
    model = model_of(channels=2, shape=(2, 2, 2), diversity=diversity, order=order, activation="tanh")
    images = pictures(3, side=2)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(images))
        z = model.equilibrium(*inputs)
    radii = []
    for k in range(3):
        one = tuple(part[k : k + 1] for part in z)
        given = [tuple(p[k : k + 1] for p in each) if isinstance(each, tuple) else each[k : k + 1] for each in inputs]
        radii.append(torch.linalg.eigvals(dense_jacobian(model.cell, one, given)).abs().max())
    assert model.certificate(images).radius == pytest.approx(float(max(radii)), rel=1e-8)


@pytest.mark.parametrize("perturb", ["always", "train"])
def test_nothing_is_proven_of_perturbed_branches(perturb):
    """The sign in the perturbation jumps, as that in D does: plain iteration of this one does not converge."""
    model, images = model_of(diversity=0.0, perturb=perturb, perturbation=0.5).train(), pictures(3)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(images))
        options = {"solver": eq.Picard(), "tolerance": TIGHT, "on_failure": "ignore"}
        assert not eq.fixed_point(model.cell, model.cell.start, *inputs, **options).converged.all()
    told = model.certificate()
    assert not told.proven
    assert "T is a contraction" not in str(told)
    assert model.eval().certificate().proven == (perturb == "train")


# --- gradients ------------------------------------------------------------------------------------------------------


def tiny_model(**options):
    numbers = {"channels": 3, "shape": (1, 4, 4), "scales": (1, 2), "classes": 2, "diversity": 0.3, "smoothing": 0.3}
    return model_of(**{**numbers, "bound": 0.6, "activation": "tanh", **options})


@pytest.mark.parametrize(("order", "full"), [("gauss-seidel", True), ("jacobi", False)])
def test_gradients_of_everything_match_finite_differences(order, full):
    model = tiny_model(order=order, full=full)
    names = [name for name, _ in model.named_parameters()]

    def logits(images, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (images,))

    images = pictures(2, 1, 4).requires_grad_()
    assert torch.autograd.gradcheck(logits, (images, *model.parameters()), eps=1e-5, atol=1e-6, fast_mode=True)


GRADIENTS = {
    "tanh": {},
    "relu": {"activation": "relu"},
    "train": {},
    "jacobi": {"scales": (1, 2, 1), "order": "jacobi"},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_300_unrolled_steps(options, request):
    model = tiny_model(**options).train("train" in request.node.callspec.id)
    images = pictures(3, 1, 4).requires_grad_()
    sources = [images, *model.parameters()]

    def loss(z):
        logits = model.read(z)
        return (logits * randn(*logits.shape, seed=3)).sum() + logits.square().sum()

    found = torch.autograd.grad(loss(model.branches(model.features(images))), sources)
    model.equilibrium.gradient, gradients = eq.UnrolledGradient(steps=300), []
    x, t = model.cell.prepare(model.features(images))
    for width in (t, t.detach()):
        z = model.equilibrium(x, width)
        gradients.append(torch.autograd.grad(loss(z), sources, retain_graph=True))
    scale = max(gradient.norm() for gradient in gradients[0])
    for name, ours, theirs in zip(["images", *dict(model.named_parameters())], found, gradients[0], strict=True):
        assert (ours - theirs).norm() < 1e-8 * (theirs.norm() + 1e-3 * scale), name
    # t is part of the function: without its gradient this would be another one.
    assert (gradients[0][0] - gradients[1][0]).norm() > 1e-5 * gradients[0][0].norm()


def test_second_derivatives_match_finite_differences():
    model = tiny_model(channels=2, shape=(2, 2, 2))
    model.stem = model.normalize = nn.Identity()
    g, name = randn(1, 2, 2, 2, seed=4).requires_grad_(), "equilibrium.f.W.0.layer.weight"

    def logits(g, weight):
        return torch.func.functional_call(model, {name: weight}, (g,))

    assert torch.autograd.gradgradcheck(logits, (g, model.get_parameter(name)), fast_mode=True)


def test_models_are_copied_and_pickled_with_a_start_of_their_own():
    model, images = model_of(), pictures()
    logits = model(images)
    logits.sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), logits)
        with torch.no_grad():
            twin.cell.W[0].layer.weight.neg_()
        assert not torch.equal(twin(images), logits)
        assert twin.equilibrium.initial.__self__ is twin.cell
    assert torch.equal(model(images), logits)


def test_weights_are_derived_once_for_a_forward_and_its_backward(monkeypatch):
    model, made, derive = model_of(diversity=0.2, scales=(1, 2)), [], eq.SpectralNorm.derive
    monkeypatch.setattr(eq.SpectralNorm, "derive", lambda self, size: made.append(id(self)) or derive(self, size))
    images = pictures()
    model(images).sum().backward()
    assert sorted(made) == sorted(map(id, (*model.cell.W, *model.cell.U)))
    before = model(images)
    model.cell.W[1].layer.weight.data *= -1  # an edit that version counters do not see
    assert not torch.allclose(model(images), before)


def test_every_parameter_learns_and_the_loss_falls():
    model = model_of(full=False, scales=(1, 2), diversity=0.1, perturb="train", perturbation=0.01).train()
    model.equilibrium.tolerance, model.equilibrium.on_failure = eq.Tolerance(relative=1e-2, max_steps=15), "ignore"
    images, labels = pictures(6), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


# --- the perturbation enhanced strategy -----------------------------------------------------------------------------


def test_when_branches_are_perturbed():
    cell = cell_of([(4, 4)] * 2, RINGS["heritage"])
    z, (x,) = features(cell.sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
    plain = cell(z, x)
    for mode, training, moved in (
        ("off", True, False),
        ("off", False, False),
        ("train", True, True),
        ("train", False, False),
        ("always", True, True),
        ("always", False, True),
    ):
        cell.train(training).perturb = mode
        assert cell.perturbed == moved
        assert torch.equal(cell(z, x)[1], plain[1]) != moved
    cell.perturbation = 0.0
    assert not cell.perturbed
    assert torch.equal(cell(z, x)[1], plain[1])


@each_order
@pytest.mark.parametrize("sizes", [[(6, 6)] * 3, [(8, 8), (4, 4), (2, 2)]], ids=["alike", "multi-scale"])
def test_each_branch_sees_what_is_worst_for_the_one_before(order, sizes):
    epsilon = 0.2
    cell = cell_of(sizes, order=order, activation="tanh", perturb="always", perturbation=epsilon)
    with torch.no_grad():
        z, g = features(sizes), randn(2, 3, 8, 8, seed=5)
        x, t = cell.prepare(g)
        found = cell.sweep(z, x, t)[0] if order == "gauss-seidel" else cell.lift(z, x, t)
        new, delta = list(z), torch.zeros_like(g)
        for i, size in enumerate(sizes):
            W, U = (convolution(layer.weight(size), size) for layer in (cell.W[i], cell.U[i]))
            U = U @ torch.kron(torch.eye(3, dtype=DOUBLE), brought((8, 8), size))
            h = cell.ring.h(new if order == "gauss-seidel" else z, t)[i]
            b = cell.b[i].repeat_interleave(math.prod(size))
            y = torch.tanh(h.flatten(1) @ W.T + (g - delta).flatten(1) @ U.T + b)
            close([found[i].flatten(1)], [y])
            delta = epsilon * torch.sign(y @ U).reshape(g.shape)
            new[i] = (y @ W).reshape(z[i].shape)
        close(cell(z, x, t), new)
        cell.perturb = "off"
        unmoved = cell.sweep(z, x, t)[0] if order == "gauss-seidel" else cell.lift(z, x, t)
    assert torch.equal(unmoved[0], found[0])
    assert not torch.equal(unmoved[1], found[1])


def test_no_gradient_goes_through_the_sign():
    cell = cell_of([(4, 4)] * 2, RINGS["heritage"], activation="tanh", perturb="always", order="jacobi")
    z, (x,) = [part.requires_grad_() for part in features(cell.sizes)], cell.prepare(randn(2, 3, 8, 8, seed=5))
    x = tuple(part.detach() for part in x)
    y = cell.lift(z, x)
    with torch.no_grad():
        delta = cell.perturbation * cell.reconstructed(0, y[0]).sign()
    sources = [*z, cell.W[0].layer.weight, cell.W[1].layer.weight, cell.U[1].layer.weight, cell.U[0].layer.weight]
    expected = torch.tanh(cell.preactivation(z, x)[1] - cell.injected(1, delta))
    close([y[1]], [expected])
    found, known = (torch.autograd.grad(v.square().sum(), sources, allow_unused=True) for v in (y[1], expected))
    assert found[-1] is None  # U of the first branch made nothing but the sign
    for one, other in zip(found[:-1], known[:-1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close([one], [other])


def test_in_eval_mode_training_with_perturbations_leaves_no_trace():
    one, other = model_of(perturb="train", perturbation=0.3), model_of()
    other.load_state_dict(one.state_dict())
    images = pictures()
    assert torch.equal(one(images), other(images))


def test_what_evaluation_normalises_by_is_of_unperturbed_branches():
    """By statistics of perturbed ones a trained model lost a quarter of its accuracy as soon as it was evaluated."""
    torch.manual_seed(0)
    one = model_of(perturb="train", perturbation=0.3, diversity=0.0).train()
    other = model_of(diversity=0.0).train()
    other.load_state_dict(one.state_dict())
    one.equilibrium.on_failure = "ignore"  # the sign in the perturbation jumps
    images = pictures(5)
    trained = one(images)
    other(images)
    for mine, its in zip(one.norm.buffers(), other.norm.buffers(), strict=True):
        torch.testing.assert_close(mine, its)
    assert one.cell.perturb == "train"
    with torch.no_grad():  # logits in training are those of perturbed branches, normalised by their own batch
        seen = torch.cat([part.mean(dim=(2, 3)) for part in one.branches(one.features(images))], dim=1)
        seen = (seen - seen.mean(0)) / (seen.var(0, correction=0) + one.norm.eps).sqrt()
        torch.testing.assert_close(trained, one.head(seen))
    assert not torch.allclose(trained, other(images), rtol=1e-3)
    assert one(images[:1]).isfinite().all()


def test_the_solve_that_gathers_statistics_is_not_one_that_is_trained():
    """It was counted as one, so that no more than half of the solves could ever fail."""
    model, images = model_of(full=False, perturb="train", perturbation=1.0).train(), pictures(4)
    model.equilibrium.tolerance, model.equilibrium.on_failure = eq.Tolerance(relative=1e-6, max_steps=8), "ignore"
    seen = []
    model.equilibrium.register_forward_hook(lambda module, given, z: seen.append(z))
    with eq.watch_solves() as solves:
        model(images).sum().backward()
    assert len(solves) == len(seen) == 1
    assert solves[0].backward is not None
    loss, _ = AugmentedClassification(("a", "b", "c")).loss(model, (images, torch.tensor([0, 1, 2, 0])))
    assert loss.isfinite()


@pytest.mark.parametrize("perturb", ["off", "always", "train"])
def test_perturbed_or_not_the_head_normalises_as_its_norm_says(perturb):
    model, images = model_of(full=False, perturb=perturb, perturbation=0.3).train(), pictures(4)
    model.equilibrium.on_failure = "ignore"
    before = model(images)
    model.norm.eps = 1.0
    changed = model(images)
    model.norm.eval()
    kept = copy.deepcopy(model.norm.state_dict())
    frozen = model(images)
    assert not torch.allclose(before, changed)
    assert not torch.allclose(changed, frozen)
    assert all(torch.equal(kept[name], value) for name, value in model.norm.state_dict().items())


def test_a_single_image_is_normalised_as_in_evaluation():
    model = model_of(full=False).train()
    model.stem.eval()
    model.norm.eps, image = 0.5, pictures(1)
    close([model(image)], [model.eval()(image)])


@each_order
def test_a_perturbed_equilibrium_is_that_of_perturbed_inputs(order):
    """At the fixed point the perturbation is a constant: T without it, given U_i (g - delta), has the same."""
    cell = cell_of([(6, 6)] * 3, RINGS["heritage"], order=order, perturb="always", perturbation=0.01, norm=0.5)
    g = randn(2, 3, 8, 8, seed=5)
    (x,), z = solved(cell, g, tolerance=eq.Tolerance(relative=1e-12, max_steps=300))
    with torch.no_grad():
        y = cell.lift(z, x)
        shifted = [x[0], *(x[i] - cell.injected(i, 0.01 * cell.reconstructed(i - 1, y[i - 1]).sign()) for i in (1, 2))]
        cell.perturb = "off"
        alone = eq.fixed_point(cell, cell.start, tuple(shifted), tolerance=TIGHT, on_failure="raise").value
    close(z, alone, 1e-10)


# --- sizes ----------------------------------------------------------------------------------------------------------

COUNTS = {  # name: (image, classes, parameters)
    "single-193k": ((3, 32, 32), 10, 192_714),
    "multi-0.48m": ((3, 32, 32), 10, 474_454),
    "multi-1.9m": ((3, 32, 32), 10, 1_882_018),
    "multi-8.1m": ((3, 32, 32), 10, 8_060_874),
    "imagenette-1.9m": ((3, 256, 256), 10, 1_897_094),
    "imagenette-10m": ((3, 256, 256), 10, 9_956_260),
    "imagenet-13m": ((3, 224, 224), 1000, 12_973_250),
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def on_paper(kind, shape, classes, **options):
    """A model without memory."""
    with torch.device("meta"):
        return kind(shape, classes, mean=(0.5,), std=(0.5,), **options)


def closed_form(size, classes, inputs=3, branches=None):
    C, L = size.channels, branches or len(size.scales)
    stem = 9 * inputs * C + (size.stem - 1) * 9 * C**2 + size.stem * 2 * C
    return stem + L * ((size.kernel**2 + size.injection_kernel**2) * C**2 + C) + (L * C + 1) * classes


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_parameters(name):
    shape, classes, parameters = COUNTS[name]
    assert count(on_paper(eq.models.MOptEq, shape, classes, size=name)) == parameters
    assert closed_form(SIZES[name], classes) == parameters


def test_counts_of_the_other_models():
    shape = (3, 32, 32)
    none, added, conv = (count(on_paper(eq.models.POptEq, shape, 10, fusion=f)) for f in ("none", "sum", "conv"))
    assert (none, added, conv) == (192_714, 192_074, 275_658)
    assert none == closed_form(SIZES["single-193k"], 10)
    assert added == none - 2 * 32 * 10
    assert conv == none + 9 * 96**2  # one convolution without bias over 3 x 32 channels
    assert count(on_paper(eq.models.OptEq, shape, 10)) == closed_form(SIZES["single-193k"], 10, branches=1)
    reduced = on_paper(eq.models.MOptEq, (1, 28, 28), 7, size="reduced")
    assert count(reduced) == closed_form(SIZES["reduced"], 7, inputs=1)


def test_every_size_has_a_count_and_fits_its_images():
    assert set(SIZES) == {*COUNTS, "reduced"}
    for name, (shape, classes, _) in COUNTS.items():
        sizes = on_paper(eq.models.MOptEq, shape, classes, size=name).cell.sizes
        side = shape[1] // 2 ** SIZES[name].downsamplings
        assert sizes == tuple((side // scale,) * 2 for scale in SIZES[name].scales)


def test_single_numbers_replace_those_of_a_size():
    model = on_paper(eq.models.MOptEq, (3, 32, 32), 10, size="multi-0.48m", channels=8, scales=[1, 4], stem=3)
    assert (model.size.channels, model.size.scales, model.size.stem) == (8, (1, 4), 3)
    assert (model.size.kernel, model.size.injection_kernel) == (3, 1)
    assert count(model) == closed_form(model.size, 10)


@pytest.mark.parametrize("name", ["opteq", "popteq", "mopteq"])
def test_models_have_names(name):
    assert name in eq.list_models()
    model = eq.create_model(name, shape=(1, 8, 8), classes=3, size="reduced", channels=4)
    assert model.eval()(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_an_empty_batch_has_nothing_to_tell():
    model = model_of()
    nothing = pictures(0)
    assert model.certificate(nothing).radius is None
    assert str(model.verify(nothing)) == "proposition 1 on no images"


# --- refusals -------------------------------------------------------------------------------------------------------

SIZE_NAMES = "reduced, single-193k, multi-0.48m"
REFUSED = {
    "size": (
        {"size": "single-193"},
        f"no size of OptEq 'single-193'; did you mean 'single-193k'\\? known: {SIZE_NAMES}",
    ),
    "no size": ({"size": None}, "no size of OptEq 'None'"),
    "no size in a list": ({"size": ["reduced"]}, r"no size of OptEq \"\['reduced'\]\""),
    "classes": ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
    "scales a truth": ({"scales": (True, 2)}, r"scales is \(True, 2\); it must be a list of whole numbers"),
    "channels": ({"channels": 0}, "channels is 0; it must be a whole number of at least 1"),
    "channels a fraction": ({"channels": 2.5}, "channels is 2.5; it must be a whole number"),
    "scales no list": ({"scales": 2}, "scales is 2; it must be a list of whole numbers of at least 1"),
    "scales zero": ({"scales": (1, 0)}, r"scales is \(1, 0\); it must be a list of whole numbers of at least 1"),
    "scales none": ({"scales": ()}, r"scales is (\(\)|empty).* one"),
    "scales too large": (
        {"scales": (1, 9)},
        r"scales is \(1, 9\), and g has 8 x 8 pixels: a branch needs",
    ),
    "scales after downsampling": ({"scales": (4,), "downsamplings": 2, "stem": 2}, "scales is .*g has 2 x 2 pixels"),
    "even kernel": ({"kernel": 4}, "kernel is 4; it must be odd, so that an image keeps its size"),
    "even injection kernel": ({"injection_kernel": 2}, "injection_kernel is 2; it must be odd"),
    "kernel zero": ({"kernel": 0}, "kernel is 0; it must be a whole number of at least 1"),
    "kernel a fraction": (
        {"injection_kernel": 3.0},
        "injection_kernel is 3.0; it must be a whole number of at least 1",
    ),
    "stem": ({"stem": 0}, "stem is 0; it must be a whole number of at least 1"),
    "downsamplings": ({"stem": 2, "downsamplings": 3}, "downsamplings is 3; .* at least 0 and at most 2"),
    "bound one": ({"bound": 1}, "bound is 1; it must be a number above 0 and below 1"),
    "bound zero": ({"bound": 0.0}, "bound is 0.0; it must be a number above 0 and below 1"),
    "bound a word": ({"bound": "0.9"}, "bound is '0.9'; it must be a number"),
    "heritage": ({"heritage": 1}, "heritage is 1; it must be a bool"),
    "diversity": ({"diversity": -0.1}, "diversity is -0.1; it must be a number of at least 0"),
    "diversity nan": ({"diversity": math.nan}, "diversity is nan; it must be a number of at least 0"),
    "sign": ({"sign": "soft"}, "sign is 'soft'; allowed: 'smooth', 'hard'"),
    "smoothing": ({"smoothing": 0}, "smoothing is 0; it must be a number above 0"),
    "order": ({"order": "seidel"}, "order is 'seidel'; allowed: 'gauss-seidel', 'jacobi'"),
    "perturb": ({"perturb": True}, "perturb is True; allowed: 'train', 'always', 'off'"),
    "perturb one": ({"perturb": "train", "scales": (1,)}, "perturb is 'train', and there is one branch.*'off', or"),
    "perturbation": ({"perturbation": -1}, "perturbation is -1; it must be a number of at least 0"),
    "gelu": ({"activation": "gelu"}, "activation is 'gelu'; it is not a proximal map.*Supported: relu"),
    "a module": ({"activation": nn.SiLU()}, "activation is SiLU.*not a proximal map.*Supported: relu"),
    "activation": ({"activation": "rellu"}, "no activation 'rellu'; did you mean 'relu'"),
    "mean and std": ({"mean": (0.5,) * 3}, r"mean is \(0.5, 0.5, 0.5\) and std is \(0.5,\)"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        eq.models.MOptEq(**{"shape": (3, 8, 8), "classes": 10, "size": "reduced", **options})


def test_refusals_of_fusion():
    make = lambda **options: eq.models.POptEq((3, 8, 8), 10, size="reduced", **options)
    with pytest.raises(ValueError, match="fusion is 'add'; allowed: 'none', 'sum', 'conv'"):
        make(fusion="add")
    for fusion in ("sum", "conv"):
        with pytest.raises(ValueError, match=rf"fusion is '{fusion}'.*differ in size \(scales \(1, 2\)\): use 'none'"):
            make(fusion=fusion, scales=(1, 2))
    make(fusion="sum", scales=(2, 2))


def test_options_that_a_model_does_not_have_are_refused():
    for name, option in (("opteq", "scales"), ("opteq", "order"), ("popteq", "heritage"), ("mopteq", "fusion")):
        with pytest.raises(TypeError, match=f"has no option '{option}'"):
            eq.create_model(name, shape=(3, 8, 8), classes=10, **{option: 1})


@pytest.mark.parametrize("side", [7, 9, 16])
def test_images_of_another_size_are_refused(side):
    model = model_of()
    words = f"images have shape \\(2, {side}, {side}\\); this model was made for \\(2, 8, 8\\).*Resize the images"
    for use in (model, model.verify, model.certificate):
        with pytest.raises(ValueError, match=words):
            use(pictures(1, side=side))


def test_images_of_other_channels_and_other_precision_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"images have shape \(1, 3, 8, 8\); it must be \(batch, 2, height, width\)"):
        model(pictures(1, channels=3))
    with pytest.raises(TypeError, match=r"images are torch.float64, and the model is torch.float32: images.to\("):
        model.float()(pictures(1))
    with pytest.raises(TypeError, match="weight is torch.bfloat16, too coarse.*torch.autocast"):
        model.bfloat16()(pictures(1).bfloat16())


def test_refusals_of_branches():
    make = lambda **options: Branches(
        **{"channels": 4, "sizes": [(4, 4)], "inputs": (4, 4, 4), "ring": Ring(), **options}
    )
    with pytest.raises(ValueError, match="sizes is empty; there must be at least one branch"):
        make(sizes=[])
    with pytest.raises(TypeError, match="ring is 'hard'; it must be a Ring"):
        make(ring="hard")
    with pytest.raises(ValueError, match=r"g has shape \(4, 5, 5\); these branches were made for \(4, 4, 4\)"):
        make().prepare(torch.rand(1, 4, 5, 5))
    with pytest.raises(ValueError, match="injection_bound is 0; it must be"):
        make(injection_bound=0)
    with pytest.raises(TypeError, match="Ring has no option 'lambda_'; .*options: heritage, diversity"):
        Ring(lambda_=0.1)

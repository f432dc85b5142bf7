"""Carrying features between resolutions, adjoints and norms, against dense matrices."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from corpus import DOUBLE, randn
from dense_opteq import (
    brought,
    cell_of,
    close,
    convolution,
    dense,
    each_size,
    images_of,
    matrices,
    model_of,
    norm,
    pictures,
)
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Ring, carry

# Carry


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


# Adjoints and norms


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

"""Norm bounds against dense truths: never below, and close."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.stability import norms
from equipoise.stability.norms import conv2d_norm_bound, operator_norm_bound


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (4, 2, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_operator_norm_bound_is_above_and_close(shape, dtype):
    matrix = torch.randn(*shape, dtype=dtype)
    truth = torch.linalg.matrix_norm(matrix, 2)
    bound = operator_norm_bound(matrix)
    assert (bound >= truth).all()
    assert (bound <= truth * min(shape[-2:]) ** (1 / 2**6)).all()


@pytest.mark.parametrize("n", [30, 300, 2000])
@pytest.mark.parametrize("value", [1.0, 0.4401, 1e-5 / 3])
def test_operator_norm_bound_holds_where_all_sums_are_rounded_alike(n, value):
    """A constant matrix has one singular value, so that the bound has no slack of its own."""
    matrix = torch.full((n, n), value)
    norm = n * float(matrix[0, 0])
    for iterations in (1, 3, 6):
        assert norm <= float(operator_norm_bound(matrix, iterations)) <= 1.001 * norm


def test_operator_norm_bound_of_zero_and_of_huge_matrices():
    assert operator_norm_bound(torch.zeros(3, 3)) == 0
    assert torch.isclose(operator_norm_bound(1e30 * torch.eye(3)), torch.tensor(1e30), rtol=0.02)


@pytest.mark.parametrize(("size", "kernel"), [((7, 6), (3, 3)), ((5, 5), (1, 1)), ((4, 9), (3, 5))])
def test_convolution_norm_bound_holds_for_the_zero_padded_operator(size, kernel):
    conv = nn.Conv2d(3, 2, kernel, padding="same", bias=False).double()
    operator = torch.autograd.functional.jacobian(
        lambda x: conv(x[None])[0], torch.zeros(3, *size, dtype=torch.float64)
    ).reshape(2 * size[0] * size[1], -1)
    truth = torch.linalg.matrix_norm(operator, 2)
    bound = conv2d_norm_bound(conv.weight, size)
    assert truth <= bound <= 1.3 * truth


@pytest.mark.parametrize("factor", [1e-42, 1e-30, 1.0, 1e20, 1e30])
def test_the_norm_of_a_convolution_of_any_scale_is_bounded(factor):
    torch.manual_seed(0)
    kernel = torch.randn(4, 4, 3, 3)
    bound = conv2d_norm_bound(factor * kernel, (5, 5)).item()
    assert bound == pytest.approx(
        factor * conv2d_norm_bound(kernel, (5, 5)).item(), rel=0.1 if factor < 1e-40 else 1e-4
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_norm_of_a_convolution_that_is_not_finite_is_not_either(value):
    kernel = torch.ones(2, 2, 3, 3)
    kernel[0, 0, 0, 0] = value
    assert not conv2d_norm_bound(kernel, (5, 5)).isfinite()


def norms_of_blocks(kernel, grid):
    """Of a circular convolution on a grid of that size, by the FFT and a dense decomposition."""
    blocks = torch.fft.fft2(kernel, s=grid).permute(2, 3, 0, 1)
    return torch.linalg.matrix_norm(blocks, 2)


@pytest.mark.parametrize("shape", [(5, 5, 3, 3), (7, 3, 3, 2), (3, 7, 5, 3), (1, 1, 3, 3)])
@pytest.mark.parametrize("cached", [1, 200, 2**20])  # one block at a time, a few, all
def test_the_largest_block_is_found_without_bounding_them_all(shape, cached, monkeypatch):
    monkeypatch.setattr(norms, "CACHED", cached)
    draws, grid = torch.Generator().manual_seed(0), (9, 8)
    for smooth in (False, True) * 10:
        kernel = torch.randn(shape, dtype=torch.float64, generator=draws)
        if smooth:
            kernel = kernel.mean(dim=(2, 3), keepdim=True) + 0.1 * kernel  # one that passes low frequencies
        blocks = torch.fft.rfft2(kernel, s=grid).permute(2, 3, 0, 1).flatten(0, 1)
        found = norms.block(kernel, norms.largest_block(kernel, grid, 6))
        torch.testing.assert_close(operator_norm_bound(found, 6), operator_norm_bound(blocks, 6).max())
        truth = norms_of_blocks(kernel, grid).max()
        assert truth <= operator_norm_bound(found, 6) * (1 + 1e-12)
    zero = torch.zeros(shape)
    assert operator_norm_bound(norms.block(zero, norms.largest_block(zero, grid, 6))) == 0


@pytest.mark.parametrize("shape", [(5, 4, 3, 3), (3, 7, 5, 3), (4, 4, 1, 1), (2, 3, 1, 3), (3, 3, 4, 1)])
def test_the_series_of_gram_matrices(shape):
    grid, kernel = (9, 8), torch.randn(shape, dtype=torch.float64)
    blocks = torch.fft.rfft2(kernel, s=grid).permute(2, 3, 0, 1).flatten(0, 1)
    even, odd, cos, sin = norms.gram_series(kernel.permute(2, 3, 0, 1), norms.tap_angles(kernel, grid))
    grams = torch.complex(cos @ even, sin @ odd).view(-1, shape[1], shape[1])
    torch.testing.assert_close(grams, blocks.mH @ blocks)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.tuples(st.integers(1, 5), st.integers(1, 5)), st.sampled_from([2, 3, 4, 20]))
def test_norms_between_the_frequencies_are_bounded_too(seed, taps, frequencies):
    """The lemma of Riesz against a fine grid, with so few frequencies that it is needed."""
    draws = torch.Generator().manual_seed(seed)
    kernel = torch.randn(3, 2, *taps, dtype=torch.float64, generator=draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "FREQUENCIES", frequencies)
        grid, slack = norms.frequency_grid(kernel, (210, 201))
        bound = conv2d_norm_bound(kernel, (210, 201), iterations=12)
    assert grid == tuple(max(1, frequencies * (k - 1)) for k in taps)
    fine = norms_of_blocks(kernel, (210, 201)).max()
    assert fine <= bound * (1 + 1e-12)
    assert fine <= slack * norms_of_blocks(kernel, grid).max() * (1 + 1e-12)
    assert bound <= slack * 1.001 * fine  # on the coarse grid itself nothing is lost
    if frequencies == 20:
        assert slack < 1.0065


def test_on_small_images_norms_are_compared_on_the_grid_itself():
    assert norms.frequency_grid(torch.zeros(2, 2, 3, 3), (32, 38)) == ((34, 40), 1.0)
    grid, slack = norms.frequency_grid(torch.zeros(2, 2, 3, 5), (39, 64))
    assert grid == (40, 68)
    assert slack == pytest.approx(1 / math.cos(math.pi / 40))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: operator_norm_bound(torch.ones(3)), r"matrix is a tensor of shape \(3,\); it must be .*rows, columns"),
        (lambda: operator_norm_bound(None), "matrix is None; it must be a tensor"),
        (lambda: operator_norm_bound(torch.eye(3), 1.5), "iterations is 1.5; it must be a whole number of at least 0"),
        (lambda: operator_norm_bound(torch.eye(3), -1), "iterations is -1"),
        (lambda: conv2d_norm_bound(torch.eye(3), (4, 4)), r"kernel is a tensor of shape \(3, 3\); it must be"),
        (lambda: conv2d_norm_bound("kernel", (4, 4)), "kernel is 'kernel'; it must be a tensor"),
        (lambda: conv2d_norm_bound(torch.ones(1, 1, 3, 3), 4), r"size is 4; it must be \(height, width\)"),
        (lambda: conv2d_norm_bound(torch.ones(1, 1, 3, 3), (4, 4.0)), r"size is \(4, 4.0\)"),
    ],
)
def test_invalid_matrices_and_kernels_are_rejected(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()

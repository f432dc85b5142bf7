"""Measurements: adjoints to rounding, operators against dense matrices, masks inside the image, noise by its source."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.tasks.physics import (
    Compose,
    Downsampling,
    GaussianBlur,
    GaussianNoise,
    Identity,
    Mask,
    MatrixOperator,
    adjoint_error,
    gathers,
    require_physics,
    square_masks,
)

D = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=D)


class Foreign:
    """A physics as another library would write it: no class of ours, keyword arguments, noise of its own."""

    noise_model = None

    def A(self, x, **kwargs):
        return x.flip(-1) * 2

    def A_adjoint(self, y, **kwargs):
        return y.flip(-1) * 2


def operators(shape):
    """Operators of images of a shape (channels, height, width), by name."""
    channels, height, width = shape
    pixels = math.prod(shape)
    factor = math.gcd(height, width)
    factor = next(n for n in (3, 2, 1) if factor % n == 0)
    mask = Mask(torch.rand(1, height, width, generator=generator(1)).round())
    half = (channels, height // factor, width // factor)
    return {
        "identity": Identity(),
        "mask": mask,
        "weights": Mask(randn(2, 1, height, width, seed=2)),
        "blur": GaussianBlur(1.3),
        "wide blur": GaussianBlur(7.0),
        "down": Downsampling(factor),
        "matrix": MatrixOperator(randn(5, pixels, seed=3), shape),
        "down of blur": Downsampling(factor) @ GaussianBlur(0.8),
        "mask of blur of mask": mask @ GaussianBlur(0.8) @ mask,
        "matrix of down": MatrixOperator(randn(4, math.prod(half), seed=4), half) @ Downsampling(factor),
        "foreign": Compose(Foreign(), mask),
    }


def dense(physics, shape):
    """The matrix of an operator on one image, column by column."""
    basis = torch.eye(math.prod(shape), dtype=D).view(-1, *shape)
    return torch.cat([physics.A(column[None].repeat(2, 1, 1, 1))[:1].flatten(1) for column in basis]).mT


sides = st.integers(1, 7)


@given(st.tuples(st.integers(1, 3), sides, sides), st.integers(0, 9))
def test_adjoints_are_exact(shape, seed):
    for name, physics in operators(shape).items():
        assert adjoint_error(physics, randn(2, *shape, seed=seed), generator(seed)) < 1e-14, name


@pytest.mark.parametrize("name", operators((2, 6, 4)))
def test_the_adjoint_is_the_transposed_matrix(name):
    shape = (2, 6, 4)
    physics = operators(shape)[name]
    matrix, x = dense(physics, shape), randn(2, *shape)
    y = physics.A(x)
    torch.testing.assert_close(y[:1].flatten(1), x[:1].flatten(1) @ matrix.mT, rtol=1e-12, atol=1e-12)
    back = physics.A_adjoint(y)
    assert back.shape == x.shape
    torch.testing.assert_close(back[:1].flatten(1), y[:1].flatten(1) @ matrix, rtol=1e-12, atol=1e-12)


def test_a_blur_is_the_wrapped_sum_of_a_gaussian():
    sigma, size = 1.7, 6
    kernel = torch.zeros(size, size, dtype=D)
    for i in range(-40, 41):
        for j in range(-40, 41):
            kernel[i % size, j % size] += math.exp(-(i * i + j * j) / (2 * sigma**2))
    kernel /= kernel.sum()
    x = randn(1, 1, size, size)
    expected = sum(kernel[i, j] * x.roll((i, j), (2, 3)) for i in range(size) for j in range(size))
    torch.testing.assert_close(GaussianBlur(sigma).A(x), expected, rtol=1e-12, atol=1e-12)


def test_down_sampling_averages_blocks():
    x = torch.arange(16.0, dtype=D).view(1, 1, 4, 4)
    assert Downsampling(2).A(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    y = randn(1, 1, 2, 2)
    torch.testing.assert_close(Downsampling(2).A(Downsampling(2).A_adjoint(y)), y / 4)


@given(st.integers(2, 12), st.integers(2, 12), st.data())
def test_squares_are_whole_and_inside(height, width, data):
    side = data.draw(st.integers(1, min(height, width) - 1))
    masks = square_masks(20, (3, height, width), side, generator(data.draw(st.integers(0, 5))))
    assert masks.shape == (20, 1, height, width)
    for hidden in masks[:, 0] == 0:
        rows, columns = hidden.any(1).nonzero()[:, 0], hidden.any(0).nonzero()[:, 0]
        assert len(rows) == len(columns) == side
        assert int(rows[-1] - rows[0]) == int(columns[-1] - columns[0]) == side - 1
        assert int(hidden.sum()) == side * side


def test_the_centre_of_a_square_is_uniform():
    masks = square_masks(4000, (1, 16, 16), 6, generator())
    starts = (masks[:, 0] == 0).any(2).int().argmax(1)
    counts = torch.bincount(starts, minlength=11)
    assert counts[10:].sum() == 0  # the centre is below S - side / 2
    assert counts[:10].min() > 320
    assert counts[:10].max() < 480


def test_noise_has_its_size_and_comes_from_its_source():
    x = torch.zeros(4, 3, 40, 40, dtype=D)
    first, second, other = (Identity(GaussianNoise(0.2, generator(seed)))(x) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert abs(float(first.std()) - 0.2) < 0.005
    assert torch.equal(x, torch.zeros_like(x))  # never changed in place
    before = torch.get_rng_state()
    GaussianNoise(0.2, generator())(x)
    assert torch.equal(before, torch.get_rng_state())


def test_measuring_is_a_followed_by_noise():
    x = randn(2, 1, 4, 4)
    physics = Downsampling(2, GaussianNoise(0.1, generator(5)))
    torch.testing.assert_close(physics(x), Downsampling(2).A(x) + 0.1 * randn(2, 1, 2, 2, seed=5))
    composed = Downsampling(2, lambda y: y + 1) @ GaussianBlur(1.0)
    torch.testing.assert_close(composed(x), composed.A(x) + 1)
    with pytest.raises(ValueError, match="inner operator GaussianBlur has noise"):
        Downsampling(2) @ GaussianBlur(1.0, GaussianNoise(0.1))


def test_operators_of_some_samples():
    shape, rows = (1, 6, 6), torch.tensor([3, 1])
    masks = square_masks(4, shape, 2, generator())
    x = randn(4, *shape)
    for physics in (Mask(masks), GaussianBlur(1.0) @ Mask(masks), Mask(masks[:1]), Mask(masks[0, 0]), Identity()):
        assert gathers(physics)
        torch.testing.assert_close(physics.take(rows).A(x[rows]), physics.A(x)[rows])
    assert not gathers(Compose(Foreign(), Mask(masks)))


def test_half_precision_is_kept():
    x = randn(1, 1, 4, 4).to(torch.bfloat16)
    assert GaussianBlur(1.0).A(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianNoise(-0.1), "GaussianNoise.sigma is -0.1; it must be a number of at least 0"),
        (lambda: GaussianNoise(0.1, 3), "GaussianNoise.rng is 3"),
        (lambda: GaussianBlur(0), "GaussianBlur.sigma is 0; it must be a number above 0"),
        (lambda: Downsampling(1.5), "Downsampling.factor is 1.5; it must be a whole number"),
        (lambda: Downsampling(4).A(torch.zeros(1, 1, 6, 6)), "6 x 6; height and width must be multiples of 4"),
        (lambda: Mask(torch.zeros(3)), "Mask.mask is (3,)"),
        (lambda: Mask(torch.zeros(3, 3)).A(torch.zeros(1, 1, 6, 6)), "the mask has shape (3, 3), the images"),
        (lambda: MatrixOperator(torch.zeros(2, 3), (1, 2, 2)), "MatrixOperator.matrix is (2, 3)"),
        (lambda: MatrixOperator([[1.0]], (1, 1, 1)), "MatrixOperator.matrix has type list; it must be a tensor"),
        (lambda: MatrixOperator(torch.zeros(2, 4), (1, 2, 2)).A(torch.zeros(1, 4)), "images have shape (4,)"),
        (lambda: square_masks(1, (3, 8, 8), 8, generator()), "side is 8; it must be a whole number of at least 1 and"),
        (lambda: Identity(3), "Identity.noise_model is 3"),
        (lambda: require_physics(3), "physics is 3; it must be an object with the methods A(x) and A_adjoint(y)"),
        (lambda: require_physics(Identity), "it must be an object with the methods"),
    ],
)
def test_errors(make, message):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("sigma", [24.0, 100.0, 1e9])
def test_a_blur_much_wider_than_the_image_is_its_mean(sigma):
    """A kernel of that width, sampled as it is, would need the memory of all its turns around the image."""
    x = randn(2, 3, 6, 5)
    torch.testing.assert_close(GaussianBlur(sigma).A(x), x.mean((2, 3), keepdim=True).expand_as(x))

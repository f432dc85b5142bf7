"""Plain restoration: total variation against closed forms and a general optimiser, filters against loops."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.optimize import minimize

from equipoise.tasks.degradations import Degradation, seeds_of
from equipoise.tasks.physics import Downsampling, GaussianBlur, Identity, Mask
from equipoise.tasks.plain_restoration import (
    bicubic,
    differences,
    differences_adjoint,
    median_filter,
    restore_plainly,
    squared_norm,
    total_variation,
)

D = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def scene(count=2, size=16):
    """Discs on a slope: edges and smooth parts."""
    rows, columns = torch.meshgrid(*[torch.arange(size, dtype=D)] * 2, indexing="ij")
    discs = [((rows - 5 - i) ** 2 + (columns - 6) ** 2 < 16).double() - 0.5 + columns / size / 2 for i in range(count)]
    return torch.stack(discs)[:, None].clamp(-1, 1)


def test_differences_have_their_adjoint():
    x, slope = randn(2, 3, 5, 4), randn(2, 2, 3, 5, 4, seed=1)
    left, right = (differences(x) * slope).sum(), (x * differences_adjoint(slope)).sum()
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_total_variation_of_a_step_has_a_closed_form():
    """Of a on n samples and b on m, the minimiser moves each level towards the other by weight / n and weight / m."""
    y = torch.cat([torch.full((1, 1, 1, 4), -0.5, dtype=D), torch.full((1, 1, 1, 8), 0.7, dtype=D)], dim=3)
    x = total_variation(y, Identity(), (1, 1, 12), weight=0.4, steps=5000)
    expected = torch.cat([torch.full((4,), -0.5 + 0.4 / 4), torch.full((8,), 0.7 - 0.4 / 8)]).double()
    torch.testing.assert_close(x[0, 0, 0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("physics", [GaussianBlur(0.7), Downsampling(2), Mask((randn(4, 4) > -0.5).double())])
def test_total_variation_reaches_the_minimum_of_a_general_optimiser(physics):
    weight, truth = 0.1, scene(1, 4) / 2
    y = physics.A(truth + 0.1 * randn(1, 1, 4, 4, seed=3))

    def objective(x, eps):
        x = torch.as_tensor(x, dtype=D).view(1, 1, 4, 4).requires_grad_()
        lengths = (differences(x).square().sum(0) + eps).sqrt()
        value = (physics.A(x) - y).square().sum() / 2 + weight * lengths.sum()
        return float(value.detach()), torch.autograd.grad(value, x)[0].flatten().numpy()

    x = np.zeros(16)
    for eps in (1e-2, 1e-4, 1e-6, 1e-8):
        x = minimize(objective, x, args=(eps,), jac=True, method="BFGS", options={"maxiter": 300}).x
    best, _ = objective(x, 0.0)
    ours, _ = objective(total_variation(y, physics, (1, 4, 4), weight, steps=2000).numpy(), 0.0)
    assert ours <= best + 1e-6


def test_the_norm_is_not_below_that_of_the_matrix():
    physics = Mask(2 * torch.rand(4, 4, generator=torch.Generator().manual_seed(0), dtype=D))
    largest = float(physics.mask.abs().max()) ** 2
    assert largest <= squared_norm(physics, randn(1, 1, 4, 4)) <= 1.06 * largest


def test_the_median_filter_is_that_of_scipy():
    x = randn(2, 3, 7, 6)
    expected = np.stack([[ndimage.median_filter(c, 3, mode="nearest") for c in image] for image in x.numpy()])
    assert np.array_equal(median_filter(x).numpy(), expected)


def test_a_hole_is_filled_from_its_border():
    x = torch.full((1, 2, 8, 8), 0.25, dtype=D)
    mask = torch.ones(8, 8)
    mask[2:7, 2:7] = 0
    filled = median_filter(Mask(mask).A(x), Mask(mask))
    torch.testing.assert_close(filled, x)
    known = randn(1, 2, 8, 8)
    kept = median_filter(Mask(mask).A(known), Mask(mask))
    assert torch.equal(kept * mask, known * mask)
    assert float(kept.abs().max()) <= float((known * mask).abs().max())
    assert torch.equal(median_filter(x, Mask(torch.zeros(8, 8))), torch.zeros_like(x))


def test_bicubic_is_exact_for_a_constant_and_keeps_the_range():
    flat = torch.full((1, 3, 4, 4), 0.5, dtype=D)
    torch.testing.assert_close(bicubic(flat, (3, 8, 8)), torch.full((1, 3, 8, 8), 0.5, dtype=D))
    assert float(bicubic(randn(1, 1, 4, 4).sign(), (1, 8, 8)).abs().max()) <= 1


@pytest.mark.parametrize(("problem", "amount"), [("inpaint", 4), ("denoise", 0.2), ("deblur", 1.0), ("upscale", 2)])
def test_every_problem_is_restored_better_than_given(problem, amount):
    truth = scene()
    degradation = Degradation(problem, amount)
    y, physics = degradation.measure(truth, seeds_of(truth))
    given = y if y.shape == truth.shape else y.repeat_interleave(2, 2).repeat_interleave(2, 3)
    restored = restore_plainly(y, physics, degradation, (1, 16, 16))
    assert (restored - truth).square().mean() < 0.8 * (given - truth).square().mean()


def test_nothing_lost_is_returned():
    y = randn(1, 1, 4, 4)
    assert restore_plainly(y, Identity(), Degradation("reconstruct"), (1, 4, 4)) is y


def test_errors():
    with pytest.raises(ValueError, match="side is 4; it must be an odd whole number"):
        median_filter(randn(1, 1, 4, 4), side=4)
    with pytest.raises(ValueError, match="weight is -1; it must be a number of at least 0"):
        total_variation(randn(1, 1, 4, 4), Identity(), (1, 4, 4), weight=-1)

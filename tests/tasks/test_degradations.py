"""Degradations by name: what they measure, the same for the same image; options that are checked."""

import pytest
import torch

from equipoise.tasks.degradations import KINDS, Degradation, random_seeds, seeds_of
from equipoise.tasks.physics import Downsampling, GaussianBlur, Identity, Mask


def images(count=4, shape=(3, 8, 8), seed=0):
    return 2 * torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed)) - 1


@pytest.mark.parametrize(
    ("problem", "amount", "kind"),
    [
        ("inpaint", 3, Mask),
        ("denoise", 0.2, Identity),
        ("deblur", 1.5, GaussianBlur),
        ("upscale", 2, Downsampling),
        ("reconstruct", None, Identity),
    ],
)
def test_an_image_is_degraded_in_the_same_way_in_every_batch(problem, amount, kind):
    truth = images()
    degradation = Degradation(problem, amount)
    measured, physics = degradation.measure(truth, seeds_of(truth))
    assert isinstance(physics, kind)
    for row in range(4):
        alone, _ = degradation.measure(truth[row : row + 1], seeds_of(truth[row : row + 1]))
        torch.testing.assert_close(alone[0], measured[row])
    if problem == "denoise":
        assert abs(float((measured - truth).std()) - 0.2) < 0.02
    else:
        torch.testing.assert_close(measured, physics.A(truth))


def test_other_images_are_degraded_differently():
    truth = images(50)
    _, physics = Degradation("inpaint", 3).measure(truth, seeds_of(truth))
    assert isinstance(physics, Mask)
    assert len({tuple(mask.flatten().tolist()) for mask in physics.mask}) > 10
    assert bool((physics.mask.flatten(1) == 0).sum(1).eq(9).all())
    assert len(set(seeds_of(truth).tolist())) == 50


def test_seeds_survive_a_change_of_precision():
    levels = torch.randint(256, (3, 1, 6, 6), generator=torch.Generator().manual_seed(0))
    single, double = (2 * (levels.to(dtype) / 255) - 1 for dtype in (torch.float32, torch.float64))
    assert torch.equal(seeds_of(single), seeds_of(double))
    source = torch.Generator().manual_seed(1)
    assert len(random_seeds(5, source).unique()) == 5


def test_defaults():
    assert {problem: Degradation(problem).amount for problem in KINDS} == {
        "reconstruct": 0, "inpaint": 20, "denoise": 0.2, "deblur": 2.0, "upscale": 2
    }  # fmt: skip
    assert Degradation("inpaint", 10.0).amount == 10


@pytest.mark.parametrize(
    ("problem", "amount", "message"),
    [
        ("inpant", 3, "Degradation.problem is 'inpant'; allowed: 'reconstruct', 'inpaint'"),
        ("inpaint", 2.5, "in pixels) is 2.5; it must be a whole number of at least 1"),
        ("denoise", -0.1, "for pixels in [-1, 1]) is -0.1; it must be a number of at least 0"),
        ("deblur", 0, "in pixels) is 0; it must be a number above 0"),
        ("upscale", 1, "is 1; it must be a whole number of at least 2"),
        ("denoise", "much", "is 'much'"),
    ],
)
def test_errors_of_options(problem, amount, message):
    with pytest.raises((ValueError, TypeError)) as error:
        Degradation(problem, amount)
    assert message in str(error.value)


def test_errors_of_sizes():
    truth = images(1)
    with pytest.raises(ValueError, match="a hidden square of side 8 does not fit into images of 8 x 8"):
        Degradation("inpaint", 8).measure(truth, seeds_of(truth))
    with pytest.raises(ValueError, match="images of 8 x 8 cannot be shrunk by 3"):
        Degradation("upscale", 3).measure(truth, seeds_of(truth))

"""Restoring by a fixed generator: optima against a general optimiser, operators of each sample, steps that are kept."""

import re
from types import SimpleNamespace

import pytest
import torch

import equipoise as eq
from equipoise.tasks import latent_vectors
from equipoise.tasks.physics import Compose, Downsampling, GaussianBlur, Identity, Mask, MatrixOperator, square_masks
from equipoise.tasks.restore_images import as_images, fit_measurements, restore, restore_by_adam
from equipoise.tasks.snapshots import Snapshots
from smooth_generator import SmoothGenerator, smooth_images

D = torch.float64
SHAPE = (1, 4, 4)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def masks(count):
    return square_masks(count, SHAPE, 2, torch.Generator().manual_seed(0))


class Foreign:
    """A physics of another library: per-sample state, keyword arguments, no ``take``."""

    def __init__(self, count):
        self.masks = masks(count).double()

    def A(self, x, **kwargs):
        return self.masks * x

    A_adjoint = A


PHYSICS = {
    "identity": Identity(),
    "masks": Mask(masks(5)),
    "blur": GaussianBlur(0.7),
    "down": Downsampling(2),
    "matrix": MatrixOperator(randn(6, 16), SHAPE),
    "composed": Downsampling(2) @ GaussianBlur(0.7),
    "foreign": Foreign(5),
    "foreign composed": Compose(GaussianBlur(0.7), Foreign(5)),
}


@pytest.mark.parametrize("name", PHYSICS)
def test_the_optimum_is_a_minimum_of_the_misfit(name):
    """The misfit as a function of x alone, z* solved for, has no descent at the latent vectors found."""
    physics, generator, truth = PHYSICS[name], SmoothGenerator(), smooth_images(5)
    y = physics.A(truth)
    images, optimum = restore(generator, y, physics, steps=300)
    assert int(optimum.converged.sum()) >= 3

    def misfit(x):
        x = x.clone().requires_grad_()
        value = (physics.A(generator(x)) - y).square().flatten(1).sum(1)
        (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope.norm(dim=1)

    solved = optimum.converged
    (found, slope), (start, first) = misfit(optimum.x), misfit(torch.zeros(5, 2, dtype=D))
    assert bool((slope < 0.02 * first)[solved].all())
    assert bool((found < 0.5 * start).all())
    for direction in torch.eye(2, dtype=D):  # neighbours are worse
        for sign in (-0.2, 0.2):
            assert bool((misfit(optimum.x + sign * direction)[0] > found)[solved].all())
    torch.testing.assert_close(found[solved], optimum.cost[solved], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(images, generator.image(optimum.z).detach())
    close = (images - generator(optimum.x).detach()).abs().flatten(1).amax(1)
    assert bool((close[solved] < 0.02).all())
    assert not images.requires_grad


def test_a_sample_does_not_depend_on_its_batch():
    """Samples stop at different steps; those that remain keep their own operators."""
    generator, truth = SmoothGenerator(), smooth_images(5)
    for physics in (Mask(masks(5)), Foreign(5)):
        y = physics.A(truth)
        together = fit_measurements(generator, y, physics, steps=60)
        assert len(set(together.stats.steps.tolist())) > 1
        for row in range(5):
            alone = fit_measurements(generator, y[row : row + 1], Mask(masks(5)[row : row + 1]), steps=60)
            # Rounding differs with the size of a batch, and acceleration amplifies it until the solve converges.
            torch.testing.assert_close(alone.x[0], together.x[row], rtol=1e-3, atol=1e-4)


def test_the_weights_and_the_measurements_are_left_alone():
    generator, truth = SmoothGenerator(), smooth_images(2)
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    y = truth.clone()
    restore(generator, y, Identity(), steps=5)
    assert torch.equal(y, truth)
    assert all(torch.equal(value, before[name]) for name, value in generator.state_dict().items())
    assert all(parameter.grad is None for parameter in generator.parameters())


def test_adam_uses_as_many_evaluations_and_joint_steps_get_further():
    generator, physics, truth = SmoothGenerator(), GaussianBlur(0.7), smooth_images(5)
    y = physics.A(truth)
    for inner in (1, 2, 4):
        adam = restore_by_adam(generator, y, physics, evaluations=60, inner=inner).optimum
        assert 60 - inner <= adam.stats.evaluations <= 60 + 2  # the first ones check f
    joint = restore(generator, y, physics, steps=60).optimum
    adam = restore_by_adam(generator, y, physics, evaluations=60).optimum
    assert joint.check().cost.median() < adam.check().cost.median()
    with pytest.raises(ValueError, match="evaluations is 3; it must be a whole number of at least 6"):
        restore_by_adam(generator, y, physics, evaluations=3)


def test_snapshots_are_the_iterates():
    generator, truth = SmoothGenerator(), smooth_images(5)
    snapshots, every = Snapshots(generator, (1, 7, 30, 100)), {}

    def both(progress):
        snapshots(progress)
        every[progress.step] = (progress.rows.clone(), generator.image(progress.value[0]).detach().clone())

    restore(generator, truth, Identity(), steps=100, callback=both)
    last = max(every)
    assert list(snapshots.images) == [step for step in (1, 7, 30, 100) if step <= last]
    kept = torch.full_like(truth, torch.nan)
    for step, (rows, images) in every.items():
        kept[rows] = images
        if step in snapshots.images:
            torch.testing.assert_close(snapshots.images[step], kept)


def test_measurements_are_shown_as_images():
    y = randn(2, 1, 2, 2)
    shown = as_images(y, Downsampling(2), SHAPE)
    torch.testing.assert_close(shown, y.repeat_interleave(2, 2).repeat_interleave(2, 3))
    assert as_images(shown, Identity(), SHAPE) is shown
    physics = MatrixOperator(randn(6, 16), SHAPE)
    back = as_images(randn(2, 6), physics, SHAPE)
    assert back.shape == (2, *SHAPE)
    assert float(back.abs().max()) == pytest.approx(1)


def test_errors():
    generator, y = SmoothGenerator(), smooth_images(2)
    with pytest.raises(TypeError, match="physics is 3; it must be an object with the methods A"):
        restore(generator, y, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("y has shape (2, 1, 4, 4); the physics maps images (2, 1, 4, 4)")):
        restore(generator, y, Downsampling(2))
    with pytest.raises(TypeError, match="y is torch.int64"):
        restore(generator, y.long(), Identity())
    wide = eq.create_model("generator", shape=(1, 16, 16), size="small-2", channels=[8, 8], latent=4).double()
    with pytest.raises(TypeError, match="y is torch.float32, the generator torch.float64: convert one of them"):
        restore(wide, y.float(), Identity())
    nothing = SimpleNamespace(A=lambda x: None, A_adjoint=lambda y: y)
    with pytest.raises(TypeError, match=re.escape("maps images to None; A(x) must return a tensor")):
        restore(generator, y, nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator has type Linear"):
        restore(torch.nn.Linear(2, 2), y, Identity())  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="max_steps"):
        restore(generator, y, Identity(), steps=0)


def test_the_joint_tolerance_can_be_met(monkeypatch):
    monkeypatch.setattr(latent_vectors, "RELATIVE", 1e-10)
    optimum = fit_measurements(SmoothGenerator(), smooth_images(2), Identity(), steps=400, solver=eq.JointAnderson())
    assert float(optimum.stats.residual.max()) < 1e-6

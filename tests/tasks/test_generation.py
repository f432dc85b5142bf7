"""Generation: latent vectors found jointly, gradients against finite differences, pictures, two processes."""

import io
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.lab.runs import checkpoints
from equipoise.stability import jacobian_penalty
from equipoise.tasks.generation import Generation
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error
from equipoise.tasks.low_frequencies import low_frequencies
from equipoise.tasks.random_iterate import RandomIterate
from lab_helpers import latest, run, run_two
from tiny_generator import tiny


def images_of(model, samples=4, scale=1.0):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(scale * torch.randn(samples, model.latent, dtype=torch.float64))


def first_kernel(model) -> torch.Tensor:
    return model.get_parameter("equilibrium.f.cell.blocks.0.0.conv1.layer.weight")


def test_fit_finds_a_latent_vector_of_an_image_that_the_model_made():
    model = tiny()
    truth = images_of(model)
    blank = squared_error(model(torch.zeros(4, 3, dtype=torch.float64)), truth[:, 0], truth)
    with torch.no_grad():
        optimum = fit(model, squared_error, truth, steps=100)
    assert (optimum.check().cost <= 0.05 * blank).all()


def test_weight_norm_needs_no_gradient_to_be_enabled():
    """Under no_grad, derived weights are constants of the solve; they once were taken for a mistake in f."""
    model = tiny()
    truth = images_of(model)
    with torch.no_grad():
        without = fit(model, squared_error, truth, steps=10)
    with_gradients = fit(model, squared_error, truth, steps=10)
    torch.testing.assert_close(without.x, with_gradients.x.detach())


def test_gradient_of_the_loss_agrees_with_finite_differences():
    """Eq. 19, at latent vectors that are found to 1e-9."""
    model = tiny(activation="softplus")
    truth = images_of(model, scale=0.05)
    truth += 0.02 * torch.randn_like(truth)
    tight = eq.Tolerance(relative=1e-9, max_steps=2000)

    def cost():
        x = torch.zeros(4, 3, dtype=torch.float64)
        return eq.optimize_input(
            lambda z, x, y: model.f(z, x),
            lambda z, x, y: squared_error(model.image(z), x, y) + 0.01 * x.square().sum(dim=1),
            x,
            model.start(x),
            truth,
            tolerance=tight,
        )

    first = cost()
    assert first.converged.all()
    weights = [model.f.inject[0].weight, model.image.layers[0].weight, first_kernel(model)]
    slopes = torch.autograd.grad(first.cost.sum(), weights)
    for weight, slope in zip(weights, slopes, strict=True):
        direction = torch.randn_like(weight)
        with torch.no_grad():
            weight += 1e-5 * direction
            above = cost().cost.sum()
            weight -= 2e-5 * direction
            below = cost().cost.sum()
            weight += 1e-5 * direction
        assert float((slope * direction).sum()) == pytest.approx(float(above - below) / 2e-5, rel=2e-4)


def progress(step, rows, value) -> Any:
    return SimpleNamespace(step=step, rows=torch.tensor(rows), value=value)


def test_random_iterate_is_that_of_the_step_drawn_or_the_last():
    torch.manual_seed(0)
    iterate = RandomIterate(3, 2, 4, torch.device("cpu"))
    assert ((iterate.step >= 2) & (iterate.step <= 4)).all()
    iterate.step = torch.tensor([2, 4, 3])
    for step in range(1, 6):
        rows = [0, 1, 2] if step < 3 else [0, 1]  # the last sample stops after two steps
        z = torch.full((len(rows), 5), float(step))
        iterate(progress(step, rows, ((z,), None, 10 * z[:, :2])))
    assert iterate.z[0][:, 0].tolist() == [2, 4, 2]
    assert iterate.x[:, 0].tolist() == [20, 40, 20]


def test_penalty_is_added_with_its_weight():
    model, truth = tiny(), images_of(tiny(seed=2))

    def loss(**options):
        torch.manual_seed(5)
        return Generation(steps=6, penalty_from=6, **options).loss(model, (truth,))

    (plain, _), (light, sums), (heavy, _) = loss(jacobian=0.0), loss(jacobian=0.5), loss(jacobian=1.0)
    penalty = sums["penalty"].item() / 4
    assert (light - plain).item() == pytest.approx(0.5 * penalty, rel=1e-9)
    assert (heavy - plain).item() == pytest.approx(penalty, rel=1e-9)
    weight = first_kernel(model)
    slopes = [torch.autograd.grad(loss, weight)[0] for loss in (plain, light)]
    assert not torch.equal(*slopes)


@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_gradient_of_the_weights_is_that_of_the_cost_at_fixed_latent_vectors(gradient):
    """ "implicit" is so after a few joint steps already, "envelope" only at an optimum."""
    model = tiny(activation="softplus")
    model.equilibrium.gradient = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-10, max_steps=300))
    truth = images_of(tiny(seed=2))
    loss, _ = Generation(steps=4, gradient=gradient, jacobian=0.0).loss(model, (truth,))
    weight = first_kernel(model)
    (slope,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        x = fit(model, squared_error, truth, steps=4).x
        direction = torch.randn_like(weight)
        weight += 1e-5 * direction
        above = squared_error(model(x), x, truth).mean()
        weight -= 2e-5 * direction
        below = squared_error(model(x), x, truth).mean()
    expected, got = ((above - below) / 2e-5).item(), (slope * direction).sum().item()
    assert (abs(got - expected) <= 1e-4 * abs(expected)) is (gradient == "implicit")


def test_a_warm_up_decodes_low_frequencies():
    """The loss is that of the model at given latent vectors, with its penalty there."""
    model, truth = tiny(), images_of(tiny(seed=2))
    x = low_frequencies(truth, 3)
    expected = squared_error(model(x), x, truth).mean()
    loss, _ = Generation(latents="frequencies", jacobian=0.0).loss(model, (truth,))
    torch.testing.assert_close(loss, expected)
    weight = first_kernel(model)
    torch.testing.assert_close(*(torch.autograd.grad(value, weight)[0] for value in (loss, expected)))
    torch.manual_seed(5)
    penalised, sums = Generation(latents="frequencies", jacobian=0.5).loss(model, (truth,))
    assert sums["penalty"] > 0
    torch.testing.assert_close(penalised, expected + 0.5 * sums["penalty"] / 4)


def test_metrics_are_those_of_the_solved_images():
    model, truth = tiny().eval(), images_of(tiny(seed=2))
    task = Generation(steps=8)
    with torch.no_grad():
        sums = task.measure(model, (truth,))
        images = model(fit(model, squared_error, truth, steps=8).x)
    error = (images - truth).square().flatten(1).mean(1)
    metrics = task.metrics(sums)
    assert metrics["loss"] == pytest.approx(float(error.mean()))
    assert metrics["psnr"] == pytest.approx(float((10 * torch.log10(4 / error)).mean()))
    assert metrics["ssim"] == pytest.approx(float(ssim(images, truth).mean()))


def test_quality_of_known_images():
    truth = torch.rand(3, 1, 16, 16) * 2 - 1
    assert psnr(truth + 0.2, truth).tolist() == pytest.approx([20.0] * 3)  # 10 log10(4 / 0.04)
    assert ssim(truth, truth).tolist() == pytest.approx([1.0] * 3)
    noisy = [ssim(truth + level * torch.randn_like(truth), truth).mean() for level in (0.1, 0.3, 0.9)]
    assert all(a > b for a, b in pairwise(noisy))


def test_pictures_can_be_drawn():
    model, task = tiny().eval(), Generation(steps=5)
    titles = []
    for title, figure in task.pictures(model, lambda: iter([(images_of(tiny(seed=2), 9),)]), {}):
        figure.savefig(io.BytesIO(), format="png")
        titles.append(title)
    assert len(titles) == 2


def test_another_model_is_rejected():
    with pytest.raises(ValueError, match="the model has type Linear, which does not generate images: choose the model"):
        generator_in(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"jacobian": -1.0}, {"probes": 0}, {"gradient": "exact"}, {"penalty_from": 0}]
)
def test_wrong_options_are_rejected(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Generation(**options)


RECIPE = """
title = "a generator"
[data]
name = "digits"
limit = 20
validation = 4
[model]
name = "generator"
latent = 4
size = "small-2"
channels = [8, 8]
downsamplings = 0
expansion = 1.0
[task]
name = "generation"
gradient = "envelope"  # without solves, which do not converge in an untrained model and amplify rounding
steps = 5
jacobian = 0.0
[training]
batch_size = 9
precision = "float64"
[[phases]]
epochs = 2
"""


def test_two_processes_average_their_gradients(tmp_path):
    """The wrapper that averages gradients sees the forward pass, which the task computes from parts of the model."""
    (tmp_path / "patterns.toml").write_text(RECIPE)
    run(tmp_path, "train", "patterns.toml")
    one = latest(tmp_path)
    run_two(tmp_path, "train", "patterns.toml")
    two = latest(tmp_path)
    assert one.folder != two.folder
    a, b = (checkpoints.read(trained.last)[0] for trained in (one, two))
    for name in a:
        if name.startswith("model/"):
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


def test_penalty_of_a_linear_map_is_its_norm():
    """The penalty that the task adds is an unbiased estimate of ||J||_F^2 / numel(z)."""
    matrix = torch.randn(6, 6, dtype=torch.float64)
    z = torch.randn(4000, 6, dtype=torch.float64)
    estimate = jacobian_penalty(lambda z: z @ matrix.T, z, probes=2)
    assert float(estimate) == pytest.approx(float(matrix.square().sum()) / 6, rel=0.1)


def test_only_solves_that_start_at_the_joint_optimum_are_warm_starts():
    """Training reports a solver that does nothing, unless its solves are meant to start near their solution."""
    assert Generation().warm_starts
    assert not Generation(latents="frequencies").warm_starts
    assert not Generation(gradient="envelope").warm_starts

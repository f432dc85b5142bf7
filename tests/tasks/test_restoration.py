"""The task restoration: outer gradients against finite differences, metrics against definitions, pictures."""

import io
import math
import statistics

import pytest
import torch
from torch import nn

from equipoise.lab.training.evaluate import add
from equipoise.tasks import TASKS, latent_vectors, restoration
from equipoise.tasks.degradations import random_seeds
from equipoise.tasks.generation import Generation
from equipoise.tasks.image_quality import psnr
from equipoise.tasks.latent_vectors import squared_error
from equipoise.tasks.medians import DECIBELS, SIMILARITY, Bins
from equipoise.tasks.physics import GaussianBlur
from equipoise.tasks.plain_restoration import restore_plainly
from equipoise.tasks.restoration import Restoration
from equipoise.tasks.restore_images import as_images, fit_measurements, restore, restore_by_adam
from smooth_generator import SmoothGenerator, smooth_images

SHAPE = (1, 12, 12)  # the structural similarity has a window of 11 x 11
TIGHT = {"steps": 500, "backward_steps": 300, "proximal": 0.0}


@pytest.fixture
def tight(monkeypatch):
    """Optima and adjoints that are as exact as finite differences."""
    monkeypatch.setattr(latent_vectors, "RELATIVE", 1e-10)
    monkeypatch.setattr(restoration, "BACKWARD_RELATIVE", 1e-10)


def supervised_loss(generator, task, truth):
    torch.manual_seed(0)  # of the degradations
    loss, _ = task.loss(generator, (truth,))
    return loss


def gradient_of(generator, task, truth):
    generator.zero_grad()
    supervised_loss(generator, task, truth).backward()
    return torch.cat([parameter.grad.flatten() for parameter in generator.parameters()])


def directional(generator, task, truth, direction, size=1e-4):
    """Central difference of the loss along a direction in the space of the weights."""
    parameters, values = list(generator.parameters()), []
    start = nn.utils.parameters_to_vector(parameters).detach().clone()
    for sign in (1, -1):
        nn.utils.vector_to_parameters(start + sign * size * direction, parameters)
        values.append(supervised_loss(generator, task, truth).item())
    nn.utils.vector_to_parameters(start, parameters)
    return (values[0] - values[1]) / (2 * size)


@pytest.mark.parametrize(("problem", "amount"), [("inpaint", 2), ("deblur", 0.7), ("denoise", 0.2), ("upscale", 2)])
def test_the_exact_outer_gradient_is_that_of_finite_differences(tight, problem, amount):
    generator, truth = SmoothGenerator(), smooth_images(3)
    exact = gradient_of(generator, Restoration(problem, amount, gradient="exact", **TIGHT), truth)
    detached = gradient_of(generator, Restoration(problem, amount, gradient="detached", **TIGHT), truth)
    task = Restoration(problem, amount, **TIGHT)
    worst = 0.0
    for seed in range(3):
        direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        direction /= direction.norm()
        truth_of = directional(generator, task, truth, direction)
        assert float(exact @ direction) == pytest.approx(truth_of, rel=1e-4, abs=1e-7 * float(exact.norm()))
        worst = max(worst, abs(float(detached @ direction) - truth_of))
    assert worst > 1e-2 * float(exact.norm())  # x* held constant is another gradient


def test_a_proximal_term_keeps_the_direction(tight):
    generator, truth = SmoothGenerator(), smooth_images(3)
    exact = gradient_of(generator, Restoration("deblur", 0.7, **TIGHT), truth)
    near = gradient_of(generator, Restoration("deblur", 0.7, **{**TIGHT, "proximal": 1e-3}), truth)
    assert 0 < float((exact - near).norm()) < 0.05 * float(exact.norm())


def test_the_jacobian_penalty_is_added():
    generator, truth = SmoothGenerator(), smooth_images(3)
    without, sums = supervised_sums(generator, Restoration("deblur", 0.7, steps=20), truth)
    penalised, more = supervised_sums(generator, Restoration("deblur", 0.7, steps=20, jacobian=2.0), truth)
    assert "penalty" not in sums
    penalty = float(more["penalty"]) / 3
    assert penalty > 0
    assert penalised.item() - without.item() == pytest.approx(2 * penalty, rel=1e-6)


def supervised_sums(generator, task, truth):
    torch.manual_seed(0)
    return task.loss(generator, (truth,))


def test_training_improves_restoration():
    generator, truth = SmoothGenerator(), smooth_images(8)
    task = Restoration("inpaint", 2, steps=60)
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = supervised_loss(generator, task, truth)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_training_degrades_at_random_and_evaluation_does_not():
    generator, truth = SmoothGenerator(SHAPE), smooth_images(4, SHAPE)
    task = Restoration("inpaint", 5, steps=10)
    torch.manual_seed(0)
    first, second = (task.loss(generator, (truth,))[0].item() for _ in range(2))
    assert first != second
    with torch.no_grad():
        whole = task.measure(generator, (truth, torch.zeros(4)))
        again = task.measure(generator, (truth,))
        parts: dict[str, torch.Tensor] = {}
        for part in truth.split(2):
            add(parts, task.measure(generator, (part,)))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    metrics, split = task.metrics(whole), task.metrics(parts)
    assert metrics == pytest.approx(split, rel=1e-6)


@pytest.mark.parametrize("problem", ["inpaint", "upscale"])
def test_metrics_are_those_of_each_image(problem):
    generator, truth = SmoothGenerator(SHAPE), smooth_images(5, SHAPE)
    amount = {"inpaint": 5, "upscale": 2}[problem]
    task = Restoration(problem, amount, steps=40)
    with torch.no_grad():
        metrics = task.metrics(task.measure(generator, (truth,)))
    y, physics = task.degradation.measure(truth, restoration.seeds_of(truth))
    images, optimum = restore(generator, y, physics, steps=40)
    plain = restore_plainly(y, physics, task.degradation, SHAPE)
    solved = generator(optimum.x).detach()
    for prefix, shown in (
        ("", images),
        ("solved ", solved),
        ("given ", as_images(y, physics, SHAPE)),
        ("plain ", plain),
    ):
        ratios = [10 * math.log10(4 / float((a - b).square().mean())) for a, b in zip(shown, truth, strict=True)]
        assert metrics[f"{prefix}psnr"] == pytest.approx(statistics.mean(ratios), abs=1e-4)
        assert metrics[f"median {prefix}psnr"] == pytest.approx(statistics.median(ratios), abs=0.011)
    if problem == "inpaint":
        known = physics.mask != 0
        error = torch.where(known, 0.0, (images - truth).square()).flatten(1).mean(1)
        ratios = 10 * torch.log10(4 / error)
        assert metrics["filled psnr"] == pytest.approx(float(ratios.mean()), abs=1e-4)
    assert ("filled psnr" in metrics) == (problem == "inpaint")
    assert metrics["loss"] == pytest.approx(float(squared_error(images, optimum.x, truth).mean()))
    assert metrics["misfit"] == pytest.approx(float((optimum.cost / y[0].numel()).mean()))
    assert {f"{median}{kind}{name}" for median in ("", "median ") for kind in ("", "given ", "plain ")
            for name in ("psnr", "ssim")} <= metrics.keys()  # fmt: skip


def test_adam_and_further_problems_are_measured_beside():
    generator, truth = SmoothGenerator(SHAPE), smooth_images(3, SHAPE)
    also = ["deblur 1", "denoise 0.4", "upscale"]
    task = Restoration("inpaint", 5, steps=30, adam=True, also=also)
    with torch.no_grad():
        whole = task.metrics(task.measure(generator, (truth,)))
        for name, prefix in (("inpaint 5", ""), ("deblur 1", "deblur 1: "), ("upscale 2", "upscale: ")):
            problem, amount = name.split()
            alone = Restoration(problem, float(amount), steps=30, adam=True)
            metrics = alone.metrics(alone.measure(generator, (truth,)))
            assert {key: whole[prefix + key] for key in metrics} == pytest.approx(metrics)
    y, physics = task.degradation.measure(truth, restoration.seeds_of(truth))
    adam = restore_by_adam(generator, y, physics, evaluations=30).images
    assert whole["adam psnr"] == pytest.approx(float(psnr(adam, truth).mean()), abs=1e-4)
    assert whole["denoise 0.4: given psnr"] == pytest.approx(20 * math.log10(2 / 0.4), abs=0.5)
    assert len(list(task.pictures(generator, lambda: iter([(truth,)]), {}))) == 4


def test_unsupervised_training_is_that_of_generation():
    generator, truth = SmoothGenerator(), smooth_images(3)
    torch.manual_seed(0)
    ours, sums = Restoration("deblur", 1, steps=50, train_steps=20, supervised=False, jacobian=0.5).loss(
        generator, (truth,)
    )
    torch.manual_seed(0)
    theirs, others = Generation(20, jacobian=0.5).loss(generator, (truth,))
    assert torch.equal(ours, theirs)
    assert sums.keys() == others.keys()


@pytest.mark.parametrize("bins", [DECIBELS, SIMILARITY, Bins(0, 1, 10)])
def test_medians_of_histograms(bins):
    source, width = torch.Generator().manual_seed(0), (bins.high - bins.low) / bins.count
    for count in (1, 2, 7, 8, 100):
        values = bins.low + (bins.high - bins.low) * torch.rand(count, generator=source, dtype=torch.float64)
        assert bins.median(bins.counts(values)) == pytest.approx(statistics.median(values.tolist()), abs=0.51 * width)
    outside = torch.tensor([bins.low - 5, bins.high + 5, torch.nan])
    assert int(bins.counts(outside).sum()) == 2
    assert math.isnan(bins.median(bins.counts(torch.empty(0))))


def test_strips_can_be_drawn():
    generator, truth = SmoothGenerator(SHAPE), smooth_images(4, SHAPE)
    task = Restoration("upscale", 2, steps=40)
    ((title, figure),) = task.pictures(generator, lambda: iter([(truth,)]), {})
    assert title == "Restored test images (upscale, 2)"
    titles = [axis.get_title().partition("\n")[0] for axis in figure.axes[:6]]
    assert titles == ["given", "step 2", "step 8", "step 20", "restored", "truth"]
    figure.savefig(io.BytesIO())


def test_pixels_are_prepared_as_for_generation():
    images = torch.randint(256, (2, *SHAPE), dtype=torch.uint8)
    (ours,), (theirs,) = (task.prepare((images,), torch.float32) for task in (Restoration(), Generation()))
    assert torch.equal(ours, theirs)
    assert float(ours.min()) >= -1


def test_the_task_has_a_name_and_checks_its_options():
    assert TASKS["restoration"] is Restoration
    for options, message in [
        ({"problem": "inpant"}, "problem is 'inpant'; allowed"),
        ({"problem": "denoise", "amount": -1}, "is -1; it must be a number of at least 0"),
        ({"gradient": "kkt"}, "Restoration.gradient is 'kkt'; allowed: 'exact', 'detached'"),
        ({"adam": 1}, "Restoration.adam is 1"),
        ({"adam": True, "steps": 5}, "Restoration.steps is 5; it must be a whole number of at least 6"),
        ({"also": ["denois 0.4"]}, "Restoration.also has 'denois 0.4'; each must be a name and an amount"),
        ({"also": "denoise 0.4"}, "Restoration.also is 'denoise 0.4'; it must be a list such as"),
        ({"also": ["denoise much"]}, "Restoration.also has 'denoise much'"),
        ({"steps": 0}, "Restoration.steps is 0"),
        ({"proximal": -1}, "Restoration.proximal is -1"),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            Restoration(**options)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="the model has type Linear"):
        Restoration("deblur", 1).loss(nn.Linear(2, 2), (smooth_images(2),))


def test_a_detached_optimum_holds_x():
    generator, truth = SmoothGenerator(), smooth_images(2)
    task = Restoration("deblur", 0.7, gradient="detached", steps=20)
    optimum = fit_measurements(generator, truth, GaussianBlur(0.7), steps=20, gradient=task.outer_gradient)
    assert not optimum.x.requires_grad
    assert optimum.z[0].requires_grad
    assert len(random_seeds(3)) == 3

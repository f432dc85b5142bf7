"""The task vae: the bound against its definition, gradients against finite differences, and the decoder in use."""

import io
import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

import equipoise as eq
from equipoise.lab.training.evaluate import add
from equipoise.tasks.generation import Generation
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error
from equipoise.tasks.physics import Identity
from equipoise.tasks.restoration import Restoration
from equipoise.tasks.restore_images import restore
from equipoise.tasks.vae import VAE
from lab_helpers import latest, run, run_two
from tiny_generator import tiny
from tiny_vae import tiny_vae

PIXELS = 144


def images_of(samples=4, seed=1):
    model = tiny(seed=2)
    with torch.no_grad():
        return model(torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def hurried():
    """A VAE in evaluation, whose solves end after a few steps: its BatchNorm has not seen any images."""
    model = tiny_vae().eval()
    for layer in (model.encoder.equilibrium, model.decoder.equilibrium):
        layer.tolerance, layer.on_failure = eq.Tolerance(relative=1e-2, max_steps=8), "ignore"
    return model


def loss_of(model, task, images):
    torch.manual_seed(0)  # of the noise
    return task.loss(model, (images,))


def test_loss_is_the_negative_bound_up_to_a_constant():
    """For Gaussian pixels of variance beta / 2, in units of beta / n."""
    model, truth, beta = tiny_vae(), images_of(), 0.3
    loss, sums = loss_of(model, VAE(beta), truth)
    with torch.no_grad():
        mean, log_variance = model.encode(truth)
        posterior = Normal(mean, (log_variance / 2).exp())
        torch.manual_seed(0)
        x = mean + torch.randn_like(mean) * posterior.stddev
        likelihood = Independent(Normal(model.decoder(x), math.sqrt(beta / 2)), 3).log_prob(truth)
        divergence = kl_divergence(posterior, Normal(torch.zeros_like(mean), 1.0)).sum(dim=1)
    constant = PIXELS / 2 * math.log(math.pi * beta)
    bound = (likelihood - divergence).mean()
    assert loss.item() == pytest.approx(-(bound.item() + constant) * beta / PIXELS)
    metrics = VAE(beta).metrics(sums)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["kl"] == pytest.approx(divergence.mean().item())


def test_gradient_of_the_loss_agrees_with_finite_differences():
    model, task, truth = tiny_vae(activation="softplus"), VAE(0.5), images_of()
    exact = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-10, max_steps=300))
    model.encoder.equilibrium.gradient = model.decoder.equilibrium.gradient = exact
    weights = [
        *(model.get_parameter(f"encoder.{name}") for name in ("stem.0.weight", "head.classify.weight")),
        model.get_parameter("encoder.equilibrium.f.blocks.0.0.conv1.layer.weight"),
        model.get_parameter("decoder.equilibrium.f.inject.0.weight"),
        model.get_parameter("decoder.equilibrium.f.cell.blocks.0.0.conv1.layer.weight"),
    ]
    slopes = torch.autograd.grad(loss_of(model, task, truth)[0], weights)
    for weight, slope in zip(weights, slopes, strict=True):
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            weight += 1e-6 * direction
            above = loss_of(model, task, truth)[0]
            weight -= 2e-6 * direction
            below = loss_of(model, task, truth)[0]
            weight += 1e-6 * direction
        assert float((slope * direction).sum()) == pytest.approx(float(above - below) / 2e-6, rel=2e-4)


def test_evaluation_takes_the_mean_and_does_not_depend_on_batches():
    model, task, truth = hurried(), VAE(0.5), images_of()
    with torch.no_grad():
        sums, parts = task.measure(model, (truth,)), {}
        for part in (truth[:1], truth[1:]):
            add(parts, task.measure(model, (part,)))
        images = model(truth)
    metrics = task.metrics(sums)
    assert metrics == pytest.approx(task.metrics(parts))
    assert metrics["psnr"] == pytest.approx(float(psnr(images, truth).mean()))
    assert metrics["ssim"] == pytest.approx(float(ssim(images, truth).mean()))
    error = squared_error(images, images, truth).mean().item()
    assert metrics["loss"] == pytest.approx(error + 0.5 * metrics["kl"] / PIXELS)


def test_training_lowers_the_loss():
    model, task, truth = hurried().train(), VAE(0.1), images_of(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first, _ = loss_of(model, task, truth)
    for _ in range(12):
        optimizer.zero_grad()
        loss_of(model, task, truth)[0].backward()
        optimizer.step()
    assert loss_of(model, task, truth)[0] < 0.7 * first


def test_joint_steps_find_better_latent_vectors_than_the_encoder():
    """The decoder is a generator, as for tasks and commands that need one."""
    model = tiny_vae().train()
    assert generator_in(model) is model.decoder
    with torch.no_grad():
        truth = model.decoder(torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        encoded = VAE().metrics(VAE().measure(model, (truth,)))
        found = Generation(steps=40).metrics(Generation(steps=40).measure(model, (truth,)))
        optimum = fit(model.decoder, squared_error, truth, steps=40)
        restored = restore(model.decoder, truth, Identity(), steps=40)
        metrics = Restoration("inpaint", 4, steps=12, adam=True)
        measured = metrics.metrics(metrics.measure(model, (truth,)))
    assert found["psnr"] > encoded["psnr"] + 1
    assert restored.images.shape == truth.shape == model.decoder.image(optimum.z).shape
    assert {"median psnr", "median adam psnr"} <= measured.keys()


def test_restoration_trains_a_vae_by_its_bound_or_its_decoder_for_the_problem():
    model, truth = tiny_vae(), images_of()
    prior = Restoration("inpaint", 4, supervised=False, steps=6, beta=0.5)
    loss, sums = loss_of(model, prior, truth)
    torch.testing.assert_close(loss, loss_of(model, VAE(0.5), truth)[0])
    assert prior.metrics(sums)["kl"] > 0
    supervised, _ = loss_of(model, Restoration("inpaint", 4, steps=4, backward_steps=4), truth)
    supervised.backward()
    assert next(model.encoder.parameters()).grad is None
    assert all(p.grad is not None for p in model.decoder.parameters())


def test_options_of_restoration_that_would_have_no_effect_are_rejected():
    with pytest.raises(ValueError, match="beta is 0.5; it weighs the loss of a VAE in unsupervised training"):
        Restoration("inpaint", 4, beta=0.5)
    unsupervised = {"supervised": False, "steps": 6}
    with pytest.raises(ValueError, match="beta is 0.5; it weighs the loss of a VAE: leave it out, or use 'mdeq-vae'"):
        Restoration("inpaint", 4, beta=0.5, **unsupervised).loss(tiny(), (images_of(),))
    with pytest.raises(ValueError, match="jacobian is 0.1; a VAE is trained without joint steps: leave it out"):
        Restoration("inpaint", 4, jacobian=0.1, **unsupervised).loss(tiny_vae(), (images_of(),))


def test_pictures_can_be_drawn():
    titles = []
    for title, figure in VAE().pictures(hurried(), lambda: iter([(images_of(9),)]), {}):
        figure.savefig(io.BytesIO(), format="png")
        titles.append(title)
    assert titles == ["Reconstructions of test images", "Samples from the prior"]


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match=r"beta is -1; it must be a number of at least 0"):
        VAE(beta=-1)
    with pytest.raises(ValueError, match="the model has type Linear; the task 'vae' needs one with encoder and"):
        VAE().loss(nn.Linear(2, 2), (images_of(),))
    with pytest.raises(
        TypeError, match="generator has type MDEQVAE; it must be an equipoise.models.Generator, or the decoder"
    ):
        restore(tiny_vae(), images_of(), Identity())  # type: ignore[arg-type]


RECIPE = """
title = "a VAE"
[data]
name = "digits"
limit = 20
validation = 4
[model]
name = "mdeq-vae"
latent = 4
size = "small-2"
channels = [8, 8]
head_channels = [4, 4]
final_channels = 8
downsamplings = 0
expansion = 1.0
[task]
name = "vae"
[gradient]
name = "unrolled"  # solves do not converge in an untrained model and amplify rounding
steps = 3
[jacobian]
weight = 0.1
[training]
batch_size = 9
precision = "float64"
[[phases]]
epochs = 1
"""


def test_two_processes_train_all_of_it(tmp_path):
    (tmp_path / "patterns.toml").write_text(RECIPE)
    text = run_two(tmp_path, "train", "patterns.toml")
    result = latest(tmp_path).result
    assert result is not None, text
    assert result["test"].keys() >= {"psnr", "kl", "loss"}
    assert run(tmp_path, "evaluate", latest(tmp_path).folder, "--task", "generation", "steps=5")

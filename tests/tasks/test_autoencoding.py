"""Autoencoding against its formula, supervised restoration by an autoencoder, and training on digits."""

import io

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq
from equipoise.models.generator.convolutional import ConvAE, ConvVAE
from equipoise.tasks import TASKS
from equipoise.tasks.autoencoding import Autoencoding
from equipoise.tasks.degradations import seeds_of
from equipoise.tasks.image_quality import psnr
from equipoise.tasks.restoration import Restoration
from equipoise.tasks.restore_images import as_images

TINY = {"channels": (4, 6, 8), "latent": 3}


def digits(samples=256, start=0):
    images = torch.from_numpy(load_digits().images / 8 - 1).float()[start : start + samples]
    return nn.functional.interpolate(images[:, None], (16, 16), mode="bilinear")


def trained(model, task, truth, steps, lr=3e-3):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=lr)
    for _ in range(steps):
        rows = torch.randint(len(truth), (32,))
        optimizer.zero_grad()
        task.loss(model, (truth[rows],))[0].backward()
        optimizer.step()
    return model.eval()


def test_the_loss_is_the_error_and_the_squares_of_the_latent_vectors():
    model, truth = ConvAE((1, 16, 16), **TINY).double().eval(), digits(5).double()
    x = model.codes(truth)
    error, square = (model.decoder(x) - truth).square().sum(dim=(1, 2, 3)), x.square().sum(dim=1)
    expected = ((error + 0.7 / 2 * square) / 256).mean()
    task = Autoencoding(beta=0.7)
    loss, sums = task.loss(model, (truth,))
    torch.testing.assert_close(loss, expected)
    metrics = task.metrics(task.measure(model, (truth,)))
    assert metrics["loss"] == pytest.approx(expected.item())
    assert metrics["square of x"] == pytest.approx(square.mean().item())
    assert metrics["psnr"] == pytest.approx(psnr(model(truth), truth).mean().item())
    assert set(task.metrics(sums)) == {"psnr", "square of x", "loss"}
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["conv-ae", "conv-rae", "conv-vae"])
def test_digits_are_learned_in_seconds(name):
    torch.manual_seed(0)
    model = eq.create_model(name, shape=(1, 16, 16), channels=(8, 16, 24), latent=12)
    task = TASKS["vae"](beta=0.1) if name == "conv-vae" else TASKS["autoencoding"](beta=0.1 if "rae" in name else 0.0)
    truth, test = digits(1000), (digits(200, start=1200),)
    mean = psnr(truth.mean(dim=0, keepdim=True).expand_as(test[0]), test[0]).mean().item()
    with torch.no_grad():
        before = task.metrics(task.measure(trained(model, task, truth, 0), test))["psnr"]
        with torch.enable_grad():
            trained(model, task, truth, 60, lr=1e-2)
        after = task.metrics(task.measure(model, test))["psnr"]
    assert after > mean + 1.5 > before  # in dB; the mean image is the best without a code


def test_supervised_restoration_trains_a_network_from_measurements_to_images():
    torch.manual_seed(0)
    model = ConvAE((1, 16, 16), channels=(8, 12, 16), latent=16)
    task = Restoration("denoise", 0.8)
    truth, test = digits(1000), digits(30, start=1200)
    trained(model, task, truth, 70, lr=1e-2)
    with torch.no_grad():
        metrics = task.metrics(task.measure(model, (test,)))
        y, physics = task.degradation.measure(test, seeds_of(test))
        direct = psnr(model(as_images(y, physics, model.shape)), test)
    assert metrics["psnr"] == pytest.approx(direct.mean().item())
    assert metrics["psnr"] > metrics["given psnr"] + 2
    assert {"median psnr", "median plain psnr", "median given psnr"} <= metrics.keys()
    assert not {"misfit", "solved psnr"} & metrics.keys()  # no latent vectors are optimised
    for title, figure in task.pictures(model, lambda: iter([(test,)]), {}):
        figure.savefig(io.BytesIO(), format="png")
        assert title == "Restored test images (denoise, 0.8)"


def test_inpainting_by_a_network_also_keeps_the_known_pixels():
    model, task, truth = ConvAE((1, 16, 16), **TINY).eval(), Restoration("inpaint", 5), digits(4)
    with torch.no_grad():
        metrics = task.metrics(task.measure(model, (truth,)))
    assert metrics["median filled psnr"] > metrics["median psnr"]
    loss, _ = task.loss(model, (truth,))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_unsupervised_restoration_trains_autoencoders_as_such():
    torch.manual_seed(0)
    model, truth = ConvAE((1, 16, 16), **TINY), digits(8)
    unsupervised = Restoration("inpaint", 5, supervised=False, steps=6, beta=0.3)
    found, _ = unsupervised.loss(model.eval(), (truth,))
    torch.testing.assert_close(found, Autoencoding(0.3).loss(model, (truth,))[0])
    variational = ConvVAE((1, 16, 16), **TINY).eval()
    task = Restoration("inpaint", 5, supervised=False, steps=6, adam=True)
    with torch.no_grad():
        assert "median adam psnr" in task.metrics(task.measure(variational, (truth,)))


def test_bad_input_gets_a_sentence():
    truth = digits(2)
    with pytest.raises(ValueError, match="beta is -1; it must be a number of at least 0"):
        Autoencoding(beta=-1)
    for model in (nn.Linear(2, 2), ConvVAE((1, 16, 16), **TINY)):
        with pytest.raises(ValueError, match=f"the model has type {type(model).__name__}; the task 'autoencoding'"):
            Autoencoding().loss(model, (truth,))
    with pytest.raises(ValueError, match="jacobian is 0.1; an autoencoder is trained without joint steps"):
        Restoration("inpaint", 5, jacobian=0.1).loss(ConvAE((1, 16, 16), **TINY), (truth,))
    with pytest.raises(ValueError, match="ConvVAE, whose decoder is not an equilibrium, and cannot be trained"):
        Restoration("inpaint", 5).loss(ConvVAE((1, 16, 16), **TINY), (truth,))

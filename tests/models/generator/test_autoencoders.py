"""Convolutional autoencoders and the MDEQ-AE: published sizes, wiring, and decoders that joint steps can use."""

import itertools

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models.generator.autoencoder import Autoencoder, VariationalAutoencoder
from equipoise.models.generator.convolutional import ConvAE, ConvRAE, ConvVAE
from equipoise.models.generator.mdeq_ae import MDEQAE
from equipoise.models.generator.vae import MDEQVAE
from equipoise.tasks.generation import Generation
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error
from equipoise.tasks.physics import Identity
from equipoise.tasks.restore_images import restore, restore_by_adam

CONVOLUTIONAL = {"conv-ae": ConvAE, "conv-rae": ConvRAE, "conv-vae": ConvVAE}
TINY = {"channels": (4, 6, 8), "latent": 3}


def images_of(samples=4, shape=(1, 12, 12), seed=0):
    draws = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(samples, *shape, generator=draws) - 1


def count(model):
    return sum(p.numel() for p in model.parameters())


def convolution(inputs, outputs, kernel):
    return inputs * outputs * kernel**2 + outputs


@pytest.mark.parametrize(
    ("size", "shape", "kernel", "widths", "side", "latent"),
    [
        ("celeba", (3, 64, 64), 5, (1024, 512, 256, 128), 4, 64),
        ("cifar10", (3, 32, 32), 4, (1024, 512, 256), 2, 128),
        ("mnist", (1, 32, 32), 4, (1024, 512, 256), 2, 16),
    ],
)
def test_published_sizes(size, shape, kernel, widths, side, latent):
    channels = (128, 256, 512, 1024)
    models = {name: eq.create_model(name, shape=shape, size=size) for name in ("conv-ae", "conv-vae")}
    encoder = sum(convolution(a, b, kernel) for a, b in zip((shape[0], *channels), channels, strict=False))
    encoder += 2 * sum(channels)  # BatchNorm
    flat = 1024 * side**2
    decoder = (latent + 1) * 8 * 8 * 1024 + 2 * sum(widths[1:]) + convolution(widths[-1], shape[0], kernel)
    decoder += sum(convolution(a, b, kernel) for a, b in itertools.pairwise(widths))
    assert count(models["conv-ae"]) == encoder + (flat + 1) * latent + decoder
    assert count(models["conv-vae"]) == encoder + (flat + 1) * 2 * latent + decoder
    for name, model in models.items():
        assert isinstance(model, CONVOLUTIONAL[name])
        assert name in eq.list_models()
        assert model.latent == latent
    assert count(models["conv-ae"]) == {"celeba": 39742531, "cifar10": 30500867, "mnist": 22689681}[size]


@pytest.mark.parametrize("name", CONVOLUTIONAL)
@pytest.mark.parametrize(("shape", "kernel"), [((3, 32, 32), 4), ((1, 28, 28), 5), ((2, 12, 20), 3)])
def test_images_keep_their_shape(name, shape, kernel):
    model, images = eq.create_model(name, shape=shape, kernel=kernel, **TINY), images_of(2, shape)
    assert model.shape == shape
    assert model.codes(images).shape == (2, 3)
    assert model(images).shape == images.shape
    assert model(images).abs().max() <= 1
    torch.testing.assert_close(model.eval()(images), model.decoder(model.codes(images)))
    assert isinstance(model, Autoencoder)
    assert isinstance(model, VariationalAutoencoder) == (name == "conv-vae")


def test_mean_and_log_variance_of_the_vae():
    model, images = ConvVAE((1, 12, 12), **TINY).eval(), images_of()
    mean, log_variance = model.encode(images)
    torch.testing.assert_close(torch.cat([mean, log_variance], dim=1), model.encoder(images))
    torch.testing.assert_close(model.codes(images), mean)


def test_every_layer_of_the_rae_has_spectral_norm_one():
    torch.manual_seed(0)
    model = ConvRAE((1, 12, 12), **TINY).train()
    for _ in range(60):  # power iteration, one step per forward pass
        model(images_of())
    assert count(model) == count(ConvAE((1, 12, 12), **TINY))
    norms = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            weight = module.weight.transpose(0, 1) if isinstance(module, nn.ConvTranspose2d) else module.weight
            norms.append(torch.linalg.matrix_norm(weight.flatten(1), 2).item())
    assert len(norms) == 3 + 1 + 1 + 2 + 1
    assert norms == pytest.approx([1.0] * len(norms), rel=0.02)


def test_mdeq_ae_is_the_mdeq_vae_without_variance():
    options = {"shape": (1, 12, 12), "size": "small-2", "latent": 3, "channels": (8, 8), "downsamplings": 0}
    options |= {"head_channels": (4, 4), "final_channels": 8, "expansion": 1.0}
    model, vae = eq.create_model("mdeq-ae", **options), MDEQVAE(**options)
    assert isinstance(model, MDEQAE)
    assert count(vae) - count(model) == 3 * (8 + 1)  # the rows of the log variance
    model.encoder.equilibrium.on_failure = model.decoder.equilibrium.on_failure = "ignore"  # untrained
    codes = model.codes(images_of())
    assert codes.shape == (4, 3)
    torch.testing.assert_close(codes, model.encoder((images_of() + 1) / 2))
    model(images_of()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_size_of_the_mdeq_ae_in_table_4():
    model = eq.create_model("mdeq-ae", shape=(3, 64, 64), size="published")
    assert count(model) == 52094423
    assert count(model.decoder) == 40798627  # the published generator


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_gradients_reach_every_weight(name):
    model = eq.create_model(name, shape=(1, 12, 12), **TINY)
    model.decoder(model.encoded(images_of())[:, -3:]).square().sum().backward()
    last = model.encoder[-1]
    for name, p in model.named_parameters():
        assert p.grad is not None, name
    assert last.bias.grad is not None


# The decoder is a generator whose f does not depend on z


def trained_ae(samples=8):
    """An autoencoder trained for a second to know its images a little."""
    torch.manual_seed(0)
    model, truth = ConvAE((1, 12, 12), **TINY), nn.functional.avg_pool2d(images_of(samples), 5, 1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        squared_error(model(truth), truth, truth).mean().backward()
        optimizer.step()
    return model.eval(), truth


def test_joint_steps_and_adam_find_latent_vectors_of_a_convolutional_decoder():
    model, truth = trained_ae()
    decoder = generator_in(model)
    assert decoder is model.decoder
    x = model.codes(truth).detach()
    truth = decoder(x).detach()
    z = decoder.f(decoder.start(x), x)
    torch.testing.assert_close(decoder.image(z), decoder(x))
    torch.testing.assert_close(decoder.f(z, x)[0], z[0])  # one evaluation is the equilibrium
    with torch.no_grad():
        optimum = fit(decoder, squared_error, truth, steps=40)
        start = squared_error(decoder(torch.zeros_like(x)), x, truth)
        torch.testing.assert_close(decoder.image(optimum.z), decoder(optimum.x), atol=0.1, rtol=0)
        assert squared_error(decoder(optimum.x), x, truth).mean() < 0.6 * start.mean()
        restored = restore(decoder, truth, Identity(), steps=40)
        adam = restore_by_adam(decoder, truth, Identity(), evaluations=60)
    for images in (restored.images, adam.images):
        assert squared_error(images, x, truth).mean() < 0.6 * start.mean()


def test_samples_are_independent_in_evaluation():
    model, truth = trained_ae()
    with torch.no_grad():
        every = fit(model.decoder, squared_error, truth, steps=8)
        one = fit(model.decoder, squared_error, truth[2:3], steps=8)
    torch.testing.assert_close(every.x[2:3], one.x, rtol=1e-3, atol=1e-4)


def test_a_convolutional_decoder_is_not_trained_by_joint_steps():
    with pytest.raises(ValueError, match="the model has type ConvAE, whose decoder is not an equilibrium"):
        Generation(steps=4).loss(ConvAE((1, 12, 12), **TINY), (images_of(),))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shape": (1, 10, 12)}, "images of 10 x 12 cannot be halved 2 times: height and width must be multiples of 4"),
        ({"shape": (1, 8)}, r"shape is \(1, 8\); it must be the shape of one image"),
        ({"upsamplings": 3}, "upsamplings is 3; it must be below 3, the number of channels"),
        ({"upsamplings": 0}, "upsamplings is 0; it must be"),
        ({"channels": ()}, r"channels is \(\); it must be a list of whole numbers"),
        ({"latent": 0}, "latent is 0; it must be"),
        ({"size": "celebs"}, "there is no size of ConvVAE 'celebs'; did you mean 'celeba'"),
        ({"groups": 4}, "ConvVAE has no option 'groups'"),
    ],
)
def test_wrong_options_are_rejected(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        ConvVAE(**{"shape": (1, 12, 12), **TINY, **options})


def test_images_of_another_size_are_rejected():
    for model in (ConvAE, ConvVAE):
        with pytest.raises(ValueError, match=r"images have shape \(1, 16, 16\); this model was made for \(1, 12, 12\)"):
            model((1, 12, 12), **TINY)(images_of(2, (1, 16, 16)))


@pytest.mark.parametrize("name", ["conv-ae", "conv-vae", "mdeq-ae", "mdeq-vae"])
def test_images_of_another_type_are_rejected(name):
    """Bytes would wrap around where they are moved to [0, 1]."""
    model = eq.create_model(name, shape=(1, 16, 16), size="small")
    with pytest.raises(TypeError, match=r"images are torch.uint8; they must be numbers in \[-1, 1\]"):
        model(torch.zeros(2, 1, 16, 16, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"images are torch.float64, and the model is torch.float32"):
        model(torch.zeros(2, 1, 16, 16, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"latents are torch.float64, and the model is torch.float32"):
        model.decoder(torch.zeros(2, model.latent, dtype=torch.float64))

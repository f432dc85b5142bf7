"""The MDEQ-VAE: its sizes, its parts, a decoder that is a generator, and what it rejects."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models.generator import model as generator
from equipoise.models.generator.vae import MDEQVAE, SIZES
from tiny_vae import tiny_vae


def images_of(samples=4, shape=(1, 12, 12), seed=0):
    draws = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(samples, *shape, generator=draws, dtype=torch.float64) - 1


@pytest.mark.parametrize(("size", "shape"), [("small", (3, 32, 32)), ("small-2", (1, 28, 28))])
def test_codes_and_reconstructions_have_their_shapes(size, shape):
    model = eq.create_model("mdeq-vae", shape=shape, size=size, latent=20)
    assert isinstance(model, MDEQVAE)
    model.encoder.equilibrium.on_failure = model.decoder.equilibrium.on_failure = "ignore"  # untrained
    images = images_of(2, shape).float()
    mean, log_variance = model.encode(images)
    assert mean.shape == log_variance.shape == (2, 20)
    assert model(images).shape == (2, *shape)
    assert model(images).abs().max() <= 1


def test_sizes_are_those_of_the_generator():
    assert eq.models.MDEQVAE is MDEQVAE
    assert "mdeq-vae" in eq.list_models()
    assert SIZES.keys() == generator.SIZES.keys()
    for name, size in SIZES.items():
        assert {getattr(size, n) == getattr(generator.SIZES[name], n) for n in generator.NUMBERS} == {True}


def test_numbers_are_those_of_both_or_of_the_encoder():
    model = tiny_vae(dropout=0.25, activation="softplus", weight_norm=False, width=8)
    for part in (model.encoder, model.decoder):
        assert part.size.channels == (8, 8)
        assert part.size.expansion == 1
        cells = [module for module in part.modules() if hasattr(module, "weight_norm")]
        assert [(cell.activation, cell.weight_norm) for cell in cells] == [("softplus", False)]
    assert (model.encoder.size.dropout, model.decoder.size.dropout, model.decoder.width) == (0.25, 0, 8)


def test_forward_is_the_image_of_the_mean():
    model, images = tiny_vae(), images_of()
    with torch.no_grad():
        mean, _ = model.encode(images)
        torch.testing.assert_close(model(images), model.decoder(mean))
        torch.testing.assert_close(torch.cat(model.encode(images), dim=1), model.encoder((images + 1) / 2))


def test_samples_are_independent():
    """Codes in evaluation; images always, since latent vectors of the decoder are optimised jointly with its state."""
    model, images = tiny_vae().eval(), images_of()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.decoder.modules())
    with torch.no_grad():
        together, alone = model.encode(images), model.encode(images[1:2])
    for every, one in zip(together, alone, strict=True):
        torch.testing.assert_close(every[1:2], one)
    assert (together[0][0] - together[0][1]).abs().max() > 1e-3


def test_means_of_an_untrained_encoder_vary_more_than_the_noise():
    model = MDEQVAE((1, 16, 16), size="small-2", latent=8)
    model.encoder.equilibrium.on_failure = "ignore"
    smooth = nn.functional.interpolate(images_of(32, (1, 4, 4)).float(), (16, 16), mode="bilinear")
    with torch.no_grad():
        mean, log_variance = model.encode(smooth)
    assert mean.std(dim=0).mean() > (log_variance / 2).exp().mean()
    assert mean.mean(dim=0).abs().max() < 1


def test_gradients_reach_every_weight():
    model = tiny_vae()
    mean, log_variance = model.encode(images_of())
    model.decoder(mean + log_variance.exp()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shape": (1, 9, 8)}, "images of 9 x 8 cannot be halved 1 times: height and width must be multiples of 2"),
        ({"shape": (1, 8)}, r"shape is \(1, 8\); it must be the shape of one image"),
        ({"latent": 0}, "latent is 0; it must be"),
        ({"size": "tiny"}, "there is no size of MDEQVAE 'tiny'"),
        ({"big_kernels": (0, 0)}, "MDEQVAE has no option 'big_kernels'"),
        ({"channels": (8, 8, 8)}, "head_channels has 2 entries, but channels has 3: give one per scale"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be"),
    ],
)
def test_wrong_options_are_rejected(options, sentence):
    numbers = {"shape": (1, 12, 12), "size": "small-2", "channels": (8, 8), "downsamplings": 0}
    with pytest.raises((ValueError, TypeError), match=sentence):
        MDEQVAE(**{**numbers, **options})


def test_images_of_another_size_are_rejected():
    with pytest.raises(ValueError, match=r"images have shape \(1, 16, 16\); this model was made for \(1, 12, 12\)"):
        tiny_vae().encode(images_of(2, (1, 16, 16)))

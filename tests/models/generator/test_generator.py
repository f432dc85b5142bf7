"""The generator: its sizes, its parts, and what it rejects."""

import pytest
import torch

from equipoise.models.generator.model import SIZES, Generator
from tiny_generator import tiny


@pytest.mark.parametrize(("size", "shape"), [("small", (3, 32, 32)), ("small-2", (1, 28, 28)), ("small", (3, 64, 32))])
def test_images_have_the_shape_asked_for_and_lie_between_minus_one_and_one(size, shape):
    model = Generator(shape=shape, size=size)
    model.equilibrium.on_failure = "ignore"  # untrained, it need not converge
    images = model(torch.randn(2, 128))
    assert images.shape == (2, *shape)
    assert images.abs().max() <= 1


def test_published_size_is_that_of_table_9():
    size = SIZES["published"]
    assert size.channels == (32, 64, 128, 256)
    assert (size.expansion, size.groups, size.blocks) == (5, 8, 1)
    model = Generator(shape=(3, 64, 64), size="published")
    # one linear map per scale, of the latent vector and a constant
    injections = sum(p.numel() for p in model.f.inject.parameters())
    assert injections == 129 * 64 * 64 * (32 + 64 / 4 + 128 / 16 + 256 / 64)


def test_every_scale_is_injected():
    """f depends on x through each of the linear maps: zeroing all but one leaves a dependence."""
    model = tiny()
    x = torch.randn(3, 3, dtype=torch.float64)
    z = tuple(torch.randn_like(part) for part in model.start(x))
    for kept in range(2):
        single = tiny()
        single.load_state_dict(model.state_dict())
        with torch.no_grad():
            single.get_parameter(f"equilibrium.f.inject.{1 - kept}.weight").zero_()
        first, second = single.f(z, x), single.f(z, 2 * x)
        assert max((a - b).abs().max().item() for a, b in zip(first, second, strict=True)) > 1e-3


def test_forward_is_the_image_of_the_equilibrium():
    model = tiny()
    x = torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        z = model.equilibrium(x)
        for part, image in zip(z, model.f(z, x), strict=True):
            assert (part - image).norm() <= 1e-8 * image.norm()
        torch.testing.assert_close(model.image(z), model(x))


def test_memory_format_changes_no_image():
    model, x = tiny(), torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        plain = model(x)
        ordered = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert ordered.start(x)[0].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ordered(x), plain, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shape": (1, 9, 8)}, "images of 9 x 8 cannot be halved 1 times: height and width must be multiples of 2"),
        ({"shape": (1, 8)}, r"shape is \(1, 8\); it must be the shape of one image"),
        ({"latent": 0}, "latent"),
        ({"width": 12}, "width, 12"),
        ({"size": "tiny"}, "size of Generator"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_wrong_options_are_rejected(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        tiny(**options)


def test_wrong_latent_vectors_are_rejected():
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\); a generator maps latent vectors, \(batch, 3\)"):
        tiny()(torch.randn(2, 5))

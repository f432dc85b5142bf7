"""The monDEQ models: the sizes of table E1, what they read, and what they refuse."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.cli import main
from equipoise.models.mondeq.certificate import Certifier
from equipoise.models.mondeq.model import convolved

SIZES = [  # table E1; 84,460 parameters are 56 channels, where the paper prints 54
    ((3, 32, 32), "conv", 81, 172_218),
    ((3, 32, 32), "multitier", (16, 32, 60), 170_194),
    ((3, 32, 32), "conv", 200, 853_612),
    ((3, 32, 32), "multitier", (64, 128, 128), 1_014_546),
    ((1, 28, 28), "dense", 87, 84_313),
    ((1, 28, 28), "conv", 56, 84_460),
    ((1, 28, 28), "multitier", (16, 32, 32), 81_394),
]


@pytest.mark.parametrize(("shape", "kind", "channels", "parameters"), SIZES)
def test_sizes_of_table_e1(shape, kind, channels, parameters):
    model = eq.create_model("mondeq", shape=shape, classes=10, kind=kind, channels=channels)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("kind", "channels"), [("dense", 7), ("conv", 4), ("multitier", (3, 2, 4))])
@pytest.mark.parametrize("size", [(8, 8), (9, 6)])
def test_trains_on_any_size(kind, channels, size):
    torch.manual_seed(0)
    model = eq.models.MonDEQ((2, *size), 3, mean=(0.5, 0.4), std=(0.2, 0.3), kind=kind, channels=channels)
    images, labels = torch.rand(5, 2, *size), torch.tensor([0, 1, 2, 0, 1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_head_averages_squares_of_the_image_without_its_border():
    model = eq.models.MonDEQ((1, 9, 10), 3, kind="conv", channels=5)
    z = torch.randn(2, *model.operator.shape)
    torch.testing.assert_close(model.features(z), F.avg_pool2d(z[:, :, :9, :10], 4).flatten(1))


@pytest.mark.parametrize("outputs", [5, 40], ids=["fewer than taps", "more than taps"])
def test_the_injection_is_the_convolution_it_says(outputs):
    layer, x = torch.nn.Conv2d(3, outputs, 3, padding=1).double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    injected = convolved(layer, x, (8, 9)).permute(3, 2, 0, 1)
    torch.testing.assert_close(injected, torch.nn.functional.pad(layer(x), (0, 4, 0, 2)), atol=1e-12, rtol=1e-12)
    assert not injected[:, :, 6:].any()
    assert not injected[:, :, :, 5:].any()


KINDS = [("dense", 7), ("conv", 4), ("multitier", (3, 2))]


@pytest.mark.parametrize(("kind", "channels"), KINDS)
@pytest.mark.parametrize("given", [(1, 7, 9), (1, 8, 9), (1, 12, 12), (1, 10, 10)], ids=str)
def test_images_of_another_shape_are_refused(kind, channels, given):
    """(1, 10, 10) is the grid of a convolution itself."""
    model = eq.models.MonDEQ((1, 8, 8), 3, kind=kind, channels=channels)
    words = (
        rf"images have shape {re.escape(str(given))}; this model was made for \(1, 8, 8\).*Resize the images, or make"
    )
    images = torch.rand(2, *given)
    for call in (model, model.bias, Certifier(model), model.eval()):
        with pytest.raises(ValueError, match=words):
            call(images)
    for images in (torch.rand(1, 8, 8), torch.rand(2, 3, 8, 8)):
        with pytest.raises(ValueError, match="it must be .batch, 1, height, width., even for a single image"):
            model(images)


def test_the_head_reads_nothing_of_another_grid():
    for kind, channels in KINDS[1:]:
        model = eq.models.MonDEQ((1, 8, 8), 3, kind=kind, channels=channels)
        z = [torch.rand(2, 4, 13, 13)] if kind == "conv" else [torch.rand(2, 3, 10, 10), torch.rand(2, 2, 8, 8)]
        with pytest.raises(ValueError, match=r"acts on .*given: .*The grids? (is|are) .* of images of \(8, 8\)"):
            model.features(z[0] if kind == "conv" else tuple(z))


@pytest.mark.parametrize(("kind", "channels"), KINDS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_under_autocast_is_that_of_float32_up_to_rounding(kind, channels, low):
    torch.manual_seed(0)
    options = {"kind": kind, "channels": channels, "pool": 2, "activation": "tanh"}  # no kink at which slopes jump
    model = eq.models.MonDEQ((2, 9, 8), 3, (0.5, 0.4), (0.2, 0.3), **options)
    model.layer.tolerance = eq.Tolerance(max_steps=200)
    images, labels = torch.rand(8, 2, 9, 8), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])

    def gradients(mode):
        model.zero_grad()
        with mode, eq.watch_solves() as solves:
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        for stats in (solves[0].stats, solves[0].backward):
            assert stats.converged.all()
            assert (stats.residual <= eq.Tolerance.relative).all()
        return logits.float(), torch.cat([p.grad.flatten() for p in model.parameters()])

    known = gradients(nullcontext())
    for found, truth in zip(gradients(torch.autocast("cpu", low)), known, strict=True):
        assert found.dtype == torch.float32
        assert (found - truth).norm() <= 8 * torch.finfo(low).eps * truth.norm(), (found - truth).norm() / truth.norm()
    assert not torch.equal(found, truth)  # autocast did do something


@pytest.mark.parametrize(("kind", "channels"), KINDS)
def test_training_in_bfloat16_lowers_the_loss(kind, channels):
    torch.manual_seed(0)
    model = eq.models.MonDEQ((1, 8, 8), 3, kind=kind, channels=channels)
    images, labels = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


RECIPE = """
title = "monDEQ on digits"
[data]
name = "digits"
validation = 64
limit = 256
[model]
name = "mondeq"
kind = "{kind}"
channels = {channels}
[optimizer]
lr = 0.01
[training]
batch_size = 64
precision = "{precision}"
[[phases]]
epochs = 2
"""


@pytest.mark.parametrize(
    ("kind", "channels", "precision"),
    [("dense", 12, "bfloat16"), ("dense", 12, "float16"), ("conv", 4, "bfloat16"), ("multitier", [3, 2], "bfloat16")],
)
def test_a_recipe_may_ask_for_low_precision(kind, channels, precision, tmp_path, capsys):
    (tmp_path / "low.toml").write_text(RECIPE.format(kind=kind, channels=channels, precision=precision))
    assert main(["train", str(tmp_path / "low.toml"), "--runs", str(tmp_path), "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"train accuracy .* loss ([\d.]+)  val", printed))
    assert last < first
    assert "100.0% converged" in printed


@pytest.mark.parametrize(("kind", "channels"), KINDS)
def test_a_model_in_half_precision_is_refused_with_the_remedy(kind, channels):
    model = eq.models.MonDEQ((1, 8, 8), 3, kind=kind, channels=channels).bfloat16()
    for images in (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8).bfloat16()):
        with pytest.raises(TypeError, match=r"has weights in torch.bfloat16, too coarse.*model.float\(\).*autocast"):
            model(images)
    with pytest.raises(TypeError, match="too coarse"):
        model.certificate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "dence"}, "kind is 'dence'; allowed: 'dense', 'conv', 'multitier'"),
        ({"kind": "multitier", "channels": 8}, "channels is 8; for kind 'multitier' it must be a list of channels"),
        ({"kind": "conv", "channels": (8, 8)}, "for kind 'conv' it must be one whole number"),
        ({"kind": "conv", "channels": 4, "pool": 9}, "pool is 9; it must be between 1 and the image's side, 8"),
        ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
        ({"kind": "multitier", "channels": None}, "channels is None; for kind 'multitier' it must be a list"),
        ({"kind": "dense", "channels": "8"}, "channels is '8'; for kind 'dense' it must be one whole number"),
        ({"channels": 4, "pool": 1.5}, "pool is 1.5; it must be between 1 and"),
        ({"channels": 4, "pool": "4"}, "pool is '4'; it must be between 1 and"),
        ({"channels": 4, "m": None}, "m is None; it must be a number above 0"),
        ({"channels": 4, "mean": 0.5}, "mean is 0.5; it must be a tuple of numbers"),
        ({"channels": 4, "std": "0.5"}, "std is '0.5'; it must be a tuple of numbers"),
        ({"channels": 4, "activation": None}, "activation is None"),
    ],
)
def test_refusals(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        eq.models.MonDEQ(**{"shape": (1, 8, 8), "classes": 3, **options})

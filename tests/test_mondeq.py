"""The monDEQ models: the sizes of table E1, what they read, and what they refuse."""

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.models.mondeq import convolved

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


def test_the_injection_is_the_convolution_it_says():
    layer, x = torch.nn.Conv2d(3, 5, 3, padding=1).double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(convolved(layer, x).permute(3, 2, 0, 1), layer(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "dence"}, "kind is 'dence'; allowed: 'dense', 'conv', 'multitier'"),
        ({"kind": "multitier", "channels": 8}, "channels is 8; for kind 'multitier' it must be a list of channels"),
        ({"kind": "conv", "channels": (8, 8)}, "for kind 'conv' it must be one whole number"),
        ({"kind": "conv", "channels": 4, "pool": 9}, "pool is 9; it must be between 1 and the image's side, 8"),
        ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        eq.models.MonDEQ(**{"shape": (1, 8, 8), "classes": 3, **options})

"""The four-layer classifier of the few-shot literature: its published sizes, its wiring, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.models.few_shot.conv4 import Conv4


@pytest.mark.parametrize(
    ("pooled", "head"),
    [
        (True, 64 * 5 + 5),  # MAML
        (False, 2 * 2 * 64 * 5 + 5),  # Reptile and iMAML
    ],
)
def test_published_sizes(pooled, head):
    model = eq.create_model("conv4", shape=(1, 28, 28), classes=5, pooled=pooled)
    assert isinstance(model, Conv4)
    convolutions = (9 * 1 * 64 + 64) + 3 * (9 * 64 * 64 + 64)
    assert sum(p.numel() for p in model.parameters()) == convolutions + 4 * 2 * 64 + head
    assert not list(model.convolutions.buffers())  # no running statistics
    assert eq.models.Conv4 is Conv4


@pytest.mark.parametrize("pooled", [True, False])
def test_logits_are_those_of_the_formula(pooled):
    torch.manual_seed(0)
    model = Conv4((2, 7, 6), 3, mean=(0.2, 0.1), std=(0.5, 0.4), filters=4, layers=2, pooled=pooled).double()
    images = torch.rand(5, 2, 7, 6, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(2, 1, 1) for v in ((0.2, 0.1), (0.5, 0.4)))
    z = (images - mean) / std
    for i in (0, 3):
        z = F.conv2d(z, model.convolutions[i].weight, model.convolutions[i].bias, stride=2, padding=1)
        centred = z - z.mean(dim=(0, 2, 3), keepdim=True)
        z = (centred / (centred.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()).relu()
    assert z.shape == (5, 4, 2, 2)
    features = z.mean(dim=(2, 3)) if pooled else z.flatten(1)
    expected = features @ model.classify.weight.T + model.classify.bias
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.eval()(images), model.train()(images))  # batch statistics, always


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"filters": 0}, "filters is 0; it must be"),
        ({"layers": 1.5}, "layers is 1.5; it must be"),
        ({"pooled": 1}, "pooled is 1; it must be"),
        ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
    ],
)
def test_wrong_options_are_rejected(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        Conv4(**{"shape": (1, 28, 28), "classes": 5, **options})

"""The small classifier: its features for images of any size, gray or coloured."""

import torch
from torch.nn.functional import interpolate

from equipoise.models.features.classifier import SmallClassifier


def network():
    torch.manual_seed(0)
    return SmallClassifier().eval()


def test_logits_are_linear_in_the_features():
    model, images = network(), torch.rand(3, 3, 32, 32)
    assert model.features(images).shape == (3, 64)
    torch.testing.assert_close(model(images), model.linear(model.features(images)))


def test_gray_images_are_repeated():
    model, images = network(), torch.rand(3, 1, 32, 32)
    torch.testing.assert_close(model.features(images), model.features(images.repeat(1, 3, 1, 1)))


def test_images_are_resized_with_antialiasing():
    model, images = network(), torch.rand(2, 3, 64, 96)
    small = interpolate(images, (32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(model.features(images), model.features(small))

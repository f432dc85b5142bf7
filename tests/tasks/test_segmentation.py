"""Segmentation: metrics against loops over pixels, augmentation of images that know where they were, whole runs."""

import io
import itertools
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional

from bomb_files import png
from equipoise.cli import main
from equipoise.lab.data import MissingData, load
from equipoise.lab.data.sets.scenes import CAMVID, CITYSCAPES
from equipoise.lab.files import read_json
from equipoise.lab.results.segment import in_windows
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run
from equipoise.lab.training.evaluate import add
from equipoise.tasks.augmentation import random_view
from equipoise.tasks.drawing import CAMVID_COLORS, CITYSCAPES_COLORS, class_colors, confusion_figure, in_color, overlay
from equipoise.tasks.segmentation import Segmentation, class_ious, mean_over_windows, spread_over, window_starts
from lab_helpers import run as run_command
from lab_helpers import run_two
from official_files import picture, write

NAMES = tuple("abcd")
VOID = 255
REAL = [
    *filter(None, os.environ.get("EQUIPOISE_DATA", "").split(os.pathsep)),
    Path(__file__).parents[3] / "shared/data",
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch_of(samples, size=(5, 6), classes=4, void=0.3, seed=0):
    draws = generator(seed)
    images = torch.rand(samples, 3, *size, generator=draws, dtype=torch.float64)
    labels = torch.randint(classes, (samples, *size), generator=draws)
    labels[torch.rand(labels.shape, generator=draws) < void] = VOID
    return images, labels


class Pixelwise(nn.Module):
    """Logits of each pixel from its own colour alone."""

    def __init__(self, classes=4, scale=5.0):
        super().__init__()
        weight = scale * torch.randn(classes, 3, 1, 1, generator=generator(1), dtype=torch.float64)
        self.weight = nn.Parameter(weight)

    def forward(self, images):
        return functional.conv2d(images, self.weight.to(images.dtype))


class Says(nn.Module):
    """Gives the same logits whatever the input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits))

    def forward(self, images):
        return self.logits[: len(images)]


def measured(task, model, images, labels, cuts=()):
    """The metrics of a split that comes in the parts between the cuts."""
    totals = {}
    for start, end in itertools.pairwise([0, *sorted(cuts), len(images)]):
        with torch.no_grad():
            add(totals, task.measure(model, (images[start:end], labels[start:end])))
    return task.metrics(totals), totals


# Metrics


def by_loops(truth, guess, classes):
    """The definitions, one pixel at a time."""
    pixels = list(zip(truth.flatten().tolist(), guess.flatten().tolist(), strict=True))
    confusion = [[0] * classes for _ in range(classes)]
    for t, g in pixels:
        if t != VOID:
            confusion[t][g] += 1
    ious, recalls = [], []
    for c in range(classes):
        both = sum(t == g == c for t, g in pixels)
        either = sum(t != VOID and c in (t, g) for t, g in pixels)
        there = sum(t == c for t, _ in pixels)
        if either:
            ious.append(both / either)
        if there:
            recalls.append(both / there)
    labelled = sum(map(sum, confusion))
    right = sum(confusion[c][c] for c in range(classes))
    return confusion, sum(ious) / len(ious), right / labelled, sum(recalls) / len(recalls)


@given(seed=st.integers(0, 999), classes=st.integers(1, 4), void=st.floats(0, 0.9), missing=st.booleans())
def test_metrics_are_those_of_loops_over_pixels(seed, classes, void, missing):
    images, labels = batch_of(2, classes=classes, void=void, seed=seed)
    labels[0, 0, 0] = 0
    if missing and classes > 2:
        labels[labels == 1] = 2  # a class that does not occur, though it may be predicted
    model = Pixelwise(classes)
    metrics, sums = measured(Segmentation(NAMES[:classes]), model, images, labels)
    confusion, iou, pixels, recall = by_loops(labels, model(images).argmax(1), classes)
    assert sums["confusion"].tolist() == confusion
    assert metrics["mean IoU"] == pytest.approx(iou)
    assert metrics["pixel accuracy"] == pytest.approx(pixels)
    assert metrics["class accuracy"] == pytest.approx(recall)


def test_a_class_that_is_nowhere_is_left_out_and_one_that_is_wrongly_seen_is_not():
    #                             taken for:  a  b  c  d
    ious = class_ious(torch.tensor([[3, 0, 1, 0], [0, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]))
    assert ious[:3].tolist() == [3 / 4, 1, 0]
    assert math.isnan(ious[3])


@given(cuts=st.sets(st.integers(1, 9)), seed=st.integers(0, 9))
def test_metrics_do_not_depend_on_how_a_split_is_cut(cuts, seed):
    images, labels = batch_of(10, seed=seed)
    labels[3] = VOID
    task = Segmentation(NAMES, class_weights=[1.0, 2.0, 0.5, 3.0])
    whole, parts = (measured(task, Pixelwise(), images, labels, c) for c in ((), cuts))
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert torch.equal(parts[1]["confusion"], whole[1]["confusion"])


def test_training_and_evaluation_report_the_same():
    images, labels = batch_of(4)
    task = Segmentation(NAMES, class_weights=[1.0, 2.0, 0.5, 3.0])
    loss, sums = task.loss(Pixelwise(), (images, labels))
    metrics, _ = measured(task, Pixelwise(), images, labels)
    assert task.metrics(sums) == pytest.approx(metrics)
    assert loss.item() == pytest.approx(metrics["loss"])
    assert not any(value.requires_grad for value in sums.values())
    assert task.best_metric in metrics


# The loss


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 3.0]])
def test_the_loss_is_the_weighted_mean_over_labelled_pixels(weights):
    images, labels = batch_of(3)
    model = Pixelwise()
    loss, _ = Segmentation(NAMES, class_weights=weights).loss(model, (images, labels))
    logs = model(images).log_softmax(1)
    total = count = 0.0
    for i, row, column in itertools.product(range(3), range(5), range(6)):
        if (label := int(labels[i, row, column])) != VOID:
            weight = weights[label] if weights else 1.0
            total -= weight * logs[i, label, row, column].item()
            count += weight
    assert loss.item() == pytest.approx(total / count)
    as_torch = functional.cross_entropy(
        model(images), labels, torch.tensor(weights or [1.0] * 4, dtype=torch.float64), ignore_index=VOID
    )
    torch.testing.assert_close(loss, as_torch)
    gradients = [torch.autograd.grad(value, model.weight)[0] for value in (loss, as_torch)]
    torch.testing.assert_close(*gradients)


def test_another_number_can_be_no_class():
    images, labels = batch_of(3)
    other = torch.where(labels == VOID, -1, labels)
    first, second = (
        measured(Segmentation(NAMES, ignore=n), Pixelwise(), images, m)[0] for n, m in ((VOID, labels), (-1, other))
    )
    assert first == second


def test_what_is_predicted_where_there_is_no_class_counts_for_nothing():
    images, labels = batch_of(2)
    logits = Pixelwise()(images).detach()
    others = torch.where((labels == VOID)[:, None], -logits, logits)
    first, second = (measured(Segmentation(NAMES), Says(x), images, labels)[0] for x in (logits, others))
    assert first == second


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5, 3.0]])
def test_a_batch_without_a_labelled_pixel_changes_nothing(weights):
    images, labels = batch_of(2, void=1.0)
    assert (labels == VOID).all()
    task, model = Segmentation(NAMES, class_weights=weights), Pixelwise()
    loss, sums = task.loss(model, (images, labels))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))
    assert all(math.isnan(value) for value in task.metrics(sums).values())
    others, truth = batch_of(3)
    add(totals := {}, sums)
    add(totals, task.loss(model, (others, truth))[1])
    assert task.metrics(totals) == measured(task, model, others, truth)[0]


def test_a_low_precision_loss_is_computed_in_single_precision():
    images, labels = batch_of(2, size=(8, 8))
    logits = Pixelwise()(images[:, :, ::4, ::4]).detach().bfloat16()
    loss, _ = Segmentation(NAMES).loss(Says(logits), (images.bfloat16(), labels))
    assert loss.dtype == torch.float32
    larger = functional.interpolate(logits.float(), (8, 8), mode="bilinear", align_corners=True)
    torch.testing.assert_close(loss, functional.cross_entropy(larger, labels, ignore_index=VOID))


def test_corners_of_logits_lie_on_corners_of_the_image():
    small = torch.tensor([[0.0, 2.0], [4.0, 6.0]], dtype=torch.float64)
    logits = Segmentation(("a",)).logits(Says(small.view(1, 1, 2, 2)), torch.zeros(1, 3, 3, 3))
    assert logits[0, 0].tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    wider = Segmentation(("a",)).logits(Says(small.view(1, 1, 2, 2)), torch.zeros(1, 3, 2, 5))
    assert wider[0, 0].tolist() == [[0, 0.5, 1, 1.5, 2], [4, 4.5, 5, 5.5, 6]]


def test_the_gradient_goes_through_the_resizing():
    images, labels = batch_of(2, size=(7, 9), void=0.0)
    model = Says(torch.randn(2, 4, 2, 3, dtype=torch.float64))
    task = Segmentation(NAMES)

    def loss(logits):
        return task.loss(lambda _: logits, (images, labels))[0]

    assert torch.autograd.gradcheck(loss, model.logits)


# Augmentation


class Located:
    """Images whose pixels say where they are: channel 0 the row, channel 1 the column; so do the labels."""

    def __init__(self, samples, height, width):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        self.images = torch.stack([rows, columns]).double().expand(samples, -1, -1, -1)
        self.labels = (rows * width + columns).expand(samples, -1, -1)
        self.width = width
        self.task = Segmentation(tuple(map(str, range(height * width))), mean=(-7.0, -8.0), ignore=-1)

    def augmented(self, seed=0, **options):
        for name, value in options.items():
            setattr(self.task, name, value)
        return self.task.augment((self.images, self.labels), generator(seed))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("scale", [None, (0.5, 2.0), (0.2, 0.9), (3.0, 3.0)])
@pytest.mark.parametrize("crop", [None, (6, 5), (20, 30), (4, 30)])
def test_an_image_and_its_label_map_move_alike(flip, scale, crop):
    made = Located(8, 11, 13)
    images, labels = made.augmented(flip=flip, scale=scale, crop=crop)
    assert images.shape == (8, 2, *(crop or (11, 13)))
    assert labels.shape == (8, *(crop or (11, 13)))
    outside = labels == -1
    assert (images[:, 0][outside] == -7).all()
    assert (images[:, 1][outside] == -8).all()
    # Bilinear values of a ramp are places; the nearest pixel is half a pixel away at most.
    rows, columns = (images[:, 0] - labels // made.width)[~outside], (images[:, 1] - labels % made.width)[~outside]
    assert rows.abs().max() <= 0.5 + 1e-9
    assert columns.abs().max() <= 0.5 + 1e-9
    assert (images[:, :, ~outside.all(0)] != -7).any()


@pytest.mark.parametrize("size", [(6, 9), (17, 21)])
def test_a_scaled_crop_is_a_part_of_the_resized_image(size):
    images, labels = batch_of(6, size=(12, 15))
    view = random_view(6, (12, 15), size, generator(2), scale=(0.4, 1.9))
    seen, seen_labels = view.of_images(images, (0.1, 0.2, 0.3)), view.of_label_maps(labels, VOID)
    room = 40  # enough on every side
    for i in range(6):
        places = []
        for line, length in ((view.rows[i], 12), (view.columns[i], 15)):
            scaled = length / (line[1] - line[0]).item()
            assert scaled == pytest.approx(round(scaled))
            assert round(0.4 * length) <= round(scaled) <= round(1.9 * length)
            places.append((round(scaled), round(((line[0].item() + 0.5) * scaled / length) - 0.5)))
        (height, top), (width, left) = places
        image = functional.interpolate(images[i : i + 1], (height, width), mode="bilinear", align_corners=False)
        label_map = functional.interpolate(labels[i : i + 1, None].double(), (height, width), mode="nearest-exact")
        canvas = torch.tensor([0.1, 0.2, 0.3, VOID], dtype=torch.float64).view(4, 1, 1).repeat(1, 99, 99)
        canvas[:, room : room + height, room : room + width] = torch.cat([image, label_map], 1)[0]
        part = canvas[:, room + top : room + top + size[0], room + left : room + left + size[1]]
        torch.testing.assert_close(seen[i], part[:3])
        assert torch.equal(seen_labels[i].double(), part[3])


def test_without_scaling_a_crop_copies_pixels():
    made = Located(400, 5, 7)
    images, labels = made.augmented(crop=(3, 4))
    starts = {tuple(image[:, 0, 0].int().tolist()) for image in images}
    assert starts == set(itertools.product(range(3), range(4)))  # every place there is
    for image, label_map in zip(images, labels, strict=True):
        row, column = image[:, 0, 0].int().tolist()
        assert torch.equal(image, made.images[0, :, row : row + 3, column : column + 4])
        assert torch.equal(label_map, made.labels[0, row : row + 3, column : column + 4])


def test_a_small_image_lies_anywhere_in_a_larger_crop():
    made = Located(400, 2, 3)
    images, labels = made.augmented(crop=(4, 5))
    corners = {tuple((labels[i] == 0).nonzero()[0].tolist()) for i in range(400)}
    assert corners == set(itertools.product(range(3), range(3)))
    assert ((labels >= 0).sum((1, 2)) == 6).all()
    assert torch.equal(images[:, 0] == -7, labels == -1)


def test_factors_fill_their_range():
    """Uniform: mean and extremes of 4000 factors, of images so long that rounding does not matter."""
    view = random_view(4000, (10_000, 10_000), (2, 2), generator(), scale=(0.5, 2.0))
    for places in (view.rows, view.columns):
        factors = 1 / (places[:, 1] - places[:, 0])
        assert 0.5 - 1e-4 <= factors.min() < 0.51
        assert 1.99 < factors.max() <= 2.0 + 1e-4
        assert (factors.mean() - 1.25).abs() < 5 * 1.5 / 12**0.5 / 4000**0.5
    ratio = (view.rows[:, 1] - view.rows[:, 0]) / (view.columns[:, 1] - view.columns[:, 0])
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-3, rtol=0)  # one factor for both sides


def test_half_of_the_images_are_mirrored():
    made = Located(2000, 2, 3)
    images, labels = made.augmented(flip=True)
    mirrored = images[:, 1, 0, 0] == 2
    assert (mirrored.double().mean() - 0.5).abs() < 5 * 0.5 / 2000**0.5
    assert torch.equal(images[mirrored], made.images[mirrored].flip(3))
    assert torch.equal(images[~mirrored], made.images[~mirrored])
    assert torch.equal(labels[mirrored], made.labels[mirrored].flip(2))


def test_augmentation_is_reproducible_and_draws_from_the_given_generator_only():
    task = Segmentation(NAMES, scale=[0.5, 2.0], crop=[4, 4], flip=True)
    batch = batch_of(8)
    before = [tensor.clone() for tensor in batch]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (task.augment(batch, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    first[0].zero_()
    assert all(map(torch.equal, batch, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_type_and_layout_change_nothing_else(dtype):
    task = Segmentation(NAMES, mean=(0.2, 0.3, 0.4), scale=[0.5, 2.0], crop=[9, 9])
    images, labels = batch_of(4)
    images = images.to(dtype)
    plain, _ = task.augment((images, labels), generator())
    last, _ = task.augment((images.contiguous(memory_format=torch.channels_last), labels), generator())
    assert plain.dtype == dtype
    assert torch.equal(plain, last)


def test_without_augmentation_the_batch_stays_as_it_is():
    batch = batch_of(2)
    assert Segmentation(NAMES).augment(batch, generator()) is batch


# Windows


@pytest.mark.parametrize("window", [(3, 4), (5, 6), (1, 1), (2, 100), (100, 100)])
def test_windows_show_a_model_of_single_pixels_the_whole_image(window):
    images, labels = batch_of(3, size=(5, 11))
    whole, parts = (measured(Segmentation(NAMES, window=w), Pixelwise(), images, labels) for w in (None, window))
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert torch.equal(parts[1]["confusion"], whole[1]["confusion"])


def test_where_windows_overlap_their_logits_are_averaged():
    seen = []

    def brightness(part):
        seen.append(part.shape)
        return part.mean((1, 2, 3), keepdim=True).expand(-1, 1, *part.shape[2:])

    image = torch.tensor([[[[1.0, 2.0, 6.0, 4.0, 5.0]]]], dtype=torch.float64)
    found = mean_over_windows(brightness, image, (1, 3), 1)
    # Windows 1 2 6 and 6 4 5 have the means 3 and 5.
    assert found.flatten().tolist() == [3, 3, 4, 5, 5]
    assert seen == [(1, 1, 1, 3)] * 2
    column = mean_over_windows(brightness, image.transpose(2, 3), (3, 9), 1)
    assert column.flatten().tolist() == [3, 3, 4, 5, 5]


@given(length=st.integers(1, 300), window=st.integers(1, 300))
def test_windows_cover_everything_and_overlap_by_a_third(length, window):
    window = min(window, length)
    starts = window_starts(length, window)
    assert starts[0] == 0
    assert starts[-1] == length - window
    steps = [after - before for before, after in itertools.pairwise(starts)]
    assert all(0 < step <= max(1, math.ceil(2 * window / 3)) for step in steps)
    assert max(steps, default=0) - min(steps, default=0) <= 1


def test_training_knows_no_windows():
    images, labels = batch_of(2)
    first, second = (Segmentation(NAMES, window=w).loss(Pixelwise(), (images, labels))[0] for w in (None, (2, 2)))
    assert torch.equal(first, second)


# At the door


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_names": ()}, "the data set has no classes: choose another data set, or another task."),
        ({"ignore": 2.5}, "ignore is 2.5; it must be a whole number"),
        ({"class_weights": [1.0, 2.0]}, "class_weights is [1.0, 2.0]; it must be a list of 4 numbers above 0"),
        ({"class_weights": [1.0, 2.0, 0.0, 1.0]}, "class_weights is [1.0, 2.0, 0.0, 1.0]; it must be"),
        ({"class_weights": [1.0, 2.0, math.nan, 1.0]}, "it must be a list of 4 numbers above 0, one per class"),
        ({"class_weights": "balanced"}, "class_weights is 'balanced'; it must be a list of 4 numbers above 0"),
        ({"scale": 2.0}, "scale is 2.0; it must be a list of 2 numbers above 0, the smallest and the largest factor"),
        ({"scale": [2.0, 0.5]}, "scale is [2.0, 0.5]; the smallest factor must come first."),
        ({"scale": [0.0, 2.0]}, "scale is [0.0, 2.0]; it must be"),
        ({"scale": [1.0, math.inf]}, "scale is [1.0, inf]; it must be"),
        ({"crop": 64}, "crop is 64; it must be a list of 2 whole numbers above 0, height and width (or None)."),
        ({"crop": [64]}, "crop is [64]; it must be"),
        ({"crop": [64, 0]}, "crop is [64, 0]; it must be"),
        ({"crop": [64, 2.5]}, "crop is [64, 2.5]; it must be"),
        ({"crop": [64, True]}, "crop is [64, True]; it must be"),
        ({"window": [64, -1]}, "window is [64, -1]; it must be"),
        ({"window": ["a", "b"]}, "window is ['a', 'b']; it must be"),
        ({"flip": 1}, "flip is 1; it must be"),
    ],
    ids=str,
)
def test_bad_options_get_their_sentence(options, words):
    with pytest.raises((TypeError, ValueError)) as error:
        Segmentation(**{"class_names": NAMES, **options})
    assert words in str(error.value)


def test_what_are_no_label_maps_is_refused():
    images, labels = batch_of(2)
    task, model = Segmentation(NAMES, crop=(2, 2)), Pixelwise()
    for wrong in (torch.arange(2), labels[:, :4], labels[:1]):
        for use in (task.loss, task.measure, lambda _, batch: task.augment(batch, generator())):
            with pytest.raises(ValueError, match="choose a data set that has them, or another task"):
                use(model, (images, wrong))
    for kind in (torch.uint8, torch.int32):
        with pytest.raises(TypeError, match=r"label maps are torch\.u?int\d+; they must be torch\.int64"):
            task.measure(model, (images, labels.to(kind)))
    for number in (4, -1, 254):
        labels[1, 2, 3] = number
        with pytest.raises(
            ValueError, match=rf"a label map holds {number}; labels must be 0 to 3, or 255 for no class"
        ):
            task.measure(model, (images, labels))


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 5, 6), (2, 5, 6), (1, 4, 5, 6)])
def test_a_model_that_does_not_segment_is_refused(shape):
    with pytest.raises(ValueError, match=r"needs logits \(batch, 4 classes, height, width\): choose a model for"):
        Segmentation(NAMES).loss(Says(torch.zeros(shape)), batch_of(2))


# Predictions and pictures


def test_predict_tells_the_largest_classes():
    logits = torch.zeros(2, 7, 4, 5)
    logits[0, 3] = 1  # all of the first image
    logits[1, 0, :2], logits[1, 6, 2, :4], logits[1, 2, 2, 4], logits[1, 1, 3] = 1, 1, 1, 1
    task = Segmentation(tuple("abcdefg"))
    first, second = task.predict(Says(logits), torch.zeros(2, 3, 4, 5))
    assert first == {"shares": {"d": 1.0}}
    assert list(second["shares"].items()) == [("a", 0.5), ("b", 0.25), ("g", 0.2), ("c", 0.05)]
    json.dumps(second)
    many = Segmentation(tuple("abcdefg")).predict(Says(torch.rand(1, 7, 30, 30)), torch.zeros(1, 3, 30, 30))
    assert len(many[0]["shares"]) == 5


def test_predict_looks_through_windows_and_takes_no_gradient():
    class Counting(Pixelwise):
        calls = 0

        def forward(self, images):
            assert not torch.is_grad_enabled()
            self.calls += 1
            return super().forward(images)

    images, _ = batch_of(1, size=(6, 6))
    whole, parts = Counting(), Counting()
    assert Segmentation(NAMES).predict(whole, images) == Segmentation(NAMES, window=[4, 4]).predict(parts, images)
    assert (whole.calls, parts.calls) == (1, 4)


def test_colours_are_those_of_the_data_set():
    assert class_colors(tuple(CITYSCAPES.values())).tolist() == [[*c] for c in CITYSCAPES_COLORS.values()]
    assert class_colors(CAMVID).tolist() == [[*c] for c in CAMVID_COLORS.values()]
    assert class_colors(("car", "sky")).tolist() == [[0, 0, 142], [70, 130, 180]]
    assert class_colors(("tree", "car")).tolist() == [[128, 128, 0], [64, 0, 128]]
    others = class_colors(tuple(map(str, range(60))))
    assert others.dtype == torch.uint8
    assert len({*map(tuple, others.tolist())}) == 60


def test_an_overlay_blends_colours_and_leaves_what_is_no_class_black():
    colors = torch.tensor([[255, 0, 0], [0, 0, 255]], dtype=torch.uint8)
    label_map = torch.tensor([[0, 1, VOID, -1]])
    assert in_color(label_map, colors)[:, 0].T.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    grey = torch.full((1, 1, 4), 0.5)
    blended = overlay(grey, label_map, colors, opacity=0.6)[:, 0].T
    torch.testing.assert_close(blended, torch.tensor([[0.8, 0.2, 0.2], [0.2, 0.2, 0.8], [0.2] * 3, [0.2] * 3]))


def drawn(figure):
    """The figure as a PNG: drawing it is what finds mistakes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return file.getvalue()


@pytest.mark.parametrize(("samples", "classes", "size"), [(1, 1, (5, 6)), (3, 4, (9, 4)), (11, 30, (8, 16))])
def test_pictures_are_drawn(samples, classes, size):
    names = tuple(f"class {i}" for i in range(classes))
    images, labels = batch_of(samples, size, min(classes, 20))
    task, model = Segmentation(names, window=[4, 4]), Pixelwise(classes)
    _, sums = measured(task, model, images, labels)

    def batches():
        yield from zip(images.split(2), labels.split(2), strict=True)

    pictures = dict(task.pictures(model, batches, sums))
    assert list(pictures) == ["Segmented images", "Intersection over union of each class", "Confusion matrix"]
    assert all(drawn(figure).startswith(b"\x89PNG") for figure in pictures.values())
    assert len(pictures["Segmented images"].axes) == 4 * min(samples, 4)


def test_the_figure_shows_truth_prediction_and_where_they_differ():
    truth = torch.tensor([[[0, 1, 1, VOID]]])
    logits = functional.one_hot(torch.tensor([[[0, 1, 0, 1]]]), 2).permute(0, 3, 1, 2).double()
    images = torch.ones(1, 3, 1, 4)
    task = Segmentation(("road", "sky"))
    figure = task.overlay_figure(Says(logits), iter([(images, truth)]), 1)
    panels = [np.asarray(axis.images[0].get_array())[0] for axis in figure.axes]
    road, sky = (0.4 + 0.6 * np.array(CITYSCAPES_COLORS[name]) / 255 for name in ("road", "sky"))
    np.testing.assert_allclose(panels[0], np.ones((4, 3)))
    np.testing.assert_allclose(panels[1], [road, sky, sky, [0.4] * 3], atol=1e-6)
    np.testing.assert_allclose(panels[2], [road, sky, road, sky], atol=1e-6)
    np.testing.assert_allclose(panels[3], [[1] * 3, [1] * 3, [0.85, 0.1, 0.1], [0] * 3], atol=1e-6)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["road", "sky", "no class"]


def test_bars_are_the_ious_of_the_classes():
    confusion = torch.zeros(4, 4)
    confusion[0, :2], confusion[1, 1] = torch.tensor([3.0, 1.0]), 4
    figure = Segmentation(NAMES).iou_figure(confusion)
    axis = figure.axes[0]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([0.75, 0.8, 0, 0])
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["0.750", "0.800", *["absent and not predicted"] * 2]
    assert figure.legends[0].get_texts()[0].get_text() == "mean 0.775"


def test_a_confusion_matrix_of_pixels_shows_percentages():
    confusion = torch.tensor([[3_000_000.0, 1_000_000.0], [2.0, 999.0]])
    texts = [text.get_text() for text in confusion_figure(confusion, ("a", "b"), percent=True).axes[0].texts]
    assert texts == ["75%", "25%", "100%"]


@given(samples=st.integers(1, 40), size=st.integers(1, 40), count=st.integers(1, 5))
def test_shown_images_come_from_all_over_the_split(samples, size, count):
    rows = torch.arange(samples)
    shown = [
        int(image) for image, _ in spread_over(zip(rows.split(size), rows.split(size), strict=True), samples, count)
    ]
    assert len(shown) == len({*shown}) == min(samples, count)
    assert shown == sorted(shown)
    gaps = [after - before for before, after in itertools.pairwise([-shown[0], *shown, 2 * samples - shown[-1]])]
    assert max(gaps) - min(gaps) <= 2


# Whole runs

TRUST = ("--trust", "street_net")
MODULE = """
import torch
from torch import nn

import equipoise as eq


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, z, x):
        return 0.3 * torch.tanh(self.conv(z)) + x


class Net(nn.Module):
    '''Logits at a quarter of the size.'''

    def __init__(self, shape, classes, mean, std):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 6, 5, stride=4, padding=2)
        self.equilibrium = eq.Equilibrium(Cell())
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, images):
        return self.head(self.equilibrium(self.stem(images)))
"""
RECIPE = """
title = "Streets"

[data]
name = "cityscapes"
validation = 2

[task]
name = "segmentation"
scale = [0.5, 2.0]
crop = [8, 12]
flip = true
window = [10, 12]

[model]
name = "street_net:Net"

[optimizer]
name = "sgd"
lr = 0.1

[training]
batch_size = 3
evaluation_batch_size = 2

[[phases]]
epochs = 1
"""


def make_streets(folder):
    """Cityscapes in its official layout, small; images have all of their pixels labelled, or few."""
    draws = np.random.default_rng(0)
    for part, city, count in (("train", "aachen", 8), ("val", "lindau", 3)):
        for i in range(count):
            stem = f"{part}/{city}/{city}_{i:06}_000019"
            labels = draws.choice([7, 8, 11, 23, 26], (12, 20)).astype(np.uint8)
            labels[draws.random((12, 20)) < (0.9 if i % 2 else 0.0)] = 0
            colors = draws.integers(0, 256, (12, 20, 3), dtype=np.uint8)
            write(folder / f"leftImg8bit/{stem}_leftImg8bit.png", picture(colors))
            write(folder / f"gtFine/{stem}_gtFine_labelIds.png", picture(labels))


def make_work(folder):
    make_streets(folder / "data/cityscapes")
    (folder / "street_net.py").write_text(MODULE)
    (folder / "street.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    """A small finished run, with its report."""
    folder = make_work(tmp_path_factory.mktemp("work"))
    words = ["--data", folder / "data", "--runs", folder / "runs", "--threads", "1", "--report"]
    assert main(["train", str(folder / "street.toml"), *map(str, words)]) == 0
    return folder / "runs/street-001"


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A picture of another size than those of the run, in an otherwise empty current folder."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(1).integers(0, 256, (31, 45, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_a_run_is_trained_measured_and_reported(street, capsys):
    result = read_json(street / "result.json")
    assert result["steps"] == 2
    assert result["failed_steps"] == 0
    assert result["best"]["metric"] == "mean IoU"
    assert {"mean IoU", "pixel accuracy", "class accuracy", "loss"} < result["test"].keys()
    page = (street / "report.html").read_text()
    for title in ("Segmented images", "Intersection over union of each class", "Confusion matrix"):
        assert title in page
    assert main(["evaluate", str(street), *TRUST, "--data", str(street.parents[1] / "data")]) == 0
    assert f"mean IoU          {result['test']['mean IoU']:.4g}" in capsys.readouterr().out


def test_segment_writes_what_the_model_sees(street, image, capsys):
    import equipoise as eq

    assert main(["segment", str(street), *TRUST, "photo.png"]) == 0
    printed = capsys.readouterr().out
    classes = np.array(Image.open("photo-segmented-classes.png"))
    assert classes.dtype == np.uint8
    assert classes.shape == (31, 45)

    # By hand, from the model alone.
    task = Segmentation(tuple(CITYSCAPES.values()), window=[10, 12])
    pixels = torch.as_tensor(np.array(Image.open(image))).permute(2, 0, 1)
    expected = task.label_maps(eq.load(street, trust="street_net"), pixels[None].float() / 255)[0]
    assert torch.equal(torch.as_tensor(classes).long(), expected)
    seen = np.asarray(Image.open("photo-segmented.png")).astype(float)
    colors = np.array([CITYSCAPES_COLORS[task.class_names[c]] for c in range(19)])
    np.testing.assert_allclose(seen, 0.4 * np.array(Image.open(image)) + 0.6 * colors[classes], atol=0.51)

    shares = re.findall(r"^([a-z ]+?)  +([\d.]+)%$", printed, re.M)
    counted = {name: f"{(classes == c).mean():.2%}" for c, name in enumerate(task.class_names) if (classes == c).any()}
    assert {name: f"{share}%" for name, share in shares} == counted
    assert [float(share) for _, share in shares] == sorted((float(share) for _, share in shares), reverse=True)
    assert re.search(r"forward solves +100.00% of \d+ converged", printed)
    assert sorted(path.name for path in Path().iterdir()) == [
        "photo-segmented-classes.png", "photo-segmented.png", "photo.png",
    ]  # fmt: skip


def test_segment_into_a_file_and_into_a_folder(street, image):
    Image.open(image).convert("L").save("grey.jpg")
    assert main(["segment", str(street), *TRUST, "photo.png", "-o", "seen/it.png", "--window", "50", "50"]) == 0
    assert {path.name for path in Path("seen").iterdir()} == {"it.png", "it-classes.png"}
    assert main(["segment", str(street), *TRUST, "photo.png", "grey.jpg", "--out", "all"]) == 0
    names = {f"{stem}-segmented{kind}.png" for stem in ("photo", "grey") for kind in ("", "-classes")}
    assert {path.name for path in Path("all").iterdir()} == names


def test_a_photo_lying_on_its_side_is_set_upright(street, image):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(image).save("side.png", exif=exif)
    assert main(["segment", str(street), *TRUST, "side.png"]) == 0
    assert np.array(Image.open("side-segmented.png")).shape == (45, 31, 3)


def test_segment_answers_a_mistake_with_a_sentence(street, image, capsys, tmp_path):
    def fails(*words):
        assert main(["segment", *TRUST, *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert captured.out == ""
        return captured.err

    (tmp_path / "taken.png").write_bytes(b"")
    (tmp_path / "free-classes.png").write_bytes(b"")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert "there is no folder runs/none" in fails("runs/none", image)
    assert "there is no file none.png" in fails(street, "none.png")
    assert "broken.png cannot be read: it is not an image that can be read; formats: PNG" in fails(street, "broken.png")
    assert "taken.png already exists" in fails(street, image, "-o", "taken.png")
    assert "free-classes.png already exists" in fails(street, image, "-o", "free.png")
    assert "it must be a file that ends in .png" in fails(street, image, "-o", "seen.jpg")
    assert "a single file, but there are 2 images" in fails(street, image, "taken.png", "-o", "seen.png")
    assert "would be written to photo-segmented.png" in fails(street, image, "elsewhere/photo.png")
    assert "--window is 0; it must be a whole number of at least 1" in fails(street, image, "--window", 0, 4)
    assert not [path for path in tmp_path.iterdir() if "seen" in path.name or "segmented" in path.name]


def test_an_image_that_does_not_fit_is_refused_before_it_is_decoded(street, image, capsys):
    """Its size, the limit and the remedy are said; a picture of 12000 x 12000 is half a megabyte on disk."""
    for side in (12000, 7000):
        Path(f"{side}.png").write_bytes(png(side, side, 3 * side**2))
        assert main(["segment", str(street), f"{side}.png", "--trust", "street_net"]) == 2
    large, smaller = capsys.readouterr().err.splitlines()
    assert large == (
        "equipoise: 12000.png cannot be read: it is 12000 x 12000, 144,000,000 pixels; at most 89,000,000 are read: "
        "make it smaller."
    )
    assert smaller == (
        "equipoise: 7000.png cannot be read: it is 7000 x 7000, and segmenting it into 19 classes takes about 12.9 GB "
        "of memory; the limit is 4 GB: make it smaller, or cut it into parts."
    )
    assert not list(Path().glob("*-segmented*"))


def test_a_large_image_is_segmented_in_windows_and_said_so():
    small, note = in_windows(Segmentation(NAMES), 1024, 2048)
    assert (small.window, note) == (None, "")
    large, note = in_windows(task := Segmentation(NAMES), 3000, 4000)
    assert large.window == (1024, 1024)
    assert task.window is None
    assert note == "segmented in windows of 1024 x 1024, since it is 4000 x 3000; --window sets another size"
    assert in_windows(Segmentation(NAMES, window=[50, 60]), 3000, 4000)[0].window == (50, 60)


def test_only_a_run_of_a_segmentation_task_segments(tmp_path, image, capsys):
    words = ["--budget", "smoke", "data.limit=20", "--runs", str(tmp_path / "runs"), "--threads", "1"]
    assert main(["train", "core/digits", *words]) == 0
    capsys.readouterr()
    assert main(["segment", str(tmp_path / "runs/core-digits-001"), str(image)]) == 2
    assert "requires the task 'segmentation'" in capsys.readouterr().err


def test_files_are_written_whole_or_not_at_all(street, image, monkeypatch):
    save, made = Image.Image.save, []

    def full_disk(self, path, *rest):
        made.append(path)
        if len(made) == 2:
            raise OSError("No space left on device")
        save(self, path, *rest)

    monkeypatch.setattr(Image.Image, "save", full_disk)
    assert main(["segment", str(street), *TRUST, "photo.png"]) == 2
    assert len(made) == 2
    assert [path.name for path in Path().iterdir()] == ["photo.png"]


def test_predict_tells_shares_of_classes(street, image, capsys):
    assert main(["predict", str(street), *TRUST, "photo.png", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["shares"]
    assert set(shares) <= set(CITYSCAPES.values())
    assert 0 < sum(shares.values()) <= 1 + 1e-9


def test_two_processes_train_as_one_does(tmp_path):
    """The mean is over all labelled pixels of a batch, of which one process may have many more than the other."""
    make_work(tmp_path)
    words = [
        "train", "street.toml", "--data", "data", "training.precision=float64", "data.validation=0",
        "training.batch_size=5", "tolerance.relative=1e-10", "tolerance.max_steps=100", "task.flip=false",
        "task.scale=[1.0,1.0]", "task.crop=[12,20]", f"task.class_weights={list(range(1, 20))}",
        "training.log_every=1",
    ]  # fmt: skip
    run_command(tmp_path, *words)
    run_two(tmp_path, *words)
    one, two = (Run(tmp_path / f"runs/street-00{number}") for number in (1, 2))
    (first, _), (second, _) = (checkpoints.read(run.last) for run in (one, two))
    for name in first:
        if name.startswith("model/"):
            torch.testing.assert_close(first[name], second[name], rtol=1e-7, atol=1e-9)
    losses = [[r["loss"] for r in run.records() if r["kind"] == "step"] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    trained = [next(r["train"] for r in run.records() if r["kind"] == "epoch") for run in (one, two)]
    assert trained[0]["mean IoU"] == pytest.approx(trained[1]["mean IoU"], rel=1e-6)


# The real files


def test_camvid():
    """A model that knows the labels' colours: its mistakes are those of a quarter of the resolution."""
    try:
        data = load("camvid", folders=REAL)
    except MissingData as missing:
        pytest.skip(str(missing))
    task = Segmentation(data.class_names, data.mean, scale=[0.5, 2.0], crop=[96, 128], flip=True)
    images, labels = task.prepare(data.test.read(torch.arange(0, 200, 50)), torch.float32)
    augmented, moved = task.augment((images, labels), generator())
    assert augmented.shape == (4, 3, 96, 128)
    assert moved.shape == (4, 96, 128)
    assert set(moved.unique().tolist()) <= {*range(11), VOID}

    truth = functional.one_hot(labels.where(labels != VOID, 3), 11).permute(0, 3, 1, 2).double()
    metrics, sums = measured(task, Says(truth), images, labels)
    assert metrics["mean IoU"] == metrics["pixel accuracy"] == metrics["class accuracy"] == 1
    assert sums["confusion"].sum() == (labels != VOID).sum()
    coarse = functional.interpolate(truth, scale_factor=0.25, mode="area")
    metrics, _ = measured(task, Says(coarse), images, labels)
    assert 0.5 < metrics["mean IoU"] < 1
    assert 0.85 < metrics["pixel accuracy"] < 1

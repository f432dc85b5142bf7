"""Tasks: augmentation against a loop over images, classification against definitions, pictures that can be drawn."""

import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, top_k_accuracy_score
from torch import nn
from torch.nn import functional

from equipoise.lab.training.evaluate import add
from equipoise.models.few_shot.conv4 import Conv4
from equipoise.models.few_shot.model import FewShotMDEQ
from equipoise.models.generator.mdeq_ae import MDEQAE
from equipoise.models.generator.model import Generator
from equipoise.models.generator.vae import MDEQVAE
from equipoise.models.opteq.model import OptEq, POptEq
from equipoise.tasks import TASKS, Task
from equipoise.tasks.augmentation import flip, shift
from equipoise.tasks.augmented import AugmentedClassification
from equipoise.tasks.classification import Classification
from equipoise.tasks.drawing import confusion_figure, image_grid

NAMES = tuple("abcde")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch_of(samples, shape=(1, 6, 6), classes=5, seed=0):
    draws = generator(seed)
    return torch.rand(samples, *shape, generator=draws), torch.randint(classes, (samples,), generator=draws)


class Fixed(nn.Module):
    """A linear classifier with known weights."""

    def __init__(self, shape=(1, 6, 6), classes=5, scale=3.0):
        super().__init__()
        pixels = torch.Size(shape).numel()
        self.weight = nn.Parameter(scale * torch.randn(pixels, classes, generator=generator(1)) / pixels**0.5)

    def forward(self, images):
        return images.flatten(1) @ self.weight.to(images.dtype)


class Says(nn.Module):
    """Gives the same logits whatever the input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.as_tensor(logits)

    def forward(self, images):
        return self.logits.to(images.dtype)[: len(images)]


# Augmentation


def shift_one_by_one(images, pixels, draws):
    """The definition: each image cut at random out of its padded self."""
    moves = torch.randint(2 * pixels + 1, (2, len(images), 1), generator=draws)[..., 0]
    n, _, height, width = images.shape
    shifted = torch.zeros_like(images)
    for i in range(n):
        down, right = (moves[:, i] - pixels).tolist()
        for row in range(height):
            for column in range(width):
                if 0 <= row + down < height and 0 <= column + right < width:
                    shifted[i, :, row, column] = images[i, :, row + down, column + right]
    return shifted


def flip_one_by_one(images, draws):
    mirrored = torch.randint(2, (len(images),), generator=draws, dtype=torch.bool)
    return torch.stack([image.flip(-1) if m else image for image, m in zip(images, mirrored, strict=True)])


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    pixels=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_shift_is_the_crop_of_a_padded_image(shape, pixels, seed):
    images = torch.rand(shape, generator=generator(seed))
    moved = shift(images, pixels, generator(seed))
    assert torch.equal(moved, shift_one_by_one(images, pixels, generator(seed)))


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), seed=st.integers(0, 99)
)
def test_flip_mirrors_whole_images(shape, seed):
    images = torch.rand(shape, generator=generator(seed))
    assert torch.equal(flip(images, generator(seed)), flip_one_by_one(images, generator(seed)))


VARIATIONS = [lambda x, g: shift(x, 2, g), flip]


@pytest.mark.parametrize("vary", VARIATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_type_and_layout_change_nothing_else(vary, dtype, layout):
    images = torch.rand(7, 3, 5, 4, generator=generator()).to(dtype)
    varied = vary(images.contiguous(memory_format=layout), generator(3))
    assert varied.dtype == dtype
    assert torch.equal(varied, vary(images.clone(), generator(3)))


@pytest.mark.parametrize("vary", VARIATIONS)
def test_variations_are_reproducible_and_leave_their_input_alone(vary):
    images = torch.rand(40, 1, 5, 5)
    before = images.clone()
    first, again, other = (vary(images, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    first.zero_()
    assert torch.equal(images, before)


@pytest.mark.parametrize("vary", VARIATIONS)
def test_variations_draw_from_the_given_generator_only(vary):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    vary(torch.rand(4, 1, 5, 5, generator=generator()), generator())
    assert torch.equal(torch.rand(3), expected)


def test_every_move_is_as_likely_as_every_other():
    """A lit pixel in the middle tells where its image went; 25 places, each 1/25 of the images to within 5 sigma."""
    n, pixels = 20_000, 2
    images = torch.zeros(n, 1, 7, 7)
    images[:, :, 3, 3] = 1
    counts = shift(images, pixels, generator()).sum((0, 1))
    assert counts.sum() == n
    assert not counts[0].any()
    assert not counts[:, 6].any()
    share = counts[1:6, 1:6] / n
    assert (share - 1 / 25).abs().max() < 5 * (1 / 25 * 24 / 25 / n) ** 0.5


def test_half_of_the_images_are_mirrored():
    n = 20_000
    images = torch.tensor([[[[0.0, 1.0]]]]).expand(n, 1, 1, 2)
    assert (flip(images, generator())[:, 0, 0, 0].mean() - 0.5).abs() < 5 * 0.5 / n**0.5


def test_the_task_augments_as_its_options_say():
    images, labels = batch_of(8)
    plain, kept = Classification(NAMES).augment((images, labels), generator())
    assert plain is images
    assert kept is labels
    both, _ = Classification(NAMES, shift=2, flip=True).augment((images, labels), generator(4))
    draws = generator(4)
    assert torch.equal(both, flip(shift(images, 2, draws), draws))


# Preparing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prepare_brings_bytes_to_the_unit_interval(dtype):
    pixels = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    labels = torch.arange(4)
    images, kept = Classification(NAMES).prepare((pixels, labels), dtype)
    assert images.dtype == dtype
    assert images.min() == 0
    assert images.max() == 1
    assert torch.equal((images * 255).round().to(torch.uint8), pixels)
    assert kept is labels
    assert pixels.dtype == torch.uint8


def test_prepare_leaves_numbers_as_they_are_and_passes_every_target_on():
    inputs, masks, labels = torch.randn(3, 5).double(), torch.zeros(3, 2, dtype=torch.uint8), torch.arange(3)
    prepared, *rest = Classification(NAMES).prepare((inputs, masks, labels), torch.float32)
    assert torch.equal(prepared, inputs.float())
    assert rest[0] is masks
    assert rest[1] is labels
    assert len(Classification(NAMES).prepare((inputs,), torch.float32)) == 1


# The contract


def test_a_task_must_have_a_loss_a_measure_and_metrics():
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]


class Plain(Task):
    """The least a task can be."""

    best_metric = "loss"
    best_is_largest = False

    def loss(self, model, batch):
        return model(batch[0]).mean(), {}

    def measure(self, model, batch):
        return {}

    def metrics(self, sums):
        return {}


def test_what_a_task_need_not_have():
    task, batch = Plain(), (torch.rand(2, 3),)
    assert task.augment(batch, generator()) is batch
    assert list(task.pictures(nn.Identity(), lambda: iter([batch]), {})) == []
    with pytest.raises(NotImplementedError, match=r"the task Plain has no predict, so it cannot predict"):
        task.predict(nn.Identity(), batch[0])


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_keeps_the_contract(name):
    makes_images = name in ("generation", "restoration", "vae", "autoencoding")
    task = TASKS[name]() if makes_images else TASKS[name](class_names=NAMES)
    assert isinstance(task, Task)
    images, labels = batch_of(6)
    model: nn.Module = Fixed()
    if makes_images:
        images, model = torch.rand(2, 1, 24, 24), Generator((1, 24, 24), latent=4, size="small-2", channels=(8, 8))
        model.equilibrium.on_failure = "ignore"
        task.steps = task.train_steps = 8  # type: ignore[attr-defined]
    if name in ("vae", "autoencoding"):
        kind = MDEQVAE if name == "vae" else MDEQAE
        model = kind((1, 24, 24), latent=4, size="small-2", channels=(8, 8), expansion=1.0)
        model.encoder.equilibrium.on_failure = model.decoder.equilibrium.on_failure = "ignore"
    if name == "segmentation":  # a class for every pixel
        labels, model = labels[:, None, None].expand(-1, *images.shape[2:]), nn.Conv2d(images.shape[1], len(NAMES), 1)
    elif name == "augmented-classification":
        model = POptEq((1, 6, 6), 5, size="reduced", channels=3, stem=1)
    batch = (images, labels)
    if name == "few-shot":  # a batch of tasks
        model, labels = FewShotMDEQ((1, 8, 8), len(NAMES), channels=(4, 4), groups=2, task_length=4), torch.arange(2)
        model.equilibrium.on_failure = "ignore"
        batch = 2 * (torch.rand(3, 2, 1, 8, 8), labels.expand(3, -1))
    if name in ("maml", "reptile", "imaml"):
        model, labels = Conv4((1, 8, 8), len(NAMES), filters=4, layers=2), torch.arange(2)
        batch = 2 * (torch.rand(3, 2, 1, 8, 8), labels.expand(3, -1))
    loss, sums = task.loss(model, batch)
    loss.backward()
    assert next(model.parameters()).grad is not None
    assert not any(value.requires_grad for value in sums.values())
    assert all(isinstance(value, float) for value in task.metrics(sums).values())
    with torch.no_grad():
        metrics = task.metrics(task.measure(model, batch))
    assert task.best_metric in metrics


# Classification


def test_the_loss_is_the_cross_entropy():
    images, labels = batch_of(30)
    model = Fixed()
    loss, sums = Classification(NAMES).loss(model, (images, labels))
    assert torch.equal(loss, functional.cross_entropy(model(images), labels))
    assert loss.requires_grad
    chances = model(images).detach().double().softmax(1)
    assert sums["loss"].item() / 30 == pytest.approx(log_loss(labels, chances, labels=range(5)))


@pytest.mark.parametrize("name", ["classification", "robustness", "segmentation"])
def test_episodes_are_no_labelled_images(name):
    task = TASKS[name](class_names=NAMES)
    support, labels = torch.rand(2, 5, 1, 6, 6), torch.zeros(2, 5, dtype=torch.int64)
    for use in (task.measure, task.loss):
        with pytest.raises(ValueError, match="a batch has 4 tensors, of shapes.*needs two, images and labels"):
            use(Fixed(), (support, labels, support, labels))


@pytest.mark.parametrize(
    ("logits", "labels"), [((4, 5, 2, 2), (4,)), ((4, 5, 2, 2), (4, 2, 2)), ((4, 5), (4, 1)), ((4, 3), (4,))], ids=str
)
def test_what_is_no_classification_is_said(logits, labels):
    task, batch = Classification(NAMES), (torch.zeros(4, 1, 6, 6), torch.zeros(labels, dtype=torch.long))
    for measure in (task.loss, task.measure):
        with pytest.raises(ValueError, match=r"classification needs logits \(batch, 5 classes\) and labels"):
            measure(lambda images: torch.zeros(logits), batch)


def test_label_smoothing_is_of_the_training_loss_alone():
    images, labels = batch_of(30)
    model = Fixed()
    loss, sums = Classification(NAMES, label_smoothing=0.2).loss(model, (images, labels))
    logs = model(images).log_softmax(1)
    target = 0.8 * functional.one_hot(labels, 5) + 0.2 / 5
    torch.testing.assert_close(loss, -(target * logs).sum(1).mean())
    assert sums["loss"].item() == pytest.approx(functional.cross_entropy(model(images), labels, reduction="sum").item())


def test_a_low_precision_loss_is_computed_in_single_precision():
    images, labels = batch_of(30)
    logits = Fixed(scale=30)(images).detach().bfloat16()
    loss, sums = Classification(NAMES).loss(Says(logits), (images.bfloat16(), labels))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, functional.cross_entropy(logits.float(), labels))
    assert sums["loss"].dtype == torch.float64
    double, _ = Classification(NAMES).loss(Fixed(), (images.double(), labels))
    assert double.dtype == torch.float64


def measured(task, model, images, labels, cuts=()):
    """The metrics of a split that comes in the parts between the cuts."""
    totals = {}
    ends = [0, *sorted(cuts), len(images)]
    for start, end in itertools.pairwise(ends):
        if start < end:
            add(totals, task.measure(model, (images[start:end], labels[start:end])))
    return task.metrics(totals), totals


@given(cuts=st.sets(st.integers(1, 39)), seed=st.integers(0, 9), top=st.integers(1, 5))
def test_metrics_do_not_depend_on_how_a_split_is_cut(cuts, seed, top):
    images, labels = batch_of(40, seed=seed)
    task, model = Classification(NAMES, top=top), Fixed()
    whole, parts = (measured(task, model, images, labels, c) for c in ((), cuts))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert torch.equal(parts[1]["confusion"], whole[1]["confusion"])


@given(seed=st.integers(0, 999), samples=st.integers(1, 60), top=st.integers(2, 4))
def test_metrics_are_those_of_scikit_learn(seed, samples, top):
    images, labels = batch_of(samples, seed=seed)
    model = Fixed()
    metrics, sums = measured(Classification(NAMES, top=top), model, images, labels)
    scores = model(images).detach()
    guesses = scores.argmax(1)
    assert sums["confusion"].tolist() == confusion_matrix(labels, guesses, labels=range(5)).tolist()
    assert metrics == pytest.approx(
        {
            "accuracy": accuracy_score(labels, guesses),
            "loss": log_loss(labels, scores.double().softmax(1), labels=range(5)),
            f"top-{top} accuracy": top_k_accuracy_score(labels, scores, k=top, labels=range(5)),
        },
        rel=1e-6,
    )


def test_top_one_is_the_accuracy_and_top_all_is_certain():
    images, labels = batch_of(50)
    assert measured(Classification(NAMES), Fixed(), images, labels)[0].keys() == {"accuracy", "loss"}
    assert measured(Classification(NAMES, top=5), Fixed(), images, labels)[0]["top-5 accuracy"] == 1


def test_training_and_evaluation_agree_on_what_both_report():
    images, labels = batch_of(50)
    task = Classification(NAMES, top=2)
    _, sums = task.loss(Fixed(), (images, labels))
    assert "confusion" not in sums
    assert task.metrics(sums) == pytest.approx(measured(task, Fixed(), images, labels)[0])


def test_logits_of_a_sure_model_lose_nothing():
    """Sums are in double precision: a loss far below the rounding of single precision is still a loss."""
    metrics, _ = measured(Classification(("a", "b")), Says([[30.0, 0.0]]), torch.zeros(1, 1, 1, 1), torch.tensor([0]))
    assert metrics["loss"] == pytest.approx(torch.tensor(-30.0).exp().item(), rel=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shift": -1}, "shift is -1; it must be"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; it must be"),
        ({"label_smoothing": float("nan")}, "label_smoothing is nan; it must be"),
        ({"top": 0}, "top is 0; it must be"),
        ({"top": 6}, "top is 6; it must be"),
        ({"class_names": ()}, "the data set has no classes: choose another data set, or another task."),
        ({"class_names": (), "top": 5}, "the data set has no classes"),
        # Of another type: they come from a recipe or the command line, where shift=1.5 is easily written.
        ({"shift": 1.5}, "shift is 1.5; it must be"),
        ({"shift": "2"}, "shift is '2'; it must be"),
        ({"shift": True}, "shift is True; it must be"),
        ({"flip": 1}, "flip is 1; it must be"),
        ({"top": 2.0}, "top is 2.0; it must be"),
        ({"label_smoothing": "a"}, "label_smoothing is 'a'; it must be"),
    ],
)
def test_bad_options_get_their_sentence(options, words):
    with pytest.raises((TypeError, ValueError)) as error:
        Classification(**{"class_names": NAMES, **options})
    assert words in str(error.value)


# Predictions


def test_predict_says_the_likeliest_classes_in_order():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [9.0, 0.0, 5.0, 1.0, 0.0]])
    first, second = Classification(NAMES).predict(Says(logits), torch.zeros(2, 1, 1, 1))
    assert first["class"] == "e"
    assert first["probability"] == pytest.approx(logits[0].softmax(0)[4].item())
    assert list(first["next"]) == ["d", "c"]
    assert second["class"] == "a"
    assert list(second["next"]) == ["c", "d"]
    assert second["next"]["c"] == pytest.approx(logits[1].softmax(0)[2].item())


@pytest.mark.parametrize(("classes", "others"), [(1, 0), (2, 1), (3, 2), (9, 2)])
def test_predict_with_few_and_many_classes(classes, others):
    names = tuple(map(str, range(classes)))
    answers = Classification(names).predict(Fixed(classes=classes), batch_of(3)[0])
    assert len(answers) == 3
    assert all(len(answer["next"]) == others for answer in answers)
    assert not any(isinstance(answer["probability"], torch.Tensor) for answer in answers)


def test_predict_takes_no_gradient():
    model = Fixed()
    Classification(NAMES).predict(model, batch_of(3)[0].requires_grad_())
    assert model.weight.grad is None


# Pictures


def drawn(figure):
    """The figure as a PNG: drawing it is what finds mistakes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return file.getvalue()


@pytest.mark.parametrize("classes", [2, 10, 21, 100])
def test_confusion_matrices_are_drawn(classes):
    confusion = torch.randint(9, (classes, classes), generator=generator())
    confusion[0] = 0  # a class of which there is no sample
    figure = confusion_figure(confusion, tuple(f"class {i}" for i in range(classes)))
    assert drawn(figure).startswith(b"\x89PNG")
    axis = figure.axes[0]
    shares = torch.as_tensor(np.asarray(axis.images[0].get_array()))
    assert torch.equal(shares[0], torch.zeros(classes))
    assert ((shares.sum(1) - 1).abs() < 1e-6)[1:].all()
    written = [text.get_text() for text in axis.texts]
    assert written == ([str(int(n)) for n in confusion.flatten() if n] if classes <= 20 else [])


def test_sums_of_the_lab_are_drawn():
    """The lab adds sums up in double precision."""
    images, labels = batch_of(40)
    _, sums = measured(Classification(NAMES), Fixed(), images, labels)
    assert sums["confusion"].dtype == torch.float64
    figure = confusion_figure(sums["confusion"], NAMES)
    assert all(text.get_text().isdecimal() for text in figure.axes[0].texts)


@pytest.mark.parametrize(("samples", "channels"), [(1, 1), (5, 3), (60, 1)])
def test_pictures_are_drawn(samples, channels):
    shape = (channels, 6, 6)
    images, labels = batch_of(samples, shape)
    task, model = Classification(NAMES), Fixed(shape)
    _, sums = measured(task, model, images, labels)

    def batches():
        yield from zip(images.split(7), labels.split(7), strict=True)

    pictures = dict(task.pictures(model, batches, sums))
    assert list(pictures) == ["Confusion matrix", "Worst examples"]
    assert all(drawn(figure).startswith(b"\x89PNG") for figure in pictures.values())
    captions = [axis.get_title() for axis in pictures["Worst examples"].axes if axis.get_title()]
    assert len(captions) == min(samples, 24)


def test_the_worst_examples_are_the_ones_with_the_largest_loss():
    images, labels = batch_of(50)
    model = Fixed()
    batches = zip(images.split(9), labels.split(9), strict=True)
    figure = Classification(NAMES).worst_figure(model, batches, count=8)
    losses = functional.cross_entropy(model(images), labels, reduction="none")
    chances, guesses = model(images).softmax(1).max(1)
    expected = losses.argsort(descending=True)[:8]
    shown = [(np.asarray(axis.images[0].get_array()), axis.get_title()) for axis in figure.axes]
    for (picture, caption), row in zip(shown, expected.tolist(), strict=True):
        assert torch.equal(torch.as_tensor(picture)[..., 0], images[row, 0])
        assert caption == f"{NAMES[labels[row]]}, predicted\nas {NAMES[guesses[row]]} ({chances[row]:.0%})"


def test_pictures_without_a_confusion_matrix():
    """Sums of a task's training have none."""
    images, labels = batch_of(3)
    pictures = Classification(NAMES).pictures(Fixed(), lambda: iter([(images, labels)]), {})
    assert [title for title, _ in pictures] == ["Worst examples"]


def test_only_images_are_shown():
    inputs, labels = torch.rand(4, 36), torch.arange(4)
    _, sums = measured(Classification(NAMES), Fixed(), inputs, labels)
    pictures = Classification(NAMES).pictures(Fixed(), lambda: iter([(inputs, labels)]), sums)
    assert [title for title, _ in pictures] == ["Confusion matrix"]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_any_number_of_channels_can_be_shown(channels):
    assert drawn(image_grid([(torch.rand(channels, 5, 5), "caption")])).startswith(b"\x89PNG")


def test_a_grid_without_images_is_empty():
    assert drawn(image_grid([])).startswith(b"\x89PNG")


# Heritage and diversity in the loss


def test_the_augmented_loss_is_the_cross_entropy_less_heritage_more_diversity():
    torch.manual_seed(0)
    model = POptEq((1, 6, 6), 5, size="reduced", channels=3, stem=1).double().eval()
    images, labels = batch_of(4)
    images = images.double()
    task = AugmentedClassification(class_names=NAMES, gamma=0.3, diversity=0.2)
    loss, sums = task.loss(model, (images, labels))
    with torch.no_grad():
        z = [part.flatten(2) for part in model.branches(model.features(images))]
        gain = torch.zeros(4, dtype=torch.float64)
        for i in range(3):
            for k, j in itertools.product(range(3), repeat=2):
                inner = (z[i][:, k] * z[(i + 1) % 3][:, j]).sum(1)
                gain += inner if k == j else -0.2 * inner.abs()
        expected = functional.cross_entropy(model(images), labels) - 0.3 * gain.mean()
    assert abs(loss - expected) < 1e-10
    assert sums["samples"] == 4
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.equilibrium.parameters())
    assert not model.equilibrium._forward_hooks


def test_the_augmented_loss_needs_branches():
    task = TASKS["augmented-classification"](class_names=NAMES)
    with pytest.raises(ValueError, match="needs a model with several branches.*not a Fixed"):
        task.loss(Fixed(), batch_of(4))
    with pytest.raises(ValueError, match="needs a model with several branches.*not a OptEq"):
        task.loss(OptEq((1, 6, 6), 5, size="reduced"), batch_of(4))
    with pytest.raises(ValueError, match="gamma is -1"):
        TASKS["augmented-classification"](class_names=NAMES, gamma=-1)

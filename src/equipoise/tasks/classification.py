"""Classification: one label per input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.options import require
from equipoise.tasks.augmentation import flip, shift
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import confusion_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Classification(Task):
    """Cross entropy and accuracy.

    Args:
        class_names: of the classes, in the order of their numbers.
        shift: training images are moved by up to so many pixels either way; 0 for not at all.
        flip: training images are mirrored at random.
        label_smoothing: of the training loss.
        top: also report the accuracy of the so many most likely classes.

    Example:
        >>> task = Classification(class_names=("cat", "dog"), shift=4, flip=True)
    """

    best_metric = "accuracy"

    def __init__(
        self,
        class_names: tuple[str, ...],
        shift: int = 0,
        flip: bool = False,
        label_smoothing: float = 0.0,
        top: int = 1,
    ):
        if not class_names:
            raise ValueError("the data set has no classes: choose another data set, or another task.")
        self.class_names = class_names
        self.shift, self.flip = shift, flip
        self.label_smoothing = label_smoothing
        self.top = top
        require(self, "shift", at_least=0, whole=True)
        require(self, "flip", kind=bool)
        require(self, "label_smoothing", at_least=0, below=1)
        require(self, "top", at_least=1, at_most=len(class_names), whole=True)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        images, labels = batch
        if self.shift:
            images = shift(images, self.shift, generator)
        if self.flip:
            images = flip(images, generator)
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, labels = batch
        logits = model(images)
        return self.cross_entropy(logits, labels), self.sums(logits.detach(), labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of a training batch, in single precision at least."""
        self.check(logits, labels)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = batch
        return self.evaluation_sums(model(images), labels)

    def evaluation_sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """What an evaluation adds up, given what the model says."""
        self.check(logits, labels)
        sums = self.sums(logits, labels)
        pairs = labels * len(self.class_names) + logits.argmax(1)
        size = len(self.class_names)
        sums["confusion"] = torch.bincount(pairs, minlength=size * size).view(size, size)  # rows: truth
        return sums

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Refuse what are no answers of a classifier, or no labels of images."""
        if labels.dim() != 1 or logits.shape != (len(labels), len(self.class_names)):
            raise ValueError(
                f"the model makes {tuple(logits.shape)} and labels are {tuple(labels.shape)}; classification needs "
                f"logits (batch, {len(self.class_names)} classes) and labels (batch,): choose a model for "
                "classification, and a data set with a label for every image."
            )

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """What both training and evaluation add up."""
        logits = logits.double()
        sums = {
            "samples": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "correct": (logits.argmax(1) == labels).sum(),
        }
        if self.top > 1:
            sums["top"] = (logits.topk(self.top).indices == labels[:, None]).sum()
        return sums

    def metrics(self, sums: Sums) -> dict[str, float]:
        samples = sums["samples"].item()
        metrics = {"accuracy": sums["correct"].item() / samples, "loss": sums["loss"].item() / samples}
        if self.top > 1:
            metrics[f"top-{self.top} accuracy"] = sums["top"].item() / samples
        return metrics

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        with torch.no_grad():
            chances, classes = model(inputs).softmax(1).topk(min(3, len(self.class_names)))
        return [
            {
                "class": self.class_names[c[0]],
                "probability": p[0],
                "next": {self.class_names[i]: q for i, q in zip(c[1:], p[1:], strict=True)},
            }
            for c, p in zip(classes.tolist(), chances.tolist(), strict=True)
        ]

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        if "confusion" in sums:
            yield "Confusion matrix", confusion_figure(sums["confusion"], self.class_names)
        if next(batches())[0].dim() == 4:  # inputs are images
            yield "Worst examples", self.worst_figure(model, batches())

    @torch.no_grad()
    def worst_figure(self, model: nn.Module, batches: Iterator[Batch], count: int = 24) -> Figure:
        """The test images with the largest loss: what they are, what the model takes them for, how sure it is."""
        worst: list[tuple[float, Tensor, int, int, float]] = []
        for images, labels in batches:
            logits = model(images)
            losses = functional.cross_entropy(logits, labels, reduction="none")
            chances, guesses = logits.softmax(1).max(1)
            for row in losses.topk(min(count, len(losses))).indices.tolist():
                image = images[row].float().cpu()
                worst.append((losses[row].item(), image, int(labels[row]), int(guesses[row]), chances[row].item()))
            worst = sorted(worst, key=lambda entry: -entry[0])[:count]
        return image_grid(
            [
                (image, caption(self.class_names[truth], self.class_names[guess], chance))
                for _, image, truth, guess, chance in worst
            ]
        )


def caption(truth: str, guess: str, chance: float) -> str:
    return (
        f"{truth}, right,\nnot sure ({chance:.0%})" if truth == guess else f"{truth}, taken for\n{guess} ({chance:.0%})"
    )


def image_grid(entries: list[tuple[Tensor, str]], columns: int = 8) -> Figure:
    """Images in [0, 1] with a caption each."""
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(entries) / columns))
    figure = Figure(figsize=(1.35 * columns, 1.75 * rows), layout="constrained")
    for axis in figure.subplots(rows, columns, squeeze=False).flat:
        axis.axis("off")
    for axis, (image, caption) in zip(figure.axes, entries, strict=False):
        picture = image if len(image) == 3 else image.mean(0, keepdim=True)  # grey unless there are three colours
        pixels = picture.clamp(0, 1).permute(1, 2, 0).squeeze(2).numpy()
        axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(caption, fontsize=7)
    return figure

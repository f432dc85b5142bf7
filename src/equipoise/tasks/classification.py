"""Classification: one label per input."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.options import require
from equipoise.tasks.augmentation import flip, shift
from equipoise.tasks.base import Batch, Sums, Task, confusion_matrix, labelled
from equipoise.tasks.drawing import confusion_figure, image_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LabelTask(Task, ABC):
    """What all tasks with one label per input share: augmentation, metrics, figures and predictions.

    Args:
        class_names: names of the classes, indexed by label.
        shift: number of pixels by which training images are moved at most, in each direction.
        flip: whether training images are mirrored at random.
        label_smoothing: label smoothing of the training loss.
        top: k of the top-k accuracy that is also reported; 1 for none.
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
        self.class_names, self.shift, self.flip = class_names, shift, flip
        self.label_smoothing, self.top = label_smoothing, top
        require(self, "shift", at_least=0, whole=True)
        require(self, "flip", kind=bool)
        require(self, "label_smoothing", at_least=0, below=1)
        require(self, "top", at_least=1, at_most=len(class_names), whole=True)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        images, labels = labelled(batch)
        if self.shift:
            images = shift(images, self.shift, generator)
        if self.flip:
            images = flip(images, generator)
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the mean cross entropy of a training batch, in single precision at least, and its sums."""
        images, labels = labelled(batch)
        logits = model(images)
        self.check(logits, labels)
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        loss = functional.cross_entropy(wide, labels, label_smoothing=self.label_smoothing)
        return loss, self.sums(logits.detach(), labels)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = labelled(batch)
        return self.evaluation_sums(model(images), labels)

    def evaluation_sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """Return the sums of an evaluation batch."""
        self.check(logits, labels)
        confusion = confusion_matrix(labels, logits.argmax(1), len(self.class_names))
        return {**self.sums(logits, labels), "confusion": confusion}

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Raise unless the model is a classifier and the data set has one label per input."""
        if labels.dim() != 1 or logits.shape != (len(labels), len(self.class_names)):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; classification needs "
                f"logits (batch, {len(self.class_names)} classes) and labels (batch,): choose a model for "
                "classification, and a data set with a label for every image."
            )

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """Return the sums that training and evaluation have in common."""
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
        names = {"accuracy": "correct", "loss": "loss"} | ({f"top-{self.top} accuracy": "top"} if self.top > 1 else {})
        return {metric: sums[name].item() / sums["samples"].item() for metric, name in names.items()}

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        with torch.no_grad():
            probabilities, classes = model(inputs).softmax(1).topk(min(3, len(self.class_names)))
        return [
            {
                "class": self.class_names[c[0]],
                "probability": p[0],
                "next": {self.class_names[i]: q for i, q in zip(c[1:], p[1:], strict=True)},
            }
            for c, p in zip(classes.tolist(), probabilities.tolist(), strict=True)
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
        """Draw the images with the largest loss, captioned with their class, the prediction and its probability."""
        worst: list[tuple[float, Tensor, str]] = []
        for images, labels in batches:
            logits = model(images)
            losses = functional.cross_entropy(logits, labels, reduction="none")
            probabilities, guesses = logits.softmax(1).max(1)
            for row in losses.topk(min(count, len(losses))).indices.tolist():
                truth, guess = (self.class_names[int(each[row])] for each in (labels, guesses))
                verdict = "right,\nnot sure" if truth == guess else f"predicted\nas {guess}"
                caption = f"{truth}, {verdict} ({probabilities[row].item():.0%})"
                worst.append((losses[row].item(), images[row].float().cpu(), caption))
            worst = sorted(worst, key=lambda entry: -entry[0])[:count]
        return image_grid([(image, caption) for _, image, caption in worst])


class Classification(LabelTask):
    """Cross entropy and accuracy; the options are those of :class:`LabelTask`.

    Example:
        >>> task = Classification(class_names=("cat", "dog"), shift=4, flip=True)
    """

"""Segmentation: a class for every pixel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equipoise.options import require
from equipoise.tasks.augmentation import random_view
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import class_colors, confusion_figure, in_three_colors, overlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 4  # images in a figure
NAMED = 5  # classes in a prediction


class Segmentation(Task):
    """Cross entropy per pixel, and how well predicted and true regions coincide.

    Batches are images and label maps, (batch, height, width), of the same size. The model's logits, (batch, classes,
    height, width), may be of any size: they are resized to the images', bilinearly, corners on corners.

    Args:
        class_names: of the classes, in the order of their numbers.
        mean: of the images' channels, which fills what augmentation adds at the edges.
        ignore: the number in label maps that is no class: such pixels count for nothing.
        class_weights: a positive number per class, by which its pixels count in the loss; None for 1 each.
        scale: training images are made larger or smaller by a random factor between these two; None for not at all.
        crop: training images are cut, or filled up, to this height and width; None keeps their size.
        flip: training images are mirrored at random.
        window: evaluate in overlapping windows of at most this height and width and average the logits, which takes
            less memory and shows the model images as large as those it was trained on; None for the whole image.

    Example:
        >>> task = Segmentation(class_names=("sky", "road"), scale=(0.5, 2.0), crop=(256, 512), flip=True)
    """

    best_metric = "mean IoU"

    def __init__(
        self,
        class_names: tuple[str, ...],
        mean: tuple[float, ...] = (0.0,),
        ignore: int = 255,
        class_weights: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        crop: Sequence[int] | None = None,
        flip: bool = False,
        window: Sequence[int] | None = None,
    ):
        if not class_names:
            raise ValueError("the data set has no classes: choose another data set, or another task.")
        self.class_names, self.mean = class_names, mean
        self.ignore = ignore
        self.class_weights = numbers("class_weights", class_weights, len(class_names), "one per class")
        self.scale = numbers("scale", scale, 2, "the least and the largest factor")
        self.crop = numbers("crop", crop, 2, "height and width", whole=True)
        self.flip = flip
        self.window = numbers("window", window, 2, "height and width", whole=True)
        require(self, "ignore", whole=True)
        require(self, "flip", kind=bool)
        if self.scale is not None and self.scale[0] > self.scale[1]:
            raise ValueError(f"Segmentation.scale is {list(self.scale)}; the least factor comes first.")

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        images, labels = batch
        if self.scale is None and self.crop is None and not self.flip:
            return batch
        self.check(images, labels)
        old = images.shape[-2:]
        view = random_view(
            len(images), old, self.crop or old, generator, scale=self.scale or (1.0, 1.0), flip=self.flip
        )
        return view.of_images(images, self.mean), view.of_label_maps(labels, self.ignore)

    # What the model says

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """The model's logits at the size of the images, in single precision or better."""
        logits = model(images)
        if logits.dim() != 4 or logits.shape[:2] != (len(images), len(self.class_names)):
            raise ValueError(
                f"the model makes {tuple(logits.shape)} of images {tuple(images.shape)}; the task segmentation needs "
                f"logits (batch, {len(self.class_names)} classes, height, width): choose a model for segmentation."
            )
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        size = images.shape[-2:]
        if logits.shape[-2:] == size:
            return logits
        return functional.interpolate(logits, size, mode="bilinear", align_corners=True)

    def evaluation_logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """The same, the mean over windows if there are any."""
        if self.window is None:
            return self.logits(model, images)
        return mean_over_windows(lambda part: self.logits(model, part), images, self.window, len(self.class_names))

    @torch.no_grad()
    def label_maps(self, model: nn.Module, images: Tensor) -> Tensor:
        """The likeliest class of every pixel, (batch, height, width).

        Example:
            >>> task.label_maps(eq.load("runs/mdeq-camvid-small-001"), images)
        """
        return likeliest(self.evaluation_logits(model, images))

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        shares = [self.shares(label_map) for label_map in self.label_maps(model, inputs)]
        return [{"shares": dict(list(share.items())[:NAMED])} for share in shares]

    def shares(self, label_map: Tensor) -> dict[str, float]:
        """The share of each class among the pixels, largest first; classes without any are left out."""
        shares = torch.bincount(label_map.flatten(), minlength=len(self.class_names)).double() / label_map.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        return {self.class_names[i]: shares[i].item() for i in order if shares[i] > 0}

    # Loss and metrics

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, labels = batch
        self.check(images, labels)
        logits = self.logits(model, images)
        sums = self.sums(logits, labels)
        mean = sums["loss"] / whole_weight(sums["weight"], len(images), model)
        return mean.to(logits.dtype), {**sums, "loss": sums["loss"].detach()}

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = batch
        self.check(images, labels)
        return self.sums(self.evaluation_logits(model, images), labels)

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """What both training and evaluation add up over the pixels that have a class.

        The cross entropy, each pixel times the weight of its class; these weights; and the confusion matrix, whose rows
        are the truth.
        """
        size, labelled = len(self.class_names), labels != self.ignore
        pairs = labels[labelled] * size + likeliest(logits.detach())[labelled]
        confusion = torch.bincount(pairs, minlength=size * size).view(size, size)
        weights = torch.tensor(self.class_weights or [1.0] * size, dtype=logits.dtype, device=logits.device)
        losses = functional.cross_entropy(logits, labels, weights, ignore_index=self.ignore, reduction="none")
        return {
            "samples": torch.tensor(len(labels)),
            "loss": losses.sum(dtype=torch.float64),  # in double precision: millions of pixels are added
            "weight": confusion.sum(1).double() @ weights.double(),
            "confusion": confusion,
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Means over classes leave out those that cannot be measured: see :func:`class_ious`.

        The class accuracy is the mean share of each class's pixels that are found. Without a labelled pixel, all are
        not a number.
        """
        confusion = sums["confusion"].double()
        found, truth = confusion.diagonal(), confusion.sum(1)
        return {
            "mean IoU": class_ious(confusion).nanmean().item(),
            "pixel accuracy": (found.sum() / truth.sum()).item(),
            "class accuracy": (found / truth).nanmean().item(),
            "loss": (sums["loss"].double() / sums["weight"].double()).item(),
        }

    def check(self, images: Tensor, labels: Tensor) -> None:
        """Refuse what are no label maps of these images."""
        if labels.shape != (len(images), *images.shape[-2:]) or images.dim() != 4:
            raise ValueError(
                f"inputs are {tuple(images.shape)}, labels {tuple(labels.shape)}; the task segmentation needs images "
                "(batch, channels, height, width) and label maps (batch, height, width): choose a data set that has "
                "them, or another task."
            )
        if labels.dtype != torch.int64:
            raise TypeError(f"label maps are {labels.dtype}; they must be torch.int64: labels.long().")
        wrong = labels[(labels != self.ignore) & ((labels < 0) | (labels >= len(self.class_names)))]
        if len(wrong):
            raise ValueError(
                f"a label map holds {int(wrong[0])}; the classes are 0 to {len(self.class_names) - 1}, and no class is "
                f"{self.ignore} (task.ignore)."
            )

    # Pictures

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        yield "Segmented images", self.overlay_figure(model, batches(), int(sums["samples"]))
        yield "Intersection over union of each class", self.iou_figure(sums["confusion"])
        yield "Confusion matrix", confusion_figure(sums["confusion"], self.class_names, percent=True)

    def overlay_figure(self, model: nn.Module, batches: Iterator[Batch], samples: int) -> Figure:
        """Images from all over a split, each with its truth, what the model says and where both differ.

        Figure 8 of S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020).
        """
        from matplotlib.figure import Figure

        chosen = list(spread_over(batches, samples, SHOWN))
        colors = class_colors(self.class_names)
        height, width = chosen[0][0].shape[-2:]
        figure = Figure(figsize=(11, 11 / 4 * len(chosen) * height / width + 1.5), layout="constrained")
        present: set[int] = set()
        axes = figure.subplots(len(chosen), 4, squeeze=False)
        for row, (image, truth) in zip(axes, chosen, strict=True):
            guess = self.label_maps(model, image[None])[0].cpu()
            image, truth = image.cpu(), truth.cpu()
            show(row[0], in_three_colors(image))
            show(row[1], overlay(image, truth, colors))
            show(row[2], overlay(image, guess, colors))
            show(row[3], mistakes(image, truth, guess, self.ignore))
            present.update(truth.unique().tolist(), guess.unique().tolist())
        for axis, title in zip(axes[0], ("image", "truth", "prediction", "wrong pixels"), strict=True):
            axis.set_title(title)
        legend(figure, self.class_names, colors, present)
        return figure

    def iou_figure(self, confusion: Tensor) -> Figure:
        """A bar for each class, in its colour, and their mean."""
        from matplotlib.figure import Figure

        ious, size = class_ious(confusion), len(self.class_names)
        figure = Figure(figsize=(5.6, 1.2 + 0.26 * size), layout="constrained")
        axis = figure.subplots()
        colors = (class_colors(self.class_names) / 255).tolist()
        axis.barh(range(size), ious.nan_to_num(0).tolist(), color=colors, edgecolor="0.3", linewidth=0.5)
        for row, iou in enumerate(ious.tolist()):
            text = "neither there nor predicted" if math.isnan(iou) else f"{iou:.3f}"
            axis.text(0.01 if math.isnan(iou) else iou + 0.01, row, text, va="center", fontsize=8, color="0.2")
        mean = ious.nanmean().item()
        axis.axvline(mean, color="0.3", linestyle=":", linewidth=1, label=f"mean {mean:.3f}")
        axis.set_yticks(range(size), self.class_names)
        axis.invert_yaxis()
        axis.set(xlabel="intersection over union", xlim=(0, 1.1))
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper right", frameon=False, fontsize=9)
        return figure


def numbers(
    name: str, values: Sequence[float] | None, count: int, what: str, whole: bool = False
) -> tuple[Any, ...] | None:
    """An option that is a list of positive numbers, checked."""
    if values is None:
        return None
    kind = "whole numbers" if whole else "numbers"
    sentence = f"Segmentation.{name} is {values!r}; it must be a list of {count} {kind} above 0, {what} (or None)."
    if not isinstance(values, list | tuple) or not all(isinstance(value, int | float) for value in values):
        raise TypeError(sentence)
    if any(isinstance(value, bool) or (whole and not isinstance(value, int)) for value in values):
        raise TypeError(sentence)
    if len(values) != count or not all(0 < value < math.inf for value in values):
        raise ValueError(sentence)
    return tuple(values)


def likeliest(logits: Tensor) -> Tensor:
    """The class of each pixel with the largest logit; ``argmax`` is the same, and six times slower on a CPU."""
    return logits.max(1).indices


def whole_weight(weight: Tensor, samples: int, model: nn.Module) -> Tensor:
    """What a process divides its summed loss by, for the mean over the pixels of the whole batch.

    Processes have images with more labelled pixels and with fewer. The lab weights the loss of each by its samples, as
    is right for means over samples; that weight is taken out here.
    """
    if isinstance(model, DistributedDataParallel):
        total = torch.stack([weight, weight.new_tensor(samples)])
        dist.all_reduce(total)
        weight = total[0] * samples / total[1]
    return torch.where(weight > 0, weight, 1.0)  # nothing labelled: the sum is 0, and so is the mean


def class_ious(confusion: Tensor) -> Tensor:
    """Intersection over union of each class's predicted and true pixels, from a confusion matrix.

    A class that neither occurs nor is predicted has no union: it is not a number and left out of means. (One that is
    predicted where it does not occur is wrong, and counts as 0.)
    """
    confusion = confusion.double()
    both = confusion.diagonal()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def mean_over_windows(
    logits: Callable[[Tensor], Tensor], images: Tensor, window: Sequence[int], classes: int
) -> Tensor:
    """Logits of whole images: at each pixel, the mean over the windows that see it.

    Args:
        logits: of a part of the images, at its size.
        images: (batch, channels, height, width).
        window: height and width; windows are spread evenly and overlap by a third at least.
        classes: how many.
    """
    size = images.shape[-2:]
    height, width = (min(side, length) for side, length in zip(window, size, strict=True))
    dtype = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(len(images), classes, *size, dtype=dtype, device=images.device)
    seen = torch.zeros(size, dtype=dtype, device=images.device)
    for top, left in product(window_starts(size[0], height), window_starts(size[1], width)):
        part = (..., slice(top, top + height), slice(left, left + width))
        total[part] += logits(images[part])
        seen[part] += 1
    return total.div_(seen)


def window_starts(length: int, window: int) -> list[int]:
    """Where windows along a length begin: as few as overlap by a third of their length."""
    steps = math.ceil((length - window) / max(1, window * 2 // 3))
    return [round(i * (length - window) / max(1, steps)) for i in range(steps + 1)]


def spread_over(batches: Iterator[Batch], samples: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many samples from all over a split: neighbours may be frames of one film."""
    count = min(count, samples)
    wanted = [int((i + 0.5) * samples / count) for i in range(count)]
    first = 0
    for images, labels in batches:
        for row in wanted:
            if first <= row < first + len(images):
                yield images[row - first], labels[row - first]
        first += len(images)
        if first > wanted[-1]:
            return


def mistakes(image: Tensor, truth: Tensor, guess: Tensor, ignore: int) -> Tensor:
    """The image, pale and grey, with wrong pixels in red and those without a class in black."""
    pale = 0.6 + 0.4 * in_three_colors(image).mean(0, keepdim=True).expand(3, -1, -1)
    red = torch.tensor([0.85, 0.1, 0.1]).view(3, 1, 1)
    return torch.where(truth == ignore, 0.0, torch.where(truth == guess, pale, red))


def show(axis: Axes, image: Tensor) -> None:
    axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    axis.axis("off")


def legend(figure: Figure, names: Sequence[str], colors: Tensor, present: set[int]) -> None:
    """The colours of what is to be seen."""
    from matplotlib.patches import Patch

    shown: dict[str, Any] = {names[i]: (colors[i] / 255).tolist() for i in sorted(present & set(range(len(names))))}
    if len(shown) < len(present):
        shown["no class"] = "black"
    patches = [Patch(facecolor=color, edgecolor="0.3", linewidth=0.5, label=name) for name, color in shown.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(7, len(patches)), frameon=False, fontsize=9)

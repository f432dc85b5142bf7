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

from equipoise.options import is_number, require
from equipoise.tasks.augmentation import random_view
from equipoise.tasks.base import Batch, Sums, Task, confusion_matrix, labelled
from equipoise.tasks.drawing import class_colors, confusion_figure, in_three_colors, overlay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4  # images in a figure
NAMED = 5  # classes in a prediction


class Segmentation(Task):
    """Train with the cross entropy of each pixel, and measure the intersection over union of each class.

    Batches are images and label maps, (batch, height, width), of the same size. The model's logits, (batch, classes,
    height, width), may be of any size: they are resized to the images' size, bilinearly, with aligned corners.

    Args:
        class_names: names of the classes, indexed by label.
        mean: mean of each channel, with which augmentation pads images.
        ignore: label of pixels that have no class and are ignored.
        class_weights: positive weight of each class in the loss; None for 1 each.
        scale: smallest and largest factor by which training images are resized at random; None to keep their size.
        crop: height and width to which training images are cropped or padded; None to keep their size.
        flip: whether training images are flipped horizontally at random.
        window: height and width of overlapping windows in which images are evaluated, averaging the logits; this takes
            less memory and shows the model images as large as in training. None for the whole image.

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
        self.class_names, self.mean, self.ignore, self.flip = class_names, mean, ignore, flip
        self.class_weights = positive_numbers("class_weights", class_weights, len(class_names), "one per class")
        self.scale = positive_numbers("scale", scale, 2, "the smallest and the largest factor")
        self.crop = positive_numbers("crop", crop, 2, "height and width", whole=True)
        self.window = positive_numbers("window", window, 2, "height and width", whole=True)
        require(self, "ignore", whole=True)
        require(self, "flip", kind=bool)
        if self.scale is not None and self.scale[0] > self.scale[1]:
            raise ValueError(f"Segmentation.scale is {list(self.scale)}; the smallest factor must come first.")

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        images, labels = labelled(batch)
        if self.scale is None and self.crop is None and not self.flip:
            return batch
        self.check(images, labels)
        old, scale = images.shape[-2:], self.scale or (1.0, 1.0)
        view = random_view(len(images), old, self.crop or old, generator, scale=scale, flip=self.flip)
        return view.of_images(images, self.mean), view.of_label_maps(labels, self.ignore)

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the model's logits at the size of the images, in single precision or better."""
        logits = model(images)
        if logits.dim() != 4 or logits.shape[:2] != (len(images), len(self.class_names)):
            raise ValueError(
                f"the model maps images {tuple(images.shape)} to {tuple(logits.shape)}; the task segmentation needs "
                f"logits (batch, {len(self.class_names)} classes, height, width): choose a model for segmentation."
            )
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        size = images.shape[-2:]
        if logits.shape[-2:] == size:
            return logits
        return functional.interpolate(logits, size, mode="bilinear", align_corners=True)

    def evaluation_logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the logits at the size of the images, averaged over windows if the task has any."""
        if self.window is None:
            return self.logits(model, images)
        return mean_over_windows(lambda part: self.logits(model, part), images, self.window, len(self.class_names))

    @torch.no_grad()
    def label_maps(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the most likely class of every pixel, (batch, height, width).

        Example:
            >>> task.label_maps(eq.load("runs/mdeq-camvid-small-001"), images)
        """
        return likeliest(self.evaluation_logits(model, images))

    def predict(self, model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
        shares = [self.shares(label_map) for label_map in self.label_maps(model, inputs)]
        return [{"shares": dict(list(share.items())[:NAMED])} for share in shares]

    def shares(self, label_map: Tensor) -> dict[str, float]:
        """Return the share of each class among the pixels, largest first, omitting classes without any."""
        shares = torch.bincount(label_map.flatten(), minlength=len(self.class_names)).double() / label_map.numel()
        order = shares.argsort(descending=True, stable=True).tolist()
        return {self.class_names[i]: shares[i].item() for i in order if shares[i] > 0}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, labels = labelled(batch)
        self.check(images, labels)
        logits = self.logits(model, images)
        sums = self.sums(logits, labels)
        mean = sums["loss"] / whole_weight(sums["weight"], len(images), model)
        return mean.to(logits.dtype), {**sums, "loss": sums["loss"].detach()}

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = labelled(batch)
        self.check(images, labels)
        return self.sums(self.evaluation_logits(model, images), labels)

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        """Return sums over the labelled pixels: weighted cross entropy, weights, and the confusion matrix."""
        size, labelled = len(self.class_names), labels != self.ignore
        confusion = confusion_matrix(labels[labelled], likeliest(logits.detach())[labelled], size)
        weights = torch.tensor(self.class_weights or [1.0] * size, dtype=logits.dtype, device=logits.device)
        losses = functional.cross_entropy(logits, labels, weights, ignore_index=self.ignore, reduction="none")
        return {
            "samples": torch.tensor(len(labels)),
            "loss": losses.sum(dtype=torch.float64),  # in double precision: millions of pixels are added
            "weight": confusion.sum(1).double() @ weights.double(),
            "confusion": confusion,
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of a split; all are NaN if it has no labelled pixel.

        Means over classes omit classes that cannot be measured, see :func:`class_ious`. The class accuracy is the mean
        recall.
        """
        confusion = sums["confusion"].double()
        correct, truth = confusion.diagonal(), confusion.sum(1)
        return {
            "mean IoU": class_ious(confusion).nanmean().item(),
            "pixel accuracy": (correct.sum() / truth.sum()).item(),
            "class accuracy": (correct / truth).nanmean().item(),
            "loss": (sums["loss"].double() / sums["weight"].double()).item(),
        }

    def check(self, images: Tensor, labels: Tensor) -> None:
        """Raise unless the labels are label maps of these images."""
        if labels.shape != (len(images), *images.shape[-2:]) or images.dim() != 4:
            raise ValueError(
                f"inputs are {tuple(images.shape)}, labels {tuple(labels.shape)}; the task segmentation needs images "
                "(batch, channels, height, width) and label maps (batch, height, width): choose a data set that has "
                "them, or another task."
            )
        if labels.dtype != torch.int64:
            raise TypeError(f"label maps are {labels.dtype}; they must be torch.int64: call labels.long().")
        wrong = labels[(labels != self.ignore) & ((labels < 0) | (labels >= len(self.class_names)))]
        if len(wrong):
            raise ValueError(
                f"a label map holds {int(wrong[0])}; labels must be 0 to {len(self.class_names) - 1}, or {self.ignore} "
                "for no class (task.ignore)."
            )

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        yield "Segmented images", self.overlay_figure(model, batches(), int(sums["samples"]))
        yield "Intersection over union of each class", self.iou_figure(sums["confusion"])
        yield "Confusion matrix", confusion_figure(sums["confusion"], self.class_names, percent=True)

    def overlay_figure(self, model: nn.Module, batches: Iterator[Batch], samples: int) -> Figure:
        """Draw images spread over a split, each with its ground truth, its prediction and the wrong pixels.

        As in figure 8 of S. Bai, V. Koltun, J. Z. Kolter, "Multiscale deep equilibrium models" (2020).
        """
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        chosen, names = list(spread_over(batches, samples, SHOWN)), self.class_names
        colors = class_colors(names)
        height, width = chosen[0][0].shape[-2:]
        figure = Figure(figsize=(11, 11 / 4 * len(chosen) * height / width + 1.5), layout="constrained")
        present: set[int] = set()
        axes = figure.subplots(len(chosen), 4, squeeze=False)
        for row, (image, truth) in zip(axes, chosen, strict=True):
            guess = self.label_maps(model, image[None])[0].cpu()
            image, truth = image.cpu(), truth.cpu()
            maps = (overlay(image, label_map, colors) for label_map in (truth, guess))
            panels = (in_three_colors(image), *maps, self.mistakes(image, truth, guess))
            for axis, panel in zip(row, panels, strict=True):
                axis.imshow(panel.permute(1, 2, 0).numpy(), interpolation="nearest")
                axis.axis("off")
            present.update(truth.unique().tolist(), guess.unique().tolist())
        for axis, title in zip(axes[0], ("image", "ground truth", "prediction", "wrong pixels"), strict=True):
            axis.set_title(title)
        shown: dict[str, Any] = {names[i]: (colors[i] / 255).tolist() for i in sorted(present & set(range(len(names))))}
        if len(shown) < len(present):
            shown["no class"] = "black"
        patches = [Patch(facecolor=color, edgecolor="0.3", linewidth=0.5, label=name) for name, color in shown.items()]
        columns = min(7, len(patches))
        figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        return figure

    def mistakes(self, image: Tensor, truth: Tensor, guess: Tensor) -> Tensor:
        """Return the image, pale and grey, with wrong pixels in red and those without a class in black."""
        pale = 0.6 + 0.4 * in_three_colors(image).mean(0, keepdim=True).expand(3, -1, -1)
        red = torch.tensor([0.85, 0.1, 0.1]).view(3, 1, 1)
        return torch.where(truth == self.ignore, 0.0, torch.where(truth == guess, pale, red))

    def iou_figure(self, confusion: Tensor) -> Figure:
        """Draw a bar for each class, in its colour, and their mean."""
        from matplotlib.figure import Figure

        ious, size = class_ious(confusion), len(self.class_names)
        figure = Figure(figsize=(5.6, 1.2 + 0.26 * size), layout="constrained")
        axis = figure.subplots()
        colors = (class_colors(self.class_names) / 255).tolist()
        axis.barh(range(size), ious.nan_to_num(0).tolist(), color=colors, edgecolor="0.3", linewidth=0.5)
        for row, iou in enumerate(ious.tolist()):
            words = "absent and not predicted" if math.isnan(iou) else f"{iou:.3f}"
            axis.text(0.01 if math.isnan(iou) else iou + 0.01, row, words, va="center", fontsize=8, color="0.2")
        mean = ious.nanmean().item()
        axis.axvline(mean, color="0.3", linestyle=":", linewidth=1, label=f"mean {mean:.3f}")
        axis.set_yticks(range(size), self.class_names)
        axis.invert_yaxis()
        axis.set(xlabel="intersection over union", xlim=(0, 1.1))
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper right", frameon=False, fontsize=9)
        return figure


def positive_numbers(
    name: str, values: Sequence[float] | None, count: int, meaning: str, whole: bool = False
) -> tuple[Any, ...] | None:
    """Return an option that is a list of positive numbers as a tuple, or raise."""
    if values is None:
        return None
    listed = isinstance(values, list | tuple) and len(values) == count
    if not listed or not all(is_number(value, above=0, whole=whole) for value in values):
        words = f"{count} {'whole ' if whole else ''}numbers above 0, {meaning} (or None)"
        raise ValueError(f"Segmentation.{name} is {values!r}; it must be a list of {words}.")
    return tuple(values)


def likeliest(logits: Tensor) -> Tensor:
    """Return the class of each pixel with the largest logit; ``argmax`` is six times slower on a CPU."""
    return logits.max(1).indices


def whole_weight(weight: Tensor, samples: int, model: nn.Module) -> Tensor:
    """Return the number to divide the summed loss of a process by, for the mean over all pixels of the batch.

    Processes have different numbers of labelled pixels. The lab weights the loss of each by its number of samples,
    which is correct for means over samples; that weight is divided out here.
    """
    if isinstance(model, DistributedDataParallel):
        total = torch.stack([weight, weight.new_tensor(samples)])
        dist.all_reduce(total)
        weight = total[0] * samples / total[1]
    return torch.where(weight > 0, weight, 1.0)  # without labelled pixels, the sum is 0, and so is the mean


def class_ious(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class's predicted and true pixels, from a confusion matrix.

    A class that neither occurs nor is predicted is NaN and omitted from means; one that is predicted but does not occur
    counts as 0.
    """
    confusion = confusion.double()
    both = confusion.diagonal()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def mean_over_windows(
    logits: Callable[[Tensor], Tensor], images: Tensor, window: Sequence[int], classes: int
) -> Tensor:
    """Return logits of whole images: at each pixel, the mean over the windows (height, width) that contain it.

    ``logits`` maps a part of the images to its logits. Windows are evenly spaced and overlap by at least a third.
    """
    size = images.shape[-2:]
    height, width = (min(side, length) for side, length in zip(window, size, strict=True))
    dtype = torch.promote_types(images.dtype, torch.float32)
    total = torch.zeros(len(images), classes, *size, dtype=dtype, device=images.device)
    count = torch.zeros(size, dtype=dtype, device=images.device)
    for top, left in product(window_starts(size[0], height), window_starts(size[1], width)):
        part = (..., slice(top, top + height), slice(left, left + width))
        total[part] += logits(images[part])
        count[part] += 1
    return total.div_(count)


def window_starts(length: int, window: int) -> list[int]:
    """Return the starts of the fewest windows that cover a length and overlap by at least a third."""
    steps = math.ceil((length - window) / max(1, window * 2 // 3))
    return [round(i * (length - window) / max(1, steps)) for i in range(steps + 1)]


def spread_over(batches: Iterator[Batch], samples: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``count`` samples spread over a split, where neighbours may be frames of one video."""
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

"""Figures of tasks: confusion matrices, grids of images, attacks, and label maps in the colours of their classes."""

from __future__ import annotations

import colorsys
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CITYSCAPES_COLORS = {
    "road": (128, 64, 128), "sidewalk": (244, 35, 232), "building": (70, 70, 70), "wall": (102, 102, 156),
    "fence": (190, 153, 153), "pole": (153, 153, 153), "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0), "vegetation": (107, 142, 35), "terrain": (152, 251, 152), "sky": (70, 130, 180),
    "person": (220, 20, 60), "rider": (255, 0, 0), "car": (0, 0, 142), "truck": (0, 0, 70), "bus": (0, 60, 100),
    "train": (0, 80, 100), "motorcycle": (0, 0, 230), "bicycle": (119, 11, 32),
}  # fmt: skip
CAMVID_COLORS = {  # from SegNet
    "sky": (128, 128, 128), "building": (128, 0, 0), "pole": (192, 192, 128), "road": (128, 64, 128),
    "pavement": (60, 40, 222), "tree": (128, 128, 0), "sign": (192, 128, 128), "fence": (64, 64, 128),
    "car": (64, 0, 128), "pedestrian": (64, 64, 0), "bicyclist": (0, 128, 192),
}  # fmt: skip


def confusion_figure(confusion: Tensor, names: tuple[str, ...], percent: bool = False) -> Figure:
    """Draw a confusion matrix with true classes as rows; cells show counts or percentages for up to 20 classes."""
    from matplotlib.figure import Figure

    size = len(names)
    share = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(6.4, 5.6) if size <= 20 else (7.5, 7), layout="constrained")
    axis = figure.subplots()
    cells = axis.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(cells, ax=axis, label="fraction of the true class", shrink=0.8)
    axis.set(xlabel="predicted class", ylabel="true class")
    if size > 20:
        return figure
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) > 2 else {}
    axis.set_xticks(range(size), names, **turned)
    axis.set_yticks(range(size), names)
    style = {"ha": "center", "va": "center", "fontsize": 9 if size <= 12 else 6}
    for truth, guess in confusion.nonzero().tolist():
        number = round(100 * share[truth, guess].item()) if percent else int(confusion[truth, guess])
        if number:
            color = "white" if share[truth, guess] > 0.5 else "0.2"
            axis.text(guess, truth, f"{number}%" if percent else str(number), color=color, **style)
    return figure


def image_grid(entries: list[tuple[Tensor, str]], columns: int = 8) -> Figure:
    """Draw a grid of images in [0, 1], each with a caption."""
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(entries) / columns))
    figure = Figure(figsize=(1.35 * columns, 1.75 * rows), layout="constrained")
    for axis in figure.subplots(rows, columns, squeeze=False).flat:
        axis.axis("off")
    for axis, (image, caption) in zip(figure.axes, entries, strict=False):
        axis.imshow(in_three_colors(image).permute(1, 2, 0).numpy(), interpolation="nearest")
        axis.set_title(caption, fontsize=7)
    return figure


def shown(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as images in [0, 1] on the CPU."""
    return ((images.detach().float() + 1) / 2).clamp(0, 1).cpu()


def rows_of_images(rows: list[tuple[str, Tensor]], captions: list[str]) -> Figure:
    """Draw named rows of images in [-1, 1], one below the other; the captions stand above the last row."""
    last = len(rows) - 1
    entries = [
        (image, captions[i] if row == last else (name if i == 0 else ""))
        for row, (name, images) in enumerate(rows)
        for i, image in enumerate(shown(images))
    ]
    return image_grid(entries, columns=len(rows[0][1]))


def attack_panel(rows: list[tuple[Tensor, Tensor, str, str]]) -> Figure:
    """Draw images in [0, 1] before and after an attack, and between them what was changed, amplified around grey.

    Args:
        rows: for each image: the clean one, the attacked one, and a caption for each.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 2.6 * len(rows)), layout="constrained")
    for axes, (clean, attacked, before, after) in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        change = attacked - clean
        factor = 0.5 / max(float(change.abs().max()), 1e-12)
        scale = f"perturbation x {factor:.3g}" if bool(change.any()) else "no perturbation"
        length = float(torch.linalg.vector_norm(change))
        captions = (before, f"{scale}\n(L2 norm {length:.2g}, largest {float(change.abs().max()):.2g})", after)
        for axis, image, text in zip(axes, (clean, 0.5 + factor * change, attacked), captions, strict=True):
            axis.imshow(in_three_colors(image).permute(1, 2, 0).numpy(), interpolation="nearest", vmin=0, vmax=1)
            axis.set_title(text, fontsize=8)
            axis.axis("off")
    return figure


def class_colors(names: tuple[str, ...]) -> Tensor:
    """Return a colour for each class, (classes, 3), uint8.

    Classes of Cityscapes get its official colours, classes of CamVid those of SegNet, others evenly spaced hues.
    """
    for known in (CITYSCAPES_COLORS, CAMVID_COLORS):
        if known.keys() >= set(names):
            return torch.tensor([known[name] for name in names], dtype=torch.uint8)
    # Adjacent hues differ in brightness.
    hues = [colorsys.hsv_to_rgb(i / len(names), 0.85, 0.95 - 0.35 * (i % 2)) for i in range(len(names))]
    return (255 * torch.tensor(hues)).round().to(torch.uint8)


def in_color(label_map: Tensor, colors: Tensor) -> Tensor:
    """Return a label map as an image in [0, 1], (3, height, width); labels without a class are black."""
    black = torch.zeros(1, 3, dtype=colors.dtype)
    is_class = (label_map >= 0) & (label_map < len(colors))
    table = torch.cat([colors, black]).float() / 255
    return table[label_map.where(is_class, len(colors))].permute(2, 0, 1)


def overlay(image: Tensor, label_map: Tensor, colors: Tensor, opacity: float = 0.6) -> Tensor:
    """Blend an image with its label map in the colours of the classes.

    Args:
        image: image in [0, 1], (channels, height, width); shown in grey unless it has three channels.
        label_map: labels, (height, width); those without a class are shown in black.
        colors: colours of the classes, see :func:`class_colors`.
        opacity: opacity of the label map.
    """
    return (1 - opacity) * in_three_colors(image) + opacity * in_color(label_map, colors)


def in_three_colors(image: Tensor) -> Tensor:
    """Return an image as RGB in [0, 1]; unless it has three channels, they are averaged to grey."""
    image = image.float().clamp(0, 1)
    return image if len(image) == 3 else image.mean(0, keepdim=True).expand(3, -1, -1)

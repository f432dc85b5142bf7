"""Image files segmented by a trained run: a picture, a map of class numbers, and how much there is of each class."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.fixed_point import watch_solves
from equipoise.lab.data.files.images import MODES, fitted, opened, pixels, reading_image
from equipoise.lab.data.files.limits import LIMITS, read_file
from equipoise.lab.files import whole
from equipoise.lab.format import printable
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures, solve_metrics, solve_sums
from equipoise.tasks.drawing import class_colors, overlay
from equipoise.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from PIL.Image import Image

WINDOW = (1024, 1024)  # height and width of windows in images that are too large to be segmented at once


@dataclass(frozen=True)
class Segmented:
    """What was found in an image, and where it is written."""

    picture: Path
    classes: Path
    shares: dict[str, float]  # of the image's pixels, largest first
    solver: dict[str, Any]
    note: str = ""  # what was done otherwise than for a smaller image


def segment_images(
    run: Run,
    images: Sequence[Path],
    machine: Machine,
    out: Path | None = None,
    weights: str = "best",
    window: Sequence[int] | None = None,
) -> Iterator[Segmented]:
    """Segment image files of any size, each at its own, and write what is found.

    Args:
        run: of a segmentation task.
        images: files.
        machine: where to compute.
        out: the picture's file (.png, for one image) or a folder; None is IMAGE-segmented.png in the current folder.
            Beside each picture, OUT-classes.png has the class number of each pixel. Nothing is overwritten.
        weights: "best" or "last".
        window: height and width of the windows in which an image is gone over; None is as in the run's evaluation,
            but for large images, which are always gone over in windows (see ``LIMITS.whole_image``). An image whose
            logits would not fit ``LIMITS.segmentation`` is refused before it is decoded.

    Example:
        >>> with this_machine() as machine:
        ...     for found in segment_images(open_run("runs/mdeq-camvid-small-001"), [Path("street.png")], machine):
        ...         print(found.shares)
    """
    files = list(zip(pictures(images, out), images, strict=True))
    changes = [] if window is None else [f"window={list(window)}"]
    trained = open_trained(run, machine, weights, changes=changes, sections=(*MODEL_SECTIONS, "task"))
    task = trained.task
    if not isinstance(task, Segmentation):
        raise RunError(
            f"{run.folder} was trained for the task {trained.recipe.task.name!r}; only a run of the task "
            "'segmentation' can segment images. `equipoise predict` works with any."
        )
    colors = class_colors(task.class_names)
    for picture, file in files:
        image = read_image(file, trained.facts["shape"][0], len(task.class_names))
        seen, note = in_windows(task, *image.shape[-2:])
        label_map, solver = segment_image(trained, seen, image)
        classes = classes_file(picture)
        with whole(picture) as part, whole(classes) as classes_part:  # both or neither
            write_png(part, (255 * overlay(image / 255, label_map, colors)).round().byte().permute(1, 2, 0))
            write_png(classes_part, label_map.to(torch.uint8 if len(task.class_names) <= 256 else torch.uint16))
        yield Segmented(picture, classes, task.shares(label_map), solver, note)


def segment_image(trained: Trained, task: Segmentation, image: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The class number of each pixel of an image, and what the solver did."""
    (inputs,) = trained.setting.prepare(task, (image[None].to(trained.setting.device),))
    with quiet_failures(), watch_solves() as solves, trained.setting.autocast():
        label_map = task.label_maps(trained.model, inputs)[0].cpu()
    return label_map, solve_metrics(solve_sums(solves))


def in_windows(task: Segmentation, height: int, width: int) -> tuple[Segmentation, str]:
    """The task with windows if an image is too large to be segmented at once, and a note that it was."""
    if task.window is not None or height * width <= LIMITS.whole_image:
        return task, ""
    task = copy.copy(task)
    task.window = WINDOW
    note = f"segmented in windows of {WINDOW[0]} x {WINDOW[1]}, since it is {width} x {height}; --window sets others"
    return task, note


def pictures(images: Sequence[Path], out: Path | None) -> list[Path]:
    """The file of each image's picture, none of which exists yet, nor that of its class numbers."""
    if out is not None and out.suffix:
        if out.suffix != ".png":
            raise ValueError(f"--out is {out}; a picture's file ends in .png, and a folder has no ending.")
        if len(images) > 1:
            raise ValueError(f"--out is {out}, one file, but {len(images)} images are given: name a folder.")
        found = [out]
    else:
        found = [(out or Path()) / f"{image.stem}-segmented.png" for image in images]
    if twice := [file for file in found if found.count(file) > 1]:
        raise ValueError(f"two of the images would be written to {twice[0]}: give them one at a time, with --out.")
    for file in (written for picture in found for written in (picture, classes_file(picture))):
        if file.exists():
            raise ValueError(f"{printable(file)} exists already: name another file or folder with --out, or remove it.")
    return found


def classes_file(picture: Path) -> Path:
    return picture.with_name(f"{picture.stem}-classes.png")


def read_image(path: Path, channels: int, classes: int) -> Tensor:
    """An image file as uint8 at its own size, upright."""
    from PIL import ImageOps

    if channels not in MODES:
        raise RunError(
            f"the run was trained on inputs of {channels} channels; only images with 1 or 3 can be read from files."
        )
    with reading_image(path):
        image: Image = opened(read_file(path, LIMITS.image_file))
        # The image as bytes, as numbers and as a picture; its logits, their mean over windows, and the classes.
        need = image.width * image.height * 4 * 3 * (channels + classes)
        if need > LIMITS.segmentation:
            raise ValueError(
                f"it is {image.width} x {image.height}, and segmenting it into {classes} classes takes about "
                f"{need / 1e9:.1f} GB of memory; at most {LIMITS.segmentation / 1e9:g} GB are taken: make it smaller, "
                "or cut it into parts"
            )
        image = ImageOps.exif_transpose(image)
        return pixels(fitted(image, channels, image.height, image.width))


def write_png(path: Path, values: Tensor) -> None:
    """Write numbers, (height, width) or (height, width, 3), as they are."""
    from PIL import Image

    Image.fromarray(values.contiguous().numpy()).save(path, "PNG")

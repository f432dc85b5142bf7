"""Segment image files with a trained run: an overlay, a map of class numbers, and the share of each class."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.fixed_point import watch_solves
from equipoise.lab.data.files.images import MODES, read_image_file
from equipoise.lab.files import LIMITS, whole
from equipoise.lab.printable import printable
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.results.png_files import write_png
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures, solve_metrics, solve_sums
from equipoise.options import require_number
from equipoise.tasks.drawing import class_colors, overlay
from equipoise.tasks.segmentation import Segmentation

WINDOW = (1024, 1024)  # height and width of the windows for images too large to be segmented at once


@dataclass(frozen=True)
class Segmented:
    """The segmentation of one image, and the files it was written to."""

    picture: Path
    classes: Path
    shares: dict[str, float]  # share of the pixels by class, largest first
    solver: dict[str, Any]
    note: str = ""  # how a large image was processed


def segment_images(
    run: Run,
    images: Sequence[Path],
    machine: Machine,
    out: Path | None = None,
    weights: str = "best",
    window: Sequence[int] | None = None,
) -> Iterator[Segmented]:
    """Segment image files of any size, and write the results.

    Args:
        run: trained run of a segmentation task.
        out: file of the overlay (.png, for a single image) or a folder; None for IMAGE-segmented.png in the current
            folder. The class number of each pixel is written to OUT-classes.png beside it. Existing files are never
            overwritten.
        window: height and width of the windows in which images are processed; None for those of the run's evaluation,
            or ``WINDOW`` for images above ``LIMITS.whole_image``. Images whose logits exceed ``LIMITS.segmentation``
            are rejected before they are decoded.

    Example:
        >>> with this_machine() as machine:
        ...     for segmented in segment_images(open_run("runs/mdeq-camvid-small-001"), [Path("street.png")], machine):
        ...         print(segmented.shares)
    """
    for length in window or ():
        require_number("--window", length, at_least=1, whole=True)
    pictures = new_pictures(images, out)
    changes = [] if window is None else [f"window={list(window)}"]
    trained = open_trained(run, machine, weights, changes=changes, sections=(*MODEL_SECTIONS, "task"))
    task, channels = trained.task, trained.facts["shape"][0]
    if not isinstance(task, Segmentation):
        raise RunError(
            f"{run} was trained for the task {trained.recipe.task.name!r}; `equipoise segment` requires the "
            "task 'segmentation'; `equipoise predict` classifies images."
        )
    if channels not in MODES:
        raise RunError(f"the run's inputs have {channels} channels; image files require 1 or 3.")
    names = task.class_names
    for picture, file in zip(pictures, images, strict=True):
        image, white = read_image_file(
            file, channels, check=partial(check_memory, channels=channels, classes=len(names))
        )
        windowed, note = in_windows(task, *image.shape[-2:])
        label_map, solver = segment_image(trained, windowed, image)
        with whole(picture) as part, whole(classes_file(picture)) as classes_part:  # both or neither
            colored = overlay(image / 255, label_map, class_colors(names))
            write_png(part, (255 * colored).round().byte().permute(1, 2, 0))
            write_png(classes_part, label_map.to(torch.uint8 if len(names) <= 256 else torch.uint16))
        yield Segmented(picture, classes_file(picture), task.shares(label_map), solver, f"{note} {white}".strip())


def segment_image(trained: Trained, task: Segmentation, image: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the class number of each pixel of an image, and the solver statistics."""
    (inputs,) = trained.setting.prepare(task, (image[None].to(trained.setting.device),))
    with quiet_failures(), watch_solves() as solves, trained.setting.autocast():
        label_map = task.label_maps(trained.model, inputs)[0].cpu()
    return label_map, solve_metrics(solve_sums(solves))


def in_windows(task: Segmentation, height: int, width: int) -> tuple[Segmentation, str]:
    """Return the task, with windows and a note if an image is too large to be segmented at once."""
    if task.window is not None or height * width <= LIMITS.whole_image:
        return task, ""
    task = copy.copy(task)
    task.window = WINDOW
    sizes = f"windows of {WINDOW[0]} x {WINDOW[1]}, since it is {width} x {height}"
    return task, f"segmented in {sizes}; --window sets another size"


def check_memory(height: int, width: int, channels: int, classes: int) -> None:
    """Raise ValueError if segmenting an image of this size would take too much memory."""
    # The image as bytes, as numbers and as a picture; its logits, their mean over windows, and the classes.
    need = width * height * 4 * 3 * (channels + classes)
    if need > LIMITS.segmentation:
        raise ValueError(
            f"it is {width} x {height}, and segmenting it into {classes} classes takes about {need / 1e9:.1f} GB of "
            f"memory; the limit is {LIMITS.segmentation / 1e9:g} GB: make it smaller, or cut it into parts"
        )


def new_pictures(images: Sequence[Path], out: Path | None) -> list[Path]:
    """Return the overlay file of each image; raise ValueError if one of the files to be written exists."""
    if out is not None and out.suffix:
        if out.suffix != ".png":
            raise ValueError(f"--out is {out}; it must be a file that ends in .png, or a folder without a suffix.")
        if len(images) > 1:
            raise ValueError(f"--out is {out}, a single file, but there are {len(images)} images: give a folder.")
        files = [out]
    else:
        files = [(out or Path()) / f"{image.stem}-segmented.png" for image in images]
    if twice := [file for file in files if files.count(file) > 1]:
        raise ValueError(f"two of the images would be written to {twice[0]}: segment them one at a time, with --out.")
    for file in (*files, *map(classes_file, files)):
        if file.exists():
            raise ValueError(f"{printable(file)} already exists: remove it, or give another file or folder with --out.")
    return files


def classes_file(picture: Path) -> Path:
    return picture.with_name(f"{picture.stem}-classes.png")

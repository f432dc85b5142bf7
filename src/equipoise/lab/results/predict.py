"""Predictions of a trained run for image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.files.images import MODES, fitted, opened, pixels, reading_image, upright_size
from equipoise.lab.data.files.limits import LIMITS, read_file
from equipoise.lab.format import printable
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.recipes.reading import RecipeError
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures

MUCH = 4  # an image whose sides change by more than this factor is mentioned


@dataclass(frozen=True)
class Predicted:
    """What a run makes of one image file.

    Args:
        image: the file.
        answer: named values, as the task gives them; None if the file could not be read.
        note: why it could not be read, or what was done to it that a person should know; else empty.
    """

    image: Path
    answer: dict[str, Any] | None
    note: str = ""


def predict_images(run: Run, images: Sequence[Path], machine: Machine, weights: str = "best") -> Iterator[Predicted]:
    """Say what a trained run makes of image files, brought to the size and channels it was trained on.

    A file that cannot be read gets no answer, only a note why: the others are answered all the same.
    """
    trained = open_trained(run, machine, weights, sections=(*MODEL_SECTIONS, "task"))
    shape = trained.facts["shape"]
    if len(shape) != 3 or shape[0] not in MODES:
        raise RecipeError(
            f"the run was trained on inputs of shape {shape}; only images with 1 or 3 channels can be read from files."
        )
    size = trained.recipe.training.evaluation_batch_size
    for some in (images[start : start + size] for start in range(0, len(images), size)):
        read = [read_or_refused(path, shape) for path in some]
        readable = [image for image, _ in read if image is not None]
        answers = iter(predictions(trained, torch.stack(readable)) if readable else [])
        for path, (image, note) in zip(some, read, strict=True):
            yield Predicted(path, None if image is None else next(answers), note)


def predictions(trained: Trained, images: Tensor) -> list[dict[str, Any]]:
    """What the model says of each image of a batch of bytes."""
    (inputs,) = trained.setting.prepare(trained.task, (images.to(trained.setting.device),))
    with quiet_failures(), trained.setting.autocast():
        return trained.task.predict(trained.model, inputs)


def read_or_refused(path: Path, shape: tuple[int, ...]) -> tuple[Tensor | None, str]:
    """The image in a file and a note, or None and why not."""
    try:
        return read_image(path, shape)
    except ValueError as error:
        return None, str(error)


def read_image(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """An image file as uint8 of the given shape, read as for training; and a note if its size was quite another."""
    channels, height, width = shape
    with reading_image(path):
        image = opened(read_file(path, LIMITS.image_file))
        before = upright_size(image)
        return pixels(fitted(image, channels, height, width)), resized(path, before, (width, height))


def resized(path: Path, before: tuple[int, int], after: tuple[int, int]) -> str:
    """A sentence about an image that was made much smaller or larger; empty for one that was not."""
    factor = min(old / new for old, new in zip(before, after, strict=True))
    if 1 / MUCH <= factor <= MUCH:
        return ""
    sizes = " to ".join(f"{width} x {height}" for width, height in (before, after))
    how = "shrunk" if factor > 1 else "enlarged"
    return f"{printable(path)} was {how} from {sizes}, the size of the images that the run was trained on."

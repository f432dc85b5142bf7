"""Predict image files with a trained run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.files.images import MODES, read_image_file
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.recipes.reading import RecipeError
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures


@dataclass(frozen=True)
class Prediction:
    """A run's prediction for one image file.

    Args:
        image: image file.
        answer: the task's named values; None if the file could not be read.
        note: why the file could not be read, or how the image was changed; empty if there is nothing to note.
    """

    image: Path
    answer: dict[str, Any] | None
    note: str = ""


def predict_images(run: Run, images: Sequence[Path], machine: Machine, weights: str = "best") -> Iterator[Prediction]:
    """Predict image files, resized to the size of the training images.

    A file that cannot be read gets a note instead of an answer; the others are predicted nevertheless.
    """
    trained = open_trained(run, machine, weights, sections=(*MODEL_SECTIONS, "task"))
    shape = trained.facts["shape"]
    if len(shape) != 3 or shape[0] not in MODES:
        raise RecipeError(f"the run's inputs have shape {shape}; image files require 1 or 3 channels.")
    size = trained.recipe.training.evaluation_batch_size
    for files in (images[start : start + size] for start in range(0, len(images), size)):
        contents = [read_or_note(file, shape) for file in files]
        answers: Iterator[dict[str, Any]] = iter(())
        if readable := [image for image, _ in contents if image is not None]:
            (inputs,) = trained.setting.prepare(trained.task, (torch.stack(readable).to(machine.device),))
            with quiet_failures(), trained.setting.autocast():
                answers = iter(trained.task.predict(trained.model, inputs))
        for file, (image, note) in zip(files, contents, strict=True):
            yield Prediction(file, None if image is None else next(answers), note)


def read_or_note(file: Path, shape: tuple[int, ...]) -> tuple[Tensor | None, str]:
    """Return an image file with the given shape and a note, or None and why it could not be read."""
    try:
        return read_image_file(file, shape[0], (shape[1], shape[2]))
    except ValueError as error:
        return None, str(error)

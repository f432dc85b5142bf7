"""Looking at a trained run: measure it again, ask it about images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.lab import checkpoints
from equipoise.lab.build import MODEL_SECTIONS, USE_SECTIONS, build_task, module_of, require_trust
from equipoise.lab.data import DataSet
from equipoise.lab.data.base import Split, spread
from equipoise.lab.data.decoding import MODES, fitted, opened, pixels, reading_image, upright_size
from equipoise.lab.data.limits import LIMITS, read_file
from equipoise.lab.evaluate import Evaluation, Setting, evaluate, quiet_failures
from equipoise.lab.loading import data_facts, open_weights
from equipoise.lab.machine import Machine
from equipoise.lab.recipes import Named, Recipe, RecipeError, Where, parse_override
from equipoise.lab.runs import Run
from equipoise.lab.train import data_of
from equipoise.lab.wording import printable
from equipoise.tasks import Task

MUCH = 4  # an image whose sides change by more than this factor is mentioned


@dataclass(frozen=True)
class Trained:
    """A trained model with its task and all that is needed to use it."""

    model: nn.Module
    task: Task
    recipe: Recipe
    facts: dict[str, Any]  # about the data it was trained on
    setting: Setting
    file: Path


def open_trained(
    run: Run,
    machine: Machine,
    weights: str = "best",
    task: str | None = None,
    changes: Sequence[str] = (),
    sections: Sequence[str] = USE_SECTIONS,
) -> Trained:
    """A run's model and task; the task may be another one, with other options.

    Args:
        task: the name of another task; None is the run's own.
        changes: options of the task as ``"key=value"``.
        sections: sections of the run's recipe that will be used, so that all code they name is trusted, or refused, at
            once.
    """
    source, options = run.source, dict(parse_override(text) for text in changes)
    require_trust(source, [section for section in sections if section != "task" or task is None])
    model, saved, file = open_weights(run, weights)
    recipe = source.phase(saved["phase"])
    if task is not None and task != recipe.task.name:
        recipe = replace(recipe, task=Named(task, options))
    else:
        recipe = replace(recipe, task=Named(recipe.task.name, {**recipe.task.options, **options}))
    facts = data_facts(saved["data"])
    setting = Setting(recipe.training, machine)
    typed = [value for value in (task, *options.values()) if value is not None]  # the caller's own words
    where = Where(
        "command line" if typed else source.where.name,
        trust=source.where.trust.including(*(module_of(value) for value in typed if isinstance(value, str))),
    )
    with checkpoints.fitting(file):
        made = build_task(recipe, facts, where)
    return Trained(setting.place(model).eval(), made, recipe, facts, setting, file)


def evaluate_run(
    run: Run,
    machine: Machine,
    folders: Sequence[Path] = (),
    *,
    split: str = "test",
    weights: str = "best",
    task: str | None = None,
    changes: Sequence[str] = (),
    limit: int | None = None,
) -> Evaluation:
    """Measure a trained run on a split of its data."""
    trained = open_trained(run, machine, weights, task, changes)
    samples = samples_of(run, trained, folders, split, limit)
    size = trained.recipe.training.evaluation_batch_size
    return evaluate(trained.model, trained.task, samples, trained.setting, machine, size, trained.recipe.seed)


def samples_of(run: Run, trained: Trained, folders: Sequence[Path], split: str, limit: int | None) -> Split:
    """A split of the data that a run was trained on, or so many of its samples, spread over it evenly."""
    data: DataSet = data_of(run, trained.recipe, folders)
    samples = getattr(data, split)
    if samples is None:
        raise ValueError(f"{data.name} has no split {split!r} in this run: it was trained with data.validation = 0.")
    if limit is None:
        return samples
    if limit < 1:
        raise ValueError(f"--limit is {limit}; it must be at least 1.")
    return spread(samples, limit)


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

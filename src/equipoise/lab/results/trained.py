"""Looking at a trained run: measure it again, ask it about images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.lab.data import DataSet
from equipoise.lab.data.base import Split, spread
from equipoise.lab.recipes.build import USE_SECTIONS, build_task, module_of, require_trust
from equipoise.lab.recipes.reading import Where, parse_override
from equipoise.lab.recipes.schema import Named, Recipe
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_facts, data_of, open_weights
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import Evaluation, Setting, evaluate
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

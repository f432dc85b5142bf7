"""Open the model and task of a trained run, and evaluate them on a split of its data."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

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


@dataclass(frozen=True)
class Trained:
    """A trained model with its task and everything needed to use it."""

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
    """Load a run's model, and its task or another one.

    Args:
        weights: "best" or "last".
        task: name of another task; None for the run's own.
        changes: options of the task as ``"key=value"``.
        sections: sections of the run's recipe that will be used; all modules they name must be trusted.
    """
    source, options = run.source, dict(parse_override(text) for text in changes)
    require_trust(source, [section for section in sections if section != "task" or task is None])
    model, saved, file = open_weights(run, weights)
    recipe = source.phase(saved["phase"])
    kept = recipe.task.options if task in (None, recipe.task.name) else {}
    recipe = replace(recipe, task=Named(task or recipe.task.name, {**kept, **options}))
    setting, facts = Setting(recipe.training, machine), data_facts(saved["data"])
    given = [value for value in (task, *options.values()) if value is not None]  # trusted: the caller named them
    entries = (entry for value in given for entry in (value if isinstance(value, list) else [value]))
    modules = (module_of(entry) for entry in entries if isinstance(entry, str))
    where = Where("command line" if given else source.where.name, trust=source.where.trust.including(*modules))
    with checkpoints.fitting(file):
        built = build_task(recipe, facts, where)
    return Trained(setting.place(model).eval(), built, recipe, facts, setting, file)


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
    """Evaluate a trained run on a split of its data; see :func:`open_trained` and :func:`samples_of`."""
    trained = open_trained(run, machine, weights, task, changes)
    samples = samples_of(run, trained, folders, split, limit)
    size = trained.recipe.training.evaluation_batch_size
    return evaluate(trained.model, trained.task, samples, trained.setting, machine, size, trained.recipe.seed)


def samples_of(run: Run, trained: Trained, folders: Sequence[Path], split: str, limit: int | None) -> Split:
    """Return a split of the data that a run was trained on, or ``limit`` evenly spaced samples of it."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; it must be at least 1.")
    data = data_of(run, trained.recipe, folders)
    samples: Split | None = getattr(data, split)
    if samples is None:
        raise ValueError(f"{data.name} has no split {split!r} in this run: it was trained with data.validation = 0.")
    return samples if limit is None else spread(samples, limit)


def progress_bar(title: str, total: int, unit: str = "sample") -> Any:
    """Return a tqdm progress bar, shown only on a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=title, unit=unit, disable=not sys.stderr.isatty(), leave=False)

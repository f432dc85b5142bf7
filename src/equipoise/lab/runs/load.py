"""``eq.load``: open a shipped model, or that of a run or file, with its data; and initialise a model from another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.lab.data import DataSet
from equipoise.lab.recipes.build import MODEL_SECTIONS, build_model, load_data, require_trust
from equipoise.lab.recipes.reading import RecipeFile
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run, RunError, open_run
from equipoise.lab.trust import Trust


def load(
    path: str | Path, weights: str = "best", device: str | torch.device = "cpu", trust: str | Sequence[str] = ()
) -> nn.Module:
    """Load a trained model: one that ships with the package, or that of a run or a checkpoint file.

    Loading runs no code that the file chooses: a model from outside the package is rejected unless it is trusted. A
    shipped file is compared with the SHA-256 of its card.

    Args:
        path: name of a shipped model (:func:`list_weights`), folder of a run, or ``.safetensors`` file that a run
            wrote. A name wins over a folder of that name; write ``"./name"`` for the folder.
        weights: "best" by the validation metric (the last, without a validation split), or "last"; for a run only
        device: device to put the model on
        trust: name of a module outside the package that the file may take its model from, or several names. Importing
            a module runs it, so name only modules that you know.

    Returns:
        The model in evaluation mode; a model of images takes values in [0, 1], (batch, channels, height, width).

    Example:
        >>> model = eq.load("mondeq/mnist-fc")
        >>> logits = model(images)
    """
    return open_weights(open_run(path, trust), weights)[0].to(device).eval()


def open_weights(run: Run, weights: str = "best") -> tuple[nn.Module, dict[str, Any], Path]:
    """Return the model of a run, the facts saved with it, and its file."""
    file = weights_file(run, weights)
    model, facts = open_checkpoint(file, run.trust)
    checkpoints.require_same_recipe(file, facts, run.facts["tables"], run.origin)
    return model, facts, file


def open_checkpoint(file: Path, trust: Trust) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a checkpoint, and the facts saved with it."""
    tensors, facts = checkpoints.read(file)
    source = RecipeFile.from_saved(facts, file, trust)
    require_trust(source, MODEL_SECTIONS)
    phases = len(source.recipe.phases)
    if not 0 <= facts["phase"] < phases:
        raise checkpoints.CheckpointError(f"{file} is damaged: its phase is {facts['phase']} of {phases}.")
    recipe = source.phase(facts["phase"])
    with checkpoints.fitting(file):
        model = build_model(recipe, data_facts(facts["data"]), source.where)
        if recipe.training.precision == "float64":
            model = model.double()
        checkpoints.load_model(model, tensors, file)
    return model, facts


def start_from(model: nn.Module, path: str) -> list[str]:
    """Load the weights of a run or file, or shipped ones, where they match; return the names of the other tensors."""
    file = weights_file(open_run(path))
    tensors, _ = checkpoints.read(file)
    return checkpoints.load_matching(model, tensors, file)


def weights_file(run: Run, weights: str = "best") -> Path:
    """Return the checkpoint of a run with the best or the last weights."""
    if weights not in ("best", "last"):
        raise ValueError(f"weights is {weights!r}; allowed: 'best', 'last'.")
    if run.file is not None:
        if weights == "last":
            raise RunError(f"{run} has a single set of weights, and no last ones: leave out weights = 'last'.")
        return run.file
    if weights == "best" and not run.best.exists() and (run.result or {}).get("weights") == "best":
        raise RunError(f"{run.best}, the best weights of this run, is missing: restore it, or use the last weights.")
    for file in (run.best, run.last) if weights == "best" else (run.last,):
        if file.exists():
            return file
    raise RunError(f"{run} has no checkpoint yet: it was stopped before the end of its first epoch.")


def data_facts(saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved facts of a data set as models take them: JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}


def data_of(run: Run, recipe: Recipe, folders: Sequence[Path]) -> DataSet:
    """Load the data set of a run, looking in these folders first."""
    try:
        return load_data(recipe, run.data_folders(folders), run.source.where.trust)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:  # damaged options
        raise RunError(f"{run.origin}: data set {recipe.data.name!r}: {error}") from error

"""``eq.load``: a trained model back from its run or file; and a model that begins with the weights of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.lab.recipes.build import MODEL_SECTIONS, build_model, require_trust
from equipoise.lab.recipes.recipe import Recipe, saved_source
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run, RunError, open_run
from equipoise.registry import Trust


def load(
    path: str | Path,
    weights: str = "best",
    device: str | torch.device = "cpu",
    trust: str | Sequence[str] = (),
) -> nn.Module:
    """The trained model of a run, or of one checkpoint file, ready to evaluate.

    Loading runs no code that the file chooses: a model from outside the package is refused unless it is trusted.

    Args:
        path: a run's folder, or a ``.safetensors`` file that a run wrote.
        weights: of a run: "best" by the validation metric (the last where there is no validation split), or "last".
        device: where to put it.
        trust: name of a module outside the package that the file may take its model from, or several names. Importing
            a module runs it, so name only modules that you know.

    Returns:
        The model in evaluation mode; for images it takes numbers in [0, 1], (batch, channels, height, width).

    Example:
        >>> model = eq.load("runs/core-mnist-001")
        >>> logits = model(images)
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return open_checkpoint(path, Trust.of(trust))[0].to(device).eval()
    return open_weights(open_run(path, trust), weights)[0].to(device).eval()


def open_weights(run: Run, weights: str = "best") -> tuple[nn.Module, dict[str, Any], Path]:
    """The model of a run, the facts that are saved with it, and its file."""
    file = weights_file(run, weights)
    model, facts = open_checkpoint(file, run.trust)
    checkpoints.require_same_recipe(file, facts, run.facts["tables"], run.folder / "run.json")
    return model, facts, file


def open_checkpoint(file: Path, trust: Trust) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, and the facts that are saved with it."""
    tensors, facts = checkpoints.read(file)
    source = saved_source(facts, file, trust)
    require_trust(source, MODEL_SECTIONS)
    phases = len(source.read(Recipe).phases)
    if not 0 <= facts["phase"] < phases:
        raise checkpoints.CheckpointError(f"{file} is damaged: it is of phase {facts['phase']} of {phases}.")
    recipe = source.phase(facts["phase"])
    with checkpoints.fitting(file):
        model = build_model(recipe, data_facts(facts["data"]), source.where)
        if recipe.training.precision == "float64":
            model = model.double()
        checkpoints.load_model(model, tensors, file)
    return model, facts


def start_from(model: nn.Module, path: str) -> list[str]:
    """Put in the weights of another run, or of a file, as far as they fit; returns the names of the model's others."""
    file = Path(path) if path.endswith(".safetensors") else weights_file(open_run(Path(path)))
    tensors, _ = checkpoints.read(file)
    return checkpoints.load_matching(model, tensors, file)


def weights_file(run: Run, weights: str = "best") -> Path:
    """The checkpoint of a run that is asked for."""
    if weights not in ("best", "last"):
        raise ValueError(f"weights is {weights!r}; allowed: 'best', 'last'.")
    for file in (run.best, run.last) if weights == "best" else (run.last,):
        if file.exists():
            return file
    raise RunError(f"{run.folder} has no checkpoint yet: it was stopped before its first epoch was done.")


def data_facts(saved: dict[str, Any]) -> dict[str, Any]:
    """Facts of a data set as models take them: JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}

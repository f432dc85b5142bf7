"""``eq.load``: a trained model back from its run or file; and a model that begins with the weights of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.lab import checkpoints
from equipoise.lab.build import build_model, find_outside
from equipoise.lab.recipes import Source, Where
from equipoise.lab.runs import Run, RunError, open_run


def load(path: str | Path, weights: str = "best", device: str | torch.device = "cpu") -> nn.Module:
    """The trained model of a run, or of one checkpoint file, ready to evaluate.

    Args:
        path: a run's folder, or a ``.safetensors`` file that a run wrote.
        weights: of a run: "best" by the validation metric (the last where there is no validation split), or "last".
        device: where to put it.

    Returns:
        The model in evaluation mode; for images it takes numbers in [0, 1], (batch, channels, height, width).

    Example:
        >>> model = eq.load("runs/core-mnist-001")
        >>> logits = model(images)
    """
    path = Path(path)
    file = path if path.suffix == ".safetensors" else weights_file(open_run(path), weights)
    return open_checkpoint(file)[0].to(device).eval()


def open_checkpoint(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, and the facts that are saved with it."""
    tensors, facts = checkpoints.read(file)
    source = Source(facts["recipe"], facts["tables"], Where(str(file)), facts["folder"])
    find_outside(source)
    recipe = source.phase(facts["phase"])
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

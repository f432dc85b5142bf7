"""Trained runs as ONNX files, and their agreement with torch on the run's data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.export import export
from equipoise.lab.recipes.build import MODEL_SECTIONS, SOLVERS, USE_SECTIONS
from equipoise.lab.results.trained import open_trained, samples_of
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import prepared
from equipoise.onnx.file import Exported
from equipoise.onnx.session import Agreement


def export_run(
    run: Run,
    machine: Machine,
    out: Path,
    weights: str = "best",
    solver: str | None = None,
    *,
    check: int | None = None,
    folders: Sequence[Path] = (),
    **options: Any,
) -> tuple[Exported, Agreement | None]:
    """Export the model of a run; the file takes what the run's model takes, such as images in [0, 1].

    Args:
        weights: "best" or "last".
        solver: name of the solver of every layer; None for the run's own.
        check: number of test samples to compare file and torch on; None for no comparison.
        folders: folders to search for data first.
        options: ``steps``, ``statistics`` and ``opset`` of :func:`equipoise.export`.
    """
    trained = open_trained(run, machine, weights, sections=(*MODEL_SECTIONS, "task") if check is None else USE_SECTIONS)
    facts = trained.facts
    samples = None if check is None else samples_of(run, trained, folders, "test", check)
    metadata = {
        "recipe": trained.recipe.title,
        "data": trained.recipe.data.name,
        "classes": json.dumps(list(facts["class_names"])),
        "weights": trained.file.name,
    }
    dtype = next(trained.model.parameters()).dtype
    example = torch.rand(2, *facts["shape"], dtype=dtype)
    chosen = None if solver is None else SOLVERS[solver]()
    exported = export(trained.model, out, example, solver=chosen, metadata=metadata, **options)
    if samples is None:
        return exported, None
    size = trained.recipe.training.evaluation_batch_size
    batches = (batch[0] for batch in prepared(samples, trained.task, trained.setting, size))
    return exported, exported.check(batches)

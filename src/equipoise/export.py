"""Export a model, or that of a run, as an ONNX file with its solves, which runs without torch or equipoise."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.options import require_number
from equipoise.problem.layout import leaves, rebuild
from equipoise.registry import MissingPackage
from equipoise.solvers import Solver

if TYPE_CHECKING:
    from equipoise.lab.results.trained import Trained
    from equipoise.lab.runs.folder import Run
    from equipoise.lab.runs.machine import Machine
    from equipoise.onnx.file import Exported
    from equipoise.onnx.session import Agreement

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export(
    model: nn.Module,
    path: str | Path,
    example: Any,
    *,
    steps: int | None = None,
    solver: Solver | None = None,
    statistics: bool = True,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Write a model as an ONNX file, with every solve of an :class:`Equilibrium` as a part of the graph.

    By default a solve is an ONNX ``Loop`` with early stop: each sample stops by its own residual, keeps its best
    iterate and ignores the others, with the tolerance of the layer. The model is exported in evaluation mode and with
    a free batch size. Weights that layers derive once per solve (norm constraints, weight normalisation, the
    factorisations of a monDEQ) are frozen into the file.

    The loop differs from :func:`fixed_point` in three ways: finished samples are computed along with the others until
    all have finished; nothing is rescaled, so values whose squares underflow or overflow (in float32 below 1e-19 or
    above 1e19) are not resolved; and f is not evaluated once more at the end, which a batch of constant size does not
    need. Numbers of steps may differ by one where a residual is within rounding of the tolerance.

    Args:
        model: model that calls equilibrium layers, or such a layer.
        path: file to write, ending in ``.onnx``.
        example: argument of the model, batch first, or a tuple of arguments. The sizes of one sample are fixed in the
            file; the file is run once on the example.
        steps: number of evaluations of f in every solve, written out one after the other, for runtimes without loops;
            the value is the last image, as of :class:`FixedSteps`. None stops early.
        solver: solver of every layer; None is the layer's own. Supported: Picard, Anderson, Broyden without line
            search, ForwardBackward, and PeacemanRachford and DouglasRachford without memory.
        statistics: whether the file also returns ``steps``, ``residual`` and ``result`` (a code of :class:`Result`) of
            every sample, with early stop.
        opset: version of the ONNX operators; None is the default of torch's exporter.
        metadata: strings to store in the file.

    Returns:
        An object that describes the file; its ``check(batches)`` compares the file with torch.

    Example:
        >>> model = eq.load("runs/mondeq-mnist-fc-001")
        >>> exported = eq.export(model, "model.onnx", torch.rand(2, 1, 28, 28))
        >>> print(exported.check([images]))
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model is {given}; it must be an nn.Module object that calls equilibrium layers.")
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(
            f"path is {str(path)!r}; it must end in .onnx. For torch.export, replace the layers of the model by "
            "equipoise.FixedSteps and save what torch.export.export returns."
        )
    require_number("steps", steps, at_least=1, whole=True, optional=True)
    if solver is not None and not isinstance(solver, Solver):
        raise TypeError(f"solver is {solver!r}; it must be an object such as equipoise.Anderson(memory=5), or None.")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or not all(isinstance(s, str) for item in metadata.items() for s in item):
        raise TypeError(f"metadata is {metadata!r}; it must be a dict of strings, such as {{'made by': 'us'}}.")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingPackage(
            f"export needs {' and '.join(missing)}, not installed here: pip install 'equipoise[onnx]'.", name=missing[0]
        )
    require_number("opset", opset, at_least=18, at_most=newest_opset(), whole=True, optional=True)
    example = several(example if isinstance(example, tuple) else (example,))

    from equipoise.onnx.file import write
    from equipoise.onnx.traced import Traceable

    traceable = Traceable(model, example, steps, solver, statistics)
    return write(path, traceable, example, {**traceable.facts(), **metadata}, opset)


def newest_opset() -> int:
    from onnx.defs import onnx_opset_version

    return onnx_opset_version()


def several(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an example of at least two samples on the CPU: torch takes a size of 1 to be fixed."""
    tensors = [tensor.detach().cpu() for _, tensor in leaves(example, "example")]
    if not tensors or any(tensor.dim() == 0 or not len(tensor) for tensor in tensors):
        raise ValueError("example must contain tensors with the batch first, at least one sample, such as x[:2].")
    return rebuild(example, [torch.cat([tensor, tensor]) if len(tensor) == 1 else tensor for tensor in tensors])


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

    The file of a generator takes latent vectors; it is checked on vectors drawn as ``equipoise sample`` draws them.

    Args:
        weights: "best" or "last".
        solver: name of the solver of every layer; None for the run's own.
        check: number of test samples to compare file and torch on; None for no comparison.
        folders: folders to search for data first.
        options: ``steps``, ``statistics`` and ``opset`` of :func:`export`.
    """
    from equipoise.lab.recipes.build import MODEL_SECTIONS, SOLVERS, USE_SECTIONS
    from equipoise.lab.results.trained import open_trained

    trained = open_trained(run, machine, weights, sections=(*MODEL_SECTIONS, "task") if check is None else USE_SECTIONS)
    example = example_of(run, trained)
    samples = None if check is None else inputs_of(run, trained, check, weights, folders)
    metadata = {
        "recipe": trained.recipe.title,
        "data": trained.recipe.data.name,
        "classes": json.dumps(list(trained.facts["class_names"])),
        "weights": trained.file.name,
    }
    chosen = None if solver is None else SOLVERS[solver]()
    exported = export(trained.model, out, example, solver=chosen, metadata=metadata, **options)
    return exported, None if samples is None else exported.check(samples)


def example_of(run: Run, trained: Trained) -> Tensor:
    """Return an example of what the model of a run takes; raise RunError if no graph can express what it does."""
    from equipoise.lab.runs.folder import RunError
    from equipoise.models.generator.decoder import Decoder
    from equipoise.tasks.episodes import EpisodeTask

    if isinstance(trained.task, EpisodeTask):
        raise RunError(
            f"{run} learns the classes of a task from a few labelled images before it answers, with a number of "
            "operations that depends on them: it cannot be exported."
        )
    dtype = next(trained.model.parameters()).dtype
    if isinstance(trained.model, Decoder):
        return torch.randn(2, trained.model.latent, dtype=dtype)
    return torch.rand(2, *trained.facts["shape"], dtype=dtype)


def inputs_of(run: Run, trained: Trained, count: int, weights: str, folders: Sequence[Path]) -> Iterator[Tensor]:
    """Return batches of what the model of a run takes: test images, or latent vectors for a generator."""
    from equipoise.lab.results.sample import drawn_latents
    from equipoise.lab.results.trained import samples_of
    from equipoise.lab.training.evaluate import prepared
    from equipoise.models.generator.decoder import Decoder

    size = trained.recipe.training.evaluation_batch_size
    if isinstance(trained.model, Decoder):
        return iter(drawn_latents(run, trained, count, weights=weights, folders=folders)[0].split(size))
    samples = samples_of(run, trained, folders, "test", count)
    return (batch[0] for batch in prepared(samples, trained.task, trained.setting, size))

"""ONNX files of traceable models: written, described, and run beside torch."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equipoise
from equipoise.fixed_point import watch_solves
from equipoise.lab.files import whole
from equipoise.models.parts.context_managers import changed, evaluating
from equipoise.onnx.traced import BATCH, Traceable
from equipoise.problem.layout import leaves, rebuild
from equipoise.registry import MissingPackage

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
EXPORTER = "torch.onnx._internal.exporter"
FAR = 1e-2  # relative difference on the example above which a file cannot be right


@contextmanager
def quiet() -> Iterator[None]:
    """Silence remarks of torch's exporter that users can do nothing about: absent torchvision, its own deprecations."""
    logger = logging.getLogger(EXPORTER)
    with warnings.catch_warnings(), changed([(logger, "level", logging.ERROR)]):
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.simplefilter("ignore", category)
        yield


def write(path: Path, model: Traceable, example: tuple[Any, ...], facts: dict[str, str], opset: int | None) -> int:
    """Write a model as ONNX with these facts as metadata; return its number of nodes."""
    import onnx_ir.passes.common as passes

    shapes = tuple(rebuild(part, [{0: BATCH} for _ in leaves(part, "example")]) for part in example)
    inputs = leaves(example, "input")
    names = ["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]
    with quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            model,
            example,
            dynamo=True,
            dynamic_shapes={"inputs": shapes},
            input_names=names,
            output_names=model.output_names(),
            opset_version=opset,
            verbose=False,
        )
    passes.DeduplicateInitializersPass(size_limit=sys.maxsize)(program.model)  # a weight is used before the loop and inside it
    passes.ClearMetadataAndDocStringPass()(program.model)  # stack traces of every node
    program.model.producer_name, program.model.producer_version = "equipoise", equipoise.__version__
    program.model.metadata_props.update(facts)
    with whole(path) as part:
        program.save(str(part))
    return sum(1 for _ in program.model.graph.all_nodes())


class Session:
    """An ONNX file in onnxruntime on the CPU, called with tensors.

    Args:
        path: file.
        threads: number of threads; None for torch's.
    """

    def __init__(self, path: Path | str, threads: int | None = None):
        require_packages()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors only: it remarks on every constant that it folds
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = [given.name for given in self.session.get_inputs()]
        self.outputs = [made.name for made in self.session.get_outputs()]

    def __call__(self, *inputs: Any) -> dict[str, Tensor]:
        """Return the outputs by name."""
        given = [tensor.detach().cpu().numpy() for _, tensor in leaves(inputs, "inputs")]
        outputs = self.session.run(None, dict(zip(self.inputs, given, strict=True)))
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, outputs, strict=True)}

    @property
    def metadata(self) -> dict[str, str]:
        return self.session.get_modelmeta().custom_metadata_map


def require_packages() -> None:
    """Raise unless all that an export needs is installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingPackage(
            f"export needs {' and '.join(missing)}, not installed here: pip install 'equipoise[onnx]'.", name=missing[0]
        )

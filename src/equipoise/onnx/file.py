"""ONNX files: written whole, with metadata, after they have been run once."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equipoise
from equipoise.fixed_point import Equilibrium, watch_solves
from equipoise.lab.files import whole
from equipoise.models.parts.context_managers import changed, evaluating
from equipoise.onnx.session import Agreement, Rows, Session, as_rows, compare
from equipoise.onnx.traced import BATCH, Traceable, numbered
from equipoise.onnx.tracing import ExportError, exact, tracing
from equipoise.problem.layout import leaves, rebuild
from equipoise.solvers import Solver

FAR = 1e-2  # difference on the example, relative to the largest output, above which a file cannot be right


@dataclass(frozen=True)
class Exported:
    """An exported file; ``print(exported)`` describes it.

    Attributes:
        path: the file.
        inputs, outputs: names and shapes, "batch" for the free dimension.
        operations: number of nodes of its graph, those of the loop included.
        opset: version of the ONNX operators.
    """

    path: Path
    inputs: dict[str, tuple[Any, ...]]
    outputs: dict[str, tuple[Any, ...]]
    operations: int
    opset: int
    model: Traceable = field(repr=False)

    def check(self, batches: Iterable[Any]) -> Agreement:
        """Compare the file with torch on batches: tensors, or tuples of the model's arguments.

        With early stop, torch solves as it always does; with a fixed number of steps, it takes the same steps.
        """
        model = self.model

        def steps_taken(*batch: Any) -> Rows:
            return as_rows(model(*batch)), None

        reference = solved(model.model, model.solver) if model.steps is None else steps_taken
        batches = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        return compare(reference, Session(self.path).rows, batches)

    def __str__(self) -> str:
        def listed(values: dict[str, tuple[Any, ...]]) -> str:
            return ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in values.items())

        size = self.path.stat().st_size / 1e6
        return (
            f"{self.path}: {size:.2f} MB, {self.operations} operations, opset {self.opset}\n"
            f"inputs: {listed(self.inputs)}\noutputs: {listed(self.outputs)}"
        )


def solved(model: nn.Module, solver: Solver | None = None) -> Any:
    """Return a function that evaluates a model in torch, with another solver if given, for :func:`compare`."""
    layers = [layer for layer in model.modules() if isinstance(layer, Equilibrium)]
    changes: list[tuple[object, str, Any]] = [(layer, "on_failure", "ignore") for layer in layers]
    changes += [(layer, "solver", solver) for layer in layers if solver is not None]

    def rows(*inputs: Any) -> Rows:
        with torch.no_grad(), evaluating(model), changed(changes), watch_solves() as solves:
            outputs = model(*inputs)
        return as_rows(outputs), torch.stack([solution.stats.steps for solution in solves], dim=1)

    return rows


def write(path: Path, model: Traceable, example: tuple[Any, ...], facts: dict[str, str], opset: int | None) -> Exported:
    """Write a model with these facts as metadata, unless the file's outputs for the example are wrong."""
    program = converted(model, example, opset)
    if opset not in (None, made := program.graph.opset_imports[""]):
        raise ExportError(
            f"opset is {opset}; torch's exporter cannot convert this {type(model.model).__name__} to it, and made "
            f"{made}: leave it out, or choose another."
        )
    program.producer_name, program.producer_version = "equipoise", equipoise.__version__
    program.metadata_props.update(facts)
    with whole(path) as part:
        require_same_outputs(model, example, save(program, part))
    graph = program.graph
    inputs, outputs = ({value.name: shape_of(value) for value in values} for values in (graph.inputs, graph.outputs))
    operations = sum(1 for _ in graph.all_nodes())
    return Exported(path, inputs, outputs, operations, graph.opset_imports[""], model)


def converted(model: Traceable, example: tuple[Any, ...], opset: int | None) -> Any:
    """Return a model as ONNX, in memory (an ``onnx_ir.Model``)."""
    import onnx_ir.passes.common as passes

    def shapes(first: Any) -> dict[str, Any]:
        return {"inputs": tuple(rebuild(part, [{0: first} for _ in leaves(part, "example")]) for part in example)}

    model.trace()
    with tracing(type(model.model).__name__):
        # Not left to torch.onnx.export, which would silently fix a batch size that the model turns out to depend on.
        traced = exact(torch.export.export(model, example, dynamic_shapes=shapes(BATCH)))
        program: Any = torch.onnx.export(
            traced,
            dynamo=True,
            dynamic_shapes=shapes(BATCH.__name__),
            input_names=numbered("input", len(leaves(example, "example"))),
            output_names=model.output_names(),
            opset_version=opset,
            custom_translation_table={torch.ops.aten.scalar_tensor.default: number} if wide(example) else None,
            verbose=False,
        )
    passes.DeduplicateInitializersPass(size_limit=sys.maxsize)(program.model)  # weights are used in and before the loop
    passes.RemoveUnusedNodesPass()(program.model)  # and constants, which onnxruntime would remark on at every opening
    passes.ClearMetadataAndDocStringPass()(program.model)  # stack traces of every node
    return program.model


def wide(example: tuple[Any, ...]) -> bool:
    """Return whether a model computes in float64, as its example does."""
    return any(tensor.dtype == torch.float64 for _, tensor in leaves(example, "example"))


def number(s: float, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """Write a number of a graph exactly; torch's exporter rounds it to float32 first."""
    import onnx_ir
    from onnxscript import opset18

    value: Any = onnx_ir.tensor(s, dtype=onnx_ir.DataType(dtype))  # the exporter's own kind of tensor
    return opset18.Constant(value=value)


def save(program: Any, path: Path) -> Session:
    """Write a model, and return it opened by onnxruntime."""
    import onnx_ir

    onnx_ir.save(program, str(path), format="protobuf")
    return Session(path)


def require_same_outputs(model: Traceable, example: tuple[Any, ...], session: Session) -> None:
    """Raise if outputs for the example are far from torch's: a safeguard against errors of the conversion.

    Samples that did not converge are not compared: small differences of rounding may grow in them.
    """
    expected, converged = model.reference(example)
    error = (session.rows(*example)[0] - expected).abs().amax(dim=1)[converged]
    if not bool((error <= FAR * expected.abs().max()).all()):
        raise ExportError(
            f"the outputs of the exported {type(model.model).__name__} for the example differ by up to "
            f"{float(error.max()):.2g} from torch's, so the file was not kept. Torch's exporter or onnxruntime "
            "may have an error: try another opset, or another solver."
        )


def shape_of(value: Any) -> tuple[Any, ...]:
    """Return the shape of an ONNX value, with the names of free dimensions."""
    return tuple(size if isinstance(size, int) else size.value for size in value.shape)

"""What surrounds a call of torch's exporter: no remarks, and errors that name their cause."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from equipoise.models.parts.context_managers import changed

REMARKS = "torch.onnx._internal.exporter._registration"  # logs that torchvision is not installed


class ExportError(RuntimeError):
    """A model could not be exported, or the file does not agree with it."""


@contextmanager
def tracing(name: str) -> Iterator[None]:
    """Trace ``name`` in the block: without gradients and torch's own warnings; an error there is an ExportError."""
    quiet = changed([(logging.getLogger(REMARKS), "level", logging.ERROR)])
    with torch.no_grad(), warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if isinstance(cause, NotImplementedError | ExportError):  # ours, which says why
                raise cause from None
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise ExportError(
                f"{name} cannot be exported: torch could not trace it with a free batch size. A graph takes no "
                "decisions by values or by the batch size (.item(), if x.sum() > 0, len(x); use x.shape[0]), and ONNX "
                f"lacks some operators. The cause: {type(cause).__name__}: {lines[0] if lines else 'no message'}"
            ) from error


def exact(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose numbers are those of torch in float64 too.

    The weight of a lerp and the alpha of a sum become attributes of ONNX operators, which are float32; a factor does
    not.
    """
    aten = torch.ops.aten
    return program.run_decompositions({aten.lerp.Scalar: lerp, aten.add.Tensor: add})


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Return a linear interpolation, by torch's formulas."""
    difference = end - start
    return start + difference * weight if abs(weight) < 0.5 else end - difference * (1 - weight)


def add(left: Tensor, right: Any, *, alpha: float = 1) -> Tensor:
    """Return left + alpha right."""
    return NotImplemented if alpha == 1 else left + right * alpha

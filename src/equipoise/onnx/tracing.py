"""What surrounds a call of torch's exporter: no remarks, and errors that name their cause."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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

"""Exported files run by onnxruntime, and how well they agree with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.problem.layout import leaves

Rows = tuple[Tensor, Tensor | None]  # the outputs of each sample as a row, and its steps in each solve


class Session:
    """An ONNX file in onnxruntime on the CPU, called with tensors.

    Args:
        path: file.
        threads: number of threads; None for torch's.
    """

    def __init__(self, path: Path | str, threads: int | None = None):
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

    def rows(self, *inputs: Any) -> Rows:
        """Return the outputs as rows, and the steps, if they are among them."""
        found = self(*inputs)
        steps = [value for name, value in found.items() if name.startswith("steps")]
        outputs = [value for name, value in found.items() if name.startswith("output")]
        return as_rows(outputs), torch.stack(steps, dim=1) if steps else None


def as_rows(outputs: Any) -> Tensor:
    """Return outputs, batch first, as one row for each sample in float64."""
    return torch.cat([tensor.detach()[:, None].flatten(1).double() for _, tensor in leaves(outputs, "output")], dim=1)


@dataclass(frozen=True)
class Agreement:
    """A comparison of two runtimes on the same samples.

    Attributes:
        samples: number of samples.
        same_steps: fraction that took the same number of steps in every solve; 1 with a fixed number of steps.
        difference: largest difference of an output where the numbers of steps are equal.
        elsewhere: the same where they are not; 0 if they are equal everywhere.
        largest: largest absolute output, to compare the differences with.
    """

    samples: int
    same_steps: float
    difference: float
    elsewhere: float
    largest: float

    def __str__(self) -> str:
        text = (
            f"{self.samples:,} samples, {self.same_steps:.2%} with the same number of steps; there outputs differ by "
            f"at most {self.difference:.1e} (largest output {self.largest:.3g})"
        )
        return text if self.same_steps == 1 else f"{text}, elsewhere by at most {self.elsewhere:.1e}"


def compare(
    reference: Callable[..., Rows], candidate: Callable[..., Rows], batches: Iterable[tuple[Any, ...]]
) -> Agreement:
    """Compare an exported file, ``Session(path).rows``, or another program with a reference on batches of arguments."""
    gaps, same, largest = [], [], 0.0  # of each sample, so that outputs as large as images need no memory
    for batch in batches:
        (wanted, steps), (found, taken) = reference(*batch), candidate(*batch)
        gaps.append((wanted - found).abs().amax(dim=1))
        alike = torch.ones(len(wanted), dtype=torch.bool)
        same.append(alike if steps is None or taken is None else (steps == taken).all(dim=1))
        largest = max(largest, float(wanted.abs().max()))
    if not same:
        raise ValueError("there are no samples to compare on.")
    gap, agree = torch.cat(gaps), torch.cat(same)
    difference, elsewhere = (float(part.max()) if len(part) else 0.0 for part in (gap[agree], gap[~agree]))
    return Agreement(len(agree), float(agree.double().mean()), difference, elsewhere, largest)

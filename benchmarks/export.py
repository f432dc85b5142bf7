"""Compare exported ONNX files with torch on test data: agreement, and the ratio of their times.

    python benchmarks/export.py [RUN...] [--images N] [--batch N] [--rounds N] [--threads N] [--data DIR] [--json F]

A run is a folder, or the name of a model that ships with the package; without any, all models that ship are compared.
Every model is exported twice: with early stop, and with the fixed number of steps that the slowest sample takes in
torch. Samples are test images, or latent vectors for a generator. Differences are those of the outputs; with early
stop, of samples that take the same number of steps. Fixed steps are compared with the same steps in torch. "rounding"
is the largest difference between torch in float32 and torch in float64, compared in the same way: what rounding alone
does to the outputs. "float64" is the largest difference between a file in float64 and torch in float64, for models
whose operators onnxruntime has in float64. torch and onnxruntime run in turns in one process; a speed above 1 says how
many times less processor time onnxruntime takes than torch with early stop, as the median over the rounds. A model that
is in the JSON file already is measured again; others in the file stay.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.export import example_of, inputs_of
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.onnx.file import Exported, solved
from equipoise.onnx.session import Agreement, Rows, Session, as_rows, compare
from equipoise.onnx.traced import Traceable
from tables import Row, show

TITLE, REFUSED = "ONNX files and torch", "Not exported"
SECONDS = 60.0  # processor time after which no further round begins


def ratio(exported: Exported, given: Tensor, rounds: int) -> float:
    """Return the processor time of torch divided by that of onnxruntime."""
    session, torch_too = Session(exported.path), solved(exported.model.model)
    began, pairs = process_time(), []
    session.rows(given)
    torch_too(given)
    while len(pairs) < rounds and (len(pairs) < 3 or process_time() - began < SECONDS):
        pairs.append((processor(lambda: torch_too(given)), processor(lambda: session.rows(given))))
    return median(ours / theirs for ours, theirs in pairs)


def processor(run: Callable[[], object]) -> float:
    """Return the processor time of one run, which other processes on the machine disturb less than the clock."""
    began = process_time()
    run()
    return process_time() - began


def in_float64(model: nn.Module, batches: list[Tensor], steps: int | None) -> float | None:
    """Return the largest difference of a file in float64 from torch; None if onnxruntime cannot run it."""
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoSuchOperator

    wide = copy.deepcopy(model).double()
    with tempfile.TemporaryDirectory() as place:
        try:
            exported = eq.export(wide, Path(place) / "model.onnx", batches[0][:2].double(), steps=steps)
        except NoSuchOperator:
            return None
        return exported.check(batch.double() for batch in batches).difference


def rounding(model: nn.Module, batches: list[Tensor], steps: int | None) -> Agreement:
    """Compare torch in float32 with torch in float64."""

    def rows(model: nn.Module, dtype: torch.dtype) -> Callable[..., Rows]:
        if steps is None:
            run: Any = solved(model)
        else:
            traceable = Traceable(model, (batches[0][:2].to(dtype),), steps, None, False)
            run = lambda given: (as_rows(traceable(given)), None)
        return lambda given: run(given.to(dtype))

    wide = rows(copy.deepcopy(model).double(), torch.float64)
    return compare(wide, rows(model, torch.float32), ((batch,) for batch in batches))


def compared(name: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way to export the model of a run."""
    run = open_run(name)
    with this_machine("cpu", arguments.threads) as machine:
        trained = open_trained(run, machine)
        Traceable(trained.model, (example_of(run, trained),), None, None, False)  # raises if it cannot be exported
        batches = list(inputs_of(run, trained, arguments.images, "best", arguments.data))
    torch_steps = torch.cat([steps for _, steps in map(solved(trained.model), batches) if steps is not None])
    slowest, batch = int(torch_steps.max()), batches[0][: arguments.batch]
    for steps in (None, slowest):
        with tempfile.TemporaryDirectory() as place:
            exported = eq.export(trained.model, Path(place) / "model.onnx", batch[:2], steps=steps)
            found = exported.check(batches)
            (call,) = exported.model.calls
            yield {
                "model": name if name in eq.list_weights() else trained.recipe.title,
                "solver": repr(call.method.solver),
                "file": "early stop" if steps is None else f"{steps} steps",
                "MB": exported.path.stat().st_size / 1e6,
                "samples": found.samples,
                "steps in torch": f"{int(torch_steps.median())} to {slowest}",
                "same steps": None if steps else f"{found.same_steps:.1%}",
                "largest difference": found.difference,
                "rounding": rounding(trained.model, batches, steps).difference,
                "float64": in_float64(trained.model, batches, steps),
                "largest output": found.largest,
                "relative": found.difference / found.largest,
                "elsewhere": None if steps or found.same_steps == 1 else found.elsewhere,
                "batch": len(batch),
                "speed": ratio(exported, batch, arguments.rounds),
                "speed, 1 sample": ratio(exported, batch[:1], 5 * arguments.rounds),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="*", help="folder of a run, or a name (default: all that ship)")
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="number of samples (default 1000)")
    parser.add_argument("--batch", type=int, default=100, metavar="N", help="largest batch (default 100)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="number of rounds (default 9)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="number of threads of both (default 1)")
    parser.add_argument("--data", type=Path, action="append", default=[], metavar="DIR", help="folder of data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    arguments = parser.parse_args()

    versions = f"equipoise {eq.__version__}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    heading = [
        f"{versions}, {arguments.threads} thread(s)",
        "Rounding: largest difference of torch in float32 and float64. Float64: of torch and a file, both in float64.",
        "Speed: processor time of torch divided by that of onnxruntime, for a batch and for 1 sample.",
    ]
    print("\n".join(heading))
    tables: dict[str, list[Row]] = {TITLE: [], REFUSED: []}
    if arguments.json and arguments.json.exists():
        tables |= json.loads(arguments.json.read_text())["tables"]
    for name in arguments.runs or eq.list_weights():
        try:
            title, new = TITLE, list(compared(name, arguments))
        except (ValueError, NotImplementedError) as error:
            title, new = REFUSED, [{"model": name, "why": str(error)}]
        show(title, new)
        for each in tables:
            tables[each] = [row for row in tables[each] if row["model"] != new[0]["model"]]
        tables[title] = sorted([*tables[title], *new], key=lambda row: str(row["model"]))
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"heading": heading, "tables": tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()

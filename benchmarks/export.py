"""Compare exported ONNX files with torch on test images: agreement, and the ratio of their times.

    python benchmarks/export.py RUN... [--images N] [--batch N] [--rounds N] [--threads N] [--data DIR] [--json F]

The model of every run is exported twice: with early stop, and with the fixed number of steps that the slowest of the
test images takes in torch. Differences are those of the logits; with early stop, of images that take the same number of
steps. Fixed steps are compared with the same steps in torch. torch and onnxruntime run in turns in one process; a speed
above 1 says how many times less processor time onnxruntime takes than torch with early stop, as the median over the
rounds. A run that is in the JSON file already is measured again; others in the file stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time

import onnxruntime
import torch
from torch import Tensor

import equipoise as eq
from equipoise.lab.data.base import spread
from equipoise.lab.results.trained import open_trained, samples_of
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.lab.training.evaluate import prepared
from equipoise.onnx.file import Exported, solved
from equipoise.onnx.session import Session
from tables import Row, show

TITLE = "ONNX files and torch"


def ratio(exported: Exported, images: Tensor, rounds: int) -> float:
    """Return the processor time of torch divided by that of onnxruntime."""
    session, torch_too = Session(exported.path), solved(exported.model.model)
    session.rows(images)
    torch_too(images)
    pairs = [(processor(lambda: torch_too(images)), processor(lambda: session.rows(images))) for _ in range(rounds)]
    return median(ours / theirs for ours, theirs in pairs)


def processor(run: Callable[[], object]) -> float:
    """Return the processor time of one run, which other processes on the machine disturb less than the clock."""
    began = process_time()
    run()
    return process_time() - began


def rows(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way to export the model of a run."""
    run = open_run(folder)
    with this_machine("cpu", arguments.threads) as machine:
        trained = open_trained(run, machine)
        samples = spread(samples_of(run, trained, arguments.data, "test", None), arguments.images)
        batches = [batch[0] for batch in prepared(samples, trained.task, trained.setting, arguments.batch)]
    torch_steps = torch.cat([steps for _, steps in map(solved(trained.model), batches) if steps is not None])
    slowest = int(torch_steps.max())
    for steps in (None, slowest):
        with tempfile.TemporaryDirectory() as place:
            exported = eq.export(trained.model, Path(place) / "model.onnx", batches[0][:2], steps=steps)
            found = exported.check(batches)
            (call,) = exported.model.calls
            yield {
                "recipe": trained.recipe.title,
                "solver": repr(call.method.solver),
                "file": "early stop" if steps is None else f"{steps} steps",
                "MB": exported.path.stat().st_size / 1e6,
                "images": found.samples,
                "steps in torch": f"{int(torch_steps.median())} to {slowest}",
                "same steps": None if steps else f"{found.same_steps:.1%}",
                "largest difference": found.difference,
                "elsewhere": None if steps or found.same_steps == 1 else found.elsewhere,
                "largest logit": found.largest,
                f"speed, {arguments.batch} images": ratio(exported, batches[0], arguments.rounds),
                "speed, 1 image": ratio(exported, batches[0][:1], 5 * arguments.rounds),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="folder of a run of a classifier")
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="number of test images (default 1000)")
    parser.add_argument("--batch", type=int, default=100, metavar="N", help="batch size (default 100)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="number of rounds (default 9)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="number of threads of both (default 1)")
    parser.add_argument("--data", type=Path, action="append", default=[], metavar="DIR", help="folder of data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()

    versions = f"equipoise {eq.__version__}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    speed = "Speed: processor time of torch divided by that of onnxruntime."
    heading = [f"{versions}, {arguments.threads} thread(s)", speed]
    print("\n".join(heading))
    stored: list[Row] = []
    if arguments.json and arguments.json.exists():
        stored = json.loads(arguments.json.read_text())["tables"][TITLE]
    for folder in arguments.folders:
        new = list(rows(folder, arguments))
        show(str(folder), new)
        stored = [row for row in stored if row["recipe"] != new[0]["recipe"]] + new
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"heading": heading, "tables": {TITLE: stored}}, indent=2) + "\n")


if __name__ == "__main__":
    main()

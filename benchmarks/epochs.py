"""Time per epoch of every recipe with a small budget, with another state of the package and with this one.

    git archive COMMIT src | tar -x -C OLD
    python benchmarks/epochs.py OLD/src [--label TEXT] [--only TEXT ...] [--rounds N] [--most SECONDS] [--json FILE]

Two processes, one for each state, build the same recipe (the file of this state) and take training steps in turns:
data, augmentation, forward, backward, optimizer, statistics. Times are processor times with one thread; a step's is
the median of the rounds after one that warms up, and an epoch's is that of its steps, without evaluation. All steps are
among the first of their phase, with weights that are hardly trained: what changes while a network trains, such as the
number of solver steps, is not seen. Of a recipe with several phases, the time is the mean over their epochs.

Left out are recipes whose data is not found or whose step takes longer than ``--most``. A recipe that ``--json FILE``
holds already is not measured again, so that a measurement can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, groupby
from pathlib import Path
from statistics import geometric_mean, median
from time import process_time
from typing import Any

from tables import Row, show

HERE = Path(__file__).resolve().parent.parent / "src"
RECIPES = HERE / "equipoise" / "papers"
TITLE = "processor time per epoch of training, in seconds, small budget"
ENOUGH = 4.0  # seconds after which a phase has no further round, from the second on


class LeftOut(Exception):
    """A recipe cannot be measured; the message says why."""


# --- the process that runs one state of the package -------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Answer requests, a line of JSON each: open a recipe, enter one of its phases, take a step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what training prints
    course: Course | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "open" in request:
                if course is not None:
                    course.close()
                course = None  # its data is freed before more is loaded
                course = Course(request["open"], folder)
                answer: Any = {"epochs": course.epochs, "steps": course.trainer.steps_per_epoch}
            else:
                assert course is not None
                answer = course.enter(request["phase"]) if "phase" in request else course.step()
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error).partition("\n")[0]}
        print(json.dumps(answer), file=answers, flush=True)


class Course:
    """A run of a recipe that takes one training step at a time, and is neither evaluated nor saved."""

    def __init__(self, recipe: str, folder: Path):
        from equipoise.lab.recipes.build import check
        from equipoise.lab.recipes.reading import open_recipe
        from equipoise.lab.runs.folder import Log, Run, create, new_folder
        from equipoise.lab.runs.machine import this_machine
        from equipoise.lab.training.evaluate import quiet_failures
        from equipoise.lab.training.trainer import StopRequest, Trainer, described

        self.stack = ExitStack()
        machine = self.stack.enter_context(this_machine("cpu", 1))
        self.stack.enter_context(quiet_failures())
        source = open_recipe(recipe, "small")
        check(source)
        run = Run(new_folder(folder, "run"), source.where.trust)
        create(run.folder, source, **described(machine, []))
        self.trainer = Trainer(run, machine, [], source, StopRequest())
        self.trainer.log = Log(run, samples=1, leads=False)
        self.epochs = [phase.epochs for phase in source.recipe.phases]

    def enter(self, phase: int) -> int:
        """Start a phase at its first batch."""
        trainer = self.trainer
        if phase:
            trainer.enter(phase)
        trainer.state.position.phase = phase
        trainer.learner.net.train()
        self.batches = self.batches_of(trainer.epochs_before[phase])
        return phase

    def batches_of(self, epoch: int) -> Iterator[tuple[Any, int]]:
        from equipoise.lab.data.base import batches

        trainer, rows = self.trainer, self.trainer.rows(epoch)
        split = trainer.data.train
        split = split.in_epoch(epoch) if hasattr(split, "in_epoch") else split
        for _ in cycle([None]):  # an epoch may have fewer batches than there are rounds
            yield from zip(batches(split, rows, trainer.machine.device), map(len, rows), strict=True)

    def step(self) -> float:
        """Take a training step and return its processor time."""
        began = process_time()
        batch, size = next(self.batches)
        self.trainer.step(batch, size)
        self.trainer.state.position.step += 1
        return process_time() - began

    def close(self) -> None:
        self.stack.close()


# --- the process that lets two states take turns ----------------------------------------------------------------------


class State:
    """A process with one state of the package."""

    def __init__(self, source: Path, folder: Path):
        variables = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        where = "import equipoise; print(equipoise.__file__)"
        found = subprocess.run([sys.executable, "-c", where], env=variables, capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).is_relative_to(source):
            raise SystemExit(f"{source} is not what Python imports, which is {found.stdout.strip()}.")
        command = [sys.executable, __file__, "--serve", str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=variables, text=True, **pipes)

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, dict) and "error" in answer:
            missing = answer["error"] == "MissingData"
            raise LeftOut("its data was not found" if missing else f"{answer['error']}: {answer['message']}")
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(recipe: Path, old: State, new: State, rounds: int, most: float) -> Row:
    """Return the row of a recipe, without a time before if the other state cannot build it."""
    facts, states = new.ask(open=str(recipe)), [new]
    try:
        old.ask(open=str(recipe))
        states = [old, new]
    except LeftOut:  # it has an option, a model or a task that did not exist
        pass
    epochs, steps = facts["epochs"], facts["steps"]
    totals = [0.0 for _ in states]
    for phase, count in enumerate(epochs):
        times: list[list[float]] = [[] for _ in states]
        for state in states:
            state.ask(phase=phase)
        for number in range(rounds + 1):
            pairs = list(zip(states, times, strict=True))
            for state, own in pairs if number % 2 else reversed(pairs):  # the first of a round has colder caches
                own.append(state.ask(step=True))
                if own[-1] > most and number == 0:
                    raise LeftOut(f"a step takes more than {most:g} s")
            if number >= 2 and sum(map(sum, times)) > ENOUGH:
                break
        totals = [total + count * steps * median(own[1:]) for total, own in zip(totals, times, strict=True)]
    *before, after = [total / sum(epochs) for total in totals]
    ratio = after / before[0] if before else None
    return {"steps": steps, "s before": before[0] if before else None, "s now": after, "now / before": ratio}


def small_recipes() -> dict[str, Path]:
    """Return the files of all recipes with a small budget, by the recipe's name."""
    files = {f"{file.parent.name}/{file.stem}": file for file in sorted(RECIPES.glob("*/*.toml"))}
    tables = {name: tomllib.loads(file.read_text()) for name, file in files.items()}
    return {name: files[name] for name, table in tables.items() if "phases" in table and "small" in table["budget"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="folder src of the other state of the package")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="recipes with one of these in their name"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each state and phase, after one to warm up")
    parser.add_argument("--most", type=float, default=10.0, help="seconds that the first step may take (default: 10)")
    parser.add_argument("--label", default="", help="what the other state is, for the heading, such as its commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also store the tables in a file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.old is None:
        parser.error("give the folder src of the other state of the package.")
    chosen = {name: file for name, file in small_recipes().items() if any(part in name for part in arguments.only)}
    rows, left_out = stored(arguments.json)
    for system, names in groupby(chosen, lambda name: name.partition("/")[0]):
        todo = [name for name in names if name not in {row["recipe"] for row in [*rows, *left_out]}]
        if not todo:
            continue
        with tempfile.TemporaryDirectory() as folder:  # new processes, which have not grown by another system's models
            old, new = (State(source.resolve(), Path(folder)) for source in (arguments.old, HERE))
            for name in todo:
                try:
                    row = measured(chosen[name], old, new, arguments.rounds, arguments.most)
                    rows.append({"recipe": name, **row})
                except LeftOut as reason:
                    left_out.append({"recipe": name, "reason": str(reason)})
                heading = [f"{arguments.label or 'another state'} and this one in turns; one thread, processor time"]
                rows, left_out = (sorted(table, key=lambda row: str(row["recipe"])) for table in (rows, left_out))
                tables = {TITLE: [*rows, summary(rows)], "left out": left_out}
                if arguments.json:
                    part = arguments.json.with_suffix(".part")
                    part.write_text(json.dumps({"heading": heading, "tables": tables}, indent=2) + "\n")
                    part.replace(arguments.json)  # whole, whenever the run is ended
            for state in (old, new):
                state.end()
        print(f"{system}: measured", file=sys.stderr)
    show(TITLE, [*rows, summary(rows)])
    if left_out:
        show("left out", left_out)


def stored(file: Path | None) -> tuple[list[Row], list[Row]]:
    """Return what a file holds already: rows without their summary, and what was left out."""
    if file is None or not file.exists():
        return [], []
    tables = json.loads(file.read_text())["tables"]
    return tables[TITLE][:-1], tables["left out"]


def summary(rows: Sequence[Row]) -> Row:
    """Return a row with the geometric mean of the ratios."""
    ratios = [row["now / before"] for row in rows if isinstance(row["now / before"], float)]
    return {"recipe": "geometric mean", "now / before": geometric_mean(ratios) if ratios else None}


if __name__ == "__main__":
    main()

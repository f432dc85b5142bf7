"""A look at a run: all there is to say about it, measured as far as it can be."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.lab.data import DataSet
from equipoise.lab.recipes.build import trust_words
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import Evaluation, evaluate, parameter_count
from equipoise.registry import UntrustedName


@dataclass(frozen=True)
class Notice:
    """A sentence that must not be missed, and the command that helps."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Look:
    """All there is to say about a run; without a checkpoint or its data, less."""

    run: Run
    label: str
    facts: dict[str, Any]
    recipe: Recipe
    records: list[dict[str, Any]]
    result: dict[str, Any] | None
    status: str
    trained: Trained | None = None
    data: DataSet | None = None
    evaluation: Evaluation | None = None
    missing: list[Notice] = field(default_factory=list)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "epoch"]

    @property
    def test(self) -> dict[str, Any]:
        """Metrics of the test split, as training ended or, before that, as measured now."""
        if self.result is not None:
            return self.result["test"]
        return self.evaluation.record() if self.evaluation is not None else {}

    @property
    def test_metrics(self) -> dict[str, float | None]:
        return {name: value for name, value in self.test.items() if name != "solver"}

    @property
    def weights(self) -> str:
        """Which weights the metrics of the test split are of: "best" or "last"."""
        if self.result is not None:
            return self.result["weights"]
        return self.trained.file.stem if self.trained is not None else ""

    @property
    def best(self) -> dict[str, Any] | None:
        """The best validation metric so far."""
        if self.result is not None or self.trained is None:
            return (self.result or {}).get("best")
        task = self.trained.task
        found = [
            {"metric": task.best_metric, "value": value, "epoch": record["epoch"]}
            for record in self.epochs
            if (value := record.get("val", {}).get(task.best_metric)) is not None
        ]
        choose = max if task.best_is_largest else min
        return choose(found, key=lambda entry: entry["value"]) if found else None

    @property
    def parameters(self) -> int | None:
        if self.result is not None:
            return self.result["parameters"]
        return parameter_count(self.trained.model) if self.trained is not None else None

    @property
    def steps(self) -> int | None:
        """Of training, as far as the log goes."""
        return self.records[-1]["step"] if self.records else None

    @property
    def seconds(self) -> float | None:
        """Of training, as far as the log goes."""
        if self.result is not None:
            return self.result["seconds"]
        return self.epochs[-1]["seconds"] if self.epochs else None

    @property
    def command_name(self) -> str:
        """The run as it is named on a command line, with what has to be trusted to open it."""
        return shlex.join([str(self.run.folder), *trust_words(self.run.source)])


def look(run: Run, label: str, machine: Machine, folders: Sequence[Path]) -> Look:
    """Measure a run as far as it can be."""
    known = Look(run, label, run.facts, run.recipe, run.records(), run.result, run.status)
    missing = [] if known.result is not None else [unfinished(known)]
    if not (run.best.exists() or run.last.exists()):
        return dataclasses.replace(known, missing=missing)
    try:
        trained = open_trained(run, machine)
    except UntrustedName:
        raise  # the remedy is a word on the command line, not in the page
    except (ValueError, LookupError, OSError, ImportError) as error:
        text = f"The model could not be opened, so that nothing was measured: {error}"
        return dataclasses.replace(known, missing=[*missing, Notice(text)])
    try:
        data = data_of(run, trained.recipe, folders)
    except (ValueError, LookupError, OSError, ImportError) as error:
        text = f"The test split could not be measured, so that its pictures are missing: {error} Then, again:"
        again = Notice(text, f"equipoise report {known.command_name}")
        return dataclasses.replace(known, trained=trained, missing=[*missing, again])
    if data.note:
        missing.append(Notice(f"About the data: {data.note}"))
    evaluation = measure(trained, data, machine, label)
    return dataclasses.replace(known, trained=trained, data=data, evaluation=evaluation, missing=missing)


def unfinished(known: Look) -> Notice:
    """How far the run is, and how to go on."""
    total = sum(phase.epochs for phase in known.recipe.phases)
    done = f"{len(known.epochs)} of {total} epochs are done"
    if known.status == "running":
        return Notice(
            f"Training is under way: {done}. To write this page again later:", f"equipoise report {known.command_name}"
        )
    if known.status == "interrupted":
        text = f"Training has not ended: {done}, and the numbers are those so far. To continue:"
    else:
        text = "Training has not ended and there is no checkpoint yet, so that there is nothing to measure. To train:"
    return Notice(text, f"equipoise resume {known.command_name}")


def measure(trained: Trained, data: DataSet, machine: Machine, label: str) -> Evaluation:
    """The test split, measured; a terminal sees how far it is."""
    from tqdm import tqdm

    training, shown = trained.recipe.training, sys.stderr.isatty()
    with tqdm(total=len(data.test), desc=f"measuring {label}", unit="sample", disable=not shown, leave=False) as bar:

        def each(done: int) -> None:
            bar.update(done - bar.n)

        size, seed = training.evaluation_batch_size, trained.recipe.seed
        return evaluate(trained.model, trained.task, data.test, trained.setting, machine, size, seed, each)

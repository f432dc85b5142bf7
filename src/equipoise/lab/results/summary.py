"""Everything a report says about a run: its log and result, and its test split evaluated again if possible."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.lab.data import DataSet
from equipoise.lab.recipes.build import trust_words
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.results.trained import Trained, open_trained, progress_bar
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import Evaluation, evaluate, parameter_count
from equipoise.registry import UntrustedName


@dataclass(frozen=True)
class Notice:
    """A highlighted sentence, and a command that helps."""

    text: str
    command: str = ""


@dataclass
class RunSummary:
    """A run's files and measurements; those that need a checkpoint or data are None where it is missing."""

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
    notices: list[Notice] = field(default_factory=list)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "epoch"]

    @property
    def test(self) -> dict[str, Any]:
        """Metrics on the test split: from the end of training or, if it is unfinished, from the evaluation."""
        if self.result is not None:
            return self.result["test"]
        return self.evaluation.record() if self.evaluation is not None else {}

    @property
    def test_metrics(self) -> dict[str, float | None]:
        return {name: value for name, value in self.test.items() if name != "solver"}

    @property
    def weights(self) -> str:
        """The weights that the test metrics belong to: "best" or "last"."""
        if self.result is not None:
            return self.result["weights"]
        return self.trained.file.stem if self.trained is not None else ""

    @property
    def best(self) -> dict[str, Any] | None:
        """The best validation metric so far, with its epoch."""
        if self.result is not None or self.trained is None:
            return (self.result or {}).get("best")
        metric = self.trained.task.best_metric
        measured = [
            {"metric": metric, "value": value, "epoch": record["epoch"]}
            for record in self.epochs
            if (value := record.get("val", {}).get(metric)) is not None
        ]
        choose = max if self.trained.task.best_is_largest else min
        return choose(measured, key=lambda entry: entry["value"], default=None)

    @property
    def parameters(self) -> int | None:
        if self.result is not None:
            return self.result["parameters"]
        return parameter_count(self.trained.model) if self.trained is not None else None

    @property
    def steps(self) -> int | None:
        """The number of training steps so far."""
        return self.records[-1]["step"] if self.records else None

    @property
    def seconds(self) -> float | None:
        """The training time so far."""
        if self.result is not None:
            return self.result["seconds"]
        return self.epochs[-1]["seconds"] if self.epochs else None

    @property
    def command_name(self) -> str:
        """The run's folder on a command line, with the options that trust its modules."""
        return shlex.join([str(self.run.folder), *trust_words(self.run.source)])


def summarize_run(run: Run, label: str, machine: Machine, folders: Sequence[Path]) -> RunSummary:
    """Read a run and evaluate it on its test split; what is missing gets a notice."""
    summary = RunSummary(run, label, run.facts, run.recipe, run.records(), run.result, run.status)
    if summary.result is None:
        summary.notices.append(unfinished(summary))
    if not (run.best.exists() or run.last.exists()):
        return summary
    try:
        trained = summary.trained = open_trained(run, machine)
        data = summary.data = data_of(run, trained.recipe, folders)
    except UntrustedName:
        raise  # the remedy belongs on the command line, not in the page
    except (ValueError, LookupError, OSError, ImportError) as error:
        notice = Notice(f"The model could not be opened, so nothing was evaluated: {error}")
        if summary.trained is not None:
            text = f"The test split could not be evaluated, so its figures are missing: {error} To retry:"
            notice = Notice(text, f"equipoise report {summary.command_name}")
        summary.notices.append(notice)
        return summary
    if data.note:
        summary.notices.append(Notice(f"Data set: {data.note}"))
    size, seed = trained.recipe.training.evaluation_batch_size, trained.recipe.seed
    with progress_bar(f"evaluating {label}", len(data.test)) as bar:
        arguments = trained.model, trained.task, data.test, trained.setting, machine, size, seed
        summary.evaluation = evaluate(*arguments, each=lambda done: bar.update(done - bar.n))
    return summary


def unfinished(summary: RunSummary) -> Notice:
    """Return a notice that says how far training is, and how to continue."""
    total = sum(phase.epochs for phase in summary.recipe.phases)
    done = f"{len(summary.epochs)} of {total} epochs"
    if summary.status == "running":
        command = f"equipoise report {summary.command_name}"
        return Notice(f"Training is in progress: {done} are done. To update this page later:", command)
    text = "Training has not started: there is no checkpoint yet, so nothing was evaluated. To train:"
    if summary.status == "interrupted":
        text = f"Training is unfinished: {done} are done, and results so far are shown. To continue:"
    return Notice(text, f"equipoise resume {summary.command_name}")

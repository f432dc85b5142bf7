"""Everything a report says about a run: its log and result, and its test split evaluated again if possible."""

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
from equipoise.lab.trust import UntrustedName


@dataclass(frozen=True)
class Notice:
    """A highlighted sentence, and a command that helps."""

    text: str
    command: str = ""


@dataclass
class RunSummary:
    """A run's files and measurements; entries of ``result`` may be missing while the run is not ``finished``."""

    run: Run
    label: str
    facts: dict[str, Any]
    recipe: Recipe
    records: list[dict[str, Any]]
    status: str
    finished: bool
    result: dict[str, Any]
    trained: Trained | None = None
    data: DataSet | None = None
    evaluation: Evaluation | None = None
    notices: list[Notice] = field(default_factory=list)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "epoch"]

    @property
    def solver(self) -> dict[str, Any]:
        """Solver statistics of the test split, keyed by direction."""
        return self.result.get("test", {}).get("solver", {})

    @property
    def test_metrics(self) -> dict[str, float | None]:
        return {name: value for name, value in self.result.get("test", {}).items() if name != "solver"}

    @property
    def command_name(self) -> str:
        """The run's folder on a command line, with the options that trust its modules."""
        return shlex.join([str(self.run.folder), *trust_words(self.run.source)])


def summarize_run(run: Run, label: str, machine: Machine, folders: Sequence[Path]) -> RunSummary:
    """Read a run and evaluate it on its test split; what is missing gets a notice."""
    result, records = run.result, run.records()
    finished = result is not None
    summary = RunSummary(run, label, run.facts, run.recipe, records, run.status, finished, result or {})
    if run.best.exists() or run.last.exists():
        measure(summary, machine, folders)
    if not finished:
        summary.notices.insert(0, unfinished(summary))
        summary.result = result_so_far(summary)
    return summary


def measure(summary: RunSummary, machine: Machine, folders: Sequence[Path]) -> None:
    """Open the model and data of a run, and evaluate its test split."""
    try:
        trained = summary.trained = open_trained(summary.run, machine)
        data = summary.data = data_of(summary.run, trained.recipe, folders)
    except UntrustedName:
        raise  # the remedy belongs on the command line, not in the page
    except (ValueError, LookupError, OSError, ImportError) as error:
        notice = Notice(f"The model could not be opened, so nothing was evaluated: {error}")
        if summary.trained is not None:
            text = f"The test split could not be evaluated, so its figures are missing: {error} To retry:"
            notice = Notice(text, f"equipoise report {summary.command_name}")
        summary.notices.append(notice)
        return
    if data.note:
        summary.notices.append(Notice(f"Data set: {data.note}"))
    size, seed = trained.recipe.training.evaluation_batch_size, trained.recipe.seed
    with progress_bar(f"evaluating {summary.label}", len(data.test)) as bar:
        arguments = trained.model, trained.task, data.test, trained.setting, machine, size, seed
        summary.evaluation = evaluate(*arguments, each=lambda done: bar.update(done - bar.n))


def result_so_far(summary: RunSummary) -> dict[str, Any]:
    """Return the entries of result.json that are known of an unfinished run."""
    result: dict[str, Any] = {}
    if summary.epochs:
        result |= {"seconds": summary.epochs[-1]["seconds"], "steps": summary.records[-1]["step"]}
    if summary.evaluation is not None:
        result["test"] = summary.evaluation.record()
    if (trained := summary.trained) is not None:
        result |= {"weights": trained.file.stem, "parameters": parameter_count(trained.model)}
        metric, choose = trained.task.best_metric, max if trained.task.best_is_largest else min
        values = [(record.get("val", {}).get(metric), record["epoch"]) for record in summary.epochs]
        if measured := [(value, epoch) for value, epoch in values if value is not None]:
            value, epoch = choose(measured, key=lambda entry: entry[0])
            result["best"] = {"metric": metric, "value": value, "epoch": epoch}
    return result


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

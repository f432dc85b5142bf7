"""Training a recipe from the outside: its folder, its seeds, its result, its report."""

from __future__ import annotations

import copy
import shutil
import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.files import read_json, write_json
from equipoise.lab.recipes.build import limits, require_trust, trust_words
from equipoise.lab.recipes.recipe import SAVED, Recipe, Source, saved_source
from equipoise.lab.runs.folder import MACHINE, Run, RunError, command, create, new_folder, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.trainer import Interrupted, StopRequest, train
from equipoise.registry import NOTHING, Trust


class Stopped(Exception):
    """Training was asked to stop; ``resume`` are the words of the command that continues it."""

    def __init__(self, folder: Path, step: int, number: int, again: Sequence[str]):
        super().__init__(f"stopped at step {step}")
        self.resume = ["equipoise", "resume", str(folder), *again]
        self.step, self.number = step, number


def train_recipe(
    source: Source, parent: Path, machine: Machine, folders: Sequence[Path] = (), report: bool = False
) -> Path:
    """Train a recipe in a new folder, once for every seed; returns the folder."""
    recipe: Recipe = source.read(Recipe)
    folder = machine.share(new_folder(parent, source.name) if machine.leads else None)
    if recipe.seeds == 1:
        if machine.leads:
            create(folder, source, **described(machine, folders))
    elif machine.leads:
        tables = {"recipe": source.name, "folder": source.folder, "tables": source.tables, "command": command()}
        write_json(folder / "sweep.json", {**tables, "machine": described(machine, folders)}, exact=True)
    machine.wait()
    try:
        resume_folder(folder, machine, folders, report, source, source.where.trust)
    except Exception:
        if machine.leads and not any(log.stat().st_size for log in folder.rglob("log.jsonl")):  # nothing was trained
            shutil.rmtree(folder)
        raise
    return folder


def resume_folder(
    folder: Path,
    machine: Machine,
    folders: Sequence[Path] = (),
    report: bool = False,
    source: Source | None = None,
    trust: Trust = NOTHING,
) -> None:
    """Take a run, or all runs of a sweep, to their end; its files may name code from the modules that are trusted."""
    if (folder / "sweep.json").exists():
        resume_sweep(folder, machine, folders, report, trust)
        return
    run = open_run(folder, trust)
    result = run_to_end(run, folder, machine, folders, source)
    if machine.leads:
        tell_result(run, result)
        if report:
            tell_report([run], machine, folders)


SWEEP = {**SAVED, "machine?": MACHINE}


def resume_sweep(folder: Path, machine: Machine, folders: Sequence[Path], report: bool, trust: Trust) -> None:
    """Train every seed that is not done yet, then tell mean and spread."""
    saved = read_json(folder / "sweep.json", SWEEP)
    source = saved_source(saved, folder / "sweep.json", trust)
    require_trust(source)
    recipe: Recipe = source.read(Recipe)
    limits(recipe, source.where)
    runs, stop = [], StopRequest()
    with stop.listening():
        for seed in range(recipe.seed, recipe.seed + recipe.seeds):
            run = Run(folder / f"seed-{seed}", trust)
            if machine.leads and not (run.folder / "run.json").exists():
                tables = copy.deepcopy(source.tables) | {"seed": seed, "seeds": 1}
                create(run.folder, Source(source.name, tables, source.where, source.folder), **saved.get("machine", {}))
            machine.wait()
            if machine.leads:
                print(f"seed {seed}")
            result = run_to_end(run, folder, machine, folders, stop=stop)
            runs.append(run)
            if machine.sum(torch.tensor(float(stop.signal is not None))):  # the next one must not begin
                raise Stopped(folder, result["steps"], stop.signal or signal.SIGTERM, trust_words(source))
    if machine.leads:
        summary = summarize([run.result or {} for run in runs])
        write_json(folder / "result.json", {"status": "finished", "seeds": len(runs), "test": summary})
        for name, numbers in summary.items():
            print(f"test {name:<13}{numbers['mean']:.4f} +- {numbers['spread']:.4f} over {len(runs)} seeds")
        print(f"sweep             {folder}")
        if report:
            tell_report(runs, machine, folders, folder)


def run_to_end(
    run: Run,
    resumable: Path,
    machine: Machine,
    folders: Sequence[Path],
    source: Source | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a run; a request to stop names the folder to resume."""
    with ExitStack() as held:
        refused = None
        if machine.leads:
            try:
                held.enter_context(run.alone())
            except RunError as error:
                refused = str(error)
        if refused := machine.share(refused):  # all processes end, not only the one that was refused
            raise RunError(refused)
        try:
            return train(run, machine, folders, source, stop)
        except Interrupted as interrupted:
            raise Stopped(resumable, interrupted.step, interrupted.number, trust_words(run.source)) from None


def summarize(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and sample standard deviation of every test metric."""
    metrics = [{k: v for k, v in result.get("test", {}).items() if isinstance(v, int | float)} for result in results]
    names = [name for name in metrics[0] if all(name in numbers for numbers in metrics)] if metrics else []
    values = {name: [numbers[name] for numbers in metrics] for name in names}
    return {
        name: {"mean": statistics.fmean(v), "spread": statistics.stdev(v) if len(v) > 1 else 0.0, "values": v}
        for name, v in values.items()
    }


def described(machine: Machine, folders: Sequence[Path]) -> dict[str, Any]:
    """What a run remembers of where it was begun; resumed with other threads it is the same only to rounding."""
    return {
        "device": str(machine.device),
        "processes": machine.world,
        "threads": torch.get_num_threads(),
        "data": [str(folder.resolve()) for folder in folders],
        "begun_in": str(Path.cwd()),
    }


def threads_of(folder: Path) -> int | None:
    """The threads a run or sweep was begun with."""
    files = [folder / name for name in ("run.json", "sweep.json") if (folder / name).is_file()]
    return read_json(files[0], {"machine?": MACHINE}).get("machine", {}).get("threads") if files else None


def tell_result(run: Run, result: dict[str, Any]) -> None:
    """The numbers people want, and where the rest is."""
    for name, value in result["test"].items():
        if isinstance(value, int | float):
            print(f"{'test ' + name:<17} " + (f"{value:.2%}" if "accuracy" in name else f"{value:.4g}"))
    for direction, numbers in result["test"].get("solver", {}).items():
        print(f"{direction} solves    {1 - numbers['failed']:.1%} converged, median {numbers['steps']['median']} steps")
    print(f"run               {run.folder}")


def tell_report(runs: list[Run], machine: Machine, folders: Sequence[Path], out: Path | None = None) -> None:
    from equipoise.lab.results.report import write_report

    print(f"report            {write_report(runs, machine, folders, out)}")

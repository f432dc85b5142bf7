"""Sweeps: a recipe trained once for every seed, in one folder."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.files import read_json, write_json
from equipoise.lab.recipes.build import require_trust, trust_words
from equipoise.lab.recipes.reading import SAVED, RecipeFile
from equipoise.lab.runs.folder import MACHINE, Run, command, create, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.trainer import (
    Report,
    Stopped,
    StopRequest,
    described,
    finish_run,
    folder_to_train_in,
    train,
)
from equipoise.lab.trust import NOTHING, Trust

SWEEP = {**SAVED, "machine?": MACHINE}


def train_sweep(
    source: RecipeFile, parent: Path, machine: Machine, folders: Sequence[Path] = (), report: Report | None = None
) -> Path:
    """Train a checked recipe once for every seed, in a new subfolder of ``parent``; return the folder."""
    facts = described(machine, folders)
    with folder_to_train_in(parent, source.name, machine) as folder:
        if machine.leads:
            write_json(folder / "sweep.json", {**source.saved(), "command": command(), "machine": facts}, exact=True)
        machine.wait()
        finish_sweep(folder, source, facts, machine, folders, report)
    return folder


def resume_folder(folder: Path, machine: Machine, folders: Sequence[Path] = (), trust: Trust = NOTHING) -> None:
    """Continue a run, or all runs of a sweep, whose files may name code only from trusted modules."""
    if not (folder / "sweep.json").exists():
        finish_run(open_run(folder, trust), machine, folders)
        return
    saved = read_json(folder / "sweep.json", SWEEP)
    source = RecipeFile.from_saved(saved, folder / "sweep.json", trust)
    require_trust(source)
    finish_sweep(folder, source, saved.get("machine", {}), machine, folders)


def finish_sweep(
    folder: Path,
    source: RecipeFile,
    facts: dict[str, Any],
    machine: Machine,
    folders: Sequence[Path],
    report: Report | None = None,
) -> None:
    """Train every seed to its end, and print mean and standard deviation of the metrics.

    Args:
        facts: description of the machine, for seeds that have not been started.
    """
    recipe, stop = source.recipe, StopRequest()
    runs = [Run(folder / f"seed-{seed}", source.where.trust) for seed in range(recipe.seed, recipe.seed + recipe.seeds)]
    with stop.listening():
        for seed, run in enumerate(runs, recipe.seed):
            if machine.leads and not (run.folder / "run.json").exists():
                tables = {**source.tables, "seed": seed, "seeds": 1}
                create(run.folder, RecipeFile(source.name, tables, source.where, source.folder), **facts)
            machine.wait()
            if machine.leads:
                print(f"seed {seed}")
            try:
                result = train(run, machine, folders, stop=stop)
            except Stopped as stopped:
                raise Stopped(folder, stopped.step, stopped.number, trust_words(source)) from None
            if machine.sum(torch.tensor(float(stop.signal is not None))):  # do not start the next one
                raise Stopped(folder, result["steps"], stop.signal, trust_words(source))
    if not machine.leads:
        return
    summary = summarize([run.result or {} for run in runs])
    write_json(folder / "result.json", {"status": "finished", "seeds": len(runs), "test": summary})
    for name, numbers in summary.items():
        print(f"test {name:<13}{numbers['mean']:.4f} +- {numbers['spread']:.4f} over {len(runs)} seeds")
    print(f"sweep             {folder}")
    if report:
        report(runs, folder)


def summarize(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean and sample standard deviation of every test metric that all results have."""
    metrics = [{k: v for k, v in result.get("test", {}).items() if isinstance(v, int | float)} for result in results]
    names = [name for name in metrics[0] if all(name in numbers for numbers in metrics)] if metrics else []
    values = {name: [numbers[name] for numbers in metrics] for name in names}
    return {
        name: {"mean": statistics.fmean(v), "spread": statistics.stdev(v) if len(v) > 1 else 0.0, "values": v}
        for name, v in values.items()
    }


def threads_of(folder: Path) -> int | None:
    """Return the number of threads that a run or sweep was started with."""
    files = [folder / name for name in ("run.json", "sweep.json") if (folder / name).is_file()]
    return read_json(files[0], {"machine?": MACHINE}).get("machine", {}).get("threads") if files else None

"""Train a recipe in a folder: one run, or a sweep with one run per seed."""

import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.files import read_json, write_json
from equipoise.lab.format import format_metric
from equipoise.lab.recipes.build import require_trust, trust_words
from equipoise.lab.recipes.reading import SAVED, RecipeFile
from equipoise.lab.runs.folder import MACHINE, Run, RunError, command, create, new_folder, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.trainer import Stopped, StopRequest, train
from equipoise.lab.trust import NOTHING, Trust

SWEEP = {**SAVED, "machine?": MACHINE}
Report = Callable[[list[Run], Path | None], object]  # writes a report on runs; into the run's own folder for None


def train_recipe(
    source: RecipeFile, parent: Path, machine: Machine, folders: Sequence[Path] = (), report: Report | None = None
) -> Path:
    """Train a checked recipe in a new subfolder of ``parent``, once for every seed; return the folder."""
    sweep = source.recipe.seeds > 1
    folder = machine.share(new_folder(parent, source.name) if machine.leads else None)
    facts = described(machine, folders)
    if machine.leads and sweep:
        content = {**source.saved(), "command": command(), "machine": facts}
        write_json(folder / "sweep.json", content, exact=True)
    elif machine.leads:
        create(folder, source, **facts)
    machine.wait()
    try:
        if sweep:
            finish_sweep(folder, source, facts, machine, folders, report)
        else:
            finish_run(Run(folder, source.where.trust), machine, folders, source, report)
    except Exception:
        if machine.leads and not any(log.stat().st_size for log in folder.rglob("log.jsonl")):  # nothing was trained
            shutil.rmtree(folder)
        raise
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


def finish_run(
    run: Run, machine: Machine, folders: Sequence[Path], source: RecipeFile | None = None, report: Report | None = None
) -> None:
    """Train a run to its end, and print its result."""
    result = run_to_end(run, machine, folders, source)
    if not machine.leads:
        return
    for name, value in result["test"].items():
        if isinstance(value, int | float):
            print(f"{'test ' + name:<17} {format_metric(name, value)}")
    for direction, numbers in result["test"].get("solver", {}).items():
        print(f"{direction} solves    {1 - numbers['failed']:.1%} converged, median {numbers['steps']['median']} steps")
    print(f"run               {run.folder}")
    if report:
        report([run], None)


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
                result = run_to_end(run, machine, folders, stop=stop)
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


def run_to_end(
    run: Run,
    machine: Machine,
    folders: Sequence[Path],
    source: RecipeFile | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a run to its end, locked against other processes; see :func:`equipoise.lab.training.trainer.train`."""
    with ExitStack() as lock:
        refusal = ""
        if machine.leads:
            try:
                lock.enter_context(run.alone())
            except RunError as error:
                refusal = str(error)
        if refusal := machine.share(refusal):  # all processes end, not only the leading one
            raise RunError(refusal)
        return train(run, machine, folders, source, stop)


def summarize(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean and sample standard deviation of every test metric that all results have."""
    metrics = [{k: v for k, v in result.get("test", {}).items() if isinstance(v, int | float)} for result in results]
    names = [name for name in metrics[0] if all(name in numbers for numbers in metrics)] if metrics else []
    values = {name: [numbers[name] for numbers in metrics] for name in names}
    return {
        name: {"mean": statistics.fmean(v), "spread": statistics.stdev(v) if len(v) > 1 else 0.0, "values": v}
        for name, v in values.items()
    }


def described(machine: Machine, folders: Sequence[Path]) -> dict[str, Any]:
    """Describe the machine for a run; with another number of threads, results agree only up to rounding."""
    return {
        "device": str(machine.device),
        "processes": machine.world,
        "threads": torch.get_num_threads(),
        "data": [str(folder.resolve()) for folder in folders],
        "begun_in": str(Path.cwd()),
    }


def threads_of(folder: Path) -> int | None:
    """Return the number of threads that a run or sweep was started with."""
    files = [folder / name for name in ("run.json", "sweep.json") if (folder / name).is_file()]
    return read_json(files[0], {"machine?": MACHINE}).get("machine", {}).get("threads") if files else None

"""Run folders: a fixed layout, never overwritten.

    runs/core-digits-001/
        run.json                     the recipe with all changes, the command, versions, the machine
        log.jsonl                    a line every few steps and one per epoch
        log.damaged                  lines of the log that could not be read when the run was resumed, as they were
        checkpoints/last.safetensors to continue from
        checkpoints/best.safetensors the best weights by the validation metric
        checkpoints/epoch-0005.safetensors  weights after an epoch, where the recipe keeps them
        result.json                  written when training has ended
        report.html, report.md       written by `equipoise report`
        tensorboard/                 when tensorboard is installed

A sweep over seeds is a folder with ``sweep.json`` and one such folder per seed, ``seed-0``, ``seed-1``, ...
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equipoise.lab.data.files.places import search_path
from equipoise.lab.files import NUMBER, misfit, parse, read_json, write_bytes, write_json
from equipoise.lab.recipes.recipe import SAVED, Recipe, Source, saved_source
from equipoise.registry import NOTHING, Trust

# The shapes of what a run writes; see equipoise.lab.files.misfit.
MACHINE = {"data?": [str], "begun_in?": str, "threads?": (int, type(None))}
RUN = {**SAVED, "machine": MACHINE, "command?": str, "started?": str, "versions?": dict}
MEASURED = (*NUMBER, type(None))  # None where a number was not finite
SOLVER = {
    "samples": int,
    "failed": NUMBER,
    "results": {str: int},
    "steps": {"median": int, "90%": int, "most": int},
    "residual": {"median": MEASURED, "worst": MEASURED},
}
METRICS = {"solver?": {str: SOLVER}, str: (*MEASURED, bool, str)}
BEST = {"metric": str, "value": NUMBER, "epoch": int, "phase": int}
RESULT = {
    "status": str,
    "test": METRICS,
    "test_of_last?": METRICS,
    "weights": str,
    "best?": BEST,
    "parameters": int,
    "steps": int,
    "seconds": NUMBER,
}
LINE = {"kind": str, "step": int}  # of the log
EPOCH = {**LINE, "epoch": int, "phase": int, "seconds": NUMBER, "failed_steps": int} | {
    f"{split}?": METRICS for split in ("train", "val", "test")
}
STEP = {
    **LINE,
    "loss?": MEASURED,
    "lr?": MEASURED,
    "gradient_norm?": MEASURED,
    "steps": {str: int},
    "residual": {str: MEASURED},
    "failed_samples": int,
}


class RunError(ValueError):
    """A folder is not a run, or not in a state for what was asked."""


@dataclass(frozen=True)
class Run:
    """A run's folder, and which modules outside the package its files may name."""

    folder: Path
    trust: Trust = NOTHING

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.safetensors"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / "best.safetensors"

    def epoch(self, number: int) -> Path:
        return self.folder / "checkpoints" / f"epoch-{number:04d}.safetensors"

    def kept(self) -> list[tuple[int, Path]]:
        """The epochs whose weights were kept, and where they are."""
        return [
            (int(path.stem.removeprefix("epoch-")), path)
            for path in sorted(self.last.parent.glob("epoch-*.safetensors"))
        ]

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says."""
        return read_json(self.folder / "run.json", RUN)

    @property
    def source(self) -> Source:
        """The recipe as it was when the run was made, all changes included."""
        return saved_source(self.facts, self.folder / "run.json", self.trust)

    @property
    def recipe(self) -> Recipe:
        return self.source.read(Recipe)

    @property
    def result(self) -> dict[str, Any] | None:
        """How training ended; None while it has not."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        return read_json(path, RESULT if (self.folder / "run.json").exists() else {"status": str})  # or of a sweep

    def data_folders(self, given: Sequence[Path]) -> list[Path]:
        """Where to look for data: as always, first in the folders given now, then in those given when it was begun.

        The folder in which it was begun comes last, as the current folder does when a run is begun.
        """
        machine = self.facts["machine"]
        begun = [Path(machine["begun_in"])] if "begun_in" in machine else []
        return [*search_path([*given, *map(Path, machine.get("data", []))], current=False), *begun]

    def records(self) -> list[dict[str, Any]]:
        """The lines of the log that can be read."""
        return [record for _, record in self.lines() if record is not None]

    def lines(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        """The lines of the log, each with what it says, or None if it is damaged or cut short."""
        if not self.log.exists():
            return []
        return [(line, read_record(line)) for line in self.log.read_bytes().split(b"\n") if line.strip()]

    def epochs(self) -> list[dict[str, Any]]:
        """The log's line of every epoch."""
        return [record for record in self.records() if record["kind"] == "epoch"]

    def trim(self, step: int, epochs: int) -> int:
        """Leave out what was logged after a checkpoint, which a resumed run writes again, and files cut short.

        Lines that cannot be read are set aside in ``log.damaged``, as they are; returns their number.
        """
        lines = self.lines()
        damaged = b"".join(line + b"\n" for line, record in lines if record is None)
        if damaged:
            aside = self.folder / "log.damaged"
            before = aside.read_bytes() if aside.exists() else b""
            if not before.endswith(damaged):  # else they were set aside by a process that was killed just then
                write_bytes(aside, before + damaged)
        kept = [
            line
            for line, record in lines
            if record and record["step"] <= step and (record["kind"] != "epoch" or record["epoch"] <= epochs)
        ]
        write_bytes(self.log, b"".join(line + b"\n" for line in kept))
        for part in self.folder.rglob(".*.part"):
            part.unlink(missing_ok=True)
        return sum(record is None for _, record in lines)

    @property
    def status(self) -> str:
        if (result := self.result) is not None:
            return result["status"]
        return "running" if self.in_use() else "interrupted" if self.last.exists() else "not started"

    def in_use(self) -> bool:
        """Whether a process is at work on it. Writes nothing: the run may be somebody else's."""
        import fcntl

        try:
            with open(self.folder / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the run for this process; the lock goes when the process does, however it ends."""
        import fcntl

        with open(self.folder / ".lock", "a") as lock:  # never emptied: it might be a link to something else
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(
                    f"{self.folder} is being trained by another process; wait for it, or stop it first."
                ) from None
            yield


def read_record(line: bytes) -> dict[str, Any] | None:
    """What a line of the log says; None if it cannot be read, or is not a line that a run writes."""
    try:
        record = parse(line)
    except ValueError:
        return None
    if misfit(record, LINE):
        return None
    return None if misfit(record, {"epoch": EPOCH, "step": STEP}.get(record["kind"], LINE)) else record


def new_folder(parent: Path, name: str) -> Path:
    """The next free folder ``name-001``, ``name-002``, ..., made here and now: two processes never get the same."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = name.replace("/", "-")
    number = 1 + max(
        [0, *(int(p.name[len(stem) + 1 :]) for p in parent.glob(f"{stem}-*") if p.name[len(stem) + 1 :].isdecimal())]
    )
    while True:
        try:
            (folder := parent / f"{stem}-{number:03d}").mkdir()
            return folder
        except FileExistsError:
            number += 1


def create(folder: Path, source: Source, **machine: Any) -> Run:
    """Write run.json into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").exists():
        raise RunError(f"{folder} is a run already, and runs are never overwritten: equipoise resume {folder}.")
    write_json(
        folder / "run.json",
        {
            "recipe": source.name,
            "folder": source.folder,
            "tables": source.tables,
            "command": command(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "machine": machine,
        },
        exact=True,  # `schedule.end = inf` is a sensible thing to write
    )
    return Run(folder, source.where.trust)


def open_run(path: str | Path, trust: str | Sequence[str] | Trust = ()) -> Run:
    """The run in a folder; ``trust`` names modules outside the package that its files may name."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        hint = (
            "it is a sweep; name one of its runs, such as seed-0"
            if (folder / "sweep.json").exists()
            else "it has no run.json"
        )
        what = f"{folder} is not a run: {hint}" if folder.is_dir() else f"there is no folder {folder}"
        raise RunError(f"{what}. `equipoise runs` lists runs.")
    return Run(folder, Trust.of(trust))


def list_runs(parent: Path) -> list[Run]:
    """Every run under a folder, sweeps' runs included, in the order of their names."""
    return [Run(path.parent) for path in sorted(parent.glob("**/run.json"))] if parent.is_dir() else []


def command() -> str:
    """The command line as it was typed."""
    words = sys.argv[1:]
    return shlex.join(["equipoise", *words])


def versions() -> dict[str, str]:
    """Of everything the numbers may depend on."""
    import torch

    import equipoise

    return {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }

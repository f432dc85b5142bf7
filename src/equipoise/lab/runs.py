"""Run folders: a fixed layout, never overwritten.

    runs/core-digits-001/
        run.json                     the recipe with all changes, the command, versions, the machine
        log.jsonl                    a line every few steps and one per epoch
        checkpoints/last.safetensors to continue from
        checkpoints/best.safetensors the best weights by the validation metric
        checkpoints/epoch-0005.safetensors  weights after an epoch, where the recipe keeps them
        result.json                  written when training has ended
        report.html, report.md       written by `equipoise report`
        tensorboard/                 when tensorboard is installed

A sweep over seeds is a folder with ``sweep.json`` and one such folder per seed, ``seed-0``, ``seed-1``, ...
"""

from __future__ import annotations

import json
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

from equipoise.lab.data.places import search_path
from equipoise.lab.files import read_json, write_json, write_text
from equipoise.lab.recipes import Recipe, Source, Where


class RunError(ValueError):
    """A folder is not a run, or not in a state for what was asked."""


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

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
        facts = read_json(self.folder / "run.json")
        if missing := [name for name in ("recipe", "tables", "folder", "machine") if name not in facts]:
            raise RunError(f"{self.folder / 'run.json'} has no {', '.join(missing)}: it is not of a run, or damaged.")
        return facts

    @property
    def source(self) -> Source:
        """The recipe as it was when the run was made, all changes included."""
        facts = self.facts
        return Source(facts["recipe"], facts["tables"], Where(str(self.folder / "run.json")), facts["folder"])

    @property
    def recipe(self) -> Recipe:
        return self.source.read(Recipe)

    @property
    def result(self) -> dict[str, Any] | None:
        """How training ended; None while it has not."""
        path = self.folder / "result.json"
        return read_json(path) if path.exists() else None

    def data_folders(self, given: Sequence[Path]) -> list[Path]:
        """Where to look for data: as always, first in the folders given now, then in those given when it was begun.

        The folder in which it was begun comes last, as the current folder does when a run is begun.
        """
        machine = self.facts["machine"]
        begun = [Path(machine["begun_in"])] if "begun_in" in machine else []
        return [*search_path([*given, *map(Path, machine.get("data", []))], current=False), *begun]

    def records(self) -> list[dict[str, Any]]:
        """The lines of the log; a last line cut short by a crash is left out."""
        if not self.log.exists():
            return []
        records = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def epochs(self) -> list[dict[str, Any]]:
        """The log's line of every epoch."""
        return [record for record in self.records() if record["kind"] == "epoch"]

    def trim(self, step: int, epochs: int) -> None:
        """Leave out what was logged after a checkpoint, which a resumed run writes again, and files cut short."""
        kept = [r for r in self.records() if r["step"] <= step and (r["kind"] != "epoch" or r["epoch"] <= epochs)]
        write_text(self.log, "".join(json.dumps(record) + "\n" for record in kept))
        for part in self.folder.rglob(".*.part"):
            part.unlink(missing_ok=True)

    @property
    def status(self) -> str:
        if self.result is not None:
            return self.result["status"]
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

        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(
                    f"{self.folder} is being trained by another process; wait for it, or stop it first."
                ) from None
            yield


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
    return Run(folder)


def open_run(path: str | Path) -> Run:
    """The run in a folder."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        hint = (
            "it is a sweep; name one of its runs, such as seed-0"
            if (folder / "sweep.json").exists()
            else "it has no run.json"
        )
        what = f"{folder} is not a run: {hint}" if folder.is_dir() else f"there is no folder {folder}"
        raise RunError(f"{what}. `equipoise runs` lists runs.")
    return Run(folder)


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

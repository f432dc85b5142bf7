"""Run folders: a fixed layout, never overwritten.

    runs/core-digits-001/
        run.json                     the recipe with all changes, the command, versions, the machine, digests of code
        log.jsonl                    one line every few steps and one per epoch
        log.damaged                  unreadable lines of the log, moved here unchanged when the run was resumed
        checkpoints/last.safetensors checkpoint to continue from
        checkpoints/best.safetensors best weights by the validation metric
        checkpoints/epoch-0005.safetensors  weights after an epoch, if the recipe keeps them
        result.json                  test metrics and their origin, written at the end of training
        report.html, report.md       written by `equipoise report`
        tensorboard/                 if tensorboard is installed

A sweep over seeds is a folder with ``sweep.json`` and one such folder per seed, ``seed-0``, ``seed-1``, ...
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.lab.data.files.places import search_path
from equipoise.lab.files import NUMBER, WriteError, finite, misfit, parse, read_json, write_bytes, write_json
from equipoise.lab.recipes.build import PACKAGE, source_digests
from equipoise.lab.recipes.reading import SAVED, RecipeFile
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs import checkpoints, shipped
from equipoise.lab.runs.checkpoints import BEST
from equipoise.lab.trust import NOTHING, Trust
from equipoise.options import similar

CHANGED = "changed while training"  # in place of a digest

# The shapes of a run's files; see equipoise.lab.files.misfit.
MACHINE = {"data?": [str], "begun_in?": str, "threads?": (int, type(None))}
RUN = {**SAVED, "machine": MACHINE, "command?": str, "started?": str, "versions?": dict, "sources?": {str: str}}
MEASURED = (*NUMBER, type(None))  # None stands for a number that was not finite
STEPS, RESIDUAL = {"median": int, "90%": int, "most": int}, {"median": MEASURED, "worst": MEASURED}
SOLVER = {"samples": int, "failed": NUMBER, "results": {str: int}, "steps": STEPS, "residual": RESIDUAL}
METRICS = {"solver?": {str: SOLVER}, str: (*MEASURED, bool, str)}
RESULT = {"status": str, "test": METRICS, "weights": str, "parameters": int, "steps": int, "seconds": NUMBER}
# The origin of a result, which results of earlier versions lack.
ORIGIN = {"recipe": str, "tables": dict, "command": str, "started": str, "sources": {str: str}}
ORIGIN |= {"versions": {str: (str, type(None))}, "machine": {str: (str, int, type(None))}}
RESULT |= {"test_of_last?": METRICS, "best?": BEST, "epochs?": int, "failed_steps?": int, "origin?": ORIGIN}
LINE = {"kind": str, "step": int}  # of log.jsonl
EPOCH = {**LINE, "epoch": int, "phase": int, "seconds": NUMBER, "failed_steps": int, "peak_memory?": int} | {
    f"{split}?": METRICS for split in ("train", "val", "test")
}
STEP = {**LINE, "steps": {str: int}, "residual": {str: MEASURED}, "failed_samples": int} | {
    f"{name}?": MEASURED for name in ("loss", "lr", "gradient_norm")
}


class RunError(ValueError):
    """A folder is not a run, or not in a state for what was requested."""


@dataclass(frozen=True)
class Run:
    """A run's folder, or weights without one.

    Args:
        folder: folder of the run; for weights without a run, the folder that commands write to.
        trust: modules outside the package that its files may name.
        file: file of the weights, if they have no run.
        name: what messages call it, if not by its file or folder.
    """

    folder: Path
    trust: Trust = NOTHING
    file: Path | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.name or str(self.file or self.folder)

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.safetensors"

    @property
    def best(self) -> Path:
        return self.file or self.folder / "checkpoints" / "best.safetensors"

    def epoch(self, number: int) -> Path:
        return self.folder / "checkpoints" / f"epoch-{number:04d}.safetensors"

    def kept(self) -> list[tuple[int, Path]]:
        """Return the epochs whose weights were kept, with their files."""
        files = sorted(self.last.parent.glob("epoch-*.safetensors"))
        return [(int(path.stem.removeprefix("epoch-")), path) for path in files]

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def facts(self) -> dict[str, Any]:
        """The content of run.json, or what a file of weights says of itself."""
        if self.file is not None:
            return {**checkpoints.read(self.file)[1], "machine": {}}
        return read_json(self.folder / "run.json", RUN)

    @property
    def origin(self) -> Path:
        """The file that the recipe is read from."""
        return self.file or self.folder / "run.json"

    @property
    def source(self) -> RecipeFile:
        """The recipe as it was when the run was created, including all changes."""
        return RecipeFile.from_saved(self.facts, self.origin, self.trust)

    @property
    def recipe(self) -> Recipe:
        return self.source.recipe

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None until training has ended, and for weights without a run."""
        path = self.folder / "result.json"
        if self.file is not None or not path.exists():
            return None
        return read_json(path, RESULT if (self.folder / "run.json").exists() else {"status": str})  # or of a sweep

    def provenance(self) -> dict[str, Any] | None:
        """Return where a result of this run comes from, without the places of this machine; None if run.json lacks it.

        A file whose code has changed since the start of training is marked.
        """
        facts = self.facts
        tables = {key: value for key, value in facts["tables"].items() if key not in ("budget", "paper")}
        machine = {key: value for key, value in facts["machine"].items() if key not in ("data", "begun_in")}
        origin = {key: facts.get(key) for key in ("recipe", "command", "started", "versions")}
        origin |= {"sources": still(facts.get("sources", {}), source_digests(facts["tables"]))}
        origin |= {"machine": machine, "tables": tables}
        return None if "sources" not in facts or misfit(origin, ORIGIN) else origin

    def data_folders(self, given: Sequence[Path]) -> list[Path]:
        """Return where to look for data: the folders given now, those given at the start, then the usual ones.

        The folder in which the run was started comes last, like the current folder when a run is started.
        """
        machine = self.facts["machine"]
        start = [Path(machine["begun_in"])] if "begun_in" in machine else []
        return [*search_path([*given, *map(Path, machine.get("data", []))], current=False), *start]

    def lines(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        """Return the lines of the log with their content, None for a line that is damaged or incomplete."""
        content = self.log.read_bytes() if self.file is None and self.log.exists() else b""
        return [(line, read_record(line)) for line in content.split(b"\n") if line.strip()]

    def records(self) -> list[dict[str, Any]]:
        """Return the readable lines of the log."""
        return [record for _, record in self.lines() if record is not None]

    def epochs(self) -> list[dict[str, Any]]:
        """Return the log's record of every epoch."""
        return [record for record in self.records() if record["kind"] == "epoch"]

    def trim(self, step: int, epochs: int) -> int:
        """Remove what was logged after a checkpoint, which a resumed run logs again, and unfinished files.

        Unreadable lines are moved to ``log.damaged``, unchanged; returns their number.
        """

        def early(record: dict[str, Any]) -> bool:
            return record["step"] <= step and (record["kind"] != "epoch" or record["epoch"] <= epochs)

        lines = self.lines()
        damaged = [line + b"\n" for line, record in lines if record is None]
        if damaged:
            aside = self.folder / "log.damaged"
            before = aside.read_bytes() if aside.exists() else b""
            if not before.endswith(
                b"".join(damaged)
            ):  # otherwise a process that was killed at this point has already moved them
                write_bytes(aside, before + b"".join(damaged))
        write_bytes(self.log, b"".join(line + b"\n" for line, record in lines if record and early(record)))
        for part in self.folder.rglob(".*.part"):
            part.unlink(missing_ok=True)
        return len(damaged)

    @property
    def status(self) -> str:
        if (result := self.result) is not None:
            return result["status"]
        return "running" if self.in_use() else "interrupted" if self.last.exists() else "not started"

    def in_use(self) -> bool:
        """Return whether a process is training the run. Writes nothing: the run may belong to somebody else."""
        import fcntl

        try:
            with open(self.folder / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except OSError as error:
            return isinstance(error, BlockingIOError)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the run for this process; the lock ends with the process, however it ends."""
        import fcntl

        if self.file is not None:
            raise RunError(
                f"{self} is weights without the folder of a run, so its training cannot be continued: start a new run "
                f"from it with `equipoise train RECIPE training.init_from={self}`."
            )
        with open(self.folder / ".lock", "a") as lock:  # never truncated: it might be a link to something else
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                other = "is being trained by another process; wait for it, or stop it first."
                raise RunError(f"{self.folder} {other}") from None
            yield


def still(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Return digests from the start of training, marked where they differ at its end."""
    return {path: digest if now.get(path) == digest else CHANGED for path, digest in before.items()}


def read_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the log; return None if it is not one that a run writes."""
    try:
        record = parse(line)
    except ValueError:
        return None
    if misfit(record, LINE):
        return None
    return None if misfit(record, {"epoch": EPOCH, "step": STEP}.get(record["kind"], LINE)) else record


class Log:
    """Write a run's log: JSONL always, TensorBoard if installed, a progress bar on a terminal, else plain lines.

    The bar counts ``samples``, of which ``done`` were trained on before the run was resumed, at step ``step``. Only the
    process that ``leads`` writes.

    Example:
        >>> with Log(run, samples=12 * 55000) as log:
        ...     log.write(kind="step", step=20, loss=0.3)
        ...     log.show("epoch 1/12  accuracy 93.1%")
    """

    def __init__(self, run: Run, samples: int, done: int = 0, step: int = 0, leads: bool = True):
        self.path = run.log
        self.file: Any = None
        self.board: Any = None
        self.bar: Any = None
        if not leads:
            return
        from tqdm import tqdm

        self.file = run.log.open("ab", buffering=0)
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step)
        options = {"unit": " samples", "unit_scale": True, "dynamic_ncols": True, "disable": not sys.stderr.isatty()}
        self.bar = tqdm(total=samples, initial=done, **options)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.file, self.board, self.bar):
            if part is not None:
                part.close()

    def write(self, **record: Any) -> None:
        """Append a line to the log, and its numbers to TensorBoard."""
        if self.file is None:
            return
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        end = self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.file.truncate(end)  # a line is written completely or not at all
            raise WriteError(f"{self.path} could not be written: {error.strerror}.") from error
        if self.board is not None:
            for name, value in flat_numbers(record):
                self.board.add_scalar(name, value, record["step"])

    def advance(self, samples: int, text: str) -> None:
        """Move the bar by a number of samples, and show a text beside it."""
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(samples)

    def show(self, text: str) -> None:
        """Print a line."""
        if self.bar is not None:
            if self.bar.disable:
                print(text, flush=True)
            else:
                self.bar.write(text)


def flat_numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in nested tables with its full name, such as "val/accuracy"."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch", "phase"):
            yield prefix + name, float(value)


def new_folder(parent: Path, name: str) -> Path:
    """Create the next free folder ``name-001``, ``name-002``, ...; two processes never get the same."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = name.replace("/", "-")
    suffixes = [path.name[len(stem) + 1 :] for path in parent.glob(f"{stem}-*")]
    number = 1 + max([0, *(int(suffix) for suffix in suffixes if suffix.isdecimal())])
    while True:
        try:
            (folder := parent / f"{stem}-{number:03d}").mkdir()
            return folder
        except FileExistsError:
            number += 1


@cache
def commit(folder: Path = PACKAGE) -> str | None:
    """Return the commit that a package's folder is checked out from, followed by "-dirty" if a file was changed.

    None if the package does not come from a git checkout, or git is not installed.
    """
    git = ["git", "--no-optional-locks", "-C", str(folder)]

    def ask(*words: str) -> str:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")  # else it is installed inside somebody else's repository
        return ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def create(folder: Path, source: RecipeFile, **machine: Any) -> Run:
    """Write run.json into a new folder."""
    import torch

    import equipoise

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").exists():
        raise RunError(f"{folder} is a run already, and runs are never overwritten: equipoise resume {folder}.")
    versions = {
        "equipoise": equipoise.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    facts = {
        **source.saved(),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "machine": machine,
        "sources": source_digests(source.tables),
    }
    write_json(folder / "run.json", facts, exact=True)  # exact: `schedule.end = inf` is a sensible option
    return Run(folder, source.where.trust)


def open_run(path: str | Path, trust: str | Sequence[str] | Trust = ()) -> Run:
    """Return the run in a folder, or the weights in a file or of a shipped model.

    Args:
        path: name of a shipped model, folder of a run, or ``.safetensors`` file with weights. A string that is the name
            of a shipped model is never a folder: write ``"./name"``, or give a Path.
        trust: modules outside the package that its files may name
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}; it must be the name of a shipped model, a folder or a .safetensors file.")
    trusted = Trust.of(trust)
    names = shipped.list_weights()
    if isinstance(path, str) and path in names:
        return Run(Path(str(path).replace("/", "-")), trusted, shipped.weights_file(str(path)), str(path))
    folder = Path(path)
    if folder.suffix == ".safetensors":
        return Run(folder.with_suffix(""), trusted, folder)
    if not (folder / "run.json").is_file():
        sweep = (folder / "sweep.json").exists()
        hint = "it is a sweep; name one of its runs, such as seed-0" if sweep else "it has no run.json"
        what = f"{folder} is not a run: {hint}" if folder.is_dir() else f"there is no folder {folder}"
        if folder.is_file():
            raise RunError(
                f"{folder} is a file; a run is a folder, and weights are in .safetensors files (`equipoise convert` "
                "writes one)."
            )
        if str(path) in names and not folder.is_dir():
            raise RunError(f"{what}; the shipped model of that name has no folder with its training.")
        near = similar(path, names, cutoff=0.75)[:3] if isinstance(path, str) else []
        if near and not folder.is_dir():
            meant = f"did you mean {' or '.join(map(repr, near))}?"
            raise RunError(f"{what}, nor a shipped model of that name; {meant} `equipoise weights` lists them.")
        raise RunError(f"{what}. `equipoise runs` lists runs.")
    return Run(folder, trusted)


def list_runs(parent: Path) -> list[Run]:
    """Return every run under a folder, including those of sweeps, sorted by name."""
    return [Run(path.parent) for path in sorted(parent.glob("**/run.json"))] if parent.is_dir() else []


def command() -> str:
    """Return the command line of this process."""
    return shlex.join(["equipoise", *sys.argv[1:]])

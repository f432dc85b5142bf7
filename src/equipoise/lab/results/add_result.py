"""Add a finished run, sweep, table or figure to a folder of results: exactly what :mod:`stored` reads, and pictures.

Nothing of the machine's places is copied: paths in commands are shortened to their last part.
"""

import copy
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.lab.files import read_json, whole, write_json
from equipoise.lab.results.reproduce import REQUEST
from equipoise.lab.results.stored import TABLE
from equipoise.lab.runs.folder import RESULT, Run, RunError

LOCAL = ("--runs", "--data", "--device", "--threads", "--run", "--out")  # options of a command that name a place
FLAGS = ("--report", "--traceback")
OWN = ("run.json", "result.json", "sweep.json", "reproduce.json", "table.json", "figure.json")
MOST = 1_000_000  # bytes of a picture


def add_result(folder: Path, name: str, results: Path) -> list[Path]:
    """Copy what a result needs from a finished run, sweep, table or figure; return the files written.

    Args:
        folder: the folder of the run
        name: name of the result, such as "mondeq/mnist-fc"
        results: folder of results
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*(/[a-z0-9][a-z0-9.-]*)+", name):
        raise ValueError(f"--as is {name!r}; it must be a name like mondeq/mnist-fc, of a-z, 0-9, dots and hyphens.")
    if not results.is_dir():
        raise FileNotFoundError(f"there is no folder {results}; run this in a clone, or name the folder with --folder.")
    kinds = {
        "reproduce.json": table_files,
        "figure.json": figure_files,
        "sweep.json": sweep_files,
        "run.json": run_files,
    }
    for marker, files in kinds.items():
        if (folder / marker).is_file():
            written = list(files(folder, results / name))
            if not written:
                raise RunError(f"{folder} has nothing to add: a figure is not drawn yet.")
            return written
    raise RunError(f"{folder} is not the folder of a run, sweep, table or figure: it has no run.json.")


def run_files(folder: Path, stem: Path) -> Iterator[Path]:
    """Write the result and log of a run, and the pictures and numbers beside them."""
    run = Run(folder)
    result = run.result
    if result is None or result["status"] != "finished":
        raise RunError(f"{folder} is {run.status}; only finished runs are added: equipoise resume {folder}.")
    if "origin" not in result:
        raise RunError(f"{folder} does not record where it comes from: an earlier version trained it. Train it again.")
    path = stem.with_name(f"{stem.name}.result.json")
    write_json(path, {**result, "origin": portable(result["origin"])})
    yield path
    yield copied(run.log, stem.with_name(f"{stem.name}.log.jsonl"))
    for file in sorted((*folder.glob("*.png"), *folder.glob("*.json"))):
        if file.name not in OWN and file.stat().st_size <= MOST:
            words = file.name.removeprefix(f"{stem.parent.name}-")  # of a figure drawn with --run
            yield copied(file, stem.with_name(f"{stem.name}-{words}"))


def sweep_files(folder: Path, stem: Path) -> Iterator[Path]:
    for run in sorted(folder.glob("seed-*")):
        yield from run_files(run, stem.with_name(f"{stem.name}.{run.name}"))


def table_files(folder: Path, stem: Path) -> Iterator[Path]:
    """Write a table, and the log of every run."""
    if not (folder / "table.json").is_file():
        raise RunError(f"{folder} has no finished row: equipoise resume {folder}.")
    content = read_json(folder / "table.json", TABLE)
    origins = {place: portable(origin) for place, origin in content.get("origins", {}).items()}
    path = stem.with_name(f"{stem.name}.table.json")
    changes = [portable_word(word) for word in content.get("changes", [])]
    write_json(path, {**content, "changes": changes, "origins": origins})
    yield path
    for log in sorted(folder.glob("row-*/**/log.jsonl")):
        place, seed = log.relative_to(folder).parts[0], log.parent.name
        words = [stem.name, place, *([seed] if seed.startswith("seed-") else []), "log.jsonl"]
        if (log.parent / "result.json").is_file():
            yield copied(log, stem.with_name(".".join(words)))


def figure_files(folder: Path, stem: Path) -> Iterator[Path]:
    """Write a figure's picture, and its numbers with the command and the commit of its first run."""
    asked = read_json(folder / "figure.json", REQUEST)
    budget = ["--budget", asked["budget"]] if asked["budget"] else []
    words = ["equipoise", "figure", asked["name"], *budget, *map(portable_word, asked["changes"])]
    origin: dict[str, Any] = {"command": shlex.join(words)}
    for file in sorted(folder.glob("recipe-*/**/result.json")):
        if "versions" not in origin and (made := read_json(file, RESULT).get("origin")):
            origin["versions"] = made["versions"]
    drawn = folder / f"{asked['name'].replace('/', '-')}.png"
    if drawn.is_file():
        yield copied(drawn, stem.with_name(f"{stem.name}.png"))
    if drawn.with_suffix(".json").is_file():
        path = stem.with_name(f"{stem.name}.json")
        write_json(path, {**read_json(drawn.with_suffix(".json"), {str: object}), "origin": origin})
        yield path


def copied(file: Path, to: Path) -> Path:
    with whole(to) as part:
        shutil.copyfile(file, part)
    return to


def portable(origin: dict[str, Any]) -> dict[str, Any]:
    """Return an origin without places of this machine."""
    made = copy.deepcopy(origin)
    made["command"] = portable_command(made["command"])
    start = made["tables"].get("training", {}).get("init_from")
    if isinstance(start, str):
        made["tables"]["training"]["init_from"] = Path(start).name
    made["recipe"] = Path(made["recipe"]).name if made["recipe"].startswith("/") else made["recipe"]
    return made


def portable_command(command: str) -> str:
    """Return a command without the options that name a place, and with paths shortened to their last part.

    Example:
        >>> portable_command("equipoise train core/mnist --runs /tmp/r training.init_from=/tmp/r/core-mnist-001")
        'equipoise train core/mnist training.init_from=core-mnist-001'
    """
    kept: list[str] = []
    words = iter(shlex.split(command))
    for word in words:
        if word in LOCAL:
            next(words, None)
        elif word not in FLAGS and word.partition("=")[0] not in LOCAL:
            kept.append(portable_word(word))
    return shlex.join(kept)


def portable_word(word: str) -> str:
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if value.startswith(("/", "~", ".")) and "/" in value else word

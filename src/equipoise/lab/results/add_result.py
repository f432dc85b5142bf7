"""Add a finished run, sweep, table or figure to a folder of results: exactly what :mod:`stored` reads, and pictures.

Nothing of the machine's places is copied: paths in commands are shortened to their last part.
"""

import copy
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from equipoise.lab.files import read_json, whole, write_json
from equipoise.lab.results.reproduce import REQUEST
from equipoise.lab.results.stored import TABLE, read_log
from equipoise.lab.runs.folder import RESULT, Run, RunError

LOCAL = ("--runs", "--data", "--device", "--threads", "--run", "--out")  # options of a command that name a place
FLAGS = ("--report", "--traceback")
OWN = ("run.json", "result.json", "sweep.json", "reproduce.json", "table.json", "figure.json")
MOST = 1_000_000  # bytes of a picture

Content = Path | dict[str, Any]  # a file to copy, or JSON
Planned = Iterator[tuple[Path, Content]]  # files to write


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
            planned = dict(files(folder, results / name))  # all of it can be read before anything is written
            if not planned:
                raise RunError(f"{folder} has nothing to add: a figure is not drawn yet.")
            require_no_others(results / name, planned)
            for path, content in planned.items():
                write(path, content)
            return list(planned)
    raise RunError(f"{folder} is not the folder of a run, sweep, table or figure: it has no run.json.")


def require_no_others(stem: Path, planned: Iterable[Path]) -> None:
    """Raise RunError for files of an earlier result of this name that stay, and would be mixed with the new one."""
    kinds = r"(\.row-\d+)?(\.seed-\d+)?\.(result\.json|table\.json|log\.jsonl)"
    named = re.compile(re.escape(stem.name) + kinds)
    files = stem.parent.iterdir() if stem.parent.is_dir() else ()
    if others := sorted(file for file in files if named.fullmatch(file.name) and file not in planned):
        raise RunError(
            f"{', '.join(map(str, others))}: part of an earlier result of this name, which would be mixed with the new "
            "one. Remove what is out of date, or choose another name with --as."
        )


def run_files(folder: Path, stem: Path) -> Planned:
    """Yield the result and log of a run, and the pictures and numbers beside them."""
    run = Run(folder)
    result = run.result
    if result is None or result["status"] != "finished":
        raise RunError(f"{folder} is {run.status}; only finished runs are added: equipoise resume {folder}.")
    if "origin" not in result:
        raise RunError(f"{folder} does not record where it comes from: an earlier version trained it. Train it again.")
    yield stem.with_name(f"{stem.name}.result.json"), {**result, "origin": portable(result["origin"])}
    if run.log.is_file():
        read_log(run.log)  # raises if it is damaged
        yield stem.with_name(f"{stem.name}.log.jsonl"), run.log
    for file in sorted((*folder.glob("*.png"), *folder.glob("*.json"))):
        if file.name not in OWN and file.stat().st_size <= MOST:
            words = file.name.removeprefix(f"{stem.parent.name}-")  # of a figure drawn with --run
            yield stem.with_name(f"{stem.name}-{words}"), file


def sweep_files(folder: Path, stem: Path) -> Planned:
    """Yield the files of every seed of a finished sweep."""
    if not (folder / "result.json").is_file():
        raise RunError(f"{folder} is not finished; only finished sweeps are added: equipoise resume {folder}.")
    runs, seeds = sorted(folder.glob("seed-*")), read_json(folder / "result.json", {"seeds": int})["seeds"]
    if len(runs) != seeds:
        raise RunError(f"{folder} was trained with {seeds} seeds and has {len(runs)}: its folders are not complete.")
    for run in runs:
        yield from run_files(run, stem.with_name(f"{stem.name}.{run.name}"))


def table_files(folder: Path, stem: Path) -> Planned:
    """Yield a table, its picture and the log of every run."""
    if not (folder / "table.json").is_file():
        raise RunError(f"{folder} has no finished row: equipoise resume {folder}.")
    content = read_json(folder / "table.json", TABLE)
    origins = {place: portable(origin) for place, origin in content.get("origins", {}).items()}
    changes = [portable_word(word) for word in content.get("changes", [])]
    yield stem.with_name(f"{stem.name}.table.json"), {**content, "changes": changes, "origins": origins}
    if (folder / "table.png").is_file():
        yield stem.with_name(f"{stem.name}.table.png"), folder / "table.png"
    for log in sorted(folder.glob("row-*/**/log.jsonl")):
        place, seed = log.relative_to(folder).parts[0], log.parent.name
        words = [stem.name, place, *([seed] if seed.startswith("seed-") else []), "log.jsonl"]
        if (log.parent / "result.json").is_file():
            yield stem.with_name(".".join(words)), log


def figure_files(folder: Path, stem: Path) -> Planned:
    """Yield a figure's picture, and its numbers with the command and the commit of its first run."""
    asked = read_json(folder / "figure.json", REQUEST)
    budget = ["--budget", asked["budget"]] if asked["budget"] else []
    words = ["equipoise", "figure", asked["name"], *budget, *map(portable_word, asked["changes"])]
    origin: dict[str, Any] = {"command": shlex.join(words)}
    for file in sorted(folder.glob("recipe-*/**/result.json")):
        if "versions" not in origin and (made := read_json(file, RESULT).get("origin")):
            origin["versions"] = made["versions"]
    drawn = folder / f"{asked['name'].replace('/', '-')}.png"
    if drawn.is_file():
        yield stem.with_name(f"{stem.name}.png"), drawn
    if drawn.with_suffix(".json").is_file():
        numbers = read_json(drawn.with_suffix(".json"), {str: object})
        yield stem.with_name(f"{stem.name}.json"), {**numbers, "origin": origin}


def write(path: Path, content: Content) -> None:
    """Write JSON, or copy a file."""
    if not isinstance(content, Path):
        write_json(path, content)
        return
    with whole(path) as part:
        shutil.copyfile(content, part)


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

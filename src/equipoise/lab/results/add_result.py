"""Add a finished run, sweep, table or figure to a folder of results: exactly what :mod:`stored` reads, and pictures.

Nothing of the machine's places is copied: paths in commands are shortened to their last part.
"""

import copy
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from equipoise.lab.files import read_json, whole, write_json
from equipoise.lab.results.reproduce import REQUEST
from equipoise.lab.results.stored import TABLE, read_log
from equipoise.lab.runs.folder import RESULT, Run, RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCAL = ("--runs", "--data", "--device", "--threads", "--run", "--out")  # options of a command that name a place
FLAGS = ("--report", "--traceback")
OWN = ("run.json", "result.json", "sweep.json", "reproduce.json", "table.json", "figure.json")
MOST = 1_000_000  # bytes of a picture

Content = Union[Path, dict[str, Any], "Figure"]  # a file to copy, JSON, or a picture
Logs = dict[str, dict[Path, Path]]  # files to copy of every training run of a table, by its folder, such as "row-3"
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
            new = {path: content for path, content in planned.items() if path != content}
            for path, content in new.items():
                write(path, content)
            return list(new)
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
    """Yield a table, the log of every run, and their picture.

    Rows that only the stored table of that name has are kept, if both were made by the same command.
    """
    if not (folder / "table.json").is_file():
        raise RunError(f"{folder} has no finished row: equipoise resume {folder}.")
    table = read_json(folder / "table.json", TABLE)
    table["changes"] = [portable_word(word) for word in table.get("changes", [])]
    table["origins"] = {place: portable(origin) for place, origin in table.get("origins", {}).items()}
    logs: Logs = {}
    for log in sorted(folder.glob("row-*/**/log.jsonl")):
        place, seed = log.relative_to(folder).parts[0], log.parent.name
        words = [stem.name, place, *([seed] if seed.startswith("seed-") else []), "log.jsonl"]
        if (log.parent / "result.json").is_file():
            logs.setdefault(place, {})[stem.with_name(".".join(words))] = log
    file = stem.with_name(f"{stem.name}.table.json")
    if file.is_file() and of_one_table(table, stored := read_json(file, TABLE)):
        keep_rows(table, logs, stored, stem)
    yield file, table
    for files in logs.values():
        yield from files.items()
    if picture := picture_of(table, logs):
        yield stem.with_name(f"{stem.name}.table.png"), picture


def of_one_table(table: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Return whether two tables are of the same command, and have the same rows where both have any."""
    if any(stored.get(key) != table.get(key) for key in ("name", "budget", "changes")):
        return False
    places = {(row["label"], row["metric"]): place_of(row) for row in table["rows"]}
    for row in stored["rows"]:
        place = place_of(row)
        known = place if place in places.values() else None
        if not re.fullmatch(r"row-\d+", place) or places.get((row["label"], row["metric"])) != known:
            return False  # an earlier version of the table, whose rows were others
    return True


def keep_rows(table: dict[str, Any], logs: Logs, stored: dict[str, Any], stem: Path) -> None:
    """Add the rows of a stored table that a new one does not have, in the order of their training runs."""
    new = set(map(place_of, table["rows"]))
    kept = [row for row in stored["rows"] if place_of(row) not in new]
    for place in set(map(place_of, kept)):
        logs[place] = {log: log for log in sorted(stem.parent.glob(f"{stem.name}.{place}.*log.jsonl"))}
        table["origins"] |= {key: origin for key, origin in stored.get("origins", {}).items() if key == place}
    table["rows"] = sorted([*table["rows"], *kept], key=lambda row: number_of(place_of(row)))
    table["origins"] = dict(sorted(table["origins"].items(), key=lambda item: number_of(item[0])))


def place_of(row: dict[str, Any]) -> str:
    """Return the folder of the training run of a row, such as "row-3"."""
    return row.get("folder", "").partition("/")[0]


def number_of(place: str) -> int:
    return int(place.removeprefix("row-"))


def picture_of(table: dict[str, Any], logs: Logs) -> "Figure | None":
    """Draw the metric of the rows over epochs and over time, if it was measured after every epoch."""
    from equipoise.lab.results.figures import row_curves

    def epochs(log: Path) -> list[dict[str, Any]]:
        return [record for record in read_log(log) if record["kind"] == "epoch"]

    rows = [(row, list(map(epochs, logs.get(place_of(row), {}).values()))) for row in table["rows"]]
    curves = [(row["label"], row["metric"], seeds) for row, seeds in rows if seeds]
    return row_curves(curves) if curves else None


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
    """Write JSON or a picture, or copy a file."""
    if isinstance(content, dict):
        write_json(path, content)
        return
    with whole(path) as part:
        if isinstance(content, Path):
            shutil.copyfile(content, part)
        else:
            content.savefig(part, format="png", dpi=150)


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

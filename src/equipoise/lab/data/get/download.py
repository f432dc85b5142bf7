"""Data sets are downloaded whole, checked and unpacked, or not at all.

What a run leaves behind when it does not succeed:

- Never a file under its final name that is not the published one, never a folder that is half unpacked, never a
  change to a copy that was there before.
- ``FILE.part`` and ``FILE.part.json`` only where the next run can continue from them: the run was interrupted or
  killed, or the connection was lost, stalled or closed early.
- Nothing at all after everything else: the file is not there, it is not the published one (size, checksum, an unsafe
  or damaged archive), there is no room for it. A folder that was made for it is removed again.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from equipoise.lab.data.get.sources import Source
from equipoise.lab.data.get.transfer import Checksums, DownloadError, Lost, Part, Report, fetch, megabytes
from equipoise.lab.data.get.unpack import ArchiveError, md5, unpack
from equipoise.lab.files import read_json, write_json

if sys.platform != "win32":
    import fcntl

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def get(
    name: str,
    sources: Sequence[Source],
    folder: Path,
    *,
    timeout: float = 30.0,
    progress: bool = True,
    attempts: int = 4,
    pause: float = 1.0,
) -> list[Path]:
    """Have every file of a data set in ``folder / name``; what is already there is not downloaded again.

    Args:
        name: of the set.
        sources: its files.
        folder: of all sets.
        timeout: seconds without a byte before a server counts as stalled.
        progress: show how far it is: a bar on a terminal, else a line when a file begins and one when it is there.
        attempts: how often an address is asked before the next one is.
        pause: seconds before the second attempt; doubled before each further one.

    Returns:
        The files, those of an archive one by one.

    Example:
        >>> get("cifar10", SOURCES["cifar10"], Path("data"))
        [Path('data/cifar10/cifar-10-batches-bin/data_batch_1.bin'), ...]
    """
    if not timeout > 0:
        raise ValueError(f"the timeout is {timeout!r}; it must be a number of seconds above 0.")
    for plain in (name, *(source.file for source in sources)):
        if plain in ("", ".", "..") or re.search(r"[/\\\0]", plain):
            raise ValueError(f"{plain!r} is the name of a set or of its file; it must be a name without a folder.")
    for source in sources:
        if not source.urls or not all(re.match("https?://", url) for url in source.urls):
            raise ValueError(
                f"{source.file} is said to be at {source.urls}; an address begins with http:// or https://."
            )
    target = Path(folder) / name
    there = [already_there(source, target) for source in sources]
    left_over = any(Part(source, target).path.exists() for source in sources)
    if all(there) and not left_over:  # asked before anything is written: a shared copy may be read-only
        if progress:
            say(f"{name}: already there, in {target}")
        return [path for files in there for path in files]
    try:
        with alone(target):
            return [path for source in sources for path in get_file(source, target, timeout, progress, attempts, pause)]
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"{name} cannot be written into {target}: {error.strerror} ({error.filename}); "
            "choose another folder or make room there."
        ) from error


def get_file(source: Source, target: Path, timeout: float, progress: bool, attempts: int, pause: float) -> list[Path]:
    """Have one file of a set, or the files of one archive, in the folder of the set."""
    part = Part(source, target)
    files = already_there(source, target)
    if files:
        part.remove()  # of a run that was killed at its very end
    else:
        with leaving_nothing(source, part), showing(source, progress) as report:
            fetch(source, part, timeout, attempts, pause, report)
            files = put_in_place(source, part, target)
    if progress:
        say(f"{source.file}: {'1 file' if len(files) == 1 else f'{len(files)} files'} in {target}")
    return files


def already_there(source: Source, target: Path) -> list[Path]:
    """The files of the source if all of them are in the folder as published; else none."""
    if not source.unpack:
        path = target / source.file
        right_size = path.is_file() and source.size in (None, path.stat().st_size)
        return [path] if right_size and not Checksums(source).read(path).wrong() else []
    sizes = unpacked_sizes(source, target)
    paths = {name: target / name for name in (sizes or source.contents)}
    if (
        all(path.is_file() for path in paths.values())
        and all(paths[name].stat().st_size == size for name, size in sizes.items())
        and all(md5(target / name) == published.lower() for name, published in source.contents.items())
    ):
        return list(paths.values())
    return []


def put_in_place(source: Source, part: Part, target: Path) -> list[Path]:
    """Give the file that arrived its name, or unpack it; a note of what was unpacked is written last."""
    if source.unpack:
        sizes = unpack(part.path, target, source.contents)
        write_json(note_path(source, target), {"archive": identity(source), "sizes": sizes})
        files = [target / name for name in sizes]
    else:
        files = [part.path.replace(target / source.file)]
    part.remove()
    return files


def unpacked_sizes(source: Source, target: Path) -> dict[str, int]:
    """Sizes by path of the files that an earlier run unpacked from the same archive; empty if none did."""
    try:
        note = read_json(note_path(source, target))
        return note["sizes"] if note["archive"] == identity(source) else {}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return {}


def note_path(source: Source, target: Path) -> Path:
    return target / f".{source.file}.unpacked.json"


def identity(source: Source) -> dict[str, str | int | None]:
    return {"md5": source.md5, "sha256": source.sha256, "size": source.size}


@contextmanager
def leaving_nothing(source: Source, part: Part) -> Iterator[None]:
    """Remove the part after a failure unless it can be continued, and say what failed."""
    try:
        yield
    except BaseException as error:
        origin = part.origin
        interrupted = isinstance(error, Lost) or not isinstance(error, Exception)
        if not (interrupted and part.arrived):
            part.remove()
        url = origin.url or source.urls[0]
        if isinstance(error, ArchiveError):
            raise DownloadError(
                f"{url}: the archive was not unpacked and was removed: {error}; run the same command again, and if it "
                "ends the same way tell the publisher of the set."
            ) from error
        if isinstance(error, OSError) and error.errno in FULL:
            size = origin.size or source.size
            need = f"{megabytes(size)}{', and more once unpacked' if source.unpack else ''}" if size else "more"
            free = megabytes(shutil.disk_usage(part.path.parent).free)
            raise DownloadError(
                f"{url}: there is no room for {source.file} in {part.path.parent} ({error.strerror}): it needs {need}, "
                f"and {free} is free; make room or choose another folder, then run the same command again."
            ) from error
        raise


@contextmanager
def showing(source: Source, progress: bool) -> Iterator[Report]:
    """What is to be told how far the download is: a bar on a terminal, nothing but a line at its start elsewhere."""
    if progress and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=source.file, unit="B", unit_scale=True) as bar:

            def show(arrived: int, size: int | None) -> None:
                bar.total = size
                bar.update(arrived - bar.n)

            yield show
    else:
        if progress:
            say(f"{source.file}: downloading from {source.urls[0]}")
        yield lambda arrived, size: None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """The folder, made if need be, for this process only; an empty folder that was made is removed in the end."""
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        path = target / ".lock"
        file = locked(path)
        try:
            yield
        finally:
            with suppress(PermissionError):  # Windows keeps a file while it is open
                path.unlink(missing_ok=True)
            file.close()
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def locked(path: Path) -> IO[str]:
    """An open lock file that holds the lock; the system frees it when this process ends, in whatever way."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+", encoding="utf-8")
        except FileNotFoundError:  # another run, which failed, removed the folder just now
            continue
        if not seize(file):
            with file:
                file.seek(0)
                owner = file.read() or "another process"
            raise DownloadError(
                f"{path.parent} is being filled by {owner}; run the same command again when it is done."
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()  # its owner finished and removed it between our two steps
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


def seize(file: IO[str]) -> bool:
    """Whether the lock is ours; a system that has no such locks gives it to everyone."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems
            pass
    return True

"""Download data sets: whole, checked and unpacked, or not at all.

A failed download never leaves a damaged file under its final name or a half-unpacked folder, and never changes a copy
that was there before. An interruption may leave ``FILE.part``, from which the next run continues.
pooch makes the requests and shows the progress; continuing a transfer that was cut off, and mirrors, are added here.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING, Any

from equipoise.lab.data.catalogue import RemoteFile, mismatch
from equipoise.lab.data.get.unpack import ArchiveError, unpack
from equipoise.lab.files import read_json, write_json

if TYPE_CHECKING:
    from requests import Response

CHUNK = 1 << 14  # bytes written at once: the most that a broken connection loses
TIMEOUT = 30.0  # seconds without a byte before a server counts as stalled
PAUSES = (0, 1, 2, 4)  # seconds to wait before each attempt at an address


class DownloadError(RuntimeError):
    """A data set could not be downloaded; the message says from where, what happened and what to do."""


class ConnectionLost(DownloadError):
    """A temporary failure: the next request can continue from what has arrived."""


def get(name: str, files: Sequence[RemoteFile], folder: Path, progress: bool = True) -> list[Path]:
    """Download the files of a data set into ``folder / name``, and return their paths.

    Args:
        name: name of the data set.
        files: its files; those that are already there are not downloaded again, archives are unpacked.
        folder: folder of all data sets.
        progress: print a line per file, and show a progress bar on a terminal.
    """
    from filelock import FileLock, Timeout

    target = Path(folder) / name
    try:
        paths = [already_there(remote, target) for remote in files]
        if all(paths):  # asked before anything is written: a shared copy may be read-only
            if progress:
                print(f"{name}: already there, in {target}", file=sys.stderr)
        else:
            target.mkdir(parents=True, exist_ok=True)
            with FileLock(target / ".lock", timeout=0):
                paths = [get_file(remote, target, progress) for remote in files]
    except Timeout as error:
        raise DownloadError(f"another process is downloading into {target}; try again when it has finished.") from error
    except OSError as error:
        raise DownloadError(
            f"{name} cannot be written into {target}: {error.strerror or error} ({error.filename}); "
            "choose another folder or make room there, then run the same command again."
        ) from error
    return [path for several in paths for path in several]


def already_there(remote: RemoteFile, target: Path) -> list[Path]:
    """Return the paths of a file, or of the files in an archive, if all are in the folder as published; else none."""
    sizes: dict[str, int | None] = {remote.file: remote.size}
    hashes = {remote.file: remote.known_hash}
    if remote.unpack:
        sizes = dict.fromkeys(remote.contents)
        hashes = {file: f"md5:{md5}" for file, md5 in remote.contents.items()}
        with suppress(FileNotFoundError, ValueError):
            note = read_json(target / remote.note, {"archive": dict, "sizes": {str: int}})
            sizes = note["sizes"] if note["archive"] == remote.identity else sizes
    for file, size in sizes.items():
        path = target / file
        if not path.is_file() or size not in (None, path.stat().st_size) or mismatch(path, hashes.get(file)):
            return []
    return [target / file for file in sizes]


def get_file(remote: RemoteFile, target: Path, progress: bool) -> list[Path]:
    """Download one file, or one archive and unpack it, from the first address that has it; return the paths."""
    if paths := already_there(remote, target):
        return paths
    part = target / f"{remote.file}.part"
    faults: dict[str, Exception] = {}
    for url in remote.urls:
        if progress:
            print(f"{remote.file}: downloading from {url}", file=sys.stderr)
        for pause in PAUSES:
            time.sleep(pause)
            try:
                receive(remote, url, part, progress)
                return put_in_place(remote, part, target)
            except (DownloadError, ArchiveError) as error:
                faults[url] = error
                if not isinstance(error, ConnectionLost):
                    break
            except OSError:  # of the disk
                part.unlink(missing_ok=True)
                raise
    passing = any(isinstance(fault, ConnectionLost) for fault in faults.values())
    if passing and remote.known_hash and part.exists() and (arrived := part.stat().st_size):
        remedy = f"run the same command again, it continues from the {arrived / 1e6:.1f} MB that arrived"
    else:
        part.unlink(missing_ok=True)
        remedy = f"get {remote.file} elsewhere and {'unpack' if remote.unpack else 'put'} it into {target}"
        if passing:
            remedy = "the server is down or cannot be reached from here: run the same command again later"
    raise DownloadError("; ".join(f"{url}: {fault}" for url, fault in faults.items()) + f"; {remedy}.")


def put_in_place(remote: RemoteFile, part: Path, target: Path) -> list[Path]:
    """Give a complete file its name, or unpack it and write a note of what it was unpacked to; return the paths."""
    if not remote.unpack:
        return [part.replace(target / remote.file)]
    sizes = unpack(part, target)
    part.unlink()
    write_json(target / remote.note, {"archive": remote.identity, "sizes": sizes})
    return [target / file for file in sizes]


def receive(remote: RemoteFile, url: str, part: Path, progress: bool) -> None:
    """Request what is missing in ``part``, append it, and check the whole file."""
    import pooch
    import requests

    if not remote.known_hash:  # nothing would show whether two parts fit together
        part.unlink(missing_ok=True)
    start = part.stat().st_size if part.exists() else 0
    if start and not mismatch(part, remote.known_hash):
        return  # a run was interrupted after the last byte

    def begin(response: Response, **options: Any) -> None:
        """Check a response before its body is read; requests calls this for redirects and errors, too."""
        nonlocal start
        stack.callback(response.close)
        status = response.status_code
        if status >= 400 and status != 416:
            passing = status in (408, 429) or status >= 500
            raise (ConnectionLost if passing else DownloadError)(f"the server answered {status} {response.reason}")
        if response.is_redirect:
            return
        response.raw.headers.pop("Content-Encoding", None)  # a gzipped file stays gzipped
        if status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = file.seek(file.truncate(0))
            if status in (206, 416):
                raise ConnectionLost("the server cannot continue the part that has arrived")
        if response.headers.get("Content-Type", "").startswith("text/html") and not remote.known_hash:
            raise DownloadError("the server sent a web page (text/html) instead of the file")
        length = response.raw.length_remaining  # urllib3 reads no more and no less than that, if it is announced
        if remote.size is not None and length != remote.size - start:
            announced = "no size" if length is None else f"{start + length} bytes"
            raise DownloadError(f"the server announces {announced}, but {remote.size} bytes are published")
        if (length or 0) > shutil.disk_usage(part.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    headers = {"User-Agent": "equipoise", "Accept-Encoding": "identity", "Range": f"bytes={start}-" if start else None}
    options = {"timeout": TIMEOUT, "headers": headers, "hooks": {"response": begin}}
    try:
        with ExitStack() as stack:
            file = stack.enter_context(part.open("ab"))
            pooch.HTTPDownloader(progress and sys.stderr.isatty(), CHUNK, **options)(url, file, None)
            os.fsync(file.fileno())  # on disk before it gets its name: a power cut must not leave an empty file
    except requests.RequestException as error:
        cause: BaseException = error
        while inner := cause.__cause__ or cause.__context__:
            cause = inner
        if isinstance(cause, TimeoutError):
            raise ConnectionLost(f"the server sent nothing for {TIMEOUT:g} s") from error
        invalid = isinstance(error, ValueError | requests.TooManyRedirects)  # ValueError: not an HTTP address
        kind = DownloadError if invalid or isinstance(cause, SSLCertVerificationError) else ConnectionLost
        raise kind(f"the connection failed ({getattr(cause, 'strerror', None) or cause})") from error
    if fault := mismatch(part, remote.known_hash):
        part.unlink()
        raise (ConnectionLost if start else DownloadError)(fault)  # two parts that do not fit: start over

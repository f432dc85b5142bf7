"""Archives from elsewhere: unpacked whole or not at all, and only what is plain files in plain folders.

An archive is first written into a temporary folder beside its target. Nothing of the target is touched until every
entry has been read, measured and checked; then each top-level entry takes its place by one rename. A folder that is
already there is merged into, so that two archives may share one.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from equipoise.lab.data.files.limits import LIMITS, Limits

CHUNK = 1 << 18
DEEPEST = 64  # folders in folders
LONGEST_HEADER = 1 << 20  # of a tar entry, whose reader takes it into memory whole


class ArchiveError(OSError):
    """An archive that is damaged or that holds what it should not; its sentence goes on from "the archive: "."""


@dataclass(frozen=True)
class Entry:
    """One entry of an archive: what it says it is, and how to read what it really is."""

    name: str
    size: int
    folder: bool
    refused: str  # why it must not be unpacked; empty if it may be
    open: Callable[[], IO[bytes]]


def unpack(
    archive: Path, target: Path, contents: Mapping[str, str] | None = None, limits: Limits | None = None
) -> dict[str, int]:
    """Unpack a zip, tar or tar.gz archive (told apart by its bytes) into a folder; returns the sizes of its files.

    Args:
        archive: the file; it stays.
        target: an existing folder.
        contents: md5 by path of files that must be in it.
        limits: what the archive may grow to.

    Example:
        >>> unpack(Path("cifar-10-binary.tar.gz"), Path("data/cifar10"))
        {'cifar-10-batches-bin/data_batch_1.bin': 30730000, ...}
    """
    fresh = target / f".{archive.name}.unpacking"
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
    fresh.mkdir()
    try:
        sizes = write_entries(archive, fresh, limits or LIMITS)
        for path, published in (contents or {}).items():
            found = md5(fresh / path) if path in sizes else "not there"
            if found != published.lower():
                raise ArchiveError(f"the md5 of its file {path!r} is {published} as published, and {found} here")
        for entry in list(fresh.iterdir()):
            move(entry, target / entry.name)
        return sizes
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_entries(archive: Path, folder: Path, limits: Limits) -> dict[str, int]:
    """Every entry of the archive as a file in ``folder``, measured against what it says and what is allowed."""
    allowed = limits.unpacked(archive)
    sizes: dict[str, int] = {}
    total = 0
    with closing(entries(archive, allowed)) as found:
        for number, entry in enumerate(found, start=1):
            path = folder / inside(entry)
            total += entry.size
            if number > limits.entries:
                raise ArchiveError(f"it has more than {limits.entries} entries, which is taken for a bomb")
            if total > allowed:
                raise bomb(allowed, entry.name)
            try:
                if entry.folder:
                    path.mkdir(parents=True, exist_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_file(entry, path)
                    sizes[path.relative_to(folder).as_posix()] = entry.size
            except (FileExistsError, NotADirectoryError):  # the folder was empty before: another entry is in the way
                raise refusal(entry.name, "has the name of another entry") from None
    if not sizes:
        raise ArchiveError("it holds no files")
    return sizes


def write_file(entry: Entry, path: Path) -> None:
    """One file, with the rights of any new file whatever the archive says of them."""
    written = 0
    with path.open("xb") as file:
        for chunk in chunks(entry):
            file.write(chunk)
            written += len(chunk)
    if written != entry.size:
        raise refusal(entry.name, f"says that it has {entry.size} bytes, and has {written}")


def chunks(entry: Entry) -> Iterator[bytes]:
    """The bytes of an entry, at most one chunk more than it says it has."""
    with reading(entry.name), entry.open() as stream:
        left = entry.size
        while left >= 0 and (chunk := stream.read(CHUNK)):
            left -= len(chunk)
            yield chunk


def inside(entry: Entry) -> Path:
    """The path of an entry, which stays in the folder it is unpacked into."""
    name = entry.name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if entry.refused:
        raise refusal(name, entry.refused)
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        raise refusal(name, "is an absolute path")
    if "\\" in name or "\0" in name:
        raise refusal(name, "has a backslash or a zero byte in its name")
    if ".." in parts:
        raise refusal(name, "leads out of the folder")
    if len(parts) > DEEPEST:
        raise refusal(name, f"is more than {DEEPEST} folders deep")
    if not parts and not entry.folder:
        raise refusal(name, "is a file without a name")
    return Path(*parts)


def entries(archive: Path, allowed: int) -> Generator[Entry]:
    """What is in an archive of any known kind, in its order."""
    with reading(), archive.open("rb") as file:
        start = file.read(tarfile.BLOCKSIZE)
        file.seek(0)
        if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            yield from zip_entries(file)
        elif start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as stream:
                yield from tar_entries(stream, allowed)
        elif is_tar_header(start):
            yield from tar_entries(file, allowed)
        else:
            raise ArchiveError("it is neither a zip nor a tar nor a tar.gz file")


def zip_entries(file: IO[bytes]) -> Iterator[Entry]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where the archive was not made on Unix
            refused = ""
            if info.flag_bits & 0x41:
                refused = "is encrypted"
            elif kind == stat.S_IFLNK:
                refused = "is a symbolic link"
            elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                refused = "is neither a file nor a folder"
            yield Entry(info.filename, info.file_size, info.is_dir(), refused, lambda info=info: archive.open(info))


def tar_entries(file: io.BufferedIOBase, allowed: int) -> Iterator[Entry]:
    stream = Bounded(file, allowed)
    with tarfile.TarFile(fileobj=stream) as archive:
        for member in archive:
            refused = ""
            if member.issym():
                refused = "is a symbolic link"
            elif member.islnk():
                refused = "is a hard link"
            elif not (member.isreg() or member.isdir()) or member.issparse():
                refused = "is neither a plain file nor a folder"
            size = member.size if member.isreg() else 0
            yield Entry(member.name, size, member.isdir(), refused, lambda member=member: tar_file(archive, member))
        # tarfile takes a damaged header, or a file that is cut short, for the end of the archive: look for its mark.
        stream.seek(archive.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("the end of the archive is missing")
        while stream.read(CHUNK):  # the checksum of a gzip file comes last
            pass


def tar_file(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(member)
    assert file is not None  # only for what is refused, or is a folder
    return file


def is_tar_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


class Bounded(io.BufferedIOBase):
    """An unpacked stream that ends in an error where a bomb would go on, in length or in what is read at once."""

    def __init__(self, file: io.BufferedIOBase, allowed: int):
        self.file, self.allowed = file, allowed

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LONGEST_HEADER:
            raise ArchiveError(f"it is damaged: it has a header of {size} bytes")
        self.bound(self.file.tell())
        return self.file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.bound(offset)
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def bound(self, position: int) -> None:
        if position > self.allowed:
            raise bomb(self.allowed)


@contextmanager
def reading(entry: str | None = None) -> Iterator[None]:
    """Whatever a reader of archives raises on damaged bytes, as one sentence."""
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:  # damaged bytes raise nearly anything: zlib.error, EOFError, struct.error, ValueError
        where = f" at its entry {entry!r}" if entry is not None else ""
        raise ArchiveError(f"it is damaged or cut short{where} ({error or type(error).__name__})") from error


def refusal(entry: str, why: str) -> ArchiveError:
    return ArchiveError(f"its entry {entry!r} {why}")


def bomb(allowed: int, entry: str | None = None) -> ArchiveError:
    where = f" with its entry {entry!r}" if entry is not None else ""
    return ArchiveError(f"it unpacks to more than {allowed} bytes{where}, which is taken for a bomb")


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def move(entry: Path, target: Path) -> None:
    """Put a file or folder in its place: a folder into the folder that is there, a file over the file."""
    if entry.is_dir() and target.is_dir():
        for inner in list(entry.iterdir()):
            move(inner, target / inner.name)
    else:
        entry.replace(target)

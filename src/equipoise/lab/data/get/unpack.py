"""Unpack archives from elsewhere: whole or not at all, and only plain files in plain folders, within limits."""

from __future__ import annotations

import errno
import gzip
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO, cast

from equipoise.lab.files import CHUNK, LIMITS, Limits

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO)


class ArchiveError(ValueError):
    """An archive is damaged, or holds what must not be unpacked."""


def unpack(archive: Path, target: Path, limits: Limits = LIMITS) -> dict[str, int]:
    """Unpack a zip, tar or tar.gz file of any name into a folder; return the sizes of its files by path.

    Everything is unpacked into a temporary folder first, whose entries then take their places by one rename each.
    """
    fresh = target / f".{archive.name}.unpacking"
    shutil.rmtree(fresh, ignore_errors=True)  # left by a process that was killed
    fresh.mkdir()
    try:
        with archive.open("rb") as file:
            start = file.peek(2)[:2]
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if start == b"\x1f\x8b" else file
            extract = extract_zip if start == b"PK" else extract_tar
            stated = extract(stream, fresh, limits.entries, limits.unpacked(archive))
        sizes = {path.relative_to(fresh).as_posix(): path.stat().st_size for path in fresh.rglob("*") if path.is_file()}
        if not sizes or sum(sizes.values()) != stated:  # two entries may have one name
            raise ArchiveError(f"the archive holds {len(sizes)} files, which do not have the {stated} bytes it states")
        move(fresh, target)
        return sizes
    except Exception as error:  # damaged bytes raise nearly anything: zlib.error, EOFError, struct.error, ValueError
        if isinstance(error, ArchiveError) or getattr(error, "errno", 0) in DISK_FAULTS:
            raise
        reason = str(error) or type(error).__name__
        raise ArchiveError(f"the archive is damaged, or not a zip, tar or tar.gz file ({reason})") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def extract_zip(file: IO[bytes], folder: Path, entries: int, size: int) -> int:
    """Extract a zip file of at most this number of entries and bytes; return the number of bytes that it states."""
    with zipfile.ZipFile(file) as archive:
        plain = (0, stat.S_IFREG, stat.S_IFDIR)  # 0 if the archive was not made on Unix
        modes = ((info, stat.S_IFMT(info.external_attr >> 16)) for info in archive.infolist())
        stated = check(((info.filename, info.file_size, mode in plain) for info, mode in modes), entries, size)
        archive.extractall(folder)
    return stated


def extract_tar(file: IO[bytes], folder: Path, entries: int, size: int) -> int:
    """Extract a tar file like :func:`extract_zip`, after reading it to its end."""
    with tarfile.TarFile(fileobj=file, tarinfo=ShortHeader) as archive:
        stated = check(
            ((m.name, m.size, m.isdir() or (m.isreg() and not m.issparse())) for m in archive), entries, size
        )
        # tarfile takes a damaged header, or a file that is cut short, for the end of the archive: look for its mark.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("the end of the archive is missing")
        while file.read(CHUNK):  # the checksum of a gzip file comes last
            if file.tell() > size:
                raise ArchiveError(f"the archive unpacks to more than {size} bytes: a bomb")
        archive.extractall(folder, filter="data")
    return stated


def check(listed: Iterable[tuple[str, int, bool]], entries: int, size: int) -> int:
    """Return the total size of entries (name, size, whether it is a plain file or folder) that may all be unpacked."""
    total = 0
    for number, (name, length, plain) in enumerate(listed, start=1):
        path, total = PurePosixPath(name), total + length
        if path.is_absolute() or ".." in path.parts or len(path.parts) > 64 or re.search(r"[\\\0]|^[A-Za-z]:", name):
            raise ArchiveError(f"the archive's entry {name!r} does not have a plain relative path of at most 64 parts")
        if not plain or length < 0:
            raise ArchiveError(f"the archive's entry {name!r} is a link or a special file")
        if number > entries or total > size:
            most = f"{entries} entries or {size} bytes"
            raise ArchiveError(f"the archive unpacks to more than {most} with its entry {name!r}: a bomb")
    return total


class ShortHeader(tarfile.TarInfo):
    """A header that is rejected if something large other than a file follows it, which tarfile reads into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> ShortHeader:
        header = super().frombuf(buf, encoding, errors)
        if not header.isreg() and header.size > CHUNK:
            raise ArchiveError(f"the archive has a header of {header.size} bytes")
        return header


def move(entry: Path, target: Path) -> None:
    """Move a file over ``target``, or what is in a folder into the folder that is there."""
    if entry.is_dir() and target.is_dir():
        for inner in list(entry.iterdir()):
            move(inner, target / inner.name)
    else:
        entry.replace(target)

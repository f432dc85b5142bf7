"""Trees of files: a folder, or a zip read in place."""

from __future__ import annotations

import os
import threading
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

from equipoise.lab.data.files.limits import LIMITS, read_file


class Tree(ABC):
    """Files below one place, named by their relative path with ``/``. Read from any thread."""

    path: Path

    @abstractmethod
    def files(self) -> list[str]:
        """Every file, sorted; hidden ones and what macOS adds to its zips left out."""

    @abstractmethod
    def read(self, file: str) -> bytes:
        """The bytes of one file, which must be within the limits of an image file."""


class Folder(Tree):
    """A folder.

    Args:
        path: of the folder.
        parts: the only subfolders to look into; all of it if empty.
    """

    def __init__(self, path: Path, parts: tuple[str, ...] = ()):
        self.path = path
        self.parts = parts

    def files(self) -> list[str]:
        found = []
        for part in self.parts or ("",):
            for folder, _, names in os.walk(self.path / part, followlinks=True):
                inside = Path(folder).relative_to(self.path).as_posix()
                found += [name if inside == "." else f"{inside}/{name}" for name in names]
        return sorted(filter(visible, found))

    def read(self, file: str) -> bytes:
        return read_file(self.path / file, LIMITS.image_file)


class Zip(Tree):
    """A zip archive, nothing of which is ever unpacked."""

    def __init__(self, path: Path):
        self.path = path
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()  # the archive is one open file with one position
        for name in self.archive.namelist():
            inside = PurePosixPath(name.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts:
                raise ValueError(f"its entry {name!r} lies outside of the archive")

    def files(self) -> list[str]:
        return sorted(name for name in self.archive.namelist() if not name.endswith("/") and visible(name))

    def read(self, file: str) -> bytes:
        with self.lock:
            info = self.archive.getinfo(file)
            most = LIMITS.entry(info.compress_size)
            if info.file_size > most:  # which zipfile then reads, and no more
                raise ValueError(f"it inflates to {info.file_size:,} bytes; at most {most:,} are read")
            return self.archive.read(info)

    def __reduce__(self):  # another process opens the file for itself
        return Zip, (self.path,)


def visible(file: str) -> bool:
    return not any(part.startswith(".") or part == "__MACOSX" for part in file.split("/"))

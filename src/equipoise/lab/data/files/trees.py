"""Trees of files: a folder, or a zip read in place."""

import os
import threading
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

from equipoise.lab.files import LIMITS, read_file


class Tree(ABC):
    """Files below one root, named by their relative POSIX paths. Safe to read from several threads."""

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, in any order."""

    @abstractmethod
    def read(self, file: str) -> bytes:
        """Return the bytes of one file; raise if it is larger than an image file may be."""

    def files(self) -> list[str]:
        """Return the names of all files, sorted, without hidden ones and those that macOS adds to its zips."""
        hidden = (".", "__MACOSX")
        return sorted(name for name in self.names() if not any(part.startswith(hidden) for part in name.split("/")))


class Folder(Tree):
    """A folder, restricted to its subfolders ``parts`` if there are any."""

    def __init__(self, path: Path, parts: tuple[str, ...] = ()):
        self.path, self.parts = path, parts

    def names(self) -> list[str]:
        names = []
        for part in self.parts or ("",):
            for folder, _, files in os.walk(self.path / part, followlinks=True):
                inside = Path(folder).relative_to(self.path).as_posix()
                names += files if inside == "." else [f"{inside}/{file}" for file in files]
        return names

    def read(self, file: str) -> bytes:
        return read_file(self.path / file, LIMITS.image_file)


class Zip(Tree):
    """A zip archive, read without unpacking it."""

    def __init__(self, path: Path):
        self.path = path
        self.archive = zipfile.ZipFile(path)
        self.lock = threading.Lock()  # the archive is one open file with one position
        for name in self.archive.namelist():
            inside = PurePosixPath(name.replace("\\", "/"))
            if inside.is_absolute() or ".." in inside.parts:
                raise ValueError(f"its entry {name!r} lies outside of the archive")

    def names(self) -> list[str]:
        return [name for name in self.archive.namelist() if not name.endswith("/")]

    def read(self, file: str) -> bytes:
        with self.lock:
            info = self.archive.getinfo(file)
            most = LIMITS.entry(info.compress_size)
            if info.file_size > most:  # zipfile reads no more than file_size
                raise ValueError(f"it inflates to {info.file_size:,} bytes; at most {most:,} are read")
            return self.archive.read(info)

    def __reduce__(self):  # every process opens the file itself
        return Zip, (self.path,)

"""Where data is looked for, and the files of one data set there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.data.files.trees import Folder, Tree, Zip
from equipoise.lab.data.get.sources import SOURCES, how_to_get

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages put data sets


class MissingData(LookupError):
    """Files of a data set are not there."""


def cache_folder() -> Path:
    """Where downloaded data sets are kept, each in a folder of its own."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "equipoise", "data")


def search_path(folders: Sequence[str | Path] = (), current: bool = True) -> list[Path]:
    """Return the folders to look for data in, each once: the one order, for reading as for listing.

    Those given (``--data``) come first, then those in ``$EQUIPOISE_DATA``, the cache, the system's, and the current
    folder last (unless ``current`` is False).
    """
    if isinstance(folders, str | Path):
        raise TypeError(f"folders is {str(folders)!r}; it must be a list of folders: [{str(folders)!r}].")
    named = filter(None, os.environ.get("EQUIPOISE_DATA", "").split(os.pathsep))
    every = (*folders, *named, cache_folder(), SYSTEM, *(current_folder() if current else ()))
    return list(dict.fromkeys(Path(os.path.expanduser(folder)) for folder in every))


def current_folder() -> list[Path]:
    """The current folder, unless it was removed."""
    try:
        return [Path.cwd()]
    except FileNotFoundError:
        return []


class Places:
    """Finds the files of one data set: in each folder of the search path, in its subfolder ``name`` and in itself.

    Args:
        name: of the data set.
        folders: to look in first.

    Example:
        >>> Places("mnist").file("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
        PosixPath('.../mnist/train-images-idx3-ubyte.gz')
    """

    def __init__(self, name: str, folders: Sequence[str | Path] = ()):
        self.name = name
        self.roots = search_path(folders)
        others = ABOUT.keys() - {name}  # MNIST and Fashion-MNIST have files of the same names
        self.folders = [
            place
            for root in self.roots
            for place in (root / name, root)
            if place != root or root.resolve().name not in others
        ]

    def find(self, *names: str) -> Path | None:
        """The first of these files that is there; a folder that comes earlier wins over a name that does."""
        candidates = (folder / name for folder in self.folders for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def find_tree(self, *names: str) -> Path | None:
        """The first folder or zip of these names that is there."""
        for folder in self.folders:
            for name in names:
                path = folder / name
                if path.is_dir() and path not in self.folders:  # CamVid's own folder may be called as the set is
                    return path
                if (archive := folder / f"{name}.zip").is_file():
                    return archive
        return None

    def file(self, *names: str) -> Path:
        """The same as ``find``; MissingData if there is none."""
        path = self.find(*names)
        if path is None:
            raise self.missing(*names)
        return path

    def tree(self, *names: str, parts: tuple[str, ...] = ()) -> Tree:
        """A folder of one of these names, or a zip; or else the place itself if it has all subfolders ``parts``."""
        path = self.find_tree(*names)
        if path is not None:
            return self.open(path)
        for folder in self.folders:
            if parts and all((folder / part).is_dir() for part in parts):
                return Folder(folder, parts)
        either = [form for name in names for form in (f"{name}/", f"{name}.zip")]
        raise self.missing(*either, *([" with ".join(f"{part}/" for part in parts)] if parts else []))

    def open(self, path: Path) -> Tree:
        """A folder or a zip as a tree."""
        if path.is_dir():
            return Folder(path)
        with self.reading(path):
            return Zip(path)

    def missing(self, *names: str) -> MissingData:
        roots = ", ".join(map(str, self.roots))
        remedy = f"; to get it: {how_to_get(self.name)}" if how_to_get(self.name) else ""
        return MissingData(
            f"the data set {self.name} is not there or not complete: no {' or '.join(names)} in {roots}, nor in the "
            f"folder {self.name} of any of them{remedy}."
        )

    def damaged(self, path: Path | str, why: str) -> ValueError:
        again = f"remove it and run: equipoise data get {self.name}" if self.name in SOURCES else "replace or remove it"
        return ValueError(f"{path} cannot be used for the data set {self.name}: {why}; {again}.")

    @contextmanager
    def reading(self, path: Path | str) -> Iterator[None]:
        """Whatever goes wrong while this file is decoded is the file's fault, and is said so."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's fault, or a missing permission
                raise
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            reason = said.strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise self.damaged(path, reason) from error

"""The search path for data, and the files of one data set on it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from equipoise.lab.data.catalogue import ABOUT, MADE_OF, SOURCES, how_to_get
from equipoise.lab.data.files.trees import Folder, Tree, Zip

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages put data sets


class MissingData(LookupError):
    """Files of a data set were not found."""


def cache_folder() -> Path:
    """Return the folder that data sets are downloaded into, each in a subfolder."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "equipoise", "data")


def search_path(folders: Sequence[str | Path] = (), current: bool = True) -> list[Path]:
    """Return the folders that are searched for data, in order.

    First come ``folders`` (``--data``), then those in ``$EQUIPOISE_DATA``, the cache, the system's folder, and last the
    current folder (unless ``current`` is False).
    """
    if isinstance(folders, str | Path):
        raise TypeError(f"folders is {str(folders)!r}; it must be a list of folders: [{str(folders)!r}].")
    named = filter(None, os.environ.get("EQUIPOISE_DATA", "").split(os.pathsep))
    every = [*folders, *named, cache_folder(), SYSTEM]
    if current:
        with suppress(FileNotFoundError):  # the current folder was removed
            every.append(Path.cwd())
    return list(dict.fromkeys(Path(os.path.expanduser(folder)) for folder in every))


class Places:
    """Find the files of a data set in each folder of the search path and its subfolder ``name``, ``folders`` first."""

    def __init__(self, name: str, folders: Sequence[str | Path] = ()):
        self.name, self.roots = name, search_path(folders)
        own = [name, MADE_OF[name]] if name in MADE_OF else [name]
        others = ABOUT.keys() - set(own)  # MNIST and Fashion-MNIST have files of the same names
        self.folders: list[Path] = []
        for root in self.roots:
            self.folders += [root / each for each in own] + ([] if root.resolve().name in others else [root])

    def find(self, *names: str) -> Path | None:
        """Return the first of these files that exists, trying all names in one folder before the next, or None."""
        candidates = (folder / name for folder in self.folders for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def find_tree(self, *names: str) -> Path | None:
        """Return the first folder or zip with one of these names, or None."""
        for folder, name in product(self.folders, names):
            path, archive = folder / name, folder / f"{name}.zip"
            if path.is_dir() and path not in self.folders:  # CamVid's own folder may be named like the data set
                return path
            if archive.is_file():
                return archive
        return None

    def file(self, *names: str) -> Path:
        """Return the first of these files that exists, as ``find`` does, or raise MissingData."""
        if path := self.find(*names):
            return path
        raise self.missing(*names)

    def tree(self, *names: str, parts: tuple[str, ...] = ()) -> Tree:
        """Return a folder or zip with one of these names, or else the folder that has all subfolders ``parts``."""
        if path := self.find_tree(*names):
            return self.open(path)
        for folder in self.folders:
            if parts and all((folder / part).is_dir() for part in parts):
                return Folder(folder, parts)
        either = [form for name in names for form in (f"{name}/", f"{name}.zip")]
        raise self.missing(*either, *([" with ".join(f"{part}/" for part in parts)] if parts else []))

    def open(self, path: Path) -> Tree:
        """Return a folder or a zip as a tree."""
        if path.is_dir():
            return Folder(path)
        with self.reading(path):
            return Zip(path)

    def missing(self, *names: str) -> MissingData:
        roots = ", ".join(map(str, self.roots))
        remedy = f"; to get it: {how_to_get(self.name)}" if how_to_get(self.name) else ""
        return MissingData(
            f"the data set {self.name} was not found or is incomplete: no {' or '.join(names)} in {roots}, nor in the "
            f"folder {self.name} of any of them{remedy}."
        )

    def damaged(self, path: Path | str, why: str) -> ValueError:
        again = f"remove it and run: equipoise data get {self.name}" if self.name in SOURCES else "replace or remove it"
        return ValueError(f"{path} cannot be used for the data set {self.name}: {why}; {again}.")

    @contextmanager
    def reading(self, path: Path | str) -> Iterator[None]:
        """Raise any error in decoding this file as one that names the file and a remedy."""
        try:
            yield
        except Exception as error:
            disk_fault = isinstance(error, OSError) and error.errno is not None  # or a missing permission
            if disk_fault or isinstance(error, MemoryError):
                raise
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise self.damaged(path, what.strip().partition("\n")[0].rstrip(".") or type(error).__name__) from error

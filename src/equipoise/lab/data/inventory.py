"""List and check the data sets that are present, for ``equipoise data list`` and ``equipoise data check``."""

import gzip
import hashlib
import importlib.util
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from equipoise.lab.data.catalogue import ABOUT, MADE_OF, OTHER_FORMS, SOURCES, RemoteFile, how_to_get, mismatch
from equipoise.lab.data.files.places import Places
from equipoise.lab.files import CHUNK, LIMITS
from equipoise.options import unknown


class Listed(NamedTuple):
    """A data set: the folder it was found in (or ""), its official numbers of samples, how to get it, its terms."""

    name: str
    found: str
    samples: str
    get: str
    licence: str


class Checked(NamedTuple):
    """A file of a data set: its path (None if missing), its size (None for a folder), the verdict of its checksum."""

    file: str
    path: Path | None
    size: int | None
    verdict: str


class Wanted(NamedTuple):
    """A file that belongs to a data set, where it was found, and its published checksums."""

    file: str
    path: Path | None
    md5: str | None = None
    md5_inside: str | None = None  # of the decompressed contents

    def checked(self) -> Checked:
        size = self.path.stat().st_size if self.path is not None and self.path.is_file() else None
        if self.path is None:
            verdict = "missing"
        elif self.md5 is None or size is None:
            verdict = "no published checksum"
        elif not mismatch(self.path, f"md5:{self.md5}"):
            verdict = "official checksum"
        elif self.md5_inside is not None and md5_of_contents(self.path) == self.md5_inside:
            verdict = "official contents, recompressed"
        else:
            verdict = "not the official checksum"
        return Checked(self.file, self.path, size, verdict)


def available(folders: Sequence[str | Path] = ()) -> list[Listed]:
    """Return all data sets of the catalogue, in its order."""
    samples = {name: f"{about.train} + {about.test}" if about.train else "" for name, about in ABOUT.items()}
    return [Listed(n, folder_of(n, folders), samples[n], how_to_get(n), about.licence) for n, about in ABOUT.items()]


def folder_of(name: str, folders: Sequence[str | Path] = ()) -> str:
    """Return the folder that a data set is read from, the first with a complete form of it, or ""."""
    if name == "digits":
        return "scikit-learn" if importlib.util.find_spec("sklearn") else ""
    firsts = [form[0].path for form in forms(name, folders) if all(wanted.path for wanted in form)]
    order = Places(name, folders).folders
    in_order = (path for place in order for path in firsts if path is not None and path.is_relative_to(place))
    return next((str(path.parent) for path in in_order), "")


def check(name: str, folders: Sequence[str | Path] = ()) -> list[Checked]:
    """Check the files of each form of a data set that is at least partly present, or else of the one to download."""
    if name not in ABOUT:
        raise LookupError(unknown("data set", name, ABOUT))
    every = forms(name, folders)
    present = [form for form in every if any(wanted.path for wanted in form)]
    return [wanted.checked() for form in present or every[:1] for wanted in form]


def forms(name: str, folders: Sequence[str | Path]) -> list[list[Wanted]]:
    """Return the files of each form that a data set is published in."""
    places = Places(name, folders)
    source = MADE_OF.get(name, name)
    tables = [table[source] for table in (SOURCES, OTHER_FORMS) if source in table]
    return [[wanted for remote in table for wanted in files_of(remote, places)] for table in tables]


def files_of(remote: RemoteFile, places: Places) -> list[Wanted]:
    """Return a file or its unpacked contents, whichever is read: the first folder wins."""
    if not remote.unpack and (path := places.find(remote.file, *remote.contents)):
        if path.name == remote.file:
            return [Wanted(remote.file, path, remote.md5, *remote.contents.values())]
        return [Wanted(path.name, path, remote.contents[path.name])]
    inside = [Wanted(file, places.find(file, Path(file).name), md5) for file, md5 in remote.contents.items()]
    if any(wanted.path for wanted in inside):
        return inside
    name = remote.file.partition(".")[0]
    tree = places.find_tree(name)
    return [Wanted(remote.file, None) if tree is None else Wanted(name, tree)]


def md5_of_contents(path: Path) -> str | None:
    """Return the md5 of the contents of a gzip file; None if it is damaged or implausibly large."""
    checksum, left = hashlib.md5(usedforsecurity=False), LIMITS.in_memory(path)
    try:
        with gzip.open(path) as file:
            while left >= 0 and (chunk := file.read(CHUNK)):
                checksum.update(chunk)
                left -= len(chunk)
    except (OSError, EOFError, zlib.error):
        return None
    return checksum.hexdigest() if left >= 0 else None

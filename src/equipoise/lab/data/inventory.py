"""What is there of each data set, for ``equipoise data list`` and ``equipoise data check``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.data.files.checksums import md5_inside, mismatch
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.get.sources import OTHER_FORMS, SOURCES, RemoteFile, how_to_get
from equipoise.registry import unknown


class Listed(NamedTuple):
    """A data set: where it was found ("" if nowhere), its official numbers of samples, how to get it, its terms."""

    name: str
    found: str
    samples: str
    get: str
    licence: str


class Checked(NamedTuple):
    """A file of a data set: where it is (None if nowhere), its size (None for a folder), what its checksum says."""

    file: str
    path: Path | None
    size: int | None
    verdict: str


class Wanted(NamedTuple):
    """A file that belongs to a data set, where it was found, and its published checksums."""

    file: str
    path: Path | None
    md5: str | None = None
    md5_inside: str | None = None  # of what is compressed in it


def available(folders: Sequence[str | Path] = ()) -> list[Listed]:
    """Every data set that can be asked for by name, in the order of the catalogue."""
    rows = []
    for name, about in ABOUT.items():
        samples = f"{about.train} + {about.test}" if about.train else ""
        rows.append(Listed(name, found(name, folders), samples, how_to_get(name), about.licence))
    return rows


def found(name: str, folders: Sequence[str | Path] = ()) -> str:
    """The folder from which a data set is read: that of a complete form, of several the first one found; else ""."""
    if name == "digits":
        return "scikit-learn" if importlib.util.find_spec("sklearn") else ""
    order = Places(name, folders).folders
    complete = [paths for form in forms(name, folders) if all(paths := [wanted.path for wanted in form])]
    first = [paths[0] for paths in complete if paths[0] is not None]
    rank = {path: next(place for place, folder in enumerate(order) if path.is_relative_to(folder)) for path in first}
    return str(min(first, key=lambda path: rank[path]).parent) if first else ""


def check(name: str, folders: Sequence[str | Path] = ()) -> list[Checked]:
    """The files of a data set and whether they are the official ones; none for a set without files of its own.

    Of the forms that a set is published in, those are listed of which something is there; else the one to download.
    """
    if name not in ABOUT:
        raise LookupError(unknown("data set", name, ABOUT))
    every = forms(name, folders)
    listed = [form for form in every if any(wanted.path for wanted in form)] or every[:1]
    return [Checked(w.file, w.path, size(w.path), verdict(w)) for form in listed for w in form]


def forms(name: str, folders: Sequence[str | Path]) -> list[list[Wanted]]:
    """For each form a data set is published in, the files of it."""
    places = Places(name, folders)
    tables = [table[name] for table in (SOURCES, OTHER_FORMS) if name in table]
    return [[wanted for source in sources for wanted in files_of(source, places)] for sources in tables]


def files_of(source: RemoteFile, places: Places) -> list[Wanted]:
    """The file itself or what it unpacks to, whichever is read: a folder that comes earlier wins."""
    if not source.unpack and (path := places.find(source.file, *source.contents)):
        if path.name == source.file:
            return [Wanted(source.file, path, source.md5, *source.contents.values())]
        return [Wanted(path.name, path, source.contents[path.name])]
    inside = [Wanted(file, places.find(file, Path(file).name), known) for file, known in source.contents.items()]
    if any(wanted.path for wanted in inside):
        return inside
    name = source.file.partition(".")[0]
    return [Wanted(source.file, None)] if (tree := places.find_tree(name)) is None else [Wanted(name, tree)]


def verdict(wanted: Wanted) -> str:
    if wanted.path is None:
        return "missing"
    if wanted.md5 is None or wanted.path.is_dir():
        return "no published checksum"
    if not mismatch(wanted.path, f"md5:{wanted.md5}"):
        return "official checksum"
    if wanted.md5_inside is not None and md5_inside(wanted.path) == wanted.md5_inside:
        return "official contents, compressed anew"
    return "not the official checksum"


def size(path: Path | None) -> int | None:
    return path.stat().st_size if path is not None and path.is_file() else None

"""The data sets as their authors published them: sizes, terms, files with checksums, and how to get them."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CATALOGUE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class About(NamedTuple):
    """A data set as its authors published it; None for what the user decides, such as the size of its images.

    ``no_weights`` says why weights trained on it must not be shipped; None if they may be.
    """

    train: int | None
    test: int | None
    licence: str
    no_weights: str | None
    shape: list[int] | None
    classes: int | None


ABOUT = {name: About(*(entry.get(key) for key in About._fields)) for name, entry in CATALOGUE.items()}


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Args:
        file: name of the file in the folder of its data set.
        urls: official address, then mirrors.
        md5, sha256: published checksum, if any.
        size: size of the file in bytes; None if it is not known.
        unpack: whether it is an archive to unpack into the folder of the data set, and then to remove.
        contents: published md5 of files inside the archive, by their path once unpacked.
    """

    file: str
    urls: tuple[str, ...] = ()
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None
    unpack: bool = False
    contents: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or re.search(r"[/\\\0]", self.file):
            raise ValueError(f"RemoteFile.file is {self.file!r}; it must be a name without a folder.")
        if not all(re.match("https?://", url) for url in self.urls):
            raise ValueError(f"RemoteFile.urls is {self.urls}; addresses must begin with http:// or https://.")

    @property
    def known_hash(self) -> str | None:
        """The published checksum as pooch writes it ("md5:..."); the stronger one if there are two."""
        kind, checksum = ("sha256", self.sha256) if self.sha256 else ("md5", self.md5)
        return f"{kind}:{checksum.lower()}" if checksum else None

    @property
    def note(self) -> str:
        """Name of the file that says what an archive was unpacked to."""
        return f".{self.file}.unpacked.json"

    @property
    def identity(self) -> dict[str, str | int | None]:
        """What distinguishes one version of the file from another."""
        return {"md5": self.md5, "sha256": self.sha256, "size": self.size}


def _files(key: str) -> dict[str, tuple[RemoteFile, ...]]:
    entries = {name: entry[key] for name, entry in CATALOGUE.items() if key in entry}
    return {n: tuple(RemoteFile(**{**e, "urls": tuple(e.get("urls", ()))}) for e in es) for n, es in entries.items()}


SOURCES = _files("files")
OTHER_FORMS = _files("other_forms")
MADE_OF: dict[str, str] = {name: entry["made_of"] for name, entry in CATALOGUE.items() if "made_of" in entry}
HOW_TO_GET: dict[str, str] = {name: entry["how_to_get"] for name, entry in CATALOGUE.items() if "how_to_get" in entry}


def how_to_get(name: str) -> str:
    """Return how to get a data set, for the end of a sentence; empty for one from outside the package."""
    return HOW_TO_GET.get(name) or (f"equipoise data get {name}" if name in SOURCES else "")


def mismatch(path: Path, known_hash: str | None) -> str:
    """Return how the checksum of a file differs from the published one ("md5:..."); empty if it does not."""
    import pooch

    if known_hash is None:
        return ""
    kind, _, published = known_hash.partition(":")
    actual = pooch.file_hash(str(path), alg=kind)
    return "" if actual == published else f"its {kind} is {actual}, but {published} is published"

"""Checksums of files, compared with those that are published."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from equipoise.lab.data.files.limits import CHUNK, LIMITS


def mismatch(path: Path, known_hash: str | None) -> str:
    """Return how the checksum of a file differs from the published one ("md5:..."); empty if it does not."""
    import pooch

    if known_hash is None:
        return ""
    kind, _, published = known_hash.partition(":")
    actual = pooch.file_hash(str(path), alg=kind)
    return "" if actual == published else f"its {kind} is {actual}, but {published} is published"


def md5_inside(path: Path) -> str | None:
    """Return the md5 of what is in a gzip file; None if it is damaged or inflates to more than is plausible."""
    checksum, left = hashlib.md5(usedforsecurity=False), LIMITS.in_memory(path)
    try:
        with gzip.open(path) as file:
            while left >= 0 and (chunk := file.read(CHUNK)):
                checksum.update(chunk)
                left -= len(chunk)
    except (OSError, EOFError, zlib.error):
        return None
    return checksum.hexdigest() if left >= 0 else None

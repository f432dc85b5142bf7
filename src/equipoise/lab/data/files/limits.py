"""Limits on what reading a file may take: the one place for them, and reading within them.

A few megabytes can claim to hold, or inflate to, more than a machine has. Every reader asks here how much it may take,
before it allocates anything.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import IO

CHUNK = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a file may grow to; one that claims more is rejected as a bomb.

    Args:
        entries: files and folders in an archive that is unpacked.
        size: bytes that an archive unpacks to.
        ratio: bytes that an archive, or an entry of a zip, inflates to per byte of its own, beyond ``small``.
        array_ratio: the same of a file of arrays, which is read into memory as a whole.
        small: bytes that any compressed file may inflate to.
        memory: bytes of one file of arrays, inflated, in memory.
        image_file: bytes of one image file, or of one entry of a zip that is read in place.
        pixels: pixels of one image; Pillow itself warns from 89.5 million on.
        whole_image: pixels of an image that is segmented at once; larger ones are segmented in windows.
        segmentation: bytes of an image and its logits while it is segmented.
    """

    entries: int = 1_000_000
    size: int = 500 * 10**9
    ratio: int = 200
    array_ratio: int = 50
    small: int = 64 * 10**6
    memory: int = 8 * 10**9
    image_file: int = 256 * 10**6
    pixels: int = 89_000_000
    whole_image: int = 2048 * 1024
    segmentation: int = 4 * 10**9

    def unpacked(self, archive: Path) -> int:
        """Bytes that this archive may unpack to on disk."""
        return min(self.size, self.inflated(archive.stat().st_size, self.ratio))

    def in_memory(self, file: Path) -> int:
        """Bytes that this compressed file may inflate to in memory."""
        return min(self.memory, self.inflated(file.stat().st_size, self.array_ratio))

    def entry(self, size: int) -> int:
        """Bytes that an entry of ``size`` compressed bytes of a zip may inflate to in memory."""
        return min(self.image_file, self.inflated(size, self.ratio))

    def inflated(self, size: int, ratio: int) -> int:
        return max(self.small, ratio * size)


LIMITS = Limits()


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most ``most`` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size:,} bytes; at most {most:,} are read")
    return path.read_bytes()


def read_exactly(file: IO[bytes] | GzipFile, size: int) -> bytearray:
    """Return all ``size`` bytes that are left in a stream, which must be so many; grows as they arrive."""
    data = bytearray()
    while len(data) <= size and (chunk := file.read(CHUNK)):
        data += chunk
    if len(data) > size:
        raise ValueError(f"it holds more than the {size} bytes of data that its header promises")
    if len(data) < size:
        raise ValueError(f"it holds {len(data)} bytes of data, its header promises {size}")
    return data

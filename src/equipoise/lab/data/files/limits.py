"""Limits on what reading a file may take: the one place for them, and reading within them.

A small file can claim to hold, or inflate to, more than a machine has: every reader asks here before it allocates.
"""

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
        entries: number of files and folders in an archive that is unpacked.
        size: number of bytes that an archive unpacks to.
        ratio: bytes that an archive, or an entry of a zip, inflates to per compressed byte, beyond ``small``.
        array_ratio: the same for a file of arrays, which is read into memory as a whole.
        small: number of bytes that any compressed file may inflate to.
        memory: number of bytes of one file of arrays, inflated, in memory.
        image_file: number of bytes of one image file, or of one entry of a zip that is read in place.
        pixels: number of pixels of one image; Pillow itself warns from 89.5 million on.
        whole_image: number of pixels of an image that is segmented at once; larger ones are segmented in windows.
        segmentation: number of bytes of an image and its logits while it is segmented.
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
        """Return the number of bytes that this archive may unpack to on disk."""
        return min(self.size, max(self.small, self.ratio * archive.stat().st_size))

    def in_memory(self, file: Path) -> int:
        """Return the number of bytes that this compressed file may inflate to in memory."""
        return min(self.memory, max(self.small, self.array_ratio * file.stat().st_size))

    def entry(self, size: int) -> int:
        """Return the number of bytes that an entry of ``size`` compressed bytes of a zip may inflate to in memory."""
        return min(self.image_file, max(self.small, self.ratio * size))


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
    """Return the bytes that are left in a stream, allocated as they arrive; raise unless there are ``size`` of them."""
    data = bytearray()
    while len(data) <= size and (chunk := file.read(CHUNK)):
        data += chunk
    if len(data) != size:
        held = f"more than the {size}" if len(data) > size else f"{len(data)} of the {size}"
        raise ValueError(f"it holds {held} bytes of data that its header declares")
    return data

"""Files: written completely or not at all, read within limits; JSON that is checked for its shape."""

import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any

DEEPEST = 60  # levels of lists and tables in JSON that is read; the lab's own files have about ten
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
NUMBER = (float, int)
KIND_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
KIND_NAMES |= {list: "a list", type(None): "null"}


class WriteError(OSError):
    """A file could not be written; an earlier one of that name is unchanged."""


class DamagedFile(ValueError):
    """A file does not have the content that it should."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block succeeds, and is removed when it fails.

    Example:
        >>> with whole(Path("result.json")) as part:
        ...     part.write_text("{}")
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    except OSError as error:
        raise not_written(path, error) from error
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:  # on disk before its name is: a power cut must not leave an empty file
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))  # the mask can only be read by setting it
        part.chmod(0o666 & ~mask)  # mkstemp's files are private; this one is an ordinary file
        part.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def not_written(path: Path, error: Exception) -> WriteError:
    reason = getattr(error, "strerror", None) or str(error).rstrip(".")
    before = " The earlier one is untouched." if path.exists() else ""
    return WriteError(f"{path} could not be written: {reason}.{before}")


def write_bytes(path: Path, content: bytes) -> None:
    with whole(path) as part:
        part.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, exact: bool = False) -> None:
    """Write a JSON file; ``exact`` keeps numbers that are not finite, which not every reader understands."""
    write_text(path, json.dumps(value if exact else finite(value), indent=2, allow_nan=exact) + "\n")


def finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, shape: Any = object) -> Any:
    """Read a JSON file; raise DamagedFile unless it is valid and has the shape (see :func:`misfit`)."""
    try:
        value = parse(path.read_bytes())
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: it is not JSON ({error}).") from None
    if reason := misfit(value, shape):
        raise DamagedFile(f"{path} is damaged: {reason}.")
    return value


def parse(content: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid, or nested so deeply that it must be an attack."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels deep") from None
    inside = [value]
    for _ in range(DEEPEST):
        tables = [
            entry.values() if isinstance(entry, dict) else entry for entry in inside if isinstance(entry, dict | list)
        ]
        inside = [entry for table in tables for entry in table]
    if inside:
        raise ValueError(f"more than {DEEPEST} levels deep")
    if SURROGATE.search(content if isinstance(content, bytes) else content.encode()):
        json.dumps(value, ensure_ascii=False).encode()  # raises for half a character, which cannot be shown or written
    return value


def misfit(value: Any, shape: Any, path: str = "") -> str:
    """Describe how a JSON value differs from a shape; return an empty string if it does not.

    Args:
        shape: type, or tuple of shapes of which one must fit; ``{"key": shape}`` is a table with a required key
            (``"key?"``: an optional one), in which ``{str: shape}`` is the shape of all other keys; ``[shape]`` a list

    Example:
        >>> misfit({"epoch": "one"}, {"epoch": int})
        "epoch is 'one', not a whole number"
    """
    if isinstance(shape, tuple):
        return "" if any(not misfit(value, one, path) for one in shape) else misfit(value, shape[0], path)
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not fits(value, kind):
        shown = repr(value)
        return f"{path or 'it'} is {shown if len(shown) <= 60 else shown[:60] + '...'}, not {KIND_NAMES[kind]}"
    if isinstance(shape, list):
        parts = ((entry, shape[0], f"{path}[{number}]") for number, entry in enumerate(value))
    elif isinstance(shape, dict):
        prefix = f"{path}." if path else ""
        if missing := [key for key in shape if key is not str and not key.endswith("?") and key not in value]:
            return f"{' and '.join(prefix + key for key in missing)} {'is' if len(missing) == 1 else 'are'} missing"
        named = {key.removesuffix("?"): entry for key, entry in shape.items() if key is not str}
        others = shape.get(str, object)
        parts = ((entry, named.get(key, others), prefix + key) for key, entry in value.items())
    else:
        return ""
    return next((reason for part in parts if (reason := misfit(*part))), "")


def fits(value: Any, kind: type) -> bool:
    """Return whether a value is of a kind; a number must be finite, and a whole one fit into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return kind is object or (kind is bool and isinstance(value, bool))
    return math.isfinite(value) if kind is float else kind is not int or abs(value) < 2**63


# Limits on what reading a file may take: a small one can claim to hold, or inflate to, more than a machine has.

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

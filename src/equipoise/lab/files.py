"""Files are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well, and is removed when it does not.

    Example:
        >>> with whole(Path("result.json")) as part:
        ...     part.write_text("{}")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:  # on disk before its name is: a power cut must not leave an empty file
            os.fsync(file.fileno())
        part.chmod(0o666 & ~umask())  # mkstemp's files are private; this one is an ordinary file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, exact: bool = False) -> None:
    """Write a JSON file, whole; ``exact`` keeps numbers that are not finite, which not every reader understands."""
    write_text(path, json.dumps(value if exact else finite(value), indent=2, allow_nan=exact) + "\n")


def finite(value: Any) -> Any:
    """The same value with None for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from None


def umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

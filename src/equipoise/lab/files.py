"""Files are written whole or not at all; JSON that is read has the shape that is needed, or is named as damaged."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEEPEST = 60  # levels of lists and tables in JSON that is read; what the lab writes has about ten


class WriteError(OSError):
    """A file could not be written; what was there before is untouched."""


class DamagedFile(ValueError):
    """A file is not what its name says."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well, and is removed when it does not.

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
        part.chmod(0o666 & ~umask())  # mkstemp's files are private; this one is an ordinary file
        part.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def not_written(path: Path, error: Exception) -> WriteError:
    """What to say where writing failed."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".")
    before = " The earlier one is untouched." if path.exists() else ""
    return WriteError(f"{path} could not be written: {reason}.{before}")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole."""
    with whole(path) as part:
        part.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole."""
    write_bytes(path, text.encode())


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


def read_json(path: Path, shape: Any = object) -> Any:
    """Read a JSON file; one that is damaged, or not of the given shape (see :func:`misfit`), is named."""
    try:
        value = parse(path.read_bytes())
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: it is not JSON ({error}).") from None
    if reason := misfit(value, shape):
        raise DamagedFile(f"{path} is damaged: {reason}.")
    return value


def parse(content: str | bytes) -> Any:
    """The value of a JSON text; a ValueError for one that is none, or that is nested so deeply that it is an attack."""
    try:
        value = json.loads(content)
    except RecursionError:
        value = None
        levels = DEEPEST + 1
    else:
        levels, inside = 0, [value]
        while inside and levels <= DEEPEST:
            levels += 1
            inside = [
                entry
                for container in inside
                if isinstance(container, dict | list)
                for entry in (container.values() if isinstance(container, dict) else container)
            ]
    if levels > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels deep")
    if SURROGATE.search(content if isinstance(content, bytes) else content.encode()):
        json.dumps(value, ensure_ascii=False).encode()  # half a character, which can be neither shown nor written
    return value


SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
NUMBER = (float, int)
WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"} | {
    list: "a list",
    type(None): "null",
}


def misfit(value: Any, shape: Any, path: str = "") -> str:
    """How a JSON value differs from a shape, in a few words; empty if it does not.

    Args:
        shape: a type, or a tuple of shapes of which one must fit; ``{"key": shape}`` is a table that has the key
            (``"key?"``: that may have it) and ``{str: shape}`` the shape of all other keys; ``[shape]`` is a list.

    Example:
        >>> misfit({"epoch": "one"}, {"epoch": int})
        "epoch is 'one', not a whole number"
    """
    if isinstance(shape, tuple):
        return "" if any(not misfit(value, one, path) for one in shape) else misfit(value, shape[0], path)
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not fits(value, kind):
        shown = repr(value)
        return f"{path or 'it'} is {shown if len(shown) <= 60 else shown[:60] + '...'}, not {WORDS[kind]}"
    if isinstance(shape, list):
        return first_misfit((entry, shape[0], f"{path}[{number}]") for number, entry in enumerate(value))
    if not isinstance(shape, dict):
        return ""
    named = {key.removesuffix("?"): entry for key, entry in shape.items() if key is not str}
    if missing := [key for key in shape if key is not str and not key.endswith("?") and key not in value]:
        return f"{' and '.join(dotted(path, key) for key in missing)} {'is' if len(missing) == 1 else 'are'} missing"
    others = shape.get(str, object)
    return first_misfit((entry, named.get(key, others), dotted(path, key)) for key, entry in value.items())


def fits(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; a number must be finite, and a whole one fit into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return kind is object or (kind is bool and isinstance(value, bool))
    return math.isfinite(value) if kind is float else kind is not int or abs(value) < 2**63


def first_misfit(entries: Iterable[tuple[Any, Any, str]]) -> str:
    return next((reason for entry in entries if (reason := misfit(*entry))), "")


def dotted(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

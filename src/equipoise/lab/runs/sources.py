"""The code that a result depends on: its commit, and digests that show later whether the result may have moved.

Digests cover the files of a recipe's model, task, solver and gradient rule, and everything of the package that these
import, down to the solvers. Comments, docstrings, empty lines and the code of pictures do not count, nor does the lab:
it reads data and counts epochs.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import equipoise
from equipoise.lab.recipes.build import GRADIENTS, SOLVERS
from equipoise.models import MODELS
from equipoise.tasks import TASKS

PACKAGE = Path(equipoise.__file__).parent
ROOMS = ("problem", "solvers", "gradients", "fixed_point", "stability", "operators", "joint", "models", "tasks")
UNCOUNTED = ("tasks/drawing.py", "tasks/__init__.py", "models/__init__.py")  # pictures, and tables of all names
NAMED = {"model": MODELS, "task": TASKS, "solver": SOLVERS, "gradient": GRADIENTS}

IMPORT = re.compile(r"^[ \t]*from equipoise\.([\w.]+) import (\([^)]*\)|.*)", re.M)
NAME = re.compile(r'"equipoise\.([\w.]+):\w+"')  # in a table of names
DOCSTRING = re.compile(r'(?:\A|(?<=:\n))[ \t]*r?"""(?:[^"\\]|\\.|"(?!""))*"""', re.S)
COMMENT = re.compile(r"(?:^[ \t]*|  )#(?: .*|!.*)?$", re.M)
CHANGED = "changed while training"  # in place of a digest


@cache
def commit(folder: Path = PACKAGE) -> str | None:
    """Return the commit that a package's folder is checked out from, with "-dirty" after it if a file was changed.

    None if the package does not come from a git checkout, or git is not installed.
    """
    git = ["git", "--no-optional-locks", "-C", str(folder)]

    def ask(*words: str) -> str:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")  # else it is installed inside somebody else's repository
        return ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def source_digests(tables: dict[str, Any]) -> dict[str, str]:
    """Return a digest of every file that a recipe's computation depends on, by its path in the package.

    Args:
        tables: tables of the recipe after all changes.
    """
    found: dict[str, str] = {}
    waiting = [file for module in named_modules(tables) for file in files_of(module)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path], imported = examined(path)
            waiting += imported
    return dict(sorted(found.items()))


def named_modules(tables: dict[str, Any]) -> Iterator[str]:
    """Yield the modules, without the package's name, of what a recipe and its phases name."""
    phases = tables.get("phases")
    for table in [tables, *(phases if isinstance(phases, list) else [])]:
        for section, registry in NAMED.items():
            named = table.get(section) if isinstance(table, dict) else None
            name = named.get("name") if isinstance(named, dict) else None
            if isinstance(name, str) and name in registry.entries:  # else the user's own
                yield registry.entries[name].partition(":")[0].removeprefix("equipoise.")


def files_of(module: str) -> list[str]:
    """Return the file of a module, as its path in the package; an empty list if it does not count."""
    if module.partition(".")[0] not in ROOMS:
        return []
    stem = module.replace(".", "/")
    return [
        path for path in (f"{stem}.py", f"{stem}/__init__.py") if path not in UNCOUNTED and (PACKAGE / path).exists()
    ]


@cache
def examined(path: str) -> tuple[str, list[str]]:
    """Return the digest of a file, and the files that it imports, anywhere in it."""
    text = (PACKAGE / path).read_text(encoding="utf-8")
    imported: list[str] = []
    for module, names in [*IMPORT.findall(text), *((module, "") for module in NAME.findall(text))]:
        inside = [f"{module}.{name}" for name in re.findall(r"\w+", names)]
        imported += [file for each in (module, *inside) for file in files_of(each)]
    return hashlib.blake2b(code_of(text).encode(), digest_size=6).hexdigest(), imported


def code_of(text: str) -> str:
    """Return the code of a file in the package's format without comments, docstrings and empty lines."""
    lines = DOCSTRING.sub("", COMMENT.sub("", text)).split("\n")
    return "\n".join(line for line in map(str.rstrip, lines) if line)


def still(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Return digests from the start of training, marked where they are others at its end."""
    return {path: digest if now.get(path) == digest else CHANGED for path, digest in before.items()}


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files that differ between two sets of digests, or are in only one of them."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))

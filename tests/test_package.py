"""The house: what may import what, what import costs, what is public."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import equipoise as eq

ROOT = Path(eq.__file__).parent
# Rooms from top to bottom; a room imports only from rooms above it (and, within solvers/, from its own floor).
ROOMS = [
    "command_start",
    "validation",
    "registry",
    "solution",
    "tolerance",
    "compiled",
    "scope",
    "captures",
    "layout",
    "problem",
    "independence",
    "rescaled",
    "solvers",
    "graph",
    "gradient_paths",
    "implicit",
    "gradients",
    "fixed_point",
    "norms",
    "stability",
    "diagnose",
    "operators",
    "models",
    "tasks",
    "lab",
    "cli",
    "__main__",
]


def imports(path: Path) -> set[str]:
    """Rooms that a file imports at run time."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body.clear()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equipoise."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("relative")
    return found


def test_every_file_is_in_the_plan():
    here = {p.stem for p in ROOT.glob("*.py")} | {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    assert here - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_above_it(room):
    above = set(ROOMS[: ROOMS.index(room)])
    files = list((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]
    for file in files:
        allowed = above | ({room} if room in file.relative_to(ROOT).parts else set())
        assert imports(file) <= allowed, f"{file.name} imports {imports(file) - allowed}"


def test_solvers_know_nothing_of_modules():
    for file in (ROOT / "solvers").glob("*.py"):
        assert "torch.nn" not in file.read_text()
        assert "import nn" not in file.read_text()


def test_public_names_exist_and_are_documented():
    for name in eq.__all__:
        assert getattr(eq, name).__doc__, name


def test_import_loads_torch_and_itself_only():
    code = """
import json, sys
import torch
before = set(sys.modules)
import equipoise
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = {name.split(".")[0] for name in json.loads(done.stdout)}
    heavy = added - {"equipoise"} - set(sys.stdlib_module_names)
    assert heavy <= {"torch"}, heavy


def test_import_adds_little_to_importing_torch():
    command = [sys.executable, "-X", "importtime", "-c", "import torch, equipoise"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    rows = [line.split("|") for line in lines[1:]]  # after the heading
    cumulative = {row[2].strip(): int(row[1]) for row in rows}
    # A ratio, not a time: machines differ.
    assert cumulative["equipoise"] < 0.1 * cumulative["torch"], cumulative["equipoise"]

"""The house: what may import what, what import costs, what is public."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import equipoise as eq

ROOT = Path(eq.__file__).parent
# Rooms from top to bottom: a room imports only from itself and from rooms above it, also for type checking. A folder
# is one room, so that a new file in it needs no line here; the lab is divided further.
ROOMS = [
    *("command_start", "options", "registry", "solution", "tolerance"),
    *("problem", "solvers", "gradients", "fixed_point", "stability", "diagnose"),  # down to here: the core
    *("hoist", "operators", "joint", "models", "tasks"),
    *("lab.trust", "lab.files", "lab.printable", "lab.data", "lab.recipes", "lab.runs", "lab.training", "lab.results"),
    *("papers", "weights", "onnx", "export", "page", "cli", "__main__"),
]


def room_of(module: str) -> str:
    """The room of a module such as "lab.data.sets.idx", named without the package."""
    return next((room for room in ROOMS if module == room or module.startswith(f"{room}.")), module)


def modules() -> dict[str, Path]:
    """Every module of the package but the ``__init__`` files that only introduce their folder to the outside."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}
    return {
        name.removesuffix(".__init__"): path for name, path in files.items() if name not in ("__init__", "lab.__init__")
    }


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.partition(".")[2] for name in named if name.startswith("equipoise.")}


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in modules()} <= set(ROOMS)


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_from_rooms_above_it(module):
    above = set(ROOMS[: ROOMS.index(room_of(module)) + 1])
    upward = {name for name in imports(modules()[module]) if name != "__version__" and room_of(name) not in above}
    assert not upward, f"{module} imports {', '.join(sorted(upward))}, which is below it in the list of rooms"


def test_the_core_is_short_enough_to_read():
    core = ROOMS[ROOMS.index("options") : ROOMS.index("diagnose") + 1]
    files = [file for room in core for file in (ROOT / f"{room}.py", *(ROOT / room).glob("*.py")) if file.is_file()]
    lines = {file: len(file.read_text().splitlines()) for file in files}
    assert sum(lines.values()) <= 5000, lines


def test_the_lab_imports_no_paper():
    """Figures are found by name: the lab works without the folder of any paper."""
    assert not [
        m for m in modules() if m.startswith("lab") and any(i.startswith("papers") for i in imports(modules()[m]))
    ]


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

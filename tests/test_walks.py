"""A reader who follows one solve, or one training run, through the package opens few files."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.lab.data import available
from equipoise.lab.recipes import build, reading

TESTS = Path(__file__).parent
FIXED_POINT_FILES = 9
TRAINING_FILES = 30


SOLVE = """
import torch, equipoise as eq
from walks import files_entered

linear, x = torch.nn.Linear(8, 8), torch.randn(64, 8, requires_grad=True)
linear.weight.data /= 4
solve = lambda: eq.fixed_point(lambda z, x: torch.tanh(linear(z) + x), torch.zeros(1, 8), x).value.sum().backward()
solve()  # what is imported on first use is imported now
print(*files_entered(solve))
"""

TRAIN = """
import sys
from equipoise.cli import main
from walks import files_entered

print(*files_entered(lambda: main(sys.argv[1:])))
"""


def walk(code: str, *arguments: str) -> list[str]:
    """Return the files in the last line that a process prints: once torch.compile was called, solves ask about f."""
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS)
    return run.stdout.splitlines()[-1].split()


def test_a_solve_and_its_gradient() -> None:
    files = walk(SOLVE)
    assert "fixed_point.py" in files
    assert len(files) <= FIXED_POINT_FILES, "\n".join([f"{len(files)} files:", *files])


def test_a_training_run(tmp_path: Path) -> None:
    found = {row.name for row in available() if row.found}
    recipe = "mondeq/mnist-fc" if "mnist" in found else "core/digits"
    files = walk(TRAIN, "train", recipe, "--budget", "smoke", "--runs", str(tmp_path), "--device", "cpu")
    assert list(tmp_path.glob("*/result.json"))
    limit = TRAINING_FILES + (recipe == "core/digits")  # those digits come with scikit-learn, by way of one more file
    assert len(files) <= limit, "\n".join([f"{len(files)} files:", *files])


def test_a_recipe_is_opened_and_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        function = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(reading, "open_recipe")
    counted(build, "check")
    assert main(["train", "core/digits", "--budget", "smoke", "--runs", str(tmp_path), "--device", "cpu"]) == 0
    assert calls == {"open_recipe": 1, "check": 1}

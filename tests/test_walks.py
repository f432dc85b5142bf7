"""A reader who follows one solve, or one training run, through the package opens few files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.data import available
from equipoise.lab.recipes import build, reading
from walks import files_entered

FIXED_POINT_FILES = 9
TRAINING_FILES = 30


def test_a_solve_and_its_gradient() -> None:
    linear = torch.nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight /= 4

    def solve() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        eq.fixed_point(lambda z, x: torch.tanh(linear(z) + x), torch.zeros(4, 8), x).value.sum().backward()

    solve()  # what is imported on first use is imported now
    files = files_entered(solve)
    assert len(files) <= FIXED_POINT_FILES, "\n".join([f"{len(files)} files:", *files])


def test_a_training_run(tmp_path: Path) -> None:
    found = {row.name for row in available() if row.found}
    recipe = "mondeq/mnist-fc" if "mnist" in found else "core/digits"
    command = ["train", recipe, "--budget", "smoke", "--runs", str(tmp_path), "--device", "cpu"]
    files = files_entered(lambda: main(command))
    assert list(tmp_path.glob("*/result.json"))
    assert len(files) <= TRAINING_FILES, "\n".join([f"{len(files)} files:", *files])


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

"""The demo runs from a plain shell, prints what it promises and leaves its plot behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).parent.parent


def run_demo(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_demo_trains_and_plots(tmp_path):
    run = run_demo("--epochs", "2", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^epoch +\d+/2 ", run.stdout, re.M)) == 2
    accuracy = re.search(r"^test accuracy +(\d+\.\d+)% of 360 digits", run.stdout, re.M)
    assert accuracy, run.stdout
    assert float(accuracy[1]) > 80  # two epochs; the whole demo reaches 97 and more
    assert re.search(r"^solver steps +median \d+, most \d+", run.stdout, re.M)
    assert re.search(r"^converged +100\.0% ", run.stdout, re.M)
    plot = tmp_path / "out" / "residuals.png"
    assert f"residual plot   {plot}" in run.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(plot.parent.iterdir()) == [plot]  # no half-written file beside it
    assert "Warning" not in run.stderr, run.stderr


def test_demo_refuses_zero_epochs(tmp_path):
    run = run_demo("--epochs", "0", cwd=tmp_path)
    assert run.returncode == 2
    assert "--epochs must be at least 1" in run.stderr

"""The demo's command runs from a plain shell, prints what it promises and leaves a whole run and its report behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_make_demo_trains_the_default_recipe_and_reports():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: .*\n\t\$\(BIN\)/equipoise train core/digits --report", makefile, re.M)


def test_demo_trains_and_reports(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "equipoise", "train", "core/digits", "phases.0.epochs=2", "--report", "--threads", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^epoch \d+/2 ", run.stdout, re.M)) == 2
    accuracy = re.search(r"^test accuracy +(\d+\.\d+)%", run.stdout, re.M)
    assert accuracy, run.stdout
    assert float(accuracy[1]) > 80  # two epochs; the whole demo reaches 97 and more
    assert re.search(r"^forward solves +100\.0% converged", run.stdout, re.M)
    assert run.stdout.splitlines()[-1].split() == ["report", "runs/core-digits-001/report.html"]
    folder = tmp_path / "runs" / "core-digits-001"
    measured = json.loads((folder / "result.json").read_text())["test"]["accuracy"]
    assert f"{measured:.2%}" == f"{accuracy[1]}%"
    assert not list(folder.rglob("*.part"))
    assert "Warning" not in run.stderr, run.stderr

"""The tutorials of ``examples/`` run at a size of seconds, draw one picture each, and their numbers are plausible."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Constants at the top of each script that make it small, and what must hold even then.
SMOKE = {
    "own_layer": ({"STEPS": 20}, lambda names: names["solution"].converged.all()),
    "per_sample_stopping": ({}, lambda names: sum(names["per_sample"]) < 0.2 * sum(names["rows"])),
    "compare_solvers": ({}, lambda names: not names["failed"].converged.any() and names["solution"].converged.all()),
    "guarantee": ({"EPOCHS": 1}, lambda names: names["broken"] == 0 and (names["radius"] > 0).any()),
    "objective": ({"EPOCHS": 1}, lambda names: falls(names["curves"]["proximal gradient"])),
    "multiscale": (
        {"WARM_UP": 2, "STEPS": 1},
        lambda names: len(names["moved"]) == len(names["labelled"]) and names["labels"].shape == (100, 32, 32),
    ),
    "restore": ({"WARM_UP": 8, "STEPS": 1}, lambda names: names["optimum"].cost.isfinite().all()),
    "generate": (
        {"WARM_UP": 4, "STEPS": 1, "LATENTS": 40},
        lambda names: names["samples"].shape == (12, 1, 8, 8) and names["samples"].isfinite().all(),
    ),
    "attack_and_defend": (
        {"EPOCHS": 1, "DEFENCE": 0, "TESTED": 8},
        lambda names: (names["changed"] - names["images"][names["test"]]).flatten(1).norm(dim=1).max() <= 1.2,
    ),
    "one_example": ({"STEPS": 2, "TASKS": 4}, lambda names: len(names["accuracy"]) == len(names["counts"])),
    "two_processes": ({"EPOCHS": 1}, lambda names: names["apart"] < 1e-2),
    "sudoku": ({"UPDATES": 8, "PUZZLES": 40, "STARTS": 2}, lambda names: len(names["grids"]) == 288),
    "export": ({"EPOCHS": 1}, lambda names: names["largest"] < 1e-4),
}
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "settling")
MARKS = {
    "two_processes": pytest.mark.slow,  # it starts three processes
    # Whether solves converge after so few training steps depends on the processor.
    "multiscale": pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning"),
}


def falls(values):
    return all(after <= before + 1e-4 * abs(before) for before, after in pairwise(values))


def shrunk(source, constants):
    """The code of a script with other values of constants, and the names that were replaced."""
    tree, replaced = ast.parse(source), set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for i, target in enumerate(targets):
                if isinstance(target, ast.Name) and target.id in constants and target.id not in replaced:
                    replaced.add(target.id)
                    new = ast.Constant(constants[target.id])
                    if isinstance(node.value, ast.Tuple):
                        values[i] = new
                    else:
                        node.value = new
    return ast.fix_missing_locations(tree), replaced


@pytest.mark.parametrize("script", [pytest.param(p, id=p.stem, marks=MARKS.get(p.stem, ())) for p in SCRIPTS])
def test_tutorial_runs(script, monkeypatch, capsys, tmp_path):
    constants, holds = SMOKE[script.stem]
    tree, replaced = shrunk(script.read_text(), constants)
    assert replaced == set(constants)
    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.chdir(tmp_path)
    source = str(Path(__file__).parent.parent / "src")
    monkeypatch.setenv("PYTHONPATH", source)  # of processes that a tutorial starts
    names = {"__name__": "__main__"}
    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    try:
        exec(compile(tree, str(script), "exec", dont_inherit=True), names)
        assert len(plt.get_fignums()) == 1
        plt.gcf().canvas.draw()
    finally:
        plt.close("all")
        plt.switch_backend(before)
    assert holds(names)
    assert capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_tutorial_is_one_short_page(script):
    text = script.read_text()
    assert sum(1 for line in text.splitlines() if line.strip() and not line.startswith("#")) <= 80
    assert re.match(r'"""\n(.+)\n(=+)\n\n', text), "a title with a line below it"
    title, line = text.splitlines()[1:3]
    assert len(title) == len(line)
    assert max(map(len, text.splitlines())) <= 120

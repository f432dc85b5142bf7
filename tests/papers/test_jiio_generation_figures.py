"""Cost over time of latent vectors: what is timed, what is scored, and what is written beside the picture."""

import json
from itertools import pairwise

import pytest
import torch

from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.papers.jiio.generation_figures import METHODS, cost_over_time, course, times_to_adam
from equipoise.tasks.generation import squared_error
from lab_helpers import run
from tiny_generator import tiny

RECIPE = """
title = "a generator of digits"
[data]
name = "digits"
limit = 20
validation = 0
[model]
name = "generator"
latent = 4
channels = [8, 8]
downsamplings = 0
expansion = 1.0
[task]
name = "generation"
steps = 4
penalty_from = 2
[training]
batch_size = 20
[[phases]]
epochs = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generator")
    (folder / "digits.toml").write_text(RECIPE)
    run(folder, "train", "digits.toml")
    return open_run(folder / "runs/digits-001")


def test_every_method_is_drawn_and_its_numbers_are_written(trained, tmp_path):
    with this_machine() as machine:
        figure = cost_over_time(
            [trained], machine, methods=list(METHODS), samples=2, steps=5, adam_steps=3, path=tmp_path / "a.png"
        )
    assert len(figure.axes[0].get_lines()) == len(METHODS)
    (entry,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert entry["methods"].keys() == METHODS.keys()
    assert entry["seconds to Adam's cost"]["adam"] is not None


def test_times_increase_and_costs_are_those_of_the_solved_images():
    model = tiny()
    with torch.no_grad():
        truth = model(torch.randn(3, 3, dtype=torch.float64))
        curve = course(model, truth, METHODS["joint"].solver, 30)
        blank = torch.zeros(3, 3, dtype=torch.float64)
        first = squared_error(model(blank), blank, truth).mean().item()
    assert all(a < b for a, b in pairwise(curve["seconds"]))
    assert curve["cost"][0] == pytest.approx(first, rel=1e-6)  # of x = 0, where all methods begin
    assert min(curve["cost"]) < 0.7 * first


def test_time_to_the_cost_of_adam():
    curves = {
        "adam": {"seconds": [1.0, 2.0, 3.0], "cost": [0.9, 0.4, 0.5]},
        "joint": {"seconds": [0.1, 0.2], "cost": [0.5, 0.3]},
        "none": {"seconds": [0.1], "cost": [0.8]},
    }
    assert times_to_adam(curves) == {"adam": 2.0, "joint": 0.2, "none": None}
    assert times_to_adam({"joint": curves["joint"]}) == {}


def test_unknown_methods_are_rejected(trained):
    with this_machine() as machine, pytest.raises(ValueError, match="method 'type1'; did you mean 'type-1'"):
        cost_over_time([trained], machine, methods=["type1"])

"""Table 2 of the JIIO paper, drawn by the command line from a small model."""

import pytest
import torch

from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine
from equipoise.papers.jiio.attack_figures import attack_time
from figure_helpers import drawn_figure
from training_helpers import train_here

RECIPE = """
title = "A small classifier"

[data]
name = "digits"
limit = 60
validation = 20

[task]
name = "robustness"
norm = "l2"
radius = 1.0
steps = 2

[model]
name = "conv-equilibrium"
channels = 4

[training]
batch_size = 20

[[phases]]
epochs = 1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("jiio"), "small", RECIPE)


def test_table_2_times_every_attack_on_the_same_images(run, tmp_path):
    (tmp_path / "small.toml").write_text(RECIPE)
    text = 'figure = "jiio-attack_time"\nsamples = 5\nsteps = 2\njoint_steps = [3, 6]'
    (numbers,) = drawn_figure(tmp_path, text, ["small"], [run])["runs"]
    names = [entry["attack"] for entry in numbers["attacks"]]
    assert names == ["PGD, 2 steps", "joint, 3 steps", "joint, 6 steps"]
    assert (numbers["samples"], numbers["radius"], numbers["norm"]) == (5, 1.0, "l2")
    for entry in numbers["attacks"]:
        assert entry["seconds"] > 0
        assert entry["accuracy"] <= numbers["clean"]
        assert entry["accuracy"] * 5 == pytest.approx(round(entry["accuracy"] * 5))
    assert numbers["attacks"][0]["speed-up"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [({"samples": 0}, "samples"), ({"steps": 0}, "steps"), ({"joint_steps": []}, "joint_steps is \\[\\]")],
)
def test_bad_options_get_their_sentence(run, options, words):
    with pytest.raises(ValueError, match=words):
        attack_time([open_run(run)], Machine(torch.device("cpu")), **options)

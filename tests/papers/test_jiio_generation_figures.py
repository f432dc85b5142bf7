"""Latent vectors: what is timed, scored and drawn, and what is written beside the picture."""

import json
from itertools import pairwise

import pytest
import torch

from digit_generator import RECIPE
from equipoise.cli import main
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import FigureSpec
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.papers.jiio.generation_figures import METHODS, cost_over_time, course, fitting_time, times_to_adam
from equipoise.papers.jiio.sample_figures import generated
from equipoise.tasks.latent_vectors import squared_error
from lab_helpers import run
from tiny_generator import tiny


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


def test_figure_3_and_table_3_take_one_run_or_two(trained, tmp_path, capsys):
    run = ["--run", str(trained.folder)]
    for name, options in (("figure3", []), ("table3", ["steps=[2,3]", "repeats=1"])):
        for count in (1, 2):
            words = ["samples=2", "adam_steps=2", *options, "--budget", "smoke", "--threads", "1", *(run * count)]
            assert main(["figure", f"jiio/{name}", *words, "--out", str(tmp_path / f"{name}.png")]) == 0
            assert len(json.loads((tmp_path / f"{name}.json").read_text())["runs"]) == count
        assert main(["figure", f"jiio/{name}", *(run * 3)]) == 2
        assert f"jiio/{name} requires 1 to 2 runs (jiio/celeba, jiio/celeba-100), got 3." in capsys.readouterr().err


def test_table_3_times_every_method_on_the_same_images(trained, tmp_path):
    with this_machine() as machine:
        options = {"samples": 2, "steps": [2, 4], "adam_steps": 2, "repeats": 2}
        figure = fitting_time([trained], machine, **options, path=tmp_path / "a.png")
    (entry,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    adam, *joint = entry["methods"].values()
    assert list(entry["methods"]) == [
        "Adam, cold solves, 2 steps",
        "joint, default, 2 steps",
        "joint, default, 4 steps",
        "joint, Anderson type I, 2 steps",
        "joint, Anderson type I, 4 steps",
    ]
    assert (adam["speed-up"], len(adam["seconds"])) == (1, 2)
    assert all(method["evaluations"] < adam["evaluations"] for method in joint)
    assert len(figure.axes[0].patches) == 5


@pytest.mark.parametrize(("samples", "reconstructions"), [(3, 0), (0, 2), (10, 9)])
def test_samples_and_reconstructions(trained, tmp_path, samples, reconstructions):
    with this_machine() as machine:
        options = {"samples": samples, "reconstructions": reconstructions, "steps": 5, "latents": 24}
        figure = generated([trained], machine, **options, path=tmp_path / "a.png")
    images = sum(len(axis.images) for axis in figure.axes)
    assert images == samples + 2 * reconstructions
    (entry,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert len(entry.get("psnr", [])) == reconstructions
    assert entry.get("samples", 0) == samples
    captions = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert captions == [f"{ratio:.1f} dB" for ratio in entry.get("psnr", [])]


def test_figures_2_5_and_6_differ_in_their_counts():
    counts = {n: open_recipe(f"jiio/figure{n}").read(FigureSpec).options for n in (2, 5, 6)}
    drawn = {n: (options["samples"] > 0, options["reconstructions"] > 0) for n, options in counts.items()}
    assert drawn == {2: (True, False), 5: (True, True), 6: (False, True)}


@pytest.mark.parametrize(
    ("draw", "options", "words"),
    [
        (generated, {"samples": 0, "reconstructions": 0}, "samples and reconstructions are both 0; at least one"),
        (generated, {"samples": -1}, "samples is -1; it must be a whole number of at least 0"),
        (generated, {"latents": 5}, "latents is 5; it must be a whole number of at least 20"),
        (fitting_time, {"steps": []}, r"steps is \[\]; it must list at least one number of steps"),
        (fitting_time, {"steps": 40}, "steps is 40; it must list at least one number of steps"),
        (fitting_time, {"steps": [0]}, "steps is 0; it must be a whole number of at least 1"),
        (fitting_time, {"repeats": 0}, "repeats is 0"),
    ],
)
def test_bad_options_get_their_sentence(trained, draw, options, words):
    with this_machine() as machine, pytest.raises(ValueError, match=words):
        draw([trained], machine, **options)

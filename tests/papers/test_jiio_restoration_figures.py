"""Strips of restored images: drawn from runs, with the numbers that the functions measure; recipes that can be read."""

import json

import pytest
import torch

from equipoise.cli import main
from equipoise.lab.recipes.build import check
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.results.reproduce import figure_functions, rows
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.papers.jiio.restoration_figures import restorations

RECIPES = ["celeba-inpaint", "celeba-denoise", "celeba-deblur", "celeba-restore", "celeba-vae-restore"]
BLOBS = """
title = "Blobs"

[data]
name = "image-folder"
folder = "blobs"
size = 16
validation = 0

[task]
name = "restoration"
supervised = {supervised}
problem = "inpaint"
amount = 5
steps = 6
train_steps = 4
backward_steps = 4

[model]
name = "generator"
size = "small-2"
channels = [8, 8]
latent = 8

[training]
batch_size = 4
evaluation_batch_size = 4

[[phases]]
epochs = 1
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A supervised and an unsupervised generator, hardly trained, of pictures of one colour each."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("work")
    (folder / "data/blobs/all").mkdir(parents=True)
    for i in range(30):
        Image.new("RGB", (16, 16), (8 * i, 100, 255 - 8 * i)).save(folder / f"data/blobs/all/{i}.png")
    for name in ("true", "false"):
        (folder / f"{name}.toml").write_text(BLOBS.format(supervised=name))
        words = ["--data", folder / "data", "--runs", folder / "runs", "--threads", "1"]
        assert main(["train", str(folder / f"{name}.toml"), *map(str, words)]) == 0
    return [open_run(folder / f"runs/{name}-001") for name in ("true", "false")]


def test_runs_restore_the_same_measurements(runs, tmp_path):
    path = tmp_path / "strips.png"
    with this_machine("cpu", 1) as machine:
        folders = [runs[0].folder.parents[1] / "data"]
        figure = restorations(runs, machine, folders, problem="inpaint", amount=5, samples=1, steps=8, path=path)
    figure.savefig(path)
    numbers = json.loads(path.with_suffix(".json").read_text())
    first, second = (run["psnr"] for run in numbers["runs"])
    assert first["given"] == pytest.approx(second["given"])
    assert list(first) == ["given", "step 1", "step 2", "step 4", "restored", "filled"]
    assert first["filled"][0] > first["restored"][0]
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles == ["Blobs", "Blobs"]


def test_strips_can_start_from_generated_images(runs, tmp_path):
    """Both runs restore the samples of the first, which the second could not have drawn."""
    path = tmp_path / "strips.png"
    with this_machine("cpu", 1) as machine:
        options = {"folders": [runs[0].folder.parents[1] / "data"], "samples": 2, "steps": 4, "amount": 5}
        restorations(runs, machine, **options, source="generated", path=path)
        with pytest.raises(ValueError, match="source is 'web'; allowed: 'test', 'generated'"):
            restorations(runs, machine, **options, source="web")
    numbers = json.loads(path.with_suffix(".json").read_text())
    assert numbers["source"] == "generated"
    assert [(run.folder / "density-best.safetensors").exists() for run in runs] == [True, False]
    first, second = (run["psnr"]["given"] for run in numbers["runs"])
    assert first == pytest.approx(second)


def test_a_network_without_joint_steps_is_refused(runs, tmp_path, capsys):
    recipe = BLOBS.format(supervised="true").replace('"generator"', '"conv-ae"').replace('size = "small-2"\n', "")
    (tmp_path / "network.toml").write_text(recipe.replace("[8, 8]", "[8, 8, 8]"))
    words = ["--data", runs[0].folder.parents[1] / "data", "--runs", tmp_path, "--threads", "1"]
    assert main(["train", str(tmp_path / "network.toml"), *map(str, words)]) == 0
    with (
        this_machine("cpu", 1) as machine,
        pytest.raises(ValueError, match="without joint steps"),
    ):
        restorations([open_run(tmp_path / "network-001")], machine, amount=5)


def test_a_supervised_run_changes_its_weights(runs):
    weights = [torch.cat([p.detach().flatten() for p in load(run).parameters()]) for run in runs]
    assert not torch.equal(*weights)
    for run in runs:
        assert run.result is not None
        assert {"median psnr", "median filled psnr", "median plain psnr"} <= run.result["test"].keys()


def load(run):
    import equipoise as eq

    return eq.load(run.folder)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("budget", ["smoke", "small", None])
def test_recipes_can_be_built(name, budget):
    recipe = open_recipe(f"jiio/{name}", budget)
    check(recipe)


def test_the_table_has_recipes_that_share_runs():
    pairs = rows(open_recipe("jiio/table4"), "smoke", [])
    assert len(pairs) == 36
    distinct = []
    for _, recipe in pairs:
        if recipe.tables not in distinct:
            distinct.append(recipe.tables)
    assert len(distinct) == 14
    assert all("psnr" in row.metric for row, _ in pairs)


def test_every_figure_names_the_function():
    assert figure_functions()["jiio-restorations"] is restorations
    for number in range(7, 13):
        source = open_recipe(f"jiio/figure{number}")
        assert source.tables["figure"] == "jiio-restorations"
        assert f"figure {number}" in source.tables["title"]
        for name in source.tables["recipes"]:
            check(open_recipe(name.split()[0], None, name.split()[1:]))

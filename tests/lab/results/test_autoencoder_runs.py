"""Commands for generators on a run of a convolutional autoencoder, and a table of distances, trained for seconds."""

import json

import pytest
import torch
from PIL import Image

import equipoise as eq
from equipoise.lab.data.files.places import MissingData
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.results.reproduce import reproduce_table
from equipoise.lab.results.restore import Request, restore_image
from equipoise.lab.results.sample import interpolate_images, latent_vectors, sample_images
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.lab.training.trainer import train_run
from equipoise.models.generator.convolutional import ConvAE

RECIPE = """
title = "an autoencoder of digits"
[data]
name = "digits"
limit = 40
validation = 10
[model]
name = "conv-ae"
latent = 4
channels = [8, 8, 8]
[task]
name = "autoencoding"
[training]
batch_size = 20
[[phases]]
epochs = 1
"""
TABLE = """
title = "distances of digits"
distances = "classifier"
[[rows]]
label = "samples"
recipe = "digits.toml"
metric = "Fréchet distance (not FID) of samples"
[[rows]]
label = "reconstructions"
recipe = "digits.toml"
metric = "Fréchet distance (not FID) of reconstructions"
[[rows]]
label = "quality"
recipe = "digits.toml"
metric = "psnr"
"""


@pytest.fixture(scope="module")
def machine():
    with this_machine("cpu", 1) as machine:
        yield machine


@pytest.fixture(scope="module")
def trained(tmp_path_factory, machine):
    folder = tmp_path_factory.mktemp("ae")
    (folder / "digits.toml").write_text(RECIPE)
    for name in ("one.png", "two.png"):
        Image.new("L", (8, 8), 200).save(folder / name)
    return open_run(train_run(open_recipe(str(folder / "digits.toml")), folder / "runs", machine))


def test_latent_vectors_are_those_of_the_encoder(trained, machine):
    images = 2 * torch.rand(3, 1, 8, 8) - 1
    loaded = open_trained(trained, machine)
    with torch.no_grad():
        found = latent_vectors(loaded, loaded.model.decoder, images)
        torch.testing.assert_close(found, loaded.model.codes(images))
    assert isinstance(eq.load(trained.folder), ConvAE)


def test_commands_for_generators(trained, machine):
    folder = trained.folder.parent.parent
    density = sample_images(trained, machine, folder / "a.png", 4, latents=20)
    assert density is not None
    assert (trained.folder / "density-best.safetensors").is_file()
    assert not interpolate_images(
        trained, machine, folder / "one.png", folder / "two.png", folder / "between.png", frames=3
    )
    request = Request(folder / "one.png", "inpaint", 3, steps=6)
    assert restore_image(trained, request, machine, folder / "strip.png").misfit > 0
    assert all((folder / name).is_file() for name in ("a.png", "between.png", "strip.png"))


def test_a_network_that_restores_without_joint_steps_says_so(trained, machine, tmp_path):
    task = '"restoration"\nproblem = "inpaint"\namount = 3\n'
    (tmp_path / "network.toml").write_text(RECIPE.replace('"autoencoding"', task))
    run = open_run(train_run(open_recipe(str(tmp_path / "network.toml")), tmp_path / "runs", machine))
    request = Request(trained.folder.parent.parent / "one.png", "inpaint", 3, steps=6)
    restored = restore_image(run, request, machine, tmp_path / "strip.png")
    assert restored.notes == ["the run was trained to map measurements to images: there are no joint steps."]
    assert not restore_image(trained, request, machine, tmp_path / "other.png").notes


def test_a_table_of_distances(trained, machine, capsys):
    folder = trained.folder.parent.parent
    (folder / "table.toml").write_text(TABLE)
    made = reproduce_table(str(folder / "table.toml"), None, [], folder / "tables", machine, [])
    assert "Fréchet distance (not FID) of samples" in made.read_text()
    lines = json.loads((made.parent / "table.json").read_text())["rows"]
    (kept,) = made.parent.glob("row-1/*/result.json")
    numbers = json.loads(kept.read_text())["test"]
    assert [line["measured"] for line in lines] == [numbers[line["metric"]] for line in lines]
    of = ("samples", "reconstructions", "training images")
    assert numbers.keys() >= {f"Fréchet distance (not FID) of {images}" for images in of}
    assert lines[0]["measured"] > 0


def test_the_fid_needs_its_network_before_anything_is_trained(trained, machine, monkeypatch):
    monkeypatch.setattr("equipoise.lab.results.features.INCEPTION_FILES", ("not-here.pth",))
    folder = trained.folder.parent.parent
    (folder / "fid.toml").write_text(TABLE.replace('"classifier"', '"inception"'))
    with pytest.raises(MissingData, match="the FID needs the Inception network"):
        reproduce_table(str(folder / "fid.toml"), None, [], folder / "tables", machine, [])
    assert not list((folder / "tables").glob("*/row-1/fid*"))
    assert not list((folder / "tables").glob("fid*/row-1"))

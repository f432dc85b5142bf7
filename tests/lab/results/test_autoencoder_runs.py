"""Commands for generators on a run of a convolutional autoencoder, and a table of distances, trained for seconds."""

import json

import pytest
import torch
from PIL import Image

import equipoise as eq
from equipoise.lab.results.sample import latent_vectors
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.models.generator.convolutional import ConvAE
from lab_helpers import run

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
RUN = "runs/digits-001"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ae")
    (folder / "digits.toml").write_text(RECIPE)
    run(folder, "train", "digits.toml")
    for name in ("one.png", "two.png"):
        Image.new("L", (8, 8), 200).save(folder / name)
    return folder


def test_latent_vectors_are_those_of_the_encoder(trained):
    images = 2 * torch.rand(3, 1, 8, 8) - 1
    with this_machine("cpu", 1) as machine:
        loaded = open_trained(open_run(trained / RUN), machine)
        with torch.no_grad():
            torch.testing.assert_close(latent_vectors(loaded, loaded.model.decoder, images), loaded.model.codes(images))
    assert isinstance(eq.load(trained / RUN), ConvAE)


def test_commands_for_generators(trained):
    assert "Gaussians" in run(trained, "sample", RUN, "-n", 4, "--latents", 20, "-o", "a.png")
    assert (trained / RUN / "density-best.safetensors").is_file()
    run(trained, "interpolate", RUN, "one.png", "two.png", "--frames", 3, "-o", "between.png")
    assert "misfit" in run(trained, "restore", RUN, "one.png", "--inpaint", 3, "--steps", 6, "-o", "strip.png")
    assert (trained / "strip.png").is_file()


def test_a_table_of_distances(trained):
    (trained / "table.toml").write_text(TABLE)
    text = run(trained, "reproduce", "table.toml")
    assert "Fréchet distance (not FID) of samples" in text
    (folder,) = (trained / "runs").glob("table-*")
    lines = json.loads((folder / "table.json").read_text())["rows"]
    (kept,) = folder.glob("row-1/*/result.json")
    numbers = json.loads(kept.read_text())["test"]
    assert [line["measured"] for line in lines[:2]] == [numbers[line["metric"]] for line in lines[:2]]
    of = ("samples", "reconstructions", "training images")
    assert numbers.keys() >= {f"Fréchet distance (not FID) of {images}" for images in of}
    assert lines[0]["measured"] > 0
    assert lines[2]["metric"] == "psnr"


def test_the_fid_needs_its_network_before_anything_is_trained(trained):
    (trained / "fid.toml").write_text(TABLE.replace('"classifier"', '"inception"'))
    text = run(trained, "reproduce", "fid.toml", expect=2)
    assert "the FID needs the Inception network" in " ".join(text.split())
    assert not list((trained / "runs").glob("fid-*/row-1"))

"""Commands for generators on a run of a VAE, trained for seconds: they use its decoder."""

import json

import pytest
import torch
from PIL import Image

import equipoise as eq
from equipoise.lab.results.png_files import write_grid
from equipoise.lab.results.sample import decoded, sample_images
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from equipoise.models.generator.vae import MDEQVAE
from lab_helpers import run

RECIPE = """
title = "a VAE of digits"
[data]
name = "digits"
limit = 40
validation = 10
[model]
name = "mdeq-vae"
latent = 4
size = "small-2"
channels = [8, 8]
head_channels = [4, 4]
final_channels = 8
downsamplings = 0
expansion = 1.0
[task]
name = "vae"
[tolerance]
max_steps = 10
[training]
batch_size = 20
[failures]
stop_after = 0
[[phases]]
epochs = 1
"""
RUN = "runs/digits-001"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    (folder / "digits.toml").write_text(RECIPE)
    run(folder, "train", "digits.toml")
    for name in ("one.png", "two.png"):
        Image.new("L", (8, 8), 200).save(folder / name)
    return folder


def test_samples_are_drawn_from_the_prior(trained):
    assert "prior of the VAE, N(0, I)" in run(trained, "sample", RUN, "-n", 4, "-o", "a.png", "--seed", 3)
    assert not list((trained / RUN).glob("density*"))
    with this_machine("cpu", 1) as machine:
        opened = open_run(trained / RUN)
        assert sample_images(opened, machine, trained / "b.png", 4, seed=3) is None
        latent = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
        loaded = open_trained(opened, machine)
        assert isinstance(loaded.model, MDEQVAE)
        write_grid(trained / "c.png", decoded(loaded, loaded.model.decoder, latent))
    assert len({(trained / name).read_bytes() for name in ("a.png", "b.png", "c.png")}) == 1


def test_latents_ask_for_a_density(trained):
    assert "Gaussians" in run(trained, "sample", RUN, "-n", 4, "--latents", 20, "-o", "d.png")
    assert (trained / RUN / "density-best.safetensors").is_file()


def test_images_are_restored_and_interpolated(trained):
    run(trained, "interpolate", RUN, "one.png", "two.png", "--frames", 3, "-o", "between.png")
    assert "misfit" in run(trained, "restore", RUN, "one.png", "--inpaint", 3, "--steps", 6, "-o", "strip.png")
    assert (trained / "between.png").is_file()
    assert (trained / "strip.png").is_file()


def test_a_run_is_evaluated_by_joint_steps(trained):
    printed = run(trained, "evaluate", RUN, "--task", "generation", "steps=6")
    assert "psnr" in printed
    words = ("--task", "restoration", "problem=inpaint", "amount=3", "steps=6", "adam=true")
    assert "median adam psnr" in run(trained, "evaluate", RUN, *words)


def test_cost_over_time_is_drawn(trained):
    from equipoise.papers.jiio.generation_figures import cost_over_time

    with this_machine("cpu", 1) as machine:
        opened = open_run(trained / RUN)
        cost_over_time([opened], machine, methods=["none", "joint"], samples=2, steps=4, path=trained / "e.png")
    (entry,) = json.loads((trained / "e.json").read_text())["runs"]
    assert entry["methods"].keys() == {"none", "joint"}


def test_the_model_can_be_opened(trained):
    model = eq.load(trained / RUN)
    assert isinstance(model, MDEQVAE)
    assert model.decoder.latent == 4

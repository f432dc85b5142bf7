"""The commands sample and interpolate on a generator of digits, trained for seconds."""

import pytest
import torch
from PIL import Image

from digit_generator import RECIPE
from equipoise.lab.results.png_files import write_grid
from lab_helpers import run, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generator")
    (folder / "digits.toml").write_text(RECIPE)
    run(folder, "train", "digits.toml")
    return folder


def size_of(file):
    with Image.open(file) as image:
        return image.size


def test_sample_writes_a_grid_and_keeps_the_density(trained):
    words = ("sample", "runs/digits-001", "-n", 6, "--latents", 40)
    first = run(trained, *words, "-o", "a.png")
    assert "Gaussians" in first
    kept = trained / "runs/digits-001/density-best.safetensors"
    before = kept.read_bytes()
    run(trained, *words, "-o", "b.png")
    run(trained, *words, "-o", "c.png", "--seed", 1)
    assert kept.read_bytes() == before
    pictures = [(trained / name).read_bytes() for name in ("a.png", "b.png", "c.png")]
    assert pictures[0] == pictures[1] != pictures[2]
    assert size_of(trained / "a.png") == (2 * 98 + 2, 3 * 98 + 2)  # 2 columns, enlarged to 96 pixels, with borders


def test_another_number_of_latents_fits_another_density(trained):
    kept = trained / "runs/digits-001/density-best.safetensors"
    run(trained, "sample", "runs/digits-001", "-n", 1, "--latents", 50, "-o", "f.png")
    before = kept.read_bytes()
    run(trained, "sample", "runs/digits-001", "-n", 1, "-o", "g.png")  # any number
    assert kept.read_bytes() == before
    run(trained, "sample", "runs/digits-001", "-n", 1, "--latents", 60, "-o", "h.png")
    assert kept.read_bytes() != before


def test_a_damaged_density_is_reported(trained):
    run(trained, "sample", "runs/digits-001", "-n", 1, "--latents", 40, "-o", "d.png")
    kept = trained / "runs/digits-001/density-best.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:-8] + b"\1" * 8)
    text = run(trained, "sample", "runs/digits-001", "-o", "e.png", expect=2)
    assert "density-best.safetensors is damaged: its checksum does not match" in " ".join(text.split())
    kept.write_bytes(content)


def test_interpolation_runs_from_one_image_to_the_other(trained):
    for name, size in (("one.png", (8, 8)), ("two.png", (16, 12))):
        Image.new("L", size, 200).save(trained / name)
    text = run(trained, "interpolate", "runs/digits-001", "one.png", "two.png", "--frames", 3, "-o", "between.png")
    assert "two.png was cropped in the middle and shrunk from 16 x 12 to 8 x 8" in text
    assert size_of(trained / "between.png") == (5 * 98 + 2, 98 + 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("sample", "RUN", "-n", "0"), "samples is 0; it must be a whole number of at least 1"),
        (("sample", "RUN", "-n", 10**12), "it must be a whole number of at least 1 and at most 10000."),
        (("interpolate", "RUN", "there.png", "there.png", "--frames", 10**30), "of at least 2 and at most 10000."),
        (("sample", "RUN", "--latents", "5"), "latents is 5; it must be a whole number of at least 20"),
        (("sample", "RUN", "-n", "few"), "-n/--samples is 'few'; it must be a whole number."),
        (("sample", "RUN", "--seed", "-1"), "seed is -1; it must be a whole number of at least 0"),
        (("sample", "RUN", "--seed", 2**70), "it must be a whole number of at least 0 and at most 9.22337e+18"),
        (("sample", "nowhere"), "there is no folder nowhere"),
        (("interpolate", "RUN", "there.png", "text.png"), "text.png cannot be read: it is not an image"),
        (("sample", "RUN", "-o", "a.jpg"), "--out is a.jpg; it must be a file that ends in .png"),
        (("sample", "RUN", "-o", "there.png"), "there.png already exists"),
        (("interpolate", "RUN", "there.png", "there.png", "--frames", "1"), "frames is 1"),
        (("interpolate", "RUN", "there.png", "nowhere.png"), "nowhere.png"),
    ],
)
def test_wrong_arguments_get_a_sentence(trained, words, sentence):
    Image.new("L", (8, 8)).save(trained / "there.png")
    (trained / "text.png").write_text("no image")
    text = run(trained, *("runs/digits-001" if word == "RUN" else word for word in words), expect=2)
    assert sentence in " ".join(text.split())


def test_a_run_of_another_model_is_rejected(tmp_path):
    classifier = train(tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    for words in (("sample",), ("interpolate", "a.png", "a.png")):
        text = run(tmp_path, words[0], classifier.folder, *words[1:], "--trust", "lab_helpers", expect=2)
        expected = "which does not generate images: give a run of the model 'generator' or 'mdeq-vae'"
        assert expected in " ".join(text.split())


def test_too_few_training_images_for_a_density(tmp_path):
    (tmp_path / "digits.toml").write_text(RECIPE.replace("limit = 60", "limit = 12").replace("= 10", "= 0"))
    run(tmp_path, "train", "digits.toml")
    text = run(tmp_path, "sample", "runs/digits-001", expect=2)
    assert "runs/digits-001 was trained on 12 images; the density of latent vectors requires at least 20" in text


def test_grid_shows_every_image_where_it_belongs(tmp_path):
    images = torch.linspace(-1, 1, 5)[:, None, None, None].expand(5, 3, 4, 4)
    write_grid(tmp_path / "grid.png", images, columns=3, scale=1)
    with Image.open(tmp_path / "grid.png") as grid:
        levels = [grid.getpixel((2 + 6 * (i % 3), 2 + 6 * (i // 3))) for i in range(6)]
    assert levels == [(0,) * 3, (64,) * 3, (128,) * 3, (191,) * 3, (255,) * 3, (255,) * 3]

"""The command `equipoise restore`: what it writes, against the functions it calls; a sentence for every bad input."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.results.restore import Request, middle, read_image, read_mask
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.tasks.degradations import Degradation
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.physics import Mask
from equipoise.tasks.restore_images import restore

RECIPE = """
title = "Blobs"

[data]
name = "image-folder"
folder = "blobs"
size = 16
validation = 0

[task]
name = "generation"
steps = 8
jacobian = 0.0

[model]
name = "generator"
size = "small-2"
channels = [8, 8]
latent = 8

[optimizer]
name = "adam"
lr = 0.01

[training]
batch_size = 6
evaluation_batch_size = 6

[[phases]]
epochs = 1
"""
SIZE = 16


def blob(side_x, side_y, seed):
    """A soft disc of a random colour on another one, as a picture."""
    draws = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side_y, :side_x] / max(side_x, side_y)
    weight = np.exp(-((rows - draws.uniform(0.3, 0.7)) ** 2 + (columns - draws.uniform(0.3, 0.7)) ** 2) / 0.05)
    colors = draws.uniform(0, 255, (2, 3))
    return Image.fromarray((weight[..., None] * colors[0] + (1 - weight[..., None]) * colors[1]).astype(np.uint8))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A generator of small coloured pictures, trained for some steps."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "data/blobs/all").mkdir(parents=True)
    for i in range(20):
        blob(SIZE, SIZE, i).save(folder / f"data/blobs/all/{i:02}.png")
    (folder / "blobs.toml").write_text(RECIPE)
    words = ["--data", folder / "data", "--runs", folder / "runs", "--threads", "1"]
    assert main(["train", str(folder / "blobs.toml"), *map(str, words)]) == 0
    return folder / "runs/blobs-001"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An otherwise empty current folder with a picture of the run's size, another one, and masks."""
    monkeypatch.chdir(tmp_path)
    blob(SIZE, SIZE, 100).save("face.png")
    blob(45, 30, 101).save("photo.png")
    hole = np.full((SIZE, SIZE), 255, dtype=np.uint8)
    hole[4:9, 5:11] = 0
    Image.fromarray(hole).save("hole.png")
    Image.fromarray(np.zeros((SIZE, SIZE), dtype=np.uint8)).save("black.png")
    Image.fromarray(np.full((SIZE, SIZE), 255, dtype=np.uint8)).save("white.png")
    return tmp_path


def pixels(name):
    image = torch.from_numpy(np.array(Image.open(name))).permute(2, 0, 1)[None]
    return 2 * (image.float() / 255) - 1


PROBLEMS = [("inpaint", 5), ("denoise", 0.2), ("deblur", 1.5), ("upscale", 2)]


@pytest.mark.parametrize(("problem", "amount"), PROBLEMS)
def test_a_picture_is_restored_as_the_function_does(run, here, capsys, problem, amount):
    words = ["restore", str(run), "face.png", f"--{problem}", str(amount), "--steps", "12", "--seed", "3"]
    assert main([*words, "-o", "strip.png", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "written           strip.png" in printed
    assert "note" not in printed

    generator = eq.load(run)
    truth = pixels("face.png")
    y, physics = Degradation(problem, amount).measure(truth, torch.tensor([3]))
    with quiet_failures():
        images, _ = restore(generator, y, physics, steps=12)
    ratio, likeness = re.findall(r"restored +(\S+) dB +(\S+)", printed)[0]
    assert float(ratio) == pytest.approx(float(psnr(images, truth)), abs=0.02)
    assert float(likeness) == pytest.approx(float(ssim(images, truth)), abs=0.002)
    assert re.search(r"given +\S+ dB", printed)
    assert bool(re.search(r"filled +\S+ dB", printed)) == (problem == "inpaint")
    with Image.open("strip.png") as strip:
        assert strip.width > 5 * strip.height / 2  # given, three steps, restored, truth in a row


def test_a_mask_hides_what_is_black(run, here, capsys):
    assert main(["restore", str(run), "face.png", "--mask", "hole.png", "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert (here / "face-restored.png").is_file()
    truth, hole = pixels("face.png"), torch.ones(SIZE, SIZE)
    hole[4:9, 5:11] = 0
    given = float(re.findall(r"given +(\S+) dB", printed)[0])
    assert given == pytest.approx(float(psnr(Mask(hole).A(truth), truth)), abs=0.01)


def test_a_degraded_picture_has_no_truth(run, here, capsys):
    blob(SIZE // 2, SIZE // 2, 102).save("small.png")
    for image, flags in (("small.png", ["--upscale", "2"]), ("face.png", ["--mask", "hole.png"]),
                         ("photo.png", ["--deblur", "1"])):  # fmt: skip
        out = f"{image}-strip.png"
        assert main(["restore", str(run), image, *flags, "--degraded", "--steps", "5", "-o", out]) == 0
        printed = capsys.readouterr().out
        assert "PSNR" not in printed
        assert "misfit" in printed
        assert ("note" in printed) == (image == "photo.png")


def test_another_size_is_cropped_and_resized_and_it_says_so(run, here, capsys):
    assert main(["restore", str(run), "photo.png", "--inpaint", "5", "--steps", "5"]) == 0
    printed = capsys.readouterr().out
    assert "photo.png is 45 x 30: its middle 30 x 30 was cropped and resized to 16 x 16, the size of the" in printed
    image, notes = read_image(Request(here / "face.png", "deblur", 1.0), (3, 32, 32))
    assert image.shape == (3, 32, 32)
    assert notes[0].endswith("is 16 x 16: it was resized to 32 x 32, the size of the generator's images.")


def test_a_mask_is_cropped_and_shrunk_with_its_picture(here):
    """Any pixel that is hidden in part is hidden."""
    hole = np.full((30, 45), 255, dtype=np.uint8)
    hole[10, 20] = 0
    Image.fromarray(hole).save("pinhole.png")
    known = read_mask(here / "pinhole.png", here / "photo.png", (3, 16, 16))
    assert known.shape == (16, 16)
    hidden = (known == 0).nonzero()
    assert 1 <= len(hidden) <= 4
    top, left, rows, columns = middle((30, 45), (16, 16))
    assert (top, left, rows, columns) == (0, 7, 30, 30)
    for row, column in hidden.tolist():
        assert abs((row + 0.5) * 30 / 16 - 10.5) < 1.5
        assert abs((column + 0.5) * 30 / 16 - (20.5 - 7)) < 1.5
    kept = read_mask(here / "hole.png", here / "face.png", (3, 16, 16))
    assert int((kept == 0).sum()) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["face.png"], "give exactly one of --inpaint, --mask, --denoise, --deblur, --upscale; got none."),
        (["face.png", "--inpaint", "5", "--deblur", "1"], "; got --inpaint and --deblur."),
        (["face.png", "--inpant", "5"], "there is no argument '--inpant'; did you mean '--inpaint'?"),
        (["face.png", "--denoise", "-0.1"], "for pixels in [-1, 1]) is -0.1; it must be a number of at least 0."),
        (["face.png", "--deblur", "0"], "is 0.0; it must be a number above 0."),
        (["face.png", "--denoise", "nan"], "is nan; it must be a number of at least 0."),
        (["face.png", "--denoise", "much"], "--denoise is 'much'; it must be a number."),
        (["face.png", "--upscale", "1.5"], "--upscale is '1.5'; it must be a whole number."),
        (["face.png", "--deblur", "-1"], "is -1.0; it must be a number above 0."),
        (["face.png", "--sharpen", "2"], "there is no argument '--sharpen'; options: "),
        (["face.png", "--mask", "hole.png", "--denoise", "0.1"], "; got --mask and --denoise."),
        (["face.png", "--inpaint", "5", "--seed", "-1"], "--seed is -1; it must be a whole number of at least 0"),
        (["face.png", "--inpaint", "0"], "is 0; it must be a whole number of at least 1."),
        (["face.png", "--inpaint", "16"], "a hidden square of side 16 does not fit into images of 16 x 16"),
        (["face.png", "--upscale", "3"], "images of 16 x 16 cannot be shrunk by 3: choose a factor that divides"),
        (["face.png", "--upscale", "3", "--degraded"], "images of 16 x 16 cannot be shrunk by 3"),
        (["face.png", "--upscale", "1"], "is 1; it must be a whole number of at least 2."),
        (["face.png", "--inpaint", "5", "--degraded"], "mark its hidden pixels in black with --mask"),
        (["face.png", "--inpaint", "5", "--steps", "0"], "--steps is 0; it must be a whole number of at least 1"),
        (
            ["face.png", "--inpaint", "5", "--steps", str(10**400)],
            "it must be a whole number of at least 1 and at most",
        ),
        (["face.png", "--denoise", "1e30"], "--denoise is 1e+30; it must be at most 1000: pixels are in [-1, 1]."),
        (["photo.png", "--mask", "hole.png"], "hole.png is 16 x 16, photo.png is 45 x 30; a mask must have the size"),
        (["face.png", "--mask", "black.png"], "black.png hides every pixel of the image; pixels that are black"),
        (["face.png", "--mask", "white.png"], "white.png hides no pixel of the image"),
        (["face.png", "--mask", "nothing.png"], "there is no file nothing.png."),
        (["nothing.png", "--inpaint", "5"], "there is no file nothing.png."),
        (["text.png", "--inpaint", "5"], "text.png cannot be read: it is not an image"),
        (["face.png", "--inpaint", "5", "-o", "face.png"], "face.png already exists: remove it, or give another file"),
        (["face.png", "--inpaint", "5", "-o", "strip.jpg"], "--out is strip.jpg; it must be a file that ends in .png."),
    ],
)
def test_bad_input_gets_a_sentence(run, here, capsys, words, message):
    (here / "text.png").write_text("no image")
    before = sorted(here.iterdir())
    capsys.readouterr()
    try:
        code = main(["restore", str(run), *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(here.iterdir()) == before


def test_only_a_generator_restores(here, capsys):
    words = ["--budget", "smoke", "data.limit=20", "--runs", str(here / "runs"), "--threads", "1"]
    assert main(["train", "core/digits", *words]) == 0
    capsys.readouterr()
    assert main(["restore", str(here / "runs/core-digits-001"), "face.png", "--inpaint", "5"]) == 2
    assert "which does not generate images: give a run of the model 'generator'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_run_is_evaluated_on_restoration(run, capsys):
    words = ["--task", "restoration", "problem=inpaint", "amount=5", "steps=6", "--threads", "1"]
    assert main(["evaluate", str(run), *words, "--data", str(run.parents[1] / "data")]) == 0
    printed = capsys.readouterr().out
    for name in ("psnr", "median psnr", "ssim", "given psnr", "median plain psnr", "misfit"):
        assert re.search(rf"^{name} +-?\d", printed, re.MULTILINE), name

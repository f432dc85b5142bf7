"""`equipoise attack`: the panel it writes, the answers it prints, and a sentence for everything that cannot work."""

import pytest
import torch

from equipoise.cli import main
from equipoise.lab.data import load
from equipoise.lab.results.attack import attack_image
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine
from equipoise.models.conv_equilibrium import ConvEquilibrium
from equipoise.tasks.drawing import attack_panel
from equipoise.tasks.robustness import Robustness
from training_helpers import train_here

Image = pytest.importorskip("PIL.Image")
for package in ("sklearn", "matplotlib"):
    pytest.importorskip(package)

MACHINE = Machine(torch.device("cpu"))
RECIPE = """
title = "A small classifier"

[data]
name = "digits"
limit = 300
validation = 32

[model]
name = "conv-equilibrium"
channels = 8
bound = 0.8

[optimizer]
lr = 1e-2

[training]
batch_size = 30

[[phases]]
epochs = 4
"""


GENERATOR = """
[task]
name = "generation"
steps = 2
penalty_from = 1

[model]
name = "generator"
latent = 4
channels = [8, 8]
downsamplings = 0
expansion = 1.0

[training]
batch_size = 300

[[phases]]
epochs = 1
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a trained run and the image of a digit that it classifies correctly."""
    folder = tmp_path_factory.mktemp("attack")
    train_here(folder, "small", RECIPE).rename(folder / "run")
    images, labels = load("digits", validation=0).test.read(torch.arange(40))
    from equipoise.lab.results.trained import open_trained

    model = open_trained(open_run(folder / "run"), MACHINE).model
    with torch.no_grad():
        right = (model(images.float() / 255).argmax(1) == labels).nonzero()[0].item()
    Image.fromarray(images[right, 0].numpy()).save(folder / "digit.png")
    (folder / "label").write_text(str(labels[right].item()))
    return folder


@pytest.mark.parametrize(
    ("attack", "norm", "radius"), [("jiio", "l2", 2.0), ("pgd", "linf", 0.3), ("jiio", "linf", 0.3)]
)
def test_a_digit_is_misclassified_within_its_radius(work, tmp_path, capsys, attack, norm, radius):
    out, label = tmp_path / "panel.png", (work / "label").read_text()
    words = ["--norm", norm, "--radius", str(radius), "--attack", attack, "--out", str(out), "--threads", "1"]
    assert main(["attack", str(work / "run"), str(work / "digit.png"), "--label", label, *words]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["clean"].startswith(f"{label} 0.")
    assert not printed["attacked"].startswith(f"{label} ")
    assert printed["misclassified"] == f"class {label}"
    assert 0.9 * radius < float(printed["distance"].split()[0]) <= radius
    assert "note" not in printed
    with Image.open(out) as panel:
        assert panel.size[0] > 2 * panel.size[1]


def test_the_answers_and_the_distance_are_those_of_the_attacked_image(work, tmp_path):
    found = attack_image(open_run(work / "run"), work / "digit.png", MACHINE, tmp_path / "a.png", radius=0.5)
    label = (work / "label").read_text()
    assert found.label == label == next(iter(found.clean))
    assert found.distance <= 0.5
    assert found.attacked.get(label, 0.0) < found.clean[label]
    assert all(0 <= p <= 1 for answer in (found.clean, found.attacked) for p in answer.values())
    assert [*found.clean.values()] == sorted(found.clean.values(), reverse=True)


def test_an_image_that_was_misclassified_before_is_no_success_of_the_attack(work, tmp_path, capsys):
    other = str((int((work / "label").read_text()) + 1) % 10)
    words = ["--label", other, "--steps", "2", "--radius", "0.1", "--out", str(tmp_path / "a.png")]
    assert main(["attack", str(work / "run"), str(work / "digit.png"), *words]) == 0
    assert f"\nmisclassified     class {other} (before the attack as well)\n" in capsys.readouterr().out


def test_an_image_of_another_size_is_cropped_and_resized_and_said_so(work, tmp_path):
    run, large = open_run(work / "run"), tmp_path / "large.png"
    Image.open(work / "digit.png").resize((16, 16)).save(large)
    found = attack_image(run, large, MACHINE, tmp_path / "a.png", radius=0.5, steps=3)
    assert "large.png was shrunk from 16 x 16 to 8 x 8, the size" in found.note
    Image.open(work / "digit.png").convert("RGB").resize((24, 16)).save(large)
    found = attack_image(run, large, MACHINE, tmp_path / "b.png", radius=0.5, steps=3)
    assert "large.png was cropped in the middle and shrunk from 24 x 16 to 8 x 8, the size" in found.note


def code_of(words):
    try:
        return main(words)
    except SystemExit as stop:  # of the parser
        return stop.code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--radius", "0"], "--radius is 0.0; it must be a number above 0."),
        (["--radius", "-1"], "--radius is -1.0; it must be a number above 0."),
        (["--radius", "2", "--norm", "linf"], "pixels are between 0 and 1"),
        (["--steps", "0"], "--steps is 0; it must be a whole number of at least 1."),
        (["--label", "12"], "--label is '12'; it must be a number from 0 to 9, or one of 0, 1, 2"),
        (["--label", "cat"], "--label is 'cat'"),
        (["--radius", "nan"], "--radius is nan; it must be a number above 0."),
        (["--radius", "far"], "--radius is 'far'; it must be a number."),
        (["--norm", "l1"], "invalid choice 'l1'; known: l2, linf."),
        (["--attack", "fgsm"], "invalid choice 'fgsm'; known: jiio, pgd, foolbox."),
        (["--out", "panel.jpg"], "--out is panel.jpg; it must be a file that ends in .png."),
    ],
)
def test_bad_arguments_get_their_sentence(work, tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert code_of(["attack", str(work / "run"), str(work / "digit.png"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_no_file_is_overwritten_and_a_missing_image_is_named(work, tmp_path, capsys):
    (tmp_path / "mine.png").write_text("mine")
    assert main(["attack", str(work / "run"), str(work / "digit.png"), "-o", str(tmp_path / "mine.png")]) != 0
    assert "mine.png already exists" in capsys.readouterr().err
    assert main(["attack", str(work / "run"), str(tmp_path / "none.png"), "-o", str(tmp_path / "a.png")]) != 0
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "text.png").write_text("no image")
    assert main(["attack", str(work / "run"), str(tmp_path / "text.png"), "-o", str(tmp_path / "a.png")]) == 2
    assert "text.png cannot be read: it is not an image that can be read; formats: PNG" in capsys.readouterr().err
    assert (tmp_path / "mine.png").read_text() == "mine"


def test_a_run_that_is_not_a_classifier_is_named(work, tmp_path, capsys, monkeypatch):
    from equipoise.tasks.segmentation import Segmentation

    def open_other(*arguments, **options):
        import dataclasses

        from equipoise.lab.results import trained

        return dataclasses.replace(trained.open_trained(*arguments, **options), task=object.__new__(Segmentation))

    monkeypatch.setattr("equipoise.lab.results.attack.open_trained", open_other)
    assert main(["attack", str(work / "run"), str(work / "digit.png"), "-o", str(tmp_path / "a.png")]) != 0
    assert "`equipoise attack` requires a classifier of images" in capsys.readouterr().err


def test_a_generator_is_not_attacked(work, tmp_path, capsys):
    text = RECIPE.split("[model]")[0] + GENERATOR
    (tmp_path / "generator.toml").write_text(text)
    assert main(["train", str(tmp_path / "generator.toml"), "--runs", str(tmp_path / "runs"), "--threads", "1"]) == 0
    capsys.readouterr()
    assert main(["attack", str(tmp_path / "runs/generator-001"), str(work / "digit.png")]) == 2
    said = capsys.readouterr().err
    assert "was trained for the task 'generation'; `equipoise attack` requires a classifier of images" in said
    assert main(["evaluate", str(tmp_path / "runs/generator-001"), "--task", "classification"]) == 2
    assert "a generator maps latent vectors, (batch, 4), to images" in capsys.readouterr().err


def test_a_model_that_cannot_be_taken_apart_is_named(work, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(ConvEquilibrium, "injections")
    monkeypatch.setattr(ConvEquilibrium, "forward", lambda self, x: self.head(self.equilibrium(self.stem(x))))
    words = ["attack", str(work / "run"), str(work / "digit.png"), "-o", str(tmp_path / "a.png"), "--radius", "1"]
    assert main(words) != 0
    assert "ConvEquilibrium cannot be taken apart" in capsys.readouterr().err
    assert main([*words, "--attack", "pgd"]) == 0


# The report's panel


def test_the_panel_shows_the_change_amplified_around_grey():
    clean = torch.full((1, 4, 4), 0.5)
    attacked = clean.clone()
    attacked[0, 1, 2] += 0.1
    figure = attack_panel([(clean, attacked, "a", "b"), (clean, clean, "c", "d")])
    shown = [axis.images[0].get_array()[..., 0] for axis in figure.axes]
    assert shown[1][1, 2] == pytest.approx(1.0)
    assert shown[1][0, 0] == pytest.approx(0.5)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0::2] == ["a", "b", titles[4]]
    assert titles[1].startswith("perturbation x 5")
    assert titles[4].startswith("no perturbation")


def test_the_report_of_a_robustness_run_has_an_attack_panel():
    torch.manual_seed(0)
    model = ConvEquilibrium(shape=(1, 6, 6), classes=3, channels=4).eval()
    batch = torch.rand(8, 1, 6, 6), torch.arange(8) % 3
    task = Robustness(("a", "b", "c"), radius=1.0, norm="l2", attack="jiio", joint_steps=5)
    with torch.no_grad():
        sums = task.measure(model, batch)
        drawn = dict(task.pictures(model, lambda: iter([batch]), sums))
    assert [*drawn][-1] == "Attack by jiio"
    titles = [axis.get_title() for axis in drawn["Attack by jiio"].axes]
    assert len(titles) == 15
    with torch.no_grad():
        guess = int(model(batch[0][:1]).argmax())
    assert titles[0].startswith("abc"[guess])
    assert (", not a" in titles[0]) == (guess != 0)

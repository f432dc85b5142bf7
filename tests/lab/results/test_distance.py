"""The command distance on a generator of digits, trained for seconds."""

import json

import pytest
import torch

from digit_generator import RECIPE
from equipoise.lab.data.files.places import MissingData
from equipoise.lab.results import distance
from equipoise.lab.results.distance import as_files, run_distances
from equipoise.lab.results.features import Features
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import this_machine
from lab_helpers import run, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distances")
    (folder / "digits.toml").write_text(RECIPE)
    run(folder, "train", "digits.toml")
    return folder


def test_distance_prints_numbers_of_images_and_features(trained):
    text = run(trained, "distance", "runs/digits-001", "-n", 30, "--latents", 40, "--json", "a.json")
    assert "distance          Fréchet distance (not FID) from 30 test images" in text
    assert "features          64 features of a small CIFAR-10 classifier, at 32x32" in text
    assert "(30 samples)" in text
    assert "note              30 images are too few for the covariance of 64 features" in text
    record = json.loads((trained / "a.json").read_text())
    titles = {"reconstructions": "reconstructions", "samples": "samples", "training": "training images"}
    for name, title in titles.items():
        assert f"{title:<18}{record[name]:.4g}" in text
    assert 0 < record["training"] < record["samples"]  # the generator has hardly been trained
    with this_machine("cpu") as machine:
        other = run_distances(open_run(trained / "runs/digits-001"), machine, images=30, seed=1).record()
    assert {name for name in record if record[name] != pytest.approx(other[name])} == {"samples"}


def test_the_same_images_are_at_distance_zero(trained, monkeypatch):
    """With the truth in place of the generator's images."""
    given = []

    def remember(trained_run, split):
        for batch in prepared(trained_run, split):
            given.append(batch)
            yield batch

    prepared = distance.prepared
    monkeypatch.setattr(distance, "prepared", remember)
    monkeypatch.setattr(distance, "decoded", lambda trained_run, model, x: given[-1][: len(x)])
    with this_machine("cpu") as machine:
        found = run_distances(open_run(trained / "runs/digits-001"), machine, images=30, latents=40)
    assert found.images == 30
    assert found.reconstructions < 1e-9 < found.training


def test_inception_is_named_as_the_fid(trained, monkeypatch):
    """With a small network in its place."""

    class Means(torch.nn.Module):
        def features(self, images):
            return images.flatten(1)[:, 20:23]

    made = Features("Fréchet inception distance (FID)", "2048 features", 3, Means())  # type: ignore[arg-type]
    monkeypatch.setattr(distance, "open_features", lambda name, folders: {"inception": made}[name])
    with this_machine("cpu") as machine:
        found = run_distances(open_run(trained / "runs/digits-001"), machine, "inception", 30, latents=40)
    assert (found.distance, found.features, found.note) == (made.distance, made.about, "")


@pytest.mark.parametrize(("count", "images"), [(64, 1000), (2048, 20_480)])
def test_a_table_measures_distances_of_enough_images(trained, monkeypatch, count, images):
    """The published FID is that of 20,000."""
    asked = []

    def measured(run_, machine, features, images=1000, **_):
        asked.append(images)
        return distance.Distances("D", "features", images, images, 1.0, 2.0, 3.0)

    made = Features("D", "features", count, torch.nn.Identity())  # type: ignore[arg-type]
    monkeypatch.setattr(distance, "open_features", lambda name, folders: made)
    monkeypatch.setattr(distance, "run_distances", measured)
    monkeypatch.setattr(distance, "write_json", lambda path, content: None)
    with this_machine("cpu") as machine:
        distance.add_distances(trained / "runs/digits-001", machine, "inception")
    assert asked == [images]


def test_images_have_the_levels_of_a_file():
    images = torch.tensor([-2.0, -1.0, 0.001, 1.0])[:, None, None, None]
    assert (255 * as_files(images)).flatten().tolist() == pytest.approx([0, 0, 128, 255])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-n", "1"), "images is 1; it must be a whole number of at least 2"),
        (("--seed", "-1"), "seed is -1; it must be a whole number of at least 0"),
        (("--latents", "5"), "latents is 5; it must be a whole number of at least 20"),
        (("--features", "inceptoin"), "did you mean 'inception'"),
    ],
)
def test_wrong_arguments_get_a_sentence(trained, words, sentence):
    text = run(trained, "distance", "runs/digits-001", *words, expect=2)
    assert sentence in " ".join(text.split())


def test_a_missing_file_is_reported_before_anything_is_computed(trained, monkeypatch):
    monkeypatch.setattr("equipoise.lab.results.features.INCEPTION_FILES", ("not-here.pth",))
    monkeypatch.setattr(distance, "drawn_latents", None)
    with this_machine("cpu") as machine, pytest.raises(MissingData, match="the FID needs the Inception network"):
        run_distances(open_run(trained / "runs/digits-001"), machine, "inception")


def test_a_run_of_another_model_is_rejected(tmp_path):
    classifier = train(tmp_path)
    text = run(tmp_path, "distance", classifier.folder, "--trust", "lab_helpers", expect=2)
    assert "which does not generate images: give a run of the model 'generator'" in " ".join(text.split())

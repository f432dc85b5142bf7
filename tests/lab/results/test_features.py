"""Networks of features: the classifier of the package, and the file of the FID's Inception network."""

import hashlib
import pickle

import pytest
import torch

from equipoise.lab.data.files.places import MissingData
from equipoise.lab.files import DamagedFile
from equipoise.lab.results import features
from equipoise.lab.results.features import INCEPTION_FILES, open_features
from equipoise.models.features.inception import FidInception


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, and no other in which the user may have the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    monkeypatch.setattr("equipoise.lab.data.files.places.SYSTEM", tmp_path / "system")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def publish(monkeypatch, file):
    """Let the published file be this one."""
    content = file.read_bytes()
    monkeypatch.setattr(features, "INCEPTION_SIZE", len(content))
    monkeypatch.setattr(features, "INCEPTION_SHA256", hashlib.sha256(content).hexdigest())


def test_classifier_is_part_of_the_package(elsewhere):
    classifier = open_features("classifier")
    found = classifier(torch.rand(4, 1, 28, 28, dtype=torch.float64))
    assert found.shape == (4, classifier.count) == (4, 64)
    assert not found.requires_grad
    assert "FID" not in classifier.distance.replace("not FID", "")


def test_unknown_features_get_a_sentence():
    with pytest.raises(ValueError, match="there is no features 'inceptoin'; did you mean 'inception'"):
        open_features("inceptoin")


def test_inception_is_read_from_the_published_file(elsewhere, monkeypatch):
    torch.manual_seed(0)
    network = FidInception().eval()
    file = elsewhere / "mine" / "inception" / INCEPTION_FILES[0]
    file.parent.mkdir(parents=True)
    torch.save(network.state_dict(), file)
    assert abs(file.stat().st_size - features.INCEPTION_SIZE) < 1e6  # the published one has the same tensors
    publish(monkeypatch, file)
    images = torch.rand(1, 3, 8, 8)
    found = open_features("inception", [elsewhere / "mine"])
    assert found.distance == "Fréchet inception distance (FID)"
    with torch.no_grad():
        assert torch.equal(found(images), network.features(images))


@pytest.mark.parametrize("place", [f"{folder}{name}" for folder in ("inception/", "") for name in INCEPTION_FILES])
def test_the_file_is_found_by_either_name_in_the_folder_or_above_it(elsewhere, place):
    file = elsewhere / "mine" / place
    file.parent.mkdir(parents=True)
    file.touch()
    assert features.inception_file([elsewhere / "mine"]) == file


def test_absence_says_what_to_get_and_where_to_put_it(elsewhere):
    with pytest.raises(MissingData) as error:
        open_features("inception", [elsewhere / "mine"])
    sentence = str(error.value)
    assert "no pt_inception-2015-12-05-6726825d.pth in" in sentence
    assert "(96 MB) from the release fid_weights of mseitzer/pytorch-fid on GitHub" in sentence
    assert f"put it into {elsewhere / 'mine' / 'inception'}, or use --features classifier" in sentence


def test_another_file_of_that_name_is_rejected_unread(elsewhere, monkeypatch):
    file = elsewhere / "inception" / INCEPTION_FILES[0]
    file.parent.mkdir()
    file.write_bytes(b"half of a download")
    with pytest.raises(DamagedFile, match="or is damaged: it has 18 bytes and another checksum; replace it with the"):
        open_features("inception")
    monkeypatch.setattr(features, "INCEPTION_SIZE", 3)
    with pytest.raises(DamagedFile, match="it has 18 bytes; at most 3 are read; replace it with the published file"):
        open_features("inception")


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of the file was run')",)


@pytest.mark.parametrize("content", ["pickle", "other tensors", "a tensor", "noise"])
def test_a_file_never_runs_code_and_must_have_the_layout(elsewhere, monkeypatch, content):
    """Even if the checksum fitted."""
    file = elsewhere / "inception" / INCEPTION_FILES[0]
    file.parent.mkdir()
    if content == "pickle":
        file.write_bytes(pickle.dumps(Hostile(), protocol=2))
    elif content == "noise":
        file.write_bytes(b"\1\2\3" * 100)
    else:
        torch.save({"fc.weight": torch.zeros(2, 2)} if content == "other tensors" else torch.zeros(2), file)
    publish(monkeypatch, file)
    with pytest.raises(DamagedFile, match="does not hold the weights of the FID's Inception network: "):
        open_features("inception")

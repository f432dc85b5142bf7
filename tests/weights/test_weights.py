"""Trained models of the package: their cards, their sizes, and the script that trains them again."""

import hashlib
import math
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import equipoise as eq
from equipoise.lab.data import available, load
from equipoise.lab.data.base import DataSet, TensorSplit
from equipoise.models.features.classifier import SmallClassifier
from equipoise.weights import cifar10_classifier as script

FOLDER = Path(eq.__file__).parent / "weights"
CARDS = {path.stem: tomllib.loads(path.read_text()) for path in FOLDER.glob("*.toml")}


def shipped():
    network = SmallClassifier()
    network.load_state_dict(load_file(FOLDER / f"{script.NAME}.safetensors"))
    return network.eval()


def test_every_model_has_a_card_and_every_card_a_model():
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == CARDS.keys() == {script.NAME}


@pytest.mark.parametrize("name", CARDS)
def test_card_describes_the_file(name):
    card, file = CARDS[name], FOLDER / f"{name}.safetensors"
    assert file.stat().st_size <= 300_000
    assert hashlib.sha256(file.read_bytes()).hexdigest() == card["sha256"]
    assert card.keys() >= {"title", "purpose", "model", "input", "training", "results", "licence"}


def test_classifier_has_the_parameters_of_its_card():
    network, card = shipped(), CARDS[script.NAME]
    assert sum(parameter.numel() for parameter in network.parameters()) == card["parameters"]
    assert network.linear.in_features == card["features"]


@pytest.mark.skipif(not any(row.name == "cifar10" and row.found for row in available()), reason="needs CIFAR-10")
def test_classifier_has_the_accuracy_of_its_card():
    data, results = load("cifar10", validation=0), CARDS[script.NAME]["results"]
    assert len(data.test) == results["test_images"]
    assert script.accuracy(shipped(), data.test) == pytest.approx(results["test_accuracy"], abs=5e-4)


def test_the_script_writes_weights_and_card(tmp_path, monkeypatch, capsys):
    """On a few random images of two classes, which differ in brightness."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 2
    images = torch.randint(100, (128, 3, 32, 32), generator=random, dtype=torch.uint8) + 150 * labels.byte().view(
        -1, 1, 1, 1
    )
    split = TensorSplit(images, labels)
    data = DataSet("two", split, split, (3, 32, 32), class_names=("dark", "light"), mean=(0.5,) * 3, std=(0.3,) * 3)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of all tests
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path), "--epochs", "4"])
    script.main()
    loss = float(capsys.readouterr().out.split("epoch 4 of 4: loss ")[1].split()[0])
    card = tomllib.loads((tmp_path / f"{script.NAME}.toml").read_text())
    content = (tmp_path / f"{script.NAME}.safetensors").read_bytes()
    assert card["sha256"] == hashlib.sha256(content).hexdigest()
    assert card.keys() == CARDS[script.NAME].keys()
    assert card["training"]["recipe"].startswith("4 epochs, batches of 128")
    assert loss < math.log(2) / 2
    network = SmallClassifier(2)
    network.load_state_dict(load_file(tmp_path / f"{script.NAME}.safetensors"))
    assert script.accuracy(network.eval(), split) == card["results"]["test_accuracy"]

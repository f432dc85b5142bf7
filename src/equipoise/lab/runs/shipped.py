"""Trained models that ship with the package, found by name: each is a file of weights with a card.

weights/mondeq/mnist-fc.safetensors  a checkpoint that holds weights alone
weights/mondeq/mnist-fc.toml         its card: how it was trained, what it measured, SHA-256, terms
"""

import hashlib
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from equipoise.lab.files import DamagedFile
from equipoise.lab.recipes.reading import RecipeError, Where, read
from equipoise.options import unknown_of_many


@dataclass(frozen=True)
class Training:
    """How a shipped model was trained.

    Args:
        command: command that trains it again.
        data: name of the data set.
        samples: number of training samples.
        epochs: number of epochs.
        epoch: epoch after which these weights were taken; the last one if no validation split chose it.
        seed: seed of the run.
        seconds: time it took.
        torch: version of torch.
    """

    command: str
    data: str
    samples: int
    epochs: int
    epoch: int
    seed: int
    seconds: int
    torch: str


@dataclass(frozen=True)
class Measured:
    """What a shipped model measured on test data.

    Args:
        command: command that measures it again.
        samples: number of test samples.
        metric: name of the metric that is quoted.
        metrics: metrics of the shipped file.
        as_trained: the same with the parameters as they were trained, in float32.
        commit: commit of the package that measured it; empty if unknown.
    """

    command: str
    samples: int
    metric: str
    metrics: dict[str, float]
    as_trained: dict[str, float]
    commit: str = ""

    @property
    def value(self) -> float:
        """The metric that is quoted."""
        return self.metrics[self.metric]


@dataclass(frozen=True)
class Terms:
    """Under which terms a shipped model, and the data it was trained on, may be used."""

    weights: str
    data: str


@dataclass(frozen=True)
class Card:
    """The card of a shipped model.

    Args:
        name: name for ``eq.load``.
        title: what it is, in a few words.
        model: name of the model.
        parameters: number of trainable parameters.
        stored: type of the parameters in the file; they are float32 once loaded.
        bytes: size of the file.
        sha256: SHA-256 of the file.
        note: remark for the user.
    """

    name: str
    title: str
    model: str
    parameters: int
    stored: str
    training: Training
    test: Measured
    terms: Terms
    bytes: int = 0
    sha256: str = ""
    note: str = ""


def weights_folder() -> Path:
    """Return the folder of the shipped models."""
    return Path(str(resources.files("equipoise"))) / "weights"


def list_weights() -> list[str]:
    """Return the names of the trained models that ship with the package, for :func:`equipoise.load`.

    Example:
        >>> eq.list_weights()
    """
    folder = weights_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.toml"))


def read_card(name: str) -> Card:
    """Return the card of a shipped model."""
    if name not in (known := list_weights()):
        raise LookupError(unknown_of_many("shipped model", name, known, "equipoise weights"))
    path = weights_folder() / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    try:
        return read(Card, tomllib.loads(text), (), Where(str(path), text))
    except (tomllib.TOMLDecodeError, RecipeError) as error:
        raise DamagedFile(f"the card of {name} is damaged: {error} Install equipoise again.") from None


def weights_file(name: str) -> Path:
    """Return the weights of a shipped model, after comparing the file with the SHA-256 of its card."""
    card, path = read_card(name), weights_folder() / f"{name}.safetensors"
    if not path.is_file():
        raise DamagedFile(f"{path}, the weights of {name}, are missing: install equipoise again.")
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != card.sha256:
        raise DamagedFile(
            f"{path} was changed: its SHA-256 is {found[:16]}..., that on its card {card.sha256[:16]}... "
            "Install equipoise again."
        )
    return path

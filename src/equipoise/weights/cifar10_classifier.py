"""Train the classifier whose features ``equipoise distance`` compares, and write its weights and card.

    python -m equipoise.weights.cifar10_classifier --out DIR

It runs on one CPU thread, so that the same version of torch on the same processor gives the same weights.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from equipoise.lab.data import load
from equipoise.lab.data.base import DataSet, Split
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.results.add_weights import LICENCE, commit, write_entry
from equipoise.lab.runs.checkpoints import model_tensors
from equipoise.lab.runs.shipped import Card, Measured, Terms, Training
from equipoise.lab.training.evaluate import parameter_count
from equipoise.models.features.classifier import SmallClassifier
from equipoise.tasks.augmentation import flip, shift

NAME = "features/cifar10-classifier"
EPOCHS, BATCH, RATE, DECAY, WARMUP, SEED, PIXELS = 12, 128, 1e-2, 5e-2, 0.2, 0, 2

TITLE = "Small classifier of CIFAR-10"
RECIPE: dict[str, Any] = {  # what the header of the weights says of them
    "title": TITLE,
    "data": {"name": "cifar10", "validation": 0},
    "task": {"name": "classification", "shift": PIXELS, "flip": True},
    "model": {"name": "small-classifier"},
    "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY},
    "schedule": {"name": "one-cycle", "warmup": WARMUP},
    "training": {"batch_size": BATCH},
    "seed": SEED,
}
NOTE = "Features for distances between sets of images (equipoise distance); not a FID, nor comparable with one."


def main() -> None:
    """Train, evaluate and write ``DIR/features/cifar10-classifier.safetensors`` and its card."""
    parser = argparse.ArgumentParser(description="Train the classifier whose features `equipoise distance` compares.")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder to write to (default: here)")
    parser.add_argument("--data", type=Path, action="append", default=[], metavar="DIR", help="folder to search first")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="number of epochs (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    data = load("cifar10", folders=arguments.data, validation=0)
    model = train(data, arguments.epochs)
    seconds = time.process_time() - begin
    correct = accuracy(model, data.test)
    print(f"test accuracy {correct:.2%} after {seconds:.0f} s of processor time")
    write(arguments.out, model, data, arguments.epochs, correct, seconds)


def train(data: DataSet, epochs: int) -> SmallClassifier:
    """Train with AdamW and one cycle of the learning rate, on shifted and mirrored images."""
    torch.manual_seed(SEED)
    random = torch.Generator().manual_seed(SEED)
    model = SmallClassifier(len(data.class_names), mean=data.mean, std=data.std)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    schedule = OneCycleLR(optimizer, RATE, epochs * (len(data.train) // BATCH), pct_start=WARMUP)
    for epoch in range(epochs):
        total = torch.zeros(())
        order = torch.randperm(len(data.train), generator=random)
        for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
            images, labels = data.train.read(rows)
            images = flip(shift(scaled(images), PIXELS, random), random).contiguous(memory_format=torch.channels_last)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        print(f"epoch {epoch + 1} of {epochs}: loss {total.item() / (len(order) // BATCH):.4f}", flush=True)
    return model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def scaled(images: Tensor) -> Tensor:
    return images.float() / 255


@torch.no_grad()
def accuracy(model: SmallClassifier, split: Split) -> float:
    """Return the share of images that are classified correctly."""
    correct = 0
    for rows in torch.arange(len(split)).split(500):
        images, labels = split.read(rows)
        correct += int((model(scaled(images)).argmax(dim=1) == labels).sum())
    return correct / len(split)


def write(folder: Path, model: SmallClassifier, data: DataSet, epochs: int, correct: float, seconds: float) -> None:
    """Write the weights and their card."""
    facts = {"recipe": NAME, "folder": "", "tables": {**RECIPE, "phases": [{"epochs": epochs}]}, "phase": 0}
    trained = Training(
        command="python -m equipoise.weights.cifar10_classifier",
        data="cifar10",
        samples=len(data.train),
        epochs=epochs,
        epoch=epochs,
        seed=SEED,
        seconds=round(seconds),
        torch=torch.__version__,
    )
    metrics = {"accuracy": correct}
    card = Card(
        name=NAME,
        title=TITLE,
        model="small-classifier",
        parameters=parameter_count(model),
        stored="float32",
        training=trained,
        test=Measured(f"equipoise evaluate {NAME}", len(data.test), "accuracy", metrics, metrics, commit() or ""),
        terms=Terms(LICENCE, ABOUT["cifar10"].licence),
        note=NOTE,
    )
    card, file = write_entry(card, model_tensors(model), {**facts, "data": data.facts()}, folder)
    print(f"written {file} ({card.bytes:,} bytes) and {file.with_suffix('.toml').name}")


if __name__ == "__main__":
    main()

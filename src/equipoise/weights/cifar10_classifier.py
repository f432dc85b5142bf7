"""Train the classifier whose features ``equipoise distance`` compares, and write its weights and card.

    python -m equipoise.weights.cifar10_classifier --out DIR

It runs on one CPU thread, so that the same version of torch on the same processor gives the same weights.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from equipoise.lab.data import load
from equipoise.lab.data.base import DataSet, Split
from equipoise.lab.files import whole, write_text
from equipoise.models.features.classifier import SmallClassifier
from equipoise.tasks.augmentation import flip, shift

NAME = "cifar10-classifier"
EPOCHS, BATCH, RATE, DECAY, SEED, PIXELS = 12, 128, 1e-2, 5e-2, 0, 2

CARD = """\
# Card of {name}.safetensors, written by the script that trains it.
title = "Small classifier of CIFAR-10"
purpose = "Features for distances between sets of images (equipoise distance); not a FID, nor comparable with one"
model = "equipoise.models.features.classifier:SmallClassifier"
parameters = {parameters}
features = {features}
input_size = "32x32"
input = "RGB images in [0, 1]; other sizes are resized (bilinear, antialiased), gray ones repeated to three channels"
sha256 = "{sha256}"

[training]
data = "CIFAR-10, 50,000 training images (A. Krizhevsky, Learning multiple layers of features from tiny images, 2009)"
script = "python -m equipoise.weights.cifar10_classifier"
recipe = "{recipe}"
torch = "{torch}"
seconds = {seconds}  # processor time

[results]
test_images = {test_images}
test_accuracy = {accuracy:.4f}  # of the last epoch; no choice was made by it

[licence]
weights = "MIT, as the package"
data = "{data_licence}"
"""


def main() -> None:
    """Train, evaluate and write ``DIR/cifar10-classifier.safetensors`` and its card."""
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
    write(arguments.out, model, arguments.epochs, correct, len(data.test), seconds)


def train(data: DataSet, epochs: int) -> SmallClassifier:
    """Train with AdamW and one cycle of the learning rate, on shifted and mirrored images."""
    torch.manual_seed(SEED)
    random = torch.Generator().manual_seed(SEED)
    model = SmallClassifier(len(data.class_names), mean=data.mean, std=data.std)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    schedule = OneCycleLR(optimizer, RATE, epochs * (len(data.train) // BATCH), pct_start=0.2)
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


def write(folder: Path, model: SmallClassifier, epochs: int, correct: float, test: int, seconds: float) -> None:
    """Write the weights, then the card with their checksum."""
    file = folder / f"{NAME}.safetensors"
    with whole(file) as part:
        save_file(model.state_dict(), part)
    card = CARD.format(
        name=NAME,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        features=model.linear.in_features,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        recipe=f"{epochs} epochs, batches of {BATCH}, AdamW (weight decay {DECAY:g}), one cycle of the learning rate "
        f"up to {RATE:g}, images shifted by up to {PIXELS} pixels and mirrored, seed {SEED}",
        torch=torch.__version__,
        seconds=round(seconds),
        test_images=test,
        accuracy=correct,
        data_licence="none is stated by its authors, who ask to be cited; no image is part of the weights",
    )
    write_text(file.with_suffix(".toml"), card)
    print(f"written {file} ({file.stat().st_size:,} bytes) and {file.with_suffix('.toml').name}")


if __name__ == "__main__":
    main()

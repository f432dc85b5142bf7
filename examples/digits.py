"""Train a small equilibrium classifier on scikit-learn's 8x8 digits and plot how its solves converge.

    python examples/digits.py [--epochs 10] [--seed 0] [--out runs/demo]

The hidden features of an image are the fixed point of one convolutional cell,

    z = f(z, u) = GroupNorm(relu(z + GroupNorm(conv(z) + u))),    u = stem(image),

found by Anderson acceleration and differentiated implicitly. Takes well under a minute on two cores.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import equipoise as eq

TOLERANCE = eq.Tolerance(relative=1e-3)  # as exact as this network needs
BATCH = 64


class Cell(nn.Module):
    """The function whose fixed point the network computes. The norms keep it bounded, so an equilibrium exists."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.inner = nn.GroupNorm(4, channels)
        self.outer = nn.GroupNorm(4, channels)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return self.outer(torch.relu(z + self.inner(self.conv(z) + u)))


class Classifier(nn.Module):
    """Stem, equilibrium, linear head; returns the logits and the Solution, which knows what the solve took."""

    def __init__(self, channels: int = 16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels))
        self.equilibrium = eq.Equilibrium(Cell(channels), tolerance=TOLERANCE)
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))

    def forward(self, images: Tensor) -> tuple[Tensor, eq.Solution]:
        solution = self.equilibrium.solve(self.stem(images))
        return self.head(solution.value), solution


def load() -> dict[str, tuple[Tensor, Tensor]]:
    """The 1797 digits as (images, labels): 1197 to train, 240 to choose the epoch, 360 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    rest, test = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=240, stratify=labels[rest], random_state=0)
    return {name: (images[rows], labels[rows]) for name, rows in [("train", train), ("val", val), ("test", test)]}


@torch.no_grad()
def evaluate(model: Classifier, images: Tensor, labels: Tensor) -> tuple[float, eq.Solution]:
    logits, solution = model.eval()(images)
    return (logits.argmax(1) == labels).float().mean().item(), solution


def train(model: Classifier, data: dict[str, tuple[Tensor, Tensor]], epochs: int) -> None:
    """Train for ``epochs`` epochs and leave the model with the weights that did best on the validation digits."""
    images, labels = data["train"]
    batches = -(-len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * batches)
    best, best_accuracy = copy.deepcopy(model.state_dict()), 0.0
    on_terminal = sys.stderr.isatty()
    with tqdm(total=epochs * batches, desc="training", unit="batch", disable=not on_terminal) as bar:
        accuracy = float("nan")
        for epoch in range(1, epochs + 1):
            model.train()
            losses, forward, backward = [], [], []
            for rows in torch.randperm(len(labels)).split(BATCH):
                logits, solution = model(images[rows])
                loss = nn.functional.cross_entropy(logits, labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                forward.append(solution.stats.steps)
                backward.append(solution.backward.steps)  # the adjoint solve reports itself, too
                bar.set_postfix_str(
                    f"epoch {epoch}/{epochs}, loss {losses[-1]:.3f}, val {accuracy:.1%}, "
                    f"steps {median(forward[-1]):.0f} forward {median(backward[-1]):.0f} backward"
                )
                bar.update()
            accuracy, _ = evaluate(model, *data["val"])
            if accuracy >= best_accuracy:
                best, best_accuracy = copy.deepcopy(model.state_dict()), accuracy
            if not on_terminal:
                print(
                    f"epoch {epoch:2d}/{epochs}  loss {sum(losses) / batches:.3f}  val {accuracy:.1%}  "
                    f"steps {median(torch.cat(forward)):.0f} forward {median(torch.cat(backward)):.0f} backward",
                    flush=True,
                )
    model.load_state_dict(best)


def median(values: Tensor) -> float:
    return values.float().median().item()


@torch.no_grad()
def plot_residuals(model: Classifier, images: Tensor, path: Path) -> None:
    """Draw every sample's residual against the steps, for plain iteration and for Anderson acceleration."""
    u = model.eval().stem(images)
    tolerance = eq.Tolerance(relative=1e-5, max_steps=80, patience=None)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (name, solver) in zip(axes, [("Picard", eq.Picard()), ("Anderson", eq.Anderson())], strict=True):
        options = {"solver": solver, "tolerance": tolerance, "trace": True, "on_failure": "ignore"}
        solution = eq.fixed_point(model.equilibrium.f, torch.zeros_like(u), u, **options)
        trace = solution.stats.trace  # (steps, batch); a sample that has stopped keeps its last residual
        steps = torch.arange(1, len(trace) + 1)
        for residuals, taken in zip(trace.T, solution.stats.steps.tolist(), strict=True):
            axis.plot(steps[:taken], residuals[:taken], color="tab:blue", alpha=0.08, linewidth=0.6)
        low, mid, high = torch.quantile(trace, torch.tensor([0.1, 0.5, 0.9]), dim=1)
        axis.fill_between(steps, low, high, color="tab:blue", alpha=0.25, linewidth=0, label="10% to 90% of samples")
        axis.plot(steps, mid, color="navy", linewidth=2, label="median")
        axis.axhline(tolerance.relative, color="black", linestyle="--", linewidth=1, label="tolerance")
        share = solution.converged.float().mean().item()
        axis.set_title(f"{name}: {share:.0%} converged, median {median(solution.stats.steps):.0f} steps")
        axis.set_yscale("log")
        axis.set_xlabel("solver steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(r"relative residual  $\|f(z)-z\| \,/\, \|f(z)\|$")
    axes[1].legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".png", delete=False) as part:
        figure.savefig(part, format="png", dpi=150)
    os.replace(part.name, path)  # the file is there whole or not at all


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small equilibrium classifier on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the residual plot")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")

    torch.manual_seed(arguments.seed)
    data = load()
    model = Classifier()
    train(model, data, arguments.epochs)
    accuracy, solution = evaluate(model, *data["test"])
    steps = solution.stats.steps
    print(f"test accuracy   {accuracy:.2%} of {len(steps)} digits")
    print(f"solver steps    median {median(steps):.0f}, most {steps.max()}, to a residual of {TOLERANCE.relative:g}")
    print(f"converged       {solution.converged.float().mean():.1%} of the test digits")
    plot = arguments.out / "residuals.png"
    plot_residuals(model, data["test"][0], plot)
    print(f"residual plot   {plot}")


if __name__ == "__main__":
    main()

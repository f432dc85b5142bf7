"""Train a small equilibrium classifier on scikit-learn's 8x8 digits and plot how its solves converge.

    python examples/digits.py [--epochs 12] [--seed 0] [--out runs/demo]

The hidden features of an image are the fixed point of one convolutional cell,

    z = f(z, u) = relu(W * z + u),    u = stem(image),

found by Anderson acceleration and differentiated implicitly. The operator norm of W is held to at most 0.9, so f is
a contraction: every image has exactly one equilibrium. Takes well under a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import equipoise as eq

BATCH = 64


class Cell(nn.Module):
    """The function whose fixed point the network computes."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = eq.SpectralNorm(nn.Conv2d(channels, channels, 3, padding=1, bias=False), bound=0.9)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return torch.relu(self.conv(z) + u)


class Classifier(nn.Module):
    """Stem, equilibrium, linear head; returns the logits and the Solution, which knows what the solve took."""

    def __init__(self, channels: int = 24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels))
        self.equilibrium = eq.Equilibrium(Cell(channels))  # Anderson and the implicit gradient by default
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))

    def forward(self, images: Tensor) -> tuple[Tensor, eq.Solution]:
        solution = self.equilibrium.solve(self.stem(images))
        return self.head(solution.value), solution


def load() -> dict[str, tuple[Tensor, Tensor]]:
    """The 1797 digits as (images, labels): 1197 to train, 240 to watch, 360 to test."""
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


def train(model: Classifier, data: dict[str, tuple[Tensor, Tensor]], epochs: int) -> float:
    """Train, telling how it goes; return the accuracy on the validation digits."""
    images, labels = data["train"]
    batches = -(-len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=epochs * batches)
    on_terminal = sys.stderr.isatty()
    with tqdm(total=epochs * batches, desc="training", unit="batch", disable=not on_terminal) as bar:
        accuracy = float("nan")
        for epoch in range(1, epochs + 1):
            model.train()
            losses, forward, backward = [], [], []
            for rows in torch.randperm(len(labels)).split(BATCH):
                logits, solution = model(shifted(images[rows]))
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
            if not on_terminal:
                print(
                    f"epoch {epoch:2d}/{epochs}  loss {sum(losses) / batches:.3f}  val {accuracy:.1%}  "
                    f"steps {median(torch.cat(forward)):.0f} forward {median(torch.cat(backward)):.0f} backward",
                    flush=True,
                )
    return accuracy


def shifted(images: Tensor) -> Tensor:
    """Each image moved by at most one pixel either way: 1197 digits are few."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    rows, columns = (torch.arange(8) + torch.randint(3, (2, len(images), 1))).unbind()
    sample = torch.arange(len(images))[:, None, None]
    return padded[sample, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def median(values: Tensor) -> float:
    return values.float().median().item()


@torch.no_grad()
def plot_residuals(model: Classifier, images: Tensor, path: Path) -> None:
    """Draw every sample's residual against the steps, for plain iteration and for Anderson acceleration."""
    u = model.eval().stem(images)
    tolerance = eq.Tolerance(relative=1e-6, max_steps=60, patience=None)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (name, solver) in zip(axes, [("Picard", eq.Picard()), ("Anderson", eq.Anderson())], strict=True):
        solution = eq.fixed_point(
            model.equilibrium.f,
            torch.zeros_like(u),
            u,
            solver=solver,
            tolerance=tolerance,
            on_failure="ignore",  # the title says how many converged
            trace=True,
        )
        trace = solution.stats.trace  # (steps, batch); a sample that has stopped keeps its last residual
        steps = torch.arange(1, len(trace) + 1)
        for i, taken in enumerate(solution.stats.steps.tolist()):
            label = None if i else "one sample"
            axis.plot(steps[:taken], trace[:taken, i], color="0.75", linewidth=0.4, zorder=1.5, label=label)
        low, mid, high = torch.quantile(trace, torch.tensor([0.1, 0.5, 0.9]), dim=1)
        label = "10% to 90% of samples"
        axis.fill_between(steps, low, high, color="tab:blue", alpha=0.4, linewidth=0, zorder=2, label=label)
        axis.plot(steps, mid, color="navy", linewidth=2, zorder=3, label="median")
        axis.axhline(tolerance.relative, color="black", linestyle="--", linewidth=1, label="tolerance")
        share = solution.converged.float().mean().item()
        axis.set_title(f"{name}: {share:.0%} converged, median {median(solution.stats.steps):.0f} steps")
        axis.set_yscale("log")
        axis.set_xlabel("solver steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(r"relative residual  $\|f(z)-z\| \,/\, \|f(z)\|$")
    axes[1].legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png", dpi=150)
    part.replace(path)  # the file is there whole or not at all


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small equilibrium classifier on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the residual plot")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")

    torch.set_num_threads(1)  # tensors this small gain little from more, and lose much when a core is busy
    torch.manual_seed(arguments.seed)
    data = load()
    model = Classifier()
    validation = train(model, data, arguments.epochs)
    accuracy, solution = evaluate(model, *data["test"])
    steps, asked = solution.stats.steps, model.equilibrium.tolerance.relative
    print(f"test accuracy   {accuracy:.2%} of {len(steps)} digits (validation {validation:.2%})")
    print(f"solver steps    median {median(steps):.0f}, most {steps.max()}, to a relative residual of {asked:g}")
    print(f"converged       {solution.converged.float().mean():.1%} of the test digits")
    plot = arguments.out / "residuals.png"
    plot_residuals(model, data["test"][0], plot)
    print(f"residual plot   {plot}")


if __name__ == "__main__":
    main()

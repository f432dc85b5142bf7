"""Time a training step with f compiled by torch.compile, and the same step without.

    python benchmarks/compile.py [--only STRING] [--rounds N] [--threads N] [--json F]

A step is forward pass, cross entropy, implicit backward pass and Adam, on random images and the initial weights of a
model, kept by a learning rate of 0, so that both solve the same problems. They run in turns in one process after a
warm-up, in which everything is compiled. Times are medians; the ratio is the median over the rounds of the plain time
divided by the compiled one. "compile s" is the time of the warm-up beyond a step, without a cache of earlier runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.lab.runs.machine import keep_freed_memory
from measuring import seconds
from tables import Row, show

FORWARD, BACKWARD = 15, 18  # evaluations of f and products, where neither depends on the weights


class Step:
    """A model that is trained on one batch, always from the same weights."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model, self.images, self.labels = model, images, labels
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    def __call__(self) -> None:
        torch.manual_seed(0)  # the same dropout masks
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()


def demo(side: int) -> nn.Module:
    """The model of the recipes core/digits and core/mnist."""
    return eq.create_model("conv-equilibrium", shape=(1, side, side), classes=10, channels=24)


def mdeq(fixed: bool) -> nn.Module:
    """The model of the recipe mdeq/cifar10-small; fixed: with a constant number of evaluations."""
    model = eq.create_model("mdeq", shape=(3, 32, 32), classes=10, size="cifar10-small")
    layer = model.equilibrium
    layer.on_failure = "ignore"
    if fixed:
        layer.tolerance = eq.Tolerance(relative=0.0, max_steps=FORWARD, patience=None)
        limit = eq.Tolerance(relative=0.0, max_steps=BACKWARD, patience=None)
        layer.gradient = eq.ImplicitGradient(tolerance=limit)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Transformer(nn.Module):
    """f(z, x) of tokens: attention and a wide GELU layer between norms, where little of the time goes to products."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = self.norms[0](x + 0.3 * z + 0.3 * self.attend(z, z, z, need_weights=False)[0])
        return 0.5 * self.norms[1](z + 0.3 * self.wide(z))


class Tokens(nn.Module):
    """A classifier of images by their 4x4 patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.equilibrium = eq.Equilibrium(Transformer(width), on_failure="ignore")
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.equilibrium(self.stem(images).flatten(2).mT).mean(dim=1))


CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]] = [
    ("core/digits, 8x8", lambda: demo(8), (1, 8, 8), 64),
    ("core/mnist, 28x28", lambda: demo(28), (1, 28, 28), 64),
    ("MDEQ, 15 + 18 evaluations", lambda: mdeq(fixed=True), (3, 32, 32), 32),
    ("MDEQ, stopping by residual", lambda: mdeq(fixed=False), (3, 32, 32), 32),
    ("transformer cell, 64 tokens", Tokens, (3, 32, 32), 64),
]


def measure(name: str, model: nn.Module, shape: tuple[int, ...], batch: int, rounds: int) -> Row:
    torch._dynamo.reset()
    images, labels = torch.rand(batch, *shape), torch.randint(10, (batch,))
    if shape[0] == 3:
        images = images.contiguous(memory_format=torch.channels_last)  # as the recipe trains it
    twin = copy.deepcopy(model)
    for layer in twin.modules():
        if isinstance(layer, eq.Equilibrium):
            layer.f.compile()  # type: ignore[union-attr]
    plain, compiled = Step(model, images, labels), Step(twin, images, labels)
    plain()
    began = seconds(compiled)
    compiled()
    times = [(seconds(plain), seconds(compiled)) for _ in range(rounds)]
    slow, fast = (median(column) for column in zip(*times, strict=True))
    row: Row = {
        "model": name,
        "batch": batch,
        "plain ms": 1e3 * slow,
        "compiled ms": 1e3 * fast,
        "ratio": median(a / b for a, b in times),
        "compile s": began - fast,
    }
    print(row, flush=True)  # compiling takes minutes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="STRING", help="run only rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="number of rounds (default 9)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="number of torch threads (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch.manual_seed(0)
        rows = [
            measure(name, make(), shape, size, arguments.rounds)
            for name, make, shape, size in CASES
            if arguments.only in name
        ]
    show("training step with f compiled", rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

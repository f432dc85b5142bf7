"""A training step with f compiled by torch.compile beside the same step without.

    python benchmarks/compile.py [--batch N] [--rounds N] [--threads N] [--json F]

A step is forward pass, cross entropy, implicit backward pass and Adam, on random images and the first weights of a
model, which stay as they are, so that both solve the same problems. They run in turns in one process after a warm-up,
in which everything is compiled. Times are medians; the ratio is the median over the rounds of the plain time by the
compiled one. "compiling s" is what the warm-up takes beyond a step, with no cache of earlier runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.lab.machine import keep_freed_memory
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
    """The model of the recipe mdeq/cifar10-small; fixed: with a number of evaluations that nothing can change."""
    model = eq.create_model("mdeq", shape=(3, 32, 32), classes=10, size="cifar10-small")
    layer = model.equilibrium
    layer.on_failure = "ignore"
    if fixed:
        layer.tolerance = eq.Tolerance(relative=0.0, max_steps=FORWARD, patience=None)
        limit = eq.Tolerance(relative=0.0, max_steps=BACKWARD, patience=None)
        layer.gradient = eq.ImplicitGradient(tolerance=limit)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


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
        "compiling s": began - fast,
    }
    print(row, flush=True)  # compiling takes minutes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="images (default 32)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns each gets (default 9)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here too")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    batch, rounds = arguments.batch, arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows = [
            measure("core/digits, 8x8", demo(8), (1, 8, 8), 64, rounds),
            measure("core/mnist, 28x28", demo(28), (1, 28, 28), 64, rounds),
            measure("MDEQ, 15 + 18 evaluations", mdeq(fixed=True), (3, 32, 32), batch, rounds),
            measure("MDEQ, stopping by residual", mdeq(fixed=False), (3, 32, 32), batch, rounds),
        ]
    show("A training step, f compiled", rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measure time and peak memory of MOptEq with the one-step, implicit and unrolled gradient, and of MDEQ.

    python benchmarks/opteq.py [--images imagenette|cifar10] [--batch N] [--rounds N] [--threads N] [--json F]

Table 6 of the MOptEq paper reports for Imagenette (256 x 256, batches of 32): MDEQ with 10M parameters, 8 GB to train
and 1.06 s to answer a batch; MOptEq with 1.9M and the one-step gradient, 3 GB and 0.26 s. Here a step is stem, solve,
head, cross entropy, backward pass and SGD; "answer" is the first three without gradients, with unchanged weights, so
that values derived from them are cached. Solvers are those of the recipes for Imagenette and CIFAR-10, without
perturbed branches. All run in turns in one process after a warm-up; times are medians, ratios to MDEQ medians over the
rounds. Peak memory is the additional memory of a step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.gradients import GradientRule
from equipoise.lab.runs.machine import keep_freed_memory
from measuring import peak_of, seconds
from tables import Row, show

FORWARD, BACKWARD = 20, 20  # steps at most, as in the recipes
MDEQ_FORWARD, MDEQ_BACKWARD = 15, 18
SIZES = {
    "imagenette": (256, "imagenette-1.9m", {"size": "cifar10-large", "downsamplings": 2}),
    "cifar10": (32, "multi-0.48m", {"size": "cifar10-large"}),
}


class Player:
    """A model that takes training steps."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.equilibrium.on_failure = "ignore"  # type: ignore[union-attr]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def answer(self, images: Tensor) -> None:
        self.model.eval()
        self.model(images)
        self.model.train()

    def steps(self, images: Tensor) -> float:
        """Return the steps of the forward solve, median over the samples."""
        with torch.no_grad(), eq.watch_solves() as solves:
            self.model(images)
        return float(solves[0].stats.steps.double().median())


def players(images: str) -> list[Player]:
    side, size, mdeq = SIZES[images]
    shape = (3, side, side)
    reference = eq.create_model("mdeq", shape=shape, classes=10, **mdeq)
    layer = reference.equilibrium
    layer.tolerance = eq.Tolerance(relative=1e-3, max_steps=MDEQ_FORWARD)  # type: ignore[union-attr]
    layer.gradient = eq.ImplicitGradient(  # type: ignore[union-attr]
        tolerance=eq.Tolerance(relative=1e-3, max_steps=MDEQ_BACKWARD)
    )
    found = [Player("MDEQ, implicit", reference)]
    implicit = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-2, max_steps=BACKWARD))
    rules: dict[str, GradientRule] = {
        "implicit": implicit,
        "one-step": eq.PhantomGradient(),
        "unrolled, 10 steps": eq.UnrolledGradient(steps=10),
    }
    for name, rule in rules.items():
        torch.manual_seed(0)
        model = eq.create_model("mopteq", shape=shape, classes=10, size=size, diversity=0.001)
        model.equilibrium.tolerance = eq.Tolerance(relative=1e-3, max_steps=FORWARD)  # type: ignore[union-attr]
        model.equilibrium.gradient = rule  # type: ignore[union-attr]
        found.append(Player(f"MOptEq, {name}", model))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", choices=SIZES, default="cifar10", help="size of the images (default cifar10)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="batch size (default 32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (default 3)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of torch threads (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    side = SIZES[arguments.images][0]
    images = torch.rand(arguments.batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (arguments.batch,))
    found = players(arguments.images)
    for player in found:
        player.step(images, labels)  # warm up
    times, answers = [], []
    for _ in range(arguments.rounds):
        times.append([seconds(lambda player=player: player.step(images, labels)) for player in found])
        for player in found:
            player.answer(images)
        answers.append([seconds(lambda player=player: player.answer(images)) for player in found])
    rows: list[Row] = []
    for i, player in enumerate(found):
        peak = peak_of(lambda player=player: player.step(images, labels))
        rows.append(
            {
                "model": player.name,
                "parameters": sum(p.numel() for p in player.model.parameters()),
                "forward steps": player.steps(images),
                "step s": median(t[i] for t in times),
                "ratio to MDEQ": median(t[i] / t[0] for t in times),
                "answer s": median(t[i] for t in answers),
                "answer ratio": median(t[i] / t[0] for t in answers),
                "peak MB": peak / 2**20,
            }
        )
    show(f"{arguments.images}, batch {arguments.batch}", rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

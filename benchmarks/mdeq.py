"""Time a training step of MDEQ in equipoise and in torchdeq: same weights, same number of evaluations.

    python benchmarks/mdeq.py [--size NAME] [--batch N] [--steps F B] [--rounds N] [--threads N] [--run RUN] [--json F]

A step is stem, solve, head, cross entropy, implicit backward pass and Adam. Both use Broyden's method with F
evaluations of f forward and B products backward and tolerance 0, so that they do the same work; their final residuals
are printed. Weights are derived once per solve for both: otherwise torchdeq would normalise them at every evaluation.
torchdeq runs twice, by default and with its model in channels-last; it makes rows of (C, H, W) either way. All run in
turns in one process after a warm-up. Times are medians; the ratio is the median over the rounds of the faster
torchdeq's time divided by the contender's.

Peak memory is the additional memory of a step, for the given number of steps and for four times as many.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import median

import torch
import torchdeq
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.lab.runs.machine import keep_freed_memory
from equipoise.problem.layout import row_norms
from equipoise.problem.scope import Scope
from measuring import peak_of, seconds
from tables import Row, show

MEMORY = 18  # updates that equipoise's Broyden keeps; torchdeq's keeps one for every step


class Equipoise:
    """The model of equipoise."""

    name = "equipoise"

    def __init__(self, model: nn.Module, forward: int, backward: int) -> None:
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        layer = model.equilibrium
        layer.solver, layer.on_failure = eq.Broyden(memory=MEMORY), "ignore"
        layer.tolerance = eq.Tolerance(relative=0.0, max_steps=forward, patience=None)
        limit = eq.Tolerance(relative=0.0, max_steps=backward, patience=None)
        layer.gradient = eq.ImplicitGradient(tolerance=limit)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def logits(self, images: Tensor) -> Tensor:
        return self.model(images)

    def residual(self, images: Tensor) -> float:
        with torch.no_grad(), eq.watch_solves() as solves:
            self.logits(images)
        return float(solves[0].stats.residual.median())

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.logits(images), labels).backward()
        self.optimizer.step()


class TorchDEQ(Equipoise):
    """The same modules with torchdeq's solve between stem and head."""

    def __init__(self, model: nn.Module, forward: int, backward: int, channels_last: bool) -> None:
        super().__init__(model, forward, backward)
        self.name = f"torchdeq{', channels-last' if channels_last else ''}"
        order = torch.channels_last if channels_last else torch.contiguous_format
        self.order = order
        self.model = model.to(memory_format=order)  # type: ignore[call-overload]
        # In training its Broyden returns the iterate before its last; it does not count its first evaluation.
        self.deq = torchdeq.get_deq(
            ift=True,
            f_solver="broyden",
            f_max_iter=forward - 1,
            f_tol=0.0,
            f_stop_mode="rel",
            b_solver="broyden",
            b_max_iter=backward - 1,
            b_tol=0.0,
            b_stop_mode="rel",
        )

    def solved(self, images: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        x = (self.model.features(images.contiguous(memory_format=self.order)),)
        f = self.model.equilibrium.f
        with Scope(len(images)).entered():
            values, _ = self.deq(lambda *z: f(z, x), f.start(x))
        return tuple(values[-1]), x

    def logits(self, images: Tensor) -> Tensor:
        return self.model.head(self.solved(images)[0])

    def residual(self, images: Tensor) -> float:
        with torch.no_grad():
            z, x = self.solved(images)
            image = self.model.equilibrium.f(z, x)
        rows = [torch.cat([part.flatten(1) for part in value], dim=1) for value in (z, image)]
        return float((row_norms(rows[1] - rows[0]) / row_norms(rows[1])).median())


def contenders(size: str, run: Path | None, forward: int, backward: int) -> list[Equipoise]:
    torch.manual_seed(0)
    model = eq.create_model("mdeq", shape=(3, 32, 32), classes=10, size=size) if run is None else eq.load(run)
    model.train()
    for module in model.modules():
        if isinstance(module, eq.VariationalDropout):
            module.p = 0.0  # both must compute the same function
    return [
        Equipoise(copy.deepcopy(model), forward, backward),
        TorchDEQ(copy.deepcopy(model), forward, backward, channels_last=False),
        TorchDEQ(copy.deepcopy(model), forward, backward, channels_last=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="cifar10-small", metavar="NAME", help="model size (default cifar10-small)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="batch size (default 32)")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[15, 18], metavar="N", help="forward, backward (default 15 18)"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="number of rounds (default 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of torch threads (default 2)")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a trained run of MDEQ (default: initial weights)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # all profit
    images, labels = torch.rand(arguments.batch, 3, 32, 32), torch.randint(10, (arguments.batch,))
    images = images.contiguous(memory_format=torch.channels_last)
    forward, backward = arguments.steps
    players = contenders(arguments.size, arguments.run, forward, backward)
    rows: list[Row] = [{"model": player.name, "residual": player.residual(images)} for player in players]
    for player in players:
        player.step(images, labels)  # warm up
    times = [
        [seconds(lambda player=player: player.step(images, labels)) for player in players]
        for _ in range(arguments.rounds)
    ]
    for i, row in enumerate(rows):
        row["step ms"] = 1e3 * median(t[i] for t in times)
        row["ratio"] = median(min(t[1:]) / t[i] for t in times)
    for steps in (forward, 4 * forward):
        for row, player in zip(rows, contenders(arguments.size, arguments.run, steps, backward), strict=True):
            peak = peak_of(lambda player=player: player.step(images, labels))
            row[f"peak MB, {steps} steps"] = peak / 2**20
    show(f"MDEQ {arguments.size}, batch {arguments.batch}, {forward} + {backward} evaluations", rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

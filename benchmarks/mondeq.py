"""Compare monDEQ in equipoise with a plain implementation of the paper (plain_mondeq.py), with the same weights.

    python benchmarks/mondeq.py [--only NAME ...] [--rounds N] [--batch N] [--threads N] [--scale X] [--cpu] [--json F]
    python benchmarks/mondeq.py --memory

A training step is forward, cross entropy, backward and Adam; evaluation is a forward pass under no_grad. All run in
turns in one process after a warm-up. Times are medians; a ratio is the median over the rounds of the plain time
divided by the contender's.

A tolerance of 1e-2 means different things to the two. The plain one stops when z of the whole batch moves by less
(alg. 2), equipoise stops each sample when the residual of f is smaller. The errors of logits and gradients relative to
a tight solve are therefore printed, and equipoise runs a second time, "as exact": at the first of 1e-2, 3e-3, 1e-3,
... at which both errors are no larger than those of the plain one, whose alpha is tuned beforehand, as in the paper
(E.2). A first check, on small images in float64, shows that the two are the same model.

With --memory, only the peak memory of equipoise on images of 128 x 128 pixels is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise.lab.runs.machine import keep_freed_memory
from equipoise.models.mondeq.model import MonDEQ
from measuring import peak_of
from plain_mondeq import PlainMonDEQ
from tables import Row, show

MODELS: dict[str, tuple[tuple[int, int, int], tuple[int, ...]]] = {  # table E1; its "54" has the parameters of 56
    "conv54": ((1, 28, 28), (54,)),
    "conv56": ((1, 28, 28), (56,)),
    "multi32": ((1, 28, 28), (16, 32, 32)),
    "multi60": ((3, 32, 32), (16, 32, 60)),
    "conv81": ((3, 32, 32), (81,)),
}
LOOSE, TIGHT = 1e-2, 1e-5
FINER = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)

Clock = Callable[[], float]


# --- the same model twice ---------------------------------------------------------------------------------------------


def pair(shape: tuple[int, int, int], channels: tuple[int, ...], scale: float = 1.0) -> tuple[PlainMonDEQ, MonDEQ]:
    """Return both models, with the same weights; `scale` is ||A||^2, ||B|| and ||S||^2 of the kernels."""
    plain = PlainMonDEQ(shape, channels)
    with torch.no_grad():
        for g in (*plain.W.g, *plain.W.s):
            g.fill_(math.log(math.expm1(scale)))  # the inverse of softplus
        for h in plain.W.h:
            h.fill_(scale)
    kind: dict[str, Any] = {"kind": "conv", "channels": channels[0]}
    if len(channels) > 1:
        kind = {"kind": "multitier", "channels": channels}
    ours = MonDEQ(shape=shape, classes=10, mean=(0.0,), std=(1.0,), **kind)  # the images are normalised already
    with torch.no_grad():
        for theirs, mine in zip(plain.parameters(), matching(plain, ours), strict=True):
            mine.copy_(theirs)
    return plain, ours


def matching(plain: PlainMonDEQ, ours: MonDEQ) -> list[nn.Parameter]:
    """Return our parameters in the order of `plain.parameters()`."""
    named = dict(ours.operator.named_parameters())
    parameters = []
    for name, _ in plain.named_parameters():
        module, _, rest = name.partition(".")
        if module == "W":
            parameters.append(
                named[rest] if rest in named else named[rest.removesuffix(".0")]
            )  # "A.0" is "A" in one tier
        else:
            parameters.append({"U": ours.inject, "head": ours.head}[module].get_parameter(rest))
    assert len(parameters) == len(list(ours.parameters())), (
        "the model of equipoise has parameters that the plain one lacks"
    )
    return parameters


class Contender:
    """A model at a tolerance: its training steps and evaluations, and the iterations they took."""

    def __init__(
        self, model: PlainMonDEQ | MonDEQ, parameters: list[nn.Parameter], images: Tensor, labels: Tensor
    ) -> None:
        self.model, self.parameters = model, parameters
        self.images, self.labels = images, labels
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.iterations = (0, 0)

    def tolerance(self, value: float) -> None:
        if isinstance(self.model, PlainMonDEQ):
            self.model.tolerance = value
        else:
            self.model.layer.tolerance = eq.Tolerance(relative=value, max_steps=300)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the gradient of every parameter in the order of the plain model."""
        self.model.train()
        self.optimizer.zero_grad()
        with eq.watch_solves() as solves:
            logits = self.model(self.images)
            F.cross_entropy(logits, self.labels).backward()
        self.count(solves)
        return logits.detach(), [p.grad.clone() for p in self.parameters]  # type: ignore[union-attr]

    def count(self, solves: Sequence[eq.Solution]) -> None:
        if isinstance(self.model, PlainMonDEQ):
            self.iterations = (self.model.forward_iterations, self.model.backward_iterations)
        else:
            forward, backward = solves[0].stats, solves[0].backward
            assert backward is not None
            self.iterations = (int(forward.steps.max()), int(backward.steps.max()))

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model(self.images)


def contenders(
    shape: tuple[int, int, int], channels: tuple[int, ...], batch: int, scale: float, dtype: torch.dtype
) -> tuple[Contender, Contender]:
    torch.manual_seed(0)
    plain, ours = pair(shape, channels, scale)
    plain.to(dtype)
    ours.to(dtype)
    images, labels = torch.randn(batch, *shape, dtype=dtype), torch.randint(10, (batch,))
    return (
        Contender(plain, list(plain.parameters()), images, labels),
        Contender(ours, matching(plain, ours), images, labels),
    )


def copy(contender: Contender) -> Contender:
    """Return a copy with its own model."""
    model = deepcopy(contender.model)
    names = {id(p): name for name, p in contender.model.named_parameters()}
    parameters = [model.get_parameter(names[id(p)]) for p in contender.parameters]
    return Contender(model, parameters, contender.images, contender.labels)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def differences(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """Return the relative difference of the logits, and that of all gradients as one vector."""
    flat = [torch.cat([g.flatten() for g in gradients]) for _, gradients in (a, b)]
    return difference(a[0], b[0]), difference(*flat)


def agreement() -> list[Row]:
    """Compare both models, solved tightly on small images in float64.

    The worst parameter is the scale h of a tier: the sum of many terms that nearly cancel.
    """
    rows: list[Row] = []
    for title, shape, channels in (("conv", (2, 8, 12), (4,)), ("multitier", (2, 8, 12), (3, 4, 5))):
        plain, ours = contenders(shape, channels, batch=4, scale=4.0, dtype=torch.float64)
        for tolerance in (1e-6, 1e-10):
            results = []
            for contender in (plain, ours):
                contender.tolerance(tolerance)
                results.append(contender.gradients())
            logits, gradients = differences(*results)
            row: Row = {"model": f"{title} {channels} {shape}", "tolerance": f"{tolerance:g}"}
            row |= {"logits": logits, "gradients": gradients}
            rows.append(row | {"worst parameter": max(map(difference, results[0][1], results[1][1]))})
    return rows


# --- timing -----------------------------------------------------------------------------------------------------------


def compare(name: str, batch: int, rounds: int, scale: float, clock: Clock) -> list[Row]:
    shape, channels = MODELS[name]
    plain, ours = contenders(shape, channels, batch, scale, torch.float32)
    exact = copy(ours)
    alpha = tune(plain)
    ours.tolerance(TIGHT)
    truth = ours.gradients()

    def accuracy(contender: Contender, tolerance: float) -> Row:
        contender.tolerance(tolerance)
        logits, gradients = differences(contender.gradients(), truth)
        row: Row = {"tolerance": f"{tolerance:.0e}", "iterations": "{}/{}".format(*contender.iterations)}
        return row | {"logit error": logits, "gradient error": gradients}

    rows = [accuracy(plain, LOOSE), accuracy(ours, LOOSE)]
    row = rows[1]
    exact.tolerance(LOOSE)
    for tolerance in FINER:
        if all(row[error] <= rows[0][error] for error in ("logit error", "gradient error")):  # type: ignore[operator]
            break
        row = accuracy(exact, tolerance)
    titles = (f"{name}: plain, alpha {alpha:g}", "equipoise", "equipoise, as exact")
    rows = [{"model": title} | row for title, row in zip(titles, (*rows, row), strict=True)]

    players = (plain, ours, exact)
    for what, runs in (("training", [p.step for p in players]), ("evaluation", [p.evaluate for p in players])):
        for player in players:
            player.model.train(what == "training")
        for run in runs:  # warm up
            run()
        times = [[seconds(run, clock) for run in runs] for _ in range(rounds)]
        for i, row in enumerate(rows):
            row[f"{what} ms"] = 1e3 * median(t[i] for t in times)
            row[f"{what} ratio"] = median(t[0] / t[i] for t in times)
    return rows


def memory() -> list[Row]:
    """Return the peak memory of a training step and of an evaluation, each with its factorisation."""
    rows: list[Row] = []
    for channels, batch in ((32, 16), (56, 8)):
        torch.manual_seed(0)
        model = MonDEQ(shape=(3, 128, 128), classes=10, kind="conv", channels=channels)
        images, labels = torch.rand(batch, 3, 128, 128), torch.randint(10, (batch,))
        contender = Contender(model, list(model.parameters()), images, labels)
        row: Row = {"model": f"conv{channels}, 128 x 128, batch {batch}"}
        row["resolvent MB"] = sum(model.operator.footprint()) * 4 / 1e6
        for what, run in (("training", contender.gradients), ("evaluation", contender.evaluate)):
            model.operator.forget()
            row[f"{what} MB"] = peak_of(run) / 1e6
        rows.append(row)
    return rows


def tune(contender: Contender) -> float:
    """Choose alpha among 1, 1/2, 1/4, ... as in the paper (E.2): the fewest forward iterations."""
    model = contender.model
    assert isinstance(model, PlainMonDEQ)
    counts: dict[float, int] = {}
    while len(counts) < 2 or counts[model.alpha] < counts[2 * model.alpha]:
        if counts:
            model.alpha /= 2
        contender.evaluate()
        counts[model.alpha] = model.forward_iterations
    model.alpha *= 2
    return model.alpha


def seconds(run: Callable[[], None], clock: Clock) -> float:
    began = clock()
    run()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="NAME",
        help=f"models (default: all of {[*MODELS]})",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds (default 5)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="batch size (default 128)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of torch threads (default 2)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="scale of the kernels (default 1)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="measure CPU time, which with --threads 1 tolerates other work",
    )
    parser.add_argument("--memory", action="store_true", help="measure only peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        show("peak memory: the factorisation, and everything else that a step takes", memory())
        return
    keep_freed_memory()  # as when training; both profit
    print(f"equipoise {eq.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, ", end="")
    print(f"batch {arguments.batch}, kernels of scale {arguments.scale:g}")
    clock = process_time if arguments.cpu else perf_counter
    if (load := os.getloadavg()[0]) > 0.5 and not arguments.cpu:
        print(f"The load average is {load:.1f}: with other work running, threads wait for each other; distrust times.")
    tables = {"relative differences between the two models: float64, tight solves": agreement()}
    for title, rows in tables.items():
        show(title, rows)
    timings = [
        row
        for name in arguments.only
        for row in compare(name, arguments.batch, arguments.rounds, arguments.scale, clock)
    ]
    title = (
        f"iterations: forward/backward, slowest sample; errors: from a solve at {TIGHT:.0e}; ratio: plain time / this"
    )
    show(title, timings)
    tables[title] = timings
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Compare steps with what this machine can do at most: their flops at the rate of a plain product, bytes at a copy's.

    python benchmarks/roofline.py [--only NAME ...] [--rounds N] [--threads N] [--cpu] [--json FILE]

A training step is a solve with a fixed number of evaluations, its implicit gradient with as many products and, for a
model, SGD. "solver step" is a step of the solver alone: the solve without its evaluations of f. Copy, product,
convolution and all steps run in turns in one process, and the medians over the rounds are printed. `counting.py`
says what is counted. A step takes at least the larger of its two bounds; if its operations run one after the other,
it takes at least the sum of theirs ("one by one"), unless they find their inputs in a cache.

    python benchmarks/roofline.py --json results/benchmarks/roofline.json
    python tests/test_docs.py --update
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch.nn import functional as F

import equipoise as eq
from counting import Counter, Counts, count
from equipoise.lab.runs.machine import keep_freed_memory
from mondeq import MODELS
from problems import PROBLEMS, Problem, State, leaves
from tables import Row, show
from training_steps import classification, limited

EVALUATIONS = 15  # forward, and as many products backward
SOLVERS = {"Anderson(6)": eq.Anderson(memory=6), "Broyden(12)": eq.Broyden(memory=12)}
SIDE = 1536  # of the plain product
COPIED = 2**28  # bytes

Clock = Callable[[], float]


@dataclass
class Subject:
    """Something that is timed and counted; a run returns its seconds."""

    name: str
    run: Callable[[], float]
    counts: Counts


# --- what the machine reaches -----------------------------------------------------------------------------------------


def yardsticks(clock: Clock) -> dict[str, Callable[[], float]]:
    """Return runs that give a rate: bytes per second of a copy, flops per second of a product and a convolution."""
    source, target = torch.rand(2, COPIED // 4)
    a, b = torch.rand(2, SIDE, SIDE)
    images = torch.rand(32, 64, 32, 32).contiguous(memory_format=torch.channels_last)
    kernel = torch.rand(64, 64, 3, 3).contiguous(memory_format=torch.channels_last)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "product": lambda: a @ b,
        "convolution": lambda: F.conv2d(images, kernel, padding=1),
    }

    def rate(name: str, run: Callable[[], object]) -> Callable[[], float]:
        counts = count(run)
        amount = counts.bytes if name == "copy" else counts.flops
        return lambda: amount / timed(run, clock)

    return {name: rate(name, run) for name, run in work.items()}


def timed(run: Callable[[], object], clock: Clock) -> float:
    began = clock()
    run()
    return clock() - began


# --- what is compared with it -----------------------------------------------------------------------------------------


class Apart:
    """f, with its time measured and its operations left out of the count."""

    def __init__(self, f: Callable[..., State], clock: Clock, counter: Counter | None = None) -> None:
        self.f, self.clock, self.counter, self.seconds = f, clock, counter, 0.0

    def __call__(self, z: State, *inputs: torch.Tensor) -> State:
        with self.counter.paused() if self.counter else nullcontext():
            began = self.clock()
            out = self.f(z, *inputs)
            self.seconds += self.clock() - began
        return out


def problem_subjects(problem: Problem, clock: Clock) -> list[Subject]:
    label = problem.title.partition(" ")[0]
    found = []
    for name, solver in SOLVERS.items():

        def solve(f: Any, solver: Any = solver) -> State:
            tolerance = limited(EVALUATIONS)
            rule = eq.ImplicitGradient(solver=solver, tolerance=tolerance)
            options: dict[str, Any] = {"solver": solver, "tolerance": tolerance, "gradient": rule}
            return eq.fixed_point(f, problem.z0, *problem.inputs, **options, on_failure="ignore").value

        def train(solve: Callable[[Any], State] = solve) -> None:
            loss = torch.stack([part.square().mean() for part in leaves(solve(problem.f))]).sum()
            torch.autograd.grad(loss, list(problem.f.parameters()))

        def solver_step(solve: Callable[[Any], State] = solve) -> float:
            f = Apart(problem.f, clock)
            with torch.no_grad():
                whole = timed(lambda: solve(f), clock)
            return (whole - f.seconds) / EVALUATIONS

        with torch.no_grad(), Counter() as counter:
            solve(Apart(problem.f, clock, counter))
        alone = Counts([op.divided(EVALUATIONS) for op in counter.counts.operations])
        found += [
            Subject(f"{label} {name}, training step", lambda train=train: timed(train, clock), count(train)),
            Subject(f"{label} {name}, solver step", solver_step, alone),
        ]
    return found


def model_subject(title: str, clock: Clock, *arguments: Any, **options: Any) -> Subject:
    step = classification(*arguments, **options)
    step()  # warm up
    return Subject(title, lambda: timed(step, clock), count(step))


def subjects(names: list[str], clock: Clock) -> list[Subject]:
    found = [subject for name in PROBLEMS if name in names for subject in problem_subjects(PROBLEMS[name](), clock)]
    for size, kind, steps in (("conv56", "conv", 3), ("multi32", "multitier", 4)):
        if size in names:
            shape, channels = MODELS[size]
            title = f"monDEQ {size}, batch 128, {steps} + {steps} evaluations"
            width = channels[0] if kind == "conv" else channels
            found.append(model_subject(title, clock, "mondeq", shape, 128, (steps, steps), kind=kind, channels=width))
    if "mdeq-model" in names:
        size, batch, steps = "cifar10-small", 32, (15, 18)
        title = f"MDEQ {size}, batch {batch}, {steps[0]} + {steps[1]} evaluations"
        found.append(model_subject(title, clock, "mdeq", (3, 32, 32), batch, steps, size=size, memory=18))
    if "mopteq" in names:
        size, batch, steps = "multi-0.48m", 32, (4, 4)
        title = f"MOptEq {size}, batch {batch}, {steps[0]} + {steps[1]} evaluations"
        found.append(model_subject(title, clock, "mopteq", (3, 32, 32), batch, steps, size=size, diversity=0.001))
    return found


NAMES = [*PROBLEMS, "conv56", "multi32", "mdeq-model", "mopteq"]


# --- tables -----------------------------------------------------------------------------------------------------------


def row(subject: Subject, seconds: float, flop_rate: float, byte_rate: float) -> Row:
    """Compare a time with the bounds that these rates imply."""
    counts = subject.counts
    by_flops, by_bytes = counts.flops / flop_rate, counts.bytes / byte_rate
    one_by_one = counts.seconds(flop_rate, byte_rate)
    return {
        "step": subject.name,
        "ms": 1e3 * seconds,
        "Gflop": counts.flops / 1e9,
        "GB": counts.bytes / 1e9,
        "ms by flops": 1e3 * by_flops,
        "ms by bytes": 1e3 * by_bytes,
        "bound by": "flops" if by_flops > by_bytes else "bytes",
        "of roofline": max(by_flops, by_bytes) / seconds,
        "ms one by one": 1e3 * one_by_one,
        "of that": one_by_one / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"subjects (default: all of {NAMES})"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="number of rounds (default 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of torch threads (default 2)")
    parser.add_argument(
        "--cpu", action="store_true", help="measure CPU time, which with --threads 1 tolerates other work"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    clock = process_time if arguments.cpu else perf_counter
    heading = [
        f"equipoise {eq.__version__}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), "
        f"{'processor' if arguments.cpu else 'wall-clock'} time, medians of {arguments.rounds} rounds"
    ]
    print(*heading)
    if (load := os.getloadavg()[0]) > 0.5 and not arguments.cpu:
        print(f"The load average is {load:.1f}: with other work running, threads wait for each other; distrust times.")
    rates, found = yardsticks(clock), subjects(arguments.only, clock)
    runs = {**rates, **{subject.name: subject.run for subject in found}}
    for run in runs.values():  # warm up
        run()
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            results[name].append(run())
    medians = {name: median(values) for name, values in results.items()}
    machine: list[Row] = [
        {"operation": f"copy of {COPIED >> 20} MB", "GB/s": medians["copy"] / 1e9},
        {"operation": f"product of {SIDE} x {SIDE} matrices", "Gflop/s": medians["product"] / 1e9},
        {"operation": "3x3 convolution, 32 x 64 x 32x32", "Gflop/s": medians["convolution"] / 1e9},
    ]
    tables = {
        "what this machine reaches": machine,
        "steps, and the least time they could take at these rates of copy and product": [
            row(subject, medians[subject.name], medians["product"], medians["copy"]) for subject in found
        ],
    }
    for title, rows in tables.items():
        show(title, rows)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"heading": heading, "tables": tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()

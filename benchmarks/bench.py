"""Compare equipoise with torchdeq: evaluations, time, overhead, memory, and one slow sample in a batch.

    python benchmarks/bench.py [--only dense conv mdeq memory slow] [--rounds N] [--threads N] [--json FILE]

Machines are noisy, so contenders run in turns (A, B, C, A, B, C, ...) in one process, every comparison is between runs
of the same round, and medians over the rounds are printed. Overhead is the time of a solve divided by the time it spent
inside f in the same run. The tables of the documentation come from the JSON file (``tables.py`` prints it):

    python benchmarks/bench.py --json results/benchmarks/bench.json
    python tests/test_docs.py --update
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

import equipoise as eq
from contenders import Contender, Equipoise, contenders, direction, loss
from measuring import peak_of
from probe import Probe
from problems import PROBLEMS, Problem, endless, leaves, one_slow_sample, relative_residual
from tables import Row, show

LOOSE, TIGHT = 1e-3, 1e-6
LIMIT = eq.Tolerance(relative=TIGHT, max_steps=200)
REFERENCE = "Anderson(6)"

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Time of one run, and how much of it was spent inside f (and its products with J^T)."""

    seconds: float
    inside: float

    @property
    def overhead(self) -> float:
        return self.seconds / self.inside


def in_turns(runs: Mapping[str, Callable[[], T]], rounds: int, budget: float = 6.0) -> dict[str, list[T]]:
    """Run everything in turns. After two rounds, a contender that has used up its ``budget`` in seconds sits out."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    for round_ in range(rounds):
        for name, run in runs.items():
            if round_ < 2 or spent[name] < budget:
                began = perf_counter()
                results[name].append(run())
                spent[name] += perf_counter() - began
    return results


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median ratio over the rounds that both took part in."""
    return median(a / b for a, b in zip(times, reference, strict=False))


# --- solving ----------------------------------------------------------------------------------------------------------


def forward_table(problem: Problem, players: Sequence[Contender], rounds: int) -> list[Row]:
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], tuple[Clock, float]]] = {}
    for player in players:
        loose = player.prepare(problem, LOOSE)
        tight = player.prepare(problem, TIGHT)
        rows[player.name] = {"solver": player.name, f"calls to {LOOSE:g}": loose, f"to {TIGHT:g}": tight}
        if tight is not None:
            runs[player.name] = lambda player=player: timed_solve(problem, player)
    results = in_turns(runs, rounds)
    reference = [clock.seconds for clock, _ in results[REFERENCE]]
    for name, solves in results.items():
        clocks = [clock for clock, _ in solves]
        rows[name] |= {
            "residual": max(residual for _, residual in solves),
            "ms": 1e3 * median(c.seconds for c in clocks),
            "time ratio": ratio([c.seconds for c in clocks], reference),
            "overhead": median(c.overhead for c in clocks),
        }
    return list(rows.values())


def timed_solve(problem: Problem, player: Contender) -> tuple[Clock, float]:
    """Time a solve; return also the true residual of its value, worst sample, to check that it did converge."""
    probe = Probe(problem.f)
    began = perf_counter()
    z = player.solve(problem, probe)
    clock = Clock(perf_counter() - began, probe.seconds)
    with torch.no_grad():
        return clock, float(relative_residual(z, problem.f(z, *problem.inputs)).max())


# --- solving and differentiating --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    forward: Clock
    backward: Clock
    gradient: Tensor

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


def gradient_table(problem: Problem, players: Sequence[Contender], rounds: int) -> list[Row]:
    """Time solve and gradient of the players that ``forward_table`` has prepared."""
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], Step]] = {}
    for player in players:
        products = player.prepare_backward(problem, TIGHT)
        rows[player.name] = {"solver": player.name, f"products to {TIGHT:g}": products}
        if products is not None:
            runs[player.name] = lambda player=player: timed_step(problem, player)
    results = in_turns(runs, rounds)
    reference = results[REFERENCE]
    exact = exact_gradient(problem)
    for name, steps in results.items():
        error = (steps[-1].gradient - exact).norm() / exact.norm()
        rows[name] |= {
            "ms forward": 1e3 * median(s.forward.seconds for s in steps),
            "ms backward": 1e3 * median(s.backward.seconds for s in steps),
            "time ratio": ratio([s.seconds for s in steps], [s.seconds for s in reference]),
            "ratio backward": ratio([s.backward.seconds for s in steps], [s.backward.seconds for s in reference]),
            "overhead backward": median(s.backward.overhead for s in steps),
            "gradient error": float(error),
        }
    return list(rows.values())


def timed_step(problem: Problem, player: Contender) -> Step:
    """Differentiate a fixed projection of z* with respect to every parameter and input."""
    wanted = [*problem.f.parameters(), *(x.requires_grad_() for x in problem.inputs)]
    v = direction(problem)
    probe = Probe(problem.f)
    began = perf_counter()
    value = player.differentiable(problem, probe)
    forward = Clock(perf_counter() - began, probe.seconds)
    objective = loss(value, v)
    probe.seconds = 0.0
    began = perf_counter()
    gradients = torch.autograd.grad(objective, wanted)
    probe.close()
    backward = Clock(perf_counter() - began, probe.seconds)
    return Step(forward, backward, torch.cat([g.flatten() for g in gradients]))


def exact_gradient(problem: Problem) -> Tensor:
    """Solve in float64 to 1e-10. Errors of 1e-4 to 1e-2 are ReLUs that switch within the tolerance of z."""
    precise = replace(
        problem,
        f=deepcopy(problem.f).double(),
        z0=problem.z0.double() if isinstance(problem.z0, Tensor) else tuple(z.double() for z in problem.z0),
        inputs=tuple(x.detach().double() for x in problem.inputs),
    )
    solver = Equipoise("exact", eq.Anderson(memory=6), eq.Tolerance(relative=1e-10, max_steps=500))
    return timed_step(precise, solver).gradient


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_table(few: int = 20, many: int = 200) -> list[Row]:
    """Measure the additional peak memory of a solve and its implicit backward pass when all steps are used."""
    problem = endless()
    state = sum(z.nbytes for z in leaves(problem.z0))
    rows: dict[str, Row] = {}
    for steps in (few, many):
        for player in contenders(replace(LIMIT, max_steps=steps, patience=None)):
            peak, calls = peak_memory(problem, player)
            row = rows.setdefault(player.name, {"solver": player.name})
            row |= {f"calls, {steps} steps": calls, f"states, {steps} steps": peak / state}
    for row in rows.values():
        row["growth"] = row[f"states, {many} steps"] / row[f"states, {few} steps"]  # type: ignore[operator]
    return list(rows.values())


def peak_memory(problem: Problem, player: Contender) -> tuple[int, int]:
    """Return the peak in bytes, and the number of calls of f and products with J^T."""
    probe = Probe(problem.f)
    v = direction(problem)
    peak = peak_of(
        lambda: torch.autograd.grad(loss(player.differentiable(problem, probe), v), list(problem.f.parameters()))
    )
    return peak, probe.calls + probe.products


# --- one slow sample --------------------------------------------------------------------------------------------------


def slow_table() -> list[Row]:
    """Compare the rows (samples x calls) computed for a batch with the sum of what each sample needs alone."""
    problem = one_slow_sample()
    rows: list[Row] = []
    for player in contenders(replace(LIMIT, max_steps=1000, patience=None)):
        calls = player.prepare(problem, TIGHT)
        row: Row = {"solver": player.name, "calls": calls}
        rows.append(row)
        if calls is not None:
            together = rows_computed(problem, player)
            alone = rows_alone(problem, player)
            row |= {"rows": together, "rows alone": alone, "ratio": together / alone}
    return rows


def rows_computed(problem: Problem, player: Contender) -> int:
    probe = Probe(problem.f)
    player.solve(problem, probe)
    return probe.rows


def rows_alone(problem: Problem, player: Contender) -> int:
    total = 0
    for i in range(len(leaves(problem.z0)[0])):
        sample = replace(problem, z0=problem.z0[i : i + 1], inputs=tuple(x[i : i + 1] for x in problem.inputs))
        total += player.prepare(sample, TIGHT) or 0
    return total


def main() -> None:
    sections = [*PROBLEMS, "memory", "slow"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sections,
        default=sections,
        metavar="NAME",
        help=f"sections to run (default: all of {sections})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="number of rounds (default 9)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="number of torch threads (default 2)")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    heading = [
        f"equipoise {eq.__version__}, torchdeq {version('torchdeq')}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        f"-: not reached in {LIMIT.max_steps} steps. Time ratios are relative to {REFERENCE}, measured in turns.",
    ]
    print("\n".join(heading))
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The load average is {load:.1f}: with other work running, threads wait for each other; distrust times.")
    tables: dict[str, list[Row]] = {}

    def add(title: str, rows: list[Row]) -> None:
        tables[title] = rows
        show(title, rows)

    for name in (n for n in PROBLEMS if n in arguments.only):
        problem = PROBLEMS[name]()
        players = contenders(LIMIT)
        forward = forward_table(problem, players, arguments.rounds)
        add(f"{problem.title}: solve", forward)
        there = [p for p, row in zip(players, forward, strict=True) if "ms" in row]
        add(f"{problem.title}: solve and differentiate", gradient_table(problem, there, arguments.rounds))
    if "memory" in arguments.only:
        add("peak memory of a solve and its implicit gradient, in units of the state's size", memory_table())
    if "slow" in arguments.only:
        add("one slow sample among 128: rows computed", slow_table())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"heading": heading, "tables": tables}, indent=2) + "\n")


if __name__ == "__main__":
    main()

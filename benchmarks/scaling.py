"""Measure how time and memory of a training step grow, fit them, and compute what the papers' models need.

    python benchmarks/scaling.py [--only fits papers] [--models NAME ...] [--rounds N] [--json FILE]
    python benchmarks/scaling.py --processes [--json FILE]

Every model is measured at three sizes, with twice the batch and with twice the evaluations; a sum of a few terms is
fitted to that and checked at a fourth size, which is four times as large in width and pixels together. Times are
processor seconds of one thread, memory is the additional peak of a step (`measuring.py`). `paper_needs.py` describes
the second part. The last one runs a step in one process and, at equal total batch, in two, in turns, with one thread
each, beside what the fit and the measured time of an all-reduce predict; it needs two idle cores, and the fits of the
first part. Without options, everything is run; with `--json`, tables are added to those that the file has:

    python benchmarks/scaling.py --json results/benchmarks/scaling.json
    python tests/test_docs.py --update
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

import equipoise as eq
import paper_needs
from equipoise.lab.runs.machine import keep_freed_memory, this_machine
from fitting import Fit, Variables, fit
from measuring import peak_of
from tables import Row, show
from training_steps import Step, classification, few_shot, generator, pixels

PARTS = ("fits", "papers")


class Size(NamedTuple):
    """C channels of the finest scale, side of the images, B samples in a batch, E evaluations forward and backward."""

    channels: int
    side: int
    batch: int
    evaluations: int

    def plan(self) -> list[Size]:
        """Return the sizes to fit, and last the one to check."""
        C, side, B, E = self
        fitted = [self, Size(2 * C, side, B, E), Size(C, 2 * side, B, E), Size(C, side, 2 * B, E)]
        return [*fitted, Size(C, side, B, 2 * E), Size(2 * C, 2 * side, B // 2, 2 * E)]


@dataclass(frozen=True)
class Family:
    """A model of any size: its smallest size, its training step, and the terms of its time and memory."""

    smallest: Size
    make: Callable[[Size], Step]
    seconds: tuple[str, ...]
    memory: tuple[str, ...]
    halvings: int = 0  # between the image and the finest scale

    def variables(self, size: Size, step: Step) -> Variables:
        P, C, B, E = pixels(size.side, self.halvings), size.channels, size.batch, size.evaluations
        return {"P": P, "C": C, "B": B, "E": E, "W": step.parameters}


def classifier(name: str, channels: int = 3, width: Callable[[int], Any] = lambda C: C, **options: Any) -> Any:
    """Return the step of a classifier as a function of its size."""

    def make(size: Size) -> Step:
        shape, E = (channels, size.side, size.side), (size.evaluations,) * 2
        return classification(name, shape, size.batch, E, channels=width(size.channels), **options)

    return make


def doubling(scales: int) -> Callable[[int], tuple[int, ...]]:
    return lambda C: tuple(C << i for i in range(scales))


CONV = ("E", "B E P C^2", "B E P C", "W")
BRANCHES = ("E", "B E P C^2", "B E P C", "C^3")
SPECTRAL = ("E", "B E P C^2", "B E P C", "P C^3")
STATES = ("W", "B P C", "1")
BLOCKS = ("P C^2", "B P C", "1")
HEAD: dict[str, Any] = {"head_channels": (4, 8, 16, 32), "final_channels": 256}

FAMILIES = {
    "monDEQ fc": Family(
        Size(256, 14, 128, 8),
        classifier("mondeq", 1, kind="dense"),
        ("E", "B E C^2", "C^3", "B P C"),
        ("C^2", "B C", "P C", "B P"),
    ),
    "monDEQ conv": Family(Size(16, 14, 64, 6), classifier("mondeq", 1, kind="conv"), SPECTRAL, BLOCKS),
    "monDEQ multi-tier": Family(
        Size(8, 16, 64, 6), classifier("mondeq", 1, lambda C: (C, 2 * C, 2 * C), kind="multitier"), SPECTRAL, BLOCKS
    ),
    "MDEQ": Family(
        Size(8, 64, 4, 6), classifier("mdeq", width=doubling(4), size="imagenet-small", **HEAD), CONV, STATES, 2
    ),
    "MDEQ segmentation": Family(
        Size(8, 64, 4, 6),
        classifier("mdeq", width=doubling(4), size="cityscapes-small", head="segmentation"),
        CONV,
        STATES,
        2,
    ),
    "OptEq": Family(Size(16, 16, 16, 6), classifier("opteq", size="reduced"), BRANCHES, STATES),
    "POptEq": Family(Size(16, 16, 16, 6), classifier("popteq", size="reduced"), BRANCHES, STATES),
    "MOptEq": Family(Size(16, 16, 16, 6), classifier("mopteq", size="reduced"), BRANCHES, STATES),
    "JIIO generator": Family(
        Size(8, 32, 2, 4),
        lambda size: generator(doubling(4)(size.channels), size.side, size.batch, size.evaluations),
        ("1", "E", "B E P C", "W"),
        STATES,
    ),
    "JIIO few-shot": Family(
        Size(8, 16, 2, 6),
        lambda size: few_shot(doubling(2)(size.channels), size.side, size.batch, size.evaluations),
        CONV,
        STATES,
    ),
}


# --- measuring and fitting --------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One model at one size."""

    size: Size
    variables: Variables
    seconds: float
    memory: float


def measure(family: Family, rounds: int) -> list[Measured]:
    """Measure a family at the sizes of its plan, in turns."""
    sizes = family.smallest.plan()
    steps = [family.make(size) for size in sizes]
    for step in steps:  # warm up
        step()
    times = [[processor_seconds(step) for step in steps] for _ in range(rounds)]
    return [
        Measured(size, family.variables(size, step), median(t[i] for t in times), peak_of(step))
        for i, (size, step) in enumerate(zip(sizes, steps, strict=True))
    ]


def processor_seconds(run: Callable[[], object]) -> float:
    began = process_time()
    run()
    return process_time() - began


@dataclass
class Fitted:
    """The two fits of a family, with what they were fitted to."""

    measured: list[Measured]
    seconds: Fit
    memory: Fit

    @classmethod
    def to(cls, family: Family, measured: list[Measured]) -> Fitted:
        *known, _ = measured
        points = [m.variables for m in known]
        return cls(
            measured,
            fit(family.seconds, points, [m.seconds for m in known]),
            fit(family.memory, points, [m.memory for m in known]),
        )


def measurement_rows(name: str, fitted: Fitted) -> list[Row]:
    return [
        {
            "model": name if i == 0 else "",
            "C": m.size.channels,
            "P": m.variables["P"],
            "B": m.size.batch,
            "E": m.size.evaluations,
            "W": f"{m.variables['W']:,}",
            "ms per sample": 1e3 * m.seconds / m.size.batch,
            "fit ": 1e3 * fitted.seconds(m.variables) / m.size.batch,
            "MB per sample": m.memory / 1e6 / m.size.batch,
            "fit": fitted.memory(m.variables) / 1e6 / m.size.batch,
            "": "check" if m is fitted.measured[-1] else "",
        }
        for i, m in enumerate(fitted.measured)
    ]


def fit_row(name: str, found: Fit, measured: list[Measured], of: Callable[[Measured], float]) -> Row:
    errors = [found(m.variables) / of(m) - 1 for m in measured]
    return {
        "model": name,
        "largest error": f"{max(map(abs, errors[:-1])):.0%}",
        "at the size to check": f"{errors[-1]:+.0%}",
        "fit": str(found),
    }


# --- two processes ----------------------------------------------------------------------------------------------------

SHARED = ("monDEQ conv", "MDEQ", "JIIO generator")


def shared_size(name: str) -> Size:
    """Return the size whose step is shared by two processes: large enough that a process has something to do."""
    return FAMILIES[name].smallest._replace(batch=4 * FAMILIES[name].smallest.batch)


def worker(file: Path, rounds: int) -> None:
    """Time steps of one process and of two, which torchrun has started; the leading process writes the times."""
    results: dict[str, dict[str, float]] = {}
    with this_machine("cpu", 1) as machine:
        for name in SHARED:
            size, family = shared_size(name), FAMILIES[name]
            whole = family.make(size)
            half = family.make(size._replace(batch=size.batch // machine.world)).share()
            gradient = torch.zeros(whole.parameters)
            runs = {"one": whole, "two": half, "all-reduce": lambda gradient=gradient: dist.all_reduce(gradient)}
            times: dict[str, list[float]] = {run: [] for run in runs}
            for round_ in range(rounds + 1):
                for run, step in runs.items():
                    machine.wait()
                    began = perf_counter()
                    if run != "one" or machine.leads:
                        step()
                    machine.wait()
                    if round_:  # the first is a warm-up
                        times[run].append(perf_counter() - began)
            results[name] = {run: median(values) for run, values in times.items()}
    if machine.leads:
        file.write_text(json.dumps(results))


def processes_table(fits: dict[str, Fit], rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, __file__, "--worker", str(file), "--rounds", str(rounds)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        results = json.loads(file.read_text())
    rows: list[Row] = []
    for name, times in results.items():
        size, family = shared_size(name), FAMILIES[name]
        step = family.make(size)
        model = fits[name]
        alone = model(family.variables(size, step))
        shared = model(family.variables(size._replace(batch=size.batch // 2), step)) + times["all-reduce"]
        rows.append(
            {
                "model": name,
                "batch": size.batch,
                "one process, ms": 1e3 * times["one"],
                "two, ms": 1e3 * times["two"],
                "all-reduce, ms": 1e3 * times["all-reduce"],
                "speed-up": times["one"] / times["two"],
                "predicted: one, ms": 1e3 * alone,
                "predicted: two, ms": 1e3 * shared,
                "predicted speed-up": alone / shared,
            }
        )
    return rows


# --- command ----------------------------------------------------------------------------------------------------------

MEASUREMENTS = "measurements: processor time and peak memory per sample, beside the fit"
SECONDS = "fitted seconds of a training step"
MEMORY = "fitted bytes of a training step, beyond weights and optimizer state"
PROCESSES = "one process and two, one thread each, at equal total batch"


class Store:
    """The tables so far, printed and written as they are made."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        stored = json.loads(file.read_text()) if file and file.exists() else {}
        self.tables: dict[str, list[Row]] = stored.get("tables", {})
        self.measured: dict[str, list[Measured]] = {
            name: [Measured(Size(*m["size"]), m["variables"], m["seconds"], m["memory"]) for m in measured]
            for name, measured in stored.get("measured", {}).items()
        }
        self.heading = [
            f"equipoise {eq.__version__}, torch {torch.__version__}, 1 thread. C: channels of the finest scale, P: its "
            "pixels, B: samples in a batch,",
            "E: evaluations forward and as many products backward (JIIO: also joint steps), W: parameters",
        ]

    def fits(self) -> dict[str, Fitted]:
        """Return the fits of all models that were measured."""
        names = [name for name in FAMILIES if name in self.measured]
        return {name: Fitted.to(FAMILIES[name], self.measured[name]) for name in names}

    def add(self, tables: dict[str, list[Row]], shown: bool = True) -> None:
        self.tables |= tables
        for title, rows in tables.items() if shown else ():
            show(title, rows)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            measured = {name: [asdict(m) for m in found] for name, found in self.measured.items()}
            content = {"heading": self.heading, "tables": self.tables, "measured": measured}
            self.file.write_text(json.dumps(content, indent=2) + "\n")


def run_fits(store: Store, names: list[str], rounds: int) -> None:
    for name in names:
        print(f"measuring {name}", flush=True)
        store.measured[name] = measure(FAMILIES[name], rounds)
    store.add(fit_tables(store.fits()))


def fit_tables(found: dict[str, Fitted]) -> dict[str, list[Row]]:
    return {
        MEASUREMENTS: [row for name, fitted in found.items() for row in measurement_rows(name, fitted)],
        SECONDS: [fit_row(n, f.seconds, f.measured, lambda m: m.seconds) for n, f in found.items()],
        MEMORY: [fit_row(n, f.memory, f.measured, lambda m: m.memory) for n, f in found.items()],
    }


def run_papers(store: Store) -> None:
    needs = []
    for paper in paper_needs.PAPERS:
        print(f"measuring {paper.recipe}", flush=True)
        needs.append(paper_needs.measure(paper))
        store.add(paper_needs.tables(needs), shown=paper is paper_needs.PAPERS[-1])


def run_processes(store: Store, rounds: int) -> None:
    if missing := [name for name in SHARED if name not in store.measured]:
        sys.exit(f"--processes needs the fits of {', '.join(missing)}: run --only fits with the same --json first.")
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The load average is {load:.1f}: two processes need two idle cores; distrust the speed-up.")
    fits = {name: fitted.seconds for name, fitted in store.fits().items()}
    store.add({PROCESSES: processes_table(fits, rounds)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"parts to run, of {PARTS}")
    parser.add_argument(
        "--models", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME", help="models to fit"
    )
    parser.add_argument("--processes", action="store_true", help="only compare one process with two")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (default 3)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of the papers' steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.worker:
        worker(arguments.worker, arguments.rounds)
        return
    store = Store(arguments.json)
    everything = not (arguments.only or arguments.processes)
    if everything or "fits" in (arguments.only or ()):
        run_fits(store, arguments.models, arguments.rounds)
    if everything or arguments.processes:
        run_processes(store, 2 * arguments.rounds)
    if everything or "papers" in (arguments.only or ()):
        torch.set_num_threads(arguments.threads)  # flops, bytes and memory do not depend on it
        run_papers(store)


if __name__ == "__main__":
    main()

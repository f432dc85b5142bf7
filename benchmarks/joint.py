"""Compare ways to optimise an input through an equilibrium: time at equal true loss, attacks, steps, memory.

    python benchmarks/joint.py [--only easy hard attack steps memory] [--batches N ...] [--threads N] [--json FILE]
    python benchmarks/joint.py --only tuning

The networks are those of `joint_nets.py`, which trains them at the first run. All methods take the same call,
`eq.optimize_input`; they run in turns on each batch, in one process after a warm-up. Times are processor seconds.
What counts is the true loss, at the z* of the selected x. It is solved for anew, outside the clock: z of an iterate has
not converged, so the loss there may be lower than any that x can have.

All settings of the other methods were tuned on batches 0 and 1 (`--only tuning` prints how), separately for each
network, by the geometric mean of the times to its three losses; all tables are of other batches. `eq.JointAnderson()`
has no setting that depends on the problem; its constants were chosen on batches 0 to 3.

With `--json`, tables are added to those that the file has; `tables.py` prints them:

    python benchmarks/joint.py --json results/benchmarks/joint.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

import equipoise as eq
from equipoise.joint.base import JointSolver
from joint_nets import Problem, problem
from measuring import peak_of
from tables import Row, show, text

TUNING = (0, 1)  # batches
TARGETS = {"easy": (0.02, 0.0125, 0.009), "hard": (0.05, 0.03, 0.02)}  # mean losses to reach
TRUE = eq.Tolerance(relative=1e-4, max_steps=80, patience=None)  # of z*
MISS = 3.0  # times that of the whole run is the time of a run that misses its target, where methods are ranked
ROUGH, SLACK = eq.Tolerance(relative=1e-3, max_steps=20, patience=None), 0.1  # a rough loss errs by less
MORE = (8, 9, 10, 11)  # batches that are attacked besides: 256 images are too few to tell methods apart
CHUNK = 10  # number of iterates that are scored together


def exactly(steps: int) -> eq.Tolerance:
    return eq.Tolerance(relative=0.0, max_steps=steps, patience=None)


# --- methods ----------------------------------------------------------------------------------------------------------

INNER = {
    "Anderson": eq.Anderson(),
    "Broyden": eq.Broyden(memory=20),
    "Picard": eq.Picard(),
    "damped": eq.Picard(damping=0.2),
}
INNERS = ("Anderson", "Broyden", "Picard")  # to choose from
RATES, STEPS = (0.1, 0.2, 0.3, 0.5, 1.0), (1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Method:
    """A solver with settings to tune, one at a time in this order, and its number of steps."""

    solver: Callable[..., JointSolver]
    steps: int
    settings: tuple[Sequence[Any], ...] = ()


def adam(forward: int | None, backward: int | None, **options: Any) -> Callable[..., JointSolver]:
    """Return Adam with this many evaluations in its inner solves; None: until its default tolerance of 1e-2."""
    limits = {"tolerance": forward, "adjoint": backward}
    options |= {name: exactly(steps) for name, steps in limits.items() if steps is not None}
    return lambda lr, inner: eq.AdamInput(lr, solver=INNER[inner], **options)


def one_loop(lr: float, damping: tuple[float, float]) -> JointSolver:
    return eq.JointIteration(damping=damping, step_size=eq.AdamStep(lr))


def plain(size: float, damping: tuple[float, float]) -> JointSolver:
    return eq.JointIteration(damping=damping, step_size=size)


def published(size: float) -> JointSolver:
    return eq.JointIteration(eq.Anderson(memory=20, kind=1), damping=(0.2, 0.4), step_size=size)


DAMPING = ((0.2, 0.2), (0.1, 0.1), (0.2, 0.4))
COLD, DEFAULT = "Adam, cold 18+20", "JointAnderson()"
UNTUNED = "Adam, cold, untuned"  # as in the prototypes that set the goals: without acceleration, rate not chosen here
WARM = ("Adam, warm 2+2", "Adam, warm 4+4", "Adam, warm to 1e-2")
METHODS = {
    COLD: Method(adam(18, 20, warm=False), 60, (RATES, INNERS)),
    UNTUNED: Method(adam(18, 20, warm=False), 60),
    WARM[0]: Method(adam(2, 2), 80, (RATES, INNERS)),
    WARM[1]: Method(adam(4, 4), 80, (RATES, INNERS)),
    WARM[2]: Method(adam(None, None), 60, (RATES, INNERS)),
    "Adam, one loop": Method(one_loop, 120, ((0.05, 0.1, 0.2, 0.3), DAMPING)),
    "joint, plain": Method(plain, 120, (STEPS, DAMPING)),
    # a_x = 0.01 for the sum over the 256 pixels, of which this is the mean
    "joint, as published": Method(lambda: published(2.56), 100),
    "joint, published, tuned step": Method(published, 100, (STEPS,)),
    "JointAnderson(tuned step)": Method(lambda size: eq.JointAnderson(step_size=size), 60, (STEPS,)),
    DEFAULT: Method(eq.JointAnderson, 60),
}
TUNED: dict[str, dict[str, tuple[Any, ...]]] = {  # by --only tuning
    "easy": {
        COLD: (0.3, "Picard"),
        UNTUNED: (0.5, "damped"),
        WARM[0]: (0.2, "Picard"),
        WARM[1]: (0.5, "Picard"),
        WARM[2]: (0.3, "Broyden"),
        "Adam, one loop": (0.1, (0.2, 0.2)),
        "joint, plain": (30.0, (0.2, 0.2)),
        "joint, published, tuned step": (30.0,),
        "JointAnderson(tuned step)": (30.0,),
    },
    "hard": {
        COLD: (1.0, "Anderson"),
        UNTUNED: (0.5, "damped"),
        WARM[0]: (0.3, "Picard"),
        WARM[1]: (1.0, "Anderson"),
        WARM[2]: (1.0, "Anderson"),
        "Adam, one loop": (0.1, (0.2, 0.2)),
        "joint, plain": (30.0, (0.2, 0.4)),
        "joint, published, tuned step": (10.0,),
        "JointAnderson(tuned step)": (100.0,),
    },
}


# --- runs -------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The selected x after a step, and what it took: processor seconds, evaluations of f, vector-Jacobian products."""

    x: Tensor
    seconds: float
    calls: int
    products: int


def course(
    p: Problem, solver: JointSolver, steps: int, factor: float = 1.0, select: str = "feasible-cost"
) -> list[Point]:
    """Optimise the input; return the points on the way. The loss is multiplied by ``factor``."""
    points: list[Point] = []
    calls, spent = 0, 0.0

    def f(z: Any, *inputs: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return p.f(z, *inputs)

    def note(progress: Any) -> None:
        nonlocal spent, began
        spent += process_time() - began
        x = progress.value[2]
        if points:
            better = progress.state.preferred().view(-1, *[1] * (x.dim() - 1))
            x = torch.where(better, x, points[-1].x)
        points.append(Point(x.clone(), spent, calls, progress.problem.count.products))
        began = process_time()

    loss = p.loss if factor == 1 else lambda *arguments: factor * p.loss(*arguments)
    constraint = eq.L2Ball(1.0) if p.constraint else None
    limits = {"constraint": constraint, "tolerance": exactly(steps), "on_failure": "ignore", "compact": False}
    limits["select"] = select
    with torch.no_grad():
        began = process_time()
        eq.optimize_input(f, loss, p.x0, p.z0, *p.inputs, solver=solver, callback=note, **limits)
    return points


def true_losses(p: Problem, points: Sequence[Point], tolerance: eq.Tolerance = TRUE) -> Tensor:
    """Return the losses at z*, solved for anew, of each point (row) and sample (column)."""
    n = len(points)
    z0, inputs = (tuple(part.repeat(n, *[1] * (part.dim() - 1)) for part in parts) for parts in (p.z0, p.inputs))
    x = torch.cat([point.x for point in points])
    with torch.no_grad():
        z = eq.fixed_point(p.f, z0, x, *inputs, solver=eq.Anderson(), tolerance=tolerance, on_failure="ignore").value
        return p.loss(z, x, *inputs).view(n, -1)


def first_below(p: Problem, points: Sequence[Point], targets: Sequence[float], rough: bool) -> list[Point | None]:
    """Return, for each of the falling targets, the first point whose mean true loss is at most that.

    Points that are far above by a rough z* are not solved for accurately, to save time; if ``rough``, none is.
    """
    new = [b for a, b in zip((None, *points), points, strict=False) if a is None or not torch.equal(a.x, b.x)]
    found: list[Point | None] = []
    left = list(targets)
    for start in range(0, len(new), CHUNK):
        chunk = new[start : start + CHUNK]
        losses = true_losses(p, chunk, ROUGH).mean(dim=1)
        near = (losses <= left[0] + SLACK * abs(left[0])).nonzero().flatten()
        if len(near) and not rough:
            losses[near] = true_losses(p, [chunk[i] for i in near]).mean(dim=1)
        for point, loss in zip(chunk, losses.tolist(), strict=True):
            while left and loss <= left[0]:
                found.append(point)
                left.pop(0)
        if not left:
            break
    return found + [None] * len(left)


class Run(NamedTuple):
    """How a run went: the first point below each target, the seconds of the whole run, and its last true loss."""

    reached: list[Point | None]
    whole: float
    last: float

    def seconds(self, target: int, miss: float) -> float:
        """Return the time to a target; where it was not reached, the time of the whole run times ``miss``."""
        point = self.reached[target]
        return miss * self.whole if point is None else point.seconds


def measured(
    p: Problem, solver: JointSolver, steps: int, targets: Sequence[float], factor: float = 1.0, rough: bool = False
) -> Run:
    points = course(p, solver, steps, factor)
    return Run(first_below(p, points, targets, rough), points[-1].seconds, float(true_losses(p, points[-1:]).mean()))


def tell(*words: object) -> None:
    """Report progress."""
    print(*words, file=sys.stderr, flush=True)


# --- tuning -----------------------------------------------------------------------------------------------------------


def rating(name: str, solver: JointSolver, steps: int) -> float:
    """Return the geometric mean of the seconds to each target on the tuning batches; a miss is 3 times the run."""
    runs = [measured(problem(name, batch), solver, steps, TARGETS[name], rough=True) for batch in TUNING]
    return exp(mean(log(run.seconds(i, MISS)) for run in runs for i in range(len(TARGETS[name]))))


def tuning_table(name: str) -> Iterator[Row]:
    """Tune one setting after the other, later ones having their first value meanwhile."""
    for label, method in METHODS.items():
        best = [values[0] for values in method.settings]
        for i, values in enumerate(method.settings):
            rated = {v: rating(name, method.solver(*best[:i], v, *best[i + 1 :]), method.steps) for v in values}
            best[i] = min(rated, key=lambda v: rated[v])
            tell(name, label, rated)
            yield {"method": label, "best": best[i], "seconds": ", ".join(f"{v}: {t:.2f}" for v, t in rated.items())}


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_tables(name: str, batches: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """Return what each method needs for each target, and the times of the baselines divided by the default's."""
    players = {label: method.solver(*TUNED[name].get(label, ())) for label, method in METHODS.items()}
    for solver in players.values():
        course(problem(name, TUNING[0]), solver, 3)  # warm up
    runs: dict[str, list[Run]] = {label: [] for label in METHODS}
    for batch in batches:
        for label, solver in players.items():
            run = measured(problem(name, batch), solver, METHODS[label].steps, TARGETS[name])
            runs[label].append(run)
            tell(name, batch, label, [point and round(point.seconds, 2) for point in run.reached], round(run.last, 4))
    rows = [speed_row(name, label, runs[label]) for label in METHODS]
    return rows, [ratio_row(target, i, runs) for i, target in enumerate(TARGETS[name])]


def speed_row(name: str, label: str, runs: Sequence[Run]) -> Row:
    row: Row = {"method": label, "setting": ", ".join(map(str, TUNED[name].get(label, ()))) or None}
    for i, target in enumerate(TARGETS[name]):
        found = [point for run in runs if (point := run.reached[i])]
        seconds = median(point.seconds for point in found) if found else None
        row[f"s to {target}"] = (
            seconds if len(found) in (0, len(runs)) else (f"{text(seconds)} ({len(found)} of {len(runs)})")
        )
        row[f"f to {target}"] = round(median(point.calls for point in found)) if found else None
        row[f"VJP to {target}"] = round(median(point.products for point in found)) if found else None
    return row | {"final loss": f"{median(run.last for run in runs):.4f}"}


def ratio_row(target: float, i: int, runs: dict[str, list[Run]]) -> Row:
    """Return medians over the batches; ">": some runs did not get there, and count with their whole time."""
    row: Row = {"loss": str(target)}
    others = [label for label in METHODS if not label.startswith("JointAnderson")]
    for title, among in (
        (COLD, [COLD]),
        (UNTUNED, [UNTUNED]),
        ("fastest warm Adam", WARM),
        ("fastest other method", others),
    ):
        best = min(among, key=lambda label: median(run.seconds(i, MISS) for run in runs[label]))
        pairs = zip(runs[best], runs[DEFAULT], strict=True)
        ratio = median(run.seconds(i, 1.0) / ours.seconds(i, MISS) for run, ours in pairs)
        row[title] = f"{'' if all(run.reached[i] for run in runs[best]) else '> '}{ratio:.1f}"
        if len(among) > 1:
            row[f"{title} is"] = best
    return row


# --- attack -----------------------------------------------------------------------------------------------------------


def stepwise(length: float) -> JointSolver:
    return eq.JointAnderson(memory=5, damping=(0.2, 0.4), step_size=eq.NormalizedStep(length))


def shortened(length: float, later: float, after: int) -> JointSolver:
    step = eq.NormalizedStep(length, later=later, after=after)
    return eq.JointAnderson(memory=3, damping=(0.2, 0.4), step_size=step)


LAST = ", last"  # ends the names of attacks that return their last iterate, not the one of least cost at its own z
ATTACKS: dict[str, tuple[JointSolver, int]] = {  # chosen on batches 0 to 3 and 12 to 15
    "PGD-20, cold 18+20": (eq.PGDInput(0.2, warm=False, tolerance=exactly(18), adjoint=exactly(20)), 21),
    "PGD-20, warm to 1e-2": (eq.PGDInput(0.2), 21),
    "joint Anderson, 30 x 0.2": (stepwise(0.2), 31),
    f"joint Anderson, 24 x 0.3 + 10 x 0.1{LAST}": (shortened(0.3, 0.1, 24), 35),
    f"joint Anderson, 30 x 0.3 + 14 x 0.1{LAST}": (shortened(0.3, 0.1, 30), 45),
    "joint, plain, 60 x 0.1": (eq.JointIteration(step_size=eq.NormalizedStep(0.1)), 61),
    "JointAnderson(), 40": (eq.JointAnderson(), 41),
}


def attack_table(batches: Sequence[int]) -> Iterator[Row]:
    """Compare attacks on the classifier: images of a batch that keep their class, at their own z*."""
    for solver, _ in ATTACKS.values():
        course(problem("attack", TUNING[0]), solver, 3)  # warm up
    ends: dict[str, list[Point]] = {label: [] for label in ATTACKS}
    left: dict[str, list[Tensor]] = {label: [] for label in ("none", *ATTACKS)}
    for batch in batches:
        p = problem("attack", batch)
        left["none"].append(true_losses(p, [Point(p.x0, 0.0, 0, 0)]) > 0)
        for label, (solver, steps) in ATTACKS.items():
            select = "last" if label.endswith(LAST) else "feasible-cost"
            ends[label].append(course(p, solver, steps, select=select)[-1])
            left[label].append(true_losses(p, ends[label][-1:]) > 0)
            tell("attack", batch, label, f"{ends[label][-1].seconds:.2f}")
    first = next(iter(ends.values()))
    for label, kept in left.items():
        row: Row = {"attack": label, "accuracy left": f"{torch.cat(kept).float().mean():.1%}"}
        if points := ends.get(label):
            row["seconds"] = median(point.seconds for point in points)
            row |= {"f": points[0].calls, "VJP": points[0].products}
            row["largest norm"] = f"{max(float(p.x.flatten(1).norm(dim=1).max()) for p in points):.6f}"
            row["speed-up"] = median(a.seconds / b.seconds for a, b in zip(first, points, strict=True))
        yield row


# --- steps ------------------------------------------------------------------------------------------------------------

# A target on the true loss, and the middle of the grid of step sizes. The targets of the decoders are the middle ones
# of the first table, those of the others about what the default reaches in 30 steps on the tuning batches.
STEPWISE = {
    "easy": (0.0125, 30.0),
    "hard": (0.03, 30.0),
    "attack": (-2.0, 0.1),
    "inpainting": (0.02, 30.0),
    "deblurring": (0.003, 30.0),
    "adapter": (0.8, 3.0),
}
GRID = [10 ** (k / 2) for k in range(-3, 4)]


def steps_table(batches: Sequence[int]) -> Iterator[Row]:
    """Compare the automatic step with constant ones, the best of which is chosen on the very batches of the table."""
    for name, (target, center) in STEPWISE.items():
        rule = eq.NormalizedStep if name == "attack" else eq.ConstantStep

        def calls(solver: JointSolver, factor: float = 1.0, name: str = name, target: float = target) -> float:
            runs = [measured(first(16, problem(name, batch)), solver, 60, [target], factor) for batch in batches]
            return median(point.calls if (point := run.reached[0]) else inf for run in runs)

        scaled = {factor: calls(eq.JointAnderson(), factor) for factor in (1.0, 1e-3, 1e3)}
        by_size = {center * k: calls(eq.JointAnderson(step_size=rule(center * k))) for k in GRID}
        tell(name, scaled, by_size)
        best = min(by_size, key=lambda size: by_size[size])
        row: Row = {"problem": name, "true loss": str(target), "auto": count(scaled[1.0])}
        row |= {f"loss x {factor:g}": count(scaled[factor]) for factor in (1e-3, 1e3)}
        row |= {"best constant": f"{best:.2g}", "f there": count(by_size[best])}
        row["auto / best"] = scaled[1.0] / by_size[best] if scaled[1.0] < inf else None
        yield row | {"all constants": ", ".join(f"{size:.2g}: {count(n)}" for size, n in by_size.items())}


def first(n: int, p: Problem) -> Problem:
    """Return the problem of the first ``n`` samples, of which the attack has 64: too many to be scored at each step."""
    z0, inputs = (tuple(part[:n] for part in parts) for parts in (p.z0, p.inputs))
    return p._replace(x0=p.x0[:n], z0=z0, inputs=inputs)


def count(calls: float) -> str:
    return f"{calls:g}" if calls < inf else "-"


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_table(batch: int) -> Iterator[Row]:
    p = problem("hard", batch)
    state = 4 * (2 * sum(part.numel() for part in p.z0) + p.x0.numel())
    solvers = {f"JointAnderson(memory={m})": eq.JointAnderson(memory=m) for m in (8, 20, 40)}
    for label, solver in {"AdamInput()": eq.AdamInput(), **solvers}.items():
        row: Row = {"method": label}
        for steps in (30, 120):
            options = {"solver": solver, "tolerance": exactly(steps), "on_failure": "ignore"}
            with torch.no_grad():
                peak = peak_of(lambda: eq.optimize_input(p.f, p.loss, p.x0, p.z0, *p.inputs, **options))  # noqa: B023
            row |= {f"MB, {steps} steps": peak / 2**20, f"states, {steps} steps": peak / state}
            tell("memory", label, steps)
        yield row


def main() -> None:
    sections = [*TARGETS, "attack", "steps", "memory"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*sections, "tuning"],
        default=sections,
        metavar="NAME",
        help=f"sections to run: {', '.join(sections)} (default: all of these), tuning",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 5, 6, 7], metavar="N", help="(default 4 5 6 7)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="number of torch threads (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    arguments = parser.parse_args()
    only, batches = arguments.only, arguments.batches

    torch.set_num_threads(arguments.threads)
    heading = [
        f"equipoise {eq.__version__}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), batches "
        f"{', '.join(map(str, batches))}; the settings were tuned on batches {' and '.join(map(str, TUNING))}",
        "Medians over the batches; processor seconds, evaluations of f, vector-Jacobian products. -: not reached",
    ]
    print("\n".join(heading))
    stored = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {"tables": {}}
    tables: dict[str, list[Row]] = stored["tables"]

    def add(title: str, rows: Iterable[Row]) -> None:
        tables[title] = list(rows)
        show(title, tables[title])
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"heading": heading, "tables": tables}, indent=2) + "\n")

    for name in TARGETS if "tuning" in only else ():
        add(f'tuning, "{name}": seconds to the losses, geometric mean', tuning_table(name))
    for name in (n for n in TARGETS if n in only):
        rows, ratios = speed_tables(name, batches)
        add(f'"{name}" decoder: to a true mean loss', rows)
        add(f'"{name}" decoder: time of other methods divided by that of {DEFAULT}', ratios)
    if "attack" in only:
        every = [*batches, *(batch for batch in MORE if batch not in batches)]
        add(f"attack: classifier, L2 ball of radius 1, {len(every)} batches of 64 images", attack_table(every))
    if "steps" in only:
        add("automatic and constant steps of JointAnderson: evaluations of f to a true mean loss", steps_table(batches))
    if "memory" in only:
        add('peak memory, "hard" decoder; a state is (z, mu, x) of the batch', memory_table(batches[0]))


if __name__ == "__main__":
    main()

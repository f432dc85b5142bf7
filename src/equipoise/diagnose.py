"""Why a solve failed, which solver suits, whether gradients are right: questions answered in words and tables."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import GRADIENT, SOLVER, TOLERANCE, fixed_point
from equipoise.gradients import GradientRule
from equipoise.problem.captures import Substituted, named_sources, other_than
from equipoise.problem.layout import leaves, rebuild, residual_at
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Result, Solution
from equipoise.solvers import Anderson, Broyden, NewtonKrylov, Picard, Solver
from equipoise.stability import spectral_radius
from equipoise.tolerance import Tolerance

LONG = Tolerance(max_steps=200)
LOOKED_AT = 8  # failed samples examined closely; the Jacobian is probed for each


@dataclass
class Diagnosis:
    """Findings in words, most telling first, and the spectral radii found at the samples looked at."""

    findings: list[str]
    samples: Tensor
    radius: Tensor | None = None

    def __str__(self) -> str:
        return "\n".join(f"- {finding}" for finding in self.findings)


def diagnose(solution: Solution) -> Diagnosis:
    """Say in words why samples of a solve failed, or how comfortable the solve was.

    Args:
        solution: what :func:`equipoise.fixed_point` returned (not one that was pickled).

    Example:
        >>> print(eq.diagnose(sol))
        - 3 of 64 samples failed (3 MAX_STEPS).
        - Not contractive: the spectral radius of df/dz at the best iterate is about 1.31 ...
    """
    solved = solution.solved
    if solved is None or not isinstance(solved.problem, FunctionProblem):
        raise ValueError("this Solution no longer knows its f (it was copied or pickled); diagnose the original.")
    problem, stats = solved.problem, solution.stats
    failed = ~stats.converged
    looked = (failed if bool(failed.any()) else ~failed).nonzero().squeeze(1)[:LOOKED_AT]
    if problem.coupled:
        looked = looked[:1]  # there is one problem
    if not len(stats.result):
        return Diagnosis(["An empty batch: nothing was solved."], looked)
    counts = {r: n for r, n in stats.counts().items() if r != Result.CONVERGED}
    if counts:
        kinds = ", ".join(f"{n} {r.name}" for r, n in counts.items())
        findings = [f"{int(failed.sum())} of {failed.numel()} samples failed ({kinds})."]
        if Result.COUPLED in counts:
            findings.append(Result.COUPLED.message)
    else:
        findings = [f"All {failed.numel()} samples converged in {int(stats.steps.max())} steps or fewer."]

    bad = non_finite(problem, looked)
    if bad:
        return Diagnosis([*findings, f"Non-finite numbers in {', '.join(bad)}: the solve could not succeed."], looked)

    rows = solved.z[looked] if problem.gatherable else solved.z
    with torch.no_grad():
        part = problem.take(looked) if problem.gatherable else problem
        images = [part(rows) for _ in range(2)]
    gaps = [residual_at(rows, image) for image in images]
    if not all(bool(torch.isfinite(gap).all()) for gap in gaps):
        findings.append(
            "f returns NaN or infinity from finite inputs and a finite z: look inside f (division, log, exp, "
            f"overflow of {problem.layout.dtype}); torch.autograd.set_detect_anomaly helps."
        )
        return Diagnosis(findings, looked)
    change = float(residual_at(images[1], images[0]).max())
    if change > 100 * problem.rounding:
        findings.append(
            f"f is not a function of z: two evaluations at the same z differ by {change:.1e}. Look for dropout (use "
            "equipoise.VariationalDropout), noise or changing state inside f."
        )

    findings += idle(problem, part, rows, images[0], solution)
    tolerance = solved.tolerance
    floor = 4 * problem.rounding
    worst = float(gaps[0].max())
    rounded = stats.rounded is not None and bool(stats.rounded.any())
    near = bool(counts) and tolerance.absolute == 0 and tolerance.relative < floor and worst < 100 * floor
    rounding_reached = rounded or near
    if rounding_reached:
        findings.append(
            f"The tolerance is below rounding: relative={tolerance.relative:g} is asked for, {problem.layout.dtype} "
            f"resolves about {floor:.0e}, and {worst:.1e} was reached. Loosen it, or use float64."
        )

    radius = spectral_radius(part, rows)  # of a coupled problem, the whole batch is one row
    radius = radius if problem.gatherable or problem.coupled else radius[looked]
    rho = float(radius.max())
    if rho >= 1:
        findings.append(
            f"Not contractive: the spectral radius of df/dz at the best iterate is about {rho:.2f}, so plain iteration "
            "moves away from it. Use Broyden or NewtonKrylov, or make f contractive (SpectralNorm, jacobian_penalty, "
            "smaller weights)."
        )
    elif counts and not rounding_reached:
        target = max(tolerance.relative, floor)
        more = math.ceil(math.log(target / worst) / math.log(max(rho, 1e-3))) if worst > target else 0
        findings.append(
            f"Contractive here but slow: spectral radius about {rho:.3f}, residual {worst:.1e}; plain iteration from "
            f"the best iterate would need about {max(more, 1)} more steps. Raise Tolerance.max_steps (now "
            f"{tolerance.max_steps}), start nearer (z0), or compare_solvers."
        )
    elif not counts:
        steps = math.ceil(math.log(max(tolerance.relative, floor)) / math.log(max(rho, 1e-3)))
        findings.append(
            f"Spectral radius about {rho:.3f}: plain iteration would take about {steps} steps; "
            f"{type(solved.solver).__name__} took {int(stats.steps.max())}."
        )
    return Diagnosis(findings, looked, radius)


def idle(problem: FunctionProblem, part: FunctionProblem, rows: Tensor, image: Tensor, solution: Solution) -> list[str]:
    """Say so if the solver had nothing to do: f does not depend on z, or every sample was solved where it started."""
    with torch.no_grad():
        elsewhere = residual_at(image, part(other_than(rows)))
    if bool((elsewhere <= problem.rounding).all()):
        return [
            "The solver does nothing: f does not depend on z at the samples looked at, so its fixed point is one "
            "evaluation of f. Check that f uses its first argument, and that the weights it is multiplied by are not 0."
        ]
    if bool(solution.converged.all()) and int(solution.stats.steps.max()) == 1:
        return [
            "The solver does nothing: every sample was within the tolerance at z0 already. Tighten the tolerance, or "
            "start elsewhere to see whether f moves at all."
        ]
    return []


def non_finite(problem: FunctionProblem, rows: Tensor) -> list[str]:
    """Names of inputs (at these samples) and parameters that hold NaN or infinity."""
    found = []
    for i, tree in enumerate(problem.inputs):
        for name, tensor in leaves(tree, f"inputs[{i}]"):
            looked = tensor if problem.coupled else tensor[rows]
            if tensor.is_floating_point() and not bool(torch.isfinite(looked).all()):
                found.append(name)
    if isinstance(problem.f, nn.Module):
        named = [*problem.f.named_parameters(), *problem.f.named_buffers()]
        found += [f"{name!r} of f" for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    return found


@dataclass
class Comparison:
    """One row per solver; print it."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        heads = ("solver", "converged", "evaluations", "rows", "median steps", "worst residual", "time")
        lines = [
            (
                str(r["solver"]),
                f"{r['converged']}/{r['batch']}",
                str(r["evaluations"]),
                str(r["rows"]),
                f"{r['median_steps']:.0f}",
                f"{r['worst_residual']:.1e}",
                f"{r['time']:.2f} x",
            )
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
        table = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))  # noqa: B905
            for line in [heads, *lines]
        ]
        return "\n".join([table[0], "-" * len(table[0]), *table[1:], "(time relative to the fastest that converged)"])


def compare_solvers(
    f: Callable[..., Any],
    z0: Any,
    *inputs: Any,
    solvers: Sequence[Solver] | None = None,
    tolerance: Tolerance = LONG,
    coupled: bool = False,
    repeats: int = 3,
) -> Comparison:
    """Solve the same problem with several solvers, print a table, return it.

    Args:
        solvers: which; None tries one of each general kind.
        coupled: as in :func:`equipoise.fixed_point`.
        repeats: alternated runs, of which the median time is shown.

    Example:
        >>> eq.compare_solvers(layer.f, torch.zeros(32, 64), x)
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats is {repeats!r}; it must be a whole number of at least 1.")
    solvers = (
        [Picard(), Picard(0.5), Anderson(), Anderson(kind=1), Broyden(), NewtonKrylov()] if solvers is None else solvers
    )
    times: list[list[float]] = [[] for _ in solvers]
    solutions: list[Any] = [None] * len(solvers)
    with torch.no_grad():
        for _ in range(repeats):
            for i, solver in enumerate(solvers):
                begin = time.perf_counter()
                solutions[i] = fixed_point(
                    f, z0, *inputs, solver=solver, tolerance=tolerance, coupled=coupled, on_failure="ignore"
                )
                solutions[i].stats.steps.tolist()  # waits for the device
                times[i].append(time.perf_counter() - begin)
    medians = [sorted(t)[len(t) // 2] for t in times]
    finished = [t for t, sol in zip(medians, solutions, strict=True) if bool(sol.converged.all())]
    fastest = min(finished or medians)
    comparison = Comparison()
    for solver, sol, seconds in zip(solvers, solutions, medians, strict=True):
        comparison.rows.append(
            {
                "solver": solver,
                "converged": int(sol.converged.sum()),
                "batch": sol.result.numel(),
                "evaluations": sol.stats.evaluations,
                "rows": sol.stats.rows,
                "median_steps": float(sol.stats.steps.float().median()) if sol.result.numel() else 0.0,
                "worst_residual": float(sol.stats.residual.max()) if sol.result.numel() else 0.0,
                "time": seconds / fastest,
            }
        )
    print(comparison)
    return comparison


@dataclass
class GradientCheck:
    """Relative error of the gradient along a random direction, for every tensor."""

    errors: dict[str, float]
    allowed: float

    @property
    def ok(self) -> bool:
        return all(error <= self.allowed for error in self.errors.values())

    def __str__(self) -> str:
        width = max((len(name) for name in self.errors), default=0)
        lines = [
            f"{name.ljust(width)}  {e:.1e}{'' if e <= self.allowed else '  WRONG'}" for name, e in self.errors.items()
        ]
        verdict = "gradients agree with finite differences" if self.ok else "gradients are off"
        return "\n".join([*lines, f"{verdict} (relative error allowed: {self.allowed:g})"])


def check_gradients(
    f: Callable[..., Any],
    z0: Any,
    *inputs: Any,
    solver: Solver = SOLVER,
    tolerance: Tolerance = TOLERANCE,
    gradient: GradientRule = GRADIENT,
    coupled: bool = False,
    allowed: float = 1e-2,
    seed: int = 0,
) -> GradientCheck:
    """Compare the gradients you would train with against central differences of tightly solved equilibria.

    A module f is copied to float64; a plain function runs in the precision of what it captured, which limits how
    small an error can be seen. Inputs and parameters are each moved along one random direction.

    Args:
        solver, tolerance, gradient, coupled: the settings to be checked.
        allowed: the relative error that still counts as right.

    Example:
        >>> print(eq.check_gradients(layer.f, torch.zeros(4, 64), x, tolerance=eq.Tolerance(1e-3)))
    """
    with torch.random.fork_rng():  # every solve is seeded, for the same dropout masks; the caller's state is kept
        return compare_with_differences(f, z0, inputs, solver, tolerance, gradient, coupled, allowed, seed)


def compare_with_differences(
    f: Callable[..., Any],
    z0: Any,
    inputs: tuple[Any, ...],
    solver: Solver,
    tolerance: Tolerance,
    gradient: GradientRule,
    coupled: bool,
    allowed: float,
    seed: int,
) -> GradientCheck:
    """:func:`check_gradients` behind its door."""
    if isinstance(f, nn.Module):
        f = copy.deepcopy(f).double()
        z0, inputs = (to_double(tree) for tree in (z0, inputs))
    generator = torch.Generator().manual_seed(seed)

    def random_like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    inputs = rebuild(
        inputs,
        [t.detach().clone().requires_grad_(t.is_floating_point()) for _, t in leaves(tuple(inputs), "inputs")],
    )
    with torch.enable_grad():
        torch.manual_seed(seed)
        sol = fixed_point(f, z0, *inputs, solver=solver, tolerance=tolerance, gradient=gradient, coupled=coupled)
        if not len(sol.result):
            raise ValueError("the batch is empty, so there is no gradient to check: give at least one sample.")
        outputs = [t for _, t in leaves(sol.value, "value")]
        weights = [random_like(t) for t in outputs]
        assert sol.solved is not None
        assert isinstance(sol.solved.problem, FunctionProblem)
        sources = dict(named_sources(sol.solved.problem))
        loss = sum((w * t).sum() for w, t in zip(weights, outputs, strict=True))
        found: Sequence[Tensor | None] = [None] * len(sources)
        if isinstance(loss, Tensor) and loss.requires_grad:  # it does not where f ignores all that needs a gradient
            found = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    double = all(t.dtype == torch.float64 for t in [*outputs, *sources.values()])
    tight = Tolerance(relative=1e-13 if double else 1e-7, max_steps=2000, patience=100)
    step = 1e-5 if double else 1e-2

    def moved(tensor: Tensor, by: Tensor) -> float:
        other = tensor.detach() + by
        changed = rebuild(inputs, [other if t is tensor else t for _, t in leaves(inputs, "inputs")])
        options = {"solver": solver, "tolerance": tight, "coupled": coupled, "on_failure": "ignore"}
        with torch.no_grad(), Substituted({id(tensor): other}):
            torch.manual_seed(seed)
            value = fixed_point(f, z0, *changed, **options).value
        return sum(float((w * t).sum()) for w, (_, t) in zip(weights, leaves(value, "value"), strict=True))

    errors = {}
    for (name, tensor), gradient_found in zip(sources.items(), found, strict=True):
        direction = random_like(tensor)
        # A longer one would leave where f is straight.
        direction /= direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)
        slope = float((gradient_found * direction).sum()) if gradient_found is not None else 0.0
        difference = (moved(tensor, step * direction) - moved(tensor, -step * direction)) / (2 * step)
        # Where the direction happens to be level, rounding is not compared with nothing, but with what is usual.
        usual = float(gradient_found.norm()) / math.sqrt(tensor.numel()) if gradient_found is not None else 0.0
        size = max(abs(slope), abs(difference), usual)
        errors[name] = abs(slope - difference) / size if size > 0 else 0.0
    return GradientCheck(errors, allowed)


def to_double(tree: Any) -> Any:
    """Floating-point tensors of a value, or of what a function returns, in float64."""
    if callable(tree) and not isinstance(tree, Tensor):
        return lambda *inputs: to_double(tree(*inputs))
    return rebuild(tree, [t.double() if t.is_floating_point() else t for _, t in leaves(tree, "value")])

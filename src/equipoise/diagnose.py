"""Explain why a solve failed, compare solvers, and check gradients against finite differences."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from equipoise.fixed_point import GRADIENT, SOLVER, TOLERANCE, fixed_point
from equipoise.gradients import GradientRule
from equipoise.options import require_number
from equipoise.problem.captures import Substituted, named_sources, other_than
from equipoise.problem.independence import NOT_A_FUNCTION
from equipoise.problem.layout import leaves, rebuild, residual_at
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Result, Solution, tally
from equipoise.solvers import Anderson, Broyden, NewtonKrylov, Picard, Solver
from equipoise.stability import spectral_radius
from equipoise.tolerance import Tolerance

EXAMINED = 8  # failed samples examined closely; the Jacobian is probed for each


@dataclass
class Diagnosis:
    """Findings in words, most important first, and the spectral radii at the samples examined."""

    findings: list[str]
    samples: Tensor
    radius: Tensor | None = None

    def __str__(self) -> str:
        return "\n".join(f"- {finding}" for finding in self.findings)


@runtime_checkable
class Explained(Protocol):
    """An outcome that has findings of its own: words, the samples examined, and their spectral radii."""

    def findings(self) -> tuple[list[str], Tensor, Tensor | None]: ...


def diagnose(solution: Solution | Explained) -> Diagnosis:
    """Explain in words why samples of a solve failed, or how much margin a successful solve had.

    Args:
        solution: what :func:`equipoise.fixed_point` or :func:`equipoise.optimize_input` returned, not an unpickled
            copy.

    Example:
        >>> print(eq.diagnose(sol))
        - 3 of 64 samples failed (3 MAX_STEPS).
        - Not contractive: the spectral radius of df/dz at the best iterate is about 1.31 ...
    """
    if isinstance(solution, Explained):
        return Diagnosis(*solution.findings())
    solved = solution.solved
    if solved is None or not isinstance(solved.problem, FunctionProblem):
        raise ValueError(
            "this Solution no longer holds its f, because it was pickled or copied: diagnose the original."
        )
    problem, tolerance, stats = solved.problem, solved.tolerance, solution.stats
    assert isinstance(tolerance, Tolerance)
    failed = ~stats.converged
    samples = (failed if bool(failed.any()) else ~failed).nonzero().squeeze(1)[: 1 if problem.coupled else EXAMINED]
    if not len(stats.result):
        return Diagnosis(["An empty batch: nothing was solved."], samples)
    failures = stats.failures()
    if failures:
        findings = [f"{int(failed.sum())} of {failed.numel()} samples failed ({tally(failures)})."]
        if Result.COUPLED in failures:
            findings.append(Result.COUPLED.message)
    else:
        findings = [f"All {failed.numel()} samples converged in {int(stats.steps.max())} steps or fewer."]

    if bad := non_finite(problem, samples):
        return Diagnosis([*findings, f"Non-finite numbers in {', '.join(bad)}: the solve could not succeed."], samples)

    part, rows = (problem.take(samples), solved.z[samples]) if problem.gatherable else (problem, solved.z)
    with torch.no_grad():
        image, again, elsewhere = part(rows), part(rows), part(other_than(rows))
    residual = residual_at(rows, image)
    if not bool((residual.isfinite() & residual_at(rows, again).isfinite()).all()):
        findings.append(
            "f returns NaN or infinity from finite inputs and a finite z: look inside f (division, log, exp, "
            f"overflow of {problem.layout.dtype}); torch.autograd.set_detect_anomaly helps."
        )
        return Diagnosis(findings, samples)
    change = float(residual_at(again, image).max())
    if change > 100 * problem.rounding:
        findings.append(f"{NOT_A_FUNCTION} The difference is {change:.1e}.")
    if bool((residual_at(image, elsewhere) <= problem.rounding).all()):
        findings.append(
            "The solver does nothing: f does not depend on z at the samples examined, so its fixed point is one "
            "evaluation of f. Check that f uses its first argument, and that the weights it is multiplied by are not 0."
        )
    elif not failures and int(stats.steps.max()) == 1:
        findings.append(
            "The solver does nothing: every sample was within the tolerance at z0 already. Tighten the tolerance, or "
            "start elsewhere to see whether f moves at all."
        )

    floor, worst = 4 * problem.rounding, float(residual.max())
    target = max(tolerance.relative, floor)
    near = bool(failures) and tolerance.absolute == 0 and tolerance.relative < floor and worst < 100 * floor
    below_rounding = near or (stats.rounded is not None and bool(stats.rounded.any()))
    if below_rounding:
        findings.append(
            f"The tolerance is below rounding error: relative={tolerance.relative:g}, where {problem.layout.dtype} "
            f"resolves about {floor:.0e}; {worst:.1e} was reached. Loosen it, or use float64."
        )

    radius = spectral_radius(part, rows)  # of a coupled problem, the whole batch is one row
    radius = radius if problem.gatherable or problem.coupled else radius[samples]
    rho = float(radius.max())
    log_rate = math.log(max(rho, 1e-3))
    if rho >= 1:
        findings.append(
            f"Not contractive: the spectral radius of df/dz at the best iterate is about {rho:.2f}, so plain iteration "
            "moves away from it. Use Broyden or NewtonKrylov, or make f contractive (SpectralNorm, jacobian_penalty, "
            "smaller weights)."
        )
    elif set(failures) - {Result.COUPLED} and not below_rounding:
        more = math.ceil(math.log(target / worst) / log_rate) if worst > target else 0
        findings.append(
            f"Contractive here but slow: spectral radius about {rho:.3f}, residual {worst:.1e}; plain iteration from "
            f"the best iterate would need about {max(more, 1)} more steps. Raise Tolerance.max_steps (now "
            f"{tolerance.max_steps}), start closer to the solution (z0), or try compare_solvers."
        )
    elif not failures:
        findings.append(
            f"Spectral radius about {rho:.3f}: plain iteration would take about "
            f"{math.ceil(math.log(target) / log_rate)} steps; {type(solved.solver).__name__} took "
            f"{int(stats.steps.max())}."
        )
    return Diagnosis(findings, samples, radius)


def non_finite(problem: FunctionProblem, samples: Tensor) -> list[str]:
    """Return the names of inputs (at these samples), parameters and buffers that hold NaN or infinity."""
    named = [
        (name, tensor if problem.coupled else tensor[samples])
        for i, tree in enumerate(problem.inputs)
        for name, tensor in leaves(tree, f"inputs[{i}]")
        if tensor.is_floating_point()
    ]
    if isinstance(problem.f, nn.Module):
        held = (*problem.f.named_parameters(), *problem.f.named_buffers())
        named += [(f"{name!r} of f", tensor) for name, tensor in held]
    return [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]


@dataclass
class Comparison:
    """A table with one row per solver; print it."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        width = max((len(str(row["solver"])) for row in self.rows), default=6)
        heads = ("converged", "evaluations", "rows", "median steps", "worst residual", "time")
        head = "{:{width}}  {}  {}  {:>7}  {}  {}  {:>8}".format("solver", *heads, width=width)
        lines = [
            f"{row['solver']!s:{width}}  {row['converged']:>4}/{row['batch']:<4}  {row['evaluations']:>11}  "
            f"{row['rows']:>7}  {row['median_steps']:>12.0f}  {row['worst_residual']:>14.1e}  {row['time']:>6.2f} x"
            for row in self.rows
        ]
        return "\n".join([head, "-" * len(head), *lines, "(time relative to the fastest that converged)"])


def compare_solvers(
    f: Callable[..., Any],
    z0: Any,
    *inputs: Any,
    solvers: Sequence[Solver] | None = None,
    tolerance: Tolerance = Tolerance(max_steps=200),  # noqa: B008 - immutable
    coupled: bool = False,
    repeats: int = 3,
) -> Comparison:
    """Solve the same problem with several solvers, print a table and return it.

    Args:
        solvers: solvers to compare; None tries one of each general kind.
        coupled: as in :func:`equipoise.fixed_point`.
        repeats: number of alternating runs; the median time is shown.

    Example:
        >>> eq.compare_solvers(layer.f, torch.zeros(32, 64), x)
    """
    require_number("repeats", repeats, at_least=1, whole=True)
    if solvers is None:
        solvers = [Picard(), Picard(0.5), Anderson(), Anderson(kind=1), Broyden(), NewtonKrylov()]
    times: list[list[float]] = [[] for _ in solvers]
    solutions: dict[int, Solution] = {}
    with torch.no_grad():
        for i, solver in list(enumerate(solvers)) * repeats:
            begin = time.perf_counter()
            solution = fixed_point(
                f, z0, *inputs, solver=solver, tolerance=tolerance, coupled=coupled, on_failure="ignore"
            )
            solution.stats.steps.tolist()  # waits for the device
            times[i].append(time.perf_counter() - begin)
            solutions[i] = solution
    medians = [sorted(seconds)[repeats // 2] for seconds in times]
    fastest = min([medians[i] for i, sol in solutions.items() if bool(sol.converged.all())] or medians)
    comparison = Comparison()
    for i, solver in enumerate(solvers):
        stats = solutions[i].stats
        batch = stats.result.numel()
        comparison.rows.append(
            {
                "solver": solver,
                "converged": int(stats.converged.sum()),
                "batch": batch,
                "evaluations": stats.evaluations,
                "rows": stats.rows,
                "median_steps": float(stats.steps.float().median()) if batch else 0.0,
                "worst_residual": float(stats.residual.max()) if batch else 0.0,
                "time": medians[i] / fastest,
            }
        )
    print(comparison)
    return comparison


@dataclass
class GradientCheck:
    """The relative error of the gradient of every tensor, along a random direction."""

    errors: dict[str, float]
    allowed: float

    @property
    def ok(self) -> bool:
        return all(error <= self.allowed for error in self.errors.values())

    def __str__(self) -> str:
        width = max(map(len, self.errors), default=0)
        lines = [
            f"{name.ljust(width)}  {e:.1e}{'' if e <= self.allowed else '  WRONG'}" for name, e in self.errors.items()
        ]
        verdict = "gradients agree with finite differences" if self.ok else "gradients are wrong"
        return "\n".join([*lines, f"{verdict} (allowed relative error: {self.allowed:g})"])


@torch.random.fork_rng()  # every solve is seeded, so that dropout masks are the same; the caller's state is kept
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

    A module f is copied to float64; a plain function runs in the precision of the tensors it captured, which limits how
    small an error can be detected. Inputs and parameters are each moved along one random direction.

    Args:
        solver, tolerance, gradient, coupled: settings to check.
        allowed: largest relative error that counts as correct.
        seed: seed of the directions, and of every solve.

    Example:
        >>> print(eq.check_gradients(layer.f, torch.zeros(4, 64), x, tolerance=eq.Tolerance(1e-3)))
    """
    if isinstance(f, nn.Module):
        f = copy.deepcopy(f).double()
        z0, inputs = to_double(z0), to_double(inputs)
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
            raise ValueError("the batch is empty, so the gradient cannot be checked: give at least one sample.")
        outputs = [t for _, t in leaves(sol.value, "value")]
        weights = [random_like(t) for t in outputs]
        assert sol.solved is not None
        assert isinstance(sol.solved.problem, FunctionProblem)
        sources = dict(named_sources(sol.solved.problem))
        loss = sum((w * t).sum() for w, t in zip(weights, outputs, strict=True))
        gradients: Sequence[Tensor | None] = [None] * len(sources)
        if isinstance(loss, Tensor) and loss.requires_grad:  # not if f ignores everything that needs a gradient
            gradients = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    double = all(t.dtype == torch.float64 for t in [*outputs, *sources.values()])
    tight = Tolerance(relative=1e-13 if double else 1e-7, max_steps=2000, patience=100)
    step = 1e-5 if double else 1e-2

    def loss_at(tensor: Tensor, moved: Tensor) -> float:
        changed = rebuild(inputs, [moved if t is tensor else t for _, t in leaves(inputs, "inputs")])
        with torch.no_grad(), Substituted({id(tensor): moved}):
            torch.manual_seed(seed)
            sol = fixed_point(f, z0, *changed, solver=solver, tolerance=tight, coupled=coupled, on_failure="ignore")
        return sum(float((w * t).sum()) for w, (_, t) in zip(weights, leaves(sol.value, "value"), strict=True))

    errors = {}
    for (name, tensor), grad in zip(sources.items(), gradients, strict=True):
        grad = torch.zeros_like(tensor) if grad is None else grad
        direction = random_like(tensor)
        # Of length 1: a longer step would leave the neighbourhood in which f is nearly linear.
        direction /= direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)
        slope = float((grad * direction).sum())
        ahead, behind = (loss_at(tensor, tensor.detach() + by * direction) for by in (step, -step))
        difference = (ahead - behind) / (2 * step)
        # A slope that happens to be near 0 is compared with the typical slope, not with its own rounding error.
        size = max(abs(slope), abs(difference), float(grad.norm()) / math.sqrt(tensor.numel()))
        errors[name] = abs(slope - difference) / size if size > 0 else 0.0
    return GradientCheck(errors, allowed)


def to_double(tree: Any) -> Any:
    """Return a value, or a function that returns one, with its floating-point tensors in float64."""
    if callable(tree) and not isinstance(tree, Tensor):
        return lambda *inputs: to_double(tree(*inputs))
    return rebuild(tree, [t.double() if t.is_floating_point() else t for _, t in leaves(tree, "value")])

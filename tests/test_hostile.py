"""Thousands of generated problems that nobody should pose: no silent wrong answer, no internal error.

Every case is made from its number alone: shapes with 0 and 1, all precisions, scales from 1e-30 to 1e30, NaN and
infinity, an f that mixes samples, rotates, expands, jumps or ignores z, every solver, gradient rule and tolerance.
Whatever is reported is compared with what is recomputed here, from the value that was returned: residuals by one
evaluation of f and sums in float64, equilibria and gradients by dense solves in float64.

    pytest tests/test_hostile.py                 # a few hundred cases
    make test-slow                               # ten thousand
"""

from __future__ import annotations

import collections
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise import Result

CI, ALL, CHUNK = 400, 10_000, 100
GENERAL = [
    eq.Picard(),
    eq.Picard(damping=0.3),
    eq.Anderson(),
    eq.Anderson(memory=2, mixing=0.7, restart=1.5),
    eq.Anderson(kind=1),
    eq.Broyden(),
    eq.Broyden(memory=3, when_full="drop"),
    eq.Broyden(line_search=2),
    eq.NewtonKrylov(),
    eq.NewtonKrylov(inner=eq.BiCGStab(), inner_steps=5),
]
KRYLOV = [eq.GMRES(), eq.GMRES(memory=3), eq.BiCGStab()]
NARROW = (torch.float16, torch.bfloat16)


@dataclass
class Case:
    """One problem and the way it is solved; ``A`` is the matrix of an affine f, in float64."""

    number: int
    kind: str
    f: Callable[..., Any]
    z0: Any
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    tolerance: eq.Tolerance
    weight: Tensor
    A: Tensor | None = None
    smooth: bool = False
    story: dict[str, Any] = field(default_factory=dict)


def leaves(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [leaf for part in tree for leaf in leaves(part)]


def rows(tree: Any) -> Tensor:
    """A value as (batch, n) numbers in float64."""
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in leaves(tree)]
    return torch.cat([part.reshape(part.shape[0], math.prod(part.shape[1:])).double() for part in parts], dim=1)


def make(number: int) -> Case:
    pick = random.Random(number)
    seed = torch.Generator().manual_seed(number)
    dtype = pick.choice([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
    real = torch.float32 if dtype == torch.complex64 else dtype
    batch = pick.choice([0, 1, 1, 2, 3, 5, 17])
    n = pick.choice([0, 1, 1, 2, 3, 8, 8, 8])
    exponent = 0 if dtype in NARROW else pick.choice([0, 0, 0, pick.uniform(-30, 30)])
    if dtype == torch.float64 and pick.random() < 0.2:
        exponent *= 4
    scale = 10.0**exponent
    gain = pick.choice([0.0, 0.3, 0.7, 0.9, 0.99, 1.0, 1.2, 3.0])

    def randn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        wide = torch.complex128 if kind.is_complex else torch.float64
        return torch.randn(*shape, generator=seed, dtype=wide).to(kind)

    A = torch.randn(n, n, generator=seed, dtype=torch.float64)
    if n:
        A = gain * A / torch.linalg.matrix_norm(A, 2).clamp(min=1e-9)
    if n >= 2 and pick.random() < 0.3:  # a rotation, whose powers never shrink in norm for gain = 1
        q = torch.linalg.qr(torch.randn(n, n, generator=seed, dtype=torch.float64))[0]
        A = gain * q
    fixed, weight = A.to(dtype), A.to(dtype).clone().requires_grad_()
    x = (scale * randn(batch, n)).to(dtype)
    if batch and n and pick.random() < 0.15:
        x = x.clone()
        x[pick.randrange(batch)] = pick.choice([math.nan, math.inf, -math.inf])
    if batch and pick.random() < 0.2:  # samples of very different size
        x = x * torch.logspace(0, pick.choice([-3, 3]), batch, dtype=real)[:, None].to(dtype)
    unit = float(scale)
    kinds: dict[str, Callable[[Any, Tensor], Any]] = {
        "affine": lambda z, x: z @ weight.mT + x,
        "tanh": lambda z, x: unit * torch.tanh((z @ weight.mT + x) / unit),
        "sine": lambda z, x: unit * torch.sin(3 * (z @ weight.mT) / unit) + x,
        "jump": lambda z, x: torch.where((z @ fixed.mT).abs() > unit, 0.5 * z, -z) + x,
        "round": lambda z, x: unit * torch.round((z @ weight.mT + x) / unit) if not z.is_complex() else x,
        "ignores z": lambda z, x: x + 0 * weight.sum(),
        "identity": lambda z, x: z + 0 * x,
        "runs away": lambda z, x: z + unit,
        "zero": lambda z, x: 0 * z + 0 * torch.nan_to_num(x),
        "square": lambda z, x: z * z / unit + x,
        "mean of batch": lambda z, x: z @ weight.mT + 0.5 * (z.mean(dim=0) if len(z) else 0) + x,
        "neighbour": lambda z, x: z.roll(1, dims=0) @ weight.mT + x,
        "largest input": lambda z, x: z @ weight.mT + (x / x.abs().max() * unit if x.numel() else x),
        "size of batch": lambda z, x: z @ weight.mT + len(z) * x,
        "pair": lambda z, x: (z[1] @ weight.mT + x, 0.5 * z[0]),
    }
    kind = pick.choice(list(kinds))
    f = kinds[kind]
    if kind in ("affine", "neighbour", "mean of batch") and pick.random() < 0.3:
        f = affine(f)
    z0: Any = torch.zeros(batch, n, dtype=dtype)
    if pick.random() < 0.3:
        z0 = (scale * randn(batch, n)).to(dtype)
    if kind == "pair":
        z0 = (z0, z0.clone())
    coupled = pick.random() < 0.1
    tolerance = eq.Tolerance(
        relative=pick.choice([0.0, 1e-30, 1e-12, 1e-6, 1e-4, 1e-4, 1e-2, 1.0]),
        absolute=pick.choice([0.0, 0.0, 0.0, 1e-8, 1.0, 1e-3 * scale]),
        max_steps=pick.choice([1, 2, 5, 50, 50, 200]),
        patience=pick.choice([None, 1, 5, 30, 30]),
    )
    solvers = GENERAL + (KRYLOV if getattr(f, "affine", False) else [])
    back = pick.choice([None, *GENERAL, *KRYLOV])
    rules = [
        eq.ImplicitGradient(),
        eq.ImplicitGradient(solver=back, tolerance=eq.Tolerance(1e-6, max_steps=200)),
        eq.PhantomGradient(pick.choice([1, 3]), damping=pick.choice([0.0, 0.5])),
        eq.UnrolledGradient(pick.choice([1, 7])),
    ]
    options = {
        "solver": pick.choice(solvers),
        "gradient": pick.choice(rules),
        "compact": pick.random() < 0.8,
        "coupled": coupled,
        "check_every": pick.choice([1, 1, 1, 2, 5]),
        "trace": pick.random() < 0.2,
        "on_failure": "ignore",
    }
    inputs: tuple[Tensor, ...] = (x,)
    if pick.random() < 0.2 and kind != "size of batch":
        closed, inputs = x, ()
        f = closure(f, closed)
    known = kind == "affine" and not dtype.is_complex and bool(torch.isfinite(x.double()).all()) if n else False
    smooth = kind in ("affine", "tanh") and not dtype.is_complex and dtype not in NARROW
    story = {"kind": kind, "dtype": dtype, "batch": batch, "n": n, "exponent": exponent, "gain": gain}
    return Case(number, kind, f, z0, inputs, options, tolerance, weight, A if known else None, smooth, story)


def affine(f: Callable[..., Any]) -> Callable[..., Any]:
    def declared(z: Any, x: Tensor) -> Any:
        return f(z, x)

    declared.affine = True  # type: ignore[attr-defined]
    return declared


def closure(f: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    def closed(z: Any) -> Any:
        return f(z, x)

    closed.affine = getattr(f, "affine", False)  # type: ignore[attr-defined]
    return closed


def judge(case: Case) -> list[str]:
    """Everything that was reported and is not so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sol = eq.fixed_point(case.f, case.z0, *case.inputs, tolerance=case.tolerance, **case.options)
    faults = [f"warned: {w.message}" for w in caught if issubclass(w.category, (eq.ConvergenceWarning, UserWarning))]
    for value, start in zip(leaves(sol.value), leaves(case.z0), strict=True):
        if value.shape != start.shape or value.dtype != start.dtype:
            faults.append(f"{value.dtype} {tuple(value.shape)} came back for {start.dtype} {tuple(start.shape)}")
        if not bool(torch.isfinite(value.detach()).all()) and not case.options["gradient"].decides_value:
            faults.append("a value is not finite")
    faults += false_claims(case, sol)
    if not faults and sol.value is not None:
        faults += false_solution(case, sol)
        faults += false_gradient(case, sol)
    return faults


def precision(case: Case) -> float:
    kinds = [leaf.dtype.to_real() if leaf.is_complex() else leaf.dtype for leaf in leaves(case.z0)]
    return max(torch.finfo(kind).eps for kind in kinds)


def false_claims(case: Case, sol: eq.Solution) -> list[str]:
    with torch.no_grad():
        z = torch.utils._pytree.tree_map(lambda t: t.detach(), sol.value)
        image = rows(case.f(z, *case.inputs))
    z = rows(z)
    if case.options["coupled"]:
        z, image = z.reshape(1, -1), image.reshape(1, -1)
    # Numbers of every size are compared in units of their own; float64 may be asked to square 1e-120.
    unit = torch.cat([z.abs(), image.abs(), z.new_full((len(z), 1), 1e-300)], dim=1).nan_to_num(0, 0, 0).amax(dim=1)
    gap = ((image - z) / unit[:, None]).norm(dim=1)
    scale = (image / unit[:, None]).norm(dim=1)
    residual = torch.where(gap == 0, 0.0, gap / scale)
    if case.options["coupled"]:
        residual, gap, scale, unit = (t.expand(len(sol.result)) for t in (residual, gap, scale, unit))
    eps = precision(case)
    faults = []
    for i, (result, claimed) in enumerate(zip(sol.result.tolist(), sol.stats.residual.tolist(), strict=True)):
        true, absolute = float(residual[i]), case.tolerance.absolute / float(unit[i])
        if result == Result.CONVERGED:
            rounded = sol.stats.rounded is not None and bool(sol.stats.rounded[i])
            relative = max(case.tolerance.relative, 8 * eps) if rounded else case.tolerance.relative + 8 * eps
            allowed = absolute + relative * float(scale[i])
            if not float(gap[i]) <= 1.05 * allowed:
                faults.append(f"sample {i} is called converged with a residual of {true:.2e} ({claimed:.2e} claimed)")
        if math.isfinite(claimed) and claimed < 1e30 and not abs(claimed - true) <= 0.05 * true + 16 * eps:
            faults.append(f"sample {i} claims a residual of {claimed:.3e}; it is {true:.3e} ({Result(result).name})")
    return faults


def false_solution(case: Case, sol: eq.Solution) -> list[str]:
    """An affine f: ||z - z*|| <= ||(I - A)^-1|| ||f(z) - z||."""
    if case.A is None or not case.inputs or case.options["gradient"].decides_value:
        return []
    system = torch.eye(len(case.A), dtype=torch.float64) - case.weight.detach().double()
    if torch.linalg.matrix_rank(system) < len(system):
        return []
    inverse = torch.linalg.inv(system)
    exact = case.inputs[0].double() @ inverse.mT
    size = float(torch.linalg.matrix_norm(inverse, 2))
    faults = []
    z = rows(sol.value.detach())
    unit = exact.abs().amax(dim=1).clamp(min=1e-300)
    error = ((z - exact) / unit[:, None]).norm(dim=1) / (exact / unit[:, None]).norm(dim=1).clamp(min=1e-300)
    for i in sol.converged.nonzero().squeeze(1).tolist():
        allowed = size * (float(sol.stats.residual[i]) + 32 * precision(case)) * 2
        if case.options["coupled"]:
            allowed = math.inf
        if allowed < 0.1 and not float(error[i]) <= allowed:
            faults.append(f"sample {i} is off by {float(error[i]):.2e} (allowed {allowed:.2e})")
    return faults


def false_gradient(case: Case, sol: eq.Solution) -> list[str]:
    """Of the sum of the value, with respect to the weight, where it says that all went well."""
    implicit = isinstance(case.options["gradient"], eq.ImplicitGradient)
    value = sol.value
    if not any(leaf.requires_grad for leaf in leaves(value)) or not len(sol.result):
        return []
    total = sum(leaf.abs().sum() if leaf.is_complex() else leaf.double().sum() for leaf in leaves(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = torch.autograd.grad(total, case.weight, allow_unused=True)
    well = bool(sol.converged.all()) and sol.backward is not None and bool(sol.backward.converged.all())
    if found is None or not (implicit and case.smooth and well) or not torch.isfinite(sol.stats.residual).all():
        return []
    with torch.enable_grad():
        weight = case.weight.detach().double().requires_grad_()
        z = value.detach().double().requires_grad_()
        x = case.inputs[0].double() if case.inputs else None
        if x is None:
            return []
        unit = 10.0 ** case.story["exponent"]
        pre = z @ weight.mT + x
        image = pre if case.kind == "affine" else unit * torch.tanh(pre / unit)
    slope = torch.ones_like(z) if case.kind == "affine" else 1 - torch.tanh(pre.detach() / unit).square()
    J = slope[:, :, None] * weight.detach()
    system = torch.eye(z.shape[1], dtype=torch.float64) - J
    condition = float(torch.linalg.cond(system).max())
    u = torch.linalg.solve(system.mT, torch.ones_like(z)[:, :, None])[:, :, 0]
    (exact,) = torch.autograd.grad(image, weight, u)
    backward = float(sol.backward.residual.max()) + 64 * precision(case)
    size = float((u.abs().mT @ z.detach().abs()).norm())  # no sum is more exact than its terms
    allowed = 4 * condition * (backward + 64 * precision(case)) * size
    error = float((found.double() - exact).norm())
    if condition * backward < 0.01 and math.isfinite(size) and not error <= allowed + 1e-300:
        return [f"the gradient is off by {error / max(size, 1e-300):.2e} of its terms (allowed {allowed / size:.2e})"]
    return []


def examine(numbers: range) -> collections.Counter[str]:
    """Judge some cases; raises with everything that is wrong."""
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for number in numbers:
        case = make(number)
        try:
            faults = judge(case)
            counts["silent"] += bool(faults)
        except Exception as error:
            counts["internal"] += 1
            faults = [f"{type(error).__name__}: {error}"]
        counts["cases"] += 1
        if faults:
            wrong.append(f"case {number} {case.story} {case.tolerance} {case.options}:\n  " + "\n  ".join(faults[:3]))
    assert not wrong, f"{dict(counts)}\n" + "\n".join(wrong[:10])
    return counts


@pytest.mark.parametrize("first", range(0, CI, CHUNK))
def test_no_silent_wrong_answer(first):
    examine(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CI, ALL, CHUNK))
def test_no_silent_wrong_answer_in_ten_thousand(first):
    examine(range(first, first + CHUNK))

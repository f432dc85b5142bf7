"""optimize_input against known optima: linear problems by dense algebra, nonlinear ones by brute force, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import equipoise as eq
from equipoise.joint import ConstantStep, Projection
from equipoise.joint.constraints import Constraint

DOUBLE = torch.float64
TIGHT = eq.Tolerance(relative=1e-11, max_steps=600, patience=None)
N, D, BATCH = 10, 3, 5


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def contraction(n: int, seed: int, norm: float = 0.6) -> Tensor:
    matrix = randn(n, n, seed=seed)
    return norm * matrix / torch.linalg.matrix_norm(matrix, 2)


class Linear:
    """f(z, x) = W z + U x + b, l = |z - y|^2 / 2 + weight |x|^2 / 2: the cost in x is a dense quadratic."""

    def __init__(self, weight: float = 0.1, batch: int = BATCH):
        self.W, self.U, self.b = contraction(N, 1), 0.7 * randn(N, D, seed=2), randn(N, seed=3)
        self.weight, self.y = weight, randn(batch, N, seed=4)
        solution = torch.linalg.inv(torch.eye(N, dtype=DOUBLE) - self.W)
        self.M, self.c = solution @ self.U, solution @ self.b
        self.H = self.M.mT @ self.M + weight * torch.eye(D, dtype=DOUBLE)
        self.right = (self.y - self.c) @ self.M

    def f(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return z @ self.W.mT + x @ self.U.mT + self.b

    def loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (z - y).square().sum(dim=1) / 2 + self.weight * x.square().sum(dim=1) / 2

    def optimum(self) -> Tensor:
        return torch.linalg.solve(self.H, self.right.mT).mT

    def constrained(self, constraint: Callable[[Tensor], Tensor], steps: int = 1500) -> Tensor:
        """Projected gradient descent from the unconstrained optimum."""
        x, length = constraint(self.optimum()), 1 / torch.linalg.matrix_norm(self.H, 2)
        for _ in range(steps):
            x = constraint(x - length * (x @ self.H - self.right))
        return x

    def minimize(self, **options: Any) -> eq.Optimum:
        batch = len(self.y)
        x0, z0 = torch.zeros(batch, D, dtype=DOUBLE), torch.zeros(batch, N, dtype=DOUBLE)
        return eq.optimize_input(self.f, self.loss, x0, z0, self.y, **{"tolerance": TIGHT, **options})


CONSTRAINTS: dict[str, Constraint] = {
    "l2": eq.L2Ball(0.3),
    "linf": eq.LinfBall(0.2),
    "box": eq.Box(-0.1, 0.3),
    "sphere": eq.Sphere(0.5),
}
SOLVERS = {
    "default": eq.JointAnderson(),
    "type II": eq.JointAnderson(kind=2, memory=12),
    "constant": eq.JointAnderson(step_size=0.05),
    "paper": eq.JointIteration(eq.Anderson(memory=20, kind=1), step_size=0.05),
    "broyden": eq.JointIteration(eq.Broyden(memory=40), step_size=0.05),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_linear_problem(name: str) -> None:
    problem = Linear()
    opt = problem.minimize(solver=SOLVERS[name])
    assert bool(opt.converged.all()), opt
    assert max(float(part.max()) for part in opt.kkt) <= 1e-10
    torch.testing.assert_close(opt.x, problem.optimum(), atol=1e-8, rtol=0)
    z = problem.c + opt.x @ problem.M.mT
    torch.testing.assert_close(opt.z, z, atol=1e-8, rtol=0)
    # mu = (I - W)^-T dl/dz, the adjoint of the loss
    adjoint = torch.linalg.solve((torch.eye(N, dtype=DOUBLE) - problem.W).mT, (z - problem.y).mT).mT
    torch.testing.assert_close(opt.mu, adjoint, atol=1e-8, rtol=0)
    torch.testing.assert_close(opt.cost, problem.loss(z, opt.x, problem.y), atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_linear_problem_with_constraint(name: str) -> None:
    problem, constraint = Linear(), CONSTRAINTS[name]
    opt = problem.minimize(constraint=constraint)
    assert bool(opt.converged.all()), opt
    assert max(float(part.max()) for part in opt.kkt) <= 1e-10
    torch.testing.assert_close(opt.x, problem.constrained(constraint), atol=1e-8, rtol=0)


EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {  # the feasible x of least slope . x
    "l2": lambda slope: -0.3 * slope / slope.norm(dim=1, keepdim=True),
    "linf": lambda slope: -0.2 * slope.sign(),
    "box": lambda slope: torch.where(slope > 0, -0.1, 0.3).to(slope),
    "sphere": lambda slope: -0.5 * slope / slope.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("d", [D, 20])
def test_a_cost_that_is_linear_in_x_is_least_at_the_border(name: str, seed: int, d: int) -> None:
    """g does not depend on x, so that an extrapolation of x has neither a length nor a sign."""
    W, U, slope = contraction(N, seed, norm=0.9), randn(N, d, seed=seed + 100), randn(BATCH, N, seed=seed + 200)
    x0, z0 = torch.full((BATCH, d), 0.1, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    opt = eq.optimize_input(
        lambda z, x, slope: z @ W.mT + x @ U.mT,
        lambda z, x, slope: (z * slope).sum(dim=1),
        x0,
        z0,
        slope,
        constraint=CONSTRAINTS[name],
        tolerance=eq.Tolerance(relative=1e-6, max_steps=300),
    )
    assert bool(opt.converged.all()), opt
    expected = EXTREMES[name](slope @ torch.linalg.solve(torch.eye(N, dtype=DOUBLE) - W, U))
    torch.testing.assert_close(opt.x, expected, atol=1e-4, rtol=0)


def test_intersection_and_own_projection() -> None:
    problem = Linear(batch=2)
    both = eq.Intersection(eq.L2Ball(0.3), eq.Box(-0.1, 0.25))
    opt = problem.minimize(constraint=both, tolerance=eq.Tolerance(relative=1e-8, max_steps=300, patience=None))
    torch.testing.assert_close(opt.x, problem.constrained(both, steps=150), atol=3e-6, rtol=0)
    opt = problem.minimize(constraint=lambda x: x.clamp(-0.1, 0.1))
    torch.testing.assert_close(opt.x, problem.constrained(lambda x: x.clamp(-0.1, 0.1)), atol=1e-8, rtol=0)


def test_nonlinear_problem_by_brute_force() -> None:
    W, U, y = contraction(6, 5), randn(6, 1, seed=6), randn(4, 6, seed=7)

    def equilibrium(x: Tensor, steps: int = 200) -> Tensor:
        z = torch.zeros(*x.shape[:-1], 6, dtype=DOUBLE)
        for _ in range(steps):
            z = torch.tanh(z @ W.mT + x @ U.mT)
        return z

    grid = torch.linspace(-3, 3, 6001, dtype=DOUBLE)
    costs = (equilibrium(grid[:, None])[None] - y[:, None]).square().sum(dim=2) + 0.1 * grid.square()
    for _ in range(3):  # zoom in on the best point of each sample
        best = grid[costs.argmin(dim=1)] if grid.dim() == 1 else grid.gather(1, costs.argmin(dim=1, keepdim=True))[:, 0]
        width = float((grid[..., 1] - grid[..., 0]).max()) if grid.dim() > 1 else float(grid[1] - grid[0])
        grid = best[:, None] + torch.linspace(-width, width, 401, dtype=DOUBLE)
        costs = (equilibrium(grid[..., None]) - y[:, None]).square().sum(dim=2) + 0.1 * grid.square()
    best = grid.gather(1, costs.argmin(dim=1, keepdim=True))
    opt = eq.optimize_input(
        lambda z, x, y: torch.tanh(z @ W.mT + x @ U.mT),
        lambda z, x, y: (z - y).square().sum(dim=1) + 0.1 * x.square().sum(dim=1),
        torch.zeros(4, 1, dtype=DOUBLE),
        torch.zeros(4, 6, dtype=DOUBLE),
        y,
        tolerance=TIGHT,
    )
    assert bool(opt.converged.all()), opt
    # A grid resolves a minimum to the root of the rounding error; the cost it resolves fully.
    torch.testing.assert_close(opt.x, best, atol=1e-6, rtol=0)
    assert bool((opt.cost <= costs.amin(dim=1) + 1e-11).all())


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("constraint", [None, eq.L2Ball(0.3)])
def test_scale_of_the_loss_does_not_matter(scale: float, constraint: Constraint | None) -> None:
    problem = Linear()
    tolerance = eq.Tolerance(relative=1e-6, max_steps=200)
    opt = problem.minimize(constraint=constraint, tolerance=tolerance)
    loss = problem.loss
    problem.loss = lambda z, x, y: scale * loss(z, x, y)  # type: ignore[method-assign]
    scaled = problem.minimize(constraint=constraint, tolerance=tolerance)
    assert bool(opt.converged.all() & scaled.converged.all())
    assert scaled.stats.steps.tolist() == pytest.approx(opt.stats.steps.tolist(), abs=2)
    torch.testing.assert_close(scaled.x, opt.x, atol=1e-5, rtol=0)


def test_batch_independence() -> None:
    """A sample alone, among 64, and beside one that diverges."""
    many = Linear(batch=64)
    together = many.minimize()
    alone = Linear(batch=64)
    alone.y = many.y[7:8]
    single = alone.minimize()
    torch.testing.assert_close(single.x, together.x[7:8], atol=1e-9, rtol=0)
    assert abs(int(single.stats.steps[0]) - int(together.stats.steps[7])) <= 1

    def f(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        wild = (y[:, :1] > 1e3).to(z.dtype)
        return many.f(z, x, y) + wild * (z.square() * 1e3 + z)

    y = many.y[:8].clone()
    y[3] = 1e4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        beside = eq.optimize_input(
            f, many.loss, torch.zeros(8, D, dtype=DOUBLE), torch.zeros(8, N, dtype=DOUBLE), y, tolerance=TIGHT
        )
    assert not bool(beside.converged[3])
    assert bool(torch.isfinite(beside.x).all() & torch.isfinite(beside.z).all())
    others = [0, 1, 2, 4, 5, 6, 7]
    assert bool(beside.converged[others].all())
    torch.testing.assert_close(beside.x[others], together.x[others], atol=1e-9, rtol=0)


@pytest.mark.parametrize("solver", [eq.JointAnderson(), eq.AdamInput(), eq.PGDInput(warm=False)], ids=repr)
@pytest.mark.parametrize("captured", [True, False])
def test_no_solve_leaves_samples_out_unless_it_may(captured: bool, solver: Any) -> None:
    """Neither the inner solves of a baseline, nor those of gradients, check and diagnosis."""
    problem = Linear(batch=16)
    speed = torch.logspace(-2, 0, 16, dtype=DOUBLE)[:, None]  # samples finish at different steps
    weight = torch.ones((), dtype=DOUBLE, requires_grad=True)
    f = lambda z, x, *inputs: weight * speed * problem.f(z, x, problem.y)
    loss = lambda z, x, *inputs: problem.loss(z, x, problem.y)
    start = torch.zeros(16, D, dtype=DOUBLE), torch.zeros(16, N, dtype=DOUBLE)
    options: dict[str, Any] = {"solver": solver, "on_failure": "ignore"}
    for gradient in (eq.EnvelopeGradient(), eq.KKTGradient(), eq.DetachedGradient()):
        if captured:
            opt = eq.optimize_input(f, loss, *start, gradient=gradient, **options)
        else:
            opt = eq.optimize_input(f, loss, *start, problem.y, gradient=gradient, compact=False, **options)
        opt.cost.sum().backward()
        assert bool(opt.check().converged.all())
        assert str(eq.diagnose(opt))


def test_one_slow_sample_does_not_hold_the_others() -> None:
    problem = Linear(batch=64)
    problem.W = torch.diag(torch.linspace(-0.6, 0.6, N, dtype=DOUBLE))
    stiff = torch.ones(64, 1, dtype=DOUBLE)
    stiff[5] = 1.66  # times W: the spectral radius of this sample is 0.996

    def f(z: Tensor, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        return factor * (z @ problem.W.mT) + x @ problem.U.mT + problem.b

    def loss(z: Tensor, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        return problem.loss(z, x, y)

    x0, z0 = torch.zeros(64, D, dtype=DOUBLE), torch.zeros(64, N, dtype=DOUBLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        opt = eq.optimize_input(f, loss, x0, z0, problem.y, stiff, tolerance=TIGHT)
    slow, rest = int(opt.stats.steps[5]), torch.cat([opt.stats.steps[:5], opt.stats.steps[6:]])
    assert slow > 1.4 * float(rest.float().median())
    assert opt.stats.rows < 0.8 * 64 * slow


def feasible(constraint: Constraint, x: Tensor) -> bool:
    match constraint:
        case eq.L2Ball():
            return bool((x.norm(dim=1) <= constraint.radius).all())
        case eq.LinfBall():
            return bool((x.abs() <= constraint.radius).all())
        case eq.Box():
            return bool(((x >= constraint.low) & (x <= constraint.high)).all())
        case eq.Sphere():
            error = (x.norm(dim=1) - constraint.radius).abs()
            return bool((error <= 4 * torch.finfo(x.dtype).eps * constraint.radius).all())
        case _:
            raise AssertionError(constraint)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["l2", "linf", "box", "sphere"]),
    solver=st.sampled_from(["auto", "normalized", "paper", "pgd"]),
    size=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, DOUBLE]),
)
def test_every_iterate_is_feasible(seed: int, name: str, solver: str, size: float, dtype: torch.dtype) -> None:
    """About 16 samples x 12 steps per case: 10^4 iterates that could be returned."""
    make = {"l2": eq.L2Ball, "linf": eq.LinfBall, "sphere": eq.Sphere}
    constraint = eq.Box(-size, 0.5 * size) if name == "box" else make[name](size)
    chosen = {
        "auto": eq.JointAnderson(),
        "normalized": eq.JointAnderson(step_size=eq.NormalizedStep(0.3 * size)),
        "paper": eq.JointIteration(eq.Anderson(memory=20, kind=1), step_size=1.0),
        "pgd": eq.PGDInput(0.5 * size),
    }[solver]
    W, U = contraction(8, seed, norm=1.1).to(dtype), randn(8, 4, seed=seed + 1).to(dtype)
    y = 3 * randn(16, 8, seed=seed + 2).to(dtype)
    seen = []
    opt = eq.optimize_input(
        lambda z, x, y: torch.tanh(z @ W.mT + x @ U.mT / size),
        lambda z, x, y: (z - y).square().sum(dim=1),
        2 * size * randn(16, 4, seed=seed + 3).to(dtype),
        torch.zeros(16, 8, dtype=dtype),
        y,
        constraint=constraint,
        solver=chosen,
        tolerance=eq.Tolerance(relative=1e-4, max_steps=12),
        on_failure="ignore",
        callback=lambda progress: seen.append(progress.value[2].clone()),
    )
    assert all(feasible(constraint, x) for x in [*seen, opt.x])
    assert len(seen) >= 2


@pytest.mark.parametrize("select", ["feasible-cost", "residual", "last", "paper"])
def test_selection(select: str) -> None:
    """Each rule returns the iterate that it names, out of those the callback saw."""
    problem = Linear()
    states: list[Any] = []
    opt = problem.minimize(
        select=select,
        tolerance=eq.Tolerance(relative=1e-12, max_steps=12, patience=None),
        solver=eq.JointAnderson(step_size=0.2),
        on_failure="ignore",
        callback=lambda progress: states.append(progress.state),
        compact=False,
    )
    costs, kkt = torch.stack([s.cost for s in states]), torch.stack([s.kkt for s in states])
    if select == "last":
        best = torch.full((BATCH,), len(states) - 1)
    elif select == "residual":
        best = kkt.amax(dim=2).argmin(dim=0)
    elif select == "feasible-cost":
        best = torch.where(kkt[:, :, 0] < 0.1, costs, torch.inf).argmin(dim=0)
    else:
        best = torch.zeros(BATCH, dtype=torch.int64)
        for i in range(BATCH):  # the rule of the authors' code, sample by sample
            lowest, least = torch.inf, torch.inf
            for k in range(len(states)):
                r, cost = float(kkt[k, i].max()), float(costs[k, i])
                if k < 10 or r < lowest:
                    lowest, least, best[i] = r, cost, k
                elif cost < least and r < 1.3 * lowest:
                    least, best[i] = cost, k
    expected = torch.stack([states[int(k)].z[i, 2 * N :] for i, k in enumerate(best)])
    torch.testing.assert_close(opt.x, expected, atol=0, rtol=0)
    torch.testing.assert_close(opt.costs, costs, atol=0, rtol=0)


def test_step_rules() -> None:
    """Every rule lowers the cost; a decayed step is the constant one until it decays."""
    problem = Linear()
    begin = problem.minimize(tolerance=eq.Tolerance(relative=1e-3, max_steps=1), on_failure="ignore").cost
    for rule in (
        "auto",
        0.05,
        eq.ConstantStep(0.05, later=0.01, after=20),
        eq.NormalizedStep(0.1, later=0.02, after=20),
        eq.MomentumStep(0.01),
        eq.AdamStep(0.1),
    ):
        for solver in (eq.JointAnderson(step_size=rule), eq.JointIteration(step_size=rule, damping=(0.2, 0.2))):
            opt = problem.minimize(
                solver=solver, tolerance=eq.Tolerance(relative=1e-6, max_steps=60), on_failure="ignore"
            )
            assert bool((opt.check().cost < begin).all()), (rule, solver)
    runs = []
    for rule in (ConstantStep(0.05), ConstantStep(0.05, later=0.01, after=5)):
        xs: list[Tensor] = []
        problem.minimize(
            solver=eq.JointIteration(step_size=rule),
            tolerance=eq.Tolerance(relative=1e-9, max_steps=10),
            on_failure="ignore",
            callback=lambda progress, xs=xs: xs.append(progress.value[2]),
        )
        runs.append(xs)
    same = [bool(torch.equal(a, b)) for a, b in zip(*runs, strict=True)]
    assert same == [True] * 6 + [False] * 4


def test_baselines_agree() -> None:
    problem = Linear()
    tolerance = eq.Tolerance(relative=1e-7, max_steps=400, patience=None)
    inner = eq.Tolerance(relative=1e-9, max_steps=100)
    for warm in (True, False):
        adam = eq.AdamInput(0.05, warm=warm, tolerance=inner, adjoint=inner)
        opt = problem.minimize(solver=adam, tolerance=tolerance, on_failure="ignore")
        torch.testing.assert_close(opt.x, problem.optimum(), atol=1e-3, rtol=0)
    ball = eq.L2Ball(0.3)
    pgd = problem.minimize(
        solver=eq.PGDInput(0.01, tolerance=inner, adjoint=inner),
        constraint=ball,
        tolerance=tolerance,
        on_failure="ignore",
    )
    torch.testing.assert_close(pgd.x, problem.constrained(ball), atol=2e-2, rtol=0)
    assert pgd.stats.products > pgd.stats.steps.max()


def test_counts() -> None:
    """A step costs one f, one loss and one product, the first being the check; f(z0) and the first radius cost an f."""
    problem, calls = Linear(), {"f": 0, "loss": 0}

    def f(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        calls["f"] += 1
        return problem.f(z, x, y)

    def loss(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        calls["loss"] += 1
        return problem.loss(z, x, y)

    x0, z0 = torch.zeros(1, D, dtype=DOUBLE), torch.zeros(1, N, dtype=DOUBLE)
    opt = eq.optimize_input(
        f, loss, x0, z0, problem.y[:1], tolerance=eq.Tolerance(1e-9, max_steps=20), on_failure="ignore", select="last"
    )
    steps = int(opt.stats.steps.max())
    assert opt.stats.products == steps
    assert opt.stats.evaluations == steps + 1
    assert calls["f"] == steps + 2
    assert calls["loss"] == steps + 1  # and of the returned value


# Values of every kind.


def test_nested_values_and_shared_input() -> None:
    """x and z as nested tuples; one x shared by the three images of a row."""
    mix = contraction(4, 8)

    def f(z: Any, x: Any, y: Tensor) -> Any:
        (a, b), (scale, shift) = z, x
        a = torch.tanh(a @ mix.mT + shift[:, None] + y)  # (batch, 3, 4)
        return a, torch.tanh(0.3 * b + a.mean(dim=1) * scale)

    def loss(z: Any, x: Any, y: Tensor) -> Tensor:
        return (z[1] - 0.3).square().sum(dim=1) + 0.01 * sum(part.square().sum(dim=1) for part in x)

    x0 = (torch.ones(6, 4, dtype=DOUBLE), torch.zeros(6, 4, dtype=DOUBLE))
    z0 = (torch.zeros(6, 3, 4, dtype=DOUBLE), torch.zeros(6, 4, dtype=DOUBLE))
    tolerance = eq.Tolerance(relative=1e-6, max_steps=600, patience=None)
    y = randn(6, 3, 4, seed=9)
    opt = eq.optimize_input(f, loss, x0, z0, y, tolerance=tolerance, constraint=eq.L2Ball(3.0))
    assert bool(opt.converged.all()), opt
    assert opt.x[1].shape == (6, 4)
    assert opt.z[0].shape == opt.mu[0].shape == (6, 3, 4)
    assert float(opt.check().error.max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    problem = Linear()
    narrow = {name: getattr(problem, name).to(dtype) for name in ("W", "U", "b", "y")}
    exact = problem.constrained(eq.L2Ball(0.5))
    vars(problem).update(narrow)
    x0, z0 = torch.zeros(BATCH, D, dtype=dtype), torch.zeros(BATCH, N, dtype=dtype)
    opt = eq.optimize_input(
        problem.f, problem.loss, x0, z0, problem.y, constraint=eq.L2Ball(0.5), on_failure="ignore", select="residual"
    )
    assert opt.x.dtype == dtype
    assert bool((opt.x.norm(dim=1) <= 0.5).all())
    torch.testing.assert_close(opt.x.double(), exact, atol=2e-3 if dtype == torch.float32 else 0.1, rtol=0)


def test_modes() -> None:
    problem = Linear()
    reference = problem.minimize()
    with torch.no_grad():
        torch.testing.assert_close(problem.minimize().x, reference.x)
    with torch.inference_mode():
        y = problem.y * 1.0
        x0, z0 = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
        opt = eq.optimize_input(problem.f, problem.loss, x0, z0, y, tolerance=TIGHT)
    torch.testing.assert_close(opt.x, reference.x)
    empty = eq.optimize_input(problem.f, problem.loss, x0[:0], z0[:0], problem.y[:0])
    assert empty.x.shape == (0, D)
    assert "empty" in str(empty)


def test_costs_in_the_autocast_mode_of_the_solve() -> None:
    head, y = nn.Linear(8, 8), torch.rand(BATCH, 8)
    f, loss = lambda z, x, y: torch.tanh(0.3 * z + x), lambda z, x, y: (head(z) - y).square().sum(dim=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt = eq.optimize_input(f, loss, torch.zeros(BATCH, 8), torch.zeros(BATCH, 8), y, on_failure="ignore")
    with torch.no_grad():
        assert torch.equal(opt.joint.costs(opt.at), opt.cost)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = eq.WeightNorm(nn.Linear(8, 8))
        self.dropout = eq.VariationalDropout(0.3)
        self.inject = nn.Linear(3, 8)

    def forward(self, z: Tensor, x: Tensor, *inputs: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.dropout(self.linear(z)) + self.inject(x))


def test_scope_of_a_solve() -> None:
    """Weights are derived once, and a dropout mask stays the same, so that a training-mode f has an optimum."""
    torch.manual_seed(0)
    cell = Cell().double().train()
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    cell.linear.register_forward_pre_hook(count)
    y = randn(4, 8, seed=11)
    opt = eq.optimize_input(
        cell,
        lambda z, x, y: (z - y).square().sum(dim=1) + 0.3 * x.square().sum(dim=1),
        torch.zeros(4, 3, dtype=DOUBLE),
        torch.zeros(4, 8, dtype=DOUBLE),
        y,
        tolerance=eq.Tolerance(relative=1e-8, max_steps=400, patience=None),
    )
    assert bool(opt.converged.all()), opt
    assert calls == opt.stats.evaluations + 1 + 1  # one check more than the first evaluation, and the record
    opt.cost.sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in cell.parameters())


def test_models_of_the_library() -> None:
    """A monotone problem, and the cells of MDEQ and MOptEq, as f: x is added to the image that is injected."""
    torch.manual_seed(0)
    operator = eq.operators.MonotoneLinear(12, m=1.0).double()
    monotone = eq.operators.MonotoneProblem(operator, "tanh")
    inject = nn.Linear(3, 12).double().requires_grad_(False)
    opt = eq.optimize_input(
        lambda z, x, y: monotone(z, inject(x)),
        lambda z, x, y: (z - y).square().sum(dim=1) + 0.1 * x.square().sum(dim=1),
        torch.zeros(3, 3, dtype=DOUBLE),
        torch.zeros(3, 12, dtype=DOUBLE),
        randn(3, 12, seed=12).abs(),
        tolerance=eq.Tolerance(relative=1e-7, max_steps=400, patience=None),
    )
    assert bool(opt.converged.all()), opt
    assert float(opt.check(eq.Tolerance(1e-10, max_steps=500)).error.max()) < 1e-5


@pytest.mark.parametrize("name", ["mdeq", "opteq"])
def test_attack_on_a_model_of_the_library(name: str) -> None:
    """A whole classifier: x is added to the image before the stem."""
    torch.manual_seed(0)
    images, labels = torch.rand(2, 1, 16, 16), torch.tensor([3, 5])
    if name == "mdeq":
        model: Any = eq.models.MDEQ((1, 16, 16), 10, size="cifar10-small", channels=(8, 8), head_channels=(4, 8))
    else:
        model = eq.models.OptEq((1, 16, 16), 10, channels=16)
    model.eval().requires_grad_(False)
    model.equilibrium.on_failure = "ignore"

    def injected(pictures: Tensor) -> tuple[Any, ...]:
        return ((model.features(pictures),),) if name == "mdeq" else model.cell.prepare(model.stem(pictures))

    def f(z: Any, x: Tensor, y: Tensor, labels: Tensor) -> Any:
        return model.equilibrium.f(z, *injected(y + x))

    def loss(z: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(z) if name == "mdeq" else model.read(z)
        return -nn.functional.cross_entropy(logits, labels, reduction="none")

    opt = eq.optimize_input(
        f,
        loss,
        torch.zeros_like(images),
        model.equilibrium.start(injected(images)),
        images,
        labels,
        constraint=eq.L2Ball(1.0),
        tolerance=eq.Tolerance(relative=1e-3, max_steps=30),
        on_failure="ignore",
    )
    before, after = (
        nn.functional.cross_entropy(model(pictures), labels, reduction="none") for pictures in (images, images + opt.x)
    )
    if name == "opteq":  # an untrained MDEQ is not contractive, so that its answers are arbitrary
        assert bool((after > before).all()), (before, after)
    assert bool((opt.x.flatten(1).norm(dim=1) <= 1.0).all())


# What is refused.


def attempt(**changes: Any) -> eq.Optimum:
    problem = Linear()
    given = {
        "f": problem.f,
        "loss": problem.loss,
        "x0": torch.zeros(BATCH, D, dtype=DOUBLE),
        "z0": torch.zeros(BATCH, N, dtype=DOUBLE),
        "y": problem.y,
        **changes,
    }
    f, loss, x0, z0, y = (given.pop(name) for name in ("f", "loss", "x0", "z0", "y"))
    return eq.optimize_input(f, loss, x0, z0, y, **given)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"loss": lambda z, x, y: (z - y).square().mean()}, ValueError, r"shape \(\).*one cost per sample"),
        ({"loss": lambda z, x, y: (z - y).square()}, ValueError, "one cost per sample"),
        ({"loss": lambda z, x, y: (z.detach() - y).square().sum(1)}, RuntimeError, "does not depend differentiably"),
        (
            {"loss": lambda z, x, y: (z.detach() - y).square().sum(1) + x.square().sum(1)},
            RuntimeError,
            "^z requires a gradient and the loss depends on it",
        ),
        (
            {"loss": lambda z, x, y: (z - y).square().sum(1) + x.detach().square().sum(1)},
            RuntimeError,
            r"^x0 requires a gradient and the loss depends on it.*or numpy in the loss",
        ),
        (
            {"loss": lambda z, x, y: (z - y).square().sum(1) / z.abs().sum()},
            ValueError,
            "loss mixes the samples of the batch",
        ),
        (
            {"loss": lambda z, x, y: (z - y)[:, :BATCH].square().sum(0)},
            ValueError,
            r"Reduce over all dimensions but the first",
        ),
        ({"loss": None}, TypeError, "loss is a NoneType"),
        ({"loss": nn.MSELoss}, TypeError, "loss is the class MSELoss"),
        ({"loss": lambda z, x, y: (z - y.mul_(1)).square().sum(1)}, RuntimeError, "^the loss modifies z or an input"),
        ({"loss": lambda z, x: z.sum(1)}, TypeError, "positional"),
        ({"f": lambda z, x, y: z @ torch.eye(N, dtype=DOUBLE) * 0 + x.detach().sum()}, RuntimeError, "no gradient can"),
        ({"f": lambda z, x, y: torch.tanh(z + x.detach().sum(1)[:, None])}, RuntimeError, "^x0 requires a gradient"),
        ({"y": torch.tensor(1.0)}, ValueError, r"^inputs\[0\] has no dimensions"),
        ({"x0": torch.zeros(BATCH, D, device="meta")}, TypeError, "^x0 is on the meta device"),
        ({"x0": torch.zeros(BATCH, D).to_sparse()}, TypeError, "^x0 is torch.sparse_coo; it must be dense"),
        ({"x0": torch.zeros(BATCH, D).to(torch.float8_e5m2)}, TypeError, "^x0 is torch.float8_e5m2"),
        ({"constraint": lambda x: None}, TypeError, r"^the value of Projection\(<lambda>\) has type NoneType"),
        ({"x0": torch.zeros(BATCH + 1, D)}, ValueError, f"x0 has batch size {BATCH + 1}, the inputs have {BATCH}"),
        ({"x0": torch.zeros(BATCH, D, dtype=torch.int64)}, TypeError, "x0 is torch.int64"),
        ({"select": "best"}, ValueError, "select is 'best'; allowed: 'feasible-cost'"),
        ({"on_failure": "shout"}, ValueError, "on_failure is 'shout'"),
        ({"solver": eq.Anderson()}, TypeError, "solver is Anderson.*joint solver"),
        ({"gradient": eq.ImplicitGradient()}, TypeError, "gradient is ImplicitGradient"),
        ({"constraint": 1.0}, TypeError, "constraint is 1.0"),
        ({"tolerance": eq.Tolerance(absolute=1e-3)}, ValueError, "tolerance.absolute is 0.001"),
    ],
)
def test_misuse(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attempt(**changes)
    with torch.no_grad(), pytest.raises(error, match=words):
        attempt(**changes)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_loss_that_cannot_be_squared_is_refused(scale: float) -> None:
    """All norms would be 0, and every x an optimum."""
    problem = Linear()
    single = {name: getattr(problem, name).float() for name in ("W", "U", "b", "y")}
    vars(problem).update(single)
    loss = lambda z, x, y: scale * problem.loss(z, x, y)
    with pytest.raises(ValueError, match="multiply the loss by a constant that brings it near 1"):
        eq.optimize_input(problem.f, loss, torch.zeros(BATCH, D), torch.zeros(BATCH, N), problem.y)


@pytest.mark.parametrize("constraint", [None, eq.L2Ball(0.4)])
@pytest.mark.parametrize("scale", [1e18, 1e19, 1e30])
def test_a_sample_whose_loss_cannot_be_squared_fails_alone(scale: float, constraint: Constraint | None) -> None:
    """At 1e18 the first squares fit, and their sum over the steps overflows."""
    problem = Linear()
    vars(problem).update({name: getattr(problem, name).float() for name in ("W", "U", "b", "y")})
    weight = torch.ones(BATCH)
    start = torch.zeros(BATCH, D), torch.zeros(BATCH, N), problem.y
    options: dict[str, Any] = {"constraint": constraint, "on_failure": "ignore"}
    expected = eq.optimize_input(problem.f, problem.loss, *start, **options)
    weight[2] = scale
    f = lambda z, x, y, weight: problem.f(z, x, y)
    loss = lambda z, x, y, weight: weight * problem.loss(z, x, y)
    opt = eq.optimize_input(f, loss, *start, weight, **options)
    assert bool(opt.x.isfinite().all())
    if bool(opt.converged[2]):  # at 1e18, without a constraint
        torch.testing.assert_close(opt.x[2], expected.x[2], atol=1e-3, rtol=0)
    others = [0, 1, 3, 4]
    assert bool(opt.converged[others].all())
    torch.testing.assert_close(opt.x[others], expected.x[others])


def test_a_cost_that_is_not_finite_is_no_success() -> None:
    """The gradient of a constant is finite even where the constant is not."""
    problem, shift = Linear(), torch.zeros(BATCH, dtype=DOUBLE)
    shift[1], shift[3] = torch.nan, torch.inf
    loss = lambda z, x, y, shift: problem.loss(z, x, y) + shift
    x0, z0 = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    f = lambda z, x, y, shift: problem.f(z, x, y)
    opt = eq.optimize_input(f, loss, x0, z0, problem.y, shift, on_failure="ignore")
    failed, good = [1, 3], [0, 2, 4]
    assert opt.result[failed].tolist() == [eq.Result.NONFINITE] * 2
    assert bool(opt.converged[good].all())
    words = "f, the loss or a gradient is NaN"  # here it is the loss
    assert words in str(opt)
    with pytest.warns(eq.ConvergenceWarning, match=words):
        eq.optimize_input(f, loss, x0, z0, problem.y, shift)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_x_is_feasible_even_where_x0_was_not_finite(name: str) -> None:
    problem, constraint = Linear(), CONSTRAINTS[name]
    if name == "box":
        constraint = eq.Box(0.1, 0.3)  # 0 is not in it
    x0 = torch.full((BATCH, D), 0.2, dtype=DOUBLE)
    x0[1] = torch.nan
    z0 = torch.zeros(BATCH, N, dtype=DOUBLE)
    opt = eq.optimize_input(
        problem.f, problem.loss, x0, z0, problem.y, constraint=constraint, tolerance=TIGHT, on_failure="ignore"
    )
    assert opt.result.tolist() == [eq.Result.NONFINITE if i == 1 else eq.Result.CONVERGED for i in range(BATCH)]
    torch.testing.assert_close(opt.x[1], constraint(torch.zeros(1, D, dtype=DOUBLE))[0], rtol=1e-12, atol=0)


def test_batch_of_z0() -> None:
    problem = Linear()
    f, loss = lambda z, x: problem.f(z, x, problem.y), lambda z, x: problem.loss(z, x, problem.y)
    x0, z0 = torch.zeros(1, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    assert torch.equal(eq.optimize_input(f, loss, x0, z0).x, problem.minimize(tolerance=eq.Tolerance(1e-3)).x)
    with pytest.raises(ValueError, match=f"x0 has batch size 3, z0 has {BATCH}"):
        eq.optimize_input(f, loss, x0.expand(3, D), z0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused() -> None:
    y = randn(BATCH, N, seed=4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        attempt(y=forward_ad.make_dual(y, torch.ones_like(y)))


@pytest.mark.parametrize("constraint", [None, eq.L2Ball(50.0), lambda x: x.clamp(0, 90)], ids=["none", "ball", "own"])
def test_nothing_depends_on_x(constraint: Any) -> None:
    problem = Linear()
    f = lambda z, x, y: problem.f(z, torch.zeros_like(x), y)
    loss = lambda z, x, y: (z - y).square().sum(dim=1)
    x0, z0 = torch.full((BATCH, D), 8.0, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    opt = eq.optimize_input(f, loss, x0, z0, problem.y, constraint=constraint)
    assert bool(opt.converged.all())
    assert torch.equal(opt.x, x0)


def test_dropout_in_the_loss_is_named() -> None:
    head = nn.Sequential(nn.Linear(N, N), nn.Dropout(0.5)).double()
    loss = lambda z, x, y: (head(z) - y).square().sum(dim=1) + x.square().sum(dim=1)
    with pytest.warns(
        eq.ImpureFunctionWarning, match="the loss is not a function of z: captured 'head' 1 is a Dropout"
    ):
        attempt(loss=loss, on_failure="ignore", tolerance=eq.Tolerance(max_steps=2))
    head.eval()
    attempt(loss=loss, on_failure="ignore", tolerance=eq.Tolerance(max_steps=2))


def test_solves_inside_f_are_not_watched() -> None:
    problem = Linear()
    inner = eq.Equilibrium(lambda z, x: 0.5 * torch.tanh(z) + x)

    def f(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return problem.f(z, inner(x), y)

    x0, z0 = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    with eq.watch_solves() as solves:
        eq.optimize_input(f, problem.loss, x0, z0, problem.y, on_failure="ignore")
        inner(x0)
    assert len(solves) == 1


def test_empty_batch() -> None:
    problem = Linear(batch=0)
    opt = problem.minimize()
    assert opt.x.shape == (0, D)
    assert "empty batch" in str(opt)
    assert "empty batch" in str(opt.check())
    assert "empty batch" in str(eq.diagnose(opt))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: eq.JointAnderson(step_size="fast"), ValueError, "JointAnderson.step_size is 'fast'"),
        (lambda: eq.JointAnderson(step_size=-1.0), ValueError, "JointAnderson.step_size is -1.0"),
        (lambda: eq.JointAnderson(damping=0.5), ValueError, "JointAnderson.damping is 0.5; it must be two numbers"),
        (lambda: eq.JointAnderson(damping=(0.5, 1.0)), ValueError, "two numbers in"),
        (lambda: eq.JointAnderson(kind=3), ValueError, "kind is 3"),
        (lambda: eq.JointAnderson(step_size=eq.AdamStep(), extrapolate_x=True), ValueError, "x would never move"),
        (lambda: eq.AdamInput(solver=eq.JointAnderson()), TypeError, "AdamInput.solver is JointAnderson"),
        (lambda: eq.JointIteration(eq.NewtonKrylov()), TypeError, "evaluate F once per step"),
        (lambda: eq.JointAnderson(memmory=3), TypeError, "did you mean 'memory'"),
        (lambda: eq.NormalizedStep(0.0), ValueError, "NormalizedStep.length is 0.0"),
        (lambda: eq.NormalizedStep(norm="l1"), ValueError, "NormalizedStep.norm is 'l1'; allowed: 'l2', 'linf'"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_joint_solver_needs_the_joint_problem() -> None:
    with pytest.raises(TypeError, match="JointAnderson needs the joint problem of equipoise.optimize_input"):
        eq.fixed_point(lambda z, x: z / 2 + x, torch.zeros(2, 3), torch.ones(2, 3), solver=eq.JointAnderson())


def test_an_f_that_mixes_samples_is_named() -> None:
    problem = Linear(batch=16)

    def f(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return problem.f(z, x, y) + 0.3 * z.mean(dim=0)

    x0, z0 = torch.zeros(16, D, dtype=DOUBLE), torch.zeros(16, N, dtype=DOUBLE)
    opt = eq.optimize_input(f, problem.loss, x0, z0, problem.y, on_failure="ignore")
    assert not bool(opt.converged.any()) or bool((opt.result == eq.Result.COUPLED).all())


# Diagnosis.


def test_diagnose() -> None:
    problem = Linear()
    opt = problem.minimize(constraint=eq.L2Ball(0.3))
    words = str(eq.diagnose(opt))
    assert "All 5 samples converged" in words
    assert "constraint is active for 5 of the 5" in words
    assert "agrees with that at z*(x)" in words
    assert float(opt.check().error.max()) < 1e-9

    wild = problem.minimize(
        solver=eq.JointIteration(step_size=1.5), tolerance=eq.Tolerance(1e-6, max_steps=40), on_failure="ignore"
    )
    words = str(eq.diagnose(wild))
    assert "failed" in words
    assert "step of x is too long" in words or "NaN or infinite" in words

    loose = problem.minimize(
        solver=eq.JointIteration(step_size=1e-3, damping=(0.99, 0.99)),
        tolerance=eq.Tolerance(1e-6, max_steps=3),
        on_failure="ignore",
        select="last",
    )
    assert "differs from that at z*(x)" in str(eq.diagnose(loose))

    problem.W = contraction(N, 1, norm=3.0)
    words = str(eq.diagnose(problem.minimize(tolerance=eq.Tolerance(1e-6, max_steps=5), on_failure="ignore")))
    assert "not contractive" in words or "NaN or infinite" in words


@pytest.mark.parametrize("size", [1.0, 5.0])
def test_a_step_that_is_too_long_is_named(size: float) -> None:
    """Samples stop at different steps; only steps before that count."""
    problem = Linear()
    f = lambda z, x, y: torch.tanh(problem.f(z, x, y) - problem.b)
    start = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE), problem.y
    long = eq.JointIteration(step_size=size)
    opt = eq.optimize_input(f, problem.loss, *start, solver=long, on_failure="ignore")
    assert "step of x is too long" in str(eq.diagnose(opt))


@pytest.mark.filterwarnings("ignore::equipoise.ImpureFunctionWarning")
@pytest.mark.parametrize("where", ["f", "loss"])
def test_noise_is_named(where: str) -> None:
    torch.manual_seed(0)
    problem = Linear()
    noisy = lambda function, *at: function(*at) * (1 + 0.1 * torch.rand(BATCH, 1, dtype=DOUBLE))
    functions: dict[str, Any] = {"f": problem.f, "loss": problem.loss}
    if where == "f":
        functions["f"] = lambda *at: noisy(problem.f, *at)
    else:
        functions["loss"] = lambda *at: noisy(lambda *at: problem.loss(*at)[:, None], *at)[:, 0]
    start = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE), problem.y
    opt = eq.optimize_input(*functions.values(), *start, compact=False, on_failure="ignore")
    words = str(eq.diagnose(opt))
    assert ("f is not a function of z" in words) == (where == "f")
    assert ("The loss is not a function of z and x" in words) == (where == "loss")


def test_no_step_is_too_long_where_all_samples_converged() -> None:
    """x cannot move here: the cost rises because z does."""
    f = lambda z, x: x - 0.9 * z
    start = torch.ones(3, 2, dtype=DOUBLE), torch.zeros(3, 2, dtype=DOUBLE)
    plain = eq.JointIteration()
    opt = eq.optimize_input(f, lambda z, x: z.sum(dim=1), *start, solver=plain, constraint=eq.Box(1.0, 1.0))
    assert bool(opt.converged.all())
    assert "too long" not in str(eq.diagnose(opt))


def test_failures_are_reported() -> None:
    problem, few = Linear(), eq.Tolerance(relative=1e-9, max_steps=3)
    with pytest.warns(eq.ConvergenceWarning, match="forward solve failed"):
        problem.minimize(tolerance=few)
    with pytest.raises(eq.ConvergenceError, match="5 MAX_STEPS"):
        problem.minimize(tolerance=few, on_failure="raise")
    text = str(problem.minimize(tolerance=few, on_failure="ignore"))
    assert "0 of 5 samples converged" in text
    assert "KKT residuals z" in text


def test_own_projection_object() -> None:
    assert isinstance(Projection(lambda x: x.clamp(0, 1)), Constraint)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_normalized_steps_have_their_length_in_their_norm(norm):
    """First the one length, then the other."""
    problem, places = Linear(), []
    step = eq.NormalizedStep(0.01, later=0.002, after=6, norm=norm)
    options = {
        "solver": eq.JointAnderson(step_size=step),
        "callback": lambda progress: places.append(progress.value[2]),
    }
    problem.minimize(**options, tolerance=eq.Tolerance(relative=0.0, max_steps=12, patience=None), on_failure="ignore")
    moves = torch.stack(places).diff(dim=0)  # from the first step on: mu starts as dl/dz
    lengths = moves.norm(dim=2) if norm == "l2" else moves.abs().amax(dim=2)
    expected = torch.tensor([0.01] * 6 + [0.002] * 5, dtype=DOUBLE)[:, None].expand_as(lengths)
    torch.testing.assert_close(lengths, expected)
    if norm == "linf":
        torch.testing.assert_close(moves.abs(), lengths[:, :, None].expand_as(moves))  # all entries move


def test_signed_steps_find_the_corner_of_a_box():
    """A linear cost under entry-wise bounds is least at a corner, whose signs are those of -g."""
    problem = Linear(weight=0.0)
    slope = randn(BATCH, N, seed=9)

    def cost(z: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        return (slope * z).sum(dim=1)

    options = {"constraint": eq.LinfBall(0.5), "select": "last", "on_failure": "ignore"}
    solver = eq.JointAnderson(memory=3, step_size=eq.NormalizedStep(0.1, norm="linf"))
    x0, z0 = torch.zeros(BATCH, D, dtype=DOUBLE), torch.zeros(BATCH, N, dtype=DOUBLE)
    found = eq.optimize_input(problem.f, cost, x0, z0, slope, solver=solver, **options)
    torch.testing.assert_close(found.x, -0.5 * (slope @ problem.M).sign())


def test_no_sample_wanders_around_a_saddle_point():
    """Type-I Anderson may go uphill where the cost curves downwards: without a safeguard, 1 of 400 takes 400 steps."""
    generator = torch.Generator().manual_seed(36)
    randn_ = lambda *shape: torch.randn(*shape, generator=generator, dtype=DOUBLE)
    W, U, b = 0.577 / 8**0.5 * randn_(8, 8), 0.577 * randn_(3, 8), 0.2 * randn_(8)
    mask = (torch.rand(64, 8, generator=generator, dtype=DOUBLE) > 0.3) / 0.7
    opt = eq.optimize_input(
        lambda z, x, y, mask: torch.tanh(0.5 * mask * (z @ W + b) + x @ U),
        lambda z, x, y, mask: (z - y).square().sum(dim=1) + 0.3 * x.square().sum(dim=1),
        torch.zeros(64, 3, dtype=DOUBLE),
        torch.zeros(64, 8, dtype=DOUBLE),
        randn_(64, 8),
        mask,
        tolerance=eq.Tolerance(relative=1e-8, max_steps=400, patience=None),
        on_failure="ignore",
    )
    assert bool(opt.converged.all())
    assert int(opt.stats.steps.max()) < 200

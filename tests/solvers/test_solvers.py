"""Every solver finds every known answer, says so truthfully, and takes no more steps than theory allows."""

import functools

import pytest
import torch

import equipoise as eq
from corpus import AFFINE, CASES, DOUBLE, affine_case, flatten, per_sample, randn, solvable, true_residual

TIGHT = eq.Tolerance(relative=1e-11, max_steps=600)

PLAIN = {"picard": eq.Picard(), "picard-damped": eq.Picard(damping=0.4)}
ACCELERATED = {
    "anderson": eq.Anderson(),
    "anderson-mixing": eq.Anderson(mixing=0.6),
    "anderson-restart": eq.Anderson(restart=2.0),
    "anderson-ridge": eq.Anderson(ridge=1e-10),
    "anderson-memory-2": eq.Anderson(memory=2),
    "anderson-bfloat16": eq.Anderson(history="bfloat16"),
    "anderson-type-1": eq.Anderson(kind=1),
    "anderson-type-1-mixing": eq.Anderson(kind=1, mixing=0.6),
    "anderson-type-1-restart": eq.Anderson(kind=1, restart=2.0),
    "broyden": eq.Broyden(),
    "broyden-memory-3": eq.Broyden(memory=3),
    "broyden-line-search": eq.Broyden(line_search=4),
    "newton-gmres": eq.NewtonKrylov(),
    "newton-bicgstab": eq.NewtonKrylov(inner=eq.BiCGStab()),
}
KRYLOV = {"gmres": eq.GMRES(), "gmres-memory-3": eq.GMRES(memory=3), "bicgstab": eq.BiCGStab()}
SOLVERS = {**PLAIN, **ACCELERATED}


def declared_affine(f):
    """The same function, said to be affine."""

    @functools.wraps(f)
    def g(*args):
        return f(*args)

    g.affine = True
    return g


def assert_solved(case, sol, f=None):
    assert sol.converged.all()
    for found, known in zip(flatten(sol.value), flatten(case.answer), strict=True):
        assert found.shape == known.shape
        assert found.dtype == known.dtype
        torch.testing.assert_close(found, known, rtol=1e-8, atol=1e-8)
    again = true_residual(case.f, sol.value, *case.inputs)
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.05, atol=2e-14)
    assert (again <= TIGHT.relative).all()


def solve(case, solver, f=None, **options):
    with torch.no_grad():
        return eq.fixed_point(f or case.f, case.z0, *case.inputs, solver=solver, tolerance=TIGHT, **options)


@pytest.mark.parametrize(("problem", "name"), solvable(SOLVERS, PLAIN))
def test_reaches_the_known_answer(problem, name):
    case = CASES[problem]()
    with torch.no_grad():
        assert_solved(case, solve(case, SOLVERS[name]))


@pytest.mark.parametrize("name", KRYLOV)
@pytest.mark.parametrize("problem", AFFINE)
def test_krylov_reaches_the_known_answer_of_an_affine_problem(problem, name):
    case = CASES[problem]()
    with torch.no_grad():
        assert_solved(case, solve(case, KRYLOV[name], declared_affine(case.f)))


@pytest.mark.parametrize("name", ["anderson", "broyden", "newton-gmres"])
def test_knowing_that_f_is_affine_changes_no_answer(name):
    case = CASES["rotation"]()
    with torch.no_grad():
        assert_solved(case, solve(case, SOLVERS[name], declared_affine(case.f)))


def test_plain_iteration_fails_on_the_expansive_problem_and_says_so():
    case = CASES["expansive"]()
    sol = solve(case, eq.Picard(), on_failure="ignore")
    assert not sol.converged.any()
    assert torch.isfinite(sol.value).all()
    assert (sol.stats.residual > 0.1).all()


def test_enough_damping_makes_plain_iteration_converge():
    case = CASES["expansive"]()
    with torch.no_grad():
        assert_solved(case, solve(case, eq.Picard(damping=0.7)))


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_broyden_at_full_memory_ends_within_2n_steps(n, seed):
    """D. M. Gay (1979): Broyden's method solves an affine problem of dimension n in at most 2n steps."""
    matrix = randn(n, n, seed=seed)
    case = affine_case(0.9 * matrix / torch.linalg.matrix_norm(matrix, 2), batch=4)
    with torch.no_grad():
        sol = eq.fixed_point(
            case.f, case.z0, *case.inputs, solver=eq.Broyden(memory=2 * n + 1), tolerance=eq.Tolerance(relative=1e-9)
        )
    assert sol.converged.all()
    assert sol.stats.steps.max() <= 2 * n + 1  # the first evaluation is step 1


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("norm", [0.9, 5.0])
def test_gmres_ends_within_n_steps(n, norm):
    matrix = randn(n, n, seed=n)
    case = affine_case(norm * matrix / torch.linalg.matrix_norm(matrix, 2), batch=4, contractive=False)
    with torch.no_grad():
        sol = eq.fixed_point(
            declared_affine(case.f), case.z0, *case.inputs, solver=eq.GMRES(), tolerance=eq.Tolerance(relative=1e-9)
        )
    assert sol.converged.all()
    assert sol.stats.steps.max() <= n + 1
    torch.testing.assert_close(sol.value, case.answer, rtol=1e-6, atol=1e-6)


def test_gmres_passes_a_stagnation():
    """A cyclic shift leaves the residual at its first size until the last step: GMRES' worst case."""
    n = 6
    shift = torch.eye(n, dtype=DOUBLE).roll(1, dims=0)
    matrix = torch.eye(n, dtype=DOUBLE) - shift  # so that I - A is the shift
    b = torch.eye(n, dtype=DOUBLE)[:2]
    f = declared_affine(lambda z, b: z @ matrix.mT + b)
    sol = eq.fixed_point(f, torch.zeros(2, n, dtype=DOUBLE), b, solver=eq.GMRES(), trace=True)
    assert sol.converged.all()
    assert sol.stats.steps.max() <= n + 1
    torch.testing.assert_close(f(sol.value, b), sol.value)


def test_gmres_residual_never_grows():
    matrix = randn(12, 12, seed=4)
    case = affine_case(matrix, batch=3, contractive=False)
    gaps = []
    with torch.no_grad():
        eq.fixed_point(
            declared_affine(case.f),
            case.z0,
            *case.inputs,
            solver=eq.GMRES(),
            tolerance=eq.Tolerance(relative=1e-10),
            compact=False,
            callback=lambda progress: gaps.append((progress.image - progress.value).norm(dim=1)),
        )
    sizes = torch.stack(gaps)
    assert (sizes[1:] <= sizes[:-1] * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("n", [2, 4, 6])
def test_anderson_ends_like_gmres_on_an_affine_problem(n, kind):
    """H. Walker and P. Ni (2011): with full memory it is GMRES (type I: Arnoldi's method) and a plain step."""
    matrix = randn(n, n, seed=20 + n)
    case = affine_case(0.9 * matrix / torch.linalg.matrix_norm(matrix, 2), batch=3)
    with torch.no_grad():
        sol = eq.fixed_point(
            case.f,
            case.z0,
            *case.inputs,
            solver=eq.Anderson(memory=n, kind=kind, ridge=0.0),
            tolerance=eq.Tolerance(relative=1e-8),
        )
    assert sol.converged.all()
    assert sol.stats.steps.max() <= n + 2


def test_anderson_type_2_takes_the_steps_of_gmres():
    """Step k of Anderson is a plain step from the (k-1)st iterate of GMRES."""
    n = 6
    matrix = randn(n, n, seed=30)
    case = affine_case(0.8 * matrix / torch.linalg.matrix_norm(matrix, 2), batch=2)
    paths = {}
    for solver in (eq.Anderson(memory=n, ridge=0.0), eq.GMRES(memory=n)):
        path = paths[type(solver).__name__] = []
        with torch.no_grad():
            eq.fixed_point(
                declared_affine(case.f),
                case.z0,
                *case.inputs,
                solver=solver,
                tolerance=eq.Tolerance(relative=1e-12, max_steps=n),
                on_failure="ignore",
                compact=False,
                callback=lambda progress, path=path: path.append((progress.value, progress.image)),
            )
    for (z, _), (_, image) in zip(paths["Anderson"][1:], paths["GMRES"][:-1], strict=True):
        torch.testing.assert_close(z, image, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", KRYLOV.values(), ids=KRYLOV)
def test_krylov_solver_refuses_a_problem_not_known_to_be_affine(solver):
    case = CASES["network"]()
    with pytest.raises(TypeError, match=r"solves affine problems.*ImplicitGradient\(solver=.*f\.affine = True"):
        solve(case, solver)


@pytest.mark.parametrize("solver", KRYLOV.values(), ids=KRYLOV)
def test_krylov_solver_does_not_claim_a_tolerance_below_rounding(solver):
    """Its residual comes from a recurrence, which goes on shrinking when the true one no longer does."""
    A = 0.9 * torch.linalg.qr(torch.randn(20, 20))[0]
    b = torch.randn(3, 20)
    f = declared_affine(lambda z, b: z @ A.mT + b)
    tolerance = eq.Tolerance(relative=1e-12, max_steps=300)
    sol = eq.fixed_point(f, torch.zeros(3, 20), b, solver=solver, tolerance=tolerance, on_failure="ignore")
    again = true_residual(f, sol.value, b)
    assert not (sol.converged & ~sol.stats.rounded & (again > tolerance.relative)).any()
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.5, atol=1e-7)


@pytest.mark.parametrize("solver", KRYLOV.values(), ids=KRYLOV)
def test_krylov_solver_does_not_believe_a_false_claim_of_being_affine(solver):
    f = declared_affine(lambda z, b: 0.5 * torch.tanh(2 * z) + b)
    b = torch.randn(2, 3)
    sol = eq.fixed_point(f, torch.zeros(2, 3), b, solver=solver, on_failure="ignore")
    assert not (sol.converged & (true_residual(f, sol.value, b) > 1e-2)).any()


@pytest.mark.parametrize("name", SOLVERS)
def test_complex_state(name):
    """f(z, x) = i z / 2 + x: z* = x / (1 - i/2)."""
    x = torch.randn(3, 4, dtype=torch.complex128)
    sol = eq.fixed_point(lambda z, x: 0.5j * z + x, torch.zeros_like(x), x, solver=SOLVERS[name], tolerance=TIGHT)
    assert sol.value.dtype == torch.complex128
    torch.testing.assert_close(sol.value, x / (1 - 0.5j), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_state(name, dtype):
    """Solved to a few rounding units of the state; sums are wider."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
    eps = torch.finfo(dtype).eps
    sol = eq.fixed_point(
        lambda z, x: 0.5 * torch.cos(z) + x,
        torch.zeros_like(x),
        x,
        solver=SOLVERS[name],
        tolerance=eq.Tolerance(relative=4 * eps),
    )
    assert sol.value.dtype == dtype
    assert sol.stats.residual.dtype == torch.float32
    exact = eq.fixed_point(lambda z, x: 0.5 * torch.cos(z) + x, torch.zeros(3, 4), x.float())
    torch.testing.assert_close(sol.value.float(), exact.value, rtol=0, atol=10 * eps)


@pytest.mark.parametrize("name", SOLVERS)
def test_mixed_dtypes(name):
    """A float32 and a float64 leaf, each kept."""
    x = torch.randn(3, 2)

    def f(z, x):
        a, b = z
        return 0.5 * b.float() + x, 0.25 * a.double() + 1

    z0 = (torch.zeros(3, 2), torch.zeros(3, 2, dtype=DOUBLE))
    sol = eq.fixed_point(f, z0, x, solver=SOLVERS[name], tolerance=eq.Tolerance(relative=1e-6))
    assert [leaf.dtype for leaf in sol.value] == [torch.float32, DOUBLE]
    torch.testing.assert_close(sol.value[0], (x + 0.5) / 0.875, rtol=1e-5, atol=1e-5)


def conv_cell(weight):
    return lambda z, x: torch.tanh(torch.nn.functional.conv2d(z, weight, padding=1) + x)


@pytest.mark.parametrize("name", SOLVERS)
def test_channels_last_state(name):
    weight = 0.1 * torch.randn(3, 3, 3, 3, dtype=DOUBLE)
    f, x = conv_cell(weight), torch.randn(2, 3, 4, 5, dtype=DOUBLE)
    plain = eq.fixed_point(f, torch.zeros_like(x), x, solver=SOLVERS[name], tolerance=TIGHT)
    turned = x.to(memory_format=torch.channels_last)
    last = eq.fixed_point(f, torch.zeros_like(turned), turned, solver=SOLVERS[name], tolerance=TIGHT)
    assert last.value.is_contiguous(memory_format=torch.channels_last)
    assert plain.value.is_contiguous()
    torch.testing.assert_close(last.value, plain.value, rtol=1e-9, atol=1e-9)


def test_channels_last_start_of_a_contiguous_f():
    """The state follows the memory order of f; the answer does not."""
    x = torch.randn(2, 3, 4, 5, dtype=DOUBLE)
    z0 = torch.randn_like(x).to(memory_format=torch.channels_last)
    sol = eq.fixed_point(lambda z, x: (0.5 * z + x).contiguous(), z0, x, tolerance=TIGHT)
    torch.testing.assert_close(sol.value, 2 * x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 4, 4, 4)])
def test_complex_channels_last_state(shape):
    x = torch.randn(shape, dtype=torch.complex128).to(memory_format=torch.channels_last)
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, torch.zeros_like(x), x, tolerance=TIGHT)
    torch.testing.assert_close(sol.value, 2 * x, rtol=1e-9, atol=1e-9)


def test_channels_last_3d_state():
    x = torch.randn(2, 3, 2, 4, 5, dtype=DOUBLE).to(memory_format=torch.channels_last_3d)
    sol = eq.fixed_point(lambda z, x: 0.5 * z.flip(1) + x, torch.zeros_like(x), x, tolerance=TIGHT)
    torch.testing.assert_close(sol.value, (x + 0.5 * x.flip(1)) / 0.75, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_constant_f(name):
    """A Jacobian of zero, and a system that turns singular after one step."""
    x = torch.randn(3, 4, dtype=DOUBLE)
    sol = eq.fixed_point(lambda z, x: 1.0 * x, torch.zeros_like(x), x, solver=SOLVERS[name], tolerance=TIGHT)
    assert sol.converged.all()
    torch.testing.assert_close(sol.value, x)


@pytest.mark.parametrize("name", SOLVERS)
def test_start_at_the_answer_costs_one_evaluation(name):
    x = torch.randn(3, 4, dtype=DOUBLE)
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, 2 * x, x, solver=SOLVERS[name], tolerance=TIGHT)
    assert sol.stats.evaluations == 1
    assert sol.stats.steps.tolist() == [1, 1, 1]
    torch.testing.assert_close(sol.value, 2 * x, rtol=0, atol=0)


@pytest.mark.parametrize("name", SOLVERS)
def test_scale_of_the_problem_does_not_matter(name):
    """Relative tolerances and a ridge relative to the Gram matrix: numbers of size 1e-6 or 1e6 take the same steps."""
    case = CASES["network"]()
    weight = case.parameters[0].detach()
    x = torch.randn(3, 8, dtype=DOUBLE)
    steps = []
    for scale in (1e-6, 1.0, 1e6):
        f = lambda z, x, scale=scale: scale * torch.tanh((z / scale) @ weight.mT + x)
        sol = eq.fixed_point(f, torch.zeros_like(x), x, solver=SOLVERS[name], tolerance=eq.Tolerance(max_steps=200))
        assert sol.converged.all()
        steps.append(sol.stats.steps)
    assert (steps[0] - steps[1]).abs().max() <= 1
    assert (steps[2] - steps[1]).abs().max() <= 1


def test_accelerated_solvers_need_fewer_evaluations_than_plain_iteration():
    case = CASES["rotation"]()
    tolerance = eq.Tolerance(relative=1e-8, max_steps=600)
    counts = {}
    for name in ("picard", "anderson", "anderson-type-1", "broyden"):
        with torch.no_grad():
            sol = eq.fixed_point(case.f, case.z0, *case.inputs, solver=SOLVERS[name], tolerance=tolerance)
        counts[name] = sol.stats.evaluations
    assert all(10 * counts[name] < counts["picard"] for name in counts if name != "picard")


@pytest.mark.parametrize("name", SOLVERS)
def test_same_bits_twice(name):
    case = CASES["network"]()
    first, second = solve(case, SOLVERS[name]), solve(case, SOLVERS[name])
    assert torch.equal(per_sample(first.value), per_sample(second.value))


def test_solvers_are_frozen_options():
    solver = eq.Anderson(memory=4)
    with pytest.raises(AttributeError):
        solver.memory = 3
    assert solver == eq.Anderson(memory=4) != eq.Anderson(memory=5)
    assert "memory=4" in repr(solver)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_real_and_complex_leaves_side_by_side(batch):
    """One real number before the complex ones puts them at an odd place in the rows."""
    x = torch.randn(batch, 2, dtype=torch.complex128)
    f = lambda z, x: (0.5 * z[0] + 1, 0.5j * z[1] + x)
    z0 = (torch.zeros(batch, 1, dtype=DOUBLE), torch.zeros_like(x))
    sol = eq.fixed_point(f, z0, x, tolerance=TIGHT)
    torch.testing.assert_close(sol.value[0], torch.full((batch, 1), 2.0, dtype=DOUBLE))
    torch.testing.assert_close(sol.value[1], x / (1 - 0.5j))

"""Numbers at the ends of their range, and tolerances below their rounding."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from corpus import true_residual
from equipoise.problem.layout import residual_at, row_units, scaled_row_norms

N = 12
SOLVERS = {
    "picard": eq.Picard(),
    "anderson": eq.Anderson(),
    "anderson-type-1": eq.Anderson(kind=1),
    "broyden": eq.Broyden(),
    "newton": eq.NewtonKrylov(),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
ADJOINTS = [None, eq.GMRES(), eq.BiCGStab(), eq.Broyden(), eq.Picard()]


def seeded(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


WEIGHT = seeded(N, N, seed=1)
WEIGHT = 0.8 * WEIGHT / torch.linalg.matrix_norm(WEIGHT, 2)
X = seeded(4, N, seed=2)
EXACT = torch.linalg.solve(torch.eye(N, dtype=torch.float64) - WEIGHT, X.mT).mT


# Norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-37, -30, -20, 0, 20, 30, 37])
def test_scaled_norms_are_exact_wherever_numbers_are(dtype, exponent):
    rows = (torch.tensor([[3.0, 4.0, 0.0], [-4.0, 3.0, 0.0]], dtype=torch.float64) * 10.0**exponent).to(dtype)
    exact = rows.double().square().sum(dim=1).sqrt()
    torch.testing.assert_close(scaled_row_norms(rows).double(), exact, rtol=1e-6, atol=0)


def test_scaled_norms_of_special_rows():
    rows = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
    assert scaled_row_norms(rows)[0] == 0
    assert torch.isinf(scaled_row_norms(rows)[1])
    assert torch.isnan(scaled_row_norms(rows)[2])
    assert scaled_row_norms(torch.zeros(3, 0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 2e38])
def test_residuals_do_not_depend_on_the_scale(scale):
    z = scale * torch.tensor([[1.0, 0.5]])
    torch.testing.assert_close(residual_at(z, 1.001 * z), torch.tensor([0.001 / 1.001]), rtol=1e-3, atol=0)


def test_ordinary_numbers_keep_their_row_units():
    rows = torch.tensor([[1e-8, 0.0], [1e12, 1.0]])
    assert row_units(rows, rows) is None
    assert row_units(rows, torch.zeros(2, 2)) is None  # nothing is known of a zero
    assert row_units(rows, torch.tensor([[1e-25, 0.0], [1.0, 1.0]])) is None  # the state is ordinary
    unit = row_units(torch.zeros(2, 2), torch.tensor([[1e-25, 0.0], [1.0, 1.0]]))
    assert 1e-25 <= unit[0] <= 2e-25
    assert math.log2(unit[0]).is_integer()
    assert unit[1] == 1


# Solving


@every_solver
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-23, 1e-15, 1e15, 1e25, 1e36])
def test_a_problem_is_solved_at_every_scale(solver, scale):
    """In as many steps, as its numbers are multiplied by a power of ten."""
    x, weight = (scale * X).float(), WEIGHT.float()
    f = lambda z, x: z @ weight.mT + x
    sol = eq.fixed_point(f, torch.zeros(4, N), x, solver=solver)
    ordinary = eq.fixed_point(f, torch.zeros(4, N), X.float(), solver=solver)
    assert sol.converged.all()
    assert (sol.stats.steps - ordinary.stats.steps).abs().max() <= 1
    torch.testing.assert_close(sol.value.double() / scale, EXACT, rtol=1e-2, atol=2e-3)


@every_solver
def test_a_tiny_sample_beside_an_ordinary_one(solver):
    scale = torch.tensor([[1.0], [1e-27], [1e25], [1.0]], dtype=torch.float64)
    x, weight = (scale * X).float(), WEIGHT.float()
    sol = eq.fixed_point(lambda z, x: z @ weight.mT + x, torch.zeros(4, N), x, solver=solver)
    assert sol.converged.all()
    torch.testing.assert_close(sol.value.double() / scale, EXACT, rtol=1e-2, atol=2e-3)


@every_solver
def test_a_state_that_shrinks_out_of_range_is_not_called_solved_early(solver):
    tolerance = eq.Tolerance(max_steps=300, patience=None)
    x = torch.full((2, 3), 1e-25)
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, torch.ones(2, 3), x, solver=solver, tolerance=tolerance)
    assert sol.converged.all()
    torch.testing.assert_close(sol.value / 1e-25, torch.full((2, 3), 2.0), rtol=1e-3, atol=0)


def test_an_absolute_tolerance_keeps_its_unit():
    x, weight = (1e-27 * X).float(), WEIGHT.float()
    tolerance = eq.Tolerance(relative=0.0, absolute=1e-30, max_steps=100)
    f = lambda z, x: z @ weight.mT + x
    sol = eq.fixed_point(f, torch.zeros(4, N), x, tolerance=tolerance)
    gap = (f(sol.value, x) - sol.value).double().norm(dim=1)
    assert sol.converged.all()
    assert (gap <= 1.1e-30).all()
    assert (gap >= 1e-34).all()  # and it is not asked for more


def test_a_callback_sees_values_in_their_own_row_units():
    x, weight, seen = (1e-27 * X).float(), WEIGHT.float(), []
    f = lambda z, x: z @ weight.mT + x
    sol = eq.fixed_point(f, torch.zeros(4, N), x, callback=lambda p: seen.append((p.rows, p.value, p.image)))
    rows, value, image = seen[-1]
    torch.testing.assert_close(value, sol.value[rows], rtol=1e-3, atol=0)
    torch.testing.assert_close(image, f(value, x[rows]), rtol=1e-4, atol=1e-32)


@pytest.mark.parametrize("solver", ADJOINTS, ids=repr)
@pytest.mark.parametrize("scale", [1e-36, 1e-23, 1e-12, 1e20, 1e30])
def test_the_gradient_of_a_scaled_loss_is_the_scaled_gradient(solver, scale):
    def gradient(scale):
        weight = WEIGHT.float().requires_grad_()
        sol = eq.fixed_point(
            lambda z, x: torch.tanh(z @ weight.mT + x),
            torch.zeros(4, N),
            X.float(),
            gradient=eq.ImplicitGradient(solver=solver),
            tolerance=eq.Tolerance(1e-5),
        )
        (scale * sol.value.sum()).backward()
        assert sol.backward.converged.all()
        return weight.grad.double() / scale

    torch.testing.assert_close(gradient(scale), gradient(1.0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("solver", [eq.GMRES(), eq.BiCGStab()], ids=repr)
def test_half_precision_is_never_converged_to_infinity(solver):
    """The state overflows on its way; the recurrence does not know."""

    def f(z, x):
        return 0.999 * z + x

    f.affine = True
    x = torch.full((4, 3), 300.0, dtype=torch.float16)
    sol = eq.fixed_point(f, torch.zeros_like(x), x, solver=solver, on_failure="ignore")
    assert torch.isfinite(sol.value).all()
    assert not sol.converged.any()


# Rounding


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.W, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, z, x):
        return self.norm(torch.relu(self.W(z) + x))


GENERAL = {name: solver for name, solver in SOLVERS.items() if name != "newton"}


@pytest.mark.parametrize("solver", GENERAL.values(), ids=GENERAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure"])
def test_default_tolerance_is_met_to_rounding_in_half_precision(solver, dtype, autocast):
    f, x = Cell(), torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    if not autocast:
        f, x = f.to(dtype), x.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        sol = eq.fixed_point(f, torch.zeros_like(x), x, solver=solver)
        with torch.no_grad():
            again = true_residual(lambda z, x: f(z, x).float(), sol.value.detach(), x)
    sol.value.float().square().sum().backward()
    assert sol.converged.all()
    assert sol.backward.converged.all()
    assert sol.stats.steps.max() < 50
    limit = 2 * torch.finfo(dtype).eps
    assert (sol.stats.residual <= limit).all()
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.05, atol=1e-5)
    if dtype == torch.bfloat16:
        assert sol.stats.rounded.any()
        assert "to rounding" in str(sol)
        assert "below rounding" in str(eq.diagnose(sol))


def test_failure_in_half_precision_names_its_rounding():
    f = lambda z, x: -1.5 * z + x
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    tolerance = eq.Tolerance(max_steps=5)
    with pytest.warns(eq.ConvergenceWarning, match="tolerance is below the rounding error of the dtype"):
        eq.fixed_point(f, torch.zeros_like(x), x, solver=eq.Picard(), tolerance=tolerance)


def test_a_tolerance_of_zero_takes_all_steps():
    weight = WEIGHT.float()
    tolerance = eq.Tolerance(relative=0.0, max_steps=70, patience=None)
    sol = eq.fixed_point(
        lambda z, x: torch.tanh(z @ weight.mT + x),
        torch.zeros(4, N),
        X.float(),
        tolerance=tolerance,
        solver=eq.Picard(0.1),
        on_failure="ignore",
    )
    assert sol.stats.rounded is None
    assert (sol.stats.steps[~sol.converged] == 70).all()

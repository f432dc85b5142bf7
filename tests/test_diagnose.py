"""Diagnosis in words, solver comparison, gradient check."""

import pickle

import pytest
import torch
from torch import nn

import equipoise as eq


class Cell(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.W = nn.Linear(12, 12)
        self.U = nn.Linear(12, 12)
        nn.init.orthogonal_(self.W.weight)
        self.gain = gain

    def forward(self, z, x):
        return torch.tanh(self.gain * self.W(z) + self.U(x))


def solve(f, x=None, **options):
    x = torch.randn(6, 12) if x is None else x
    return eq.fixed_point(f, torch.zeros(1, 12), x, on_failure="ignore", **options)


def test_success_reports_the_radius_and_what_plain_iteration_would_take():
    diagnosis = eq.diagnose(solve(Cell(0.5)))
    assert "All 6 samples converged" in str(diagnosis)
    assert "Spectral radius" in str(diagnosis)
    assert (diagnosis.radius < 1).all()


def test_a_map_that_is_not_contractive_is_named_so_with_its_radius():
    f = lambda z, x: -1.3 * z + x
    diagnosis = eq.diagnose(solve(f, solver=eq.Picard()))
    assert "Not contractive" in str(diagnosis)
    assert "about 1.30" in str(diagnosis)


def test_too_few_steps_are_distinguished_from_divergence():
    diagnosis = str(eq.diagnose(solve(lambda z, x: 0.99 * z + x, solver=eq.Picard())))
    assert "Contractive here but slow" in diagnosis
    assert "0.990" in diagnosis


def test_a_tolerance_below_rounding_is_named_so():
    diagnosis = str(eq.diagnose(solve(Cell(0.5), tolerance=eq.Tolerance(1e-12, max_steps=200))))
    assert "below rounding" in diagnosis
    assert "float64" in diagnosis


def test_non_finite_inputs_and_weights_are_named():
    x = torch.randn(6, 12)
    x[2, 3] = torch.nan
    diagnosis = eq.diagnose(solve(Cell(), x))
    assert "1 of 6 samples failed (1 NONFINITE)" in str(diagnosis)
    assert "inputs[0]" in str(diagnosis)
    assert diagnosis.samples.tolist() == [2]
    f = Cell()
    f.U.bias.data[0] = torch.inf
    f.W.weight.data[0] = torch.nan
    assert "'W.weight' of f, 'U.bias' of f" in str(eq.diagnose(solve(f)))


def test_nan_from_inside_f_is_distinguished_from_nan_inputs():
    diagnosis = str(eq.diagnose(solve(lambda z, x: torch.log(-1 - z.abs()) + x)))
    assert "look inside f" in diagnosis


def test_noise_inside_f_is_found():
    with pytest.warns(eq.ImpureFunctionWarning, match="not a function of z"):
        sol = solve(lambda z, x: 0.5 * z + x + 0.1 * torch.randn_like(z))
    assert "f is not a function of z" in str(eq.diagnose(sol))


def test_diagnosis_of_closures_and_of_empty_batches():
    x = torch.randn(6, 12)
    sol = eq.fixed_point(lambda z: -2 * z + x, torch.zeros(6, 12), solver=eq.Picard(), on_failure="ignore")
    assert "Not contractive" in str(eq.diagnose(sol))
    empty = eq.fixed_point(lambda z, x: z + x, torch.zeros(0, 3), torch.zeros(0, 3))
    assert "empty batch" in str(eq.diagnose(empty))


def test_a_pickled_solution_says_why_it_cannot_be_diagnosed():
    sol = pickle.loads(pickle.dumps(solve(lambda z, x: 0.5 * z + x)))
    with pytest.raises(ValueError, match="pickled"):
        eq.diagnose(sol)


def test_comparison_prints_a_table_with_a_row_per_solver(capsys):
    solvers = [eq.Picard(), eq.Anderson(memory=3), eq.Broyden()]
    table = eq.compare_solvers(Cell(0.7), torch.zeros(1, 12), torch.randn(5, 12), solvers=solvers, repeats=1)
    printed = capsys.readouterr().out
    assert "Anderson(memory=3)" in printed
    assert "5/5" in printed
    assert [row["solver"] for row in table.rows] == solvers
    assert min(row["time"] for row in table.rows if row["converged"] == 5) == 1.0


def test_default_comparison_names_every_general_solver(capsys):
    eq.compare_solvers(Cell(0.7), torch.zeros(1, 12), torch.randn(2, 12), repeats=1)
    printed = capsys.readouterr().out
    for name in ("Picard", "Anderson", "Broyden", "NewtonKrylov"):
        assert name in printed


def test_gradient_check_passes_implicit_and_fails_one_step_gradients():
    f, z0, x = Cell(0.9), torch.zeros(1, 12), torch.randn(4, 12)
    good = eq.check_gradients(f, z0, x, tolerance=eq.Tolerance(1e-6, max_steps=200))
    assert good.ok
    assert set(good.errors) == {"inputs[0]", *(f"parameter {n!r}" for n, _ in f.named_parameters())}
    assert "agree" in str(good)
    bad = eq.check_gradients(f, z0, x, gradient=eq.PhantomGradient())
    assert not bad.ok
    assert "WRONG" in str(bad)


@pytest.mark.parametrize("seed", range(8))
def test_gradient_check_passes_in_single_precision(seed):
    """A function that captures its weights runs in their precision, whatever direction is drawn."""
    torch.manual_seed(seed)
    W = torch.nn.Linear(32, 32)
    W.weight.data *= 0.5
    x = torch.randn(8, 32)
    check = eq.check_gradients(
        lambda z, x: torch.tanh(W(z) + x), torch.zeros(1, 32), x, tolerance=eq.Tolerance(1e-6, max_steps=200), seed=seed
    )
    assert check.ok, check


def test_gradient_check_covers_captured_tensors_and_does_not_change_them():
    W = (torch.randn(3, 3) / 4).requires_grad_()
    before = W.detach().clone()
    check = eq.check_gradients(lambda z, x: torch.tanh(z @ W + x), torch.zeros(1, 3), torch.randn(4, 3))
    assert check.ok
    assert "captured 'W'" in check.errors
    assert torch.equal(W, before)


def test_a_solver_that_does_nothing_is_reported():
    x = torch.randn(6, 12)
    ignoring = lambda z, x: torch.tanh(x) + 0 * z
    assert "The solver does nothing: f does not depend on z" in str(eq.diagnose(solve(ignoring, x)))
    at_once = eq.fixed_point(lambda z, x: 0.5 * z + 0 * x, torch.zeros(6, 12), x)
    assert "within the tolerance at z0 already" in str(eq.diagnose(at_once))
    assert "does nothing" not in str(eq.diagnose(solve(Cell(), x)))


def test_a_coupled_solve_is_not_called_slow():
    mixing = lambda z, x: 0.5 * torch.tanh(z + z.mean(0)) + x
    x = torch.tensor([[0.5], [1.0], [1.5], [2.0]])
    text = str(eq.diagnose(eq.fixed_point(mixing, torch.zeros(4, 1), x, on_failure="ignore")))
    assert "4 COUPLED" in text
    assert "slow" not in text

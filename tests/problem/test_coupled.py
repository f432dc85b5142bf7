"""An f that mixes the samples of a batch is named, and the residual reported is always that of the value returned."""

import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from corpus import true_residual
from equipoise import Result

BATCH, N = 20, 8
SOLVERS = {
    "picard": eq.Picard(),
    "anderson": eq.Anderson(),
    "broyden": eq.Broyden(),
    "newton": eq.NewtonKrylov(),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def seeded(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = seeded(BATCH, N, seed=1) * torch.logspace(-2, 1, BATCH)[:, None]  # samples of different difficulty
Z = torch.zeros(BATCH, N)
WEIGHT = seeded(N, N, seed=2)
WEIGHT = 0.7 * WEIGHT / torch.linalg.matrix_norm(WEIGHT, 2)
ADJACENCY = torch.rand(BATCH, BATCH, generator=torch.Generator().manual_seed(3))
ADJACENCY = 0.8 * ADJACENCY / ADJACENCY.sum(dim=1, keepdim=True)
POSITIONS = seeded(100, N, seed=4)

MIXING = {  # what users write; the first two mix whatever is left out, the others only when samples are
    "batch mean": lambda z, x: 0.5 * torch.tanh(z @ WEIGHT + z.mean(dim=0)) + x,
    "neighbour": lambda z, x: 0.9 * torch.tanh(z.roll(1, dims=0) @ WEIGHT) + x,
    "largest input": lambda z, x: 0.9 * torch.tanh(z @ WEIGHT + x) + x / x.abs().max(),
    "positions": lambda z, x: 0.9 * torch.tanh(z @ WEIGHT) + x + 0.1 * len(z) * POSITIONS[: len(z)],
}
each_mixing = pytest.mark.parametrize("f", MIXING.values(), ids=MIXING)


def attention(*, batch_first):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(N, 2, batch_first=batch_first).requires_grad_(False)

    def f(z, x):
        given = z + x
        return 0.3 * layer(given, given, given)[0] + x

    return f


def assert_true(sol, f, x):
    with torch.no_grad():
        again = true_residual(f, sol.value.detach(), x)
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.02, atol=1e-6)


@every_solver
@each_mixing
@pytest.mark.parametrize("compact", [True, False], ids=["gathering", "compact=False"])
@pytest.mark.parametrize("needs_gradient", [False, True], ids=["no gradient", "gradient"])
def test_the_residual_is_that_of_the_value(f, solver, compact, needs_gradient):
    """And no sample whose true residual is above the tolerance is called converged."""
    x = X.clone().requires_grad_(needs_gradient)
    sol = eq.fixed_point(f, Z, x, solver=solver, compact=compact, on_failure="ignore")
    assert_true(sol, f, x)
    assert (sol.stats.residual[sol.converged] <= 1.01e-4).all()


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
@pytest.mark.parametrize("name", ["batch mean", "neighbour"])
def test_samples_that_depend_on_each_other_are_named(solver, name):
    with pytest.warns(eq.ConvergenceWarning, match=r"COUPLED.*batch_first=True.*coupled=True"):
        sol = eq.fixed_point(MIXING[name], Z, X, solver=solver)
    assert sol.result.tolist() == [Result.COUPLED] * BATCH
    assert "coupled=True" in str(eq.diagnose(sol))


@pytest.mark.parametrize("name", ["largest input", "positions"])
def test_inputs_that_depend_on_each_other_are_named_when_samples_are_left_out(name):
    sol = eq.fixed_point(MIXING[name], Z, X, on_failure="ignore")
    assert sol.result.tolist() == [Result.COUPLED] * BATCH


@every_solver
@each_mixing
def test_coupled_solves_the_batch_as_one_problem(f, solver):
    tolerance = eq.Tolerance(relative=1e-5, max_steps=200)
    sol = eq.fixed_point(f, Z, X, solver=solver, coupled=True, tolerance=tolerance)
    assert sol.converged.shape == (BATCH,)
    assert sol.converged.all()
    image = f(sol.value, X)
    residual = (image - sol.value).norm() / image.norm()
    torch.testing.assert_close(sol.stats.residual, residual.expand(BATCH), rtol=0.02, atol=1e-7)
    assert len(sol.stats.steps.unique()) == 1


def test_graph_network_with_gradients_against_the_dense_solve():
    A = ADJACENCY.double()
    x = X.double().requires_grad_()
    weight = WEIGHT.double().requires_grad_()
    f = lambda z, x: A @ z @ weight + x
    tolerance = eq.Tolerance(relative=1e-12, max_steps=200)
    sol = eq.fixed_point(f, Z.double(), x, coupled=True, tolerance=tolerance)
    system = torch.eye(BATCH * N, dtype=torch.float64) - torch.kron(A, weight.T.contiguous())
    exact = torch.linalg.solve(system, x.reshape(-1)).reshape(BATCH, N)
    torch.testing.assert_close(sol.value, exact)
    cotangent = seeded(BATCH, N, seed=5).double()
    found = torch.autograd.grad((cotangent * sol.value).sum(), [x, weight])
    expected = torch.autograd.grad((cotangent * exact).sum(), [x, weight])
    torch.testing.assert_close(found, expected)
    assert sol.backward.converged.tolist() == [True] * BATCH
    assert sol.adjoint.shape == (BATCH, N)


def test_coupled_second_derivatives():
    A, x = ADJACENCY[:3, :3].double(), X[:3, :2].double().requires_grad_()
    tolerance = eq.Tolerance(relative=1e-13, max_steps=300, patience=None)
    solve = lambda x: (
        eq.fixed_point(
            lambda z, x: torch.tanh(A @ z + x), torch.zeros(3, 2).double(), x, coupled=True, tolerance=tolerance
        ).value
    )
    assert torch.autograd.gradcheck(solve, x)
    assert torch.autograd.gradgradcheck(solve, x)


@pytest.mark.parametrize(
    "rule", [eq.ImplicitGradient(), eq.ImplicitGradient(solver=eq.GMRES()), eq.PhantomGradient(30)], ids=repr
)
def test_every_rule_differentiates_a_coupled_problem(rule):
    x = X.double().requires_grad_()
    tolerance = eq.Tolerance(relative=1e-9, max_steps=300)
    f = lambda z, x: 0.5 * torch.tanh(z @ WEIGHT.double() + z.mean(dim=0)) + x
    sol = eq.fixed_point(f, Z.double(), x, coupled=True, gradient=rule, tolerance=tolerance)
    (found,) = torch.autograd.grad(sol.value.square().sum(), x)
    unrolled = eq.fixed_point(f, Z.double(), x, coupled=True, gradient=eq.UnrolledGradient(200), tolerance=tolerance)
    (expected,) = torch.autograd.grad(unrolled.value.square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_edges_of_a_graph_are_inputs_of_another_size():
    source, target = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 0, 1])
    weight = torch.tensor([0.3, 0.2, 0.4, 0.1])

    def f(z, x, source, target, weight):
        return x + torch.zeros_like(z).index_add(0, target, weight[:, None] * z[source])

    x = X[:3]
    with pytest.raises(ValueError, match="coupled=True"):
        eq.fixed_point(f, Z[:3], x, source, target, weight)
    sol = eq.fixed_point(f, Z[:3], x, source, target, weight, coupled=True, tolerance=eq.Tolerance(1e-6))
    dense = torch.zeros(3, 3).index_put((target, source), weight, accumulate=True)
    torch.testing.assert_close(sol.value, torch.linalg.solve(torch.eye(3) - dense, x), rtol=1e-4, atol=1e-5)
    assert sol.converged.tolist() == [True] * 3


def test_a_sparse_input_serves_a_coupled_problem():
    sparse = ADJACENCY.to_sparse()
    sol = eq.fixed_point(lambda z, x, A: 0.5 * (A @ z) + x, Z, X, sparse, coupled=True)
    assert sol.converged.all()


def test_a_coupled_layer():
    layer = eq.Equilibrium(MIXING["batch mean"], coupled=True)
    solution = layer.solve(X)
    assert solution.converged.all()
    steps = eq.FixedSteps(layer, steps=60, solver=eq.Picard())
    torch.testing.assert_close(steps(X), solution.value, rtol=1e-2, atol=1e-3)
    assert "converged" in str(eq.diagnose(solution))


def test_coupled_tuple_states_of_different_sizes():
    f = lambda z, x: (0.3 * z[1].mean(dim=0) + x, 0.2 * torch.tanh(z[1]) + 0.1 * z[0][:2, :3])
    sol = eq.fixed_point(f, (torch.zeros(4, 3), torch.zeros(2, 3)), X[:4, :3], coupled=True)
    assert sol.value[0].shape == (4, 3)
    assert sol.value[1].shape == (2, 3)
    assert sol.converged.tolist() == [True] * 4


def test_coupled_needs_a_general_solver():
    operator = eq.operators.MonotoneLinear(N)
    problem = eq.operators.MonotoneProblem(operator, "relu")
    with pytest.raises(TypeError, match="coupled=True.*PeacemanRachford.*use Anderson"):
        eq.fixed_point(problem, Z, X, solver=eq.PeacemanRachford(), coupled=True)


# Layers that take the batch for a sequence


def test_sequence_first_attention_is_named_at_the_door():
    x = X[:, None].repeat(1, 3, 1)
    z = torch.zeros_like(x)
    with pytest.warns(eq.ImpureFunctionWarning, match="MultiheadAttention with batch_first=False.*coupled=True"):
        sol = eq.fixed_point(attention(batch_first=False), z, x, on_failure="ignore")
    assert_true(sol, attention(batch_first=False), x)
    assert not sol.converged.any()


def test_attention_within_a_sample_is_not_accused():
    x = X[:, None].repeat(1, 3, 1)
    f = attention(batch_first=False)
    turned = lambda z, x: f(z.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in (attention(batch_first=True), turned):
            assert eq.fixed_point(cell, torch.zeros_like(x), x).converged.all()


def test_a_coupled_attention_layer_is_solved():
    x = 0.3 * X[:, None].repeat(1, 3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tolerance = eq.Tolerance(relative=1e-4, max_steps=200)
        sol = eq.fixed_point(attention(batch_first=False), torch.zeros_like(x), x, coupled=True, tolerance=tolerance)
    assert sol.converged.all()


def test_batch_normalisation_in_training_mode_is_not_called_converged():
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(N)
    f = lambda z, x: 0.5 * layer(z + x) @ WEIGHT + x
    with pytest.warns(eq.ImpureFunctionWarning, match="BatchNorm1d"):
        sol = eq.fixed_point(f, Z, X, on_failure="ignore", compact=False)
    with torch.no_grad():
        again = true_residual(f, sol.value, X)
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.02, atol=1e-6)
    assert (sol.stats.residual[sol.converged] <= 1.01e-4).all()


# What it costs


def test_where_nothing_was_frozen_nothing_is_evaluated_again():
    x = X[:1].repeat(6, 1)
    calls = []

    def f(z, x):
        calls.append(len(z))
        return torch.tanh(z @ WEIGHT) + x

    sol = eq.fixed_point(f, Z[:6], x, solver=eq.Picard())
    assert len(sol.stats.steps.unique()) == 1
    assert len(calls) == sol.stats.evaluations == sol.stats.steps.max()


def test_otherwise_it_costs_one_evaluation_and_none_with_gradients():
    calls = []

    def f(z, x):
        calls.append(len(z))
        return torch.tanh(z @ WEIGHT) + x

    sol = eq.fixed_point(f, Z, X, solver=eq.Picard())
    assert len(calls) == sol.stats.evaluations == sol.stats.steps.max() + 1
    calls.clear()
    eq.fixed_point(f, Z, X.clone().requires_grad_(), solver=eq.Picard())
    assert len(calls) == sol.stats.evaluations  # the record that gradients need is the one that is measured


def test_the_backward_pass_is_measured_together_too():
    """A Jacobian that mixes samples, where the values do not show it: they stand still."""
    z0 = torch.zeros(6, 3)
    x = torch.zeros(6, 3, requires_grad=True)
    f = lambda z, x: 0.9 * torch.sin(z.roll(1, dims=0)) + x
    sol = eq.fixed_point(f, z0, x)
    assert sol.converged.all()
    loss = (torch.logspace(-4, 2, 6)[:, None] * sol.value).sum()
    with pytest.warns(eq.ConvergenceWarning, match="backward solve failed.*COUPLED"):
        loss.backward()
    assert (sol.backward.result == Result.COUPLED).all()

"""The reversible gradient is that of its unrolled steps, in memory that does not grow with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad, gradcheck

import equipoise as eq
from corpus import DOUBLE, randn
from equipoise import Result
from peak_memory import peak_memory

N = 4
IGNORE = {"on_failure": "ignore"}


def leaf(tensor):
    return tensor.clone().requires_grad_()


def cell(w, b=0.0):
    return lambda z, x: torch.tanh(z @ w.mT + x + b)


def by_hand(f, z0, x, steps, damping):
    """The states z before and after every step, recorded."""
    y = z = z0
    states = [z]
    for _ in range(steps):
        y = damping * y + (1 - damping) * f(z, x)
        z = damping * z + (1 - damping) * f(y, x)
        states.append(z)
    return states


@given(steps=st.integers(1, 8), damping=st.floats(0.4, 0.9), scale=st.floats(0.1, 0.6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_gradient_is_that_of_the_unrolled_iteration(steps, damping, scale, seed):
    w, x, z0 = leaf(scale * randn(N, N, seed=seed)), leaf(randn(3, N, seed=seed + 1)), leaf(randn(3, N, seed=seed + 2))
    rule = eq.ReversibleGradient(steps, damping=damping)
    sol = eq.fixed_point(cell(w), z0, x, gradient=rule, **IGNORE)
    known = by_hand(cell(w), z0, x, steps, damping)[-1]
    torch.testing.assert_close(sol.value, known, rtol=1e-13, atol=1e-13)
    v = randn(3, N, seed=seed + 3)
    tolerance = 1e-13 * (3 / damping) ** steps  # what the way back may lose
    for a, b in zip(grad(sol.value, (w, x, z0), v), grad(known, (w, x, z0), v), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert sol.backward.converged.all()
    assert (sol.backward.residual <= tolerance).all()


def test_finite_differences():
    w, x, z0 = leaf(0.4 * randn(N, N, seed=1)), leaf(randn(2, N, seed=2)), leaf(randn(2, N, seed=3))
    solve = lambda w, x, z0: eq.fixed_point(cell(w), z0, x, gradient=eq.ReversibleGradient(6), **IGNORE).value
    assert gradcheck(solve, (w, x, z0))


def test_everything_that_f_depends_on_gets_a_gradient():
    """Parameters behind weight normalisation, captured results of other layers, nested inputs, tuple states."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = eq.WeightNorm(nn.Linear(N, N))

        def forward(self, z, x):
            a, b = z
            return torch.tanh(self.linear(b) + x[0]), 0.5 * a + x[1] + shift

    torch.manual_seed(0)
    f, raw, x = Cell().double(), leaf(randn(N, seed=5)), (leaf(randn(3, N, seed=6)), leaf(randn(3, N, seed=7)))
    shift = raw.square()
    z0 = (torch.zeros(3, N, dtype=DOUBLE),) * 2
    sol = eq.fixed_point(f, z0, x, gradient=eq.ReversibleGradient(5), **IGNORE)
    y = z = z0
    for _ in range(5):
        y = tuple(0.5 * a + 0.5 * b for a, b in zip(y, f(z, x), strict=True))
        z = tuple(0.5 * a + 0.5 * b for a, b in zip(z, f(y, x), strict=True))
    sources = [raw, *x, *f.parameters()]
    loss = lambda value: value[0].square().sum() + (value[1] ** 3).sum()
    for a, b in zip(grad(loss(sol.value), sources), grad(loss(z), sources), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_single_precision_is_exact_to_rounding():
    """States in single precision would lose a digit at about every third step back."""
    torch.manual_seed(0)
    w, x = nn.Parameter(0.3 * torch.randn(N, N)), torch.randn(8, N)
    sol = eq.fixed_point(cell(w), torch.zeros(1, N), x, gradient=eq.ReversibleGradient(30), **IGNORE)
    known = by_hand(cell(w), torch.zeros(8, N), x, 30, 0.5)[-1]
    torch.testing.assert_close(grad(sol.value.sum(), w)[0], grad(known.sum(), w)[0], rtol=1e-4, atol=1e-5)
    assert (sol.backward.residual < 1e-5).all()


def test_the_value_is_the_same_without_gradients_and_converges_to_the_equilibrium():
    w, x = leaf(0.1 * randn(N, N, seed=1)), randn(3, N, seed=2)
    options = {"gradient": eq.ReversibleGradient(20), "tolerance": eq.Tolerance(1e-5)}
    sol = eq.fixed_point(cell(w), torch.zeros(1, N, dtype=DOUBLE), x, **options)
    with torch.no_grad():
        again = eq.fixed_point(cell(w), torch.zeros(1, N, dtype=DOUBLE), x, **options)
    assert torch.equal(sol.value, again.value)
    assert sol.converged.all()
    exact = eq.fixed_point(cell(w), torch.zeros(1, N, dtype=DOUBLE), x, tolerance=eq.Tolerance(1e-12, max_steps=200))
    torch.testing.assert_close(sol.value, exact.value, rtol=1e-5, atol=1e-5)
    a, b = (grad(s.value.sum(), w)[0] for s in (sol, exact))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_statistics_and_trace():
    w, x = leaf(0.4 * randn(N, N, seed=1)), randn(3, N, seed=2)
    z0 = torch.zeros(1, N, dtype=DOUBLE)
    sol = eq.fixed_point(cell(w), z0, x, gradient=eq.ReversibleGradient(6), trace=True, **IGNORE)
    assert sol.stats.evaluations == 13  # two a step, and one to measure the residual
    assert sol.stats.steps.tolist() == [7] * 3
    assert sol.stats.trace.shape == (7, 3)
    states = by_hand(cell(w), z0.expand(3, N), x, 6, 0.5)
    known = [(cell(w)(z, x) - z).norm(dim=1) / cell(w)(z, x).norm(dim=1) for z in states]
    torch.testing.assert_close(sol.stats.trace, torch.stack(known).detach())
    sol.value.sum().backward()
    assert sol.backward.evaluations == 24
    assert sol.backward.steps.tolist() == [6] * 3


def test_lost_digits_are_reported():
    w, x = leaf(0.3 * randn(N, N, seed=1)), randn(3, N, seed=2)
    sol = eq.fixed_point(cell(w), torch.zeros(1, N, dtype=DOUBLE), x, gradient=eq.ReversibleGradient(40, damping=0.05))
    with pytest.warns(eq.ConvergenceWarning, match=r"DRIFTED.*take fewer steps"):
        sol.value.sum().backward()
    assert (sol.backward.result == Result.DRIFTED).any()


@pytest.mark.filterwarnings("ignore::equipoise.ImpureFunctionWarning")
def test_an_f_that_changes_is_reported():
    f = lambda z, x: 0.5 * z + x + torch.rand(()).item()
    x = leaf(randn(2, N, seed=2))
    rule = eq.ReversibleGradient(3)
    sol = eq.fixed_point(f, torch.zeros(1, N, dtype=DOUBLE), x, gradient=rule, on_failure="ignore")
    sol.value.sum().backward()
    assert sol.backward.result.tolist() == [Result.DRIFTED] * 2


def test_a_bad_sample_spoils_no_gradient():
    w, x = leaf(0.3 * randn(N, N, seed=1)), randn(4, N, seed=2)
    spoiled = x.clone()
    spoiled[1] = torch.nan
    z0, rule = torch.zeros(1, N, dtype=DOUBLE), eq.ReversibleGradient(5)
    spoiled.requires_grad_()
    sol = eq.fixed_point(cell(w), z0, spoiled, gradient=rule, **IGNORE)
    assert sol.result.tolist()[1] == Result.NONFINITE
    good = [0, 2, 3]
    rest = leaf(x[good])
    clean = eq.fixed_point(cell(w), z0, rest, gradient=rule, **IGNORE)
    (found, of_inputs), (known, of_rest) = grad(sol.value[good].sum(), (w, spoiled)), grad(clean.value.sum(), (w, rest))
    torch.testing.assert_close(found, known)
    torch.testing.assert_close(of_inputs[good], of_rest)
    assert sol.backward.result.tolist()[1] == Result.NONFINITE


def test_errors():
    w, x, z0 = leaf(randn(N, N, seed=1)), randn(2, N, seed=2), torch.zeros(1, N, dtype=DOUBLE)
    sol = eq.fixed_point(cell(w), z0, x, gradient=eq.ReversibleGradient(2), **IGNORE)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(sol.value.sum(), w, create_graph=True)
    with pytest.raises(ValueError, match="calls no callback"):
        eq.fixed_point(cell(w), z0, x, gradient=eq.ReversibleGradient(2), callback=print)
    with pytest.raises(ValueError, match="damping is 1.0; it must be a number"):
        eq.ReversibleGradient(damping=1.0)
    with pytest.raises(RuntimeError, match="no gradient can reach it"):
        eq.fixed_point(lambda z, x: 0.1 * z @ w.detach() + x, z0, leaf(x), gradient=eq.ReversibleGradient(40))
    sol = eq.fixed_point(cell(w), z0, x, gradient=eq.ReversibleGradient(2), **IGNORE)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sol.value.sum().backward()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((1024,), 0.5))

    def forward(self, z, x):
        return torch.tanh(self.w * z.roll(1, dims=1) + x)


def peak(steps, path):
    def run():
        rule = eq.ReversibleGradient(steps, drift=1e9)
        sol = eq.fixed_point(Wide(), torch.zeros(1, 1024), torch.randn(16, 1024), gradient=rule, **IGNORE)
        sol.value.square().sum().backward()
        return sol

    return peak_memory(run, path)


def test_peak_memory_does_not_grow_with_the_steps(tmp_path):
    few, many = (peak(steps, tmp_path / f"{steps}.json") for steps in (5, 50))
    assert many <= 1.05 * few

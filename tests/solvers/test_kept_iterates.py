"""Iterates along the trajectory: which they are, and their gradients."""

import pytest
import torch
from torch.autograd import grad

import equipoise as eq
from corpus import DOUBLE, randn

N = 4
SOLVERS = [eq.Picard(), eq.Picard(damping=0.3), eq.Anderson(), eq.Broyden()]


def leaf(tensor):
    return tensor.clone().requires_grad_()


def cell(w):
    return lambda z, x: torch.tanh(z @ w.mT + x)


Z0 = torch.zeros(1, N, dtype=DOUBLE)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("check_every", [1, 5])
def test_kept_iterates_are_those_of_the_solver(solver, check_every):
    w, x = 0.8 * randn(N, N, seed=1), randn(5, N, seed=2)
    seen = {}

    def record(progress):
        for row, value in zip(progress.rows.tolist(), progress.value, strict=True):
            seen[progress.step, row] = value.clone()

    tolerance = eq.Tolerance(1e-10, max_steps=300)
    known = eq.fixed_point(cell(w), Z0, x, solver=solver, tolerance=tolerance, callback=record)
    keep = (1, 3, 7, 250)
    sol = eq.fixed_point(cell(w), Z0, x, solver=solver, tolerance=tolerance, keep=keep, check_every=check_every)
    for step, kept in zip(keep, sol.kept, strict=True):
        for row in range(5):
            stopped = int(known.stats.steps[row])
            if step < stopped:
                assert torch.equal(kept[row], seen[step, row])
            elif check_every == 1:
                assert torch.equal(kept[row], known.value[row])
    assert torch.equal(sol.kept[0], torch.zeros(5, N, dtype=DOUBLE))
    if check_every == 1:
        assert torch.equal(sol.value, known.value)  # keeping changes nothing else
        assert torch.equal(sol.stats.steps, known.stats.steps)


def test_their_gradient_is_that_of_one_step():
    w, x = leaf(0.5 * randn(N, N, seed=1)), leaf(randn(5, N, seed=2))
    sol = eq.fixed_point(cell(w), Z0, x, keep=(2, 4), tolerance=eq.Tolerance(1e-10))
    v = randn(5, N, seed=3)
    for kept in sol.kept:
        known = cell(w)(kept.detach(), x)
        for a, b in zip(grad(kept, (w, x), v, retain_graph=True), grad(known, (w, x), v), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    loss = sol.value.square().sum() + sum(kept.square().sum() for kept in sol.kept)
    loss.backward()  # together with the implicit gradient
    assert sol.backward.converged.all()


@pytest.mark.parametrize("rule", [eq.UnrolledGradient(6), eq.ReversibleGradient(6, damping=0.5)], ids=str)
def test_rules_that_run_their_own_steps_give_exact_gradients(rule):
    w, x, z0 = leaf(0.5 * randn(N, N, seed=1)), leaf(randn(5, N, seed=2)), leaf(randn(5, N, seed=4))
    f = cell(w)
    sol = eq.fixed_point(f, z0, x, gradient=rule, keep=(1, 3, 6, 7, 90), on_failure="ignore")
    y = z = z0
    states = [z]
    for _ in range(6):
        if isinstance(rule, eq.UnrolledGradient):
            z = f(z, x)
        else:
            y = (y + f(z, x)) / 2
            z = (z + f(y, x)) / 2
        states.append(z)
    known = [states[0], states[2], states[5], states[6], states[6], states[6]]
    cotangents = [randn(5, N, seed=10 + i) for i in range(6)]
    found = [*sol.kept, sol.value]
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    a, b = (grad(values, (w, x, z0), cotangents) for values in (found, known))
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)


def test_structured_values_and_layers():
    f = lambda z, x: (0.5 * torch.tanh(z[1]) + x, 0.3 * z[0])
    layer = eq.Equilibrium(f, initial=((N,), (N,)))
    sol = layer.solve(randn(3, N, seed=1), keep=(3,))
    (kept,) = sol.kept
    assert isinstance(kept, tuple)
    assert [part.shape for part in kept] == [(3, N), (3, N)]


def test_a_sample_that_is_not_finite_contributes_its_best_iterate():
    x = leaf(torch.tensor([[0.5], [3.0]], dtype=DOUBLE))
    f = lambda z, x: z.square() * x + 0.1  # escapes to infinity for the second
    sol = eq.fixed_point(f, torch.zeros(1, 1, dtype=DOUBLE), x, solver=eq.Picard(), keep=(20,), on_failure="ignore")
    assert torch.isfinite(sol.kept[0]).all()
    assert torch.isfinite(grad(sol.kept[0].sum(), x)[0]).all()


def test_coupled_problems():
    a = torch.tensor([[0.0, 0.4], [0.3, 0.0]], dtype=DOUBLE)
    f, x = lambda z, x: a @ z + x, randn(2, 3, seed=1)
    sol = eq.fixed_point(f, torch.zeros(2, 3, dtype=DOUBLE), x, keep=(2,), coupled=True)
    assert sol.kept[0].shape == (2, 3)


def test_steps_must_be_whole_numbers():
    for keep in ((0,), (2.5,), [3], 4, (True,)):
        with pytest.raises(ValueError, match=r"keep is .*; it must be a tuple of steps"):
            eq.fixed_point(lambda z: 0.5 * z, torch.ones(1, 1), keep=keep)

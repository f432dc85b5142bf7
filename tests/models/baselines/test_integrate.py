"""Integration: closed forms, gradients against finite differences, what is counted, and what happens when it fails."""

import math
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models.baselines.integrate import METHODS, ODESolver, integrate
from equipoise.solution import ConvergenceError, ConvergenceWarning, Result

TIGHT = 1e-9


class Linear(nn.Module):
    """dy/dt = y A^T + sin(t) b."""

    def __init__(self, n=3):
        super().__init__()
        self.A = nn.Parameter(torch.randn(n, n, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(n, dtype=torch.float64))
        self.calls = 0

    def forward(self, t, y):
        self.calls += 1
        return y @ self.A.T + torch.sin(t) * self.b


def exact(field, y0):
    """y(1), from the matrix exponential of the system of y, sin(t) and cos(t)."""
    n = len(field.b)
    system = torch.zeros(n + 2, n + 2, dtype=torch.float64)
    system[:n, :n], system[:n, n] = field.A, field.b
    system[n, n + 1], system[n + 1, n] = 1, -1
    state = torch.cat([y0, torch.zeros(len(y0), 1), torch.ones(len(y0), 1)], dim=1)
    return (state @ torch.linalg.matrix_exp(system).T)[:, :n]


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_equation_has_its_closed_form(method):
    field, y0 = Linear(), torch.randn(4, 3, dtype=torch.float64)
    tolerance = TIGHT if method.startswith("dopri") else 1e-5
    with torch.no_grad():
        found = integrate(field, y0, ODESolver(method=method, tolerance=tolerance, max_steps=10_000))
        torch.testing.assert_close(found.value, exact(field, y0), rtol=30 * tolerance, atol=30 * tolerance)


@pytest.mark.parametrize("adjoint", [True, False])
def test_gradients_are_those_of_the_closed_form(adjoint):
    field, y0 = Linear(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    inputs, weight = (y0, field.A, field.b), torch.randn(4, 3, dtype=torch.float64)
    known = torch.autograd.grad((exact(field, y0) * weight).sum(), inputs)
    value = integrate(field, y0, ODESolver(tolerance=TIGHT, adjoint=adjoint)).value
    for found, truth in zip(torch.autograd.grad((value * weight).sum(), inputs), known, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("adjoint", [True, False])
def test_gradients_of_the_model_are_those_of_finite_differences(adjoint):
    model = eq.models.NeuralODE((1, 4, 4), 3, filters=3, augment=1, time=True, tolerance=1e-5, adjoint=adjoint).double()
    images, weight = torch.rand(2, 1, 4, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    gradients = torch.autograd.grad((model(images) * weight).sum(), list(model.parameters()))
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()

    @torch.no_grad()
    def at(step):
        for parameter, direction in zip(model.parameters(), directions, strict=True):
            parameter += step * direction
        return (model(images) * weight).sum().item()

    step = 1e-4
    assert (at(step) - at(-2 * step)) / (2 * step) == pytest.approx(
        slope, rel=3e-3
    )  # ReLU limits the order of the method


@pytest.mark.parametrize("adjoint", [True, False])
def test_every_evaluation_is_counted(adjoint):
    field, y0 = Linear(), torch.randn(5, 3, dtype=torch.float64)
    with eq.watch_solves() as solves:
        value = integrate(field, y0, ODESolver(adjoint=adjoint)).value
    (solution,) = solves
    forward = field.calls
    assert solution.stats.evaluations == forward > 5
    assert solution.stats.rows == 5 * forward
    assert solution.stats.steps.tolist() == [forward] * 5
    assert solution.converged.all()
    value.sum().backward()
    if adjoint:
        assert solution.backward.evaluations == field.calls - forward > 5
        assert solution.backward.converged.all()
    else:
        assert solution.backward is None
        assert field.calls == forward


def test_the_adjoint_method_keeps_no_steps():
    def kept(adjoint, tolerance):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t)
        field, y0 = Linear(), torch.randn(50, 3, dtype=torch.float64)
        with hooks:
            integrate(field, y0, ODESolver(adjoint=adjoint, tolerance=tolerance))
        return sum(sizes)

    assert kept(True, 1e-3) == kept(True, 1e-9) < 500
    assert kept(False, 1e-9) > 3 * kept(False, 1e-3) > 3000


def test_without_gradients_nothing_is_recorded():
    field = Linear().requires_grad_(False)
    assert not integrate(field, torch.randn(2, 3, dtype=torch.float64), ODESolver()).value.requires_grad
    y0 = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)  # frozen weights, as in an attack
    for adjoint in (True, False):
        value = integrate(field, y0, ODESolver(adjoint=adjoint, tolerance=TIGHT)).value
        (found,) = torch.autograd.grad(value.sum(), y0)
        truth = torch.linalg.matrix_exp(field.A).sum(dim=0).expand(2, 3)
        torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7)


class Scaled(nn.Module):
    """dy/dt = scale y^power; y(0) = 1 and power 2 grow without bound at t = 1 / scale."""

    def __init__(self, scale, power):
        super().__init__()
        self.scale, self.power = nn.Parameter(torch.tensor(scale)), power

    def forward(self, t, y):
        return self.scale * y**self.power


FAILURES = {  # field, options, result
    "steps": (Scaled(-1.0, 1), {"max_steps": 1, "tolerance": 1e-6}, Result.MAX_STEPS),
    "blow-up": (Scaled(4.0, 2), {"tolerance": 0.5}, Result.STALLED),
    "not finite": (Scaled(math.nan, 1), {}, Result.NONFINITE),
}


@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize(("field", "options", "result"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_reported_and_its_gradient_is_nan(field, options, result, adjoint):
    y0, solver = torch.ones(3, 2, requires_grad=True), ODESolver(adjoint=adjoint, **options)
    with pytest.warns(ConvergenceWarning, match=rf"forward solve failed for some samples \({result.name}"):
        solution = integrate(field, y0, solver)
    assert set(solution.result.tolist()) == {result}
    assert torch.isinf(solution.stats.residual).all()
    assert torch.isfinite(solution.value).all()  # the last state that was accepted
    for gradient in torch.autograd.grad(solution.value.sum(), (y0, field.scale)):
        assert torch.isnan(gradient).all()
    with pytest.raises(ConvergenceError, match=result.name):
        integrate(field, y0, solver, on_failure="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not integrate(field, y0, solver, on_failure="ignore").converged.any()


def test_a_failure_of_the_backward_integration_is_reported():
    class Forward(Linear):
        def forward(self, t, y):
            if self.calls >= 20:  # the forward integration takes fewer
                return super().forward(t, y) * math.nan
            return super().forward(t, y)

    field = Forward()
    solution = integrate(field, torch.randn(2, 3, dtype=torch.float64), ODESolver(tolerance=1e-2))
    assert solution.converged.all()
    field.calls = 20
    with pytest.warns(ConvergenceWarning, match="backward solve failed for some samples"):
        solution.value.sum().backward()
    assert not solution.backward.converged.any()
    assert torch.isnan(field.A.grad).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "rk4"}, "ODESolver.method is 'rk4'; allowed: 'dopri5', 'dopri8'"),
        ({"tolerance": 0}, "ODESolver.tolerance is 0; it must be a number above 0"),
        ({"max_steps": 0}, "ODESolver.max_steps is 0; it must be a whole number of at least 1"),
        ({"adjoint": 1}, "ODESolver.adjoint is 1; it must be a bool"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        ODESolver(**options)
    with pytest.raises((ValueError, TypeError), match=words):
        eq.create_model("neural-ode", shape=(1, 8, 8), classes=3, **options)

"""f may return something beside z: the auxiliary output at the solution, with its gradient."""

import pytest
import torch
from torch import nn
from torch.autograd import grad, gradcheck

import equipoise as eq
from corpus import DOUBLE, randn

N = 3
EXACT = eq.Tolerance(1e-12, max_steps=200)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(0.3 * torch.randn(N, N, dtype=DOUBLE))

    def forward(self, z, x):
        weights = torch.softmax(z @ self.w + x, dim=1)
        return weights * x, {"weights": weights, "name": "attention"}


def test_it_is_that_of_the_returned_value():
    f, x = Attentive(), randn(5, N, seed=1)
    sol = eq.fixed_point(f, torch.zeros(1, N, dtype=DOUBLE), x, aux=True, tolerance=EXACT)
    assert torch.equal(sol.aux["weights"], f(sol.value, x)[1]["weights"])
    assert sol.aux["name"] == "attention"
    plain = eq.fixed_point(lambda z, x: f(z, x)[0], torch.zeros(1, N, dtype=DOUBLE), x, tolerance=EXACT)
    assert torch.equal(sol.value, plain.value)
    assert sol.stats.evaluations == plain.stats.evaluations


RULES = [eq.ImplicitGradient(), eq.UnrolledGradient(60), eq.ReversibleGradient(20)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_gradients_reach_parameters_and_inputs_through_z_and_directly(rule):
    f = Attentive()

    def auxiliary(w, x):
        g = lambda z, x: (torch.softmax(z @ w + x, dim=1) * x, torch.softmax(z @ w + x, dim=1))
        z0 = torch.zeros(1, N, dtype=DOUBLE)
        return eq.fixed_point(g, z0, x, aux=True, tolerance=EXACT, gradient=rule, on_failure="ignore").aux

    assert gradcheck(auxiliary, (f.w, randn(2, N, seed=1).requires_grad_()))


def test_a_layer_returns_both_as_f_does():
    layer = eq.Equilibrium(Attentive(), aux=True, tolerance=EXACT)
    x = randn(4, N, seed=1)
    value, aux = layer(x)
    assert value.shape == (4, N)
    (g,) = grad(value.sum() + aux["weights"].square().sum(), layer.f.w)
    assert torch.isfinite(g).all()
    assert g.abs().sum() > 0
    with pytest.raises(ValueError, match="aux=True, and FixedSteps returns only z"):
        eq.FixedSteps(layer, 3)


def test_samples_left_out_of_the_batch_have_their_auxiliary_output():
    """Gathering narrows the batch inside the solve, not here."""
    x = torch.linspace(0.05, 0.99, 16, dtype=DOUBLE)[:, None]
    sol = eq.fixed_point(lambda z, x: (x * z + 1, z.sum(dim=1)), torch.zeros(1, 1, dtype=DOUBLE), x, aux=True)
    assert sol.aux.shape == (16,)
    assert torch.equal(sol.aux, sol.value[:, 0])


def test_errors():
    z0, x = torch.zeros(1, N), torch.zeros(2, N)
    with pytest.raises(TypeError, match=r"aux=True, f must return a pair \(z, aux\); it returned Tensor"):
        eq.fixed_point(lambda z, x: z, z0, x, aux=True)
    with pytest.raises(TypeError, match="it returned a tuple of length 3"):
        eq.fixed_point(lambda z, x: (z, 1, 2), z0, x, aux=True)
    with pytest.raises(ValueError, match=r"If f returns \(z, aux\), set aux=True"):
        eq.fixed_point(lambda z, x: (0.5 * z, x), z0, x)
    with pytest.raises(TypeError, match=r"f\(z\)\[1\] has type dict.*If f returns \(z, aux\), set aux=True"):
        eq.fixed_point(lambda z, x: (0.5 * z, {"x": x}), z0, x)
    with pytest.raises(TypeError, match="aux is 1; it must be True or False"):
        eq.fixed_point(lambda z, x: (0.5 * z, x), z0, x, aux=1)

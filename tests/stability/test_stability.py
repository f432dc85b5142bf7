"""Contraction measured and enforced: Jacobian penalty, spectral radius, norm constraints, dropout within a solve."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.stability import layers as stability
from equipoise.stability import norms


def dense_jacobians(f, z):
    return torch.stack([torch.autograd.functional.jacobian(lambda v: f(v[None])[0], zi) for zi in z])


def test_spectral_radius_is_right_for_complex_pairs():
    c, s = math.cos(1.0), math.sin(1.0)
    rotation = 0.9 * torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    radius = eq.spectral_radius(lambda z: z @ rotation, torch.zeros(3, 2, dtype=torch.float64))
    torch.testing.assert_close(radius, torch.full((3,), 0.9, dtype=torch.float64))


def test_spectral_radius_is_exact_when_the_krylov_space_is_full():
    W = torch.randn(7, 7, dtype=torch.float64)
    z = torch.randn(4, 7, dtype=torch.float64)
    f = lambda z: torch.tanh(z @ W)
    truth = torch.linalg.eigvals(dense_jacobians(f, z)).abs().amax(dim=1)
    torch.testing.assert_close(eq.spectral_radius(f, z), truth, rtol=1e-8, atol=0)


def test_spectral_radius_survives_invariant_subspaces_and_large_states():
    diagonal = torch.tensor([0.5, 0.5, 0.5, -0.8], dtype=torch.float64)
    radius = eq.spectral_radius(lambda z: z * diagonal, torch.zeros(5, 4, dtype=torch.float64))
    torch.testing.assert_close(radius, torch.full((5,), 0.8, dtype=torch.float64))
    W = torch.randn(300, 300, dtype=torch.float64) / 300**0.5
    truth = torch.linalg.eigvals(W).abs().max()
    estimate = eq.spectral_radius(lambda z: z @ W, torch.zeros(2, 300, dtype=torch.float64))
    assert ((estimate > 0.95 * truth) & (estimate < 1.001 * truth)).all()


def test_spectral_radius_of_a_constant_function_is_zero():
    assert eq.spectral_radius(lambda z, x: x, torch.zeros(2, 3), torch.ones(2, 3)).tolist() == [0.0, 0.0]


def test_spectral_radius_is_not_a_number_where_the_derivative_is_not():
    z = torch.tensor([[0.0, 4.0], [1.0, 4.0]], dtype=torch.float64)  # the derivative of a root at 0 is infinite
    radius = eq.spectral_radius(lambda z: z.sqrt(), z)
    assert radius.isnan().tolist() == [True, False]
    assert radius[1] == pytest.approx(0.5)


def test_jacobian_penalty_estimates_the_frobenius_norm():
    W = torch.randn(6, 6, dtype=torch.float64) / 3
    z = torch.randn(5, 6, dtype=torch.float64)
    f = lambda z: torch.tanh(z @ W)
    truth = dense_jacobians(f, z).square().sum() / z.numel()
    estimate = eq.jacobian_penalty(f, z, probes=4000, generator=torch.Generator().manual_seed(0))
    assert abs(estimate / truth - 1) < 0.05


def test_jacobian_penalty_is_differentiable_in_parameters_and_state():
    W = (torch.randn(3, 3, dtype=torch.float64) / 3).requires_grad_()
    z = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def penalty(W, z):
        return eq.jacobian_penalty(lambda z: torch.tanh(z @ W), z, generator=torch.Generator().manual_seed(1))

    assert torch.autograd.gradcheck(penalty, (W, z))


def test_jacobian_penalty_at_an_equilibrium_differentiates_through_it():
    cell = nn.Linear(3, 3).double()
    f = lambda z, x: torch.tanh(cell(z) / 2 + x)
    x = torch.randn(2, 3, dtype=torch.float64)

    def loss():
        tight = eq.Tolerance(1e-13, max_steps=200)
        z = eq.fixed_point(f, torch.zeros(1, 3, dtype=torch.float64), x, tolerance=tight).value
        return eq.jacobian_penalty(f, z, x, generator=torch.Generator().manual_seed(1))

    (gradient,) = torch.autograd.grad(loss(), cell.bias)
    for i in range(3):
        with torch.no_grad():
            cell.bias[i] += 1e-5
            up = loss()
            cell.bias[i] -= 2e-5
            down = loss()
            cell.bias[i] += 1e-5
        assert abs((up - down) / 2e-5 - gradient[i]) < 1e-7


class Cell(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        self.weight = eq.SpectralNorm(nn.Linear(6, 6), bound=0.8)
        self.drop = eq.VariationalDropout(p)
        self.inject = eq.WeightNorm(nn.Linear(6, 6))

    def forward(self, z, x):
        return torch.tanh(self.drop(self.weight(z)) + self.inject(x))


@pytest.fixture
def layer():
    return eq.Equilibrium(Cell().double(), tolerance=eq.Tolerance(1e-11, max_steps=100))


def test_norm_constraint_holds_whatever_the_weights(layer):
    linear = layer.f.weight
    for factor in (1e-3, 1.0, 1e3):
        linear.layer.weight.data = factor * torch.randn(6, 6, dtype=torch.float64)
        assert torch.linalg.matrix_norm(linear.weight(), 2) <= 0.8 + 1e-12
    always = eq.SpectralNorm(nn.Linear(6, 6), bound=2.0, always=True)
    assert 1.8 < torch.linalg.matrix_norm(always.weight(), 2) <= 2.0 + 1e-6
    conv = eq.SpectralNorm(nn.Conv2d(2, 2, 3, padding=1, bias=False).double(), bound=0.5)
    conv.layer.weight.data *= 10
    x = torch.randn(50, 2, 5, 7, dtype=torch.float64)
    assert (conv(x).flatten(1).norm(dim=1) <= 0.5 * x.flatten(1).norm(dim=1) + 1e-12).all()


def test_derived_weights_are_made_once_per_solve_and_never_stale(layer, monkeypatch):
    made = []
    derive = eq.WeightNorm.derive
    monkeypatch.setattr(eq.WeightNorm, "derive", lambda self: made.append(1) or derive(self))
    x = torch.randn(4, 6, dtype=torch.float64)
    sol = layer.eval().solve(x)
    assert sol.stats.evaluations > 3
    assert len(made) == 1
    sol.value.sum().backward()
    assert len(made) == 1
    before = sol.value.detach()
    layer.f.inject.scale.data *= 2  # an edit that version counters do not see
    assert not torch.allclose(layer(x), before)
    assert len(made) == 2


def test_weight_norm_gives_scale_times_unit_rows_and_survives_zero_rows():
    conv = eq.WeightNorm(nn.Conv2d(3, 4, 3))
    torch.testing.assert_close(conv.weight, conv.layer.weight)  # starts as the layer it wraps
    conv.layer.weight.data[1] = 0
    conv.scale.data.fill_(2.0)
    assert torch.allclose(conv.weight.flatten(1).norm(dim=1), torch.tensor([2.0, 0.0, 2.0, 2.0]))
    conv(torch.randn(1, 3, 5, 5)).sum().backward()
    assert torch.isfinite(conv.layer.weight.grad).all()


def test_dropout_mask_is_one_per_solve_and_follows_gathered_samples():
    drop = eq.VariationalDropout(0.5)
    seen = {}

    class Watch(nn.Module):
        def forward(self, z, rate, index):
            masked = drop(torch.ones(len(z), 8, 1))[..., 0]
            for i, row in zip(index[:, 0].int().tolist(), masked, strict=True):
                assert torch.equal(seen.setdefault(i, row), row)  # the same mask at every call
            return rate * z + 0.1 * masked

    rate = torch.linspace(0.05, 0.95, 40)[:, None]
    index = torch.arange(40.0)[:, None]
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(1e-5, max_steps=400)}
    sol = eq.fixed_point(Watch(), torch.zeros(1, 8), rate, index, **options)
    assert sol.stats.rows < 40 * sol.stats.evaluations  # samples were gathered
    first = dict(seen)
    seen.clear()
    eq.fixed_point(Watch(), torch.zeros(1, 8), rate, index, **options)
    assert any(not torch.equal(first[i], seen[i]) for i in seen)  # another solve, another mask
    values = torch.stack(list(first.values()))
    assert set(values.unique().tolist()) == {0.0, 2.0}


def test_dropout_is_the_identity_in_eval_and_ordinary_outside_a_solve():
    drop = eq.VariationalDropout(0.5)
    x = torch.ones(4, 16, 3, 3)
    a, b = drop(x), drop(x)
    assert not torch.equal(a, b)
    assert ((a == a[:, :, :1, :1]) & ((a == 0) | (a == 2))).all()  # whole channels
    assert torch.equal(drop.eval()(x), x)


def test_gradients_through_constraints_and_dropout_match_finite_differences(layer):
    x = torch.randn(3, 6, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss():
        torch.manual_seed(5)  # the same mask every time
        return layer(x).square().sum()

    gradients = torch.autograd.grad(loss(), list(parameters.values()))
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += 1e-5 * direction
            up = loss()
            parameter -= 2e-5 * direction
            down = loss()
            parameter += 1e-5 * direction
        assert abs((up - down) / 2e-5 - (gradient * direction).sum()) < 1e-6 * (1 + gradient.norm())


def test_second_derivatives_through_a_constraint():
    cell = eq.SpectralNorm(nn.Linear(2, 2).double(), bound=0.5)
    x = torch.randn(2, 2, dtype=torch.float64)

    def value(weight, bias):
        f = lambda z, x: torch.tanh(
            torch.func.functional_call(cell, {"layer.weight": weight, "layer.bias": bias}, z) + x
        )
        return eq.fixed_point(f, torch.zeros(1, 2).double(), x, tolerance=eq.Tolerance(1e-13, max_steps=200)).value

    weight = (3 * torch.randn(2, 2, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradgradcheck(value, (weight, torch.zeros(2).double().requires_grad_()))


def test_layers_copy_pickle_and_save_clean(layer):
    layer(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert list(layer.state_dict()) == [
        "f.weight.layer.weight",
        "f.weight.layer.bias",
        "f.inject.scale",
        "f.inject.layer.weight",
        "f.inject.layer.bias",
    ]
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(twin.eval()(x), layer.eval()(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.VariationalDropout(1.0), "below 1"),
        (lambda: eq.WeightNorm(nn.ReLU()), "nn.Linear"),
        (lambda: eq.SpectralNorm(nn.Conv2d(1, 1, 3, stride=2)), "stride 1"),
        (lambda: eq.SpectralNorm(nn.Conv1d(1, 1, 3)), "nn.Conv2d"),
        (lambda: eq.SpectralNorm(nn.Linear(1, 1), bound=0), "above 0"),
        (lambda: eq.SpectralNorm(nn.Linear(1, 1), bound="a"), "bound is 'a'; it must be a number above 0"),
        (lambda: eq.jacobian_penalty(torch.tanh, torch.zeros(1, 1), probes=0), "at least 1"),
        (lambda: eq.spectral_radius(torch.tanh, torch.zeros(1, 1), steps=0), "at least 1"),
    ],
)
def test_bad_arguments_get_a_sentence(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def searched(monkeypatch):
    """A list that grows whenever the largest block of a kernel is searched for."""
    seen, search = [], stability.largest_block
    monkeypatch.setattr(stability, "largest_block", lambda *given: seen.append(given) or search(*given))
    return seen


def test_the_largest_block_is_searched_for_again_only_when_the_kernel_or_the_size_has_changed(monkeypatch):
    torch.manual_seed(0)
    seen = searched(monkeypatch)
    conv = eq.SpectralNorm(nn.Conv2d(3, 3, 3, padding=1), bound=0.5)

    def fresh():
        return eq.SpectralNorm(conv.layer, bound=0.5)

    with torch.inference_mode():
        first = conv(torch.ones(1, 3, 6, 6))
    for _ in range(3):
        torch.testing.assert_close(conv(torch.ones(1, 3, 6, 6)), first, rtol=0, atol=0)
    assert len(seen) == 1
    for change in (
        lambda: conv.layer.weight.data.mul_(3),  # no counter of changes sees this
        lambda: conv.layer.weight.data[0].neg_(),
        lambda: conv.load_state_dict(eq.SpectralNorm(nn.Conv2d(3, 3, 3)).state_dict()),
        lambda: setattr(conv.layer, "weight", nn.Parameter(torch.randn(3, 3, 3, 3))),
    ):
        change()
        before = len(seen)
        torch.testing.assert_close(conv.weight((6, 6)), fresh().weight((6, 6)), rtol=0, atol=0)
        assert len(seen) == before + 2  # by both
    torch.testing.assert_close(conv.weight((5, 6)), fresh().weight((5, 6)), rtol=0, atol=0)
    assert copy.deepcopy(conv).double().weight((6, 6)).dtype == torch.float64


def test_a_norm_found_before_is_differentiated_as_one_found_now(monkeypatch):
    torch.manual_seed(0)
    conv, x = eq.SpectralNorm(nn.Conv2d(2, 2, 3, padding=1).double(), bound=0.5), torch.randn(1, 2, 4, 4).double()
    (now,) = torch.autograd.grad(conv(x).square().sum(), conv.layer.weight)
    conv.known = None
    with torch.inference_mode():
        conv(x)
    seen = searched(monkeypatch)
    (before,) = torch.autograd.grad(conv(x).square().sum(), conv.layer.weight)
    torch.testing.assert_close(before, now, rtol=0, atol=0)
    assert not seen


@pytest.mark.parametrize("shape", [(4, 4, 3, 3), (5, 3, 3, 3)])
def test_the_norm_stays_bounded_after_every_step_of_an_optimizer(shape, monkeypatch):
    monkeypatch.setattr(norms, "CACHED", 100)  # a few frequencies at a time: most have a proof, and no bound
    torch.manual_seed(0)
    conv = eq.SpectralNorm(nn.Conv2d(shape[1], shape[0], 3, padding=1, bias=False), bound=0.9)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.3, momentum=0.9)
    x, target = torch.randn(8, shape[1], 6, 5), 3 * torch.randn(8, shape[0], 6, 5)
    units = torch.eye(shape[1] * 30).view(-1, shape[1], 6, 5)
    truths = []
    for _ in range(200):
        optimizer.zero_grad()
        (conv(x) - target).square().sum(dim=(1, 2, 3)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            truths.append(torch.linalg.matrix_norm(conv(units).flatten(1).double(), 2).item())
    assert max(truths) <= 0.9
    assert min(truths) > 0.75  # the operator on zero-padded images is a restriction of the circular one


# Options


def shrink(z):
    return 0.5 * z


BAD_COUNTS = [0, -1, 1.5, "2", True, None, float("nan")]


@pytest.mark.parametrize("count", BAD_COUNTS)
@pytest.mark.parametrize(
    ("function", "option"), [(eq.spectral_radius, "steps"), (eq.jacobian_penalty, "probes")], ids=["radius", "penalty"]
)
def test_invalid_counts(function, option, count):
    with pytest.raises(
        (ValueError, TypeError), match=f"^{option} is {count!r}; it must be a whole number of at least 1"
    ):
        function(shrink, torch.ones(2, 3), **{option: count})


@pytest.mark.parametrize("function", [eq.spectral_radius, eq.jacobian_penalty])
def test_an_invalid_generator(function):
    with pytest.raises(TypeError, match=r"generator is 0; it must be a torch.Generator, or None"):
        function(shrink, torch.ones(2, 3), generator=0)


@pytest.mark.parametrize("p", [None, -0.1, 1, 1.0, "0.5", True, float("nan"), float("inf")])
def test_an_invalid_probability(p):
    words = rf"VariationalDropout.p is {re.escape(repr(p))}; it must be a number of at least 0 and below 1"
    with pytest.raises((ValueError, TypeError), match=words):
        eq.VariationalDropout(p)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.WeightNorm(nn.Linear), "layer is the class Linear; give an object, such as nn.Linear"),
        (lambda: eq.WeightNorm(None), "layer has type NoneType; it must be nn.Linear or nn.Conv1d"),
        (lambda: eq.SpectralNorm(nn.Conv2d), "layer is the class Conv2d; give an object"),
        (lambda: eq.SpectralNorm(nn.Linear(2, 2), bound="1"), "SpectralNorm.bound is '1'; it must be a number above 0"),
        (lambda: eq.SpectralNorm(nn.Linear(2, 2), bound=None), "SpectralNorm.bound is None"),
        (lambda: eq.SpectralNorm(nn.Linear(2, 2), bound=-1.0), "SpectralNorm.bound is -1.0"),
        (lambda: eq.SpectralNorm(nn.Linear(2, 2), always="no"), "SpectralNorm.always is 'no'; it must be a bool"),
    ],
)
def test_bad_options_of_layers(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()

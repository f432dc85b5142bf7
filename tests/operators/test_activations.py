"""Proximal activations: what prox^alpha, its reflection, the derivative and f must be, for each and every alpha."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp  # comes with torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from equipoise.operators.activations import (
    BLOCK,
    ELU,
    NAMES,
    REFUSED,
    Arctan,
    BorderZero,
    HardTanh,
    LeakyReLU,
    ProximalActivation,
    ReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    Tanh,
    activation,
)
from equipoise.operators.splitting import Diagonal

DOUBLE = torch.float64
SMOOTH = [Tanh(), Arctan(), ELU(), Sigmoid(), Softplus()]
KINKED = [
    ReLU(),
    LeakyReLU(),
    LeakyReLU(slope=0.7),
    ELU(scale=0.3),
    HardTanh(),
    SoftThreshold(),
    SoftThreshold(threshold=1.3),
]
ACTIVATIONS = SMOOTH + KINKED
KINKS = {ReLU: [0.0], LeakyReLU: [0.0], ELU: [0.0], HardTanh: [-1.0, 1.0], SoftThreshold: [-0.5, 0.5, -1.3, 1.3]}
DOMAINS = {
    ReLU(): (0, math.inf),
    ELU(): (-1, math.inf),
    ELU(scale=0.3): (-0.3, math.inf),
    HardTanh(): (-1, 1),
    Tanh(): (-1, 1),
    Arctan(): (-math.pi / 2, math.pi / 2),
    Sigmoid(): (0, 1),
    Softplus(): (0, math.inf),
}
ALPHAS = [1e-4, 0.03, 0.5, 1.0, 1.5, 20.0, 1e4]

every = pytest.mark.parametrize("act", ACTIVATIONS, ids=repr)
smooth = pytest.mark.parametrize("act", SMOOTH, ids=repr)
alphas = st.floats(-4, 4).map(lambda power: 10.0**power)
points = st.one_of(
    st.floats(-5, 5),
    st.floats(-1e4, 1e4),
    st.builds(lambda sign, p: sign * 10.0**p, st.sampled_from((-1, 1)), st.floats(-9, 4)),
)
lists = st.lists(points, min_size=1, max_size=20).map(lambda numbers: torch.tensor(numbers, dtype=DOUBLE))


def domain(act):
    return DOMAINS.get(act, (-math.inf, math.inf))


def inside(act, count=201):
    """Points of the domain of f, its ends among them."""
    low, high = domain(act)
    return torch.linspace(max(low, -6), min(high, 6), count, dtype=DOUBLE)


def batch_last(*shape, dtype=DOUBLE):
    """Random images whose batch is the innermost dimension in memory."""
    batch, channels, rows, columns = shape
    return (2 * torch.randn(rows, columns, channels, batch, dtype=dtype)).permute(3, 2, 0, 1)


# prox


@every
@given(x=st.floats(-8, 8), alpha=st.floats(-2, 2).map(lambda power: 10.0**power))
def test_prox_is_where_the_minimum_is(act, x, alpha):
    x = torch.tensor([x], dtype=DOUBLE)

    def objective(z):
        z = torch.as_tensor(z, dtype=DOUBLE)
        return (x - z).square() / 2 + alpha * act.function(z)

    found = act.prox(x, alpha)
    low, high = max(domain(act)[0], -20), min(domain(act)[1], 20)
    grid = torch.linspace(low, high, 4001, dtype=DOUBLE)
    assert objective(found).item() <= objective(grid).min().item() + 1e-12
    best = grid[objective(grid).argmin()].item()
    ends = max(low, best - 0.02), min(high, best + 0.02)
    tight = minimize_scalar(lambda z: objective(z).item(), bounds=ends, method="bounded", options={"xatol": 1e-10})
    # 1/2 (x - z)^2 is curved by 1: values that agree to rounding are minima that agree to its square root.
    assert abs(found.item() - tight.x) < 1e-6


@every
@given(x=lists, alpha=alphas)
def test_prox_satisfies_the_optimality_condition(act, x, alpha):
    """(x - z) / alpha is a subgradient of f at z: f(y) >= f(z) + (x - z) (y - z) / alpha for all y."""
    z = act.prox(x, alpha)
    y = torch.cat([inside(act), z, torch.tensor([-1e4, -0.1, 0.0, 0.3, 1.1, 1e4], dtype=DOUBLE)])
    f = act.function(z)
    assert torch.isfinite(f).all()
    above = alpha * (act.function(y)[None] - f[:, None]) - (x - z)[:, None] * (y[None] - z[:, None])
    scale = alpha * (f.abs()[:, None] + 1) + (x.abs() + 1)[:, None] * (y.abs()[None] + z.abs()[:, None] + 1)
    assert (above >= -1e-14 * scale).all()


EXACT = {
    Tanh(): (mp.tanh, lambda p: mp.sech(p) ** 2),
    Arctan(): (mp.atan, lambda p: 1 / (1 + p * p)),
    ELU(): (lambda p: p if p > 0 else mp.expm1(p), lambda p: 1 if p > 0 else mp.exp(p)),
    ELU(scale=0.3): (lambda p: p if p > 0 else 0.3 * mp.expm1(p), lambda p: 1 if p > 0 else 0.3 * mp.exp(p)),
    Sigmoid(): (lambda p: 1 / (1 + mp.exp(-p)), lambda p: 1 / (2 * mp.cosh(p / 2)) ** 2),
    Softplus(): (lambda p: mp.log1p(mp.exp(p)), lambda p: 1 / (1 + mp.exp(-p))),
}


@pytest.mark.parametrize("act", EXACT, ids=repr)
@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha != 1])
def test_prox_of_a_smooth_activation_is_right_to_rounding(act, alpha):
    """Against bisection in 60 digits: relative to z, up to what rounding of x alone would do."""
    powers = 10 ** torch.linspace(-6, 4, 21)
    special = torch.tensor([0.0, (1 - alpha) / 2, 1 - alpha, 0.6590461])  # p = 0; the end of the domain; s(p) = p
    x = torch.cat([powers, -powers, special])
    s, derivative = EXACT[act]
    found = [act.prox(x, alpha).tolist(), act.prox(x.to(DOUBLE), alpha).tolist()]
    with mp.workdps(60):
        for number, single, double in zip(map(mp.mpf, x.tolist()), *found, strict=True):
            phi = lambda p: s(p) + alpha * (p - s(p))
            far = number - phi(number)
            low, high = sorted([number + far / max(1, alpha), number + far / min(1, alpha)])
            for _ in range(150):
                middle = (low + high) / 2
                low, high = (middle, high) if phi(middle) < number else (low, middle)
            z, slope = s(low), derivative(low)
            if abs(z) < 1e-30:
                assert abs(double) <= 1e-29  # it underflows in float32
                continue
            noise = abs(z) + abs(number) * slope / (slope + alpha * (1 - slope))
            assert abs(single - z) <= 4 * torch.finfo(torch.float32).eps * noise, (number, single)
            assert abs(double - z) <= 4 * torch.finfo(DOUBLE).eps * noise, (number, double)


@smooth
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha != 1])
def test_few_newton_steps_are_enough(act, dtype, alpha, monkeypatch):
    powers = 10 ** torch.linspace(-9, 4, 20001, dtype=dtype)
    parts, steps = type(act).parts, []
    monkeypatch.setattr(type(act), "parts", lambda self, p, alpha: steps.append(p) or parts(self, p, alpha))
    saturated = 1 + torch.linspace(-0.03, 0.03, 20001, dtype=dtype)  # where phi is flat and its rounding weighs most
    act.prox(torch.cat([powers, -powers, saturated]), alpha)
    assert 1 < len(steps) <= 14


@every
def test_prox_with_alpha_1_is_the_activation(act):
    x = torch.linspace(-6, 6, 101, dtype=DOUBLE)
    assert torch.equal(act.prox(x, 1.0), act(x))
    torch.testing.assert_close(act.prox(x, 1.0 + 1e-12), act(x), rtol=1e-10, atol=1e-10)  # no short-cut


@every
@given(x=lists, y=lists, alpha=alphas)
def test_prox_is_firmly_nonexpansive(act, x, y, alpha):
    x, y = x[:, None], y[None]
    dx, dz = x - y, act.prox(x, alpha) - act.prox(y, alpha)
    noise = 1e-15 * (x.abs() + y.abs() + 1) * (dx.abs() + dz.abs())
    assert (dz.square() <= dz * dx + 4 * noise).all()


@every
def test_prox_for_alpha_to_0_is_the_projection_onto_the_domain(act):
    x = torch.tensor([-3.0, -1.0, -0.4, 0.2, 0.6, 1.0, 2.5], dtype=DOUBLE)
    low, high = domain(act)
    errors = [(act.prox(x, alpha) - x.clamp(low, high)).abs().max().item() for alpha in (1e-2, 1e-4, 1e-8)]
    assert errors[2] <= 1e-5
    assert errors[2] <= errors[1] <= errors[0]


@smooth
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("alpha", [1e-12, *ALPHAS, 1e12])
def test_prox_of_what_is_not_finite_or_hardly(act, dtype, alpha):
    most = torch.finfo(dtype).max
    x = torch.tensor([math.nan, math.inf, -math.inf, most, -most, 0.1], dtype=dtype)
    z = act.prox(x, alpha)
    assert z[0].isnan()
    assert torch.equal(z[1:5], act(x[1:5]))  # the limits
    assert torch.equal(z[5:], act.prox(x[5:], alpha))  # whatever its neighbours are


@every
@pytest.mark.parametrize("alpha", [0.3, 4.0])
def test_an_entry_is_computed_alike_in_any_company_and_layout(act, alpha):
    x = batch_last(16, 5, 30, 31, dtype=torch.float32)
    assert x.numel() > BLOCK
    for method in (act.prox, act.reflect):
        z = method(x, alpha)
        assert z.stride() == x.stride()
        alone = method(x[3, :, 7:9].contiguous(), alpha)
        torch.testing.assert_close(z[3, :, 7:9], alone, rtol=1e-6, atol=1e-7)
        wide = x[:1].expand(9, -1, -1, -1)
        torch.testing.assert_close(method(wide, alpha)[8], z[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(method(x[:, :, ::2], alpha), z[:, :, ::2], rtol=1e-6, atol=1e-7)


# reflect, derivative, function


@every
@pytest.mark.parametrize("alpha", ALPHAS)
def test_reflect_is_twice_prox_minus_x(act, alpha):
    x = 3 * torch.randn(50, dtype=DOUBLE)
    torch.testing.assert_close(act.reflect(x, alpha), 2 * act.prox(x, alpha) - x, rtol=1e-14, atol=1e-14)


@every
def test_derivative_is_that_of_autograd_also_at_kinks_and_of_differences_elsewhere(act):
    kinks = torch.tensor(KINKS.get(type(act), []), dtype=DOUBLE)
    x = torch.cat(
        [kinks, 3 * torch.randn(100, dtype=DOUBLE), torch.tensor([-40.0, 40.0], dtype=DOUBLE)]
    ).requires_grad_()
    (slope,) = torch.autograd.grad(act(x).sum(), x)
    x = x.detach()
    torch.testing.assert_close(act.derivative(x), slope, rtol=1e-14, atol=1e-15)
    assert ((slope >= 0) & (slope <= 1)).all()
    h = 1e-5
    away = ((x[:, None] - kinks).abs() > 2 * h).all(dim=1)
    differences = (act(x + h) - act(x - h)) / (2 * h)
    torch.testing.assert_close(act.derivative(x)[away], differences[away], rtol=1e-8, atol=1e-9)


@every
def test_function_is_convex_and_infinite_outside_its_domain(act):
    z = inside(act)
    f = act.function(z)
    assert f.dtype == DOUBLE
    assert torch.isfinite(f).all()
    middle = act.function((z[:, None] + z[None]) / 2)
    assert (middle <= (f[:, None] + f[None]) / 2 + 1e-14).all()
    low, high = domain(act)
    outside = torch.tensor(
        [end for end in (low - 1e-9, low - 3, high + 1e-9, high + 3) if math.isfinite(end)], dtype=DOUBLE
    )
    assert torch.isinf(act.function(outside)).all()


def test_function_of_softplus_is_the_dilogarithm():
    z = torch.tensor([0.0, math.log(2), 1.0, 60.0, math.inf], dtype=DOUBLE)
    at_1 = sum(math.exp(-k) / k**2 for k in range(1, 60))
    known = [math.pi**2 / 6, math.pi**2 / 12 - math.log(2) ** 2 / 2, at_1, math.exp(-60), 0.0]
    torch.testing.assert_close(Softplus().function(z), torch.tensor(known, dtype=DOUBLE), rtol=1e-14, atol=0.0)


@smooth
def test_two_derivatives_of_the_activation(act):
    x = (2 * torch.randn(8, dtype=DOUBLE)).requires_grad_()
    assert gradcheck(act, x, check_forward_ad=True)
    assert gradgradcheck(act, x)


def test_options_compare_and_show_themselves():
    assert ReLU() == ReLU() != HardTanh()
    assert len({LeakyReLU(), LeakyReLU(slope=0.01), LeakyReLU(slope=0.2)}) == 2
    assert (
        repr(BorderZero(SoftThreshold(0.1), (2, 3)))
        == "BorderZero(activation=SoftThreshold(threshold=0.1), size=(2, 3))"
    )
    assert BorderZero(ReLU(), (2, 3)) == BorderZero(ReLU(), (2, 3)) != BorderZero(Tanh(), (2, 3))
    assert hash(BorderZero(ReLU(), (2, 3))) == hash(BorderZero(ReLU(), (2, 3)))


# BorderZero


def assert_rounded(found, expected):
    """Equal to rounding: an entry's last bit may depend on whether the processor computed it in a vector or alone."""
    torch.testing.assert_close(found, expected, rtol=4e-15, atol=4e-15)


@every
@pytest.mark.parametrize("size", [(4, 3), (4, 5), (6, 5), (1, 1)])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_a_border_is_zero_and_the_inside_as_without(act, size, alpha):
    h, w = size
    bordered = BorderZero(act, size)
    x = batch_last(4, 3, 6, 5)
    kept = x.clone()
    methods = [
        (bordered, act, 0.0),
        (lambda x: bordered.prox(x, alpha), lambda x: act.prox(x, alpha), 0.0),
        (lambda x: bordered.reflect(x, alpha), lambda x: act.reflect(x, alpha), -x),
        (bordered.derivative, act.derivative, 0.0),
        (bordered.function, act.function, torch.inf),
    ]
    for mine, whole, outside in methods:
        expected = torch.full_like(x, outside) if isinstance(outside, float) else outside.clone()
        expected[:, :, :h, :w] = whole(x)[:, :, :h, :w]
        for image in (x, x.contiguous(), x.to(memory_format=torch.channels_last), x.mT.contiguous().mT):
            found = mine(image)
            assert_rounded(found, expected)
            border = torch.ones_like(x, dtype=torch.bool)
            border[:, :, :h, :w] = False
            assert torch.equal(found[border], expected[border])
            assert found.stride() == image.stride()
        assert_rounded(mine(x[:1].expand(4, -1, -1, -1)), mine(x[:1]).expand(4, -1, -1, -1))
    assert torch.equal(x, kept)
    inside_zero = torch.zeros_like(x)
    assert torch.equal(bordered.function(inside_zero)[:, :, h:], inside_zero[:, :, h:])


@every
def test_a_border_has_two_derivatives_and_keeps_the_layout(act):
    bordered = BorderZero(act, (2, 3))
    x = batch_last(2, 1, 3, 4).requires_grad_()
    z = bordered(x)
    assert z.stride() == x.stride()
    (slope,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(slope, bordered.derivative(x.detach()), rtol=1e-14, atol=1e-15)
    assert gradcheck(bordered, x, check_forward_ad=True)
    if act in SMOOTH:
        assert gradgradcheck(bordered, x)
    with torch.no_grad():
        assert torch.equal(bordered(x), z)


# Diagonal


@pytest.mark.parametrize("alpha", ALPHAS)
def test_diagonal_is_the_resolvent_of_theorem_3(alpha):
    x, slope = batch_last(5, 3, 4, 2), batch_last(5, 3, 4, 2).sigmoid()
    slope[0], slope[1] = 0.0, 1.0
    act = Diagonal(slope)
    z = act.prox(x, alpha)
    torch.testing.assert_close(z[2:], x[2:] / (1 + alpha * (1 / slope[2:] - 1)), rtol=1e-13, atol=0.0)
    assert torch.equal(z[0], torch.zeros_like(z[0]))
    assert torch.equal(z[1], x[1])
    assert z.stride() == x.stride()
    torch.testing.assert_close(act.reflect(x, alpha), 2 * z - x, rtol=1e-14, atol=1e-14)
    # The minimum of 1/2 (x - z)^2 + alpha f(z), beside which both neighbours are higher; f is infinite where slope = 0.
    function = lambda z: torch.where(z == 0, 0.0, (1 / slope - 1) * z.square() / 2)
    objective = lambda z: (x - z).square() / 2 + alpha * function(z)
    assert torch.isfinite(objective(z)).all()
    assert (objective(z) < torch.minimum(objective(z - 1e-5), objective(z + 1e-5))).all()


def test_diagonal_is_its_own_derivative_and_can_be_narrowed():
    slope, x = batch_last(5, 3, 4, 2).sigmoid(), batch_last(5, 3, 4, 2)
    act, rows = Diagonal(slope), torch.tensor([4, 1])
    assert torch.equal(act(x), slope * x)
    assert torch.equal(act.derivative(x), slope)
    for alpha in (0.3, 2.0, 0.3, 1.0):  # a factor of an earlier alpha, or of more samples, must not be used again
        whole = act.prox(x, alpha)
        few = act.take(rows)
        assert torch.equal(few.prox(x[rows], alpha), whole[rows])
        torch.testing.assert_close(whole, x * slope / (slope + alpha * (1 - slope)), rtol=1e-14, atol=0.0)
        assert few.slope.permute(2, 3, 1, 0).is_contiguous()
    broken = slope.clone()
    broken[2] = torch.nan
    assert torch.equal(Diagonal(broken).prox(x, 0.3)[3:], act.prox(x, 0.3)[3:])  # one sample that failed stays alone
    empty = Diagonal(slope[:0])
    assert empty.prox(x[:0], 0.3).shape == x[:0].shape


# Names and rejections


@pytest.mark.parametrize(
    ("given", "made"),
    [
        *((name, cls()) for name, cls in NAMES.items()),
        (torch.relu, ReLU()),
        (F.relu, ReLU()),
        (torch.tanh, Tanh()),
        (torch.arctan, Arctan()),
        (F.elu, ELU()),
        (nn.ELU(0.4), ELU(scale=0.4)),
        (torch.sigmoid, Sigmoid()),
        (F.softplus, Softplus()),
        (F.leaky_relu, LeakyReLU()),
        (F.softshrink, SoftThreshold()),
        (F.hardtanh, HardTanh()),
        (nn.ReLU(inplace=True), ReLU()),
        (nn.LeakyReLU(0.3), LeakyReLU(slope=0.3)),
        (nn.Tanh(), Tanh()),
        (nn.Sigmoid(), Sigmoid()),
        (nn.Softplus(), Softplus()),
        (nn.Softshrink(0.2), SoftThreshold(threshold=0.2)),
        (nn.Hardtanh(), HardTanh()),
        (BorderZero(ReLU(), (2, 2)), BorderZero(ReLU(), (2, 2))),
    ],
)
def test_what_an_activation_can_be_asked_for_by(given, made):
    found = activation(given)
    assert found == made
    x = torch.linspace(-3, 3, 25, dtype=DOUBLE)
    if callable(given) and not isinstance(given, ProximalActivation):
        torch.testing.assert_close(found(x), given(x.clone()), rtol=0, atol=1e-15)


class Squared(nn.Module):
    def forward(self, x):
        return x.square()


class GELU(nn.Module):
    """A user's class with the same name."""


NEITHER = "it decreases for some negative x, and its slope exceeds 1 for some positive x. Supported: relu, leaky-relu"
UNWRITTEN = "it is a proximal map, but its prox\\^alpha is not implemented"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("rellu", ValueError, r"there is no activation 'rellu'; did you mean 'relu'\? known: relu, leaky-relu, elu"),
        ("leaky_relu", ValueError, "did you mean 'leaky-relu'"),
        ("ReLU", ValueError, "there is no activation 'ReLU'; .*known: relu"),
        ("GELU", ValueError, f"activation is 'GELU'; it is not a proximal map: {NEITHER}"),
        ("swish", ValueError, NEITHER),
        (F.gelu, ValueError, NEITHER),
        (F.silu, ValueError, NEITHER),
        (nn.GELU(), ValueError, f"activation is GELU.*{NEITHER}"),
        (nn.SiLU(), ValueError, NEITHER),
        (nn.Mish(), ValueError, NEITHER),
        (nn.Hardswish(), ValueError, NEITHER),
        (nn.SELU(), ValueError, "not a proximal map: its slope exceeds 1 near 0"),
        (nn.Hardshrink(), ValueError, "it is not continuous.*soft-threshold"),
        (nn.ELU(1.5), ValueError, "ELU.scale is 1.5; it must be a number above 0 and at most 1"),
        (nn.CELU(), ValueError, UNWRITTEN),
        (nn.LogSigmoid(), ValueError, UNWRITTEN),
        (nn.ReLU6(), ValueError, UNWRITTEN),
        (nn.Softmax(dim=1), ValueError, "it does not act elementwise"),
        (nn.PReLU(), ValueError, r"its slope is learned and may leave \[0, 1\]"),
        (nn.RReLU(), ValueError, "its slope is random during training"),
        (nn.Identity(), ValueError, r"use LeakyReLU\(slope=1.0\) for the identity"),
        (nn.Softplus(beta=2.0), ValueError, "only torch's default options are supported"),
        (nn.Hardtanh(0.0, 1.0), ValueError, "only torch's default options are supported"),
        (nn.LeakyReLU(0.0), ValueError, "LeakyReLU.slope is 0.0; it must be a number above 0 and at most 1"),
        (nn.LeakyReLU(-0.1), ValueError, "LeakyReLU.slope is -0.1"),
        (
            torch.sin,
            TypeError,
            "which is not known to be a proximal map .*never decrease, and have slope at most 1",
        ),
        (Squared(), TypeError, r"activation is Squared\(\), which is not known"),
        (GELU(), TypeError, "which is not known to be"),
        (lambda x: x, TypeError, "your own is a subclass of equipoise.operators.ProximalActivation"),
        (3, TypeError, "activation is 3, which"),
        ([], TypeError, r"activation is \[\], which"),
        (ReLU, TypeError, r"activation is the class ReLU; give an object: ReLU\(\)"),
        (nn.ReLU, TypeError, r"give an object: ReLU\(\)"),
    ],
)
def test_what_is_not_a_proximal_activation_is_rejected(given, error, words):
    with pytest.raises(error, match=words):
        activation(given)


@pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "selu",
        "celu",
        "softsign",
        "logsigmoid",
        "tanhshrink",
        "hardsigmoid",
        "relu6",
    ],
)
def test_the_reason_given_for_a_rejection_is_true(name):
    x = torch.linspace(-8, 8, 4001, dtype=DOUBLE)
    slopes = getattr(F, name)(x).diff() / x.diff()
    decreases, steep = bool((slopes < -1e-9).any()), bool((slopes > 1 + 1e-9).any())
    reason = REFUSED[name]
    assert decreases == ("decreases" in reason)
    assert steep == ("exceeds 1" in reason)
    assert ("it is a proximal map" in reason) == (not decreases and not steep)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LeakyReLU(slope=0.0), ValueError, "LeakyReLU.slope is 0.0; it must be a number above 0 and at most 1"),
        (lambda: LeakyReLU(slope=1.5), ValueError, "LeakyReLU.slope is 1.5"),
        (lambda: LeakyReLU(slop=0.1), TypeError, "LeakyReLU has no option 'slop'; did you mean 'slope'"),
        (lambda: SoftThreshold(threshold=-1.0), ValueError, "SoftThreshold.threshold is -1.0; .* at least 0"),
        (
            lambda: BorderZero("relu", (2, 2)),
            TypeError,
            "BorderZero.activation is 'relu'; it must be a ProximalActivation",
        ),
        (
            lambda: BorderZero(ReLU(), 2),
            ValueError,
            r"BorderZero.size is 2; it must be \(rows, columns\), whole numbers",
        ),
        (lambda: BorderZero(ReLU(), (2, 0)), ValueError, r"BorderZero.size is \(2, 0\)"),
        (lambda: BorderZero(ReLU(), (2, 2.0)), ValueError, r"BorderZero.size is \(2, 2.0\)"),
        (
            lambda: BorderZero(ReLU(), (2, 2))(torch.zeros(3, 4)),
            ValueError,
            r"shape \(3, 4\); it must be \(batch, channels",
        ),
        (lambda: BorderZero(ReLU(), (2, 5))(torch.zeros(1, 1, 4, 4)), ValueError, "at least 2 rows and 5 columns"),
    ],
)
def test_a_bad_option_gets_its_sentence(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("act", [Tanh(), LeakyReLU(), SoftThreshold()], ids=repr)
@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_alpha_is_rejected(act, alpha):
    with pytest.raises(ValueError, match="alpha is .*; it must be a number above 0"):
        act.prox(torch.ones(2), alpha)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), "1", None, True])
@pytest.mark.parametrize("act", [Tanh(), LeakyReLU(), SoftThreshold()], ids=repr)
def test_an_alpha_of_invalid_type_is_rejected(act, alpha):
    with pytest.raises((ValueError, TypeError), match=f"alpha is {alpha!r}; it must be a number above 0"):
        act.prox(torch.ones(2), alpha)

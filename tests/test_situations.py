"""Situations that training code gets into, each of which went wrong once."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import equipoise as eq

DOUBLE = torch.float64
TIGHT = eq.Tolerance(1e-12, max_steps=500)


class Cell(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.W = nn.Linear(n, n)

    def forward(self, z, x):
        return torch.tanh(0.6 * self.W(z) + x)


class Dropped(Cell):
    def __init__(self):
        super().__init__()
        self.drop = eq.VariationalDropout(0.5)

    def forward(self, z, x):
        return torch.tanh(self.drop(0.6 * self.W(z)) + x)


@pytest.fixture
def layer():
    return eq.Equilibrium(Cell().double(), solver=eq.Picard(), tolerance=TIGHT)


@pytest.fixture
def x():
    return torch.linspace(-4, 4, 64, dtype=DOUBLE).reshape(16, 4)  # samples of very different difficulty


def unrolled(cell, x, parameters=None):
    z = torch.zeros_like(x)
    for _ in range(300):
        z = torch.func.functional_call(cell, parameters, (z, x)) if parameters else cell(z, x)
    return z


def test_parameters_swapped_around_the_layer_still_get_their_gradients(layer, x):
    """The backward pass must not look at the parameters that are back in place by then."""
    fast = {name: (0.5 * p).detach().requires_grad_() for name, p in layer.named_parameters()}
    sol = torch.func.functional_call(layer, fast, (x,))
    found = torch.autograd.grad(sol.square().sum(), list(fast.values()), retain_graph=True)
    inner = {name.removeprefix("f."): p for name, p in fast.items()}
    expected = torch.autograd.grad(unrolled(layer.f, x, inner).square().sum(), list(fast.values()))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    with pytest.raises(RuntimeError, match="f has changed since the forward pass"):
        torch.autograd.grad(sol.square().sum(), list(fast.values()), create_graph=True)


def test_a_reused_input_buffer_does_not_spoil_the_gradient(layer, x):
    buffer = x.clone()
    value = layer(buffer)
    expected = torch.autograd.grad(unrolled(layer.f, x).sum(), list(layer.parameters()))
    buffer.normal_()
    found = torch.autograd.grad(value.sum(), list(layer.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_switching_to_eval_before_backward_keeps_the_dropout_mask(x):
    layer = eq.Equilibrium(Dropped().double(), solver=eq.Picard(), tolerance=TIGHT)
    gradients = []
    for switch in (False, True):
        torch.manual_seed(0)
        layer.train()
        value = layer(x)
        layer.train(not switch)
        gradients.append(torch.autograd.grad(value.sum(), list(layer.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-10)


def test_a_captured_tensor_with_another_path_gets_both_gradients_with_create_graph(layer, x):
    leaf = x.clone().requires_grad_()
    h = 2 * leaf
    W = layer.f.W.weight

    def loss(value):
        return value.square().sum() + h.sum()

    options = {"tolerance": TIGHT}
    value = eq.fixed_point(lambda z: torch.tanh(0.3 * z @ W + h), torch.zeros_like(x), **options).value
    (found,) = torch.autograd.grad(loss(value), h, create_graph=True)
    z = torch.zeros_like(x)
    for _ in range(200):
        z = torch.tanh(0.3 * z @ W + h)
    (expected,) = torch.autograd.grad(loss(z), h, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), [leaf, W], retain_graph=True),
        torch.autograd.grad(expected.square().sum(), [leaf, W], retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_weight_reached_directly_and_through_a_captured_tensor_is_counted_once(layer, x):
    W = layer.f.W.weight
    h = x @ W
    f = lambda z: torch.tanh(0.3 * z @ W + h)
    value = eq.fixed_point(f, torch.zeros_like(x), tolerance=TIGHT).value
    z = torch.zeros_like(x)
    for _ in range(200):
        z = f(z)
    for create_graph in (False, True):
        (found,) = torch.autograd.grad(value.sum(), W, retain_graph=True, create_graph=create_graph)
        (expected,) = torch.autograd.grad(z.sum(), W, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_two_inner_steps_of_meta_learning(layer, x):
    cell = layer.f

    def adapt(solve):
        fast = dict(cell.named_parameters())
        for _ in range(2):
            gradients = torch.autograd.grad(solve(fast).square().sum(), list(fast.values()), create_graph=True)
            fast = {name: p - 0.01 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        return torch.autograd.grad(solve(fast).sum(), list(cell.parameters()))

    def implicit(fast):
        f = lambda z, x: torch.func.functional_call(cell, fast, (z, x))
        return eq.fixed_point(f, torch.zeros_like(x), x, tolerance=TIGHT).value

    torch.testing.assert_close(adapt(implicit), adapt(lambda fast: unrolled(cell, x, fast)), rtol=1e-7, atol=1e-9)


def test_inference_mode_solves_like_no_grad(layer, x):
    solve = lambda: eq.fixed_point(layer.f, torch.zeros_like(x), x, solver=eq.NewtonKrylov(), tolerance=TIGHT)
    with torch.no_grad():
        expected = solve()
    with torch.inference_mode():
        found = solve()
        with pytest.raises(RuntimeError, match="inference_mode"):
            eq.spectral_radius(layer.f, expected.value, x)
    assert torch.equal(found.stats.steps, expected.stats.steps)
    torch.testing.assert_close(found.value, expected.value)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_stays_visible_in_the_gradient(layer, x, bad):
    cotangent = torch.ones_like(x)
    cotangent[3] = bad
    inputs = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(inputs).backward(cotangent)
    assert not torch.isfinite(inputs.grad[3]).any()
    assert torch.isfinite(inputs.grad[:3]).all()


def test_forward_mode_is_refused(layer, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            layer(dual)


def test_dropout_in_a_nested_solve_keeps_its_mask(x):
    drop = eq.VariationalDropout(0.5)
    inner = lambda z, u: 0.3 * drop(z) + u
    tight = {"tolerance": eq.Tolerance(1e-10, max_steps=200)}
    outer = lambda z, x: torch.tanh(0.3 * eq.fixed_point(inner, torch.zeros_like(z), z, **tight).value + x)
    assert eq.fixed_point(outer, torch.zeros_like(x), x, **tight).converged.all()


def test_a_nested_solve_has_the_right_gradient(x):
    W = (0.5 * torch.linalg.qr(torch.randn(4, 4, dtype=DOUBLE))[0]).requires_grad_()
    inner = lambda z, u: torch.tanh(z @ W + u)
    outer = lambda z, x: torch.tanh(0.5 * eq.fixed_point(inner, torch.zeros_like(z), z, tolerance=TIGHT).value + x)
    value = eq.fixed_point(outer, torch.zeros_like(x), x, tolerance=eq.Tolerance(1e-11, max_steps=200)).value
    z = torch.zeros_like(x)
    for _ in range(60):
        u = torch.zeros_like(x)
        for _ in range(60):
            u = inner(u, z)
        z = torch.tanh(0.5 * u + x)
    torch.testing.assert_close(
        torch.autograd.grad(value.sum(), W), torch.autograd.grad(z.sum(), W), rtol=1e-7, atol=1e-9
    )


def test_a_mask_that_cannot_follow_its_samples_is_refused(x):
    drop = eq.VariationalDropout(0.5)
    f = lambda z, x: 0.5 * drop(z.reshape(-1, 2)).reshape(z.shape) + x
    with pytest.raises(RuntimeError, match="follow its samples"):
        eq.fixed_point(f, torch.zeros_like(x), x)


def test_the_norm_constraint_holds_under_autocast():
    constrained = eq.SpectralNorm(nn.Linear(150, 150), bound=0.9)
    nn.init.normal_(constrained.layer.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = constrained.weight()
    assert torch.linalg.matrix_norm(weight.float(), 2) <= 0.9 * (1 + 1e-6)


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.Picard(), eq.NewtonKrylov()], ids=repr)
def test_backward_inside_autocast(solver):
    f, x = Cell(), torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = eq.fixed_point(f, torch.zeros(1, 4), x, solver=solver, tolerance=eq.Tolerance(2e-2), on_failure="ignore")
        sol.value.sum().backward()
    assert torch.isfinite(f.W.weight.grad).all()


def test_the_value_may_be_changed_in_place(x):
    f = Cell().double()
    model = nn.Sequential(eq.Equilibrium(f, tolerance=TIGHT), nn.ReLU(inplace=True))
    found = torch.autograd.grad(model(x).square().sum(), f.W.weight)
    torch.testing.assert_close(
        found, torch.autograd.grad(unrolled(f, x).relu().square().sum(), f.W.weight), rtol=1e-8, atol=1e-10
    )
    pair = eq.fixed_point(lambda z, x: (f(z[1], x), 0.5 * z[0]), (torch.zeros_like(x),) * 2, x, tolerance=TIGHT).value
    pair[0].add_(1)
    (pair[0] * pair[1]).sum().backward()


def test_when_every_sample_is_bad_the_message_is_about_that():
    f = Cell()
    f.W.weight.data.fill_(torch.nan)
    g = lambda z, x: f(z.view(len(z), -1), x) / z.abs().max()
    with pytest.warns(eq.ConvergenceWarning, match="at the very start"):
        value = eq.fixed_point(g, torch.ones(3, 4), torch.ones(3, 4)).value
    value.sum().backward()
    assert torch.isfinite(value).all()


def test_a_model_that_solves_in_a_method_is_not_accused_of_its_other_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.cell = Cell()
            self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

        def step(self, z, h):
            return self.cell(z, h)

        def forward(self, x):
            h = self.stem(x)
            return self.head(eq.fixed_point(lambda z: self.step(z, h), torch.zeros_like(h)).value)

    Model()(torch.randn(6, 4)).sum().backward()  # a warning would be an error here


def test_noise_inside_f_is_not_blamed_on_an_unused_parameter():
    class Noisy(Cell):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, z, x):
            return self.drop(super().forward(z, x))

    with pytest.warns(eq.ImpureFunctionWarning):
        eq.fixed_point(Noisy(), torch.zeros(6, 4), torch.randn(6, 4), on_failure="ignore")


def test_gradients_of_a_cell_with_dropout_check_out_and_the_seed_is_kept():
    cell = Dropped()
    before = torch.get_rng_state()
    check = eq.check_gradients(cell, torch.zeros(1, 4), torch.ones(5, 4), tolerance=eq.Tolerance(1e-6))
    assert check.ok, str(check)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_initial_state_suits_autocast_and_integer_inputs():
    stem, layer = nn.Linear(4, 4), eq.Equilibrium(Cell(), tolerance=eq.Tolerance(2e-2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(stem(torch.randn(3, 4))).dtype == torch.float32
    with pytest.raises(TypeError, match="initial="):
        eq.Equilibrium(Cell())(torch.ones(3, 4, dtype=torch.int64))


def test_writing_over_an_input_is_refused():
    def f(z, x):
        h = x
        h += 0.1 * z
        return h

    with pytest.raises(RuntimeError, match="in place"):
        eq.fixed_point(f, torch.zeros(2, 3), torch.ones(2, 3))

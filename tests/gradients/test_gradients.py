"""Every gradient rule gives the gradient it promises, to every order, for every tensor that f depends on."""

import copy
import gc
import math
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import grad, gradcheck, gradgradcheck

import equipoise as eq
from corpus import CASES, DOUBLE, dense_gradient, flatten, randn, solvable, unflatten
from equipoise import Result

EXACT = eq.Tolerance(relative=1e-13, max_steps=1000)

PLAIN = {"picard": eq.Picard(), "picard-damped": eq.Picard(damping=0.4)}
ACCELERATED = {
    "anderson": eq.Anderson(),
    "anderson-type-1": eq.Anderson(kind=1),
    "anderson-mixing": eq.Anderson(mixing=0.7, restart=2.0),
    "broyden": eq.Broyden(),
    "broyden-line-search": eq.Broyden(memory=5, line_search=3),
    "newton-gmres": eq.NewtonKrylov(),
    "newton-bicgstab": eq.NewtonKrylov(inner=eq.BiCGStab()),
}
KRYLOV = {"gmres": eq.GMRES(), "bicgstab": eq.BiCGStab()}
SOLVERS = {**PLAIN, **ACCELERATED}


def inputs_with_gradient(case):
    """Fresh inputs of a case that require gradients, and their leaves."""
    leaves = [tensor.clone().requires_grad_() for tensor in flatten(case.inputs)]
    return unflatten(case.inputs, leaves), leaves


def cotangent_of(case):
    leaves = flatten(case.answer)
    return unflatten(case.answer, [randn(*leaf.shape, seed=40 + i) for i, leaf in enumerate(leaves)])


def gradients_of(case, **options):
    """The gradients a solve gives, and those of the dense implicit function theorem."""
    inputs, leaves = inputs_with_gradient(case)
    options = {"tolerance": EXACT, **options}
    sol = eq.fixed_point(case.f, case.z0, *inputs, **options)
    cotangent = cotangent_of(case)
    found = grad(flatten(sol.value), [*leaves, *case.parameters], flatten(cotangent))
    known = type(case)(case.f, case.z0, inputs, case.answer, case.parameters)
    return found, dense_gradient(known, cotangent, [*leaves, *case.parameters]), sol


# The implicit gradient against the dense one


@pytest.mark.parametrize(("problem", "name"), solvable(SOLVERS, PLAIN))
def test_implicit_gradient_is_that_of_the_dense_system(problem, name):
    case = CASES[problem]()
    found, known, sol = gradients_of(case, solver=SOLVERS[name])
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert sol.backward.converged.all()


@pytest.mark.parametrize("name", {**ACCELERATED, **KRYLOV})
@pytest.mark.parametrize("problem", ["expansive", "network", "two_leaves", "nested"])
def test_any_solver_serves_the_backward_pass(problem, name):
    solver = {**ACCELERATED, **KRYLOV}[name]
    gradient = eq.ImplicitGradient(solver=solver, tolerance=EXACT)
    tolerance = eq.Tolerance(relative=1e-12, max_steps=500)
    found, known, sol = gradients_of(CASES[problem](), solver=eq.Anderson(), tolerance=tolerance, gradient=gradient)
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert (sol.backward.residual <= 1e-13).all()


def test_newton_hands_its_inner_solver_to_the_backward_pass():
    """Plain Newton steps would find the answer in one step of many products; GMRES takes n of one each."""
    _, _, sol = gradients_of(CASES["dense_affine"](), solver=eq.NewtonKrylov())
    assert sol.backward.steps.max() <= 7
    assert sol.backward.evaluations <= 8


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("check_every", [1, 4])
def test_options_of_the_loop_change_no_gradient(compact, check_every):
    found, known, _ = gradients_of(CASES["network"](), compact=compact, check_every=check_every)
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


# Finite differences: first and second derivatives

N = 2
W = 0.4 * randn(N, N, seed=50)
X = randn(2, N, seed=51)
EASY_AND_HARD = torch.tensor([[0.05], [0.95]], dtype=DOUBLE)  # one sample is done long before the other
Z0 = torch.zeros(2, N, dtype=DOUBLE)

RULES = {
    "anderson": (eq.Anderson(), None),
    "picard": (eq.Picard(), None),
    "broyden": (eq.Broyden(), None),
    "newton": (eq.NewtonKrylov(), None),
    "gmres": (eq.Anderson(), eq.GMRES()),
    "bicgstab": (eq.Anderson(), eq.BiCGStab()),
}


def equilibrium(f, z0, *inputs, backward=None, **options):
    gradient = eq.ImplicitGradient(solver=backward)
    return eq.fixed_point(f, z0, *inputs, gradient=gradient, tolerance=EXACT, **options).value


def leaf(tensor):
    return tensor.clone().requires_grad_()


def check_both(function, *tensors):
    tensors = [leaf(tensor) for tensor in tensors]
    assert gradcheck(function, tensors, atol=1e-6)
    assert gradgradcheck(function, tensors, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_inputs_and_captured_leaves(rule):
    """With gathering in the forward and backward solves."""
    solver, backward = rule
    shapes = []

    def solve(w, x):
        def f(z, x, gain):
            shapes.append(len(z))
            return gain * torch.tanh(z @ w.mT + x)

        return equilibrium(f, Z0, x, EASY_AND_HARD, solver=solver, backward=backward)

    check_both(solve, W, X)
    assert 1 in shapes


def test_gathering_is_active_in_the_backward_solve():
    x = leaf(X)
    f = lambda z, x, gain: gain * torch.sin(z + x)
    sol = eq.fixed_point(f, Z0, x, EASY_AND_HARD, solver=eq.Picard(), tolerance=EXACT)
    sol.value.sum().backward()
    assert sol.backward.rows < 2 * sol.backward.evaluations
    assert sol.backward.steps[0] < sol.backward.steps[1]


def test_an_input_that_decides_the_difficulty():
    check_both(lambda gain, x: equilibrium(lambda z, gain, x: gain * torch.sin(z + x), Z0, gain, x), EASY_AND_HARD, X)


def test_captured_nonleaf_tensors():
    def solve(w, x):
        weight, bias = torch.sin(w), x * x
        return equilibrium(lambda z: torch.tanh(z @ weight.mT + bias), Z0)

    check_both(solve, W, X)


def test_captured_nonleaf_beside_inputs_and_gathering():
    def solve(w, x):
        weight = torch.sin(w)
        return equilibrium(lambda z, x, gain: gain * torch.tanh(z @ weight.mT + x), Z0, torch.cos(x), EASY_AND_HARD)

    check_both(solve, W, X)


def test_an_input_that_is_captured_as_well():
    def solve(w, x):
        return equilibrium(lambda z, y: torch.tanh(z @ w.mT + y) + 0.1 * x * y, Z0, x, compact=False)

    check_both(solve, W, X)


def test_an_input_that_stems_from_a_captured_leaf():
    def solve(w, x):
        return equilibrium(lambda z, y: torch.tanh(z @ w.mT + y) + 0.1 * x * y, Z0, torch.sin(x), compact=False)

    check_both(solve, W, X)


def test_one_tensor_as_two_inputs():
    check_both(lambda x: equilibrium(lambda z, a, b: 0.3 * torch.sin(z * a) + b, Z0, x, x), X)


def test_pieces_of_one_tensor_as_inputs():
    def solve(x):
        a, b = (2 * x).chunk(2, dim=1)
        return equilibrium(lambda z, a, b: 0.3 * torch.sin(z * a) + b, Z0, a, b)

    check_both(solve, torch.cat([X, 0.5 * X], dim=1))


def test_nested_inputs():
    def solve(w, x):
        f = lambda z, given: torch.tanh(z @ w.mT * given[1][0] + given[0])
        return equilibrium(f, Z0, (x, [torch.cos(x), EASY_AND_HARD]))

    check_both(solve, W, X)


def test_tuple_states():
    z0 = (Z0, (torch.zeros(2, 1, N, dtype=DOUBLE),))

    def solve(w, x):
        def f(z, x, gain):
            a, (b,) = z
            return gain * torch.tanh(b[:, 0] @ w.mT + x), (0.5 * torch.sin(a)[:, None] + w[0],)

        a, (b,) = equilibrium(f, z0, x, EASY_AND_HARD)
        return a, b

    check_both(solve, W, X)


def test_only_one_leaf_of_a_tuple_state_in_the_loss():
    z0 = (Z0, torch.zeros(2, 1, dtype=DOUBLE))

    def solve(w, x):
        f = lambda z, x: (torch.tanh(z[0] @ w.mT + x), 0.3 * z[1] + z[0].sum(dim=1, keepdim=True))
        return equilibrium(f, z0, x)[1]

    check_both(solve, W, X)


class Cell(nn.Module):
    def __init__(self, n=N):
        super().__init__()
        self.inner, self.outer = nn.Linear(n, n), nn.Linear(n, n, bias=False)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.outer(x))


def test_module_parameters():
    """gradcheck changes the parameters in place."""
    layer = eq.Equilibrium(Cell().double(), tolerance=EXACT)
    parameters = tuple(layer.parameters())
    assert len(parameters) == 3
    assert gradcheck(lambda *_: layer(X), parameters)
    assert gradgradcheck(lambda *_: layer(X), parameters, atol=1e-5)


def test_complex_states_inputs_and_captures():
    c = X + 1j * randn(2, N, seed=52)
    check_both(
        lambda w, c: equilibrium(lambda z, c: 0.3 * torch.sin(z) * w[0] + c * w[1], Z0.to(torch.complex128), c), W, c
    )


@pytest.mark.parametrize("coupled", [False, True])
def test_complex_and_real_states_together(coupled):
    """An odd number of real numbers before the complex ones, in a batch of one: torch's complex views need even."""
    x = randn(1, 3, seed=55)
    z0 = torch.zeros_like(x), torch.zeros(1, 2, dtype=torch.complex128)

    def solve(w, x):
        def f(z, x):
            a, b = z
            return torch.sin(x + 0.1 * a * w[0, 0] + b.real.sum()), 0.2j * b + a[:, :2] * w[1]

        a, b = equilibrium(f, z0, x, coupled=coupled)
        return a.sum() + b.abs().sum()

    check_both(solve, 0.1 * W.detach(), x)


def test_channels_last_states():
    weight, x = 0.3 * randn(2, 2, 1, 1, seed=53), randn(2, 2, 1, 2, seed=54).to(memory_format=torch.channels_last)
    check_both(
        lambda w, x: equilibrium(
            lambda z, x: torch.tanh(torch.einsum("oikl,bihw->bohw", w, z) + x), torch.zeros_like(x), x
        ),
        weight,
        x,
    )


def test_layers_in_a_row():
    def solve(w, x):
        y = equilibrium(lambda z, x: torch.tanh(z @ w.mT + x), Z0, x)
        return equilibrium(lambda z, y: torch.tanh(z @ w.mT + 0.5 * y), Z0, y)

    check_both(solve, W, X)


def test_a_layer_captured_by_the_next():
    def solve(w, x):
        y = equilibrium(lambda z, x: torch.tanh(z @ w.mT + x), Z0, x)
        return equilibrium(lambda z: torch.tanh(z @ w.mT + 0.5 * y), Z0)

    check_both(solve, W, X)


def test_a_fixed_point_inside_f():
    def solve(w, x):
        def f(z, x):
            inner = equilibrium(lambda u, z: 0.3 * torch.tanh(u) + z, torch.zeros_like(z), z)
            return torch.tanh(0.3 * inner @ w.mT + x)

        return equilibrium(f, Z0, x)

    tensors = [leaf(W), leaf(X)]
    assert gradcheck(solve, tensors, fast_mode=True)
    assert gradgradcheck(solve, tensors, fast_mode=True, atol=1e-5)


def test_third_derivative_by_the_closed_form():
    """z = a / (1 + z) has z = (sqrt(1 + 4 a) - 1) / 2."""
    a = torch.tensor([[0.5], [2.0]], dtype=DOUBLE, requires_grad=True)
    z = equilibrium(lambda z, a: a / (1 + z), torch.zeros(2, 1, dtype=DOUBLE), a)
    root = (1 + 4 * a.detach()).sqrt()
    torch.testing.assert_close(z.detach(), (root - 1) / 2)
    for exact in (1 / root, -2 / root**3, 12 / root**5):
        (z,) = grad(z.sum(), a, create_graph=True)
        torch.testing.assert_close(z.detach(), exact, rtol=1e-8, atol=1e-8)


def test_third_derivative_of_a_captured_tensor():
    """z = a z + 1 has z = 1 / (1 - a), whose kth derivative is k! / (1 - a)^(k+1)."""
    a = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    z = equilibrium(lambda z: a * z + 1, torch.zeros(1, 1, dtype=DOUBLE)).sum()
    for k in range(1, 4):
        (z,) = grad(z, a, create_graph=True)
        assert z.item() == pytest.approx(math.factorial(k) * 2 ** (k + 1), rel=1e-8)


def test_gradient_penalty():
    """The gradient of a squared input gradient, as in a critic's loss, against finite differences."""

    def penalty(w):
        x = leaf(X)
        y = equilibrium(lambda z, x: torch.tanh(z @ w.mT + x), Z0, x)
        (g,) = grad(y.square().sum(), x, create_graph=True)
        return g.square().sum()

    assert gradcheck(penalty, leaf(W))


# Phantom


def contraction(w):
    return lambda z, x: torch.tanh(z @ w.mT + x)


def solved(w, x, **options):
    options = {"tolerance": EXACT, **options}
    return eq.fixed_point(contraction(w), Z0, x, **options)


def test_one_phantom_step_is_the_gradient_of_f_alone():
    w, x = leaf(W), leaf(X)
    sol = solved(w, x, gradient=eq.PhantomGradient(steps=1))
    v = randn(2, N, seed=60)
    found = grad(sol.value, (w, x), v)
    exact = grad(contraction(w)(sol.value.detach(), x), (w, x), v)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_phantom_steps_are_damped_steps_from_the_equilibrium(damping):
    w, x = leaf(W), leaf(X)
    sol = solved(w, x, gradient=eq.PhantomGradient(steps=3, damping=damping))
    z = sol.value.detach()
    for _ in range(3):
        z = (1 - damping) * contraction(w)(z, x) + damping * z
    v = randn(2, N, seed=61)
    for a, b in zip(grad(sol.value, (w, x), v), grad(z, (w, x), v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_phantom_approaches_the_implicit_gradient(damping):
    w, x = leaf(W), leaf(X)
    exact = grad(solved(w, x).value.sum(), w)[0]
    errors = []
    for steps in (1, 4, 16, 64):
        found = grad(solved(w, x, gradient=eq.PhantomGradient(steps, damping)).value.sum(), w)[0]
        errors.append((found - exact).norm().item())
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-8


def test_phantom_leaves_the_value_alone():
    w, x = leaf(W), leaf(X)
    plain = solved(w.detach(), X)
    sol = solved(w, x, gradient=eq.PhantomGradient(5, 0.5))
    assert torch.equal(sol.value, plain.value)


def test_second_derivative_of_phantom_steps():
    """That of the recorded steps, with the equilibrium held fixed."""
    w = leaf(W)
    sol = solved(w, X, gradient=eq.PhantomGradient(2))
    z = sol.value.detach()
    for _ in range(2):
        z = contraction(w)(z, X)

    def second(y):
        (g,) = grad(y.sum(), w, create_graph=True)
        return grad(g.square().sum(), w)[0]

    torch.testing.assert_close(second(sol.value), second(z), rtol=1e-10, atol=1e-12)


# Unrolled


def by_hand(f, z, x, steps):
    for _ in range(steps):
        z = f(z, x)
    return z


@pytest.mark.parametrize("steps", [1, 5])
def test_unrolled_is_plain_recorded_iteration(steps):
    w, x, z0 = leaf(W), leaf(X), leaf(randn(2, N, seed=62))
    sol = eq.fixed_point(contraction(w), z0, x, gradient=eq.UnrolledGradient(steps), on_failure="ignore")
    expected = by_hand(contraction(w), z0, x, steps)
    torch.testing.assert_close(sol.value, expected, rtol=0, atol=0)
    v = randn(2, N, seed=63)
    for a, b in zip(grad(sol.value, (w, x, z0), v), grad(expected, (w, x, z0), v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("expands", [False, True])
def test_unrolled_is_the_same_without_gradients(expands):
    """Where plain steps lead away from the equilibrium, the best iterate would be the first."""
    w = leaf(3 * W if expands else W)
    rule = {"gradient": eq.UnrolledGradient(4), "on_failure": "ignore"}
    f = lambda z, x: z @ w.mT + x
    expected = eq.fixed_point(f, Z0, X, **rule)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = eq.fixed_point(f, Z0, X, **rule)
            assert torch.equal(found.value, expected.value)
            assert not found.value.requires_grad
            assert found.stats.steps.tolist() == expected.stats.steps.tolist()
    with torch.no_grad():
        assert eq.fixed_point(lambda z, x: x, Z0, X, **rule).value.data_ptr() != X.data_ptr()


def test_unrolled_gradient_reaches_the_start_alone():
    """Nothing but z0 requires a gradient."""
    z0 = leaf(Z0)
    sol = eq.fixed_point(contraction(W), z0, X, gradient=eq.UnrolledGradient(3), on_failure="ignore")
    (found,) = grad(sol.value.sum(), z0)
    (exact,) = grad(by_hand(contraction(W), z0, X, 3).sum(), z0)
    torch.testing.assert_close(found, exact)


def test_unrolled_gradient_reaches_a_broadcast_start():
    w, z0 = leaf(W), leaf(torch.zeros(1, N, dtype=DOUBLE))
    sol = eq.fixed_point(contraction(w), z0, X, gradient=eq.UnrolledGradient(3), on_failure="ignore")
    (found,) = grad(sol.value.sum(), z0)
    (exact,) = grad(by_hand(contraction(w), z0.expand(2, N), X, 3).sum(), z0)
    torch.testing.assert_close(found, exact)


def test_unrolled_second_derivatives():
    solve = lambda w, x: (
        eq.fixed_point(contraction(w), Z0, x, gradient=eq.UnrolledGradient(3), on_failure="ignore").value
    )
    check_both(solve, W, X)


def test_unrolled_statistics():
    w = leaf(W)
    sol = solved(w, X, gradient=eq.UnrolledGradient(4), trace=True, on_failure="ignore")
    assert sol.stats.evaluations == 5  # one more to measure the residual
    assert sol.stats.rows == 10
    assert sol.stats.steps.tolist() == [5, 5]
    assert sol.stats.trace.shape == (5, 2)
    image = contraction(w)(sol.value, X)
    torch.testing.assert_close(sol.stats.residual, ((image - sol.value).norm(dim=1) / image.norm(dim=1)).detach())
    assert sol.result.tolist() == [Result.MAX_STEPS] * 2


def test_unrolled_residual_of_a_zero_answer_is_zero():
    w = leaf(W)
    sol = eq.fixed_point(lambda z, x: z @ w.mT + x, Z0, 0 * X, gradient=eq.UnrolledGradient(2), trace=True)
    assert sol.converged.all()
    assert torch.equal(sol.stats.trace, torch.zeros(3, 2, dtype=DOUBLE))


def test_unrolled_reports_what_is_not_finite():
    w, x = leaf(W), X.clone()
    x[1] = torch.nan
    with pytest.warns(eq.ConvergenceWarning, match="NONFINITE"):
        sol = eq.fixed_point(contraction(w), Z0, x, gradient=eq.UnrolledGradient(30))
    assert sol.result.tolist()[1] == Result.NONFINITE


def test_implicit_gradient_does_not_reach_the_start():
    w, z0 = leaf(W), leaf(Z0)
    sol = eq.fixed_point(contraction(w), z0, X)
    assert grad(sol.value.sum(), z0, allow_unused=True) == (None,)


# Living with a training loop


def test_repeated_backward_with_retain_graph():
    w, x = leaf(W), leaf(X)
    sol = solved(w, x)
    first = grad(sol.value.sum(), (w, x), retain_graph=True)
    second = grad(sol.value.sum(), (w, x), retain_graph=True)
    third = grad(3 * sol.value.sum(), (w, x))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 3 * a)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        grad(sol.value.sum(), (w, x))


def test_backward_accumulates_into_grad():
    layer = eq.Equilibrium(Cell().double(), tolerance=EXACT)
    for _ in range(2):
        layer(X).sum().backward()
    twice = layer.f.inner.weight.grad.clone()
    layer.zero_grad()
    layer(X).sum().backward()
    torch.testing.assert_close(twice, 2 * layer.f.inner.weight.grad)


def test_several_calls_before_backward():
    layer = eq.Equilibrium(Cell().double(), tolerance=EXACT)
    parameters = list(layer.parameters())
    batches = [X, 2 * X, layer(X)]
    each = [grad(layer(x).square().sum(), parameters, retain_graph=True) for x in batches]
    together = grad(sum(layer(x).square().sum() for x in batches), parameters)
    for i, total in enumerate(together):
        torch.testing.assert_close(total, each[0][i] + each[1][i] + each[2][i], rtol=1e-9, atol=1e-12)


def test_recurrent_use_of_one_layer():
    """The answer of one call is the input of the next, three times over."""
    layer = eq.Equilibrium(Cell().double(), tolerance=EXACT)

    def run(*_):
        x = X
        for _ in range(3):
            x = layer(x)
        return x

    assert gradcheck(run, tuple(layer.parameters()), fast_mode=True)


def test_eval_mode_and_no_grad():
    layer = eq.Equilibrium(Cell().double(), tolerance=EXACT)
    training = layer(X)
    layer.eval()
    evaluating = layer(X)
    assert torch.equal(training, evaluating)
    assert evaluating.requires_grad
    with torch.no_grad():
        silent = layer(X)
    assert not silent.requires_grad
    assert torch.equal(silent, training)


def test_f_is_recorded_only_when_a_gradient_is_needed():
    """The record costs one more evaluation; statistics count the solver's own."""
    calls = []

    def f(z, x):
        calls.append(torch.is_grad_enabled())
        return 0.5 * z + x

    sol = eq.fixed_point(f, Z0, X)
    assert len(calls) == sol.stats.evaluations
    calls.clear()
    sol = eq.fixed_point(f, Z0, leaf(X))
    assert len(calls) == sol.stats.evaluations + 1


@pytest.mark.parametrize("steps", [40, 400])
def test_what_is_kept_for_backward_does_not_grow_with_the_steps(steps):
    w = leaf(0.999 * torch.eye(N, dtype=DOUBLE))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        eq.fixed_point(
            lambda z, x: z @ w.mT + x,
            Z0,
            X,
            solver=eq.Picard(),
            tolerance=eq.Tolerance(relative=1e-12, max_steps=steps),
            on_failure="ignore",
        )
    assert len(saved) < 12


def test_deepcopy():
    layer = eq.Equilibrium(Cell().double(), initial=(N,), solver=eq.Broyden(memory=7), tolerance=EXACT)
    layer(X).sum().backward()
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(X), layer(X))
    with torch.no_grad():
        twin.f.inner.weight.zero_()
    assert not torch.equal(twin(X), layer(X))
    assert twin.solver == eq.Broyden(memory=7)


def test_pickle():
    layer = eq.Equilibrium(
        Cell().double(),
        initial=(N,),
        solver=eq.NewtonKrylov(inner=eq.BiCGStab()),
        gradient=eq.ImplicitGradient(solver=eq.GMRES(memory=3), tolerance=eq.Tolerance(relative=1e-9)),
        tolerance=EXACT,
    )
    layer(X).sum().backward()
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(X), layer(X))
    assert (twin.solver, twin.gradient, twin.tolerance) == (layer.solver, layer.gradient, layer.tolerance)


def test_state_dict_is_that_of_f():
    layer = eq.Equilibrium(Cell())
    before = set(vars(layer))
    layer(torch.randn(3, N)).sum().backward()
    assert set(vars(layer)) == before  # nothing is stored on the layer
    assert list(layer.state_dict()) == ["f.inner.weight", "f.inner.bias", "f.outer.weight"]


def test_pickle_of_a_solution():
    w = leaf(W)
    sol = solved(w, X)
    sol.value.sum().backward()
    again = pickle.loads(pickle.dumps(sol))
    assert torch.equal(again.value, sol.value)
    assert torch.equal(again.backward.steps, sol.backward.steps)
    assert str(again) == str(sol)


def test_threads():
    """Four threads solve and differentiate one layer, twice over, at once."""
    layer = eq.Equilibrium(Cell(5).double(), tolerance=EXACT)
    layer.f.spare = nn.Parameter(torch.ones(3, dtype=DOUBLE))  # an unused parameter
    parameters = [p for name, p in layer.named_parameters() if name != "f.spare"]
    batches = [randn(6, 5, seed=70 + i) for i in range(4)]

    def derivatives(x):
        first = grad(layer(x).square().sum(), parameters, create_graph=True)
        second = grad(sum(g.square().sum() for g in first), parameters)
        return [*first, *second]

    expected = [derivatives(x) for x in batches]
    found = [None] * 4
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait()
        found[i] = derivatives(batches[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_initial_forms():
    cell = Cell().double()
    expected = eq.Equilibrium(cell, tolerance=EXACT)(X)
    for initial in ((N,), [N], lambda x: torch.zeros_like(x)):
        torch.testing.assert_close(eq.Equilibrium(cell, initial=initial, tolerance=EXACT)(X), expected)
    pair = eq.Equilibrium(lambda z, x: (0.5 * z[0] + x, 0.5 * z[1]), initial=((N,), (3, 1)))
    assert [part.shape for part in pair(X)] == [(2, N), (2, 3, 1)]


def test_warm_start_of_a_layer():
    layer = eq.Equilibrium(Cell().double(), tolerance=eq.Tolerance(relative=1e-8))
    cold = layer.solve(X)
    warm = layer.solve(X + 1e-6, z0=cold.value)
    assert warm.stats.steps.max() < cold.stats.steps.min()


# The backward solve


def test_backward_statistics():
    w = leaf(W)
    sol = solved(w, X, solver=eq.Picard())
    assert sol.backward is None
    assert sol.adjoint is None
    sol.value.sum().backward()
    assert sol.backward.converged.tolist() == [True, True]
    assert sol.backward.steps.shape == (2,)
    assert (sol.backward.residual <= EXACT.relative).all()
    assert 1 < sol.backward.steps.max() <= sol.backward.evaluations
    z = sol.value.detach()
    J = (1 - z.square())[:, :, None] * W  # the derivative of tanh at z*, where tanh(...) = z
    u = sol.adjoint
    torch.testing.assert_close(u, torch.ones_like(u) + (u[:, None] @ J)[:, 0])


def test_failed_backward_solve_warns():
    w = leaf(W)
    gradient = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=2))
    sol = solved(w, X, gradient=gradient)
    with pytest.warns(eq.ConvergenceWarning, match=r"backward solve failed for some samples \(MAX_STEPS"):
        sol.value.sum().backward()
    assert sol.backward.result.tolist() == [Result.MAX_STEPS] * 2
    assert torch.isfinite(w.grad).all()


def test_failed_backward_solve_raises_when_asked():
    w = leaf(W)
    gradient = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=2))
    sol = solved(w, X, gradient=gradient, on_failure="raise")
    with pytest.raises(eq.ConvergenceError, match="backward solve failed for 2 of 2") as caught:
        sol.value.sum().backward()
    assert caught.value.statistics.result.tolist() == [Result.MAX_STEPS] * 2
    assert w.grad is None


def test_failed_backward_solve_is_ignored_when_asked():
    w = leaf(W)
    gradient = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solved(w, X, gradient=gradient, on_failure="ignore").value.sum().backward()


def test_failed_samples_are_differentiated_at_their_best_iterate():
    w = leaf(W)
    tolerance = eq.Tolerance(relative=1e-12, max_steps=3)
    with pytest.warns(eq.ConvergenceWarning, match="forward"):
        sol = solved(w, X, tolerance=tolerance, gradient=eq.ImplicitGradient(tolerance=EXACT))
    (found,) = grad(sol.value.sum(), w)
    z = sol.value.detach()
    image = contraction(w)(z, X)
    J = (1 - image.detach().square())[:, :, None] * W
    u = torch.linalg.solve((torch.eye(N, dtype=DOUBLE) - J).mT, torch.ones(2, N, dtype=DOUBLE))
    torch.testing.assert_close(found, grad(image, w, u)[0])


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_gradient_is_linear_in_the_loss(scale):
    """An absolute tolerance speaks of z; the size of a loss's gradient has nothing to do with it."""
    w = leaf(W)
    sol = solved(w, X, tolerance=eq.Tolerance(relative=1e-12, absolute=1e-6, max_steps=500))
    (one,) = grad(sol.value.sum(), w, retain_graph=True)
    (scaled,) = grad(scale * sol.value.sum(), w)
    torch.testing.assert_close(scaled / scale, one, rtol=1e-5, atol=0)


def test_absolute_tolerance_alone_still_gives_a_gradient():
    w = leaf(W)
    sol = solved(w, X, tolerance=eq.Tolerance(relative=0.0, absolute=1e-8, max_steps=500))
    (small,) = grad(1e-6 * sol.value.sum(), w)
    exact = grad(solved(w, X).value.sum(), w)[0]
    torch.testing.assert_close(1e6 * small, exact, rtol=1e-4, atol=1e-6)


def test_zero_cotangent():
    """A sample that the loss does not look at has the adjoint zero at once."""
    w, x = leaf(W), leaf(X)
    sol = solved(w, x)
    sol.value[0].sum().backward()
    assert sol.backward.converged.all()
    assert sol.backward.steps[1] == 1
    assert (x.grad[1] == 0).all()


@pytest.mark.parametrize("nested", [False, True])
def test_warm_start_of_the_backward_solve(nested):
    w = leaf(W)
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(relative=1e-10, max_steps=200)}
    f, z0 = contraction(w), Z0
    if nested:
        f, z0 = lambda z, x: (contraction(w)(z[0], x), 0.5 * z[1] + z[0][:, :1]), (Z0, Z0[:, :1])
    cold = eq.fixed_point(f, z0, X, **options)
    sum(part.sum() for part in flatten(cold.value)).backward()
    first = w.grad.clone()
    w.grad = None
    warm = eq.fixed_point(f, z0, X, gradient=eq.ImplicitGradient(start=cold.adjoint), **options)
    sum(part.sum() for part in flatten(warm.value)).backward()
    assert warm.backward.steps.max() <= 2 < cold.backward.steps.min()
    torch.testing.assert_close(w.grad, first, rtol=1e-8, atol=1e-10)


def test_shine_estimate_of_a_scalar_affine_problem_is_exact():
    """In one dimension a secant knows the slope, so the adjoint needs no step beyond the first look."""
    rate = torch.tensor([[0.5], [-2.0]], dtype=DOUBLE, requires_grad=True)
    sol = eq.fixed_point(
        lambda z, rate: rate * z + 1,
        torch.zeros(2, 1, dtype=DOUBLE),
        rate,
        solver=eq.Broyden(),
        gradient=eq.ImplicitGradient(shine=True),
        tolerance=eq.Tolerance(relative=1e-10),
    )
    sol.value.sum().backward()
    assert sol.backward.steps.tolist() == [1, 1]
    torch.testing.assert_close(rate.grad, 1 / (1 - rate.detach()) ** 2)


def test_shine_start_is_better_than_none_and_the_gradient_is_exact():
    case = CASES["dense_affine"]()
    options = {"solver": eq.Broyden(memory=20), "tolerance": eq.Tolerance(relative=1e-12, max_steps=100)}
    found, known, _ = gradients_of(case, gradient=eq.ImplicitGradient(shine=True), **options)
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    raw = {"tolerance": eq.Tolerance(max_steps=1)}
    guess = gradients_of(case, gradient=eq.ImplicitGradient(shine=True, **raw), on_failure="ignore", **options)[2]
    plain = gradients_of(case, gradient=eq.ImplicitGradient(**raw), on_failure="ignore", **options)[2]
    assert (guess.backward.residual < plain.backward.residual).all()


def test_second_derivatives_with_shine():
    solve = lambda w, x: (
        eq.fixed_point(
            contraction(w), Z0, x, solver=eq.Broyden(), gradient=eq.ImplicitGradient(shine=True), tolerance=EXACT
        ).value
    )
    check_both(solve, W, X)


# Samples that are not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", [eq.ImplicitGradient(), eq.PhantomGradient(3)], ids=["implicit", "phantom"])
def test_a_bad_sample_spoils_no_gradient(rule, bad):
    w, b = leaf(W), leaf(X[0])
    x = randn(5, N, seed=80)
    f = lambda z, x: torch.tanh(z @ w.mT + x - x.square() + b)
    z0 = torch.zeros(1, N, dtype=DOUBLE)
    spoiled = x.clone()
    spoiled[2] = bad
    good = torch.tensor([0, 1, 3, 4])
    sol = eq.fixed_point(f, z0, spoiled, gradient=rule, tolerance=EXACT, on_failure="ignore")
    assert sol.result.tolist() == [0, 0, Result.NONFINITE, 0, 0]
    assert torch.isfinite(sol.value).all()
    found = grad(sol.value.sum(), (w, b))
    clean = eq.fixed_point(f, z0, x[good], gradient=rule, tolerance=EXACT)
    for a, c in zip(found, grad(clean.value.sum(), (w, b)), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-12)


def test_statistics_of_the_backward_solve_cover_the_whole_batch():
    """Also when a bad sample was left out of it."""
    w, x = leaf(W), X.clone()
    x[0] = torch.nan
    sol = solved(w, x, on_failure="ignore")
    sol.value.sum().backward()
    assert sol.backward.result.shape == sol.backward.steps.shape == sol.backward.residual.shape == (2,)
    assert sol.backward.converged.tolist()[1]
    assert sol.adjoint.shape == sol.value.shape


def test_warm_start_beside_a_bad_sample():
    w, x = leaf(W), leaf(X)
    sol = solved(w, x)
    sol.value.sum().backward()
    exact = x.grad[1]
    bad = X.clone()
    bad[0] = torch.nan
    bad.requires_grad_()
    warm = solved(w, bad, gradient=eq.ImplicitGradient(start=sol.adjoint), on_failure="ignore")
    warm.value.sum().backward()
    torch.testing.assert_close(bad.grad[1], exact)


def test_shine_beside_a_bad_sample():
    w, x = leaf(W), leaf(X)
    exact = grad(solved(w, x).value.sum(), x)[0][1]
    bad = X.clone()
    bad[0] = torch.nan
    bad.requires_grad_()
    gradient = eq.ImplicitGradient(shine=True)
    solved(w, bad, solver=eq.Broyden(), gradient=gradient, on_failure="ignore").value.sum().backward()
    torch.testing.assert_close(bad.grad[1], exact)


def test_a_sample_with_image_zero_keeps_its_gradient():
    """||f(z) - z|| / ||f(z)|| is infinite there, f is not."""
    x = torch.tensor([[0.0], [1.0]], dtype=DOUBLE, requires_grad=True)
    z0 = torch.full((2, 1), 1e-6, dtype=DOUBLE)
    sol = eq.fixed_point(lambda z, x: 2 * x, z0, x, tolerance=eq.Tolerance(absolute=1e-3))
    assert sol.converged.all()
    sol.value.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 1), 2.0, dtype=DOUBLE))


# Memory


@pytest.fixture
def _no_cyclic_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Traced(Cell):
    """A module that can tell who still holds what it computed."""

    def forward(self, z, x):
        out = super().forward(z, x)
        self.seen = weakref.ref(out)
        return out


@pytest.mark.usefixtures("_no_cyclic_collector")
@pytest.mark.parametrize("rule", [eq.ImplicitGradient(), eq.PhantomGradient(2), eq.UnrolledGradient(40)], ids=str)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_nothing_outlives_a_solution(rule, order):
    cell = Traced().double()
    x = X.clone().requires_grad_()
    sol = eq.fixed_point(cell, Z0, x, gradient=rule, tolerance=eq.Tolerance(max_steps=100))
    value = sol.value
    if order == 1:
        value.sum().backward()
    if order == 2:
        (g,) = grad(value.sum(), x, create_graph=True)
        g.square().sum().backward()
        del g
    watched = {
        "solution": weakref.ref(sol),
        "value": weakref.ref(value),
        "problem": weakref.ref(sol.solved.problem),
        "image": cell.seen,
        "input": weakref.ref(x),
        "f": weakref.ref(cell),
    }
    del sol, value, x, cell
    assert {name for name, ref in watched.items() if ref() is not None} == set()


@pytest.mark.usefixtures("_no_cyclic_collector")
def test_the_value_may_outlive_its_solution():
    w = leaf(W)
    sol = solved(w, X)
    value, watched = sol.value, weakref.ref(sol)
    del sol
    assert watched() is None
    value.sum().backward()
    assert w.grad.abs().sum() > 0


# Other ways of running a layer


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.NewtonKrylov()], ids=str)
def test_autocast(solver):
    """The backward pass runs after the context has been left, in the mode of the forward pass."""
    cell, x = Cell(8), torch.randn(4, 8)
    layer = eq.Equilibrium(cell, solver=solver, tolerance=eq.Tolerance(relative=1e-2))
    parameters = list(cell.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    found = grad(y.square().sum(), parameters)
    exact = eq.Equilibrium(cell, tolerance=eq.Tolerance(relative=1e-6))(x)
    assert y.dtype == torch.float32
    assert (y - exact).norm() / exact.norm() < 0.03
    for a, b in zip(found, grad(exact.square().sum(), parameters), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    layer, x = eq.Equilibrium(Cell().double(), tolerance=EXACT), leaf(X)
    (exact,) = grad(layer(x).square().sum(), x)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, exact)


# Threads


def test_looking_for_gradient_paths_touches_nothing_that_other_threads_use():
    """An unused parameter is looked for by trying other values, while another thread solves the same layer."""

    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(N, N), torch.nn.Linear(N, N)

        def forward(self, z, x):
            return 0.3 * torch.tanh(self.used(z) + self.unused.weight.detach().mean() + x)

    torch.manual_seed(0)
    layer = eq.Equilibrium(Cell().double(), tolerance=eq.Tolerance(1e-6))
    for parameter in layer.f.unused.parameters():
        parameter.requires_grad_(False)
    extra = torch.nn.Parameter(torch.ones(N, dtype=DOUBLE))
    layer.f.register_parameter("extra", extra)  # requires a gradient, and f does not use it: it is tried
    with torch.no_grad():
        expected = layer(X)
    stop, wrong = threading.Event(), []

    def infer():
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(layer(X), expected) or extra.data_ptr() != address:
                    wrong.append(1)

    address = extra.data_ptr()
    others = [threading.Thread(target=infer) for _ in range(2)]
    for thread in others:
        thread.start()
    for _ in range(60):
        layer(X.clone().requires_grad_()).sum().backward()
    stop.set()
    for thread in others:
        thread.join()
    assert not wrong


def test_a_parameter_that_is_tried_is_never_changed():
    weight = torch.nn.Parameter(torch.full((N,), 0.5, dtype=DOUBLE))

    def f(z, x):
        return torch.tanh(weight.detach() * z) + x

    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="captured 'weight' requires a gradient"):
        eq.fixed_point(f, Z0, X.clone().requires_grad_())
    assert torch.equal(weight, before)
    assert weight._version == 0

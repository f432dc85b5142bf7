"""Every misuse gets its sentence: what is wrong, what is allowed, what to do. What is no misuse gets none."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq

X = torch.linspace(-1, 1, 12).reshape(4, 3)
Z = torch.zeros(4, 3)


def f(z, x):
    return 0.5 * torch.tanh(z) + x


# Options


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.Anderson(memmory=3), r"Anderson has no option 'memmory'; did you mean 'memory'\?"),
        (lambda: eq.Broyden(memory=3, linesearch=1), "did you mean 'line_search'"),
        (lambda: eq.Tolerance(rel=1e-3), r"Tolerance has no option 'rel'.*options: relative, absolute, max_steps"),
        (lambda: eq.Tolerance(tol=1e-3), "Tolerance has no option 'tol'"),
        (lambda: eq.Picard(dampening=0.1), "did you mean 'damping'"),
        (lambda: eq.ImplicitGradient(solvers=None), "did you mean 'solver'"),
        (lambda: eq.BiCGStab(memory=3), "BiCGStab has no option 'memory'"),
        (lambda: eq.UnrolledGradient(n=3), "UnrolledGradient has no option 'n'"),
    ],
)
def test_unknown_option_is_answered_with_the_nearest(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.Tolerance(relative=-1e-3), r"Tolerance.relative is -0.001; it must be a number of at least 0"),
        (lambda: eq.Tolerance(absolute=-1.0), "Tolerance.absolute is -1.0"),
        (lambda: eq.Tolerance(relative=float("nan")), "Tolerance.relative is nan"),
        (lambda: eq.Tolerance(relative=float("inf")), "Tolerance.relative is inf"),
        (lambda: eq.Tolerance(max_steps=0), "Tolerance.max_steps is 0; it must be a whole number of at least 1"),
        (lambda: eq.Tolerance(patience=0), r"Tolerance.patience is 0; .* \(or None\)"),
        (lambda: eq.Anderson(memory=0), "Anderson.memory is 0; it must be a whole number of at least 1"),
        (lambda: eq.Anderson(kind=3), "Anderson.kind is 3; allowed: 1, 2"),
        (lambda: eq.Anderson(ridge=-1e-8), "Anderson.ridge is -1e-08"),
        (lambda: eq.Anderson(mixing=0.0), "Anderson.mixing is 0.0; it must be a number above 0 and at most"),
        (lambda: eq.Anderson(mixing=2.5), "Anderson.mixing is 2.5"),
        (lambda: eq.Anderson(restart=0.5), "Anderson.restart is 0.5"),
        (lambda: eq.Picard(damping=1.0), "Picard.damping is 1.0; .* below 1"),
        (lambda: eq.Picard(damping=-0.1), "Picard.damping is -0.1"),
        (lambda: eq.Broyden(memory=0), "Broyden.memory is 0"),
        (lambda: eq.Broyden(line_search=-1), "Broyden.line_search is -1"),
        (lambda: eq.GMRES(memory=0), "GMRES.memory is 0"),
        (lambda: eq.NewtonKrylov(forcing=1.0), "NewtonKrylov.forcing is 1.0"),
        (lambda: eq.NewtonKrylov(inner_steps=0), "NewtonKrylov.inner_steps is 0"),
        (lambda: eq.PhantomGradient(steps=0), "PhantomGradient.steps is 0"),
        (lambda: eq.PhantomGradient(damping=1.0), "PhantomGradient.damping is 1.0"),
        (lambda: eq.UnrolledGradient(steps=0), "UnrolledGradient.steps is 0"),
    ],
)
def test_bad_value_fails_when_the_option_is_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.Anderson(memory=2.5), "Anderson.memory is 2.5; it must be a whole number"),
        (lambda: eq.Anderson(memory="5"), "Anderson.memory is '5'"),
        (lambda: eq.Anderson(memory=True), "Anderson.memory is True"),
        (lambda: eq.Tolerance(relative="1e-3"), "Tolerance.relative is '1e-3'; it must be a number"),
        (lambda: eq.Tolerance(max_steps=1e3), "Tolerance.max_steps is 1000.0; it must be a whole number"),
        (lambda: eq.Picard(damping=None), "Picard.damping is None"),
        (lambda: eq.NewtonKrylov(inner=eq.Picard()), r"NewtonKrylov.inner is Picard.*GMRES\(...\) or BiCGStab\(\)"),
        (lambda: eq.NewtonKrylov(inner="gmres"), "NewtonKrylov.inner is 'gmres'"),
        (lambda: eq.ImplicitGradient(solver="gmres"), "ImplicitGradient.solver is 'gmres'; it must be a Solver"),
        (lambda: eq.ImplicitGradient(solver=eq.GMRES), "not its class"),
        (lambda: eq.ImplicitGradient(tolerance=1e-6), "ImplicitGradient.tolerance is 1e-06; it must be a Tolerance"),
        (lambda: eq.ImplicitGradient(shine=1), "ImplicitGradient.shine is 1; it must be a bool"),
    ],
)
def test_wrong_type_fails_when_the_option_is_made(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize("entry", ["fixed_point", "Equilibrium"])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"solver": "anderson"}, TypeError, r"solver is 'anderson'; it must be an object such as .*Anderson\("),
        ({"solver": eq.Anderson}, TypeError, "solver is .*class.*; it must be an object"),
        ({"solver": eq.Tolerance()}, TypeError, "solver is Tolerance"),
        ({"tolerance": 1e-4}, TypeError, r"tolerance is 0.0001; .*Tolerance\(relative=1e-4\)"),
        ({"gradient": "implicit"}, TypeError, r"gradient is 'implicit'; .*ImplicitGradient\(\)"),
        ({"gradient": eq.ImplicitGradient}, TypeError, "gradient is .*class"),
        ({"on_failure": "error"}, ValueError, "on_failure is 'error'; allowed: 'warn', 'raise', 'ignore'"),
        ({"on_failure": None}, ValueError, "on_failure is None"),
        ({"check_every": 0}, ValueError, "check_every is 0; it must be a whole number of at least 1"),
        ({"check_every": 1.5}, ValueError, "check_every is 1.5"),
        ({"check_every": True}, ValueError, "check_every is True"),
    ],
)
def test_wrong_option_of_the_front_door(entry, options, error, words):
    with pytest.raises(error, match=words):
        eq.fixed_point(f, Z, X, **options) if entry == "fixed_point" else eq.Equilibrium(f, **options)


def test_unknown_option_of_the_front_door():
    with pytest.raises(TypeError, match="tol"):
        eq.fixed_point(f, Z, X, tol=1e-3)
    with pytest.raises(TypeError, match="tol"):
        eq.Equilibrium(f, tol=1e-3)


@pytest.mark.parametrize("initial", [5, "zeros", (3, "a"), (-1,), (2.0,)])
def test_wrong_initial(initial):
    with pytest.raises(TypeError, match="initial is .*shape of one sample"):
        eq.Equilibrium(f, initial=initial)


def test_layer_without_inputs_needs_a_start():
    layer = eq.Equilibrium(lambda z: 0.5 * z + 1)
    with pytest.raises(ValueError, match="needs z0"):
        layer()
    assert layer(z0=Z).shape == Z.shape


# f, z0 and inputs


def test_f_must_be_callable():
    with pytest.raises(TypeError, match="f has type Tensor; it must be a function"):
        eq.fixed_point(X, Z)
    with pytest.raises(TypeError, match="f has type Tensor"):
        eq.Equilibrium(X)


@pytest.mark.parametrize(
    ("g", "error", "words"),
    [
        (lambda z, x: z[:, :2], ValueError, r"f changes the shape of z: z is \(4, 3\), f\(z\) is \(4, 2\)"),
        (lambda z, x: z[:2], ValueError, r"changes the shape.*\(2, 3\)"),
        (lambda z, x: z.sum(), ValueError, r"changes the shape"),
        (lambda z, x: z[:, None], ValueError, r"changes the shape.*\(4, 1, 3\)"),
        (lambda z, x: (z, z), ValueError, r"structured like z: z has 1 tensor\(s\).* 2 nested as \(\*, \*\)"),
        (lambda z, x: (z,), ValueError, r"structured like z"),
        (lambda z, x: z.double(), TypeError, r"f changes the dtype of z: z is torch.float32, f\(z\) is torch.float64"),
        (lambda z, x: z.long(), TypeError, r"f changes the dtype of z.*int64"),
        (lambda z, x: z + 0j, TypeError, r"f changes the dtype of z.*complex64"),
        (lambda z, x: None, TypeError, r"f\(z\) has type NoneType; it must be a tensor"),
        (lambda z, x: z.tolist(), TypeError, r"f\(z\).* has type float; it must be a tensor"),
        (lambda z, x: {"z": z}, TypeError, r"f\(z\) has type dict"),
    ],
)
def test_f_must_return_what_it_was_given(g, error, words):
    with pytest.raises(error, match=words):
        eq.fixed_point(g, Z, X)


@pytest.mark.parametrize(
    "g", [lambda z, x: (z[1], z[0]), lambda z, x: (z[0], (z[1],)), lambda z, x: z[0]], ids=["swap", "nest", "drop"]
)
def test_f_must_keep_the_nesting(g):
    with pytest.raises(ValueError, match=r"structured like z|changes the shape of z: z\[0\]"):
        eq.fixed_point(g, (torch.zeros(4, 3), torch.zeros(4, 2)), X)


def test_shape_is_checked_at_every_call():
    calls = []

    def g(z, x):
        calls.append(z)
        return f(z, x) if len(calls) < 3 else f(z, x)[:, :2]

    with pytest.raises(ValueError, match="changes the shape"):
        eq.fixed_point(g, Z, X)


def test_nan_at_once_warns_with_the_remedy():
    with pytest.warns(eq.ConvergenceWarning, match="NONFINITE.*NaN or infini.*check the inputs"):
        sol = eq.fixed_point(lambda z, x: x / 0 * 0, Z, X)
    assert torch.equal(sol.value, Z)


@pytest.mark.parametrize(
    ("z0", "inputs", "words"),
    [
        (Z, (X.to("meta"),), r"mixed devices: z0 is on cpu, inputs\[0\] on meta"),
        ((Z, Z.to("meta")), (X,), r"mixed devices: z0\[0\] is on cpu, z0\[1\] on meta"),
        (Z.to("meta"), (X,), r"mixed devices: z0 is on meta, inputs\[0\] on cpu"),
    ],
)
def test_mixed_devices(z0, inputs, words):
    with pytest.raises(ValueError, match=words):
        eq.fixed_point(f, z0, *inputs)


def test_f_must_stay_on_the_device():
    with pytest.raises(ValueError, match=r"mixed devices: z0 is on cpu, f\(z\) on meta"):
        eq.fixed_point(lambda z, x: z.to("meta"), Z, X)


@pytest.mark.parametrize("z0", [Z.long(), Z.bool(), (Z, Z.int())])
def test_integer_state(z0):
    with pytest.raises(TypeError, match=r"z0.* is torch\.\w+; a state must be floating point"):
        eq.fixed_point(f, z0, X)


def test_integer_inputs_are_fine():
    table = torch.linspace(0, 1, 5)
    sol = eq.fixed_point(lambda z, i: 0.5 * z + table[i][:, None], torch.zeros(4, 1), torch.tensor([0, 4, 2, 1]))
    torch.testing.assert_close(sol.value[:, 0], 2 * table[[0, 4, 2, 1]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("z0", "inputs", "words"),
    [
        (torch.tensor(0.0), (), "z0 has no dimensions; the first must be the batch"),
        (Z, (torch.tensor(2.0),), r"inputs\[0\] has no dimensions.*belong in f"),
        (Z, (X, (X, torch.tensor(2.0))), r"inputs\[1\]\[1\] has no dimensions"),
        (Z, (X[:3],), r"z0 has batch size 4, others have 3"),
        (Z, (X, X[:3]), r"inputs\[1\] has batch size 3, others have 4"),
        (Z, (X, X[:1]), r"inputs\[1\] has batch size 1, others have 4.*z0 may have 1"),
        (Z, (X, X[:0]), r"inputs\[1\] has batch size 0, others have 4"),
        ((Z, Z[:2]), (), r"z0\[1\] has batch size 2, others have 4"),
        ((), (X,), "z0 is an empty tuple"),
    ],
)
def test_batch_sizes_must_agree(z0, inputs, words):
    with pytest.raises(ValueError, match=words):
        eq.fixed_point(lambda z, *x: z, z0, *inputs)


@pytest.mark.parametrize(
    ("z0", "inputs", "words"),
    [
        (0.0, (), "z0 has type float; it must be a tensor or a"),
        (np.zeros((4, 3)), (X,), "z0 has type ndarray"),
        (None, (X,), "z0 has type NoneType"),
        (Z, (2.0,), r"inputs\[0\] has type float.*belongs in f"),
        (Z, (X, None), r"inputs\[1\] has type NoneType"),
        ({"z": Z}, (X,), "z0 has type dict"),
        (lambda x: None, (X,), "z0 has type NoneType"),
    ],
)
def test_values_must_be_tensors(z0, inputs, words):
    with pytest.raises(TypeError, match=words):
        eq.fixed_point(f, z0, *inputs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.Equilibrium(nn.Linear), r"f is the class Linear; pass an object, such as Linear\(...\)"),
        (lambda: eq.fixed_point(nn.Linear, Z, X), "f is the class Linear"),
        (lambda: eq.FixedSteps(nn.Linear(3, 3), steps=3), "layer has type Linear; it must be an equipoise.Equilibrium"),
        (
            lambda: eq.FixedSteps(eq.Equilibrium(f), steps=3, solver=eq.Picard),
            "solver is <class .*Picard'>; it must be an object such as .*, or None",
        ),
        (
            lambda: eq.fixed_point(f, Z, X, callback=5),
            "callback is 5; it must be a function of one argument",
        ),
        (lambda: eq.fixed_point(f, Z, X, compact="no"), "compact is 'no'; it must be True or False"),
        (lambda: eq.fixed_point(f, Z, X, trace=1), "trace is 1; it must be True or False"),
        (lambda: eq.fixed_point(f, Z, X, coupled="yes"), "coupled is 'yes'"),
        (lambda: eq.Equilibrium(f, compact=None), "compact is None"),
        (lambda: eq.Equilibrium(f, coupled=1), "coupled is 1"),
        (lambda: eq.fixed_point(f, Z.to_sparse(), X), r"z0 is torch.sparse_coo; it must be dense"),
        (lambda: eq.fixed_point(f, Z, X.to_sparse()), r"inputs\[0\] is torch.sparse_coo"),
        (lambda: eq.fixed_point(f, Z.to(torch.float8_e4m3fn), X), "z0 is torch.float8_e4m3fn; a state needs float16"),
        (lambda: eq.fixed_point(f, Z.to("meta"), X.to("meta")), "z0 is on the meta device"),
        (
            lambda: eq.fixed_point(f, torch.nested.nested_tensor([Z[0], Z[1, :2]], layout=torch.jagged), X),
            "z0 is a nested tensor; pad it",
        ),
        (lambda: eq.fixed_point(f, Z, X, None), r"inputs\[1\] has type NoneType.*f\(z, x, mask=None\)"),
        (lambda: eq.Equilibrium(f)(X, mask=X), r"keyword argument 'mask'\. Pass inputs by position: layer\(x, mask\)"),
    ],
)
def test_misunderstandings_get_a_sentence(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_swapped_arguments_are_seen_where_shapes_tell():
    weight = torch.randn(3, 2)
    g = lambda x, z: torch.tanh(z + x @ weight)
    with pytest.raises(RuntimeError, match="The state comes first"):
        eq.fixed_point(g, torch.zeros(4, 2), X)
    with pytest.raises(ValueError, match="The state comes first"):
        eq.fixed_point(lambda x, z: z + 0 * x[:, :1], torch.zeros(4, 2), X)


def test_a_state_of_several_tensors_needs_a_start():
    def pair(z, x):
        a, b = z
        return b / 2 + x, a / 2

    with pytest.raises(ValueError, match=r"f failed at its first call, where z is \(4, 3\).*initial=...\)"):
        eq.Equilibrium(pair)(X)
    with pytest.raises(ValueError, match=r"z has 1 tensor.*f\(z\) has 2 nested as .*initial=\(shape, shape"):
        eq.Equilibrium(lambda z, x: (z / 2, x))(X)
    assert len(eq.Equilibrium(pair, initial=((3,), (3,)))(X)) == 2


def test_gradient_checks_without_anything_to_check():
    with pytest.raises(ValueError, match="the batch is empty.*give at least one sample"):
        eq.check_gradients(f, Z[:0], X[:0])
    ignored = nn.Linear(3, 3)
    check = eq.check_gradients(lambda z, x: 0.5 * z + 1 + 0 * ignored.weight[0, 0].item(), Z, X)
    assert check.ok
    with pytest.raises(ValueError, match="repeats is 0"):
        eq.compare_solvers(f, Z, X, repeats=0)


# Gradients that cannot be had


class Cell(nn.Module):
    """Uses ``cut`` in a way that no gradient survives, and leaves ``unused`` alone."""

    def __init__(self, how, unused=True):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(0.1 * torch.ones(3))
        self.cut = nn.Parameter(0.5 * torch.ones(3))
        if unused:
            self.unused = nn.Linear(3, 5)

    def forward(self, z, x):
        return torch.tanh(self.weight * z + HOW[self.how](self.cut)) + x


def without_grad(p):
    with torch.no_grad():
        return 2 * p


HOW = {
    "detach": lambda p: p.detach(),
    "no_grad": without_grad,
    "data": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "item": lambda p: p[0].item(),
    "used": lambda p: p,
}
CUTS = [how for how in HOW if how != "used"]
RULES = {"implicit": eq.ImplicitGradient(), "phantom": eq.PhantomGradient(), "unrolled": eq.UnrolledGradient(30)}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("how", CUTS)
def test_parameter_cut_off_is_named(how, rule):
    with pytest.raises(RuntimeError, match="parameter 'cut' requires a gradient.*no gradient can reach it.*detach"):
        eq.fixed_point(Cell(how), Z, X, gradient=rule)


@pytest.mark.parametrize("how", CUTS)
def test_captured_tensor_cut_off_is_named(how):
    weight, lost = torch.full((3,), 0.1, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
    with pytest.raises(RuntimeError, match="captured 'lost' requires a gradient"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * z + HOW[how](lost)) + x, Z, X)


@pytest.mark.parametrize("how", CUTS)
def test_input_cut_off_is_named(how):
    weight, x = torch.full((3,), 0.1, requires_grad=True), X.clone().requires_grad_()
    each = lambda x: HOW[how](x) if how != "item" else torch.tensor([[row[0].item()] for row in x])
    with pytest.raises(RuntimeError, match=r"inputs\[1\]\[0\] requires a gradient"):
        eq.fixed_point(lambda z, x, y: torch.tanh(weight * z + x) + each(y[0]), Z, X, (x, X))


def test_captured_module_cut_off_is_named():
    cell = Cell("detach")
    with pytest.raises(RuntimeError, match="captured 'cell': parameter 'cut'"):
        eq.fixed_point(lambda z, x: cell(z, x), Z, X)


def test_captured_nonleaf_cut_off_is_named():
    raw = torch.full((3,), 0.1, requires_grad=True)
    weight, lost = 2 * raw, 3 * raw
    with pytest.raises(RuntimeError, match="captured 'lost'"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * z + lost.detach()) + x, Z, X)


def test_tensor_in_a_captured_container_is_named():
    weight, pair = torch.full((3,), 0.1, requires_grad=True), [torch.ones(3), torch.ones(3, requires_grad=True)]
    with pytest.raises(RuntimeError, match=r"captured 'pair'\[1\]"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * z + pair[1].detach()) + x, Z, X)


def test_tensor_in_a_captured_dict_is_named():
    weights = {"in": torch.full((3,), 0.1, requires_grad=True), "out": torch.ones(3, requires_grad=True)}
    with pytest.raises(RuntimeError, match="captured 'weights'.*out"):
        eq.fixed_point(lambda z, x: torch.tanh(weights["in"] * z + weights["out"].detach()) + x, Z, X)


def test_tensor_in_a_partial_is_named():
    weight = torch.full((3,), 0.1, requires_grad=True)

    def g(bias, z, x):
        return torch.tanh(weight * z + bias.detach()) + x

    with pytest.raises(RuntimeError, match="functools.partial"):
        eq.fixed_point(functools.partial(g, torch.ones(3, requires_grad=True)), Z, X)


def test_tensor_in_a_default_argument_is_named():
    weight, lost = torch.full((3,), 0.1, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="bias"):
        eq.fixed_point(lambda z, x, bias=lost: torch.tanh(weight * z + bias.detach()) + x, Z, X)


def test_parameter_behind_a_bound_method_is_named():
    """f = self.step, the habit of a module that calls fixed_point in its own forward."""
    cell = Cell("detach")
    with pytest.raises(RuntimeError, match="'cut'"):
        eq.fixed_point(cell.forward, Z, X)


def test_parameter_of_a_callable_object_is_named():
    class Plain:
        def __init__(self):
            self.cell = Cell("detach")

        def __call__(self, z, x):
            return self.cell(z, x)

    with pytest.raises(RuntimeError, match="'cut'"):
        eq.fixed_point(Plain(), Z, X)


@pytest.mark.parametrize("how", ["detach", "no_grad", "data", "numpy"])
def test_everything_cut_off_is_named(how):
    """f(z) requires no gradient at all, though its weight does."""
    weight = torch.full((3,), 0.1, requires_grad=True)
    with pytest.raises(RuntimeError, match="captured 'weight' requires a gradient"):
        eq.fixed_point(lambda z, x: torch.tanh(HOW[how](weight) * z) + x, Z, X)


@pytest.mark.parametrize("how", ["detach", "no_grad", "data", "numpy"])
def test_state_cut_off_is_named(how):
    """Without a path to z the Jacobian looks like zero, and the implicit gradient is that of one step: wrong."""
    weight = torch.full((3,), 0.1, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\bz\b.*no gradient can reach it"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * HOW[how](z)) + x, Z, X)


def test_leaf_of_the_state_cut_off_is_named():
    weight = torch.full((3,), 0.1, requires_grad=True)
    f = lambda z, x: (torch.tanh(weight * z[1].detach()) + x, 0.5 * z[0])
    with pytest.raises(RuntimeError, match=r"\bz\[1\].*no gradient can reach it"):
        eq.fixed_point(f, (Z, Z), X)


def test_an_f_that_does_not_look_at_z_passes_silently():
    weight = torch.full((3,), 0.1, requires_grad=True)
    sol = eq.fixed_point(lambda z, x: weight * x, Z, X)
    torch.testing.assert_close(torch.autograd.grad(sol.value.sum(), weight)[0], X.sum(dim=0))
    pair = eq.fixed_point(lambda z, x: (weight * x, 0.5 * z[0]), (Z, Z), X)
    torch.testing.assert_close(torch.autograd.grad(pair.value[1].sum(), weight)[0], 0.5 * X.sum(dim=0))


def test_a_trial_that_ends_in_nan_does_not_prove_a_tensor_unused():
    """sqrt(1 - 0.95) is fine, and a change of 0.95 by a tenth is not."""
    weight, lost = torch.full((3,), 0.1, requires_grad=True), torch.full((3,), 0.95, requires_grad=True)
    with pytest.raises(RuntimeError, match="captured 'lost'"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * z) + x + torch.sqrt(1 - lost.detach()), Z, X)


def test_a_bad_sample_does_not_hide_a_cut():
    weight, lost = torch.full((3,), 0.1, requires_grad=True), torch.ones(3, requires_grad=True)
    x = X.clone()
    x[1] = torch.nan
    with pytest.raises(RuntimeError, match="captured 'lost'"):
        eq.fixed_point(lambda z: torch.tanh(weight * z) + x + lost.detach(), Z, on_failure="ignore")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_unused_parameters_pass_silently_again_and_again(rule):
    cell = Cell("used")
    before = [p.detach().clone() for p in cell.parameters()]
    for _ in range(3):
        eq.fixed_point(cell, Z, X, gradient=rule).value.sum().backward()
    assert cell.unused.weight.grad is None
    assert cell.cut.grad.abs().min() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, cell.parameters(), strict=True))


@pytest.mark.parametrize(
    "unused",
    [X.clone(), 2 * X, X[:1].expand(4, 3), X.to(torch.float16), X[:, None].expand(4, 2, 3)],
    ids=["leaf", "copy", "expanded", "half", "expanded inside"],
)
def test_unused_input_passes_silently(unused):
    leaf = unused if unused.is_contiguous() else None
    y = leaf.requires_grad_() if leaf is not None else unused.clone().requires_grad_()[..., :1].expand(unused.shape)
    weight = torch.full((3,), 0.1, requires_grad=True)
    for _ in range(2):
        eq.fixed_point(lambda z, x, y: torch.tanh(weight * z) + x, Z, X, y)


def test_unused_here_is_not_unused_there():
    """A tensor that one f leaves alone and another cuts off."""
    weight, other = torch.full((3,), 0.1, requires_grad=True), torch.ones(3, requires_grad=True)

    def innocent(z, x):
        if z is None:
            return other
        return torch.tanh(weight * z) + x

    eq.fixed_point(innocent, Z, X)
    with pytest.raises(RuntimeError, match="captured 'other'"):
        eq.fixed_point(lambda z, x: torch.tanh(weight * z + other.detach()) + x, Z, X)


def test_unused_now_is_not_unused_later():
    """A parameter that comes into use, cut off, in a later solve of the same module."""

    class Late(Cell):
        late = False

        def forward(self, z, x):
            out = torch.tanh(self.weight * z) + x
            return out + self.cut.detach() if self.late else out

    cell = Late("used", unused=False)
    eq.fixed_point(cell, Z, X)
    cell.late = True
    with pytest.raises(RuntimeError, match="parameter 'cut'"):
        eq.fixed_point(cell, Z, X)


def test_an_empty_batch_does_not_clear_a_cut_parameter():
    cell = Cell("detach", unused=False)
    eq.fixed_point(cell, Z[:0], X[:0])
    with pytest.raises(RuntimeError, match="parameter 'cut'"):
        eq.fixed_point(cell, Z, X)


def test_one_tensor_given_twice_is_no_misuse():
    x = X.clone().requires_grad_()
    sol = eq.fixed_point(lambda z, a, b: 0.3 * torch.tanh(z) * a + b, Z, x, x)
    assert torch.autograd.grad(sol.value.sum(), x)[0].abs().min() > 0


def test_one_weight_in_two_modules_is_no_misuse():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    with torch.no_grad():
        first.weight.mul_(0.3)
    sol = eq.fixed_point(lambda z, x: torch.tanh(first(second(z))) + x, Z, X)
    assert torch.autograd.grad(sol.value.sum(), first.weight)[0].abs().max() > 0


def test_pieces_of_one_tensor_are_no_misuse():
    """chunk gives several tensors one node of the graph."""
    a, b = (2 * torch.cat([X, X], dim=1).requires_grad_()).chunk(2, dim=1)
    sol = eq.fixed_point(lambda z, a, b: 0.1 * torch.tanh(z) * a + b, Z, a, b)
    ga, gb = torch.autograd.grad(sol.value.sum(), (a, b))
    assert ga.abs().max() > 0
    assert gb.abs().min() > 0


def test_piece_of_a_tensor_that_is_cut_off_is_named():
    a, b = (2 * torch.cat([X, X], dim=1).requires_grad_()).chunk(2, dim=1)
    with pytest.raises(RuntimeError, match=r"inputs\[0\]"):
        eq.fixed_point(lambda z, a, b: 0.1 * torch.tanh(z) * a.detach() + b, Z, a, b)
    with pytest.raises(RuntimeError, match=r"inputs\[1\]"):
        eq.fixed_point(lambda z, a, b: 0.1 * torch.tanh(z) * a + b.detach(), Z, a, b)


def test_frozen_parameters_and_no_grad_pass_silently():
    cell = Cell("detach")
    cell.cut.requires_grad_(False)
    eq.fixed_point(cell, Z, X)
    with torch.no_grad():
        eq.fixed_point(Cell("detach"), Z, X)


# f that is not a function of z


class Around(nn.Module):
    """A contraction around a layer."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), *layers).requires_grad_(False)

    def forward(self, z, x):
        return 0.1 * self.layers(z) + x


def test_batchnorm_in_training_mode_warns():
    with pytest.warns(eq.ImpureFunctionWarning, match=r"layers.1 is a BatchNorm1d in training mode.*GroupNorm"):
        eq.fixed_point(Around(nn.BatchNorm1d(3)), Z, X, on_failure="ignore", compact=False)


def test_dropout_in_training_mode_warns():
    with pytest.warns(eq.ImpureFunctionWarning, match=r"layers.1 is a Dropout in training mode.*VariationalDropout"):
        eq.fixed_point(Around(nn.Dropout(0.5)), Z, X, on_failure="ignore")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=["batchnorm", "dropout"])
def test_captured_layer_in_training_mode_warns(layer):
    with torch.no_grad(), pytest.warns(eq.ImpureFunctionWarning, match="in training mode"):
        eq.fixed_point(lambda z, x: 0.1 * layer(z) + x, Z, X, on_failure="ignore", compact=False)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=["batchnorm", "dropout"])
def test_layers_in_eval_mode_pass_silently(layer):
    assert eq.fixed_point(Around(layer).eval(), Z, X).converged.all()


def test_dropout_of_nothing_passes_silently():
    assert eq.fixed_point(Around(nn.Dropout(0.0)), Z, X).converged.all()


@pytest.mark.parametrize("rule", [eq.ImplicitGradient(), eq.PhantomGradient()], ids=["implicit", "phantom"])
def test_fresh_noise_is_detected_when_a_gradient_is_needed(rule):
    weight = torch.full((3,), 0.1, requires_grad=True)
    noisy = lambda z, x: torch.tanh(weight * z) + x + 0.1 * torch.randn_like(z)
    with pytest.warns(eq.ImpureFunctionWarning, match="not a function of z.*noise"):
        eq.fixed_point(noisy, Z, X, on_failure="ignore", gradient=rule)


@pytest.mark.parametrize("rule", [eq.ImplicitGradient(), eq.PhantomGradient()], ids=["implicit", "phantom"])
def test_a_pure_function_is_not_accused(rule):
    """Neither where it converges to zero, nor where a sample fails."""
    weight = torch.full((3,), 0.5, requires_grad=True)
    x = X.clone()
    x[1] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sol = eq.fixed_point(lambda z, x: weight * z + x, Z, x, gradient=rule)
        assert sol.value[1].abs().max() == 0
        eq.fixed_point(lambda z, x: 9 * weight * torch.sin(5 * z) + x, Z, x, gradient=rule, on_failure="ignore")


# Combinations that cannot be


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Picard(), eq.NewtonKrylov()])
def test_shine_needs_broyden(solver):
    weight = torch.full((3,), 0.1, requires_grad=True)
    with pytest.raises(TypeError, match=r"shine=True\) reuses Broyden's estimate, but the forward solver is"):
        eq.fixed_point(
            lambda z, x: torch.tanh(weight * z) + x, Z, X, solver=solver, gradient=eq.ImplicitGradient(shine=True)
        )


def test_unrolling_calls_no_callback():
    weight = torch.full((3,), 0.1, requires_grad=True)
    with pytest.raises(ValueError, match="UnrolledGradient .*calls no callback"):
        eq.fixed_point(
            lambda z, x: torch.tanh(weight * z) + x, Z, X, gradient=eq.UnrolledGradient(20), callback=lambda p: None
        )


def test_a_start_of_the_wrong_shape_is_refused_by_name():
    weight = torch.full((3,), 0.1, requires_grad=True)
    for start in (torch.zeros(4, 2), torch.zeros(3, 3), (Z, Z)):
        with pytest.raises((ValueError, TypeError), match="start"):
            eq.fixed_point(
                lambda z, x: torch.tanh(weight * z) + x, Z, X, gradient=eq.ImplicitGradient(start=start)
            ).value.sum().backward()

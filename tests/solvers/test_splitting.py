"""Splitting solvers find the equilibrium of a monotone problem and its gradients, as the dense truth has them."""

import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from corpus import DOUBLE, flatten, per_sample, randn, true_residual, unflatten
from dense import Spec, differentiable_equilibrium, equilibrium, slope, unrow
from equipoise import operators as ops

TIGHT = eq.Tolerance(relative=1e-11, max_steps=5000, patience=None)
SPECS = {
    "dense": Spec(6),
    "conv": Spec(2, (3, 2), 1.0, True),
    "multitier": Spec((2, 1), (3, 2), 1.0, True),
}
ACTIVATIONS = {
    "relu": (ops.ReLU(), torch.relu),
    "leaky-relu": (ops.LeakyReLU(slope=0.3), functools.partial(F.leaky_relu, negative_slope=0.3)),
    "elu": (ops.ELU(), F.elu),
    "tanh": (ops.Tanh(), torch.tanh),
    "arctan": (ops.Arctan(), torch.arctan),
    "sigmoid": (ops.Sigmoid(), torch.sigmoid),
    "softplus": (ops.Softplus(), F.softplus),
    "soft-threshold": (ops.SoftThreshold(threshold=0.2), functools.partial(F.softshrink, lambd=0.2)),
    "hard-tanh": (ops.HardTanh(), F.hardtanh),
}
SMOOTH = ["elu", "tanh", "arctan", "sigmoid", "softplus"]
SOLVERS = {
    "fb": eq.ForwardBackward(),
    "pr": eq.PeacemanRachford(),
    "pr-memory": eq.PeacemanRachford(memory=3),
    "dr": eq.DouglasRachford(),
    "dr-memory": eq.DouglasRachford(memory=3),
}

each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
each_kind = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class Case:
    """An operator, an activation, a bias, and their equilibrium by dense algebra."""

    def __init__(self, spec, name="relu", batch=3, seed=0, scale=0.2):
        self.spec = spec
        self.op = spec.build(seed=seed, scale=scale)
        for key, p in self.op.named_parameters():
            if key[0] in "gs":
                p.data -= 2  # a small ||I - W||, for the sake of forward-backward
        self.activation, self.s = ACTIVATIONS[name]
        self.problem = ops.MonotoneProblem(self.op, self.activation)
        self.bias = spec.randn(batch, seed=seed + 1)

    def answer(self, bias=None):
        with torch.no_grad():
            rows = per_sample(self.bias if bias is None else bias)
            return equilibrium(self.spec.matrix(self.op), self.s, rows, self.spec.interior())

    def graph(self, order=1):
        """The same with exact derivatives."""
        W = self.spec.matrix(self.op)
        return differentiable_equilibrium(W, self.s, per_sample(self.bias), self.spec.interior(), order)

    def zeros(self):
        return unflatten(self.bias, [torch.zeros_like(leaf) for leaf in flatten(self.bias)])

    def lipschitz(self):
        W = self.spec.matrix(self.op).detach()
        return float(torch.linalg.matrix_norm(torch.eye(len(W), dtype=DOUBLE) - W, ord=2))

    def solve(self, solver, tolerance=TIGHT, **options):
        return eq.fixed_point(self.problem, self.zeros(), self.bias, solver=solver, tolerance=tolerance, **options)

    def sources(self):
        """Bias and parameters, ready for gradients."""
        return [leaf.requires_grad_() for leaf in flatten(self.bias)] + list(self.op.parameters())

    def names(self):
        return ["bias"] * len(flatten(self.bias)) + [name for name, _ in self.op.named_parameters()]


def assert_solved(case, sol, tolerance=1e-8):
    assert sol.converged.all()
    torch.testing.assert_close(per_sample(sol.value).detach(), case.answer(), rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        again = true_residual(case.problem, sol.value, case.bias)
    # W z + b follows from numbers that may be much larger than f(z): rounding counts that much more.
    torch.testing.assert_close(sol.stats.residual, again, rtol=0.01, atol=1e-11)


# The equilibrium


def with_activations(few, but=()):
    """Every kind of operator with a few activations, the dense one with all ``but`` some."""
    names = [name for name in ACTIVATIONS if name not in but]
    pairs = [(kind, name) for kind in SPECS for name in names if kind == "dense" or name in few]
    return pytest.mark.parametrize(("kind", "name"), pairs)


@with_activations({"relu", "tanh", "soft-threshold"})
@each_solver
def test_finds_the_dense_equilibrium(kind, name, solver):
    case = Case(SPECS[kind], name)
    with torch.no_grad():
        assert_solved(case, case.solve(solver))


@each_kind
@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("alpha", [0.2, 1, 4.0])
@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("method", [eq.PeacemanRachford, eq.DouglasRachford])
def test_any_alpha_gives_the_same_point(spec, name, alpha, memory, method):
    case = Case(spec, name)
    with torch.no_grad():
        assert_solved(case, case.solve(method(alpha=alpha, memory=memory)))


@each_kind
@pytest.mark.parametrize("name", ["relu", "softplus"])
@pytest.mark.parametrize("fraction", [0.2, 0.9])
def test_forward_backward_below_its_bound(spec, name, fraction):
    case = Case(spec, name)
    alpha = fraction * 2 * spec.m / case.lipschitz() ** 2
    with torch.no_grad():
        assert_solved(case, case.solve(eq.ForwardBackward(alpha=alpha)))


@pytest.mark.parametrize("relaxation", [0.2, 0.5, 0.9])
def test_douglas_rachford_at_any_relaxation(relaxation):
    case = Case(SPECS["dense"])
    with torch.no_grad():
        assert_solved(case, case.solve(eq.DouglasRachford(relaxation=relaxation)))


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize(
    "spec", [Spec(6, None, 0.01), Spec(2, (3, 2), 0.1, True), Spec((2, 1), (3, 2), 0.1, True)], ids=str
)
def test_weak_monotonicity(spec, name, memory):
    case = Case(spec, name, scale=0.4)
    with torch.no_grad():
        assert_solved(case, case.solve(eq.PeacemanRachford(memory=memory)), tolerance=1e-7)


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "batch_last": lambda x: x.permute(*range(1, x.dim()), 0).contiguous().permute(x.dim() - 1, *range(x.dim() - 1)),
    "expanded": lambda x: x[:1].expand_as(x),
}


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["z0", "bias"])
def test_layout_of_memory_does_not_matter(spec, layout, which):
    case = Case(spec, "tanh")
    if which == "bias":
        case.bias = unflatten(case.bias, [LAYOUTS[layout](leaf) for leaf in flatten(case.bias)])
    sources = case.sources()
    z0 = case.zeros()
    if which == "z0":
        z0 = unflatten(z0, [LAYOUTS[layout](leaf) for leaf in flatten(z0)])
    sol = eq.fixed_point(case.problem, z0, case.bias, solver=eq.PeacemanRachford(), tolerance=TIGHT)
    assert_solved(case, sol)
    assert_close(case, torch.autograd.grad(loss(per_sample(sol.value)), sources))


@each_kind
@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.NewtonKrylov()], ids=lambda s: type(s).__name__)
def test_solvers_that_see_no_structure_agree(spec, solver):
    case = Case(spec, "tanh")
    with torch.no_grad():
        assert_solved(case, case.solve(solver, eq.Tolerance(relative=1e-10, max_steps=100)), tolerance=1e-7)


@each_kind
def test_forward_mode_sees_w_at_zero(spec):
    """z = 0 is where solves start, and W z can be left out there; its derivative cannot."""
    case = Case(spec, "tanh")
    tangent = spec.randn(seed=3)
    with torch.no_grad():
        _, found = torch.func.jvp(lambda z: case.problem(z, case.bias), (case.zeros(),), (tangent,))
        slopes = case.spec.interior() * slope(case.s, per_sample(case.bias))
        known = slopes * (per_sample(tangent) @ spec.matrix(case.op).mT)
    torch.testing.assert_close(per_sample(found), known, rtol=1e-10, atol=1e-10)


def test_the_input_may_enter_the_first_tiers_only():
    case = Case(Spec((2, 1, 2), (3, 4), 0.5, True))
    whole = unflatten(case.bias, [case.bias[0], *map(torch.zeros_like, case.bias[1:])])
    known = case.answer(whole)
    for bias in (whole, case.bias[:1], (case.bias[0], torch.zeros_like(case.bias[1]))):
        with torch.no_grad():
            sol = eq.fixed_point(case.problem, case.zeros(), bias, solver=eq.PeacemanRachford(), tolerance=TIGHT)
        torch.testing.assert_close(per_sample(sol.value), known, rtol=1e-8, atol=1e-8)


@each_kind
@each_solver
def test_single_precision(spec, solver):
    case = Case(spec, "tanh")
    known = case.answer()
    case.op.float()
    bias = unflatten(case.bias, [leaf.float() for leaf in flatten(case.bias)])
    z0 = unflatten(bias, [torch.zeros_like(leaf) for leaf in flatten(bias)])
    with torch.no_grad():
        sol = eq.fixed_point(
            case.problem, z0, bias, solver=solver, tolerance=eq.Tolerance(relative=1e-5, max_steps=1000)
        )
    assert sol.converged.all()
    assert {leaf.dtype for leaf in flatten(sol.value)} == {torch.float32}
    torch.testing.assert_close(per_sample(sol.value).double(), known, rtol=1e-3, atol=1e-3)


@each_kind
def test_equilibrium_module(spec):
    case = Case(spec)
    layer = eq.Equilibrium(case.problem, initial=case.op.shape, solver=eq.PeacemanRachford(), tolerance=TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(per_sample(layer(case.bias)), case.answer(), rtol=1e-8, atol=1e-8)
    names = {name.rpartition("operator.")[2] for name, _ in layer.named_parameters()}
    assert names == {name for name, _ in case.op.named_parameters()}


@each_kind
def test_start_is_zero_in_the_memory_order_of_operators(spec):
    case = Case(spec)
    start = case.problem.start(case.bias)
    for zeros, image in zip(flatten(start), flatten(case.op(case.bias)), strict=True):
        assert zeros.shape == image.shape
        assert zeros.stride() == image.stride()
        assert not zeros.any()


@each_kind
@each_solver
def test_a_warm_start_saves_steps(spec, solver):
    case = Case(spec, "tanh")
    tolerance = eq.Tolerance(relative=1e-9, max_steps=5000, patience=None)
    with torch.no_grad():
        cold = case.solve(solver, tolerance)
        warm = eq.fixed_point(
            case.problem, unrow(case.answer(), case.bias), case.bias, solver=solver, tolerance=tolerance
        )
        near = unrow(case.answer() + 1e-6 * randn(*case.answer().shape, seed=5), case.bias)
        close = eq.fixed_point(case.problem, near, case.bias, solver=solver, tolerance=tolerance)
    assert (warm.stats.steps == 1).all()
    assert (close.stats.steps < cold.stats.steps).all()


@with_activations({"relu", "tanh"}, but=("sigmoid", "softplus"))  # whose values are above 0
@each_solver
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_zero_is_found_from_anywhere(kind, name, solver, dtype):
    """f(z) = 0 exactly where z is merely small: no relative tolerance would be met there. Beside it, other samples."""
    case = Case(SPECS[kind], name, batch=4)
    sign = -1.0 if name == "relu" else 0.0
    case.bias = unflatten(
        case.bias, [torch.cat([sign * (0.1 + leaf[:2].abs()), leaf[2:]]).to(dtype) for leaf in flatten(case.bias)]
    )
    case.op.to(dtype)
    z0 = unflatten(case.bias, [3 + leaf.abs() for leaf in flatten(case.bias)])
    tolerance = eq.Tolerance(relative=1e-4, max_steps=3000, patience=None)
    with torch.no_grad():
        sol = eq.fixed_point(case.problem, z0, case.bias, solver=solver, tolerance=tolerance)
        again = true_residual(case.problem, sol.value, case.bias)
    assert sol.converged.all()
    rows = per_sample(sol.value)
    assert (rows[:2] == 0).all()
    assert rows[2:].abs().amax(dim=1).min() > 0
    assert (again[:2] == 0).all()
    assert (sol.stats.residual[:2] == 0).all()
    torch.testing.assert_close(sol.stats.residual, again.to(dtype), rtol=0.05, atol=1e-6)


def test_zero_is_no_answer_where_f_is_not_finite():
    case = Case(SPECS["dense"])
    case.bias = -case.bias.abs() - 0.1
    with torch.no_grad():
        case.op.A[0, 0] = float("nan")
        for z0 in (case.zeros(), 1 + case.bias.abs()):
            sol = eq.fixed_point(case.problem, z0, case.bias, solver=eq.PeacemanRachford(), on_failure="ignore")
            assert (sol.result == eq.Result.NONFINITE).all()


# Gradients


def loss(rows):
    return (rows * randn(*rows.shape, seed=8)).sum() + 0.5 * rows.square().sum()


def assert_close(case, found):
    """Gradients of the loss in every source of a case."""
    known = torch.autograd.grad(loss(case.graph()), case.sources())
    for name, one, other in zip(case.names(), found, known, strict=True):
        assert (one - other).abs().max() <= 1e-8 * max(1, other.abs().max()), name


@with_activations({"relu", "softplus"})
@each_solver
def test_every_gradient_is_the_dense_one(kind, name, solver):
    case = Case(SPECS[kind], name)
    sources = case.sources()
    sol = case.solve(solver)
    assert_close(case, torch.autograd.grad(loss(per_sample(sol.value)), sources))
    assert sol.backward is not None
    assert sol.backward.converged.all()
    assert (sol.backward.residual <= TIGHT.relative).all()


@each_kind
@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_gradients_do_not_depend_on_alpha(spec, alpha):
    """Also when the backward solve uses another alpha: the resolvent in use must be its own."""
    case = Case(spec, "tanh")
    sources = case.sources()
    for backward in (None, eq.PeacemanRachford(alpha=0.7), eq.GMRES()):
        sol = case.solve(eq.PeacemanRachford(alpha=alpha), gradient=eq.ImplicitGradient(solver=backward))
        assert_close(case, torch.autograd.grad(loss(per_sample(sol.value)), sources))


@each_kind
@pytest.mark.parametrize("wanted", ["bias", "weights"])
def test_gradients_of_a_part(spec, wanted):
    case = Case(spec, "tanh")
    case.op.requires_grad_(wanted == "weights")
    sources = list(case.op.parameters()) if wanted == "weights" else case.sources()[: len(flatten(case.bias))]
    value = loss(per_sample(case.solve(eq.PeacemanRachford()).value))
    known = torch.autograd.grad(loss(case.graph()), sources)
    for _ in range(2):  # the graph is not used up
        found = torch.autograd.grad(value, sources, retain_graph=True)
        for one, other in zip(found, known, strict=True):
            assert (one - other).abs().max() <= 1e-8 * max(1, other.abs().max())


@each_kind
def test_weights_changed_before_the_backward_pass_are_noticed(spec):
    """As in any layer of torch."""
    case = Case(spec, "tanh")
    value = loss(per_sample(case.solve(eq.PeacemanRachford()).value))
    with torch.no_grad():
        for p in case.op.parameters():
            p.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("scale", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("kind", SPECS)
def test_the_automatic_step_is_near_the_best_halving(kind, scale):
    spec = {"dense": Spec(40), "conv": Spec(6, (8, 7), 1.0, True), "multitier": Spec((4, 5), (8, 7), 1.0, True)}[kind]
    op = spec.build(seed=1)
    with torch.no_grad():
        for key, p in op.named_parameters():
            if key[0] == "h" or kind == "dense":
                p.mul_(scale if key[0] == "h" else scale**0.5)
    problem, bias = ops.MonotoneProblem(op), spec.randn(32, seed=2)

    def steps(alpha):
        loose = eq.Tolerance(relative=1e-2, max_steps=1000)
        layer = eq.Equilibrium(problem, initial=op.shape, solver=eq.PeacemanRachford(alpha), tolerance=loose)
        return int(layer.solve(bias, z0=None).stats.steps.median())

    with torch.no_grad():
        best = min(steps(0.5**k) for k in range(7))
        assert steps("auto") <= best + max(1, best // 5), (steps("auto"), best)


@each_kind
def test_training_under_autocast(spec):
    case = Case(spec, "tanh")
    case.op.float()
    case.bias = unflatten(case.bias, [leaf.float() for leaf in flatten(case.bias)])
    sources = case.sources()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = case.solve(eq.PeacemanRachford(), eq.Tolerance(relative=1e-3))
    found = torch.autograd.grad(loss(per_sample(sol.value)), sources)
    case.bias = unflatten(case.bias, [leaf.double() for leaf in flatten(case.bias)])
    for source, one, other in zip(case.names(), found, torch.autograd.grad(loss(case.graph()), sources), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 0.05 * max(1, other.abs().max()), source


LOW = [torch.bfloat16, torch.float16]


def single(case):
    """The case in float32, its bias rounded to numbers that bfloat16 and float16 have."""
    case.op.float()
    case.bias = unflatten(case.bias, [leaf.bfloat16().half().float() for leaf in flatten(case.bias)])
    return case


def of_scale(found, known, rounding):
    """Whether tensors agree up to rounding of their largest entry."""
    return (found.float() - known.float()).abs().max() <= rounding * known.abs().max()


@with_activations({"relu", "tanh"})
@each_solver
def test_autocast_gives_the_numbers_of_float32(kind, name, solver):
    """Of a bias in low precision, too, and to the tolerance that is the default; autocast is for what surrounds W."""
    case = single(Case(SPECS[kind], name))
    sources = case.sources()
    tolerance = eq.Tolerance(relative=eq.Tolerance.relative, max_steps=2000)
    known = case.solve(solver, tolerance)
    value = per_sample(known.value)
    gradients = torch.autograd.grad(loss(value), sources)
    for low in LOW:
        narrow = unflatten(case.bias, [leaf.to(low) for leaf in flatten(case.bias)])
        with torch.autocast("cpu", low):
            sol = eq.fixed_point(case.problem, case.problem.start(narrow), narrow, solver=solver, tolerance=tolerance)
        assert sol.converged.all()
        assert {leaf.dtype for leaf in flatten(sol.value)} == {torch.float32}
        assert torch.equal(per_sample(sol.value), value)
        assert (true_residual(case.problem, sol.value, case.bias) <= 1.01 * tolerance.relative + 1e-6).all()
        found = torch.autograd.grad(loss(per_sample(sol.value)), sources)
        assert sol.backward is not None
        assert sol.backward.converged.all()
        for source, one, other in zip(case.names(), found, gradients, strict=True):
            assert one.dtype == torch.float32
            assert of_scale(one, other, torch.finfo(low).eps if source == "bias" else 1e-5), source


@each_kind
@pytest.mark.parametrize("low", LOW, ids=str)
def test_the_backward_pass_may_run_inside_autocast(spec, low):
    case = single(Case(spec, "tanh"))
    sources = case.sources()
    known = torch.autograd.grad(loss(per_sample(case.solve(eq.PeacemanRachford(), eq.Tolerance()).value)), sources)
    with torch.autocast("cpu", low):
        sol = case.solve(eq.PeacemanRachford(), eq.Tolerance())
        found = torch.autograd.grad(loss(per_sample(sol.value)), sources)
    for source, one, other in zip(case.names(), found, known, strict=True):
        assert one.dtype == torch.float32
        assert of_scale(one, other, 4 * torch.finfo(low).eps), source  # torch then pulls back in low precision


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.Picard(0.5)], ids=lambda s: type(s).__name__)
def test_other_solvers_under_autocast(solver):
    case = single(Case(SPECS["conv"], "tanh"))
    sources = case.sources()
    tolerance = eq.Tolerance(max_steps=500)
    known = torch.autograd.grad(loss(per_sample(case.solve(eq.PeacemanRachford(), tolerance).value)), sources)
    with torch.autocast("cpu", torch.bfloat16):
        sol = case.solve(solver, tolerance)
    assert sol.converged.all()
    found = torch.autograd.grad(loss(per_sample(sol.value)), sources)
    for source, one, other in zip(case.names(), found, known, strict=True):
        assert of_scale(one, other, 0.01), source


def test_second_derivatives_under_autocast():
    case = single(Case(SPECS["dense"], "tanh"))
    sources = case.sources()

    def second(rows):
        first = torch.autograd.grad(loss(rows), sources, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), sources)

    tolerance = eq.Tolerance(relative=1e-5, max_steps=500)
    known = second(per_sample(case.solve(eq.PeacemanRachford(), tolerance).value))
    with torch.autocast("cpu", torch.bfloat16):
        rows = per_sample(case.solve(eq.PeacemanRachford(), tolerance).value)
    found = second(rows)
    for source, one, other in zip(case.names(), found, known, strict=True):
        assert of_scale(one, other, 1e-3), source


@each_kind
def test_types_that_do_not_fit_are_named(spec):
    case = Case(spec, "tanh")
    wide, case = case.bias, single(case)
    name = r"bias(\[0\])?"
    with pytest.raises(
        TypeError, match=rf"{name} is torch.float64 and the weights of W are torch.float32: give {name}.to"
    ):
        eq.fixed_point(case.problem, case.zeros(), wide, solver=eq.PeacemanRachford())
    z0 = unflatten(wide, [torch.zeros_like(leaf) for leaf in flatten(wide)])
    with pytest.raises(TypeError, match=r"has weights in torch.float32 and z is torch.float64: give z.to"):
        eq.fixed_point(case.problem, z0, case.bias, solver=eq.PeacemanRachford())
    # Outside autocast nobody has asked for low precision to be widened.
    z0 = unflatten(wide, [torch.zeros_like(leaf).bfloat16() for leaf in flatten(wide)])
    with pytest.raises(TypeError, match="has weights in torch.float32 and z is torch.bfloat16"):
        eq.fixed_point(case.problem, z0, case.bias, solver=eq.PeacemanRachford())


def test_gradients_of_a_bias_in_the_first_tier_only():
    case = Case(Spec((1, 2), (2, 3), 0.5, True), "tanh")
    first = case.bias[0].requires_grad_()
    case.bias = (first, torch.zeros_like(case.bias[1]))
    sol = eq.fixed_point(case.problem, case.zeros(), (first,), solver=eq.PeacemanRachford(), tolerance=TIGHT)
    sources = [first, *case.op.parameters()]
    found = torch.autograd.grad(loss(per_sample(sol.value)), sources)
    known = torch.autograd.grad(loss(case.graph()), sources)
    for one, other in zip(found, known, strict=True):
        assert (one - other).abs().max() <= 1e-8


@pytest.mark.parametrize("spec", [Spec(3, None, 0.5), Spec(1, (1, 2), 0.5, True)], ids=["dense", "conv"])
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_gradients_match_finite_differences(spec, name):
    case = Case(spec, name, batch=2)

    def f(*sources):
        return per_sample(case.solve(eq.PeacemanRachford()).value)

    assert torch.autograd.gradcheck(f, case.sources(), fast_mode=True)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("solver", [eq.PeacemanRachford(), eq.ForwardBackward()], ids=["pr", "fb"])
def test_second_derivatives(spec, name, solver):
    case = Case(spec, name, batch=2)
    sources = case.sources()

    def second(rows):
        first = torch.autograd.grad(loss(rows), sources, create_graph=True)
        mixed = sum((g * randn(*g.shape, seed=i)).sum() for i, g in enumerate(first) if g.dim())
        return torch.autograd.grad(mixed, sources)

    found, known = second(per_sample(case.solve(solver).value)), second(case.graph(order=2))
    for source, one, other in zip(case.names(), found, known, strict=True):
        assert (one - other).abs().max() <= 1e-7 * max(1, other.abs().max()), source


@each_kind
def test_training_lowers_a_loss_and_stays_exact(spec):
    """The resolvent in use is that of the weights after every step of the optimiser."""
    case = Case(spec)
    optimizer = torch.optim.Adam(case.op.parameters(), lr=0.05)
    target = randn(*per_sample(case.bias).shape, seed=4).abs()
    losses = []
    for _ in range(4):
        sol = case.solve(eq.PeacemanRachford())
        assert_solved(case, sol)
        value = (per_sample(sol.value) - target).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]


# Samples are independent


@each_kind
@each_solver
def test_a_sample_does_not_feel_its_batch(spec, solver):
    case = Case(spec, "tanh", batch=16)
    tolerance = eq.Tolerance(relative=1e-11, max_steps=5000, patience=None)
    with torch.no_grad():
        together = case.solve(solver, tolerance)
        for i in (0, 9):
            bias = unflatten(case.bias, [leaf[i : i + 1] for leaf in flatten(case.bias)])
            z0 = unflatten(bias, [torch.zeros_like(leaf) for leaf in flatten(bias)])
            alone = eq.fixed_point(case.problem, z0, bias, solver=solver, tolerance=tolerance)
            assert abs(int(alone.stats.steps) - int(together.stats.steps[i])) <= 1
            torch.testing.assert_close(per_sample(alone.value)[0], per_sample(together.value)[i], rtol=1e-9, atol=1e-9)


@each_kind
@each_solver
def test_finished_samples_are_left_out(spec, solver):
    """Samples of very different difficulty: half of them start at their answer."""
    case = Case(spec, "tanh", batch=16)
    with torch.no_grad():
        z0 = case.answer()
        z0[::2] = 0
        options = {"solver": solver, "tolerance": TIGHT}
        sol = eq.fixed_point(case.problem, unrow(z0, case.bias), case.bias, **options)
        whole = eq.fixed_point(case.problem, unrow(z0, case.bias), case.bias, compact=False, **options)
    assert_solved(case, sol)
    assert sol.stats.rows < 0.8 * whole.stats.rows
    assert torch.equal(sol.stats.steps, whole.stats.steps)
    torch.testing.assert_close(per_sample(sol.value), per_sample(whole.value), rtol=1e-12, atol=1e-12)


def test_gradients_of_gathered_samples():
    case = Case(SPECS["conv"], "tanh", batch=12)
    case.bias = case.bias * torch.logspace(-3, 1, 12, dtype=DOUBLE)[:, None, None, None]
    sources = case.sources()
    assert_close(case, torch.autograd.grad(loss(per_sample(case.solve(eq.PeacemanRachford()).value)), sources))


# Failure is loud


@each_solver
def test_running_out_of_steps_is_reported(solver):
    case = Case(SPECS["dense"])
    few = eq.Tolerance(relative=1e-12, max_steps=3)
    with torch.no_grad():
        with pytest.warns(eq.ConvergenceWarning, match="MAX_STEPS"):
            sol = case.solve(solver, few)
        assert (sol.stats.steps == 3).all()
        assert (sol.result == eq.Result.MAX_STEPS).all()
        again = true_residual(case.problem, sol.value, case.bias)
        torch.testing.assert_close(sol.stats.residual, again, rtol=1e-6, atol=1e-12)
        with pytest.raises(eq.ConvergenceError, match="the forward solve failed for 3 of 3 samples"):
            case.solve(solver, few, on_failure="raise")
        case.solve(solver, few, on_failure="ignore")


def test_a_failed_backward_solve_is_reported():
    case = Case(SPECS["conv"], "tanh")
    case.sources()
    few = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=2))
    sol = case.solve(eq.PeacemanRachford(), gradient=few)
    with pytest.warns(eq.ConvergenceWarning, match=r"the backward solve failed for some samples \(MAX_STEPS"):
        loss(per_sample(sol.value)).backward()
    sol = case.solve(eq.PeacemanRachford(), gradient=few, on_failure="raise")
    with pytest.raises(eq.ConvergenceError, match="the backward solve failed"):
        loss(per_sample(sol.value)).backward()


def test_forward_backward_above_its_bound_is_reported():
    case = Case(Spec(6, None, 0.1), "leaky-relu", scale=2.0)
    alpha = 20 * 2 * case.spec.m / case.lipschitz() ** 2
    tolerance = eq.Tolerance(relative=1e-8, max_steps=2000)
    with torch.no_grad():
        with pytest.warns(eq.ConvergenceWarning, match="forward solve failed"):
            sol = case.solve(eq.ForwardBackward(alpha=alpha), tolerance)
        assert not sol.converged.any()
        assert torch.isfinite(per_sample(sol.value)).all()
        with pytest.raises(eq.ConvergenceError):
            case.solve(eq.ForwardBackward(alpha=alpha), tolerance, on_failure="raise")


def test_a_bad_sample_spoils_no_other():
    case = Case(SPECS["conv"], "tanh")
    good = case.answer()
    flatten(case.bias)[0][1, 0, 0, 0] = float("nan")
    with torch.no_grad():
        sol = case.solve(eq.PeacemanRachford(), on_failure="ignore")
    assert sol.result.tolist() == [eq.Result.CONVERGED, eq.Result.NONFINITE, eq.Result.CONVERGED]
    torch.testing.assert_close(per_sample(sol.value)[[0, 2]], good[[0, 2]], rtol=1e-8, atol=1e-8)
    assert torch.isfinite(per_sample(sol.value)).all()


BAD = {"nan": float("nan"), "inf": float("inf"), "overflow": 1e30}  # the last is finite, its square is not


@each_kind
@each_solver
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("compact", [True, False])
def test_bad_weights_are_reported_as_such(spec, solver, bad, compact):
    """Not as an alpha that nobody has set, nor as a matrix that LAPACK does not like."""
    case = Case(Spec(spec.channels, spec.size))
    case.op.float()
    case.bias = unflatten(case.bias, [leaf.float() for leaf in flatten(case.bias)])
    with torch.no_grad():
        next(case.op.parameters()).view(-1)[-1] = BAD[bad]
    case.sources()
    with pytest.warns(eq.ConvergenceWarning, match="NONFINITE.*check the inputs.* the weights"):
        sol = case.solve(solver, eq.Tolerance(), compact=compact)
    assert (sol.result == eq.Result.NONFINITE).all()
    assert torch.isfinite(per_sample(sol.value)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        per_sample(sol.value).sum().backward()  # no other error either
    if sol.backward is not None:
        assert not sol.backward.converged.any()


@each_kind
def test_weights_gone_bad_in_training_stop_nothing_else(spec):
    """The next model in the same process works: nothing bad is kept."""
    case = Case(spec)
    with torch.no_grad():
        good = [p.clone() for p in case.op.parameters()]
        next(case.op.parameters()).fill_(float("nan"))
        assert not case.solve(eq.PeacemanRachford(), on_failure="ignore").converged.any()
        for p, value in zip(case.op.parameters(), good, strict=True):
            p.copy_(value)
        assert_solved(case, case.solve(eq.PeacemanRachford()))


@each_kind
@pytest.mark.parametrize("low", LOW, ids=str)
def test_operators_in_half_precision_are_refused(spec, low):
    case = Case(spec)
    case.op.to(low)
    bias = unflatten(case.bias, [leaf.to(low) for leaf in flatten(case.bias)])
    z0 = unflatten(bias, [torch.zeros_like(leaf) for leaf in flatten(bias)])
    op = case.op
    for call in (
        lambda: eq.fixed_point(case.problem, z0, bias, solver=eq.PeacemanRachford()),
        lambda: eq.Equilibrium(case.problem, initial=case.problem.start)(bias),
        lambda: eq.Equilibrium(case.problem, initial=case.problem.start)(case.bias),
        lambda: op(bias),
        lambda: op.adjoint(bias),
        lambda: op.recorded(bias),
        lambda: op.resolvent(0.5),
        lambda: op.lipschitz_bound(),
        lambda: op.typical_size(),
    ):
        with pytest.raises(TypeError, match=rf"Monotone\w+ has weights in {low}, too coarse.*float32.*torch.autocast"):
            call()


@each_solver
def test_an_f_without_structure_is_refused(solver):
    x = torch.ones(2, 3)
    with pytest.raises(
        TypeError, match=rf"{type(solver).__name__} needs f\(z\) = s\(W z \+ b\).*MonotoneProblem.*Anderson"
    ):
        eq.fixed_point(lambda z, x: torch.relu(0.1 * z + x), torch.zeros(2, 3), x, solver=solver)


METHODS = [eq.ForwardBackward, eq.PeacemanRachford, eq.DouglasRachford]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("Auto", ValueError),
        (True, TypeError),
        (None, TypeError),
        (torch.ones(()), TypeError),
    ],
)
def test_bad_alpha(method, alpha, error):
    allowed = "allowed: 'auto'" if isinstance(alpha, str) else "it must be a number above 0"
    with pytest.raises(error, match=rf"{method.__name__}\.alpha is {re.escape(repr(alpha))}; {allowed}"):
        method(alpha=alpha)


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize(("memory", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("3", TypeError)])
def test_bad_memory(method, memory, error):
    with pytest.raises(
        error, match=rf"{method.__name__}.memory is {memory!r}; it must be a whole number of at least 0"
    ):
        method(memory=memory)


@pytest.mark.parametrize("relaxation", [0.0, -0.5, float("nan")])
def test_bad_relaxation(relaxation):
    with pytest.raises(ValueError, match=rf"DouglasRachford.relaxation is {relaxation!r}; it must be a number above 0"):
        eq.DouglasRachford(relaxation=relaxation)


def test_unknown_option():
    with pytest.raises(TypeError, match="PeacemanRachford has no option 'aplha'; did you mean 'alpha'"):
        eq.PeacemanRachford(aplha=1.0)


# Any problem


@settings(max_examples=30)
@given(
    n=st.integers(1, 6),
    m=st.floats(0.5, 2.0),
    scale=st.floats(0.0, 0.8),
    alpha=st.floats(0.05, 20.0),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    memory=st.sampled_from([0, 3]),
    method=st.sampled_from(METHODS[1:]),
    seed=st.integers(0, 2**16),
)
def test_any_dense_problem_at_any_alpha(n, m, scale, alpha, name, memory, method, seed):
    case = Case(Spec(n, None, m), name, batch=2, seed=seed, scale=scale)
    tolerance = eq.Tolerance(relative=1e-10, max_steps=20000, patience=None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        sol = case.solve(method(alpha=alpha, memory=memory), tolerance)
    assert_solved(case, sol, tolerance=1e-7)

"""Solvers that go downhill on a hidden objective: where they end, that G falls, and what they refuse."""

import pytest
import torch
from torch import nn

import equipoise as eq
from corpus import DOUBLE, per_sample, randn, true_residual
from equipoise import Result
from equipoise.lab.recipes.build import BACKWARD_SOLVERS, SOLVERS
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Ring

METHODS = {"proximal gradient": eq.ProximalGradient(), "fista": eq.FISTA()}
each_method = pytest.mark.parametrize("solver", METHODS.values(), ids=METHODS)
each_activation = pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
TIGHT = eq.Tolerance(relative=1e-10, max_steps=600, patience=None)
STRONG = 0.3  # a diversity at which plain iteration does not converge


def cell_of(diversity=0.25, activation="tanh", sizes=((6, 6),) * 3, **options):
    """Branches of 4 channels with ||W|| = 0.9."""
    ring = Ring(diversity=diversity)
    cell = Branches(4, sizes, (4, 6, 6), ring, **{"order": "jacobi", "activation": activation, **options}).double()
    for layer in cell.W:
        layer.always = True
    with torch.no_grad():
        for bias in cell.b:
            bias.normal_(std=0.3)
    return cell


def inputs_of(cell, batch=3, seed=1):
    with torch.no_grad():
        return cell.prepare(randn(batch, 4, 6, 6, seed=seed))


def taken(inputs, rows):
    """Some samples of the inputs of a solve."""
    return [tuple(p[rows] for p in part) if isinstance(part, tuple) else part[rows] for part in inputs]


def run(cell, inputs, solver, tolerance=TIGHT, z0=None, **options):
    with torch.no_grad():
        z0 = cell.start if z0 is None else z0
        return eq.fixed_point(cell, z0, *inputs, solver=solver, tolerance=tolerance, on_failure="ignore", **options)


def apart(a, b):
    """How far values are from each other, relative, per sample."""
    return (per_sample(a) - per_sample(b)).norm(dim=1) / per_sample(b).norm(dim=1)


# --- the equilibrium --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [*METHODS.values(), eq.FISTA(step_size=1.0)], ids=str)
@each_activation
@pytest.mark.parametrize("diversity", [0.0, 0.25, STRONG])
def test_the_equilibrium_is_that_of_anderson(solver, activation, diversity):
    cell = cell_of(diversity, activation)
    inputs = inputs_of(cell)
    known, found = run(cell, inputs, eq.Anderson()), run(cell, inputs, solver)
    assert known.converged.all()
    assert found.converged.all(), str(found)
    assert apart(found.value, known.value).max() < 1e-8
    with torch.no_grad():
        torch.testing.assert_close(
            found.stats.residual, true_residual(cell, found.value, *inputs), rtol=0.05, atol=1e-14
        )


@each_method
def test_an_activation_that_looks_at_the_shape_of_its_images(solver):
    cell = cell_of(activation=eq.operators.BorderZero(eq.operators.Tanh(), size=(6, 6)))
    inputs = inputs_of(cell)
    known, found = run(cell, inputs, eq.Anderson()), run(cell, inputs, solver)
    assert found.converged.all(), str(found)
    assert apart(found.value, known.value).max() < 1e-8


def test_plain_iteration_does_not_get_there():
    cell = cell_of(STRONG)
    found = run(cell, inputs_of(cell), eq.Picard(), eq.Tolerance(relative=1e-10, max_steps=200, patience=None))
    assert not found.converged.any()
    assert found.stats.residual.max() > 1e-3


@each_method
@pytest.mark.parametrize("sizes", [((6, 6),), ((6, 6), (3, 3), (1, 1)), ((6, 4), (4, 3))], ids=str)
def test_branches_of_any_sizes(solver, sizes):
    cell = cell_of(sizes=sizes)
    inputs = inputs_of(cell)
    found = run(cell, inputs, solver)
    assert found.converged.all(), str(found)
    assert apart(found.value, run(cell, inputs, eq.Anderson()).value).max() < 1e-8


@each_method
def test_without_heritage(solver):
    cell = cell_of()
    cell.ring = Ring(heritage=False, diversity=0.1)
    inputs = inputs_of(cell)
    assert apart(run(cell, inputs, solver).value, run(cell, inputs, eq.Anderson()).value).max() < 1e-8


@each_method
@each_activation
@pytest.mark.parametrize("diversity", [0.0, STRONG])
def test_single_precision(solver, activation, diversity):
    """Where G has too few digits to tell whether a step was too long."""
    torch.manual_seed(2)
    cell = cell_of(diversity, activation)
    exact = run(cell, inputs_of(cell, batch=12), eq.Anderson()).value
    cell.float()
    inputs = cell.prepare(randn(12, 4, 6, 6, seed=1).float())
    found = run(cell, inputs, solver, eq.Tolerance(relative=1e-5, max_steps=500))
    assert found.converged.all(), str(found)
    assert found.value[0].dtype == torch.float32
    assert apart([part.double() for part in found.value], exact).max() < 2e-3


@each_method
def test_memory_order_does_not_matter(solver):
    cell = cell_of()
    inputs = inputs_of(cell)
    last = (tuple(part.contiguous(memory_format=torch.channels_last) for part in inputs[0]), inputs[1])
    assert apart(run(cell, last, solver).value, run(cell, inputs, solver).value).max() < 1e-10


# --- G ----------------------------------------------------------------------------------------------------------------


def descent(cell, inputs, solver, steps):
    """G at every iterate, (iterates, batch)."""
    way = []

    def note(progress):
        unpack, state = progress.problem.layout.unpack, progress.state
        way.append((unpack(getattr(state, "last", state.y)), unpack(state.y), progress.value))  # FISTA: as it was found

    run(cell, inputs, solver, eq.Tolerance(relative=0.0, max_steps=steps, patience=None), callback=note, compact=False)
    found, y, z = ([torch.cat(parts) for parts in zip(*values, strict=True)] for values in zip(*way, strict=True))
    repeated = [tuple(p.repeat(steps, 1, 1, 1) for p in inputs[0]), *(t.repeat(steps, 1) for t in inputs[1:])]
    with torch.no_grad():
        for a, b in zip(cell.lower(y), z, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # z = W^T y, always
        return cell.objective(found, *repeated).reshape(steps, -1)


@each_method
@each_activation
@pytest.mark.parametrize("diversity", [0.25, 3.0])
def test_g_never_rises(solver, activation, diversity):
    """Also where steps of length 1 would run far uphill, and long after the end is reached."""
    cell = cell_of(diversity, activation)
    values = descent(cell, inputs_of(cell), solver, 60)
    assert (values.diff(dim=0) <= 1e-13 * (1 + values[:-1].abs())).all()
    assert (values[5] < values[0]).all()


def test_plain_steps_would_raise_g():
    cell = cell_of(3.0)
    inputs = inputs_of(cell)
    with torch.no_grad():
        z, values = cell.start(*inputs), []
        for _ in range(20):
            y = cell.lift(z, *inputs)
            values.append(cell.objective(y, *inputs))
            z = cell.lower(y)
    assert (torch.stack(values).diff(dim=0) > 1).any()


@each_method
def test_g_ends_at_a_stationary_point(solver):
    """G at nearby y is higher, or lower by second order only; at the minimum of a convex G it is higher."""
    cell = cell_of(0.0)
    inputs = inputs_of(cell)
    z = run(cell, inputs, solver).value
    with torch.no_grad():
        y = cell.lift(z, *inputs)
        lowest = cell.objective(y, *inputs)
        for seed in range(5):
            moved = tuple((part + 1e-3 * randn(*part.shape, seed=seed)).clamp(-1, 1) for part in y)
            assert (cell.objective(moved, *inputs) > lowest).all()


# --- samples ----------------------------------------------------------------------------------------------------------


@each_method
def test_alone_and_in_a_batch(solver):
    cell = cell_of(STRONG)
    inputs = inputs_of(cell, batch=12)
    together = run(cell, inputs, solver)
    assert together.converged.all()
    assert together.stats.rows < 12 * together.stats.evaluations  # samples were left out
    for i in (0, 5, 11):
        alone = run(cell, taken(inputs, slice(i, i + 1)), solver)
        assert apart(taken([together.value], slice(i, i + 1))[0], alone.value).max() < 1e-8
        assert abs(int(together.stats.steps[i] - alone.stats.steps[0])) <= 1


MATES = {
    "slow": lambda x: 5 * x,
    "huge": lambda x: 1e8 * x,
    "nan": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.full_like(x, torch.inf),
}


@each_method
@pytest.mark.parametrize("mate", MATES)
@pytest.mark.parametrize("compact", [True, False], ids=["gathering", "compact=False"])
def test_beside_a_batch_mate_in_trouble(solver, mate, compact):
    cell = cell_of(STRONG, "softplus")
    x, t = inputs_of(cell, batch=1)
    tolerance = eq.Tolerance(relative=1e-8, max_steps=150)
    alone = run(cell, (x, t), solver, tolerance)
    pair = tuple(torch.cat([part, MATES[mate](part)]) for part in x), t.repeat(2, 1)
    together = run(cell, pair, solver, tolerance, compact=compact)
    assert together.result[0] == alone.result[0] == Result.CONVERGED
    assert apart(taken([together.value], slice(0, 1))[0], alone.value).max() < 1e-7
    assert abs(int(together.stats.steps[0] - alone.stats.steps[0])) <= 1
    assert all(part.isfinite().all() for part in together.value)
    if mate in ("nan", "infinite"):
        assert together.result[1] == Result.NONFINITE


@pytest.mark.parametrize("mate", ["nan", "infinite"])
def test_a_batch_mate_without_a_finite_f_costs_no_line_search(mate, monkeypatch):
    cell, calls, energy = cell_of(0.0, "softplus"), [], Branches.energy
    (x,) = inputs_of(cell, batch=1)
    pair = (tuple(torch.cat([part, MATES[mate](part)]) for part in x),)
    monkeypatch.setattr(Branches, "energy", lambda self, *parts: calls.append(1) or energy(self, *parts))
    steps = int(run(cell, pair, eq.ProximalGradient(), compact=False).stats.steps[0])
    assert len(calls) <= 2 * steps


@each_method
def test_the_way_does_not_depend_on_where_batch_mates_start(solver):
    """One starts at zero, the other does not: each as if alone, iterate by iterate."""
    cell = cell_of(STRONG)
    inputs, z0 = inputs_of(cell, batch=2), tuple(randn(2, 4, 6, 6, seed=3 + i) for i in range(3))
    for part in z0:
        part[0] = 0
    steps = eq.Tolerance(relative=0.0, max_steps=4)
    together = run(cell, inputs, solver, steps, z0=z0, trace=True)
    for i in range(2):
        one = slice(i, i + 1)
        alone = run(cell, taken(inputs, one), solver, steps, z0=taken([z0], one)[0], trace=True)
        torch.testing.assert_close(together.stats.trace[:, i], alone.stats.trace[:, 0], rtol=1e-8, atol=0)


@each_method
def test_any_start_gives_the_same_point(solver):
    cell = cell_of(0.1)
    inputs = inputs_of(cell)
    known = run(cell, inputs, solver)
    z0 = tuple(3 * randn(3, 4, 6, 6, seed=3 + i) for i in range(3))
    found = run(cell, inputs, solver, z0=z0)
    assert found.converged.all()
    assert apart(found.value, known.value).max() < 1e-8


@each_method
def test_a_warm_start_saves_steps(solver):
    cell = cell_of(0.1)
    inputs = inputs_of(cell)
    known = run(cell, inputs, solver)
    loose = eq.Tolerance(relative=1e-9, max_steps=500)
    assert (run(cell, inputs, solver, loose, z0=known.value).stats.steps == 1).all()
    near = tuple(part + 1e-6 * randn(*part.shape, seed=7) for part in known.value)
    assert (run(cell, inputs, solver, loose, z0=near).stats.steps < known.stats.steps).all()


# --- layers -----------------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("diversity", [0.0, STRONG])
def test_gradients_of_a_layer_are_those_of_anderson(solver, diversity):
    options = {"size": "reduced", "channels": 4, "stem": 1, "activation": "tanh", "order": "jacobi"}
    model = eq.models.MOptEq((2, 6, 6), 3, diversity=diversity, **options).double().eval()
    for layer in model.cell.W:
        layer.always = True
    model.equilibrium.tolerance, model.equilibrium.on_failure = TIGHT, "raise"
    images = torch.rand(2, 2, 6, 6, dtype=DOUBLE, requires_grad=True)
    sources = [images, *model.parameters()]
    gradients = []
    for each in (eq.Anderson(), solver):
        model.equilibrium.solver = each
        with eq.watch_solves() as solves:
            logits = model(images)
            gradients.append(torch.autograd.grad(logits.square().sum(), sources))
        assert solves[0].backward.converged.all()
    scale = max(gradient.norm() for gradient in gradients[0])
    for known, found in zip(*gradients, strict=True):
        assert (known - found).norm() < 1e-8 * scale


@each_method
def test_verify_by_descent(solver):
    model = eq.models.MOptEq((2, 6, 6), 3, size="reduced", channels=4, diversity=0.25, order="jacobi").double().eval()
    model.equilibrium.solver = solver
    assert model.verify(torch.rand(2, 2, 6, 6, dtype=DOUBLE), relative=1e-11).gradient.max() < 1e-8


def test_names_in_recipes():
    for registry in (SOLVERS, BACKWARD_SOLVERS):
        assert registry["proximal-gradient"]() == eq.ProximalGradient()
        assert registry["fista"](step_size=0.25) == eq.FISTA(step_size=0.25)


# --- refusals ---------------------------------------------------------------------------------------------------------


@each_method
def test_an_f_without_an_objective_is_refused(solver):
    name, x = type(solver).__name__, torch.rand(2, 3)
    for f in (lambda z, x: torch.tanh(z / 2 + x), nn.Bilinear(3, 3, 3)):
        with pytest.raises(TypeError, match=f"{name} needs an f that minimises an objective.*Anderson"):
            eq.fixed_point(f, torch.zeros(2, 3), x, solver=solver)


@each_method
def test_what_minimises_no_objective_is_refused(solver):
    cell = cell_of(order="gauss-seidel")
    with pytest.raises(ValueError, match="order is 'gauss-seidel', and a descent solver .*order='jacobi'"):
        run(cell, inputs_of(cell), solver)
    cell = cell_of(perturb="train")
    inputs = inputs_of(cell)
    with pytest.raises(ValueError, match="perturb is 'train', .*perturb='off'"):
        run(cell, inputs, solver)
    assert run(cell.eval(), inputs, solver).converged.all()


@each_method
def test_the_backward_system_is_refused(solver):
    cell = cell_of()
    x = tuple(part.requires_grad_() for part in inputs_of(cell)[0])
    layer = eq.Equilibrium(cell, initial=cell.start, solver=solver, gradient=eq.ImplicitGradient(solver=solver))
    value = layer(x, inputs_of(cell)[1])
    with pytest.raises(TypeError, match="needs an f that minimises an objective"):
        value[0].sum().backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: eq.FISTA(step_size=0), "FISTA.step_size is 0; it must be a number above 0 and at most 1"),
        (lambda: eq.FISTA(step_size=1.5), "FISTA.step_size is 1.5; it must be a number above 0 and at most 1"),
        (lambda: eq.FISTA(step=0.5), "FISTA has no option 'step'; did you mean 'step_size'"),
        (lambda: eq.ProximalGradient(step_size=0.5), "ProximalGradient has no option 'step_size'"),
    ],
)
def test_bad_options_get_a_sentence(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()

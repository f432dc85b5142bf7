"""``hoist``: values and gradients are those of f, and what does not depend on z is computed once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import equipoise as eq

N, BATCH = 6, 5
TIGHT = eq.Tolerance(relative=1e-12, max_steps=200)
RULES = [eq.ImplicitGradient(), eq.PhantomGradient(steps=3), eq.UnrolledGradient(steps=20)]


class Counting(TorchFunctionMode):
    """Counts the calls of torch functions by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(N, N)
        self.inject = nn.Linear(N, N)
        self.double()
        self.inner.weight.data *= 0.4

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + torch.sin(self.inject(x)))


class Branching(Cell):
    """Control flow that depends on z, on the mode and on the input."""

    def forward(self, z, x):
        y = self.inject(x)
        y = y.exp().clamp(max=2) if self.training else y.cos()
        for _ in range(2):
            y = y * 0.5 if y.mean() > 0 else y * 0.25
        return torch.tanh(self.inner(z) + y) if z.abs().max() < 10 else z * 0


class Modifying(Cell):
    """Results of the part without z are modified in place, and computed twice."""

    def forward(self, z, x):
        y, w = self.inject(x), self.inject(x)
        y += self.inner(z)
        w[:, :2].mul_(0.5)
        buffer = x.new_zeros(x.shape)
        other = x.new_zeros(x.shape)
        buffer += 1
        return torch.tanh(y + 0.1 * w + 0.1 * buffer + other)


class Normalised(Cell):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.inner)
        self.inject = eq.WeightNorm(self.inject)


class Masked(Cell):
    def __init__(self):
        super().__init__()
        self.dropout = eq.VariationalDropout(0.5)

    def forward(self, z, x):
        return torch.tanh(self.dropout(self.inner(z)) + self.dropout(self.inject(x)))


CELLS = [Cell, Branching, Modifying, Normalised]
every_cell = pytest.mark.parametrize("make", CELLS, ids=[c.__name__ for c in CELLS])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def data(*shape):
    return torch.randn(*(shape or (BATCH, N)), dtype=torch.float64)


def solve(f, x, **options):
    return eq.fixed_point(f, torch.zeros_like(x), x, **{"tolerance": TIGHT, **options})


@every_cell
@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_values_and_gradients_are_those_of_f(make, rule):
    cell, x = make(), data().requires_grad_()
    wanted = [x, *cell.parameters()]
    found = []
    for f in (cell, eq.hoist(cell)):
        solution = solve(f, x, gradient=rule, on_failure="ignore")
        found.append([solution.value, *torch.autograd.grad(solution.value.sin().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@every_cell
def test_second_derivatives(make):
    cell, x = eq.hoist(make()), data(2, N).requires_grad_()
    weight = next(cell.parameters())

    layer = eq.Equilibrium(cell, tolerance=TIGHT)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    first = torch.autograd.grad(layer(x).square().sum(), weight, create_graph=True)[0]
    plain = eq.Equilibrium(cell.__wrapped__, tolerance=TIGHT)
    expected = torch.autograd.grad(plain(x).square().sum(), weight, create_graph=True)[0]
    second = [torch.autograd.grad(g.square().sum(), [x, weight]) for g in (first, expected)]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_part_without_z_is_computed_once():
    cell, x = Cell(), data()
    with torch.no_grad():
        hoisted = eq.hoist(cell)
        solve(hoisted, x)  # verifies
        with Counting() as counting:
            solution = solve(hoisted, x, compact=False)
    assert solution.stats.evaluations > 8
    assert counting.calls["sin"] == 1
    assert counting.calls["linear"] == solution.stats.evaluations + 1


def test_a_derived_weight_is_computed_once():
    cell, x = Normalised(), data()
    with torch.no_grad():
        hoisted = eq.hoist(cell)
        solve(hoisted, x)
        with Counting() as counting:
            solution = solve(hoisted, x, compact=False)
    assert solution.stats.evaluations > 8
    assert counting.calls["_weight_norm"] == 1


def test_finished_samples_are_left_out():
    rotation = torch.linalg.qr(data(N, N)).Q
    rate = torch.full((16, 1), 0.3, dtype=torch.float64)
    rate[3] = 0.95

    def f(z, x, rate):
        return rate * (z @ rotation.T) + torch.tanh(x) @ rotation

    x = data(16, N)
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(relative=1e-10, max_steps=1000)}
    plain = eq.fixed_point(f, torch.zeros_like(x), x, rate, **options)
    found = eq.fixed_point(eq.hoist(f), torch.zeros_like(x), x, rate, **options)
    assert found.stats.rows == plain.stats.rows < 16 * plain.stats.evaluations
    torch.testing.assert_close(found.value, plain.value, rtol=0, atol=0)


@every_cell
def test_nothing_is_stale(make):
    cell = make()
    layer, plain, x = eq.Equilibrium(eq.hoist(cell), tolerance=TIGHT), eq.Equilibrium(cell, tolerance=TIGHT), data()
    layer(x)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    x.mul_(0.5)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    layer.eval()
    assert not cell.training
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    layer.float()
    assert next(cell.parameters()).dtype == torch.float32
    loose = {"z0": torch.zeros(BATCH, N)}
    layer.tolerance = plain.tolerance = eq.Tolerance(relative=1e-5)
    torch.testing.assert_close(layer(x.float(), **loose), plain(x.float(), **loose), rtol=0, atol=0)


def test_training_reaches_the_same_weights():
    cells = [Cell(), Cell()]
    cells[1].load_state_dict(cells[0].state_dict())
    x = data()
    for cell, f in zip(cells, [cells[0], eq.hoist(cells[1])], strict=True):
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            solve(f, x).value.square().sum().backward()
            optimizer.step()
    for a, b in zip(cells[0].parameters(), cells[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_names_of_parameters_do_not_change():
    cell = Cell()
    hoisted = eq.hoist(cell)
    assert list(hoisted.state_dict()) == list(cell.state_dict())
    assert [id(p) for p in hoisted.parameters()] == [id(p) for p in cell.parameters()]
    hoisted.load_state_dict({name: 0 * t for name, t in cell.state_dict().items()})
    assert not cell.inner.weight.any()
    other = copy.deepcopy(hoisted)
    other.inner.weight.data.fill_(1.0)
    assert other.__wrapped__.inner.weight.all()
    assert not cell.inner.weight.any()


def test_what_is_saved_is_what_f_saves():
    class Saving(Cell):
        def __init__(self):
            super().__init__()
            self.register_buffer("scratch", torch.ones(N, dtype=torch.float64), persistent=False)
            self.note = None

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    cell, other = Saving(), Saving()
    cell.note = "seen"
    cell.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}added": torch.ones(1)}))
    other.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.pop(f"{prefix}added", None))
    hoisted, restored = eq.hoist(cell), eq.hoist(other)
    assert list(hoisted.state_dict(prefix="f.")) == list(cell.state_dict(prefix="f."))
    restored.load_state_dict(hoisted.state_dict())
    assert other.note == "seen"
    restored.register_buffer("more", torch.ones(1), persistent=False)
    assert "more" not in restored.state_dict()
    assert "more" not in other.state_dict()


def test_attributes_are_those_of_f():
    class Scaled(Cell):
        scale = 1.0

        def forward(self, z, x):
            return self.scale * super().forward(z, x)

    cell, x = Scaled(), data()
    hoisted = eq.hoist(cell)
    hoisted.scale, hoisted.inject = 0.5, nn.Linear(N, N).double()
    assert cell.scale == hoisted.scale == 0.5
    assert cell.inject is hoisted.inject
    torch.testing.assert_close(solve(hoisted, x).value, solve(cell, x).value, rtol=0, atol=0)
    hoisted.eval()
    assert not cell.training
    assert not hoisted.training
    cell.train()
    assert hoisted.training


def test_tuples():
    cell = Cell()

    def f(z, x):
        (a, b), (u, (v,)) = z, x
        return torch.tanh(cell.inner(b) + u.exp()), 0.5 * torch.tanh(a + cell.inject(v))

    x = data()
    z0 = (torch.zeros_like(x), torch.zeros_like(x))
    inputs = (x, (2 * x,))
    plain = eq.fixed_point(f, z0, inputs, tolerance=TIGHT)
    found = eq.fixed_point(eq.hoist(f), z0, inputs, tolerance=TIGHT)
    for a, b in zip(plain.value, found.value, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_captured_tensors_get_gradients():
    weight, shift = (0.3 * data(N, N)).requires_grad_(), data(N).requires_grad_()

    def f(z, x):
        return torch.tanh(z @ weight + x @ shift.diag())

    x = data()
    found = [torch.autograd.grad(solve(g, x).value.sum(), [weight, shift]) for g in (f, eq.hoist(f))]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("solver", [eq.Broyden(), eq.NewtonKrylov(), eq.Anderson()], ids=lambda s: type(s).__name__)
def test_every_kind_of_solver(solver):
    cell, x = Cell(), data()
    torch.testing.assert_close(solve(eq.hoist(cell), x, solver=solver).value, solve(cell, x, solver=solver).value)


def test_variational_dropout_draws_one_mask():
    cell, x = Masked(), data()
    torch.manual_seed(1)
    expected = solve(cell, x).value
    torch.manual_seed(1)
    torch.testing.assert_close(solve(eq.hoist(cell), x).value, expected, rtol=0, atol=0)


def test_an_equilibrium_inside_f():
    cell, inner = Cell(), eq.Equilibrium(Cell(), tolerance=TIGHT)

    def f(z, x):
        return torch.tanh(cell.inner(z) + inner(x))

    x = data()
    torch.testing.assert_close(solve(eq.hoist(f), x).value, solve(f, x).value, rtol=1e-11, atol=1e-11)


def test_inputs_that_change_between_solves_of_one_scope():
    """A freed input may leave its id to the next one: results of the first must not be found for the second."""
    cell, y = Cell(), data()
    f = lambda z, x, y: cell(z, x) + 0.1 * torch.sin(y)
    inner = eq.AdamInput(tolerance=eq.Tolerance(1e-6), adjoint=eq.Tolerance(1e-6))
    costs = [
        eq.optimize_input(
            g,
            lambda z, x, y: (z - y).square().sum(1) + 0.1 * x.square().sum(1),
            torch.zeros_like(y),
            torch.zeros_like(y),
            y,
            solver=inner,
            tolerance=eq.Tolerance(1e-9, max_steps=20),
            on_failure="ignore",
        ).cost
        for g in (f, eq.hoist(f))
    ]
    torch.testing.assert_close(*costs, rtol=0, atol=0)


@pytest.mark.parametrize("aux", [None, {"steps": 3}, torch.tensor([True])], ids=["None", "dict", "bool"])
def test_auxiliary_outputs_of_any_type(aux):
    cell, x = Cell(), data()
    sol = eq.fixed_point(eq.hoist(lambda z, x: (cell(z, x), aux)), torch.zeros_like(x), x, aux=True, tolerance=TIGHT)
    torch.testing.assert_close(sol.value, solve(cell, x).value, rtol=1e-11, atol=1e-11)
    assert sol.aux is aux


def test_outside_a_solve_f_is_called():
    cell, x = Cell(), data()
    torch.testing.assert_close(eq.hoist(cell)(x, x), cell(x, x), rtol=0, atol=0)


# Refusals


def test_noise_is_refused():
    cell = Cell()

    def f(z, x):
        return cell(z, x + 0.01 * torch.rand_like(x))

    with pytest.raises(RuntimeError, match="eq.hoist\\(f\\) and f have different values"):
        solve(eq.hoist(f), data(), on_failure="ignore")


def test_changing_state_is_refused():
    cell, calls = Cell(), []

    def f(z, x):
        calls.append(1)
        return cell(z, x) + 0.01 * len(calls)

    with pytest.raises(RuntimeError, match="not a function of z, its inputs and its parameters"):
        solve(eq.hoist(f), data(), on_failure="ignore")


def test_nothing_to_hoist_is_said():
    linear = nn.Linear(N, N).double()
    with pytest.warns(UserWarning, match="found nothing in f"):
        solve(eq.hoist(lambda z, x: torch.tanh(0.3 * linear(z) + x)), data())


def test_a_compiled_f_is_refused():
    with pytest.raises(TypeError, match="before torch.compile"):
        eq.hoist(torch.compile(Cell()))


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="it must be a function or module"):
        eq.hoist(3)

"""torch.compile around and inside a solve: the same values and gradients, few graphs, and sentences where it cannot."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import equipoise as eq
from equipoise.lab.data.base import FACTS
from equipoise.lab.recipes.build import build_model, compile_equilibria, require_compiler
from equipoise.lab.recipes.reading import RecipeError, Where, open_recipe
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import create
from equipoise.lab.runs.machine import this_machine
from equipoise.lab.training.trainer import Stopped, StopRequest, train
from equipoise.problem.compiled import COMPILER
from lab_helpers import RECIPE

TIGHT = eq.Tolerance(1e-6, max_steps=200)
# Dynamo looks at .grad of every tensor it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
compiled = partial(torch.compile, backend="aot_eager")  # all of torch.compile but the kernels, in a tenth of the time


class Cell(nn.Module):
    """A cell whose backward pass has donated buffers: saved tensors that are nobody else's."""

    def __init__(self, n=8):
        super().__init__()
        self.W, self.U, self.norm = nn.Linear(n, n), nn.Linear(n, n), nn.LayerNorm(n)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.norm(0.5 * self.W(z) + self.U(x)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = eq.WeightNorm(nn.Conv2d(4, 4, 3, padding=1)), nn.GroupNorm(2, 4)
        self.drop = eq.VariationalDropout(0.3)

    def forward(self, z, x):
        return 0.2 * torch.relu(self.norm(0.5 * self.drop(self.conv(z)) + x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, z, x):
        return 0.3 * self.norm(0.3 * self.attend(z, z, z, need_weights=False)[0] + x)


CELLS = {
    "LayerNorm": (Cell, (8,)),
    "GroupNorm": (Conv, (4, 5, 5)),
    "attention": (Attention, (3, 8)),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def batch(*shape, size=12):
    """Samples that need different numbers of steps, so that some are left out before others."""
    return torch.randn(size, *shape) * torch.logspace(0, 1.5, size).view(-1, *(1 for _ in shape))


def solved(f, x, weights, **options):
    """The value, and the gradient of something in ``weights``."""
    torch.manual_seed(0)
    value = eq.fixed_point(f, torch.zeros_like(x[:1]), x, **{"tolerance": TIGHT, **options}).value
    return [value.detach(), *torch.autograd.grad(value.square().sum(), list(weights))]


def require_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


RULES = {
    "implicit, Anderson": {},
    "implicit, Picard": {"solver": eq.Picard()},
    "implicit, Broyden with its estimate": {"solver": eq.Broyden(), "gradient": eq.ImplicitGradient(shine=True)},
    "implicit, GMRES": {"gradient": eq.ImplicitGradient(solver=eq.GMRES())},
    "implicit, BiCGStab": {"gradient": eq.ImplicitGradient(solver=eq.BiCGStab())},
    "implicit, NewtonKrylov": {"solver": eq.NewtonKrylov()},
    "phantom": {"gradient": eq.PhantomGradient(steps=3, damping=0.2)},
    "unrolled": {"gradient": eq.UnrolledGradient(steps=8), "on_failure": "ignore"},
}


FEW = ("implicit, Anderson", "implicit, NewtonKrylov", "phantom", "unrolled")


@pytest.mark.parametrize(
    "rule", [rule if rule in FEW else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES]
)
def test_a_compiled_f_trains_with_every_gradient_rule(rule):
    f, x = Cell(), batch(8)
    expected = solved(f, x, f.parameters(), **RULES[rule])
    require_same(solved(compiled(f), x, f.parameters(), **RULES[rule]), expected)


@pytest.mark.parametrize("name", CELLS)
def test_real_cells_train(name):
    make, shape = CELLS[name]
    f, x = make(), batch(*shape)
    expected = solved(f, x, f.parameters())
    f.compile(backend="aot_eager")
    require_same(solved(f, x, f.parameters()), expected)
    assert not torch._dynamo.utils.counters["graph_break"]


def function(W, z, x):
    return torch.tanh(0.3 * nn.functional.layer_norm(z @ W, (8,)) + x)


class Parts(nn.Module):
    """An f that is not compiled, with a part that is."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, z, x):
        return 0.9 * self.cell(z, x) + 0.01 * z


def test_every_way_to_compile_f():
    x = batch(8)
    W = torch.randn(8, 8, requires_grad=True)
    f = lambda z, x: function(W, z, x)
    require_same(solved(compiled(f), x, [W]), solved(f, x, [W]))
    cell = Cell()
    expected = solved(Parts(cell), x, cell.parameters())
    require_same(solved(Parts(compiled(cell)), x, cell.parameters()), expected)
    newton = solved(Parts(compiled(cell)), x, cell.parameters(), solver=eq.NewtonKrylov())
    require_same(newton, expected)
    layer = eq.Equilibrium(cell, tolerance=TIGHT)
    plain = torch.autograd.grad(layer(x).square().sum(), list(cell.parameters()))
    layer = eq.Equilibrium(compiled(cell), tolerance=TIGHT)
    require_same(torch.autograd.grad(layer(x).square().sum(), list(cell.parameters())), plain)


class Nested(nn.Module):
    """An f that solves an equilibrium of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.W = eq.Equilibrium(Cell(), tolerance=TIGHT), nn.Linear(8, 8)

    def forward(self, z, x):
        return 0.3 * torch.tanh(self.W(z) + self.inner(x))


@pytest.mark.parametrize("cell", [Cell, Nested])
def test_a_compiled_model_trains_and_compiles_once(cell):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), eq.Equilibrium(cell(), tolerance=TIGHT), nn.Linear(8, 3))
    x = batch(8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    whole = compiled(model)
    stats = torch._dynamo.utils.counters["stats"]
    for round in range(3):
        found = torch.autograd.grad(whole(x).square().sum(), list(model.parameters()))
        require_same(found, expected)
        if round == 0:
            graphs = stats["unique_graphs"]
    assert stats["unique_graphs"] == graphs <= 3


def test_batch_sizes_share_graphs_when_samples_are_left_out():
    f = Cell()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = eq.Equilibrium(torch.compile(f, backend=counter), tolerance=TIGHT)
    sizes = set()
    for size in (40, 33, 7, 40, 1):
        layer.solve(batch(8, size=size), callback=lambda p: sizes.add(len(p.rows))).value.sum().backward()
    assert len(sizes) >= 8  # as many graphs as torch compiles before it gives up
    assert counter.frame_count <= 6  # with and without a gradient, for one sample and for several


def test_weights_and_masks_of_a_solve_are_inputs_of_the_compiled_graph():
    f, x = Conv(), batch(4, 5, 5)
    plain, counter = Conv(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    plain.load_state_dict(f.state_dict())
    f.compile(backend=counter)
    for seed in range(3):
        for cell in (f, plain):
            with torch.no_grad():
                cell.conv.scale.mul_(0.9)
        torch.manual_seed(seed)
        found = eq.fixed_point(f, torch.zeros_like(x), x, tolerance=TIGHT).value
        torch.manual_seed(seed)
        torch.testing.assert_close(found, eq.fixed_point(plain, torch.zeros_like(x), x, tolerance=TIGHT).value)
    assert counter.frame_count <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


def test_threads_have_weights_of_their_own():
    cells = [Conv().eval() for _ in range(2)]
    x = batch(4, 5, 5)
    expected = [eq.fixed_point(cell, torch.zeros_like(x), x, tolerance=TIGHT).value.detach() for cell in cells]
    found = [[], []]

    def solve(i):
        with torch.no_grad():
            for _ in range(5):
                found[i].append(eq.fixed_point(cells[i], torch.zeros_like(x), x, tolerance=TIGHT).value)

    for cell in cells:
        cell.compile(backend="aot_eager")
        with torch.no_grad():
            eq.fixed_point(cell, torch.zeros_like(x), x, tolerance=TIGHT)
    threads = [threading.Thread(target=solve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for values, wanted in zip(found, expected, strict=True):
        assert len(values) == 5
        for value in values:
            torch.testing.assert_close(value, wanted)


def test_a_gradient_that_is_cut_off_inside_a_compiled_f_is_named():
    x, W = batch(8), torch.randn(8, 8, requires_grad=True)

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.U, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, z, x):
            return torch.tanh(0.3 * z + self.U(x)) + 0.1 * self.shift.detach()

    f = Cut()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^parameter 'shift' requires a gradient"):
            solved(compiled(f), x, f.U.parameters())
    with pytest.raises(RuntimeError, match=r"^captured 'W' requires a gradient"):
        solved(compiled(lambda z, x: 0.3 * torch.tanh(z @ W.detach() + x)), x.requires_grad_(), [x])


def test_a_parameter_that_a_compiled_f_does_not_use_is_fine():
    f, x = Cell(), batch(8)
    f.unused = nn.Linear(8, 8)
    weights = [*f.W.parameters(), *f.U.parameters()]
    require_same(solved(compiled(f), x, weights), solved(f, x, weights))


def test_a_compiled_f_has_no_second_derivative_but_a_jacobian_penalty():
    f, x = Cell(), batch(8)
    g = compiled(f)
    value = eq.fixed_point(g, torch.zeros(1, 8), x, tolerance=TIGHT).value
    with pytest.raises(RuntimeError, match=r"a second derivative, which a compiled f does not have"):
        torch.autograd.grad(value.square().sum(), list(f.parameters()), create_graph=True)
    z, generator = value.detach(), torch.Generator()
    found = [
        torch.autograd.grad(eq.jacobian_penalty(each, z, x, generator=generator.manual_seed(0)), f.W.weight)[0]
        for each in (f, g)
    ]
    require_same(found[1:], found[:1])


def test_the_graph_of_a_solve_can_be_retained():
    f, x = Cell(), batch(8)
    value = eq.fixed_point(compiled(f), torch.zeros(1, 8), x, tolerance=TIGHT).value
    first = torch.autograd.grad(value.square().sum(), f.W.weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value.square().sum(), f.W.weight), first)


def test_an_f_that_was_compiled_to_run_backward_once_says_so():
    f, x = Cell(), batch(8)
    g = compiled(f)
    for size in (12, 11, 10):  # outside a solve, as anybody would train it, and for every size
        z = torch.zeros(size, 8, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(z, 0)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        part = x[:size].clone()
        torch._dynamo.maybe_mark_dynamic(part, 0)
        g(z, part).sum().backward()
    with pytest.raises(RuntimeError, match=r"its backward pass can run only once.*donated_buffer = False"):
        solved(g, x, f.parameters())


def test_inference_and_autocast():
    f, x = Cell(), batch(8)
    expected = eq.fixed_point(f, torch.zeros(1, 8), x, tolerance=TIGHT).value.detach()
    g = compiled(f)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(eq.fixed_point(g, torch.zeros(1, 8), x, tolerance=TIGHT).value, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = eq.fixed_point(g, torch.zeros(1, 8), x, tolerance=eq.Tolerance(2e-2))
    assert bool(sol.converged.all())
    sol.value.sum().backward()
    assert (sol.value.detach() - expected).norm() < 0.05 * expected.norm()


def test_importing_equipoise_and_solving_load_no_dynamo():
    code = (
        "import sys, torch, equipoise as eq; W = torch.eye(2, requires_grad=True);"
        "eq.fixed_point(lambda z, x: 0.5 * z @ W + x, torch.zeros(1, 2), torch.ones(3, 2)).value.sum().backward();"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


KNOWN = """
import sys, torch, equipoise as eq
from torch import nn

part = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
f = lambda z, x: 0.1 * part(z) + x
torch.optim.Adam(part.parameters())
{}
assert {!r} in sys.modules
eq.fixed_point(f, torch.zeros(1, 8), torch.randn(12, 8)).value.square().sum().backward()
"""


@pytest.mark.parametrize(
    "line",
    [
        "f = torch.compile(f, backend='aot_eager')",
        "part = torch.compile(part, backend='aot_eager')",
        "part.compile(backend='aot_eager')",
    ],
)
def test_a_process_that_compiles_is_known_to_compile(line):
    code = KNOWN.format(line, COMPILER)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- inductor ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_inductor_trains_a_cell_with_layer_norm():
    f, x = Cell(), batch(8)
    expected = solved(f, x, f.parameters())
    require_same(solved(torch.compile(f), x, f.parameters()), expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_inductor_trains_with_every_gradient_rule(rule):
    f, x = Cell(), batch(8)
    expected = solved(f, x, f.parameters(), **RULES[rule])
    require_same(solved(torch.compile(f), x, f.parameters(), **RULES[rule]), expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_inductor_trains_real_cells(name):
    make, shape = CELLS[name]
    f, x = make(), batch(*shape)
    expected = solved(f, x, f.parameters())
    f.compile()
    require_same(solved(f, x, f.parameters()), expected)


def gradients_of_a_model(model, images):
    torch.manual_seed(0)
    return torch.autograd.grad(model(images).square().sum(), [p for p in model.parameters() if p.requires_grad])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv-equilibrium", "mdeq"])
def test_inductor_trains_the_models(name):
    options = {"channels": 8} if name == "conv-equilibrium" else {"size": "cifar10-small", "channels": [8, 16]}
    model = eq.create_model(name, shape=(3, 16, 16), classes=10, **options, **({} if len(options) == 1 else HEAD))
    layer, images = model.double().equilibrium, torch.rand(6, 3, 16, 16, dtype=torch.float64)
    # A new MDEQ does not converge, and a long solve would amplify rounding: a few plain steps do not.
    layer.solver, layer.tolerance, layer.on_failure = eq.Picard(), eq.Tolerance(0.0, max_steps=4), "ignore"
    layer.gradient = eq.ImplicitGradient()
    expected = gradients_of_a_model(model, images)
    compile_equilibria(model, Where("test"))
    for a, b in zip(gradients_of_a_model(model, images), expected, strict=True):
        assert (a - b).norm() <= 1e-8 * b.norm() + 1e-8


HEAD = {"head_channels": [4, 8], "final_channels": 16}


# --- the lab ----------------------------------------------------------------------------------------------------------


def test_a_recipe_compiles_every_equilibrium_and_keeps_the_names_of_tensors():
    source = open_recipe("core/digits", None, ["training.compile=true"])
    recipe = source.phase(0)
    assert recipe.training.compile
    facts = {**dict.fromkeys(FACTS), "shape": (1, 8, 8), "classes": 10, "mean": (0.5,), "std": (0.5,)}
    model = build_model(recipe, facts, source.where)
    names = list(model.state_dict())
    compile_equilibria(model, source.where)
    assert list(model.state_dict()) == names
    assert model.equilibrium.f._compiled_call_impl is not None
    with pytest.raises(RecipeError, match=r"training\.compile=true: training\.compile is true; the model has no"):
        compile_equilibria(nn.Linear(2, 2), source.where)


def test_a_recipe_needs_a_compiler(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand sixty lines more")

    monkeypatch.setattr(torch, "compile", broken)
    source = open_recipe("core/digits", None, ["training.compile=true"])
    sentence = r"needs a C\+\+ compiler such as g\+\+ .* set training\.compile = false"
    with pytest.raises(RecipeError, match=sentence) as error:
        require_compiler(source.where)
    assert "\n" not in str(error.value)
    with pytest.raises(RecipeError, match=r"training\.compile is 'yes'; it must be true or false"):
        open_recipe("core/digits", None, ["training.compile='yes'"]).phase(0)


PHASES = """
[[phases]]
epochs = 1
gradient = { name = "unrolled", steps = 4 }

[[phases]]
epochs = 1
"""


def trained(folder, *changes, stop_first=False):
    """The tensors of a small run, stopped after its first step and resumed or not."""
    (folder / "recipe.toml").write_text(RECIPE + PHASES)
    source = open_recipe(str(folder / "recipe.toml"), None, changes)
    run = create(folder / ("stopped" if stop_first else "whole") / "-".join(changes), source)
    with this_machine("cpu") as machine:
        if stop_first:
            stop = StopRequest()
            stop.signal = signal.SIGTERM
            with pytest.raises(Stopped):
                train(run, machine, stop=stop)
            assert not run.result
        train(run, machine)
    return checkpoints.read(run.last)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
def test_training_with_compile_resumes_and_comes_out_as_without(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", compiled)
    expected = trained(tmp_path)
    found = trained(tmp_path, "training.compile=true")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 4 <= graphs <= 16  # the warm-up, the equilibrium, and evaluation do run compiled
    resumed = trained(tmp_path, "training.compile=true", stop_first=True)
    assert found.keys() == expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point() and not name.startswith("sums/"):
            torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(resumed[name], found[name], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.slow
def test_the_command_line_trains_compiled_and_says_so_without_a_compiler(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "equipoise", "train", "core/digits", "training.compile=true", "--budget", "smoke"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100.0% converged" in done.stdout
    environment |= {"CXX": "/nothing/here", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("equipoise: command line, training.compile=true: training.compile is true, but")
    assert done.stderr.count("\n") == 1

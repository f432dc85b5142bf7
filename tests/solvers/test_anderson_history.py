"""Anderson's stored differences in bfloat16, and its compiled step: the same solutions, and one clean fallback."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.problem.problem import FunctionProblem
from equipoise.solvers import fused
from equipoise.solvers.base import iterate

HALF = partial(eq.Anderson, history="bfloat16")
KINDS = pytest.mark.parametrize("kind", [1, 2])
# Dynamo looks at .grad of every tensor it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def compiler(monkeypatch):
    """All of torch.compile but the kernels, in a tenth of the time; returns the number of graphs compiled so far."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fused.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    assert not fused.failures
    fused.compiled.cache_clear()
    torch._dynamo.reset()


def network(n=24, batch=12, dtype=torch.float32, norm=0.7):
    """A tanh layer, and samples of different sizes that stop at different steps."""
    torch.manual_seed(0)
    weight = (norm * torch.linalg.qr(torch.randn(n, n))[0]).to(dtype).requires_grad_()
    x = (torch.randn(batch, n) * torch.logspace(-2, 1, batch)[:, None]).to(dtype)
    return weight, lambda z, x: torch.tanh(z @ weight + x), torch.zeros(1, n, dtype=dtype), x


def solved(solver, dtype=torch.float32, relative=1e-5, **options):
    weight, f, z0, x = network(dtype=dtype)
    sol = eq.fixed_point(f, z0, x, solver=solver, tolerance=eq.Tolerance(relative, max_steps=400), **options)
    (gradient,) = torch.autograd.grad(sol.value.square().sum(), weight)
    assert sol.converged.all()
    assert sol.backward is not None
    assert sol.backward.converged.all()
    return sol, gradient


def agree(solver, reference, rounding=1e-4, **options):
    (sol, gradient), (expected, exact) = solved(solver, **options), solved(reference, **options)
    assert (sol.value - expected.value).norm() <= rounding * expected.value.norm()
    assert (gradient - exact).norm() <= 10 * rounding * exact.norm()
    assert sol.stats.evaluations <= 1.15 * expected.stats.evaluations + 1
    assert sol.backward.evaluations <= 1.15 * expected.backward.evaluations + 1


VARIANTS = {"plain": {}, "mixing": {"mixing": 0.7}, "restart": {"restart": 1.5}, "memory": {"memory": 2}}


@KINDS
@pytest.mark.parametrize("name", VARIANTS)
def test_a_bfloat16_history_takes_as_many_evaluations(name, kind):
    options = {"kind": kind, **VARIANTS[name]}
    agree(HALF(**options), eq.Anderson(**options))


@KINDS
def test_a_bfloat16_history_reaches_float64_tolerances(kind):
    agree(HALF(kind=kind), eq.Anderson(kind=kind), rounding=1e-9, dtype=torch.float64, relative=1e-11)


@settings(max_examples=15, deadline=None)
@given(
    exponent=st.integers(-15, 15),
    norm=st.floats(0.1, 0.8),
    memory=st.integers(1, 8),
    kind=st.sampled_from([1, 2]),
    batch=st.integers(1, 9),
)
def test_a_bfloat16_history_has_the_range_of_float32(exponent, norm, memory, kind, batch):
    weight, _, z0, x = network(batch=batch, norm=norm)
    unit, weight = 10.0**exponent, weight.detach()
    f = lambda z, x: unit * torch.tanh((z / unit) @ weight + x)
    sol = eq.fixed_point(f, z0, x, solver=HALF(memory=memory, kind=kind), tolerance=eq.Tolerance(1e-4, max_steps=300))
    assert sol.converged.all()
    torch.testing.assert_close(f(sol.value, x) / unit, sol.value / unit, rtol=1e-3, atol=1e-3)


def test_the_history_is_stored_in_half_the_bytes_and_gathered():
    _, f, z0, x = network()
    states = []
    for solver in (HALF(), eq.Anderson()):
        eq.fixed_point(f, z0, x, solver=solver, callback=lambda progress: states.append(progress.state))
    half, full = states[0], states[-1]
    assert half.moves.dtype == half.left.dtype == torch.bfloat16
    assert half.gap.dtype == half.gram.dtype == torch.float32
    assert full.moves.dtype == torch.float32
    assert min(len(state.z) for state in states) < len(x)
    rows = torch.tensor([3, 1])
    taken = half.take(rows)
    assert torch.equal(taken.gap, half.gap[rows])
    assert torch.equal(taken.left, half.left[rows])


@pytest.mark.parametrize("history", ["full", "bfloat16"])
def test_large_states_are_widened_in_parts(history, monkeypatch):
    monkeypatch.setattr("equipoise.solvers.anderson.WIDENED", 0)
    agree(HALF(), eq.Anderson())
    _, f, z0, x = network()
    coupled = eq.fixed_point(f, z0.expand_as(x), x, solver=eq.Anderson(history=history), coupled=True)
    assert coupled.converged.all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = eq.fixed_point(f, z0, x, solver=eq.Anderson(history=history), tolerance=eq.Tolerance(2e-2))
    assert sol.converged.all()
    empty = eq.fixed_point(f, z0[:0], x[:0], solver=eq.Anderson(history=history))
    assert empty.value.shape == (0, 24)


def test_second_derivatives_with_a_bfloat16_history():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = (0.3 * torch.randn(4, 4, dtype=torch.float64)).requires_grad_()
    tight = eq.Tolerance(1e-12, max_steps=200)
    solve = lambda x, weight: (
        eq.fixed_point(
            lambda z, x: torch.tanh(z @ weight + x), torch.zeros_like(x), x, solver=HALF(), tolerance=tight
        ).value
    )
    assert torch.autograd.gradgradcheck(solve, (x, weight))


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"Anderson.history is 'half'; allowed: 'full', 'bfloat16'"):
        eq.Anderson(history="half")
    with pytest.raises(TypeError, match=r"Anderson.compile is 1; it must be a bool"):
        eq.Anderson(compile=1)


# --- the compiled step ------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("history", ["full", "bfloat16"])
@pytest.mark.parametrize("name", [n if n == "mixing" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_a_compiled_step_gives_the_same_values(compiler, name, history, kind):
    options = {"kind": kind, "history": history, **VARIANTS[name]}
    agree(eq.Anderson(compile=True, **options), eq.Anderson(**options))
    assert compiler.frame_count > 0


def test_one_graph_serves_all_steps_and_batch_sizes(compiler):
    _, f, z0, x = network(batch=40)
    sizes = set()
    for size in (40, 33, 7, 40, 20):
        watch = lambda progress: sizes.add(len(progress.rows))
        eq.fixed_point(f, z0, x[:size], solver=eq.Anderson(compile=True), callback=watch)
    assert len(sizes) >= 8
    assert compiler.frame_count <= 4  # two functions, for one sample and for several


def test_a_compiled_step_differentiates_twice(compiler):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tight = eq.Tolerance(1e-12, max_steps=200)
    solver = eq.Anderson(compile=True)
    solve = lambda x: (
        eq.fixed_point(
            lambda z, x: 0.5 * torch.sin(z) + x, torch.zeros_like(x), x, solver=solver, tolerance=tight
        ).value
    )
    assert torch.autograd.gradgradcheck(solve, (x,))
    assert compiler.frame_count > 0


def test_solvers_with_a_compiled_step_are_copied_and_pickled(compiler):
    solver = eq.Anderson(compile=True, history="bfloat16")
    solved(solver)
    assert pickle.loads(pickle.dumps(solver)) == copy.deepcopy(solver) == solver
    assert repr(solver) == "Anderson(history='bfloat16', compile=True)"


def test_a_static_graph_holds_plain_steps():
    layer = eq.Equilibrium(torch.nn.Bilinear(4, 4, 4), solver=eq.Anderson(compile=True))
    x = 0.1 * torch.randn(3, 4)
    with torch.no_grad():
        program = torch.export.export(eq.FixedSteps(layer, steps=6), (x,))
        torch.testing.assert_close(program.module()(x), eq.FixedSteps(layer, steps=6, solver=eq.Anderson())(x))


def test_a_compilation_that_fails_is_reported_once(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler here\nand sixty lines more")

    monkeypatch.setattr(fused, "failures", [])
    monkeypatch.setattr(torch, "compile", broken)
    fused.compiled.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"steps uncompiled.*compile=False. torch reports: no compiler here$"):
        sol, _ = solved(eq.Anderson(compile=True))
    again, _ = solved(eq.Anderson(compile=True))
    expected, _ = solved(eq.Anderson())
    assert sol.stats.evaluations == again.stats.evaluations == expected.stats.evaluations
    assert torch.equal(again.value, expected.value)
    assert fused.failures == ["no compiler here"]


WITHOUT = """
import torch, warnings, equipoise as eq
warnings.simplefilter("always")
torch.manual_seed(0)
x, solver = torch.randn(5, 8), eq.Anderson(compile=True)
with warnings.catch_warnings(record=True) as seen:
    for _ in range(2):
        sol = eq.fixed_point(lambda z, x: 0.5 * torch.cos(z) + x, torch.zeros_like(x), x, solver=solver)
assert sol.converged.all()
print(len([w for w in seen if "steps uncompiled" in str(w.message)]))
"""


@pytest.mark.slow
def test_without_a_compiler_there_is_one_warning(tmp_path):
    environment = {**os.environ, "CXX": "/nothing/here", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # inductor uses names that torch deprecates
@pytest.mark.parametrize("history", ["full", "bfloat16"])
def test_inductor_gives_the_same_values(history):
    agree(eq.Anderson(compile=True, history=history), eq.Anderson(history=history))
    assert not fused.failures


def test_a_fixed_number_of_steps_runs_compiled(compiler):
    _, f, z0, x = network()
    with torch.no_grad():
        states = [
            iterate(*FunctionProblem.start(f, z0, (x,)), solver, 6).z
            for solver in (eq.Anderson(compile=True), eq.Anderson())
        ]
    torch.testing.assert_close(*states)

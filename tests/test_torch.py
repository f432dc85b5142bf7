"""The rest of torch around a solve: export, ONNX, autocast, transforms, distributed training."""

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq

TIGHT = eq.Tolerance(1e-6, max_steps=200)


class Cell(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.W = nn.Linear(n, n)
        self.U = nn.Linear(n, n)

    def forward(self, z, x):
        return torch.tanh(0.7 * self.W(z) + self.U(x))


@pytest.fixture
def x():
    return torch.randn(10, 8)


def test_autocast_solves_with_sums_in_float32_and_keeps_gradients(x):
    f = Cell()
    expected = torch.autograd.grad(eq.fixed_point(f, torch.zeros(1, 8), x).value.square().sum(), list(f.parameters()))
    seen = []
    loose = eq.Tolerance(1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sol = eq.fixed_point(
            f,
            torch.zeros(1, 8),
            x,
            tolerance=loose,
            callback=lambda p: seen.append((p.state.z.dtype, p.residual.dtype)),
        )
        assert f(sol.value, x).dtype == torch.bfloat16  # f does run in low precision here
    assert set(seen) == {(torch.float32, torch.float32)}
    assert sol.value.dtype == torch.float32
    assert bool(sol.converged.all())
    found = torch.autograd.grad(sol.value.square().sum(), list(f.parameters()))  # outside autocast, as torch advises
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_autocast_is_restored_when_f_is_evaluated_in_the_backward_pass(x):
    modes = []

    class Watch(Cell):
        def forward(self, z, x):
            modes.append(torch.is_autocast_enabled("cpu"))
            return super().forward(z, x)

    f = Watch()
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        value = eq.fixed_point(f, torch.zeros(1, 8), x, tolerance=eq.Tolerance(2e-2)).value
        modes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        first = torch.autograd.grad(value.sum(), list(f.parameters()), create_graph=True)
        sum(g.float().square().sum() for g in first).backward()
    assert modes
    assert all(modes)


def test_functional_transforms_are_refused_with_a_sentence_and_fixed_steps_takes_them():
    layer = eq.Equilibrium(Cell().double(), tolerance=eq.Tolerance(1e-12, max_steps=200))
    x = torch.randn(4, 8, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match="FixedSteps"):
            transform(lambda v: layer(v[None] if v.dim() == 1 else v).sum())(x)
    steps = eq.FixedSteps(layer, 150, solver=eq.Picard())
    parameters = dict(steps.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(steps, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(layer(x).square().sum(), list(parameters.values()))
    torch.testing.assert_close(list(found.values()), list(expected), rtol=1e-8, atol=1e-8)
    many = {name: torch.stack([p, 0.9 * p]) for name, p in parameters.items()}
    losses = torch.func.vmap(loss)(many)
    torch.testing.assert_close(losses[0], loss(parameters))


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Picard(0.2), eq.Anderson(), eq.Broyden()], ids=repr)
def test_fixed_steps_exports_with_a_free_batch_size(solver, x):
    layer = eq.Equilibrium(Cell(), tolerance=TIGHT)
    with torch.no_grad():
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(
            eq.FixedSteps(layer, 30, solver=solver), (x,), dynamic_shapes={"inputs": ({0: batch},)}
        )
        other = torch.randn(7, 8)
        torch.testing.assert_close(program.module()(other), layer(other), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_exporting_an_equilibrium_names_fixed_steps(x):
    model = nn.Sequential(nn.Linear(8, 8), eq.Equilibrium(Cell()))
    ways = {
        "export": lambda: torch.export.export(model, (x,)),
        "strict export": lambda: torch.export.export(model, (x,), strict=True),
        "trace": lambda: torch.jit.trace(model, (x,)),
    }
    for name, way in ways.items():
        with pytest.raises(Exception, match=r"cannot be exported or traced.* Export equipoise\.FixedSteps\("):
            way()
        torch._dynamo.reset()
        assert torch.isfinite(model(x)).all(), name  # and it still solves


def test_fixed_steps_refuses_to_drop_a_gradient(x):
    layer = eq.Equilibrium(Cell())
    with pytest.raises(RuntimeError, match="for inference"):
        eq.FixedSteps(layer, 5)(x)
    with pytest.raises(ValueError, match="at least 1"):
        eq.FixedSteps(layer, 0)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_fixed_steps_runs_under_onnx(x, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    layer = eq.Equilibrium(Cell(), tolerance=TIGHT).eval()
    program = torch.onnx.export(eq.FixedSteps(layer, 40, solver=eq.Picard()), (x,), dynamo=True, verbose=False)
    path = tmp_path / "layer.onnx"
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), layer(x).detach(), rtol=1e-4, atol=1e-5)


DISTRIBUTED = """
    import os, sys, torch, torch.distributed as dist
    import torch.distributed.nn  # imported later, its default arguments would keep the group: its thread would not end
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import equipoise as eq

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = eq.WeightNorm(nn.Linear(6, 6))
            self.U = nn.Linear(6, 6)
        def forward(self, z, x):
            return torch.tanh(0.5 * self.W(z) + self.U(x))

    def model():
        torch.manual_seed(0)
        layer = eq.Equilibrium(Cell(), tolerance=eq.Tolerance(1e-11, max_steps=200))
        return nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 2)).double()

    torch.manual_seed(1)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    half = slice(4 * rank, 4 * rank + 4)
    alone, together = model(), DistributedDataParallel(model())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, together)]
    for _ in range(5):
        for m, optimizer, part in zip((alone, together), optimizers, (slice(None), half)):
            optimizer.zero_grad()
            (m(x[part]) - y[part]).square().mean().backward()
            optimizer.step()
    gap = max((a - b).abs().max().item() for a, b in zip(alone.parameters(), together.module.parameters()))
    del m, together, optimizers  # its reducer must not outlive the group
    dist.destroy_process_group()
    print(f"rank {rank} gap {gap:.1e}")
    sys.exit(gap > 1e-9)
"""


def test_distributed_data_parallel_equals_one_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DISTRIBUTED))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gap") == 2

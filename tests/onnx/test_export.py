"""Exported files, run by onnxruntime."""

import importlib.util

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.onnx.file import require_same_outputs
from equipoise.onnx.session import Session
from equipoise.onnx.traced import Traceable
from equipoise.onnx.tracing import ExportError
from equipoise.registry import MissingPackage
from export_helpers import MODELS, ODD, Cell, Odd

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs the extra onnx",
)


@needs_onnx
def test_a_loop_with_failing_samples_and_a_free_batch_size(tmp_path):
    layer = eq.Equilibrium(Odd(), solver=eq.Picard(), tolerance=eq.Tolerance(1e-4, max_steps=20), on_failure="ignore")
    exported = eq.export(layer, tmp_path / "odd.onnx", ODD, metadata={"made by": "a test"})
    session = Session(tmp_path / "odd.onnx")
    assert exported.outputs == {"output": ("batch", 3), **dict.fromkeys(("steps", "residual", "result"), ("batch",))}
    for batch in (ODD, ODD[2:3], ODD[2:], ODD[torch.arange(64) % 5]):
        found, solution = session(batch), layer.solve(batch)
        assert found["result"].tolist() == solution.result.tolist()
        assert found["steps"].tolist() == solution.stats.steps.tolist()
        torch.testing.assert_close(found["output"], solution.value)
    assert {eq.Result.CONVERGED, eq.Result.MAX_STEPS, eq.Result.NONFINITE} == set(session(ODD)["result"].tolist())
    facts = session.metadata
    assert facts["equipoise"] == eq.__version__
    assert facts["made by"] == "a test"
    assert "Picard()" in facts["solves"]
    assert "max_steps=20" in facts["solves"]
    assert exported.path.read_bytes().count(b"Traceback") == 0
    assert "odd.onnx" in str(exported)


@needs_onnx
@pytest.mark.parametrize("steps", [None, 2])
def test_opening_a_file_prints_nothing(steps, tmp_path, capfd):
    """onnxruntime remarks on every constant that is not used."""
    import onnxruntime

    layer = eq.Equilibrium(Cell(), solver=eq.Picard())
    exported = eq.export(layer, tmp_path / "quiet.onnx", torch.randn(2, 6), steps=steps)
    capfd.readouterr()
    onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")


@needs_onnx
def test_a_model_with_frozen_weights_and_its_check(tmp_path):
    torch.manual_seed(0)
    model = eq.create_model("mondeq", shape=(1, 4, 4), classes=3, mean=(0.3,), std=(0.2,), kind="dense", channels=8)
    exported = eq.export(model, tmp_path / "model.onnx", torch.rand(1, 1, 4, 4))  # a single sample is enough
    agreement = exported.check([torch.rand(n, 1, 4, 4) for n in (1, 3, 64)])
    assert agreement.samples == 68
    assert agreement.same_steps > 0.95
    assert agreement.difference < 1e-5
    assert exported.path.stat().st_size < 50_000  # no weight twice
    assert model.training


class Reading(nn.Module):
    """A model that returns ``read(layer, x)``."""

    def __init__(self, read, f=None):
        super().__init__()
        self.layer, self.read = eq.Equilibrium(f or Cell(), solver=eq.Picard()), read

    def forward(self, x):
        return self.read(self.layer, x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = eq.Equilibrium(Cell())

    def forward(self, z, x):
        return 0.5 * self.inner(z) + x


@needs_onnx
def test_one_number_for_each_sample(tmp_path):
    exported = eq.export(Reading(lambda layer, x: layer(x).sum(dim=1)), tmp_path / "energy.onnx", torch.randn(2, 6))
    assert exported.outputs["output"] == ("batch",)
    agreement = exported.check([torch.randn(5, 6)])
    assert agreement.same_steps == 1
    assert agreement.difference < 1e-5


@needs_onnx
@pytest.mark.parametrize(
    ("model", "error", "sentence"),
    [
        (Reading(lambda layer, x: layer(x).sum()), ValueError, r"output of Reading has shape \(\) for an example of 2"),
        (Reading(lambda layer, x: layer(x).T), ValueError, r"shape \(6, 2\) .* an output must have the batch first"),
        (Reading(lambda layer, x: layer.solve(x).value), ValueError, "write layer.x. in place of layer.solve"),
        (
            Reading(lambda layer, x: layer(x), Outer()),
            NotImplementedError,
            "layer.f.inner is solved inside the f of layer, and an equilibrium inside another cannot be exported",
        ),
    ],
    ids=["scalar", "transposed", "solve", "nested"],
)
def test_models_of_another_form_are_named(model, error, sentence, tmp_path):
    with pytest.raises(error, match=sentence):
        eq.export(model, tmp_path / "model.onnx", torch.randn(2, 6))
    assert not list(tmp_path.iterdir())


@needs_onnx
@pytest.mark.parametrize("solver", [eq.ForwardBackward(), eq.PeacemanRachford(), eq.DouglasRachford()], ids=repr)
def test_splitting_solvers(solver, tmp_path):
    torch.manual_seed(0)
    model = eq.create_model("mondeq", shape=(1, 4, 4), classes=3, kind="conv", channels=2)
    exported = eq.export(model, tmp_path / "model.onnx", torch.rand(2, 1, 4, 4), solver=solver)
    agreement = exported.check([torch.rand(n, 1, 4, 4) for n in (1, 20)])
    assert agreement.same_steps == 1
    assert agreement.difference < 1e-5


@needs_onnx
@pytest.mark.parametrize("steps", [None, 4])
def test_numbers_of_a_graph_in_float64_are_not_rounded_to_float32(steps, tmp_path):
    torch.manual_seed(0)
    model = eq.create_model("mondeq", shape=(1, 4, 4), classes=3, kind="dense", channels=8).double()
    x = torch.rand(8, 1, 4, 4, dtype=torch.float64)
    solver = eq.DouglasRachford(1 / 3, relaxation=0.7)  # its numbers are the factors of lerp and add
    exported = eq.export(model, tmp_path / "model.onnx", x, solver=solver, steps=steps)
    agreement = exported.check([x])
    assert agreement.same_steps == 1
    assert agreement.difference < 1e-13


@needs_onnx
def test_a_fixed_number_of_steps_has_no_loop(tmp_path):
    torch.manual_seed(0)
    layer = eq.Equilibrium(Cell(), solver=eq.Anderson(2))
    exported = eq.export(layer, tmp_path / "steps.onnx", torch.randn(2, 6), steps=3)
    assert list(exported.outputs) == ["output"]
    assert b"Loop" not in exported.path.read_bytes()
    agreement = exported.check([torch.randn(5, 6)])
    assert agreement.difference < 1e-5
    assert agreement.same_steps == 1


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    torch.manual_seed(0)
    model = eq.create_model(name, classes=3, **MODELS[name]).eval()
    exported = eq.export(model, tmp_path / "model.onnx", torch.rand(2, *MODELS[name]["shape"]))
    agreement = exported.check([torch.rand(n, *MODELS[name]["shape"]) for n in (1, 3, 64)])
    assert agreement.same_steps > 0.95
    assert agreement.difference < 1e-5 * max(1, agreement.largest)


def layer(**options):
    return eq.Equilibrium(Cell(), **options)


X = torch.randn(2, 6)


@needs_onnx
@pytest.mark.parametrize(
    ("model", "options", "error", "sentence"),
    [
        (layer(), {"path": "model.pt"}, ValueError, "it must end in .onnx"),
        (eq.Equilibrium, {}, TypeError, "the class Equilibrium"),
        (layer(), {"steps": 0}, ValueError, "steps is 0"),
        (layer(), {"metadata": {"version": 3}}, TypeError, "it must be a dict of strings"),
        (layer(), {"solver": "anderson"}, TypeError, "solver is 'anderson'"),
        (layer(), {"example": torch.tensor(1.0)}, ValueError, "batch first"),
        (nn.Linear(6, 6), {}, ValueError, "solves no equipoise.Equilibrium"),
        (layer(solver=eq.NewtonKrylov()), {}, NotImplementedError, "NewtonKrylov cannot be exported"),
        (layer(), {"solver": eq.Broyden(line_search=2)}, NotImplementedError, "Use line_search=0"),
        (layer(coupled=True), {}, NotImplementedError, "coupled=True"),
        (eq.Equilibrium(lambda z, x: (0.5 * z + x, {}), aux=True), {}, NotImplementedError, "has aux=True"),
        (layer(gradient=eq.ReversibleGradient()), {}, NotImplementedError, r"has gradient=ReversibleGradient\(\)"),
        (layer(), {"solver": eq.PeacemanRachford()}, TypeError, "PeacemanRachford needs"),
    ],
    ids=range(13),
)
def test_what_cannot_be_exported_is_named(model, options, error, sentence, tmp_path):
    path = tmp_path / options.pop("path", "model.onnx")
    with pytest.raises(error, match=sentence):
        eq.export(model, path, options.pop("example", X), **options)
    assert not list(tmp_path.iterdir())


def monotone(activation, solver):
    return eq.Equilibrium(
        eq.operators.MonotoneProblem(eq.operators.MonotoneLinear(6), activation), initial=(6,), solver=solver
    )


@needs_onnx
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (monotone("tanh", eq.PeacemanRachford(0.5)), "Newton's method"),
        (monotone("relu", eq.PeacemanRachford(memory=3)), "Use memory=0"),
    ],
)
def test_splitting_solvers_that_branch_on_data_are_named(model, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        eq.export(model, "never.onnx", X)


class Branching(Cell):
    def forward(self, z, x):
        return super().forward(z, -x if z.abs().max() > 1e6 else x)


class Mixing(Cell):
    def forward(self, z, x):
        return super().forward(z - z.mean(dim=0), x)


@needs_onnx
@pytest.mark.parametrize(
    ("f", "sentence"), [(Branching, "torch could not trace it"), (Mixing, "f mixes the samples of the batch")]
)
@pytest.mark.parametrize("seed", range(5))
def test_what_a_graph_cannot_express_is_named(f, sentence, seed, tmp_path):
    torch.manual_seed(seed)
    layer, x = eq.Equilibrium(f(), on_failure="ignore"), torch.randn(5, 6)
    with pytest.raises(ExportError, match=sentence):
        eq.export(layer, tmp_path / "model.onnx", x)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [3.0, torch.nan])
def test_wrong_outputs_for_the_example_are_named(wrong):
    class Wrong:
        def rows(self, x):
            return torch.full((2, 6), wrong), None

    with pytest.raises(ExportError, match="differ by up to (3|4|nan)"):
        require_same_outputs(Traceable(layer(), (X,), None, None, True), (X,), Wrong())


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"export needs onnx and onnxscript and onnxruntime.*equipoise\[onnx\]"):
        eq.export(layer(), "model.onnx", X)

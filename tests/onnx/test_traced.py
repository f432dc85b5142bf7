"""The arithmetic of exported graphs, run in torch in float64, against the solvers themselves."""

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.onnx.traced import Traceable
from export_helpers import MODELS, ODD, Cell, Odd

SHAPES = {"conv": (1, 6, 6), "multitier": (1, 8, 8), "dense": (1, 4, 4)}


def both(model, x, **options):
    """The graph's outputs and statistics, and the outputs and Solution of the model."""
    traceable = Traceable(model, (x,), options.pop("steps", None), options.pop("solver", None), True)
    outputs, *statistics = traceable(x)
    return outputs, statistics, traceable.expected, traceable.calls[0].solution


def assert_same(model, x, **options):
    outputs, (steps, residual, result), expected, solution = both(model.double().eval(), x.double(), **options)
    assert steps.tolist() == solution.stats.steps.tolist()
    assert result.tolist() == solution.result.tolist()
    torch.testing.assert_close(residual, solution.stats.residual, rtol=1e-6, atol=1e-14)
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-10)
    return result


SOLVERS = [
    eq.Picard(),
    eq.Picard(damping=0.3),
    eq.Anderson(),
    eq.Anderson(memory=3, mixing=0.7, restart=1.1),
    eq.Anderson(memory=3, kind=1, mixing=0.7, restart=1.1),
    eq.Broyden(memory=3),
    eq.Broyden(memory=3, when_full="drop"),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("tolerance", [eq.Tolerance(1e-6), eq.Tolerance(1e-6, max_steps=9)], ids=repr)
def test_steps_results_and_values_are_those_of_the_solver(solver, tolerance):
    torch.manual_seed(0)
    layer = eq.Equilibrium(Cell(), solver=solver, tolerance=tolerance, on_failure="ignore")
    result = assert_same(nn.Sequential(nn.Linear(4, 6), layer), torch.randn(7, 4))
    assert set(result.tolist()) <= {eq.Result.CONVERGED, eq.Result.MAX_STEPS}


@pytest.mark.parametrize("relative", [0.0, 1e-30])
def test_a_tolerance_below_rounding(relative):
    tolerance = eq.Tolerance(relative, max_steps=150, patience=None)
    layer = eq.Equilibrium(Cell(bound=0.5), solver=eq.Picard(), tolerance=tolerance, on_failure="ignore")
    result = assert_same(layer, torch.randn(5, 6))
    assert result.eq(eq.Result.CONVERGED).all() == (relative > 0)


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("patience", [None, 5])
def test_samples_that_fail_keep_their_best_iterate_and_say_so(check_every, patience):
    tolerance = eq.Tolerance(1e-4, max_steps=20, patience=patience)
    layer = eq.Equilibrium(Odd(), solver=eq.Picard(), tolerance=tolerance, check_every=check_every, on_failure="ignore")
    traceable = Traceable(layer, (ODD,), None, None, True)
    value, steps, _, result = traceable(ODD)
    solution = traceable.calls[0].solution
    assert result.tolist() == solution.result.tolist()
    assert eq.Result.NONFINITE in result.tolist()
    assert eq.Result.MAX_STEPS in result.tolist()
    assert steps.tolist() == solution.stats.steps.tolist()
    assert torch.isfinite(value).all()
    torch.testing.assert_close(value, solution.value)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "solver",
    [
        eq.PeacemanRachford(),
        eq.DouglasRachford(0.6, relaxation=0.8),
        eq.ForwardBackward(),
        eq.Anderson(),
    ],
    ids=repr,
)
def test_mondeq(kind, solver):
    torch.manual_seed(0)
    channels = {"conv": 4, "multitier": [3, 4], "dense": 12}[kind]
    model = eq.create_model("mondeq", shape=SHAPES[kind], classes=3, kind=kind, channels=channels, pool=2)
    assert_same(model, torch.rand(4, *SHAPES[kind]), solver=solver)


def test_a_sample_whose_equilibrium_is_zero_starts_there():
    op = eq.operators.MonotoneLinear(5)
    layer = eq.Equilibrium(
        eq.operators.MonotoneProblem(op, "relu"),
        initial=lambda bias: torch.ones_like(bias),
        solver=eq.PeacemanRachford(),
    )
    bias = torch.tensor([[-1.0], [1.0], [-2.0]]).expand(3, 5)
    assert_same(layer, bias)
    assert both(layer, bias.double())[1][0].tolist()[::2] == [1, 1]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    torch.manual_seed(0)
    model = eq.create_model(name, classes=3, **MODELS[name])
    assert_same(model, torch.rand(3, *MODELS[name]["shape"]))


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(3), eq.Broyden(4)], ids=repr)
def test_a_fixed_number_of_steps_is_that_of_fixed_steps(solver):
    torch.manual_seed(0)
    layer = eq.Equilibrium(Cell().double(), solver=solver, on_failure="ignore")
    x = torch.randn(3, 6, dtype=torch.float64)
    (value,) = Traceable(layer, (x,), 7, None, True)(x)
    with torch.no_grad():
        torch.testing.assert_close(value, eq.FixedSteps(layer, 7)(x), rtol=1e-10, atol=1e-12)


def test_layers_that_are_called_twice_or_nested_in_tuples():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = eq.Equilibrium(Cell(), tolerance=eq.Tolerance(1e-6))

        def forward(self, x, y):
            return self.layer(x) + self.layer(y[0]), self.layer(x)

    torch.manual_seed(0)
    model, x, y = Twice().double(), *torch.randn(2, 3, 6, dtype=torch.float64)
    traceable = Traceable(model, (x, (y,)), None, None, True)
    outputs = traceable(x, (y,))
    names = ["output_0", "output_1"]
    names += [f"{name}_{i}" for i in range(3) for name in ("steps", "residual", "result")]
    assert traceable.output_names() == names
    assert len(outputs) == len(names)
    torch.testing.assert_close(outputs[:2], traceable.expected)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(eq.Equilibrium(Cell()), nn.Dropout(0.5)).train()
    Traceable(model, (torch.randn(2, 6),), None, None, True)(torch.randn(2, 6))
    assert model.training
    assert model[1].training
    assert "forward" not in vars(model[0])
    assert all(p.requires_grad for p in model.parameters())

"""Parts of models: keyword options that are passed on, and context managers that restore what they change."""

import inspect

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models.mdeq.cell import MDEQSize
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Ring
from equipoise.models.parts.context_managers import changed, evaluating, exact_gradients, keeping_statistics
from equipoise.models.parts.keyword_options import accepts, options_of, positional_of


class Part:
    def __init__(self, width, depth=2, *, bias=True):
        self.width, self.depth, self.bias = width, depth, bias


class Whole:
    @accepts(*positional_of(Part), *options_of(Part, "bias"), *options_of(Ring, "sign"))
    def __init__(self, *sizes, depth=3, sign="hard", **options):
        self.part, self.sign = Part(*sizes, depth=depth, **options), sign


def test_a_constructor_lists_what_it_passes_on():
    parameters = inspect.signature(Whole).parameters
    assert list(parameters) == ["width", "depth", "bias", "sign"]
    assert parameters["width"].default is inspect.Parameter.empty
    assert [parameters[name].default for name in ("depth", "bias", "sign")] == [3, True, "hard"]
    assert vars(Whole(4, bias=False).part) == {"width": 4, "depth": 3, "bias": False}
    with pytest.raises(TypeError, match=r"Whole has no option 'dept'; did you mean 'depth'\? options: width, depth, "):
        Whole(4, dept=1)


def test_a_subclass_with_a_constructor_has_its_own_signature():
    class Mine(eq.models.MDEQ):
        def __init__(self, shape, classes):
            super().__init__(shape, classes, channels=(8,), head_channels=(4,), final_channels=8, groups=4)

    assert list(inspect.signature(Mine).parameters) == ["shape", "classes"]
    assert Mine((1, 8, 8), 3).size.channels == (8,)


def test_models_have_the_defaults_of_their_parts():
    defaults = {name: p.default for name, p in inspect.signature(eq.models.MOptEq).parameters.items()}
    cell, ring = (inspect.signature(part).parameters for part in (Branches, Ring))
    for part, names in ((cell, ("bound", "activation", "order", "perturbation", "perturb")), (ring, ("sign",))):
        assert all(defaults[name] == part[name].default for name in names)
    numbers = inspect.signature(MDEQSize).parameters
    listed = inspect.signature(eq.models.MDEQ).parameters
    assert all(listed[name].default is None for name in numbers)


@pytest.mark.parametrize("model", ["opteq", "popteq", "mopteq", "mdeq"])
def test_a_misspelled_option_is_refused_with_the_nearest_one(model):
    for make in (lambda **options: eq.create_model(model, **options), type(eq.create_model(model, **small(model)))):
        with pytest.raises(TypeError, match=r"has no option 'chanels'; did you mean 'channels'\? options: "):
            make(chanels=8, **small(model))


def small(model):
    return {"shape": (1, 8, 8), "classes": 3, "size": "cifar10-small" if model == "mdeq" else "reduced"}


def test_changes_are_undone_after_an_error_too():
    part = Part(1)
    with pytest.raises(ZeroDivisionError), changed([(part, "width", 2), (part, "depth", 9)]):
        assert (part.width, part.depth) == (2, 9)
        raise ZeroDivisionError
    assert (part.width, part.depth) == (1, 2)


def test_every_module_returns_to_its_own_mode():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 2))
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [True, False, True]


def test_running_statistics_are_kept():
    norm = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x = torch.randn(8, 3, requires_grad=True)
    with keeping_statistics(norm):
        y = norm(x)
        assert not torch.equal(norm.running_mean, before["running_mean"])
    y.square().sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_phantom_gradients_are_replaced_and_restored():
    phantom = eq.Equilibrium(nn.Identity(), gradient=eq.PhantomGradient(2))
    unrolled = eq.Equilibrium(nn.Identity(), gradient=eq.UnrolledGradient(2))
    model = nn.ModuleList([phantom, unrolled])
    with exact_gradients(model):
        assert isinstance(phantom.gradient, eq.ImplicitGradient)
        assert isinstance(unrolled.gradient, eq.UnrolledGradient)
    assert isinstance(phantom.gradient, eq.PhantomGradient)

"""Gradients of models with branches."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from corpus import randn
from dense_opteq import model_of, pictures


def tiny_model(**options):
    numbers = {"channels": 3, "shape": (1, 4, 4), "scales": (1, 2), "classes": 2, "diversity": 0.3, "smoothing": 0.3}
    return model_of(**{**numbers, "bound": 0.6, "activation": "tanh", **options})


@pytest.mark.parametrize(("order", "full"), [("gauss-seidel", True), ("jacobi", False)])
def test_gradients_of_everything_match_finite_differences(order, full):
    model = tiny_model(order=order, full=full)
    names = [name for name, _ in model.named_parameters()]

    def logits(images, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (images,))

    images = pictures(2, 1, 4).requires_grad_()
    assert torch.autograd.gradcheck(logits, (images, *model.parameters()), eps=1e-5, atol=1e-6, fast_mode=True)


GRADIENTS = {
    "tanh": {},
    "relu": {"activation": "relu"},
    "train": {},
    "jacobi": {"scales": (1, 2, 1), "order": "jacobi"},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_300_unrolled_steps(options, request):
    model = tiny_model(**options).train("train" in request.node.callspec.id)
    images = pictures(3, 1, 4).requires_grad_()
    sources = [images, *model.parameters()]

    def loss(z):
        logits = model.read(z)
        return (logits * randn(*logits.shape, seed=3)).sum() + logits.square().sum()

    found = torch.autograd.grad(loss(model.branches(model.features(images))), sources)
    model.equilibrium.gradient, gradients = eq.UnrolledGradient(steps=300), []
    x, t = model.cell.prepare(model.features(images))
    for width in (t, t.detach()):
        z = model.equilibrium(x, width)
        gradients.append(torch.autograd.grad(loss(z), sources, retain_graph=True))
    scale = max(gradient.norm() for gradient in gradients[0])
    for name, ours, theirs in zip(["images", *dict(model.named_parameters())], found, gradients[0], strict=True):
        assert (ours - theirs).norm() < 1e-8 * (theirs.norm() + 1e-3 * scale), name
    # t is part of the function: without its gradient this would be another one.
    assert (gradients[0][0] - gradients[1][0]).norm() > 1e-5 * gradients[0][0].norm()


def test_second_derivatives_match_finite_differences():
    model = tiny_model(channels=2, shape=(2, 2, 2))
    model.stem = model.normalize = nn.Identity()
    g, name = randn(1, 2, 2, 2, seed=4).requires_grad_(), "equilibrium.f.W.0.layer.weight"

    def logits(g, weight):
        return torch.func.functional_call(model, {name: weight}, (g,))

    assert torch.autograd.gradgradcheck(logits, (g, model.get_parameter(name)), fast_mode=True)


def test_models_are_copied_and_pickled_with_a_start_of_their_own():
    model, images = model_of(), pictures()
    logits = model(images)
    logits.sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), logits)
        with torch.no_grad():
            twin.cell.W[0].layer.weight.neg_()
        assert not torch.equal(twin(images), logits)
        assert twin.equilibrium.initial.__self__ is twin.cell
    assert torch.equal(model(images), logits)


def test_weights_are_derived_once_for_a_forward_and_its_backward(monkeypatch):
    model, made, derive = model_of(diversity=0.2, scales=(1, 2)), [], eq.SpectralNorm.derive
    monkeypatch.setattr(eq.SpectralNorm, "derive", lambda self, size: made.append(id(self)) or derive(self, size))
    images = pictures()
    model(images).sum().backward()
    assert sorted(made) == sorted(map(id, (*model.cell.W, *model.cell.U)))
    before = model(images)
    model.cell.W[1].layer.weight.data *= -1  # an edit that version counters do not see
    assert not torch.allclose(model(images), before)


def test_every_parameter_learns_and_the_loss_falls():
    model = model_of(full=False, scales=(1, 2), diversity=0.1, perturb="train", perturbation=0.01).train()
    model.equilibrium.tolerance, model.equilibrium.on_failure = eq.Tolerance(relative=1e-2, max_steps=15), "ignore"
    images, labels = pictures(6), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]

"""Training with perturbed branches."""

import copy
import math

import pytest
import torch

import equipoise as eq
from corpus import DOUBLE, randn
from dense_opteq import (
    RINGS,
    TIGHT,
    brought,
    cell_of,
    close,
    convolution,
    each_order,
    features,
    model_of,
    pictures,
    solved,
)
from equipoise.tasks.augmented import AugmentedClassification


def test_when_branches_are_perturbed():
    cell = cell_of([(4, 4)] * 2, RINGS["heritage"])
    z, (x,) = features(cell.sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
    plain = cell(z, x)
    for mode, training, moved in (
        ("off", True, False),
        ("off", False, False),
        ("train", True, True),
        ("train", False, False),
        ("always", True, True),
        ("always", False, True),
    ):
        cell.train(training).perturb = mode
        assert cell.perturbed == moved
        assert torch.equal(cell(z, x)[1], plain[1]) != moved
    cell.perturbation = 0.0
    assert not cell.perturbed
    assert torch.equal(cell(z, x)[1], plain[1])


@each_order
@pytest.mark.parametrize("sizes", [[(6, 6)] * 3, [(8, 8), (4, 4), (2, 2)]], ids=["alike", "multi-scale"])
def test_each_branch_sees_what_is_worst_for_the_one_before(order, sizes):
    epsilon = 0.2
    cell = cell_of(sizes, order=order, activation="tanh", perturb="always", perturbation=epsilon)
    with torch.no_grad():
        z, g = features(sizes), randn(2, 3, 8, 8, seed=5)
        x, t = cell.prepare(g)
        found = cell.sweep(z, x, t)[0] if order == "gauss-seidel" else cell.lift(z, x, t)
        new, delta = list(z), torch.zeros_like(g)
        for i, size in enumerate(sizes):
            W, U = (convolution(layer.weight(size), size) for layer in (cell.W[i], cell.U[i]))
            U = U @ torch.kron(torch.eye(3, dtype=DOUBLE), brought((8, 8), size))
            h = cell.ring.h(new if order == "gauss-seidel" else z, t)[i]
            b = cell.b[i].repeat_interleave(math.prod(size))
            y = torch.tanh(h.flatten(1) @ W.T + (g - delta).flatten(1) @ U.T + b)
            close([found[i].flatten(1)], [y])
            delta = epsilon * torch.sign(y @ U).reshape(g.shape)
            new[i] = (y @ W).reshape(z[i].shape)
        close(cell(z, x, t), new)
        cell.perturb = "off"
        unmoved = cell.sweep(z, x, t)[0] if order == "gauss-seidel" else cell.lift(z, x, t)
    assert torch.equal(unmoved[0], found[0])
    assert not torch.equal(unmoved[1], found[1])


def test_no_gradient_goes_through_the_sign():
    cell = cell_of([(4, 4)] * 2, RINGS["heritage"], activation="tanh", perturb="always", order="jacobi")
    z, (x,) = [part.requires_grad_() for part in features(cell.sizes)], cell.prepare(randn(2, 3, 8, 8, seed=5))
    x = tuple(part.detach() for part in x)
    y = cell.lift(z, x)
    with torch.no_grad():
        delta = cell.perturbation * cell.reconstructed(0, y[0]).sign()
    sources = [*z, cell.W[0].layer.weight, cell.W[1].layer.weight, cell.U[1].layer.weight, cell.U[0].layer.weight]
    expected = torch.tanh(cell.preactivation(z, x)[1] - cell.injected(1, delta))
    close([y[1]], [expected])
    found, known = (torch.autograd.grad(v.square().sum(), sources, allow_unused=True) for v in (y[1], expected))
    assert found[-1] is None  # U of the first branch made nothing but the sign
    for one, other in zip(found[:-1], known[:-1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close([one], [other])


def test_in_eval_mode_training_with_perturbations_leaves_no_trace():
    one, other = model_of(perturb="train", perturbation=0.3), model_of()
    other.load_state_dict(one.state_dict())
    images = pictures()
    assert torch.equal(one(images), other(images))


def test_what_evaluation_normalises_by_is_of_unperturbed_branches():
    """By statistics of perturbed ones a trained model lost a quarter of its accuracy as soon as it was evaluated."""
    torch.manual_seed(0)
    one = model_of(perturb="train", perturbation=0.3, diversity=0.0).train()
    other = model_of(diversity=0.0).train()
    other.load_state_dict(one.state_dict())
    one.equilibrium.on_failure = "ignore"  # the sign in the perturbation jumps
    images = pictures(5)
    trained = one(images)
    other(images)
    for mine, its in zip(one.norm.buffers(), other.norm.buffers(), strict=True):
        torch.testing.assert_close(mine, its)
    assert one.cell.perturb == "train"
    with torch.no_grad():  # logits in training are those of perturbed branches, normalised by their own batch
        seen = torch.cat([part.mean(dim=(2, 3)) for part in one.branches(one.features(images))], dim=1)
        seen = (seen - seen.mean(0)) / (seen.var(0, correction=0) + one.norm.eps).sqrt()
        torch.testing.assert_close(trained, one.head(seen))
    assert not torch.allclose(trained, other(images), rtol=1e-3)
    assert one(images[:1]).isfinite().all()


def test_the_solve_that_gathers_statistics_is_not_one_that_is_trained():
    """It was counted as one, so that no more than half of the solves could ever fail."""
    model, images = model_of(full=False, perturb="train", perturbation=1.0).train(), pictures(4)
    model.equilibrium.tolerance, model.equilibrium.on_failure = eq.Tolerance(relative=1e-6, max_steps=8), "ignore"
    seen = []
    model.equilibrium.register_forward_hook(lambda module, given, z: seen.append(z))
    with eq.watch_solves() as solves:
        model(images).sum().backward()
    assert len(solves) == len(seen) == 1
    assert solves[0].backward is not None
    loss, _ = AugmentedClassification(("a", "b", "c")).loss(model, (images, torch.tensor([0, 1, 2, 0])))
    assert loss.isfinite()


@pytest.mark.parametrize("perturb", ["off", "always", "train"])
def test_perturbed_or_not_the_head_normalises_as_its_norm_says(perturb):
    model, images = model_of(full=False, perturb=perturb, perturbation=0.3).train(), pictures(4)
    model.equilibrium.on_failure = "ignore"
    before = model(images)
    model.norm.eps = 1.0
    changed = model(images)
    model.norm.eval()
    kept = copy.deepcopy(model.norm.state_dict())
    frozen = model(images)
    assert not torch.allclose(before, changed)
    assert not torch.allclose(changed, frozen)
    assert all(torch.equal(kept[name], value) for name, value in model.norm.state_dict().items())


def test_a_single_image_is_normalised_as_in_evaluation():
    model = model_of(full=False).train()
    model.stem.eval()
    model.norm.eps, image = 0.5, pictures(1)
    close([model(image)], [model.eval()(image)])


@each_order
def test_a_perturbed_equilibrium_is_that_of_perturbed_inputs(order):
    """At the fixed point the perturbation is a constant: T without it, given U_i (g - delta), has the same."""
    cell = cell_of([(6, 6)] * 3, RINGS["heritage"], order=order, perturb="always", perturbation=0.01, norm=0.5)
    g = randn(2, 3, 8, 8, seed=5)
    (x,), z = solved(cell, g, tolerance=eq.Tolerance(relative=1e-12, max_steps=300))
    with torch.no_grad():
        y = cell.lift(z, x)
        shifted = [x[0], *(x[i] - cell.injected(i, 0.01 * cell.reconstructed(i - 1, y[i - 1]).sign()) for i in (1, 2))]
        cell.perturb = "off"
        alone = eq.fixed_point(cell, cell.start, tuple(shifted), tolerance=TIGHT, on_failure="raise").value
    close(z, alone, 1e-10)

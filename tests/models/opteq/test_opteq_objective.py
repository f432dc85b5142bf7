"""Propositions 1 and 2: equilibria are stationary points of the objective, and what perturbs it most."""

import copy
import math

import pytest
import torch

import equipoise as eq
from corpus import DOUBLE, per_sample, randn
from dense_opteq import (
    ACTIVATIONS,
    SIZES_OF_RINGS,
    SUBGRADIENTS,
    TIGHT,
    Truth,
    cell_of,
    close,
    convolution,
    features,
    images_of,
    matrices,
    model_of,
    pictures,
    rows,
    solved,
)
from equipoise.models.opteq import ring as ring_module
from equipoise.models.opteq.ring import Ring, carry
from equipoise.models.opteq.theorems import gradient_at

# Proposition 1


def stationarity(cell, g, f, **options):
    """||dG/dz|| at the equilibrium of each sample, by the larger of its two parts; G by dense inverses."""
    inputs, z = solved(cell, g, **options)
    x, t = inputs if len(inputs) == 2 else (*inputs, None)
    W = [convolution(layer.weight(size), size).detach() for layer, size in zip(cell.W, cell.sizes, strict=True)]
    truth, found, values = Truth(cell.sizes, cell.ring), [], []
    for k in range(len(g)):
        at = [matrices(part)[k].clone().requires_grad_() for part in z]
        coupling = truth.coupling(at, rows(t, k))
        value = truth.G(at, [matrices(part)[k] for part in x], rows(t, k), f, W)
        whole, pull = (per_sample([p[None] for p in torch.autograd.grad(v, at)]) for v in (value, coupling))
        found.append((whole.norm() / max(pull.norm(), (whole - pull).norm())).item())
        values.append(value.detach())
    return max(found), torch.stack(values), z


SHAPES = {name: SIZES_OF_RINGS[name] for name in ("1 alike", "3 alike", "8 4 2 1", "no whole ratio")}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("heritage", [True, False], ids=["heritage", "no heritage"])
def test_the_equilibrium_is_a_stationary_point_of_g(sizes, activation, heritage):
    cell = cell_of(sizes, Ring(heritage=heritage, diversity=0.05), activation=activation)
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS[activation][1])
    assert relative <= 1e-8


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation", SUBGRADIENTS)
def test_the_equilibrium_is_a_stationary_point_where_f_has_a_subgradient(sizes, activation):
    """0 is in df(y) + the gradient of all the rest in y."""
    cell, g = cell_of(sizes, Ring(diversity=0.05), activation=activation), 2 * randn(2, 3, 8, 8, seed=5)
    (x, t), z = solved(cell, g)
    distance = SUBGRADIENTS[activation][2]
    truth = Truth(sizes, cell.ring)
    W = [convolution(layer.weight(size), size).detach() for layer, size in zip(cell.W, sizes, strict=True)]
    with torch.no_grad():
        y = cell.lift(z, x, t)
    met = set()  # whether y is at a corner of f
    for k in range(2):
        sample = [part[k].flatten().requires_grad_() for part in y]
        lowered = [(W[i].T @ part).reshape(4, -1).T for i, part in enumerate(sample)]
        for i, part in enumerate(sample):
            close([torch.linalg.solve(W[i].T, z[i][k].flatten())], [part.detach()], 1e-8)
        rest = truth.coupling(lowered, t[k])
        rest = rest + sum((p**2 / 2 - x[i][k].flatten() * p).sum() for i, p in enumerate(sample))
        for part, pull in zip(sample, torch.autograd.grad(rest, sample), strict=True):
            assert distance(part, -pull).max() <= 1e-8
            corner = (part == 0) | (part.abs() == 1)
            met |= set(corner.tolist())
    assert met == {True, False}


class Whole(Ring):
    """Without the 1/2 of h."""

    def drawn(self, i, z, signs):
        return 2 * super().drawn(i, z, signs)


def test_without_its_factor_h_belongs_to_another_objective():
    for ring, stationary in ((Ring(diversity=0.05), True), (Whole(diversity=0.05), False)):
        torch.manual_seed(0)
        cell = cell_of([(6, 6)] * 3, ring, norm=0.6, activation="tanh")
        relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
        assert (relative < 1e-8) if stationary else (relative > 0.1)


def test_upsampling_that_is_not_the_adjoint_belongs_to_another_objective(monkeypatch):
    def repeated(z, size):
        factor = math.prod(max(1, n // o) for n, o in zip(size, z.shape[2:], strict=True))
        return factor * carry(z, size)

    torch.manual_seed(0)
    sizes = SIZES_OF_RINGS["8 4 2 1"]
    cell = cell_of(sizes, Ring(diversity=0.05), norm=0.3, activation="tanh")
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
    assert relative < 1e-6
    monkeypatch.setattr(ring_module, "carry", repeated)
    relative, _, _ = stationarity(cell, randn(2, 3, 8, 8, seed=5), ACTIVATIONS["tanh"][1])
    assert relative > 0.1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_signs_are_those_of_single_precision_under_autocast(scale):
    ring, z = Ring(diversity=0.1), [scale * randn(2, 4, 8, 8, seed=i).float() for i in range(3)]
    t = ring.thresholds(z)
    with torch.autocast("cpu", torch.float16):
        half = [part.half() for part in z]
        assert ring.total_diversity(half, t).isfinite().all()
        for e in range(3):
            torch.testing.assert_close(
                ring.signs(e, half, ring.thresholds(half)), ring.signs(e, z, t), rtol=0, atol=0.02
            )
        mixed = ring.h(half, t)
    for found, truth in zip(mixed, ring.h(z, t), strict=True):
        torch.testing.assert_close(found.float(), truth, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *SUBGRADIENTS])
@pytest.mark.parametrize("options", [{}, {"scales": (1, 2, 4, 8), "diversity": 0.2}, {"order": "jacobi"}], ids=str)
def test_objective_is_the_dense_one(activation, options):
    model, images = model_of(activation=activation, **options), pictures()
    f = {**ACTIVATIONS, **SUBGRADIENTS}[activation][1]
    with torch.no_grad():
        g = model.features(images)
        z = model.branches(g)
        found = model.objective(z, images)
    _, values, again = stationarity(model.cell, g, lambda y: f(y) + 0 * y)
    close(z, again, 1e-11)
    close([found], [values], 1e-9)


def test_objective_has_its_value_by_hand():
    """One pixel, one channel, W = w: G = -x y + y^2 / 2 - z^2 / 2 with y = z / w, so y = x / (1 - w^2)."""
    model = eq.models.OptEq((1, 1, 1), 2, size="reduced", channels=1, kernel=1, injection_kernel=1, stem=1).double()
    model.eval().equilibrium.tolerance = TIGHT
    with torch.no_grad():
        for p in (*model.cell.parameters(), model.stem[0].weight):
            p.fill_(0.5)
    images = torch.tensor([0.9, 0.6], dtype=DOUBLE)[:, None, None, None]
    z = model.branches(model.features(images))
    g = ((images - 0.5) / 0.5 / 2 / math.sqrt(1 + 1e-5)).flatten()
    x = 0.5 * g + 0.5
    y = x / (1 - 0.25)
    close([z[0].flatten()], [y / 2], 1e-10)
    close([model.objective(z, images)], [-x * y + y**2 / 2 - (y / 2) ** 2 / 2], 1e-10)


VERIFIED = {
    "default": {},
    "strong diversity": {"diversity": 0.25},
    "multi-scale": {"scales": (1, 2, 4, 8), "diversity": 0.05},
    "softplus": {"activation": "softplus"},
    "hard-tanh": {"activation": "hard-tanh", "diversity": 0.1},
    "jacobi": {"order": "jacobi"},
}


@pytest.mark.parametrize("options", VERIFIED.values(), ids=VERIFIED)
def test_verify_finds_a_stationary_point(options):
    model, images = model_of(**options), pictures(3)
    found = model.verify(images)
    assert found.residual.shape == found.objective.shape == found.gradient.shape == (3,)
    assert found.gradient.max() <= 1e-10
    assert found.residual.max() <= 1e-10
    with torch.no_grad():
        close([found.objective], [model.objective(model.branches(model.features(images)), images)], 1e-10)
    assert "proposition 1 on 3 images" in str(found)
    assert f"{found.gradient.max():.1e}" in str(found)


@pytest.mark.parametrize("kind", [eq.models.OptEq, eq.models.POptEq, eq.models.MOptEq])
def test_objective_refuses_a_z_of_other_images(kind):
    """A z of one image would be broadcast."""
    model, images = model_of(kind), pictures(3)
    z = model.branches(model.features(images))
    for wrong in (tuple(part[:1] for part in z), z[0], z[1:], tuple(part[..., 1:] for part in z)):
        with pytest.raises(ValueError, match="z has the shapes .*; it must have one tensor for each branch, of"):
            model.objective(wrong, images)


def test_objective_leaves_running_statistics_alone():
    model, images = model_of().train(), pictures(3)
    z = model.branches(model.features(images))
    before = copy.deepcopy(model.state_dict())
    model.objective(z, images).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [eq.models.OptEq, eq.models.POptEq])
def test_verify_of_uncoupled_models(kind):
    assert model_of(kind).verify(pictures(3)).gradient.max() <= 1e-10


def test_verify_in_single_precision_and_in_inference_mode():
    model, images = model_of().float(), pictures(3).float()
    assert model.verify(images).gradient.max() < 1e-3
    with torch.inference_mode():
        assert model.verify(pictures(3).float()).gradient.max() < 1e-3


def test_verify_finds_no_stationary_point_where_there_is_none():
    model, images = model_of(diversity=0.05), pictures()
    cell = model.cell
    with torch.no_grad():
        x, t = cell.prepare(model.features(images))
        for z in (features(cell.sizes), cell(cell.start(x), x, t)):
            gradient, part = gradient_at(cell, z, cell.lift(z, x, t), t)
            assert (per_sample(gradient).norm(dim=1) > 1e-2 * per_sample(part).norm(dim=1)).all()
    loose = model.verify(images, relative=0.3)
    assert (loose.gradient > 1e-6).all()
    object.__setattr__(cell, "ring", Whole(diversity=0.05))
    for layer in cell.W:
        layer.bound = 0.6
    wrong = model.verify(images)
    assert (wrong.residual < 1e-12).all()
    assert (wrong.gradient > 0.1).all()


def test_gradient_is_that_of_the_dense_objective_anywhere():
    """At W^T y with y = s(W h(z) + x), z being no equilibrium."""
    cell = cell_of([(4, 4), (2, 2)], Ring(diversity=0.1), activation="tanh")
    with torch.no_grad():
        x, t = cell.prepare(randn(1, 3, 8, 8, seed=5))
        z = features(cell.sizes, batch=1)
        y = cell.lift(z, x, t)
        found, _ = gradient_at(cell, z, y, t)
        W = [convolution(layer.weight(size), size) for layer, size in zip(cell.W, cell.sizes, strict=True)]
    at = [matrices(part)[0].clone().requires_grad_() for part in cell.lower(y)]
    value = Truth(cell.sizes, cell.ring).G(at, [matrices(p)[0] for p in x], t[0].detach(), ACTIVATIONS["tanh"][1], W)
    expected = torch.autograd.grad(value, at)
    close(found, [images_of([p], size) for p, size in zip(expected, cell.sizes, strict=True)], 1e-9)


def test_verify_leaves_the_model_as_it_is():
    model = model_of().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.verify(pictures())
    model.certificate(pictures())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("perturb", ["always", "train"])
def test_verify_does_not_vouch_for_perturbed_branches(perturb):
    """They minimise no objective of these images, though T has an equilibrium."""
    options = {"perturbation": 1e-3, "diversity": 0.0, "activation": "softplus"}
    model, images = model_of(perturb=perturb, **options).train(), pictures()
    with pytest.raises(ValueError, match=f"perturb is '{perturb}'.*perturb='off'"):
        model.verify(images)
    if perturb == "train":
        assert model.eval().verify(images).gradient.max() <= 1e-10


# Proposition 2


def perturbed_rise(cell, g, delta):
    """G and z at the equilibrium of g - delta."""
    inputs, z = solved(cell, g - delta)
    with torch.no_grad():
        return cell.objective(cell.lift(z, *inputs), *inputs), z[0].flatten(1)


@pytest.mark.parametrize("activation", ["relu", "leaky-relu", "tanh", "sigmoid"])
def test_proposition_2(activation):
    """The larger of the rise of G and sqrt(N) epsilon |z' - z| is at least (epsilon |U^T y|_1 - N epsilon^2) / 2."""
    epsilons = torch.tensor([0.001, 0.01, 0.05, 0.1, 0.3], dtype=DOUBLE)[:, None, None, None]
    meant = 0
    for case in range(5):
        torch.manual_seed(case)
        bound = (0.5, 0.9, 0.999, 0.9, 0.7)[case]
        cell = cell_of([(5, 5)], Ring(heritage=False), norm=bound, inputs=(4, 5, 5), activation=activation)
        g = randn(1, 4, 5, 5, seed=case).relu().repeat(5, 1, 1, 1)
        inputs, z = solved(cell, g)
        with torch.no_grad():
            y = cell.lift(z, *inputs)
            before = cell.objective(y, *inputs)
            seen = cell.reconstructed(0, y[0])
        after, moved = perturbed_rise(cell, g, epsilons * seen.sign())
        N, epsilon = g[0].numel(), epsilons.flatten()
        assert N == 100
        promised = (epsilon * seen.abs().sum(dim=(1, 2, 3)) - N * epsilon**2) / 2
        reached = torch.maximum(after - before, math.sqrt(N) * epsilon * (moved - z[0].flatten(1)).norm(dim=1))
        assert (reached >= promised - 1e-10).all()
        meant += int((promised > 0).sum())
        # Also the inequality of the proof from which it follows.
        step = after - before + math.sqrt(N) * epsilon * (moved - z[0].flatten(1)).norm(dim=1)
        assert (step >= 2 * promised - 1e-10).all()
    assert meant >= 5  # the promise was not empty


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_reconstructed_perturbation_raises_g_more_than_any_random_one(activation):
    cell = cell_of([(5, 5)], Ring(heritage=False), inputs=(4, 5, 5), activation=activation)
    g = randn(1, 4, 5, 5, seed=1).relu().repeat(21, 1, 1, 1)
    inputs, z = solved(cell, g)
    with torch.no_grad():
        y = cell.lift(z, *inputs)
        before = cell.objective(y, *inputs)
        delta = 0.1 * randn(21, 4, 5, 5, seed=2).sign()
        delta[0] = 0.1 * cell.reconstructed(0, y[0])[0].sign()
    rise = perturbed_rise(cell, g, delta)[0] - before
    assert (rise[0] > 2 * rise[1:].abs()).all()

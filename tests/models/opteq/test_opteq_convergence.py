"""Which solves converge, and what certificates prove."""

import pytest
import torch
from torch import nn

import equipoise as eq
from corpus import DOUBLE, dense_jacobian, randn, true_residual
from dense_opteq import TIGHT, dense, each_order, features, model_of, norm, pictures

# Convergence


def full_norm_model(channels, **options):
    """A model of three branches as it begins, but for ||W|| = 0.9."""
    model = eq.models.MOptEq((3, 8, 8), 10, size="reduced", channels=channels, **options).double().eval()
    for layer in model.cell.W:
        layer.always = True
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-10, max_steps=200)
    model.equilibrium.on_failure = "ignore"
    return model


@pytest.mark.parametrize("diversity", [0.0, 0.001, 0.01, "1/C"])
@each_order
def test_the_default_solver_converges_up_to_one_over_c(diversity, order):
    model = full_norm_model(16, diversity=1 / 16 if diversity == "1/C" else diversity, order=order)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(pictures(4, 3)))
        solution = model.equilibrium.solve(*inputs)
        assert solution.converged.all(), solution
        assert true_residual(model.cell, solution.value, *inputs).max() < 1.01e-10


def test_the_papers_own_sign_does_not():
    model = full_norm_model(16, diversity=1 / 16, sign="hard")
    with torch.no_grad():
        solution = model.equilibrium.solve(*model.cell.prepare(model.features(pictures(8, 3))))
    assert not solution.converged.all()
    assert solution.stats.residual.max() > 1e-6


# Certificates


def longest(z):
    """The largest 2-norm of a branch, per sample."""
    return torch.stack([part.flatten(1).norm(dim=1) for part in z]).amax(dim=0)


@each_order
@pytest.mark.parametrize("scales", [(1,), (1, 1, 1), (4, 1, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("heritage", [True, False], ids=["heritage", "no heritage"])
def test_without_diversity_every_step_leaves_at_most_the_factor(order, scales, heritage):
    options = {"order": order, "scales": scales, "heritage": heritage, "diversity": 0.0}
    model, images = model_of(**options, activation=nn.LeakyReLU(1.0)), pictures()
    told = model.certificate()
    assert told.proven
    assert told.radius is None
    with torch.no_grad():
        norms = [norm(dense(W, (4, *size))) for W, size in zip(model.cell.W, model.cell.sizes, strict=True)]
        assert max(norms) <= told.norm <= 0.9 + 1e-9
        assert told.factor == pytest.approx(told.norm**2, rel=1e-12)
        inputs = model.cell.prepare(model.features(images))
        answer = model.equilibrium(*inputs)
        z = features(model.cell.sizes)
        for _ in range(20):
            new = model.cell(z, *inputs)
            gaps = [longest([a - b for a, b in zip(found, answer, strict=True)]) for found in (z, new)]
            assert (gaps[1] <= told.factor * gaps[0] + 1e-12).all()
            z = new
        one, other = features(model.cell.sizes, seed=20), features(model.cell.sizes, seed=30)
        ends = [model.cell(z, *inputs) for z in (one, other)]
        gaps = [longest([a - b for a, b in zip(*pair, strict=True)]) for pair in ((one, other), ends)]
        assert (gaps[1] <= told.factor * gaps[0]).all()
    assert str(told).startswith("||W|| <= 0.9; T is a contraction: every step leaves at most 0.8")


@each_order
def test_the_factor_is_met_where_all_branches_are_alike(order):
    """W = 0.9 I, but for the slack of the bound: a change that all branches share shrinks by the factor."""
    model = model_of(diversity=0.0, order=order, activation=nn.LeakyReLU(1.0))
    with torch.no_grad():
        for layer in model.cell.W:
            nn.init.dirac_(layer.layer.weight)
        told, inputs = model.certificate(), model.cell.prepare(model.features(pictures()))
        z = features([(8, 8)] * 3)
        moved = tuple(part + randn(1, 4, 8, 8, seed=9) for part in z)
        before, after = (
            longest([a - b for a, b in zip(*pair, strict=True)])
            for pair in ((z, moved), [model.cell(v, *inputs) for v in (z, moved)])
        )
    torch.testing.assert_close(after / before, torch.full((2,), told.factor, dtype=DOUBLE), rtol=1e-3, atol=0)


def test_the_factor_holds_for_signs_that_stay():
    """T with the signs of D frozen, and the largest gap that a unit change of z can make, by dense matrices."""
    model = model_of(diversity=0.2, order="jacobi", scales=(1, 1), shape=(2, 4, 4), activation=nn.LeakyReLU(1.0))
    told, cell = model.certificate(), model.cell
    assert told.factor == pytest.approx(told.norm**2 * (1 + 0.2 * 3), rel=1e-12)
    with torch.no_grad():
        z, t = features(cell.sizes, batch=1), torch.full((1, 2), 1e-3, dtype=DOUBLE)
        signs = {e: cell.ring.signs(e, z, t) for e in range(2)}
        assert signs[0].abs().max() > 0.99

        def step(i, j, e):
            """Of branch i, when branch j changes by e and the other not."""
            change = [e if k == j else e.new_zeros(len(e), *z[k].shape[1:]) for k in range(2)]
            drawn = cell.ring.drawn(i, change, {k: sign.expand(len(e), 4, 4) for k, sign in signs.items()})
            return cell.W[i].adjoint(cell.W[i](drawn))

        for i in range(2):
            shares = [norm(dense(lambda e, i=i, j=j: step(i, j, e), z[j].shape[1:])) for j in range(2)]
            assert 0.1 * told.factor < sum(shares) <= told.factor


def test_with_diversity_nothing_is_proven():
    images = pictures()
    told = model_of(diversity=0.01).certificate(images)
    assert told.factor < 1
    assert not told.proven
    assert "no contraction is proven: with all signs held fixed" in str(told)
    assert f"measured: {told.radius:.3g}" in str(told)
    told = model_of(diversity=0.3).certificate()
    assert told.factor > 1
    assert not told.proven
    assert "no contraction is proven: even with all signs held fixed the bound is" in str(told)
    assert "measured" not in str(told)


@pytest.mark.parametrize(
    ("jumps", "options"),
    [
        (False, {"diversity": 0.2}),
        (True, {"diversity": 0.2, "sign": "hard"}),
        (False, {"diversity": 0.0, "sign": "hard"}),
        (True, {"diversity": 0.0, "perturb": "always"}),
    ],
)
def test_a_radius_says_whether_signs_were_held_fixed(jumps, options):
    model = model_of(**options)
    model.equilibrium.on_failure = "ignore"
    told = model.certificate(pictures(2))
    assert told.jumps == jumps
    assert (f"measured: {told.radius:.3g}, with all signs held fixed: T jumps" in str(told)) == jumps


@each_order
@pytest.mark.parametrize("diversity", [0.0, 0.3])
def test_the_radius_is_that_of_the_dense_jacobian(order, diversity):
    model = model_of(channels=2, shape=(2, 2, 2), diversity=diversity, order=order, activation="tanh")
    images = pictures(3, side=2)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(images))
        z = model.equilibrium(*inputs)
    radii = []
    for k in range(3):
        one = tuple(part[k : k + 1] for part in z)
        given = [tuple(p[k : k + 1] for p in each) if isinstance(each, tuple) else each[k : k + 1] for each in inputs]
        radii.append(torch.linalg.eigvals(dense_jacobian(model.cell, one, given)).abs().max())
    assert model.certificate(images).radius == pytest.approx(float(max(radii)), rel=1e-8)


@pytest.mark.parametrize("perturb", ["always", "train"])
def test_nothing_is_proven_of_perturbed_branches(perturb):
    """The sign in the perturbation jumps, as that in D does: plain iteration of this one does not converge."""
    model, images = model_of(diversity=0.0, perturb=perturb, perturbation=0.5).train(), pictures(3)
    with torch.no_grad():
        inputs = model.cell.prepare(model.features(images))
        options = {"solver": eq.Picard(), "tolerance": TIGHT, "on_failure": "ignore"}
        assert not eq.fixed_point(model.cell, model.cell.start, *inputs, **options).converged.all()
    told = model.certificate()
    assert not told.proven
    assert "T is a contraction" not in str(told)
    assert model.eval().certificate().proven == (perturb == "train")

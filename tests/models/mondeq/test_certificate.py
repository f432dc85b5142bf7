"""Certificates of monDEQ: bounds against dense truth in float64, rates against solves, radii against attacks."""

import json
import math
import warnings

import pytest
import torch

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.data import TensorSplit
from equipoise.models.conv_equilibrium import ConvEquilibrium
from equipoise.models.mondeq.certificate import Certificate, Certifier, contraction, injection_norm, readings
from equipoise.models.mondeq.model import MonDEQ
from equipoise.tasks.robustness import class_gap, lengths
from training_helpers import train_here

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # foolbox imports names that scipy would rather it did not
    try:
        import foolbox
    except ImportError:
        foolbox = None

SHAPE, CLASSES = (3, 6, 5), 4
KINDS = {"dense": 12, "conv": 4, "multitier": (3, 4)}
EXACT = eq.Tolerance(relative=1e-13, max_steps=5000)


def small(kind, activation="relu", solver=None, m=0.7, scale=1.5):
    """A model in float64 with weights larger than at the start: activations are on, off, and between."""
    std = (0.3, 0.5, 0.2)
    options = {"m": m, "activation": activation, "pool": 2}
    model = MonDEQ(SHAPE, CLASSES, (0.4, 0.5, 0.6), std, kind=kind, channels=KINDS[kind], **options).double()
    with torch.no_grad():
        for p in model.operator.parameters():
            p.mul_(scale)
        model.inject.bias.uniform_(-1, 1)
    model.layer.tolerance = EXACT
    if solver is not None:
        model.layer.solver = solver
    return model.requires_grad_(False)


def flat(value):
    parts = value if isinstance(value, tuple) else (value,)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


class Dense:
    """Matrices of a model, from unit vectors: M = I - W, U / std and the head, off the border."""

    def __init__(self, model):
        operator, shape = model.operator, model.operator.shape
        shapes = [shape] if isinstance(shape[0], int) else list(shape)
        kept = [torch.zeros(part, dtype=torch.bool) for part in shapes]
        for part, size in zip(kept, operator.inner, strict=True):
            part[(..., *map(slice, size)) if size else ...] = True
        kept = torch.cat([part.flatten() for part in kept])
        n = len(kept)
        self.whole = torch.eye(n, dtype=torch.float64) - operator.as_matrix().detach()
        self.M = self.whole[kept][:, kept]
        pixels = torch.eye(math.prod(SHAPE), dtype=torch.float64).view(-1, *SHAPE)
        with torch.no_grad():
            moved = flat(model.bias(model.normalize(pixels))) - flat(model.bias(model.normalize(0 * pixels)))
            self.U = torch.cat([moved, moved.new_zeros(len(moved), n - moved.shape[1])], dim=1).T[kept]
            basis = torch.eye(n, dtype=torch.float64).split([math.prod(part) for part in shapes], dim=1)
            basis = tuple(part.reshape(n, *size) for part, size in zip(basis, shapes, strict=True))
            self.H = (model.features(basis if len(shapes) > 1 else basis[0]) @ model.head.weight.T).T[:, kept]
        self.kept = kept


def largest(matrix):
    return torch.linalg.matrix_norm(matrix, ord=2).item()


# Bounds against dense truth


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_dense_matrices(kind):
    model = small(kind)
    dense, certificate = Dense(model), model.certificate()
    assert torch.linalg.eigvalsh((dense.M + dense.M.T) / 2)[0] >= certificate.m * (1 - 1e-12)
    assert largest(dense.whole) <= certificate.L <= 1.5 * largest(dense.whole)
    bound = injection_norm(model)
    # A dense U exactly; zeros around so small an image take something from the norm of the circular convolution.
    assert largest(dense.U) <= bound <= (1.001 if kind == "dense" else 1.2) * largest(dense.U)
    assert certificate.features == pytest.approx(bound / 0.7, rel=1e-6)
    read, written = readings(model)
    torch.testing.assert_close(read[:, dense.kept], dense.H)
    assert not read[:, ~dense.kept].any()
    torch.testing.assert_close(written, dense.H @ dense.U)
    expected = (largest(dense.H @ dense.U) + bound * largest(dense.H)) / (2 * certificate.m)
    assert certificate.logits == pytest.approx(expected, rel=2e-3)
    assert certificate.logits >= expected
    i, j = 1, 3
    difference = dense.H[i] - dense.H[j]
    expected = ((difference @ dense.U).norm() + bound * difference.norm()) / (2 * certificate.m)
    assert certificate.margins[i, j] == pytest.approx(expected.item(), rel=1e-6)
    assert certificate.readings[i, j] == pytest.approx(difference.norm().item())


def test_the_injection_of_a_real_size_is_bounded_within_a_percent():
    model = MonDEQ((3, 28, 28), 10, (0.5,), (0.25,), kind="conv", channels=8).double().requires_grad_(False)
    x = torch.randn(1, 3, 28, 28, dtype=torch.float64)
    zero = model.bias(model.normalize(torch.zeros_like(x)))
    for _ in range(200):  # power iteration: from below
        x = (x / x.norm()).requires_grad_()
        moved = model.bias(model.normalize(x)) - zero
        (x,) = torch.autograd.grad(moved, x, moved.detach())
    assert moved.norm().item() <= injection_norm(model) <= 1.01 * moved.norm().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["relu", "tanh", "leaky-relu"])
def test_no_pair_of_images_is_moved_further(kind, activation):
    model = small(kind, activation)
    certificate = model.certificate()
    images = torch.rand(60, *SHAPE, dtype=torch.float64)
    steps = torch.logspace(-6, 0, 60, dtype=torch.float64).view(-1, 1, 1, 1)
    others = images + steps * torch.randn_like(images)
    with torch.no_grad():
        z, w = (flat(model.layer(model.bias(model.normalize(x)))) for x in (images, others))
        difference = model(others) - model(images)
    size = (others - images).flatten(1).norm(dim=1)
    rounding = 1e-10
    assert ((w - z).norm(dim=1) <= certificate.features * size + rounding).all()
    assert (difference.norm(dim=1) <= certificate.logits * size + rounding).all()
    apart = (difference[:, :, None] - difference[:, None]).abs()
    assert (apart <= certificate.margins * size[:, None, None] + rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_come_near_the_bounds_and_stay_below(kind):
    """With a linear s all is active, and the slopes of differences of logits are a good part of what is allowed."""
    model = small(kind, eq.operators.LeakyReLU(1.0), scale=0.3)
    certificate = model.certificate()
    shares = []
    for i in range(1, CLASSES):
        x = torch.rand(1, *SHAPE, dtype=torch.float64, requires_grad=True)
        logits = model(x)
        (slope,) = torch.autograd.grad(logits[0, 0] - logits[0, i], x)
        shares.append((slope.norm() / certificate.margins[0, i]).item())
    assert max(shares) <= 1
    assert max(shares) > {"dense": 0.6, "conv": 0.3, "multitier": 0.1}[kind]


def test_the_bound_of_a_single_unit_is_attained():
    """m = 1, U = 2 / 0.5, head +-3: a change of the image by d moves the logits' difference by 24 d."""
    model = MonDEQ((1, 1, 1), 2, (0.5,), (0.5,), kind="dense", channels=1).double()
    with torch.no_grad():
        model.operator.A.zero_()
        model.inject.weight.fill_(2.0)
        model.inject.bias.fill_(5.0)
        model.head.weight.copy_(torch.tensor([[3.0], [-3.0]]))
        model.head.bias.zero_()
    model.layer.tolerance = EXACT
    certificate = model.certificate()
    assert certificate.features == pytest.approx(4.0)
    assert certificate.margins[0, 1] == pytest.approx(24.0)
    image = torch.full((1, 1, 1, 1), 0.25, dtype=torch.float64)  # z = 2 (0.25 - 0.5) / 0.5 + 5 = 4, the difference 24
    verdict = Certifier(model)(image)
    assert verdict.radii.item() == pytest.approx(1.0, rel=1e-6)
    assert verdict.radii.item() < 1
    changed = Certifier(model)(image - 0.9999)
    assert changed.classes.item() == 0
    assert changed.radii.item() == pytest.approx(1e-4, rel=1e-3)


# Rates


def distances_to_the_limit(model, solver, steps=30):
    """||u - u*|| (z for forward-backward) after every step, for a batch of random images."""
    bias = model.bias(model.normalize(torch.rand(20, *SHAPE, dtype=torch.float64)))
    z = eq.fixed_point(model.layer.f, model.layer.start((bias,)), bias, solver=eq.PeacemanRachford(), tolerance=EXACT)
    found = []

    def look(progress):
        split, alpha = solver.split(progress.problem)
        limit = progress.problem.layout.pack(z.value)
        if hasattr(progress.state, "u"):
            found.append(progress.state.u - torch.lerp(limit, split.preactivation(limit), alpha))
        else:
            found.append(progress.state.z - limit)

    options = {"tolerance": eq.Tolerance(relative=0.0, max_steps=steps), "on_failure": "ignore", "compact": False}
    eq.fixed_point(model.layer.f, model.layer.start((bias,)), bias, solver=solver, callback=look, **options)
    return torch.stack([rows.norm(dim=1) for rows in found])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "solver",
    [
        eq.PeacemanRachford(),
        eq.PeacemanRachford(0.1),
        eq.PeacemanRachford(3.0),
        eq.DouglasRachford(0.5),
        eq.DouglasRachford(1.0, relaxation=0.8),
        eq.ForwardBackward(),
    ],
    ids=repr,
)
def test_no_step_shortens_the_distance_by_less_than_the_rate(kind, solver):
    model = small(kind, "tanh" if kind == "dense" else "relu", solver)
    certificate = model.certificate()
    assert certificate.rate < 1
    distances = distances_to_the_limit(model, solver)
    assert (distances[1:] <= certificate.rate * distances[:-1] + 1e-9 * distances[0]).all()
    assert (distances[1:6] >= 1e-6 * distances[0]).any()  # there was something to measure
    reached = certificate.steps(1e-3)
    if reached < len(distances):
        assert (distances[reached] <= 1e-3 * distances[0]).all()


@pytest.mark.parametrize("alpha", [0.05, 0.4, 2.0])
def test_the_rate_of_m_and_l_is_sharp_and_the_exact_one_no_larger(alpha):
    """M = [[m, -k], [k, m]] attains it; for any other M the norm itself is smaller."""
    operator = eq.operators.MonotoneLinear(2, m=0.5).double().requires_grad_(False)
    with torch.no_grad():
        operator.A.zero_()
        operator.B.copy_(torch.tensor([[0.0, 3.0], [0.0, 0.0]]))
    L = math.hypot(0.5, 3)
    square = 1 + (alpha * L) ** 2
    sharp = math.sqrt((square - alpha) / (square + alpha))
    assert contraction(eq.PeacemanRachford(), operator, alpha, L) == pytest.approx(sharp, rel=1e-8)
    assert contraction(eq.DouglasRachford(), operator, alpha, L) == pytest.approx((1 + sharp) / 2, rel=1e-8)
    forward = math.sqrt(square - alpha)
    expected = pytest.approx(forward, rel=1e-8) if forward < 1 else None
    assert contraction(eq.ForwardBackward(), operator, alpha, L) == expected

    for kind in ("dense", "conv"):
        model = small(kind)
        M, certificate = Dense(model).whole, model.certificate(alpha)
        eye = torch.eye(len(M), dtype=torch.float64)
        assert certificate.rate == pytest.approx(
            largest(torch.linalg.solve(eye + alpha * M, eye - alpha * M)), rel=1e-8
        )
        square = 1 + (alpha * certificate.L) ** 2
        known = math.sqrt((square - 1.4 * alpha) / (square + 1.4 * alpha))
        assert certificate.rate <= known <= math.sqrt(1 - 4 * alpha * 0.7 / (1 + alpha * certificate.L) ** 2)


def test_alpha_is_the_one_that_the_solver_uses():
    model = small("conv")
    bias = model.bias(model.normalize(torch.rand(2, *SHAPE, dtype=torch.float64)))
    for solver in (eq.PeacemanRachford(), eq.PeacemanRachford(0.3), eq.ForwardBackward()):
        model.layer.solver = solver
        problem = model.layer.solve(bias).solved.problem
        assert model.certificate().alpha == solver.split(problem)[1]
        assert model.certificate(0.25).alpha == 0.25


def test_where_nothing_is_proven_no_rate_is_given():
    for solver in (eq.Anderson(), eq.PeacemanRachford(memory=3), eq.ForwardBackward(50.0)):
        certificate = small("dense", solver=solver).certificate()
        assert certificate.rate is None
        assert certificate.steps(0.5) is None
        assert "no rate of convergence is proven" in str(certificate)
    with pytest.raises(ValueError, match="solved by Anderson.*which has no alpha"):
        small("dense", solver=eq.Anderson()).certificate(0.5)
    with pytest.raises(ValueError, match="alpha is -1"):
        small("dense").certificate(-1)
    with pytest.raises(ValueError, match="relative is 2"):
        small("dense").certificate().steps(2)


def test_a_certificate_tells_its_story_and_changes_nothing():
    model = small("dense").float().requires_grad_(True)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    certificate = model.certificate()
    assert len(str(certificate).splitlines()) == 3
    assert "I - W >= 0.7" in str(certificate)
    assert f"{certificate.steps(0.01)} steps at most 1%" in str(certificate)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with torch.inference_mode():
        assert model.certificate().margins.equal(certificate.margins)
    assert json.loads(json.dumps(certificate.record()))["m"] == 0.7


# Radii


@pytest.mark.parametrize("kind", KINDS)
def test_a_loose_solve_gives_smaller_radii_and_the_right_ones(kind):
    """The logits of a loose solve differ from the true ones by no more than is taken off."""
    model = small(kind).float()
    images = torch.rand(30, *SHAPE)
    tight, loose = (Certifier(model, eq.Tolerance(relative=r, max_steps=2000)) for r in (1e-7, 1e-1))
    true, found = tight(images), loose(images)
    assert not torch.equal(true.logits, found.logits)
    certain = found.radii > 0
    assert torch.equal(true.classes[certain], found.classes[certain])
    assert (found.radii <= true.radii + 1e-6).all()
    assert true.radii.max() > 0

    # The same by hand: the defect is ||W r||, and readings over m bound what it does to differences of logits.
    with torch.no_grad():
        inner = loose.exact
        z = loose.model.layer(loose.model.bias(loose.model.normalize(images)))
        z = tuple(part.double() for part in z) if isinstance(z, tuple) else z.double()
        after = inner.layer.f(z, inner.bias(inner.normalize(images.double())))
        gap = tuple(a - b for a, b in zip(after, z, strict=True)) if isinstance(z, tuple) else after - z
        defect = flat(inner.operator(gap)).norm(dim=1)
    error = found.logits - true.logits
    apart = (error[:, :, None] - error[:, None]).abs()
    assert (apart <= loose.certificate.readings * defect[:, None, None] / 0.7 + 1e-5).all()
    assert (defect > 1e-4).any()


def test_logits_that_are_not_numbers_or_even_certify_nothing():
    certificate = small("dense").certificate()
    logits = torch.tensor([[torch.nan, 1, 0, 0], [2.0, 2, 0, 0], [9.0, 1, 0, 0]], dtype=torch.float64)
    radii = certificate.radii(logits, torch.zeros(3, dtype=torch.float64))
    assert radii[:2].tolist() == [0, 0]
    nearest = min(8 / certificate.margins[0, 1], *(9 / certificate.margins[0, 2:]))
    assert radii[2].item() == pytest.approx(nearest.item(), rel=1e-6)
    assert certificate.radii(logits, torch.full((3,), 1e6, dtype=torch.float64)).tolist() == [0, 0, 0]


def steepest(model, images, labels, radii, steps=6):
    """Images at just these distances, each found by following the gradient on its own sphere."""
    x = images
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(class_gap(model(x), labels).sum(), x)
        x = images + radii.view(-1, 1, 1, 1) * gradient / lengths(gradient)
    return x.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_inside_a_certified_radius_succeeds(kind):
    """Each sample is attacked at its own radius."""
    model = small(kind)
    model.layer.tolerance = eq.Tolerance(relative=1e-6, max_steps=500)
    certifier = Certifier(model)
    images = torch.rand(24, *SHAPE, dtype=torch.float64)
    verdict = certifier(images)
    assert (verdict.radii > 0).all()
    inside = steepest(model, images, verdict.classes, verdict.radii)
    changed = certifier(inside)
    assert torch.equal(changed.classes, verdict.classes)
    gaps = [class_gap(found.logits, verdict.classes) for found in (verdict, changed)]
    assert (gaps[1] > gaps[0]).all()  # they were led towards another class


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(kind, value):
    model = small(kind)
    next(model.operator.parameters()).view(-1)[0] = value
    for make in (model.certificate, lambda: Certifier(model)):
        with pytest.raises(ValueError, match=r"nothing can be certified: layer.f.operator.A\S* of the model is NaN"):
            make()


def test_a_certifier_refuses_what_it_cannot_certify():
    with pytest.raises(TypeError, match="model is a Linear; certified radii are available for a MonDEQ instance"):
        Certifier(torch.nn.Linear(3, 3))
    with pytest.raises(TypeError, match="model is the class MonDEQ"):
        Certifier(MonDEQ)
    with pytest.raises(TypeError, match=r"tolerance is 1e-06; it must be an object such as equipoise.Tolerance"):
        Certifier(small("dense"), 1e-6)
    for relative in (0, 1.0, "0.1", None, True, float("nan")):
        words = f"relative is {relative!r}; it must be a number above 0 and below 1"
        with pytest.raises((ValueError, TypeError), match=words):
            small("dense").certificate().steps(relative)


# The command

RECIPE = """
title = "monDEQ on digits"
[data]
name = "digits"
validation = 64
[model]
name = "mondeq"
kind = "dense"
channels = 24
[optimizer]
lr = 0.01
[training]
batch_size = 64
[[phases]]
epochs = 2
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("certified"), "digits", RECIPE)


def test_evaluate_certify_end_to_end(run, tmp_path, capsys):
    words = ["samples=60", "steps=8", "--limit", "150", "--json", str(tmp_path / "too.json")]
    assert main(["evaluate", str(run), "--certify", *words]) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "certified.json").read_text())
    assert (run / "certified.png").read_bytes().startswith(b"\x89PNG")
    assert f"accuracy          {found['accuracy']:.2%}" in printed
    assert "one equilibrium for every image" in printed
    assert f"violations        0 of {found['inside']} attacks" in printed
    assert found["violations"] == 0
    assert found["inside"] > 60  # the certificate was put to the test
    assert found["samples"] == 150
    assert found["attacked samples"] == 60
    assert found["accuracy"] > 0.8
    assert json.loads((tmp_path / "too.json").read_text())["accuracy"] == found["accuracy"]

    curve = found["certified"]["accuracy"]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] == pytest.approx(found["accuracy"], abs=0.02)
    assert curve[-1] < 0.05
    attacks = {entry["attack"] for entry in found["attacks"]}
    assert attacks == {"PGD", "PGD of foolbox"} if foolbox else {"PGD"}
    for name in attacks:
        left = [entry["accuracy"] for entry in found["attacks"] if entry["attack"] == name]
        assert len(left) == 6
        assert left[-1] < 0.7 * left[0]  # the attacks are attacks
    assert sum(entry["inside"] for entry in found["attacks"]) == found["inside"]
    rows = torch.tensor(found["certificate"]["margins"])
    assert rows.shape == (10, 10)
    assert torch.equal(rows, rows.T)


def test_a_false_certificate_is_found_out(run, capsys, monkeypatch):
    monkeypatch.setattr(Certificate, "radii", lambda self, logits, defects: torch.full_like(defects, 5.0))
    assert main(["evaluate", str(run), "--certify", "samples=20", "radii=[3.0]", "steps=4", "--limit", "20"]) == 1
    found = json.loads((run / "certified.json").read_text())
    assert found["violations"] > 10
    assert f"violations        {found['violations']} of {found['inside']} attacks" in capsys.readouterr().out


def test_options_of_certify(run, capsys):
    assert main(["evaluate", str(run), "--certify", "samples=20", "radii=[0.05, 0.2]", "steps=2", "--limit", "40"]) == 0
    found = json.loads((run / "certified.json").read_text())
    assert {entry["radius"] for entry in found["attacks"]} == {0.05, 0.2}
    assert main(["evaluate", str(run), "--certify", "samples=0", "--limit", "40", "--split", "val"]) == 0
    found = json.loads((run / "certified.json").read_text())
    assert (found["split"], found["attacks"], found["violations"]) == ("val", [], 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smaples=3"], "Certify has no option 'smaples'; did you mean 'samples'?"),
        (["samples=many"], "Certify.samples is 'many'"),
        (["radii=[-1]"], "Certify.radii is [-1]; it must be a list of numbers above 0"),
        (["radii=[inf]"], "Certify.radii is [inf]; it must be a list of numbers above 0"),
        (["radii=[true]"], "Certify.radii is [True]; it must be a list of numbers above 0"),
        (["relative=2"], "Certify.relative is 2; it must be a number above 0 and below 1"),
        (["--task", "robustness"], "--certify and --task are mutually exclusive"),
        (["--limit", "0"], "--limit is 0; it must be at least 1"),
    ],
)
def test_a_mistake_gets_a_sentence(run, words, said, capsys):
    assert main(["evaluate", str(run), "--certify", *words]) == 2
    assert said in capsys.readouterr().err


def test_samples_of_another_size_are_not_certified(run, monkeypatch, capsys):
    """A run whose data has changed behind its back."""
    images = torch.zeros(20, 1, 12, 12, dtype=torch.uint8)
    wrong = TensorSplit(images, torch.zeros(20, dtype=torch.int64))
    monkeypatch.setattr("equipoise.lab.results.certify.samples_of", lambda *_: wrong)
    (run / "certified.json").unlink(missing_ok=True)
    assert main(["evaluate", str(run), "--certify"]) == 2
    assert "images have shape (1, 12, 12); this model was made for (1, 8, 8)" in capsys.readouterr().err
    assert not (run / "certified.json").exists()


def test_a_certificate_of_something_else_is_no_certificate_of_radii(tmp_path, capsys):
    """That of an OptEq is of its convergence."""
    words = [
        "--budget",
        "smoke",
        "data={name='digits', limit=64, validation=0}",
        "task.flip=false",
        "--runs",
        str(tmp_path),
    ]
    assert main(["train", "opteq/reduced-opteq", *words]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "opteq-reduced-opteq-001"), "--certify"]) == 2
    told = capsys.readouterr().err
    assert "the model 'opteq' of" in told
    assert "has no certified radii: --certify requires a model 'mondeq'" in told
    assert "Its own certificate() covers convergence only" in told


def test_a_model_without_a_certificate_is_refused(tmp_path, capsys):
    assert not hasattr(ConvEquilibrium, "certificate")
    words = ["--budget", "smoke", "data.limit=64", "data.validation=0", "--runs", str(tmp_path)]
    assert main(["train", "core/digits", *words]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "core-digits-001"), "--certify"]) == 2
    assert "the model 'conv-equilibrium' of" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "core-digits-001"), "--certify", "--split", "val"]) == 2

"""Attacks: inside the ball, as strong as theory allows, no trace left in the model; checked against foolbox."""

import itertools
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.lab.trust import look_in
from equipoise.models.conv_equilibrium import ConvEquilibrium
from equipoise.tasks import robustness
from equipoise.tasks.joint_attack import jiio
from equipoise.tasks.robustness import ATTACKS, NORMS, Robustness, foolbox_pgd, pgd, random_change, within

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # foolbox imports names that scipy would rather it did not
    try:
        import foolbox
    except ImportError:
        foolbox = None

needs_foolbox = pytest.mark.skipif(foolbox is None, reason="foolbox is not installed")
BOTH = [pytest.param(pgd, id="pgd"), pytest.param(foolbox_pgd, id="foolbox", marks=needs_foolbox)]

NAMES = ("a", "b", "c")


class Linear(nn.Module):
    """Two classes apart by ``direction . x + offset``: the closer to the second class, the larger."""

    def __init__(self, direction, offset=0.0):
        super().__init__()
        self.direction = nn.Parameter(direction.flatten())
        self.offset = offset

    def gap(self, images):
        return images.flatten(1) @ self.direction + self.offset

    def forward(self, images):
        gap = self.gap(images)
        return torch.stack([-gap / 2, gap / 2], 1)


class Bent(nn.Module):
    """A small network with many local maxima of the loss."""

    def __init__(self, pixels, classes=3, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(pixels, 12, dtype=dtype)
        self.second = nn.Linear(12, classes, dtype=dtype)

    def forward(self, images):
        return self.second(torch.sin(8 * self.first(images.flatten(1))))


def loss_of(model, images, labels):
    with torch.no_grad():
        return functional.cross_entropy(model(images).double(), labels, reduction="none")


def size_of(change, norm):
    return change.flatten(1).double().norm(p=torch.inf if norm == "linf" else 2, dim=1)


def exact_l2(images, direction, radius):
    """The image in the ball and in [0, 1] furthest along a direction: steps d / k, cut, k such that it just fits."""
    direction = direction.double()
    low, high = torch.zeros(len(images), 1, 1, 1), torch.full((len(images), 1, 1, 1), 1e4)
    low, high = low.double(), high.double()
    for _ in range(80):
        middle = (low + high) / 2
        change = (images.double() + middle * direction).clamp(0, 1) - images
        fits = (size_of(change, "l2") <= radius).view(-1, 1, 1, 1)
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return (images.double() + low * direction).clamp(0, 1)


# Where attacked images lie


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    radius=st.floats(1e-3, 3),
    norm=st.sampled_from(NORMS),
    steps=st.integers(1, 4),
    restarts=st.integers(1, 2),
    random_start=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    corners=st.booleans(),
)
def test_attacked_images_are_in_the_ball_and_in_the_unit_interval(
    shape, radius, norm, steps, restarts, random_start, dtype, corners
):
    radius = min(radius, 1.0) if norm == "linf" else radius
    images = torch.rand(shape, dtype=dtype)
    images = images.round() if corners else images
    before, labels = images.clone(), torch.randint(3, shape[:1])
    model = Bent(images[0].numel(), dtype=dtype)
    attacked = pgd(
        model, images, labels, radius=radius, norm=norm, steps=steps, restarts=restarts, random_start=random_start
    )
    assert attacked.shape == images.shape
    assert attacked.dtype == dtype
    assert not attacked.requires_grad
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    rounding = torch.finfo(dtype).eps
    assert (size_of(attacked - images, norm) <= radius * (1 + 8 * rounding) + rounding).all()
    assert torch.equal(images, before)


@pytest.mark.parametrize("norm", NORMS)
def test_the_nearest_point_of_the_ball(norm):
    center, x = torch.rand(50, 2, 3, 3), torch.randn(50, 2, 3, 3)
    nearest = within(center, x, 0.3, norm)
    assert torch.equal(within(center, center, 0.3, norm), center)
    torch.testing.assert_close(within(center, nearest, 0.3, norm), nearest)
    small = (center + 0.01 * torch.randn_like(center)).clamp(0, 1)
    torch.testing.assert_close(within(center, small, 0.3, norm), small)


@pytest.mark.parametrize("norm", NORMS)
def test_random_starts_are_uniform_in_the_ball(norm):
    """Moments of the uniform distribution, each to within 5 standard errors; dimension 6."""
    n, radius, d = 20_000, 0.3, 6
    changes = random_change(torch.full((n, 2, 1, 3), 0.5, dtype=torch.float64), radius, norm).flatten(1)
    assert (size_of(changes, norm) <= radius * (1 + 1e-12)).all()
    deviation = radius / (3**0.5 if norm == "linf" else (d + 2) ** 0.5)  # of one coordinate
    assert changes.mean(0).abs().max() < 5 * deviation / n**0.5
    assert (changes.square().mean(0) / deviation**2 - 1).abs().max() < 5 * (2 / n) ** 0.5
    share = (size_of(changes, norm) / radius) ** d  # uniform in [0, 1] if the volume is filled evenly
    assert (share.mean() - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5
    assert (share.square().mean() - 1 / 3).abs() < 5 * (4 / 45 / n) ** 0.5


def test_random_starts_follow_the_seed():
    images, labels, model = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), Bent(9)
    attacks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        attacks.append(pgd(model, images, labels, radius=0.2, steps=1))
    assert torch.equal(attacks[0], attacks[1])
    assert not torch.equal(attacks[0], attacks[2])
    fixed = [pgd(model, images, labels, radius=0.2, steps=1, random_start=False) for _ in range(2)]
    assert torch.equal(fixed[0], fixed[1])


# How strong attacks are

# The offset makes the model unsure, sure, or so sure that the cross entropy and its gradient round to zero.
OFFSETS = [0.0, -5.0, -20.0, -30.0, -100.0]


@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("label", [0, 1])
def test_a_linear_model_is_attacked_as_well_as_can_be_in_linf(offset, label, random_start):
    images, direction = torch.rand(5, 3, 4, 4), torch.randn(3, 4, 4)
    side = 1 - 2 * label
    attacked = pgd(
        Linear(direction, side * offset), images, torch.full((5,), label), radius=0.3, random_start=random_start
    )
    torch.testing.assert_close(attacked, (images + 0.3 * side * direction.sign()).clamp(0, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_linear_model_is_attacked_as_well_as_can_be_in_l2(offset):
    images, direction = 0.4 + 0.2 * torch.rand(5, 3, 4, 4), torch.randn(3, 4, 4)
    labels = torch.zeros(5, dtype=torch.int64)
    attacked = pgd(Linear(direction, offset), images, labels, radius=0.3, norm="l2", random_start=False)
    torch.testing.assert_close(attacked, images + 0.3 * direction / direction.norm(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("radius", [0.3, 1.5])
def test_a_random_start_or_an_edge_costs_little_in_l2(offset, radius):
    """Images up to the edges of [0, 1]: what is gained is close to what the best image would give."""
    images, direction = torch.rand(20, 3, 4, 4), torch.randn(3, 4, 4)
    model = Linear(direction, offset)
    attacked = pgd(model, images, torch.zeros(20, dtype=torch.int64), radius=radius, norm="l2", steps=40)
    best = exact_l2(images, direction, radius).float()
    gained, possible = (model.gap(x) - model.gap(images) for x in (attacked, best))
    assert (gained <= possible * (1 + 1e-4)).all()
    assert (gained >= 0.95 * possible).all()


def test_a_sure_model_is_not_taken_for_a_robust_one():
    """One step away from every image lies another class, but the loss at the image rounds to zero."""
    images = torch.full((8, 1, 4, 4), 0.5)
    model = Linear(torch.full((16,), 100.0), -16 * 50 - 40.0)  # gap -40 at the images, +120 one radius away
    labels = torch.zeros(8, dtype=torch.int64)
    for norm, radius in (("linf", 0.1), ("l2", 0.4)):
        attacked = pgd(model, images, labels, radius=radius, norm=norm, random_start=False)
        assert (model(attacked).argmax(1) == 1).all()


@given(seed=st.integers(0, 999), norm=st.sampled_from(NORMS), steps=st.integers(1, 6), radius=st.floats(0.01, 1))
def test_the_loss_is_never_below_that_of_the_image(seed, norm, steps, radius):
    torch.manual_seed(seed)
    images, labels, model = torch.rand(6, 1, 3, 3), torch.randint(3, (6,)), Bent(9)
    attacked = pgd(model, images, labels, radius=radius, norm=norm, steps=steps, random_start=False)
    assert (loss_of(model, attacked, labels) >= loss_of(model, images, labels) - 1e-6).all()


@pytest.mark.parametrize("norm", NORMS)
def test_every_restart_helps_or_does_no_harm(norm):
    images, labels, model = torch.rand(20, 1, 3, 3), torch.randint(3, (20,)), Bent(9)
    losses = []
    for restarts in (1, 2, 4, 8):
        torch.manual_seed(0)  # the first restarts are the same ones
        attacked = pgd(model, images, labels, radius=0.3, norm=norm, steps=3, restarts=restarts)
        losses.append(loss_of(model, attacked, labels))
    for fewer, more in itertools.pairwise(losses):
        assert (more >= fewer - 1e-6).all()
    assert (losses[-1] > losses[0] + 1e-3).any()


def test_the_last_step_counts():
    """With one step there is one gradient; the image after it must have been looked at."""
    images, direction = torch.full((2, 1, 2, 2), 0.5), torch.tensor([1.0, -1.0, 1.0, 1.0])
    labels = torch.zeros(2, dtype=torch.int64)
    attacked = pgd(Linear(direction), images, labels, radius=0.1, steps=1, random_start=False)
    torch.testing.assert_close(attacked.flatten(1) - 0.5, 0.1 * direction.expand(2, 4))


def test_the_step_size_is_taken():
    images, direction = torch.full((2, 1, 2, 2), 0.5), torch.ones(4)
    options = {"radius": 0.3, "steps": 3, "random_start": False}
    attacked = pgd(Linear(direction), images, torch.zeros(2, dtype=torch.int64), step_size=0.05, **options)
    torch.testing.assert_close(attacked, images + 0.15)


@pytest.mark.parametrize("norm", NORMS)
def test_images_of_a_batch_do_not_see_each_other(norm):
    images, labels, model = torch.rand(6, 1, 3, 3), torch.randint(3, (6,)), Bent(9)
    options = {"radius": 0.2, "norm": norm, "steps": 4, "random_start": False}
    together = pgd(model, images, labels, **options)
    apart = [pgd(model, images[i : i + 1], labels[i : i + 1], **options) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-5)


# What attacks leave behind


@pytest.mark.parametrize("attack", BOTH)
@pytest.mark.parametrize("training", [True, False])
def test_no_gradient_is_left_in_the_model_and_its_mode_is_as_before(attack, training):
    model = Bent(9).train(training)
    model.second.eval()
    model.first.bias.requires_grad_(False)
    attack(model, torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), radius=0.1, steps=2)
    assert all(p.grad is None for p in model.parameters())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["first.bias"]
    assert (model.training, model.first.training, model.second.training) == (training, training, False)


@pytest.mark.parametrize("attack", BOTH)
def test_running_statistics_are_not_touched(attack):
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(9), nn.Linear(9, 3)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attack(model, torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), radius=0.1, steps=2)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("attack", BOTH)
def test_a_gradient_that_was_there_is_not_touched(attack):
    model = Bent(9).eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    attack(model, torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), radius=0.1, steps=2)
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))


def test_attacks_work_where_gradients_are_switched_off():
    images, labels, model = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), Bent(9).eval()
    with torch.no_grad():
        attacked = pgd(model, images, labels, radius=0.3, random_start=False)
        assert not torch.is_grad_enabled()
    assert (loss_of(model, attacked, labels) > loss_of(model, images, labels)).any()


def test_attacks_work_in_low_precision():
    images, labels, model = torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]), Bent(9).eval()
    with torch.autocast("cpu", torch.bfloat16):
        attacked = pgd(model, images, labels, radius=0.1)
    assert attacked.dtype == torch.float32
    assert (size_of(attacked - images, "linf") <= 0.1 + 1e-6).all()
    assert (loss_of(model, attacked, labels) > loss_of(model, images, labels)).any()


class Undefined(nn.Module):
    """Logits that are finite everywhere, for NaN too; their gradient is not a number for some of the pixels."""

    def __init__(self, pixels):
        super().__init__()
        self.pixels = pixels

    def forward(self, images):
        x = images.flatten(1)
        bright = (x > -1).float().mean(1)  # less for an image that is not a number: the worst of all
        undefined = (x[:, : self.pixels] * 0).abs().sqrt().sum(1)  # 0, and the slope of the root there is infinite
        return torch.stack([9 * bright - x[:, -1], undefined], 1).nan_to_num()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pixels", [4, 9])
def test_gradients_that_are_not_numbers_give_no_such_images(norm, pixels):
    images, labels = torch.full((3, 1, 3, 3), 0.5), torch.zeros(3, dtype=torch.int64)
    attacked = pgd(Undefined(pixels), images, labels, radius=0.1, norm=norm, random_start=False)
    assert attacked.isfinite().all()
    assert (size_of(attacked - images, norm) <= 0.1 + 1e-6).all()
    if pixels < 9:  # the other pixels have a gradient, and the attack goes on with them
        assert (attacked[:, 0, 2, 2] > 0.55).all()


def test_a_loss_that_is_not_a_number_is_no_attack():
    class Broken(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :2] * torch.nan

    images = torch.rand(3, 1, 2, 2)
    assert torch.equal(pgd(Broken(), images, torch.zeros(3, dtype=torch.int64), radius=0.1), images)


# Equilibria


@pytest.fixture
def equilibrium():
    model = ConvEquilibrium(shape=(1, 6, 6), classes=3, channels=4, pool=2).double().eval()
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-12, max_steps=400)
    return model


def test_the_gradient_at_the_image_is_that_of_finite_differences(equilibrium):
    images, labels = torch.rand(3, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2])
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(equilibrium(x), labels, reduction="sum"), x)
    h = 1e-5
    for _ in range(5):
        direction = torch.randn_like(images)
        ahead, behind = (loss_of(equilibrium, images + s * h * direction, labels) for s in (1, -1))
        slope = (gradient * direction).sum((1, 2, 3))
        torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_with_an_equilibrium_is_attacked(equilibrium, norm):
    images, labels = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 3
    equilibrium.equilibrium.tolerance = eq.Tolerance(relative=1e-6, max_steps=100)
    attacked = pgd(equilibrium, images, labels, radius=0.1, norm=norm, steps=5, random_start=False)
    gained = loss_of(equilibrium, attacked, labels) - loss_of(equilibrium, images, labels)
    noise = within(images, images + random_change(images, 0.1, norm), 0.1, norm)
    by_chance = loss_of(equilibrium, noise, labels) - loss_of(equilibrium, images, labels)
    assert (gained > 0).all()
    assert gained.mean() > 2 * by_chance.mean()
    assert (size_of(attacked - images, norm) <= 0.1 + 1e-9).all()


@pytest.mark.parametrize("attack", BOTH)
def test_the_solves_of_an_attack_are_not_kept(equilibrium, attack):
    """The lab watches solves: an attack of many steps would keep the state of every one until it ends."""
    images, labels = torch.rand(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1])
    with eq.watch_solves() as solves:
        attacked = attack(equilibrium, images, labels, radius=0.1, steps=3)
    assert not torch.equal(attacked, images)
    assert all(solution.value is None for solution in solves)


@pytest.mark.parametrize("attack", BOTH)
def test_a_model_in_the_middle_of_training_is_attacked(equilibrium, attack):
    """With everything in it that a step of training leaves behind."""
    images, labels = torch.rand(4, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    functional.cross_entropy(equilibrium.train()(images), labels).backward()
    before = {name: p.grad.clone() for name, p in equilibrium.named_parameters()}
    attacked = attack(equilibrium.eval(), images, labels, radius=0.1, steps=3)
    assert (loss_of(equilibrium, attacked, labels) > loss_of(equilibrium, images, labels)).all()
    assert all(torch.equal(p.grad, before[name]) for name, p in equilibrium.named_parameters())


@pytest.mark.parametrize("rule", [eq.PhantomGradient(), eq.UnrolledGradient(steps=30)], ids=repr)
def test_models_are_not_measured_under_attacks_by_a_phantom_gradient(equilibrium, rule):
    images, labels = torch.rand(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1])
    layer, seen = equilibrium.equilibrium, []

    def attack(model, images, labels, **budget):
        seen.append(layer.gradient)
        return images

    layer.gradient = rule
    task = Robustness(NAMES)
    task.attacks = {"mine": attack}
    task.measure(equilibrium, (images, labels))
    phantom = isinstance(rule, eq.PhantomGradient)
    assert [type(gradient) for gradient in seen] == [eq.ImplicitGradient if phantom else eq.UnrolledGradient]
    assert layer.gradient is rule


# Against foolbox


@pytest.fixture(scope="module")
def digits():
    """A small network trained on digits for a moment, and digits it has not seen."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(classes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(150):
        rows = torch.arange(64) + 64 * (step % 20)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), images[1300:1600], labels[1300:1600]


@needs_foolbox
@pytest.mark.parametrize(("norm", "radius"), [("linf", 0.05), ("linf", 0.1), ("l2", 0.3), ("l2", 0.6)])
def test_foolbox_finds_no_stronger_attack(digits, norm, radius):
    model, images, labels = digits
    robust = {}
    for name in ("pgd", "foolbox"):
        torch.manual_seed(0)
        attacked = ATTACKS[name](model, images, labels, radius=radius, norm=norm, steps=20)
        assert (size_of(attacked - images, norm) <= radius + 1e-5).all()
        robust[name] = (model(attacked).argmax(1) == labels).float().mean().item()
    clean = (model(images).argmax(1) == labels).float().mean().item()
    assert clean > 0.85
    assert 0.02 < robust["foolbox"] < clean - 0.05  # neither trivial nor hopeless
    assert -0.02 <= robust["foolbox"] - robust["pgd"] <= 0.04


@needs_foolbox
def test_foolbox_takes_restarts_and_a_fixed_start(digits):
    model, images, labels = digits
    options = {"radius": 0.05, "steps": 3}
    first, again = (foolbox_pgd(model, images[:8], labels[:8], random_start=False, **options) for _ in range(2))
    assert torch.equal(first, again)
    attacked = foolbox_pgd(model, images[:8], labels[:8], restarts=2, **options)
    assert (size_of(attacked - images[:8], "linf") <= 0.05 + 1e-6).all()


@needs_foolbox
def test_foolbox_needs_a_module():
    with pytest.raises(TypeError, match="the attack 'foolbox' requires a model that is a torch.nn.Module"):
        foolbox_pgd(lambda x: x.flatten(1), torch.rand(1, 1, 2, 2), torch.tensor([0]), radius=0.1)  # type: ignore[arg-type]


def test_foolbox_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "foolbox", None)
    with pytest.raises(ImportError, match=r"'foolbox' needs the package foolbox: pip install 'equipoise\[attacks"):
        foolbox_pgd(Bent(4), torch.rand(1, 1, 2, 2), torch.tensor([0]), radius=0.1)


def test_foolbox_that_is_not_installed_is_named_before_anything_is_trained(monkeypatch):
    monkeypatch.setitem(sys.modules, "foolbox", None)
    with pytest.raises(ImportError, match=r"pip install 'equipoise\[attacks\]'"):
        Robustness(NAMES, attack="foolbox")


# The task


def measured(task, model, images, labels):
    with torch.no_grad():
        return task.metrics(task.measure(model, (images, labels)))


@pytest.mark.parametrize("attack", ["pgd", pytest.param("foolbox", marks=needs_foolbox)])
def test_the_robust_accuracy_is_at_most_the_accuracy(digits, attack):
    model, images, labels = digits
    task = Robustness(tuple("0123456789"), radius=0.05, steps=5, attack=attack)
    metrics = measured(task, model, images, labels)
    assert metrics["robust accuracy"] < metrics["accuracy"]
    assert metrics["accuracy"] == pytest.approx((model(images).argmax(1) == labels).double().mean().item())
    weaker = measured(Robustness(tuple("0123456789"), radius=0.01, steps=5, attack=attack), model, images, labels)
    assert metrics["robust accuracy"] < weaker["robust accuracy"] <= weaker["accuracy"]


def test_an_image_that_is_wrong_as_it_is_counts_as_broken(tmp_path, monkeypatch):
    """An attack of one's own, and one that helps the model: it must not help the count."""
    (tmp_path / "mine_attack.py").write_text(
        "def kind(model, images, labels, radius, norm, steps, restarts):\n    return 1 - images\n"
        "def idle(model, images, labels, radius, norm, steps, restarts):\n    return images\n"
        "def odd(model, images, labels, radius, norm):\n    return images\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    look_in(tmp_path)
    images = torch.tensor([0.2, 0.8, 0.4, 0.9]).view(4, 1, 1, 1)
    labels = torch.tensor([0, 0, 0, 1])
    model = Linear(torch.tensor([1.0]), -0.5)  # right, wrong, right, right; of 1 - images: wrong, right, wrong, wrong
    kind = measured(Robustness(("a", "b"), attack="mine_attack:kind"), model, images, labels)
    assert (kind["accuracy"], kind["robust accuracy"]) == (0.75, 0)
    idle = measured(Robustness(("a", "b"), attack="mine_attack:idle"), model, images, labels)
    assert (idle["accuracy"], idle["robust accuracy"]) == (0.75, 0.75)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        measured(Robustness(("a", "b"), attack="mine_attack:odd"), model, images, labels)
    sys.modules.pop("mine_attack")


def test_the_loss_of_training_is_that_of_the_attacked_images():
    images, labels = torch.rand(5, 1, 3, 3), torch.tensor([0, 1, 2, 0, 1])
    model = Bent(9)
    clean, _ = Robustness(NAMES).loss(model, (images, labels))
    assert torch.equal(clean, functional.cross_entropy(model(images), labels))
    torch.manual_seed(3)
    attacked, sums = Robustness(NAMES, radius=0.2, train_steps=4).loss(model, (images, labels))
    torch.manual_seed(3)
    expected = functional.cross_entropy(model(pgd(model, images, labels, radius=0.2, steps=4)), labels)
    torch.testing.assert_close(attacked, expected)
    assert attacked > clean
    assert "robust accuracy" not in Robustness(NAMES).metrics(sums)


def test_training_attacks_a_fixed_function_and_leaves_every_mode_as_it_was(monkeypatch):
    modes = []
    real = robustness.gap_and_gradient

    def spy(model, *arguments):
        modes.append([module.training for module in model.modules()])
        return real(model, *arguments)

    monkeypatch.setattr(robustness, "gap_and_gradient", spy)
    normed = nn.BatchNorm1d(9).eval()  # a part that its owner keeps fixed
    model = nn.Sequential(nn.Flatten(), normed, nn.Dropout(0.5), nn.Linear(9, 3))
    assert normed.running_mean is not None
    statistics = normed.running_mean.clone()
    task = Robustness(NAMES, train_steps=2)
    task.loss(model, (torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 2, 0])))
    assert modes == [[False] * 5] * 2
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(normed.running_mean, statistics)


def test_an_attack_that_fails_leaves_the_mode_as_it_was():
    model = Bent(4).train()
    with pytest.raises((RuntimeError, IndexError)):
        Robustness(NAMES, train_steps=2).loss(model, (torch.rand(2, 1, 3, 3), torch.tensor([0, 1])))
    assert model.training


def test_training_on_attacked_images_makes_a_model_robust():
    """One pixel tells the class well and stands firm; sixty tell it better together, and fall to the attack."""

    def images_of(labels):
        side = (2 * labels - 1).float()[:, None]
        firm = 0.5 + 0.35 * side * torch.where(torch.rand(len(labels), 1) < 0.92, 1, -1)
        weak = 0.5 + 0.05 * side + 0.1 * torch.randn(len(labels), 62)
        return torch.cat([firm, weak], 1).clamp(0, 1).view(-1, 1, 7, 9)

    labels = torch.arange(400) % 2
    images = images_of(labels)
    test_labels = torch.arange(300) % 2
    test = images_of(test_labels)
    found = {}
    for train_steps in (0, 3):
        task = Robustness(("a", "b"), radius=0.1, steps=10, train_steps=train_steps)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(63, 2))
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(100):
            optimizer.zero_grad()
            loss, _ = task.loss(model, (images, labels))
            loss.backward()
            optimizer.step()
        found[train_steps] = measured(task, model.eval(), test, test_labels)
    assert found[0]["accuracy"] > 0.9
    assert found[0]["robust accuracy"] < 0.5
    assert found[3]["robust accuracy"] > 0.85


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"radius": 0}, "radius is 0; it must be"),
        ({"radius": -0.1}, "radius is -0.1; it must be"),
        ({"radius": float("nan")}, "radius is nan; it must be"),
        ({"radius": float("inf")}, "radius is inf; it must be"),
        ({"radius": "8/255"}, "radius is '8/255'; it must be"),  # a fraction on the command line only
        ({"radius": 8}, "radius is 8, and pixels are between 0 and 1"),
        ({"norm": "linff"}, "norm is 'linff'; allowed: 'linf', 'l2'."),
        ({"norm": 2}, "norm is 2; allowed"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"restarts": 0}, "restarts is 0"),
        ({"restarts": "3"}, "restarts is '3'"),
        ({"train_steps": -1}, "train_steps is -1"),
        ({"train_steps": 1.5}, "train_steps is 1.5"),
        ({"attack": "pdg"}, "there is no attack 'pdg'; did you mean 'pgd'?"),
        ({"top": 4}, "top is 4"),
    ],
)
def test_bad_options_get_their_sentence(options, words):
    with pytest.raises((ValueError, TypeError, LookupError)) as error:
        Robustness(NAMES, **options)
    assert words in str(error.value)


@pytest.mark.parametrize("attack", BOTH)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"radius": -1.0}, "radius is -1.0"),
        ({"radius": 0.1, "norm": "l1"}, "norm is 'l1'"),
        ({"radius": 0.1, "steps": 0}, "steps is 0"),
        ({"radius": 0.1, "step_size": 0.0}, "step_size is 0.0"),
        ({"radius": 0.1, "step_size": -0.1}, "step_size is -0.1"),
    ],
)
def test_attacks_refuse_what_makes_no_sense(attack, options, words):
    with pytest.raises(ValueError) as error:
        attack(Bent(4), torch.rand(1, 1, 2, 2), torch.tensor([0]), **options)
    assert words in str(error.value)


@pytest.mark.parametrize("attack", [pgd, jiio])
@pytest.mark.parametrize("pixel", [-0.1, 255.0, torch.nan])
def test_pixels_outside_the_unit_interval_are_refused(attack, pixel):
    """Clipped to [0, 1], they would be moved farther than the radius."""
    images = torch.rand(2, 1, 2, 2)
    images[1, 0, 0, 0] = pixel
    with pytest.raises(ValueError, match="an attack needs them between 0 and 1"):
        attack(Bent(4), images, torch.tensor([0, 1]), radius=0.1)


def test_the_best_weights_are_chosen_by_what_was_trained_for():
    """Trained on clean images, a model of 97% accuracy was once replaced by one of 78% that was no more robust."""
    assert Robustness(NAMES, train_steps=0).best_metric == "accuracy"
    assert Robustness(NAMES, train_steps=5).best_metric == "robust accuracy"

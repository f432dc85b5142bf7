"""The joint attack: in the ball and the box, against known optima and PGD, on every model that can be taken apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.models.parts.taken_apart import TakenApart
from equipoise.tasks.joint_attack import jiio
from equipoise.tasks.robustness import Robustness, class_gap, pgd

NAMES = ("a", "b", "c")
TINY = {
    "conv-equilibrium": {"channels": 8},
    "mdeq": {"channels": [4, 4], "head_channels": [2, 4], "final_channels": 8, "groups": 2, "expansion": 2},
    "mondeq": {"channels": 4, "pool": 2},
    "opteq": {"size": "reduced", "channels": 4},
    "popteq": {"size": "reduced", "channels": 4},
    "mopteq": {"size": "reduced", "channels": 4},
}


def tiny(name):
    torch.manual_seed(0)
    model = eq.create_model(name, shape=(1, 8, 8), classes=3, **TINY[name])
    model.equilibrium.on_failure = "ignore"
    return model


def size_of(change, norm):
    return change.flatten(1).norm(dim=1) if norm == "l2" else change.flatten(1).abs().amax(dim=1)


class Half(nn.Module):
    """f(z, u) = z / 2 + u, so that z* = 2 u."""

    def forward(self, z, u):
        return z / 2 + u


class LinearEquilibrium(nn.Module):
    """Two classes apart by ``2 direction . x``."""

    def __init__(self, direction):
        super().__init__()
        self.direction = nn.Parameter(direction)
        self.equilibrium = eq.Equilibrium(Half(), initial=(1,), tolerance=eq.Tolerance(relative=1e-10, max_steps=100))

    def injections(self, images):
        return ((images.flatten(1) @ self.direction)[:, None],)

    def read(self, z):
        return torch.cat([-z / 2, z / 2], dim=1)

    def forward(self, images):
        return self.read(self.equilibrium(*self.injections(images)))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_attack_on_a_linear_model_is_the_best_one(norm):
    direction = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, images = LinearEquilibrium(direction), torch.full((3, 1, 3, 4), 0.5, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0])
    attacked = jiio(model, images, labels, radius=0.2, norm=norm)
    best = direction / direction.norm() if norm == "l2" else direction.sign()
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close((attacked - images).flatten(1), 0.2 * signs * best, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_pixels_stay_in_range_where_the_best_attack_would_leave_it(norm):
    """At the border of [0, 1] the optimum over ball and box uses the pixels that can still move."""
    model = LinearEquilibrium(torch.ones(4, dtype=torch.float64))
    images = torch.tensor([[1.0, 1.0, 0.2, 0.4]], dtype=torch.float64).view(1, 1, 2, 2)
    change = (jiio(model, images, torch.tensor([0]), radius=0.3, norm=norm) - images).flatten()
    expected = [0.0, 0.0, 0.3, 0.3] if norm == "linf" else [0.0, 0.0, 0.3 / 2**0.5, 0.3 / 2**0.5]
    torch.testing.assert_close(change, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", TINY)
def test_models_of_the_package_are_attacked_within_ball_and_box(name, norm):
    model, labels = tiny(name).train(), torch.tensor([0, 1, 2, 0])
    images = torch.rand(4, 1, 8, 8).mul(1.6).sub(0.3).clamp(0, 1)  # many pixels at the border
    assert isinstance(model, TakenApart)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    radius = 0.5 if norm == "l2" else 0.1
    with eq.watch_solves() as solves:
        attacked = jiio(model, images, labels, radius=radius, norm=norm, steps=12)
    assert not solves
    assert bool((size_of(attacked - images, norm) <= radius).all())  # in float32, not to a tolerance
    assert 0 <= attacked.min() <= attacked.max() <= 1
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        gained = class_gap(model(attacked), labels) - class_gap(model(images), labels)
    assert (gained >= 0).all()
    assert name == "mdeq" or gained.max() > 0  # untrained, an MDEQ hardly depends on its images: |g| is about 1e-7


@pytest.mark.parametrize("name", TINY)
def test_a_model_is_its_parts(name):
    model, images = tiny(name).eval(), torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.read(model.equilibrium(*model.injections(images))), model(images))


@pytest.fixture(scope="module")
def digits():
    """An equilibrium classifier trained on digits for a moment, and digits it has not seen."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(classes)
    model = eq.create_model("conv-equilibrium", shape=(1, 8, 8), classes=10, channels=8, bound=0.8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(60):
        rows = torch.arange(64) + 64 * (step % 20)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), images[1300:1428], labels[1300:1428]


@pytest.mark.parametrize(("norm", "radius"), [("l2", 0.5), ("linf", 0.1)])
def test_it_is_about_as_strong_as_pgd_with_fewer_evaluations(digits, norm, radius):
    model, images, labels = digits
    calls = 0

    def count(*arguments):
        nonlocal calls
        calls += 1

    gaps, counted = {}, {}
    hook = model.equilibrium.f.register_forward_pre_hook(count)
    for name, attack in (("pgd", pgd), ("jiio", jiio)):
        calls = 0
        attacked = attack(model, images, labels, radius=radius, norm=norm, random_start=False)
        counted[name] = calls
        with torch.no_grad():
            gaps[name] = class_gap(model(attacked), labels)
    hook.remove()
    with torch.no_grad():
        clean = class_gap(model(images), labels)
    assert (gaps["jiio"] - clean).mean() > 0.97 * (gaps["pgd"] - clean).mean()
    assert ((gaps["jiio"] > 0).sum() - (gaps["pgd"] > 0).sum()).abs() <= 4
    assert counted["jiio"] < counted["pgd"] / 2


def test_restarts_start_at_random_points_and_keep_the_worst(digits):
    model, images, labels = digits
    options = {"radius": 0.4, "norm": "l2", "steps": 6}
    once = jiio(model, images[:8], labels[:8], **options)
    assert torch.equal(once, jiio(model, images[:8], labels[:8], **options))
    thrice = jiio(model, images[:8], labels[:8], restarts=3, **options)
    with torch.no_grad():
        assert (class_gap(model(thrice), labels[:8]) >= class_gap(model(once), labels[:8])).all()
    first, again = (jiio(model, images[:8], labels[:8], random_start=True, **options) for _ in range(2))
    assert not torch.equal(first, again)
    assert (size_of(first - images[:8], "l2") <= 0.4).all()


def test_a_model_that_cannot_be_taken_apart_gets_a_sentence():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(TypeError, match=r"Sequential cannot be taken apart.*`equilibrium`.*'pgd' works with any model"):
        jiio(model, torch.rand(1, 1, 2, 2), torch.tensor([0]), radius=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"radius": 0.0}, "radius is 0.0"), ({"radius": 0.1, "norm": "l1"}, "norm is 'l1'"), ({"steps": 0}, "steps is 0")],
)
def test_bad_budgets_get_their_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        jiio(tiny("conv-equilibrium"), torch.rand(1, 1, 8, 8), torch.tensor([0]), **{"radius": 0.1, **options})


# The task


def test_every_attack_of_a_list_has_its_accuracy_and_the_worst_counts_per_sample(digits):
    model, images, labels = digits
    common = {"radius": 0.5, "norm": "l2", "steps": 5, "joint_steps": 15}
    task = Robustness(tuple("0123456789"), attack=["pgd", "jiio"], **common)
    torch.manual_seed(0)
    with torch.no_grad():
        both = task.metrics(task.measure(model, (images, labels)))
    assert {"accuracy", "accuracy under pgd", "accuracy under jiio", "robust accuracy"} <= both.keys()
    assert both["robust accuracy"] <= min(both["accuracy under pgd"], both["accuracy under jiio"]) < both["accuracy"]
    with torch.no_grad():
        alone = Robustness(tuple("0123456789"), attack="jiio", **common)
        single = alone.metrics(alone.measure(model, (images, labels)))
    assert single["robust accuracy"] == both["accuracy under jiio"]
    assert not any(name.startswith("accuracy under") for name in single)


def test_images_that_only_one_attack_breaks_are_not_robust():
    images, labels = torch.tensor([0.2, 0.3, 0.1, 0.9]).view(4, 1, 1, 1), torch.tensor([0, 0, 0, 0])

    class Threshold(nn.Module):
        def forward(self, x):
            return torch.cat([0.5 - x.flatten(1), x.flatten(1) - 0.5], dim=1)

    def breaks(*rows):
        return lambda model, images, labels, **budget: images.index_fill(0, torch.tensor(rows), 1.0)

    task = Robustness(("a", "b"), attack=["pgd", "jiio"])
    task.attacks = {"first": breaks(0), "second": breaks(1)}
    metrics = task.metrics(task.measure(Threshold(), (images, labels)))
    assert (metrics["accuracy under first"], metrics["accuracy under second"]) == (0.5, 0.5)
    assert (metrics["accuracy"], metrics["robust accuracy"]) == (0.75, 0.25)


def test_training_on_joint_attacks_holds_the_attacked_images_fixed():
    """The gradient is the implicit one of the loss at the attacked images."""
    model, images, labels = tiny("conv-equilibrium").double(), torch.rand(3, 1, 8, 8).double(), torch.tensor([0, 1, 2])
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-10, max_steps=200)
    task = Robustness(NAMES, radius=0.4, norm="l2", train_attack="jiio", train_steps=8)
    loss, _ = task.loss(model, (images, labels))
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    attacked = jiio(model, images, labels, radius=0.4, norm="l2", steps=8)
    expected = functional.cross_entropy(model(attacked), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    with torch.no_grad():
        assert loss > functional.cross_entropy(model(images), labels)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attack": []}, "attack is []; it must be the name of an attack, or a list of different names."),
        ({"attack": ["pgd", "pgd"]}, "a list of different names"),
        ({"attack": 3}, "attack is 3; it must be"),
        ({"attack": ["pgd", "jio"]}, "there is no attack 'jio'; did you mean 'jiio'?"),
        ({"joint_steps": 0}, "joint_steps is 0"),
        ({"train_attack": "foolbox"}, "train_attack is 'foolbox'; allowed: 'pgd', 'jiio'."),
    ],
)
def test_bad_options_get_their_sentence(options, words):
    with pytest.raises((ValueError, TypeError)) as error:
        Robustness(NAMES, **options)
    assert words in str(error.value)

"""What all baselines share with the models they are compared with: names, sizes, refusals, independent samples, use."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import equipoise as eq
from equipoise.lab.data import load
from equipoise.models.baselines.neural_ode import SIZES as ODE_SIZES
from equipoise.models.baselines.resnet import SIZES as RESNET_SIZES
from equipoise.models.parts.taken_apart import taken_apart
from equipoise.solution import ConvergenceWarning

MNIST, CIFAR, HALF, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 16, 16), (3, 224, 224)
COUNTS = [  # name, options, shape, classes, parameters
    ("neural-ode", {"size": "node-84k"}, MNIST, 10, 84_395),  # Dupont et al. (2019), appendix F.2.2
    ("neural-ode", {"size": "anode-84k"}, MNIST, 10, 84_816),
    ("neural-ode", {"size": "node-172k"}, CIFAR, 10, 172_358),
    ("neural-ode", {"size": "anode-172k"}, CIFAR, 10, 171_799),
    ("neural-ode", {"size": "node-84k", "time": True}, MNIST, 10, 85_316),  # the authors' code
    ("neural-ode", {"size": "anode-84k", "time": True}, MNIST, 10, 85_462),
    ("neural-ode", {"size": "node-172k", "time": True}, CIFAR, 10, 173_611),
    ("neural-ode", {"size": "anode-172k", "time": True}, CIFAR, 10, 172_452),
    ("neural-ode", {"size": "node-1m"}, CIFAR, 10, 1_001_613),
    ("neural-ode", {"size": "anode-1m"}, CIFAR, 10, 1_001_124),
    ("plain-deq", {"channels": 73}, MNIST, 10, 84_471),
    ("plain-deq", {"channels": 106}, CIFAR, 10, 171_942),
    ("plain-deq", {"kind": "multitier", "channels": (24, 48, 76)}, CIFAR, 10, 170_426),
    ("unrolled", {"channels": 73}, MNIST, 10, 84_471),
    ("unrolled", {"channels": 34}, HALF, 10, 16_806),
    ("resnet", {"size": "resnet-18"}, CIFAR, 10, 11_173_962),
    ("resnet", {"size": "resnet-18-imagenet"}, IMAGENET, 1000, 11_689_512),  # that of torchvision
    ("resnet", {"size": "resnet-20"}, CIFAR, 10, 272_474),
    ("resnet", {"size": "84k"}, MNIST, 10, 83_115),
    ("resnet", {"size": "17k"}, HALF, 10, 17_180),
    ("hrnet", {}, IMAGENET, 1000, 13_187_464),  # HRNet-W18-C-Small-v1
    ("mdeq", {"size": "cifar10-2.5m"}, CIFAR, 10, 2_526_262),
]


def on_paper(name, shape, classes, **options):
    with torch.device("meta"):
        return eq.create_model(name, shape=shape, classes=classes, **options)


@pytest.mark.parametrize(("name", "options", "shape", "classes", "parameters"), COUNTS)
def test_sizes(name, options, shape, classes, parameters):
    model = on_paper(name, shape, classes, **options)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_every_size_has_a_count():
    counted = {(name, options.get("size")) for name, options, *_ in COUNTS}
    assert {("neural-ode", size) for size in ODE_SIZES} | {("resnet", size) for size in RESNET_SIZES} <= counted


def test_resnet_18_multiplies_as_often_as_the_published_one():
    """1.81 billion multiplications for an image of 224 x 224."""
    model = on_paper("resnet", IMAGENET, 1000, size="resnet-18-imagenet").eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(1, *IMAGENET, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(1.81, abs=0.01)


SMALL = {
    "node": ("neural-ode", {"filters": 6}),
    "augmented": ("neural-ode", {"filters": 6, "augment": 3, "time": True, "adjoint": False}),
    "plain": ("plain-deq", {"channels": 6, "pool": 2}),
    "tiers": ("plain-deq", {"kind": "multitier", "channels": (4, 6, 5)}),
    "unrolled": ("unrolled", {"channels": 6, "pool": 2, "steps": 4}),
    "resnet": ("resnet", {"channels": (4, 8), "blocks": (1, 2)}),
    "hrnet": (
        "hrnet",
        {"channels": (4, 8, 6), "head_channels": (2, 2, 2), "final_channels": 9, "stem": 5, "bottleneck": 2}
        | {"blocks": 1, "downsamplings": 0},
    ),
}


def small(name, shape=(2, 8, 8), classes=3):
    name, options = SMALL[name]
    return eq.create_model(name, shape=shape, classes=classes, **options)


@pytest.mark.parametrize("name", SMALL)
def test_models_have_names_and_train_in_every_precision(name):
    assert SMALL[name][0] in eq.list_models()
    images, labels = torch.rand(4, 2, 8, 8), torch.tensor([0, 1, 2, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            low = dtype == torch.bfloat16
            model = small(name).to(torch.float32 if low else dtype)
            with torch.autocast("cpu", dtype, enabled=low):
                logits = model(images.to(torch.float32 if low else dtype))
            assert logits.shape == (4, 3)
            F.cross_entropy(logits.double(), labels).backward()
            assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_a_copy_and_loaded_weights_give_the_same_logits(name):
    model, other, images = small(name).eval(), small(name).eval(), torch.rand(3, 2, 8, 8)
    model(images).sum().backward()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(logits, other(images))
        assert torch.equal(logits, copy.deepcopy(model)(images))


@pytest.mark.parametrize("name", [name for name, (model, _) in SMALL.items() if model != "neural-ode"])
def test_logits_do_not_depend_on_the_rest_of_the_batch(name):
    """A Neural ODE is the exception: its step size is chosen for the batch."""
    model, images = small(name).eval().double(), torch.rand(5, 2, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[3:], model(images[3:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["node", "plain", "tiers", "unrolled"])
@pytest.mark.parametrize("shape", [(2, 9, 8), (2, 4, 4)])
def test_images_of_another_shape_are_refused(name, shape):
    with pytest.raises(ValueError, match=r"images have shape .*this model was made for \(2, 8, 8\): its head reads"):
        small(name)(torch.rand(2, *shape))


def test_images_that_cannot_be_halved_are_refused():
    with pytest.raises(ValueError, match=r"images of 10 x 8 do not fit.*must be multiples of 4"):
        small("hrnet")(torch.rand(2, 2, 10, 8))
    assert small("resnet").eval()(torch.rand(2, 2, 9, 7)).shape == (2, 3)  # any size


REFUSED = {
    "filters": ("neural-ode", {"filters": 0}, "FieldSize.filters is 0; it must be a whole number of at least 1"),
    "augment": ("neural-ode", {"augment": -1}, "FieldSize.augment is -1; it must be a whole number of at least 0"),
    "time": ("neural-ode", {"time": 1}, "FieldSize.time is 1; it must be a bool"),
    "size": ("neural-ode", {"size": "node-84"}, "no size of a Neural ODE 'node-84'; did you mean 'node-84k'"),
    "option": ("neural-ode", {"tol": 1e-3}, "has no option 'tol'"),
    "kind": ("plain-deq", {"kind": "dense"}, "PlainDEQ.kind is 'dense'; allowed: 'conv', 'multitier'"),
    "tiers": ("plain-deq", {"channels": (3, 4)}, r"channels is \(3, 4\); for kind 'conv' it must be one whole number"),
    "no tiers": ("plain-deq", {"kind": "multitier", "channels": 4}, "for kind 'multitier' it must be a list of whole"),
    "empty": ("plain-deq", {"kind": "multitier", "channels": ()}, r"channels is \(\); for kind 'multitier' it must be"),
    "pool": ("unrolled", {"pool": 9}, "pool is 9; it must be a whole number of at least 1 and at most 8"),
    "steps": ("unrolled", {"steps": 0}, "steps is 0; it must be a whole number of at least 1"),
    "blocks": ("resnet", {"blocks": (1, 1)}, "blocks has 2 entries, but channels has 3 stages"),
    "channels": ("resnet", {"channels": (4, 0, 4)}, r"channels is \(4, 0, 4\); it must be a list of whole numbers"),
    "head": ("hrnet", {"channels": (4, 4)}, "head_channels has 4 entries, but channels has 2: give one per branch"),
    "branch": ("hrnet", {"channels": (4,), "head_channels": (4,)}, r"channels is \[4\]; it must have at least 2"),
    "downsamplings": ("hrnet", {"downsamplings": 3}, "downsamplings is 3; .* at least 0 and at most 2"),
}


@pytest.mark.parametrize(("name", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(name, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        eq.create_model(name, shape=(1, 8, 8), classes=3, **options)


# The flow


def test_a_flow_that_stands_still_is_a_linear_classifier():
    model = small("augmented")
    nn.init.zeros_(model.field.conv3.weight)
    nn.init.zeros_(model.field.conv3.bias)
    images = torch.rand(4, 2, 8, 8)
    state = model.features(images)
    torch.testing.assert_close(state[:, :2], model.normalize(images))
    assert not state[:, 2:].any()  # the channels that augment the image start at zero


def test_the_time_enters_every_convolution():
    field, z = small("augmented").field, torch.rand(2, 5, 8, 8)
    changes = [(field(torch.tensor(t), z) - field(torch.tensor(0.0), z)).flatten() for t in (0.3, 0.6)]
    assert all(change.any() for change in changes)
    for conv in (field.conv1, field.conv2, field.conv3):
        nn.init.zeros_(conv.weight[:, :1])  # the time is the first channel
    assert torch.equal(field(torch.tensor(0.9), z), field(torch.tensor(0.0), z))


# The weight-tied block


@pytest.mark.parametrize("name", ["plain", "tiers"])
def test_the_cell_is_relu_of_a_dense_matrix(name):
    """W is block lower bidiagonal, as in a multi-tier monDEQ (D1); the injection enters the first tier alone."""
    model = small(name).double()
    cell, (u,) = model.equilibrium.f, model.injections(torch.rand(1, 2, 8, 8, dtype=torch.float64))
    start = cell.start(u)
    z = tuple(torch.rand_like(part) for part in start)

    def before_relu(*z):
        linear = [conv(part) for conv, part in zip(cell.within, z, strict=True)]
        for i, conv in enumerate(cell.between):
            linear[i + 1] = linear[i + 1] + conv(z[i])
        return tuple(linear)

    blocks = torch.autograd.functional.jacobian(before_relu, z)
    for i, (row, found) in enumerate(zip(blocks, cell(z, u), strict=True)):
        assert all((block.any() == (j in (i - 1, i))) for j, block in enumerate(row))
        product = sum(
            torch.einsum("bij,j->bi", block.reshape(1, start[i].numel(), -1), z[j].flatten())
            for j, block in enumerate(row)
        ).view_as(start[i])
        torch.testing.assert_close(found, torch.relu(product + (u if i == 0 else 0)))


def test_an_unrolled_network_applies_its_block_a_number_of_times():
    model, images = small("unrolled").double(), torch.rand(3, 2, 8, 8, dtype=torch.float64)
    (u,) = model.injections(images)
    z = model.equilibrium.f.start(u)
    for _ in range(4):
        z = model.equilibrium.f(z, u)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it is no equilibrium is intended
        torch.testing.assert_close(model(images), model.read(z))
    model(images).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.read(z).sum().backward()
    for one, other in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_a_plain_deq_is_solved_and_differentiated_at_its_equilibrium():
    model, images = small("plain").double(), torch.rand(3, 2, 8, 8, dtype=torch.float64)
    for conv in model.equilibrium.f.within:
        conv.weight.data *= 0.5  # a contraction, so that it can be unrolled to the end
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-10, max_steps=300)
    model.equilibrium.gradient = eq.ImplicitGradient(tolerance=eq.Tolerance(relative=1e-10, max_steps=300))
    found = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    model.equilibrium.gradient = eq.UnrolledGradient(60)
    known = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert taken_apart(model) is model


# Learning


LEARNERS = {  # options, learning rate, epochs, least test accuracy
    "neural-ode": ({"filters": 12, "adjoint": False, "tolerance": 1e-2}, 2e-2, 1, 0.87),
    "augmented": ({"filters": 12, "augment": 3, "adjoint": False, "tolerance": 1e-2}, 2e-2, 1, 0.87),
    "plain-deq": ({"kind": "multitier", "channels": (8, 16)}, 1e-2, 1, 0.82),
    "unrolled": ({"channels": 12, "pool": 2, "steps": 6}, 1e-2, 2, 0.88),
    "resnet": ({"channels": (8, 16), "blocks": (1, 1)}, 2e-2, 2, 0.92),
    "hrnet": (
        {"channels": (4, 8), "head_channels": (4, 8), "final_channels": 32, "stem": 8, "bottleneck": 4}
        | {"blocks": 1, "downsamplings": 0},
        2e-2,
        2,
        0.85,
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_digits_are_learnt_in_seconds(name):
    """Handwritten digits of 8 x 8 pixels; chance is 0.1."""
    pytest.importorskip("sklearn")
    options, rate, epochs, least = LEARNERS[name]
    data = load("digits", validation=0)
    (images, labels), (test_images, test_labels) = data.train.tensors, data.test.tensors
    torch.manual_seed(0)
    name = "neural-ode" if name == "augmented" else name
    model = eq.create_model(name, shape=data.shape, classes=10, mean=data.mean, std=data.std, **options)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(images)).split(32)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # nothing makes a plain DEQ converge
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch].float() / 255), labels[batch]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            guesses = model.eval()(test_images.float() / 255).argmax(1)
    assert (guesses == test_labels).double().mean() >= least

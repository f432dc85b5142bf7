"""MAML, Reptile and implicit MAML against loops over tasks, central differences, and dense Hessians."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise.lab.data.sets.episodes import Episodes
from equipoise.models.few_shot.conv4 import Conv4
from equipoise.tasks import TASKS
from equipoise.tasks.episodes import INTERVAL, task_losses
from equipoise.tasks.imaml import IMAML, conjugate_gradients
from equipoise.tasks.inner_descent import descend, weights_of, with_gradients
from equipoise.tasks.maml import MAML
from equipoise.tasks.reptile import Reptile

DOUBLE = torch.float64
NAMES = ("1", "2", "3")
LEARNERS = {"maml": MAML, "reptile": Reptile, "imaml": IMAML}


def smooth(seed=0):
    """A classifier of 4 x 4 images with second derivatives everywhere."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Softplus(), nn.Linear(5, 3)).to(DOUBLE)


def convolutional(seed=0):
    torch.manual_seed(seed)
    return Conv4((1, 4, 4), 3, filters=3, layers=1, pooled=False).to(DOUBLE)


def episodes(tasks=2, queries=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    support, query = (torch.rand(tasks, n, 1, 4, 4, dtype=DOUBLE, generator=generator) for n in (3, 3 * queries))
    labels = torch.arange(3).expand(tasks, -1)
    return support, labels, query, labels.repeat_interleave(queries, dim=1)


def trained(model, batches, optimizer, **options):
    """The definition: a copy of the model, trained on the batches of one task by an optimizer of torch."""
    model = copy.deepcopy(model)
    optimizer = optimizer(model.parameters(), **options)
    for images, labels in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def slopes(task, model, batch):
    model.zero_grad()
    loss, _ = task.loss(model, batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def central_differences(loss, model, direction, size=1e-5):
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(sign * size * direction[name])
            values.append(loss().item())
            for name, p in model.named_parameters():
                p.sub_(sign * size * direction[name])
    return (values[0] - values[1]) / (2 * size)


def random_direction(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, dtype=DOUBLE, generator=generator) for n, p in model.named_parameters()}


def along(gradients, direction):
    return sum((gradients[name] * direction[name]).sum().item() for name in direction)


# Inner steps


@pytest.mark.parametrize("make", [smooth, convolutional])
@pytest.mark.parametrize("adam", [False, True])
def test_inner_steps_are_those_of_an_optimizer_for_each_task(make, adam):
    model, (support, labels, query, answers) = make(), episodes()
    batches = [(support, labels), (query, answers), (support, labels)]
    found = descend(model, batches, 0.1, tasks=2, adam=adam)
    for task in range(2):
        kind = torch.optim.Adam if adam else torch.optim.SGD
        options = {"lr": 0.1, **({"betas": (0.0, 0.999)} if adam else {})}
        expected = trained(model, [(x[task], y[task]) for x, y in batches], kind, **options)
        for name, weight in expected.named_parameters():
            if name != "convolutions.0.bias":  # which BatchNorm cancels: its gradient is rounding, scaled up by Adam
                torch.testing.assert_close(found[name][task], weight, rtol=1e-8, atol=1e-8)


def test_the_proximal_term_pulls_towards_the_weights_of_the_model():
    model, (support, labels, _, _) = smooth(), episodes()
    found = descend(model, [(support, labels)] * 3, 0.1, tasks=2, penalty=2.0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        moved = copy.deepcopy(model)
        moved.load_state_dict(weights)
        functional.cross_entropy(moved(support[1]), labels[1]).backward()
        pulled = {n: p.grad + 2.0 * (weights[n] - weights_of(model)[n]) for n, p in moved.named_parameters()}
        weights = {n: (w - 0.1 * pulled[n]).detach() for n, w in weights.items()}
    for name, weight in weights.items():
        torch.testing.assert_close(found[name][1], weight)


@pytest.mark.parametrize("name", LEARNERS)
def test_without_steps_a_task_has_the_weights_of_the_model(name):
    model, (support, labels, query, _) = smooth(), episodes()
    logits = LEARNERS[name](NAMES).learn(model, support, labels, steps=0)(query)
    torch.testing.assert_close(logits, torch.stack([model(images) for images in query]))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_task_does_not_depend_on_its_batch_mates(name):
    model, (support, labels, query, _) = convolutional(), episodes(4)
    task = LEARNERS[name](NAMES, steps=3)
    with torch.no_grad():
        together = task.learn(model, support, labels)(query)
        alone = task.learn(model, support[2:3], labels[2:3])(query[2:3])
    torch.testing.assert_close(together[2:3], alone)


@pytest.mark.parametrize("name", LEARNERS)
def test_query_images_are_classified_together_or_each_beside_the_support_images(name):
    model, (support, labels, query, _) = convolutional(), episodes()
    with torch.no_grad():
        together, apart = (
            LEARNERS[name](NAMES, steps=2, transductive=transductive).learn(model, support, labels)
            for transductive in (True, False)
        )
        torch.testing.assert_close(apart(query)[:, 1:2], apart(query[:, 1:2]))
        assert not torch.allclose(together(query)[:, 1:2], together(query[:, 1:2]))
        beside = together(torch.cat([support, query[:, 1:2]], dim=1))[:, -1]
        torch.testing.assert_close(apart(query)[:, 1], beside)


# MAML


@pytest.mark.parametrize("make", [smooth, convolutional])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_of_maml_against_central_differences(make, steps):
    model, batch = make(), episodes()
    task, direction = MAML(NAMES, train_steps=steps, step_size=0.5), random_direction(model)
    expected = central_differences(lambda: task.loss(model, batch)[0], model, direction)
    assert along(slopes(task, model, batch), direction) == pytest.approx(expected, rel=1e-6)
    first = MAML(NAMES, train_steps=steps, step_size=0.5, first_order=True)
    assert along(slopes(first, model, batch), direction) != pytest.approx(expected, rel=1e-3)


def test_the_first_order_gradient_is_that_at_the_adapted_weights():
    model, batch = smooth(), episodes()
    found = slopes(MAML(NAMES, train_steps=2, step_size=0.5, first_order=True), model, batch)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for support, labels, query, answers in zip(*batch, strict=True):
        moved = trained(model, [(support, labels)] * 2, torch.optim.SGD, lr=0.5)
        moved.zero_grad()
        functional.cross_entropy(moved(query), answers).backward()
        for name, p in moved.named_parameters():
            total[name] += p.grad / 2
    for name, slope in total.items():
        torch.testing.assert_close(found[name], slope)


# Reptile


@pytest.mark.parametrize("adam", [False, True])
def test_an_outer_step_of_reptile_is_its_definition(adam):
    model, batch = smooth(), episodes(tasks=3)
    task = Reptile(NAMES, train_steps=4, minibatch=5, step_size=0.05, adam=adam)
    images, labels = (torch.cat(pair, dim=1) for pair in ((batch[0], batch[2]), (batch[1], batch[3])))
    torch.manual_seed(7)
    batches = task.minibatches(images, labels)
    kind, options = (torch.optim.Adam, {"betas": (0.0, 0.999)}) if adam else (torch.optim.SGD, {})
    ends = [trained(model, [(x[i], y[i]) for x, y in batches], kind, lr=0.05, **options) for i in range(3)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.manual_seed(7)
    task.loss(model, batch)[0].backward()
    optimizer.step()
    for name, p in model.named_parameters():
        mean = torch.stack([end.get_parameter(name) for end in ends]).mean(dim=0)
        torch.testing.assert_close(p, before[name] + 0.25 * (mean - before[name]), rtol=1e-9, atol=1e-10)


def test_minibatches_use_every_image_once_before_any_again():
    images = torch.arange(2 * 6, dtype=DOUBLE).view(2, 6, 1, 1, 1)
    batches = Reptile(NAMES, train_steps=4, minibatch=3).minibatches(images, images.flatten(1))
    assert all(torch.equal(x.flatten(1), y) for x, y in batches)
    for task in range(2):
        for half in (batches[:2], batches[2:]):
            seen = torch.cat([y[task] for _, y in half])
            assert sorted(seen.tolist()) == images[task].flatten().tolist()


# Implicit MAML


def hessian_of(model, support, labels):
    """The dense Hessian of the support loss at the weights of a model."""
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(model, weights, (support,)), labels)

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return torch.autograd.functional.hessian(loss, flat)


@pytest.mark.parametrize("damping", [(0.0, 0.0), (1.0, 10.0)])
def test_the_gradient_of_imaml_against_dense_hessians(damping):
    """At any weights, converged or not: (I + H / lambda)^-1 times the gradient of the query loss."""
    model, batch = smooth(), episodes()
    task = IMAML(NAMES, steps=4, penalty=0.7, backward_steps=200, damping=damping)
    found = slopes(task, model, batch)
    weights = task.learned(model, *batch[:2])
    total = 0
    for i, (support, labels, query, answers) in enumerate(zip(*batch, strict=True)):
        moved = copy.deepcopy(model)
        moved.load_state_dict({name: weight[i] for name, weight in weights.items()})
        moved.zero_grad()
        functional.cross_entropy(moved(query), answers).backward()
        right = torch.cat([p.grad.flatten() for p in moved.parameters()])
        hessian = hessian_of(moved, support, labels) / (0.7 + damping[1])
        matrix = (1 + damping[0]) * torch.eye(len(right), dtype=DOUBLE) + hessian
        assert torch.linalg.eigvalsh(matrix).min() > 0
        total = total + torch.linalg.solve(matrix, right) / 2
    torch.testing.assert_close(torch.cat([g.flatten() for g in found.values()]), total, rtol=1e-7, atol=1e-10)


def test_the_gradient_of_imaml_against_central_differences_at_the_optimum():
    model, batch = smooth(), episodes()
    task = IMAML(NAMES, steps=150, step_size=0.8, penalty=0.5, backward_steps=60)
    direction = random_direction(model)
    found = along(slopes(task, model, batch), direction)
    expected = central_differences(
        lambda: task_losses(task.learn(model, *batch[:2])(batch[2]), batch[3]).mean(), model, direction
    )
    assert found == pytest.approx(expected, rel=1e-6)
    without = along(slopes(IMAML(NAMES, 150, 0.8, 0.5, backward_steps=0), model, batch), direction)
    assert without != pytest.approx(expected, rel=1e-2)


def test_conjugate_gradients_of_each_row():
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(3, 6, 6, dtype=DOUBLE, generator=generator)
    matrices = factors @ factors.mT + 0.1 * torch.eye(6, dtype=DOUBLE)
    right = torch.randn(3, 6, dtype=DOUBLE, generator=generator)

    def apply(rows):
        return (matrices @ rows[:, :, None])[:, :, 0]

    expected = torch.linalg.solve(matrices, right)
    torch.testing.assert_close(conjugate_gradients(apply, right, 40), expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(conjugate_gradients(apply, right, 0), right)
    matrices[1] = -torch.eye(6, dtype=DOUBLE)  # no positive curvature: this row stops, the others do not
    found = conjugate_gradients(apply, right, 40)
    assert torch.equal(found[1], right[1])
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-6, atol=1e-8)


def test_a_value_with_other_gradients():
    model = smooth()
    gradients = random_direction(model)
    value = with_gradients(torch.tensor(0.1, dtype=DOUBLE), model, gradients)
    assert value.item() == 0.1
    (3 * value).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 3 * gradients[name])


# Several processes


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", LEARNERS)
def test_a_wrapped_model_has_the_same_gradients(name, process_group):
    model, batch, task = smooth(), episodes(), LEARNERS[name](NAMES)
    torch.manual_seed(5)
    expected = slopes(task, model, batch)
    torch.manual_seed(5)
    model.zero_grad()
    loss, _ = task.loss(nn.parallel.DistributedDataParallel(model), batch)
    loss.backward()
    for weight, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[weight])
    assert "forward" not in vars(model)


# Learning


def digit_episodes(part, count):
    """5-way 1-shot tasks of the 8 x 8 digits, whose labels mean another digit in every task."""
    images, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(images * (255 / 16)).to(torch.uint8).view(-1, 1, 8, 8)
    drawings = torch.stack([images[digits == digit][:160] for digit in range(10)])
    drawings = drawings[:, :120] if part == "train" else drawings[:, 120:]
    return Episodes(drawings, episodes=count, ways=5, shots=1, queries=3, seed=part == "train")


@pytest.mark.parametrize(
    ("name", "options", "optimizer", "steps", "least"),
    [
        ("maml", {}, torch.optim.Adam, 70, 0.7),
        ("maml", {"first_order": True}, torch.optim.Adam, 30, 0.65),
        ("reptile", {"minibatch": 10, "step_size": 0.05, "adam": False, "train_steps": 8}, torch.optim.SGD, 30, 0.55),
        ("imaml", {"steps": 5, "penalty": 0.5, "backward_steps": 2}, torch.optim.Adam, 25, 0.6),
    ],
)
def test_every_learner_learns_to_learn_digits(name, options, optimizer, steps, least):
    torch.manual_seed(0)
    model = eq.create_model("conv4", shape=(1, 8, 8), classes=5, filters=16, layers=3, pooled=False)
    task = TASKS[name](class_names=("a", "b", "c", "d", "e"), **options)
    train, test = digit_episodes("train", 8 * steps), digit_episodes("test", 100)
    batch = task.prepare(test.read(torch.arange(100)), torch.float32)
    with torch.no_grad():
        untrained = task.metrics(task.measure(model, batch))["accuracy"]
    update = optimizer(model.parameters(), lr=0.5 if optimizer is torch.optim.SGD else 1e-2)
    for rows in torch.arange(len(train)).split(8):
        update.zero_grad()
        loss, sums = task.loss(model, task.prepare(train.read(rows), torch.float32))
        loss.backward()
        update.step()
    assert set(task.metrics(sums)) == {"accuracy", "loss"}
    with torch.no_grad():
        metrics = task.metrics(task.measure(model, batch))
    assert metrics["accuracy"] > max(least, untrained + 0.05)  # chance is 0.2
    assert 0 < metrics[INTERVAL] < 0.1
    assert {title for title, _ in task.pictures(model, lambda: iter([batch]), {})} == {
        "Accuracy over inner steps",
        "Episodes",
    }


# What is refused


@pytest.mark.parametrize(
    ("learner", "options", "message"),
    [
        (MAML, {"steps": -1}, "MAML.steps is -1; it must be a whole number"),
        (MAML, {"step_size": 0.0}, "MAML.step_size is 0.0; it must be a number above 0"),
        (MAML, {"first_order": 1}, "MAML.first_order is 1; it must be"),
        (Reptile, {"minibatch": 0}, "Reptile.minibatch is 0; it must be a whole number"),
        (Reptile, {"class_names": ()}, "the data set has no classes"),
        (IMAML, {"penalty": 0.0}, "IMAML.penalty is 0.0; it must be a number above 0"),
        (IMAML, {"backward_steps": -1}, "IMAML.backward_steps is -1; it must be a whole number"),
        (IMAML, {"damping": 1.0}, "IMAML.damping is 1.0; it must be two numbers"),
        (IMAML, {"damping": (1.0, -1.0)}, r"IMAML.damping is \(1.0, -1.0\); it must be two numbers"),
    ],
)
def test_wrong_options(learner, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        learner(**{"class_names": NAMES, **options})


@pytest.mark.parametrize("name", LEARNERS)
def test_models_and_data_that_are_not_for_it(name):
    task, batch = LEARNERS[name](NAMES), episodes()
    for norm in (nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.LayerNorm([2, 2])):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Linear(8, 3)).to(DOUBLE)
        with pytest.raises(ValueError, match=rf"has a {type(norm).__name__} \(1\); the task {name} cannot use it"):
            task.loss(model, batch)
    with pytest.raises(ValueError, match=f"adapts a task vector, and the task {name} adapts weights"):
        task.loss(eq.create_model("few-shot-mdeq", shape=(1, 8, 8), classes=3), batch)
    with pytest.raises(ValueError, match="choose a data set of episodes, such as 'omniglot-episodes'"):
        task.loss(smooth(), (batch[0][:, 0], batch[1][:, 0]))

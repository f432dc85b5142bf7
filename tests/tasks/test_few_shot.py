"""Few-shot classification: its outer gradients against central differences, its metrics, and what it refuses."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.models.few_shot.model import FewShotMDEQ
from equipoise.tasks.episodes import INTERVAL, task_losses
from equipoise.tasks.few_shot import FewShot
from equipoise.tasks.random_iterate import RandomIterate

DOUBLE = torch.float64
NAMES = ("1", "2", "3")


def learner(**options):
    """A tiny learner, smooth and contractive, so that its inner problem has one isolated minimum."""
    torch.manual_seed(0)
    numbers = {"channels": (2, 2), "groups": 1, "expansion": 1, "task_length": 4, "pool": 2, "activation": "softplus"}
    model = FewShotMDEQ((1, 4, 4), 3, **{**numbers, **options}).to(DOUBLE)
    cell = model.cell.scales
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.stem[1].weight.fill_(2.0)
        model.head.classify.weight.mul_(2.0)
        for blocks, gain in zip(cell.blocks, (3.0, 0.3), strict=True):
            blocks[0].norm2.weight.fill_(gain)
        cell.fuse[0][1].norms[0].weight.fill_(0.2)
        cell.fuse[1][0].norms[0].weight.fill_(2.0)
    tight = eq.Tolerance(relative=1e-12, max_steps=400)
    model.equilibrium.tolerance, model.equilibrium.solver = tight, eq.Anderson(memory=8)
    model.equilibrium.gradient = eq.ImplicitGradient(tolerance=tight)
    model.equilibrium.on_failure = "ignore"  # the values are tested
    return model


def episodes(tasks=2, queries=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    support, query = (torch.rand(tasks, n, 1, 4, 4, dtype=DOUBLE, generator=generator) for n in (3, 3 * queries))
    labels = torch.arange(3).expand(tasks, -1)
    return support, labels, query, labels.repeat_interleave(queries, dim=1)


def exact(gradient="exact", **options):
    return FewShot(NAMES, gradient=gradient, **{"steps": 3000, "tolerance": 1e-10, "penalty": 1.0, **options})


def slopes(task, model, batch):
    model.zero_grad()
    loss, _ = task.loss(model, batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("film_head", [False, True])
def test_outer_gradients_against_central_differences(film_head):
    model, batch = learner(film_head=film_head), episodes()
    task = exact(backward_steps=2000)
    with torch.no_grad():
        x = task.adapt(model, *batch[:2])
        assert x.abs().max() > 0.1  # the tasks were learned from
    truth, detached = slopes(task, model, batch), slopes(exact("detached"), model, batch)
    differs = []
    names = ["equilibrium.f.films.0.weight", "equilibrium.f.films.1.bias", "head.classify.weight", "stem.0.weight"]
    for name in [*names, *["head.film.weight"] * film_head]:
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
        direction /= direction.norm()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-5 * direction)
                losses.append(task.loss(model, batch)[0].item())
                parameter.sub_(sign * 1e-5 * direction)
        expected = (losses[0] - losses[1]) / 2e-5
        assert (truth[name] * direction).sum().item() == pytest.approx(expected, rel=1e-4, abs=1e-7), name
        differs.append(abs((detached[name] * direction).sum().item() - expected) > 0.05 * abs(expected))
    assert any(differs)  # x held constant is another gradient


def test_the_detached_gradient_is_that_of_the_query_loss_at_a_fixed_x():
    model, batch = learner(), episodes()
    task = exact("detached")
    found = slopes(task, model, batch)
    with torch.no_grad():
        x = task.adapt(model, *batch[:2])
    model.zero_grad()
    task_losses(model(batch[2], x), batch[3]).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_the_unrolled_gradient_is_that_of_gradient_descent():
    model, batch = learner(), episodes()
    task = FewShot(NAMES, gradient="unrolled", steps=2, step_size=0.5, penalty=0.1)
    found = slopes(task, model, batch)
    for name in ("head.classify.weight", "equilibrium.f.films.0.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-5 * direction)
                losses.append(task.loss(model, batch)[0].item())
                parameter.sub_(sign * 1e-5 * direction)
        assert (found[name] * direction).sum().item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4), name


@pytest.mark.parametrize("gradient", ["detached", "unrolled"])
def test_a_task_does_not_depend_on_its_batch_mates(gradient):
    model, batch = learner(), episodes(4)
    task = exact(gradient, **({"steps": 3, "step_size": 0.5} if gradient == "unrolled" else {"steps": 20}))
    together = task.logits(model, *batch[:3]).detach()
    alone = task.logits(model, *(part[2:3] for part in batch[:3])).detach()
    torch.testing.assert_close(together[2:3], alone, rtol=1e-6, atol=1e-8)


def test_learning_lowers_the_support_loss():
    model, (support, labels, _, _) = learner(), episodes()
    task = exact("detached", penalty=0.01)
    with torch.no_grad():
        before = task_losses(model(support, model.blank(2)), labels)
        after = task_losses(model(support, task.adapt(model, support, labels)), labels)
        assert torch.equal(task.adapt(model, support, labels, steps=0), model.blank(2))
    assert (after < before).all()


def test_metrics_with_their_interval():
    task = FewShot(NAMES)
    logits = torch.zeros(3, 2, 3)
    logits[0, :, 0] = logits[1, :, 1] = logits[2, :, 0] = 1.0
    labels = torch.tensor([[0, 0], [0, 0], [0, 1]])
    sums = {**task.sums(logits, labels), "support": torch.tensor(1.5)}
    metrics = task.metrics(sums)
    scores = torch.tensor([1.0, 0.0, 0.5])
    assert metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["support accuracy"] == pytest.approx(0.5)
    assert metrics[INTERVAL] == pytest.approx(1.96 * scores.std().item() / math.sqrt(3))
    assert INTERVAL not in task.metrics(task.sums(logits, labels))  # not of training, whose weights change
    halves = [task.sums(logits[part], labels[part]) for part in (slice(0, 1), slice(1, 3))]
    joined = {name: halves[0][name] + halves[1][name] for name in halves[0]}
    assert task.metrics(joined) == pytest.approx(task.metrics(task.sums(logits, labels)))


class Pixels(nn.Module):
    """An embedding that returns the images themselves."""

    def embedding(self, images):
        return images.flatten(2)


def prototype_loss(support, query, answers):
    task = FewShot(NAMES)
    return task.prototype_loss(task.distances(Pixels(), (support, answers, query, answers)), answers)


def test_the_prototype_loss_is_small_for_features_that_tell_classes_apart():
    means = 10 * torch.eye(3, 16).view(1, 3, 1, 4, 4)
    labels = torch.arange(3)[None]
    assert prototype_loss(means, means, labels) < 1e-6
    assert prototype_loss(means, means[:, [1, 2, 0]], labels) > 10


def test_the_classes_of_all_tasks_compete():
    """Two tasks with the same images: every class has a twin, so that half the answers are wrong."""
    means = 10 * torch.eye(3, 16).view(1, 3, 1, 4, 4).expand(2, -1, -1, -1, -1)
    loss = prototype_loss(means, means, torch.arange(3).expand(2, -1))
    torch.testing.assert_close(loss, torch.tensor(2.0).log())


def test_without_inner_steps_the_prototype_loss_is_the_only_one():
    model, batch = learner(), episodes(3)
    task = FewShot(NAMES, steps=0, prototypes=2.0)
    loss, sums = task.loss(model, batch)
    distances = task.distances(model, batch)
    torch.testing.assert_close(loss, 2 * task.prototype_loss(distances, batch[3]))
    support, query = (model.embedding(batch[i]) for i in (0, 2))  # one support image per class, in the order of labels
    right = torch.cdist(query, support).argmin(dim=2) == batch[3]
    assert sums["accuracy"].item() == pytest.approx(right.double().mean(dim=1).sum().item())
    assert 0 < right.double().mean() < 1
    assert task.measure(model, batch)["accuracy"] == sums["accuracy"]
    loss.backward()
    assert model.head.classify.weight.grad is None  # the head has nothing to learn yet
    assert model.stem[0].weight.grad.abs().sum() > 0


def test_the_random_iterate_of_the_jacobian_penalty():
    model, batch = learner(), episodes(6)
    seen = []

    class Recorded(RandomIterate):
        def __call__(self, progress):
            super().__call__(progress)
            seen.append((progress.rows.clone(), progress.value[2].clone()))

    torch.manual_seed(0)
    trail = Recorded(6, first=3, last=8, device=torch.device("cpu"))
    task = exact("detached")
    with torch.no_grad():
        task.optimum(model, model.features(batch[0]), batch[1], model.blank(6), 8, trail)
    assert set(trail.step.tolist()) <= set(range(3, 9))
    assert len(set(trail.step.tolist())) > 1
    for row, step in enumerate(trail.step.tolist()):
        rows, values = seen[min(step, len(seen)) - 1]
        torch.testing.assert_close(trail.x[row], values[rows.tolist().index(row)])
    plain, penalised = (exact("detached", steps=8, jacobian=weight) for weight in (0.0, 0.5))
    assert penalised.loss(model, batch)[0] > plain.loss(model, batch)[0]


def test_pictures():
    model, batch = learner(), episodes(3)
    task = exact("detached", steps=4)
    titles = dict(task.pictures(model, lambda: iter([batch]), {}))
    assert list(titles) == ["Accuracy over inner steps", "Episodes"]
    counts, points = task.curve(model, iter([batch]))
    assert counts == [0, 1, 2, 4]
    with torch.no_grad():
        last = task.metrics(task.measure(model, batch))["accuracy"]
    assert points[-1][0] == pytest.approx(last)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient": "envelop"}, "FewShot.gradient is 'envelop'"),
        ({"steps": -1}, "FewShot.steps is -1; it must be a whole number"),
        ({"penalty": -1.0}, "FewShot.penalty is -1.0; it must be a number of at least 0"),
        (
            {"gradient": "unrolled"},
            "FewShot.step_size is 'auto'; it must be a positive number for the gradient descent",
        ),
        ({"gradient": "unrolled", "step_size": 1.0, "jacobian": 0.1}, "FewShot.jacobian is for joint solves"),
        ({"step_size": [0.1]}, r"FewShot.step_size is \[0.1\]; a list must hold two numbers"),
        ({"step_size": "fast"}, "JointAnderson.step_size is 'fast'"),
        ({"damping": [0.1]}, "JointAnderson.damping is"),
        ({"class_names": ()}, "the data set has no classes"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FewShot(**{"class_names": NAMES, **options})


def test_models_and_data_that_are_not_for_it():
    task, batch = FewShot(NAMES), episodes()
    with pytest.raises(ValueError, match="the model Linear has no task vector; .* choose the model 'few-shot-mdeq'"):
        task.loss(nn.Linear(1, 1), batch)
    with pytest.raises(ValueError, match="choose a data set of episodes, such as 'omniglot-episodes'"):
        task.loss(learner(), (batch[0][:, 0], batch[1][:, 0]))
    with pytest.raises(ValueError, match="the batch has the label 2; the task has 2 classes"):
        FewShot(NAMES[:2]).measure(learner(), batch)

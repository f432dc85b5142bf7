"""Few-shot classification: find a task vector from a few labelled images, then classify others.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), appendix B.1. The inner problem is the loss of the support images, minimised over the task vector x; the outer
loss is that of the query images at this x (eq. 29).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.joint import (
    ConstantStep,
    DetachedGradient,
    JointAnderson,
    JointGradient,
    KKTGradient,
    Optimum,
    optimize_input,
)
from equipoise.models.few_shot.model import FewShotMDEQ
from equipoise.options import is_number, require
from equipoise.stability import jacobian_penalty
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import image_grid
from equipoise.tasks.random_iterate import RandomIterate
from equipoise.tasks.wrapped import unwrapped
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRADIENTS = ("detached", "exact", "unrolled")
STEPS = (0, 1, 2, 5, 10, 20, 50, 100)  # inner steps after which the accuracy is plotted
DRAWN = 200  # episodes behind that figure, at most
SHOWN = 3  # episodes whose images are drawn
INTERVAL = "95% interval of accuracy (±)"
SHARPNESS = 10.0  # of the prototype loss, in units of the mean squared distance of features
PROBES = 2  # random vectors that estimate the Jacobian penalty


class FewShot(Task):
    """Learn to learn classes from a few images: adapt a task vector x to support images, classify query images.

    Batches are (support, labels, query, labels), with images (tasks, images, channels, height, width) and labels
    (tasks, images). The model is a :class:`~equipoise.models.few_shot.model.FewShotMDEQ`, or one with its
    ``features``, ``cell``, ``head``, ``blank`` and ``forward``.

    The inner problem minimises the mean cross entropy of the support images of a task plus ``penalty`` times the mean
    square of x. All its images and their x are one sample of :func:`equipoise.optimize_input`. Query images are then
    solved for with x fixed, by the model's own solver. The metric "95% interval of accuracy (±)" is half the width of
    the 95% confidence interval of the accuracy, from its standard deviation over tasks.

    Args:
        class_names: names of the classes of a task, indexed by label.
        gradient: outer gradient: "detached" (the paper's) holds x constant; "exact" also differentiates x as the
            solution of the inner problem (KKT conditions); "unrolled" replaces the inner solver by ``steps`` gradient
            descent steps from x = 0, each through the model's own equilibrium, and differentiates through them (MAML on
            x): a warm-up, after which the inner problem is worth solving.
        steps: largest number of joint steps, or number of gradient descent steps.
        tolerance: relative tolerance of the joint solve.
        step_size: step size of x: "auto", a number, or two: for the first 65 joint steps and for the later ones.
        memory: memory of the joint solver.
        damping: weights of the current iterate in the joint step, of z and of mu.
        penalty: weight of the mean square of x.
        jacobian: weight of the Jacobian penalty of f at a random iterate of the joint solve, in the training loss.
        jacobian_from: first step from which that iterate is drawn.
        prototypes: weight of an auxiliary training loss, which classifies query images by the nearest mean feature of a
            class, among those of all tasks of the batch, at x = 0 (J. Snell, K. Swersky, R. Zemel, "Prototypical
            networks", 2017). It makes features of one class alike, without which x has nothing to select from early in
            training. With ``steps`` = 0, where x stays 0, it is the only loss, and metrics are those of the nearest
            mean: a warm-up without an inner problem.
        backward_steps: largest number of steps of the backward solve of "exact".
        proximal: weight of a proximal term in that solve, see :class:`~equipoise.KKTGradient`.

    Example:
        >>> task = FewShot(class_names=("1", "2", "3", "4", "5"), gradient="exact", steps=30)
        >>> task.logits(model, support, labels, query).shape
        torch.Size([8, 25, 5])
    """

    best_metric = "accuracy"

    def __init__(
        self,
        class_names: tuple[str, ...],
        gradient: str = "detached",
        steps: int = 30,
        tolerance: float = 1e-2,
        step_size: float | str | Sequence[float] = "auto",
        memory: int = 8,
        damping: Sequence[float] = (0.1, 0.4),
        penalty: float = 0.1,
        jacobian: float = 0.0,
        jacobian_from: int = 0,
        prototypes: float = 0.0,
        backward_steps: int = 30,
        proximal: float = 0.0,
    ):
        if not class_names:
            raise ValueError("the data set has no classes: choose another data set, or another task.")
        self.class_names, self.gradient, self.steps, self.tolerance = class_names, gradient, steps, tolerance
        self.penalty, self.jacobian, self.jacobian_from = penalty, jacobian, jacobian_from
        self.prototypes, self.backward_steps, self.proximal = prototypes, backward_steps, proximal
        self.step_size = step_size
        require(self, "gradient", among=GRADIENTS)
        require(self, "steps", at_least=0, whole=True)
        require(self, "backward_steps", at_least=1, whole=True)
        require(self, "jacobian_from", at_least=0, whole=True)
        for name in ("tolerance", "penalty", "jacobian", "prototypes", "proximal"):
            require(self, name, at_least=0)
        if gradient == "unrolled" and not is_number(step_size, above=0):
            raise ValueError(
                f"FewShot.step_size is {step_size!r}; it must be a positive number for the gradient descent of "
                "gradient='unrolled'."
            )
        if gradient == "unrolled" and jacobian:
            raise ValueError("FewShot.jacobian is for joint solves: leave it out with gradient='unrolled'.")
        rule: Any = step_size
        if isinstance(step_size, list | tuple):
            if len(step_size) != 2:
                raise ValueError(
                    f"FewShot.step_size is {step_size!r}; a list must hold two numbers, such as [0.04, 0.01]."
                )
            rule = ConstantStep(step_size[0], later=step_size[1])
        pair = tuple(damping) if isinstance(damping, list) else damping
        self.solver = JointAnderson(memory=memory, damping=pair, step_size=rule)  # type: ignore[arg-type]

    # Inner problem

    def adapt(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Tensor:
        """Return the task vectors (tasks, length) of support images, with the task's outer gradient.

        Args:
            model: model, not wrapped.
            support, labels: support images and their labels.
            steps: number of inner steps; None for the task's.
        """
        return self.adapted(model, support, labels, steps)[0]

    def adapted(
        self, model: Any, support: Tensor, labels: Tensor, steps: int | None = None, penalised: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the task vectors, and the Jacobian penalty at a random iterate if it is asked for."""
        steps = self.steps if steps is None else steps
        x = model.blank(len(support))
        if steps == 0:
            return x, None
        if self.gradient == "unrolled":
            return self.descended(model, support, labels, x, steps), None
        differentiable = torch.is_grad_enabled()
        with torch.set_grad_enabled(differentiable and self.gradient == "exact"):
            features = model.features(support)
            trail = RandomIterate(len(x), self.jacobian_from + 1, steps, x.device) if penalised else None
            optimum = self.optimum(model, features, labels, x, steps, trail)
        if trail is None:
            return optimum.x, None
        with torch.set_grad_enabled(differentiable):
            there = (tuple(part.detach() for part in trail.z), trail.x.detach(), model.features(support))
            return optimum.x, jacobian_penalty(model.cell, *there, probes=PROBES)

    def optimum(
        self, model: Any, features: Tensor, labels: Tensor, x: Tensor, steps: int, trail: RandomIterate | None = None
    ) -> Optimum:
        """Minimise the inner loss by :func:`equipoise.optimize_input`."""
        rule: JointGradient = DetachedGradient()
        if self.gradient == "exact":
            limits = Tolerance(relative=self.tolerance, max_steps=self.backward_steps, patience=None)
            rule = KKTGradient(tolerance=limits, proximal=self.proximal)
        return optimize_input(
            *self.inner(model),
            x,
            model.cell.start(x, features),
            features,
            labels,
            solver=self.solver,
            tolerance=Tolerance(relative=self.tolerance, max_steps=steps),
            gradient=rule,
            on_failure="ignore",  # a solve that ends after ``steps`` is meant to
            callback=trail,
        )

    def inner(self, model: Any) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]:
        """Return f and the cost of the inner problem, functions of (z, x, features, labels)."""

        def f(z: tuple[Tensor, ...], x: Tensor, features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            return model.cell(z, x, features)

        def cost(z: tuple[Tensor, ...], x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
            return task_losses(model.head(z, x), labels) + self.penalty * x.square().mean(dim=1)

        return f, cost

    def descended(self, model: Any, support: Tensor, labels: Tensor, x: Tensor, steps: int) -> Tensor:
        """Return x after gradient descent steps on the inner loss; differentiable if gradients are enabled."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.requires_grad_()
            for _ in range(steps):
                cost = task_losses(model(support, x), labels) + self.penalty * x.square().mean(dim=1)
                (slope,) = torch.autograd.grad(cost.sum(), x, create_graph=differentiable)
                x = x - self.step_size * slope  # type: ignore[operator]
                x = x if differentiable else x.detach().requires_grad_()
        return x if differentiable else x.detach()

    def logits(self, model: nn.Module, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """Return the logits (tasks, images, classes) of query images after learning from support images."""
        return model(query, self.adapt(unwrapped(model), support, labels))

    # Outer problem

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        return tuple(t.to(dtype) / 255 if t.dtype == torch.uint8 else t for t in batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        support, labels, query, answers = self.checked(model, batch)
        if self.warming:
            distances = self.distances(unwrapped(model), batch)
            return self.prototypes * self.prototype_loss(distances, answers), self.nearest(distances.detach(), answers)
        x, stiffness = self.adapted(unwrapped(model), support, labels, penalised=self.jacobian > 0)
        logits = model(query, x)
        loss = task_losses(logits, answers).mean()
        sums = self.sums(logits.detach(), answers)
        if stiffness is not None:
            loss = loss + self.jacobian * stiffness
        if self.prototypes:
            loss = loss + self.prototypes * self.prototype_loss(self.distances(unwrapped(model), batch), answers)
        return loss, sums

    @property
    def warming(self) -> bool:
        """Whether features are trained alone, by the prototype loss."""
        return self.steps == 0 and self.prototypes > 0

    def distances(self, model: Any, batch: Batch) -> Tensor:
        """Return the distances of query images to class means, (tasks, images, tasks, classes), at x = 0."""
        support, labels, query, answers = batch
        ways = len(self.class_names)
        features = model.embedding(torch.cat([support, query], dim=1))
        learned, asked = features.split([support.shape[1], query.shape[1]], dim=1)
        member = functional.one_hot(labels, ways).to(learned)
        means = member.mT @ learned / member.sum(dim=1).clamp(min=1)[:, :, None]
        flat = (asked.flatten(0, 1)[:, None] - means.flatten(0, 1)[None]).square().mean(dim=-1)
        return flat.view(*answers.shape, len(answers), ways)

    def prototype_loss(self, distances: Tensor, answers: Tensor) -> Tensor:
        """Return the mean cross entropy of query images classified by their distances to the means of classes.

        The classes of all tasks of the batch compete: telling 40 apart teaches more than telling 5.
        """
        first = distances.shape[-1] * torch.arange(len(answers), device=answers.device)[:, None]  # class of each task
        return functional.cross_entropy(-SHARPNESS * distances.flatten(2).flatten(0, 1), (answers + first).flatten())

    def nearest(self, distances: Tensor, answers: Tensor) -> Sums:
        """Return the sums of query images classified by the nearest class mean of their own task."""
        own = distances.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        return self.sums(-SHARPNESS * own, answers)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        support, labels, query, answers = self.checked(model, batch)
        if self.warming:
            return self.nearest(self.distances(unwrapped(model), batch), answers)
        x = self.adapt(unwrapped(model), support, labels)
        sums = self.sums(model(query, x), answers)
        return {**sums, "support": accuracies(model(support, x), labels).sum()}

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        accuracy = accuracies(logits, labels)
        return {
            "episodes": torch.tensor(len(labels)),
            "loss": task_losses(logits.double(), labels).sum(),
            "accuracy": accuracy.sum(),
            "squares": accuracy.square().sum(),
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = sums["episodes"].item()
        mean = sums["accuracy"].item() / count
        variance = max(0.0, sums["squares"].item() / count - mean**2) * count / max(1, count - 1)
        metrics = {"accuracy": mean, "loss": sums["loss"].item() / count}
        if "support" in sums:
            metrics["support accuracy"] = sums["support"].item() / count
            metrics[INTERVAL] = 1.96 * (variance / count) ** 0.5
        return metrics

    def checked(self, model: nn.Module, batch: Batch) -> Batch:
        """Return the batch; raise unless the model and the data set are made for episodes."""
        if not all(hasattr(unwrapped(model), name) for name in ("features", "cell", "head", "blank")):
            raise ValueError(
                f"the model {type(unwrapped(model)).__name__} has no task vector; the task few-shot requires one: "
                f"choose the model 'few-shot-mdeq' ({FewShotMDEQ.__name__})."
            )
        episodes = len(batch) == 4 and batch[0].dim() == 5 and batch[2].dim() == 5
        if not episodes or batch[1].shape != batch[0].shape[:2] or batch[3].shape != batch[2].shape[:2]:
            raise ValueError(
                f"the batch has tensors of shapes {[tuple(t.shape) for t in batch]}; few-shot needs support images "
                "(tasks, images, channels, height, width), their labels (tasks, images), query images and their "
                "labels: choose a data set of episodes, such as 'omniglot-episodes'."
            )
        highest = max(int(batch[1].max()), int(batch[3].max()))
        if highest >= len(self.class_names):
            raise ValueError(f"the batch has the label {highest}; the task has {len(self.class_names)} classes.")
        return batch

    # Pictures

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        yield "Accuracy over inner steps", accuracy_figure(*self.curve(model, batches()))
        yield "Episodes", self.episode_figure(model, next(batches()))

    @torch.no_grad()
    def curve(self, model: nn.Module, batches: Iterator[Batch], most: int = DRAWN) -> tuple[list[int], list[Any]]:
        """Return numbers of inner steps, and (accuracy, half its 95% interval) of the query images after each."""
        counts = [steps for steps in STEPS if steps < self.steps] + [self.steps]
        totals: list[Sums] = [{} for _ in counts]
        done = 0
        for batch in batches:
            support, labels, query, answers = (t[: most - done] for t in batch)
            for steps, total in zip(counts, totals, strict=True):
                x = self.adapt(unwrapped(model), support, labels, steps)
                for name, value in self.sums(model(query, x), answers).items():
                    total[name] = total[name] + value if name in total else value
            done += len(support)
            if done >= most:
                break
        measured = [self.metrics({**total, "support": torch.tensor(0.0)}) for total in totals]
        return counts, [(metrics["accuracy"], metrics[INTERVAL]) for metrics in measured]

    @torch.no_grad()
    def episode_figure(self, model: nn.Module, batch: Batch) -> Figure:
        """Draw episodes: support images with their classes, then query images with the answers and their truth."""
        support, labels, query, answers = (t[:SHOWN] for t in batch)
        probabilities, guesses = self.logits(model, support, labels, query).softmax(dim=-1).max(dim=-1)
        ways, entries = len(self.class_names), []
        for task in range(len(support)):
            for image, label in zip(support[task], labels[task], strict=True):
                entries.append((image.float().cpu(), f"learn {self.class_names[int(label)]}"))
            entries += [(torch.ones_like(support[task, 0]).float().cpu(), "")] * (-len(support[task]) % ways)
            order = answers[task].argsort(stable=True)
            asked = order.view(ways, -1)[:, :2].T.flatten() if len(order) % ways == 0 else order[: 2 * ways]
            for i in asked.tolist():
                truth, guess = (self.class_names[int(t[task, i])] for t in (answers, guesses))
                verdict = f"{guess}, right" if truth == guess else f"{guess}, not {truth}"
                caption = f"{verdict} ({probabilities[task, i].item():.0%})"
                entries.append((query[task, i].float().cpu(), caption))
            entries += [(torch.ones_like(support[task, 0]).float().cpu(), "")] * (-len(asked) % ways)
        return image_grid(entries, columns=ways)


def task_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of each task, in single precision at least."""
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.unflatten(0, labels.shape).mean(dim=1)


def accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the share of correct answers of each task."""
    return (logits.argmax(dim=-1) == labels).double().mean(dim=1)


def accuracy_figure(counts: Sequence[int], points: Sequence[tuple[float, float]]) -> Figure:
    """Draw the accuracy of query images over the number of inner steps, with 95% intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    means, halves = zip(*points, strict=True)
    axis.errorbar(range(len(counts)), means, yerr=halves, marker="o", capsize=3)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set(xlabel="inner steps", ylabel="accuracy of query images", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    return figure

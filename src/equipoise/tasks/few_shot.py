"""Few-shot classification: find a task vector from a few labelled images, then classify others.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), appendix B.1. The inner problem is the loss of the support images, minimised over the task vector x; the outer
loss is that of the query images at this x (eq. 29).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.episodes import Classifier, EpisodeTask, task_losses
from equipoise.tasks.random_iterate import RandomIterate
from equipoise.tasks.wrapped import unwrapped
from equipoise.tolerance import Tolerance

GRADIENTS = ("detached", "exact", "unrolled")
SHARPNESS = 10.0  # of the prototype loss, in units of the mean squared distance of features
PROBES = 2  # random vectors that estimate the Jacobian penalty


class FewShot(EpisodeTask):
    """Learn to learn classes from a few images: adapt a task vector x to support images, classify query images.

    Batches and metrics are those of an :class:`~equipoise.tasks.episodes.EpisodeTask`. The model is a
    :class:`~equipoise.models.few_shot.model.FewShotMDEQ`, or one with its ``features``, ``cell``, ``head``, ``blank``
    and ``forward``.

    The inner problem minimises the mean cross entropy of the support images of a task plus ``penalty`` times the mean
    square of x. All its images and their x are one sample of :func:`equipoise.optimize_input`. Query images are then
    solved for with x fixed, by the model's own solver.

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
        super().__init__(class_names, steps)
        self.gradient, self.tolerance = gradient, tolerance
        self.penalty, self.jacobian, self.jacobian_from = penalty, jacobian, jacobian_from
        self.prototypes, self.backward_steps, self.proximal = prototypes, backward_steps, proximal
        self.step_size = step_size
        require(self, "gradient", among=GRADIENTS)
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

    def learn(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Classifier:
        x = self.adapt(model, support, labels, steps)
        return lambda images: model(images, x)

    def logits(self, model: nn.Module, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """Return the logits (tasks, images, classes) of query images after learning from support images."""
        return self.learn(unwrapped(model), support, labels)(query)

    # Outer problem

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
        if not self.warming:
            return super().measure(model, batch)
        batch = self.checked(model, batch)
        return self.nearest(self.distances(unwrapped(model), batch), batch[3])

    def check_model(self, model: nn.Module) -> None:
        if not all(hasattr(model, name) for name in ("features", "cell", "head", "blank")):
            raise ValueError(
                f"the model {type(model).__name__} has no task vector; the task few-shot requires one: choose the "
                f"model 'few-shot-mdeq' ({FewShotMDEQ.__name__}), or the task 'maml', 'reptile' or 'imaml'."
            )

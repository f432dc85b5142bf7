"""Implicit MAML: learn weights near which a regularised optimum on the support images solves a task.

A. Rajeswaran, C. Finn, S. Kakade, S. Levine, "Meta-learning with implicit gradients" (2019), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from equipoise.options import is_number, require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.episodes import Classifier, EpisodeTask, task_losses
from equipoise.tasks.inner_descent import (
    Weights,
    classifier,
    descend,
    mean_loss,
    require_adaptable,
    with_gradients,
)
from equipoise.tasks.wrapped import inside, unwrapped


class IMAML(EpisodeTask):
    """Minimise the loss of query images at w = argmin L(w) + lambda / 2 ||w - weights||^2, L the support loss (eq. 3).

    The inner problem is solved by gradient descent, and the outer gradient of a task is (I + H / lambda)^-1 g, with the
    Hessian H of L and the gradient g of the query loss, both at w (lemma 1), solved for by conjugate gradients. It is
    exact only at the optimum; memory does not grow with the number of inner steps. The published code takes the step of
    the proximal term once, after the inner steps.

    Args:
        class_names: names of the classes of a task, indexed by label.
        steps: number of inner steps, in training and evaluation.
        step_size: step size of the inner steps.
        penalty: lambda.
        backward_steps: number of steps of conjugate gradients; 0 leaves out the inverse (H = 0).
        damping: numbers added to I and to lambda in the outer gradient. Few inner steps end where H is not positive
            definite and the inverse may be huge; the published code has (1, 10), which bounds it.
        transductive: see :class:`~equipoise.tasks.maml.MAML`.

    Example:
        >>> task = IMAML(class_names=("1", "2", "3", "4", "5"), steps=16, penalty=2.0)
    """

    def __init__(
        self,
        class_names: tuple[str, ...],
        steps: int = 16,
        step_size: float = 0.1,
        penalty: float = 2.0,
        backward_steps: int = 5,
        damping: tuple[float, float] = (0.0, 0.0),
        transductive: bool = True,
    ):
        super().__init__(class_names, steps)
        self.step_size, self.penalty, self.backward_steps = step_size, penalty, backward_steps
        self.damping, self.transductive = damping, transductive
        require(self, "step_size", above=0)
        require(self, "penalty", above=0)
        require(self, "backward_steps", at_least=0, whole=True)
        require(self, "transductive", kind=bool)
        pair = isinstance(damping, tuple | list) and len(damping) == 2
        if not pair or not all(is_number(number, at_least=0.0) for number in damping):
            raise ValueError(f"IMAML.damping is {damping!r}; it must be two numbers of at least 0, such as (1, 10).")

    def check_model(self, model: nn.Module) -> None:
        require_adaptable(model, "imaml")

    def learned(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Weights:
        """Return the weights of each task, the solution of its inner problem, without a graph."""
        batches = [(support, labels)] * (self.steps if steps is None else steps)
        with torch.no_grad():
            return descend(model, batches, self.step_size, tasks=len(support), penalty=self.penalty)

    def learn(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Classifier:
        weights = self.learned(model, support, labels, steps)
        return classifier(model, weights, None if self.transductive else support)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        support, labels, query, answers = self.checked(model, batch)
        sums: Sums = {}

        def forward(net: nn.Module) -> Tensor:
            weights = {n: w.requires_grad_() for n, w in self.learned(net, support, labels).items()}
            with torch.enable_grad():
                logits = classifier(net, weights, None if self.transductive else support)(query)
                losses = task_losses(logits, answers)
                slopes = torch.autograd.grad(losses.sum(), list(weights.values()))
            sums.update(self.sums(logits.detach(), answers))
            with torch.no_grad():
                outer = self.outer_gradients(net, weights, dict(zip(weights, slopes, strict=True)), support, labels)
            return with_gradients(losses.mean(), net, {name: slope.mean(dim=0) for name, slope in outer.items()})

        return inside(model, unwrapped(model), forward), sums

    def outer_gradients(
        self, model: nn.Module, weights: Weights, slopes: Weights, support: Tensor, labels: Tensor
    ) -> Weights:
        """Return (I + H / lambda)^-1, damped, applied to ``slopes``, for each task (lemma 1)."""
        gradient = vmap(grad(lambda weights, *batch: mean_loss(model, weights, *batch)), randomness="different")
        fixed = {name: weight.detach() for name, weight in weights.items()}
        pull = vjp(lambda weights: gradient(weights, support, labels), fixed)[1]  # v -> H v, since H is symmetric
        shapes = {name: slope.shape for name, slope in slopes.items()}

        def packed(values: Weights) -> Tensor:
            return torch.cat([values[name].flatten(1) for name in shapes], dim=1)

        def unpacked(rows: Tensor) -> Weights:
            parts = rows.split([shape[1:].numel() for shape in shapes.values()], dim=1)
            return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

        def apply(rows: Tensor) -> Tensor:
            more, harder = self.damping
            return (1 + more) * rows + packed(pull(unpacked(rows))[0]) / (self.penalty + harder)

        return unpacked(conjugate_gradients(apply, packed(slopes), self.backward_steps))


def conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, steps: int) -> Tensor:
    """Solve A x = b for each row b, with symmetric positive definite A, from x = b.

    A row stops at a direction without positive curvature: there, A is not positive definite.

    Args:
        apply: function that applies the A of each row.
        right: rows b.
        steps: number of steps.
    """
    if not steps:
        return right
    x, residual = right, right - apply(right)
    direction, square = residual, residual.square().sum(dim=1, keepdim=True)
    for _ in range(steps):
        image = apply(direction)
        curvature = (direction * image).sum(dim=1, keepdim=True)
        going = (curvature > 0) & (square > 0)
        length = torch.where(going, square / curvature, 0)
        x, residual, before = x + length * direction, residual - length * image, square
        square = torch.where(going, residual.square().sum(dim=1, keepdim=True), 0)  # 0 from then on
        direction = residual + torch.where(before > 0, square / before, 0) * direction
    return x

"""Gradient descent on the weights of a model for many tasks at once, each with weights of its own (torch.func)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from equipoise.tasks.episodes import Classifier

Weights = dict[str, Tensor]  # by name: those of a model, or, with one more dimension first, those of each task
Batches = Sequence[tuple[Tensor, Tensor]]  # of each inner step: images (tasks, images, ...) and labels (tasks, images)
DECAY, EPSILON = 0.999, 1e-8  # of Adam's second moment


def weights_of(model: nn.Module) -> Weights:
    """Return the weights of a model, from which each task starts."""
    return dict(model.named_parameters())


def mean_loss(model: nn.Module, weights: Weights, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the images of one task, in single precision at least."""
    logits = functional_call(model, weights, (images,))
    return functional.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels)


def descend(
    model: nn.Module,
    batches: Batches,
    step_size: float,
    *,
    tasks: int,
    first_order: bool = False,
    penalty: float = 0.0,
    adam: bool = False,
) -> Weights:
    """Return the weights of each task after a step on each batch, from those of the model.

    With gradients enabled, they are differentiable in the weights of the model.

    Args:
        model: classifier of images.
        batches: images and labels of each step.
        step_size: step size, or learning rate of Adam.
        tasks: number of tasks.
        first_order: whether the gradients of the steps are held constant when the result is differentiated.
        penalty: lambda of the proximal term lambda / 2 ||weights - weights of the model||^2.
        adam: Adam without momentum (beta 1 = 0), from moments of 0, instead of gradient descent.
    """
    start = weights_of(model)

    def learn(_: Tensor, batches: Batches) -> Weights:
        weights, squares = start, {name: torch.zeros_like(value) for name, value in start.items()}
        for step, (images, labels) in enumerate(batches, 1):
            slopes = grad(lambda weights, *batch: mean_loss(model, weights, *batch))(weights, images, labels)
            if first_order:
                slopes = {name: slope.detach() for name, slope in slopes.items()}
            if penalty:
                slopes = {name: slope + penalty * (weights[name] - start[name]) for name, slope in slopes.items()}
            if adam:
                squares = {n: DECAY * squares[n] + (1 - DECAY) * slope.square() for n, slope in slopes.items()}
                slopes = {
                    name: slope / ((squares[name] / (1 - DECAY**step)).sqrt() + EPSILON)
                    for name, slope in slopes.items()
                }
            weights = {name: value - step_size * slopes[name] for name, value in weights.items()}
        return weights

    rows = torch.arange(tasks, device=next(iter(start.values())).device)  # makes a result of no step one of every task
    return vmap(learn, randomness="different")(rows, tuple(batches))


def classifier(model: nn.Module, weights: Weights, beside: Tensor | None = None) -> Classifier:
    """Return the model with the weights of each task: maps images (tasks, images, ...) to logits.

    Args:
        model: classifier of images.
        weights: weights of each task.
        beside: images (tasks, images, ...), beside which every image is classified alone; None to classify all images
            of a task together. It matters for layers that normalise an image by its batch.
    """

    def together(weights: Weights, images: Tensor) -> Tensor:
        return functional_call(model, weights, (images,))

    def alone(weights: Weights, known: Tensor, image: Tensor) -> Tensor:
        return functional_call(model, weights, (torch.cat([known, image[None]]),))[-1]

    if beside is None:
        return lambda images: vmap(together, randomness="different")(weights, images)
    every = vmap(vmap(alone, in_dims=(None, None, 0), randomness="different"), randomness="different")
    return lambda images: every(weights, beside, images)


def with_gradients(value: Tensor, model: nn.Module, gradients: Weights) -> Tensor:
    """Return ``value``, whose gradient with respect to the weights of the model is ``gradients``."""
    pull = sum((weight * gradients[name].detach()).sum() for name, weight in model.named_parameters())
    return value.detach() + (pull - pull.detach())  # type: ignore[union-attr]


def require_adaptable(model: nn.Module, task: str) -> None:
    """Raise unless the weights of a model can be adapted to each task alone."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase | nn.LayerNorm):
            raise ValueError(
                f"the model {type(model).__name__} has a {type(module).__name__} ({name}); the task {task} cannot use "
                "it: torch.func.vmap cannot update running statistics, and second derivatives of torch's batch, "
                "instance and layer norms under vmap are wrong. Choose the model 'conv4', or GroupNorm, or the "
                "BatchStatisticsNorm of equipoise.models.few_shot.conv4."
            )
    if hasattr(model, "blank"):
        raise ValueError(
            f"the model {type(model).__name__} adapts a task vector, and the task {task} adapts weights: choose the "
            "model 'conv4', or the task 'few-shot'."
        )

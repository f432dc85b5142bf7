"""Robustness: classification of images changed by an adversary within a given distance.

Projected gradient descent: A. Madry, A. Makelov, L. Schmidt, D. Tsipras, A. Vladu, "Towards deep learning models
resistant to adversarial attacks" (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equipoise.registry import Registry, call
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.classification import Classification

ATTACKS = Registry(
    "attack",
    {"pgd": "equipoise.tasks.robustness:pgd", "foolbox": "equipoise.tasks.robustness:foolbox_pgd"},
)
NORMS = ("linf", "l2")


def pgd(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    norm: str = "linf",
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
) -> Tensor:
    """Images within ``radius`` of the given ones, in [0, 1], that raise the cross entropy: the worst of each found.

    Args:
        model: images in [0, 1] to logits; its parameters get no gradient.
        images, labels: a batch.
        radius: how far an image may be moved, in the norm.
        norm: "linf" (the largest change of a pixel) or "l2" (Euclidean length of the change).
        steps: of gradient ascent.
        step_size: of each; None is 2.5 radius / steps, which can reach every point of the ball.
        restarts: attacks per image, from different random points; the one with the largest loss counts.
        random_start: from a random point of the ball instead of the image itself.

    Example:
        >>> attacked = pgd(model, images, labels, radius=8 / 255, steps=20)
    """
    check_attack(radius, norm, steps, restarts)
    size = 2.5 * radius / steps if step_size is None else step_size
    worst, largest = images.clone(), torch.full((len(images),), -torch.inf, dtype=images.dtype, device=images.device)

    def keep_worst(candidate: Tensor, loss: Tensor) -> None:
        higher = loss > largest  # a loss that is not a number never counts as an attack
        largest.copy_(torch.where(higher, loss, largest))
        worst.copy_(torch.where(higher[:, None, None, None], candidate, worst))

    for _ in range(restarts):
        x = (
            within(images, images + random_change(images, radius, norm), radius, norm)
            if random_start
            else images.clone()
        )
        for _ in range(steps):
            loss, gradient = loss_and_gradient(model, x, labels)
            keep_worst(x, loss)
            direction = gradient.sign() if norm == "linf" else gradient / lengths(gradient).clamp(min=1e-12)
            x = within(images, x + size * direction, radius, norm)
        with torch.no_grad():
            keep_worst(x, functional.cross_entropy(model(x), labels, reduction="none"))
    return worst


def loss_and_gradient(model: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy of each image, and its gradient in the image."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        loss = functional.cross_entropy(model(x), labels, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), gradient


def within(center: Tensor, x: Tensor, radius: float, norm: str) -> Tensor:
    """The nearest point to x in the ball, cut to [0, 1]: center is in there, so cutting never leaves the ball."""
    change = x - center
    change = change.clamp(-radius, radius) if norm == "linf" else change * (radius / lengths(change).clamp(min=radius))
    return (center + change).clamp(0, 1)


def random_change(images: Tensor, radius: float, norm: str) -> Tensor:
    """Uniform in the ball: for l2, a random direction times a length distributed as U^(1/d)."""
    if norm == "linf":
        return torch.empty_like(images).uniform_(-radius, radius)
    direction = torch.randn_like(images)
    share = torch.rand(len(images), 1, 1, 1, device=images.device, dtype=images.dtype) ** (1 / images[0].numel())
    return radius * share * direction / lengths(direction)


def lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)


def check_attack(radius: float, norm: str, steps: int, restarts: int) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; allowed: {', '.join(map(repr, NORMS))}.")
    if not radius > 0:
        raise ValueError(
            f"radius is {radius!r}; it must be above 0, for images in [0, 1] (8/255 is common for 'linf')."
        )
    if steps < 1 or restarts < 1:
        raise ValueError(f"steps is {steps} and restarts is {restarts}; both must be at least 1.")


def foolbox_pgd(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    norm: str = "linf",
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
) -> Tensor:
    """The same attack by foolbox (the extra ``attacks``): an independent check of :func:`pgd`."""
    try:
        import foolbox
        from foolbox.models.pytorch import PyTorchModel
    except ImportError as error:
        raise ImportError(
            "the attack 'foolbox' needs the package foolbox: pip install 'equipoise[attacks]'."
        ) from error
    check_attack(radius, norm, steps, restarts)
    module = model if isinstance(model, nn.Module) else None
    if module is None:
        raise TypeError("the attack 'foolbox' needs a model that is a torch.nn.Module.")
    kind = foolbox.attacks.LinfPGD if norm == "linf" else foolbox.attacks.L2PGD
    size = 2.5 * radius / steps if step_size is None else step_size
    attack: Any = kind(abs_stepsize=size, steps=steps, random_start=random_start)
    if restarts > 1:
        attack = attack.repeat(restarts)
    with torch.enable_grad():
        wrapped = PyTorchModel(module.eval(), bounds=(0, 1), device=images.device)
        _, attacked, _ = attack(wrapped, images, labels, epsilons=radius)
    return attacked.detach()


class Robustness(Classification):
    """Classification under attack: reports accuracy without and with one, and can train on attacked images.

    Args:
        class_names, shift, flip, label_smoothing, top: as in classification.
        radius, norm, steps, restarts: of the attack that is evaluated.
        attack: "pgd", "foolbox", or your own as "my_module:my_attack" with the same parameters.
        train_steps: of the attack on training images; 0 trains on the images as they are.
    """

    best_metric = "robust accuracy"

    def __init__(
        self,
        class_names: tuple[str, ...],
        shift: int = 0,
        flip: bool = False,
        label_smoothing: float = 0.0,
        top: int = 1,
        radius: float = 8 / 255,
        norm: str = "linf",
        steps: int = 20,
        restarts: int = 1,
        attack: str = "pgd",
        train_steps: int = 0,
    ):
        super().__init__(class_names, shift, flip, label_smoothing, top)
        check_attack(radius, norm, steps, restarts)
        if train_steps < 0:
            raise ValueError(f"train_steps is {train_steps}; it must be 0 (no attack while training) or more.")
        self.attack = ATTACKS[attack]
        self.options = {"radius": radius, "norm": norm}
        self.steps, self.restarts, self.train_steps = steps, restarts, train_steps

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, labels = batch
        if self.train_steps:
            training = model.training
            model.eval()  # the attack must see one fixed function: no dropout, no running statistics
            # Not through the wrapper that averages gradients: it would wait for gradients of the weights.
            bare = model.module if isinstance(model, DistributedDataParallel) else model
            images = pgd(bare, images, labels, steps=self.train_steps, **self.options)
            model.train(training)
        return super().loss(model, (images, labels))

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = batch
        sums = super().measure(model, batch)
        options = {**self.options, "steps": self.steps, "restarts": self.restarts}
        attacked = call(self.attack, options, {"model": model, "images": images, "labels": labels}, "the attack")
        # An image that the model gets wrong as it is counts as broken: no attack was needed.
        right = (model(images).argmax(1) == labels) & (model(attacked).argmax(1) == labels)
        sums["robust"] = right.sum()
        return sums

    def metrics(self, sums: Sums) -> dict[str, float]:
        metrics = super().metrics(sums)
        if "robust" in sums:
            metrics["robust accuracy"] = sums["robust"].item() / sums["samples"].item()
        return metrics

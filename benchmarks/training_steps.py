"""Training steps of every model at a chosen size, with a chosen number of evaluations: tolerance 0, no early stop.

A step is the loss of a batch of random images, its gradient, and one step of SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import equipoise as eq
from equipoise.tasks.few_shot import FewShot
from equipoise.tasks.generation import Generation

WAYS = 5  # classes of a few-shot task, one support and one query image each

Loss = Callable[[nn.Module], Tensor]


@dataclass
class Step:
    """A model with the loss of one batch; calling it takes a training step."""

    model: nn.Module
    loss: Loss

    def __post_init__(self) -> None:
        self.net: nn.Module = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes the optimizer's state, which does not belong to the memory of a step

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.net).backward()
        self.optimizer.step()

    def share(self) -> Step:
        """Average gradients over processes from now on."""
        self.net = DistributedDataParallel(self.model)
        return self

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def limited(evaluations: int) -> eq.Tolerance:
    """All steps are taken: a tolerance of zero is never met."""
    return eq.Tolerance(relative=0.0, max_steps=evaluations, patience=None)


def fix_evaluations(model: nn.Module, forward: int, backward: int, memory: int | None = None) -> None:
    """Let every equilibrium of a model take these steps; ``memory`` is that of its solver."""
    for layer in (module for module in model.modules() if isinstance(module, eq.Equilibrium)):
        layer.tolerance, layer.on_failure = limited(forward), "ignore"
        layer.gradient = eq.ImplicitGradient(tolerance=limited(backward))
        if memory is not None:
            layer.solver = replace(layer.solver, memory=memory)  # type: ignore[type-var]


def classification(
    name: str, shape: tuple[int, int, int], batch: int, evaluations: tuple[int, int], **options: Any
) -> Step:
    """A step of a model of `eq.create_model` with the cross entropy of random images, or of their pixels."""
    memory = options.pop("memory", None)
    torch.manual_seed(0)
    order = torch.contiguous_format if name == "mondeq" else torch.channels_last
    model = eq.create_model(name, shape=shape, classes=10, **options).to(memory_format=order)  # type: ignore[call-overload]
    fix_evaluations(model, *evaluations, memory)
    for module in model.modules():
        if isinstance(module, eq.VariationalDropout):
            module.p = 0.0
    images = torch.rand(batch, *shape).contiguous(memory_format=order)
    with torch.no_grad():
        labels = torch.randint(10, model.eval()(images).amax(dim=1).shape)  # (batch,) or (batch, h, w)
    model.train()
    return Step(model, lambda net: F.cross_entropy(net(images), labels))


def generator(channels: tuple[int, ...], side: int, batch: int, evaluations: int) -> Step:
    """A step of JIIO's generator: joint steps, a solve and an adjoint solve of as many evaluations each, a penalty."""
    torch.manual_seed(0)
    model = eq.create_model("generator", shape=(3, side, side), size="published", channels=channels)
    fix_evaluations(model, evaluations, evaluations)
    task = Generation(steps=evaluations, penalty_from=1)
    images = 2 * torch.rand(batch, 3, side, side) - 1
    return Step(model, lambda net: task.loss(net, (images,))[0])


def few_shot(channels: tuple[int, ...], side: int, tasks: int, evaluations: int) -> Step:
    """A step of JIIO's few-shot model: joint steps on support images, a solve and an adjoint solve of query images."""
    torch.manual_seed(0)
    model = eq.create_model("few-shot-mdeq", shape=(1, side, side), classes=WAYS, size="omniglot", channels=channels)
    fix_evaluations(model, evaluations, evaluations)
    task = FewShot(tuple("12345"), steps=evaluations, tolerance=1e-9, jacobian=0.1)
    support, query = torch.rand(2, tasks, WAYS, 1, side, side)
    labels = torch.arange(WAYS).repeat(tasks, 1)
    return Step(model, lambda net: task.loss(net, (support, labels, query, labels))[0])


def pixels(side: int, halvings: int = 0) -> int:
    return prod([side >> halvings] * 2)

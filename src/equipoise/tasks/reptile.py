"""Reptile: move the weights towards those that training on each task leads to.

A. Nichol, J. Achiam, J. Schulman, "On first-order meta-learning algorithms" (2018), algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.episodes import Classifier, EpisodeTask, task_losses
from equipoise.tasks.inner_descent import (
    Batches,
    classifier,
    descend,
    require_adaptable,
    weights_of,
    with_gradients,
)
from equipoise.tasks.wrapped import inside, unwrapped


class Reptile(EpisodeTask):
    """Train on each task from the same weights, and move them towards the mean of the weights that this leads to.

    In training, support and query images are both learned from, in random minibatches. The gradient of the loss is the
    weights minus their mean over tasks after the inner steps, so that the optimizer "sgd" with learning rate e takes
    the published step, weights + e (mean - weights). Inner steps are those of Adam without momentum, from moments of 0
    for each task; the published code keeps its moments from task to task. The accuracy in training is that of images
    that were learned from.

    Args:
        class_names: names of the classes of a task, indexed by label.
        steps: number of inner steps in evaluation, each on all support images.
        train_steps: number of inner steps in training.
        minibatch: number of images of an inner step in training.
        step_size: learning rate of the inner steps.
        adam: whether inner steps are those of Adam, or of gradient descent.
        transductive: see :class:`~equipoise.tasks.maml.MAML`.

    Example:
        >>> task = Reptile(class_names=("1", "2", "3", "4", "5"), minibatch=25, train_steps=3)
    """

    def __init__(
        self,
        class_names: tuple[str, ...],
        steps: int = 5,
        train_steps: int = 3,
        minibatch: int = 25,
        step_size: float = 1e-3,
        adam: bool = True,
        transductive: bool = True,
    ):
        super().__init__(class_names, steps)
        self.train_steps, self.minibatch, self.step_size = train_steps, minibatch, step_size
        self.adam, self.transductive = adam, transductive
        require(self, "train_steps", at_least=1, whole=True)
        require(self, "minibatch", at_least=1, whole=True)
        require(self, "step_size", above=0)
        require(self, "adam", kind=bool)
        require(self, "transductive", kind=bool)

    def check_model(self, model: nn.Module) -> None:
        require_adaptable(model, "reptile")

    def learn(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Classifier:
        batches = [(support, labels)] * (self.steps if steps is None else steps)
        weights = descend(model, batches, self.step_size, tasks=len(support), adam=self.adam)
        return classifier(model, weights, None if self.transductive else support)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        support, labels, query, answers = self.checked(model, batch)
        images, truth = torch.cat([support, query], dim=1), torch.cat([labels, answers], dim=1)
        batches, sums = self.minibatches(images, truth), {}

        def forward(net: nn.Module) -> Tensor:
            with torch.no_grad():
                weights = descend(net, batches, self.step_size, tasks=len(images), adam=self.adam)
                logits = classifier(net, weights)(images)
                sums.update(self.sums(logits, truth))
                towards = {name: weight - weights[name].mean(dim=0) for name, weight in weights_of(net).items()}
            return with_gradients(task_losses(logits, truth).mean(), net, towards)

        return inside(model, unwrapped(model), forward), sums

    def minibatches(self, images: Tensor, labels: Tensor) -> Batches:
        """Return the images and labels of each inner step: every task is shuffled again once its images are used up."""
        tasks, count = labels.shape
        wanted = self.train_steps * self.minibatch
        turns = [torch.rand(tasks, count, device=labels.device).argsort(dim=1) for _ in range(-(-wanted // count))]
        rows = torch.cat(turns, dim=1)[:, :wanted]
        task = torch.arange(tasks, device=labels.device)[:, None]
        return [(images[task, part], labels[task, part]) for part in rows.split(self.minibatch, dim=1)]

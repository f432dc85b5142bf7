"""MAML: learn weights from which a few gradient steps on the support images learn a task.

C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017), algorithm 2.
"""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.episodes import Classifier, EpisodeTask, task_losses
from equipoise.tasks.inner_descent import classifier, descend, require_adaptable
from equipoise.tasks.wrapped import inside, unwrapped


class MAML(EpisodeTask):
    """Minimise the loss of query images after gradient descent on the support images, from the weights of the model.

    Args:
        class_names: names of the classes of a task, indexed by label.
        steps: number of inner steps in evaluation.
        train_steps: number of inner steps in training.
        step_size: step size of the inner steps.
        first_order: whether inner gradients are held constant in the outer gradient (section 5.2), which is cheaper.
        transductive: whether the query images of a task are classified together, as published: a model that normalises
            them by their batch then learns from all of them about each. Otherwise each is classified beside the support
            images alone.

    Example:
        >>> task = MAML(class_names=("1", "2", "3", "4", "5"))
        >>> classify = task.learn(eq.create_model("conv4", shape=(1, 28, 28), classes=5), support, labels)
        >>> classify(query).shape
        torch.Size([8, 25, 5])
    """

    def __init__(
        self,
        class_names: tuple[str, ...],
        steps: int = 3,
        train_steps: int = 1,
        step_size: float = 0.4,
        first_order: bool = False,
        transductive: bool = True,
    ):
        super().__init__(class_names, steps)
        self.train_steps, self.step_size = train_steps, step_size
        self.first_order, self.transductive = first_order, transductive
        require(self, "train_steps", at_least=1, whole=True)
        require(self, "step_size", above=0)
        require(self, "first_order", kind=bool)
        require(self, "transductive", kind=bool)

    def check_model(self, model: nn.Module) -> None:
        require_adaptable(model, "maml")

    def learn(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Classifier:
        batches = [(support, labels)] * (self.steps if steps is None else steps)
        weights = descend(model, batches, self.step_size, tasks=len(support), first_order=self.first_order)
        return classifier(model, weights, None if self.transductive else support)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        support, labels, query, answers = self.checked(model, batch)
        sums: Sums = {}

        def forward(net: nn.Module) -> Tensor:
            logits = self.learn(net, support, labels, self.train_steps)(query)
            sums.update(self.sums(logits.detach(), answers))
            return task_losses(logits, answers).mean()

        return inside(model, unwrapped(model), forward), sums

"""Classification with heritage and diversity in the loss instead of in the equilibrium.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), section 3.2: figure 3c
compares it with coupling the branches inside the objective.
"""

from typing import Any

from torch import Tensor, nn

from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Images, Ring, heritage
from equipoise.models.parts.keyword_options import accepts, positional_of
from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.classification import LabelTask
from equipoise.tasks.wrapped import unwrapped


class AugmentedClassification(LabelTask):
    """Cross entropy - gamma sum_i (H(z_i, z_i+1) - lambda D(z_i, z_i+1)), per sample; for models with branches.

    The paper prints + gamma, with which minimising the loss would make neighbours dissimilar.

    Args:
        class_names, shift, flip, label_smoothing, top: see :class:`~equipoise.tasks.classification.LabelTask`.
        gamma: weight of the added terms. Keep it small: they grow with the square of z and have no lower bound.
        diversity: lambda.
    """

    @accepts(*positional_of(LabelTask))
    def __init__(self, *labels: Any, gamma: float = 1e-6, diversity: float = 0.01, **options: Any):
        super().__init__(*labels, **options)
        self.gamma, self.diversity = gamma, diversity
        require(self, "gamma", at_least=0)
        require(self, "diversity", at_least=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        inner: Any = unwrapped(model)
        cell = getattr(getattr(inner, "equilibrium", None), "f", None)
        if not isinstance(cell, Branches) or len(cell.sizes) < 2:
            raise ValueError(
                f"the task 'augmented-classification' needs a model with several branches (popteq, mopteq), not a "
                f"{type(inner).__name__}."
            )
        equilibria: list[Images] = []
        hook = inner.equilibrium.register_forward_hook(lambda module, inputs, z: equilibria.append(z))
        try:
            loss, sums = super().loss(model, batch)  # of the wrapped model, which averages gradients
        finally:
            hook.remove()
        (z,) = equilibria
        gain = heritage(z) - self.diversity * Ring().total_diversity(z)
        return loss - self.gamma * gain.mean(), sums

"""Classification with heritage and diversity in the loss instead of in the equilibrium.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), section 3.2, figure 3c:
what a coupling of the branches inside the objective is compared with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Images, Ring, heritage
from equipoise.options import require
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.classification import Classification


class AugmentedClassification(Classification):
    """Cross entropy - gamma sum_i (H(z_i, z_i+1) - lambda D(z_i, z_i+1)), per sample; for models with branches.

    The paper prints + gamma, by which a loss that is minimised would make neighbours unlike each other.

    Args:
        class_names, shift, flip, label_smoothing, top: as in classification.
        gamma: weight of the added terms. Small: they grow with the square of z and have no lower bound.
        diversity: lambda.
    """

    def __init__(
        self,
        class_names: tuple[str, ...],
        shift: int = 0,
        flip: bool = False,
        label_smoothing: float = 0.0,
        top: int = 1,
        gamma: float = 1e-6,
        diversity: float = 0.01,
    ):
        super().__init__(class_names, shift, flip, label_smoothing, top)
        self.gamma, self.diversity = gamma, diversity
        require(self, "gamma", at_least=0)
        require(self, "diversity", at_least=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, labels = batch
        bare: Any = model.module if isinstance(model, DistributedDataParallel) else model
        cell = getattr(getattr(bare, "equilibrium", None), "f", None)
        if not isinstance(cell, Branches) or len(cell.sizes) < 2:
            raise ValueError(
                f"the task 'augmented-classification' needs a model with several branches (popteq, mopteq), not a "
                f"{type(bare).__name__}."
            )
        found: list[Images] = []
        hook = bare.equilibrium.register_forward_hook(lambda module, given, z: found.append(z))
        try:
            logits = model(images)  # as a whole: a wrapper that averages gradients has to see it
        finally:
            hook.remove()
        (z,) = found
        gain = heritage(z) - self.diversity * Ring().total_diversity(z)
        return self.cross_entropy(logits, labels) - self.gamma * gain.mean(), self.sums(logits.detach(), labels)

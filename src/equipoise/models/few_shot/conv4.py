"""The four-layer convolutional classifier of the few-shot literature, for learners that adapt its weights.

C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017), section 5.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.models.parts.images import MEAN, STD, ImageClassifier
from equipoise.options import require


class BatchStatisticsNorm(nn.Module):
    """BatchNorm of images without running statistics, in elementary operations.

    torch.func.vmap differentiates torch's own batch, instance and layer norms correctly once, but not twice: gradients
    through a gradient are silently wrong (pytorch/functorch issue 534; torch 2.13).
    """

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, images: Tensor) -> Tensor:
        variance, mean = torch.var_mean(images, dim=(0, 2, 3), keepdim=True, correction=0)
        scale = self.weight[:, None, None] * (variance + self.eps).rsqrt()
        return images * scale + (self.bias[:, None, None] - mean * scale)


class Conv4(ImageClassifier):
    """3x3 convolutions of stride 2, each with BatchNorm and ReLU, and a linear layer: maps images in [0, 1] to logits.

    BatchNorm has no running statistics: images are always normalised by the batch that they are in, as published. The
    logits of an image therefore depend on its batch, even in evaluation.

    Args:
        shape, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        classes: number of classes of a task.
        filters: number of channels of every convolution.
        layers: number of convolutions.
        pooled: whether the linear layer reads the means of the channels (MAML), or all their pixels (Reptile, iMAML).

    Example:
        >>> Conv4(shape=(1, 28, 28), classes=5)(torch.rand(25, 1, 28, 28)).shape
        torch.Size([25, 5])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        filters: int = 64,
        layers: int = 4,
        pooled: bool = True,
    ):
        super().__init__(shape, classes, mean, std)
        self.filters, self.layers, self.pooled = filters, layers, pooled
        require(self, "filters", at_least=1, whole=True)
        require(self, "layers", at_least=1, whole=True)
        require(self, "pooled", kind=bool)
        parts: list[nn.Module] = []
        channels, (height, width) = shape[0], shape[1:]
        for _ in range(layers):
            parts += [nn.Conv2d(channels, filters, 3, stride=2, padding=1)]
            parts += [BatchStatisticsNorm(filters), nn.ReLU()]
            channels, height, width = filters, (height + 1) // 2, (width + 1) // 2
        self.convolutions = nn.Sequential(*parts)
        self.classify = nn.Linear(filters if pooled else filters * height * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        features = self.convolutions(self.normalized(images))
        return self.classify(features.mean(dim=(2, 3)) if self.pooled else features.flatten(1))

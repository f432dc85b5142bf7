"""Neural ODE classifiers, also augmented: an image flows along a learned vector field, and a linear map reads it.

R. T. Q. Chen et al., "Neural ordinary differential equations" (2018); E. Dupont, A. Doucet, Y. W. Teh, "Augmented
neural ODEs" (2019), whose image models these are: no convolution before the flow, which would do most of the work.

Sizes of 84K and 172K are those of appendix F.2.2 of the latter: 84,395 and 84,816 parameters on MNIST, 172,358 and
171,799 on CIFAR-10. These counts are those of a field without time, while appendix F.1.2 and the authors' code append
the time to the input of every convolution (``time=True``), which makes 85,316, 85,462, 173,611 and 172,452. The sizes
of 1M, whose filters no paper states, have the same architecture with more filters.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.baselines.integrate import ODESolver, integrate
from equipoise.models.parts.images import MEAN, STD, ImageClassifier
from equipoise.models.parts.keyword_options import accepts, numbers_of, options_of, sized
from equipoise.options import options, require


@options
class FieldSize:
    """The numbers that make a vector field.

    Args:
        filters: channels of the two hidden layers.
        augment: number of channels of zeros that are appended to the image before the flow; 0 for none.
        time: whether every convolution has the time as one more input channel.
    """

    filters: int
    augment: int = 0
    time: bool = False

    def __post_init__(self) -> None:
        require(self, "filters", at_least=1, whole=True)
        require(self, "augment", at_least=0, whole=True)
        require(self, "time", kind=bool)


SIZES = {
    "node-84k": FieldSize(92),
    "anode-84k": FieldSize(64, augment=5),
    "node-172k": FieldSize(125),
    "anode-172k": FieldSize(64, augment=10),
    "node-1m": FieldSize(328),
    "anode-1m": FieldSize(309, augment=10),
}


class VectorField(nn.Module):
    """dz/dt: 1x1, 3x3 and 1x1 convolutions with ReLU between them."""

    def __init__(self, channels: int, filters: int, time: bool):
        super().__init__()
        self.time, more = time, int(time)
        self.conv1 = nn.Conv2d(channels + more, filters, 1)
        self.conv2 = nn.Conv2d(filters + more, filters, 3, padding=1)
        self.conv3 = nn.Conv2d(filters + more, channels, 1)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        z = torch.relu(self.conv1(self.with_time(t, z)))
        z = torch.relu(self.conv2(self.with_time(t, z)))
        return self.conv3(self.with_time(t, z))

    def with_time(self, t: Tensor, z: Tensor) -> Tensor:
        """Return z with t as its first channel, if the field depends on the time."""
        if not self.time:
            return z
        return torch.cat([t.to(z.dtype).expand(len(z), 1, *z.shape[2:]), z], dim=1)


class NeuralODE(ImageClassifier):
    """Map images in [0, 1] to logits: the image, with channels of zeros, flows from t = 0 to 1; a linear map reads it.

    Its evaluations of the vector field are counted as those of a solve: :func:`equipoise.watch_solves` collects them.

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        size: key of ``SIZES``.
        options: numbers that replace those of the size, see :class:`FieldSize`, and options of
            :class:`~equipoise.models.baselines.integrate.ODESolver`.

    Example:
        >>> model = NeuralODE(shape=(1, 28, 28), classes=10, size="anode-84k", adjoint=False)
        >>> sum(p.numel() for p in model.parameters())
        84816
    """

    one_shape = "its head reads every pixel"

    @accepts(*numbers_of(FieldSize), *options_of(ODESolver))
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "node-84k",
        **options: Any,
    ):
        super().__init__(shape, classes, mean, std)
        self.size = sized(SIZES, size, "a Neural ODE", options)
        self.solver = ODESolver(**options)
        channels = shape[0] + self.size.augment
        self.field = VectorField(channels, self.size.filters, self.size.time)
        self.head = nn.Linear(channels * math.prod(shape[1:]), classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the state at t = 1."""
        x = self.normalized(images)
        if self.size.augment:
            x = torch.cat([x, x.new_zeros(len(x), self.size.augment, *x.shape[2:])], dim=1)
        return integrate(self.field, x, self.solver).value

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))

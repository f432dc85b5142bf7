"""A small plain classifier of 32x32 photographs, whose 64 pooled features compare sets of images."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import interpolate

from equipoise.models.parts.images import MEAN, STD, Normalize, as_rgb

SIDE = 32


class SmallClassifier(nn.Module):
    """Four 3x3 convolutions, each with BatchNorm and ReLU, the first three also with a 2x2 maximum; a linear layer.

    Args:
        classes: number of classes.
        widths: channels of the four convolutions; the last is the number of features.
        mean, std: mean and standard deviation of the training images per channel.

    Example:
        >>> SmallClassifier().features(torch.rand(8, 1, 64, 64)).shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        classes: int = 10,
        widths: Sequence[int] = (24, 48, 56, 64),
        mean: Sequence[float] = MEAN * 3,
        std: Sequence[float] = STD * 3,
    ):
        super().__init__()
        self.normalize = Normalize(mean, std)
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(zip((3, *widths), widths, strict=False)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False)]
            layers += [nn.MaxPool2d(2)] if number < len(widths) - 1 else []  # before the norm, which it makes cheaper
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.convolutions = nn.Sequential(*layers)
        self.linear = nn.Linear(widths[-1], classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the features of images in [0, 1], (batch, 64): means over pixels of the last convolution's output.

        Images of another size are resized to 32x32 (bilinear, antialiased); the channel of gray images is repeated.
        """
        images = as_rgb(images)
        if images.shape[2:] != (SIDE, SIDE):
            images = interpolate(images, (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True)
        return self.convolutions(self.normalize(images)).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.features(images))

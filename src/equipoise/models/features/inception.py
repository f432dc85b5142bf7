"""The Inception network whose features define the Fréchet inception distance (FID).

C. Szegedy et al., "Rethinking the Inception architecture for computer vision" (2016), with the weights of TensorFlow's
model of 2015-12-05 that M. Heusel et al. (2017) chose. It departs from the paper, and from torchvision's network, in
two points that the weights require: averages at the border leave out the padding, and the last block has a maximum
instead of an average.

Parts are named as in torchvision and pytorch-fid, so that the published state dict fits.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, max_pool2d, relu

from equipoise.models.parts.images import as_rgb

SIDE = 299
FEATURES = 2048
CLASSES = 1008
Kernel = tuple[int, int]
Step = tuple[int, tuple[Kernel, ...]]  # output channels, and kernels: of two, both see the same input
Plan = dict[str, tuple[Step, ...]]  # the convolutions of each branch of a block, one after the other
POINT, THREE, FIVE = ((1, 1),), ((3, 3),), ((5, 5),)
WIDE, HIGH, FORK = ((1, 7),), ((7, 1),), ((1, 3), (3, 1))


class Convolution(nn.Module):
    """A convolution without bias, BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, pad: bool = True):
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if pad else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """A block: branches of convolutions and a pooling side by side, whose outputs are concatenated.

    Args:
        inputs: number of input channels.
        plan: branches by name; ``branch_pool`` follows the pooling.
        pool: "average" or "maximum".
        stride: 2 halves the image: the pooling and the last convolution of each branch have this stride, unpadded.
    """

    def __init__(self, inputs: int, plan: Plan, pool: str = "average", stride: int = 1):
        super().__init__()
        self.pool, self.stride = pool, stride
        self.branches: dict[str, list[list[str]]] = {}  # names of the convolutions at each step
        for branch, steps in plan.items():
            channels, self.branches[branch] = inputs, []
            for number, (outputs, kernels) in enumerate(steps, 1):
                base = f"{branch}_{number}" if len(steps) > 1 else branch
                names = [f"{base}{letter}" for letter in "ab"] if len(kernels) > 1 else [base]
                halve = stride == 2 and number == len(steps)
                for name, kernel in zip(names, kernels, strict=True):
                    self.add_module(name, Convolution(channels, outputs, kernel, stride if halve else 1, not halve))
                self.branches[branch].append(names)
                channels = outputs

    def pooled(self, x: Tensor) -> Tensor:
        if self.stride == 2:
            return max_pool2d(x, 3, 2)
        if self.pool == "maximum":
            return max_pool2d(x, 3, 1, 1)
        return avg_pool2d(x, 3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for branch, steps in self.branches.items():
            y = self.pooled(x) if branch == "branch_pool" else x
            for names in steps:
                y = torch.cat([self.get_submodule(name)(y) for name in names], dim=1)
            outputs.append(y)
        if "branch_pool" not in self.branches:
            outputs.append(self.pooled(x))
        return torch.cat(outputs, dim=1)


def block_35(pool: int) -> Plan:
    """Return the branches of a block of 35x35 pixels."""
    return {
        "branch1x1": ((64, POINT),),
        "branch5x5": ((48, POINT), (64, FIVE)),
        "branch3x3dbl": ((64, POINT), (96, THREE), (96, THREE)),
        "branch_pool": ((pool, POINT),),
    }


def block_17(width: int) -> Plan:
    """Return the branches of a block of 17x17 pixels."""
    return {
        "branch1x1": ((192, POINT),),
        "branch7x7": ((width, POINT), (width, WIDE), (192, HIGH)),
        "branch7x7dbl": ((width, POINT), (width, HIGH), (width, WIDE), (width, HIGH), (192, WIDE)),
        "branch_pool": ((192, POINT),),
    }


BLOCK_8: Plan = {
    "branch1x1": ((320, POINT),),
    "branch3x3": ((384, POINT), (384, FORK)),
    "branch3x3dbl": ((448, POINT), (384, THREE), (384, FORK)),
    "branch_pool": ((192, POINT),),
}
FROM_35_TO_17: Plan = {"branch3x3": ((384, THREE),), "branch3x3dbl": ((64, POINT), (96, THREE), (96, THREE))}
FROM_17_TO_8: Plan = {
    "branch3x3": ((192, POINT), (320, THREE)),
    "branch7x7x3": ((192, POINT), (192, WIDE), (192, HIGH), (192, THREE)),
}


class FidInception(nn.Module):
    """The Inception network of the FID; random weights until a state dict is loaded.

    Example:
        >>> network = FidInception().eval()
        >>> network.load_state_dict(torch.load("pt_inception-2015-12-05-6726825d.pth", weights_only=True))
        >>> network.features(images).shape
        torch.Size([8, 2048])
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, (3, 3), stride=2, pad=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, (3, 3), pad=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, (3, 3))
        self.Conv2d_3b_1x1 = Convolution(64, 80, (1, 1))
        self.Conv2d_4a_3x3 = Convolution(80, 192, (3, 3), pad=False)
        self.Mixed_5b = Mixed(192, block_35(32))
        self.Mixed_5c = Mixed(256, block_35(64))
        self.Mixed_5d = Mixed(288, block_35(64))
        self.Mixed_6a = Mixed(288, FROM_35_TO_17, stride=2)
        self.Mixed_6b = Mixed(768, block_17(128))
        self.Mixed_6c = Mixed(768, block_17(160))
        self.Mixed_6d = Mixed(768, block_17(160))
        self.Mixed_6e = Mixed(768, block_17(192))
        self.Mixed_7a = Mixed(768, FROM_17_TO_8, stride=2)
        self.Mixed_7b = Mixed(1280, BLOCK_8)
        self.Mixed_7c = Mixed(2048, BLOCK_8, pool="maximum")
        self.fc = nn.Linear(FEATURES, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """Return the 2048 pooled features of images in [0, 1], (batch, 1 or 3, height, width).

        Images are resized to 299x299 (bilinear, not antialiased, as in pytorch-fid); the channel of gray ones is
        repeated.
        """
        x = 2 * interpolate(as_rgb(images), (SIDE, SIDE), mode="bilinear", align_corners=False) - 1
        for name, part in self.named_children():
            if name == "fc":
                break
            x = part(x)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = max_pool2d(x, 3, 2)
        return x.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images))

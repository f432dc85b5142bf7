"""The three fixed points that the benchmark solves, from a matrix to a multiscale network.

Every problem is `z = f(z, *inputs)`, batch first, inputs explicit so that a solver can gather rows of them. It starts
at zero and is made from seed 0, so that two runs (and two libraries) see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    name: str
    title: str
    f: nn.Module
    z0: State
    inputs: tuple[Tensor, ...]


def leaves(z: State) -> tuple[Tensor, ...]:
    return (z,) if isinstance(z, Tensor) else tuple(z)


def relative_residual(z: State, fz: State) -> Tensor:
    """||f(z) - z|| / ||f(z)|| of each sample, over all leaves together: the one measure applied to every library."""
    distance = sum((b - a).flatten(1).square().sum(1) for a, b in zip(leaves(z), leaves(fz), strict=True))
    size = sum(b.flatten(1).square().sum(1) for b in leaves(fz))
    return torch.sqrt(distance / size)


class Dense(nn.Module):
    """f(z) = tanh(Wz + Ux + b): cheap, so that the overhead of the solver shows."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.9 * torch.randn(n, n) / n**0.5)
        self.U = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.b = nn.Parameter(0.1 * torch.randn(n))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + x @ self.U.T + self.b)


class ConvBlock(nn.Module):
    """f(z) = GN(relu(z + GN(conv(z) + x))): not a contraction, so plain iteration is slow."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.inner = nn.GroupNorm(groups, channels)
        self.outer = nn.GroupNorm(groups, channels)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.outer(torch.relu(z + self.inner(self.conv(z) + x)))


class Multiscale(nn.Module):
    """An MDEQ block: a residual block on each scale, then every scale is fused into every other (Bai et al. 2020).

    At torch's default initialisation this map is chaotic. The gains are the initial weights of its norms: inside the
    residual `branch`, on the way `down` to coarser scales, `up` to finer ones, and at the `out`put. The defaults let
    the input, which enters at the finest scale, rule the rest, so that plain iteration reaches 1e-6 in 30-40 steps.
    """

    def __init__(
        self,
        channels: tuple[int, ...],
        groups: int,
        expansion: int,
        *,
        branch: float = 0.3,
        down: float = 3.0,
        up: float = 0.3,
        out: float = 0.2,
    ) -> None:
        super().__init__()
        scales = range(len(channels))
        self.expand = nn.ModuleList(
            nn.Sequential(conv(c, expansion * c), norm(groups, expansion * c, branch), nn.ReLU()) for c in channels
        )
        self.contract = nn.ModuleList(conv(expansion * c, c) for c in channels)
        self.inject = nn.ModuleList(norm(groups, c) for c in channels)
        self.residual = nn.ModuleList(norm(groups, c) for c in channels)

        def fusion(i: int, j: int) -> nn.Module:
            """From scale j to scale i; scale 0 is the finest."""
            if i == j:
                return nn.Identity()
            if j > i:
                lift = nn.Upsample(scale_factor=2 ** (j - i), mode="nearest")
                return nn.Sequential(conv(channels[j], channels[i], 1), norm(groups, channels[i], up), lift)
            halvings = [
                nn.Sequential(conv(channels[j], channels[j], stride=2), norm(groups, channels[j]), nn.ReLU())
                for _ in range(i - j - 1)
            ]
            return nn.Sequential(*halvings, conv(channels[j], channels[i], stride=2), norm(groups, channels[i], down))

        self.fuse = nn.ModuleList(nn.ModuleList(fusion(i, j) for j in scales) for i in scales)
        self.finish = nn.ModuleList(
            nn.Sequential(nn.ReLU(), conv(c, c, 1), norm(groups // 2, c, out)) for c in channels
        )

    def forward(self, z: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        y = []
        for i, zi in enumerate(z):
            branch = self.contract[i](self.expand[i](zi))
            if i == 0:
                branch = branch + x
            y.append(self.residual[i](torch.relu(self.inject[i](branch) + zi)))
        return tuple(
            finish(sum(path(yj) for path, yj in zip(row, y, strict=True)))
            for finish, row in zip(self.finish, self.fuse, strict=True)
        )


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def norm(groups: int, channels: int, weight: float = 1.0) -> nn.GroupNorm:
    layer = nn.GroupNorm(groups, channels)
    nn.init.constant_(layer.weight, weight)
    return layer


def dense() -> Problem:
    torch.manual_seed(0)
    f = Dense(512)
    return Problem(
        "dense", "(i) tanh(Wz + Ux + b), n=512, batch 128", f, torch.zeros(128, 512), (torch.randn(128, 512),)
    )


def convolution() -> Problem:
    torch.manual_seed(0)
    f = ConvBlock(32, groups=4)
    x = torch.randn(32, 32, 32, 32)
    return Problem("conv", "(ii) GN(relu(z + GN(conv(z) + x))), 32 x 32x32, batch 32", f, torch.zeros_like(x), (x,))


def multiscale() -> Problem:
    torch.manual_seed(0)
    channels = (8, 16, 32)
    f = Multiscale(channels, groups=4, expansion=5)
    x = torch.randn(32, channels[0], 32, 32)
    z0 = tuple(torch.zeros(32, c, 32 >> i, 32 >> i) for i, c in enumerate(channels))
    return Problem("mdeq", "(iii) multiscale block, channels 8, 16, 32 from 32x32, batch 32", f, z0, (x,))


class Rotation(nn.Module):
    """f(z) = rate * Qz + x, Q orthogonal: plain iteration contracts by exactly `rate`, which differs by sample."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.Q = nn.Parameter(torch.linalg.qr(torch.randn(n, n)).Q)

    def forward(self, z: Tensor, x: Tensor, rate: Tensor) -> Tensor:
        return rate * (z @ self.Q.T) + x


class Shift(nn.Module):
    """f(z) = w * shift(z) + x with w = 0.999: too slow for any solver, forward and adjoint, so all steps are used."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((n,), 0.999))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.w * z.roll(1, dims=1) + x


def one_slow_sample() -> Problem:
    torch.manual_seed(0)
    rate = torch.empty(128, 1).uniform_(0.3, 0.6)
    rate[64] = 0.973  # 500 plain steps to 1e-6, the others 12 to 27
    # In double, so that no count depends on how a kernel rounds at this batch size.
    inputs = (torch.randn(128, 64).double(), rate.double())
    return Problem("slow", "one slow sample among 128", Rotation(64).double(), torch.zeros(128, 64).double(), inputs)


def endless() -> Problem:
    torch.manual_seed(0)
    x = torch.randn(16, 1024)
    return Problem("memory", "w * shift(z) + x, n=1024, batch 16", Shift(1024), torch.zeros_like(x), (x,))


PROBLEMS: dict[str, Callable[[], Problem]] = {"dense": dense, "conv": convolution, "mdeq": multiscale}

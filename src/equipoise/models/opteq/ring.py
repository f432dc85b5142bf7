"""The coupling of branches on a ring: hierarchical heritage H, diversity D, and h, the negative of their gradient.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), eq. 3-6. The branch
before the first is the last. Edge i joins branches i and i + 1; P_i resizes branch i + 1 to the size of branch i, and
its adjoint branch i to the size of branch i + 1. With features as (pixels x channels) matrices and
M_i = (P_i z_{i+1})^T z_i,

    H_i = trace(M_i),    D_i = sum of |M_i| off the diagonal,    coupling = 1/2 sum_i lambda D_i - H_i,
    h_i = 1/2 P_i z_{i+1} (I - lambda sign M_i) + 1/2 P_{i-1}^T z_{i-1} (I - lambda sign M_{i-1}^T),

sign without its diagonal. Without heritage a branch is coupled to itself: -1/2 |z_i|^2 in place of -1/2 H_i, and z_i in
h_i in place of the neighbours' mean.

Where the papers err: the published main text has lost the transpose of P_{i-1}, and P_i is called average pooling where
branch i has the higher resolution, but must be its adjoint.

|m| has a corner where two channels are orthogonal; there the sign jumps, and the equilibrium equation often has no
solution. So it is smoothed here: |m| becomes sqrt(m^2 + t^2) - t. t is computed before a solve and then fixed: a t that
followed z would belong to another objective.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.models.parts.images import is_channels_last
from equipoise.options import option, options

SIGNS = ("smooth", "hard")
FLOOR = 1e-6  # added to the scale of M, so that t is positive where all features are zero
Images = tuple[Tensor, ...]  # one (batch, channels, height, width) for each branch


@options
class Ring:
    """The coupling of branches with the same number of channels.

    Args:
        heritage: whether each branch is drawn to both its neighbours by H; otherwise to itself, with -1/2 |z_i|^2 in
            place of -1/2 H, and without diversity the branches are independent.
        diversity: lambda, the weight of D.
        sign: "smooth", or "hard" as in the paper.
        smoothing: t relative to the scale of the inner products in M.
    """

    heritage: bool = option(default=True, kind=bool)
    diversity: float = option(default=0.0, at_least=0)
    sign: str = option(default="smooth", among=SIGNS)
    smoothing: float = option(default=0.05, above=0)

    @property
    def smooth(self) -> bool:
        """Whether there is a sign and it is smooth, so that t is needed."""
        return self.diversity > 0 and self.sign == "smooth"

    def thresholds(self, z: Sequence[Tensor]) -> Tensor:
        """Return t of every edge, (batch, branches): proportional to the root mean square of M."""
        squares = [self.products(e, z).square().mean(dim=(1, 2)) for e in range(len(z))]
        return self.smoothing * (torch.stack(squares, dim=1) + FLOOR**2).sqrt()

    def products(self, e: int, z: Sequence[Tensor]) -> Tensor:
        """Return M of edge e, (batch, C, C), with a zero diagonal; rows are channels of branch e + 1."""
        after = carry(z[(e + 1) % len(z)], z[e].shape[2:])
        dtype = torch.promote_types(after.dtype, torch.float32)  # in half precision squares overflow or vanish
        with torch.autocast(after.device.type, enabled=False):
            inner = torch.bmm(after.flatten(2).to(dtype), z[e].flatten(2).mT.to(dtype))
        return inner * (1 - torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device))

    def signs(self, e: int, z: Sequence[Tensor], t: Tensor | None) -> Tensor:
        """Return the derivative of |M| of edge e, smoothed by t if given."""
        m = self.products(e, z)
        return m.sign() if t is None else m * (m.square() + t[:, e, None, None].square()).rsqrt()

    def h(self, z: Sequence[Tensor], t: Tensor | None = None) -> list[Tensor]:
        """Return h, the negative gradient of the coupling."""
        signs = {e: self.signs(e, z, t) for e in range(len(z))} if self.diversity else {}
        return [self.drawn(i, z, signs) for i in range(len(z))]

    def h_of(self, i: int, z: Sequence[Tensor], t: Tensor | None = None) -> Tensor:
        """Return h of one branch."""
        edges = {i, (i - 1) % len(z)}
        return self.drawn(i, z, {e: self.signs(e, z, t) for e in edges} if self.diversity else {})

    def drawn(self, i: int, z: Sequence[Tensor], signs: dict[int, Tensor]) -> Tensor:
        """Return h_i, given the signs of the two edges that meet at branch i."""
        own, count = z[i], len(z)
        if not (self.heritage or self.diversity):
            return own
        after, before = (carry(z[j % count], own.shape[2:]) for j in (i + 1, i - 1))
        h = (after + before) / 2 if self.heritage else own
        if self.diversity:
            for sign, part in ((signs[i].mT, after), (signs[(i - 1) % count], before)):
                h = add_mixed(h, sign, part, -self.diversity / 2)
        return h

    def coupling(self, z: Sequence[Tensor], t: Tensor | None = None) -> Tensor:
        """Return the coupling's part of the objective, per sample."""
        if self.heritage:
            total = -heritage(z) / 2
        else:
            total = -torch.stack([part.square().flatten(1).sum(dim=1) for part in z]).sum(dim=0) / 2
        return total + self.diversity / 2 * self.total_diversity(z, t) if self.diversity else total

    def total_diversity(self, z: Sequence[Tensor], t: Tensor | None = None) -> Tensor:
        """Return the sum of D over the edges (eq. 4), per sample; smoothed by t if given."""
        total = []
        for e in range(len(z)):
            m = self.products(e, z)
            if t is None:
                size = m.abs()
            else:  # sqrt(m^2 + t^2) - t, without cancellation
                width = t[:, e, None, None]
                size = m.square() / ((m.square() + width.square()).sqrt() + width)
            total.append(size.sum(dim=(1, 2)))
        return torch.stack(total).sum(dim=0)


def heritage(z: Sequence[Tensor]) -> Tensor:
    """Return the sum of H over the edges (eq. 3), per sample."""
    edges = [(z[e] * carry(z[(e + 1) % len(z)], z[e].shape[2:])).flatten(1).sum(dim=1) for e in range(len(z))]
    return torch.stack(edges).sum(dim=0)


def add_mixed(base: Tensor, weights: Tensor, images: Tensor, scale: float) -> Tensor:
    """Return base + scale * images with channels mixed by weights, (batch, C, C), in the memory order of the images."""
    if is_channels_last(images):
        pixels = torch.baddbmm(base.flatten(2).mT, images.flatten(2).mT, weights.mT, alpha=scale)
        return pixels.mT.view_as(base)
    return torch.baddbmm(base.flatten(2), weights, images.flatten(2), alpha=scale).view_as(base)


def carry(z: Tensor, size: Sequence[int]) -> Tensor:
    """Resize images: to a lower resolution by averaging, to a higher one by the adjoint of averaging.

    Both directions are adjoint to each other: <carry(a, size of b), b> = <a, carry(b, size of a)>.
    """
    old, new = tuple(z.shape[2:]), tuple(size)
    if old == new:
        return z
    sides = list(zip(new, old, strict=True))
    if all(n <= o for n, o in sides):
        return F.adaptive_avg_pool2d(z, (new[0], new[1]))
    if not all(n >= o for n, o in sides):
        raise ValueError(f"images of {old} cannot be carried to {new}: one side grows and the other shrinks.")
    if all(n % o == 0 for n, o in sides):
        return F.interpolate(z, new, mode="nearest-exact") / math.prod(n // o for n, o in sides)
    height, width = (averaging(n, o, z) for n, o in sides)
    return height.mT @ z @ width


def averaging(n: int, m: int, like: Tensor) -> Tensor:
    """Return the (m, n) matrix of adaptive average pooling from n pixels to m."""
    return F.adaptive_avg_pool1d(torch.eye(n, dtype=like.dtype, device=like.device), m).mT

"""The multi-tier monotone operator: convolutions at several resolutions, coupled by strided ones (section 4.3, D)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.operators.convolution import BORDER, COARSE, blocks_norm, checked_size, composed, fresh_kernel, means
from equipoise.operators.linear import (
    RAW_ONE,
    MonotoneOperator,
    identity_like,
    inverted,
    positive,
    resolved,
    spectral_norm,
    unit,
)
from equipoise.operators.spectrum import Spectrum, embed, images, memory, real, spectrum
from equipoise.options import is_number

STRIDE = 2


class MonotoneMultiTier(MonotoneOperator):
    """W of eq. D1-D5: tiers i = 1..L of images, each half the size of the one before.

    W_ii = (1 - m) I - A_i^T A_i - S_i^T S_i + B_i - B_i^T (no S in the last tier) and W_{i+1,i} = -2 A_{i+1}^T S_i,
    where S_i, a 3x3 convolution of stride 2, leads from tier i to tier i + 1. With A the block matrix of A_i and S_i,
    this again has the form (1 - m) I - A^T A + B - B^T (D4), so I - W >= m I.

    z is a tuple of tensors (batch, channels_i, height_i, width_i). Tier i holds an image of size ceil(size / 2^i) and a
    border of at least two rows and columns at the end (three where S needs an even grid), which the nonlinearity keeps
    at zero. S_i z is taken at every second pixel, starting at the first, and lies in the top left of the next grid.

    Args:
        channels: number of channels of each tier.
        size: (height, width) of the image.
        m: strong monotonicity of I - W.
        normalize: whether to scale with learned scalars, A_i^T A_i -> softplus(g_i) A_i^T A_i / ||A_i||^2,
            B_i -> h_i B_i / ||B_i|| and S_i^T S_i -> softplus(s_i) S_i^T S_i / ||S_i||^2 (E.2).

    Example:
        >>> op = eq.operators.MonotoneMultiTier((16, 32, 32), (28, 28))
        >>> op.shape
        ((16, 30, 30), (32, 16, 16), (32, 9, 9))

    Reference: E. Winston, J. Z. Kolter, "Monotone operator equilibrium networks" (2020), section 4.3, appendix D.
    """

    def __init__(self, channels: Sequence[int], size: tuple[int, int], *, m: float = 1.0, normalize: bool = True):
        super().__init__(m, normalize)
        whole = isinstance(channels, tuple | list) and all(is_number(c, 1, whole=True) for c in channels)
        if not whole or not channels:
            raise ValueError(f"channels is {channels!r}; it must be a tuple of whole numbers, one for each tier.")
        self.channels, self.tiers = tuple(channels), len(channels)
        height, width = checked_size(size)
        self.sizes = [(-(-height // STRIDE**i), -(-width // STRIDE**i)) for i in range(self.tiers)]
        self.grids = [(h + BORDER, w + BORDER) for h, w in self.sizes]
        self.grids[:-1] = [(h + h % STRIDE, w + w % STRIDE) for h, w in self.grids[:-1]]
        self.shape = tuple((c, *grid) for c, grid in zip(channels, self.grids, strict=True))
        self.inner = tuple(self.sizes)
        self.A = nn.ParameterList(fresh_kernel(c, c) for c in channels)
        self.B = nn.ParameterList(fresh_kernel(c, c) for c in channels)
        self.S = nn.ParameterList(fresh_kernel(b, a) for a, b in itertools.pairwise(channels))
        if normalize:
            self.g = nn.ParameterList(nn.Parameter(torch.tensor(RAW_ONE)) for _ in self.A)
            self.h = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in self.B)
            self.s = nn.ParameterList(nn.Parameter(torch.tensor(RAW_ONE)) for _ in self.S)

    def spectrum(self, i: int, like: Tensor) -> Spectrum:
        """Return the transform of tier i; where S follows, frequencies that it folds together are adjacent."""
        return spectrum(self.grids[i], like, STRIDE if i + 1 < self.tiers else 1)

    def coarse(self, i: int, like: Tensor) -> Spectrum:
        """Return the transform of S_i z, before it is placed in the next grid."""
        height, width = self.grids[i]
        return spectrum((height // STRIDE, width // STRIDE), like, split=False)  # in the order of the folded rows

    def kernels(self, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A_i, B_i and S_i, scaled."""
        A, B, S = self.A[i], self.B[i], self.S[i] if i + 1 < self.tiers else None
        if self.normalize:
            A, B = positive(self.g[i]).sqrt() * unit(A), self.h[i] * unit(B)
            S = None if S is None else positive(self.s[i]).sqrt() * unit(S)
        return A, B, S

    def blocks(self, i: int, grid: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return W_ii without S_i, A_i and S_i at every frequency of the tier's grid, or of another, complex."""
        A, B, S = self.kernels(i)
        transform = self.spectrum(i, A) if grid is None else spectrum(grid, A, STRIDE)
        within = transform.blocks(composed(self.m, A, B))
        return within, transform.blocks(A), None if S is None else transform.blocks(S)

    def derive(self) -> list[Tier]:
        """Return what a product with W needs."""
        tiers = map(self.blocks, range(self.tiers))
        return [Tier(real(W), real(A), None if S is None else Fold.of(S)) for W, A, S in tiers]

    def multiply(self, matrix: list[Tier], z: tuple[Tensor, ...], *, adjoint: bool) -> tuple[Tensor, ...]:
        if adjoint:
            return self.multiply_adjoint(matrix, z)
        return tuple(images(transform.inverse(product)) for transform, product in self.products(matrix, z))

    def recorded(self, z: tuple[Tensor, ...]) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        z = self.checked(z)
        with self.without_autocast():
            return [(product, transform.pull) for transform, product in self.products(self.weights, z)]

    def products(self, tiers: list[Tier], z: tuple[Tensor, ...]) -> list[tuple[Spectrum, Tensor]]:
        """Return the spectrum of W z in every tier, with its transform."""
        products, below = [], None
        for i, (part, tier) in enumerate(zip(z, tiers, strict=True)):
            transform = self.spectrum(i, part)
            spectra = transform.forward(memory(part))
            product = torch.bmm(tier.within, spectra)
            if below is not None:  # W_{i,i-1} = -2 A_i^T S_{i-1}
                product.baddbmm_(tier.A.mT, transform.forward(below), alpha=-2)
            if tier.fold is not None:
                folded = tier.fold.down(spectra)
                tier.fold.subtract_lifted(folded, product)
                below = self.placed(i, folded)
            products.append((transform, product))
        return products

    def multiply_adjoint(self, tiers: list[Tier], z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts, above = [], None
        for i in reversed(range(self.tiers)):
            tier, transform = tiers[i], self.spectrum(i, z[i])
            spectra = transform.forward(memory(z[i]))
            product = torch.bmm(tier.within.mT, spectra)
            if tier.fold is not None and above is not None:  # W_{i+1,i}^T = -2 S_i^T A_{i+1}
                tier.fold.subtract_lifted(tier.fold.down(spectra) + 2 * self.taken(i, above), product)
            if i:
                above = transform.inverse(torch.bmm(tier.A, spectra))
            parts.append(images(transform.inverse(product)))
        return tuple(reversed(parts))

    def placed(self, i: int, folded: Tensor) -> Tensor:
        """Return S_i z, from its spectrum, in the top left of the next grid: (H, W, C, batch)."""
        return embed(self.coarse(i, folded).inverse(folded), self.grids[i + 1])

    def taken(self, i: int, stored: Tensor) -> Tensor:
        """Return the adjoint of :meth:`placed`, up to the transform: the spectrum of the top left."""
        height, width = self.grids[i]
        return self.coarse(i, stored).forward(stored[: height // STRIDE, : width // STRIDE].contiguous())

    def factorise(self, alpha: float) -> list[Factors]:
        """Invert the diagonal blocks (1 + alpha) I - alpha W_ii, using Woodbury's identity for S_i (prop. D1).

        At a coarse frequency S_i sums K_f z^_f over the four frequencies f that fold into it, and takes a quarter. With
        P the block-diagonal part without S_i, (P + alpha/4 K^H K)^-1 = P^-1 - P^-1 K^H G^-1 K P^-1,
        G = 4/alpha I + K P^-1 K^H. The term of tier i in the equation of tier i + 1 then follows from
        K (P + alpha/4 K^H K)^-1 = 4/alpha G^-1 K P^-1, and likewise transposed. Only G^-1 K P^-1 and P^-1 K^H are kept.
        """
        factors = []
        for i in range(self.tiers):
            W, A, K = self.blocks(i)
            inverse, strided = inverted(resolved(W, alpha)), None
            if K is not None:
                KP, PK = K @ inverse, inverse @ K.mH
                coupling = folded_sum(KP @ K.mH)
                G = STRIDE**2 / alpha * identity_like(coupling) + coupling
                strided = Woodbury(Fold.of(spread(inverted(G)) @ KP), Fold.of(PK.mH))
            factors.append(Factors(real(inverse), real(A), strided))
        return factors

    def footprint(self) -> list[int]:
        counts = [self.spectrum(i, self.example).count for i in range(self.tiers)]
        sizes = [n for count, c in zip(counts, self.channels, strict=True) for n in 2 * [count * (2 * c) ** 2]]
        for count, (a, b) in zip(counts, itertools.pairwise(self.channels), strict=False):
            sizes += 2 * [count * 2 * a * 2 * b]
        return sizes  # P^-1 and A of every tier; G^-1 K P^-1 and P^-1 K^H where there is an S

    def solve(
        self, factors: list[Factors], alpha: float, z: tuple[Tensor, ...], *, adjoint: bool
    ) -> tuple[Tensor, ...]:
        """Substitute tier by tier (D7), downwards, or upwards for the adjoint."""
        if adjoint:
            return self.solve_adjoint(factors, z)
        parts, below = [], None
        for i, (part, tier) in enumerate(zip(z, factors, strict=True)):
            transform = self.spectrum(i, part)
            right = transform.forward(memory(part))
            if below is not None:  # alpha W_{i,i-1} x_{i-1}
                right.baddbmm_(tier.A.mT, transform.forward(below), alpha=-2 * alpha)
            x = torch.bmm(tier.inverse, right)
            if (strided := tier.strided) is not None:
                y = strided.left.sum(right)
                strided.right.subtract_lifted(y, x)
                below = self.placed(i, y / alpha)
            parts.append(images(transform.inverse(x)))
        return tuple(parts)

    def solve_adjoint(self, factors: list[Factors], z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts, above = [], None
        for i in reversed(range(self.tiers)):
            tier, transform = factors[i], self.spectrum(i, z[i])
            right = transform.forward(memory(z[i]))
            x = torch.bmm(tier.inverse.mT, right)
            if (strided := tier.strided) is not None and above is not None:  # alpha W_{i+1,i}^T x_{i+1}
                y = torch.add(strided.right.sum(right), self.taken(i, above), alpha=2 * STRIDE**2)
                strided.left.subtract_lifted(y, x)
            if i:
                above = transform.inverse(torch.bmm(tier.A, x))
            parts.append(images(transform.inverse(x)))
        return tuple(reversed(parts))

    def norm(self, *, bound: bool) -> Tensor:
        """Return the norm of the matrix of the norms of the blocks of I - W, which is never below that of I - W."""
        sizes = torch.zeros(self.tiers, self.tiers, dtype=torch.float64, device=self.example.device)
        into: Tensor | None = None  # ||S_{i-1}||
        for i in range(self.tiers):
            W, A, K = self.blocks(i, None if bound else COARSE)
            sizes[i, i] = blocks_norm(identity_like(W) - W, bound=bound)
            if into is not None:
                sizes[i, i - 1] = 2 * blocks_norm(A, bound=bound) * into
            if K is not None:
                into = blocks_norm(Fold.complex(K), bound=bound) / STRIDE
                sizes[i, i] += into**2
        return spectral_norm(sizes)

    def typical(self) -> tuple[Tensor, Tensor]:
        """Return the means over the tiers, uncoupled and weighted by size."""
        sizes = torch.tensor([math.prod(shape) for shape in self.shape], dtype=torch.float64)
        kernels = (composed(self.m, A, B) for A, B, _ in map(self.kernels, range(self.tiers)))
        per_tier = torch.tensor([[float(mean) for mean in means(kernel)] for kernel in kernels], dtype=torch.float64)
        mean, square = (sizes / sizes.sum()) @ per_tier
        return mean, square.sqrt()

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.sizes[0]}, m={self.m:g}, normalize={self.normalize}"


def folded_sum(blocks: Tensor) -> Tensor:
    """Sum (frequency, ...) over the four that fold together: (coarse frequency, ...)."""
    return blocks.view(STRIDE, -1, STRIDE, *blocks.shape[1:]).sum(dim=(0, 2))


def spread(blocks: Tensor) -> Tensor:
    """Repeat (coarse frequency, ...) for the four that fold together, the adjoint of :func:`folded_sum`."""
    repeated = blocks[None, :, None].expand(STRIDE, -1, STRIDE, *blocks.shape[1:])
    return repeated.reshape(-1, *blocks.shape[1:])


@dataclass
class Fold:
    """A map K_f at every frequency f, summed over those that fold together."""

    table: Tensor  # real: (column alias, coarse frequency, [re, im] O, row alias x [re, im] I)

    @classmethod
    def of(cls, blocks: Tensor) -> Fold:
        split = real(blocks).view(STRIDE, -1, STRIDE, 2 * blocks.shape[1], 2 * blocks.shape[2])
        return cls(split.permute(0, 1, 3, 2, 4).flatten(3))

    @staticmethod
    def complex(blocks: Tensor) -> Tensor:
        """Return the whole map at every coarse frequency: (coarse, O, four I)."""
        split = blocks.view(STRIDE, -1, STRIDE, *blocks.shape[1:])
        return split.permute(1, 3, 0, 2, 4).flatten(2)

    def sum(self, spectra: Tensor) -> Tensor:
        """Return the sum of K_f z^_f over the frequencies that fold together: (coarse, 2 O, batch)."""
        split = spectra.view(*self.table.shape[:2], self.table.shape[3], spectra.shape[2])
        return torch.baddbmm(torch.bmm(self.table[0], split[0]), self.table[1], split[1])

    def subtract_lifted(self, spectra: Tensor, result: Tensor) -> None:
        """Subtract K_f^H y^ from ``result`` in place, the adjoint of :meth:`sum`: the spectrum of S^T y."""
        split = result.view(*self.table.shape[:2], self.table.shape[3], spectra.shape[2])
        for alias in range(STRIDE):
            split[alias].baddbmm_(self.table[alias].mT, spectra, alpha=-1)

    def down(self, spectra: Tensor) -> Tensor:
        """Return the spectrum of S z: dropping pixels averages the frequencies that fold together (D19)."""
        return self.sum(spectra) / STRIDE**2


@dataclass
class Tier:
    """What a product with W needs of one tier."""

    within: Tensor
    A: Tensor
    fold: Fold | None


@dataclass
class Factors:
    """What the resolvent needs of one tier: P^-1, A, and what S adds."""

    inverse: Tensor
    A: Tensor
    strided: Woodbury | None = None


@dataclass
class Woodbury:
    """G^-1 K P^-1 and (P^-1 K^H)^H."""

    left: Fold
    right: Fold

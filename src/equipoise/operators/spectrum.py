"""The discrete Fourier transform of real images, laid out for products over channels.

Circular convolutions become one (C, C) block per frequency (eq. 16, C1-C3 of the monDEQ paper), and since images are
real, half the frequencies are enough. On grids of the sizes that equilibrium networks have, the transform itself is
fastest as four products with small cosine and sine matrices, because these read and write the layouts that the
products over channels need: images lie in memory as (H, W, C, batch), spectra as (frequency, [re, im] C, batch), and
nothing is ever copied into another order. All is plain torch, so it can be differentiated to every order.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from equipoise.problem.layout import BATCH_LAST, inverse

ORDER = BATCH_LAST[4]


def memory(images: Tensor) -> Tensor:
    """(batch, C, H, W) as it lies in memory, (H, W, C, batch); a copy only when it lies otherwise."""
    return images.permute(ORDER).contiguous()


def images(stored: Tensor) -> Tensor:
    """(H, W, C, batch) as (batch, C, H, W)."""
    return stored.permute(inverse(ORDER))


def embed(stored: Tensor, grid: tuple[int, int]) -> Tensor:
    """(H, W, C, batch) images in the top left of a grid, zeros elsewhere."""
    return F.pad(stored, (0, 0, 0, 0, 0, grid[1] - stored.shape[1], 0, grid[0] - stored.shape[0]))


class Spectrum:
    """The transform on one grid, x^(k) = sum_p x(p) exp(-2 pi i k p / n) in both directions.

    Frequencies k = (column, row) are numbered columns first. Of the columns, half are kept: those from which the rest
    follow by conjugation. With ``aliases = 2`` frequencies that fall together when every second row and column is
    dropped stand together, in the order (column alias, coarse column, coarse row, row alias).
    """

    def __init__(self, grid: tuple[int, int], aliases: int, dtype: torch.dtype, device: torch.device):
        height, width = grid
        if height % aliases or width % aliases:
            raise ValueError(f"grid is {grid}; both sides must be multiples of {aliases}.")
        coarse = (height // aliases, width // aliases)
        columns = [k + a * coarse[1] for a in range(aliases) for k in range(coarse[1] // 2 + 1)]
        rows = [k + b * coarse[0] for k in range(coarse[0]) for b in range(aliases)]
        # A column stands for its conjugate as well, unless that is in the list itself.
        share = [1.0 if -k % width in columns else 2.0 for k in columns]

        def angles(frequencies: list[int], n: int) -> tuple[Tensor, Tensor]:
            turns = torch.tensor(frequencies)[:, None] * torch.arange(n) % n
            angle = turns.double() * (2 * math.pi / n)
            return angle.cos(), angle.sin()

        self.grid, self.columns, self.rows = grid, columns, rows
        cos, sin = angles(columns, width)
        weights = torch.tensor(share).double()[:, None] / width
        across = torch.stack([cos, -sin])  # [re, im], column | position
        back_across = torch.stack([cos, -sin], dim=1) * weights[:, None]
        cos, sin = angles(rows, height)
        # Products with exp(-i angle) and exp(+i angle) as real matrices: row, [re, im] | position, [re, im] and back.
        down = torch.stack([torch.stack([cos, sin], 2), torch.stack([-sin, cos], 2)], dim=1)
        back_down = torch.stack([torch.stack([cos.T, -sin.T], 2), torch.stack([sin.T, cos.T], 2)]) / height

        def matrix(table: Tensor, rows: int) -> Tensor:
            return table.reshape(rows, -1).to(device=device, dtype=dtype)

        self.across, self.back_across = matrix(across, 2 * len(columns)), matrix(back_across, 2 * len(columns)).T
        self.pull_across = matrix(across * weights / height, 2 * len(columns))
        self.down, self.back_down = matrix(down, 2 * len(rows)), matrix(back_down, 2 * height)
        self.dtype, self.device = dtype, device

    @property
    def count(self) -> int:
        """How many frequencies are kept."""
        return len(self.columns) * len(self.rows)

    def forward(self, x: Tensor) -> Tensor:
        """(H, W, C, batch) images to (frequency, 2 C, batch) spectra."""
        return self.transform(x, self.across)

    def pull(self, x: Tensor) -> Tensor:
        """The transpose of :meth:`inverse`: the transform itself, each column with its weight in the inverse."""
        return self.transform(x, self.pull_across)

    def transform(self, x: Tensor, across: Tensor) -> Tensor:
        (height, width), columns = self.grid, len(self.columns)
        rest = x.shape[2] * x.shape[3]
        halves = torch.bmm(across.expand(height, -1, -1), x.reshape(height, width, rest))
        by_column = halves.view(2 * height, columns, rest).transpose(0, 1)
        spectra = torch.bmm(self.down.expand(columns, -1, -1), by_column)
        return spectra.view(self.count, 2 * x.shape[2], x.shape[3])

    def inverse(self, spectra: Tensor) -> Tensor:
        """(frequency, 2 C, batch) spectra to (H, W, C, batch) images."""
        (height, width), columns = self.grid, len(self.columns)
        channels, batch = spectra.shape[1] // 2, spectra.shape[2]
        by_column = spectra.reshape(columns, 2 * len(self.rows), channels * batch)
        halves = torch.bmm(self.back_down.expand(columns, -1, -1), by_column)
        by_row = halves.view(2 * columns, height, channels * batch).transpose(0, 1)
        return torch.bmm(self.back_across.expand(height, -1, -1), by_row).view(height, width, channels, batch)

    def blocks(self, kernel: Tensor) -> Tensor:
        """The (frequency, O, I) complex blocks of a circular convolution (torch's: y(p) = sum_t K_t x(p + t - c))."""
        phases = self.phases(kernel.shape[2], kernel.shape[3])
        table = phases @ kernel.flatten(2).permute(2, 0, 1).flatten(1)  # (2 frequencies, O I)
        re, im = table.view(2, self.count, *kernel.shape[:2])
        return torch.complex(re, im)

    @lru_cache(maxsize=8)  # noqa: B019 - spectra are themselves kept for ever, a few of them
    def phases(self, height: int, width: int) -> Tensor:
        """cos and sin of the angle of every tap of a centred kernel at every frequency: (2 frequencies, taps)."""
        with torch.inference_mode(False):
            y, x = torch.arange(height) - height // 2, torch.arange(width) - width // 2
            rows, columns = torch.tensor(self.rows), torch.tensor(self.columns)
            down = (rows[:, None] * y % self.grid[0]).double() / self.grid[0]
            across = (columns[:, None] * x % self.grid[1]).double() / self.grid[1]
            angle = 2 * math.pi * (across[:, None, None, :] + down[None, :, :, None]).reshape(self.count, -1)
            return torch.cat([angle.cos(), angle.sin()]).to(device=self.device, dtype=self.dtype)


def spectrum(grid: tuple[int, int], like: Tensor, aliases: int = 1) -> Spectrum:
    """The transform on a grid in the numbers of a tensor; its tables are made once."""
    with torch.inference_mode(False):
        return _spectrum(grid, aliases, like.dtype, like.device)


_spectrum = lru_cache(maxsize=64)(Spectrum)


def real(blocks: Tensor) -> Tensor:
    """Complex (..., O, I) blocks as real (..., 2 O, 2 I) ones, for products with [re, im]; transposed, the adjoint."""
    re, im = blocks.real, blocks.imag
    if torch.is_grad_enabled() or in_transform():
        return torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    outputs, inputs = blocks.shape[-2:]
    made = re.new_empty(*blocks.shape[:-2], 2 * outputs, 2 * inputs)  # every number written once, nothing in between
    for row, column, part in ((0, 0, re), (outputs, 0, im), (outputs, inputs, re)):
        made[..., row : row + outputs, column : column + inputs] = part
    torch.neg(im, out=made[..., :outputs, inputs:])
    return made


def in_transform() -> bool:
    """Whether values may carry tangents or more batches, which look like zeros when they are not."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()

"""The discrete Fourier transform of real images, laid out for products over channels.

A circular convolution becomes one (C, C) block per frequency (eq. 16, C1-C3 of the monDEQ paper), and half of the
frequencies are enough because images are real. On the grid sizes of equilibrium networks, the transform is fastest as
four products with small cosine and sine matrices: these read and write the layouts that the products over channels
need. Images lie in memory as (H, W, C, batch), spectra as (frequency, [re, im] C, batch), and nothing is ever copied
into another order. It is plain torch, so it can be differentiated to any order.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.operators.linear import in_transform
from equipoise.problem.layout import BATCH_LAST, inverse

ORDER = BATCH_LAST[4]


def memory(images: Tensor) -> Tensor:
    """Return (batch, C, H, W) images as (H, W, C, batch); a copy only if they lie in memory in another order."""
    return images.permute(ORDER).contiguous()


def images(stored: Tensor) -> Tensor:
    """Return (H, W, C, batch) as (batch, C, H, W) images."""
    return stored.permute(inverse(ORDER))


def embed(stored: Tensor, grid: tuple[int, int]) -> Tensor:
    """Place (H, W, C, batch) images in the top left of a grid, with zeros elsewhere."""
    return F.pad(stored, (0, 0, 0, 0, 0, grid[1] - stored.shape[1], 0, grid[0] - stored.shape[0]))


class Spectrum:
    """The transform on one grid, x^(k) = sum_p x(p) exp(-2 pi i k p / n) in both directions.

    Frequencies k = (column, row) are numbered columns first. Half of the columns are kept; the others follow by
    conjugation. With ``aliases = 2``, frequencies that coincide when every second row and column is dropped are
    grouped, in the order (column alias, coarse column, coarse row, row alias).
    """

    def __init__(self, grid: tuple[int, int], aliases: int, dtype: torch.dtype, device: torch.device):
        height, width = grid
        if height % aliases or width % aliases:
            raise ValueError(f"grid is {grid}; both sides must be multiples of {aliases}.")
        coarse = (height // aliases, width // aliases)
        columns = [k + a * coarse[1] for a in range(aliases) for k in range(coarse[1] // 2 + 1)]
        rows = [k + b * coarse[0] for k in range(coarse[0]) for b in range(aliases)]
        # A column counts for its conjugate as well, unless that is in the list itself.
        share = [1.0 if -k % width in columns else 2.0 for k in columns]

        def angles(frequencies: list[int], n: int) -> tuple[Tensor, Tensor]:
            turns = torch.tensor(frequencies)[:, None] * torch.arange(n) % n
            angle = turns.double() * (2 * math.pi / n)
            return angle.cos(), angle.sin()

        self.grid, self.columns, self.rows = grid, columns, rows
        self.count = len(columns) * len(rows)  # of the frequencies that are kept
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

    def forward(self, x: Tensor) -> Tensor:
        """Transform (H, W, C, batch) images to (frequency, 2 C, batch) spectra."""
        return self.transform(x, self.across)

    def pull(self, cotangent: Tensor) -> Tensor:
        """Apply the transpose of :meth:`inverse` to (batch, C, H, W): the transform with the inverse's weights."""
        return self.transform(memory(cotangent), self.pull_across)

    def transform(self, x: Tensor, across: Tensor) -> Tensor:
        (height, width), columns = self.grid, len(self.columns)
        rest = x.shape[2] * x.shape[3]
        halves = torch.bmm(across.expand(height, -1, -1), x.reshape(height, width, rest))
        by_column = halves.view(2 * height, columns, rest).transpose(0, 1)
        spectra = torch.bmm(self.down.expand(columns, -1, -1), by_column)
        return spectra.view(self.count, 2 * x.shape[2], x.shape[3])

    def inverse(self, spectra: Tensor) -> Tensor:
        """Transform (frequency, 2 C, batch) spectra to (H, W, C, batch) images."""
        (height, width), columns = self.grid, len(self.columns)
        channels, batch = spectra.shape[1] // 2, spectra.shape[2]
        by_column = spectra.reshape(columns, 2 * len(self.rows), channels * batch)
        halves = torch.bmm(self.back_down.expand(columns, -1, -1), by_column)
        by_row = halves.view(2 * columns, height, channels * batch).transpose(0, 1)
        return torch.bmm(self.back_across.expand(height, -1, -1), by_row).view(height, width, channels, batch)

    def blocks(self, kernel: Tensor) -> Tensor:
        """Return the (frequency, O, I) complex blocks of a circular convolution, y(p) = sum_t K_t x(p + t - c)."""
        phases = self.phases(kernel.shape[2], kernel.shape[3])
        table = phases @ kernel.flatten(2).permute(2, 0, 1).flatten(1)  # (2 frequencies, O I)
        re, im = table.view(2, self.count, *kernel.shape[:2])
        return torch.complex(re, im)

    @lru_cache(maxsize=8)  # noqa: B019 - spectra are themselves cached
    def phases(self, height: int, width: int) -> Tensor:
        """Return cos and sin of the angle of each tap of a centred kernel at each frequency: (2 frequencies, taps)."""
        with torch.inference_mode(False):
            y, x = torch.arange(height) - height // 2, torch.arange(width) - width // 2
            rows, columns = torch.tensor(self.rows), torch.tensor(self.columns)
            down = (rows[:, None] * y % self.grid[0]).double() / self.grid[0]
            across = (columns[:, None] * x % self.grid[1]).double() / self.grid[1]
            angle = 2 * math.pi * (across[:, None, None, :] + down[None, :, :, None]).reshape(self.count, -1)
            return torch.cat([angle.cos(), angle.sin()]).to(device=self.device, dtype=self.dtype)


_cached_spectrum = lru_cache(maxsize=64)(Spectrum)


def spectrum(grid: tuple[int, int], like: Tensor, aliases: int = 1) -> Spectrum:
    """Return the transform on a grid, with the dtype and device of a tensor; its tables are cached."""
    with torch.inference_mode(False):
        return _cached_spectrum(grid, aliases, like.dtype, like.device)


def real(blocks: Tensor) -> Tensor:
    """Return complex (..., O, I) blocks as real (..., 2 O, 2 I) ones; their transpose is that of the adjoint."""
    re, im = blocks.real, blocks.imag
    if torch.is_grad_enabled() or in_transform():
        return torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    outputs, inputs = blocks.shape[-2:]
    table = re.new_empty(*blocks.shape[:-2], 2 * outputs, 2 * inputs)  # written once, without temporaries
    for row, column, part in ((0, 0, re), (outputs, 0, im), (outputs, inputs, re)):
        table[..., row : row + outputs, column : column + inputs] = part
    torch.neg(im, out=table[..., :outputs, inputs:])
    return table

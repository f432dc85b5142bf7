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
SPLIT = 24  # rows from which halving the multiplications costs less than it saves
AT_ONCE = 2**20  # numbers that are computed together where all together would take too much memory


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

    With ``split``, the transform along an even number of rows takes even and odd rows apart, as a first step of the
    fast transform: with E of the even rows and O of the odd ones, x^(k) = E(k) + O(k) and x^(k + n/2) = E(k) - O(k).
    That halves its multiplications, and the two frequencies are adjacent.
    """

    def __init__(self, grid: tuple[int, int], aliases: int, split: bool, dtype: torch.dtype, device: torch.device):
        height, width = grid
        if height % aliases or width % aliases:
            raise ValueError(f"grid is {grid}; both sides must be multiples of {aliases}.")
        coarse = (height // aliases, width // aliases)
        columns = [k + a * coarse[1] for a in range(aliases) for k in range(coarse[1] // 2 + 1)]
        split = split and height % 2 == 0 and height >= SPLIT
        near = 2 if split else aliases
        rows = [k + b * (height // near) for k in range(height // near) for b in range(near)]
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

        def matrix(table: Tensor, rows: int) -> Tensor:
            return table.reshape(rows, -1).to(device=device, dtype=dtype)

        self.parities = [slice(0, None, 2), slice(1, None, 2)] if split else [slice(None)]  # positions taken together
        self.down, self.back_down = [], []
        for parity in self.parities:
            cos, sin = (table[:, parity] for table in angles(rows[:: len(self.parities)], height))
            # Products with exp(-i angle) and exp(+i angle) as real matrices: row, [re, im] | position, [re, im] and
            # back.
            down = torch.stack([torch.stack([cos, sin], 2), torch.stack([-sin, cos], 2)], dim=1)
            back_down = torch.stack([torch.stack([cos.T, -sin.T], 2), torch.stack([sin.T, cos.T], 2)]) / height
            self.down.append(matrix(down, 2 * len(cos)))
            self.back_down.append(matrix(back_down, 2 * len(cos)))
        self.across, self.back_across = matrix(across, 2 * len(columns)), matrix(back_across, 2 * len(columns)).T
        self.pull_across = matrix(across * weights / height, 2 * len(columns))
        self.dtype, self.device = dtype, device

    def forward(self, x: Tensor) -> Tensor:
        """Transform (H, W, C, batch) images to (frequency, 2 C, batch) spectra."""
        return self.transform(x, self.across)

    def pull(self, cotangent: Tensor) -> Tensor:
        """Apply the transpose of :meth:`inverse` to (batch, C, H, W): the transform with the inverse's weights."""
        return self.transform(memory(cotangent), self.pull_across)

    def transform(self, x: Tensor, across: Tensor) -> Tensor:
        (height, width), columns = self.grid, len(self.columns)
        rest, count, parts = x.shape[2] * x.shape[3], height // len(self.parities), []
        for parity, down in zip(self.parities, self.down, strict=True):
            rows = x[parity].reshape(count, width, rest)
            halves = torch.bmm(across.expand(count, -1, -1), rows)
            by_column = halves.view(2 * count, columns, rest).transpose(0, 1)
            parts.append(torch.bmm(down.expand(columns, -1, -1), by_column).view(columns * count, 2 * rest))
        spectra = parts[0] if len(parts) == 1 else sum_and_difference(*parts)
        return spectra.view(self.count, 2 * x.shape[2], x.shape[3])

    def inverse(self, spectra: Tensor) -> Tensor:
        """Transform (frequency, 2 C, batch) spectra to (H, W, C, batch) images."""
        (height, width), columns = self.grid, len(self.columns)
        channels, batch = spectra.shape[1] // 2, spectra.shape[2]
        rest, count, parts = channels * batch, height // len(self.parities), [spectra]
        images = spectra.new_empty(height, width, rest) if len(self.parities) == 2 and not recording(spectra) else None
        if len(self.parities) == 2:
            pairs = spectra.reshape(columns * count, 2, 2 * rest)
            parts = [pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]]
            del spectra, pairs  # their memory is free for what follows
        results = []
        for part, back_down, parity in zip(parts, self.back_down, self.parities, strict=True):
            by_column = part.reshape(columns, 2 * count, rest)
            halves = torch.bmm(back_down.expand(columns, -1, -1), by_column)
            by_row = halves.view(2 * columns, count, rest).transpose(0, 1)
            out = images[parity] if images is not None else None
            results.append(torch.bmm(self.back_across.expand(count, -1, -1), by_row, out=out))
        if images is None:
            images = torch.stack(results, dim=1)
        return images.view(height, width, channels, batch)

    def correlation(self, cotangent: Tensor, spectra: Tensor, taps: tuple[int, int]) -> Tensor:
        """Return the gradient of the kernel of a convolution of what has these spectra: (O, I, *taps)."""
        pulled, phases = self.pull(cotangent), self.phases(*taps)
        outputs, inputs = pulled.shape[1] // 2, spectra.shape[1] // 2
        total = pulled.new_zeros(phases.shape[1], outputs * inputs)
        few = max(1, AT_ONCE // (4 * outputs * inputs))
        for y, x, cos, sin in zip(
            *(table.split(few) for table in (pulled, spectra, *phases.view(2, self.count, -1))), strict=True
        ):
            # W x^ = (Re + i Im) (x_re + i x_im): the gradients of Re and Im, then of the taps they are sums of.
            products = torch.bmm(y, x.mT)
            (rr, ri), (ir, ii) = (row.split(inputs, dim=2) for row in products.split(outputs, dim=1))
            total.addmm_(cos.T, (rr + ii).flatten(1)).addmm_(sin.T, (ir - ri).flatten(1))
        return total.view(*taps, outputs, inputs).permute(2, 3, 0, 1)

    def blocks(self, kernel: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the (frequency, O, I) complex blocks of a circular convolution, y(p) = sum_t K_t x(p + t - c).

        Args:
            kernel: K, (O, I, height, width).
            part: some of the frequencies.
        """
        phases = self.phases(kernel.shape[2], kernel.shape[3]).view(2, self.count, -1)[:, part]
        table = phases @ kernel.flatten(2).permute(2, 0, 1).flatten(1)  # ([re, im], frequency, O I)
        re, im = table.unflatten(2, kernel.shape[:2])
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


def spectrum(grid: tuple[int, int], like: Tensor, aliases: int = 1, *, split: bool = True) -> Spectrum:
    """Return the transform on a grid, with the dtype and device of a tensor; its tables are cached."""
    with torch.inference_mode(False):
        return _cached_spectrum(grid, aliases, split, like.dtype, like.device)


def recording(*tensors: Tensor) -> bool:
    """Return whether results must be new tensors, for a graph or for a transform of functions."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return recorded or in_transform() or torch.compiler.is_compiling()


def sum_and_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b and a - b in a new dimension after the first."""
    if recording(a, b):
        return torch.stack([a + b, a - b], dim=1)
    both = a.new_empty(len(a), 2, *a.shape[1:])
    torch.add(a, b, out=both[:, 0])
    torch.sub(a, b, out=both[:, 1])
    return both


def real(blocks: Tensor, table: Tensor | None = None) -> Tensor:
    """Return complex (..., O, I) blocks as real (..., 2 O, 2 I) ones; their transpose is that of the adjoint.

    Args:
        blocks: complex blocks.
        table: where to write the result, without a graph.
    """
    re, im = blocks.real, blocks.imag
    if recording(blocks):
        return torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    outputs, inputs = blocks.shape[-2:]
    if table is None:
        table = re.new_empty(*blocks.shape[:-2], 2 * outputs, 2 * inputs)  # written once, without temporaries
    for row, column, part in ((0, 0, re), (outputs, 0, im), (outputs, inputs, re)):
        table[..., row : row + outputs, column : column + inputs] = part
    torch.neg(im, out=table[..., :outputs, inputs:])
    return table

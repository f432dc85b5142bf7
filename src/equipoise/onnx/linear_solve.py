"""Small dense linear systems written out in elementary operations: ONNX has no linear solve."""

import torch
from torch import Tensor


def solve(matrix: Tensor, right: Tensor, *, definite: bool = False) -> Tensor:
    """Solve (batch, n, n) systems by Gaussian elimination; 0 where a matrix is singular.

    The loop over n is unrolled, so n should be small.

    Args:
        matrix: (batch, n, n).
        right: (batch, n).
        definite: whether the matrices are symmetric and positive definite: then no pivoting is needed.
    """
    batch, n = right.shape
    table, rows = torch.cat([matrix, right[:, :, None]], dim=2), []
    for left in range(n, 0, -1):  # table: the rows and columns that are left, and the right-hand side
        row, below = table.split([1, left - 1], dim=1)
        if not definite and left > 1:
            largest = table[:, :, 0].abs().argmax(dim=1)[:, None, None]
            pivot = table.gather(1, largest.expand(batch, 1, left + 1))
            here = torch.arange(1, left, device=right.device)[:, None] == largest
            row, below = pivot, torch.where(here, row, below)  # the first row takes the place of the pivot's
        head, rest = row.split([1, left], dim=2)
        rows.append((head, rest))
        heads, others = below.split([1, left], dim=2)
        table = others - heads / head * rest
    known = torch.ones_like(right[:, :1, None])  # (-x, 1) for the entries of x computed so far
    for head, rest in reversed(rows):
        known = torch.cat([-(rest @ known) / head, known], dim=1)
    singular = torch.cat([head for head, _ in rows], dim=1).eq(0).any(dim=1)
    return torch.where(singular, 0.0, -known[:, :n, 0])

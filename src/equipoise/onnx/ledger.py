"""The ledger of a solve as tensors: the entries and rules of :mod:`equipoise.solvers.ledger` without branches."""

import torch
from torch import Tensor

from equipoise.problem.layout import relative_residual, row_norms
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Result
from equipoise.solvers.ledger import ACTIVE, FLOOR, PROGRESS, SETTLED
from equipoise.tolerance import Tolerance

Entries = tuple[Tensor, ...]  # of every sample: best iterate, result, steps, residual, mark, since


class Rules:
    """When a sample stops, and what is kept of it."""

    def __init__(self, tolerance: Tolerance, problem: FunctionProblem, check_every: int):
        self.tolerance, self.check_every = tolerance, check_every
        self.floor = FLOOR * problem.rounding
        # Whether the tolerance is below rounding; a tolerance of zero asks for all steps.
        self.limited = tolerance.relative < self.floor and (tolerance.relative > 0 or tolerance.absolute > 0)

    def opened(self, z: Tensor) -> Entries:
        """Return the entries before the first evaluation."""
        zeros = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
        infinite = torch.full((z.shape[0],), torch.inf, dtype=z.dtype, device=z.device)
        return z, zeros + ACTIVE, zeros, infinite, infinite.clone(), zeros.clone()

    def active(self, step: Tensor, entries: Entries) -> Tensor:
        """Return whether another step is to be taken."""
        return (step < self.tolerance.max_steps) & (entries[1] == ACTIVE).any()

    def recorded(self, step: Tensor, z: Tensor, image: Tensor, entries: Entries) -> Entries:
        """Enter evaluation number ``step``, of f at z."""
        after = self.settled(step, z, image, entries)
        if self.check_every == 1:
            return after
        due = (step == 1) | (step % self.check_every == 0) | (step >= self.tolerance.max_steps)
        return tuple(torch.where(due, new, old) for new, old in zip(after, entries, strict=True))

    def settled(self, step: Tensor, z: Tensor, image: Tensor, entries: Entries) -> Entries:
        best, result, steps, lowest, mark, since = entries
        tolerance, last = self.tolerance, step >= self.tolerance.max_steps
        gap, scale = row_norms(image - z), row_norms(image)
        residual = relative_residual(gap, scale)
        active = result == ACTIVE
        usable = active & torch.isfinite(gap + scale)
        reached = usable & (gap <= tolerance.relative * scale + tolerance.absolute)
        better = (usable & (residual < lowest)) | reached
        progress = usable & (residual < PROGRESS * mark)
        lowest = torch.where(better, residual, lowest)
        mark = torch.where(progress, torch.minimum(residual, mark), mark)
        since = torch.where(progress, step, since)
        result = torch.where(reached, Result.CONVERGED, result)
        result = torch.where(active & ~usable, Result.NONFINITE, result)
        waited = step - since
        if self.limited:  # converged to rounding
            settled = (lowest <= self.floor) & (last | (waited >= SETTLED))
            result = torch.where((result == ACTIVE) & settled, Result.CONVERGED, result)
        if (patience := tolerance.patience) is not None and patience < tolerance.max_steps:
            stalled = (step > patience) & (waited >= patience)
            result = torch.where((result == ACTIVE) & stalled, Result.STALLED, result)
        result = torch.where((result == ACTIVE) & last, Result.MAX_STEPS, result)
        return torch.where(better[:, None], z, best), result, torch.where(active, step, steps), lowest, mark, since

"""What is known about each sample of a solve: its best iterate, its residual, and whether and how it has finished."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from equipoise.problem.layout import relative_residual, select, smallest_exact_norm, squares_fit
from equipoise.problem.problem import Problem
from equipoise.solution import Result
from equipoise.solvers.base import State
from equipoise.tolerance import Tolerance

ACTIVE = -1  # code of a sample that is still being solved; the other codes are those of Result
PER_SAMPLE = ("best", "companion", "result", "steps", "residual", "mark", "since", "rounded")  # tensors of a Ledger
PROGRESS = 0.99  # a residual below this fraction of the last mark counts as progress
FLOOR = 2.0  # residuals below this number of rounding units are rounding errors
SETTLED = 3  # steps without progress at the floor after which a sample has converged to rounding


@dataclass
class Ledger:
    """The entries of a batch of samples, updated at every check. Those of a finished sample no longer change."""

    tolerance: Tolerance
    floor: float  # residual below which rounding dominates
    unit: Tensor | float  # Problem.unit of these samples
    best: Tensor  # iterate with the lowest residual
    companion: Tensor | None  # Solver.companion of best
    result: Tensor
    steps: Tensor  # number of steps, of finished samples
    residual: Tensor  # relative residual of best
    mark: Tensor  # residual at the last progress
    since: Tensor  # step of the last progress
    rounded: Tensor | None  # whether a sample converged to rounding; None if the tolerance is above it
    finished: int = 0  # number of samples that are not active

    @classmethod
    def open(cls, problem: Problem, z: Tensor, companion: Tensor | None, tolerance: Tolerance) -> Self:
        floor = FLOOR * problem.rounding
        codes = torch.full((len(z),), ACTIVE, dtype=torch.int64, device=z.device)
        infinite = torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device)
        # A tolerance of zero asks for all steps.
        limited = tolerance.relative < floor and (tolerance.relative > 0 or tolerance.absolute > 0)
        rounded = codes == 0 if limited else None
        zeros = torch.zeros_like(codes)
        return cls(tolerance, floor, problem.unit, z, companion, codes, zeros, infinite, infinite, zeros, rounded)

    @functools.cached_property
    def allowance(self) -> Tensor:
        """How far a gap may exceed relative * scale without being examined."""
        allowed = self.tolerance.absolute / self.unit + smallest_exact_norm(self.best.dtype)
        return torch.as_tensor(allowed, dtype=self.best.dtype, device=self.best.device)

    def reached(self, gap: Tensor, scale: Tensor) -> Tensor:
        """Return which samples meet the tolerance; NaN never does."""
        bound = self.tolerance.relative * scale
        return gap <= (bound + self.tolerance.absolute / self.unit if self.tolerance.absolute else bound)

    def record(self, step: int, z: Tensor, companion: Tensor | None, state: State) -> tuple[Tensor, int]:
        """Enter one evaluation, at z; return residuals and the number of active samples, with one synchronisation."""
        gap, scale = state.norms()
        if (preferred := state.preferred()) is not None:  # such a state measures itself, exactly
            residual = self.settle(step, gap, scale, z, companion, preferred)
            return residual, len(residual) - self.finished
        residual = gap / scale
        # The tolerance is met, or squares may have underflowed.
        near = gap <= torch.add(self.allowance, scale, alpha=self.tolerance.relative)
        progress = residual < PROGRESS * self.mark  # False for NaN
        uneventful = progress > near
        if self.finished:
            active = self.result == ACTIVE
            progress &= active
            uneventful |= ~active
        if step < self.tolerance.max_steps and bool(uneventful.all()):
            # The common case, progress everywhere and no sample finished, is detected and handled cheaply.
            self.improve(progress, residual, z, companion, everywhere=not self.finished)
            self.advance(progress, residual, step, everywhere=not self.finished)
        else:
            if not squares_fit(gap, scale):
                gap, scale = state.scaled_norms()
            residual = self.settle(step, gap, scale, z, companion, preferred)
        return residual, len(residual) - self.finished

    def settle(
        self, step: int, gap: Tensor, scale: Tensor, z: Tensor, companion: Tensor | None, preferred: Tensor | None
    ) -> Tensor:
        """Determine which samples have finished, and how; return the residuals."""
        residual = relative_residual(gap, scale)
        patience, last = self.tolerance.patience, step >= self.tolerance.max_steps
        active = self.result == ACTIVE
        usable = active & torch.isfinite(gap + scale)
        reached = usable & self.reached(gap, scale)
        progress = residual < PROGRESS * self.mark
        if preferred is None:
            better = usable & (residual < self.residual) | reached
        else:
            better = usable & preferred | reached
            progress |= preferred
        self.advance(usable & progress, torch.minimum(residual, self.mark), step, everywhere=False)
        result = self.result.masked_fill(reached, Result.CONVERGED)
        result.masked_fill_(active ^ usable, Result.NONFINITE)
        if self.rounded is not None:
            best = torch.where(better, residual, self.residual)
            rounded = (result == ACTIVE) & (best <= self.floor) & (last | (step - self.since >= SETTLED))
            result.masked_fill_(rounded, Result.CONVERGED)
            self.rounded = self.rounded | rounded
        if patience is not None and step > patience:
            result.masked_fill_((result == ACTIVE) & (step - self.since >= patience), Result.STALLED)
        if last:
            result.masked_fill_(result == ACTIVE, Result.MAX_STEPS)
        self.result = result
        self.steps = self.steps.masked_fill(active, step)
        improved, self.finished = torch.stack([better, result != ACTIVE]).sum(dim=1).tolist()
        if improved:
            self.improve(better, residual, z, companion, everywhere=improved == len(better))
        return residual

    def improve(
        self, where: Tensor, residual: Tensor, z: Tensor, companion: Tensor | None, *, everywhere: bool
    ) -> None:
        """Take ``z`` as the best iterate of some samples; of all of them, without a copy."""
        self.best = z if everywhere else torch.where(where[:, None], z, self.best)
        if companion is not None and self.companion is not None:
            self.companion = companion if everywhere else torch.where(where[:, None], companion, self.companion)
        self.residual = residual if everywhere else torch.where(where, residual, self.residual)

    def advance(self, where: Tensor, residual: Tensor, step: int, *, everywhere: bool) -> None:
        """Mark the progress of some samples."""
        self.mark = residual if everywhere else torch.where(where, residual, self.mark)
        self.since = torch.full_like(self.since, step) if everywhere else self.since.masked_fill(where, step)

    def confirm(self, step: int, state: State) -> tuple[int, bool]:
        """Replace the residuals by those measured at the best iterates of all samples together.

        Returns the number of samples that are no longer solved, and whether a recorded residual was wrong.
        """
        gap, scale = state.norms()
        if not squares_fit(gap, scale):
            gap, scale = state.scaled_norms()
        residual, claimed = relative_residual(gap, scale), self.residual
        if self.rounded is None and bool((residual <= torch.add(self.floor, claimed, alpha=1.001)).all()):
            self.residual = residual  # no residual is larger than recorded
            return 0, False
        finite = torch.isfinite(gap + scale)
        slack = self.tolerance.relative + 2 * self.floor  # another batch size may sum in another order
        reached = self.reached(gap, scale)
        holds = finite & (reached | (residual <= slack))
        converged = self.result == Result.CONVERGED
        lost = converged & ~holds
        wrong = lost | (~converged & finite & ~((residual - claimed).abs() <= 0.5 * claimed + 50 * self.floor))
        self.result = self.result.masked_fill(lost, Result.MAX_STEPS if step >= self.tolerance.max_steps else ACTIVE)
        self.residual = torch.where(finite, residual, claimed.masked_fill(lost, torch.inf))
        if self.rounded is not None:
            self.rounded = converged & holds & ~reached
        self.mark = torch.where(lost, self.residual, self.mark)
        self.since = self.since.masked_fill(lost, step)
        remaining = int((self.result == ACTIVE).sum())
        self.finished = len(gap) - remaining
        return remaining, bool(wrong.any())

    def entries(self) -> dict[str, Tensor]:
        return {name: entry for name in PER_SAMPLE if (entry := getattr(self, name)) is not None}

    def take(self, rows: Tensor) -> Self:
        """Return the entries of some samples, all of them active."""
        taken: dict[str, Any] = {name: select(entry, rows) for name, entry in self.entries().items()}
        if isinstance(self.unit, Tensor):
            taken["unit"] = select(self.unit, rows)
        return dataclasses.replace(self, **taken, finished=0)

    def put(self, rows: Tensor, part: "Ledger") -> None:
        """Write the entries of some samples back."""
        for name, entry in self.entries().items():
            setattr(self, name, entry.index_copy(0, rows, getattr(part, name)))

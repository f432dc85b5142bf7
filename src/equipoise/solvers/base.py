"""The one loop that every solver shares, and what a solver is.

A solver is a frozen dataclass of options with ``init`` and ``step``; it proposes iterates and never loops.
:func:`solve` measures residuals, stops each sample by its own, keeps the best iterate of each, leaves finished samples
out of the batch, and counts. :func:`iterate` is the same without looking: a fixed number of steps, traceable.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from equipoise.problem.function import Problem, autocast_state
from equipoise.problem.independence import mixes_samples
from equipoise.problem.layout import select
from equipoise.problem.rescaled import Rescaled, units
from equipoise.solution import Result, Statistics
from equipoise.tolerance import (
    Tolerance,
    relative_residual,
    row_distances,
    row_norms,
    scaled_row_norms,
    smallest_exact_norm,
    squares_fit,
)

ACTIVE = -1  # a sample that is still being solved; other codes are those of Result
PER_SAMPLE = ("best", "companion", "result", "steps", "residual", "mark", "since", "rounded")  # tensors of a Ledger
PROGRESS = 0.99  # a residual counts as progress when it falls below this fraction of the last that did
FLOOR = 2.0  # rounding units below which a residual is rounding
SETTLED = 3  # steps without progress there after which a sample has converged as far as its numbers can tell


@dataclass
class State:
    """An iterate and its image f(z), both (batch, n). Solvers add what they remember.

    Nothing in it is ever changed in place but the solver's own buffers: iterates may be kept by reference.
    """

    z: Tensor
    image: Tensor

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return ||f(z) - z|| and ||f(z)|| per sample, by squares that may underflow or overflow."""
        return row_distances(self.image, self.z), row_norms(self.image)

    def difference(self) -> Tensor:
        """Return f(z) - z."""
        return self.image - self.z

    def take(self, rows: Tensor) -> Self:
        """This state for the samples ``rows``: every tensor has the batch first."""
        taken = {
            f.name: select(value, rows)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **taken)


@dataclass
class GapState(State):
    """Adds the gap f(z) - z, for solvers that work with it."""

    gap: Tensor

    def norms(self) -> tuple[Tensor, Tensor]:
        return row_norms(self.gap), row_norms(self.image)

    def difference(self) -> Tensor:
        return self.gap


class Solver(ABC):
    """Options of a method, and its ``init`` and ``step``."""

    structured = False  # whether it needs to see more of f than its values: Problem.splitting()
    recurrent = False  # the gap is carried along by a recurrence, not measured: the loop has to confirm the end

    @abstractmethod
    def init(self, problem: Problem, z: Tensor, image: Tensor) -> Any:
        """The state at the start, where ``image`` = f(z) is known."""

    @abstractmethod
    def step(self, problem: Problem, state: Any) -> Any:
        """The state at the next iterate, its image evaluated."""

    def value(self, state: Any) -> Tensor:
        return state.z

    def companion(self, state: Any) -> Tensor | None:
        """What else is wanted of the best iterate, as rows."""
        return None

    def take(self, state: Any, rows: Tensor) -> Any:
        return state.take(rows)

    def for_adjoint(self) -> Solver:
        """The solver that suits the backward pass when the user names none."""
        return self


@dataclass
class Progress:
    """What a callback is given at every check. ``rows`` are the indices of the samples still computed."""

    step: int
    rows: Tensor
    residual: Tensor  # of those rows
    active: Tensor  # which of those rows are still being solved
    state: State = field(repr=False)
    problem: Problem = field(repr=False)

    @property
    def value(self) -> Any:
        """The current iterate of ``rows``, structured like z0."""
        return self.problem.unpack(self.state.z)

    @property
    def image(self) -> Any:
        """f at the current iterate of ``rows``, structured like z0."""
        return self.problem.unpack(self.state.image)


@dataclass
class Ledger:
    """What is known of each sample. ``best`` freezes once its sample is finished, and so does its companion."""

    tolerance: Tolerance
    floor: float  # the residual below which rounding decides
    unit: Tensor | float  # Problem.unit of these samples
    best: Tensor
    companion: Tensor | None
    result: Tensor
    steps: Tensor  # of finished samples
    residual: Tensor  # relative, of ``best``
    mark: Tensor  # the residual at the last progress, and when that was
    since: Tensor
    rounded: Tensor | None  # whether a sample converged to rounding; None where the tolerance is above it
    finished: int = 0

    @classmethod
    def open(cls, problem: Problem, z: Tensor, companion: Tensor | None, tolerance: Tolerance) -> Ledger:
        floor = FLOOR * problem.rounding
        codes = torch.full((len(z),), ACTIVE, dtype=torch.int64, device=z.device)
        infinite = torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device)
        # With a tolerance of zero all steps are meant to be taken.
        limited = tolerance.relative < floor and (tolerance.relative > 0 or tolerance.absolute > 0)
        rounded = codes == 0 if limited else None
        zeros = torch.zeros_like(codes)
        return cls(tolerance, floor, problem.unit, z, companion, codes, zeros, infinite, infinite, zeros, rounded)

    @functools.cached_property
    def allowance(self) -> Tensor:
        """What a gap may exceed relative * scale by before it needs no closer look."""
        allowed = self.tolerance.absolute / self.unit + smallest_exact_norm(self.best.dtype)
        return torch.as_tensor(allowed, dtype=self.best.dtype, device=self.best.device)

    def record(self, step: int, z: Tensor, companion: Tensor | None, state: State) -> tuple[Tensor, int]:
        """Enter one evaluation, at z. Returns the residuals and how many samples are active: one synchronisation."""
        gap, scale = state.norms()
        residual = gap / scale
        # Reached the tolerance, or is so small that its squares may have underflowed.
        near = gap <= torch.add(self.allowance, scale, alpha=self.tolerance.relative)
        progress = residual < PROGRESS * self.mark  # False for NaN
        uneventful = progress > near
        if self.finished:
            active = self.result == ACTIVE
            progress &= active
            uneventful |= ~active
        if step < self.tolerance.max_steps and bool(uneventful.all()):
            # The common case, every active sample nearer and none done, takes a short way: cheap functions feel it.
            self.improve(progress, residual, z, companion, everywhere=not self.finished)
            self.progress(progress, residual, step, everywhere=not self.finished)
            return residual, len(residual) - self.finished
        if not squares_fit(gap, scale):
            gap, scale = scaled_row_norms(state.difference()), scaled_row_norms(state.image)
        residual = relative_residual(gap, scale)
        self.settle(step, gap, scale, residual, z, companion)
        return residual, len(residual) - self.finished

    def settle(
        self, step: int, gap: Tensor, scale: Tensor, residual: Tensor, z: Tensor, companion: Tensor | None
    ) -> None:
        """The long way: find out which samples are finished, and how."""
        patience, last = self.tolerance.patience, step >= self.tolerance.max_steps
        active = self.result == ACTIVE
        usable = active & torch.isfinite(gap + scale)
        reached = usable & self.tolerance.reached(gap, scale, self.unit)
        self.progress(usable & (residual < PROGRESS * self.mark), residual, step, everywhere=False)
        better = usable & (residual < self.residual) | reached
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

    def improve(
        self, where: Tensor, residual: Tensor, z: Tensor, companion: Tensor | None, *, everywhere: bool
    ) -> None:
        """Take ``z`` as the best iterate of some samples; of all of them, without a copy."""
        self.best = z if everywhere else torch.where(where[:, None], z, self.best)
        if companion is not None and self.companion is not None:
            self.companion = companion if everywhere else torch.where(where[:, None], companion, self.companion)
        self.residual = residual if everywhere else torch.where(where, residual, self.residual)

    def progress(self, where: Tensor, residual: Tensor, step: int, *, everywhere: bool) -> None:
        """Note that some samples have come on."""
        self.mark = residual if everywhere else torch.where(where, residual, self.mark)
        self.since = torch.full_like(self.since, step) if everywhere else self.since.masked_fill(where, step)

    def confirm(self, step: int, image: Tensor) -> tuple[int, bool]:
        """Enter what was measured at the best iterates of all samples together, in place of what was claimed.

        Returns how many samples are no longer solved and have to go on, and whether a claim was contradicted.
        """
        state = State(self.best, image)
        gap, scale = state.norms()
        if not squares_fit(gap, scale):
            gap, scale = scaled_row_norms(state.difference()), scaled_row_norms(image)
        residual, claimed = relative_residual(gap, scale), self.residual
        if self.rounded is None and bool((residual <= torch.add(self.floor, claimed, alpha=1.001)).all()):
            self.residual = residual  # nothing is worse than it was said to be
            return 0, False
        finite = torch.isfinite(gap + scale)
        slack = self.tolerance.relative + 2 * self.floor  # a batch of another size may be summed in another order
        reached = self.tolerance.reached(gap, scale, self.unit)
        holds = finite & (reached | (residual <= slack))
        converged = self.result == Result.CONVERGED
        lost = converged & ~holds
        false = lost | (~converged & finite & ~((residual - claimed).abs() <= 0.5 * claimed + 50 * self.floor))
        self.result = self.result.masked_fill(lost, Result.MAX_STEPS if step >= self.tolerance.max_steps else ACTIVE)
        self.residual = torch.where(finite, residual, claimed.masked_fill(lost, torch.inf))
        if self.rounded is not None:
            self.rounded = converged & holds & ~reached
        self.mark = torch.where(lost, self.residual, self.mark)
        self.since = self.since.masked_fill(lost, step)
        remaining = int((self.result == ACTIVE).sum())
        self.finished = len(gap) - remaining
        return remaining, bool(false.any())

    def take(self, rows: Tensor) -> Ledger:
        """The entries of some samples, all of them active."""
        entries = self.entries()
        taken: dict[str, Any] = {name: None if entry is None else select(entry, rows) for name, entry in entries}
        unit = select(self.unit, rows) if isinstance(self.unit, Tensor) else self.unit
        return Ledger(self.tolerance, self.floor, unit, **taken)

    def put(self, rows: Tensor, part: Ledger) -> None:
        """Write the entries of some samples back."""
        for name, entry in self.entries():
            if entry is not None:
                setattr(self, name, entry.index_copy(0, rows, getattr(part, name)))

    def entries(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in PER_SAMPLE]


@dataclass
class Solved:
    """The outcome of :func:`solve`, in rows, with what is needed to look closer or to differentiate."""

    z: Tensor
    companion: Tensor | None  # of z: Solver.companion
    stats: Statistics
    problem: Problem
    solver: Solver
    tolerance: Tolerance
    states: list[tuple[Tensor, Any]] = field(default_factory=list)  # samples and the state they ended in, on request
    confirmed: bool = False  # whether ``finish`` evaluated f at z, all samples together

    @property
    def below_rounding(self) -> bool:
        """Whether the tolerance asks for less than the numbers resolve."""
        return self.tolerance.absolute == 0 and 0 < self.tolerance.relative < FLOOR * self.problem.rounding

    def take(self, rows: Tensor) -> Solved:
        """The same for some samples."""
        problem = self.problem.take(rows)
        assert problem is not None
        companion = None if self.companion is None else select(self.companion, rows)
        stats = self.stats.take(rows)
        return dataclasses.replace(
            self, z=select(self.z, rows), companion=companion, stats=stats, problem=problem, confirmed=False
        )


@dataclass(frozen=True)
class Looks:
    """How a solve is looked at on its way.

    Attributes:
        trace: whether to keep the residuals of every check.
        callback: called with a :class:`Progress` at every check.
        check_every: steps between two looks at the residuals.
        keep_states: whether to keep the state in which each sample ended.
    """

    trace: bool = False
    callback: Callable[[Progress], object] | None = None
    check_every: int = 1
    keep_states: bool = False


UNWATCHED = Looks()


def solve(
    problem: Problem,
    z: Tensor,
    image: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    looks: Looks = UNWATCHED,
    *,
    inner: bool = False,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Solved:
    """Solve z = problem(z) for every row from ``z``, whose ``image`` is known. Records no graph.

    Finished samples are left out if ``problem.gatherable``. What was claimed of samples that stopped while others went
    on is measured in the end, all samples together, and samples that are not solved any more go on.

    Args:
        inner: whether this is a step of another solver, which measures for itself.
        finish: evaluates f for that last measurement, instead of ``problem``; may record it.
    """
    kind = z.device.type
    own_sums_in_full_precision = torch.autocast(kind, enabled=False) if autocast_state(kind) else nullcontext()
    finish = finish or problem
    with torch.no_grad(), own_sums_in_full_precision:
        if inner or solver.structured or (unit := units(z, image)) is None:
            return loop(problem, z, image, solver, tolerance, looks, inner, finish)
        scaled = Rescaled(problem, unit)
        scaled_finish = scaled.conjugate(finish)
        z, image = scaled.divided(z), scaled.divided(image)
        solved = loop(scaled, z, image, solver, tolerance, looks, inner, scaled_finish)
        return dataclasses.replace(solved, z=scaled.multiplied(solved.z), problem=problem)


def loop(
    problem: Problem,
    z: Tensor,
    image: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    looks: Looks,
    inner: bool,
    finish: Callable[[Tensor], Tensor],
) -> Solved:
    """:func:`solve`, in units in which numbers can be squared."""
    whole, narrow, gatherable, coarse = problem, problem, problem.gatherable, problem.coarse
    # One sample has no batch-mates, and a solver that sees the structure of f knows that they do not matter.
    confirm = not inner and (solver.recurrent or (len(z) > 1 and not solver.structured))
    rows = torch.arange(z.shape[0], device=z.device)
    history: list[Tensor] = []
    states: list[tuple[Tensor, Any]] = []
    wasted, confirmed, examined, mixing = 0, False, False, False

    held = [solver.init(narrow, z, image)]  # popped for every step, so that it can let go of tensors before f runs
    # Of the samples still computed, and of all.
    ledger = book = Ledger.open(problem, problem.rounded(z), solver.companion(held[0]), tolerance)
    step = 1
    while True:
        if step == 1 or step % looks.check_every == 0 or step >= tolerance.max_steps:
            was_active = ledger.result == ACTIVE if looks.trace else None
            state: State = held[0]
            value = solver.value(state)
            if coarse:  # measured where it will be returned
                value = narrow.rounded(value)
            residual, active = ledger.record(
                step, value, solver.companion(state), State(value, state.image) if coarse else state
            )
            if was_active is not None:
                last = history[-1] if history else torch.full_like(book.residual, torch.inf)
                history.append(last.index_copy(0, rows, torch.where(was_active, residual, last[rows])))
            if looks.callback is not None:
                looks.callback(Progress(step, rows, residual, ledger.result == ACTIVE, state, narrow))
            if looks.keep_states:
                ended = ((ledger.result != ACTIVE) & (ledger.steps == step)).nonzero().squeeze(1)
                states.append((rows[ended], solver.take(state, ended)))
            if active == 0:
                measured = ledger is book and book.best is value and not solver.recurrent
                if ledger is not book:
                    book.put(rows, ledger)
                if measured or not confirm:
                    break
                held.clear()
                del state, value
                image, confirmed = finish(book.best), True
                remaining, contradicted = book.confirm(step, image)
                if contradicted and not examined and (not solver.recurrent or step >= tolerance.max_steps):
                    examined, mixing = True, mixes_samples(whole, book.best, image)
                    gatherable = gatherable and not mixing
                if not remaining:
                    break
                # Samples moved when their batch-mates did, or a recurrence had drifted: go on from what was measured.
                ledger, rows, narrow, wasted = book, torch.arange(len(image), device=image.device), whole, 0
                held, confirmed = [solver.init(narrow, book.best, image)], False
                step += 1
                continue
            wasted += (len(rows) - active) * looks.check_every
            if gatherable and worth_gathering(len(rows), active, wasted):
                kept = (ledger.result == ACTIVE).nonzero().squeeze(1)
                taken = narrow.take(kept)
                if taken is None:
                    gatherable = False
                else:
                    if ledger is not book:
                        book.put(rows, ledger)
                    ledger, rows, wasted = ledger.take(kept), rows.index_select(0, kept), 0
                    narrow, held = taken, [solver.take(held.pop(), kept)]
            del state, value
        held.append(solver.step(narrow, held.pop()))
        step += 1

    if mixing:
        book.result = book.result.masked_fill(book.result != Result.NONFINITE, Result.COUPLED)
    stats = Statistics(
        result=book.result,
        steps=book.steps,
        residual=book.residual,
        evaluations=whole.count.evaluations,
        rows=whole.count.rows,
        trace=torch.stack(history) if looks.trace else None,
        rounded=book.rounded,
    )
    best = book.best
    if best is z or not (bool(stats.converged.all()) or bool(torch.isfinite(stats.residual).all())):
        best = torch.nan_to_num(best, nan=0.0, posinf=0.0, neginf=0.0)  # a z0 that was never finite; also a copy
    return Solved(best, book.companion, stats, whole, solver, tolerance, states, confirmed)


def worth_gathering(rows: int, active: int, wasted: int) -> bool:
    """Leave finished samples out once they make an eighth of the batch and have cost as much as gathering may.

    Gathering copies the history of the active samples, which costs about as much as evaluating them once (measured:
    0.4 to 1.2 evaluations), so it waits until that much has been wasted since the last time.
    """
    return 8 * active <= 7 * rows and wasted >= active


def iterate(problem: Problem, z: Tensor, image: Tensor, solver: Solver, steps: int) -> State:
    """``steps`` evaluations by ``solver`` with no look at the residual: no synchronisation, one straight graph."""
    state = solver.init(problem, z, image)
    for _ in range(steps - 1):
        state = solver.step(problem, state)
    return state


def evaluated(problem: Problem, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An iterate, its image and its gap: the first three fields of a :class:`GapState`."""
    image = problem(z)
    return z, image, image - z

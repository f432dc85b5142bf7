"""The one loop that every solver shares, and what a solver is.

A solver is a frozen dataclass of options with ``init`` and ``step``; it proposes iterates and never loops.
:func:`solve` measures residuals, stops each sample by its own, keeps the best iterate of each, leaves finished samples
out of the batch, and counts. :func:`iterate` is the same without looking: a fixed number of steps, traceable.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from equipoise.layout import select
from equipoise.problem import Problem, autocast_state
from equipoise.solution import Result, Statistics
from equipoise.tolerance import Tolerance, relative_residual, row_distances, row_norms

ACTIVE = -1  # a sample that is still being solved; other codes are those of Result
PER_SAMPLE = ("best", "companion", "result", "steps", "residual", "mark", "since")  # the tensors of a Ledger
PROGRESS = 0.99  # a residual counts as progress when it falls below this fraction of the last that did


@dataclass
class State:
    """An iterate and its image f(z), both (batch, n). Solvers add what they remember.

    Nothing in it is ever changed in place but the solver's own buffers: iterates may be kept by reference.
    """

    z: Tensor
    image: Tensor

    def norms(self) -> tuple[Tensor, Tensor]:
        """||f(z) - z|| and ||f(z)|| per sample."""
        return row_distances(self.image, self.z), row_norms(self.image)

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
        return self.problem.layout.unpack(self.state.z)

    @property
    def image(self) -> Any:
        """f at the current iterate of ``rows``, structured like z0."""
        return self.problem.layout.unpack(self.state.image)


@dataclass
class Ledger:
    """What is known of each sample. ``best`` freezes once its sample is finished, and so does its companion."""

    best: Tensor
    companion: Tensor | None
    result: Tensor
    steps: Tensor  # of finished samples
    residual: Tensor  # relative, of ``best``
    mark: Tensor  # the residual at the last progress, and when that was
    since: Tensor
    finished: int = 0

    @classmethod
    def open(cls, z: Tensor, companion: Tensor | None) -> Ledger:
        batch = z.shape[0]
        codes = torch.full((batch,), ACTIVE, dtype=torch.int64, device=z.device)
        infinite = torch.full((batch,), torch.inf, dtype=z.dtype, device=z.device)
        return cls(z, companion, codes, torch.zeros_like(codes), infinite, infinite, torch.zeros_like(codes))

    def record(
        self, step: int, z: Tensor, companion: Tensor | None, state: State, tolerance: Tolerance
    ) -> tuple[Tensor, int]:
        """Enter one evaluation, at z. Returns the residuals and how many samples are active: one synchronisation."""
        gap, scale = state.norms()
        residual = gap / scale
        reached = tolerance.reached(gap, scale)
        progress = residual < PROGRESS * self.mark  # False for NaN
        uneventful = progress > reached
        if self.finished:
            active = self.result == ACTIVE
            progress &= active
            uneventful |= ~active
        if step < tolerance.max_steps and bool(uneventful.all()):
            # The common case, every active sample nearer and none done, takes a short way: cheap functions feel it.
            self.improve(progress, residual, z, companion, everywhere=not self.finished)
            self.progress(progress, residual, step, everywhere=not self.finished)
            return residual, len(residual) - self.finished
        residual = relative_residual(gap, scale)
        self.settle(step, gap + scale, residual, reached, progress, z, companion, tolerance)
        return residual, len(residual) - self.finished

    def settle(
        self,
        step: int,
        size: Tensor,
        residual: Tensor,
        reached: Tensor,
        progress: Tensor,
        z: Tensor,
        companion: Tensor | None,
        tolerance: Tolerance,
    ) -> None:
        """The long way: find out which samples are finished, and how."""
        active = self.result == ACTIVE
        usable = active & torch.isfinite(size)
        converged = usable & reached
        self.progress(progress & active, residual, step, everywhere=False)
        result = self.result.masked_fill(converged, Result.CONVERGED)
        result.masked_fill_(active ^ usable, Result.NONFINITE)
        if tolerance.patience is not None and step > tolerance.patience:
            result.masked_fill_((result == ACTIVE) & (step - self.since >= tolerance.patience), Result.STALLED)
        if step >= tolerance.max_steps:
            result.masked_fill_(result == ACTIVE, Result.MAX_STEPS)
        self.result = result
        self.steps = self.steps.masked_fill(active, step)
        better = usable & (residual < self.residual) | converged
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

    def confirm(self, step: int, state: State, tolerance: Tolerance) -> int:
        """Enter measured gaps in place of claimed ones. Returns how many samples have to go on."""
        gap, scale = state.norms()
        false = (self.result == Result.CONVERGED) & ~tolerance.reached(gap, scale)
        self.result = self.result.masked_fill(false, Result.MAX_STEPS if step >= tolerance.max_steps else ACTIVE)
        self.residual = torch.where(torch.isfinite(gap + scale), relative_residual(gap, scale), self.residual)
        self.mark = torch.where(false, self.residual, self.mark)
        self.since = self.since.masked_fill(false, step)
        remaining = int((self.result == ACTIVE).sum())
        self.finished = len(gap) - remaining
        return remaining

    def take(self, rows: Tensor) -> Ledger:
        """The entries of some samples, all of them active."""
        entries = self.entries()
        taken: dict[str, Any] = {name: None if entry is None else select(entry, rows) for name, entry in entries}
        return Ledger(**taken)

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

    def take(self, rows: Tensor) -> Solved:
        """The same for some samples."""
        problem = self.problem.take(rows)
        assert problem is not None
        companion = None if self.companion is None else select(self.companion, rows)
        stats = self.stats.take(rows)
        return dataclasses.replace(self, z=select(self.z, rows), companion=companion, stats=stats, problem=problem)


def solve(
    problem: Problem,
    z: Tensor,
    image: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    *,
    trace: bool = False,
    callback: Callable[[Progress], object] | None = None,
    check_every: int = 1,
    keep_states: bool = False,
    confirm: bool = True,
) -> Solved:
    """Solve z = problem(z) for every row from ``z``, whose ``image`` is known. Records no graph.

    Finished samples are left out if ``problem.gatherable``. ``confirm`` is for recurrent solvers.
    """
    kind = z.device.type
    own_sums_in_full_precision = torch.autocast(kind, enabled=False) if autocast_state(kind) else nullcontext()
    with torch.no_grad(), own_sums_in_full_precision:
        whole, narrow, gatherable = problem, problem, problem.gatherable
        rows = torch.arange(z.shape[0], device=z.device)
        history: list[Tensor] = []
        states: list[tuple[Tensor, Any]] = []
        wasted = 0

        held = [solver.init(narrow, z, image)]  # popped for every step, so that it can let go of tensors before f runs
        ledger = book = Ledger.open(z, solver.companion(held[0]))  # of the samples still computed, and of all
        step = 1
        while True:
            if step == 1 or step % check_every == 0 or step >= tolerance.max_steps:
                was_active = ledger.result == ACTIVE if trace else None
                residual, active = ledger.record(
                    step, solver.value(held[0]), solver.companion(held[0]), held[0], tolerance
                )
                if was_active is not None:
                    last = history[-1] if history else torch.full_like(book.residual, torch.inf)
                    history.append(last.index_copy(0, rows, torch.where(was_active, residual, last[rows])))
                if callback is not None:
                    callback(Progress(step, rows, residual, ledger.result == ACTIVE, held[0], narrow))
                if keep_states:
                    ended = ((ledger.result != ACTIVE) & (ledger.steps == step)).nonzero().squeeze(1)
                    states.append((rows[ended], solver.take(held[0], ended)))
                if active == 0:
                    if ledger is not book:
                        book.put(rows, ledger)
                    if not (solver.recurrent and confirm):
                        break
                    image = whole(book.best)
                    if book.confirm(step, State(book.best, image), tolerance) == 0:
                        break
                    # The recurrence had drifted from the truth: go on from the measured gap.
                    ledger, rows, narrow, wasted = book, torch.arange(len(image), device=image.device), whole, 0
                    held = [solver.init(narrow, book.best, image)]
                    step += 1
                    continue
                wasted += (len(rows) - active) * check_every
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
            held.append(solver.step(narrow, held.pop()))
            step += 1

        stats = Statistics(
            result=book.result,
            steps=book.steps,
            residual=book.residual,
            evaluations=whole.count.evaluations,
            rows=whole.count.rows,
            trace=torch.stack(history) if trace else None,
        )
        best = book.best
        if best is z or not bool(stats.converged.all()):
            best = torch.nan_to_num(best, nan=0.0, posinf=0.0, neginf=0.0)  # a z0 that was never finite; also a copy
        return Solved(best, book.companion, stats, whole, solver, tolerance, states)


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

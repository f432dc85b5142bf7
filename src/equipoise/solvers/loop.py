"""The loop that all solvers share.

:func:`solve` measures residuals, stops each sample by its own, keeps the best iterate of each, leaves finished samples
out of the batch, and counts evaluations. A :class:`Loop` is one solve: :meth:`Loop.run` is the loop,
:meth:`Loop.measure` its condition, :meth:`Loop.advance` its body, and its attributes are the carry.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from equipoise.problem.independence import mixes_samples
from equipoise.problem.layout import row_units, select
from equipoise.problem.problem import Problem, autocast_state
from equipoise.problem.rescaled import Rescaled
from equipoise.solution import Result, Statistics
from equipoise.solvers.base import Progress, Solver, State
from equipoise.solvers.ledger import ACTIVE, FLOOR, Ledger
from equipoise.tolerance import Tolerance


@dataclass(frozen=True)
class Watch:
    """Options for observing a solve."""

    trace: bool = False  # keep the residuals of every check
    callback: Callable[[Progress], object] | None = None  # called at every check
    check_every: int = 1  # number of steps between two checks
    keep_states: bool = False  # keep the final state of each sample
    keep: tuple[int, ...] = ()  # steps whose iterates to keep


UNWATCHED = Watch()
Evaluate = Callable[[Tensor], Tensor]


class Recorded(Protocol):
    """An evaluation of f with its graph, made by a gradient rule."""

    image: Tensor


@dataclass
class Solved:
    """The outcome of :func:`solve`, in rows, with what is needed to differentiate or diagnose it."""

    z: Tensor
    companion: Tensor | None  # Solver.companion of z
    stats: Statistics
    problem: Problem
    solver: Solver
    tolerance: Tolerance
    converged: bool  # whether every sample has
    states: list[tuple[Tensor, Any]]  # samples and their final state, if requested
    record: Any = None  # f recorded at z, if the loop evaluated it there for all samples together
    kept: list[Tensor] = field(default_factory=list)  # iterates at the steps ``Watch.keep``

    @property
    def below_rounding(self) -> bool:
        """Whether the tolerance is below the rounding error of the numbers."""
        return self.tolerance.absolute == 0 and 0 < self.tolerance.relative < FLOOR * self.problem.rounding

    def take(self, rows: Tensor) -> Self:
        """Return the outcome for some samples."""
        problem = self.problem.take(rows)
        assert problem is not None
        companion = None if self.companion is None else select(self.companion, rows)
        z, stats = select(self.z, rows), self.stats.take(rows)
        return dataclasses.replace(self, z=z, companion=companion, stats=stats, problem=problem, record=None)


def solve(
    problem: Problem,
    z: Tensor,
    image: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    watch: Watch = UNWATCHED,
    *,
    inner: bool = False,
    record: Callable[[Tensor], Recorded] | None = None,
) -> Solved:
    """Solve z = problem(z) for every row, starting from ``z`` with its known ``image``; records no graph.

    Finished samples are left out if ``problem.gatherable``. At the end f is evaluated at the best iterates of all
    samples together, and samples that are no longer solved continue.

    Args:
        inner: whether this is a step of another solver, which measures its own residuals.
        record: function that evaluates f for that last measurement and records it, in place of ``problem``.
    """
    records: list[Recorded] = []

    def finish(rows: Tensor) -> Tensor:
        if record is None:
            return problem(rows)
        records[:] = [record(rows)]
        return records[0].image.detach()

    kind = z.device.type
    with torch.no_grad(), torch.autocast(kind, enabled=False) if autocast_state(kind) else nullcontext():
        if inner or solver.needs or (unit := row_units(z, image)) is None:
            loop = Loop(problem, solver, tolerance, watch, inner, finish)
            solved = loop.run(z, image)
        else:
            scaled = Rescaled(problem, unit)
            loop = Loop(scaled, solver, tolerance, watch, inner, scaled.conjugate(finish))
            solved = loop.run(scaled.divided(z), scaled.divided(image))
            solved.z, solved.problem = scaled.multiplied(solved.z), problem
            solved.kept = [scaled.multiplied(rows) for rows in solved.kept]
    solved.record = records[0] if records and loop.confirmed else None
    return solved


class Loop:
    """The state of one solve; ``finish`` evaluates f for the last measurement."""

    def __init__(
        self, problem: Problem, solver: Solver, tolerance: Tolerance, watch: Watch, inner: bool, finish: Evaluate
    ):
        self.problem, self.solver, self.tolerance, self.watch = problem, solver, tolerance, watch
        self.inner, self.finish, self.coarse = inner, finish, problem.coarse
        # The carry: what changes from step to step.
        self.step = 1
        self.gatherable = problem.gatherable
        self.wasted = 0  # rows computed for finished samples since the last gathering
        self.confirmed = False  # whether f was evaluated at the best iterates of all samples together
        self.mixing: bool | None = None  # whether f mixes samples; None if not examined
        self.history: list[Tensor] = []
        self.states: list[tuple[Tensor, Any]] = []
        self.kept: dict[int, Tensor] = {}

    def run(self, z: Tensor, image: Tensor) -> Solved:
        self.start(z, image)
        companion = self.solver.companion(self.held[0])
        # Entries of the samples still computed, and of all: the same object until samples are left out.
        self.ledger = self.book = Ledger.open(self.problem, self.problem.rounded(z), companion, self.tolerance)
        while True:
            if self.measure():
                self.advance()
            elif not self.reopen():
                return self.outcome(z)

    def start(self, z: Tensor, image: Tensor) -> None:
        self.narrow, self.rows = self.problem, torch.arange(len(z), device=z.device)
        self.held = [self.solver.init(self.problem, z, image)]  # a list, so that ``advance`` can release the state

    def measure(self) -> bool:
        """Check the residuals, if a check is due; return whether samples are still active; leave finished ones out."""
        watch, ledger, step = self.watch, self.ledger, self.step
        if step > 1 and step % watch.check_every and step < self.tolerance.max_steps and step not in watch.keep:
            return True
        was_active = ledger.result == ACTIVE if watch.trace else None
        state: State = self.held[0]
        self.value = value = self.solver.value(state)
        companion = self.solver.companion(state)
        if self.coarse:  # measured where it will be returned
            self.value = value = self.narrow.rounded(value)
            residual, active = ledger.record(step, value, companion, State(value, state.image))
        else:
            residual, active = ledger.record(step, value, companion, state)
        if was_active is not None:
            last = self.history[-1] if self.history else torch.full_like(self.book.residual, torch.inf)
            current = torch.where(was_active, residual, last[self.rows])
            self.history.append(last.index_copy(0, self.rows, current))
        if watch.callback is not None:
            watch.callback(Progress(step, self.rows, residual, ledger.result == ACTIVE, state, self.narrow))
        if step in watch.keep:
            self.keep(value)
        if watch.keep_states:
            ended = ((ledger.result != ACTIVE) & (ledger.steps == step)).nonzero().squeeze(1)
            self.states.append((self.rows[ended], self.solver.take(state, ended)))
        if active:
            self.value = None
            self.wasted += (len(self.rows) - active) * watch.check_every
            if self.gatherable and worth_gathering(len(self.rows), active, self.wasted):
                self.gather()
        return active > 0

    def keep(self, value: Tensor) -> None:
        """Keep the iterates of this step: those of finished samples, and where one is not finite, the best so far."""
        self.put_back()
        current = (self.ledger.result == ACTIVE)[:, None] & torch.isfinite(value).all(dim=1, keepdim=True)
        chosen = torch.where(current, value, self.ledger.best)
        self.kept[self.step] = self.book.best.index_copy(0, self.rows, chosen)

    def gather(self) -> None:
        """Continue with the active samples only."""
        kept = (self.ledger.result == ACTIVE).nonzero().squeeze(1)
        taken = self.narrow.take(kept)
        if taken is None:
            self.gatherable = False
            return
        self.put_back()
        self.ledger, self.rows, self.wasted = self.ledger.take(kept), self.rows.index_select(0, kept), 0
        self.narrow, self.held = taken, [self.solver.take(self.held.pop(), kept)]

    def put_back(self) -> None:
        if self.ledger is not self.book:
            self.book.put(self.rows, self.ledger)

    def advance(self) -> None:
        self.held.append(self.solver.step(self.narrow, self.held.pop()))
        self.step += 1

    def reopen(self) -> bool:
        """Evaluate f at all results together; return whether some samples are not solved and continue."""
        solver, book = self.solver, self.book
        known = self.ledger is book and book.best is self.value and not solver.recurrent
        self.put_back()
        # A single sample has no batch-mates, and they do not matter to a structure that separates the samples.
        separate = len(book.best) == 1 or (solver.needs is not None and solver.needs.separates)
        confirm = not self.inner and (solver.recurrent or not separate)
        if known or not confirm:
            return False
        self.held.clear()
        self.value = None
        image, self.confirmed = self.finish(book.best), True
        remaining, wrong = book.confirm(self.step, solver.measured(self.problem, book.best, image, book.companion))
        last = self.step >= self.tolerance.max_steps
        if wrong and self.mixing is None and (not solver.recurrent or last):
            self.mixing = mixes_samples(self.problem, book.best, image)
            self.gatherable = self.gatherable and not self.mixing
        if not remaining:
            return False
        # Samples moved when their batch-mates did, or a recurrence had drifted: continue from what was measured.
        self.ledger, self.wasted, self.confirmed = book, 0, False
        self.start(book.best, image)
        self.step += 1
        return True

    def outcome(self, first: Tensor) -> Solved:
        book = self.book
        if self.mixing:
            book.result = book.result.masked_fill(book.result != Result.NONFINITE, Result.COUPLED)
        trace = torch.stack(self.history) if self.watch.trace else None
        count = self.problem.count
        stats = Statistics(
            book.result, book.steps, book.residual, count.evaluations, count.rows, trace=trace, rounded=book.rounded
        )
        best, converged = book.best, bool((book.result == Result.CONVERGED).all())
        if best is first or not (converged or bool(torch.isfinite(book.residual).all())):
            best = torch.nan_to_num(best, nan=0.0, posinf=0.0, neginf=0.0)  # if z0 was never finite; also copies
        kept = [self.kept.get(step, best) for step in self.watch.keep]
        return Solved(
            best, book.companion, stats, self.problem, self.solver, self.tolerance, converged, self.states, kept=kept
        )


def worth_gathering(rows: int, active: int, wasted: int) -> bool:
    """Return whether to leave finished samples out: once they are an eighth of the batch and have cost enough.

    Gathering copies the history of the active samples, which costs about one evaluation of them (measured: 0.4 to 1.2).
    """
    return 8 * active <= 7 * rows and wasted >= active

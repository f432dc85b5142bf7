"""What a solver is: a frozen dataclass of options with ``init`` and ``step``. It proposes iterates and never loops."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from equipoise.problem.layout import row_distances, row_norms, scaled_row_norms, select
from equipoise.problem.problem import AnyStructure, Problem, Structure


@dataclass
class State:
    """An iterate and its image f(z), both (batch, n). Solvers add what they remember.

    Nothing in it is modified in place except the solver's own buffers: iterates may be kept by reference.
    """

    z: Tensor
    image: Tensor

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return ||f(z) - z|| and ||f(z)|| per sample; inexact where squares underflow or overflow."""
        return row_distances(self.image, self.z), row_norms(self.image)

    def scaled_norms(self) -> tuple[Tensor, Tensor]:
        """Return :meth:`norms`, computed so that no square underflows or overflows."""
        return scaled_row_norms(self.difference()), scaled_row_norms(self.image)

    def difference(self) -> Tensor:
        return self.image - self.z

    def preferred(self) -> Tensor | None:
        """Return which samples prefer this iterate to all before it; None prefers the lowest residual."""
        return None

    def take(self, rows: Tensor) -> Self:
        """Return the state of the samples ``rows``; every tensor has the batch first."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        taken = {name: select(entry, rows) for name, entry in entries.items() if isinstance(entry, Tensor)}
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

    needs: ClassVar[type[Structure] | None] = None  # structure of f that the method works with, beyond values of f
    recurrent: ClassVar[bool] = False  # the gap is updated by a recurrence: the loop has to measure it at the end

    @abstractmethod
    def init(self, problem: Problem, z: Tensor, image: Tensor) -> Any:
        """Return the initial state, where ``image`` = f(z) is known."""

    @abstractmethod
    def step(self, problem: Problem, state: Any) -> Any:
        """Return the state at the next iterate, with its image evaluated."""

    def value(self, state: Any) -> Tensor:
        return state.z

    def companion(self, state: Any) -> Tensor | None:
        """Return what else is needed of the best iterate, as rows."""
        return None

    def take(self, state: Any, rows: Tensor) -> Any:
        return state.take(rows)

    def measured(self, problem: Problem, z: Tensor, image: Tensor, companion: Tensor | None) -> State:
        """Return a state whose norms are those of ``z``, evaluated once more at the end."""
        return State(z, image)

    def for_adjoint(self) -> "Solver":
        """Return the solver for the backward pass when the user specifies none."""
        return self

    def structure(self, problem: Problem, kind: type[AnyStructure]) -> AnyStructure:
        """Return the structure of f that this method needs, or raise."""
        if (shown := problem.structure(kind)) is None:
            raise TypeError(
                f"{type(self).__name__} needs {kind.requirement}; this f does not show that structure. Otherwise use "
                "Anderson, Broyden or Picard."
            )
        return shown


@dataclass
class Progress:
    """What a callback receives at every check."""

    step: int
    rows: Tensor  # indices of the samples that are still computed
    residual: Tensor  # relative residuals of those rows
    active: Tensor  # which of those rows are not solved yet
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


def iterate(problem: Problem, z: Tensor, image: Tensor, solver: Solver, steps: int) -> State:
    """Return the state after ``steps`` evaluations without checking residuals: no synchronisation, a static graph."""
    state = solver.init(problem, z, image)
    for _ in range(steps - 1):
        state = solver.step(problem, state)
    return state


def backtrack(problem: Problem, state: GapState, direction: Tensor, halvings: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return z + direction with its image and gap; halved up to ``halvings`` times where the residual would grow."""
    z = state.z + direction
    image = problem(z)
    gap = image - z
    if not halvings:
        return z, image, gap
    before, length = row_norms(state.gap), 1.0
    for _ in range(halvings):
        worse = ~(row_norms(gap) <= before)[:, None]  # NaN counts as worse
        if not bool(worse.any()):
            break
        length /= 2
        z = torch.where(worse, state.z + length * direction, z)
        retry = problem(z)
        image, gap = torch.where(worse, retry, image), torch.where(worse, retry - z, gap)
    return z, image, gap


def extrapolation_weights(gram: Tensor, right: Tensor, ridge: float | None) -> Tensor:
    """Return the weights of Anderson's differences, zeros (the plain step) where the system is singular."""
    ridge = 100 * torch.finfo(gram.dtype).eps if ridge is None else ridge
    system = gram.clone()
    diagonal = system.diagonal(dim1=1, dim2=2)
    # A ridge on the matrix scaled to unit diagonal multiplies the diagonal. A zero difference has no effect.
    diagonal.mul_(1 + ridge).add_(diagonal == 0)
    solution, failed = torch.linalg.solve_ex(system, right[:, :, None])
    return solution[:, :, 0].masked_fill_((failed != 0)[:, None], 0.0)

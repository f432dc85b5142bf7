"""The solvers as static graphs: their states are tuples of tensors of fixed shapes, and a step has no branches.

A graph cannot grow a history, nor index it by a number that changes. So the histories of Anderson and Broyden start as
zeros, which have no effect, and a step writes its entry through a mask. The iterates are those of the solvers in
:mod:`equipoise.solvers` up to rounding.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from equipoise.onnx.linear_solve import solve
from equipoise.operators.activations import SmoothActivation
from equipoise.operators.splitting import (
    DouglasRachford,
    ForwardBackward,
    OnRows,
    PeacemanRachford,
    ReflectionSolver,
    ReflectionState,
    Splitting,
    SplittingSolver,
    SplittingState,
)
from equipoise.problem.layout import leaves, rebuild, row_norms
from equipoise.problem.problem import Count, FunctionProblem
from equipoise.solvers import Anderson, Broyden, Picard, Solver

Tensors = tuple[Tensor, ...]
Options = TypeVar("Options", bound=Solver)
SplitOptions = TypeVar("SplitOptions", bound=SplittingSolver)


class Method(ABC, Generic[Options]):
    """A solver as a static graph. The first two tensors of a state are z and f(z), as rows.

    Args:
        solver: its options.
        problem: a problem like those of the graph, with the weights that are frozen into it.
        from_zero: whether z0 is always 0.
    """

    unsupported: ClassVar[dict[str, tuple[Any, str]]] = {}  # options: the only value that can be exported, and why

    def __init__(self, solver: Options, problem: FunctionProblem, from_zero: bool):
        self.solver, self.problem, self.from_zero = solver, problem, from_zero
        for name, (value, reason) in self.unsupported.items():
            if (given := getattr(solver, name)) != value:
                raise NotImplementedError(
                    f"{solver!r} cannot be exported: {reason}. Use {name}={value!r} (it is {given!r}), or pass another "
                    "solver, such as solver=equipoise.Anderson()."
                )

    def inputs(self, problem: FunctionProblem) -> Tensors:
        """Return what a step needs of a problem and does not change."""
        return tuple(tensor for _, tensor in leaves(problem.inputs, "inputs"))

    def bound(self, inputs: Tensors, batch: int) -> FunctionProblem:
        """Return the problem for a batch of this size, with the result of :meth:`inputs` for another problem."""
        return self.sized(batch).replaced(inputs=rebuild(self.problem.inputs, inputs))

    def sized(self, batch: int) -> FunctionProblem:
        """Return a problem without inputs, with the frozen weights."""
        return self.problem.replaced(scope=replace(self.problem.scope, batch=batch), count=Count(), structures={})

    @abstractmethod
    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        """Return the initial state of a :meth:`bound` problem."""

    @abstractmethod
    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        """Return the next state; ``seen`` is the number of steps before this one."""


class PicardMethod(Method[Picard]):
    """Plain and damped steps."""

    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        return z, problem(z)

    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        z, image = state
        z = torch.lerp(image, z, self.solver.damping) if self.solver.damping else image
        return z, problem(z)


class AndersonMethod(Method[Anderson]):
    """Anderson acceleration; see :class:`~equipoise.solvers.anderson.Anderson` for the equations."""

    unsupported: ClassVar[dict[str, tuple[Any, str]]] = {
        "history": ("full", "a graph stores its differences in full precision"),
        "compile": (False, "a graph has nothing to compile"),
    }

    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        (batch, n), memory = z.shape, self.solver.memory
        return z, problem(z), *(z.new_zeros(batch, memory, size) for size in (n, n, memory))

    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        z, image, left, moves, gram = state
        mixing = self.solver.mixing
        gap = image - z
        gamma = self.weights(gram, (left @ gap[:, :, None])[:, :, 0])
        base = image if mixing == 1.0 else torch.add(z, gap, alpha=mixing)
        new = base - (gamma[:, None] @ moves)[:, 0]
        new_image = problem(new)
        new_gap = new_image - new
        dgap, move = new_gap - gap, new_image - image
        if mixing != 1.0:
            move = torch.add(move, dgap, alpha=mixing - 1)
        if self.solver.restart is not None:
            grew = (row_norms(new_gap) > self.solver.restart * row_norms(gap))[:, None, None]
            gram, left = (torch.where(grew, 0.0, part) for part in (gram, left))  # a zero difference has no effect
        here = slot(seen, self.solver.memory)
        newest = dgap if self.solver.kind == 2 else new - z
        left, moves = (
            torch.where(here[:, None], part[:, None], ring) for part, ring in ((newest, left), (move, moves))
        )
        row = column = (left @ newest[:, :, None])[:, :, 0]
        if self.solver.kind == 1:  # entry i, j is dz_i . dgap_j, where dgap_j = (moves_j - dz_j) / mixing
            row = ((moves @ newest[:, :, None])[:, :, 0] - row) / mixing
            column = (left @ dgap[:, :, None])[:, :, 0]
        gram = torch.where(here[:, None], row[:, None], gram)
        return new, new_image, left, moves, torch.where(here, column[:, :, None], gram)

    def weights(self, gram: Tensor, right: Tensor) -> Tensor:
        """Return gamma, as :func:`~equipoise.solvers.base.extrapolation_weights` does."""
        ridge = 100 * torch.finfo(gram.dtype).eps if self.solver.ridge is None else self.solver.ridge
        diagonal = gram.diagonal(dim1=1, dim2=2)
        wanted = diagonal * (1 + ridge) + (diagonal == 0).to(gram.dtype)
        where = torch.eye(self.solver.memory, dtype=torch.bool, device=gram.device)
        matrix = torch.where(where, wanted[:, :, None], gram)
        return solve(matrix, right, definite=self.solver.kind == 2)


class BroydenMethod(Method[Broyden]):
    """Broyden's method; see :class:`~equipoise.solvers.broyden.Broyden`."""

    unsupported: ClassVar = {"line_search": (0, "the number of its evaluations of f depends on the data")}

    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        (batch, n), memory, image = z.shape, self.solver.memory, problem(z)
        left, right = (z.new_zeros(batch, memory, n) for _ in range(2))
        return z, image, left, right, z.new_zeros(batch, memory), image - z

    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        z, image, left, right, weights, direction = state
        gap = image - z
        new = z + direction
        new_image = problem(new)
        new_gap = new_image - new
        here = slot(seen, self.solver.memory)
        if self.solver.when_full == "restart":
            fresh = here[0]  # slot 0 is next: no updates are left, and H = -I
            product = torch.where(fresh, -gap, -direction)  # H g_old
            left, right = (torch.where(fresh, 0.0, ring) for ring in (left, right))
        else:
            old = torch.where(here, weights, 0.0)
            product = -direction - (old[:, None] @ left)[:, 0]
            left, right = (torch.where(here[:, None], 0.0, ring) for ring in (left, right))
        moved = new - z
        along = (right @ new_gap[:, :, None])[:, :, 0]
        new_product = (along[:, None] @ left)[:, 0] - new_gap  # H g_new
        turned = ((left @ moved[:, :, None]).mT @ right)[:, 0] - moved  # H^T s
        scale = (turned * (new_gap - gap)).sum(dim=1, keepdim=True)  # s^T H y
        update = (moved - (new_product - product)) * torch.where(scale == 0, 0.0, 1 / scale)
        weight = (turned * new_gap).sum(dim=1, keepdim=True)
        left, right = (
            torch.where(here[:, None], part[:, None], ring) for part, ring in ((update, left), (turned, right))
        )
        weights = torch.where(here, weight, along)
        return new, new_image, left, right, weights, -torch.addcmul(new_product, update, weight)


class SplittingMethod(Method[SplitOptions]):
    """A splitting solver: its own steps, with the resolvent as products with matrices that are part of the graph."""

    def __init__(self, solver: SplitOptions, problem: FunctionProblem, from_zero: bool):
        super().__init__(solver, problem, from_zero)
        self.shown, self.alpha = solver.split(problem)
        activation = cast(OnRows, self.shown.activation).activation
        if isinstance(activation, SmoothActivation) and self.alpha != 1:
            raise NotImplementedError(
                f"{solver!r} with {activation!r} cannot be exported: the proximal map of this activation is found by "
                "Newton's method, whose number of steps depends on the data. Use alpha=1, or another solver, such as "
                "solver=equipoise.Anderson()."
            )

    def inputs(self, problem: FunctionProblem) -> Tensors:
        return (cast(Splitting, problem.structure(Splitting)).bias,)

    def bound(self, inputs: Tensors, batch: int) -> FunctionProblem:
        problem = self.sized(batch)
        problem.structures[Splitting] = replace(self.shown, bias=inputs[0], problem=problem)
        return problem

    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        """As :meth:`~equipoise.operators.splitting.SplittingSolver.begin`: at 0 for samples whose equilibrium is 0."""
        split = cast(Splitting, problem.structure(Splitting))
        if self.from_zero:  # no product with W, which the file then need not contain
            return z, split.activation(split.bias), split.bias
        at_rest = (split.activation(split.bias) == 0).all(dim=1, keepdim=True)
        z = torch.where(at_rest, 0.0, z)
        pre = split.product(z) + split.bias
        return z, split.activation(pre), pre


class ForwardBackwardMethod(SplittingMethod[ForwardBackward]):
    """Forward-backward splitting."""

    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        after = self.solver.step(problem, SplittingState(*state))
        return after.z, after.image, after.pre


class ReflectionMethod(SplittingMethod[Any]):
    """Peaceman-Rachford and Douglas-Rachford splitting."""

    unsupported: ClassVar = {"memory": (0, "the safeguard of its acceleration branches on the data")}

    def __init__(self, solver: ReflectionSolver, problem: FunctionProblem, from_zero: bool):
        super().__init__(solver, problem, from_zero)
        self.shown.solve(torch.zeros_like(self.shown.bias), self.alpha)  # factorises

    def start(self, problem: FunctionProblem, z: Tensor) -> Tensors:
        z, image, pre = super().start(problem, z)
        # With relaxation, u does not follow from z and W z + b after the first step.
        u = () if self.solver.relaxation == 1 else (torch.lerp(z, pre, self.alpha),)
        return z, image, pre, *u

    def step(self, problem: FunctionProblem, state: Tensors, seen: Tensor) -> Tensors:
        z, image, pre, *u = state
        after = self.solver.step(problem, ReflectionState(z, image, pre, self.alpha, u[0] if u else None))
        return after.z, after.image, after.pre, *(() if after.kept is None else (after.kept,))


METHODS: dict[type[Solver], type[Method[Any]]] = {
    Picard: PicardMethod,
    Anderson: AndersonMethod,
    Broyden: BroydenMethod,
    ForwardBackward: ForwardBackwardMethod,
    PeacemanRachford: ReflectionMethod,
    DouglasRachford: ReflectionMethod,
}


def method_of(solver: Solver, problem: FunctionProblem, from_zero: bool) -> Method[Any]:
    """Return the form of a solver that can be exported, or raise."""
    kind = METHODS.get(type(solver))
    if kind is None:
        supported = ", ".join(known.__name__ for known in METHODS)
        raise NotImplementedError(
            f"{type(solver).__name__} cannot be exported: the number of operations in one of its steps depends on the "
            f"data. Supported: {supported}; pass one as solver=equipoise.Anderson()."
        )
    return kind(solver, problem, from_zero)


def slot(seen: Tensor, memory: int) -> Tensor:
    """Return a mask of the history's entry that step number ``seen`` writes."""
    return torch.arange(memory, device=seen.device) == seen % memory

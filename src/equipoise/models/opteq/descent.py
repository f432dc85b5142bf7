"""What the branches show the descent solvers: the objective G on rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import FunctionProblem
from equipoise.solvers.structure import Objective

if TYPE_CHECKING:
    from equipoise.models.opteq.branches import Branches


class BranchObjective(Objective):
    """G of some branches, for the samples of a problem."""

    def __init__(self, branches: Branches, problem: FunctionProblem):
        self.branches, self.problem = branches, problem

    def preactivation(self, z: Tensor) -> Tensor:
        self.problem.count.add(len(z))
        return self.call(self.branches.preactivation, z, *self.problem.inputs)

    def lower(self, y: Tensor) -> Tensor:
        return self.call(self.branches.lower, y)

    def response(self, pre: Tensor) -> Tensor:
        return self.each(self.branches.activation, pre)

    def prox(self, rows: Tensor, steps: Tensor) -> Tensor:
        image = torch.empty_like(rows)
        for step in steps.unique().tolist():
            at = (steps == step).nonzero().squeeze(1)
            image[at] = self.each(lambda part, step=step: self.branches.activation.prox(part, step), rows[at])
        return image

    def value(self, y: Tensor, z: Tensor) -> Tensor:
        parts = (self.problem.unpack(rows) for rows in (y, z))
        return self.problem.in_scope(self.branches.energy, *parts, *self.problem.inputs)

    def take(self, rows: Tensor, problem: FunctionProblem) -> BranchObjective:
        return BranchObjective(self.branches, problem)

    def each(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a function to every branch: an activation may depend on the shape of its images."""
        return self.call(lambda value: rebuild(value, [function(part) for _, part in leaves(value, "y")]), rows)

    def call(self, function: Callable[..., Any], rows: Tensor, *inputs: Any) -> Tensor:
        return self.problem.pack(self.problem.in_scope(function, self.problem.unpack(rows), *inputs))

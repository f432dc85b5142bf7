"""Jacobian regularisation while training: on some steps the loss gets a term that keeps df/dz small at the equilibrium.

S. Bai, V. Koltun, J. Z. Kolter, "Stabilizing equilibrium models by Jacobian regularization" (2021), and the authors'
code, from which how often, how much and the jitter are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.lab.recipes.recipe import Jacobian
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Solution
from equipoise.stability import jacobian_penalty


def weight_at(jacobian: Jacobian, step: int, draw: torch.Generator) -> float:
    """The weight of the penalty in a step, counted within its phase; 0 in those that have none."""
    if not jacobian.weight or float(torch.rand((), generator=draw)) >= jacobian.share:
        return 0.0
    grown = step // jacobian.growth_every if jacobian.growth_every else 0
    return jacobian.weight + jacobian.growth * grown


@contextmanager
def jittered(model: nn.Module, jitter: int, draw: torch.Generator) -> Iterator[None]:
    """Solves of a model with ``max_steps`` moved by a random number from -jitter to 1, so that it relies on none."""
    layers = [layer for layer in model.modules() if isinstance(layer, Equilibrium)]
    before = [layer.tolerance for layer in layers]
    move = int(torch.randint(-jitter, 2, (), generator=draw)) if jitter else 0
    try:
        for layer in layers:
            steps = max(1, layer.tolerance.max_steps + move)
            layer.tolerance = replace(layer.tolerance, max_steps=steps)
        yield
    finally:
        for layer, tolerance in zip(layers, before, strict=True):
            layer.tolerance = tolerance


def penalty(solves: Sequence[Solution], probes: int) -> Tensor:
    """||df/dz||_F^2 / numel(z) at the equilibria just found, by random probes; z itself gets no gradient."""
    found = []
    for solution in solves:
        assert solution.solved is not None
        problem = solution.solved.problem
        assert isinstance(problem, FunctionProblem)
        z = rebuild(solution.value, [part.detach() for _, part in leaves(solution.value, "z")])
        with problem.scope.entered():  # the same weights and the same dropout as in the solve
            found.append(jacobian_penalty(problem.f, z, *problem.inputs, probes=probes))
    if not found:
        raise ValueError("jacobian: the model solved no equilibrium in this step: leave the section out.")
    return torch.stack(found).sum()

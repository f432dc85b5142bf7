"""Jacobian regularisation during training: on some steps, a loss term keeps df/dz small at the equilibrium.

S. Bai, V. Koltun, J. Z. Kolter, "Stabilizing equilibrium models by Jacobian regularization" (2021), and the authors'
code, from which frequency, weight and jitter are taken.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.lab.recipes.schema import Jacobian
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import FunctionProblem
from equipoise.solution import Solution
from equipoise.stability import jacobian_penalty


def weight_at(jacobian: Jacobian, step: int, draw: torch.Generator) -> float:
    """Return the weight of the penalty in a step, counted within its phase; 0 in steps without a penalty."""
    if not jacobian.weight or float(torch.rand((), generator=draw)) >= jacobian.share:
        return 0.0
    increases = step // jacobian.growth_every if jacobian.growth_every else 0
    return jacobian.weight + jacobian.growth * increases


@contextmanager
def jittered(model: nn.Module, jitter: int, draw: torch.Generator) -> Iterator[None]:
    """Add a random number from -jitter to 1 to ``max_steps`` of a model's solves, so that it relies on no number."""
    layers = [layer for layer in model.modules() if isinstance(layer, Equilibrium)]
    before = [layer.tolerance for layer in layers]
    shift = int(torch.randint(-jitter, 2, (), generator=draw)) if jitter else 0
    try:
        for layer in layers:
            steps = max(1, layer.tolerance.max_steps + shift)
            layer.tolerance = replace(layer.tolerance, max_steps=steps)
        yield
    finally:
        for layer, tolerance in zip(layers, before, strict=True):
            layer.tolerance = tolerance


def penalty(solves: Sequence[Solution], probes: int) -> Tensor:
    """Estimate ||df/dz||_F^2 / numel(z) at solved equilibria with random probes; z itself gets no gradient."""
    penalties = []
    for solution in solves:
        assert solution.solved is not None
        problem = solution.solved.problem
        assert isinstance(problem, FunctionProblem)
        z = rebuild(solution.value, [part.detach() for _, part in leaves(solution.value, "z")])
        with problem.scope.entered():  # the same weights and the same dropout as in the solve
            penalties.append(jacobian_penalty(problem.f, z, *problem.inputs, probes=probes))
    if not penalties:
        raise ValueError("jacobian: the model solved no equilibrium in this step: leave the section out.")
    return torch.stack(penalties).sum()

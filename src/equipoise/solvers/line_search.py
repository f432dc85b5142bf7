"""Backtracking on the residual, per sample, for solvers whose full step may overshoot."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.problem.function import Problem
from equipoise.solvers.base import GapState, evaluated
from equipoise.tolerance import row_norms


def backtrack(problem: Problem, state: GapState, direction: Tensor, halvings: int) -> tuple[Tensor, Tensor, Tensor]:
    """z + direction with its image and gap; halved, at most ``halvings`` times, where the residual would grow."""
    z, image, gap = evaluated(problem, state.z + direction)
    before, length = row_norms(state.gap), 1.0
    for _ in range(halvings):
        worse = ~(row_norms(gap) <= before)  # NaN counts as worse
        if not bool(worse.any()):
            break
        length /= 2
        retry = torch.where(worse[:, None], state.z + length * direction, z)
        worse = worse[:, None]
        _, tried, shorter = evaluated(problem, retry)
        z, image, gap = retry, torch.where(worse, tried, image), torch.where(worse, shorter, gap)
    return z, image, gap

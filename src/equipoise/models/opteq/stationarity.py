"""Whether equilibria are stationary points of the objective G, as proposition 1 says.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.fixed_point import fixed_point
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Images
from equipoise.models.parts.context_managers import evaluating
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from equipoise.models.opteq.model import BranchModel

MAX_STEPS = 500


@dataclass(frozen=True, eq=False)
class Verification:
    """Proposition 1 at the equilibria of some images; every attribute is a tensor (batch,).

    Attributes:
        residual: ||T(z) - z|| / ||T(z)|| of the solve.
        objective: G.
        gradient: ||dG/dz|| relative to the norm of one of its two parts, which cancel at a stationary point.
    """

    residual: Tensor
    objective: Tensor
    gradient: Tensor

    def __str__(self) -> str:
        if not len(self.gradient):
            return "proposition 1 on no images"
        return (
            f"proposition 1 on {len(self.gradient)} images: the gradient of the objective is at most "
            f"{self.gradient.max():.1e} of either of its parts\n"
            f"(median {self.gradient.median():.1e}), where the residual of the equilibrium is at most "
            f"{self.residual.max():.1e}; objective between {self.objective.min():.4g} and {self.objective.max():.4g}"
        )


def verification_of(model: BranchModel, images: Tensor, relative: float | None = None) -> Verification:
    """Solve to the tolerance and measure the gradient of G; see :func:`gradient_at`."""
    layer, cell = model.equilibrium, model.cell
    refuse_perturbed(cell)
    if relative is None:
        relative = 100 * torch.finfo(next(model.parameters()).dtype).eps
    tolerance = Tolerance(relative=relative, max_steps=MAX_STEPS)
    with torch.inference_mode(False), torch.no_grad(), evaluating(model.stem):
        inputs = cell.prepare(model.features(images))
        solution = fixed_point(
            cell, cell.start, *inputs, solver=layer.solver, tolerance=tolerance, on_failure=layer.on_failure
        )
        y = cell.lift(solution.value, *inputs)
        gradient, part = (
            torch.linalg.vector_norm(torch.cat([branch.flatten(1) for branch in branches], dim=1), dim=1)
            for branches in gradient_at(cell, solution.value, y, *inputs[1:])
        )
        return Verification(
            solution.stats.residual, cell.objective(y, *inputs), gradient / torch.where(part == 0, 1.0, part)
        )


def refuse_perturbed(cell: Branches) -> None:
    """Raise if branches are perturbed: each then sees another g."""
    if cell.perturbed:
        raise ValueError(
            f"perturb is {cell.perturb!r}: perturbed branches are not a stationary point of one objective. Use "
            "perturb='off', or model.eval() if it is 'train'."
        )


def gradient_at(cell: Branches, z: Images, y: Images, t: Tensor | None = None) -> tuple[Images, Images]:
    """Return dG/dz at W^T y for y = s(W h(z) + x), and its first part.

    With a = W h(z) + x, a - y is a subgradient of f at y = prox_f(a). So the terms of G in y have the derivative
    (a - y) - x + y = W h(z) in y, which is h(z) in W^T y: no inverse is needed, nor a derivative of f where it has
    none. The coupling is differentiated by autograd, which tests h.
    """
    lowered = tuple(part.detach().requires_grad_() for part in cell.lower(y))
    with torch.enable_grad():
        pulls = torch.autograd.grad(cell.ring.coupling(lowered, t).sum(), lowered)
    h = tuple(cell.ring.h(z, t))
    return tuple(a + b for a, b in zip(h, pulls, strict=True)), h

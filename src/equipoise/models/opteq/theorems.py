"""The theorems about OptEq, POptEq and MOptEq, and what a model has to show for them: contraction, stationarity.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022): section 2.3, which
claims that every lambda up to about 1/C makes T a contraction, and proposition 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Images


@dataclass(frozen=True)
class Contraction:
    """How T converges. A theorem without diversity and perturbation, whose signs change with z.

    Attributes:
        norm: upper bound of the norm of every W_i.
        factor: norm^2 (1 + lambda (C - 1)), by which every step at least shortens distances, in the largest of the
            branches' 2-norms, as long as all signs stay the same.
        proven: whether the factor bounds T itself and is below 1. Then every image has one equilibrium, and plain
            iteration finds it.
        radius: largest spectral radius of T' measured at the equilibria of the given images; below 1, plain iteration
            converges near them, unless T jumps. None if nothing was measured.
        jumps: whether T jumps where a hard sign changes, which T' does not show.
    """

    norm: float
    factor: float
    proven: bool
    radius: float | None = None
    jumps: bool = False

    def __str__(self) -> str:
        bound = f"no contraction is proven: even with all signs held fixed the bound is {self.factor:.3g}"
        if self.proven:
            bound = f"T is a contraction: every step leaves at most {self.factor:.3g} of the error"
        elif self.factor < 1:
            bound = (
                f"no contraction is proven: with all signs held fixed every step would leave at most {self.factor:.3g} "
                "of the error, but they move with z"
            )
        if self.radius is not None:
            bound += f"\nspectral radius of T' at the equilibria, measured: {self.radius:.3g}"
            if self.jumps:
                bound += ", with all signs held fixed: T jumps where one changes, and iteration need not converge"
        return f"||W|| <= {self.norm:.3g}; {bound}"


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

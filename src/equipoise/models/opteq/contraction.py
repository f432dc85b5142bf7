"""Whether the T of OptEq, POptEq and MOptEq is a contraction: proven bounds, and measurements where nothing is proven.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), section 2.3, which
claims that every lambda up to about 1/C makes it one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.models.parts.context_managers import evaluating
from equipoise.stability import spectral_radius
from equipoise.stability.norms import conv2d_norm_bound

if TYPE_CHECKING:
    from equipoise.models.opteq.model import BranchModel


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
        if self.proven:
            bound = f"T is a contraction: every step leaves at most {self.factor:.3g} of the error"
        elif self.factor < 1:
            bound = (
                f"no contraction is proven: with all signs held fixed every step would leave at most {self.factor:.3g} "
                "of the error, but they move with z"
            )
        else:
            bound = f"no contraction is proven: even with all signs held fixed the bound is {self.factor:.3g}"
        measured = ""
        if self.radius is not None:
            measured = f"\nspectral radius of T' at the equilibria, measured: {self.radius:.3g}"
            if self.jumps:
                measured += ", with all signs held fixed: T jumps where one changes, and iteration need not converge"
        return f"||W|| <= {self.norm:.3g}; {bound}{measured}"


def contraction_of(model: BranchModel, images: Tensor | None = None) -> Contraction:
    """Return bounds, computed in float64 on the model's grids, and the spectral radius at the images' equilibria."""
    cell = model.cell
    ring = cell.ring
    with torch.inference_mode(False), torch.no_grad(), evaluating(model.stem):
        norm = max(
            float(conv2d_norm_bound(W.weight(size).double(), size, iterations=12))  # type: ignore[operator]
            for W, size in zip(cell.W, cell.sizes, strict=True)
        )
        radius = None
        if images is not None and len(images):
            inputs = cell.prepare(model.features(images))
            radius = float(spectral_radius(cell, model.equilibrium.solve(*inputs).value, *inputs).max())
    factor = norm**2 * (1 + ring.diversity * (cell.channels - 1))
    jumps = cell.perturbed or (ring.diversity > 0 and not ring.smooth)
    return Contraction(norm, factor, ring.diversity == 0 and not jumps and factor < 1, radius, jumps)

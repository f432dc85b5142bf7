"""Whether the T of OptEq and its kin is a contraction: proven, or measured where nothing is.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022), section 2.3, where
every lambda up to about 1/C is said to make it one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.models.opteq.branches import Branches
from equipoise.models.parts.temporary import evaluating
from equipoise.stability import spectral_radius
from equipoise.stability.norms import conv2d_norm_bound


@dataclass(frozen=True)
class Contraction:
    """How T converges. A theorem without diversity and perturbation, whose signs change with z.

    Attributes:
        norm: of the largest W_i, from above.
        factor: norm^2 (1 + lambda (C - 1)): distances shrink by it or more at every step, if the signs stay as they
            are; in the largest of the branches' 2-norms.
        proven: whether the factor is a bound of T itself, and below 1. Then every image has one equilibrium, and plain
            iteration finds it.
        radius: the largest spectral radius of T' at the equilibria of the images that were given: measured; below 1,
            plain iteration converges near there, unless T jumps. None if nothing was measured.
        jumps: whether T jumps where a hard sign changes, which T' does not see.
    """

    norm: float
    factor: float
    proven: bool
    radius: float | None = None
    jumps: bool = False

    def __str__(self) -> str:
        if self.proven:
            told = f"T is a contraction: every step leaves at most {self.factor:.3g} of the error"
        elif self.factor < 1:
            told = (
                f"no contraction is proven: with all signs held fixed every step would leave at most {self.factor:.3g} "
                "of the error, but they move with z"
            )
        else:
            told = f"no contraction is proven: even with all signs held fixed the bound is {self.factor:.3g}"
        measured = ""
        if self.radius is not None:
            measured = f"\nspectral radius of T' at the equilibria, measured: {self.radius:.3g}"
            if self.jumps:
                measured += ", with all signs held fixed: T jumps where one changes, and iteration need not converge"
        return f"||W|| <= {self.norm:.3g}; {told}{measured}"


def contraction_of(model: Any, images: Tensor | None = None) -> Contraction:
    """Bounds in float64, of the convolutions on the grids at hand; the spectral radius at the images' equilibria."""
    cell: Branches = model.cell
    ring = cell.ring
    with torch.inference_mode(False), torch.no_grad(), evaluating(model.stem):
        norms = [
            conv2d_norm_bound(W.weight(size).double(), size, iterations=12)  # type: ignore[operator]
            for W, size in zip(cell.W, cell.sizes, strict=True)
        ]
        norm = float(torch.stack(norms).max())
        factor = norm**2 * (1 + ring.diversity * (cell.channels - 1))
        radius = None
        if images is not None and len(images):
            inputs = cell.prepare(model.features(images))
            z = model.equilibrium.solve(*inputs).value
            radius = float(spectral_radius(cell, z, *inputs).max())
    jumps = cell.perturbed or (ring.diversity > 0 and not ring.smooth)
    return Contraction(norm, factor, ring.diversity == 0 and not jumps and factor < 1, radius, jumps)

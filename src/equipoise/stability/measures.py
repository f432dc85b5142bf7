"""Measure how contractive f is: the Jacobian penalty and the spectral radius."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.implicit import gradients, isolated, recorded
from equipoise.options import require_number
from equipoise.problem.problem import FunctionProblem


def jacobian_penalty(
    f: Callable[..., Any], z: Any, *inputs: Any, probes: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Return an unbiased estimate of ||df/dz||_F^2 / numel(z): a differentiable scalar to add to the loss.

    Args:
        f: function of the fixed point.
        z: point at which to measure, the equilibrium or any iterate. Detach it to keep gradients from flowing into it.
        probes: number of Gaussian vectors to average over.
        generator: random generator for the probes.

    Example:
        >>> loss = loss + 0.5 * eq.jacobian_penalty(layer.f, z.detach(), x, probes=2)

    Reference: S. Bai, V. Koltun, J. Z. Kolter, "Stabilizing equilibrium models by Jacobian regularization" (2021).
    """
    require_number("probes", probes, at_least=1, whole=True)
    with torch.enable_grad():
        rows, image = recorded_rows(f, z, inputs, generator)
        total = image.new_zeros(())
        for _ in range(probes):
            (product,) = gradients([image], [rows], [gaussian_like(image, generator)], create_graph=True)
            total = total + product.square().sum()
    return total / (probes * max(rows.numel(), 1))


def spectral_radius(
    f: Callable[..., Any], z: Any, *inputs: Any, steps: int = 40, generator: torch.Generator | None = None
) -> Tensor:
    """Return the largest |eigenvalue| of df/dz per sample: if it is below 1, plain iteration converges near z.

    Uses ``steps`` steps of Arnoldi's method, which finds complex pairs, unlike power iteration. The result is exact
    when ``steps`` reaches the size of z, otherwise slightly too small; NaN where f or its derivative is not finite.
    Memory: ``steps`` vectors like z.

    Example:
        >>> eq.spectral_radius(layer.f, layer(x), x)
    """
    require_number("steps", steps, at_least=1, whole=True)
    with torch.enable_grad():
        rows, image = recorded_rows(f, z, inputs, generator)
    with torch.no_grad():
        batch, n = rows.shape
        steps = min(steps, n)
        if batch == 0 or n == 0:
            return rows.new_zeros(batch)
        basis = [normalised(gaussian_like(rows, generator))[0]]
        hessenberg = rows.new_zeros(batch, steps, steps)
        for k in range(steps):
            (w,) = gradients([image], [rows], [basis[-1]], create_graph=False)  # J^T has the eigenvalues of J
            before = torch.linalg.vector_norm(w, dim=1)
            V = torch.stack(basis, dim=1)
            for _ in range(2):  # twice, because rounding spoils a single pass
                overlap = (w[:, None] @ V.mT)[:, 0]
                w = w - (overlap[:, None] @ V)[:, 0]
                hessenberg[:, : k + 1, k] += overlap
            w, size = normalised(w)
            closed = size <= 10 * torch.finfo(w.dtype).eps * before  # the space is invariant: start a new block
            if k + 1 < steps:
                hessenberg[:, k + 1, k] = torch.where(closed, 0.0, size)
                basis.append(torch.where(closed[:, None], fresh_direction(V, generator), w))
        finite = hessenberg.isfinite().all(dim=2).all(dim=1)  # LAPACK may crash otherwise
        radius = rows.new_full((batch,), torch.nan)
        radius[finite] = torch.linalg.eigvals(hessenberg[finite]).abs().amax(dim=1)
        return radius


def recorded_rows(
    f: Callable[..., Any], z: Any, inputs: tuple[Any, ...], generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return z as rows that gradients can be taken with respect to, and f at z with its graph."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is {generator!r}; it must be a torch.Generator, or None.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a Jacobian needs derivatives, which inference_mode does not have: use torch.no_grad().")
    problem, _, _ = FunctionProblem.start(f, z, inputs)
    rows = isolated(problem.layout.pack(z))
    return rows, recorded(problem.uncompiled(), rows)  # compiled graphs have no second derivative


def gaussian_like(rows: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(rows.shape, dtype=rows.dtype, device=rows.device, generator=generator)


def normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows scaled to unit length (zero rows stay zero), and their lengths."""
    size = torch.linalg.vector_norm(rows, dim=1)
    return rows / torch.where(size == 0, 1.0, size)[:, None], size


def fresh_direction(V: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a random unit vector per sample, orthogonal to the orthonormal rows of V."""
    w = gaussian_like(V[:, 0], generator)
    for _ in range(2):
        w = w - ((w[:, None] @ V.mT) @ V)[:, 0]
    return normalised(w)[0]

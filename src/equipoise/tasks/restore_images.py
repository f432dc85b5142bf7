"""Restore images with a generator: find the latent vector whose image has the given measurements.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.2 (eq. 22).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.joint import AdamInput, JointGradient, Optimum
from equipoise.joint.base import JointSolver
from equipoise.joint.optimize_input import GRADIENT, SOLVER
from equipoise.models.generator.decoder import Decoder
from equipoise.options import require_number
from equipoise.solvers import Progress
from equipoise.tasks.latent_vectors import fit
from equipoise.tasks.physics import LinearPhysics, Mask, Physics, gathers, require_physics
from equipoise.tolerance import Tolerance

STEPS = 100  # the paper's number of joint steps for inverse problems


class Restored(NamedTuple):
    """Restored images (batch, channels, height, width), in [-1, 1], and the optimum they were made from."""

    images: Tensor
    optimum: Optimum


def restore(
    generator: Decoder,
    y: Tensor,
    physics: Physics,
    *,
    steps: int = STEPS,
    solver: JointSolver = SOLVER,
    callback: Callable[[Progress], object] | None = None,
) -> Restored:
    """Minimise ||y - A h(z)||^2 over the latent vector x, from x = 0, with the weights fixed (eq. 22).

    Args:
        generator: trained generator with head h.
        y: measurements, batch first, of images in [-1, 1].
        physics: object with A(x) and A_adjoint(y): one of :mod:`equipoise.tasks.physics`, or a physics of deepinv.
        steps: number of joint steps.
        solver: joint solver; ``AdamInput()`` for the method it replaces, see :func:`restore_by_adam`.
        callback: see :func:`equipoise.optimize_input`; :class:`~equipoise.tasks.snapshots.Snapshots` keeps the images
            of some steps.

    Returns:
        The images h(z) of the optimum, as in the paper, and the :class:`~equipoise.joint.Optimum`. After few steps, z
        is only close to the equilibrium of x; ``generator(optimum.x)`` solves for it.

    Example:
        >>> images, optimum = restore(eq.load("runs/jiio-celeba-001"), measured, GaussianBlur(2.0))
    """
    with torch.no_grad():
        optimum = fit_measurements(generator, y, physics, steps=steps, solver=solver, callback=callback)
        return Restored(generator.image(optimum.z), optimum)


def restore_by_adam(
    generator: Decoder,
    y: Tensor,
    physics: Physics,
    *,
    evaluations: int = STEPS,
    lr: float = 0.5,
    inner: int = 2,
    callback: Callable[[Progress], object] | None = None,
) -> Restored:
    """Restore by Adam on x with inner solves for z and its adjoint, at a given number of evaluations of f.

    Inner solves start from the previous ones, the strongest variant of the two-loop method that we measured.

    Args:
        generator, y, physics, callback: see :func:`restore`.
        evaluations: largest number of evaluations of f per image; a joint step is one.
        lr: learning rate of x.
        inner: evaluations of each inner solve for z.
    """
    require_number("inner", inner, at_least=1, whole=True)
    require_number("evaluations", evaluations, at_least=2 * (inner + 1), whole=True)
    short = Tolerance(relative=0.0, max_steps=inner)
    solver = AdamInput(lr=lr, warm=True, tolerance=short, adjoint=short)
    steps = evaluations // (inner + 1)  # one more evaluation, with a graph, for the gradient
    return restore(generator, y, physics, steps=steps, solver=solver, callback=callback)


def fit_measurements(
    generator: Decoder,
    y: Tensor,
    physics: Physics,
    *,
    steps: int = STEPS,
    solver: JointSolver = SOLVER,
    gradient: JointGradient = GRADIENT,
    callback: Callable[[Progress], object] | None = None,
) -> Optimum:
    """Return the optimum of ||y - A h(z)||^2 over the latent vector; see :func:`restore`."""
    require_physics(physics)
    check_measurements(generator, y, physics)
    rows = torch.arange(len(y), device=y.device)  # travels along, so that each sample keeps its own operator

    def misfit(images: Tensor, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return (measured(physics, images, rows, batch) - y).square().flatten(1).sum(dim=1)

    batch = len(y)
    return fit(generator, misfit, y, rows, steps=steps, solver=solver, gradient=gradient, callback=callback)


def measured(physics: Physics, images: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Return A of the images of some samples of a batch."""
    if len(rows) == batch:
        return physics.A(images)
    if isinstance(physics, LinearPhysics) and gathers(physics):
        return physics.take(rows).A(images)
    every = images.new_zeros(batch, *images.shape[1:]).index_copy(0, rows, images)  # an operator may be per sample
    return physics.A(every)[rows]


@torch.no_grad()
def check_measurements(generator: Decoder, y: Tensor, physics: Physics) -> None:
    """Raise unless the measurements have the shape that the operator gives images of the generator."""
    if not isinstance(generator, Decoder):
        raise TypeError(
            f"generator has type {type(generator).__name__}; it must be an equipoise.models.Generator, or the decoder "
            "of an autoencoder."
        )
    if not isinstance(y, Tensor) or not y.is_floating_point() or not y.dim():
        given = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else repr(y)
        raise TypeError(f"y is {given}; it must be a floating-point tensor of measurements, batch first.")
    own = next((parameter.dtype for parameter in generator.parameters()), y.dtype)
    if y.dtype != own and not torch.is_autocast_enabled(y.device.type):
        raise TypeError(f"y is {y.dtype}, the generator {own}: convert one of them, as by y.to({own}).")
    expected = physics.A(y.new_zeros(len(y), *generator.shape))
    if not isinstance(expected, Tensor):
        raise TypeError(f"the physics maps images to {expected!r}; A(x) must return a tensor of measurements.")
    if expected.shape != y.shape:
        raise ValueError(
            f"y has shape {tuple(y.shape)}; the physics maps images {(len(y), *generator.shape)} of this generator to "
            f"{tuple(expected.shape)}: measure images of that size with the same physics."
        )


def as_images(y: Tensor, physics: Physics, shape: Sequence[int]) -> Tensor:
    """Return measurements as images of a shape (channels, height, width), for display.

    Smaller images are enlarged without interpolation; other measurements are shown by the adjoint, scaled to [-1, 1].
    """
    if y.shape[1:] == tuple(shape):
        return y
    if y.dim() == 4 and y.shape[1] == shape[0]:
        return functional.interpolate(y, tuple(shape[1:]), mode="nearest-exact")
    back = physics.A_adjoint(y)
    return back / back.flatten(1).abs().amax(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


def filled(images: Tensor, y: Tensor, physics: Mask) -> Tensor:
    """Return restored images with the known pixels as they were given: only hidden ones are filled."""
    return torch.where(physics.mask.to(images) != 0, y, images)

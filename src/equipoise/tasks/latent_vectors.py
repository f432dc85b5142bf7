"""The latent vectors of images: the inputs of a generator, found by joint optimisation.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), eq. 20.
"""

from collections.abc import Callable

from torch import Tensor, nn

from equipoise.joint import JointGradient, Optimum, optimize_input
from equipoise.joint.base import JointSolver
from equipoise.joint.optimize_input import GRADIENT, SOLVER
from equipoise.models.generator.autoencoder import Autoencoder
from equipoise.models.generator.decoder import Decoder
from equipoise.solvers import Progress
from equipoise.tasks.wrapped import unwrapped
from equipoise.tolerance import Tolerance

RELATIVE = 1e-3  # tolerance of the joint optimisation


def generator_in(model: nn.Module) -> Decoder:
    """Return the generator inside a wrapper, or the decoder of an autoencoder; raise ValueError for another model."""
    model = unwrapped(model)
    if isinstance(model, Autoencoder):
        return model.decoder
    if not isinstance(model, Decoder):
        raise ValueError(
            f"the model has type {type(model).__name__}, which does not generate images: choose the model 'generator', "
            "an autoencoder such as 'mdeq-vae', or a run of one."
        )
    return model


def fit(
    model: Decoder,
    loss: Callable[..., Tensor],
    *inputs: Tensor,
    steps: int = 40,
    solver: JointSolver = SOLVER,
    gradient: JointGradient = GRADIENT,
    callback: Callable[[Progress], object] | None = None,
) -> Optimum:
    """Find the latent vectors whose images have the least loss, from x = 0 (eq. 20).

    Args:
        model: generator, or the decoder of an autoencoder, in evaluation mode if it has BatchNorm.
        loss: function ``loss(images, x, *inputs) -> (batch,)`` of images in [-1, 1] and latent vectors.
        inputs: tensors, batch first, that are passed to the loss.
        steps: number of joint steps.
        solver, gradient, callback: see :func:`equipoise.optimize_input`.

    Example:
        >>> opt = fit(model, squared_error, images)
        >>> model.image(opt.z)
    """
    x = inputs[0].new_zeros(len(inputs[0]), model.latent)
    return optimize_input(
        lambda z, x, *_: model.f(z, x),
        lambda z, x, *rest: loss(model.image(z), x, *rest),
        x,
        model.start(x),
        *inputs,
        solver=solver,
        tolerance=Tolerance(relative=RELATIVE, max_steps=steps),
        gradient=gradient,
        on_failure="ignore",  # the number of steps is a budget
        callback=callback,
    )


def squared_error(images: Tensor, x: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error of each image."""
    return (images - truth).square().flatten(1).mean(dim=1)

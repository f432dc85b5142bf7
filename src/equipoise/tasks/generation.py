"""Generation: a decoder learns images together with the latent vector of each, found by joint optimisation.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.1 (eq. 20 to 22) and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.joint import JointGradient, Optimum, optimize_input
from equipoise.joint.optimize_input import GRADIENT, SOLVER
from equipoise.joint.solvers import JointSolver
from equipoise.models.generator.model import Generator
from equipoise.models.generator.vae import MDEQVAE
from equipoise.options import require
from equipoise.solvers import Progress
from equipoise.stability import jacobian_penalty
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import image_grid
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.low_frequencies import low_frequencies
from equipoise.tasks.random_iterate import RandomIterate
from equipoise.tasks.wrapped import inside, unwrapped
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RELATIVE = 1e-3  # tolerance of the joint optimisation
SHOWN = 8  # images in a figure
GRADIENTS = ("implicit", "envelope")
LATENTS = ("optimised", "frequencies")


def generator_in(model: nn.Module) -> Generator:
    """Return the generator inside a wrapper, or the decoder of a VAE; raise ValueError for another model."""
    model = unwrapped(model)
    if isinstance(model, MDEQVAE):
        return model.decoder
    if not isinstance(model, Generator):
        raise ValueError(
            f"the model is a {type(model).__name__}, which does not generate images: choose the model 'generator' or "
            "'mdeq-vae', or a run of one."
        )
    return model


def fit(
    model: Generator,
    loss: Callable[..., Tensor],
    *inputs: Tensor,
    steps: int = 40,
    solver: JointSolver = SOLVER,
    gradient: JointGradient = GRADIENT,
    callback: Callable[[Progress], object] | None = None,
) -> Optimum:
    """Find the latent vectors whose images have the least loss, from x = 0 (eq. 20).

    Args:
        model: generator.
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


class Generation(Task):
    """Reconstruct images from latent vectors found by joint optimisation.

    Args:
        steps: number of joint steps that find the latent vectors.
        latents: latent vectors in training: "optimised" by joint steps, or "frequencies", the low spatial frequencies
            of the images. The latter is a warm-up, cheap and well conditioned, after which optimisation from x = 0 has
            something to find; evaluation always optimises.
        gradient: "implicit" solves z* and its adjoint at the latent vectors found, starting from the state of the last
            joint step, for the gradient of the weights; it is exact for these latent vectors however inaccurate the
            joint optimisation is. "envelope" uses the adjoint of the joint optimisation (eq. 19) without any solve: it
            is exact at an optimum only, and useless when the adjoint has not converged.
        jacobian: weight of the penalty ||df/dz||_F^2 / numel(z) at a random iterate of the joint optimisation; the
            paper uses 0.1 with 40 steps and 2 with 100.
        probes: number of random vectors that estimate the penalty.
        penalty_from: first step at which the penalty may be measured.
    """

    best_metric = "psnr"

    def __init__(
        self,
        steps: int = 40,
        gradient: str = "implicit",
        jacobian: float = 0.1,
        probes: int = 2,
        penalty_from: int = 15,
        latents: str = "optimised",
    ):
        self.steps, self.gradient, self.jacobian, self.latents = steps, gradient, jacobian, latents
        self.probes, self.penalty_from = probes, penalty_from
        for name in ("steps", "probes", "penalty_from"):
            require(self, name, at_least=1, whole=True)
        require(self, "gradient", among=GRADIENTS)
        require(self, "latents", among=LATENTS)
        require(self, "jacobian", at_least=0)

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        images, *rest = super().prepare(batch, dtype)
        return 2 * images - 1, *rest

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, generator = batch[0], generator_in(model)
        iterate = RandomIterate(len(images), self.penalty_from, self.steps, images.device)
        follow = iterate if self.jacobian else None

        def forward(generator: Generator) -> Tensor:
            """Return the costs of the images, and their penalty, in one tensor."""
            if self.latents == "frequencies":
                x = low_frequencies(images, generator.latent)
                z = generator.equilibrium(x)
                cost = squared_error(generator.image(z), x, images)
                iterate.z, iterate.x = tuple(part.detach() for part in z), x
            elif self.gradient == "envelope":
                cost = fit(generator, squared_error, images, steps=self.steps, callback=follow).cost
            else:
                with torch.no_grad():
                    optimum = fit(generator, squared_error, images, steps=self.steps, callback=follow)
                image = generator.image(generator.equilibrium(optimum.x, z0=optimum.z))
                cost = squared_error(image, optimum.x, images)
            if not self.jacobian:
                return cost
            penalty = jacobian_penalty(generator.f, iterate.z, iterate.x, probes=self.probes)
            return torch.cat([cost, penalty[None]])

        costs = inside(model, generator, forward)
        cost = costs[: len(images)]
        sums = self.sums(cost.detach())
        if not self.jacobian:
            return cost.mean(), sums
        return cost.mean() + self.jacobian * costs[-1], {**sums, "penalty": costs[-1].detach() * len(images)}

    def sums(self, errors: Tensor) -> Sums:
        ratio = 10 * torch.log10(4 / errors.double().clamp(min=1e-30))
        return {"samples": torch.tensor(len(errors)), "loss": errors.double().sum(), "psnr": ratio.sum()}

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        generator, truth = generator_in(model), batch[0]
        optimum = fit(generator, squared_error, truth, steps=self.steps)
        images = generator(optimum.x, z0=optimum.z)  # z* is solved for: what the latent vector is worth
        return {
            **self.sums(squared_error(images, optimum.x, truth)),
            "psnr": psnr(images, truth).double().sum(),
            "ssim": ssim(images, truth).double().sum(),
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        names = [name for name in ("psnr", "ssim", "loss", "penalty") if name in sums]
        return {name: sums[name].item() / sums["samples"].item() for name in names}

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        generator, truth = generator_in(model), next(batches())[0][:64]
        with torch.no_grad():
            latents = fit(generator, squared_error, truth, steps=self.steps).x
            images = generator(latents)
            ratios = psnr(images, truth)
            yield (
                "Reconstructions of test images",
                rows_of_images(
                    [("given", truth[:SHOWN]), ("reconstructed", images[:SHOWN])],
                    [f"{ratio:.1f} dB" for ratio in ratios[:SHOWN].tolist()],
                ),
            )
            weight = torch.linspace(0, 1, SHOWN, device=truth.device)[:, None]
            between = torch.cat([generator((1 - weight) * latents[i] + weight * latents[i + 1]) for i in (0, 2, 4)])
            yield (
                "Interpolations between latent vectors of test images",
                image_grid([(im, "") for im in shown(between)]),
            )


def shown(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as images in [0, 1] on the CPU."""
    return ((images.detach().float() + 1) / 2).clamp(0, 1).cpu()


def rows_of_images(rows: list[tuple[str, Tensor]], captions: list[str]) -> Figure:
    """Draw named rows of images in [-1, 1], one below the other; the captions stand above the last row."""
    last = len(rows) - 1
    entries = [
        (image, captions[i] if row == last else (name if i == 0 else ""))
        for row, (name, images) in enumerate(rows)
        for i, image in enumerate(shown(images))
    ]
    return image_grid(entries, columns=len(rows[0][1]))

"""Generation: a decoder learns images together with the latent vector of each, found by joint optimisation.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.1 (eq. 20 to 22) and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.models.generator.model import Generator
from equipoise.options import require
from equipoise.stability import jacobian_penalty
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.drawing import image_grid, shown
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error
from equipoise.tasks.low_frequencies import low_frequencies
from equipoise.tasks.random_iterate import RandomIterate
from equipoise.tasks.reconstruction import SHOWN, Reconstruction, error_sums, reconstructions, totals
from equipoise.tasks.wrapped import inside, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRADIENTS = ("implicit", "envelope")
LATENTS = ("optimised", "frequencies")


def equilibrium_in(model: nn.Module) -> Generator:
    """Return the generator inside a wrapper, or the decoder of an MDEQ-VAE or MDEQ-AE; raise ValueError for others."""
    generator = generator_in(model)
    if not isinstance(generator, Generator):
        raise ValueError(
            f"the model has type {type(unwrapped(model)).__name__}, whose decoder is not an equilibrium, and cannot be "
            "trained by joint optimisation: train it by the task 'vae' or 'autoencoding'."
        )
    return generator


class Generation(Reconstruction):
    """Reconstruct images from latent vectors found by joint optimisation.

    Args:
        steps: number of joint steps that find the latent vectors.
        latents: latent vectors in training: "optimised" by joint steps, or "frequencies", the low spatial frequencies
            of the images. The latter is a cheap warm-up, which makes images depend on x; without it, optimisation from
            x = 0 hardly moves x. Evaluation always optimises.
        gradient: "implicit" solves for z* and its adjoint at the latent vectors found, starting from the state of the
            last joint step, for the gradient of the weights; it is exact for these latent vectors however inaccurate
            the joint optimisation is. "envelope" uses the adjoint of the joint optimisation (eq. 19) without any solve:
            it is exact only at an optimum, and inaccurate when the adjoint has not converged.
        jacobian: weight of the penalty ||df/dz||_F^2 / numel(z) at a random iterate of the joint optimisation; the
            paper uses 0.1 with 40 steps and 2 with 100.
        probes: number of random vectors that estimate the penalty.
        penalty_from: first step at which the penalty may be measured.
    """

    best_metric = "psnr"
    reported = ("psnr", "ssim", "loss", "penalty")

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
        self.warm_starts = latents == "optimised" and gradient == "implicit"  # at the joint optimum
        for name in ("steps", "probes", "penalty_from"):
            require(self, name, at_least=1, whole=True)
        require(self, "gradient", among=GRADIENTS)
        require(self, "latents", among=LATENTS)
        require(self, "jacobian", at_least=0)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        images, generator = batch[0], equilibrium_in(model)
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
        sums = error_sums(cost.detach())
        if not self.jacobian:
            return cost.mean(), sums
        return cost.mean() + self.jacobian * costs[-1], {**sums, "penalty": costs[-1].detach() * len(images)}

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        generator, truth = generator_in(model), batch[0]
        optimum = fit(generator, squared_error, truth, steps=self.steps)
        images = generator(optimum.x, z0=optimum.z)  # at z*(x), not at the z of the last joint step
        loss = squared_error(images, optimum.x, truth)
        return totals({"loss": loss, "psnr": psnr(images, truth), "ssim": ssim(images, truth)})

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        generator, truth = generator_in(model), next(batches())[0][:64]
        with torch.no_grad():
            latents = fit(generator, squared_error, truth, steps=self.steps).x
            images = generator(latents)
            yield reconstructions(truth, images, psnr(images, truth))
            weight = torch.linspace(0, 1, SHOWN, device=truth.device)[:, None]
            between = torch.cat([generator((1 - weight) * latents[i] + weight * latents[i + 1]) for i in (0, 2, 4)])
            yield (
                "Interpolations between latent vectors of test images",
                image_grid([(im, "") for im in shown(between)]),
            )

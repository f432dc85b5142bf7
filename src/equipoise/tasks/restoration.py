"""Restoration: solve inverse problems with a generator, pretrained or trained for the problem.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.2 (eq. 22 and 24) and appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.gradients.implicit import ImplicitGradient
from equipoise.joint import DetachedGradient, JointGradient, KKTGradient
from equipoise.models.generator.autoencoder import Autoencoder, VariationalAutoencoder
from equipoise.models.generator.decoder import Decoder
from equipoise.models.generator.model import Generator
from equipoise.options import require
from equipoise.solvers import Progress
from equipoise.stability import jacobian_penalty
from equipoise.tasks.autoencoding import Autoencoding
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.degradations import Degradation, random_seeds, seeds_of
from equipoise.tasks.drawing import image_grid, shown
from equipoise.tasks.generation import Generation, equilibrium_in
from equipoise.tasks.image_quality import psnr, ssim
from equipoise.tasks.latent_vectors import generator_in, squared_error
from equipoise.tasks.medians import DECIBELS, SIMILARITY
from equipoise.tasks.physics import LinearPhysics, Mask
from equipoise.tasks.plain_restoration import restore_plainly
from equipoise.tasks.random_iterate import RandomIterate
from equipoise.tasks.reconstruction import error_sums
from equipoise.tasks.restore_images import (
    Restored,
    as_images,
    filled,
    fit_measurements,
    restore,
    restore_by_adam,
)
from equipoise.tasks.snapshots import Snapshots
from equipoise.tasks.vae import VAE
from equipoise.tasks.wrapped import inside, unwrapped
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRADIENTS = ("exact", "detached")
BACKWARD_RELATIVE = 1e-3  # tolerance of the backward solve
KINDS = ("", "solved ", "filled ", "given ", "plain ", "adam ")  # of images that are compared with the truth
COUNTS = "counts of "  # sums that are histograms
SHOWN = 6  # strips in a figure
QUALITY = {"psnr": DECIBELS, "ssim": SIMILARITY}
NAMES = (*(kind + name for kind in KINDS for name in QUALITY), "loss", "misfit", "penalty", "kl", "square of x")


class Restoration(Task):
    """Restore degraded images: min over the weights of ||y - h(z*)||^2, where x* minimises ||A y - A h(z)||^2.

    Each image is degraded by an operator A of its own: drawn at random in training, seeded by its pixels in evaluation,
    so that all models are compared on the same measurements. A generator trained for the task "generation" can be
    evaluated, too: that is unsupervised restoration (eq. 22). Training by this task is supervised (eq. 24).

    Supervised, a deterministic autoencoder is a network G that maps measurements to images (eq. 23): it is trained and
    evaluated on ||y - G(A y)||^2, without an optimisation of latent vectors.

    Args:
        problem, amount: see :class:`~equipoise.tasks.degradations.Degradation`.
        steps: number of joint steps that find the latent vectors.
        train_steps: number of joint steps in training; None for ``steps``.
        supervised: whether to train for the problem; otherwise as for the task "generation" or, if the model is an
            autoencoder, for the task "vae" or "autoencoding". Supervised training of an MDEQ-VAE trains its decoder
            alone.
        gradient: "exact" differentiates the KKT conditions (eq. 16 and 17); "detached" holds x* constant, as the
            authors' code does.
        backward_steps: number of steps of the backward solve.
        proximal: proximal term of the exact gradient, see :class:`~equipoise.KKTGradient`; 0 for none.
        jacobian, probes, penalty_from, latents: see :class:`~equipoise.tasks.generation.Generation`; ``latents`` is for
            unsupervised training.
        adam: whether to measure Adam on x as well, with ``steps`` evaluations of f.
        also: further problems to evaluate, each a name and an amount, as "denoise 0.4".
        beta: see :class:`~equipoise.tasks.vae.VAE` and :class:`~equipoise.tasks.autoencoding.Autoencoding`; used in
            unsupervised training of an autoencoder only.

    Example:
        >>> Restoration("inpaint", 20, also=["denoise 0.2", "denoise 0.4"])
    """

    best_metric = "psnr"

    def __init__(
        self,
        problem: str = "inpaint",
        amount: float | None = None,
        steps: int = 100,
        train_steps: int | None = None,
        supervised: bool = True,
        gradient: str = "exact",
        backward_steps: int = 40,
        proximal: float = 0.01,
        jacobian: float = 0.0,
        probes: int = 2,
        penalty_from: int = 15,
        adam: bool = False,
        also: Sequence[str] = (),
        beta: float | None = None,
        latents: str = "optimised",
    ):
        self.degradation = Degradation(problem, amount)
        if not isinstance(also, list | tuple):
            raise ValueError(f'Restoration.also is {also!r}; it must be a list such as ["denoise 0.2", "deblur 2"].')
        self.also = {name: degradation_of(name) for name in also}
        self.steps, self.train_steps = steps, steps if train_steps is None else train_steps
        self.supervised, self.gradient, self.backward_steps = supervised, gradient, backward_steps
        self.proximal, self.adam, self.penalty_from = proximal, adam, penalty_from
        require(self, "steps", at_least=6 if adam else 1, whole=True)
        for name in ("train_steps", "backward_steps"):
            require(self, name, at_least=1, whole=True)
        for name in ("supervised", "adam"):
            require(self, name, kind=bool)
        require(self, "proximal", at_least=0)
        require(self, "gradient", among=GRADIENTS)
        penalty = {"jacobian": jacobian, "probes": probes, "penalty_from": penalty_from}
        self.generation = Generation(self.train_steps, **penalty, latents=latents)
        self.warm_starts = not supervised and self.generation.warm_starts
        if latents != "optimised" and supervised:
            raise ValueError(f"latents is {latents!r}; it is for unsupervised training: supervised=False.")
        options = {} if beta is None else {"beta": beta}
        self.beta, self.vae, self.autoencoding = beta, VAE(**options), Autoencoding(**options)
        if beta is not None and supervised:
            raise ValueError(f"beta is {beta}; it weighs the loss of a VAE in unsupervised training: supervised=False.")

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        return self.generation.prepare(batch, dtype)

    @property
    def outer_gradient(self) -> JointGradient:
        tolerance = Tolerance(relative=BACKWARD_RELATIVE, max_steps=self.backward_steps)
        if self.gradient == "exact":
            return KKTGradient(tolerance=tolerance, proximal=self.proximal)
        return DetachedGradient(gradient=ImplicitGradient(tolerance=tolerance))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        if not self.supervised:
            return self.unsupervised(model).loss(model, batch)
        truth = batch[0]
        y, physics = self.degradation.measure(truth, random_seeds(len(truth)))
        weight, sums = self.generation.jacobian, {}
        if (network := self.network_in(model)) is not None:
            if weight:
                raise ValueError(
                    f"jacobian is {weight}; an autoencoder is trained without joint steps: leave it out, and give the "
                    "weight of a penalty in the recipe's section [jacobian]."
                )

            def direct(network: Autoencoder) -> Tensor:
                errors = squared_error(network(as_images(y, physics, network.shape)), y, truth)
                sums.update(error_sums(errors.detach()))
                return errors.mean()

            return inside(model, network, direct), sums

        def forward(generator: Generator) -> Tensor:
            images, x, iterate = self.differentiable(generator, y, physics)
            errors = squared_error(images, x, truth)
            sums.update(error_sums(errors.detach()))
            if not weight:
                return errors.mean()
            penalty = jacobian_penalty(generator.f, iterate.z, iterate.x, probes=self.generation.probes)
            sums["penalty"] = penalty.detach() * len(truth)
            return errors.mean() + weight * penalty

        return inside(model, equilibrium_in(model), forward), sums

    def network_in(self, model: nn.Module) -> Autoencoder | None:
        """Return the autoencoder that is trained to map measurements to images, or None for other models."""
        inner = unwrapped(model)
        direct = self.supervised and isinstance(inner, Autoencoder) and not isinstance(inner, VariationalAutoencoder)
        return inner if direct else None  # type: ignore[return-value]

    def unsupervised(self, model: nn.Module) -> Task:
        """Return the task that trains a model as a prior: "vae", "autoencoding", or "generation" for a generator."""
        inner, weight = unwrapped(model), self.generation.jacobian
        if isinstance(inner, Autoencoder) and weight:
            kind = "a VAE" if isinstance(inner, VariationalAutoencoder) else "an autoencoder"
            raise ValueError(
                f"jacobian is {weight}; {kind} is trained without joint steps: leave it out, and give the weight of "
                "the penalty in the recipe's section [jacobian]."
            )
        if isinstance(inner, Autoencoder):
            return self.vae if isinstance(inner, VariationalAutoencoder) else self.autoencoding
        if self.beta is not None:
            raise ValueError(f"beta is {self.beta}; it weighs the loss of a VAE: leave it out, or use 'mdeq-vae'.")
        return self.generation

    def differentiable(
        self, generator: Generator, y: Tensor, physics: LinearPhysics
    ) -> tuple[Tensor, Tensor, RandomIterate]:
        """Return h(z*) with its outer gradient, x*, and the iterate for the Jacobian penalty."""
        iterate = RandomIterate(len(y), self.penalty_from, self.train_steps, y.device)
        callback = iterate if self.generation.jacobian else None
        optimum = fit_measurements(
            generator, y, physics, steps=self.train_steps, gradient=self.outer_gradient, callback=callback
        )
        return generator.image(optimum.z), optimum.x, iterate

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        network, truth = self.network_in(model), batch[0]
        sums: Sums = {"samples": torch.tensor(len(truth))}
        for prefix, degradation in self.problems().items():
            if network is None:
                measured = self.measure_problem(generator_in(model), truth, degradation)
            else:
                measured = self.measure_network(network, truth, degradation)
            sums |= {prefix + name: value for name, value in measured.items()}
        return sums

    def problems(self) -> dict[str, Degradation]:
        """Return the problems that are evaluated, by the prefix of their metrics."""
        return {"": self.degradation} | {f"{name}: ": degradation for name, degradation in self.also.items()}

    def measure_network(self, network: Autoencoder, truth: Tensor, degradation: Degradation) -> Sums:
        """Return the sums of a batch for one problem, restored by a network."""
        y, physics = degradation.measure(truth, seeds_of(truth))
        given = as_images(y, physics, network.shape)
        pictures = {
            "": network(given),
            "given ": given,
            "plain ": restore_plainly(y, physics, degradation, network.shape),
        }
        if isinstance(physics, Mask):
            pictures["filled "] = filled(pictures[""], y, physics)
        return {"loss": squared_error(pictures[""], y, truth).double().sum(), **qualities(pictures, truth)}

    def measure_problem(self, generator: Decoder, truth: Tensor, degradation: Degradation) -> Sums:
        """Return the sums of a batch for one problem."""
        y, physics = degradation.measure(truth, seeds_of(truth))
        images, optimum = restore(generator, y, physics, steps=self.steps)
        pictures = {
            "": images,
            "solved ": generator(optimum.x),
            "given ": as_images(y, physics, generator.shape),
            "plain ": restore_plainly(y, physics, degradation, generator.shape),
        }
        if isinstance(physics, Mask):
            pictures["filled "] = filled(images, y, physics)
        if self.adam:
            pictures["adam "] = restore_by_adam(generator, y, physics, evaluations=self.steps).images
        sums: Sums = {
            "loss": squared_error(images, optimum.x, truth).double().sum(),
            "misfit": (optimum.cost.double() / y[0].numel()).sum(),
        }
        return sums | qualities(pictures, truth)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return means over the images, and medians of PSNR (peak 2 for pixels in [-1, 1]) and SSIM.

        "solved" is the image at z*(x), solved for, "given" the degraded image, "plain" the restoration by
        :func:`~equipoise.tasks.plain_restoration.restore_plainly`, "adam" that by Adam, "filled" the restored image
        with all known pixels as given (inpainting); "misfit" is the mean squared error of the measurements.
        """
        metrics: dict[str, float] = {}
        for prefix in self.problems():
            for name in (name for name in NAMES if prefix + name in sums):
                metrics[prefix + name] = sums[prefix + name].item() / sums["samples"].item()
                if (counts := sums.get(f"{prefix}{COUNTS}{name}")) is not None:
                    metrics[f"{prefix}median {name}"] = QUALITY[name.split()[-1]].median(counts)
        return metrics

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        network, truth = self.network_in(model), next(batches())[0][:SHOWN]
        for degradation in self.problems().values():
            title = f"Restored test images ({degradation.problem}, {degradation.amount:g})"
            if network is None:
                yield title, strips(generator_in(model), degradation, truth, self.steps)
            else:
                with torch.no_grad():
                    y, physics = degradation.measure(truth, seeds_of(truth))
                    yield title, strip_figure(network_panels(network, y, physics, truth)[0])


def qualities(pictures: dict[str, Tensor], truth: Tensor) -> Sums:
    """Return the sums and the histograms of the quality of each kind of images."""
    sums: Sums = {}
    for kind, restored in pictures.items():
        for name, measured in (("psnr", psnr(restored, truth)), ("ssim", ssim(restored, truth))):
            sums[kind + name] = measured.double().sum()
            sums[f"{COUNTS}{kind}{name}"] = QUALITY[name].counts(measured)
    return sums


def degradation_of(text: str) -> Degradation:
    """Return the degradation that a string such as "denoise 0.4" specifies."""
    problem, _, amount = text.partition(" ") if isinstance(text, str) else ("", "", "")
    try:
        return Degradation(problem, float(amount) if amount else None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"Restoration.also has {text!r}; each must be a name and an amount: {error}") from None


def strips(generator: Decoder, degradation: Degradation, truth: Tensor, steps: int) -> Figure:
    """Draw a strip for each image: given, some steps, restored, and truth, with their PSNR (as figures 7 to 12)."""
    y, physics = degradation.measure(truth, seeds_of(truth))
    panels, _ = strip_panels(generator, y, physics, truth, steps)
    return strip_figure(panels)


Panel = tuple[str, Tensor, Tensor | None]  # title, images in [-1, 1], PSNR of each


def strip_panels(
    generator: Decoder,
    y: Tensor,
    physics: LinearPhysics,
    truth: Tensor | None,
    steps: int,
    callback: Callable[[Progress], object] | None = None,
) -> tuple[list[Panel], Restored]:
    """Restore images, and return the panels of their strips: given, about three steps, restored, and truth if known.

    With a mask, there is one more: hidden pixels filled, and the others as given.
    """
    snapshots = Snapshots(generator, [max(1, round(steps * share)) for share in (0.05, 0.2, 0.5)])

    def watch(progress: Progress) -> None:
        snapshots(progress)
        if callback is not None:
            callback(progress)

    restored = restore(generator, y, physics, steps=steps, callback=watch)
    panels = [("given", as_images(y, physics, generator.shape))]
    panels += [(f"step {step}", images) for step, images in snapshots.images.items()]
    panels += [("restored", restored.images)]
    if isinstance(physics, Mask):
        panels += [("filled", filled(restored.images, y, physics))]
    rated: list[Panel] = [(title, images, None if truth is None else psnr(images, truth)) for title, images in panels]
    return (rated if truth is None else [*rated, ("truth", truth, None)]), restored


def network_panels(
    network: Autoencoder, y: Tensor, physics: LinearPhysics, truth: Tensor | None
) -> tuple[list[Panel], Tensor]:
    """Restore images by a network, and return the panels of their strips, and the images."""
    given = as_images(y, physics, network.shape)
    images = network(given)
    panels = [("given", given), ("restored", images)]
    if isinstance(physics, Mask):
        panels += [("filled", filled(images, y, physics))]
    rated: list[Panel] = [(title, part, None if truth is None else psnr(part, truth)) for title, part in panels]
    return (rated if truth is None else [*rated, ("truth", truth, None)]), images


def strip_figure(panels: list[Panel]) -> Figure:
    """Draw the panels of each image in a row."""
    entries = []
    for row in range(len(panels[0][1])):
        for title, images, ratios in panels:
            rated = "" if ratios is None else f"\n{float(ratios[row]):.1f} dB"
            entries.append((shown(images[row]), title + rated))
    return image_grid(entries, columns=len(panels))

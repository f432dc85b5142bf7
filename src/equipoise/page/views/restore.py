"""Restore: an image is degraded, and joint steps restore it, beside Adam for the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.models.generator.decoder import Decoder
from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.pictures import in_bytes, table
from equipoise.page.refused import Refused
from equipoise.page.sent import Sent
from equipoise.page.views import latents
from equipoise.page.views.view import Clock, View, Work
from equipoise.solvers import Progress
from equipoise.tasks.image_quality import psnr_of_error
from equipoise.tasks.physics import Compose, GaussianBlur, GaussianNoise, Identity, LinearPhysics, Mask
from equipoise.tasks.restore_images import Restored, filled, restore, restore_by_adam

EXAMPLES = 6
MOST_STEPS = 200
PER_STEP = 20  # evaluations of Adam per joint step: more than it has time for
JOINT, ADAM = 0, 1  # lanes

Call = Callable[[Progress], object]


class Enough(Exception):
    """Adam has had as much time as the joint steps."""


def examples(sent: Sent, model: Available) -> Work:
    """Return images to restore: samples of the generator, or test images if it cannot be sampled."""
    seed = sent.count("seed", 0, latents.LARGEST_SEED)

    def work(job: Job) -> None:
        sampled = latents.can_draw(model)
        images = latents.generated(model, EXAMPLES, seed) if sampled else model.test_images(EXAMPLES)
        job.emit("examples", {"pictures": [table(image) for image in images], "sampled": sampled})

    return work


def solve(sent: Sent, model: Available) -> Work:
    """Degrade an image, and restore it."""
    image = sent.image("image", model.shape)
    hole = sent.image("hole", (1, *model.shape[1:]))[0] > 0
    noise, blur = sent.number("noise", 0.0, 1.0), sent.number("blur", 0.0, 5.0)
    steps, seed = sent.count("steps", 1, MOST_STEPS), sent.count("seed", 0, latents.LARGEST_SEED)
    if bool(hole.all()):
        raise Refused("The hole covers the whole image: leave some of it.", "hole")

    def work(job: Job) -> None:
        generator, truth = latents.generator(model), model.prepared(image)  # pixels in [-1, 1]
        physics = degradation(hole.to(truth.device), noise, blur, seed)
        y = physics(truth)
        job.emit("given", {"picture": shown(y), "psnr": psnr(y, truth)})

        def jointly(callback: Call) -> Restored:
            return restore(generator, y, physics, steps=steps, callback=callback)

        def by_adam(callback: Call) -> Restored:
            return restore_by_adam(generator, y, physics, evaluations=PER_STEP * steps + 6, callback=callback)

        known = physics if isinstance(physics, Mask) and not noise else None
        seconds = watch_one(job, generator, truth, JOINT, jointly, known and partial(filled, y=y, physics=known))
        watch_one(job, generator, truth, ADAM, by_adam, known and partial(filled, y=y, physics=known), seconds)

    return work


def degradation(hole: Tensor, noise: float, blur: float, seed: int) -> LinearPhysics:
    """Return the operator that blurs an image, hides the hole and adds noise."""
    model = GaussianNoise(noise, torch.Generator().manual_seed(seed)) if noise else None
    last = Mask((~hole).float(), model) if bool(hole.any()) else Identity(model)
    return Compose(last, GaussianBlur(blur)) if blur else last


def watch_one(
    job: Job,
    generator: Decoder,
    truth: Tensor,
    lane: int,
    method: Callable[[Call], Restored],
    finish: Callable[[Tensor], Tensor] | None,
    most: float = float("inf"),
) -> float:
    """Restore by one method for at most that many seconds, and report every step; return the seconds it took.

    ``finish`` puts known pixels into the result.
    """
    clock, best = Clock(), (float("inf"), truth)

    @torch.no_grad()
    def show(progress: Progress) -> None:
        nonlocal best
        seconds = clock.pause()
        state: Any = progress.state
        images, cost = generator.image(progress.value[0]), float(state.cost[0])
        if cost < best[0]:
            best = cost, images
        kkt = dict(zip(("z", "mu", "x"), state.kkt[0].tolist(), strict=True))
        numbers = {"lane": lane, "step": progress.step, "seconds": seconds, "cost": cost, "kkt": kkt}
        job.emit("frame", numbers, lambda: {"picture": shown(images)})
        if seconds > most:
            raise Enough
        clock.resume()

    try:
        images = method(show).images
        seconds = clock.pause()
    except Enough:
        images, seconds = best[1], clock.spent
    images = images if finish is None else finish(images)
    job.emit("end", {"lane": lane, "seconds": seconds, "psnr": psnr(images, truth), "picture": shown(images)})
    return seconds


def psnr(images: Tensor, truth: Tensor) -> float:
    return float(psnr_of_error((images - truth).square().mean()))


def shown(images: Tensor) -> dict[str, Any]:
    """Return the first of a batch of images in [-1, 1] as the page takes it."""
    return table(in_bytes(images[0], -1.0, 1.0))


def describe(model: Available) -> dict[str, Any]:
    return {"shape": model.shape, "steps": MOST_STEPS}


VIEW = View(
    "restore",
    latents.takes,
    "Restoring needs a generator. Train one with `equipoise train jiio/fashion-mnist --budget small` (an hour), and "
    "start the page with `equipoise page --run runs/jiio-fashion-mnist-001`.",
    describe,
    {"examples": examples, "solve": solve},
    lambda model: model.shape,
)

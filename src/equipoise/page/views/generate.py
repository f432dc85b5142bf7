"""Generate: sampled images settle, and an image follows a latent vector that the visitor moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.fixed_point import fixed_point
from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.pictures import in_bytes, table
from equipoise.page.sent import Sent
from equipoise.page.views import latents
from equipoise.page.views.view import Clock, View, Work, ending
from equipoise.solvers import Progress

SAMPLES = 12
REACH = 3.0  # standard deviations by which an entry of a latent vector can be moved


def sample(sent: Sent, model: Available) -> Work:
    """Draw latent vectors, and show their images settle."""
    seed = sent.count("seed", 0, latents.LARGEST_SEED)
    return lambda job: settle(job, model, latents.drawn(model, SAMPLES, seed))


def image(sent: Sent, model: Available) -> Work:
    """Show the image of a latent vector between two samples, with one entry moved."""
    seed = sent.count("seed", 0, latents.LARGEST_SEED)
    first, second = sent.count("first", 0, SAMPLES - 1), sent.count("second", 0, SAMPLES - 1)
    share, move = sent.number("share", 0.0, 1.0), sent.number("move", -REACH, REACH)
    entry = sent.count("entry", 1, latents.length(model)) - 1

    def work(job: Job) -> None:
        x = latents.drawn(model, SAMPLES, seed)
        between = torch.lerp(x[first], x[second], share)
        between[entry] += move * latents.deviations(model)[entry]
        settle(job, model, between[None])

    return work


@torch.no_grad()
def settle(job: Job, model: Available, x: Tensor) -> None:
    """Solve for the states of latent vectors, and report the images of every step."""
    generator = latents.generator(model)
    layer, clock = generator.equilibrium, Clock()
    current = generator.start(x)  # of all samples, also those that have stopped

    def pictures(z: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        return [table(each) for each in in_bytes(generator.image(z), -1.0, 1.0)]

    def show(progress: Progress) -> None:
        seconds = clock.pause()
        for kept, part in zip(current, progress.value, strict=True):
            kept[progress.rows] = part
        numbers = {"step": progress.step, "residual": float(progress.residual.max()), "seconds": seconds}
        job.emit("frame", {**numbers, "left": int(progress.active.sum())}, lambda: {"pictures": pictures(current)})
        clock.resume()

    options = {"solver": layer.solver, "tolerance": layer.tolerance, "on_failure": "ignore"}
    solution = fixed_point(layer.f, generator.start(x), x, **options, callback=show)
    end = ending(solution, clock.pause())
    job.emit("end", {**end, "pictures": pictures(solution.value)})


def describe(model: Available) -> dict[str, Any]:
    return {"samples": SAMPLES, "entries": latents.length(model), "reach": REACH}


def takes(model: Available) -> bool:
    return latents.takes(model) and latents.can_draw(model)


VIEW = View(
    "generate",
    takes,
    "Generating needs a generator whose latent vectors have a density. Train one with `equipoise train "
    "jiio/fashion-mnist --budget small` (an hour), fit the density with `equipoise sample "
    "runs/jiio-fashion-mnist-001`, and start the page with `equipoise page --run runs/jiio-fashion-mnist-001`.",
    describe,
    {"sample": sample, "image": image},
    lambda model: model.shape,
)

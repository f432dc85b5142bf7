"""Segment: the classes of a street scene's pixels settle, and the residual of every scale falls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.fixed_point import fixed_point
from equipoise.models.mdeq.model import MDEQ
from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.pictures import table
from equipoise.page.refused import Refused
from equipoise.page.sent import Sent
from equipoise.page.views import scenes
from equipoise.page.views.view import Clock, View, Work, ending, first_residual
from equipoise.solvers import Progress
from equipoise.tasks.drawing import class_colors
from equipoise.tasks.segmentation import Segmentation, likeliest

EXAMPLES = 6
SMALLEST = 16  # height and width of an image
MOST_STEPS = 60


def takes(model: Available) -> bool:
    original = model.original
    segments = isinstance(original, MDEQ) and original.segments and isinstance(model.task, Segmentation)
    return segments and model.shape[0] in (1, 3)


def examples(sent: Sent, model: Available) -> Work:
    """Return drawn street scenes of the size that the model was trained on."""

    def work(job: Job) -> None:
        images = scenes.drawn(EXAMPLES, model.shape)
        job.emit("examples", {"pictures": [table(image) for image in images], "known": False})

    return work


def solve(sent: Sent, model: Available) -> Work:
    """Segment an image of any size."""
    image = sent.image("image", (model.shape[0], None, None))
    steps = sent.count("steps", 1, MOST_STEPS)
    if min(image.shape[1:]) < SMALLEST:
        raise Refused(f"The image is smaller than {SMALLEST} x {SMALLEST} pixels.", "image")
    return lambda job: watch(job, model, image, steps)


@torch.no_grad()
def watch(job: Job, model: Available, image: Tensor, steps: int) -> None:
    """Solve, and report the label map and the residual of every scale at every step."""
    net: MDEQ = model.model
    (height, width), downsampling = image.shape[1:], 2**net.size.downsamplings
    rows, columns = (-(-n // downsampling) for n in (height, width))
    inputs, layer, clock = net.injections(model.prepared(image)), net.equilibrium, Clock()

    def logits(z: tuple[Tensor, ...]) -> Tensor:
        return net.read(z)[:, :, :rows, :columns]  # without padding

    def show(progress: Progress) -> None:
        seconds = clock.pause()
        z = progress.value
        numbers = {"step": progress.step, "residual": first_residual(progress), "seconds": seconds}
        scales = [relative(after, before) for after, before in zip(progress.image, z, strict=True)]
        job.emit("frame", {**numbers, "scales": scales}, lambda: {"labels": label_table(likeliest(logits(z))[0])})
        clock.resume()

    options = {"solver": layer.solver, "tolerance": replace(layer.tolerance, max_steps=steps)}
    solution = fixed_point(layer.f, layer.start(inputs), *inputs, **options, on_failure="ignore", callback=show)
    seconds = clock.pause()
    full = functional.interpolate(logits(solution.value).float(), (height, width), mode="bilinear", align_corners=True)
    label_map = likeliest(full)[0]
    assert isinstance(model.task, Segmentation)
    end = ending(solution, seconds, ("steps",))
    job.emit("end", {**end, "labels": label_table(label_map), "shares": model.task.shares(label_map)})


def relative(after: Tensor, before: Tensor) -> float:
    """Return ||f(z) - z|| / ||f(z)|| of one scale."""
    return float((after - before).float().norm() / after.float().norm().clamp(min=1e-30))


def label_table(label_map: Tensor) -> dict[str, Any]:
    return table(label_map.to(torch.uint8)[None])


def describe(model: Available) -> dict[str, Any]:
    original, task = model.original, model.task
    assert isinstance(original, MDEQ)
    assert isinstance(task, Segmentation)
    return {
        "shape": model.shape,
        "classes": task.class_names,
        "colors": class_colors(task.class_names).tolist(),
        "scales": original.size.scales,
        "steps": MOST_STEPS,
        "default_steps": min(MOST_STEPS, original.equilibrium.tolerance.max_steps),
    }


VIEW = View(
    "segment",
    takes,
    "Segmenting needs a multiscale model (MDEQ). Train one with `equipoise train mdeq/camvid-small --budget small` "
    "(hours), and start the page with `equipoise page --run runs/mdeq-camvid-small-001`.",
    describe,
    {"examples": examples, "solve": solve},
    lambda model: (model.shape[0], None, None),
)

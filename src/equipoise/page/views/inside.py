"""Look inside: a MOptEq's objective falls step by step, with and without diversity between the channels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.fixed_point import fixed_point
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.descent import FISTA, ProximalGradient
from equipoise.models.opteq.model import MOptEq
from equipoise.models.opteq.ring import Images, carry
from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.limits import LIMITS
from equipoise.page.pictures import in_bytes, table
from equipoise.page.sent import Sent
from equipoise.page.views import scenes
from equipoise.page.views.view import Clock, View, Work, ending, first_residual, maps
from equipoise.solvers import Anderson, Picard, Progress, Solver
from equipoise.tasks.classification import LabelTask
from equipoise.tolerance import Tolerance

EXAMPLES = 6
SOLVERS: dict[str, tuple[str, Solver]] = {
    "proximal-gradient": ("Proximal gradient (never raises the objective)", ProximalGradient()),
    "fista": ("FISTA (accelerated)", FISTA()),
    "anderson": ("Anderson", Anderson()),
    "picard": ("Plain iteration", Picard()),
}
RELATIVE = 1e-4  # tolerance of the solves
WITH, WITHOUT = 0, 1  # lanes: diversity on and off
DIVERSITY = 0.01  # of the lane with diversity, for a model that was trained without


def takes(model: Available) -> bool:
    original = model.original
    several = isinstance(original, MOptEq) and len(original.cell.sizes) > 1 and original.cell.channels > 1
    return several and isinstance(model.task, LabelTask) and model.shape[0] in (1, 3)


def examples(sent: Sent, model: Available) -> Work:
    """Return test images of the data that the model was trained on, or drawn scenes."""

    def work(job: Job) -> None:
        images, known = model.test_images(EXAMPLES), True
        if not len(images):
            images, known = scenes.drawn(EXAMPLES, model.shape), False
        job.emit("examples", {"pictures": [table(image) for image in images], "known": known})

    return work


def solve(sent: Sent, model: Available) -> Work:
    """Minimise the objective of an image, with and without diversity."""
    image = sent.image("image", model.shape)
    _, solver = SOLVERS[sent.choice("solver", tuple(SOLVERS))]
    tolerance = Tolerance(relative=RELATIVE, max_steps=sent.count("steps", 1, LIMITS.steps))

    def work(job: Job) -> None:
        net: MOptEq = model.model
        with torch.no_grad():
            g = net.features(model.prepared(image))
        ring = net.cell.ring
        with_diversity = replace(ring, diversity=ring.diversity or DIVERSITY)
        for lane, chosen in ((WITH, with_diversity), (WITHOUT, replace(ring, diversity=0.0))):
            cell = copy.copy(net.cell)
            cell.ring, cell.order, cell.perturb = chosen, "jacobi", "off"  # G is that of all branches moving at once
            watch_one(job, net, cell, g, lane, solver, tolerance)

    return work


@torch.no_grad()
def watch_one(
    job: Job, net: MOptEq, cell: Branches, g: Tensor, lane: int, solver: Solver, tolerance: Tolerance
) -> None:
    """Solve with one coupling of the branches, and report every step."""
    inputs, clock = cell.prepare(g), Clock()

    def show(progress: Progress) -> None:
        seconds = clock.pause()
        z, state = progress.value, progress.state
        # Other solvers than the descent methods do not know y: this one has z as its next image.
        objective = getattr(state, "objective", None)
        if objective is None:
            objective = cell.objective(cell.lift(z, *inputs), *inputs)
        numbers = {"lane": lane, "step": progress.step, "residual": first_residual(progress), "seconds": seconds}
        job.emit("frame", {**numbers, "objective": float(objective[0])}, lambda: pictures(z))
        clock.resume()

    options = {"solver": solver, "tolerance": tolerance, "on_failure": "ignore"}
    solution = fixed_point(cell, cell.start, *inputs, **options, callback=show)
    end = ending(solution, clock.pause(), ("solver", "steps"))
    correlation = correlations(solution.value, 0)
    job.emit(
        "end",
        {
            "lane": lane,
            **end,
            "probabilities": net.read(solution.value)[0].float().softmax(0).tolist(),
            "similarity": float(off_diagonal(correlation).mean()),
            "diversity": cell.ring.diversity,
        },
    )


def pictures(z: Images) -> dict[str, Any]:
    """Return the correlations of every pair of neighbouring branches, and the mean magnitude of every branch."""
    heat = torch.stack([correlations(z, edge) for edge in range(len(z))])
    return {
        "heat": maps(in_bytes(heat), *heat.shape),
        "branches": [table(brightness(part[0])) for part in z],
    }


def correlations(z: Images, edge: int) -> Tensor:
    """Return |cos| of the angle between channel k of branch ``edge`` + 1 (rows) and l of branch ``edge`` (columns)."""
    after = carry(z[(edge + 1) % len(z)], z[edge].shape[2:])[0].flatten(1).double()
    before = z[edge][0].flatten(1).double()
    lengths = after.norm(dim=1)[:, None] * before.norm(dim=1)[None, :]
    return ((after @ before.mT).abs() / lengths.clamp(min=1e-30)).clamp(max=1.0)


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]


def brightness(part: Tensor) -> Tensor:
    """Return the mean magnitude of the channels as a gray image."""
    mean = part.abs().mean(dim=0, keepdim=True)
    return in_bytes(mean / mean.max().clamp(min=1e-30))


def describe(model: Available) -> dict[str, Any]:
    original, task = model.original, model.task
    assert isinstance(original, MOptEq)
    assert isinstance(task, LabelTask)
    return {
        "shape": model.shape,
        "classes": task.class_names,
        "branches": len(original.cell.sizes),
        "channels": original.cell.channels,
        "solvers": [{"name": name, "label": label} for name, (label, _) in SOLVERS.items()],
        "steps": LIMITS.steps,
    }


VIEW = View(
    "inside",
    takes,
    "Looking inside needs a MOptEq with several branches. Train one with `equipoise train opteq/reduced-mopteq "
    "--budget small` (minutes), and start the page with `equipoise page --run runs/opteq-reduced-mopteq-001`.",
    describe,
    {"examples": examples, "solve": solve},
    lambda model: model.shape,
)

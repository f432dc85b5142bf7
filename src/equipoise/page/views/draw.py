"""Draw: an image that a visitor draws is classified step by step, by one solver or two; its class is certified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.fixed_point import fixed_point
from equipoise.models.mondeq.certificate import Certifier
from equipoise.models.mondeq.model import MonDEQ
from equipoise.models.parts.taken_apart import TakenApart
from equipoise.operators.splitting import DouglasRachford, ForwardBackward, PeacemanRachford
from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.limits import LIMITS
from equipoise.page.pictures import in_bytes, table
from equipoise.page.sent import Sent
from equipoise.page.views.view import Clock, FeatureMaps, View, Work, ending, first_residual
from equipoise.solvers import Anderson, Broyden, Picard, Progress, Solver
from equipoise.tasks.classification import LabelTask
from equipoise.tasks.robustness import pgd
from equipoise.tolerance import Tolerance

ATTACK_STEPS = 20
CONTROLS = ("solver", "step", "tolerance", "steps")
LARGEST_RADIUS = 8.0
NONE = "none"  # in place of the second solver


@dataclass(frozen=True)
class Choice:
    """A solver that a visitor can choose.

    Args:
        label: its name.
        make: function from the step size to the solver; 0 stands for the automatic step.
        step: meaning, smallest, largest and initial value of the step size; None if it has none.
        monotone: whether it needs the structure of a monDEQ.
    """

    label: str
    make: Callable[[float], Solver]
    step: tuple[str, float, float, float] | None = None
    monotone: bool = False


ALPHA = ("step size α (0: automatic)", 0.0, 2.0, 0.0)
SOLVERS = {
    "peaceman-rachford": Choice("Peaceman–Rachford", lambda a: PeacemanRachford(a or "auto"), ALPHA, True),
    "douglas-rachford": Choice("Douglas–Rachford", lambda a: DouglasRachford(a or "auto"), ALPHA, True),
    "forward-backward": Choice("Forward–backward", lambda a: ForwardBackward(a or "auto"), ALPHA, True),
    "anderson": Choice("Anderson", lambda a: Anderson(mixing=a), ("mixing", 0.1, 2.0, 1.0)),
    "broyden": Choice("Broyden", lambda _: Broyden()),
    "picard": Choice("Plain iteration", lambda a: Picard(damping=1 - a), ("step size", 0.1, 1.0, 1.0)),
}


def takes(model: Available) -> bool:
    original = model.original
    return isinstance(model.task, LabelTask) and isinstance(original, TakenApart) and model.shape == (1, 28, 28)


def solvers_of(model: Available) -> dict[str, Choice]:
    monotone = isinstance(model.original, MonDEQ)
    return {name: choice for name, choice in SOLVERS.items() if monotone or not choice.monotone}


def class_names(model: Available) -> tuple[str, ...]:
    assert isinstance(model.task, LabelTask)
    return model.task.class_names


def describe(model: Available) -> dict[str, Any]:
    return {
        "classes": class_names(model),
        "solvers": [
            {"name": name, "label": choice.label, "step": choice.step} for name, choice in solvers_of(model).items()
        ],
        "steps": LIMITS.steps,
        "radius": LARGEST_RADIUS,
    }


def chosen(sent: Sent, model: Available, solver: str, step: str) -> Solver | None:
    """Return the solver of two fields, or None for no second solver."""
    choices = solvers_of(model)
    name = sent.choice(solver, (*choices, NONE) if solver == "second" else tuple(choices))
    size = sent.number(step, 0.0, 2.0)
    if name == NONE:
        return None
    choice = choices[name]
    if choice.step is not None:
        size = sent.number(step, choice.step[1], choice.step[2])
    return choice.make(size)


def solve(sent: Sent, model: Available) -> Work:
    """Classify the image with one solver or two, and certify its class."""
    image = sent.image("image", model.shape)
    tolerance = Tolerance(relative=sent.number("tolerance", 1e-7, 1e-1), max_steps=sent.count("steps", 1, LIMITS.steps))
    lanes = [chosen(sent, model, "solver", "step"), chosen(sent, model, "second", "second_step")]

    def work(job: Job) -> None:
        batch = model.prepared(image)
        for lane, solver in enumerate(lanes):
            if solver is not None:
                watch_one(job, model, batch, lane, solver, tolerance)
        if isinstance(model.original, MonDEQ):
            job.emit("certificate", certificate(model, batch))

    return work


@torch.no_grad()
def watch_one(job: Job, model: Available, batch: Tensor, lane: int, solver: Solver, tolerance: Tolerance) -> None:
    """Solve with one solver, and report every step."""
    net = model.model
    inputs, layer, maps = net.injections(batch), net.equilibrium, FeatureMaps(model.shape[1:])
    clock = Clock()

    def show(progress: Progress) -> None:
        seconds = clock.pause()
        value = progress.value
        probabilities = net.read(value)[0].float().softmax(0).tolist()
        numbers = {"lane": lane, "step": progress.step, "residual": first_residual(progress), "seconds": seconds}
        job.emit("frame", {**numbers, "probabilities": probabilities}, lambda: maps(value))
        clock.resume()

    options = {"solver": solver, "tolerance": tolerance, "on_failure": "ignore"}
    solution = fixed_point(layer.f, layer.start(inputs), *inputs, **options, callback=show)
    job.emit("end", {"lane": lane, **ending(solution, clock.pause(), CONTROLS)})


def prepare(model: Available) -> None:
    """Solve once on this thread, so that the first visitor does not wait for what is made or loaded only once."""
    blank = torch.zeros(model.shape, dtype=torch.uint8)
    batch = model.prepared(blank)
    with torch.no_grad():
        model.model(batch)
    if isinstance(model.original, MonDEQ):
        certificate(model, batch)


def certifier(model: Available) -> Certifier:
    return model.once("certifier", lambda: Certifier(model.model))


def certificate(model: Available, batch: Tensor) -> dict[str, Any]:
    verdict = certifier(model)(batch)
    return {"radius": float(verdict.radii[0]), "class": int(verdict.classes[0])}


def attack(sent: Sent, model: Available) -> Work:
    """Try to change the class by a change of the image of a given length."""
    image = sent.image("image", model.shape)
    radius = sent.number("radius", 1e-3, LARGEST_RADIUS)

    def work(job: Job) -> None:
        batch, net = model.prepared(image), model.model
        with torch.no_grad():
            before = net(batch).argmax(1)
        path = Path(job, batch)

        def watched(x: Tensor) -> Tensor:
            logits = net(x)
            path.report(x.detach(), int(logits.argmax(1)))
            return logits

        found = pgd(watched, batch, before, radius=radius, norm="l2", steps=ATTACK_STEPS, random_start=False)
        with torch.no_grad():
            after = net(found)[0].float()
        x, y, distance = path.place(found)
        job.emit(
            "attacked",
            {
                "before": int(before),
                "after": int(after.argmax()),
                "probabilities": after.softmax(0).tolist(),
                "distance": distance,
                "x": x,
                "y": y,
                "picture": table(in_bytes(found[0])),
                "change": table(in_bytes(found[0] - batch[0], -0.5, 0.5)),
            },
        )

    return work


class Path:
    """The way of an attack in the plane of the disc.

    The first axis is the direction of its first step, and the second the distance from that axis, so that lengths from
    the centre are true.
    """

    def __init__(self, job: Job, center: Tensor):
        self.job, self.center, self.axis, self.step = job, center, None, 0

    def place(self, x: Tensor) -> tuple[float, float, float]:
        """Return both coordinates of an image and its distance from the centre."""
        change = (x - self.center).double().flatten()
        distance = float(change.norm())
        if self.axis is None and distance > 0:
            self.axis = change / distance
        along = 0.0 if self.axis is None else float(change @ self.axis)
        return along, max(0.0, distance**2 - along**2) ** 0.5, distance

    def report(self, x: Tensor, label: int) -> None:
        along, across, distance = self.place(x)
        self.job.emit("moved", {"step": self.step, "x": along, "y": across, "distance": distance, "class": label})
        self.step += 1


VIEW = View(
    "draw",
    takes,
    "Drawing needs a classifier of 28 x 28 digits. Train one with `equipoise train mondeq/mnist-fc --budget small` "
    "(minutes), and start the page with `equipoise page --run runs/mondeq-mnist-fc-001`.",
    describe,
    {"solve": solve, "attack": attack},
    lambda model: model.shape,
)

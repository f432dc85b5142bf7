"""An attack that moves the image, the equilibrium and its adjoint together: one loop instead of a solve per step.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), section 4.4.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import watch_solves
from equipoise.joint import (
    Box,
    Constraint,
    Intersection,
    JointAnderson,
    L2Ball,
    LinfBall,
    NormalizedStep,
    optimize_input,
)
from equipoise.models.parts.context_managers import evaluating, frozen
from equipoise.models.parts.taken_apart import TakenApart, taken_apart
from equipoise.tasks.robustness import JOINT_STEPS, Budget, class_gap, random_change, require_pixels
from equipoise.tolerance import Tolerance

LONG, SHORT, LONG_SHARE = 0.3, 0.1, 0.68  # lengths of steps in units of the radius; fraction of the steps that are long


def jiio(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int = JOINT_STEPS,
    random_start: bool = False,
    **budget: Any,
) -> Tensor:
    """Attack a batch: return images in [0, 1] near the given ones, by joint optimisation of the image through z*.

    A step evaluates the equilibrium's f once, where a step of :func:`~equipoise.tasks.robustness.pgd` solves twice.
    Of the given image and the last iterate of every attempt, the one with the largest class gap is returned, measured
    at z*, which is solved for again.

    Args:
        model: classifier that can be taken apart, see :class:`~equipoise.models.parts.taken_apart.TakenApart`; it is
            attacked in evaluation mode, and its parameters get no gradient.
        images, labels: batch to attack.
        steps: number of joint steps.
        random_start: whether to start from a random point of the ball instead of the image itself; restarts do.
        budget: other fields of :class:`~equipoise.tasks.robustness.Budget`; ``step_size`` is the length of the first
            steps, 0.3 times the radius by default; later steps are a third as long.

    Example:
        >>> attacked = jiio(model, images, labels, radius=1.0, norm="l2")
    """
    allowed = Budget(steps=steps, random_start=random_start, **budget)
    require_pixels(images)
    parts = taken_apart(model)
    near = neighbourhood(images, allowed.radius, allowed.norm)
    with torch.no_grad(), evaluating(model), frozen(model), watch_solves():  # its solves are not counted as the model's
        worst, largest = images.clone(), class_gap(model(images), labels)
        for attempt in range(allowed.restarts):
            start = images
            if attempt or allowed.random_start:
                start = images + random_change(images, allowed.radius, allowed.norm)
            found = optimized(parts, start, labels, near, allowed)
            gap = class_gap(model(found), labels)
            higher = gap > largest  # never true for NaN
            largest = torch.where(higher, gap, largest)
            worst = torch.where(higher[:, None, None, None], found, worst)
    return worst


def optimized(parts: TakenApart, start: Tensor, labels: Tensor, near: Constraint, budget: Budget) -> Tensor:
    """Return the images after the joint steps."""
    layer = parts.equilibrium

    def f(z: Any, x: Tensor, labels: Tensor) -> Any:
        return layer.f(z, *parts.injections(x))

    def cost(z: Any, x: Tensor, labels: Tensor) -> Tensor:
        return -class_gap(parts.read(z), labels)

    optimum = optimize_input(
        *(f, cost, start, layer.start(parts.injections(start)), labels),
        constraint=near,
        solver=attack_solver(budget),
        tolerance=Tolerance(relative=0.0, max_steps=budget.steps + 1, patience=None),
        select="last",  # the cost at a z that has not converged misleads
        on_failure="ignore",
    )
    return optimum.x


def attack_solver(budget: Budget) -> JointAnderson:
    """Return the joint solver, whose steps of x have given lengths."""
    length = LONG * budget.radius if budget.step_size is None else budget.step_size
    after = max(1, round(LONG_SHARE * budget.steps))
    rule = NormalizedStep(length, later=SHORT / LONG * length, after=after, norm=budget.norm)
    return JointAnderson(memory=3, damping=(0.2, 0.4), step_size=rule)


def neighbourhood(images: Tensor, radius: float, norm: str) -> Constraint:
    """Return the set of images in [0, 1] within a distance of the given ones."""
    ball = LinfBall if norm == "linf" else L2Ball
    return Intersection(ball(radius, center=images), Box(0.0, 1.0))

"""What a view is, and what views share: events of solves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.page.available import Available
from equipoise.page.jobs import Job
from equipoise.page.pictures import encoded
from equipoise.page.sent import Sent
from equipoise.problem.layout import leaves
from equipoise.solution import Result, Solution
from equipoise.solvers import Progress

Work = Callable[[Job], object]
TOLERANCE, SOLVER, STEP = "increase the tolerance", "choose another solver", "reduce the step size"
# What happened, and what may help, by the control of the view that it needs.
WORDS: dict[Result, tuple[str, dict[str, str]]] = {
    Result.MAX_STEPS: (
        "the residual is still above the tolerance.",
        {"steps": "allow more steps", "tolerance": TOLERANCE},
    ),
    Result.STALLED: ("the residual no longer falls.", {"solver": SOLVER, "step": STEP, "tolerance": TOLERANCE}),
    Result.NONFINITE: ("the state became infinite.", {"solver": SOLVER, "step": STEP}),
}
SIDE = 32  # largest height and width of a feature map that is sent
MAPS = 24  # number of feature maps that are sent, if they are images


@dataclass(frozen=True)
class View:
    """One part of the page.

    Args:
        name: name in addresses.
        takes: whether a model can be shown.
        missing: sentence for a visitor if there is no such model; it names a command.
        describe: facts of a model that the page needs before it asks for anything.
        actions: functions that read a request and return the work of its job, by name.
        upload: shape of uploaded images, None for the image's own height and width.
    """

    name: str
    takes: Callable[[Available], bool]
    missing: str
    describe: Callable[[Available], dict[str, Any]]
    actions: dict[str, Callable[[Sent, Available], Work]]
    upload: Callable[[Available], Sequence[int | None]]


@dataclass
class Clock:
    """Time spent in a solve, without the time spent on showing it."""

    spent: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def pause(self) -> float:
        """Stop the clock and return the seconds spent so far."""
        self.spent += time.perf_counter() - self.since
        return self.spent

    def resume(self) -> None:
        self.since = time.perf_counter()


def ending(solution: Solution, seconds: float, controls: Collection[str] = ()) -> dict[str, Any]:
    """Return how a solve ended: of several samples, the message is that of the first one that did not converge.

    Args:
        controls: names of the view's controls; only remedies that it offers are named.
    """
    result = Result(int(solution.result[int((~solution.converged).int().argmax())]))
    return {
        "steps": int(solution.stats.steps.max()),
        "evaluations": solution.stats.evaluations,
        "residual": float(solution.stats.residual.max()),
        "converged": result is Result.CONVERGED,
        "message": "" if result is Result.CONVERGED else explained(result, controls),
        "seconds": seconds,
    }


def explained(result: Result, controls: Collection[str]) -> str:
    """Return what happened, and what a visitor with these controls can do about it."""
    happened, remedies = WORDS.get(result, (result.message, {}))
    *others, last = [words for name, words in remedies.items() if name in controls] or [""]
    advice = f"{', '.join(others)} or {last}" if others else last
    return f"{happened} {advice[:1].upper()}{advice[1:]}." if advice else happened


def first_residual(progress: Progress) -> float:
    return float(progress.residual[0])


class FeatureMaps:
    """The feature maps of one sample, step by step: always the same channels, those that move first and most."""

    def __init__(self, size: tuple[int, int]):
        self.size, self.channels = size, torch.zeros(0)

    def __call__(self, value: Any) -> dict[str, Any]:
        """Return maps as bytes, relative to the largest magnitude, which is ``scale``."""
        part = leaves(value, "z")[0][1][0].detach().float().cpu()
        if part.dim() == 3:
            part = part[:, : self.size[0], : self.size[1]]  # without a border
            part = part[self.chosen(part)]
            if max(part.shape[1:]) > SIDE:
                sides = min(SIDE, part.shape[1]), min(SIDE, part.shape[2])
                part = torch.nn.functional.adaptive_avg_pool2d(part, sides)
        else:
            part = part.reshape(-1, 1, 1)
        scale = float(part.abs().max())
        levels = (127 + 127 * part / scale if scale > 0 else torch.full_like(part, 127)).round().clamp(0, 254)
        count, height, width = part.shape
        return {"maps": maps(levels.to(torch.uint8), count, height, width), "scale": scale}

    def chosen(self, part: Tensor) -> Tensor:
        if len(self.channels) == 0:
            energy = part.square().sum(dim=(1, 2))
            order = energy.argsort(descending=True, stable=True)[:MAPS].sort().values
            if float(energy.max()) == 0:  # z is still 0
                return order
            self.channels = order
        return self.channels.long()


def maps(levels: Tensor, count: int, height: int, width: int) -> dict[str, Any]:
    return {"count": count, "height": height, "width": width, "data": encoded(levels)}

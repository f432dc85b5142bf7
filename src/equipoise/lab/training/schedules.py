"""Learning-rate schedules, stepped once per optimizer step; torch's own, with lengths counted in epochs."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, MultiStepLR, OneCycleLR


def constant(optimizer: Optimizer) -> LRScheduler:
    """The optimizer's own rate throughout."""
    return LambdaLR(optimizer, lambda _: 1.0)


def step(
    optimizer: Optimizer,
    steps: int,
    epochs: int,
    *,
    every: int | None = None,
    at: list[int] | None = None,
    factor: float = 0.1,
) -> LRScheduler:
    """The rate times ``factor`` after every so many epochs, or at the given ones: ``at = [100, 150]``."""
    if (every is None) == (at is None):
        raise ValueError(
            f"a step schedule needs one of every = EPOCHS (given: {every}) and at = [EPOCH, ...] (given: {at})."
        )
    if every is not None and every < 1:
        raise ValueError(f"every is {every}; it must be at least 1 epoch.")
    at = list(range(every, epochs, every)) if every is not None else at or []
    return MultiStepLR(optimizer, [epoch * steps for epoch in at], factor)


def cosine(optimizer: Optimizer, steps: int, epochs: int, *, final: float = 0.0) -> LRScheduler:
    """Half a cosine from the optimizer's rate down to ``final``."""
    return CosineAnnealingLR(optimizer, steps * epochs, eta_min=final)


def one_cycle(
    optimizer: Optimizer,
    steps: int,
    epochs: int,
    *,
    warmup: float = 0.3,
    start: float = 25.0,
    end: float = 1e4,
    momentum: list[float] | None = None,
) -> LRScheduler:
    """Up from lr / start to the optimizer's rate over the share ``warmup`` of the steps, then down to lr / start / end.

    Momentum (Adam's first beta) moves the other way, between the two numbers ``momentum = [lowest, highest]`` (default
    0.85 and 0.95). L. N. Smith, N. Topin, "Super-convergence" (2018).
    """
    if start <= 0 or end <= 0:
        raise ValueError(f"start is {start} and end is {end}; both must be above 0.")
    if momentum is not None and len(momentum) != 2:
        raise ValueError(f"momentum is {momentum}; it must be two numbers, [lowest, highest].")
    lowest, highest = momentum or (0.85, 0.95)
    rates = [group["lr"] for group in optimizer.param_groups]
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return OneCycleLR(
        optimizer,
        rates,
        total_steps=max(2, steps * epochs),
        pct_start=warmup,
        div_factor=start,
        final_div_factor=end,
        cycle_momentum=cycles,
        base_momentum=lowest,
        max_momentum=highest,
    )

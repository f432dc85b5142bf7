"""The arithmetic of an Anderson step as functions that torch.compile can fuse, in place of whole-tensor operations.

Their histories have a fixed number of differences, zero at first, and are indexed by a tensor: one graph serves all
steps and batch sizes. The equations are those of :class:`~equipoise.solvers.anderson.Anderson`.
"""

import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from equipoise.solution import warn_user
from equipoise.solvers.base import extrapolation_weights

Tensors = tuple[Tensor, ...]
failures: list[str] = []  # why compilation does not work in this process


@functools.cache
def compiled(function: FunctionType, *size: Any) -> Any:
    """Return a compiled copy of a function for states of one size: torch limits the number of graphs of a function."""
    name = "_".join(map(str, (function.__name__, *size)))
    copy = FunctionType(function.__code__.replace(co_name=name), function.__globals__)
    return torch.compile(copy, fullgraph=True)


def attempt(function: Any, history: Tensors, tensors: Tensors, *options: Any) -> Tensor | None:
    """Return ``function(history, tensors, *options)``, compiled; None, with one warning per process, if that fails."""
    if failures:
        return None
    left, moves, _ = history
    try:
        run = compiled(function, *left.shape[1:], left.dtype, left.device.type)
        for tensor in (left, moves, *tensors):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # gathering changes the batch size
        return run(history, tensors, *options)
    except Exception as error:  # torch raises a different one for everything that may be missing
        failures.append(str(error).strip().partition("\n")[0])
        warn_user(
            "Anderson(compile=True) takes its steps uncompiled: torch.compile does not work here. On a CPU it needs a "
            "C++ compiler such as g++ and Python's header files; install them, or set compile=False. torch reports: "
            f"{failures[0]}",
            RuntimeWarning,
        )
        return None


def enter(history: Tensors, tensors: Tensors, kind: int, mixing: float) -> Tensor:
    """Write the differences of two iterates into a slot of the history, and return the gap."""
    (left, moves, slot), (z, image, old_z, old_image, old_gap) = history, tensors
    gap = image - z
    change = gap - old_gap
    move = image - old_image if mixing == 1.0 else image - old_image + (mixing - 1) * change
    left.index_copy_(1, slot, (change if kind == 2 else z - old_z)[:, None].to(left.dtype))
    moves.index_copy_(1, slot, move[:, None].to(moves.dtype))
    return gap


def extrapolate(history: Tensors, tensors: Tensors, kind: int, mixing: float, ridge: float | None) -> Tensor:
    """Return the next iterate, after entering the difference in a slot of the history in the Gram matrix."""
    (left, moves, slot), (z, image, gap, gram) = history, tensors
    newest = left.index_select(1, slot)[:, 0].to(gap.dtype)
    row = column = products(left, newest)
    if kind == 1:
        dgap = (moves.index_select(1, slot)[:, 0] - newest) / mixing
        row, column = (products(moves, newest) - row) / mixing, products(left, dgap)
    new = torch.arange(left.shape[1], device=slot.device) == slot
    gram.copy_(torch.where(new[:, None], row[:, None], torch.where(new, column[:, :, None], gram)))
    gamma = extrapolation_weights(gram, products(left, gap), ridge)
    base = image if mixing == 1.0 else z + mixing * gap
    if moves.dtype == base.dtype:
        return torch.baddbmm(base[:, None], gamma[:, None], moves, alpha=-1)[:, 0]
    return base - (moves * gamma[:, :, None]).sum(dim=1)


def products(history: Tensor, rows: Tensor) -> Tensor:
    """Return the inner product of every difference with its sample's row."""
    if history.dtype == rows.dtype:
        return (rows[:, None] @ history.mT)[:, 0]
    return (history * rows[:, None]).sum(dim=2)  # widened where it is summed; a product would widen the whole history

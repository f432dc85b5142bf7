"""What is computed once per solve: derived weights, and masks that belong to the samples.

f is called many times with the same parameters. A layer that derives its weight (weight normalisation, a norm
constraint) or draws a mask (variational dropout) does so at its first call within a solve and finds the result here at
every later call, including those of the backward pass. A scope lives as long as its solve, so it is never stale.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Derived = TypeVar("Derived")


@dataclass
class Scope:
    """The memory of one solve of ``batch`` samples."""

    batch: int
    # f runs without a graph inside the loop, but a derived weight must keep its path to the raw parameters.
    grad: bool = field(default_factory=torch.is_grad_enabled)
    shared: dict[Hashable, Any] = field(default_factory=dict)
    per_sample: dict[Hashable, Tensor] = field(default_factory=dict)  # gathered along with the samples

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Share this scope between the solves inside; within another solve, share that one's."""
        outer = current.scope
        current.scope = self if outer is None else replace(outer, batch=self.batch)
        try:
            yield
        finally:
            current.scope = outer


class Current(threading.local):  # torch.compile can trace it, unlike a ContextVar
    """The scope of the solve that this thread is in."""

    scope: Scope | None = None


current = Current()


def once_per_solve(key: Hashable, compute: Callable[[], Derived], *, per_sample: bool = False) -> Derived:
    """Return ``compute()`` as evaluated first within the current solve; outside a solve it is always computed.

    Args:
        key: name of the entry; includes ``id(self)`` and everything the result depends on except parameters.
        per_sample: whether the result is a tensor with a batch dimension, to be gathered along with its samples.
    """
    scope = current.scope
    if scope is None:
        return compute()
    entries: dict[Hashable, Any] = scope.per_sample if per_sample else scope.shared
    if torch.compiler.is_compiling():
        if key not in entries:  # an entry is an input of the compiled graph; computing it is not part of the graph
            torch.compiler.disable(enter)(scope.grad, entries, key, compute)  # type: ignore[call-arg]
        return entries[key]
    if key not in entries:
        enter(scope.grad, entries, key, compute)
    if per_sample and len(entries[key]) != scope.batch:
        raise RuntimeError(
            f"a mask of {len(entries[key])} rows in a solve of {scope.batch} samples: it cannot follow its samples. "
            "Keep the batch as the first dimension where dropout is applied, or pass the mask to f as an input."
        )
    return entries[key]


def enter(grad: bool, entries: dict[Hashable, Any], key: Hashable, compute: Callable[[], Any]) -> None:
    with torch.set_grad_enabled(grad):
        entries[key] = compute()

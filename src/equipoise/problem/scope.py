"""What is computed once per solve: derived weights, and masks that belong to the samples.

f is called many times with the same parameters. A layer that derives its weight (weight normalisation, a norm
constraint) or draws a mask (variational dropout) does so at its first call within a solve and finds the result here at
every later one, also in the backward pass. A scope lives and dies with its solve, so nothing in it can be stale.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Derived = TypeVar("Derived")


class _Current(threading.local):  # which torch.compile can see through, unlike a ContextVar
    scope: Scope | None = None


_current = _Current()


class Scope:
    """The memory of one solve. ``shared`` entries serve all samples; ``per_sample`` ones are gathered with them."""

    def __init__(self, batch: int) -> None:
        # A solve inside the f of another belongs to it: the same weights and masks, or the outer f would change.
        outer = _current.scope
        self.batch = batch
        # f runs without a graph inside the loop, yet a derived weight must keep its path to the raw parameters.
        self.grad: bool = torch.is_grad_enabled() if outer is None else outer.grad
        self.shared: dict[Hashable, Any] = {} if outer is None else outer.shared
        self.per_sample: dict[Hashable, Tensor] = {} if outer is None else outer.per_sample

    def take(self, rows: Tensor) -> Scope:
        """The same scope for the samples ``rows``."""
        taken = copy.copy(self)
        taken.batch = len(rows)
        taken.per_sample = {key: entry.index_select(0, rows) for key, entry in self.per_sample.items()}
        return taken

    def without_shared(self) -> Scope:
        """The same masks, with every weight to be derived anew."""
        fresh = copy.copy(self)
        fresh.shared = {}
        return fresh

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer, _current.scope = _current.scope, self
        try:
            yield
        finally:
            _current.scope = outer


def once_per_solve(key: Hashable, compute: Callable[[], Derived], *, per_sample: bool = False) -> Derived:
    """``compute()``, or what it gave the first time within the current solve; outside a solve it is always computed.

    Args:
        key: names the entry; include ``id(self)`` and whatever else the result depends on but the parameters.
        per_sample: the result is a tensor with a batch dimension and follows its samples when they are gathered.
    """
    scope = _current.scope
    if scope is None:
        return compute()
    entries: dict[Hashable, Any] = scope.per_sample if per_sample else scope.shared
    if torch.compiler.is_compiling():
        if key not in entries:  # an entry is an input of the compiled graph; what makes it is not part of that
            torch.compiler.disable(make)(scope.grad, entries, key, compute)  # type: ignore[call-arg]
        return entries[key]
    if key not in entries:
        make(scope.grad, entries, key, compute)
    if per_sample and len(entries[key]) != scope.batch:
        raise RuntimeError(
            f"a mask of {len(entries[key])} rows in a solve of {scope.batch} samples: it cannot follow its samples. "
            "Keep the batch as the first dimension where dropout is applied, or pass the mask to f as an input."
        )
    return entries[key]


def make(grad: bool, entries: dict[Hashable, Any], key: Hashable, compute: Callable[[], Any]) -> None:
    """Enter what ``compute`` gives, recorded or not as the solve wants it."""
    with torch.set_grad_enabled(grad):
        entries[key] = compute()

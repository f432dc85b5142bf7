"""What is computed once per solve: derived weights, and masks that belong to the samples.

f is called many times with the same parameters. A layer that derives its weight (weight normalisation, a norm
constraint) or draws a mask (variational dropout) does so at its first call within a solve and finds the result here at
every later one, also in the backward pass. A scope lives and dies with its solve, so nothing in it can be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_current: ContextVar[Scope | None] = ContextVar("equipoise_scope", default=None)


class Scope:
    """The memory of one solve. ``shared`` entries serve all samples; ``per_sample`` ones are gathered with them."""

    def __init__(self) -> None:
        # f runs without a graph inside the loop, yet a derived weight must keep its path to the raw parameters.
        self.grad = torch.is_grad_enabled()
        self.shared: dict[Hashable, Tensor] = {}
        self.per_sample: dict[Hashable, Tensor] = {}

    def take(self, rows: Tensor) -> Scope:
        """The same scope for the samples ``rows``."""
        taken = Scope.__new__(Scope)
        taken.grad, taken.shared = self.grad, self.shared
        taken.per_sample = {key: entry.index_select(0, rows) for key, entry in self.per_sample.items()}
        return taken

    def without_shared(self) -> Scope:
        """The same masks, with every weight to be derived anew."""
        fresh = Scope.__new__(Scope)
        fresh.grad, fresh.shared, fresh.per_sample = self.grad, {}, self.per_sample
        return fresh

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def once_per_solve(key: Hashable, compute: Callable[[], Tensor], *, per_sample: bool = False) -> Tensor:
    """``compute()``, or what it gave the first time within the current solve; outside a solve it is always computed.

    Args:
        key: names the entry; include ``id(self)`` and whatever else the result depends on but the parameters.
        per_sample: the result has a batch dimension and follows its samples when they are gathered.
    """
    scope = _current.get()
    if scope is None:
        return compute()
    entries = scope.per_sample if per_sample else scope.shared
    if key not in entries:
        with torch.set_grad_enabled(scope.grad):
            entries[key] = compute()
    return entries[key]

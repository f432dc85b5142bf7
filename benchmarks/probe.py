"""A wrapper around f that sees what a solver does: calls, time inside f, and how close each iterate was.

It stands between f and each library, so that all are measured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from problems import State, leaves, relative_residual

Observer = Callable[[State, State], None]


class Probe:
    """`f` with a clock around its calls and around its vector-Jacobian products with respect to z.

    `on_call(z, f(z))` and `on_product(u, J^T u)` show every iterate to a calibration run; timed runs leave them out.
    """

    def __init__(self, f: nn.Module, on_call: Observer | None = None, on_product: Observer | None = None) -> None:
        self.f = f
        self.calls = 0
        self.rows = 0  # samples x calls
        self.products = 0
        self.seconds = 0.0
        self._on_call = on_call
        self._on_product = on_product
        self._product_began: float | None = None
        self._cotangent: State = ()

    def __call__(self, z: State, *inputs: Tensor) -> State:
        began = perf_counter()
        if torch.is_grad_enabled():
            fz = _restore(z, _Output.apply(self, *leaves(self.f(_restore(z, _Input.apply(self, *leaves(z))), *inputs))))
        else:
            fz = self.f(z, *inputs)
        self.seconds += perf_counter() - began
        self.calls += 1
        self.rows += len(leaves(z)[0])
        if self._on_call is not None:
            self._on_call(z, fz)
        return fz

    def begin_product(self, cotangent: tuple[Tensor, ...]) -> None:
        self._cotangent = cotangent
        self._product_began = perf_counter()

    def end_product(self, result: tuple[Tensor, ...]) -> None:
        self.close()
        self.products += 1
        if self._on_product is not None:
            self._on_product(self._cotangent, result)

    def close(self) -> None:
        """The product for the parameters ends without reaching z: it ends with the backward pass."""
        if self._product_began is not None:
            self.seconds += perf_counter() - self._product_began
            self._product_began = None


def _restore(like: State, tensors: tuple[Tensor, ...]) -> State:
    return tensors[0] if isinstance(like, Tensor) else tensors


class _Output(torch.autograd.Function):
    """The identity behind f: its backward is where a product begins."""

    @staticmethod
    def forward(ctx: Any, probe: Probe, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.probe = probe
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        ctx.probe.begin_product(cotangent)
        return None, *cotangent


class _Input(torch.autograd.Function):
    """The identity in front of f: its backward is where a product ends."""

    @staticmethod
    def forward(ctx: Any, probe: Probe, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.probe = probe
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *result: Tensor) -> tuple[Tensor | None, ...]:
        ctx.probe.end_product(result)
        return None, *result


class Reached(Exception):
    """Ends a calibration run at the iterate that is close enough."""


class Watch:
    """Raises `Reached` once every sample has had an iterate within `tolerance`: libraries return each sample's best."""

    def __init__(self, tolerance: float, adjoint_source: State | None = None) -> None:
        self.tolerance = tolerance
        self.source = adjoint_source
        self.best: Tensor | None = None

    def __call__(self, point: State, image: State) -> None:
        if self.source is not None:  # the adjoint's fixed point is u = v + J^T u
            image = tuple(v + a for v, a in zip(leaves(self.source), leaves(image), strict=True))
            if not isinstance(point, tuple):
                point = leaves(point)
        residual = relative_residual(point, image)
        self.best = residual if self.best is None else torch.fmin(self.best, residual)
        if float(self.best.max()) <= self.tolerance:
            raise Reached

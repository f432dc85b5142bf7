"""Count the floating-point operations and the memory traffic of a computation, operation by operation.

Flops are those of products, convolutions, Fourier transforms and matrix inverses, by the formulas of
`torch.utils.flop_counter` and, for the last two and for complex numbers, by those below; a multiplication and an
addition are two. Sums, norms and activations do no flops here: their cost is their traffic.

Bytes are the sizes of the tensors that each operation reads and writes: the traffic to memory if nothing stays in a
cache between two operations, and if an operation reads its inputs once and needs no space of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
COMPLEX = 4  # real products in a complex one
WRITTEN_ONLY = {aten.copy_, aten.fill_, aten.zero_}  # their first argument is not read


def transform_flops(x: Tensor, dims: list[int], *_: Any, out_val: Tensor, **__: Any) -> float:
    """5 n log2 n for a complex transform of n numbers, half of it if one side is real."""
    real = not (x.is_complex() and out_val.is_complex())
    numbers = max(x.numel(), out_val.numel())
    grid = prod((out_val if out_val.numel() > x.numel() else x).shape[d] for d in dims)
    return (2.5 if real else 5.0) * numbers * log2(max(grid, 2))


def inverse_flops(a: Tensor, *_: Any, **__: Any) -> float:
    return 2.0 * a.numel() * a.shape[-1] * (COMPLEX if a.is_complex() else 1)


def vector_flops(*tensors: Any, **_: Any) -> float:
    """A product of a matrix (or vector) with a vector."""
    return 2.0 * max(t.numel() for t in tensors if isinstance(t, Tensor))


FORMULAS: dict[Any, Callable[..., float]] = {
    **dict.fromkeys((aten._fft_r2c, aten._fft_c2r, aten._fft_c2c), transform_flops),
    aten.linalg_inv_ex: inverse_flops,
    **dict.fromkeys((aten.mv, aten.addmv, aten.dot, aten.vdot), vector_flops),
}


@dataclass(frozen=True)
class Operation:
    """One call of a kernel."""

    name: str
    flops: float
    bytes: float

    def divided(self, by: int) -> Operation:
        return Operation(self.name, self.flops / by, self.bytes / by)


@dataclass
class Counts:
    """The operations of a computation."""

    operations: list[Operation] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.operations)

    @property
    def bytes(self) -> float:
        return sum(op.bytes for op in self.operations)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the least time if operations run one after the other, each bound by flops or by bytes."""
        return sum(max(op.flops / flops_per_second, op.bytes / bytes_per_second) for op in self.operations)


class Counter(TorchDispatchMode):
    """Within this context, operations are counted in ``counts``; `paused` leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.on:
            packet = func._overloadpacket
            flops, moved = flops_of(packet, args, kwargs or {}, out), bytes_of(func, args, kwargs or {}, out)
            if flops or moved:
                self.counts.operations.append(Operation(str(packet), flops, moved))
        return out


def count(run: Callable[[], object]) -> Counts:
    """Run a computation and return what it did."""
    with Counter() as counter:
        run()
    return counter.counts


def flops_of(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet.__name__.endswith("_"):  # in place
        packet = getattr(aten, packet.__name__.rstrip("_"), packet)
    if packet in FORMULAS:
        return FORMULAS[packet](*args, **kwargs, out_val=out)
    if packet not in flop_registry:
        return 0.0
    flops = flop_registry[packet](*args, **kwargs, out_val=out)
    return flops * (COMPLEX if any(t.is_complex() for t in tensors(args)) else 1)


def bytes_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if func.is_view or packet.__name__.startswith(("empty", "new_empty", "_local_scalar")):
        return 0
    read, written = tensors(args), tensors(out)
    if not func._schema.is_mutable:
        stored = {t.untyped_storage()._cdata for t in read}
        if any(t.untyped_storage()._cdata in stored for t in written):
            return 0  # a view in all but name
    if packet in WRITTEN_ONLY:
        read = read[1:]
    read += tensors({name: value for name, value in kwargs.items() if name != "out"})
    return sum(size(t) for t in [*read, *written])


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor, with those it repeats (`expand`) once."""
    lengths: Iterable[int] = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not n)
    return prod(lengths) * tensor.element_size()

"""Support for an f compiled by torch.compile.

A solve needs what a compiled graph does not provide by default: the adjoint system runs backward through one record
many times, while inductor lets a backward pass overwrite what the forward pass saved ("donated buffers"); finished
samples are left out, so the batch size varies; and forward-mode derivatives need the uncompiled f.

The compiler is slow to import. Nothing here loads it, and callers first test whether it is loaded, so that programs
that compile nothing pay nothing. Optimizers load dynamo, but not what torch.compile loads besides.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

COMPILER = "torch._dynamo.debug_utils"  # in sys.modules once torch.compile was called, or a compiled f loaded


def original(f: Any) -> Any:
    """Return the module or function that was given to torch.compile; any other f is returned unchanged."""
    if isinstance(f, nn.Module):
        return f._modules.get("_orig_mod", f)
    return getattr(f, "_torchdynamo_orig_callable", f)


def uncompiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f without its own compilation by ``torch.compile(f)`` or ``f.compile()``; parts of f stay compiled."""
    plain = original(f)
    if isinstance(plain, nn.Module) and plain._compiled_call_impl is not None:
        return plain._call_impl
    return plain


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which nothing compiled runs."""
    if COMPILER not in sys.modules or torch.compiler.is_compiling():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def vary_batch(f: Callable[..., Any], tensors: Iterable[Tensor]) -> None:
    """Have a compiled f accept any batch size, since gathering would otherwise compile it again and again."""
    if uncompiled(f) is not f and not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


@contextmanager
def buffers_kept() -> Iterator[None]:
    """Have graphs compiled inside keep what they saved for the backward pass, which can then run many times."""
    if torch.compiler.is_compiling():
        yield
        return
    config: Any = sys.modules["torch._functorch.config"]  # not its patch(), which takes 90 us
    before, config.donated_buffer = config.donated_buffer, False
    try:
        yield
    finally:
        config.donated_buffer = before


def graphs(nodes: Iterable[Any]) -> set[Any]:
    """Return the compiled graphs among the nodes of a record, each a class that torch.compile made."""
    classes = {getattr(node, "_forward_cls", None) for node in nodes}
    return {graph for graph in classes if hasattr(getattr(graph, "metadata", None), "bw_donated_idxs")}


def require_buffers(nodes: Iterable[Any]) -> None:
    """Raise if a compiled graph among the nodes of a record was compiled elsewhere and can run backward only once."""
    for graph in graphs(nodes):
        if graph.metadata.bw_donated_idxs:
            raise RuntimeError(
                "f was compiled before this solve so that its backward pass can run only once, and implicit gradients "
                "need it many times: set torch._functorch.config.donated_buffer = False before compiled parts of f are "
                "first called outside a solve, or call torch._dynamo.reset() to compile again."
            )
        graph.metadata.bw_donated_idxs = []  # None means "unknown" and would be treated as some

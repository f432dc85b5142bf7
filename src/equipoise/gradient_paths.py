"""A tensor that needs a gradient but cannot get one is an error that names it.

After one recorded evaluation of f, every input, parameter and captured tensor that requires a gradient must be
reachable in the recorded graph. One that is not is either unused, which is fine, or cut off (``detach``, ``no_grad``, ``.data``,
a trip through numpy), which would make its gradient silently wrong; a small change of its value tells which.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.graph import nodes
from equipoise.problem import FunctionProblem, leaves

# Found once, not tried again. By identity: a WeakSet would compare tensors element by element.
_unused: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def require_gradient_paths(problem: FunctionProblem, rows: Tensor, image: Tensor) -> None:
    """Raise if f at ``rows``, recorded as ``image``, depends on a tensor that no gradient would reach."""
    missing = unreachable(image, dict(named_sources(problem)))
    for name, tensor in missing.items():
        if _unused.get(id(tensor)) is tensor:
            continue
        if depends_on(problem, rows, image, tensor):
            raise RuntimeError(
                f"{name} requires a gradient and f depends on it, but no gradient can reach it: look for detach(), "
                "no_grad(), .data, .item() or numpy on its way through f. "
                "If it is meant to be constant, pass it detached or set requires_grad=False."
            )
        _unused[id(tensor)] = tensor


def named_sources(problem: FunctionProblem) -> Iterator[tuple[str, Tensor]]:
    """The tensors that require a gradient and are visibly in f's reach."""
    for i, tree in enumerate(problem.inputs):
        yield from ((name, t) for name, t in leaves(tree, f"inputs[{i}]") if t.requires_grad)
    yield from captured(problem.f)


def captured(f: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a module; tensors and modules in the closure of a function or among the globals it names."""
    if isinstance(f, nn.Module):
        yield from ((f"parameter {name!r}", p) for name, p in f.named_parameters() if p.requires_grad)
    elif isinstance(f, functools.partial):
        yield from captured(f.func)
        for value in (*f.args, *f.keywords.values()):
            yield from held(value, "an argument of functools.partial")
    elif isinstance(f, types.FunctionType):
        variables = inspect.getclosurevars(f)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            yield from held(value, f"captured {name!r}")


def held(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        # Only some of a captured model's parameters need be f's; a missing path is told from non-use by trial.
        yield from ((f"{name}: parameter {key!r}", p) for key, p in value.named_parameters() if p.requires_grad)
    elif isinstance(value, Tensor):
        if value.requires_grad:
            yield name, value
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from held(part, f"{name}[{i}]")


def unreachable(image: Tensor, sources: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``sources`` that the graph of ``image`` does not contain. The search ends once all are found."""
    wanted = {id(t) if t.grad_fn is None else t.grad_fn: name for name, t in sources.items()}
    missing = dict(sources)
    for node in nodes(image):
        if not missing:
            break
        found = wanted.get(node) or wanted.get(id(getattr(node, "variable", None)))
        if found is not None:
            missing.pop(found, None)
    return missing


def depends_on(problem: FunctionProblem, rows: Tensor, image: Tensor, tensor: Tensor) -> bool:
    """Whether f at ``rows`` changes with ``tensor``, by trying; its value is restored to the bit."""
    fresh = problem.take(torch.arange(rows.shape[0], device=rows.device))
    original = tensor.detach().clone()
    with torch.no_grad():
        try:
            tensor.data.add_(0.1 * (1 + original.abs())).mul_(1.01)
            fresh.inputs, fresh.scope = problem.inputs, fresh.scope.without_shared()
            changed = fresh(rows.detach())
        finally:
            tensor.data.copy_(original)
    scale = image.detach().abs().max() if image.numel() else 0.0
    return bool((changed - image).abs().max() > 1e-6 * scale) if image.numel() else False

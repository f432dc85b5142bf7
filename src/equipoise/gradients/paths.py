"""A tensor that needs a gradient but cannot get one is an error that names it.

After one recorded evaluation of f, every input, parameter and captured tensor that requires a gradient must be
reachable in the recorded graph. One that is not is either unused, which is fine, or cut off (``detach``, ``no_grad``,
``.data``, a trip through numpy), which would make its gradient silently wrong; a change of its value tells which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from equipoise.gradients.graph import edges, leaf_of, origin
from equipoise.problem.captures import Substituted, tensors_needing_gradients
from equipoise.problem.compiled import eagerly, graphs
from equipoise.problem.function import FunctionProblem
from equipoise.problem.independence import other_than
from equipoise.problem.layout import leaves, rebuild


def require_gradient_paths(problem: FunctionProblem, rows: Tensor, record: Tensor) -> None:
    """Raise if f at ``rows``, recorded in the graph of ``record``, depends on a tensor that no gradient would reach.

    If ``rows`` is a leaf that requires a gradient, the state itself is looked at too: a z that is cut off inside f
    would make its Jacobian look like zero.
    """
    new = graphs(node for node, _ in edges(record, [rows, *problem.sources])) - set(_looked_through)
    if new:  # a compiled graph shows a path to all that it is given, also to what is cut off inside it
        with torch.enable_grad(), eagerly():
            record = problem(rows)
    require_paths(problem, rows, record)
    _looked_through.update(new)


_looked_through: WeakSet[Any] = WeakSet()  # compiled graphs in which nothing is cut off


def require_paths(problem: FunctionProblem, rows: Tensor, record: Tensor) -> None:
    missing = unreachable(record, list(named_sources(problem)))
    lost = unreachable_state(problem, rows, record) if rows.is_leaf and rows.requires_grad else []
    if not (missing or lost):
        return
    with torch.no_grad():
        image = problem.uncompiled()(rows)
    if not changes(problem, rows, image, [tensor for _, tensor in missing], [columns for _, columns in lost]):
        return
    if changes(problem, rows, image, [], []):
        return  # f changes by itself, which is another fault and reported as such
    for name, tensor in missing:
        if changes(problem, rows, image, [tensor], []):
            raise RuntimeError(CUT_OFF.format(name=name))
    for name, columns in lost:
        if changes(problem, rows, image, [], [columns]):
            raise RuntimeError(CUT_OFF.format(name=name))


CUT_OFF = (
    "{name} requires a gradient and f depends on it, but no gradient can reach it: look for detach(), no_grad(), "
    ".data, .item() or numpy on its way through f. If it is meant to be constant, pass it detached or set "
    "requires_grad=False."
)


def named_sources(problem: FunctionProblem) -> Iterator[tuple[str, Tensor]]:
    """The tensors that require a gradient and are visibly in f's reach."""
    for i, tree in enumerate(problem.inputs):
        yield from ((name, t) for name, t in leaves(tree, f"inputs[{i}]") if t.requires_grad)
    yield from tensors_needing_gradients(problem.f)


def unreachable(image: Tensor, sources: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those of ``sources`` that the graph of ``image`` does not contain."""
    wanted = {id(tensor) if tensor.is_leaf else origin(tensor) for _, tensor in sources}
    for edge in edges(image):
        wanted.discard(edge)
        wanted.discard(id(leaf_of(edge[0])))
        if not wanted:
            return []
    return [(name, t) for name, t in sources if (id(t) if t.is_leaf else origin(t)) in wanted]


def unreachable_state(problem: FunctionProblem, rows: Tensor, image: Tensor) -> list[tuple[str, slice]]:
    """The tensors of the state, with their columns in ``rows``, that the graph of ``image`` does not contain."""
    reached = set()
    for node, index in edges(image):
        if any(leaf_of(parent) is rows for parent, _ in node.next_functions):
            reached.add(index)  # of the split into tensors, if there is more than one
    missing, begin = [], 0
    for i, leaf in enumerate(problem.layout.leaves):
        if i not in reached:
            missing.append((leaf.name, slice(begin, begin + leaf.numel)))
        begin += leaf.numel
    return missing


def changes(
    problem: FunctionProblem, rows: Tensor, image: Tensor, tensors: Collection[Tensor], columns: Collection[slice]
) -> bool:
    """Return whether f at ``rows`` changes with ``tensors`` or ``columns``, by trying others in their place."""
    others = {id(t): other_than(t.detach()) for t in tensors}
    given = [t for _, t in leaves(problem.inputs, "inputs")]
    trial, at = problem.with_fresh_weights(), rows.detach().clone()
    trial.inputs = rebuild(problem.inputs, [others.get(id(t), t) for t in given])
    for part in columns:
        at[:, part] = other_than(at[:, part])
    with torch.no_grad():
        with eagerly(), Substituted(others):
            after = trial(at)
        finite = torch.isfinite(image)
        scale = torch.where(finite, image, 0.0).abs().max() if image.numel() else 0.0
        return bool((finite & ~((after - image).abs() <= max(1e-6, 100 * problem.rounding) * scale)).any())

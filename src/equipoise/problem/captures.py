"""What f depends on: as its code names it, and as the graph of a recorded evaluation shows it.

A tensor that needs a gradient but cannot get one is an error that names it. A tensor that requires a gradient and is
not in the graph is either unused, which is fine, or cut off (``detach``, ``no_grad``, ``.data``, numpy), which would
make its gradient silently wrong. Changing its value shows which.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.problem.compiled import COMPILER, eagerly, graphs, original
from equipoise.problem.layout import leaves, rebuild

if TYPE_CHECKING:
    from equipoise.problem.problem import FunctionProblem

Edge = tuple[Any, int]  # a node of the graph, and which of its outputs


# What the code of f names.


def visible(f: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the modules and tensors in f's closure, globals, defaults and attributes, each with a locating phrase."""
    f = original(f) if COMPILER in sys.modules else f
    if isinstance(f, nn.Module):
        yield "", f
    elif isinstance(f, functools.partial):
        yield from visible(f.func)
        yield from unfold([*f.args, *f.keywords.values()], "an argument of functools.partial", ())
    elif isinstance(f, types.MethodType):
        yield from attributes(f.__self__, "attribute", f.__func__.__code__.co_names)
    elif isinstance(f, types.FunctionType):
        variables = inspect.getclosurevars(f)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            yield from unfold(value, f"captured {name!r}", f.__code__.co_names)
        for name, parameter in inspect.signature(f).parameters.items():
            yield from unfold(parameter.default, f"default argument {name!r}", ())
    elif callable(inner := getattr(f, "__wrapped__", None)):  # a hoisted function
        yield from visible(inner)
    elif isinstance(call := type(f).__dict__.get("__call__"), types.FunctionType):
        yield from attributes(f, "attribute", call.__code__.co_names)


def unfold(value: Any, phrase: str, names: Collection[str]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the modules and tensors in a value.

    If the code names parts of a module, as in ``model.cell(z)`` or within ``model.step(z)``, only those parts count.
    """
    if isinstance(value, Tensor):
        yield phrase, value
    elif isinstance(value, nn.Module):
        methods = [m for n in names if isinstance(m := type(value).__dict__.get(n), types.FunctionType)]
        within = {*names, *(n for method in methods for n in method.__code__.co_names)}
        parts = list(attributes(value, phrase, within))
        yield from parts or ([] if methods else [(phrase, value)])
    elif isinstance(value, tuple | list | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from unfold(part, f"{phrase}[{key!r}]", names)


def attributes(owner: Any, phrase: str, names: Collection[str]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the modules and tensors among the attributes of ``owner`` that the code names."""
    known = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        known |= {**owner._parameters, **owner._buffers, **owner._modules}
    for name in names:
        if name in known:
            yield from unfold(known[name], f"{phrase} {name!r}", ())


def tensors_needing_gradients(f: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and parameters that ``f`` names and that require a gradient."""
    for phrase, item in visible(f):
        if isinstance(item, Tensor):
            if item.requires_grad:
                yield phrase, item
        else:
            where = f"{phrase}: " if phrase else ""
            yield from ((f"{where}parameter {key!r}", p) for key, p in item.named_parameters() if p.requires_grad)


def layers(f: Any) -> Iterator[tuple[str, nn.Module]]:
    for phrase, item in visible(f):
        if isinstance(item, nn.Module):
            yield from ((f"{phrase} {name}".strip() or "f", module) for name, module in item.named_modules())


def named_sources(problem: FunctionProblem) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs and visible tensors of a problem that require a gradient."""
    for i, tree in enumerate(problem.inputs):
        yield from ((name, t) for name, t in leaves(tree, f"inputs[{i}]") if t.requires_grad)
    yield from tensors_needing_gradients(problem.f)


# What the recorded graph shows.


def origin(tensor: Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def leaf_of(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)  # of a node that accumulates a gradient


def edges(image: Tensor, stop: Sequence[Tensor] = ()) -> Iterator[Edge]:
    """Yield every edge that ``image`` depends on, not going beyond the tensors in ``stop``."""
    ends = {origin(tensor) for tensor in stop}
    queue = [origin(image)]
    seen: set[Edge] = set()
    for edge in queue:
        if edge[0] is None or edge in seen or edge in ends:
            continue
        seen.add(edge)
        yield edge
        queue.extend(edge[0].next_functions)


def leaves_of(image: Tensor, stop: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that ``image`` depends on other than through those in ``stop``."""
    excluded = {id(tensor) for tensor in stop}
    reached = (leaf_of(node) for node, _ in edges(image, stop))
    return [leaf for leaf in reached if leaf is not None and id(leaf) not in excluded]


def captured_tensors(image: Tensor, known: Sequence[Tensor], visible: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors through which ``image`` depends on anything but ``known``, none upstream of another.

    They are leaves, or, where possible, the ``visible`` tensors computed from leaves. That is impossible if a leaf is
    reached both through such a tensor and around it: its gradient would be counted twice.
    """
    reached = set(edges(image, known))
    computed = list({origin(t): t for t in visible if not t.is_leaf and origin(t) in reached}.values())
    around = leaves_of(image, [*known, *computed])
    through = {id(leaf) for tensor in computed for leaf in leaves_of(tensor, known)}
    if any(id(leaf) in through for leaf in around):
        return leaves_of(image, known)
    upstream = {edge for tensor in computed for edge in edges(tensor) if edge != origin(tensor)}
    return [*around, *(tensor for tensor in computed if origin(tensor) not in upstream)]


# Whether gradients reach everything that needs one.

_checked_graphs: WeakSet[Any] = WeakSet()  # compiled graphs in which nothing is cut off


def require_gradient_paths(
    problem: FunctionProblem, rows: Tensor, record: Tensor, sources: Sequence[tuple[str, Tensor]] | None = None
) -> None:
    """Raise if f at ``rows``, with image ``record``, depends on a tensor that no gradient would reach.

    Checked are the named ``sources``, or all that f visibly has. If ``rows`` is a leaf that requires a gradient, so is
    the state: a z that is cut off inside f would make its Jacobian look like zero.
    """
    compiled = set()
    if COMPILER in sys.modules:
        compiled = graphs(node for node, _ in edges(record, [rows, *problem.sources])) - set(_checked_graphs)
    if compiled:  # a compiled graph shows a path to all its inputs, including those cut off inside it
        with torch.enable_grad(), eagerly():
            record = problem(rows)
    sources = list(named_sources(problem)) if sources is None else list(sources)
    missing: list[tuple[str, Tensor | slice]] = [*unreachable(record, sources)]
    if rows.is_leaf and rows.requires_grad:
        missing += unreachable_state(problem, rows, record)
    if missing:
        with torch.no_grad():
            image = problem.uncompiled()(rows)
        everything = [part for _, part in missing]
        # An f that changes from call to call is a different fault, reported as such.
        if changes(problem, rows, image, everything) and not changes(problem, rows, image, []):
            for name, part in missing:
                if changes(problem, rows, image, [part]):
                    raise RuntimeError(
                        f"{name} requires a gradient and {problem.called} depends on it, but no gradient can reach it: "
                        f"look for detach(), no_grad(), .data, .item() or numpy in {problem.called}. If it is meant to "
                        "be constant, pass it detached or set requires_grad=False."
                    )
    _checked_graphs.update(compiled)


def unreachable(image: Tensor, sources: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return those of ``sources`` that the graph of ``image`` does not contain."""
    wanted = {id(tensor) if tensor.is_leaf else origin(tensor) for _, tensor in sources}
    for edge in edges(image):
        wanted -= {edge, id(leaf_of(edge[0]))}
        if not wanted:
            return []
    return [(name, t) for name, t in sources if (id(t) if t.is_leaf else origin(t)) in wanted]


def unreachable_state(problem: FunctionProblem, rows: Tensor, image: Tensor) -> list[tuple[str, slice]]:
    """Return the columns of those tensors of the state that the graph of ``image`` does not contain."""
    # Indices of the outputs of the split into tensors, if there are several.
    reached = {i for node, i in edges(image) if any(leaf_of(parent) is rows for parent, _ in node.next_functions)}
    missing, begin = [], 0
    for i, leaf in enumerate(problem.layout.leaves):
        if i not in reached:
            missing.append((leaf.name, slice(begin, begin + leaf.numel)))
        begin += leaf.numel
    return missing


def changes(problem: FunctionProblem, rows: Tensor, image: Tensor, parts: Sequence[Tensor | slice]) -> bool:
    """Return whether f at ``rows`` changes if ``parts``, tensors or columns of the state, are changed."""
    others = {id(t): other_than(t.detach()) for t in parts if isinstance(t, Tensor)}
    trial, at = problem.with_fresh_weights(), rows.detach().clone()
    trial.inputs = rebuild(problem.inputs, [others.get(id(t), t) for _, t in leaves(problem.inputs, "inputs")])
    for part in parts:
        if isinstance(part, slice):
            at[:, part] = other_than(at[:, part])
    with torch.no_grad():
        with eagerly(), Substituted(others):
            after = trial(at)
        finite = torch.isfinite(image)
        scale = torch.where(finite, image, 0.0).abs().max() if image.numel() else 0.0
        return bool((finite & ~((after - image).abs() <= max(1e-6, 100 * problem.rounding) * scale)).any())


def other_than(tensor: Tensor) -> Tensor:
    """Return a tensor that differs in every entry, by about a tenth."""
    return 1.01 * tensor + 0.1 * (1 + tensor.abs())


class Substituted(TorchFunctionMode):
    """A context in which torch functions called by this thread see other tensors in place of those with some ids."""

    def __init__(self, tensors: Mapping[int, Tensor]):
        super().__init__()
        self.tensors = tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*self.replaced(args), **{name: self.replaced(value) for name, value in (kwargs or {}).items()})

    def replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensors.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self.replaced(part) for part in value)
        return value

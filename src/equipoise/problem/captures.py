"""What a function can reach by name: the modules and tensors in its closure, globals, defaults and attributes.

:class:`Substituted` runs a function with others in their place, without touching them: other threads may use them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.problem.compiled import original


def visible(f: Any) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """The modules and tensors that ``f`` names, each with a phrase that says where. A module is its own."""
    f = original(f)
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
    elif isinstance(call := type(f).__dict__.get("__call__"), types.FunctionType):
        yield from attributes(f, "attribute", call.__code__.co_names)


def unfold(value: Any, phrase: str, names: Collection[str]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Modules and tensors in a value.

    Of a module whose parts are named, as in ``model.cell(z)`` or within ``model.step(z)``, only those parts.
    """
    if isinstance(value, Tensor):
        yield phrase, value
    elif isinstance(value, nn.Module):
        methods = [m for n in names if isinstance(m := type(value).__dict__.get(n), types.FunctionType)]
        within = {*names, *(n for method in methods for n in method.__code__.co_names)}
        parts = list(attributes(value, phrase, within))
        yield from parts or ([] if methods else [(phrase, value)])
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from unfold(part, f"{phrase}[{i}]", names)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from unfold(part, f"{phrase}[{key!r}]", names)


def attributes(owner: Any, phrase: str, names: Collection[str]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """The modules and tensors among the attributes of ``owner`` that code names."""
    known = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        known |= {**owner._parameters, **owner._buffers, **owner._modules}
    for name in names:
        if name in known:
            yield from unfold(known[name], f"{phrase} {name!r}", ())


def tensors_needing_gradients(f: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors and parameters that ``f`` names and that require a gradient."""
    for phrase, item in visible(f):
        if isinstance(item, Tensor):
            if item.requires_grad:
                yield phrase, item
        else:
            where = f"{phrase}: " if phrase else ""
            yield from ((f"{where}parameter {key!r}", p) for key, p in item.named_parameters() if p.requires_grad)


def layers(f: Any) -> Iterator[tuple[str, nn.Module]]:
    """The layers that ``f`` is made of, as far as it names them."""
    for phrase, item in visible(f):
        if isinstance(item, nn.Module):
            yield from ((f"{phrase} {name}".strip() or "f", module) for name, module in item.named_modules())


class Substituted(TorchFunctionMode):
    """A context in which torch functions called by this thread see other tensors in place of some.

    Args:
        tensors: what to put in place of the tensor with each ``id``.
    """

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

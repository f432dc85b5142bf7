"""What does not depend on z is computed once per solve: :func:`hoist`.

f is called many times with the same inputs and parameters. A hoisted f remembers, for the length of a solve, results of
those torch functions whose arguments are inputs, parameters or such results, and finds them again at its next call.
The code of f runs at every call, so control flow, submodules and modes need no tracing. Inputs that are narrowed to
some samples, or recorded for a gradient, are other tensors: results that depend on them are then computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.problem.captures import visible
from equipoise.problem.compiled import uncompiled
from equipoise.problem.layout import leaves, same_nesting
from equipoise.problem.problem import autocast_state, require_function, version
from equipoise.problem.scope import Scope, current
from equipoise.solution import warn_user

F = TypeVar("F", bound=Callable[..., Any])
SHARED = (  # what torch keeps of a module, so that its names and what is saved of it stay the same
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_post_hooks"),
)
SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def hoist(f: F) -> F:
    """Return f such that what does not depend on z is computed once per solve instead of at every step.

    In ``tanh(W z + U x + b)``, that is ``U x``; a weight that f derives from parameters is another example. Values and
    gradients are those of f, which the first solve verifies. Parameters, their names and the mode (train, eval) are
    shared with f. Outside a solve, and when compiled as a whole, the result calls f as it is.

    Args:
        f: function or module ``f(z, *inputs) -> z``, not compiled.

    Example:
        >>> layer = eq.Equilibrium(eq.hoist(cell), initial=(64,))
    """
    require_function(f)
    parts = [item for _, item in visible(f) if isinstance(item, nn.Module)]
    if any(uncompiled(part) is not part for part in [f, *(m for part in parts for m in part.modules())]):
        raise TypeError(
            "hoist cannot see inside a compiled f: pass the function or module before torch.compile. The two do not "
            "combine: use one or the other."
        )
    return cast(F, HoistedModule(f) if isinstance(f, nn.Module) else HoistedFunction(f))


class HoistedFunction:
    """A function f with a memory for each solve."""

    def __init__(self, f: Callable[..., Any]):
        self.__wrapped__ = f
        self.verified = False

    def __call__(self, z: Any, *inputs: Any) -> Any:
        return remembering(self, self.__wrapped__, z, inputs)

    def __getattr__(self, name: str) -> Any:  # what f shows to solvers: affine, structure, ...
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


class HoistedModule(nn.Module):
    """A module f with a memory for each solve; its parameters, buffers, submodules and mode are those of f."""

    def __init__(self, f: nn.Module):
        super().__init__()
        vars(self).update({name: vars(f)[name] for name in SHARED}, __wrapped__=f, verified=False)  # not registered
        del self.training  # as are all attributes that this module lacks, it is then that of f

    def forward(self, z: Any, *inputs: Any) -> Any:
        return remembering(self, self.__wrapped__, z, inputs)

    def train(self, mode: bool = True) -> HoistedModule:
        self.__wrapped__.train(mode)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__wrapped__._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__wrapped__._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(vars(self)["__wrapped__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name == "verified" or "__wrapped__" not in vars(self)
        super().__setattr__(name, value) if own else setattr(vars(self)["__wrapped__"], name, value)

    def extra_repr(self) -> str:
        return "hoisted"


def remembering(hoisted: Any, f: Callable[..., Any], z: Any, inputs: Sequence[Any]) -> Any:
    """Return f(z, *inputs), computed with the memory of the current solve."""
    scope = current.scope
    if scope is None or torch.compiler.is_compiling():
        return f(z, *inputs)
    key = (id(hoisted), "hoist", torch.is_grad_enabled())  # results with a graph and without are kept apart
    memory: Memory | None = scope.shared.get(key)
    if memory is None:
        memory = scope.shared[key] = Memory(f)
    image = memory.call(f, z, inputs, scope)
    if memory.calls == 2 and not hoisted.verified:
        hoisted.verified = verify(memory, f, image, z, inputs)
    return image


def verify(memory: Memory, f: Callable[..., Any], image: Any, z: Any, inputs: Sequence[Any]) -> bool:
    """Raise unless f itself has the same image; warn if nothing was found again."""
    with torch.no_grad():
        images = [given if same_nesting(given, z) else given[0] for given in (image, f(z, *inputs))]  # without aux
        for (_, found), (_, exact) in zip(*(leaves(given, "f(z)") for given in images), strict=True):
            size = torch.where(torch.isfinite(exact), exact, 0).abs().amax() if exact.numel() else 0.0
            same = (found == exact) | ((found - exact).abs() <= 1000 * torch.finfo(exact.dtype).eps * size)
            if not bool((same | torch.isnan(exact)).all()):
                raise RuntimeError(
                    "eq.hoist(f) and f have different values at the same z: f is not a function of z, its inputs and "
                    "its parameters. Look for dropout (use equipoise.VariationalDropout), noise or changing state "
                    "inside f, or use f without hoist."
                )
    if not memory.useful:
        warn_user(
            "eq.hoist found nothing in f that is computed from its inputs and parameters alone: use f itself. If f has "
            "such a part, tensors or modules that it uses may be out of sight: pass them as inputs, or make them "
            "attributes of f.",
            UserWarning,
        )
    return True


class Memory(TorchFunctionMode):
    """Results of torch functions that depend on inputs and parameters only, from the last call of f in a solve.

    An entry belongs to the n-th use of a function with the same arguments, so that no result is shared within a call.
    One that f has modified in place since, or that drew random numbers, is computed again.
    """

    def __init__(self, f: Callable[..., Any]):
        super().__init__()
        self.roots = list(tensors_of(f))
        self.entries: dict[Hashable, tuple[Any, list[Tensor], list[int]]] = {}  # result, its tensors, their versions
        self.known: dict[int, Tensor] = {}
        self.calls = 0
        self.useful = False  # whether anything but views was found again

    def call(self, f: Callable[..., Any], z: Any, inputs: Sequence[Any], scope: Scope) -> Any:
        self.calls += 1
        self.grad, self.used, self.count = torch.is_grad_enabled(), {}, {}
        once = [t for kept in (scope.shared, scope.per_sample) for t in kept.values() if isinstance(t, Tensor)]
        given = [tensor for _, tensor in leaves(inputs, "inputs")]
        # Tensors that do not depend on z. Entries name them by their ids, which are unique while they exist: those of
        # the last call are held during this one.
        self.last, self.known = self.known, {id(tensor): tensor for tensor in [*self.roots, *once, *given]}
        for _, tensor in leaves(z, "z"):
            self.known.pop(id(tensor), None)
            self.device = tensor.device.type
        with self:
            image = f(z, *inputs)
        self.entries = self.used
        del self.used, self.last
        return image

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A custom autograd function or a no_grad block inside f manages its own graph.
        named = self.key((args, kwargs)) if torch.is_grad_enabled() == self.grad else None
        if named is None:
            return func(*args, **kwargs)
        use = (func, named, self.autocast())
        self.count[use] = nth = self.count.get(use, 0) + 1
        entry = self.entries.get((use, nth))
        if entry is not None and all(version(t) == v for t, v in zip(*entry[1:], strict=True)):
            self.useful = self.useful or not all(t._is_view() for t in entry[1])
        else:
            state = torch.get_rng_state()
            result = func(*args, **kwargs)
            found = list(tensors_in(result))
            changed = self.key((args, kwargs)) != named or not torch.equal(state, torch.get_rng_state())
            if not found or changed or entry is not None:
                return result
            entry = (result, found, [version(t) for t in found])
        self.used[use, nth] = entry
        self.known.update((id(t), t) for t in entry[1])
        return entry[0]

    def key(self, value: Any) -> Hashable:
        """Return what identifies an argument, tensors by identity; None if it may depend on z."""
        if isinstance(value, Tensor):
            return (id(value), version(value)) if id(value) in self.known else None
        if isinstance(value, SIMPLE) or value is Ellipsis:
            return type(value), value
        if isinstance(value, slice):
            value = ("slice", value.start, value.stop, value.step)
        elif isinstance(value, dict):
            value = ("dict", *value.keys(), *value.values())
        if not isinstance(value, tuple | list):
            return None
        parts = []
        for part in value:
            if (named := self.key(part)) is None:
                return None
            parts.append(named)
        return type(value), *parts

    def autocast(self) -> Hashable:
        state = autocast_state(self.device)
        return tuple(state.values()) if state else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def tensors_of(f: Any) -> Iterator[Tensor]:
    """Yield the tensors that f visibly captures: parameters, buffers, and those in its closure and attributes."""
    for _, item in visible(f):
        if isinstance(item, Tensor):
            yield item
        else:
            yield from item.parameters()
            yield from item.buffers()

"""A batch of independent fixed-point problems v = f(v, *inputs), as solvers see it: one (batch, n) matrix of rows.

A :class:`Problem` maps rows to rows, counts its calls, and can be narrowed to some of its samples;
:class:`FunctionProblem` is the user's f, checked at the door and at every call.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from equipoise.problem.captures import layers, tensors_needing_gradients
from equipoise.problem.compiled import buffers_kept, eagerly, uncompiled, vary_batch
from equipoise.problem.layout import Layout, Leaf, leaves, outline, rebuild, select, skeleton, skeleton_differs
from equipoise.problem.scope import Scope
from equipoise.solution import warn_user

SEQUENCE_FIRST = (nn.MultiheadAttention, nn.RNNBase)  # torch's own layers with an option batch_first, off by default


class ImpureFunctionWarning(RuntimeWarning):
    """f gave different answers for the same arguments, or mixes the samples of a batch."""


@dataclass
class Count:
    """Calls of f, and samples x calls."""

    evaluations: int = 0
    rows: int = 0

    def add(self, rows: int) -> None:
        self.evaluations += 1
        self.rows += rows


class Problem(ABC):
    """What solvers see: a map of (batch, n) rows to rows, each sample by itself.

    ``affine`` says that it is affine in its rows, which the Krylov solvers need; :meth:`product` is its linear part.
    """

    layout: Layout
    device: torch.device
    count: Count
    affine: bool = False
    autocast: dict[str, Any] | None = None
    gatherable: bool = False  # whether take() can leave samples out
    known_impure: bool = False  # whether it was warned that f is not a function
    unit: Tensor | float = 1.0  # what 1 stands for in each row (see equipoise.problem.rescaled)

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor: ...

    def take(self, rows: Tensor) -> Problem | None:
        """The same problem for the samples ``rows``, calls counted together; None if it turns out not to be."""
        raise NotImplementedError(f"{type(self).__name__} is not gatherable")

    def unpack(self, rows: Tensor) -> Any:
        """Return rows as a value structured like z0."""
        return self.layout.unpack(rows)

    def pack(self, value: Any) -> Tensor:
        """Return a value structured like z0 as rows."""
        return self.layout.pack(value)

    @property
    def coarse(self) -> bool:
        """Whether values have fewer digits than rows, so that an iterate is returned rounded."""
        return False

    def rounded(self, rows: Tensor) -> Tensor:
        """Return the rows of the value that ``rows`` are returned as."""
        return rows

    @property
    def rounding(self) -> float:
        """The rounding unit of the coarsest numbers that the problem may compute with."""
        kinds = [leaf.dtype for leaf in self.layout.leaves] + ([self.autocast["dtype"]] if self.autocast else [])
        return max(torch.finfo(kind).eps for kind in kinds)

    @property
    def visible_tensors(self) -> list[Tensor]:
        """The tensors it visibly captures that require a gradient."""
        return []

    @property
    def sources(self) -> list[Tensor]:
        """The explicit tensors the problem depends on differentiably."""
        return []

    def with_sources(self, sources: Sequence[Tensor]) -> Problem:
        """The same problem with other tensors in their place."""
        return self

    def splitting(self) -> Any:
        """What a splitting solver needs, a :class:`~equipoise.solvers.structure.Splitting`; None without structure."""
        return None

    def product(self, rows: Tensor) -> Tensor:
        """The linear part of an affine problem."""
        return self(rows) - self(torch.zeros_like(rows))

    def jvp(self, rows: Tensor, tangent: Tensor) -> Tensor:
        """The Jacobian at ``rows`` times ``tangent``, by forward-mode differentiation."""
        if self.affine:
            return self.product(tangent)
        with forward_ad.dual_level():
            dual = self(cast(Tensor, forward_ad.make_dual(rows, tangent)))
            product = forward_ad.unpack_dual(dual).tangent
        return torch.zeros_like(rows) if product is None else product


class FunctionProblem(Problem):
    """``f(z, *inputs)`` on rows, made by :meth:`start`. f's own attributes (its structure) are found at ``f``.

    A coupled problem has one row, which holds the states of all samples.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        inputs: Sequence[Any],
        layout: Layout,
        batch: int,
        device: torch.device,
        *,
        coupled: bool,
    ):
        self.f = f
        self.inputs = tuple(inputs)
        self.layout = layout
        self.device = device
        self.coupled = coupled
        self.scope = Scope(batch)
        self.count = Count()
        self.affine = bool(getattr(f, "affine", False))
        own = getattr(f, "full_precision", False)  # f sees to its precision by itself
        self.autocast = None if own else autocast_state(device.type)
        # Without explicit inputs a closure may have captured the whole batch.
        self.gatherable = bool(inputs) and not coupled
        self.gathered = False
        self.needs_gradient = False
        self.sequence_first: str | None = None  # a layer inside f that takes the first dimension for a sequence
        self.split: Any = None  # the structure of f, once a solver has asked for it

    @classmethod
    def start(
        cls, f: Callable[..., Any], z0: Any, inputs: Sequence[Any], *, coupled: bool = False
    ) -> tuple[FunctionProblem, Tensor, Tensor]:
        """Check everything at the door; return the problem, z0 and f(z0) as rows, with their graphs."""
        require_function(f)
        warned, sequence_first = inspect_layers(f)
        z0, batch, device = initial_value(z0, inputs, coupled=coupled)
        problem = cls(f, inputs, Layout(one_sample(z0) if coupled else z0), batch, device, coupled=coupled)
        problem.known_impure, problem.sequence_first = warned, sequence_first
        try:
            image = problem.uncompiled().evaluate(z0)  # derives weights and draws masks, which are not compiled
        except Exception as error:
            error.add_note(SWAPPED if swapped(f, z0, inputs) else FIRST_CALL.format(shapes=shapes_of(z0)))
            raise
        problem.check_image(image)
        found = leaves(image, "f(z)")
        problem.needs_gradient = any(tensor.requires_grad for _, tensor in found)
        if not coupled:
            # Rows follow the memory order f produces, so that a channels-last f is never copied back and forth.
            for leaf, (name, tensor) in zip(problem.layout.leaves, found, strict=True):
                leaf.permutation = Leaf.of(name, tensor).permutation
        return problem, problem.pack(z0), problem.pack(image)

    @property
    def samples(self) -> int:
        """How many samples the rows hold."""
        return self.scope.batch

    @property
    def visible_tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in tensors_needing_gradients(self.f)]

    def __call__(self, rows: Tensor) -> Tensor:
        image = self.evaluate(self.unpack(rows))
        self.check_image(image)
        return self.pack(image)

    def unpack(self, rows: Tensor) -> Any:
        value = self.layout.unpack(rows)
        return rebuild(value, [tensor[0] for _, tensor in leaves(value, "z")]) if self.coupled else value

    def pack(self, value: Any) -> Tensor:
        return self.layout.pack(one_sample(value) if self.coupled else value)

    def fits(self, value: Any) -> bool:
        """Whether a value has the nesting and the shapes of z0."""
        return self.layout.fits(one_sample(value) if self.coupled else value, 1 if self.coupled else self.samples)

    @property
    def coarse(self) -> bool:
        return self.layout.coarse

    def rounded(self, rows: Tensor) -> Tensor:
        return self.pack(self.unpack(rows)) if self.coarse else rows

    def evaluate(self, value: Any) -> Any:
        """Call f as the user wrote it, in the autocast mode and the scope of this solve."""
        self.count.add(self.samples)
        mode = torch.autocast(self.device.type, **self.autocast) if self.autocast else nullcontext()
        given = [(tensor, version(tensor)) for _, tensor in leaves([value, *self.inputs], "z")]
        if self.gatherable:
            vary_batch(self.f, [*(tensor for tensor, _ in given), *self.scope.per_sample.values()])
        recording = buffers_kept() if torch.is_grad_enabled() else nullcontext()
        with self.scope.entered(), mode, recording:
            try:
                image = self.f(value, *self.inputs)
            except (RuntimeError, IndexError, ValueError) as error:
                if self.gathered:
                    raise RuntimeError(GATHERING) from error
                raise
        if any(version(tensor) != before for tensor, before in given):
            raise RuntimeError(
                "f writes over z or an input in place (a function such as relu_, or z += ...): return a new tensor."
            )
        return image

    def check_image(self, image: Any) -> None:
        """Require f to return what it was given: the same nesting, shapes and kind of numbers."""
        expected, found = self.layout.leaves, leaves(image, "f(z)")
        if len(found) != len(expected) or skeleton_differs(image, self.layout.nesting):
            raise ValueError(
                f"f must return a value structured like z: z has {len(expected)} tensor(s) nested as "
                f"{outline(self.layout.nesting)}, f(z) has {len(found)} nested as {outline(skeleton(image))}. A state "
                "of several tensors starts from a tuple: z0=(...), or Equilibrium(f, initial=(shape, shape, ...))."
            )
        for leaf, (name, tensor) in zip(expected, found, strict=True):
            shape = tuple(leaf.shape) if self.coupled else (self.samples, *leaf.shape)
            if tensor.shape != shape:
                remedy = "f(z, *inputs) must return a value shaped like z."
                if self.gathered:
                    remedy = GATHERING
                elif any(tensor.shape == given.shape for _, given in leaves(self.inputs, "inputs")):
                    remedy += f" {SWAPPED}"
                raise ValueError(
                    f"f changes the shape of z: {leaf.name} is {shape}, {name} is {tuple(tensor.shape)}. {remedy}"
                )
            if tensor.dtype != leaf.dtype and not (
                tensor.dtype.is_floating_point
                and leaf.dtype.is_floating_point
                and torch.promote_types(tensor.dtype, leaf.dtype) == leaf.dtype  # as autocast does
            ):
                raise TypeError(
                    f"f changes the dtype of z: {leaf.name} is {leaf.dtype}, {name} is {tensor.dtype}. "
                    f"Give z0 in {tensor.dtype}, or convert inside f."
                )
            if tensor.device != self.device:
                raise ValueError(f"mixed devices: z0 is on {self.device}, {name} on {tensor.device}.")

    def splitting(self) -> Any:
        if self.split is None and (make := getattr(self.f, "splitting", None)) is not None:
            self.split = make(self.layout, self.scope, *self.inputs)
        return self.split

    def take(self, rows: Tensor) -> FunctionProblem:
        taken = copy.copy(self)
        given = [select(tensor, rows) for _, tensor in leaves(self.inputs, "inputs")]
        taken.inputs = rebuild(self.inputs, given)
        taken.scope = self.scope.take(rows)
        taken.gathered = True
        taken.split = None if self.split is None else self.split.take(rows, taken.scope)
        return taken

    @property
    def sources(self) -> list[Tensor]:
        return [tensor for _, tensor in leaves(self.inputs, "inputs") if tensor.requires_grad]

    def uncounted(self) -> FunctionProblem:
        """Return the same problem with a count of its own, for evaluations that are not part of the solve."""
        probe = copy.copy(self)
        probe.count = Count()
        return probe

    def jvp(self, rows: Tensor, tangent: Tensor) -> Tensor:
        with eagerly():  # compiled graphs have no forward mode: they fail, or drop the tangent without a word
            return super().jvp(rows, tangent)

    def uncompiled(self) -> FunctionProblem:
        """The same problem with f not compiled."""
        if (plain := uncompiled(self.f)) is self.f:
            return self
        problem = copy.copy(self)
        problem.f = plain
        return problem

    def with_fresh_weights(self) -> FunctionProblem:
        """The same problem with derived weights to be derived anew."""
        fresh = copy.copy(self.uncompiled())
        fresh.scope = self.scope.without_shared()
        return fresh

    def with_sources(self, sources: Sequence[Tensor]) -> FunctionProblem:
        replaced = copy.copy(self)
        given = iter(sources)
        replaced.inputs = rebuild(
            self.inputs,
            [next(given) if tensor.requires_grad else tensor for _, tensor in leaves(self.inputs, "inputs")],
        )
        replaced.split = None
        return replaced


GATHERING = (
    "f failed after finished samples were left out of the batch. If f holds tensors of the whole batch "
    "(captured, or stored on a module), pass them as inputs, f(z, *inputs), so that they are narrowed along, "
    "or set compact=False. If f mixes the samples, as a graph network does, set coupled=True."
)
FIRST_CALL = (
    "f failed at its first call, where z is {shapes}. If that is not the state f expects, give z0, or "
    "Equilibrium(f, initial=...) the shape of one sample or a tuple of such shapes."
)
SWAPPED = "The state comes first: is f defined as f(x, z) where f(z, x) is called?"


def require_function(f: Any) -> None:
    """Refuse what cannot be called, or is a class where an object is meant."""
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise TypeError(f"f is the class {f.__name__}; pass an object, such as {f.__name__}(...).")
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; it must be a function or module f(z, *inputs) -> z.")


def swapped(f: Callable[..., Any], z0: Any, inputs: Sequence[Any]) -> bool:
    """Whether f, which failed, accepts its first two arguments in the other order."""
    if not inputs:
        return False
    try:
        with torch.no_grad():
            image = f(inputs[0], z0, *inputs[1:])
        return [t.shape for _, t in leaves(image, "f(z)")] == [t.shape for _, t in leaves(z0, "z0")]
    except Exception:
        return False


def shapes_of(value: Any) -> str:
    """The shapes of a value, for a message."""
    shapes = ", ".join(str(tuple(tensor.shape)) for _, tensor in leaves(value, "value"))
    return f"({shapes})" if isinstance(value, tuple | list) else shapes


def one_sample(value: Any) -> Any:
    """A whole batch as one sample."""
    return rebuild(value, [tensor[None] for _, tensor in leaves(value, "value")])


def initial_value(z0: Any, inputs: Sequence[Any], *, coupled: bool = False) -> tuple[Any, int, torch.device]:
    """z0 (a value, or a function of the inputs) broadcast over the batch, the batch size and the device of it all.

    A coupled problem takes z0 as it is, and inputs of any leading size.
    """
    if callable(z0) and not isinstance(z0, Tensor):
        z0 = z0(*inputs)
    named = leaves(z0, "z0")
    if not named:
        raise ValueError("z0 is an empty tuple; it must hold at least one tensor.")
    given = [leaf for i, tree in enumerate(inputs) for leaf in leaves(tree, f"inputs[{i}]")]
    device = named[0][1].device
    for name, tensor in named + given:
        if tensor.dim() == 0 and not (coupled and name.startswith("inputs")):
            raise ValueError(
                f"{name} has no dimensions; the first one must be the batch. What has no batch belongs in f."
            )
        if tensor.device != device:
            raise ValueError(f"mixed devices: {named[0][0]} is on {device}, {name} on {tensor.device}.")
    for name, tensor in named + given:
        require_numbers(name, tensor, sparse=coupled and name.startswith("inputs"))
    for name, tensor in named:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"{name} is {tensor.dtype}; a state must be floating point, e.g. {name}.float().")
        if tensor.dtype.itemsize == 1 or tensor.dtype == torch.complex32:
            raise TypeError(f"{name} is {tensor.dtype}; a state needs float16, bfloat16 or wider: convert inside f.")
    if coupled:
        return rebuild(z0, [tensor.clone() for _, tensor in named]), named[0][1].shape[0], device
    batch = (given or named)[0][1].shape[0]
    if not given:  # a leaf of batch 1 follows the others
        batch = next((tensor.shape[0] for _, tensor in named if tensor.shape[0] != 1), batch)
    for name, tensor in given + named:
        if tensor.shape[0] != batch and (tensor.shape[0] != 1 or not name.startswith("z0")):
            raise ValueError(
                f"{name} has batch size {tensor.shape[0]}, others have {batch}: z0 and inputs share their first "
                "dimension (z0 may have 1). What has no batch dimension belongs in f; inputs of another leading size, "
                "such as the edges of a graph, need coupled=True."
            )
    own = [tensor.expand(batch, *tensor.shape[1:]).clone() for _, tensor in named]  # never the caller's memory
    return rebuild(z0, own), batch, device


def require_numbers(name: str, tensor: Tensor, *, sparse: bool) -> None:
    """Refuse tensors that solvers cannot compute with."""
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device, which holds no numbers: move it to a real one, e.g. 'cpu'.")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; pad it with to_padded_tensor() and pass a mask as an input.")
    if tensor.layout != torch.strided and not sparse:
        raise TypeError(f"{name} is {tensor.layout}; it must be dense (to_dense()), or captured by f if it is fixed.")


def autocast_state(device_type: str) -> dict[str, Any] | None:
    """The autocast mode in force, to be restored around every call of f; None when there is none."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return {"dtype": torch.get_autocast_dtype(device_type), "cache_enabled": torch.is_autocast_cache_enabled()}


def inspect_layers(f: Any) -> tuple[bool, str | None]:
    """Look for layers that do not suit f.

    Warns of those that tie samples together (BatchNorm in training mode) or draw a new mask at every call (dropout).
    Returns whether there are any, and a layer that takes the first dimension for a sequence.
    """
    warned, sequence_first = False, None
    for name, module in layers(f):
        if isinstance(module, SEQUENCE_FIRST) and not module.batch_first:
            sequence_first = f"{name}, a {type(module).__name__} with batch_first=False,"
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            remedy = "its samples depend on each other; use GroupNorm or LayerNorm, or put it outside f"
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            remedy = "it draws a new mask at every call; use equipoise.VariationalDropout"
        else:
            continue
        warn_user(
            f"f is not a function of z: {name} is a {type(module).__name__} in training mode: {remedy}.",
            ImpureFunctionWarning,
        )
        warned = True
    return warned, sequence_first


def version(tensor: Tensor) -> int:
    """Counts writes into the memory of a tensor (tensors of inference mode do not)."""
    return 0 if tensor.is_inference() else tensor._version

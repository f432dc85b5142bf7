"""A batch of independent fixed-point problems v = f(v, *inputs), as solvers see it: one (batch, n) matrix of rows.

A :class:`Problem` maps rows to rows, counts its calls, and can be narrowed to some of its samples;
:class:`FunctionProblem` is the user's f, checked at the start and at every call.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from equipoise.problem.captures import layers, tensors_needing_gradients
from equipoise.problem.compiled import COMPILER, buffers_kept, eagerly, uncompiled, vary_batch
from equipoise.problem.layout import Layout, Leaf, leaves, outline, rebuild, same_nesting, select
from equipoise.problem.scope import Scope, current
from equipoise.solution import warn_user

SEQUENCE_FIRST = (nn.MultiheadAttention, nn.RNNBase)  # torch's layers whose option batch_first is off by default


class ImpureFunctionWarning(RuntimeWarning):
    """f gave different answers for the same arguments, or mixes the samples of a batch."""


@dataclass
class Count:
    """The number of calls of f, of samples x calls, and of vector-Jacobian products apart from those calls."""

    evaluations: int = 0
    rows: int = 0
    products: int = 0

    def add(self, rows: int) -> None:
        self.evaluations += 1
        self.rows += rows


class Structure(ABC):
    """What an f shows beyond its values to solvers that need it (``Solver.needs``).

    An f shows its structure through a method ``structure(kind, problem)``, which returns an object of the class
    ``kind`` for this :class:`FunctionProblem`, or None.
    """

    requirement: ClassVar[str]  # what f must be, for the error message of a solver
    separates: ClassVar[bool] = True  # whether samples are independent by construction, so that none is measured again

    @abstractmethod
    def take(self, rows: Tensor, problem: FunctionProblem) -> Self:
        """Return the structure of ``problem``, which is narrowed to the samples ``rows``."""


AnyStructure = TypeVar("AnyStructure", bound=Structure)


class Problem(ABC):
    """A map of (batch, n) rows to rows, sample by sample."""

    layout: Layout
    device: torch.device
    count: Count
    affine: bool = False  # as Krylov solvers require; ``product`` is its linear part
    autocast: dict[str, Any] | None = None
    gatherable: bool = False  # whether ``take`` can leave samples out
    known_impure: bool = False  # whether a warning has already said that f is not a function
    unit: Tensor | float = 1.0  # what 1 stands for in each row (see equipoise.problem.rescaled)

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor: ...

    def take(self, rows: Tensor) -> Problem | None:
        """Return the problem for the samples ``rows``, with a common count; None if that is not possible after all."""
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
        """The visibly captured tensors that require a gradient."""
        return []

    @property
    def sources(self) -> list[Tensor]:
        """The explicit tensors that the problem depends on differentiably."""
        return []

    def with_sources(self, sources: Sequence[Tensor]) -> Problem:
        """Return the problem with other tensors in place of its sources."""
        return self

    def structure(self, kind: type[AnyStructure]) -> AnyStructure | None:
        """Return the structure of f that a solver asks for; None if f does not have it."""
        return None

    def product(self, rows: Tensor) -> Tensor:
        """Return the linear part of an affine problem, applied to ``rows``."""
        return self(rows) - self(torch.zeros_like(rows))

    def jvp(self, rows: Tensor, tangent: Tensor) -> Tensor:
        """Return the Jacobian at ``rows`` times ``tangent``, by forward-mode differentiation."""
        if self.affine:
            return self.product(tangent)
        with forward_ad.dual_level():
            dual = self(cast(Tensor, forward_ad.make_dual(rows, tangent)))
            product = forward_ad.unpack_dual(dual).tangent
        return torch.zeros_like(rows) if product is None else product


class DerivedProblem(Problem):
    """A problem made from another one, for the same samples and layout."""

    def __init__(self, problem: Problem, count: Count | None = None):
        self.problem, self.count = problem, count or Count()
        self.layout, self.device, self.gatherable = problem.layout, problem.device, problem.gatherable

    @property
    def rounding(self) -> float:
        return self.problem.rounding


class FunctionProblem(Problem):
    """``f(z, *inputs)`` on rows, created by :meth:`start`. A coupled problem has one row, the states of all samples."""

    called: ClassVar[str] = "f"  # the name of f in messages

    def __init__(
        self, f: Callable[..., Any], z0: Any, inputs: Sequence[Any], batch: int, coupled: bool, aux: bool = False
    ):
        self.f, self.inputs, self.coupled, self.aux = f, tuple(inputs), coupled, aux
        self.layout = Layout(one_sample(z0) if coupled else z0)
        self.device = leaves(z0, "z0")[0][1].device
        outer = current.scope
        if outer is None:
            self.scope = Scope(batch)
        else:  # a solve inside the f of another shares its weights and masks, or the outer f would change
            self.scope = Scope(batch, outer.grad, outer.shared, outer.per_sample)
        self.count = Count()
        self.affine = bool(getattr(f, "affine", False))
        self.autocast = None if getattr(f, "full_precision", False) else autocast_state(self.device.type)
        self.gatherable = bool(inputs) and not coupled  # without inputs, a closure may have captured the whole batch
        self.gathered = False
        self.needs_gradient = False
        self.sequence_first: str | None = None  # a layer inside f that takes the first dimension for a sequence
        self.structures: dict[type, Structure | None] = {}  # those that solvers have asked for

    @classmethod
    def start(
        cls, f: Callable[..., Any], z0: Any, inputs: Sequence[Any], *, coupled: bool = False, aux: bool = False
    ) -> tuple[FunctionProblem, Tensor, Tensor]:
        """Check all arguments; return the problem, z0 and f(z0) as rows, with their graphs."""
        require_function(f)
        known_impure, sequence_first = inspect_layers(f)
        z0, batch = initial_value(z0, inputs, coupled)
        problem = cls(f, z0, inputs, batch, coupled, aux)
        problem.known_impure, problem.sequence_first = known_impure, sequence_first
        try:
            image = problem.uncompiled().evaluate(z0)  # derives weights and draws masks, which are not compiled
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for _, tensor in leaves(z0, "z0"))
            shapes = f"({shapes})" if isinstance(z0, tuple | list) else shapes
            error.add_note(SWAPPED if swapped(f, z0, inputs) else FIRST_CALL.format(shapes=shapes))
            raise
        problem.check_image(image)
        named = leaves(image, "f(z)")
        problem.needs_gradient = any(tensor.requires_grad for _, tensor in named)
        if not coupled:
            # Rows follow the memory order that f produces, so that a channels-last f is never copied back and forth.
            for leaf, (name, tensor) in zip(problem.layout.leaves, named, strict=True):
                leaf.permutation = Leaf.of(name, tensor).permutation
        return problem, problem.pack(z0), problem.pack(image)

    @property
    def samples(self) -> int:
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
        """Return whether a value has the nesting and the shapes of z0."""
        return self.layout.fits(*((one_sample(value), 1) if self.coupled else (value, self.samples)))

    @property
    def coarse(self) -> bool:
        return self.layout.coarse

    def rounded(self, rows: Tensor) -> Tensor:
        return self.pack(self.unpack(rows)) if self.coarse else rows

    def evaluate(self, value: Any) -> Any:
        """Return f(value), structured like z."""
        self.count.add(self.samples)
        returned = self.call(value)
        return pair(returned)[0] if self.aux else returned

    def auxiliary(self, value: Any) -> Any:
        """Return what f returns beside z at ``value``."""
        return pair(self.uncompiled().call(value))[1]

    def call(self, value: Any) -> Any:
        """Call f as the user wrote it, in the autocast mode and the scope of this solve."""
        mode = torch.autocast(self.device.type, **self.autocast) if self.autocast else nullcontext()
        given = [(tensor, version(tensor)) for _, tensor in leaves([value, *self.inputs], "z")]
        recording = nullcontext()
        if COMPILER in sys.modules:
            if self.gatherable:
                vary_batch(self.f, [*(tensor for tensor, _ in given), *self.scope.per_sample.values()])
            recording = buffers_kept() if torch.is_grad_enabled() else recording
        try:
            with mode, recording:
                image = self.in_scope(self.f, value, *self.inputs)
        except (RuntimeError, IndexError, ValueError) as error:
            if self.gathered:
                raise RuntimeError(GATHERING) from error
            raise
        if any(version(tensor) != before for tensor, before in given):
            raise RuntimeError(
                f"{self.called} modifies z or an input in place (a function such as relu_, or z += ...): return a new "
                "tensor."
            )
        return image

    def in_scope(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the scope of this solve."""
        outer, current.scope = current.scope, self.scope
        try:
            return function(*arguments)
        finally:
            current.scope = outer

    def check_image(self, image: Any) -> None:
        """Require f to return what it was given: the same nesting, shapes and kind of numbers."""
        expected, named = self.layout.leaves, leaves(image, "f(z)")
        if not same_nesting(image, self.layout.nesting):
            raise ValueError(
                f"f must return a value structured like z: z has {len(expected)} tensor(s) nested as "
                f"{outline(self.layout.nesting)}, f(z) has {len(named)} nested as {outline(image)}. Start a state of "
                "several tensors from a tuple: z0=(...), or Equilibrium(f, initial=(shape, shape, ...)). If f returns "
                "(z, aux), set aux=True."
            )
        for leaf, (name, tensor) in zip(expected, named, strict=True):
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
            if tensor.dtype != leaf.dtype and not narrower(tensor.dtype, leaf.dtype):
                raise TypeError(
                    f"f changes the dtype of z: {leaf.name} is {leaf.dtype}, {name} is {tensor.dtype}. "
                    f"Pass z0 in {tensor.dtype}, or convert inside f."
                )
            if tensor.device != self.device:
                raise ValueError(f"mixed devices: z0 is on {self.device}, {name} on {tensor.device}.")

    def structure(self, kind: type[AnyStructure]) -> AnyStructure | None:
        if kind not in self.structures and (show := getattr(self.f, "structure", None)) is not None:
            self.structures[kind] = show(kind, self.replaced(structures={}))  # a copy: no reference cycle
        return cast("AnyStructure | None", self.structures.get(kind))

    def take(self, rows: Tensor) -> FunctionProblem:
        inputs = rebuild(self.inputs, [select(tensor, rows) for _, tensor in leaves(self.inputs, "inputs")])
        per_sample = {key: entry.index_select(0, rows) for key, entry in self.scope.per_sample.items()}
        scope = dataclasses.replace(self.scope, batch=len(rows), per_sample=per_sample)
        taken = self.replaced(inputs=inputs, scope=scope, gathered=True)
        own = taken.replaced(structures={})
        taken.structures = {kind: shown and shown.take(rows, own) for kind, shown in self.structures.items()}
        return taken

    @property
    def sources(self) -> list[Tensor]:
        return [tensor for _, tensor in leaves(self.inputs, "inputs") if tensor.requires_grad]

    def with_sources(self, sources: Sequence[Tensor]) -> FunctionProblem:
        remaining = iter(sources)
        given = [next(remaining) if t.requires_grad else t for _, t in leaves(self.inputs, "inputs")]
        return self.replaced(inputs=rebuild(self.inputs, given), structures={})

    def uncompiled(self) -> FunctionProblem:
        """Return the problem with f not compiled."""
        if COMPILER not in sys.modules or (plain := uncompiled(self.f)) is self.f:
            return self
        return self.replaced(f=plain)

    def with_fresh_weights(self) -> FunctionProblem:
        """Return the uncompiled problem, in which derived weights are derived again."""
        return self.uncompiled().replaced(scope=dataclasses.replace(self.scope, shared={}))

    def replaced(self, **attributes: Any) -> FunctionProblem:
        problem = copy.copy(self)
        vars(problem).update(attributes)
        return problem

    def jvp(self, rows: Tensor, tangent: Tensor) -> Tensor:
        with eagerly():  # compiled graphs have no forward mode: they fail, or silently drop the tangent
            return super().jvp(rows, tangent)


GATHERING = (
    "f failed after finished samples were left out of the batch. If f holds tensors of the whole batch (captured, or "
    "stored on a module), pass them as inputs, f(z, *inputs), so that they are narrowed too, or set compact=False. If "
    "f mixes the samples, as a graph network does, set coupled=True."
)
FIRST_CALL = (
    "f failed at its first call, where z is {shapes}. If f expects another state, pass z0, or pass the shape of one "
    "sample (or a tuple of such shapes) to Equilibrium(f, initial=...)."
)
SWAPPED = "The state comes first: is f defined as f(x, z) where f(z, x) is called?"


def pair(returned: Any) -> tuple[Any, Any]:
    """Return z and the auxiliary output, or raise."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        kind = f"a tuple of length {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"with aux=True, f must return a pair (z, aux); it returned {kind}.")
    return returned


def require_function(f: Any) -> None:
    """Raise unless f can be called, and is not a class where an object is meant."""
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise TypeError(f"f is the class {f.__name__}; pass an object, such as {f.__name__}(...).")
    if not callable(f):
        raise TypeError(f"f has type {type(f).__name__}; it must be a function or module f(z, *inputs) -> z.")


def swapped(f: Callable[..., Any], z0: Any, inputs: Sequence[Any]) -> bool:
    """Return whether f, which failed, accepts its first two arguments in the other order."""
    if not inputs:
        return False
    try:
        with torch.no_grad():
            image = f(inputs[0], z0, *inputs[1:])
        return [t.shape for _, t in leaves(image, "f(z)")] == [t.shape for _, t in leaves(z0, "z0")]
    except Exception:
        return False


def one_sample(value: Any) -> Any:
    """Return a whole batch as one sample."""
    return rebuild(value, [tensor[None] for _, tensor in leaves(value, "value")])


def initial_value(z0: Any, inputs: Sequence[Any], coupled: bool) -> tuple[Any, int]:
    """Return z0, a value or a function of the inputs, broadcast over the batch, and the batch size.

    A coupled problem leaves z0 unchanged and accepts inputs of any leading size.
    """
    if callable(z0) and not isinstance(z0, Tensor):
        z0 = z0(*inputs)
    named = leaves(z0, "z0")
    if not named:
        raise ValueError("z0 is an empty tuple; it must contain at least one tensor.")
    given = [leaf for i, tree in enumerate(inputs) for leaf in leaves(tree, f"inputs[{i}]")]
    device = named[0][1].device
    for name, tensor in named + given:
        if tensor.device != device:
            raise ValueError(f"mixed devices: {named[0][0]} is on {device}, {name} on {tensor.device}.")
    for name, tensor in named + given:
        require_dense(name, tensor, free=coupled and name.startswith("inputs"))
    for name, tensor in named:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"{name} is {tensor.dtype}; a state must be floating point, e.g. {name}.float().")
        if tensor.dtype.itemsize == 1 or tensor.dtype == torch.complex32:
            raise TypeError(f"{name} is {tensor.dtype}; a state needs float16, bfloat16 or wider: convert inside f.")
    if coupled:
        return rebuild(z0, [tensor.clone() for _, tensor in named]), named[0][1].shape[0]
    batch = (given or named)[0][1].shape[0]
    if not given:  # a leaf of batch 1 is broadcast to the others
        batch = next((tensor.shape[0] for _, tensor in named if tensor.shape[0] != 1), batch)
    for name, tensor in given + named:
        if tensor.shape[0] != batch and (tensor.shape[0] != 1 or not name.startswith("z0")):
            raise ValueError(
                f"{name} has batch size {tensor.shape[0]}, others have {batch}: z0 and inputs share their first "
                "dimension (z0 may have 1). Anything without a batch dimension belongs in f; inputs of another leading "
                "size, such as the edges of a graph, need coupled=True."
            )
    own = [tensor.expand(batch, *tensor.shape[1:]).clone() for _, tensor in named]  # never the caller's memory
    return rebuild(z0, own), batch


def require_dense(name: str, tensor: Tensor, *, free: bool) -> None:
    """Raise unless solvers can compute with a tensor; ``free`` ones may be scalar or sparse."""
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device, which holds no numbers: move it to a real one, e.g. 'cpu'.")
    if tensor.dim() == 0 and not free:
        raise ValueError(f"{name} has no dimensions; the first must be the batch. Scalars belong in f.")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; pad it with to_padded_tensor() and pass a mask as an input.")
    if tensor.layout != torch.strided and not free:
        raise TypeError(f"{name} is {tensor.layout}; it must be dense (to_dense()), or captured by f if it is fixed.")


def autocast_state(device_type: str) -> dict[str, Any] | None:
    """Return the current autocast mode, to be restored around every call of f; None if autocast is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return {"dtype": torch.get_autocast_dtype(device_type), "cache_enabled": torch.is_autocast_cache_enabled()}


def inspect_layers(f: Any, called: str = "f") -> tuple[bool, str | None]:
    """Warn about layers that tie samples together (BatchNorm in training mode) or draw a mask at every call (dropout).

    Returns whether there are any, and a layer that takes the first dimension for a sequence.
    """
    warned, sequence_first = False, None
    for name, module in layers(f):
        if isinstance(module, SEQUENCE_FIRST) and not module.batch_first:
            sequence_first = f"{name}, a {type(module).__name__} with batch_first=False,"
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            remedy = f"its samples depend on each other; use GroupNorm or LayerNorm, or put it outside {called}"
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            remedy = "it draws a new mask at every call; use equipoise.VariationalDropout"
        else:
            continue
        warn_user(
            f"{called} is not a function of z: {name} is a {type(module).__name__} in training mode: {remedy}.",
            ImpureFunctionWarning,
        )
        warned = True
    return warned, sequence_first


def narrower(given: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether both are real and rows of the ``expected`` dtype hold the ``given`` one, as under autocast."""
    real = given.is_floating_point and expected.is_floating_point
    return real and torch.promote_types(given, expected) == expected


def version(tensor: Tensor) -> int:
    """Return the number of writes into the memory of a tensor; inference tensors do not count them."""
    return 0 if tensor.is_inference() else tensor._version

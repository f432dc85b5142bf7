"""Models whose equilibrium layers torch can trace: the solve becomes a loop, or a number of steps, of the graph.

:class:`Traceable` runs the model once on example inputs. That derives the weights that layers derive once per solve
(norm constraints, weight normalisation, factorisations), and the graph takes them as constants. Then every call of an
:class:`~equipoise.Equilibrium` is replaced by :class:`EarlyStop` or :class:`FixedNumber`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

import equipoise
from equipoise.fixed_point import Equilibrium, fixed_point
from equipoise.models.parts.context_managers import evaluating
from equipoise.onnx.ledger import Rules
from equipoise.onnx.methods import Method, Tensors, method_of
from equipoise.onnx.session import as_rows
from equipoise.onnx.tracing import ExportError, tracing
from equipoise.operators.splitting import MonotoneProblem
from equipoise.problem.captures import other_than
from equipoise.problem.independence import mixes_samples
from equipoise.problem.layout import leaves
from equipoise.problem.problem import FunctionProblem, initial_value
from equipoise.problem.scope import Scope
from equipoise.solvers import Solver

STATISTICS = ("steps", "residual", "result")  # outputs about every solve, per sample
BATCH = torch.export.Dim("batch")


class Call:
    """One call of an equilibrium layer in a model's forward pass, with the example's values."""

    def __init__(self, name: str, layer: Equilibrium, solver: Solver | None, inputs: tuple[Any, ...], z0: Any):
        self.name, self.layer, self.inputs, self.z0 = name, layer, inputs, z0
        if layer.coupled:
            raise NotImplementedError(
                f"{name} has coupled=True, which solves the whole batch as one problem: it cannot be exported with a "
                "free batch size. Export equipoise.FixedSteps(layer, steps) with torch.onnx.export instead."
            )
        if layer.aux:
            raise NotImplementedError(f"{name} has aux=True, and an exported solve returns only z: use an f that does.")
        if layer.gradient.decides_value:
            raise NotImplementedError(
                f"{name} has gradient={layer.gradient!r}, which takes its steps in place of a solve, and only solves "
                "are exported: set its gradient to equipoise.ImplicitGradient(), whose value is the equilibrium."
            )
        options = {**layer.options(), "on_failure": "ignore"}
        if solver is not None:
            options["solver"] = solver
        start = layer.start(inputs) if z0 is None else z0
        self.solution = fixed_point(layer.f, start, *inputs, **options)
        self.problem, _, rows = FunctionProblem.start(layer.f, start, inputs)
        if self.problem.coarse:
            raise TypeError(f"the state of {name} is in half precision; export the model in float32: model.float().")
        trial = other_than(rows)  # a state of zeros would hide much
        if mixes_samples(self.problem, trial, self.problem(trial)):
            raise ExportError(
                f"{name} cannot be exported: f mixes the samples of the batch, and a graph solves each by itself. Put "
                "the batch first (batch_first=True in attention and recurrent layers), and normalise each sample "
                "separately."
            )
        self.problem.gatherable = False
        for leaf in self.problem.layout.leaves:
            leaf.permutation = None  # tensors of a graph have no strides
        zeros = not callable(layer.initial) or (isinstance(layer.f, MonotoneProblem) and layer.initial == layer.f.start)
        self.method: Method[Any] = method_of(options["solver"], self.problem, from_zero=z0 is None and zeros)

    def begin(self, inputs: tuple[Any, ...], z0: Any) -> tuple[FunctionProblem, Tensors, Tensors]:
        """Return the problem as the method sees it, what it needs of the inputs, and the initial state."""
        start = self.layer.start(inputs) if z0 is None else z0
        value, batch = initial_value(start, inputs, False)
        problem = self.method.sized(batch).replaced(inputs=inputs)
        z = problem.pack(value)
        needed = self.method.inputs(problem)
        bound = self.method.bound(needed, batch)
        return bound, needed, self.method.start(bound, z)


class Body(nn.Module):
    """One step of a solve, from (step, state, entries, inputs) to the next (step, state, entries)."""

    def __init__(self, call: Call, rules: Rules, sizes: tuple[int, int]):
        super().__init__()
        self.f = call.layer.f if isinstance(call.layer.f, nn.Module) else None  # registers its parameters
        self.method, self.rules, self.sizes = call.method, rules, sizes

    def forward(self, step: Tensor, *tensors: Tensor) -> Tensors:
        a, b = self.sizes[0], sum(self.sizes)
        problem = self.method.bound(tensors[b:], tensors[0].shape[0])
        state = self.method.step(problem, tensors[:a], step - 1)
        step = step + 1
        entries = self.rules.recorded(step, state[0], state[1], tensors[a:b])
        return fresh((step, *state, *entries))


class EarlyStop:
    """A call as a loop in which every sample stops by its own residual, as in :mod:`equipoise.solvers.loop`."""

    def __init__(self, call: Call):
        self.call = call
        self.rules = Rules(call.layer.tolerance, call.problem, call.layer.check_every)
        *_, state = call.begin(call.inputs, call.z0)
        self.sizes = (len(state), len(self.rules.opened(state[0])))
        self.body: Callable[..., Tensors] = Body(call, self.rules, self.sizes)

    def trace(self) -> nn.Module:
        """Trace the body of the loop; torch's exporter takes it as it takes modules."""
        problem, needed, state = self.call.begin(self.call.inputs, self.call.z0)
        step, *per_sample = fresh((*self.carry(problem, state), *needed))
        shapes = {"step": None, "tensors": tuple({0: BATCH} for _ in per_sample)}
        body = Body(self.call, self.rules, self.sizes).eval()
        with tracing(self.call.name):
            program = torch.export.export(body, (step, *per_sample), dynamic_shapes=shapes)
        program.graph.eliminate_dead_code()  # such as results that are no tensors, which a loop cannot hold
        self.body = traced = program.module()
        return traced

    def carry(self, problem: FunctionProblem, state: Tensors) -> Tensors:
        """Return what changes from step to step, after the first evaluation."""
        step = torch.ones((), dtype=torch.int64, device=problem.device)
        return fresh((step, *state, *self.rules.recorded(step, state[0], state[1], self.rules.opened(state[0]))))

    def __call__(self, inputs: tuple[Any, ...], z0: Any) -> tuple[Any, Tensors]:
        """Return the value and its statistics."""
        problem, needed, state = self.call.begin(inputs, z0)
        first, last = self.sizes[0], sum(self.sizes)
        body, rules = self.body, self.rules

        def proceeds(step: Tensor, *tensors: Tensor) -> Tensor:
            return rules.active(step, tensors[first:last])

        def advanced(step: Tensor, *tensors: Tensor) -> Tensors:
            return tuple(body(step, *tensors, *needed))

        _, *tensors = loop(proceeds, advanced, self.carry(problem, state))
        best, result, steps, residual, *_ = tensors[first:last]
        best = torch.where(torch.isfinite(best), best, 0.0)  # of samples whose z0 was never finite
        return problem.unpack(best), (steps, residual, result)


def loop(proceeds: Callable[..., Tensor], advanced: Callable[..., Tensors], carry: Tensors) -> Tensors:
    """Advance while the condition holds: as a loop of the graph when torch exports, else in Python."""
    if torch.compiler.is_exporting():
        return torch.while_loop(proceeds, advanced, carry)
    while bool(proceeds(*carry)):
        carry = advanced(*carry)
    return carry


class FixedNumber:
    """A call as a fixed number of steps, as :class:`~equipoise.FixedSteps`: the value is the last image."""

    def __init__(self, call: Call, steps: int):
        self.call, self.steps = call, steps

    def __call__(self, inputs: tuple[Any, ...], z0: Any) -> tuple[Any, Tensors]:
        problem, _, state = self.call.begin(inputs, z0)
        for seen in range(self.steps - 1):
            state = self.call.method.step(problem, state, torch.tensor(seen))
        return problem.unpack(state[1]), ()


class Traceable(nn.Module):
    """A model in evaluation mode whose solves can be traced; without tracing, its forward pass is that of the graph.

    Args:
        model: any module that calls equilibrium layers.
        example: its arguments, at least two samples.
        steps: number of steps of every solve; None stops every sample by its own residual.
        solver: solver of every layer; None for its own.
        statistics: whether the statistics of every solve follow the outputs; with early stop only.
    """

    def __init__(
        self, model: nn.Module, example: tuple[Any, ...], steps: int | None, solver: Solver | None, statistics: bool
    ):
        super().__init__()
        self.model, self.steps, self.solver, self.training = model, steps, solver, False
        self.statistics = statistics and steps is None
        found = model.named_modules()
        self.layers = {layer: name or "the model" for name, layer in found if isinstance(layer, Equilibrium)}
        self.scope = Scope(leaves(example, "example")[0][1].shape[0], grad=False)
        self.calls: list[Call] = []

        outer: list[str] = []  # the layer that is being examined

        def examine(layer: Equilibrium, inputs: tuple[Any, ...], z0: Any) -> Any:
            name = self.layers[layer]
            if outer:
                raise NotImplementedError(
                    f"{name} is solved inside the f of {outer[0]}, and an equilibrium inside another cannot be "
                    "exported: write the inner one as a few steps of f."
                )
            outer.append(name)
            self.calls.append(call := Call(name, layer, solver, inputs, z0))
            outer.clear()
            return call.solution.value

        with self.prepared(examine):
            self.expected = model(*example)
            if not self.calls:
                raise ValueError(
                    f"{type(model).__name__} solves no equipoise.Equilibrium for the example: there is no solve to "
                    "export. Use torch.onnx.export for models without one. Only calls of a layer are exported: write "
                    "layer(x) in place of layer.solve(x).value and fixed_point(f, z0, x).value."
                )
            for name, tensor in leaves(self.expected, "output"):
                if tensor.shape[:1] != (self.scope.batch,):
                    raise ValueError(
                        f"{name} of {type(model).__name__} has shape {tuple(tensor.shape)} for an example of "
                        f"{self.scope.batch} samples; an output must have the batch first."
                    )
            self.solves: list[Any] = [
                EarlyStop(call) if steps is None else FixedNumber(call, steps) for call in self.calls
            ]
        self.bodies = nn.ModuleList()

    def trace(self) -> None:
        """Trace the bodies of the loops, so that torch can export the module."""
        with self.prepared(None):
            self.bodies.extend(solve.trace() for solve in self.solves if isinstance(solve, EarlyStop))

    @contextmanager
    def prepared(self, solve: Callable[[Equilibrium, tuple[Any, ...], Any], Any] | None) -> Iterator[None]:
        """Evaluate without gradients, with the weights derived for the example, and layers solved by ``solve``."""

        def replacement(layer: Equilibrium) -> Callable[..., Any]:
            return lambda *inputs, z0=None: cast(Any, solve)(layer, inputs, z0)

        with torch.no_grad(), evaluating(self.model), self.scope.entered():
            try:
                for layer in self.layers if solve else ():
                    vars(layer)["forward"] = replacement(layer)
                yield
            finally:
                for layer in self.layers:
                    vars(layer).pop("forward", None)

    def forward(self, *inputs: Any) -> Any:
        remaining, statistics = iter(self.solves), []

        def solve(layer: Equilibrium, given: tuple[Any, ...], z0: Any) -> Any:
            value, numbers = next(remaining)(given, z0)
            statistics.extend(numbers)
            return value

        with self.prepared(solve):
            outputs = [tensor for _, tensor in leaves(self.model(*inputs), "output")]
        return (*outputs, *statistics) if self.statistics else tuple(outputs)

    def reference(self, example: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return the outputs for the example as rows, and which samples to compare: with early stop, the converged."""
        if self.steps is None:
            return as_rows(self.expected), torch.stack([call.solution.converged for call in self.calls]).all(dim=0)
        outputs = as_rows(self(*example))
        return outputs, torch.isfinite(outputs).all(dim=1)

    def facts(self) -> dict[str, str]:
        """Return what a file should say about its origin."""
        ends = [f"{self.steps} steps" if self.steps else repr(call.layer.tolerance) for call in self.calls]
        solves = [f"{c.name}: {c.method.solver!r}, {end}" for c, end in zip(self.calls, ends, strict=True)]
        facts = {"equipoise": equipoise.__version__, "torch": torch.__version__, "model": type(self.model).__name__}
        return {**facts, "solves": "; ".join(solves)}

    def output_names(self) -> list[str]:
        """Return the names of the outputs, in order."""
        names = numbered("output", len(leaves(self.expected, "output")))
        if self.statistics:
            columns = zip(*(numbered(name, len(self.calls)) for name in STATISTICS), strict=True)
            names += [name for column in columns for name in column]
        return names


def numbered(name: str, count: int) -> list[str]:
    """Return a name, or one with a number for each of several."""
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


def fresh(tensors: Sequence[Tensor]) -> Tensors:
    """Return contiguous copies: what a loop carries must not share memory with what it was made from."""
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)

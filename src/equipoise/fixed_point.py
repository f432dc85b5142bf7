"""The front door: the function :func:`fixed_point` and the module :class:`Equilibrium`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from equipoise.gradients.paths import named_sources, require_gradient_paths
from equipoise.gradients.rules import Forward, GradientRule, ImplicitGradient
from equipoise.problem.function import FunctionProblem, autocast_state, require_function
from equipoise.problem.independence import warn_of_sequence_first_layers
from equipoise.problem.layout import leaves, rebuild
from equipoise.solution import Report, Solution
from equipoise.solvers import Anderson, Picard, Progress, Solver
from equipoise.solvers.base import Looks, iterate
from equipoise.tolerance import Tolerance

SOLVER, TOLERANCE, GRADIENT = Anderson(), Tolerance(), ImplicitGradient()  # the defaults, everywhere
ON_FAILURE = ("warn", "raise", "ignore")
NO_EXPORT = (
    "an Equilibrium cannot be exported or traced: its solver stops by the residuals it sees, which a fixed graph "
    "cannot do. Export equipoise.FixedSteps(layer, steps=30, solver=equipoise.Picard()) in its place."
)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none
_watched: ContextVar[list[Solution] | None] = ContextVar("watched", default=None)


@contextmanager
def watch_solves() -> Iterator[list[Solution]]:
    """Collect the Solution of every solve made inside the block, however deep inside a model.

    A solve inside the f of another is not collected. A Solution keeps its value alive: read its statistics, then let
    it go.

    Example:
        >>> with eq.watch_solves() as solves:
        ...     model(x).sum().backward()
        >>> solves[0].stats.steps, solves[0].backward.steps
    """
    solves: list[Solution] = []
    token = _watched.set(solves)
    try:
        yield solves
    finally:
        _watched.reset(token)


def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    *inputs: Any,
    solver: Solver = SOLVER,
    tolerance: Tolerance = TOLERANCE,
    gradient: GradientRule = GRADIENT,
    on_failure: str = "warn",
    compact: bool = True,
    coupled: bool = False,
    trace: bool = False,
    callback: Callable[[Progress], object] | None = None,
    check_every: int = 1,
) -> Solution:
    """Solve z = f(z, *inputs) for every sample of a batch.

    Args:
        f: ``f(z, *inputs) -> z``; a function or module. Parameters and captured tensors get their gradients too.
        z0: where to start: a tensor or a nested tuple of tensors, batch first (a batch of 1 is broadcast), or a
            function of the inputs that returns one.
        inputs: tensors or tuples of tensors, batch first. Given explicitly, they let finished samples be left out.
        solver: how to iterate; an object such as ``Anderson(memory=5)``.
        tolerance: when a sample is solved.
        gradient: how to differentiate; only :class:`UnrolledGradient`, which takes steps of its own, matters without.
        on_failure: "warn", "raise" or "ignore" when samples fail; holds for the backward solve too.
        compact: leave finished samples out of the computation (needs ``inputs``).
        coupled: solve the whole batch as one problem, with one residual, for an f that mixes its samples: graph
            networks, attention with the sequence first. Inputs may then have any leading size, such as a list of edges.
        trace: keep the residuals of every check in ``stats.trace``.
        callback: called with a :class:`~equipoise.solvers.Progress` at every check.
        check_every: look at the residuals only every so many steps; each look synchronises with the device once.

    Returns:
        A :class:`Solution`; ``sol.value`` is structured like z0.

    Example:
        >>> W = 0.5 * torch.eye(3)
        >>> sol = eq.fixed_point(lambda z, x: torch.tanh(z @ W + x), torch.zeros(1, 3), torch.randn(8, 3))
        >>> sol.value.shape, bool(sol.converged.all())
        (torch.Size([8, 3]), True)
    """
    if exporting():
        raise NotImplementedError(NO_EXPORT)
    check_options(solver, tolerance, gradient, on_failure, compact, coupled, check_every)
    require_bool("trace", trace)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is {callback!r}; it must be a function of one argument, an equipoise.Progress.")
    looks = Looks(trace, callback, check_every)
    options = (solver, tolerance, gradient, on_failure, compact, coupled, looks)
    if torch.compiler.is_compiling():
        # One clean break in the traced graph; looked up here because dynamo is slow to import.
        reason = "an equilibrium is solved by a loop that looks at its residuals"
        return torch.compiler.disable(watched_run, reason=reason)(f, z0, inputs, *options)  # type: ignore[call-arg]
    return watched_run(f, z0, inputs, *options)


def exporting() -> bool:
    """Whether torch.export, ONNX or torch.jit.trace is recording a fixed graph."""
    return torch._C._get_tracing_state() is not None or _is_exporting()


def watched_run(*arguments: Any) -> Solution:
    """:func:`run`, its Solution collected when somebody watches; solves inside its f are its own affair."""
    solves = _watched.get()
    if solves is None:
        return run(*arguments)
    token = _watched.set(None)
    try:
        solution = run(*arguments)
    finally:
        _watched.reset(token)
    solves.append(solution)
    return solution


def run(
    f: Callable[..., Any],
    z0: Any,
    inputs: tuple[Any, ...],
    solver: Solver,
    tolerance: Tolerance,
    gradient: GradientRule,
    on_failure: str,
    compact: bool,
    coupled: bool,
    looks: Looks,
) -> Solution:
    """:func:`fixed_point` behind the door."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # inside it a Jacobian product would silently be zero
            return run(f, z0, inputs, solver, tolerance, gradient, on_failure, compact, coupled, looks)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "fixed_point cannot run inside torch.func.grad, vmap and the like: it solves a batch already, and its "
            "gradients are those of torch.autograd, to any order (torch.autograd.grad with create_graph=True). Call it "
            "outside the transform, or use equipoise.FixedSteps(layer, steps, solver=Picard()), which transforms like "
            "any module."
        )
    if coupled and solver.structured:
        raise TypeError(
            f"coupled=True solves the batch as one problem, and {type(solver).__name__} solves samples one by one: use "
            "Anderson, Broyden, Picard or NewtonKrylov."
        )
    problem, z, image = FunctionProblem.start(f, z0, inputs, coupled=coupled)
    problem.gatherable = problem.gatherable and compact
    if not coupled:
        warn_of_sequence_first_layers(problem, z)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(image).tangent is not None:
        raise NotImplementedError(
            "fixed_point has no forward-mode derivative: use reverse mode (torch.autograd.grad), or FixedSteps. For an "
            "equilibrium inside the f of another, solve the outer one with Anderson, Broyden or Picard."
        )
    image = image.detach()  # its graph is not needed
    forward = Forward(problem, z, image, solver, tolerance, looks)
    report = Report(on_failure)
    ruled = problem.needs_gradient or gradient.decides_value
    if ruled:
        rows, solved = gradient.run(forward, report)
    else:
        solved = forward.solve()
        rows = solved.z.clone()  # f may have returned one of its inputs
        if torch.is_grad_enabled() and any(named_sources(problem)):
            require_gradient_paths(problem, rows, rows)  # nothing has a path: is nothing needed, or all cut off?
    stats = solved.stats.expand(problem.samples) if coupled else solved.stats
    report.failure(stats, "forward", below_rounding=solved.below_rounding)
    value = problem.unpack(rows)
    if ruled:  # copies, so that the caller may change them in place
        value = rebuild(value, [tensor.clone() for _, tensor in leaves(value, "value")])
    solution = Solution(value, stats, solved=solved)
    report.solution = weakref.ref(solution)
    return solution


def check_options(
    solver: Any, tolerance: Any, gradient: Any, on_failure: Any, compact: Any, coupled: Any, check_every: Any
) -> None:
    """Options are objects of the right kind, not names or classes."""
    for name, value, kind, example in (
        ("solver", solver, Solver, "equipoise.Anderson(memory=5)"),
        ("tolerance", tolerance, Tolerance, "equipoise.Tolerance(relative=1e-4)"),
        ("gradient", gradient, GradientRule, "equipoise.ImplicitGradient()"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}; it must be an object such as {example}.")
    if on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure is {on_failure!r}; allowed: {', '.join(map(repr, ON_FAILURE))}.")
    require_bool("compact", compact)
    require_bool("coupled", coupled)
    if not isinstance(check_every, int) or check_every < 1:
        raise ValueError(f"check_every is {check_every!r}; it must be a whole number of at least 1.")


def require_bool(name: str, value: Any) -> None:
    """Refuse what is only taken for True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")


class Equilibrium(nn.Module):
    """A layer whose output is the fixed point of ``f``. It stores nothing: warm start by passing ``z0``.

    Args:
        f: a module (or function) ``f(z, *inputs) -> z``.
        initial: where to start: a function of the inputs; or the shape of one sample, e.g. ``(64,)``, or a tuple of
            such shapes, for zeros; None is zeros like the first input.
        solver, tolerance, gradient, on_failure, compact, coupled, check_every: as in :func:`fixed_point`.

    Example:
        >>> layer = eq.Equilibrium(MyCell(), initial=(64,), solver=eq.Anderson(memory=5))
        >>> y = layer(x)
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        initial: Any = None,
        solver: Solver = SOLVER,
        tolerance: Tolerance = TOLERANCE,
        gradient: GradientRule = GRADIENT,
        on_failure: str = "warn",
        compact: bool = True,
        coupled: bool = False,
        check_every: int = 1,
    ):
        super().__init__()
        check_options(solver, tolerance, gradient, on_failure, compact, coupled, check_every)
        require_function(f)
        if not (initial is None or callable(initial) or is_shape(initial)):
            raise TypeError(
                f"initial is {initial!r}; it must be None, a function of the inputs, the shape of one sample, "
                "or a tuple of such shapes."
            )
        self.f = f
        self.initial = initial
        self.solver = solver
        self.tolerance = tolerance
        self.gradient = gradient
        self.on_failure = on_failure
        self.compact = compact
        self.coupled = coupled
        self.check_every = check_every

    def forward(self, *inputs: Any, z0: Any = None, **unknown: Any) -> Any:
        if unknown:
            name = next(iter(unknown))
            raise TypeError(
                f"an Equilibrium has no keyword argument {name!r}: inputs are positional, layer(x, {name}), and "
                f"reach f in that order, f(z, x, {name})."
            )
        return self.solve(*inputs, z0=z0).value

    def solve(
        self,
        *inputs: Any,
        z0: Any = None,
        trace: bool = False,
        callback: Callable[[Progress], object] | None = None,
    ) -> Solution:
        """The whole :class:`Solution` for the same call."""
        return fixed_point(
            self.f,
            self.start(inputs) if z0 is None else z0,
            *inputs,
            solver=self.solver,
            tolerance=self.tolerance,
            gradient=self.gradient,
            on_failure=self.on_failure,
            compact=self.compact,
            coupled=self.coupled,
            trace=trace,
            callback=callback,
            check_every=self.check_every,
        )

    def start(self, inputs: tuple[Any, ...]) -> Any:
        """The initial value for these inputs."""
        if callable(self.initial):
            return self.initial(*inputs)
        if not inputs:
            raise ValueError("an Equilibrium called without inputs needs z0, which also sets the batch size.")
        like = leaves(inputs[0], "inputs[0]")[0][1]
        if self.initial is None and not (like.is_floating_point() or like.is_complex()):
            raise TypeError(
                f"the first input is {like.dtype}, so that a state like it cannot be a start: give Equilibrium "
                "initial=(the shape of one sample), or call it with z0."
            )
        dtype = like.dtype if like.is_floating_point() or like.is_complex() else torch.get_default_dtype()
        if autocast_state(like.device.type):
            dtype = torch.promote_types(dtype, torch.float32)  # what autocast made narrow was not meant for a state
        if self.initial is None:
            return torch.zeros_like(like, dtype=dtype)

        def zeros(shape: Any) -> Any:
            if shape and isinstance(shape[0], tuple | list):
                return tuple(zeros(part) for part in shape)
            return torch.zeros(like.shape[0], *shape, dtype=dtype, device=like.device)

        return zeros(self.initial)

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, gradient={self.gradient}"


def is_shape(initial: Any) -> bool:
    """Whether this is the shape of a sample, or a tuple of such."""
    if not isinstance(initial, tuple | list):
        return False
    return all(isinstance(n, int) and n >= 0 for n in initial) or all(is_shape(part) for part in initial)


class FixedSteps(nn.Module):
    """An Equilibrium run for a fixed number of steps, without a look at the residual: one straight graph.

    What ``torch.export`` and ONNX can trace; also free of synchronisation. With :class:`Picard` the graph holds nothing
    but f and can be differentiated; :class:`Anderson` adds batched linear solves, which ONNX does not have.

    Args:
        layer: the equilibrium layer; its f and initial value are used.
        steps: evaluations of f, the last of which is the output.
        solver: None takes the layer's.

    Example:
        >>> torch.export.export(eq.FixedSteps(layer, steps=30, solver=eq.Picard()), (x,))
    """

    def __init__(self, layer: Equilibrium, steps: int, *, solver: Solver | None = None):
        super().__init__()
        if not isinstance(layer, Equilibrium):
            raise TypeError(
                f"layer is a {type(layer).__name__}; it must be an equipoise.Equilibrium. Replace the equilibrium "
                "layers inside a model: model.layer = FixedSteps(model.layer, steps)."
            )
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps!r}; it must be a whole number of at least 1.")
        self.layer, self.steps, self.solver = layer, steps, solver or layer.solver

    def forward(self, *inputs: Any, z0: Any = None) -> Any:
        start = self.layer.start(inputs) if z0 is None else z0
        problem, z, image = FunctionProblem.start(self.layer.f, start, inputs, coupled=self.layer.coupled)
        if problem.needs_gradient and not isinstance(self.solver, Picard):
            raise RuntimeError(
                f"FixedSteps with {self.solver!r} is for inference: run it under torch.no_grad(), "
                "or use solver=Picard()."
            )
        state = iterate(problem, z, image, self.solver, self.steps)
        return problem.unpack(state.image)

"""The main entry points: the function :func:`fixed_point` and the module :class:`Equilibrium`."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from equipoise.gradients import GradientRule, ImplicitGradient
from equipoise.gradients.steps import one_step
from equipoise.options import is_number
from equipoise.problem.captures import named_sources, require_gradient_paths
from equipoise.problem.independence import warn_of_sequence_first_layers
from equipoise.problem.layout import leaves, rebuild
from equipoise.problem.problem import Count, FunctionProblem, autocast_state, require_function
from equipoise.solution import Report, Solution
from equipoise.solvers import Anderson, Picard, Progress, Solver
from equipoise.solvers.base import iterate
from equipoise.solvers.loop import Watch, solve
from equipoise.tolerance import Tolerance

SOLVER, TOLERANCE, GRADIENT = Anderson(), Tolerance(), ImplicitGradient()  # the defaults, everywhere
ON_FAILURE = ("warn", "raise", "ignore")
KINDS = {
    "solver": (Solver, "an object such as equipoise.Anderson(memory=5)"),
    "tolerance": (Tolerance, "an object such as equipoise.Tolerance(relative=1e-4)"),
    "gradient": (GradientRule, "an object such as equipoise.ImplicitGradient()"),
    **dict.fromkeys(("compact", "coupled", "aux", "trace"), (bool, "True or False")),
}


@dataclass(frozen=True)
class Options:
    """The options of :func:`fixed_point`, checked."""

    solver: Solver
    tolerance: Tolerance
    gradient: GradientRule
    on_failure: str
    compact: bool
    coupled: bool
    check_every: int
    aux: bool
    trace: bool = False
    callback: Callable[[Progress], object] | None = None
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (kind, allowed) in KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} is {value!r}; it must be {allowed}.")
        if self.on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure is {self.on_failure!r}; allowed: {', '.join(map(repr, ON_FAILURE))}.")
        if type(self.check_every) is not int or self.check_every < 1:  # True is not a number of steps
            raise ValueError(f"check_every is {self.check_every!r}; it must be a whole number of at least 1.")
        if not isinstance(self.keep, tuple) or not all(is_number(k, at_least=1, whole=True) for k in self.keep):
            raise ValueError(f"keep is {self.keep!r}; it must be a tuple of steps, such as (4, 8, 12), of at least 1.")
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback is {self.callback!r}; it must be a function of one argument, a Progress.")
        if self.callback is not None and self.gradient.decides_value:
            raise ValueError(f"{type(self.gradient).__name__} runs no solver and calls no callback: omit callback.")
        if self.coupled and self.solver.needs:
            raise TypeError(
                f"coupled=True solves the batch as one problem, and {type(self.solver).__name__} solves samples "
                "separately: use Anderson, Broyden, Picard or NewtonKrylov."
            )


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
    aux: bool = False,
    keep: tuple[int, ...] = (),
    trace: bool = False,
    callback: Callable[[Progress], object] | None = None,
    check_every: int = 1,
) -> Solution:
    """Solve z = f(z, *inputs) for every sample of a batch.

    Args:
        f: function or module ``f(z, *inputs) -> z``. Its parameters and captured tensors get gradients too.
        z0: initial value: a tensor or nested tuple of tensors, batch first (a batch of 1 is broadcast), or a function
            of the inputs that returns one.
        inputs: tensors or tuples of tensors, batch first. Passing them explicitly lets finished samples be left out.
        solver: iteration method, such as ``Anderson(memory=5)``.
        tolerance: stopping criterion of each sample.
        gradient: rule of differentiation; used only when a gradient is needed (except :class:`UnrolledGradient`).
        on_failure: reaction to samples that fail: "warn", "raise" or "ignore"; applies to the backward solve too.
        compact: whether to leave finished samples out of the computation (requires ``inputs``).
        coupled: whether to solve the whole batch as one problem with one residual, for an f that mixes its samples:
            graph networks, attention with the sequence first. Inputs may then have any leading size.
        aux: whether f returns ``(z, aux)``. What it returns beside z, of any type, does not take part in the solve;
            ``sol.aux`` is that of one more call of f, at the returned value, and is differentiable.
        keep: steps, counted as in ``stats.steps``, whose iterates are returned in ``sol.kept``, for losses along the
            trajectory. Their gradient is that of one step of f. A sample that has stopped before contributes its
            solution.
        trace: whether to keep the residuals of every check in ``stats.trace``.
        callback: function called with a :class:`~equipoise.solvers.Progress` at every check.
        check_every: number of steps between checks of the residuals; each check synchronises with the device once.

    Returns:
        A :class:`Solution`; ``sol.value`` is structured like z0.

    Example:
        >>> W = 0.5 * torch.eye(3)
        >>> sol = eq.fixed_point(lambda z, x: torch.tanh(z @ W + x), torch.zeros(1, 3), torch.randn(8, 3))
        >>> sol.value.shape, bool(sol.converged.all())
        (torch.Size([8, 3]), True)
    """
    if torch._C._get_tracing_state() is not None or _is_exporting():
        raise NotImplementedError(
            "an Equilibrium cannot be exported or traced: its number of steps depends on the data, and a static "
            "graph has a fixed one. Export equipoise.FixedSteps(layer, steps=30, solver=equipoise.Picard()) instead."
        )
    options = Options(
        solver, tolerance, gradient, on_failure, compact, coupled, check_every, aux, trace, callback, keep
    )
    if torch.compiler.is_compiling():
        # One clean break in the traced graph; looked up here because dynamo is slow to import.
        reason = "the number of steps of a solver depends on the residuals it measures"
        return torch.compiler.disable(watched_run, reason=reason)(f, z0, inputs, options)  # type: ignore[call-arg]
    return watched_run(f, z0, inputs, options)


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 lacks it
_watched: ContextVar[list[Solution] | None] = ContextVar("watched", default=None)


@contextmanager
def watch_solves() -> Iterator[list[Solution]]:
    """Collect the Solution of every solve inside the block, however deep inside a model.

    A solve inside the f of another is not collected. A Solution holds its value: drop it after reading the statistics.

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


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the solves inside the block from :func:`watch_solves`."""
    token = _watched.set(None)
    try:
        yield
    finally:
        _watched.reset(token)


def watched_run(f: Callable[..., Any], z0: Any, inputs: tuple[Any, ...], options: Options) -> Solution:
    with unwatched():
        solution = run(f, z0, inputs, options)
    collect(solution)
    return solution


def collect(solution: Solution) -> None:
    """Hand a Solution to :func:`watch_solves`; for layers that are solved by other means than :func:`fixed_point`."""
    if (solves := _watched.get()) is not None:
        solves.append(solution)


def run(f: Callable[..., Any], z0: Any, inputs: tuple[Any, ...], options: Options) -> Solution:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # inside it a Jacobian product would silently be zero
            return run(f, z0, inputs, options)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "fixed_point cannot run inside torch.func.grad, vmap and similar transforms: it solves a batch already, "
            "and torch.autograd.grad with create_graph=True provides gradients to any order. Call it outside the "
            "transform, or use equipoise.FixedSteps(layer, steps, solver=Picard()), which transforms like any module."
        )
    solver, tolerance, gradient = options.solver, options.tolerance, options.gradient
    problem, z, image = FunctionProblem.start(f, z0, inputs, coupled=options.coupled, aux=options.aux)
    problem.gatherable = problem.gatherable and options.compact
    if problem.sequence_first and not options.coupled:
        warn_of_sequence_first_layers(problem, z)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(image).tangent is not None:
        raise NotImplementedError(
            "fixed_point has no forward-mode derivative: use reverse mode (torch.autograd.grad), or FixedSteps. For an "
            "equilibrium inside the f of another, solve the outer one with Anderson, Broyden or Picard."
        )
    report = Report(options.on_failure)
    watch = Watch(options.trace, options.callback, options.check_every, gradient.keeps_states, options.keep)
    if gradient.decides_value:
        problem.count = Count()  # the evaluation at the start is not one of the steps
        rows, solved = gradient.run(problem, z, tolerance, watch, report)
    elif problem.needs_gradient:
        gradient.check(problem, solver)
        record = partial(gradient.record, problem)
        solved = solve(problem, z.detach(), image.detach(), solver, tolerance, watch, record=record)
        rows = gradient.attach(solved, report)
        solved.kept = [one_step(problem, kept) for kept in solved.kept]
    else:
        solved = solve(problem, z.detach(), image.detach(), solver, tolerance, watch)
        rows = solved.z
        if torch.is_grad_enabled() and any(named_sources(problem)):
            require_gradient_paths(problem, rows, rows)  # f(z0) needs no gradient: was a path cut by mistake?
    stats = solved.stats.expand(problem.samples) if options.coupled else solved.stats
    if not solved.converged:
        report.failure(stats, "forward", below_rounding=solved.below_rounding)
    value, *kept = (own(problem.unpack(each)) for each in (rows, *solved.kept))
    extra = problem.auxiliary(value) if options.aux else None
    solution = Solution(value, stats, kept=tuple(kept), aux=extra, solved=solved)
    report.solution = weakref.ref(solution)
    return solution


def own(value: Any) -> Any:
    """Return a copy of a value, which users may modify in place."""
    return rebuild(value, [tensor.clone() for _, tensor in leaves(value, "value")])


class Equilibrium(nn.Module):
    """A layer whose output is the fixed point of ``f``. It is stateless: warm start by passing ``z0``.

    Args:
        f: module or function ``f(z, *inputs) -> z``.
        initial: initial value: a function of the inputs; or the shape of one sample, e.g. ``(64,)``, or a tuple of
            such shapes, for zeros; None for zeros like the first input.
        solver, tolerance, gradient, on_failure, compact, coupled, check_every: as in :func:`fixed_point`.
        aux: whether f returns ``(z, aux)``; the layer then does so as well.

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
        aux: bool = False,
    ):
        super().__init__()
        require_function(f)
        if not (initial is None or callable(initial) or is_shape(initial)):
            raise TypeError(
                f"initial is {initial!r}; it must be None, a function of the inputs, the shape of one sample, "
                "or a tuple of such shapes."
            )
        self.f, self.initial, self.solver, self.tolerance, self.gradient = f, initial, solver, tolerance, gradient
        self.on_failure, self.compact, self.coupled, self.check_every = on_failure, compact, coupled, check_every
        self.aux = aux
        Options(**self.options())

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`fixed_point`, with the current values of the layer."""
        names = ("solver", "tolerance", "gradient", "on_failure", "compact", "coupled", "check_every", "aux")
        return {name: getattr(self, name) for name in names}

    def forward(self, *inputs: Any, z0: Any = None, **unknown: Any) -> Any:
        if unknown:
            name = next(iter(unknown))
            raise TypeError(
                f"an Equilibrium has no keyword argument {name!r}. Pass inputs by position: layer(x, {name}) calls "
                f"f(z, x, {name})."
            )
        solution = self.solve(*inputs, z0=z0)
        return (solution.value, solution.aux) if self.aux else solution.value

    def solve(
        self,
        *inputs: Any,
        z0: Any = None,
        keep: tuple[int, ...] = (),
        trace: bool = False,
        callback: Callable[[Progress], object] | None = None,
    ) -> Solution:
        """Return the :class:`Solution` of this call, not only its value."""
        start = self.start(inputs) if z0 is None else z0
        return fixed_point(self.f, start, *inputs, **self.options(), keep=keep, trace=trace, callback=callback)

    def start(self, inputs: tuple[Any, ...]) -> Any:
        """Return the initial value for these inputs."""
        if callable(self.initial):
            return self.initial(*inputs)
        if not inputs:
            raise ValueError("an Equilibrium called without inputs needs z0, which sets the batch size: layer(z0=...).")
        like = leaves(inputs[0], "inputs[0]")[0][1]
        numeric = like.is_floating_point() or like.is_complex()
        if self.initial is None and not numeric:
            raise TypeError(
                f"the first input is {like.dtype}, but the state must be floating-point or complex: pass "
                "initial=(the shape of one sample) to Equilibrium, or call it with z0."
            )
        dtype = like.dtype if numeric else torch.get_default_dtype()
        if autocast_state(like.device.type):
            dtype = torch.promote_types(dtype, torch.float32)  # autocast narrows inputs, not the state
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
    if not isinstance(initial, tuple | list):
        return False
    return all(isinstance(n, int) and n >= 0 for n in initial) or all(is_shape(part) for part in initial)


class FixedSteps(nn.Module):
    """An Equilibrium run for a fixed number of steps without checking residuals: one static graph.

    ``torch.export`` and ONNX can trace it; it never synchronises. With :class:`Picard` the graph contains only f and is
    differentiable; :class:`Anderson` adds batched linear solves, which ONNX lacks.

    Args:
        layer: equilibrium layer, whose f and initial value are used.
        steps: number of evaluations of f, the last of which is the output.
        solver: iteration method; None uses the layer's.

    Example:
        >>> torch.export.export(eq.FixedSteps(layer, steps=30, solver=eq.Picard()), (x,))
    """

    def __init__(self, layer: Equilibrium, steps: int, *, solver: Solver | None = None):
        super().__init__()
        if not isinstance(layer, Equilibrium):
            raise TypeError(
                f"layer has type {type(layer).__name__}; it must be an equipoise.Equilibrium. Replace the equilibrium "
                "layers inside a model: model.layer = FixedSteps(model.layer, steps)."
            )
        if layer.aux:
            raise ValueError("the layer has aux=True, and FixedSteps returns only z: use a layer whose f returns z.")
        if not is_number(steps, at_least=1, whole=True):
            raise ValueError(f"steps is {steps!r}; it must be a whole number of at least 1.")
        if not isinstance(solver, Solver | None):
            raise TypeError(f"solver is {solver!r}; it must be {KINDS['solver'][1]}, or None.")
        self.layer, self.steps, self.solver = layer, steps, solver or layer.solver

    def forward(self, *inputs: Any, z0: Any = None) -> Any:
        start = self.layer.start(inputs) if z0 is None else z0
        problem, z, image = FunctionProblem.start(self.layer.f, start, inputs, coupled=self.layer.coupled)
        if problem.needs_gradient and not isinstance(self.solver, Picard):
            raise RuntimeError(
                f"FixedSteps with {self.solver!r} is only for inference: run it under torch.no_grad(), "
                "or use solver=Picard()."
            )
        state = iterate(problem, z, image, self.solver, self.steps)
        return problem.unpack(state.image)

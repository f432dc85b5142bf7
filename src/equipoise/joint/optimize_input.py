"""The main entry point: :func:`optimize_input`."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise.fixed_point import ON_FAILURE, unwatched
from equipoise.joint.anderson import JointAnderson
from equipoise.joint.base import SCALES, SELECT, JointSolver
from equipoise.joint.constraints import Constraint, as_constraint
from equipoise.joint.gradients import EnvelopeGradient, JointGradient
from equipoise.joint.optimum import KKT, NONFINITE, Optimum
from equipoise.joint.problem import First, Joint, JointFunction, JointProblem, LossProblem, tensors
from equipoise.problem.captures import leaves_of, require_gradient_paths
from equipoise.problem.layout import Layout, leaves, rebuild
from equipoise.problem.problem import FunctionProblem, inspect_layers, require_dense
from equipoise.solution import Report
from equipoise.solvers import Progress
from equipoise.solvers.loop import Solved, Watch, solve
from equipoise.tolerance import Tolerance

SOLVER, GRADIENT = JointAnderson(), EnvelopeGradient()  # the defaults
TOLERANCE = Tolerance(relative=1e-3, max_steps=100)
KINDS: dict[str, tuple[type, str]] = {
    "solver": (JointSolver, "a joint solver such as equipoise.JointAnderson()"),
    "tolerance": (Tolerance, "an object such as equipoise.Tolerance(relative=1e-3)"),
    "gradient": (JointGradient, "an object such as equipoise.EnvelopeGradient()"),
    "compact": (bool, "True or False"),
    "trace": (bool, "True or False"),
}


@dataclass(frozen=True)
class Options:
    """The options of :func:`optimize_input`, checked."""

    constraint: Constraint | None
    solver: JointSolver
    tolerance: Tolerance
    gradient: JointGradient
    select: str
    on_failure: str
    compact: bool
    trace: bool
    callback: Callable[[Progress], object] | None

    def __post_init__(self) -> None:
        for name, (kind, allowed) in KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} is {value!r}; it must be {allowed}.")
        for name, among in (("select", SELECT), ("on_failure", ON_FAILURE)):
            if (value := getattr(self, name)) not in among:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, among))}.")
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback is {self.callback!r}; it must be a function of one argument, a Progress.")
        if self.tolerance.absolute:
            raise ValueError(
                f"tolerance.absolute is {self.tolerance.absolute!r}; it must be 0: the residuals of z, mu and x have "
                "different units, and each is relative to its own size."
            )


def optimize_input(
    f: Callable[..., Any],
    loss: Callable[..., Tensor],
    x0: Any,
    z0: Any,
    *inputs: Any,
    constraint: Constraint | Callable[[Any], Any] | None = None,
    solver: JointSolver = SOLVER,
    tolerance: Tolerance = TOLERANCE,
    gradient: JointGradient = GRADIENT,
    select: str = "feasible-cost",
    on_failure: str = "warn",
    compact: bool = True,
    trace: bool = False,
    callback: Callable[[Progress], object] | None = None,
) -> Optimum:
    """Minimise loss(z, x, *inputs) over x subject to z = f(z, x, *inputs), for every sample of a batch (JIIO).

    z, its adjoint mu, and x move together in one fixed-point iteration: each step costs one evaluation of f, one of the
    loss and one vector-Jacobian product, whereas an optimiser around a solver needs two solves per step.

    Args:
        f: function or module ``f(z, x, *inputs) -> z``.
        loss: function ``loss(z, x, *inputs)`` that returns one cost per sample, of shape (batch,).
        x0: initial x: a tensor or nested tuple of tensors, batch first (a batch of 1 is broadcast); it is projected
            onto the constraint. An x shared by several images is one sample whose state holds all of these images.
        z0: initial state, as in :func:`equipoise.fixed_point`.
        inputs: tensors or tuples of tensors, batch first, passed to f and to the loss: targets, masks, images.
        constraint: set that x stays in: an :class:`L2Ball`, :class:`LinfBall`, :class:`Box`, :class:`Sphere`,
            :class:`Intersection`, or a function that projects x; None for any x.
        solver: joint solver, or :class:`AdamInput` or :class:`PGDInput` for comparison.
        tolerance: bound on the relative residuals of z, mu and x, and the number of steps.
        gradient: rule for gradients with respect to the parameters, inputs and captured tensors of f and the loss;
            used only when a gradient is needed. x0 and z0 get none.
        select: which iterate is returned for a sample that has not converged: "feasible-cost", the least cost among
            those with ||f - z|| below a tenth of ||f||; "residual", the lowest KKT residual; "last"; or "paper", the
            rule of the authors' code.
        on_failure: reaction to samples that fail: "warn", "raise" or "ignore"; applies to the backward solve too.
        compact: whether to leave finished samples out of the computation (requires ``inputs``).
        trace: whether to keep the residuals of every step in ``stats.trace``.
        callback: function called with a :class:`~equipoise.solvers.Progress` at every step; its value is (z, mu, x).

    Returns:
        An :class:`~equipoise.joint.Optimum`.

    Example:
        >>> W, U = 0.5 * torch.eye(3), torch.randn(2, 3)
        >>> target = torch.randn(8, 3)
        >>> opt = eq.optimize_input(
        ...     lambda z, x, y: torch.tanh(z @ W + x @ U),
        ...     lambda z, x, y: (z - y).square().sum(dim=1),
        ...     torch.zeros(8, 2), torch.zeros(8, 3), target,
        ... )
        >>> opt.x.shape, opt.cost.shape
        (torch.Size([8, 2]), torch.Size([8]))

    Reference: S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in
    equilibrium networks" (2021), eq. 11.
    """
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "optimize_input cannot be traced, exported or transformed by torch.func: the number of its steps depends "
            "on the data. Call it outside."
        )
    if isinstance(loss, type) or not callable(loss):
        given = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise TypeError(f"loss is {given}; it must be a function loss(z, x, *inputs) -> (batch,).")
    options = Options(
        as_constraint(constraint), solver, tolerance, gradient, select, on_failure, compact, trace, callback
    )
    if torch.compiler.is_compiling():
        reason = "the number of steps of a solver depends on the residuals it measures"
        eager = torch.compiler.disable(unwatched_run, reason=reason)
        return eager(f, loss, x0, z0, inputs, options)  # type: ignore[call-arg]
    return unwatched_run(f, loss, x0, z0, inputs, options)


def unwatched_run(f: Any, loss: Any, x0: Any, z0: Any, inputs: tuple[Any, ...], options: Options) -> Optimum:
    with unwatched():
        return run(f, loss, x0, z0, inputs, options)


def run(f: Any, loss: Any, x0: Any, z0: Any, inputs: tuple[Any, ...], options: Options) -> Optimum:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # inside it there are no Jacobian products
            x0, inputs = (usable(part) for part in (x0, inputs))
            z0 = z0 if callable(z0) and not isinstance(z0, Tensor) else usable(z0)
            return run(f, loss, x0, z0, inputs, options)
    function, x, z, needs_gradient = start(f, loss, x0, z0, inputs, options)
    problem = JointProblem.of(function, z, x, inputs)
    problem.gatherable = problem.gatherable and options.compact
    course: list[tuple[Tensor, Tensor]] = []

    def follow(progress: Progress) -> None:
        course.append((progress.rows, progress.state.cost))  # type: ignore[attr-defined]
        if options.callback is not None:
            options.callback(progress)

    settings = "KKTGradient(tolerance=...) or DetachedGradient(gradient=...)"
    report = Report(options.on_failure, settings=settings, owner="Optimum", nonfinite=NONFINITE)
    v = problem.pack((z, rebuild(z, [torch.zeros_like(t) for t in tensors(z)]), x))
    solved = solve(problem, v, v, options.solver, options.tolerance, Watch(options.trace, follow))
    rows, cost, kkt = attached(solved, options.gradient if needs_gradient else None, report)
    solved.stats.products = problem.count.products
    if not solved.converged:
        report.failure(solved.stats, "forward", below_rounding=solved.below_rounding)
    z, mu, x = problem.unpack(rows)
    z, mu, x = (rebuild(part, [t.clone() for t in tensors(part)]) for part in (z, mu, x))
    if options.gradient.holds_x:
        mu, x = (rebuild(part, [t.detach() for t in tensors(part)]) for part in (mu, x))
    optimum = Optimum(x, z, mu, cost, kkt, solved.stats, solved=solved, course=course)
    report.solution = weakref.ref(optimum)
    return optimum


def usable(value: Any) -> Any:
    """Return a value without inference tensors, which autograd rejects."""
    return rebuild(value, [t.clone() if t.is_inference() else t for t in tensors(value)])


def start(
    f: Any, loss: Any, x0: Any, z0: Any, inputs: tuple[Any, ...], options: Options
) -> tuple[JointFunction, Any, Any, bool]:
    """Check all arguments; return the joint function, x and z to start from, and whether a gradient is needed."""
    x = initial_input(x0, z0, inputs)
    layout, batch = Layout(x), len(tensors(x)[0])
    constraint, recording = options.constraint, torch.is_grad_enabled()
    moving = False
    if constraint is not None:
        constraint = constraint.fitted(layout, batch, tensors(x)[0].device)
        rows = layout.pack(x)
        x = layout.unpack(constraint.project(rows))
        moving = recording and bool(constraint.sources(rows))
        if moving and not options.gradient.moves_constraint:
            raise ValueError(
                f"{constraint!r} depends on a tensor that requires a gradient, which {options.gradient!r} does not "
                "provide: pass gradient=equipoise.KKTGradient(), or use the tensor detached."
            )
    # From f(z0), known after the checks: at z0 = 0 the loss may be steep, as a normalisation of zeros is.
    with x_counted_apart(), torch.enable_grad():  # weights derived once per solve keep their path, checked below
        inner, _, rows = FunctionProblem.start(f, z0, (x, *inputs))
    inner.structures = {}
    rows = rows.detach().requires_grad_()
    with torch.enable_grad():
        x_leaf = rebuild(x, [t.detach().requires_grad_() for t in tensors(x)])
        there = inner.replaced(inputs=(x_leaf, *inputs))
        image = there(rows)
        value = inner.unpack(rows)
        costs = LossProblem.of(loss, there, value)
        inspect_layers(loss, costs.called)
        try:
            cost = costs.call(value)
        except Exception as error:
            error.add_note("loss failed at its first call; it is called as loss(z, x, *inputs).")
            raise
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in (image, cost)):
        raise NotImplementedError(
            "optimize_input has no forward-mode derivative: use reverse mode (torch.autograd.grad) with a gradient "
            "rule such as KKTGradient()."
        )
    check_cost(cost, batch)
    parts = [rows, *tensors(x_leaf)]
    # Without gradients, weights that were derived before are constants.
    sources = None if recording else leaves(x_leaf, "inputs[0]")
    with x_counted_apart():
        require_gradient_paths(there, rows, image, sources)
        require_gradient_paths(costs, rows, cost, sources)
    require_separate_costs(cost, parts)
    needs = recording and (moving or bool(leaves_of(image, parts) or leaves_of(cost, parts)))
    z = rebuild(value, [t.detach() for t in tensors(value)])
    function = JointFunction(inner, loss, constraint, options.select)
    function.first = First.of(inner, rows, x_leaf, image, cost)
    return function, x, z, needs


def require_separate_costs(cost: Tensor, parts: list[Tensor]) -> None:
    """Raise if the cost of a sample depends on the z or x of another; ``parts`` are z and x."""
    if len(cost) < 2:
        return
    odd = (torch.arange(len(cost), device=cost.device) % 2).to(cost.dtype)
    gradients = torch.autograd.grad(cost, parts, odd, retain_graph=True, allow_unused=True)
    if any(gradient is not None and bool((gradient[::2].abs() > 0).any()) for gradient in gradients):
        raise ValueError(
            "loss mixes the samples of the batch: the cost of one depends on the z or x of another. Reduce over all "
            "dimensions but the first, e.g. .flatten(1).sum(1), and normalise each sample separately."
        )


@contextmanager
def x_counted_apart() -> Iterator[None]:
    """Name inputs in errors as the caller does: to the problem z = f(z, x, *inputs), the first input is x."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if error.args and isinstance(message := error.args[0], str):
            name = lambda found: "x0" if found[1] == "0" else f"inputs[{int(found[1]) - 1}]"  # noqa: E731
            error.args = (re.sub(r"\binputs\[(\d+)\]", name, message), *error.args[1:])
        raise


def initial_input(x0: Any, z0: Any, inputs: tuple[Any, ...]) -> Any:
    """Return x0, checked and broadcast over the batch, without its graph."""
    named = leaves(x0, "x0")
    if not named:
        raise ValueError("x0 is an empty tuple; it must contain at least one tensor.")
    for name, tensor in named:
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise TypeError(f"{name} is {tensor.dtype}; an input to optimise must be floating point: {name}.float().")
        if not tensor.dim():
            raise ValueError(f"{name} is a scalar; it must have the batch as its first dimension: {name}[None].")
        if tensor.dtype.itemsize == 1 or tensor.dtype == torch.complex32:
            raise TypeError(f"{name} is {tensor.dtype}; x needs float16, bfloat16 or wider: convert inside f.")
        require_dense(name, tensor, free=False)
    given = [tensor for i, tree in enumerate(inputs) for _, tensor in leaves(tree, f"inputs[{i}]")]
    if not given and not (callable(z0) and not isinstance(z0, Tensor)):
        given = [tensor for _, tensor in (*leaves(z0, "z0"), *named)]
    sizes = [tensor.shape[0] for tensor in given if tensor.dim()] or [t.shape[0] for _, t in named]
    batch = next((size for size in sizes if size != 1), sizes[0])
    for name, tensor in named:
        if tensor.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} has batch size {tensor.shape[0]}, {'the inputs have' if inputs else 'z0 has'} {batch}: x0, z0 "
                "and inputs share their first dimension (x0 and z0 may have 1)."
            )
    return rebuild(x0, [t.detach().expand(batch, *t.shape[1:]).clone() for _, t in named])


def check_cost(cost: Any, batch: int) -> None:
    if not isinstance(cost, Tensor):
        raise TypeError(f"loss returned {type(cost).__name__}; it must return a tensor of shape (batch,).")
    if cost.shape != (batch,):
        raise ValueError(
            f"loss returned a tensor of shape {tuple(cost.shape)}; it must return one cost per sample, shape "
            f"({batch},): reduce over all other dimensions, not over the batch, e.g. .flatten(1).sum(1)."
        )
    if not cost.is_floating_point():
        raise TypeError(f"loss returned {cost.dtype}; costs must be floating point.")
    if not cost.requires_grad:
        raise RuntimeError(
            "loss does not depend differentiably on z or x: look for detach(), no_grad(), .item(), argmax or numpy."
        )


def attached(solved: Solved, gradient: JointGradient | None, report: Report) -> tuple[Tensor, Tensor, KKT]:
    """Return the optimum as rows and its costs, with gradients where they are finite, and its KKT residuals."""
    joint = solved.problem.structure(Joint)
    assert joint is not None
    solver, finite = solved.solver, torch.isfinite(solved.stats.residual)
    assert isinstance(solver, JointSolver)
    if joint.constraint is not None and not bool(finite.all()):  # where x0 was not finite, x is 0 now
        x = solved.z[:, joint.x]
        x = torch.where(finite[:, None], x, joint.project(x))
        solved.z = torch.cat([solved.z[:, : 2 * joint.n], x], dim=1)
    v = solved.z
    if gradient is None:
        with torch.no_grad():
            cost = joint.costs(v)
    else:
        finite = finite.nonzero().squeeze(1)
        if len(finite) == len(v) or not joint.problem.gatherable:
            rows, cost = gradient.attach(joint, solved, report)
        elif len(finite):
            part = solved.take(finite)
            narrow = part.problem.structure(Joint)
            assert narrow is not None
            with torch.no_grad():
                every = joint.costs(v)
            rows, cost = gradient.attach(narrow, part, replace(report))  # a copy: its statistics would not fit
            rows, cost = v.index_copy(0, finite, rows), every.index_copy(0, finite, cost)
        else:
            rows, cost = v.clone().requires_grad_(), joint.costs(v).detach().requires_grad_()
        v = rows
    return v, cost, kkt_of(solved, joint)


def kkt_of(solved: Solved, joint: Joint) -> KKT:
    """Return the residuals of the blocks at the optimum, measured again if those of the whole batch differ."""
    solver, kkt = solved.solver, solved.companion
    assert isinstance(solver, JointSolver)
    assert kkt is not None
    kkt = kkt[:, SCALES:]
    if bool(((kkt.amax(dim=1) - solved.stats.residual).abs() > 0.01 * solved.stats.residual).any()):
        with torch.no_grad():
            kkt = solver.measured(solved.problem, solved.z, solved.problem(solved.z), solved.companion).kkt
    return KKT(*kkt.unbind(dim=1))

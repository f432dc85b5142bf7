"""Implicit differentiation, to every order.

Let z* solve z = f(z, theta). For a loss with gradient v at z*, the gradient with respect to theta is u^T df/dtheta,
where u solves the adjoint system u = v + J^T u, J = df/dz at z*: again a fixed point, solved by the same loop.

First order: f is recorded once at z*, and autograd pulls u back through that record to whatever f captured. Higher
orders (``create_graph=True``): u is itself the solution of a fixed-point problem in (v, z*, theta) and is attached in
the same way; u^T df/dtheta is evaluated apart from the running graph (:class:`_Isolated`), since z* in it is the output
of the very node whose backward is running, and asking autograd to pass through that node would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.gradients.graph import captured_tensors, edges
from equipoise.problem.compiled import require_buffers
from equipoise.problem.function import Count, Problem
from equipoise.solution import Report
from equipoise.solvers.base import Solved, Solver, solve
from equipoise.solvers.krylov import GMRES
from equipoise.tolerance import Tolerance, residual_at


def recorded(problem: Problem, z: Tensor) -> Tensor:
    """f at ``z`` with its graph."""
    with torch.enable_grad():
        if problem.autocast:
            torch.clear_autocast_cache()  # weights that were cast inside the loop were cast without a graph
        return problem(z)


def reusable_record(problem: Problem, z: Tensor) -> Tensor:
    """:func:`recorded`, for a backward pass that runs many times."""
    image = recorded(problem, z)
    require_buffers(node for node, _ in edges(image, [z, *problem.sources]))
    return image


def with_gradient_of(image: Tensor, value: Tensor) -> Tensor:
    """``value`` with the gradient that ``image`` has."""
    return _Attach.apply(lambda cotangent: cotangent, None, image, value)


@dataclass
class Record:
    """f recorded at z: the graph through which a gradient is pulled back.

    Attributes:
        problem: the problem with ``views`` in place of its sources, to tell them from captures of the same tensors.
        z: where; a leaf that requires a gradient, unless ``split`` makes that unnecessary.
        image: f(z) with its graph; W z + b where f is split.
        split: the structure of f, where a splitting solver sees it, and ``pre`` the value of W z + b.
    """

    problem: Problem
    views: list[Tensor]
    z: Tensor
    image: Tensor
    split: Any = None
    pre: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, z: Tensor, pre: Tensor | None = None, *, structured: bool = False) -> Record:
        """Record f at ``z``."""
        with torch.enable_grad():  # the loop that asks for it records nothing
            views = [tensor.view_as(tensor) for tensor in problem.sources]
        narrow = problem.with_sources(views)
        if not structured or (split := narrow.splitting()) is None:
            z = z.detach().requires_grad_()
            return cls(narrow, views, z, reusable_record(narrow, z))
        z = z.detach()  # no product with W^T is asked of autograd
        split.share(problem.splitting())
        if pre is None:
            with torch.no_grad():
                pre = split.preactivation(z)
        return cls(narrow, views, z, split.recorded(z, pre), split, pre)


@dataclass
class Adjoint:
    """How adjoint systems u = v + J^T u are solved, at every order of differentiation."""

    solver: Solver
    tolerance: Tolerance
    report: Report
    rows: Tensor  # which samples of the batch these are
    batch: int
    start: Callable[[Tensor], Tensor] | None = None  # a guess of u from v

    def attach(
        self, problem: Problem, solution: Tensor, *, pre: Tensor | None = None, record: Record | None = None
    ) -> tuple[Tensor, Record]:
        """Return ``solution`` with the gradient of a fixed point of ``problem``, and the record that gives it.

        Args:
            problem: z = f(z).
            solution: its solution, as rows.
            pre: W z + b there, where a splitting solver knows it; then nothing is evaluated again.
            record: f recorded there, where that has been done.
        """
        if record is None:
            record = Record.of(problem, solution, pre, structured=self.solver.structured)
        if record.split is None:
            first, full, before = partial(self.pull, record), None, record.image.detach
        else:
            assert record.pre is not None
            first, full = partial(self.pull_by_splitting, record, record.split), record.split.product_adjoint
            before = partial(record.split.activation, record.pre)
        sources = problem.sources
        captured = captured_tensors(record.image, [record.z, *record.views], problem.visible_tensors)
        higher = partial(self.differentiable_pull, problem, before, len(sources), full)
        return _Attach.apply(first, higher, record.image, solution, *sources, *captured), record

    def report_solve(self, solved: Solved) -> None:
        """Report the adjoint system: in the Solution, if that is still in use, and as a warning or an error."""
        solution = self.report.solution() if self.report.solution is not None else None
        if solution is not None:
            stats, adjoint = solved.stats.spread(self.rows, self.batch), solved.z
            if len(self.rows) < self.batch:
                adjoint = solved.z.new_zeros(self.batch, solved.z.shape[1]).index_copy(0, self.rows, solved.z)
            coupled = len(solution.result) != self.batch
            solution.backward = stats.expand(len(solution.result)) if coupled else stats
            solution.adjoint = solved.problem.unpack(adjoint)
        self.report.failure(solved.stats, "backward", below_rounding=solved.below_rounding)

    def pull(self, record: Record, cotangent: Tensor) -> Tensor:
        """u = (I - J^T)^-1 v, with J that of the recorded map z -> image."""
        cotangent = cotangent.detach()
        finite = torch.isfinite(cotangent).all(dim=1, keepdim=True)
        system = AdjointProblem(record.problem, record.z, record.image, torch.where(finite, cotangent, 0.0))
        guess = system.cotangent if self.start is None else self.start(system.cotangent)
        solved = solve(system, guess, system(guess), self.solver, self.tolerance)
        self.report_solve(solved)
        return torch.where(finite, solved.z, cotangent)  # a loss that is NaN or infinite stays so: scalers look for it

    def pull_by_splitting(self, record: Record, split: Any, cotangent: Tensor) -> Tensor:
        """J u, the cotangent of W z + b, where f(z) = s(W z + b) and J = s' there; u = v + W^T (J u) (theorem 3)."""
        problem, pre = record.problem, record.image.detach()
        cotangent = problem.layout.arranged(cotangent.detach())
        finite = torch.isfinite(cotangent.sum(dim=1))[:, None]  # a sum with a NaN is one
        if not (whole := bool(finite.all())):  # or one that has overflowed
            finite = torch.isfinite(cotangent).all(dim=1, keepdim=True)
        system = SplitAdjoint(problem, split.adjoint(pre, cotangent if whole else torch.where(finite, cotangent, 0.0)))
        guess = torch.zeros_like(cotangent) if self.start is None else self.start(cotangent)
        solved = solve(system, guess, system(guess), self.solver, self.tolerance)
        self.report_solve(solved)
        return solved.z if whole else torch.where(finite, solved.z, cotangent)

    def differentiable_pull(
        self,
        problem: Problem,
        before: Callable[[], Tensor],
        count: int,
        full: Callable[[Tensor], Tensor] | None,
        u: Tensor,
        cotangent: Tensor,
        value: Tensor,
        *tensors: Tensor,
    ) -> Sequence[Tensor]:
        """u^T df/dtheta for the ``count`` sources and the captured leaves in ``tensors``, as a function of all."""
        sources, captured = tensors[:count], tensors[count:]
        if full is not None:
            with torch.no_grad():
                u = cotangent + full(u)
        at = value.view_as(value)
        there = problem.with_sources(sources)
        image = recorded(there, at)
        if not agree(problem, image, before()):
            raise RuntimeError(ANOTHER_FUNCTION)
        if any("CompiledFunction" in node.name() for node, _ in edges(image, [at, *sources])):
            raise RuntimeError(
                "torch.compile gives f no second derivative: for create_graph=True use the f that is not compiled."
            )
        system = AdjointProblem(there, at, image, cotangent)
        solver = GMRES() if self.solver.structured else self.solver  # this system shows no structure to split by
        again = replace(self, solver=solver, start=None, report=Report(self.report.on_failure))
        u, _ = again.attach(system, u)
        return _Isolated.apply(partial(pullback, problem, captured), 2 + count, u, value, *sources, *captured)


class AdjointProblem(Problem):
    """u -> v + J^T u, with J the Jacobian of the recorded map z -> image of ``problem``."""

    affine = True

    def __init__(self, problem: Problem, z: Tensor, image: Tensor, cotangent: Tensor):
        self.problem, self.z, self.image, self.cotangent = problem, z, image, cotangent
        self.layout, self.device, self.gatherable = problem.layout, problem.device, problem.gatherable
        self.unpack = problem.unpack
        self.count = Count()

    def __call__(self, rows: Tensor) -> Tensor:
        return self.cotangent + self.product(rows)

    def product(self, rows: Tensor) -> Tensor:
        self.count.add(rows.shape[0])
        return gradients([self.image], [self.z], [rows], create_graph=torch.is_grad_enabled())[0]

    def take(self, rows: Tensor) -> AdjointProblem | None:
        narrow = self.problem.take(rows)
        if narrow is None:
            return None
        z = self.z.detach().index_select(0, rows).requires_grad_()
        image = reusable_record(narrow, z)
        self.count.add(len(rows))  # the record made anew
        if not agree(self.problem, image, self.image.index_select(0, rows)):
            return None  # f is another function by now (see ANOTHER_FUNCTION): keep to the record of the forward pass
        taken = AdjointProblem(narrow, z, image, self.cotangent.index_select(0, rows))
        taken.count = self.count
        return taken

    @property
    def visible_tensors(self) -> list[Tensor]:
        return self.problem.visible_tensors

    @property
    def rounding(self) -> float:
        return self.problem.rounding

    @property
    def sources(self) -> list[Tensor]:
        return [self.cotangent, self.z, *self.problem.sources]

    def with_sources(self, sources: Sequence[Tensor]) -> AdjointProblem:
        cotangent, z, *others = sources
        inner = self.problem.with_sources(others)
        z = z if z.requires_grad else z.detach().requires_grad_()
        return AdjointProblem(inner, z, recorded(inner, z), cotangent)


class SplitAdjoint(Problem):
    """u -> J (W^T u + v): the adjoint system of z = s(W z + b) in a form that splitting solvers see through."""

    affine = True

    def __init__(self, problem: Problem, split: Any):
        self.problem, self.split = problem, split
        self.layout, self.device, self.gatherable = problem.layout, problem.device, problem.gatherable
        self.count = Count()

    def __call__(self, rows: Tensor) -> Tensor:
        self.count.add(rows.shape[0])
        with torch.no_grad():
            return self.split.activation(self.split.preactivation(rows))

    def splitting(self) -> Any:
        return self.split

    def take(self, rows: Tensor) -> SplitAdjoint:
        taken = SplitAdjoint(self.problem, self.split.take(rows, self.split.scope))
        taken.count = self.count
        return taken

    @property
    def rounding(self) -> float:
        return self.problem.rounding


ANOTHER_FUNCTION = (
    "f is another function now than in the forward pass, so that its second derivative cannot be had: parameters were "
    "swapped (torch.func.functional_call around the layer: call it inside f instead), inputs overwritten, or train and "
    "eval mode switched between forward and backward."
)


def agree(problem: Problem, image: Tensor, before: Tensor) -> bool:
    """Whether f evaluated again gave what it gave before, up to rounding."""
    with torch.no_grad():
        return bool((residual_at(image, before) <= 1000 * problem.rounding).all())


def pullback(problem: Problem, captured: Sequence[Tensor], u: Tensor, z: Tensor, *sources: Tensor) -> Sequence[Tensor]:
    """u^T df/dtheta for the sources and captured leaves of f recorded at z; differentiable when grad mode is on."""
    create_graph = torch.is_grad_enabled()
    fresh = [isolated(tensor) for tensor in sources]
    image = recorded(problem.with_sources(fresh), z.detach() if not create_graph else isolated(z))
    return gradients([image], [*fresh, *captured], [u], create_graph=create_graph)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], *, create_graph: bool
) -> list[Tensor]:
    """torch.autograd.grad with zeros where there is no path, keeping the graph."""
    paths = [(out, cotangent) for out, cotangent in zip(outputs, cotangents, strict=True) if out.requires_grad]
    if not paths or not inputs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [out for out, _ in paths],
        inputs,
        [cotangent for _, cotangent in paths],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [torch.zeros_like(tensor) if g is None else g for g, tensor in zip(found, inputs, strict=True)]


def isolated(tensor: Tensor) -> Tensor:
    """A stand-in at which a gradient can be asked for: a view, or a leaf where there is no graph."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


class _Attach(torch.autograd.Function):
    """The value of one tensor with the gradient of another.

    First order: ``first`` turns the cotangent into that of ``image``. With create_graph, ``higher`` gives the gradients
    of ``tensors`` as differentiable functions, and ``image`` gets none.
    """

    @staticmethod
    def forward(ctx: Any, first: Any, higher: Any, image: Tensor, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.first, ctx.higher = first, higher
        out = value.clone()
        ctx.save_for_backward(out, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        value, *tensors = ctx.saved_tensors
        pulled = ctx.first(cotangent)
        if ctx.higher is None or not torch.is_grad_enabled():
            return None, None, pulled, None, *(None for _ in tensors)
        return None, None, None, None, *ctx.higher(pulled, cotangent, value, *tensors)


class _Isolated(torch.autograd.Function):
    """fn(*tensors) differentiated apart from the graph the tensors come from, to every order.

    The first ``count`` tensors are arguments of ``fn``, the rest are leaves it captures.
    """

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Sequence[Tensor]], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.fn, ctx.count = fn, count
        ctx.save_for_backward(*tensors)
        return tuple(fn(*(tensor.detach() for tensor in tensors[:count])))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors, count, fn = ctx.saved_tensors, ctx.count, ctx.fn
        arguments, captured = tensors[:count], tensors[count:]

        def pull(*given: Tensor) -> Sequence[Tensor]:
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                fresh = [isolated(tensor) for tensor in given[:count]]
                outputs = fn(*fresh)
            return gradients(outputs, [*fresh, *captured], given[count:], create_graph=create_graph)

        given = (*arguments, *cotangents)
        if torch.is_grad_enabled():
            return None, None, *_Isolated.apply(pull, len(given), *given, *captured)
        return None, None, *pull(*(tensor.detach() for tensor in given))

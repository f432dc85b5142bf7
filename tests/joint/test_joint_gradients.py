"""Outer gradients of an optimum against central differences of tightly solved optima, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.joint import JointGradient

DOUBLE = torch.float64
N, D, BATCH = 8, 3, 3
TIGHT = eq.Tolerance(relative=1e-12, max_steps=800, patience=200)
KKT = eq.KKTGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=400, patience=100))
NAMES = ("W", "U", "b", "head", "y")  # in f, in f, in f, in the loss, an input of the loss
CONSTRAINTS: dict[str, Any] = {
    "none": None,
    "l2": eq.L2Ball(0.3),
    "linf": eq.LinfBall(0.2),
    "box": eq.Box(-0.1, 0.3),
    "sphere": eq.Sphere(0.5),
    "intersection": eq.Intersection(eq.L2Ball(0.3), eq.Box(-0.1, 0.25)),
    "projection": lambda x: x.clamp(-0.1, 0.1),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def parameters() -> list[Tensor]:
    W = randn(N, N, seed=0)
    W = 0.6 * W / torch.linalg.matrix_norm(W, 2)
    return [W, 0.7 * randn(D, N, seed=1), 0.3 * randn(N, seed=2), 0.4 * randn(N, 4, seed=3), randn(BATCH, 4, seed=4)]


def optimum(
    tensors: list[Tensor],
    constraint: Any = None,
    gradient: JointGradient = KKT,
    scale: float = 1.0,
    tolerance: eq.Tolerance = TIGHT,
) -> Any:
    W, U, b, head, y = tensors
    return eq.optimize_input(
        lambda z, x, y: torch.tanh(z @ W.mT + x @ U + b),
        lambda z, x, y: scale * ((z @ head - y).square().sum(dim=1) / 2 + 0.5 * x.square().sum(dim=1)),
        torch.full((BATCH, D), 0.1, dtype=DOUBLE),
        torch.zeros(BATCH, N, dtype=DOUBLE),
        y,
        constraint=constraint,
        tolerance=tolerance,
        gradient=gradient,
        select="residual",
    )


def outer(opt: eq.Optimum) -> Tensor:
    """A loss of everything in the optimum, other than the inner one."""
    weights = torch.tensor([1.0, 2.0, -1.0], dtype=DOUBLE)
    return (opt.z.sin().sum(dim=1) + (opt.x * weights).sum(dim=1) + opt.mu.square().sum(dim=1)).sum() + opt.cost.sum()


def slopes(loss: Callable[[list[Tensor]], Tensor], tensors: list[Tensor], gradients: Any) -> list[tuple[float, float]]:
    """Return pairs: along a random direction of every tensor, the gradient and the central difference."""
    pairs = []
    for i, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        direction = randn(*tensor.shape, seed=100 + i)
        direction /= direction.norm()
        ahead, behind = (
            float(loss([t.detach() + (by * direction if j == i else 0) for j, t in enumerate(tensors)]))
            for by in (1e-5, -1e-5)
        )
        pairs.append((float((gradient * direction).sum()), (ahead - behind) / 2e-5))
    return pairs


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_kkt_gradient(name: str) -> None:
    constraint = CONSTRAINTS[name]
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    opt = optimum(tensors, constraint)
    assert bool(opt.converged.all()), opt
    gradients = torch.autograd.grad(outer(opt), tensors)
    assert opt.backward is not None
    assert bool(opt.backward.converged.all())
    for given, exact in slopes(lambda moved: outer(optimum(moved, constraint)).detach(), tensors, gradients):
        assert given == pytest.approx(exact, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_kkt_gradient_is_as_exact_as_the_optimum(name: str) -> None:
    """A constraint is active also where x is on its boundary only up to the tolerance."""
    found = []
    for tolerance in (eq.Tolerance(relative=1e-3, max_steps=100), TIGHT):
        tensors = [tensor.requires_grad_() for tensor in parameters()]
        opt = optimum(tensors, CONSTRAINTS[name], tolerance=tolerance)
        assert bool(opt.converged.all())
        found.append(torch.autograd.grad(outer(opt), tensors))
    for loose, tight in zip(*found, strict=True):
        assert float((loose - tight).norm() / tight.norm()) < 0.02


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_envelope_gradient(name: str) -> None:
    """Of the cost, also with active constraints, and of its negative (attacks)."""
    constraint, rule = CONSTRAINTS[name], eq.EnvelopeGradient()
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    opt = optimum(tensors, constraint, rule)
    gradients = torch.autograd.grad(-opt.cost.sum(), tensors)
    for given, exact in slopes(lambda moved: -optimum(moved, constraint).cost.sum().detach(), tensors, gradients):
        assert given == pytest.approx(exact, rel=1e-6, abs=1e-6)
    exact = torch.autograd.grad(-optimum(tensors, constraint).cost.sum(), tensors)
    torch.testing.assert_close(gradients, exact, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_kkt_gradient_does_not_depend_on_units(scale: float) -> None:
    """x* is the same for a scaled loss, so its gradient is too, after about as many steps."""
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    first, second = optimum(tensors, eq.L2Ball(0.3)), optimum(tensors, eq.L2Ball(0.3), scale=scale)
    expected = torch.autograd.grad(first.x.sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad(second.x.sum(), tensors), expected, atol=1e-7, rtol=1e-6)
    assert int(second.backward.steps.max()) <= 2 * int(first.backward.steps.max())


def test_gradcheck() -> None:
    _, U, b, head, y = parameters()

    def function(W: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt = optimum([W, U, b, head, y])
        return opt.x, opt.cost

    W, y = parameters()[0].requires_grad_(), y.requires_grad_()
    assert torch.autograd.gradcheck(function, (W, y), eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_detached_gradient_is_wrong_where_x_moves() -> None:
    """It misses how x* moves: another gradient for a loss of z*, exact where x cannot move."""
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    exact, wrong = (
        torch.autograd.grad(optimum(tensors, gradient=rule).z.sum(), tensors[:3])
        for rule in (KKT, eq.DetachedGradient())
    )
    cosines = [
        float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in zip(exact, wrong, strict=True)
    ]
    assert min(cosines) < 0.9
    pinned = eq.Box(0.1, 0.1)
    exact, same = (
        torch.autograd.grad(optimum(tensors, pinned, rule).z.sum(), tensors[:3])
        for rule in (KKT, eq.DetachedGradient())
    )
    torch.testing.assert_close(same, exact, atol=1e-6, rtol=1e-5)
    opt = optimum(tensors, gradient=eq.DetachedGradient())
    assert not opt.x.requires_grad
    opt.z.sum().backward()
    assert opt.backward is not None


def test_singular_latent_needs_a_proximal_term() -> None:
    """A direction of x that changes nothing makes the system singular: said, and cured by the proximal term."""
    W, U, b, head, y = parameters()
    flat = torch.cat([U, torch.zeros(1, N, dtype=DOUBLE)])

    def gradient(proximal: float) -> tuple[Tensor, Any]:
        leaf = W.clone().requires_grad_()
        rule = eq.KKTGradient(tolerance=eq.Tolerance(relative=1e-9, max_steps=200), proximal=proximal)
        opt = eq.optimize_input(
            lambda z, x, y: torch.tanh(z @ leaf.mT + x @ flat + b),
            lambda z, x, y: (z @ head - y).square().sum(dim=1) / 2 + 0.5 * x[:, :D].square().sum(dim=1),
            torch.zeros(BATCH, D + 1, dtype=DOUBLE),
            torch.zeros(BATCH, N, dtype=DOUBLE),
            y,
            tolerance=TIGHT,
            gradient=rule,
            on_failure="ignore",
        )
        opt.x.sum().backward()
        return leaf.grad, opt

    _, opt = gradient(0.0)
    assert not bool(opt.backward.converged.any())  # x[3] is arbitrary: its gradient does not exist
    found, opt = gradient(1e-6)
    assert bool(opt.backward.converged.all())
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    exact = torch.autograd.grad(optimum(tensors).x.sum(), tensors[0])[0]
    torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)


def test_envelope_refuses_other_gradients() -> None:
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    for name in ("x", "z", "mu"):
        opt = optimum(tensors, gradient=eq.EnvelopeGradient())
        with pytest.raises(RuntimeError, match=r"gradient of opt.cost only.*KKTGradient"):
            getattr(opt, name).sum().backward()
    opt = optimum(tensors, gradient=eq.EnvelopeGradient())
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(opt.cost.sum(), tensors[0], create_graph=True)
    opt = optimum(tensors)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(opt.x.sum(), tensors[0], create_graph=True)


def test_a_projection_that_depends_on_a_learned_tensor() -> None:
    """Only KKTGradient differentiates it; no other rule may drop its gradient silently."""
    bound = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
    cost = lambda bound, rule: optimum(parameters(), lambda x: torch.minimum(x, bound), rule).cost.sum()
    found = torch.autograd.grad(cost(bound, KKT), bound)
    difference = [float(cost(bound.detach() + by, KKT)) for by in (1e-5, -1e-5)]
    assert float(found[0]) == pytest.approx((difference[0] - difference[1]) / 2e-5, rel=1e-6)
    for rule in (eq.EnvelopeGradient(), eq.DetachedGradient()):
        with pytest.raises(ValueError, match=r"depends on a tensor that requires a gradient.*KKTGradient\(\)"):
            cost(bound, rule)
        assert not cost(bound.detach(), rule).requires_grad
        with torch.no_grad():
            cost(bound, rule)


def test_no_gradient_is_attached_when_none_is_needed() -> None:
    opt = optimum(parameters())
    assert not any(tensor.requires_grad for tensor in (opt.x, opt.z, opt.cost))
    with torch.no_grad():
        opt = optimum([tensor.requires_grad_() for tensor in parameters()])
    assert not opt.cost.requires_grad


def test_failed_samples_do_not_spoil_gradients() -> None:
    """A sample whose f is NaN has no gradient, and the others have theirs."""
    tensors = parameters()
    y = tensors[4].clone()
    y[1] = torch.nan
    leaf = tensors[0].clone().requires_grad_()
    for rule in (eq.EnvelopeGradient(), KKT, eq.DetachedGradient()):
        opt = eq.optimize_input(
            lambda z, x, y: torch.tanh(z @ leaf.mT + x @ tensors[1] + y[:, :1]),
            lambda z, x, y: (z @ tensors[3] - y).square().sum(dim=1) / 2 + 0.5 * x.square().sum(dim=1),
            torch.zeros(BATCH, D, dtype=DOUBLE),
            torch.zeros(BATCH, N, dtype=DOUBLE),
            y,
            tolerance=eq.Tolerance(relative=1e-8, max_steps=200),
            gradient=rule,
            on_failure="ignore",
        )
        assert opt.result.tolist() == [eq.Result.CONVERGED, eq.Result.NONFINITE, eq.Result.CONVERGED]
        assert bool(torch.isfinite(opt.x).all() & torch.isfinite(opt.z).all())
        (gradient,) = torch.autograd.grad(opt.cost[[0, 2]].sum(), leaf)
        assert bool(torch.isfinite(gradient).all()), rule


def test_backward_failure_is_reported() -> None:
    tensors = [tensor.requires_grad_() for tensor in parameters()]
    opt = optimum(tensors, gradient=eq.KKTGradient(tolerance=eq.Tolerance(relative=1e-12, max_steps=2)))
    with pytest.warns(eq.ConvergenceWarning, match=r"backward solve failed.*KKTGradient\(tolerance=...\)"):
        opt.x.sum().backward()
    assert not bool(opt.backward.converged.any())

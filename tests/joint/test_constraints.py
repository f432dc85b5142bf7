"""Constraints: always satisfied in the arithmetic of x, nearest in float64, and differentiable."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.joint.constraints import Box, L2Ball, LinfBall, Projection, Sphere, as_constraint
from equipoise.joint.intersection import Intersection
from equipoise.problem.layout import Layout, scaled_row_norms

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SAMPLES = 20  # per example


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def in_ball(x, center, radius):
    """Check ||x - center|| <= radius in the dtype of x, in every way that its range allows."""
    offset = (x - center).flatten(1)
    found = [offset.norm(dim=1), torch.linalg.vector_norm(offset, dim=1), offset.T.contiguous().T.norm(dim=1)]
    squares = offset.square()
    limits = torch.finfo(x.dtype)
    exact = (squares.amax(dim=1) > limits.tiny / limits.eps * x.shape[1]) & squares.sum(dim=1).isfinite()
    if x.dtype != torch.float16:  # its squares underflow
        one_by_one = squares.flip(1).to(torch.promote_types(x.dtype, torch.float32)).cumsum(dim=1)[:, -1]
        found += [squares.sum(dim=1).sqrt(), one_by_one.sqrt().to(x.dtype)]
    ok = torch.stack([norm <= radius for norm in found]).all(dim=0)
    scaled = scaled_row_norms(offset.double()) <= torch.as_tensor(radius, dtype=torch.float64)
    return bool(torch.where(exact, ok, scaled).all())


def in_linf_ball(x, center, radius):
    radius = radius[:, None] if isinstance(radius, torch.Tensor) else radius
    return bool(((x - center).abs() <= radius).all())


def in_box(x, low, high):
    return bool(((x >= low) & (x <= high)).all())


def on_sphere(x, center, radius):
    offset = x.double() - center.double()
    exact = torch.tensor(
        [math.sqrt(math.fsum(entry**2 for entry in row)) for row in offset.tolist()], dtype=torch.float64
    )
    sizes = torch.as_tensor(radius, dtype=torch.float64)
    coarse = torch.finfo(x.dtype).eps * center.double().norm(dim=1)  # what rounding x itself may move
    return bool(((exact - sizes).abs() <= 4 * torch.finfo(x.dtype).eps * sizes + coarse).all())


@st.composite
def problems(draw):
    """Draw a batch of points, a center, a radius and bounds of one dtype and scale."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    scale = 10.0 ** draw(st.integers(-2, 2) if dtype == torch.float16 else st.integers(-30, 30))
    d = draw(st.sampled_from([1, 2, 3, 7, 32, 500]))
    center = (randn(draw(st.sampled_from([1, SAMPLES])), d) * scale * draw(st.sampled_from([0.0, 1.0, 20.0]))).to(dtype)
    radius = scale * (0.1 + torch.rand(SAMPLES, dtype=torch.float64))
    radius = radius.to(dtype) if draw(st.booleans()) else radius[0].item()
    spread = draw(st.sampled_from([0.01, 1.0, 100.0]))
    point = randn(SAMPLES, d) if draw(st.booleans()) else torch.ones(SAMPLES, d)  # equal entries: biased sums
    return (point * scale * spread + center.double()).to(dtype), center, radius


def projected(constraint, x):
    y = constraint(x)
    assert y.dtype == x.dtype
    assert y.isfinite().all()
    assert isinstance(constraint, Sphere) or torch.equal(constraint(y), y)
    return y


@settings(max_examples=140)
@given(problems())
def test_l2_ball_is_never_left(problem):
    x, center, radius = problem
    assert in_ball(projected(L2Ball(radius, center), x), center, radius)


@settings(max_examples=110)
@given(problems())
def test_linf_ball_is_never_left(problem):
    x, center, radius = problem
    y = projected(LinfBall(radius, center), x)
    assert in_linf_ball(y, center, radius)
    inside = (x - center).abs() <= (radius[:, None] if isinstance(radius, torch.Tensor) else radius)
    assert torch.equal(y[inside], x[inside])


@settings(max_examples=110)
@given(problems(), st.booleans())
def test_box_is_never_left(problem, numbers):
    x, center, radius = problem
    size = radius.mean().item() if isinstance(radius, torch.Tensor) else radius
    low, high = (-size / 3, size) if numbers else (center - size, center + size)
    y = projected(Box(low, high), x)
    assert in_box(y, low, high)
    inside = (x >= low) & (x <= high)
    assert torch.equal(y[inside], x[inside])
    if numbers:  # also compared in float64
        moved = y.double()[~inside]
        assert in_box(moved, low, high)


@settings(max_examples=60)
@given(problems())
def test_sphere_to_rounding(problem):
    x, center, radius = problem
    x[0] = center[0]
    assert on_sphere(projected(Sphere(radius, center), x), center, radius)


@settings(max_examples=90)
@given(problems(), st.booleans())
def test_intersection_never_leaves_a_part(problem, pinned):
    x, center, radius = problem
    size = radius if isinstance(radius, float) else radius.mean().item()
    low, high = center - size / 4, center + (0 if pinned else size / 2)
    y = projected(Intersection(L2Ball(radius, center), Box(low, high), LinfBall(radius, center)), x)
    assert in_ball(y, center, radius)
    assert in_box(y, low, high)
    assert in_linf_ball(y, center, radius)


@pytest.mark.parametrize("dtype", DTYPES)
def test_intersection_of_balls(dtype):
    for scale in (0.1, 0.5):
        x = (randn(SAMPLES, 12) * scale).to(dtype)
        center, radius = (randn(1, 12) * 0.3).to(dtype), torch.linspace(0.9, 1.5, SAMPLES).to(dtype)
        y = projected(Intersection(L2Ball(radius), L2Ball(1.2, center), lambda x: x.clamp(min=-0.25)), x)
        assert in_ball(y, torch.zeros_like(center), radius)
        assert in_ball(y, center, 1.2)
        assert (y >= -0.25 - 1e-5).all()


def feasible_points(constraint, x, count=8):
    return [constraint(x + scale * torch.randn_like(x)) for scale in torch.logspace(-3, 1, count).tolist()]


def convex_constraints():
    center, low = randn(1, 9) / 3, -torch.rand(16, 9, dtype=torch.float64)
    radius = 0.5 + torch.rand(16, dtype=torch.float64)
    yield L2Ball(1.0), 1e-12
    yield L2Ball(radius, center), 1e-12
    yield LinfBall(radius, center), 1e-12
    yield Box(low, 0.3), 1e-12
    yield Box(0.0, math.inf), 1e-12
    yield Intersection(L2Ball(1.0), Box(low, 0.3)), 1e-12
    beside = Box(-9.0, center.clamp(min=0) - 0.01)  # without the center
    yield Intersection(L2Ball(1.0, center), Box(center - 0.1, center + 0.5), beside), 1e-12
    yield Intersection(L2Ball(radius + 0.5), L2Ball(1.0, center)), 1e-5
    yield Intersection(L2Ball(1.0), lambda x: x.relu()), 1e-5
    yield Projection(torch.relu), 1e-12


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_nearest_point(index, scale):
    constraint, accuracy = list(convex_constraints())[index]
    x = scale * randn(16, 9)
    y = constraint(x)
    for other in feasible_points(constraint, y):  # the angle to every allowed point is at least a right one
        assert (((x - y) * (other - y)).sum(dim=1) <= accuracy * (1 + x.norm(dim=1)) * (other - y).norm(dim=1)).all()


def test_closed_forms():
    x, center = 2 * randn(30, 6), randn(1, 6)
    offset = x - center
    ball = center + offset * (1.5 / offset.norm(dim=1, keepdim=True)).clamp(max=1)
    assert (L2Ball(1.5, center)(x) - ball).abs().max() < 1e-13
    assert (Sphere(1.5, center)(x) - (center + 1.5 * offset / offset.norm(dim=1, keepdim=True))).abs().max() < 1e-13
    assert (LinfBall(0.5, center)(x) - torch.clamp(x, center - 0.5, center + 0.5)).abs().max() < 1e-15
    assert torch.equal(Box(-0.25, 0.5)(x), x.clamp(-0.25, 0.5))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e8, 1e30])
def test_ball_and_box_from_afar(scale):
    x = randn(16, 40) * scale
    low, high = torch.zeros(16, 1, dtype=torch.float64), x.norm(dim=1, keepdim=True)
    for _ in range(300):  # bisection: the nearest point is clamp(s x) with the largest s that the ball allows
        middle = (low + high) / 2
        beyond = (middle * x / x.norm(dim=1, keepdim=True)).clamp(-0.1, 0.3).norm(dim=1, keepdim=True) > 1
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    truth = (low * x / x.norm(dim=1, keepdim=True)).clamp(-0.1, 0.3)
    assert (Intersection(L2Ball(1.0), Box(-0.1, 0.3))(x) - truth).abs().max() < 1e-12


def test_samples_do_not_depend_on_each_other():
    x, radius = randn(8, 10), torch.linspace(0.5, 2, 8, dtype=torch.float64)
    center = randn(1, 10) / 10
    whole = Intersection(L2Ball(radius), L2Ball(1.0, center), Box(-0.5, 0.5))(x)
    for i in (0, 3, 7):
        alone = Intersection(L2Ball(radius[i].item()), L2Ball(1.0, center), Box(-0.5, 0.5))(x[i : i + 1])
        assert (alone - whole[i : i + 1]).abs().max() < 1e-14


def test_take():
    x, center, radius = randn(6, 4), randn(6, 4), 0.1 + torch.rand(6, dtype=torch.float64)
    rows = torch.tensor([4, 1])
    shift = randn(6, 4)
    for constraint in (
        L2Ball(radius, center),
        Sphere(radius, center[:1]),
        LinfBall(radius, center),
        Box(center - 0.1, center + 0.1),
        Intersection(L2Ball(radius, center), Box(center - 0.1, 9.0), LinfBall(0.3, center)),
        Projection(lambda x: (x + shift).relu() - shift),  # captures tensors of the whole batch
    ):
        fitted = constraint.fitted(Layout(x), 6)
        assert torch.equal(fitted.take(rows).project(x[rows]), fitted.project(x)[rows])
        assert torch.equal(fitted.take(rows).take(torch.tensor([1])).project(x[1:2]), fitted.project(x)[1:2])


def test_nested_values_and_mixed_dtypes():
    x = (3 * torch.randn(5, 2, 3), [(3 * torch.randn(5, 4)).bfloat16()])
    for constraint in (L2Ball(1.0), Intersection(L2Ball(1.0), Box(-0.1, 0.3))):
        y = constraint(x)
        assert (y[0].dtype, y[1][0].dtype) == (torch.float32, torch.bfloat16)
        rows = torch.cat([y[0].flatten(1), y[1][0].float()], dim=1)
        assert (rows.norm(dim=1) <= 1).all()
    y = Box((torch.zeros(1, 2, 3), [torch.full((5, 4), -0.1)]), 0.1)(x)
    assert in_box(y[0].double(), 0, 0.1)
    assert in_box(y[1][0], -0.1, 0.1)


def test_channels_last_and_complex():
    x = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    center = torch.randn(3, 4, 5, 5)
    y = LinfBall(0.1, center)(x)
    assert ((y - center).abs() <= 0.1).all()
    assert (L2Ball(0.5)(torch.randn(4, 3, dtype=torch.complex64)).abs().square().sum(dim=1).sqrt() <= 0.5).all()
    with pytest.raises(TypeError, match="complex"):
        Box(0.0, 1.0)(torch.randn(4, 3, dtype=torch.complex64))


@pytest.mark.parametrize(
    "constraint", [L2Ball(1.0), Sphere(1.0), LinfBall(1.0), Box(-1.0, 1.0), Intersection(L2Ball(1.0), Box(-1.0, 1.0))]
)
def test_non_finite_rows(constraint):
    x = torch.randn(4, 3)
    x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
    y = constraint(x)
    assert y[0].isnan().any()
    for row in y[1:3]:  # a bound, or NaN everywhere
        assert (row.abs() <= 1).all() or row.isnan().all()
    assert torch.equal(y[3:], constraint(x[3:]))


def test_pinned_entries_and_bounds_that_x_cannot_hold():
    x = torch.randn(4, 3).bfloat16()
    y = Box(0.1, 0.1)(x)  # no bfloat16 number is 0.1
    assert ((y >= 0.1) & (y <= 0.1)).all()
    low, high = torch.tensor([[0.0, -1, -1]]), torch.tensor([[0.0, 1, 1]])
    y = Intersection(L2Ball(0.5), Box(low, high))(5 * torch.randn(4, 3))
    assert (y[:, 0] == 0).all()
    assert in_ball(y, torch.zeros(1, 3), 0.5)


def test_reach():
    x = torch.randn(3, 4)
    layout, radius = Layout(x), torch.tensor([1.0, 2.0, 3.0])
    assert L2Ball(2.0).fitted(layout, 3).reach() == 4
    assert L2Ball(radius).fitted(layout, 3).reach().tolist() == [2, 4, 6]
    assert LinfBall(0.5).fitted(layout, 3).reach().item() == 2
    assert Box(0.0, math.inf).fitted(layout, 3).reach().item() == math.inf
    assert Projection(torch.relu).fitted(layout, 3).reach() == math.inf
    both = Intersection(L2Ball(radius), LinfBall(1.0), torch.relu).fitted(layout, 3).reach()
    assert both.tolist() == [2, 4, 4]


def quadratic(d=5, batch=6):
    root = randn(batch, d, d) / 3
    return root @ root.mT + 0.5 * torch.eye(d, dtype=torch.float64), randn(batch, d), randn(batch, d)


def minimiser(constraint, hessian, target, x):
    """Minimise (x - t) H (x - t) / 2 by projected gradient steps."""
    fitted = constraint.fitted(Layout(x), len(x))
    step = 1 / torch.linalg.matrix_norm(hessian, 2)[:, None]
    for _ in range(300):
        new = fitted.project(x - step * (hessian @ (x - target)[..., None])[..., 0])
        if torch.equal(new, x):
            break
        x = new
    return x, (hessian @ (x - target)[..., None])[..., 0], fitted


@pytest.mark.parametrize(
    "constraint", [L2Ball(0.7), L2Ball(50.0), LinfBall(0.4), Box(-0.2, 0.6), Sphere(0.7)], ids=lambda c: repr(c)
)
def test_tangent_is_the_derivative_of_the_optimum(constraint):
    hessian, target, direction = quadratic()
    x, gradient, fitted = minimiser(constraint, hessian, target, torch.randn_like(target))
    ahead, _, _ = minimiser(constraint, hessian, target + 1e-5 * direction, x)
    behind, _, _ = minimiser(constraint, hessian, target - 1e-5 * direction, x)
    tangent = fitted.tangent(x, gradient)
    assert tangent is not None
    d = x.shape[1]
    free = torch.stack([tangent.free(torch.eye(d, dtype=x.dtype)[i].expand_as(x)) for i in range(d)], dim=2)
    assert (free - free.mT).abs().max() < 1e-15
    assert (free @ free - free).abs().max() < 1e-14
    inner = hessian + tangent.curvature[:, None, None] * torch.eye(d, dtype=x.dtype)
    system = free @ inner @ free + torch.eye(d, dtype=x.dtype) - free
    derivative = torch.linalg.solve(system, free @ hessian @ direction[..., None])[..., 0]
    assert (derivative - (ahead - behind) / 2e-5).abs().max() < 1e-5 * derivative.abs().max()


def test_tangent_inactive_constraints():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.0]], dtype=torch.float64)
    x = L2Ball(1.0)(x)
    gradient = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    tangent = L2Ball(1.0).fitted(Layout(x), 3).tangent(x, gradient)
    assert tangent.curvature.tolist() == [2, 0, 0]  # pushed outward, pushed inward, not at the boundary
    assert tangent.free(torch.ones_like(x)).tolist() == [[0, 1], [1, 1], [1, 1]]
    assert L2Ball(1.0).fitted(Layout(x), 3).tangent(x, 0 * gradient).curvature.tolist() == [0, 0, 0]
    box = Box(-1.0, x).fitted(Layout(x), 3).tangent(x, gradient)
    assert box.free(torch.ones_like(x)).tolist() == [[0, 1], [1, 1], [0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [3, 500])
def test_projected_points_are_active(dtype, d):
    x = (5 * torch.randn(10, d)).to(dtype)
    layout = Layout(x)
    for constraint in (L2Ball(1.0), LinfBall(0.1), Box(-0.1, 0.2)):
        fitted = constraint.fitted(layout, 10)
        rows = fitted.project(layout.pack(x))
        free = fitted.tangent(rows, -layout.pack(x)).free(layout.pack(x))
        assert (free.norm(dim=1) < layout.pack(x).norm(dim=1)).all()


def test_autograd():
    x, center = randn(4, 4).requires_grad_(), randn(1, 4) / 3
    for constraint in (
        L2Ball(0.6),
        Sphere(0.6, center),
        Box(-0.3, 0.4),
        Projection(lambda x: x.clamp(min=-0.1)),
        Intersection(L2Ball(0.8), Box(-0.3, 0.4)),
        Intersection(L2Ball(0.8, center), Box(-0.3, 0.4), LinfBall(0.35)),
    ):
        assert torch.autograd.gradcheck(constraint, (x,))
        assert torch.autograd.gradgradcheck(constraint, (x,))
    several = Intersection(L2Ball(0.8), L2Ball(0.9, center), lambda x: x.clamp(min=-0.3))
    rows, direction = 0.5 * x.detach(), torch.randn_like(x)
    assert torch.autograd.gradcheck(several, (rows[:2].clone().requires_grad_(),), atol=1e-4)
    fitted = several.fitted(Layout(rows), 4)
    _, forward = torch.func.jvp(fitted.project, (rows,), (direction,))
    difference = fitted.project(rows + 1e-5 * direction) - fitted.project(rows - 1e-5 * direction)
    assert (forward - difference / 2e-5).abs().max() < 1e-5


def test_errors():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="L2Ball.radius is -1; it must be a number above 0"):
        L2Ball(-1)
    with pytest.raises(TypeError, match="Box.low is 'a'"):
        Box("a", 1.0)
    with pytest.raises(TypeError, match="no option 'centre'; did you mean 'center'"):
        L2Ball(1.0, centre=x)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="lies between -1 and 2; it must be positive"):
        LinfBall(torch.tensor([-1.0, 2.0]))
    with pytest.raises(ValueError, match="L2Ball.radius has shape \\(2,\\); for this x it must be \\(4,\\)"):
        L2Ball(torch.ones(2))(x)
    with pytest.raises(ValueError, match="L2Ball.center has shape \\(3,\\); for this x it must have \\(4, 3\\)"):
        L2Ball(1.0, torch.zeros(3))(x)
    with pytest.raises(TypeError, match="center is 0.5"):
        L2Ball(1.0, 0.5)
    with pytest.raises(ValueError, match="nested as \\(\\*, \\*\\) and x as \\*"):
        Box((x, x), 1.0)(x)
    with pytest.raises(ValueError, match="low is above Box.high"):
        Box(1.0, 0.0)(x)
    for low, high in ((math.inf, math.inf), (-math.inf, -math.inf)):
        with pytest.raises(ValueError, match="Box.low is inf or Box.high is -inf"):
            Box(low, high)(x)
    for ball in (L2Ball, LinfBall, Sphere):
        with pytest.raises(ValueError, match="center is infinite"):
            ball(1.0, torch.tensor([[0.0, math.inf, 0.0]]))(x)
    with pytest.raises(ValueError, match="center is infinite in some entry, in the dtype of x"):
        L2Ball(1.0, torch.full((1, 3), 1e6))(x.half())
    with pytest.raises(ValueError, match="contains NaN"):
        Box(x * math.nan, 1.0)(x)
    with pytest.raises(ValueError, match="requires a gradient"):
        L2Ball(1.0, x.clone().requires_grad_())(x)
    with pytest.raises(ValueError, match="Sphere, which is not convex"):
        Intersection(L2Ball(1.0), Sphere(1.0))
    with pytest.raises(ValueError, match="no constraints"):
        Intersection()
    with pytest.raises(ValueError, match="L2Ball.*seems to be empty: .* 4 samples"):
        Intersection(L2Ball(1.0), L2Ball(1.0, 3 * torch.ones(1, 3)))(x)
    with pytest.raises(ValueError, match="seems to be empty"):
        Intersection(L2Ball(1.0), Box(1.0, 2.0))(x)
    with pytest.raises(ValueError, match="shaped like x"):
        Projection(lambda x: x[:1])(x)
    with pytest.raises(TypeError, match="without a graph"):
        Projection(lambda x: x.detach())(x.clone().requires_grad_())
    with pytest.raises(TypeError, match="constraint is 3"):
        as_constraint(3)
    with pytest.raises(TypeError, match="constraint is <class"):
        as_constraint(L2Ball)
    assert as_constraint(None) is None
    assert isinstance(as_constraint(torch.relu), Projection)
    assert "L2Ball(radius=1.0)" in repr(Intersection(L2Ball(1.0), torch.relu))

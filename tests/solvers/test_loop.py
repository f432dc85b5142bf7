"""The one loop: who stops when, what comes back, and what is counted."""

import itertools
import math
import warnings

import pytest
import torch

import equipoise as eq
from equipoise import Result

SOLVERS = {
    "picard": eq.Picard(),
    "anderson": eq.Anderson(),
    "anderson-type-1": eq.Anderson(kind=1),
    "broyden": eq.Broyden(),
    "broyden-line-search": eq.Broyden(line_search=3),
    "newton": eq.NewtonKrylov(),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def linear(z, rate):
    """z* = 1 / (1 - rate); Picard from 0 has the residual rate^(k-1) (1 - rate) / (1 - rate^k) at step k."""
    return rate * z + 1


def rates(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def picard(f=linear, z0=None, *inputs, **options):
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(relative=1e-6, max_steps=500), **options}
    z0 = torch.zeros_like(inputs[0]) if z0 is None else z0
    return eq.fixed_point(f, z0, *inputs, **options)


def picard_steps(rate, relative):
    """By the closed form: the first step whose residual is within the tolerance."""
    return next(k for k in itertools.count(1) if rate ** (k - 1) * (1 - rate) <= relative * (1 - rate**k))


# Stopping


@pytest.mark.parametrize("compact", [True, False])
def test_each_sample_stops_at_its_own_step(compact):
    each = [0.1, 0.5, 0.9, 0.3]
    sol = picard(linear, None, rates(*each), compact=compact)
    assert sol.stats.steps.tolist() == [picard_steps(rate, 1e-6) for rate in each]
    assert sol.converged.all()
    assert (sol.stats.residual <= 1e-6).all()


@pytest.mark.parametrize("compact", [True, False])
def test_a_finished_sample_keeps_its_value(compact):
    """Its value is that of a run that stops there, to the bit, though its batch-mate goes on for 100 steps."""
    sol = picard(linear, None, rates(0.5, 0.95), compact=compact)
    z = 0.0
    for _ in range(picard_steps(0.5, 1e-6) - 1):
        z = 0.5 * z + 1
    assert sol.value[0].item() == z


@every_solver
def test_gathering_changes_no_answer(solver):
    weight = torch.randn(6, 6, dtype=torch.float64)
    weight = weight / torch.linalg.matrix_norm(weight, 2)
    gain = torch.linspace(0.05, 0.95, 16, dtype=torch.float64)[:, None]
    x = 0.1 * torch.randn(16, 6, dtype=torch.float64)
    f = lambda z, gain, x: torch.tanh(gain * z @ weight.mT) + x
    on, off = (picard(f, torch.zeros_like(x), gain, x, solver=solver, compact=compact) for compact in (True, False))
    torch.testing.assert_close(on.value, off.value, rtol=1e-12, atol=1e-15)
    assert torch.equal(on.stats.steps, off.stats.steps)
    assert torch.equal(on.result, off.result)
    assert on.stats.evaluations <= off.stats.evaluations
    assert on.stats.rows <= off.stats.rows == 16 * off.stats.evaluations
    assert on.stats.rows < off.stats.rows or isinstance(solver, eq.NewtonKrylov)  # whose samples take equally many


def test_absolute_tolerance_alone():
    sol = picard(linear, None, rates(0.5), tolerance=eq.Tolerance(relative=0.0, absolute=1e-3))
    assert sol.stats.steps.tolist() == [11]  # the gap at step k is 2^-(k-1)
    assert sol.converged.all()


def test_absolute_and_relative_tolerances_add():
    """||f(z) - z|| <= absolute + relative ||f(z)||; the gap at step k is 2^-(k-1), the image 2 - 2^-(k-1)."""
    tolerance = eq.Tolerance(relative=0.1, absolute=0.1)
    expected = next(k for k in itertools.count(1) if 2.0 ** -(k - 1) <= 0.1 + 0.1 * (2 - 2.0 ** -(k - 1)))
    sol = picard(linear, None, rates(0.5), tolerance=tolerance)
    assert sol.stats.steps.tolist() == [expected]


@pytest.mark.parametrize("every", [2, 3, 7])
def test_check_every_looks_at_multiples_only(every):
    each = [0.1, 0.5, 0.9]
    sol = picard(linear, None, rates(*each), check_every=every, trace=True)
    due = [picard_steps(rate, 1e-6) for rate in each]
    assert sol.stats.steps.tolist() == [every * math.ceil(step / every) for step in due]
    assert sol.converged.all()
    last = max(sol.stats.steps.tolist())
    assert sol.stats.evaluations == last + 1  # in the end all samples are measured together
    assert sol.stats.trace.shape == (1 + last // every, 3)  # the first evaluation is always looked at


def test_check_every_still_stops_at_max_steps():
    tolerance = eq.Tolerance(relative=1e-12, max_steps=10)
    sol = picard(linear, None, rates(0.99), check_every=4, tolerance=tolerance, on_failure="ignore")
    assert sol.stats.steps.tolist() == [10]
    assert sol.stats.evaluations == 10


def test_max_steps():
    tolerance = eq.Tolerance(relative=1e-6, max_steps=20)
    sol = picard(linear, None, rates(0.1, 0.99), tolerance=tolerance, on_failure="ignore")
    assert sol.result.tolist() == [Result.CONVERGED, Result.MAX_STEPS]
    assert sol.stats.steps.tolist() == [picard_steps(0.1, 1e-6), 20]
    assert sol.converged.tolist() == [True, False]


def test_one_step_returns_the_start():
    z0 = torch.ones(2, 1, dtype=torch.float64)
    sol = picard(linear, z0, rates(0.5, 0.2), tolerance=eq.Tolerance(max_steps=1), on_failure="ignore")
    assert torch.equal(sol.value, z0)
    assert sol.result.tolist() == [Result.MAX_STEPS] * 2
    assert sol.stats.evaluations == 1
    torch.testing.assert_close(sol.stats.residual, torch.tensor([0.5 / 1.5, 0.2 / 1.2], dtype=torch.float64))


@every_solver
def test_tolerance_below_rounding_is_met_as_far_as_the_numbers_go(solver):
    rate = torch.tensor([[0.5, -0.3, 0.7]])
    tolerance = eq.Tolerance(relative=1e-30, max_steps=400, patience=10)
    x = torch.tensor([[1.0, 1 / 3, 0.1]])
    sol = picard(lambda z, x: torch.cos(rate * z) + x, None, x, solver=solver, tolerance=tolerance, on_failure="ignore")
    assert sol.result.tolist() == [Result.CONVERGED]
    assert sol.stats.rounded.item() == (sol.stats.residual.item() > 0)  # by luck the gap is 0 to the bit
    assert sol.stats.residual.item() <= 2 * torch.finfo(torch.float32).eps
    assert sol.stats.steps.item() < 100
    assert ("to rounding" in str(sol)) == bool(sol.stats.rounded.item())


def test_tolerance_of_zero_stalls():
    noise = torch.randn(40, 5)
    calls = itertools.count()
    f = lambda z, x: 0.5 * z + x + 1e-3 * noise[next(calls) % 40]  # a floor below which no residual falls
    tolerance = eq.Tolerance(relative=0.0, max_steps=400, patience=12)
    sol = picard(f, None, torch.ones(3, 5), tolerance=tolerance, on_failure="ignore")
    assert sol.result.tolist() == [Result.STALLED] * 3
    assert sol.stats.steps.max() < 100


def test_a_cycle_stalls_after_its_patience():
    """Rotation by a right angle about the origin: the residual stays where it is."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    z0 = torch.tensor([[1.0, 0.0]])
    tolerance = eq.Tolerance(max_steps=200, patience=15)
    sol = eq.fixed_point(lambda z: z @ turn.mT, z0, solver=eq.Picard(), tolerance=tolerance, on_failure="ignore")
    assert sol.result.tolist() == [Result.STALLED]
    assert sol.stats.steps.tolist() == [16]  # 15 steps without progress after the first
    torch.testing.assert_close(sol.stats.residual, torch.tensor([2.0]).sqrt())


def test_no_patience_never_stalls():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    tolerance = eq.Tolerance(max_steps=80, patience=None)
    sol = eq.fixed_point(
        lambda z: z @ turn.mT, torch.ones(1, 2), solver=eq.Picard(), tolerance=tolerance, on_failure="ignore"
    )
    assert sol.result.tolist() == [Result.MAX_STEPS]
    assert sol.stats.steps.tolist() == [80]


def test_slow_but_steady_progress_is_no_stall():
    """The residual falls by 0.5% per step: 1% within two steps."""
    tolerance = eq.Tolerance(relative=1e-3, max_steps=3000, patience=5)
    sol = picard(linear, None, rates(0.995), tolerance=tolerance)
    assert sol.converged.all()


# Values that are not finite


def test_nan_at_once_returns_the_start_and_says_so():
    z0 = torch.full((2, 3), 2.0)
    sol = eq.fixed_point(lambda z, x: z * x, z0, torch.full((2, 3), torch.nan), on_failure="ignore")
    assert sol.result.tolist() == [Result.NONFINITE] * 2
    assert torch.equal(sol.value, z0)
    assert sol.stats.steps.tolist() == [1, 1]
    assert torch.isinf(sol.stats.residual).all()


@every_solver
def test_nan_later_returns_the_best_finite_iterate(solver):
    """The third call on returns NaN for sample 0; sample 1 goes its way."""
    calls = itertools.count(1)

    def f(z, x):
        image = torch.tanh(0.9 * z) + x
        return torch.where((x > 0) & torch.tensor(next(calls) > 2), torch.nan, image)

    x = torch.tensor([[0.5], [-0.5]], dtype=torch.float64)
    seen = []
    sol = picard(
        f,
        None,
        x,
        solver=solver,
        on_failure="ignore",
        compact=False,
        callback=lambda p: seen.append((p.residual[0].item(), p.value[0].item())),
    )
    assert sol.result.tolist() == [Result.NONFINITE, Result.CONVERGED]
    finite = [(r, z) for r, z in seen if math.isfinite(r)]
    assert (sol.stats.residual[0].item(), sol.value[0].item()) == min(finite)
    assert torch.isfinite(sol.value).all()


def test_divergence_returns_the_best_iterate_not_the_last():
    sol = picard(linear, None, rates(-1.5), on_failure="ignore", tolerance=eq.Tolerance(max_steps=25))
    assert sol.result.tolist() == [Result.MAX_STEPS]
    assert sol.value.abs().max() <= 1  # the iterates grow like 1.5^k
    again = (linear(sol.value, rates(-1.5)) - sol.value).abs() / linear(sol.value, rates(-1.5)).abs()
    torch.testing.assert_close(sol.stats.residual, again[:, 0])


@every_solver
def test_overflow_is_nonfinite_and_finite_in_value(solver):
    x = torch.tensor([[3.0], [0.0]])
    f = lambda z, x: torch.where(x > 0, torch.exp(z * z) + x, 0.5 * z + 1)
    sol = picard(f, None, x, solver=solver, on_failure="ignore")
    assert sol.result.tolist()[1] == Result.CONVERGED
    assert sol.result.tolist()[0] != Result.CONVERGED
    assert torch.isfinite(sol.value).all()
    torch.testing.assert_close(sol.value[1], torch.tensor([2.0]), rtol=1e-5, atol=0)


def test_nan_in_the_start_gives_a_finite_value_and_says_so():
    z0 = torch.tensor([[torch.nan, 1.0], [0.0, 0.0], [torch.inf, 1.0]])
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, z0, torch.ones(3, 2), on_failure="ignore")
    assert sol.result.tolist() == [Result.NONFINITE, Result.CONVERGED, Result.NONFINITE]
    assert torch.isfinite(sol.value).all()
    torch.testing.assert_close(sol.value[1], torch.full((2,), 2.0), rtol=1e-3, atol=0)


def test_nan_in_the_start_that_f_forgets():
    """f does not look at z: its image is finite, yet the residual at z0 is not."""
    z0 = torch.full((1, 2), torch.nan)
    sol = eq.fixed_point(lambda z, x: 1.0 * x, z0, torch.ones(1, 2), on_failure="ignore")
    assert sol.result.tolist() == [Result.NONFINITE]
    assert torch.isfinite(sol.value).all()


# Batches and starts


@every_solver
@pytest.mark.parametrize("inputs", [(), (torch.zeros(0, 3),)], ids=["closure", "inputs"])
def test_empty_batch(solver, inputs):
    weight = torch.tensor(0.5, requires_grad=True)
    sol = eq.fixed_point(lambda z, *x: weight * z + 1, torch.zeros(0, 3), *inputs, solver=solver, trace=True)
    assert sol.value.shape == (0, 3)
    assert sol.result.shape == sol.stats.steps.shape == sol.stats.residual.shape == (0,)
    assert sol.stats.trace.shape[1] == 0
    assert "empty" in str(sol)
    sol.value.sum().backward()
    assert weight.grad.item() == 0


@every_solver
def test_samples_of_size_zero(solver):
    sol = eq.fixed_point(lambda z, x: 0.5 * z, torch.zeros(3, 0), torch.zeros(3, 0), solver=solver)
    assert sol.value.shape == (3, 0)
    assert sol.converged.all()
    assert sol.stats.residual.tolist() == [0, 0, 0]


def test_one_dimensional_state():
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, torch.zeros(3), torch.arange(3.0))
    torch.testing.assert_close(sol.value, 2 * torch.arange(3.0), rtol=1e-3, atol=1e-3)


def test_start_of_batch_one_is_broadcast():
    x = torch.randn(4, 3)
    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, torch.zeros(1, 3), x)
    assert sol.value.shape == (4, 3)
    torch.testing.assert_close(sol.value, 2 * x, rtol=1e-3, atol=1e-3)


def test_start_leaves_are_broadcast_each():
    x = torch.randn(4, 3)
    z0 = (torch.zeros(1, 3), torch.zeros(4, 2))
    sol = eq.fixed_point(lambda z, x: (0.5 * z[0] + x, 0.5 * z[1] + 1), z0, x)
    assert [leaf.shape for leaf in sol.value] == [(4, 3), (4, 2)]


def test_start_as_a_function_of_the_inputs():
    x = torch.randn(4, 3)
    given = []

    def start(x):
        given.append(x)
        return 2 * x

    sol = eq.fixed_point(lambda z, x: 0.5 * z + x, start, x)
    assert given[0] is x
    assert sol.stats.evaluations == 1


def test_lists_and_named_tuples_come_back_as_they_are():
    from typing import NamedTuple

    class Pair(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    f = lambda z, x: [Pair(0.5 * z[0].a + x, 0.5 * z[0].b + 1), 0.1 * z[1]]
    z0 = [Pair(torch.zeros(2, 1), torch.zeros(2, 1)), torch.ones(2, 4)]
    sol = eq.fixed_point(f, z0, torch.ones(2, 1))
    assert isinstance(sol.value, list)
    assert isinstance(sol.value[0], Pair)


@every_solver
@pytest.mark.parametrize("max_steps", [1, 2, 300])
@pytest.mark.parametrize("solved", [True, False], ids=["from the answer", "from elsewhere"])
def test_value_shares_no_memory_with_the_start(solver, max_steps, solved):
    x = torch.ones(3, 2)
    z0 = 2 * x if solved else torch.zeros(3, 2)
    before = z0.clone()
    tolerance = eq.Tolerance(max_steps=max_steps)
    sol = eq.fixed_point(
        lambda z, x: 0.5 * z + x, z0, x, solver=solver, tolerance=tolerance, on_failure="ignore", compact=False
    )
    sol.value.add_(7)
    assert torch.equal(z0, before)


@every_solver
def test_value_shares_no_memory_with_the_inputs(solver):
    """f returns an input itself."""
    x = torch.ones(3, 2)
    sol = eq.fixed_point(lambda z, x: x, torch.zeros(3, 2), x, solver=solver)
    sol.value.add_(7)
    assert torch.equal(x, torch.ones(3, 2))


def test_an_f_that_works_in_place_is_refused_or_right():
    """f(z) written over z makes every gap zero: it must not pass for convergence, nor change the user's z0."""
    z0 = torch.ones(2, 3)

    def f(z, x):
        return z.mul_(0.5).add_(x)

    try:
        sol = eq.fixed_point(f, z0, torch.ones(2, 3))
    except (RuntimeError, ValueError) as error:
        assert "place" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(sol.value, torch.full((2, 3), 2.0), rtol=1e-3, atol=0)
    assert torch.equal(z0, torch.ones(2, 3))


# Gathering


def test_a_closure_over_the_batch_simply_works():
    x = torch.linspace(0.05, 0.95, 16)[:, None]
    shapes = []

    def f(z):
        shapes.append(z.shape[0])
        return x * z + 1

    sol = eq.fixed_point(f, torch.zeros(16, 1), tolerance=eq.Tolerance(max_steps=200), solver=eq.Picard())
    assert set(shapes) == {16}
    assert sol.stats.rows == 16 * sol.stats.evaluations == 16 * len(shapes)
    torch.testing.assert_close(sol.value, 1 / (1 - x), rtol=1e-2, atol=0)


def test_compact_off_computes_all_samples():
    shapes = []

    def f(z, rate):
        shapes.append(z.shape[0])
        return rate * z + 1

    sol = picard(f, None, rates(*[0.1] * 15, 0.9), compact=False)
    assert set(shapes) == {16}
    assert sol.stats.rows == 16 * sol.stats.evaluations


def test_rows_are_counted_as_they_are_computed():
    shapes = []

    def f(z, rate):
        shapes.append((z.shape[0], rate.shape[0]))
        return rate * z + 1

    sol = picard(f, None, rates(*[0.1] * 15, 0.9))
    assert all(a == b for a, b in shapes)
    assert sol.stats.rows == sum(a for a, _ in shapes)
    assert sol.stats.evaluations == len(shapes)
    assert shapes[-2:] == [(1, 1), (16, 16)]  # in the end all samples are measured together
    assert sol.stats.steps.sum() <= sol.stats.rows - 16 <= 1.15 * sol.stats.steps.sum()


def test_nested_inputs_are_gathered_along():
    rate = rates(*[0.1] * 7, 0.9)
    f = lambda z, given: given[0] * z + given[1][0]
    sol = picard(f, torch.zeros_like(rate), (rate, [torch.ones_like(rate), torch.arange(8)]))
    assert sol.stats.rows < 8 * sol.stats.evaluations
    torch.testing.assert_close(sol.value, 1 / (1 - rate), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["mismatch", "broadcast"])
def test_a_shape_error_after_gathering_names_compact(kind):
    rate = rates(*[0.1] * 7, 0.9, 0.95) if kind == "mismatch" else rates(*[0.1] * 7, 0.9)
    hidden = torch.ones_like(rate)  # of the whole batch, and not an input
    with pytest.raises((RuntimeError, ValueError), match="compact=False"):
        picard(lambda z, rate: rate * z + hidden, None, rate)
    sol = picard(lambda z, rate: rate * z + hidden, None, rate, compact=False)
    torch.testing.assert_close(sol.value, 1 / (1 - rate), rtol=1e-4, atol=0)


def test_an_error_before_gathering_is_left_as_it_is():
    def f(z, rate):
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="^the user's own") as caught:
        picard(f, None, rates(0.1))
    assert caught.value.args == ("the user's own",)  # what is known about the call is a note of its own


# Trace and callbacks


@pytest.mark.parametrize("compact", [True, False])
def test_trace_holds_every_residual(compact):
    each = [0.1, 0.5, 0.9]
    sol = picard(linear, None, rates(*each), trace=True, compact=compact)
    steps = sol.stats.steps.tolist()
    assert sol.stats.trace.shape == (max(steps), 3)
    for i, rate in enumerate(each):
        expected = [rate ** (k - 1) * (1 - rate) / (1 - rate**k) for k in range(1, steps[i] + 1)]
        expected = torch.tensor(expected, dtype=torch.float64)
        found = sol.stats.trace[:, i]
        torch.testing.assert_close(found[: steps[i]], expected, rtol=1e-6, atol=1e-12)
        assert (found[steps[i] - 1 :] == found[-1]).all()  # a sample that has stopped keeps its last entry
        assert found[-1] == sol.stats.residual[i]


def test_residual_is_the_lowest_of_the_trace():
    x = torch.randn(5, 4, dtype=torch.float64)
    f = lambda z, x: torch.sin(3 * z) + x
    sol = eq.fixed_point(f, torch.zeros_like(x), x, solver=eq.Picard(), trace=True, on_failure="ignore")
    failed = ~sol.converged
    assert failed.any()
    assert torch.equal(sol.stats.trace.min(dim=0).values[failed], sol.stats.residual[failed])


def test_no_trace_unless_asked():
    assert picard(linear, None, rates(0.5)).stats.trace is None


def test_callback_is_told_everything():
    each = rates(*[0.1] * 7, 0.9)
    seen = []
    sol = picard(linear, None, each, callback=seen.append)
    assert [p.step for p in seen] == list(range(1, sol.stats.evaluations))  # the last measures all samples together
    first, last = seen[0], seen[-1]
    assert first.rows.tolist() == list(range(8))
    assert first.active.all()
    assert torch.equal(first.value, torch.zeros(8, 1, dtype=torch.float64))
    assert torch.equal(first.image, torch.ones(8, 1, dtype=torch.float64))
    assert torch.equal(first.residual, torch.ones(8, dtype=torch.float64))
    assert last.rows.tolist() == [7]  # the others have been left out
    assert not last.active.any()
    assert torch.equal(last.value, sol.value[7:])
    for p in seen:
        assert len(p.rows) == len(p.residual) == len(p.active) == len(p.value)


def test_callback_follows_check_every():
    steps = []
    picard(linear, None, rates(0.9), check_every=5, callback=lambda p: steps.append(p.step))
    assert steps == [1, *range(5, steps[-1] + 1, 5)]


def test_callback_sees_nested_values():
    seen = []
    z0 = (torch.zeros(2, 1), torch.zeros(2, 3))
    eq.fixed_point(lambda z, x: (0.5 * z[0] + x, 0.5 * z[1]), z0, torch.ones(2, 1), callback=seen.append)
    assert [leaf.shape for leaf in seen[0].value] == [(2, 1), (2, 3)]


# What is said about failures


def test_failure_warns_by_default():
    tolerance = eq.Tolerance(relative=1e-9, max_steps=5)
    with pytest.warns(eq.ConvergenceWarning, match=r"forward solve failed for some samples \(MAX_STEPS") as caught:
        sol = picard(linear, None, rates(0.9, 0.0), tolerance=tolerance)
    assert Result.MAX_STEPS.message in str(caught[0].message)
    assert sol.result.tolist() == [Result.MAX_STEPS, Result.CONVERGED]


def test_warnings_point_to_the_line_that_called():
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(max_steps=2)}
    with pytest.warns(eq.ConvergenceWarning) as caught:
        eq.fixed_point(linear, torch.zeros(1, 1), torch.full((1, 1), 0.9), **options)
    assert caught[0].filename == __file__


def test_a_warning_is_shown_once_per_line_and_kind():
    """Its words have no numbers in them; those are in the Solution."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for steps in (3, 4, 5, 6):
            tolerance = eq.Tolerance(relative=1e-9, max_steps=steps)
            picard(linear, None, rates(0.9, 0.0, 0.5)[: steps - 2], tolerance=tolerance)
        assert len({str(w.message) for w in caught}) == 1
        for steps in (3, 4, 5):
            tolerance = eq.Tolerance(relative=1e-9, max_steps=steps)
            eq.fixed_point(linear, torch.zeros(1, 1), torch.full((1, 1), 0.9), tolerance=tolerance)
    assert [w.filename for w in caught] == [__file__] * len(caught)
    assert len(caught) == 2


def test_warnings_of_layers_and_backward_passes_point_to_the_user():
    x = torch.full((2, 1), 0.9, requires_grad=True)
    few = eq.Tolerance(relative=1e-9, max_steps=2)
    layer = eq.Equilibrium(linear, tolerance=few, solver=eq.Picard())
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    with pytest.warns(eq.ConvergenceWarning) as caught:
        value = model(x)
    here = caught[0].lineno
    assert caught[0].filename == __file__
    with pytest.warns(eq.ConvergenceWarning, match="backward") as caught:
        value.sum().backward()
    assert caught[0].filename == __file__
    assert caught[0].lineno > here


def test_failure_raises_when_asked():
    tolerance = eq.Tolerance(relative=1e-9, max_steps=5)
    with pytest.raises(eq.ConvergenceError, match="forward solve failed for 1 of 2") as caught:
        picard(linear, None, rates(0.9, 0.0), tolerance=tolerance, on_failure="raise")
    assert caught.value.statistics.result.tolist() == [Result.MAX_STEPS, Result.CONVERGED]


def test_failure_is_ignored_when_asked():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sol = picard(linear, None, rates(0.9), tolerance=eq.Tolerance(max_steps=2), on_failure="ignore")
    assert not sol.converged.any()


def test_success_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for on_failure in ("warn", "raise"):
            picard(linear, None, rates(0.9), on_failure=on_failure)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result.CONVERGED, "within the tolerance"),
        (Result.MAX_STEPS, "raise Tolerance.max_steps"),
        (Result.NONFINITE, "NaN or infinity"),
        (Result.STALLED, "stopped shrinking"),
    ],
)
def test_result_message_is_a_sentence(result, words):
    assert words in result.message
    assert result.message.endswith(".")


def test_result_codes_are_fixed():
    """They are stored in tensors and files."""
    codes = {"CONVERGED": 0, "MAX_STEPS": 1, "NONFINITE": 2, "STALLED": 3, "COUPLED": 4, "DRIFTED": 5}
    assert {r.name: int(r) for r in Result} == codes


def test_story_of_a_success_has_three_lines():
    lines = str(picard(linear, None, rates(0.5, 0.9))).splitlines()
    assert len(lines) == 3
    assert "2 of 2 samples converged" in lines[0]
    assert "steps median" in lines[1]
    assert "evaluations" in lines[1]
    assert "rows" in lines[1]
    assert "within the tolerance" in lines[2]


def test_story_of_a_failure_has_three_lines():
    sol = picard(linear, None, rates(0.5, 0.99), tolerance=eq.Tolerance(1e-6, max_steps=30), on_failure="ignore")
    lines = str(sol).splitlines()
    assert len(lines) == 3
    assert "1 of 2 samples converged" in lines[0]
    assert "1 MAX_STEPS" in lines[2]
    assert Result.MAX_STEPS.message in lines[2]


def test_story_of_a_backward_solve_has_three_lines():
    rate = rates(0.5, 0.9).requires_grad_()
    sol = picard(linear, torch.zeros(2, 1, dtype=torch.float64), rate)
    sol.value.sum().backward()
    lines = str(sol).splitlines()
    assert len(lines) == 3
    assert "backward" in lines[2]
    assert "2 of 2 samples converged" in lines[2]


def test_statistics_count_results():
    x = torch.tensor([[0.5], [0.99], [torch.nan], [0.1]], dtype=torch.float64)
    sol = picard(linear, torch.zeros_like(x), x, tolerance=eq.Tolerance(1e-6, max_steps=30), on_failure="ignore")
    assert sol.stats.counts() == {Result.CONVERGED: 2, Result.MAX_STEPS: 1, Result.NONFINITE: 1}
    assert list(sol.stats.counts()) == sorted(sol.stats.counts())


def test_statistics_of_newton_count_products():
    """One evaluation at z0; then each step costs its products with J and one more evaluation."""
    calls = itertools.count()

    def f(z, x):
        next(calls)
        return torch.tanh(0.5 * z) + x

    sol = eq.fixed_point(f, torch.zeros(2, 3), torch.ones(2, 3), solver=eq.NewtonKrylov(line_search=0))
    assert sol.stats.evaluations == next(calls)


def test_shapes_of_statistics():
    sol = picard(linear, None, rates(0.5, 0.9, 0.1))
    for field in (sol.result, sol.converged, sol.stats.steps, sol.stats.residual):
        assert field.shape == (3,)
    assert sol.converged.dtype == torch.bool
    assert sol.result.dtype == sol.stats.steps.dtype == torch.int64
    assert isinstance(sol.stats.evaluations, int)
    assert isinstance(sol.stats.rows, int)
    assert sol.backward is None


def test_residual_of_a_zero_answer_is_zero():
    """f(z) = z / 2 from 0: both norms are zero, and 0/0 must not become NaN."""
    sol = picard(lambda z, x: 0.5 * z, None, torch.zeros(2, 3))
    assert sol.converged.all()
    assert sol.stats.residual.tolist() == [0, 0]


def test_inference_mode():
    with torch.inference_mode():
        sol = picard(linear, None, rates(*[0.1] * 7, 0.9))
    assert sol.converged.all()

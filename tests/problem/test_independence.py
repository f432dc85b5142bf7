"""A sample's answer, result and cost do not depend on who shares its batch."""

import pytest
import torch

import equipoise as eq
from equipoise import Result

SOLVERS = {
    "picard": eq.Picard(),
    "picard-damped": eq.Picard(damping=0.2),
    "anderson": eq.Anderson(),
    "anderson-type-1": eq.Anderson(kind=1),
    "anderson-mixing-restart": eq.Anderson(mixing=0.8, restart=2.0),
    "broyden": eq.Broyden(),
    "broyden-line-search": eq.Broyden(line_search=3),
    "newton-gmres": eq.NewtonKrylov(),
    "newton-bicgstab": eq.NewtonKrylov(inner=eq.BiCGStab()),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)

N = 16
TOLERANCE = eq.Tolerance(relative=1e-6, max_steps=500)
WEIGHT = torch.randn(N, N, generator=torch.Generator().manual_seed(1))
WEIGHT = WEIGHT / torch.linalg.matrix_norm(WEIGHT, 2)


def f(z, x, gain):
    """A contraction with factor ``gain``; far from the origin, and with a gain above 1, it grows without bound."""
    return gain * torch.where(gain > 1, z, torch.tanh(z @ WEIGHT.mT)) + x


def samples(batch, gain):
    x = torch.randn(batch, N, generator=torch.Generator().manual_seed(2))
    return x, torch.full((batch, 1), gain)


def joined(*parts):
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def run(inputs, solver, **options):
    z0 = torch.zeros(len(inputs[0]), N)
    return eq.fixed_point(f, z0, *inputs, solver=solver, tolerance=TOLERANCE, on_failure="ignore", **options)


def same(found, alone):
    return (found - alone).norm() / alone.norm() < 1e-6


@every_solver
def test_alone_and_in_a_batch_of_128(solver):
    batch = samples(128, 0.7)
    together = run(batch, solver)
    for i in (0, 57, 127):
        alone = run((batch[0][i : i + 1], batch[1][i : i + 1]), solver)
        assert same(together.value[i], alone.value[0])
        assert together.result[i] == alone.result[0] == Result.CONVERGED
        assert abs(together.stats.steps[i] - alone.stats.steps[0]) <= 1  # rounding may decide at the threshold


MATES = {
    "slow": lambda x, gain: (5 * x, torch.full_like(gain, 0.97)),
    "diverging": lambda x, gain: (x, torch.full_like(gain, 1e4)),
    "nan": lambda x, gain: (torch.full_like(x, torch.nan), gain),
    "infinite": lambda x, gain: (torch.full_like(x, torch.inf), gain),
}


@every_solver
@pytest.mark.parametrize("mates", [[name] for name in MATES] + [list(MATES)], ids=[*MATES, "all of them"])
@pytest.mark.parametrize("compact", [True, False], ids=["gathering", "compact=False"])
def test_beside_a_batch_mate_in_trouble(solver, mates, compact):
    sample = samples(1, 0.7)
    alone = run(sample, solver)
    together = run(joined(sample, *(MATES[name](*sample) for name in mates)), solver, compact=compact)
    assert same(together.value[0], alone.value[0])
    assert together.result[0] == alone.result[0] == Result.CONVERGED
    assert torch.isfinite(together.value).all()
    for name, result in zip(mates, together.result[1:].tolist(), strict=True):
        if name in ("nan", "infinite"):
            assert result == Result.NONFINITE


@every_solver
def test_a_failing_sample_fails_alike_alone_and_in_company(solver):
    sample = samples(1, 0.7)
    bad = MATES["nan"](*sample)
    alone, together = run(bad, solver), run(joined(sample, bad, sample), solver)
    assert together.result[1] == alone.result[0] == Result.NONFINITE
    assert torch.equal(together.value[1], alone.value[0])


@pytest.mark.parametrize("name", ["picard", "anderson", "anderson-type-1", "broyden", "newton-gmres"])
def test_one_slow_sample_among_128_costs_little(name):
    """Rows computed are at most 1.15 x what the samples need alone."""
    solver = SOLVERS[name]
    x, gain = (tensor.repeat(8, 1) for tensor in samples(16, 0.1))
    gain[127] = 0.99
    x[127] = 0.1 * x[127]  # near the origin, where tanh is steep
    together = run((x, gain), solver)
    assert together.converged.all()
    *fast, slow = [run((x[i : i + 1], gain[i : i + 1]), solver).stats.rows for i in (*range(16), 127)]
    assert slow >= 2 * sorted(fast)[8]
    measured = 128  # in the end, all samples together
    assert together.stats.rows - measured <= 1.15 * (8 * sum(fast) - fast[-1] + slow)


def test_one_sample_of_500_steps_among_128_costs_little():
    """The worst case of a solver without gathering: 500 x 128 rows."""
    gain = torch.full((128, 1), 0.3)
    gain[77] = 0.97
    sol = eq.fixed_point(
        lambda z, gain: gain * z + 1,
        torch.zeros(128, N),
        gain,
        solver=eq.Picard(),
        tolerance=eq.Tolerance(relative=1e-6, max_steps=500),
    )
    assert sol.stats.steps[77] > 300
    assert sol.stats.rows - 128 <= 1.15 * sol.stats.steps.sum()  # alone, each needs as many rows as steps


def test_gradients_are_independent_too():
    """The adjoint of a sample is the same alone, in company, and beside a NaN."""
    x, gain = samples(8, 0.7)
    gain[3] = 0.97

    def gradient(x, gain):
        x = x.clone().requires_grad_()
        sol = run((x, gain), eq.Anderson())
        (g,) = torch.autograd.grad(sol.value.square().sum(), x)
        return g

    together = gradient(x, gain)
    spoiled = x.clone()
    spoiled[5] = torch.nan
    beside = gradient(spoiled, gain)
    for i in (0, 3, 7):
        alone = gradient(x[i : i + 1], gain[i : i + 1])[0]
        assert (together[i] - alone).norm() / alone.norm() < 1e-5
        assert (beside[i] - alone).norm() / alone.norm() < 1e-5


def test_shine_estimate_does_not_depend_on_batch_mates():
    """A sample that has converged learns nothing more while others go on."""
    x, gain = samples(2, 0.7)
    x, gain = x.double(), gain.double()

    def estimate(x, gain):
        x = x.clone().requires_grad_()
        shine = eq.ImplicitGradient(shine=True, tolerance=eq.Tolerance(max_steps=1))
        weight = WEIGHT.double()
        sol = eq.fixed_point(
            lambda z, x, gain: gain * torch.tanh(z @ weight.mT) + x,
            torch.zeros_like(x),
            x,
            gain,
            solver=eq.Broyden(memory=30),
            gradient=shine,
            tolerance=eq.Tolerance(relative=1e-6, max_steps=100),
            on_failure="ignore",
        )
        sol.value.square().sum().backward()
        return sol.adjoint

    alone = estimate(x[:1], gain[:1])
    slow = gain.clone()
    slow[1], x[1] = 0.99, 0.1 * x[1]
    together = estimate(x, slow)
    torch.testing.assert_close(together[:1], alone, rtol=1e-9, atol=1e-12)

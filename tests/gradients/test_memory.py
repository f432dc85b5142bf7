"""Memory of a solve and its implicit gradient does not grow with the steps."""

import pytest
import torch
from torch import nn

import equipoise as eq
from peak_memory import peak_memory

SOLVERS = [
    eq.Picard(),
    eq.Anderson(6),
    eq.Anderson(6, kind=1),
    eq.Broyden(12),
    eq.NewtonKrylov(inner=eq.GMRES(6), inner_steps=2),
]


class Shift(nn.Module):
    """Too slow for any solver, forward and adjoint, so that every step allowed is taken."""

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.full((n,), 0.999))

    def forward(self, z, x):
        return self.w * z.roll(1, dims=1) + x


def peak(solver, gradient, steps, path):
    f, x = Shift(1024), torch.randn(16, 1024)
    tolerance = eq.Tolerance(1e-7, max_steps=steps, patience=None)

    def run():
        sol = eq.fixed_point(
            f, torch.zeros(1, 1024), x, solver=solver, tolerance=tolerance, gradient=gradient, on_failure="ignore"
        )
        sol.value.square().sum().backward()
        assert int(sol.stats.steps.max()) == int(sol.backward.steps.max()) == steps
        return sol

    return peak_memory(run, path)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_peak_memory_at_200_steps_is_that_at_20(solver, tmp_path):
    few, many = (peak(solver, eq.ImplicitGradient(), steps, tmp_path / f"{steps}.json") for steps in (20, 200))
    assert many <= 1.05 * few


@pytest.mark.parametrize("inner", [eq.GMRES(6), eq.BiCGStab()], ids=repr)
def test_krylov_adjoints_keep_to_their_memory(inner, tmp_path):
    few, many = (peak(eq.Picard(), eq.ImplicitGradient(solver=inner), n, tmp_path / f"{n}.json") for n in (20, 200))
    assert many <= 1.05 * few

"""MINRES on symmetric systems: against dense solutions, the minimal residuals of each step, and batches."""

import dataclasses

import pytest
import torch

from equipoise.joint.minres import MINRES
from equipoise.problem.layout import Layout
from equipoise.problem.problem import Count, Problem
from equipoise.solution import Result
from equipoise.solvers.krylov import GMRES
from equipoise.solvers.loop import Watch, solve
from equipoise.tolerance import Tolerance

TIGHT = Tolerance(relative=1e-12, max_steps=2000)


class System(Problem):
    """M u = b as the fixed point of u - M u + b."""

    affine, gatherable = True, True

    def __init__(self, matrix, b, count=None):
        self.matrix, self.b, self.layout, self.device = matrix, b, Layout(b), b.device
        self.count = count or Count()

    def __call__(self, rows):
        self.count.add(len(rows))
        return self.product(rows) + self.b

    def product(self, rows):
        return rows - times(self.matrix, rows)

    def take(self, rows):
        return System(self.matrix[rows], self.b[rows], self.count)


def times(matrix, rows):
    return (matrix @ rows[..., None])[..., 0]


def symmetric(eigenvalues):
    batch, n = eigenvalues.shape
    basis = torch.linalg.qr(torch.randn(batch, n, n, dtype=torch.float64)).Q
    matrix = basis @ torch.diag_embed(eigenvalues.double()) @ basis.mT
    return (matrix + matrix.mT) / 2


def solved(matrix, b, solver=None, tolerance=TIGHT):
    problem, z = System(matrix, b), torch.zeros_like(b)
    return solve(problem, z, problem(z), solver or MINRES(), tolerance)


def signs(batch, n):
    return torch.where(torch.rand(batch, n) < 0.4, -1.0, 1.0)


@pytest.mark.parametrize("decades", [0, 2, 4])
def test_indefinite(decades):
    matrix = symmetric(signs(8, 50) * torch.logspace(0, -decades, 50))
    b = torch.randn(8, 50, dtype=torch.float64)
    found = solved(matrix, b)
    truth = torch.linalg.solve(matrix, b)
    assert found.converged
    assert ((found.z - truth).norm(dim=1) <= 1e-11 * 10**decades * truth.norm(dim=1)).all()


def test_singular_and_consistent():
    eigenvalues = signs(6, 40) * (0.1 + torch.rand(6, 40))
    eigenvalues[:, :10] = 0
    matrix = symmetric(eigenvalues)
    b = times(matrix, torch.randn(6, 40, dtype=torch.float64))
    found = solved(matrix, b)
    assert found.converged
    least_norm = times(torch.linalg.pinv(matrix, hermitian=True, rtol=1e-8), b)
    assert (found.z - least_norm).abs().max() < 1e-9 * least_norm.abs().max()


def test_singular_and_inconsistent_stays_finite():
    eigenvalues = torch.linspace(-1, 1, 30).repeat(3, 1)
    eigenvalues[:, :3] = 0
    matrix = symmetric(eigenvalues)
    b = torch.randn(3, 30, dtype=torch.float64)
    found = solved(matrix, b, tolerance=Tolerance(relative=1e-10, max_steps=100))
    assert found.z.isfinite().all()
    assert not found.stats.result.eq(Result.CONVERGED).any()
    unreachable = b - times(matrix @ torch.linalg.pinv(matrix, hermitian=True, rtol=1e-8), b)
    assert ((b - times(matrix, found.z)).norm(dim=1) < 1.2 * unreachable.norm(dim=1)).all()


def minimal_residuals(matrix, b, steps):
    """Return the least ||b - M u|| over the Krylov spaces of dimension 1, 2, ..., from an orthonormal basis."""
    basis, norms = [b / b.norm()], []
    for _ in range(steps):
        image = matrix @ torch.stack(basis, dim=1)
        norms.append((b - image @ torch.linalg.lstsq(image, b[:, None]).solution[:, 0]).norm())
        vector = matrix @ basis[-1]
        for other in basis + basis:
            vector = vector - (vector @ other) * other
        basis.append(vector / vector.norm())
    return torch.stack(norms)


def test_residual_of_every_step_is_minimal():
    matrix = symmetric(signs(3, 60) * (0.2 + torch.rand(3, 60)))
    b = torch.randn(3, 60, dtype=torch.float64)
    problem, solver, z = System(matrix, b), MINRES(), torch.zeros_like(b)
    state = solver.init(problem, z, problem(z))
    found = []
    for _ in range(25):
        state = solver.step(problem, state)
        true = b - times(matrix, state.z)
        assert (state.gap - true).abs().max() < 1e-12  # the recurrence follows the true residual
        assert (state.length.abs()[:, 0] - true.norm(dim=1)).abs().max() < 1e-12
        found.append(true.norm(dim=1))
    for i in range(3):
        least = minimal_residuals(matrix[i], b[i], 25)
        assert (torch.stack(found)[:, i] - least).abs().max() < 1e-8 * b[i].norm()


def test_as_many_steps_as_gmres():
    matrix = symmetric(signs(5, 80) * (0.5 + torch.rand(5, 80)))
    b = torch.randn(5, 80, dtype=torch.float64)
    tolerance = Tolerance(relative=1e-6, max_steps=300)
    short, full = (solved(matrix, b, solver, tolerance).stats.steps for solver in (MINRES(), GMRES(memory=100)))
    assert (short - full).abs().max() <= 1


def test_batch_of_different_difficulty():
    hard = signs(1, 30)[0] * torch.logspace(0, -3, 30)
    easy = torch.linspace(0.5, 1, 30)
    eigenvalues = torch.stack([torch.ones(30), torch.linspace(-1, 2, 30), hard, easy, easy])
    matrix = symmetric(eigenvalues)
    b = torch.randn(5, 30, dtype=torch.float64)
    b[4] = 0
    together = solved(matrix, b)
    assert together.converged
    assert together.z[4].eq(0).all()
    assert together.stats.steps[0] <= 3
    for i in range(5):
        alone = solved(matrix[i : i + 1], b[i : i + 1])
        condition = (eigenvalues[i].abs().max() / eigenvalues[i].abs().min()).item()
        assert (alone.z[0] - together.z[i]).abs().max() <= 1e-11 * condition * alone.z.abs().max()


def test_exhausted_space_starts_anew():
    matrix = symmetric(torch.tensor([[1.0, -2.0, 3.0] * 4]))  # three distinct eigenvalues: solved in three steps
    b = torch.randn(1, 12, dtype=torch.float64)
    problem, solver, z = System(matrix, b), MINRES(), torch.zeros_like(b)
    state = solver.init(problem, z, problem(z))
    for step in range(12):
        state = solver.step(problem, state)
        assert all(getattr(state, field.name).isfinite().all() for field in dataclasses.fields(state))
        if step >= 2:
            assert (b - times(matrix, state.z)).norm() < 1e-13 * b.norm()


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_float32_and_scales(scale):
    matrix = symmetric(signs(4, 30) * (0.5 + torch.rand(4, 30))).float()
    b = scale * torch.randn(4, 30)
    found = solved(matrix, b, tolerance=Tolerance(relative=1e-5, max_steps=200))
    assert found.converged
    truth = torch.linalg.solve(matrix.double(), b.double())
    assert ((found.z - truth).norm(dim=1) <= 1e-4 * truth.norm(dim=1)).all()


def test_starts_anywhere_and_traces():
    matrix = symmetric(signs(4, 30) * (0.5 + torch.rand(4, 30)))
    b, z = torch.randn(2, 4, 30, dtype=torch.float64)
    problem = System(matrix, b)
    found = solve(problem, z, problem(z), MINRES(), TIGHT, Watch(trace=True))
    assert (found.z - torch.linalg.solve(matrix, b)).abs().max() < 1e-9
    assert found.stats.trace is not None


def test_needs_an_affine_problem():
    problem = System(torch.eye(2)[None], torch.ones(1, 2))
    problem.affine = False
    with pytest.raises(TypeError, match="MINRES solves affine problems"):
        solve(problem, torch.zeros(1, 2), torch.ones(1, 2), MINRES(), TIGHT)
    with pytest.raises(TypeError, match="MINRES has no option 'memory'"):
        MINRES(memory=3)  # type: ignore[call-arg]

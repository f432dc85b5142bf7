import pytest
import torch

from equipoise.onnx.linear_solve import solve


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_solutions_are_those_of_torch(n):
    generator = torch.Generator().manual_seed(n)
    matrix = torch.randn(20, n, n, generator=generator, dtype=torch.float64)
    right = torch.randn(20, n, generator=generator, dtype=torch.float64)
    if n > 1:
        matrix[:, 0, 0] = 0  # the first pivot is another row's
    torch.testing.assert_close(solve(matrix, right), torch.linalg.solve(matrix, right), rtol=1e-9, atol=1e-9)
    definite = matrix @ matrix.mT + torch.eye(n)
    torch.testing.assert_close(solve(definite, right, definite=True), torch.linalg.solve(definite, right))


@pytest.mark.parametrize("definite", [True, False])
def test_a_singular_system_has_the_solution_zero_and_leaves_others_alone(definite):
    matrix = torch.stack([torch.zeros(3, 3), torch.eye(3), torch.full((3, 3), torch.nan)])
    solution = solve(matrix, torch.ones(3, 3), definite=definite)
    assert solution[:2].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert solution[2].isnan().any()

"""Properties that hold for every shape, dtype, nesting, dimension and batch, tried on examples found by hypothesis."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from corpus import DOUBLE, flatten, generator, per_sample, true_residual, unflatten
from equipoise.problem.layout import Layout

SOLVERS = [
    eq.Picard(),
    eq.Picard(damping=0.3),
    eq.Anderson(),
    eq.Anderson(kind=1),
    eq.Anderson(memory=2, mixing=0.7, restart=1.5),
    eq.Broyden(),
    eq.Broyden(memory=4, line_search=2),
    eq.NewtonKrylov(),
    eq.NewtonKrylov(inner=eq.BiCGStab()),
]
KRYLOV = [eq.GMRES(), eq.GMRES(memory=3), eq.BiCGStab()]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
TIGHT = eq.Tolerance(relative=1e-10, max_steps=2000, patience=None)

solvers = st.sampled_from(SOLVERS)
seeds = st.integers(0, 2**16)
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


def nestings(leaf):
    return st.recursive(leaf, lambda part: st.lists(part, min_size=1, max_size=3).map(tuple), max_leaves=5)


def filled(batch, spec, seed):
    """A value with random entries from a nesting of (shape, dtype, channels_last)."""
    random = generator(seed)

    def build(node):
        if isinstance(node[0], tuple) and len(node) == 3 and isinstance(node[1], torch.dtype):
            shape, dtype, last = node
            wide = torch.complex128 if dtype.is_complex else torch.float64
            tensor = torch.randn(batch, *shape, dtype=wide, generator=random).to(dtype)
            return tensor.to(memory_format=torch.channels_last) if last and tensor.dim() == 4 else tensor
        return tuple(build(part) for part in node)

    return build(spec)


values = st.builds(
    filled, st.integers(0, 4), nestings(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans())), seeds
)


@given(values)
def test_rows_hold_every_bit_of_a_value(value):
    layout = Layout(value)
    rows = layout.pack(value)
    assert rows.shape[0] == flatten(value)[0].shape[0]
    assert rows.dtype in (torch.float32, torch.float64)
    again = layout.unpack(rows)
    for found, leaf in zip(flatten(again), flatten(value), strict=True):
        assert found.dtype == leaf.dtype
        assert torch.equal(found, leaf)
    assert nesting(again) == nesting(value)


def nesting(tree):
    return None if isinstance(tree, torch.Tensor) else tuple(nesting(part) for part in tree)


@given(values, solvers)
def test_any_value_can_be_a_state(value, solver):
    """f(z, x) = -z / 4 + x has the answer 0.8 x whatever the shapes, dtypes and nesting of z and x."""
    f = lambda z, x: unflatten(x, [-0.25 * a + b for a, b in zip(flatten(z), flatten(x), strict=True)])
    z0 = unflatten(value, [torch.zeros_like(leaf) for leaf in flatten(value)])
    eps = max(torch.finfo(leaf.dtype).eps for leaf in flatten(value))
    sol = eq.fixed_point(f, z0, value, solver=solver, tolerance=eq.Tolerance(relative=4 * eps, max_steps=100))
    assert nesting(sol.value) == nesting(value)
    scale = max([1.0, *(leaf.abs().max().item() for leaf in flatten(value) if leaf.numel())])
    for found, leaf in zip(flatten(sol.value), flatten(value), strict=True):
        assert found.dtype == leaf.dtype
        assert found.shape == leaf.shape
        assert leaf.numel() == 0 or (found - 0.8 * leaf).abs().max() <= 60 * eps * scale


@given(nestings(st.lists(st.integers(1, 3), max_size=2).map(tuple)), solvers, seeds)
def test_a_nested_state_is_solved_like_its_leaves_side_by_side(spec, solver, seed):
    batch = 3
    z0 = filled(batch, spec_of(spec), 0)
    z0 = unflatten(z0, [torch.zeros_like(leaf) for leaf in flatten(z0)])
    sizes = [leaf[0].numel() for leaf in flatten(z0)]
    n = sum(sizes)
    weight = matrix(n, 0.8, seed)
    x = torch.randn(batch, n, dtype=DOUBLE, generator=generator(seed))

    def flat(z, x):
        return torch.tanh(z @ weight.mT) + x

    def nested(z, x):
        image = flat(per_sample(z), x)
        parts = zip(image.split(sizes, dim=1), flatten(z), strict=True)
        return unflatten(z, [part.reshape(leaf.shape) for part, leaf in parts])

    tolerance = eq.Tolerance(relative=1e-8, max_steps=500)
    one = eq.fixed_point(flat, torch.zeros(batch, n, dtype=DOUBLE), x, solver=solver, tolerance=tolerance)
    many = eq.fixed_point(nested, z0, x, solver=solver, tolerance=tolerance)
    assert torch.equal(one.stats.steps, many.stats.steps)
    torch.testing.assert_close(per_sample(many.value), one.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(many.stats.residual, one.stats.residual, rtol=1e-3, atol=1e-15)


def spec_of(tree):
    """A nesting of shapes, as strategies give it, with float64 leaves."""
    if all(isinstance(part, int) for part in tree):
        return (tree, DOUBLE, False)
    return tuple(spec_of(part) for part in tree)


def matrix(n, norm, seed):
    A = torch.randn(n, n, dtype=DOUBLE, generator=generator(seed))
    return norm * A / torch.linalg.matrix_norm(A, 2)


def affine(weight):
    f = lambda z, x: z @ weight.mT + x
    f.affine = True
    return f


@given(st.sampled_from([*SOLVERS, *KRYLOV]), st.integers(1, 12), st.floats(0.0, 0.9), st.integers(1, 5), seeds)
def test_every_contraction_is_solved(solver, n, norm, batch, seed):
    """The answer is that of the dense solve."""
    weight = matrix(n, norm, seed)
    x = torch.randn(batch, n, dtype=DOUBLE, generator=generator(seed + 1))
    f = affine(weight)
    sol = eq.fixed_point(f, torch.zeros(batch, n, dtype=DOUBLE), x, solver=solver, tolerance=TIGHT)
    exact = torch.linalg.solve(torch.eye(n, dtype=DOUBLE) - weight, x.mT).mT
    assert sol.converged.all()
    torch.testing.assert_close(sol.value, exact, rtol=1e-7, atol=1e-7)
    assert (true_residual(f, sol.value, x) <= 1.5e-10).all()


@given(st.sampled_from([eq.Anderson(memory=8), eq.Broyden(memory=20), eq.NewtonKrylov()]), st.integers(1, 4), seeds)
def test_expansions_are_solved_by_accelerated_solvers(solver, n, seed):
    """Eigenvalues between -4 and -2: every plain step doubles the error or worse."""
    basis = torch.eye(n, dtype=DOUBLE) + 0.3 * matrix(n, 1.0, seed)
    eigenvalues = -2 - 2 * torch.rand(n, dtype=DOUBLE, generator=generator(seed))
    weight = basis @ torch.diag(eigenvalues) @ torch.linalg.inv(basis)
    x = torch.randn(2, n, dtype=DOUBLE, generator=generator(seed + 1))
    sol = eq.fixed_point(
        lambda z, x: z @ weight.mT + x,
        torch.zeros(2, n, dtype=DOUBLE),
        x,
        solver=solver,
        tolerance=eq.Tolerance(relative=1e-9, max_steps=200),
    )
    exact = torch.linalg.solve(torch.eye(n, dtype=DOUBLE) - weight, x.mT).mT
    torch.testing.assert_close(sol.value, exact, rtol=1e-6, atol=1e-6)


def network(n, seed):
    weight = matrix(n, 1.0, seed)
    return lambda z, x, gain: gain * torch.tanh(z @ weight.mT) + x


def problem(batch, n, seed):
    """Samples of very different difficulty."""
    random = generator(seed)
    x = torch.randn(batch, n, dtype=DOUBLE, generator=random)
    gain = 0.97 * torch.rand(batch, 1, dtype=DOUBLE, generator=random)
    return x, gain


@given(solvers, st.integers(1, 24), st.integers(1, 6), seeds)
def test_permuting_the_batch_permutes_the_answer(solver, batch, n, seed):
    f, (x, gain) = network(n, seed), problem(batch, n, seed)
    order = torch.randperm(batch, generator=generator(seed))
    options = {"solver": solver, "tolerance": eq.Tolerance(relative=1e-8, max_steps=2000)}
    sol = eq.fixed_point(f, torch.zeros_like(x), x, gain, **options)
    turned = eq.fixed_point(f, torch.zeros_like(x), x[order], gain[order], **options)
    torch.testing.assert_close(turned.value, sol.value[order], rtol=1e-7, atol=1e-9)
    assert torch.equal(turned.result, sol.result[order])
    assert (turned.stats.steps - sol.stats.steps[order]).abs().max() <= 1  # rounding may decide at the threshold


@given(solvers, st.lists(st.booleans(), min_size=1, max_size=24), seeds)
def test_any_subset_may_be_finished_at_the_start(solver, finished, seed):
    """Samples that start at their answer stop at once; the others are solved as if they were alone."""
    n, batch = 4, len(finished)
    done = torch.tensor(finished)
    f, (x, gain) = network(n, seed), problem(batch, n, seed)
    options = {"solver": solver, "tolerance": eq.Tolerance(relative=1e-8, max_steps=2000)}
    precise = {"solver": eq.NewtonKrylov(), "tolerance": eq.Tolerance(relative=1e-12, max_steps=2000)}
    answer = eq.fixed_point(f, torch.zeros_like(x), x, gain, **precise).value
    z0 = torch.where(done[:, None], answer, 0.0)
    sol = eq.fixed_point(f, z0, x, gain, **options)
    assert torch.equal(sol.value[done], answer[done])
    assert (sol.stats.steps[done] == 1).all()
    rest = eq.fixed_point(f, z0[~done], x[~done], gain[~done], **options)
    torch.testing.assert_close(sol.value[~done], rest.value, rtol=1e-7, atol=1e-9)
    assert (sol.stats.steps[~done] - rest.stats.steps).abs().sum() <= batch // 4


@given(solvers, st.integers(1, 24), st.integers(1, 5), seeds)
def test_rows_lie_between_what_is_needed_and_all(solver, batch, every, seed):
    f, (x, gain) = network(3, seed), problem(batch, 3, seed)
    options = {"solver": solver, "check_every": every, "tolerance": eq.Tolerance(relative=1e-8, max_steps=2000)}
    sol = eq.fixed_point(f, torch.zeros_like(x), x, gain, **options)
    assert sol.stats.steps.sum() <= sol.stats.rows <= batch * sol.stats.evaluations
    assert sol.stats.steps.max() <= sol.stats.evaluations


@given(solvers, st.integers(2, 10), seeds)
def test_the_gradient_of_any_batch_is_that_of_the_dense_solve(solver, batch, seed):
    """v^T dz*/dx = v^T (I - J)^-1 per sample, with J = gain diag(1 - tanh^2) W."""
    n = 3
    f, (x, gain) = network(n, seed), problem(batch, n, seed)
    x.requires_grad_()
    tolerance = eq.Tolerance(relative=1e-11, max_steps=3000, patience=None)
    sol = eq.fixed_point(f, torch.zeros(1, n, dtype=DOUBLE), x, gain, solver=solver, tolerance=tolerance)
    v = torch.randn(batch, n, dtype=DOUBLE, generator=generator(seed))
    (found,) = torch.autograd.grad(sol.value, x, v)
    z = sol.value.detach()
    weight = matrix(n, 1.0, seed)
    J = (gain * (1 - torch.tanh(z @ weight.mT).square()))[:, :, None] * weight
    exact = torch.linalg.solve((torch.eye(n, dtype=DOUBLE) - J).mT, v)
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-8)

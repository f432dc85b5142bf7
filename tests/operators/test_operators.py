"""One contract for every operator: W, its adjoint and its resolvent are those of the matrix of its current parameters.

The truth is in :mod:`dense`, written without the implementation.
"""

import contextlib
import copy
import gc
import io
import itertools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise as eq
from corpus import DOUBLE, flatten, per_sample, randn, unflatten
from dense import Spec, circular, dense_resolvent, randomize, smallest_eigenvalue, unrow
from equipoise import operators as ops
from equipoise.operators import linear
from equipoise.operators.linear import Factorisation
from equipoise.operators.spectrum import images, real, spectrum
from equipoise.operators.splitting import is_zero
from equipoise.problem.layout import row_distances
from peak_memory import peak_memory

SIZES = [
    (1, None),
    (7, None),
    (1, (4, 4)),
    (3, (5, 3)),
    (2, (3, 6)),
    (3, (1, 4)),
    ((2,), (3, 2)),
    ((2, 3), (4, 4)),
    ((3, 1, 2), (5, 3)),
    ((1, 2), (1, 1)),
    ((1, 2, 1, 2), (6, 9)),
]
ALL = [Spec(*size, m, normalize) for size in SIZES for m in (1.0, 0.1, 0.01) for normalize in (False, True)]
KINDS = [Spec(7, None, 0.1), Spec(2, (3, 2), 0.1), Spec((2, 1), (3, 2), 0.1)]  # one of each, small
BOTH = [Spec(spec.channels, spec.size, spec.m, normalize) for spec in KINDS for normalize in (False, True)]
NORMALIZED = BOTH[1::2]  # where the parameters are one more step away from W
ALPHAS = [0.01, 0.3, 1.0, 7.0]

every = pytest.mark.parametrize("spec", ALL, ids=str)
each_kind = pytest.mark.parametrize("spec", BOTH, ids=str)
normalized = pytest.mark.parametrize("spec", NORMALIZED, ids=str)


def assert_equal(found, known, tolerance=1e-12):
    """Rows, or values, equal up to rounding relative to the largest entry."""
    found, known = (x if isinstance(x, torch.Tensor) and x.dim() == 2 else per_sample(x) for x in (found, known))
    assert found.shape == known.shape
    error = (found.double() - known).abs().max() if known.numel() else torch.zeros(())
    assert error <= tolerance * max(1.0, float(known.abs().max())), f"off by {error:.1e}"


def assert_true(spec, op, parameters=None, *, tolerance=1e-12, alphas=(0.3, 1.0), call=None):
    """W z, W^T z and the resolvents are those of the dense matrix of ``parameters``."""
    dtype = next(iter(op.parameters())).dtype
    z = spec.randn(dtype=dtype)
    with torch.no_grad():
        rows, W = per_sample(z).double(), spec.matrix(parameters or op)
        found = (call or everything)(op, z, alphas)
        known = [rows @ W.mT, rows @ W]
        for alpha in alphas:
            V = dense_resolvent(W, alpha)
            known += [rows @ V.mT, rows @ V]
    for one, other in zip(found, known, strict=True):
        assert {leaf.dtype for leaf in flatten(one)} == {dtype}
        assert_equal(one, other, tolerance)


def everything(op, z, alphas):
    out = [op(z), op.adjoint(z)]
    for alpha in alphas:
        V = op.resolvent(alpha)
        out += [V(z), V.adjoint(z)]
    return out


def test_the_truth_is_torchs_convolution():
    kernel, x = randn(2, 3, 3, 3, seed=0), randn(4, 3, 5, 6, seed=1)
    known = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel)
    assert_equal(x.flatten(1) @ circular(kernel, (5, 6)).mT, known.flatten(1))


# W, its adjoint, its resolvent


@every
def test_agrees_with_the_dense_matrix(spec):
    op = spec.build(seed=1)
    with torch.no_grad():
        z, W = spec.randn(), spec.matrix(op)
        rows = per_sample(z)
        assert_equal(op(z), rows @ W.mT)
        assert_equal(op.adjoint(z), rows @ W)
        assert_equal(op.as_matrix(), W)
        for alpha in ALPHAS:
            V, known = op.resolvent(alpha), dense_resolvent(W, alpha)
            assert_equal(V(z), rows @ known.mT)
            assert_equal(V.adjoint(z), rows @ known)
        assert_equal(V.as_matrix(), known)
    assert op.shape == spec.shape()
    assert op.m == spec.m


@every
def test_is_monotone_and_bounded(spec):
    op = spec.build(seed=2)
    with torch.no_grad():
        W = op.as_matrix()
        assert smallest_eigenvalue(W) >= spec.m - 1e-10
        norm = torch.linalg.matrix_norm(torch.eye(len(W), dtype=DOUBLE) - W, ord=2)
        bound = float(op.lipschitz_bound())
    # Several tiers are bounded by the norms of their blocks; one is nearly exact.
    assert norm * (1 - 1e-12) <= bound <= (2.0 if len(spec.tiers) > 1 else 1.001) * norm


@each_kind
def test_the_bound_covers_the_rounding_of_weights_in_float32(spec):
    for seed in range(10):
        op = spec.build(seed=seed).float()
        bound = op.lipschitz_bound()
        with torch.no_grad():
            W = op.double().as_matrix()
        assert float(torch.linalg.matrix_norm(torch.eye(len(W), dtype=DOUBLE) - W, ord=2)) <= bound


@each_kind
def test_adjoint_is_the_adjoint(spec):
    op, x, y = spec.build(), spec.randn(seed=1), spec.randn(seed=2)

    def product(a, b):
        return (per_sample(a) * per_sample(b)).sum()

    with torch.no_grad():
        torch.testing.assert_close(product(op(x), y), product(x, op.adjoint(y)), rtol=1e-12, atol=1e-12)
        V = op.resolvent(0.7)
        torch.testing.assert_close(product(V(x), y), product(x, V.adjoint(y)), rtol=1e-12, atol=1e-12)


@each_kind
def test_single_precision_agrees(spec):
    assert_true(spec, spec.build(dtype=torch.float32), tolerance=1e-5, alphas=ALPHAS)


@each_kind
@pytest.mark.parametrize("batch", [0, 1])
def test_any_batch(spec, batch):
    op, z = spec.build(), spec.randn(batch=batch)
    with torch.no_grad():
        for out in everything(op, z, [0.3]):
            assert [leaf.shape for leaf in flatten(out)] == [leaf.shape for leaf in flatten(z)]


def batch_last(x):
    order = (*range(1, x.dim()), 0)
    return x.permute(order).contiguous().permute(x.dim() - 1, *range(x.dim() - 1))


@pytest.mark.parametrize("spec", [Spec(60, (1, 1), 0.1, True), Spec((25, 30), (1, 1), 0.1, True)], ids=str)
@pytest.mark.parametrize("h", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_many_channels(spec, h, dtype):
    """Also where B dominates, and inversion without pivoting would lose accuracy."""
    op, z = spec.build(dtype=dtype), spec.randn(dtype=dtype)
    with torch.no_grad():
        fill("h", h)(op)
        V, rows = dense_resolvent(spec.matrix(op), 1.0), per_sample(z).double()
        for found, known in ((op.resolvent(1.0)(z), rows @ V.mT), (op.resolvent(1.0).adjoint(z), rows @ V)):
            error = (per_sample(found).double() - known).norm() / known.norm()
            assert error <= (1e-11 if dtype == torch.float64 else 2e-4)


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "batch_last": batch_last,
    "expanded": lambda x: x[:1].expand_as(x),
    "strided": lambda x: torch.stack([x, -x], dim=-1)[..., 0],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "offset": lambda x: torch.cat([x, x])[len(x) :],
}


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_memory_does_not_matter(spec, layout):
    op = spec.build()
    z = spec.randn()
    odd = unflatten(z, [LAYOUTS[layout](leaf) for leaf in flatten(z)])
    before = [leaf.clone() for leaf in flatten(odd)]
    plain = unflatten(z, before)
    with torch.no_grad():
        for found, known in zip(everything(op, odd, [0.3]), everything(op, plain, [0.3]), strict=True):
            assert_equal(found, known, 1e-14)
    assert all(torch.equal(one, other) for one, other in zip(flatten(odd), before, strict=True))  # untouched


# Monotone for every parameter an optimiser can reach


def basis_matrix(spec, op):
    """W by its columns, differentiable in the parameters of ``op``."""
    return per_sample(op(spec.basis(next(op.parameters()).dtype))).mT


def fill(names, value):
    def change(op):
        for name, p in op.named_parameters():
            if name.split(".")[0] in names:
                p.copy_(torch.as_tensor(value(p) if callable(value) else value, dtype=p.dtype).expand_as(p))

    return change


EXTREMES = {
    "g=-2000": fill("gs", -2000.0),
    "g=-500": fill("gs", -500.0),
    "g=-5": fill("gs", -5.0),
    "g=50": fill("gs", 50.0),
    "A=0": fill("A", 0.0),
    "B=0": fill("B", 0.0),
    "S=0": fill("S", 0.0),
    "all zero": fill("ABSghs", 0.0),
    "h=0": fill("h", 0.0),
    "h=1e6": fill("h", 1e6),
    "h=-1e6": fill("h", -1e6),
    "1e8": fill("ABS", lambda p: 1e8 * p),
    "1e-30": fill("ABS", lambda p: 1e-30 * p),
}


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_parameters_stay_monotone_and_finite(spec, extreme, dtype):
    op = spec.build(dtype=dtype)
    with torch.no_grad():
        EXTREMES[extreme](op)
    W = basis_matrix(spec, op)
    assert torch.isfinite(W).all()
    wide = W.detach().double()
    rounding = torch.finfo(dtype).eps * torch.linalg.matrix_norm(wide, ord=2) * len(W)
    assert smallest_eigenvalue(wide) >= spec.m - 1e-10 - rounding
    for p, grad in zip(op.parameters(), torch.autograd.grad(W.sum(), list(op.parameters())), strict=True):
        assert torch.isfinite(grad).all(), p.shape
    with torch.no_grad():
        for alpha in (0.01, 1.0):
            V = op.resolvent(alpha)
            z = spec.randn(dtype=dtype)
            for out in (V(z), V.adjoint(z)):
                # The resolvent of a strongly monotone operator is a contraction.
                size = per_sample(out).norm(dim=1) / per_sample(z).norm(dim=1)
                assert (size <= (1 + 1e-3) / (1 + alpha * spec.m)).all()
        assert float(op.lipschitz_bound()) >= (1 - 1e-3) * float(torch.linalg.matrix_norm(wide - torch.eye(len(W)), 2))


@each_kind
@pytest.mark.parametrize("lr", [0.03, 1.0])
def test_no_optimiser_can_break_monotonicity(spec, lr):
    op = spec.build(seed=3)
    optimizer = torch.optim.Adam(op.parameters(), lr=lr)
    lowest = []
    for _ in range(60):
        W = basis_matrix(spec, op)
        eigenvalue = smallest_eigenvalue(W)
        lowest.append(float(eigenvalue.detach()))
        assert lowest[-1] >= spec.m - 1e-10
        optimizer.zero_grad()
        eigenvalue.backward()
        optimizer.step()
    assert min(lowest) - spec.m <= 0.1 * (lowest[0] - spec.m) + 1e-3  # it did try


# Gradients


def gradients(spec, op, call, z, cotangent):
    leaves = [leaf.detach().requires_grad_() for leaf in flatten(z)]
    value = per_sample(call(unflatten(z, leaves)))
    return torch.autograd.grad((value * cotangent).sum(), [*leaves, *op.parameters()], allow_unused=True)


@pytest.mark.parametrize("spec", [s for s in ALL if s.m == 0.1], ids=str)
def test_gradients_are_those_of_the_dense_matrix(spec):
    op, z = spec.build(seed=4), spec.randn()
    cotangent = per_sample(spec.randn(seed=5))
    pairs = [
        (op, lambda z: unrow(per_sample(z) @ spec.matrix(op).mT, z)),
        (op.adjoint, lambda z: unrow(per_sample(z) @ spec.matrix(op), z)),
    ]
    for call, truth in pairs:
        found, known = (gradients(spec, op, f, z, cotangent) for f in (call, truth))
        for name, one, other in itertools.zip_longest([*"z" * len(flatten(z)), *op.state_dict()], found, known):
            other = torch.zeros_like(one) if other is None else other  # a dense 1x1 B takes no part
            one = torch.zeros_like(other) if one is None else one
            torch.testing.assert_close(
                one, other, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


TINY = [Spec(2, None, 0.1, True), Spec(1, (1, 2), 0.1, True), Spec((1, 1), (1, 1), 0.1, True)]


@pytest.mark.parametrize("spec", TINY, ids=str)
def test_first_and_second_derivatives_match_finite_differences(spec):
    op, z = spec.build(seed=6), spec.randn(batch=2)
    names, parameters = zip(*op.named_parameters(), strict=True)
    leaves = [leaf.requires_grad_() for leaf in flatten(z)]

    def f(*tensors):
        state = unflatten(z, tensors[: len(leaves)])
        return per_sample(functional_call(op, dict(zip(names, tensors[len(leaves) :], strict=True)), (state,)))

    arguments = [*leaves, *parameters]
    assert torch.autograd.gradcheck(f, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, arguments, fast_mode=True)


@each_kind
@pytest.mark.parametrize("wanted", ["z", "parameters"])
def test_the_resolvent_is_differentiable(spec, wanted):
    op = spec.build()
    z = spec.randn()
    if wanted == "z":
        op.requires_grad_(False)
        z = unflatten(z, [leaf.requires_grad_() for leaf in flatten(z)])
    sources = flatten(z) if wanted == "z" else list(op.parameters())
    cotangent = per_sample(spec.randn(seed=7))
    known = torch.autograd.grad((per_sample(z) @ dense_resolvent(spec.matrix(op), 0.3).mT * cotangent).sum(), sources)
    for _ in range(2):  # the second time round, it must not meet a graph that has been used up
        found = torch.autograd.grad((per_sample(op.resolvent(0.3)(z)) * cotangent).sum(), sources)
        for one, other in zip(found, known, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# Never stale


def sgd(op, **options):
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1, momentum=0.9, **options)
    for p in op.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return op


def adam(op, **options):
    optimizer = torch.optim.Adam(op.parameters(), lr=0.1, **options)
    for p in op.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return op


def edit(change):
    def apply(op):
        with torch.no_grad():
            for p in op.parameters():
                change(p)
        return op

    return apply


def set_data(p):
    p.data = p.data + 0.1


def one_entry(op):
    op_parameters = list(op.parameters())
    op_parameters[-1].data.view(-1)[-1] += 1e-6
    return op


def load(op, **options):
    op.load_state_dict({name: value + 0.1 for name, value in op.state_dict().items()}, **options)
    return op


def replaced(op):
    for name, p in list(op.named_parameters()):
        owner = op.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(p.detach() + 0.1))
    return op


def through_bytes(op):
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    return randomize(torch.load(buffer, weights_only=False), seed=9)


CHANGES = {
    "sgd": sgd,
    "sgd fused": lambda op: sgd(op, fused=True),
    "adam": adam,
    "adam fused": lambda op: adam(op, fused=True),
    "adam foreach": lambda op: adam(op, foreach=True),
    "copy_": edit(lambda p: p.copy_(p + 0.1)),
    "mul_": edit(lambda p: p.mul_(1.3)),
    ".data in place": edit(lambda p: p.data.add_(0.1)),
    ".data replaced": edit(set_data),
    "numpy": edit(lambda p: p.detach().numpy().__iadd__(0.1)),
    "one entry of .data": one_entry,
    "load_state_dict": load,
    "load_state_dict assign": lambda op: load(op, assign=True),
    "new parameters": replaced,
    "deepcopy, then edited": lambda op: randomize(copy.deepcopy(op), seed=9),
    "pickle, then edited": lambda op: randomize(pickle.loads(pickle.dumps(op)), seed=9),
    "torch.save, then edited": through_bytes,
    "reset requires_grad": lambda op: op.requires_grad_(False),
}


@normalized
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("change", CHANGES)
def test_never_stale(spec, change, training):
    op = spec.build().train(training)
    assert_true(spec, op)
    after = CHANGES[change](op)
    assert_true(spec, after)
    assert_true(spec, after.train(not training))
    edit(lambda p: p.data.mul_(0.9))(after)  # and once more, in the other mode
    assert_true(spec, after)


@each_kind
def test_a_resolvent_in_hand_is_of_one_moment(spec):
    """It may follow the parameters or keep those it was made for, but must not mix them."""
    op, z = spec.build(), spec.randn()
    V, truth = op.resolvent(0.3), dense_resolvent(spec.matrix(op), 0.3).detach()
    with torch.no_grad():
        V(z)
        edit(lambda p: p.data.mul_(1.2))(op)
        now = dense_resolvent(spec.matrix(op), 0.3).detach()
        rows = per_sample(z)
        of_then = all(
            torch.allclose(per_sample(a), b, rtol=1e-10, atol=1e-10)
            for a, b in ((V(z), rows @ truth.mT), (V.adjoint(z), rows @ truth))
        )
        of_now = all(
            torch.allclose(per_sample(a), b, rtol=1e-10, atol=1e-10)
            for a, b in ((V(z), rows @ now.mT), (V.adjoint(z), rows @ now))
        )
        assert of_then or of_now
        assert_true(spec, op)


@each_kind
def test_a_copy_is_independent(spec):
    op = spec.build()
    early = copy.deepcopy(op)
    assert_true(spec, op)
    late = copy.deepcopy(op)
    edit(lambda p: p.data.add_(0.1))(op)
    for one in (op, early, late):
        assert_true(spec, one)
    edit(lambda p: p.data.add_(0.2))(late)
    for one in (op, early, late):
        assert_true(spec, one)


@each_kind
def test_precision_can_be_changed(spec):
    op = spec.build()
    assert_true(spec, op)
    assert_true(spec, op.float(), tolerance=1e-5)
    assert_true(spec, op.double())  # rounded parameters, but exactly those


@each_kind
def test_alpha_can_be_changed(spec):
    op = spec.build()
    assert_true(spec, op, alphas=[0.3, 1.0, 0.3, 7.0, 1, 0.3000001, 0.3])


class Everything(nn.Module):
    """All of an operator in one forward, so that functional_call reaches it."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, z, alphas):
        return everything(self.op, z, alphas)


@each_kind
def test_parameters_swapped_for_one_call(spec):
    op = spec.build()
    whole = Everything(op)
    assert_true(spec, op)
    others = {name: p.detach() + 0.1 for name, p in op.named_parameters()}
    inner = {f"op.{name}": value for name, value in others.items()}
    for _ in range(2):
        assert_true(spec, op, others, call=lambda op, *args: functional_call(whole, inner, args))
        assert_true(spec, op)


class Shifted(nn.Module):
    """The shift is a buffer, which comparing parameters alone would miss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor(0.1, dtype=DOUBLE))

    def forward(self, weight):
        return weight + self.shift


@pytest.mark.parametrize("spec", [s for s in BOTH if not s.tiered], ids=str)
def test_parametrized_parameters(spec):
    op = spec.build()
    assert_true(spec, op)
    raw = {name: p.detach().clone() for name, p in op.named_parameters()}
    shifted = Shifted()
    parametrize.register_parametrization(op, "A", shifted)
    assert_true(spec, op, {**raw, "A": raw["A"] + 0.1})
    op.parametrizations.A.original.data.mul_(2)
    assert_true(spec, op, {**raw, "A": 2 * raw["A"] + 0.1})
    with parametrize.cached():
        assert_true(spec, op, {**raw, "A": 2 * raw["A"] + 0.1})
    shifted.shift.fill_(0.5)
    assert_true(spec, op, {**raw, "A": 2 * raw["A"] + 0.5})


@each_kind
def test_another_m_is_another_operator(spec):
    """m may be changeable or not, but never half changed."""
    op = spec.build()
    assert_true(spec, op)
    with contextlib.suppress(AttributeError):
        op.m = 0.7
    assert_true(Spec(spec.channels, spec.size, op.m, spec.normalize), op)


@each_kind
def test_what_is_kept_has_no_graph(spec):
    op, z = spec.build(), spec.randn()
    with torch.no_grad():
        op.resolvent(0.3)(z), op.lipschitz_bound()
    op.requires_grad_(False)
    assert not any(leaf.requires_grad for leaf in flatten(op.resolvent(0.3)(z)))


@normalized
def test_inference_mode_leaves_nothing_behind(spec):
    op, z = spec.build(), spec.randn()
    with torch.inference_mode():
        everything(op, z, [0.3]), op.lipschitz_bound()
    assert_true(spec, op)
    op.requires_grad_(False)
    leaves = [leaf.requires_grad_() for leaf in flatten(z)]
    grads = torch.autograd.grad(per_sample(op.resolvent(0.3)(unflatten(z, leaves))).sum(), leaves)
    rows = torch.ones_like(per_sample(z)) @ dense_resolvent(spec.matrix(op), 0.3)
    assert_equal(per_sample(unflatten(z, grads)), rows)


@normalized
def test_autocast_leaves_nothing_behind(spec):
    """Products may be rounded to bfloat16 inside; what is kept for later must not be."""
    op, z = spec.build(dtype=torch.float32), spec.randn(dtype=torch.float32)
    with torch.no_grad():
        W = spec.matrix(op)
        rows, V = per_sample(z).double(), dense_resolvent(W, 0.3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = everything(op, z, [0.3])
        for one, other in zip(found, (rows @ W.mT, rows @ W, rows @ V.mT, rows @ V), strict=True):
            assert_equal(one, other, 0.05)
    assert_true(spec, op, tolerance=1e-5)


# Factorised once


class Factorisations(TorchDispatchMode):
    """Counts the calls that cost as much as an inverse."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        words = ("inv", "solve", "lu_factor", "cholesky", "linalg_ldl", "linalg_qr", "linalg_svd", "linalg_eig")
        self.count += any(word in func.__name__ for word in words)
        return func(*args, **(kwargs or {}))


def factorisations(op, z, alpha):
    with Factorisations() as counter, torch.no_grad():
        V = op.resolvent(alpha)
        V(z), V.adjoint(z)
    return counter.count


@each_kind
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_factorised_once_per_weight_update(spec, training):
    op, z = spec.build().train(training), spec.randn()
    first = factorisations(op, z, 0.3)
    assert first > 0
    assert factorisations(op, z, 0.3) == 0
    op(z), op.adjoint(z)
    assert factorisations(op, z, 0.3) == 0
    edit(lambda p: p.data.add_(0.1))(op)
    assert 0 < factorisations(op, z, 0.3) <= first
    assert factorisations(op, z, 0.3) == 0


# Misuse


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ops.MonotoneLinear(3, m=0), "m is 0; it must be a number above 0"),
        (lambda: ops.MonotoneLinear(3, m=float("nan")), "m is nan; it must be a number above 0"),
        (lambda: ops.MonotoneConv2d(3, (4, 4), m=-1.0), "m is -1.0"),
        (lambda: ops.MonotoneMultiTier((3, 2), (4, 4), m="1"), "m is '1'"),
        (lambda: ops.MonotoneLinear(3, m=True), "m is True"),
        (lambda: ops.MonotoneLinear(0), "features is 0; it must be a whole number of at least 1"),
        (lambda: ops.MonotoneLinear(2.0), "features is 2.0"),
        (lambda: ops.MonotoneLinear(True), "features is True"),
        (lambda: ops.MonotoneConv2d(0, (4, 4)), "channels is 0"),
        (lambda: ops.MonotoneConv2d(3, 4), r"size is 4; it must be \(height, width\)"),
        (lambda: ops.MonotoneConv2d(3, (4, 0)), r"size is \(4, 0\)"),
        (lambda: ops.MonotoneConv2d(3, (4, 4, 4)), r"size is \(4, 4, 4\)"),
        (lambda: ops.MonotoneMultiTier((), (4, 4)), r"channels is \(\); it must be a tuple of whole numbers"),
        (lambda: ops.MonotoneMultiTier(3, (4, 4)), "channels is 3; it must be a tuple"),
        (lambda: ops.MonotoneMultiTier((3, 0), (4, 4)), r"channels is \(3, 0\)"),
        (lambda: ops.MonotoneMultiTier((3, 2), (4.0, 4)), r"size is \(4.0, 4\)"),
        (lambda: ops.MonotoneLinear(3, normalize="no"), "normalize is 'no'; it must be True or False"),
        (lambda: ops.MonotoneConv2d(3, (4, 4), normalize=None), "normalize is None"),
        (lambda: ops.MonotoneMultiTier((3, 2), (4, 4), normalize=1), "normalize is 1"),
        (lambda: ops.MonotoneProblem(ops.MonotoneLinear), "operator has type .*; it must be a monotone one"),
        (lambda: ops.MonotoneProblem(ops.MonotoneLinear(3), None), "activation is None"),
    ],
)
def test_bad_options(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf"), "auto", True, torch.ones(())])
def test_bad_alpha(alpha):
    with pytest.raises((ValueError, TypeError), match="alpha is .*; it must be a number above 0"):
        ops.MonotoneLinear(3).resolvent(alpha)


@pytest.mark.parametrize(
    ("spec", "z", "words"),
    [
        (Spec(3), torch.zeros(2, 4), r"MonotoneLinear acts on \(batch, 3\); given: \(2, 4\)"),
        (Spec(3), torch.zeros(3), r"given: \(3,\)"),
        (Spec(3), (torch.zeros(2, 3),), "given: .*tuple"),
        (
            Spec(2, (3, 4)),
            torch.zeros(1, 2, 3, 4),
            r"MonotoneConv2d .*\(batch, 2, 5, 6\); given: \(1, 2, 3, 4\)",
        ),
        (Spec(2, (3, 4)), torch.zeros(2, 5, 6), r"\(batch, 2, 5, 6\); given: \(2, 5, 6\)"),
        (
            Spec((2, 1), (2, 4)),
            torch.zeros(1, 2, 4, 6),
            r"MonotoneMultiTier acts on a tuple of .*\(batch, 1, 3, 4\); given",
        ),
        (Spec((2, 1), (2, 4)), (torch.zeros(1, 2, 4, 6),), r"a tuple of \(batch, 2, 4, 6\), \(batch, 1, 3, 4\); given"),
    ],
)
def test_a_value_of_another_shape(spec, z, words):
    op = spec.build(dtype=torch.float32)
    for call in (op, op.adjoint, op.resolvent(0.3), op.resolvent(0.3).adjoint):
        with pytest.raises(ValueError, match=words):
            call(z)


@pytest.mark.parametrize("spec", BOTH[2:], ids=str)
@pytest.mark.parametrize("change", ["higher", "wider", "channels", "image"])
def test_a_grid_of_another_size(spec, change):
    """At every entry point, with a reminder of the border."""
    op = spec.build(dtype=torch.float32)
    z = spec.randn(dtype=torch.float32)
    changes = {
        "higher": lambda x: F.pad(x, (0, 0, 0, 1)),
        "wider": lambda x: F.pad(x, (0, 2)),
        "channels": lambda x: torch.cat([x, x], dim=1),
        "image": lambda x: x[:, :, :-2, :-2],
    }
    wrong = unflatten(z, [changes[change](leaf) for leaf in flatten(z)])
    words = r"Monotone\w+ acts on .*given: .*The grids? (is|are) .* of images of \(3, 2\).* a border of zeros"
    V = op.resolvent(0.3)
    problem = ops.MonotoneProblem(op)
    zero = unflatten(z, [torch.zeros_like(leaf) for leaf in flatten(wrong)])  # where W z is left out
    for call in (op, op.adjoint, op.recorded, V, V.adjoint, lambda z: problem(z, z), lambda _: problem(zero, zero)):
        with pytest.raises(ValueError, match=words):
            call(wrong)


@each_kind
def test_a_value_of_another_type(spec):
    op = spec.build(dtype=torch.float32)
    for call in (op, op.adjoint, op.recorded, op.resolvent(0.3), op.resolvent(0.3).adjoint):
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
            z = spec.randn()
            z = unflatten(z, [leaf.to(dtype) for leaf in flatten(z)])
            with pytest.raises(TypeError, match=rf"has weights in torch.float32 and z is {dtype}: give z.to"):
                call(z)


@each_kind
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_widens_what_it_made_narrow(spec, low):
    op = spec.build(dtype=torch.float32)
    z = spec.randn(dtype=torch.float32)
    narrow = unflatten(z, [leaf.to(low) for leaf in flatten(z)])
    wide = unflatten(z, [leaf.float() for leaf in flatten(narrow)])
    with torch.no_grad():
        known = everything(op, wide, [0.3])
        with torch.autocast("cpu", low):
            found = everything(op, narrow, [0.3])
    for one, other in zip(found, known, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(flatten(one), flatten(other), strict=True))


# Weights that are none


@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_not_finite(spec, value):
    """No error of LAPACK: W and its resolvent are as bad as the weights, and no bound holds."""
    op, z = spec.build(dtype=torch.float32), spec.randn(dtype=torch.float32)
    with torch.no_grad():
        next(op.parameters()).view(-1)[0] = value
        finite = torch.isfinite(op.as_matrix()).all()
        assert finite == (value == 1e30 and spec.normalize)
        V = op.resolvent(0.3)
        for out in (op(z), op.adjoint(z), V(z), V.adjoint(z)):
            assert bool(torch.isfinite(per_sample(out)).all()) == bool(finite)
    assert (op.lipschitz_bound() == float("inf")) == (not finite)
    assert (op.typical_size() == float("inf")) == (not finite)


# Memory


def bytes_of(factors):
    if isinstance(factors, torch.Tensor):
        return factors.nbytes
    if isinstance(factors, list):
        return sum(map(bytes_of, factors))
    return 0 if factors is None else sum(map(bytes_of, vars(factors).values()))


@every
def test_the_footprint_is_what_a_factorisation_takes(spec):
    op = spec.build()
    with torch.no_grad():
        factors = op.resolvent(0.3).factorisation.factors
    assert 8 * sum(op.footprint()) == bytes_of(factors)


@pytest.mark.parametrize(
    ("make", "recorded"),
    [
        (lambda: ops.MonotoneConv2d(24, (30, 30)), False),
        (lambda: ops.MonotoneConv2d(24, (30, 30)), True),
        (lambda: ops.MonotoneMultiTier((16, 24, 8), (31, 30)), False),
        (lambda: ops.MonotoneMultiTier((16, 24, 8), (31, 30)), True),
        (lambda: ops.MonotoneLinear(900), False),
    ],
)
def test_the_estimate_is_near_the_memory_that_is_taken(make, recorded, tmp_path, monkeypatch):
    """Measured with torch's record of every allocation, which leaves out the workspace of LAPACK."""
    op = make()
    monkeypatch.setattr(linear, "ALWAYS", 0)
    with torch.set_grad_enabled(recorded):
        run = op.derive if recorded else lambda: op.resolvent(0.3)
        run()  # tables of cosines and sines are made
        op.forget()
        taken = peak_memory(run, tmp_path / "trace.json")
    monkeypatch.setattr(linear, "available_memory", lambda device: 0)
    with pytest.raises(torch.OutOfMemoryError) as error:
        op.require_memory("a test", recorded)
    words = re.search(r"needs ([\d.]+) GB to compute a test", str(error.value))
    needed = 1e9 * float(words[1])
    assert 0.7 * taken <= needed <= 1.6 * taken, (needed, taken)


def test_what_does_not_fit_is_rejected_before_it_is_computed(monkeypatch):
    monkeypatch.setattr(linear, "available_memory", lambda device: 3 * 10**9)
    op = ops.MonotoneConv2d(200, (224, 224))  # 16 GB; nothing of that size is made here
    words = (
        r"MonotoneConv2d\(200, size=\(224, 224\), m=1, normalize=True\) needs 28.9 GB to compute its resolvent, of "
        r"which it keeps 16.5 GB, and 3 GB are available on cpu.*fewer channels or smaller images"
    )
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError, match=words):
            op.resolvent(0.5)
        z = torch.zeros(1, 1).expand(1, 200 * 226 * 226).view(1, 200, 226, 226)
        with pytest.raises(torch.OutOfMemoryError, match="to compute a product with it, of which it keeps 16.5 GB"):
            op(z)
    with pytest.raises(torch.OutOfMemoryError, match="needs 49.5 GB to compute its resolvent"):
        op.resolvent(0.5)  # recorded, which takes more
    problem = ops.MonotoneProblem(op)
    layer = eq.Equilibrium(problem, initial=problem.start, solver=eq.PeacemanRachford())
    with pytest.raises(torch.OutOfMemoryError, match=r"MonotoneConv2d\(200, size=\(224, 224\)"):
        layer(z)


def test_what_fits_is_allowed(monkeypatch):
    for device_memory in (None, 10**12):  # None: it cannot be found out
        monkeypatch.setattr(linear, "available_memory", lambda device, found=device_memory: found)
        monkeypatch.setattr(linear, "ALWAYS", 0)
        spec = KINDS[1]
        assert_true(spec, spec.build())


def test_available_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    42 kB\n")
    assert linear.machine_memory(meminfo) == 42 * 1024
    assert linear.machine_memory(tmp_path / "nowhere") is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert linear.container_memory(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert linear.container_memory(tmp_path) is None
    assert linear.container_memory(tmp_path / "nowhere") is None
    found = linear.available_memory(torch.device("cpu"))
    assert found is None or found > 10**6
    assert linear.available_memory(torch.device("meta")) is None


def factorisations_alive():
    """Without garbage collection: memory must be freed immediately."""
    return [thing for thing in gc.get_objects() if type(thing) is Factorisation]


@each_kind
def test_one_factorisation_is_kept_for_each_alpha_in_use(spec):
    gc.collect()  # what other tests have left
    before = len(factorisations_alive())
    op, z = spec.build(), spec.randn()
    with torch.no_grad():
        for alpha in (0.1, 0.2, 0.3, 0.4):
            op.resolvent(alpha)(z)
        assert len(factorisations_alive()) == before + 1  # the others are no longer in use
        held = [op.resolvent(alpha) for alpha in (0.1, 0.2)]
        assert factorisations(op, z, 0.1) == factorisations(op, z, 0.2) == 0
        assert len(factorisations_alive()) == before + 2
        edit(lambda p: p.data.add_(0.1))(op)
        op.resolvent(0.3)(z)
        assert len(factorisations_alive()) == before + 3  # those in hand belong to whoever holds them
        held.clear()
        assert len(factorisations_alive()) == before + 1
    del op
    assert len(factorisations_alive()) == before


def test_training_keeps_no_stale_factorisation():
    spec = KINDS[1]
    gc.collect()  # what other tests have left
    before = len(factorisations_alive())
    op = spec.build()
    layer = eq.Equilibrium(ops.MonotoneProblem(op), initial=op.shape, solver=eq.PeacemanRachford())
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        layer(spec.randn()).square().sum().backward()
        optimizer.step()
        assert len(factorisations_alive()) == before + 1


@pytest.mark.parametrize("spec", [Spec(2, (24, 2), 0.1), Spec((2, 1), (23, 3), 0.1)], ids=str)
def test_tall_images_factorised_a_few_frequencies_at_a_time(spec, monkeypatch):
    monkeypatch.setattr("equipoise.operators.convolution.AT_ONCE", 100)
    assert_true(spec, spec.build())


GRIDS = [((5, 6), 1), ((6, 5), 1), ((6, 8), 2), ((1, 1), 1), ((2, 4), 2)]
SPLIT_GRIDS = [((24, 5), 1), ((26, 4), 1), ((26, 6), 2), ((28, 4), 2)]  # even and odd rows are transformed apart


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("grid", "aliases"), GRIDS + SPLIT_GRIDS)
def test_the_transform_is_the_fourier_transform(grid, aliases, recorded):
    transform = spectrum(grid, torch.zeros((), dtype=DOUBLE), aliases)
    assert (len(transform.parities) == 2) == ((grid, aliases) in SPLIT_GRIDS)
    x = randn(*grid, 3, 2, seed=0).requires_grad_(recorded)
    spectra = transform.forward(x)
    every_frequency = torch.fft.fft2(x, dim=(0, 1))[transform.rows][:, transform.columns].transpose(0, 1).flatten(0, 1)
    expected = torch.cat([every_frequency.real, every_frequency.imag], dim=1)
    torch.testing.assert_close(spectra, expected, rtol=1e-12, atol=1e-12)
    same = transform.inverse(spectra)
    torch.testing.assert_close(same, x, rtol=1e-12, atol=1e-12)
    if recorded:
        cotangent = randn(*same.shape, seed=1)
        (pulled,) = torch.autograd.grad(same, x, cotangent)
        torch.testing.assert_close(pulled, cotangent, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("grid", "aliases"), GRIDS + SPLIT_GRIDS)
def test_correlation_is_the_gradient_of_the_kernel(grid, aliases, monkeypatch):
    monkeypatch.setattr("equipoise.operators.spectrum.AT_ONCE", 50)  # a few frequencies at a time
    transform = spectrum(grid, torch.zeros((), dtype=DOUBLE), aliases)
    kernel = randn(4, 3, 5, 3, seed=0).requires_grad_()
    x, cotangent = randn(*grid, 3, 2, seed=1), images(randn(*grid, 4, 2, seed=2))
    spectra = transform.forward(x)
    product = images(transform.inverse(torch.bmm(real(transform.blocks(kernel)), spectra)))
    (expected,) = torch.autograd.grad(product, kernel, cotangent)
    torch.testing.assert_close(transform.correlation(cotangent, spectra, (5, 3)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("grid", "aliases"), GRIDS + SPLIT_GRIDS)
def test_pull_is_the_transpose_of_the_inverse_transform(grid, aliases):
    transform = spectrum(grid, torch.zeros((), dtype=DOUBLE), aliases)
    spectra = randn(transform.count, 2 * 3, 2, seed=0)
    cotangent = randn(*grid, 3, 2, seed=1)
    inside = (transform.inverse(spectra) * cotangent).sum()
    torch.testing.assert_close((spectra * transform.pull(images(cotangent))).sum(), inside, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=["rows", "columns", "mixed"])
def test_is_zero_looks_at_every_number(layout):
    tensor = torch.zeros(3, 4, 5).permute(layout)
    assert all(map(is_zero, (tensor, -tensor, tensor[:0])))
    for value in (1e-45, -1e30, float("nan"), float("inf")):
        changed = tensor.clone()
        changed[-1, -1, -1] = value
        assert not is_zero(changed)


def test_distances_of_rows_in_either_memory_order():
    a, b = randn(4, 7, seed=0), randn(4, 7, seed=1)
    expected = torch.linalg.vector_norm(a - b, dim=1)
    torch.testing.assert_close(row_distances(a, b), expected)
    torch.testing.assert_close(row_distances(a.T.contiguous().T, b.T.contiguous().T), expected)
    torch.testing.assert_close(row_distances(a.T.contiguous().T, b), expected)

"""Heritage, diversity, h and T, against the equations of the paper written plainly."""

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from corpus import DOUBLE, randn, true_residual
from dense_opteq import (
    ACTIVATIONS,
    RINGS,
    SIZES_OF_RINGS,
    Truth,
    cell_of,
    close,
    convolution,
    each_ring,
    each_size,
    features,
    images_of,
    matrices,
    model_of,
    pictures,
    rows,
    solved,
    weighed,
    widths,
)
from equipoise.models.opteq.ring import Ring, heritage

# H and the coupling


@each_size
@each_ring
def test_h_is_that_of_the_paper(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    truth = Truth(sizes, ring)
    expected = [truth.h([matrices(part)[k] for part in z], rows(t, k)) for k in range(2)]
    expected = [images_of([sample[i] for sample in expected], size) for i, size in enumerate(sizes)]
    close(ring.h(z, t), expected)
    close([ring.h_of(i, z, t) for i in range(len(z))], expected)


@each_size
@each_ring
def test_heritage_diversity_and_coupling_are_those_of_the_paper(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    truth = Truth(sizes, ring)
    samples = [[matrices(part)[k] for part in z] for k in range(2)]
    close([heritage(z)], [torch.stack([truth.H(sample) for sample in samples])])
    close([ring.total_diversity(z, t)], [torch.stack([truth.D(s, rows(t, k)) for k, s in enumerate(samples)])])
    close([ring.coupling(z, t)], [torch.stack([truth.coupling(s, rows(t, k)) for k, s in enumerate(samples)])])


@each_size
@each_ring
def test_h_is_the_negative_gradient_of_the_coupling(sizes, ring):
    z, t = [part.requires_grad_() for part in features(sizes)], widths(sizes, ring)
    pulls = torch.autograd.grad(ring.coupling(z, t).sum(), z)
    close(ring.h(z, t), [-pull for pull in pulls])


@pytest.mark.parametrize("t", [1e-3, 1e-9, 0.3])
def test_smoothed_diversity_is_near_the_papers_and_needs_no_difference_of_large_numbers(t):
    ring = Ring(diversity=1.0)
    z, width = features([(6, 6)] * 3), torch.full((2, 3), t, dtype=DOUBLE)
    hard, smooth = ring.total_diversity(z), ring.total_diversity(z, width)
    assert (smooth < hard + 1e-12).all()
    assert (smooth > hard - t * 3 * 12 - 1e-12).all()  # 3 edges of 12 products, each within t
    tiny = [1e-8 * part for part in z]
    by_series = sum(ring.products(e, tiny).square().sum(dim=(1, 2)) for e in range(3)) / (2 * t)
    if t == 0.3:
        torch.testing.assert_close(ring.total_diversity(tiny, width), by_series, rtol=1e-10, atol=0)


def test_t_is_a_share_of_the_size_of_the_products():
    sizes, ring = SIZES_OF_RINGS["8 4 2 1"], Ring(diversity=0.1, smoothing=0.07)
    z, truth = features(sizes), Truth(sizes, ring)
    for k in range(2):
        for e in range(4):
            M = truth.product([matrices(part)[k] for part in z], e)
            M = M - torch.diag(torch.diag(M))
            expected = 0.07 * torch.sqrt((M**2).mean() + 1e-12)
            torch.testing.assert_close(ring.thresholds(z)[k, e], expected, rtol=1e-12, atol=0)
    zeros = tuple(torch.zeros_like(part) for part in z)
    t = ring.thresholds(zeros)
    assert (t > 0).all()
    assert all(torch.equal(h, torch.zeros_like(h)) for h in ring.h(zeros, t))


@each_size
@each_ring
def test_channels_last_gives_the_same_and_stays(sizes, ring):
    z, t = features(sizes), widths(sizes, ring)
    last = [part.contiguous(memory_format=torch.channels_last) for part in z]
    found = ring.h(last, t)
    close(found, ring.h(z, t))
    close([ring.coupling(last, t)], [ring.coupling(z, t)])
    if (1, 1) not in sizes and sizes != SIZES_OF_RINGS["no whole ratio"]:  # one pixel has either order
        assert all(h.is_contiguous(memory_format=torch.channels_last) for h in found)
    assert all(h.is_contiguous() for h in ring.h(z, t))


# T


def plain_sweep(cell, z, x, t):
    """Algorithm 2: each branch overwrites its z before the next one looks."""
    truth, s = Truth(cell.sizes, cell.ring), ACTIVATIONS["tanh"][0]
    ys, zs = [], []
    for k in range(len(z[0])):
        new, y = [matrices(part)[k] for part in z], []
        for i, size in enumerate(cell.sizes):
            W = convolution(cell.W[i].weight(size), size)
            h = truth.h(new, rows(t, k))[i]
            y.append(s(W @ h.T.flatten() + x[i][k].flatten()))
            new[i] = (W.T @ y[i]).reshape(4, -1).T
        ys.append([part.reshape(4, *size) for part, size in zip(y, cell.sizes, strict=True)])
        zs.append([part.T.reshape(4, *size) for part, size in zip(new, cell.sizes, strict=True)])
    return [[torch.stack(parts) for parts in zip(*found, strict=True)] for found in (ys, zs)]


@pytest.mark.parametrize("sizes", [SIZES_OF_RINGS[name] for name in ("1 alike", "2 alike", "3 alike", "6 3")], ids=str)
def test_gauss_seidel_is_algorithm_2(sizes):
    cell = cell_of(sizes, activation="tanh")
    with torch.no_grad():
        z, (x, t) = features(sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
        expected = plain_sweep(cell, z, x, t)
        for found, true in zip(cell.sweep(z, x, t), expected, strict=True):
            close(found, true)
        close(cell(z, x, t), expected[1])


@each_size
def test_jacobi_moves_all_branches_at_once(sizes):
    cell = cell_of(sizes, activation="tanh", order="jacobi")
    with torch.no_grad():
        z, (x, t) = features(sizes), cell.prepare(randn(2, 3, 8, 8, seed=5))
        h = cell.ring.h(z, t)
        expected = []
        for i, size in enumerate(sizes):
            W = convolution(cell.W[i].weight(size), size)
            y = torch.tanh(h[i].flatten(1) @ W.T + x[i].flatten(1))
            expected.append((y @ W).reshape(z[i].shape))
        close(cell(z, x, t), expected)


def test_x_is_u_g_plus_b_and_t_is_that_of_the_first_iterate():
    cell, g = cell_of(SIZES_OF_RINGS["6 3"], activation="tanh", order="jacobi"), randn(2, 3, 8, 8, seed=5)
    with torch.no_grad():
        x, t = cell.prepare(g)
        for i, size in enumerate(cell.sizes):
            seen = F.conv2d(F.adaptive_avg_pool2d(g, size), cell.U[i].weight(size), cell.b[i], padding=1)
            close([x[i]], [seen])
        close([t], [cell.ring.thresholds(cell(cell.start(x), x, t))])


@pytest.mark.parametrize("sizes", [SIZES_OF_RINGS[name] for name in ("2 alike", "3 alike", "8 4 2 1")], ids=str)
@pytest.mark.parametrize("ring", [RINGS["heritage"], RINGS["both"], RINGS["diversity"]], ids=str)
def test_both_orders_have_the_same_equilibrium(sizes, ring):
    cell, g = cell_of(sizes, ring, norm=0.8), randn(2, 3, 8, 8, seed=5)
    _, one = solved(cell, g)
    cell.order = "jacobi"
    inputs, other = solved(cell, g)
    close(one, other, 1e-10)
    with torch.no_grad():
        assert true_residual(cell, other, *inputs).max() < 1e-12


@pytest.mark.parametrize("kind", ["OptEq", "MOptEq of one branch"])
def test_one_branch_is_opteq(kind):
    made = {"OptEq": (eq.models.OptEq, {}), "MOptEq of one branch": (eq.models.MOptEq, {"scales": (1,)})}[kind]
    model = model_of(made[0], **made[1], **({"diversity": 0.0} if made[1] else {}))
    images, cell = pictures(), model.cell
    with torch.no_grad():
        g = model.features(images)
        W, U = (convolution(layer.weight((8, 8)), (8, 8)) for layer in (cell.W[0], cell.U[0]))
        b = cell.b[0].repeat_interleave(64)
        z = torch.zeros(2, 256, dtype=DOUBLE)
        for _ in range(300):
            z = torch.relu(z @ W.T + g.flatten(1) @ U.T + b) @ W
        close([part.flatten(1) for part in model.branches(g)], [z], 1e-11)
        pooled = z.reshape(2, 4, 64).mean(dim=2)
        close([model(images)], [weighed(model, pooled)], 1e-11)


def test_mopteq_without_heritage_and_diversity_is_popteq():
    one = model_of(eq.models.POptEq, scales=(1, 2, 1))
    other = model_of(heritage=False, diversity=0.0, scales=(1, 2, 1))
    other.load_state_dict(one.state_dict())
    images = pictures()
    close([other(images)], [one(images)])
    coupled = model_of(diversity=0.0, scales=(1, 2, 1))
    coupled.load_state_dict(one.state_dict())
    assert (coupled(images) - one(images)).abs().max() > 1e-3


def test_branches_of_popteq_are_opteqs():
    model = model_of(eq.models.POptEq)
    images = pictures()
    with torch.no_grad():
        together = model.branches(model.features(images))
        for i, z in enumerate(together):
            alone = model_of(eq.models.OptEq)
            alone.stem, alone.normalize = model.stem, model.normalize
            alone.cell.W[0], alone.cell.U[0], alone.cell.b[0] = model.cell.W[i], model.cell.U[i], model.cell.b[i]
            close(alone.branches(alone.features(images)), [z], 1e-11)


def test_g_is_made_by_the_stem():
    model = model_of(stem=3, downsamplings=2, shape=(2, 9, 10), mean=(0.4, 0.6), std=(0.2, 0.3))
    images = torch.rand(2, 2, 9, 10, dtype=DOUBLE)
    x = (images - torch.tensor([0.4, 0.6])[:, None, None]) / torch.tensor([0.2, 0.3])[:, None, None]
    for k in range(3):
        conv, norm = model.stem[3 * k], model.stem[3 * k + 1]
        x = F.conv2d(x, conv.weight, stride=2 if k < 2 else 1, padding=1)
        x = (x - norm.running_mean[:, None, None]) / (norm.running_var + 1e-5).sqrt()[:, None, None]
        x = (x * norm.weight[:, None, None] + norm.bias[:, None, None]).clamp(min=0)
    close([model.features(images)], [x], 1e-6)  # mean and std begin as single precision
    assert x.shape == (2, 4, 3, 3)
    assert model.cell.sizes == ((3, 3),) * 3


@pytest.mark.parametrize("fusion", ["none", "sum", "conv"])
def test_what_popteq_reads(fusion):
    model = model_of(eq.models.POptEq, fusion=fusion)
    z = features([(8, 8)] * 3)
    if fusion == "none":
        read = torch.cat([part.mean(dim=(2, 3)) for part in z], dim=1)
    elif fusion == "sum":
        read = (z[0] + z[1] + z[2]).mean(dim=(2, 3))
    else:
        read = F.conv2d(torch.cat(z, dim=1), model.fuse.weight, padding=1).clamp(min=0).mean(dim=(2, 3))
    close([model.read(z)], [weighed(model, read)])


def test_a_single_image_is_read_by_what_was_seen_before_it():
    model, z = model_of(), features([(8, 8)] * 3)
    one = tuple(part[:1] for part in z)
    expected, known = model.read(one), model.norm.running_mean.clone()
    model.train()
    close([model.read(one)], [expected])
    assert model.norm.running_mean.equal(known)
    model(pictures(1)).sum().backward()
    model.read(z)
    assert not model.norm.running_mean.equal(known)


@pytest.mark.parametrize("scales", [(1, 2, 4), (1, 2, 3)], ids=str)
def test_images_of_any_shape_and_memory_order(scales):
    """Also where the ratio of two branches is not whole."""
    model = model_of(scales=scales, shape=(2, 7, 10))
    images = torch.rand(2, 2, 7, 10, dtype=DOUBLE)
    logits = model(images)
    last = model.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    close([last], [logits], 1e-10)

"""MDEQ against plain functions of weights that bear the names of the authors' code."""

import copy
import itertools
import math
import pickle
import re
from collections import defaultdict
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.models.mdeq.cell import MDEQSize, MultiscaleCell
from equipoise.models.mdeq.heads import ImageHead, SegmentationHead
from equipoise.models.mdeq.model import SIZES
from equipoise.problem.layout import Layout

# --- the truth --------------------------------------------------------------------------------------------------------

RENAMED = [  # from the authors' names to ours, one after the other
    (r"^downsample\.", "stem."),
    (r"^stage0\.", "inject."),
    (r"^fullstage\.branches\.(\d)\.blocks\.(\d)\.", r"equilibrium.f.blocks.\1.\2."),
    (r"\.gn(\d)\.", r".norm\1."),
    (r"^fullstage\.fuse_layers\.(\d)\.(\d)\.net\.", r"equilibrium.f.fuse.\1.\2."),
    (r"(\.fuse\.\d\.\d)\.(conv|gnorm)\.", r"\1.0.\2."),
    (r"(\.fuse\.\d\.\d)\.(\d)\.conv\.", r"\1.convs.\2."),
    (r"(\.fuse\.\d\.\d)\.(\d)\.gnorm\.", r"\1.norms.\2."),
    (r"^fullstage\.post_fuse_layers\.(\d)\.conv\.", r"equilibrium.f.post.\1."),
    (r"^fullstage\.post_fuse_layers\.(\d)\.gnorm\.", r"equilibrium.f.norms.\1."),
    (r"\.weight_v$", ".layer.weight"),
    (r"\.weight_g$", ".scale"),
    (r"^incre_modules\.(\d)\.0\.downsample\.", r"head.widen.\1.shortcut."),
    (r"^incre_modules\.(\d)\.0\.(conv|bn)(\d)\.", r"head.widen.\1.inner.\2\3."),
    *((f"inner.{kind}{k}.", f"inner.{3 * k - 3 + (kind == 'bn')}.") for kind in ("conv", "bn") for k in (1, 2, 3)),
    (r"^downsamp_modules\.", "head.merge."),
    (r"^final_layer\.", "head.final."),
    (r"^(classifier|last_layer\.3)\.", "head.classify."),
    (r"^last_layer\.", "head.mix."),
]


def ours(name):
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


class Reference:
    """Stem, f and heads on weights ``w`` by the authors' names, each drawn where it is first used."""

    def __init__(self, size, head="classification", activation="relu", weight_norm=True, training=False):
        self.size, self.training, self.weight_norm, self.w = size, training, weight_norm, {}
        self.act = F.softplus if activation == "softplus" else F.relu
        self.head, self.momentum = (self.classify, 0.1) if head == "classification" else (self.segment, 0.01)
        self.masks = {}  # of block b on scale i

    def weight(self, name, *shape):
        if name not in self.w:
            spread = 0.5 / math.sqrt(math.prod(shape[1:]))
            positive = name.endswith("running_var") or (name.endswith("weight") and len(shape) == 1)
            self.w[name] = positive + spread * torch.randn(shape).clamp(-1.5, 1.5).double()
        return self.w[name]

    def conv(self, name, x, outputs, kernel, stride=1, bias=False, normed=False):
        shape = outputs, x.shape[1], kernel, kernel
        if normed and self.weight_norm:
            v, g = self.weight(f"{name}.weight_v", *shape), self.weight(f"{name}.weight_g", outputs, 1, 1, 1)
            weight = v * g / v.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()
        else:
            weight = self.weight(f"{name}.weight", *shape)
        return F.conv2d(x, weight, self.weight(f"{name}.bias", outputs) if bias else None, stride, kernel // 2)

    def affine(self, name, x):
        scale, shift = (self.weight(f"{name}.{kind}", x.shape[1]) for kind in ("weight", "bias"))
        return x * scale[:, None, None] + shift[:, None, None]

    def group_norm(self, name, x, groups, affine=True):
        x = F.group_norm(x, groups, eps=1e-5)
        return self.affine(name, x) if affine else x

    def batch_norm(self, name, x, affine=True):
        mean, variance = (self.weight(f"{name}.running_{kind}", x.shape[1]) for kind in ("mean", "var"))
        batches = self.w.setdefault(f"{name}.num_batches_tracked", torch.tensor(0))
        if self.training:
            means, variances = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
            unbiased = x.detach().var(dim=(0, 2, 3), correction=1)
            self.w[f"{name}.running_mean"] = mean.lerp(means.detach(), self.momentum)
            self.w[f"{name}.running_var"] = variance.lerp(unbiased, self.momentum)
            self.w[f"{name}.num_batches_tracked"] = batches + 1
            mean, variance = means, variances
        x = (x - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
        return self.affine(name, x) if affine else x

    def features(self, x):
        c, down = self.size.channels[0], self.size.downsamplings
        for k in range(max(2, down)):
            x = self.conv(f"downsample.{3 * k}", x, c, 3, stride=2 if k < down else 1)
            x = F.relu(self.batch_norm(f"downsample.{3 * k + 1}", x))
        if down == 0 and self.size.scales <= 2:
            return x
        return F.relu(self.batch_norm("stage0.1", self.conv("stage0.0", x, c, 1)))

    def zeros(self, x):
        batch, _, height, width = x.shape
        return [x.new_zeros(batch, c, height // 2**i, width // 2**i) for i, c in enumerate(self.size.channels)]

    def f(self, z, x):
        size, x, y = self.size, [x, *self.zeros(x)[1:]], []
        C, G, n = size.channels, size.groups, size.scales
        for i, found in enumerate(z):
            kernels = [(3, 3), (5, 3), (5, 5)][size.big_kernels[i] if size.big_kernels else 0]
            for b in range(size.blocks):
                block = f"fullstage.branches.{i}.blocks.{b}"
                a = self.conv(f"{block}.conv1", found, int(size.expansion * C[i]), kernels[0], normed=True)
                a = self.act(self.group_norm(f"{block}.gn1", a, G))
                a = self.conv(f"{block}.conv2", a, C[i], kernels[1], normed=True) * self.masks.get((i, b), 1.0)
                a = self.group_norm(f"{block}.gn2", a + x[i] if b == 0 else a, G)
                found = self.group_norm(f"{block}.gn3", self.act(a + found), G)
            y.append(found)
        if n == 1:
            return y
        out = []
        for i in range(n):
            total = 0.0
            for j in range(n):
                t, net = y[j], f"fullstage.fuse_layers.{i}.{j}.net"
                if j > i:
                    t = self.group_norm(f"{net}.gnorm", self.conv(f"{net}.conv", t, C[i], 1), G)
                    t = t.repeat_interleave(2 ** (j - i), dim=2).repeat_interleave(2 ** (j - i), dim=3)
                for k in range(i - j):
                    last = k == i - j - 1
                    t = self.conv(f"{net}.{k}.conv", t, C[i] if last else C[j], 3, stride=2)
                    t = self.group_norm(f"{net}.{k}.gnorm", t, G)
                    t = t if last else self.act(t)
                total = total + t
            post = f"fullstage.post_fuse_layers.{i}"
            total = self.conv(f"{post}.conv", self.act(total), C[i], 1, normed=True)
            out.append(self.group_norm(f"{post}.gnorm", total, G // 2, affine=size.post_affine))
        return out

    def iterate(self, x, steps):
        z = self.zeros(x)
        for _ in range(steps):
            z = self.f(z, x)
        return z

    def logits(self, images, steps):
        return self.head(self.iterate(self.features((images - 0.5) / 0.25), steps))

    def classify(self, z):
        h = self.size.head_channels

        def widen(i):
            name, a, shortcut = f"incre_modules.{i}.0", z[i], z[i]
            for k, (outputs, kernel) in enumerate([(h[i], 1), (h[i], 3), (4 * h[i], 1)], start=1):
                a = self.conv(f"{name}.conv{k}", a if k == 1 else F.relu(a), outputs, kernel)
                a = self.batch_norm(f"{name}.bn{k}", a, affine=False)
            if z[i].shape[1] != 4 * h[i]:
                shortcut = self.conv(f"{name}.downsample.0", z[i], 4 * h[i], 1)
                shortcut = self.batch_norm(f"{name}.downsample.1", shortcut)
            return F.relu(a + shortcut)

        y = widen(0)
        for i in range(self.size.scales - 1):
            y = self.conv(f"downsamp_modules.{i}.0", y, 4 * h[i + 1], 3, stride=2, bias=True)
            y = widen(i + 1) + F.relu(self.batch_norm(f"downsamp_modules.{i}.1", y))
        y = self.conv("final_layer.0", y, self.size.final_channels, 1, bias=True)
        y = F.relu(self.batch_norm("final_layer.1", y)).mean(dim=(2, 3))
        return y @ self.weight("classifier.weight", 5, y.shape[1]).T + self.weight("classifier.bias", 5)

    def segment(self, z):
        y = torch.cat([F.interpolate(part, z[0].shape[2:], mode="bilinear", align_corners=True) for part in z], dim=1)
        y = self.batch_norm("last_layer.1", self.conv("last_layer.0", y, y.shape[1], 1, bias=True))
        return self.conv("last_layer.3", F.relu(y), 5, 1, bias=True)


def pair(size, contractive=False, training=False, **options):
    """A model and the truth with the same random weights.

    Contractive: a block's last norm gives little of what it is given beside a random constant per channel, so that all
    that follows, norms included, changes little with z (groups of many channels: a norm magnifies equal constants).
    """
    truth = Reference(size, **options)
    truth.logits(torch.zeros(1, 3, 16, 16).double(), 1)  # draws the weights
    truth.training = training
    for name, value in truth.w.items():
        if contractive and ".gn3." in name:
            truth.w[name] = 0.1 * value if name.endswith("weight") else 2 * value
    of_classification = ("head_channels", "final_channels") if options.get("head") == "segmentation" else ()
    numbers = {name: value for name, value in asdict(size).items() if name not in of_classification}
    model = eq.models.MDEQ((3, 16, 16), 5, mean=(0.5,), std=(0.25,), **numbers, **options).double()
    kept = {name: model.state_dict()[name] for name in ("normalize.mean", "normalize.std")}
    model.load_state_dict({ours(name): value for name, value in truth.w.items()} | kept)  # strictly all, of all shapes
    model.equilibrium.tolerance = eq.Tolerance(1e-13, max_steps=300)
    model.equilibrium.on_failure = "raise" if contractive else "ignore"
    return model.train(training), truth


def watched_masks(model):
    """What dropout multiplies by at every call from now on, by scale and block."""
    masks = defaultdict(list)
    for i, blocks in enumerate(model.equilibrium.f.blocks):
        for b, block in enumerate(blocks):

            def note(module, inputs, output, key=(i, b)):
                ratio = output.detach() / inputs[0].detach()
                assert torch.allclose(ratio, ratio[:, :, :1, :1].expand_as(ratio))  # one number for a channel
                masks[key].append(ratio[:, :, :1, :1])

            block.drop.register_forward_hook(note)
    return masks


def images_of(*shape):
    return torch.rand(shape, dtype=torch.float64)


def state_and_input(truth, *shape):
    x = torch.randn(shape, dtype=torch.float64)
    return tuple(torch.randn_like(part) for part in truth.zeros(x)), x


def rows_of(z):
    return torch.cat([part.reshape(len(part), -1) for part in z], dim=1)


def close(found, truth, tolerance=1e-10):
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


THREE = MDEQSize((8, 12, 8), (2, 2, 3), 6, groups=2, expansion=2, dropout=0.3)
DEEP = replace(THREE, channels=(8, 12), head_channels=(2, 2), downsamplings=2, post_affine=True)
TWO = MDEQSize((8, 12), (2, 2), 6, groups=4, expansion=2, dropout=0.3)
CASES = {
    "one scale": MDEQSize((8,), (3,), 6, groups=4, dropout=0.3),
    "two scales": TWO,
    "three scales": MDEQSize((8, 16, 32), (2, 3, 4), 10, groups=4, dropout=0.3),
    "four scales": MDEQSize((8, 4, 12, 8), (1, 2, 3, 2), 5, groups=4, expansion=2, post_affine=True, dropout=0.3),
    "big kernels": replace(TWO, channels=(4, 8), big_kernels=(1, 2)),
    "two blocks": replace(TWO, blocks=2),
    "broken expansion": replace(TWO, channels=(8, 8), expansion=2.5),
    "two downsamplings": replace(TWO, downsamplings=2, post_affine=True),
    "three downsamplings": replace(TWO, downsamplings=3),
}


# --- sizes ------------------------------------------------------------------------------------------------------------

PARTS = ("stem", "inject", "equilibrium.f", "head.widen", "head.merge", "head.final", "head.classify")
COUNTS = {  # the total and the parts in this order, as the authors' code has them
    "cifar10-small-public": (158_890, 5_928, 0, 111_696, 7_232, 18_624, 13_400, 2_010),
    "cifar10-large-public": (11_097_438, 10_208, 1_088, 8_715_232, 408_660, 1_187_760, 757_680, 16_810),
    "cifar10-large-regularized": (11_097_438, 10_208, 1_088, 8_715_232, 408_660, 1_187_760, 757_680, 16_810),
    "imagenet-small": (16_808_936, 10_208, 1_088, 8_716_192, 965_760, 3_487_680, 1_579_008, 2_049_000),
    "imagenet-small-regularized": (18_613_496, 10_208, 1_088, 8_715_232, 1_250_480, 4_746_336, 1_841_152, 2_049_000),
    "imagenet-large": (67_063_624, 60_080, 6_560, 54_422_800, 2_223_360, 6_198_528, 2_103_296, 2_049_000),
    "imagenet-large-regularized": (67_061_224, 60_080, 6_560, 54_420_400, 2_223_360, 6_198_528, 2_103_296, 2_049_000),
    "imagenet-xl": (90_463_280, 72_424, 7_920, 77_699_952, 2_332_160, 6_198_528, 2_103_296, 2_049_000),
    "cityscapes-small": (8_968_467, 10_208, 1_088, 8_716_192, 240_979),
    "cityscapes-large": (55_955_859, 60_080, 6_560, 54_422_800, 1_466_419),
    "cityscapes-xl": (79_551_755, 72_424, 7_920, 77_699_952, 1_771_459),
}


def on_paper(size, **options):
    """A model without memory."""
    kind = size.partition("-")[0]
    shape, classes = {"cifar10": ((3, 32, 32), 10), "imagenet": ((3, 224, 224), 1000)}.get(kind, ((3, 512, 1024), 19))
    head = "segmentation" if kind == "cityscapes" else "classification"
    with torch.device("meta"):
        return eq.models.MDEQ(shape, classes, size=size, head=head, **options)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("size", COUNTS)
def test_parts_have_as_many_parameters_as_the_authors(size):
    model = on_paper(size)
    parts = ("stem", "inject", "equilibrium.f", "head") if size.startswith("cityscapes") else PARTS
    assert (count(model), *(count(model.get_submodule(part)) for part in parts)) == COUNTS[size]


def test_totals_of_the_paper_and_without_weight_normalisation():
    assert count(on_paper("cifar10-small")) == 170_378
    assert round(count(on_paper("cifar10-large")) / 1e6, 2) == 9.03
    assert count(on_paper("cifar10-small-public", weight_norm=False)) == 158_554
    assert count(on_paper("cifar10-large-public", weight_norm=False)) == 11_094_078
    wide = on_paper("cifar10-small", head_channels=(8, 16, 32), final_channels=200)
    assert (count(wide), count(wide.equilibrium)) == (279_746, 133_256)
    f = on_paper("cifar10-small-public").equilibrium.f
    assert [count(f.blocks), count(f.fuse), count(f.post) + count(f.norms)] == [104_640, 5_856, 1_200]


def test_groups_dropout_and_downsamplings_of_the_sizes():
    assert [size.groups for size in SIZES.values()] == [4] * 3 + [8] * 11
    assert [size.downsamplings for size in SIZES.values()] == [0] * 6 + [2] * 8
    cifar, imagenet, cityscapes = [0.2, 0.25, 0.25, 0.25, 0.3, 0.22], [0, 0.02, 0, 0, 0], [0.05, 0.03, 0.04]
    assert [size.dropout for size in SIZES.values()] == cifar + imagenet + cityscapes


def closed_form(size, weight_norm):
    """The parameters of f."""
    total, scales = 0, range(size.scales)
    for i in scales:
        c, inner = size.channels[i], int(size.expansion * size.channels[i])
        kernels = [(9, 9), (25, 9), (25, 25)][size.big_kernels[i]]
        total += size.blocks * (sum(kernels) * inner * c + 2 * inner + 4 * c + weight_norm * (inner + c))
        if size.scales > 1:
            total += c * c + weight_norm * c + 2 * c * size.post_affine
    for i, j in itertools.permutations(scales, 2):
        a, b = size.channels[j], size.channels[i]
        total += a * b + 2 * b if j > i else (i - j - 1) * (9 * a * a + 2 * a) + 9 * a * b + 2 * b
    return total


@given(st.data(), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans(), st.integers(1, 2))
def test_parameters_of_f_in_closed_form(data, scales, groups, weight_norm, post_affine, blocks):
    channels = data.draw(st.lists(st.sampled_from([8, 16, 24, 40]), min_size=scales, max_size=scales))
    big = data.draw(st.lists(st.integers(0, 2), min_size=scales, max_size=scales))
    expansion = data.draw(st.sampled_from([1, 2, 5, 6]))
    size = MDEQSize(tuple(channels), (), 0, groups, expansion, 0.0, 0, post_affine, tuple(big), blocks)
    with torch.device("meta"):
        assert count(MultiscaleCell(size, weight_norm=weight_norm)) == closed_form(size, weight_norm)


# --- f, stem and heads ------------------------------------------------------------------------------------------------


OPTIONS = {"relu": {}, "softplus": {"activation": "softplus"}, "no weight norm": {"weight_norm": False}}


@pytest.mark.parametrize("size", CASES.values(), ids=CASES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_f_is_that_of_the_authors(size, training, options):
    model, truth = pair(size, training=training, **options)
    masks = watched_masks(model)
    z, x = state_and_input(truth, 3, size.channels[0], 8, 16)
    for order in (torch.contiguous_format, torch.channels_last):
        given_z, given_x = tuple(part.contiguous(memory_format=order) for part in z), x.contiguous(memory_format=order)
        found = model.equilibrium.f(given_z, (given_x,))
        truth.masks = {key: calls[-1] for key, calls in masks.items()}
        assert any((mask == 0).any() for mask in truth.masks.values()) == training
        close(found, truth.f(z, x))
        close((*given_z, given_x), (*z, x), 0)  # nothing given was written over


def compare_with_unrolling(model, truth, steps, images):
    """Logits, and gradients of everything, against plain back-propagation through so many steps."""
    images.requires_grad_()
    masks = watched_masks(model)
    logits = model(images)
    truth.masks = {key: calls[0] for key, calls in masks.items()}
    direction = torch.randn_like(logits)
    logits.backward(direction)
    learnt = {name: w.requires_grad_() for name, w in truth.w.items() if re.search(r"(weight(_[gv])?|bias)$", name)}
    assert len(learnt) == len(list(model.parameters()))
    expected = truth.logits(images, steps)
    close([logits], [expected])
    gradients = torch.autograd.grad(expected, [images, *learnt.values()], direction)
    found = [images.grad, *(model.get_parameter(ours(name)).grad for name in learnt)]
    rounding = 1e-12 * max(gradient.norm() for gradient in gradients)  # of the 0 of a bias before a BatchNorm
    for name, ours_, theirs in zip(["images", *learnt], found, gradients, strict=True):
        assert (ours_ - theirs).norm() < 1e-8 * theirs.norm() + rounding, name


HEADS = [*((name, "classification") for name in CASES), *((name, "segmentation") for name in list(CASES)[-2:])]


@pytest.mark.parametrize(("case", "head"), HEADS, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_warm_up_is_backpropagation_through_k_steps(case, head, training):
    model, truth = pair(CASES[case], training=training, head=head)
    model.equilibrium.gradient = eq.UnrolledGradient(steps=3)
    with eq.watch_solves() as solves:
        compare_with_unrolling(model, truth, 3, images_of(3, 3, 32, 32))
    assert solves[0].stats.steps.tolist() == [4, 4, 4]  # the last evaluation only measures
    state = model.state_dict()  # BatchNorm's statistics moved once, or not at all
    close([state[ours(name)] for name in truth.w], [w.detach() for w in truth.w.values()])


def test_rows_of_the_solver_are_the_scales_one_after_the_other():
    model, truth = pair(THREE, contractive=True)
    z, x = state_and_input(truth, 2, 8, 8, 8)
    assert torch.equal(Layout(z).pack(z), rows_of(z))
    solution = model.equilibrium.solve((x,))
    assert torch.equal(solution.solved.z, rows_of(solution.value))
    with torch.device("meta"):
        for name, numbers in (("cifar10-small-public", 30_720), ("cifar10-large-public", 61_440)):
            z = MultiscaleCell(SIZES[name]).start((torch.empty(2, SIZES[name].channels[0], 32, 32),))
            assert sum(part[0].numel() for part in z) == numbers


# --- the equilibrium --------------------------------------------------------------------------------------------------

SOLVERS = {"broyden": eq.Broyden(memory=30), "anderson": eq.Anderson(), "picard": eq.Picard()}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_logits_do_not_depend_on_the_solver(solver, order):
    model, truth = pair(THREE, contractive=True)
    model.equilibrium.solver = solver
    images = images_of(3, 3, 16, 16)
    with torch.no_grad():
        found = model.to(memory_format=order)(images.contiguous(memory_format=order))
        close([found], [truth.logits(images, 80)])


@pytest.mark.parametrize(("head", "side"), [("classification", 8), ("segmentation", 16)])
def test_gradients_are_those_of_300_unrolled_steps(head, side):
    model, truth = pair(THREE if side == 8 else DEEP, contractive=True, training=True, head=head)
    compare_with_unrolling(model, truth, 300, images_of(2, 3, side, side))


def test_jacobian_penalty_is_that_of_the_dense_jacobian():
    size = MDEQSize((4, 4), (1, 1), 4, groups=2, expansion=2)
    model, truth = pair(size)
    z, x = state_and_input(truth, 2, 4, 4, 4)

    def penalty(probes):
        generator = torch.Generator().manual_seed(3)
        return eq.jacobian_penalty(model.equilibrium.f, z, (x,), probes=probes, generator=generator)

    def f_of_rows(rows, x):  # of one sample
        return rows_of(truth.f((rows[:64].view(1, 4, 4, 4), rows[64:].view(1, 4, 2, 2)), x[None]))[0]

    generator, expected = torch.Generator().manual_seed(3), 0.0
    probes = [torch.randn(2, 80, dtype=torch.float64, generator=generator) for _ in range(2)]
    for k in range(2):
        jacobian = torch.func.jacrev(f_of_rows)(rows_of(z)[k], x[k])
        expected += sum((probe[k] @ jacobian).square().sum() for probe in probes) / 2 / 160
    torch.testing.assert_close(penalty(2), expected, rtol=1e-10, atol=0)

    weights = list(model.equilibrium.parameters())
    gradients = torch.autograd.grad(penalty(1), weights)
    directions = [torch.randn_like(p) for p in weights]
    with torch.no_grad():
        moved = []
        for step in (1e-6, -2e-6):
            torch._foreach_add_(weights, directions, alpha=step)
            moved.append(penalty(1))
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    torch.testing.assert_close((moved[0] - moved[1]) / 2e-6, slope, rtol=1e-6, atol=0)


# --- weight normalisation and dropout ---------------------------------------------------------------------------------


def test_normed_weights_are_derived_once_per_solve_and_never_stale(monkeypatch):
    model, truth = pair(THREE, contractive=True, training=True)
    made, derive = [], eq.WeightNorm.derive
    monkeypatch.setattr(eq.WeightNorm, "derive", lambda self: made.append(id(self)) or derive(self))
    images = images_of(4, 3, 8, 8)
    with eq.watch_solves() as solves:
        model(images).square().sum().backward()
    assert solves[0].stats.evaluations > 3
    assert solves[0].backward.evaluations > 3
    assert len(made) == len(set(made)) == 9  # two in each of three blocks, three after the fusion
    torch.optim.SGD(model.parameters(), 1e-3).step()
    truth.w, truth.training = {name: model.state_dict()[ours(name)] for name in truth.w}, False
    close([model.eval()(images)], [truth.logits(images, 80)])


def test_models_are_saved_and_copied_without_derived_weights():
    model, truth = pair(THREE, contractive=True)
    images = images_of(2, 3, 8, 8)
    logits = model(images)
    logits.sum().backward()
    assert set(model.state_dict()) == {*map(ours, truth.w), "normalize.mean", "normalize.std"}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), logits)
        with torch.no_grad():
            twin.equilibrium.f.post[0].scale.mul_(2)
        assert not torch.equal(twin(images), logits)  # its start and its f are its own
        assert twin.equilibrium.initial.__self__ is twin.equilibrium.f
    assert torch.equal(model(images), logits)


def test_dropout_draws_one_mask_for_a_forward_and_its_backward():
    model, _ = pair(replace(THREE, blocks=2), contractive=True, training=True)
    model.equilibrium.compact = False
    masks, images = watched_masks(model), images_of(5, 3, 8, 8)
    drawn = []
    for _ in range(2):
        model(images).square().sum().backward()
        assert len(masks) == 6
        for (i, _), calls in masks.items():
            assert len(calls) > 4
            assert calls[0].shape == (5, THREE.channels[i], 1, 1)
            assert all(torch.allclose(mask, calls[0]) for mask in calls)
            values = calls[0].flatten()
            assert torch.allclose(values, torch.where(values < 0.5, 0.0, 1 / 0.7).double())
        drawn.append({key: calls[0] for key, calls in masks.items()})
        masks.clear()
    first, second = drawn
    assert all(not torch.allclose(first[key], second[key]) for key in first)  # another forward, other masks
    assert not torch.allclose(first[0, 0], first[0, 1])  # another block, another mask
    assert not torch.allclose(first[0, 0][0], first[0, 0][1])  # another sample, another mask
    model.eval()(images)
    assert all((mask == 1).all() for calls in masks.values() for mask in calls)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_samples_left_out_change_nothing_for_the_others_and_masks_stay_theirs(solver, dropout):
    model, _ = pair(replace(THREE, dropout=dropout), contractive=True, training=True)
    layer, masks = model.equilibrium, watched_masks(model)
    layer.solver = solver
    x = torch.randn(6, 8, 8, 8, dtype=torch.float64, requires_grad=True)

    def solved(compact, z0=None):
        masks.clear()
        layer.compact = compact
        torch.manual_seed(7)  # the same masks
        solution = layer.solve((x,), z0=z0)
        loss = sum(part[:2].square().sum() for part in solution.value)  # the other samples' adjoint is 0: left out too
        return solution, torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)

    whole, expected = solved(compact=False)
    half = tuple(torch.cat([part[:3], torch.zeros_like(part[3:])]).detach() for part in whole.value)
    solution, gradients = solved(compact=True, z0=half)  # three samples are solved from the start
    assert solution.stats.steps[:3].tolist() == [1, 1, 1]
    for stats in (solution.stats, solution.backward):
        assert stats.rows < 6 * stats.evaluations
    close(solution.value, whole.value)
    close(gradients, expected, 1e-8)
    narrowed = [next(mask for mask in calls if len(mask) == 3) for calls in masks.values()]
    close(narrowed, [calls[0][3:] for calls in masks.values()])


# --- heads ------------------------------------------------------------------------------------------------------------


def test_segmentation_gives_logits_at_a_quarter_of_the_resolution():
    model = eq.models.MDEQ((3, 45, 62), 19, size="cityscapes-small", channels=(8, 16), head="segmentation").eval()
    model.equilibrium.on_failure = "ignore"
    with torch.no_grad():
        assert model(torch.rand(2, 3, 48, 64)).shape == (2, 19, 12, 16)
        assert model(torch.rand(2, 3, 45, 62)).shape == (2, 19, 12, 16)  # rounded up
        assert model(torch.rand(2, 3, 49, 60)).shape == (2, 19, 13, 15)


def test_segmentation_resizes_corner_to_corner():
    head = SegmentationHead((1, 1), 2).double().eval()
    with torch.no_grad():
        for conv in (head.mix[0], head.classify):
            conv.weight.copy_(torch.eye(2)[:, :, None, None])
            conv.bias.zero_()
    fine = images_of(1, 1, 4, 4)
    coarse = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)[None, None]
    by_hand = torch.tensor([[(2 * i + j) / 3 for j in range(4)] for i in range(4)], dtype=torch.float64)
    found = head((fine, coarse)) * math.sqrt(1 + 1e-5)  # what BatchNorm divides by
    close([found[0, 0], found[0, 1]], [fine[0, 0], by_hand])


def test_segmentation_pads_what_does_not_divide_and_cuts_it_again():
    model, truth = pair(replace(THREE, downsamplings=2), contractive=True, head="segmentation")
    images = images_of(2, 3, 45, 62)
    with torch.no_grad():
        padded = F.pad((images - 0.5) / 0.25, (0, 2, 0, 3))
        expected = truth.segment(truth.iterate(truth.features(padded), 80))
        close([model(images)], [expected[:, :, :12, :16]])
        images = images_of(2, 3, 32, 48)
        close([model(images)], [truth.logits(images, 80)])  # nothing to pad


def test_image_head_makes_images_and_has_a_gradient():
    head = ImageHead((4, 8), outputs=3, groups=4, width=8).double()
    z = (torch.randn(2, 4, 4, 6, dtype=torch.float64), torch.randn(2, 8, 2, 3, dtype=torch.float64))
    image = head(z)
    assert image.shape == (2, 3, 4, 6)
    assert image.abs().max() <= 1
    assert torch.autograd.gradcheck(lambda *z: head(z)[:, :, ::2, ::3], [part.requires_grad_() for part in z])
    image.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


# --- the beginning ----------------------------------------------------------------------------------------------------


def test_weights_begin_as_in_the_authors_code():
    model = eq.models.MDEQ((3, 32, 32), 10, size="cifar10-small-public")
    normed = {id(m.layer): m for m in model.modules() if isinstance(m, eq.WeightNorm)}
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert (len(convs), len(normed)) == (20, 6)
    for conv in convs:
        if id(conv) not in normed:
            assert abs(conv.weight.std() / 0.01 - 1) < 6 / math.sqrt(2 * conv.weight.numel())
            continue
        v, bound = conv.weight, 1 / math.sqrt(conv.weight[0].numel())  # torch's: uniform up to 1 / sqrt(fan in)
        assert 0.98 * bound < v.abs().max() <= bound
        assert abs(v.std() / (bound / math.sqrt(3)) - 1) < 6 / math.sqrt(2 * v.numel())
        close([normed[id(conv)].scale.flatten()], [v.flatten(1).norm(dim=1)], 1e-6)
    plain = torch.cat([c.weight.flatten() for c in convs if id(c) not in normed])
    assert plain.abs().max() > 0.035  # normal: a uniform one of this spread ends at 0.017
    biases = torch.cat([c.bias for c in convs if c.bias is not None])
    assert (len(biases), abs(biases.std() / 0.01 - 1) < 0.2) == (264, True)
    linear, bound = model.head.classify, 1 / math.sqrt(200)
    assert 0.98 * bound < linear.weight.abs().max() <= bound
    assert 0 < linear.bias.abs().max() <= bound
    for norm in model.modules():
        if isinstance(norm, nn.GroupNorm | nn.BatchNorm2d) and norm.weight is not None:
            assert (norm.weight == 1).all()
            assert (norm.bias == 0).all()


def test_softplus_takes_the_weights_of_relu():
    relu, _ = pair(TWO)
    softplus, truth = pair(TWO, activation="softplus")
    softplus.load_state_dict(relu.state_dict())
    truth.w = {name: relu.state_dict()[ours(name)] for name in truth.w}
    z, x = state_and_input(truth, 2, 8, 8, 8)
    close(softplus.equilibrium.f(z, (x,)), truth.f(z, x))


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "image does not divide": ({"shape": (3, 30, 32)}, "images of 30 x 32 .* multiples of 4"),
    "nor after downsampling": ({"downsamplings": 2, "shape": (3, 32, 40)}, "images of 32 x 40 .* multiples of 16"),
    "channels no list": ({"channels": 8}, "channels is 8; it must be a list of whole numbers"),
    "channels a fraction": ({"channels": (8, 2.5, 4)}, "channels is .* whole numbers"),
    "channels none": ({"channels": ()}, r"channels is \(\); it must be a list of .* one for each scale"),
    "channels zero": ({"channels": (8, 0, 4)}, "channels is .* at least 1"),
    "head channels too few": ({"head_channels": (4, 8)}, "head_channels has 2 entries, but channels has 3"),
    "big kernels too many": ({"big_kernels": (1, 1, 1, 1)}, "big_kernels has 4 entries, but channels has 3"),
    "big kernels 3": ({"big_kernels": (0, 3, 0)}, "big_kernels is .*3.* two convolutions: use 0, 1 or 2"),
    "size": ({"size": "cifar10-smal"}, "no size of MDEQ 'cifar10-smal'; did you mean 'cifar10-small'"),
    "groups do not divide": ({"groups": 16}, "groups is 16, but 16 does not divide 8 channels"),
    "groups and expansion": ({"groups": 8, "expansion": 1.5}, "groups is 8, .* expansion 1.5"),
    "groups zero": ({"groups": 0}, "groups is 0; it must be a whole number of at least 1"),
    "blocks zero": ({"blocks": 0}, "blocks is 0; it must be a whole number of at least 1"),
    "downsamplings": ({"downsamplings": -1}, "downsamplings is -1"),
    "dropout": ({"dropout": 1.0}, "dropout is 1.0; it must be a number of at least 0 and below 1"),
    "half the groups": ({"channels": (5, 10, 20), "groups": 5}, "groups is 5, but 2 does not divide 5 channels"),
    "head channels zero": ({"head_channels": (4, 0, 4)}, "head_channels is .* at least 1"),
    "expansion": ({"expansion": float("nan")}, "expansion is nan; it must be a number above 0"),
    "head channels of no use": (
        {"size": "cityscapes-small", "head": "segmentation", "head_channels": (1, 2, 3, 4)},
        "head_channels and final_channels are those of a classification head",
    ),
    "weight norm": ({"weight_norm": "no"}, "weight_norm is 'no'; allowed: True, False"),
    "no size": ({"size": None}, "no size of MDEQ 'None'"),
    "no head": ({"size": "cityscapes-small"}, "'cityscapes-small' has no classification head: give head_channels"),
    "head": ({"head": "segment"}, "head is 'segment'; allowed: 'classification', 'segmentation'"),
    "activation": ({"activation": "tanh"}, "activation is 'tanh'; allowed: 'relu', 'softplus'"),
    "classes": ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        eq.models.MDEQ(**{"shape": (3, 32, 32), "classes": 10, **options})


def test_refusals_of_f_and_of_the_image_head():
    model, _ = pair(TWO)
    with pytest.raises(ValueError, match="images of 15 x 16 do not fit this model, .* multiples of 2"):
        model(images_of(1, 3, 15, 16))
    with pytest.raises(ValueError, match="features of 15 x 16 cannot be halved 1 times: .* multiples of 2"):
        model.equilibrium.f.start((images_of(1, TWO.channels[0], 15, 16),))
    with pytest.raises(ValueError, match="MultiscaleCell.activation is 'tanh'; allowed: 'relu', 'softplus'"):
        MultiscaleCell(TWO, activation="tanh")
    with pytest.raises(TypeError, match="post_affine is 'no'; it must be a bool"):
        MDEQSize((8,), post_affine="no")
    with pytest.raises(ValueError, match="groups is 8; it must divide the sum of the channels, 12, and width, 32"):
        ImageHead((4, 8))

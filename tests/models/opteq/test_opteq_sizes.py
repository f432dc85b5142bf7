"""Sizes, parameter counts, and what models refuse."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from dense_opteq import model_of, pictures
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.model import SIZES
from equipoise.models.opteq.ring import Ring

# Sizes


COUNTS = {  # name: (image, classes, parameters)
    "single-193k": ((3, 32, 32), 10, 192_714),
    "multi-0.48m": ((3, 32, 32), 10, 474_454),
    "multi-1.9m": ((3, 32, 32), 10, 1_882_018),
    "multi-8.1m": ((3, 32, 32), 10, 8_060_874),
    "imagenette-1.9m": ((3, 256, 256), 10, 1_897_094),
    "imagenette-10m": ((3, 256, 256), 10, 9_956_260),
    "imagenet-13m": ((3, 224, 224), 1000, 12_973_250),
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def on_paper(kind, shape, classes, **options):
    """A model without memory."""
    with torch.device("meta"):
        return kind(shape, classes, mean=(0.5,), std=(0.5,), **options)


def closed_form(size, classes, inputs=3, branches=None):
    C, L = size.channels, branches or len(size.scales)
    stem = 9 * inputs * C + (size.stem - 1) * 9 * C**2 + size.stem * 2 * C
    return stem + L * ((size.kernel**2 + size.injection_kernel**2) * C**2 + C) + (L * C + 1) * classes


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_parameters(name):
    shape, classes, parameters = COUNTS[name]
    assert count(on_paper(eq.models.MOptEq, shape, classes, size=name)) == parameters
    assert closed_form(SIZES[name], classes) == parameters


def test_counts_of_the_other_models():
    shape = (3, 32, 32)
    none, added, conv = (count(on_paper(eq.models.POptEq, shape, 10, fusion=f)) for f in ("none", "sum", "conv"))
    assert (none, added, conv) == (192_714, 192_074, 275_658)
    assert none == closed_form(SIZES["single-193k"], 10)
    assert added == none - 2 * 32 * 10
    assert conv == none + 9 * 96**2  # one convolution without bias over 3 x 32 channels
    assert count(on_paper(eq.models.OptEq, shape, 10)) == closed_form(SIZES["single-193k"], 10, branches=1)
    reduced = on_paper(eq.models.MOptEq, (1, 28, 28), 7, size="reduced")
    assert count(reduced) == closed_form(SIZES["reduced"], 7, inputs=1)


def test_every_size_has_a_count_and_fits_its_images():
    assert set(SIZES) == {*COUNTS, "reduced"}
    for name, (shape, classes, _) in COUNTS.items():
        sizes = on_paper(eq.models.MOptEq, shape, classes, size=name).cell.sizes
        side = shape[1] // 2 ** SIZES[name].downsamplings
        assert sizes == tuple((side // scale,) * 2 for scale in SIZES[name].scales)


def test_single_numbers_replace_those_of_a_size():
    model = on_paper(eq.models.MOptEq, (3, 32, 32), 10, size="multi-0.48m", channels=8, scales=[1, 4], stem=3)
    assert (model.size.channels, model.size.scales, model.size.stem) == (8, (1, 4), 3)
    assert (model.size.kernel, model.size.injection_kernel) == (3, 1)
    assert count(model) == closed_form(model.size, 10)


@pytest.mark.parametrize("name", ["opteq", "popteq", "mopteq"])
def test_models_have_names(name):
    assert name in eq.list_models()
    model = eq.create_model(name, shape=(1, 8, 8), classes=3, size="reduced", channels=4)
    assert model.eval()(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_an_empty_batch_has_nothing_to_tell():
    model = model_of()
    nothing = pictures(0)
    assert model.certificate(nothing).radius is None
    assert str(model.verify(nothing)) == "proposition 1 on no images"


# Refusals


SIZE_NAMES = "reduced, single-193k, multi-0.48m"
REFUSED = {
    "size": (
        {"size": "single-193"},
        f"no size of OptEq 'single-193'; did you mean 'single-193k'\\? known: {SIZE_NAMES}",
    ),
    "no size": ({"size": None}, "no size of OptEq 'None'"),
    "no size in a list": ({"size": ["reduced"]}, r"no size of OptEq \"\['reduced'\]\""),
    "classes": ({"classes": 1}, "classes is 1; a classifier needs at least 2"),
    "scales a truth": ({"scales": (True, 2)}, r"scales is \(True, 2\); it must be a list of whole numbers"),
    "channels": ({"channels": 0}, "channels is 0; it must be a whole number of at least 1"),
    "channels a fraction": ({"channels": 2.5}, "channels is 2.5; it must be a whole number"),
    "scales no list": ({"scales": 2}, "scales is 2; it must be a list of whole numbers of at least 1"),
    "scales zero": ({"scales": (1, 0)}, r"scales is \(1, 0\); it must be a list of whole numbers of at least 1"),
    "scales none": ({"scales": ()}, r"scales is (\(\)|empty).* one"),
    "scales too large": (
        {"scales": (1, 9)},
        r"scales is \(1, 9\), and g has 8 x 8 pixels: a branch needs",
    ),
    "scales after downsampling": ({"scales": (4,), "downsamplings": 2, "stem": 2}, "scales is .*g has 2 x 2 pixels"),
    "even kernel": ({"kernel": 4}, "kernel is 4; it must be odd, so that an image keeps its size"),
    "even injection kernel": ({"injection_kernel": 2}, "injection_kernel is 2; it must be odd"),
    "kernel zero": ({"kernel": 0}, "kernel is 0; it must be a whole number of at least 1"),
    "kernel a fraction": (
        {"injection_kernel": 3.0},
        "injection_kernel is 3.0; it must be a whole number of at least 1",
    ),
    "stem": ({"stem": 0}, "stem is 0; it must be a whole number of at least 1"),
    "downsamplings": ({"stem": 2, "downsamplings": 3}, "downsamplings is 3; .* at least 0 and at most 2"),
    "bound one": ({"bound": 1}, "bound is 1; it must be a number above 0 and below 1"),
    "bound zero": ({"bound": 0.0}, "bound is 0.0; it must be a number above 0 and below 1"),
    "bound a word": ({"bound": "0.9"}, "bound is '0.9'; it must be a number"),
    "heritage": ({"heritage": 1}, "heritage is 1; it must be a bool"),
    "diversity": ({"diversity": -0.1}, "diversity is -0.1; it must be a number of at least 0"),
    "diversity nan": ({"diversity": math.nan}, "diversity is nan; it must be a number of at least 0"),
    "sign": ({"sign": "soft"}, "sign is 'soft'; allowed: 'smooth', 'hard'"),
    "smoothing": ({"smoothing": 0}, "smoothing is 0; it must be a number above 0"),
    "order": ({"order": "seidel"}, "order is 'seidel'; allowed: 'gauss-seidel', 'jacobi'"),
    "perturb": ({"perturb": True}, "perturb is True; allowed: 'train', 'always', 'off'"),
    "perturb one": ({"perturb": "train", "scales": (1,)}, "perturb is 'train', and there is one branch.*'off', or"),
    "perturbation": ({"perturbation": -1}, "perturbation is -1; it must be a number of at least 0"),
    "gelu": ({"activation": "gelu"}, "activation is 'gelu'; it is not a proximal map.*Supported: relu"),
    "a module": ({"activation": nn.SiLU()}, "activation is SiLU.*not a proximal map.*Supported: relu"),
    "activation": ({"activation": "rellu"}, "no activation 'rellu'; did you mean 'relu'"),
    "mean and std": ({"mean": (0.5,) * 3}, r"mean is \(0.5, 0.5, 0.5\) and std is \(0.5,\)"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        eq.models.MOptEq(**{"shape": (3, 8, 8), "classes": 10, "size": "reduced", **options})


def test_refusals_of_fusion():
    make = lambda **options: eq.models.POptEq((3, 8, 8), 10, size="reduced", **options)
    with pytest.raises(ValueError, match="fusion is 'add'; allowed: 'none', 'sum', 'conv'"):
        make(fusion="add")
    for fusion in ("sum", "conv"):
        with pytest.raises(ValueError, match=rf"fusion is '{fusion}'.*differ in size \(scales \(1, 2\)\): use 'none'"):
            make(fusion=fusion, scales=(1, 2))
    make(fusion="sum", scales=(2, 2))


def test_options_that_a_model_does_not_have_are_refused():
    for name, option in (("opteq", "scales"), ("opteq", "order"), ("popteq", "heritage"), ("mopteq", "fusion")):
        with pytest.raises(TypeError, match=f"has no option '{option}'"):
            eq.create_model(name, shape=(3, 8, 8), classes=10, **{option: 1})


@pytest.mark.parametrize("side", [7, 9, 16])
def test_images_of_another_size_are_refused(side):
    model = model_of()
    words = f"images have shape \\(2, {side}, {side}\\); this model was made for \\(2, 8, 8\\).*Resize the images"
    for use in (model, model.verify, model.certificate):
        with pytest.raises(ValueError, match=words):
            use(pictures(1, side=side))


def test_images_of_other_channels_and_other_precision_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"images have shape \(1, 3, 8, 8\); it must be \(batch, 2, height, width\)"):
        model(pictures(1, channels=3))
    with pytest.raises(TypeError, match=r"images are torch.float64, and the model is torch.float32: images.to\("):
        model.float()(pictures(1))
    with pytest.raises(TypeError, match="weight is torch.bfloat16, too coarse.*torch.autocast"):
        model.bfloat16()(pictures(1).bfloat16())


def test_refusals_of_branches():
    make = lambda **options: Branches(
        **{"channels": 4, "sizes": [(4, 4)], "inputs": (4, 4, 4), "ring": Ring(), **options}
    )
    with pytest.raises(ValueError, match="sizes is empty; there must be at least one branch"):
        make(sizes=[])
    with pytest.raises(TypeError, match="ring is 'hard'; it must be a Ring"):
        make(ring="hard")
    with pytest.raises(ValueError, match=r"g has shape \(4, 5, 5\); these branches were made for \(4, 4, 4\)"):
        make().prepare(torch.rand(1, 4, 5, 5))
    with pytest.raises(ValueError, match="injection_bound is 0; it must be"):
        make(injection_bound=0)
    with pytest.raises(TypeError, match="Ring has no option 'lambda_'; .*options: heritage, diversity"):
        Ring(lambda_=0.1)

"""The classifier with a task vector, against plain functions of its weights."""

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.models.few_shot.model import SIZES, FewShotMDEQ
from equipoise.models.mdeq.cell import Block, MDEQSize

DOUBLE = torch.float64


def small(centred=True, **options):
    torch.manual_seed(0)
    numbers = {"channels": (4, 6), "groups": 2, "expansion": 2, "downsamplings": 1, "task_length": 8, "pool": 2}
    model = FewShotMDEQ((1, 8, 8), 3, centred=centred, **{**numbers, **options}).to(DOUBLE)
    model.equilibrium.gradient = eq.UnrolledGradient(5)  # a fixed number of steps: nothing depends on a tolerance
    model.equilibrium.on_failure = "ignore"
    return model


def images(tasks=2, count=3, seed=0):
    return torch.rand(tasks, count, 1, 8, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def vectors(tasks=2, length=8, seed=1):
    return torch.randn(tasks, length, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def test_the_papers_size():
    model = eq.create_model("few-shot-mdeq", shape=(1, 28, 28), classes=5, size="omniglot", centred=False)
    assert isinstance(model, FewShotMDEQ)
    assert [tuple(film.weight.shape) for film in model.cell.films] == [(2 * 5 * 64, 200), (2 * 5 * 128, 200)]
    assert model.head.classify.in_features == 64 * 4 * 4 + 128 * 2 * 2
    assert len(model.stem) == 3  # one convolution
    assert SIZES["omniglot"].groups == 8
    assert eq.models.FewShotMDEQ is FewShotMDEQ
    assert "few-shot-mdeq" in eq.models.list_models()


@pytest.mark.parametrize("centred", [True, False])
def test_film_scales_and_shifts_what_the_first_norm_returns(centred):
    block = Block(MDEQSize((4, 6), groups=2, expansion=2), 1, "relu", weight_norm=False).to(DOUBLE)
    model, x = small(centred), vectors()
    z = torch.randn(6, 6, 4, 4, dtype=DOUBLE)
    films = model.cell.modulation(x, images=3)
    film = model.cell.films[1]
    both = x[:, 4:] @ film.weight.T + film.bias  # the second scale gets the second half of x
    gamma, beta = (part.repeat_interleave(3, dim=0)[:, :, None, None] for part in both.split(12, dim=1))
    wide = F.relu((gamma + centred) * block.norm1(block.conv1(z)) + beta)
    expected = block.norm3(F.relu(block.norm2(block.conv2(wide)) + z))
    torch.testing.assert_close(block(z, None, films[1]), expected)
    assert not torch.allclose(block(z, None), expected)


def test_the_images_of_a_task_share_its_vector_and_nothing_else():
    model, every, x = small(), images(3, 4), vectors(3)
    logits = model(every, x)
    assert logits.shape == (3, 4, 3)
    one = model(every[1:2, 2:3], x[1:2])  # neither other images of the task nor other tasks matter
    torch.testing.assert_close(one[0, 0], logits[1, 2])
    z = tuple(torch.randn(3, 4, *part.shape[2:], dtype=DOUBLE) for part in model.cell.start(x, model.features(every)))
    f = model.cell(z, x, model.features(every))
    alone = model.cell(tuple(p[1:2, 2:3] for p in z), x[1:2], model.features(every[1:2, 2:3]))
    for whole, part in zip(f, alone, strict=True):
        torch.testing.assert_close(whole[1:2, 2:3], part)
    assert not torch.allclose(model(every, vectors(3, seed=5)), logits, atol=1e-3)


def test_embedding_and_logits():
    model, every = small(), images()
    features = model.embedding(every)
    assert features.shape == (2, 3, 4 * 4 + 6)
    torch.testing.assert_close(model.head.classify(features), model(every, model.blank(2)))


def test_the_task_vector_scales_what_the_head_reads():
    model, every, x = small(film_head=True), images(), vectors()
    z = model.equilibrium(x, model.features(every))
    gates = x @ model.head.film.weight.T
    expected = (model.head.pooled(z) * gates[:, None]) @ model.head.classify.weight.T + model.head.classify.bias
    torch.testing.assert_close(model(every, x), expected)
    assert not model.head(z, 0 * x).any()  # no class is preferred at first
    film = model.head.film.weight.detach()  # orthogonal at first: x is the scales, and as long
    torch.testing.assert_close(film.T @ film, torch.eye(8, dtype=DOUBLE), atol=1e-6, rtol=0)
    assert small().head.film is None


@pytest.mark.parametrize("film_head", [False, True])
def test_gradients_reach_everything(film_head):
    model, x = small(film_head=film_head), vectors().requires_grad_()
    model(images(), x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().min() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_what_is_refused():
    with pytest.raises(ValueError, match="task_length is 9; it must be a multiple of 2, the number of scales"):
        small(task_length=9)
    with pytest.raises(ValueError, match="images of 28 x 28 do not fit this model, which halves them 3 times"):
        FewShotMDEQ((1, 28, 28), 5, downsamplings=2)
    with pytest.raises(ValueError, match="there is no size of FewShotMDEQ 'omniglott'; did you mean 'omniglot'"):
        FewShotMDEQ((1, 28, 28), 5, size="omniglott")
    with pytest.raises(TypeError, match="FewShotMDEQ has no option 'head_channels'"):
        FewShotMDEQ((1, 28, 28), 5, head_channels=(4, 4))
    for name in ("centred", "film_head"):
        with pytest.raises((TypeError, ValueError), match=f"{name} is 1; it must be"):
            FewShotMDEQ((1, 28, 28), 5, **{name: 1})
    model = small()
    with pytest.raises(
        ValueError, match=r"images have shape \(2, 1, 8, 8\); it must be \(tasks, images per task, 1, 8, 8"
    ):
        model(images()[:, 0], vectors())
    with pytest.raises(ValueError, match=r"x has shape \(3, 8\); it must be \(tasks, task_length\) = \(2, 8\)"):
        model(images(), vectors(3))

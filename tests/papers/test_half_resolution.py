"""Tables whose rows are compared at equal numbers of parameters have equal numbers of parameters."""

import pytest
import torch

from equipoise.lab.recipes.build import build_model
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import TableSpec
from equipoise.lab.results.reproduce import rows


def sizes(table, shape):
    """The number of parameters of every row, by its label."""
    found, channels = {}, (0.5,) * shape[0]
    facts = {"shape": shape, "classes": 10, "mean": channels, "std": channels}
    for row, source in rows(open_recipe(table), None, []):
        with torch.device("meta"):
            model = build_model(source.phase(0), facts, source.where)
        found[row.label] = sum(p.numel() for p in model.parameters())
    return found


def test_half_resolution_compares_models_of_16_channels_with_others_of_their_size():
    found = sizes("opteq/half-resolution", (3, 16, 16))
    assert found["MOptEq"] == found["POptEq, no fusion (MOptEq without D and H)"] == 17_162
    assert found["OptEq, one branch"] == 7_594
    assert found["POptEq, conv"] == 17_162 + 9 * 48 * 48
    for label in ("ResNet", "MDEQ", "monDEQ", "Weight-tied network, 10 steps"):
        assert found[label] == pytest.approx(17_162, rel=0.1), label


def test_half_resolution_says_so_and_trains_all_alike():
    order = ["POptEq, no fusion", "MOptEq", "OptEq", "MOptEq, perturbed", "MOptEq without D", "MOptEq without H"]
    order += ["ResNet", "MDEQ", "monDEQ", "Weight-tied", "POptEq, sum", "POptEq, conv"]
    source = open_recipe("opteq/half-resolution")
    assert "CIFAR-10 at 16x16" in source.read(TableSpec).title
    labels = []
    for row, recipe in rows(source, None, []):
        read = recipe.recipe
        assert "CIFAR-10 at 16x16" in read.title
        assert read.data.options == {"size": 16}
        assert (sum(phase.epochs for phase in read.phases), read.seeds, read.schedule.name) == (15, 2, "one-cycle")
        assert (read.training.batch_size, read.training.test, read.data.validation) == (128, "epoch", 5000)
        assert read.task.options == {"shift": 2, "flip": True}
        labels.append(row.label)
    assert all(label.startswith(start) for label, start in zip(labels, order, strict=True))


def test_models_on_mnist_are_of_equal_size():
    found = sizes("mondeq/mnist-equal", (1, 28, 28))
    assert len(found) == 7
    for label, count in found.items():
        assert count == pytest.approx(84_460, rel=0.04), label

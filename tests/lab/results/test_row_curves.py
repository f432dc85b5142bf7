"""The picture of a table: the metric of every row over epochs and over time, with its spread over seeds."""

import statistics

import pytest

from equipoise.lab.results.figures import row_curves


def epochs(*accuracies, split="val", seconds=60.0):
    return [
        {"kind": "epoch", "epoch": i, "seconds": seconds * i, split: {"accuracy": value}}
        for i, value in enumerate(accuracies, 1)
    ]


def lines_of(figure):
    return [{line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()} for axis in figure.axes]


def test_mean_and_spread_over_epochs_and_over_time():
    two = [epochs(0.1, 0.3), epochs(0.3, 0.6, seconds=120.0)]
    figure = row_curves([("two seeds", "accuracy", two), ("one", "accuracy", [epochs(0.2, 0.25)])])
    by_epoch, by_time = lines_of(figure)
    assert by_epoch["two seeds"] == [[1, pytest.approx(0.2)], [2, pytest.approx(0.45)]]
    assert by_time["two seeds"] == [[1.5, pytest.approx(0.2)], [3, pytest.approx(0.45)]]
    assert by_epoch["one"] == [[1, 0.2], [2, 0.25]]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(0.45 + statistics.stdev([0.3, 0.6]))
    assert figure.axes[0].get_ylabel() == "validation accuracy"


def test_test_metrics_are_shown_only_if_every_row_has_them():
    both = [{**a, **b} for a, b in zip(epochs(0.1, 0.2), epochs(0.5, 0.6, split="test"), strict=True)]
    assert row_curves([("a", "accuracy", [both])]).axes[0].get_ylabel() == "test accuracy"
    figure = row_curves([("a", "accuracy", [both]), ("b", "accuracy", [epochs(0.3, 0.4)])])
    assert figure.axes[0].get_ylabel() == "validation accuracy"
    assert lines_of(figure)[0]["a"] == [[1, 0.1], [2, 0.2]]


def test_rows_without_the_metric_are_left_out():
    figure = row_curves([("a", "accuracy", [epochs(0.1, 0.2)]), ("b", "psnr", [epochs(0.3, 0.4)])])
    assert list(lines_of(figure)[0]) == ["a"]
    assert row_curves([("a", "accuracy under attack", [epochs(0.1, 0.2)])]) is None
    assert row_curves([("a", "accuracy", [epochs(0.1)])]) is None


def test_seeds_that_have_not_finished_are_compared_up_to_the_same_epoch():
    figure = row_curves([("a", "accuracy", [epochs(0.1, 0.2, 0.3), epochs(0.3, 0.4)])])
    assert lines_of(figure)[0]["a"] == [[1, pytest.approx(0.2)], [2, pytest.approx(0.3)]]


def test_as_many_as_20_rows_look_different():
    figure = row_curves([(f"row {i}", "accuracy", [epochs(0.1, 0.2)]) for i in range(20)])
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}) == 20

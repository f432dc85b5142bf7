"""What training cost: columns of a table, computed from the log."""

import pytest
import torch

from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import Row, TableSpec
from equipoise.lab.results.costs import costs, costs_of, shown
from equipoise.lab.results.reproduce import markdown
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import peak_memory, reset_peak_memory


def epoch(step, seconds, forward=None, backward=None, failed=0.0, **more):
    counts = {"forward": forward, "backward": backward}
    solver = {d: {"evaluations": n, "failed": failed} for d, n in counts.items() if n is not None}
    return {"kind": "epoch", "step": step, "seconds": seconds, "train": {"accuracy": 0.5, "solver": solver}, **more}


def test_costs_are_means_over_epochs_and_steps():
    epochs = [epoch(10, 3.0, 200, 100, peak_memory=5_000_000), epoch(20, 5.0, 300, 140, 0.25, peak_memory=7_000_000)]
    found = costs_of(epochs)
    assert found == {
        "seconds per epoch": 2.5,
        "peak memory": 7_000_000,
        "failed": 0.25,
        "forward evaluations": 25.0,
        "backward evaluations": 12.0,
    }
    cells = [shown(column, found) for column in ("time", "evaluations", "memory", "failed")]
    assert cells == ["2.5 s", "25.0 + 12.0", "7 MB", "25.00%"]


def test_what_a_log_lacks_is_left_open():
    """A network that solves nothing, a log of an earlier version, and one without any epoch."""
    found = costs_of([epoch(10, 3.0)])
    assert (found["forward evaluations"], found["peak memory"], found["seconds per epoch"]) == (None, None, 3.0)
    assert [shown(column, found) for column in ("evaluations", "memory", "failed")] == ["-", "-", "-"]
    assert set(costs_of([]).values()) == {None}
    assert shown("evaluations", costs_of([epoch(10, 3.0, 200)])) == "20.0"  # back-propagated, not solved


def test_a_table_shows_the_columns_it_asks_for():
    line = {"label": "A", "metric": "accuracy", "paper": None, "paper_spread": None, "measured": 0.5, "spread": None}
    line |= {"parameters": 1234, "costs": costs_of([epoch(10, 3.0, 200, 100)])}
    rows = (Row("core/digits", "A"),)
    plain = markdown(TableSpec("T", rows), [line], None, 1)
    assert (
        "| | metric | paper | measured | parameters |\n|---|---|---|---|---|\n| A | accuracy | - | 0.5 | 1,234 |"
        in plain
    )
    text = markdown(TableSpec("T", rows, columns=("evaluations", "time")), [line], None, 1)
    assert "| parameters | evaluations per minibatch, forward + backward | time per epoch |\n|---|---|" in text
    assert "| 1,234 | 20.0 + 10.0 | 3.0 s |" in text


def test_means_over_seeds(monkeypatch, tmp_path):
    logs = {tmp_path / "0": [epoch(10, 3.0, 200)], tmp_path / "1": [epoch(10, 5.0, 300)]}
    monkeypatch.setattr(Run, "epochs", lambda run: logs[run.folder])
    found = costs([Run(folder) for folder in logs])
    assert (found["seconds per epoch"], found["forward evaluations"], found["peak memory"]) == (4.0, 25.0, None)


def test_an_unknown_column_is_refused(tmp_path):
    file = tmp_path / "table.toml"
    file.write_text('title = "T"\ncolumns = ["speed"]\n[[rows]]\nlabel = "A"\nrecipe = "core/digits"\n')
    with pytest.raises(ValueError, match=r"columns.*'speed'"):
        open_recipe(str(file), kind=TableSpec).read(TableSpec)


def test_peak_memory_is_that_since_the_last_reset():
    device = torch.device("cpu")
    reset_peak_memory(device)
    if (before := peak_memory(device)) is None:
        pytest.skip("this system does not tell")
    block = torch.ones(100_000_000, dtype=torch.uint8)
    assert peak_memory(device) >= before + 90_000_000
    del block
    reset_peak_memory(device)
    assert peak_memory(device) < before + 50_000_000

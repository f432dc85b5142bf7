"""What the benchmarks count and fit is what can be counted and fitted by hand."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import equipoise as eq

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import epochs  # noqa: E402
import paper_needs  # noqa: E402
import roofline  # noqa: E402
import scaling  # noqa: E402
from counting import Counter, Counts, Operation, count  # noqa: E402
from fitting import Fit, fit, value  # noqa: E402
from tables import text  # noqa: E402
from training_steps import classification, generator  # noqa: E402

# --- counting ---------------------------------------------------------------------------------------------------------


def test_a_product():
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    counts = count(lambda: a @ b)
    assert counts.flops == 2 * 3 * 4 * 5
    assert counts.bytes == 4 * (3 * 4 + 4 * 5 + 3 * 5)


def test_a_convolution_and_its_gradient():
    x, w = torch.rand(2, 3, 8, 8, requires_grad=True), torch.rand(5, 3, 3, 3, requires_grad=True)
    forward = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    counts = count(lambda: F.conv2d(x, w, padding=1))
    assert (counts.flops, counts.bytes) == (forward, 4 * (x.numel() + w.numel() + 2 * 5 * 8 * 8))
    assert count(lambda: F.conv2d(x, w, padding=1).sum().backward()).flops == 3 * forward


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: torch.fft.fft(torch.ones(4, 8, dtype=torch.complex64)), 4 * 5 * 8 * 3),
        (lambda: torch.fft.rfft2(torch.ones(4, 8, 8)), 4 * 2.5 * 64 * 6),
        (lambda: torch.ones(3, 4, dtype=torch.complex64) @ torch.ones(4, 5, dtype=torch.complex64), 8 * 3 * 4 * 5),
        (lambda: torch.linalg.inv(torch.eye(6)), 2 * 6**3),
        (lambda: torch.ones(3, 4) @ torch.ones(4), 2 * 3 * 4),
        (lambda: torch.zeros(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    ],
    ids=["transform", "real transform", "complex product", "inverse", "matrix and vector", "in place"],
)
def test_formulas(run, flops):
    assert count(run).flops == flops


def test_traffic_is_what_is_read_and_written():
    a, b = torch.rand(2, 10, 10)
    assert count(lambda: a.add_(b)).bytes == 3 * a.nbytes
    assert count(lambda: a.copy_(b)).bytes == 2 * a.nbytes
    assert count(lambda: a[:, 3].copy_(b[:, 3])).bytes == 2 * a.nbytes // 10
    assert count(lambda: a.T.reshape(10, 1, 10).expand(10, 7, 10)[2:]).bytes == 0
    assert count(lambda: torch.empty(1000)).bytes == 0
    assert count(lambda: a[:1].expand(10, 10) + b).bytes == a.nbytes // 10 + 2 * a.nbytes


def test_a_pause_leaves_out():
    a = torch.rand(4, 4)
    with Counter() as counter:
        a @ a
        with counter.paused():
            a @ a
    assert counter.counts.flops == 2 * 4**3


def test_flops_of_a_training_step_are_those_of_torch():
    step = classification("mdeq", (3, 16, 16), 2, (3, 3), size="cifar10-small", memory=4)
    with FlopCounterMode(display=False) as theirs:
        ours = count(step)
    assert ours.flops == pytest.approx(theirs.get_total_flops(), rel=1e-9)
    assert ours.flops > 0


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_a_row_of_the_roofline():
    counts = Counts([Operation("product", 100.0, 10), Operation("sum", 0.0, 30)])
    row = roofline.row(roofline.Subject("step", lambda: 0.0, counts), 10.0, flop_rate=20.0, byte_rate=10.0)
    assert (row["ms by flops"], row["ms by bytes"], row["ms one by one"]) == (5000, 4000, 8000)
    assert (row["bound by"], row["of roofline"], row["of that"]) == ("flops", 0.5, 0.8)


# --- fits -------------------------------------------------------------------------------------------------------------


def test_a_term_is_a_product():
    assert value("B P^1.5 C^2", {"B": 2, "P": 4, "C": 3}) == 2 * 8 * 9
    assert value("1", {}) == 1


def test_a_fit_recovers_coefficients_and_drops_what_is_not_there():
    points = [{"B": B, "C": C} for B, C in ((1, 8), (2, 8), (1, 16), (2, 16), (4, 4))]
    truth = Fit({"B": 3e-3, "B C^2": 2e-7})
    found = fit(("1", "B", "B C", "B C^2"), points, [truth(p) for p in points])
    assert found.coefficients == pytest.approx(truth.coefficients, rel=1e-6)
    assert str(found) == "0.003 B + 2e-07 B C^2"


def test_coefficients_are_never_negative():
    points = [{"x": x} for x in (1.0, 2.0, 3.0)]
    found = fit(("1", "x"), points, [5.0, 3.0, 1.0])
    assert all(c > 0 for c in found.coefficients.values())


@pytest.mark.parametrize("name", scaling.FAMILIES)
def test_the_size_to_check_is_not_among_those_fitted(name):
    *fitted, check = scaling.FAMILIES[name].smallest.plan()
    assert len({(size.channels, size.side) for size in fitted}) == 3
    assert (check.channels, check.side) not in {(size.channels, size.side) for size in fitted}
    assert {size.evaluations for size in fitted} >= {check.evaluations}


def test_steps_take_all_evaluations():
    step = classification("opteq", (3, 8, 8), 4, (5, 3), size="reduced", channels=4)
    with eq.watch_solves() as solves:
        step()
    assert (solves[0].stats.steps == 5).all()
    assert solves[0].backward is not None
    assert (solves[0].backward.steps == 3).all()


def test_a_joint_step_of_the_generator_changes_every_weight():
    step = generator((8, 8), 8, 2, 3)
    step.optimizer.param_groups[0]["lr"] = 1.0
    before = [p.detach().clone() for p in step.model.parameters()]
    step()
    assert all((p != b).any() for p, b in zip(step.model.parameters(), before, strict=True))


# --- what the papers need ---------------------------------------------------------------------------------------------


def test_a_quantity_is_extrapolated_to_the_real_size():
    points = [
        {"B": B, "P": P, "C": C, "W": W} for B, P, C, W in ((2, 4, 1, 9), (2, 8, 1, 7), (4, 4, 2, 5), (3, 3, 3, 3))
    ]
    values = [5 * p["W"] + 3 * p["B"] * p["P"] * p["C"] for p in points]
    model = {"P": 100, "C": 10, "W": 1000}
    line = paper_needs.Linear.through(("W", "B P", "B P C"), points, values, model)
    assert (line.fixed, line.each, line.error) == pytest.approx((5000, 3000, 0), abs=1e-6)
    assert line(5) == pytest.approx(20_000)


def test_a_ring_sends_each_gradient_nearly_twice():
    assert paper_needs.traffic(1000, 2) == 4 * 1000
    assert paper_needs.traffic(1000, 8) == 4 * 1000 * 2 * 7 / 8


def test_hours_and_memory_follow_from_a_step():
    phase = paper_needs.Phase(
        "",
        epochs=2,
        flops=paper_needs.Linear(0.0, 4e12, 0.0),
        bytes=paper_needs.Linear(1e9, 0.0, 0.0),
        memory=paper_needs.Linear(1e9, 1e8, 0.0),
    )
    need = paper_needs.Needs(paper_needs.PAPERS[0], 10, resident=1e9, batch=5, images=50, phases=[phase])
    gpu = paper_needs.GPU("one", gigabytes=10 / paper_needs.USABLE, teraflops=1.0, bandwidth=1.0)
    assert need.steps(phase) == 20
    assert need.memory(5) == pytest.approx(2.5e9)
    assert need.fitting(gpu) == 80
    assert need.hours(gpu) == pytest.approx(
        (20 * 20 / paper_needs.SUSTAINED / 3600, 20 * 1 / paper_needs.SUSTAINED / 3600)
    )


# --- what is stored ---------------------------------------------------------------------------------------------------


def stored(name):
    return json.loads((ROOT / "results" / "benchmarks" / name).read_text())


def shown(rows):
    return [{name: text(cell) for name, cell in row.items()} for row in rows]


def test_the_stored_fits_are_those_of_the_measurements():
    """The tables shown follow from the measurements stored beside them."""
    content = stored("scaling.json")
    store = scaling.Store(ROOT / "results" / "benchmarks" / "scaling.json")
    assert list(store.fits()) == list(scaling.FAMILIES)
    for title, rows in scaling.fit_tables(store.fits()).items():
        assert shown(content["tables"][title]) == shown(rows)


def test_flops_and_bytes_are_linear_in_the_pixels():
    """Of MDEQ; joint steps of JIIO end where they converge, which depends on the images."""
    tables = stored("scaling.json")["tables"]
    rows = [row for title, rows in tables.items() if title.startswith("cost of a step") for row in rows]
    rows = [row for row in rows if row["recipe"].startswith("mdeq/")]
    assert rows
    for row in rows:
        for quantity in ("error: flops", "bytes"):
            assert abs(float(row[quantity].rstrip("%"))) <= 1.0, row["recipe"]


def test_the_roofline_has_every_step():
    steps = [row["step"] for row in list(stored("roofline.json")["tables"].values())[1]]
    for start in ("(i) ", "(ii) ", "(iii) ", "monDEQ conv56", "monDEQ multi32", "MDEQ ", "MOptEq "):
        assert any(step.startswith(start) for step in steps), start


# --- time per epoch ---------------------------------------------------------------------------------------------------


def test_recipes_with_a_small_budget_are_recipes():
    names = epochs.small_recipes()
    assert {
        "core/digits",
        "mondeq/mnist-fc",
        "mdeq/cifar10-small",
        "opteq/reduced-mopteq",
        "jiio/celeba",
    } <= names.keys()
    assert not {"core/table", "core/convergence", "mondeq/claims"} & names.keys()


def test_a_recipe_that_only_one_state_knows_has_no_ratio():
    class Fixed:
        def __init__(self, seconds: float | None):
            self.seconds = seconds

        def ask(self, **request):
            if self.seconds is None:
                raise epochs.LeftOut("UnknownName: no such model")
            return {"epochs": [1, 3], "steps": 10} if "open" in request else self.seconds

    row = epochs.measured(Path("recipe.toml"), Fixed(2.0), Fixed(1.0), rounds=3, most=5.0)  # type: ignore[arg-type]
    assert row == {"steps": 10, "s before": 20.0, "s now": 10.0, "now / before": 0.5}
    alone = epochs.measured(Path("recipe.toml"), Fixed(None), Fixed(1.0), rounds=3, most=5.0)  # type: ignore[arg-type]
    assert alone == {"steps": 10, "s before": None, "s now": 10.0, "now / before": None}
    assert epochs.summary([row, alone])["now / before"] == pytest.approx(0.5)
    with pytest.raises(epochs.LeftOut, match="more than 0.5 s"):
        epochs.measured(Path("recipe.toml"), Fixed(2.0), Fixed(1.0), rounds=3, most=0.5)  # type: ignore[arg-type]

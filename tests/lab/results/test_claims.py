"""Marks of claims follow from stored numbers by their rules."""

import json

import pytest
from test_results_page import origin, result, store

from equipoise.lab.recipes.reading import RecipeError
from equipoise.lab.results.claims import Claim, Comparison, Mark, ValueSpec, judge, read_claims, value_of
from equipoise.lab.results.results_page import results_page
from equipoise.lab.results.stored import read_stored

FC, CONV = "mondeq/table1: MNIST, fully connected, 84K", "mondeq/table1: MNIST, single convolution, 84K"
ROW = ValueSpec(row=FC)


def number(value):
    return ValueSpec(number=value)


def claim(*holds, **options):
    return Claim("A sentence.", "table 1", tuple(holds), **options)


def stored_fc(folder, accuracies=(0.97,), budget: str | None = "small", epochs=12, name="mnist-fc"):
    command = f"equipoise train mondeq/{name}" + (f" --budget {budget}" if budget else "")
    made = origin(command, f"mondeq/{name}", budget)
    for seed, accuracy in enumerate(accuracies):
        store(folder, f"mondeq/{name}.seed-{seed}.result.json", result(accuracy, epochs=epochs, origin=made))
    return read_stored(folder)


def mark(folder, *holds, stored=None, **options):
    return judge(claim(*holds, **options), stored or stored_fc(folder)).mark


@pytest.mark.parametrize(
    ("rule", "right", "by", "said"),
    [
        ("above", 0.96, 0.0, Mark.CONFIRMED),
        ("above", 0.98, 0.0, Mark.NOT_AT_THIS_BUDGET),
        ("above", 0.965, 0.01, Mark.NOT_AT_THIS_BUDGET),  # within the margin
        ("below", 0.98, 0.0, Mark.CONFIRMED),
        ("below", 0.96, 0.0, Mark.NOT_AT_THIS_BUDGET),
        ("reaches", 0.975, 0.01, Mark.CONFIRMED),
        ("reaches", 0.99, 0.01, Mark.NOT_AT_THIS_BUDGET),
        ("reaches", 0.5, 0.0, Mark.CONFIRMED),
        ("within", 0.975, 0.01, Mark.CONFIRMED),
        ("within", 0.5, 0.01, Mark.NOT_AT_THIS_BUDGET),
    ],
)
def test_a_short_training_run_confirms_or_leaves_open(tmp_path, rule, right, by, said):
    assert mark(tmp_path, Comparison(ROW, rule, number(right), by)) == said


def test_at_the_budget_of_the_paper_what_fails_is_refuted(tmp_path):
    stored = stored_fc(tmp_path, (0.97,), None, 40)
    assert mark(tmp_path, Comparison(ROW, "above", number(0.98)), stored=stored) == Mark.REFUTED
    assert mark(tmp_path, Comparison(ROW, "above", number(0.969), 0.01), stored=stored) == Mark.NOT_AT_THIS_BUDGET
    stopped_early = stored_fc(tmp_path, (0.97,), None, 39)
    assert mark(tmp_path, Comparison(ROW, "above", number(0.98)), stored=stopped_early) == Mark.NOT_AT_THIS_BUDGET


def test_a_claim_about_any_budget_is_refuted_by_a_short_run(tmp_path):
    assert mark(tmp_path, Comparison(ROW, "above", number(0.98)), any_budget=True) == Mark.REFUTED
    assert mark(tmp_path, Comparison(ROW, "above", number(0.96)), any_budget=True) == Mark.CONFIRMED


def test_a_missing_value_is_not_run_whatever_else_fails(tmp_path):
    stored = stored_fc(tmp_path, (0.97,), None, 40)
    fails, missing = Comparison(ROW, "above", number(0.98)), Comparison(ValueSpec(row=CONV), "above", ROW)
    verdict = judge(claim(fails, missing), stored)
    assert verdict.mark == Mark.NOT_RUN
    assert verdict.reasons[-1] == ("not run: MNIST, single convolution, 84K, accuracy", [])
    for spec in (
        ValueSpec(run="mondeq/nothing", metric="accuracy"),
        ValueSpec(run="mondeq/mnist-fc", metric="no such metric"),
        ValueSpec(file="mondeq/nothing.json", at=("a",)),
        ValueSpec(row="mondeq/table1: no such row"),
        ValueSpec(row="no/table: row"),
        ValueSpec(row="core/table: MNIST", paper=True),  # without a printed number
        ValueSpec(row=FC, paper=True, metric="loss"),  # of which no number is printed
        ValueSpec(number=1.0, over={"run": "mondeq/nothing"}),
    ):
        assert mark(tmp_path, Comparison(spec, "above", number(0)), stored=stored) == Mark.NOT_RUN


def test_seeds_have_to_differ_by_more_than_their_spread(tmp_path):
    stored_fc(tmp_path, (0.96, 0.98))  # 0.97 +- 0.014
    stored = stored_fc(tmp_path, (0.98, 0.99), name="mnist-conv")  # 0.985 +- 0.007: sqrt(a^2 + b^2) is 0.0158
    comparison = Comparison(ValueSpec(row=CONV), "above", ROW)
    verdict = judge(claim(comparison), stored)
    assert verdict.mark == Mark.NOT_AT_THIS_BUDGET
    ((said, files),) = verdict.reasons
    assert said == (
        "98.50% ± 0.71% (MNIST, single convolution, 84K) > 97.00% ± 1.41% (MNIST, fully connected, 84K) "
        "by more than 1.6 points: within the margin"
    )
    assert files == ["mondeq/mnist-conv.seed-0.result.json", "mondeq/mnist-fc.seed-0.result.json"]
    stored = stored_fc(tmp_path, (0.985, 0.995), name="mnist-conv")
    assert judge(claim(comparison), stored).mark == Mark.CONFIRMED


def test_the_number_of_the_paper_brings_its_spread(tmp_path):
    stored = stored_fc(tmp_path, (0.9805,))
    comparison = Comparison(ROW, "reaches", ValueSpec(row=FC, paper=True))
    assert judge(claim(comparison), stored).mark == Mark.CONFIRMED  # 98.1 +- 0.1
    assert judge(claim(comparison), stored_fc(tmp_path, (0.979,))).mark == Mark.NOT_AT_THIS_BUDGET


def test_the_longest_budget_counts(tmp_path):
    stored_fc(tmp_path)
    made = origin("equipoise train mondeq/mnist-fc", "mondeq/mnist-fc", None)
    store(tmp_path, "mondeq/long.result.json", result(0.99, epochs=40, origin=made))
    value = value_of(ROW, read_stored(tmp_path))
    assert value.number is not None
    assert value.number.mean == 0.99
    assert value.full


def test_a_row_at_the_budget_of_the_paper_does_not_beat_one_that_is_not(tmp_path):
    """However large the difference is; unless the claim does not depend on the budget."""
    stored_fc(tmp_path, (0.5,))
    stored = stored_fc(tmp_path, (0.9,), None, 40, "mnist-conv")
    ratio = Comparison(ValueSpec(row=CONV, over={"row": FC}), "above", number(1))
    for holds in (Comparison(ValueSpec(row=CONV), "above", ROW), Comparison(ROW, "above", ValueSpec(row=CONV)), ratio):
        verdict = judge(claim(holds), stored)
        assert verdict.mark == Mark.NOT_AT_THIS_BUDGET
        assert verdict.reasons[0][0].endswith(", at different budgets")
    assert mark(tmp_path, Comparison(ValueSpec(row=CONV), "above", ROW), stored=stored, any_budget=True) == "confirmed"
    assert mark(tmp_path, Comparison(ValueSpec(row=CONV), "above", number(0.8)), stored=stored) == Mark.CONFIRMED
    assert mark(tmp_path, Comparison(ROW, "reaches", ValueSpec(row=FC, paper=True)), stored=stored) != Mark.CONFIRMED


def test_rows_are_compared_at_a_budget_that_both_have(tmp_path):
    stored_fc(tmp_path, (0.5,))
    stored_fc(tmp_path, (0.4,), name="mnist-conv")
    made = origin("equipoise train mondeq/mnist-conv", "mondeq/mnist-conv", None)
    store(tmp_path, "mondeq/long.result.json", result(0.9, epochs=40, origin=made))
    stored = read_stored(tmp_path)
    verdict = judge(claim(Comparison(ValueSpec(row=CONV, over={"row": FC}), "above", number(1))), stored)
    assert verdict.reasons[0][0].startswith("0.8 (40.00% (MNIST, single convolution, 84K) / 50.00% (")
    verdict = judge(claim(Comparison(ValueSpec(row=CONV), "above", ROW)), stored)
    assert verdict.reasons[0][0].startswith("40.00% (MNIST, single convolution, 84K) > 50.00% (")
    alone = value_of(ValueSpec(row=CONV), stored).number
    assert alone is not None
    assert alone.mean == 0.9


CONTENT = {"runs": [{"name": "a", "curve": [3.0, 2.0], "steps": None}, {"name": "b", "curve": [5.0, 1.0]}], "0.1": 7}


@pytest.mark.parametrize(
    ("at", "take", "found"),
    [
        (("0.1",), "only", 7),
        (("runs", "0", "curve", "-1"), "only", 2),
        (("runs", "*", "curve", "-1"), "least", 1),
        (("runs", "*", "curve", "0"), "most", 5),
        (("runs", "*", "curve", "*"), "mean", 2.75),
        (("runs", "name=b", "0", "curve", "0"), "only", 5),
        (("runs", "*", "steps"), "least", None),
        (("runs", "7", "curve"), "only", None),
        (("runs", "*", "curve", "0"), "only", None),
        (("nothing",), "only", None),
    ],
)
def test_places_in_a_file(tmp_path, at, take, found):
    store(tmp_path, "a/b.json", CONTENT)
    stored, spec = read_stored(tmp_path), ValueSpec(file="a/b.json", at=at, take=take)
    if found is None:
        with pytest.raises(RecipeError, match=r"a/b.json has \d+ values at"):
            value_of(spec, stored)
    else:
        value = value_of(spec, stored)
        assert value.number is not None
        assert value.number.mean == found
        assert not value.full


def test_values_of_a_log_and_ratios(tmp_path):
    lines = [{"kind": "other", "step": 1}, *({"kind": "note", "step": step, "x": step} for step in (2, 8))]
    store(tmp_path, "a/b.log.jsonl", "\n".join(map(json.dumps, lines)))
    last = ValueSpec(file="a/b.log.jsonl", at=("kind=note", "-1", "x"))
    ratio = ValueSpec(file=last.file, at=last.at, over={"file": last.file, "at": ["kind=note", "0", "x"]})
    value = value_of(ratio, read_stored(tmp_path))
    assert value.number is not None
    assert value.number.mean == 4
    assert value.text == "4 (8 / 2)"


def test_a_ratio_has_the_spread_of_its_parts(tmp_path):
    stored_fc(tmp_path, (0.4, 0.6))  # 0.5 +- 0.1414
    stored = stored_fc(tmp_path, (0.9, 1.1), name="mnist-conv")  # 1 +- 0.1414
    value = value_of(ValueSpec(row=CONV, over={"row": FC}), stored)
    assert value.number is not None
    assert value.number.mean == pytest.approx(2)
    assert value.number.spread == pytest.approx(0.02**0.5 * 5**0.5 / 0.5)
    comparison = Comparison(ValueSpec(row=CONV, over={"row": FC}), "above", number(1.9))
    verdict = judge(claim(comparison, any_budget=True), stored)
    assert verdict.mark == Mark.NOT_AT_THIS_BUDGET
    ((said, files),) = verdict.reasons
    assert "> 1.9 by more than 0.63: within the margin" in said
    assert files == ["mondeq/mnist-conv.seed-0.result.json", "mondeq/mnist-fc.seed-0.result.json"]


def test_a_ratio_to_zero_has_no_value(tmp_path):
    verdict = judge(
        claim(Comparison(ValueSpec(number=1.0, over={"number": 0.0}), "above", number(0))), stored_fc(tmp_path)
    )
    assert verdict.mark == Mark.NOT_RUN
    assert verdict.reasons == [("not run: 1 / 0, which has no value", [])]


@pytest.mark.parametrize("take", ["most", "mean"])
@pytest.mark.parametrize("missing", ["null", "NaN"])
def test_what_is_not_finite_is_not_left_out(tmp_path, take, missing):
    store(tmp_path, "a/b.json", f'{{"x": [1.0, {missing}, 3.0]}}')
    with pytest.raises(RecipeError, match="a/b.json has 3 values at x / \\*, of which 1 are not finite"):
        value_of(ValueSpec(file="a/b.json", at=("x", "*"), take=take), read_stored(tmp_path))
    least = value_of(ValueSpec(file="a/b.json", at=("x", "*"), take="least"), read_stored(tmp_path))
    assert least.number is not None
    assert least.number.mean == 1


@pytest.mark.parametrize("take", ["only", "least"])
def test_a_value_that_is_null_is_not_called_several(tmp_path, take):
    store(tmp_path, "a/b.json", {"x": None})
    with pytest.raises(RecipeError, match="has 1 values at x, of which 1 are not finite: nothing is left to compare"):
        value_of(ValueSpec(file="a/b.json", at=("x",), take=take), read_stored(tmp_path))


@pytest.mark.parametrize(
    ("command", "full"),
    [
        ("equipoise train mondeq/mnist-fc", True),
        ("equipoise train mondeq/mnist-fc seed=3 seeds=2", True),
        ("equipoise train mondeq/mnist-fc --budget small", False),
        ("equipoise train mondeq/mnist-fc phases.0.epochs=1", False),
        ("equipoise train mondeq/mnist-fc data.limit=100", False),
    ],
)
def test_a_run_with_changes_is_not_at_the_budget_of_the_paper(tmp_path, command, full):
    store(tmp_path, "mondeq/mnist-fc.result.json", result(0.97, origin=origin(command, budget=None)))
    value = value_of(ValueSpec(run="mondeq/mnist-fc", metric="accuracy"), read_stored(tmp_path))
    assert value.full is full


@pytest.mark.parametrize("spec", [ROW, ValueSpec(run="mondeq/mnist-fc", metric="accuracy")])
def test_a_run_of_an_earlier_recipe_is_not_at_the_budget_of_the_paper(tmp_path, spec):
    made = origin("equipoise train mondeq/mnist-fc", budget=None)
    for limit, full in ((None, True), (100, False)):
        if limit is not None:
            made["tables"]["data"]["limit"] = limit  # which the recipe has no longer
        store(tmp_path, "mondeq/mnist-fc.result.json", result(0.5, epochs=40, origin=made))
        assert value_of(spec, read_stored(tmp_path)).full is full


def test_a_mistake_in_a_file_of_claims_is_located(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text('[[claims]]\nclaim = "A"\nwhere = "B"\n[[claims.holds]]\nleft = {number = 1}\nrule = "abov"\n')
    with pytest.raises(RecipeError, match=r"line 6: claims.0.holds.0.rule is 'abov'; did you mean 'above'"):
        read_claims(path)
    path.write_text("[[claims]\n")
    with pytest.raises(RecipeError, match=r"claims.toml: "):
        read_claims(path)


def test_marks_and_reasons_are_on_the_page(tmp_path):
    stored_fc(tmp_path, (0.982,), name="mnist-fc")
    page = results_page(tmp_path, tmp_path / "page.md")
    assert (
        "| Fully connected, 98.1% on MNIST. | table 1 | **confirmed** | 98.20% (MNIST, fully connected, 84K) ≥ 98.10%"
        in page.text
    )
    assert page.marks[Mark.CONFIRMED] == 1
    assert page.marks[Mark.NOT_RUN] + page.marks[Mark.NOT_AT_THIS_BUDGET] + 1 == page.marks.total()

"""Table 9 of the JIIO paper: what the recipes have, beside what the paper prints."""

import json

import pytest

from equipoise.cli import main
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import FigureSpec
from equipoise.papers.jiio.hyperparameter_figures import SETTINGS, cell_text, hyperparameters, same, shown


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The numbers beside the picture, and the Markdown."""
    folder = tmp_path_factory.mktemp("table9")
    words = ["--runs", str(folder / "runs"), "--out", str(folder / "table.png"), "--threads", "1"]
    assert main(["figure", "jiio/table9", *words]) == 0
    assert (folder / "table.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("runs/*/recipe-*"))  # nothing is trained
    return json.loads((folder / "table.json").read_text()), (folder / "table.md").read_text()


def test_values_are_those_of_the_recipes(table):
    numbers, text = table
    values = {row["name"]: [cell["recipe"] for cell in row["cells"]] for row in numbers["rows"]}
    assert values.keys() == SETTINGS.keys()
    assert values["Batch size"] == [96, 96, 48, 48, 80]
    assert values["Channels"][2] == [32, 64, 128, 256]
    assert values["JIIO iterations"] == [80, 80, 40, 100, 100]
    assert values["Jacobian penalty"] == [0.01, 0.01, 0.1, 2.0, 0.5]
    assert values["JIIO step size of x"][2:] == ["auto", "auto", 0.04]
    assert "| Batch size | 96 | 96 | 48 | 48 | 80 |" in text


def test_differences_and_misprints_are_marked(table):
    numbers, text = table
    marked = {row["name"]: [cell["differs"] for cell in row["cells"]] for row in numbers["rows"]}
    assert marked["Forward steps"] == [False, False, True, True, False]
    assert not any(marked["Learning rate"])  # the paper does not specify that of Omniglot
    assert "**0.3** (paper 0.6; printed 0.1) | **0.3** (paper 0.1; printed 0.6)" in text
    count = sum(map(sum, marked.values()))
    assert f"Bold: {count} of {5 * len(SETTINGS)} values differ" in text


def test_a_budget_shows_what_it_changes(tmp_path, capsys):
    words = ["--budget", "small", "--runs", str(tmp_path / "runs"), "--threads", "1"]
    assert main(["figure", "jiio/table9", *words]) == 0
    assert "| Image size | **14** (paper 28) | **16** (paper 32) | **32** (paper 64) |" in capsys.readouterr().out


def test_runs_are_rejected(tmp_path, capsys):
    assert main(["figure", "jiio/table9", "--run", str(tmp_path)]) == 2
    assert "jiio/table9 is drawn from recipes, not from trained runs: omit --run." in capsys.readouterr().err


def test_wrong_options_get_their_sentence():
    source = open_recipe("jiio/celeba")
    with pytest.raises(ValueError, match="there is no hyperparameter 'Batchsize'; did you mean 'Batch size'"):
        hyperparameters([source], {"Batchsize": [3]})
    with pytest.raises(ValueError, match="Batch size has 2 values; it must have 1, one per recipe"):
        hyperparameters([source], {"Batch size": [3, 4]})
    with pytest.raises(ValueError, match="the task 'classification' has no joint steps"):
        hyperparameters([open_recipe("core/digits")], {"JIIO memory": [20]})


def test_values_are_compared_and_shown():
    assert same("Adam", "adam")
    assert same([0.8, 0.6], (0.8, 0.6))
    assert not same([0.8], [0.8, 0.6])
    assert not same("auto", 0.01)
    assert [shown(value) for value in ("", True, 0.001, [1, 2.5])] == ["-", "yes", "0.001", "1, 2.5"]
    assert cell_text({"recipe": 3, "printed": 3, "meant": 3, "differs": False}) == "3"


def test_the_published_values_are_one_per_recipe():
    spec = open_recipe("jiio/table9").read(FigureSpec)
    assert all(len(row) == len(spec.recipes) for row in spec.options["published"].values())

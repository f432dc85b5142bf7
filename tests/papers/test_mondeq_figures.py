"""Table 1 and the figures of the monDEQ paper, drawn by the command line from small models; their numbers."""

import json
import re
import shutil

import pytest
import torch

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.data import load
from equipoise.lab.recipes.reading import open_recipe, recipe_names
from equipoise.lab.recipes.schema import FigureSpec, Recipe, TableSpec
from equipoise.lab.results.reproduce import rows
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine
from equipoise.papers.mondeq import figures
from training_helpers import train_here

RECIPE = """
title = "A small monDEQ, {kind}"

[data]
name = "digits"
limit = 96
validation = 32

[model]
name = "mondeq"
kind = "{kind}"
channels = {channels}

[solver]
name = "peaceman-rachford"

[tolerance]
relative = 1e-2
max_steps = 200

[optimizer]
lr = 0.02

[training]
batch_size = 16
test = "epoch"
keep_every = 1

[[phases]]
epochs = 2
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with two recipes and a run of each."""
    folder = tmp_path_factory.mktemp("work")
    for kind, channels in (("dense", 16), ("multitier", [4, 4])):
        train_here(folder, kind, RECIPE.format(kind=kind, channels=channels))
    return folder


@pytest.fixture
def draw(tmp_path):
    """Draw a figure by the command line; returns the numbers beside the picture."""

    def drawn(name, *words):
        out = tmp_path / "figure.png"
        assert main(["figure", str(name), "--out", str(out), "--threads", "1", *map(str, words)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
        return json.loads(out.with_suffix(".json").read_text())

    return drawn


def figure_file(folder, text, recipe="a.toml"):
    file = folder / "mine.toml"
    file.write_text(f'title = "A figure"\nrecipes = ["{recipe}"]\n{text}\n')
    return file


# What the paper prints


def mondeq(kind):
    names = [name for name in recipe_names() if name.startswith("mondeq/")]
    return [name for name in names if kind in open_recipe(name).tables]


def test_table_1_has_every_recipe_and_what_its_aim_says():
    source = open_recipe("mondeq/table1")
    table = source.read(TableSpec)
    aims = {name: open_recipe(name).read(Recipe).paper.aim for name in mondeq("phases")}
    assert sorted(row.recipe for row in table.rows) == [name for name, aim in aims.items() if "(table 1)" in aim]
    for row, recipe in rows(source, None, []):
        read = recipe.read(Recipe)
        found = re.match(r"([\d.]+)(?: \+- ([\d.]+) )?% \(table 1\)", read.paper.aim)
        assert found, read.paper.aim
        assert row.paper == pytest.approx(float(found[1]) / 100)  # accuracies are shares of 1 in the lab
        assert row.spread == (found[2] and pytest.approx(float(found[2]) / 100))  # the paper cites some without one
        assert row.metric == "accuracy"
        assert read.seeds == 3


def test_figures_1_and_f1_show_the_numbers_of_table_1():
    paper = {row.recipe: row.paper for row in open_recipe("mondeq/table1").read(TableSpec).rows}
    drawn = []
    for name in ("mondeq/figure1", "mondeq/figure-f1"):
        spec = open_recipe(name).read(FigureSpec)
        assert spec.options["published"] == {recipe: paper[recipe] for recipe in spec.recipes}
        assert all(open_recipe(recipe).read(Recipe).training.test == "epoch" for recipe in spec.recipes)
        drawn += spec.recipes
    assert sorted(drawn) == sorted(paper)


@pytest.mark.parametrize("name", ["mondeq/figure2", "mondeq/figure-f2"])
def test_recipes_of_figures_over_training_keep_their_epochs(name):
    for recipe in open_recipe(name).read(FigureSpec).recipes:
        assert open_recipe(recipe).read(Recipe).training.keep_every == 1


# Figures 1 and F1


def test_accuracy_is_that_of_the_logs(work, draw):
    runs = [open_run(work / f"{kind}-001") for kind in ("dense", "multitier", "dense", "multitier")]
    found = draw("mondeq/figure1", *(word for run in runs for word in ("--run", run.folder)))["runs"]
    for run, numbers in zip(runs, found, strict=True):
        assert numbers["title"] == run.recipe.title
        assert numbers["epoch"] == [1, 2]
        assert numbers["accuracy"] == [record["test"]["accuracy"] for record in run.epochs()]
        assert numbers["accuracy"][-1] == run.result["test_of_last"]["accuracy"]
        assert numbers["published"] is None  # digits are in no paper


def test_published_accuracies_are_dotted(work):
    runs = [open_run(work / "dense-001"), open_run(work / "multitier-001")]
    (axis,) = figures.accuracy(runs, {"multitier": 0.9}).axes
    solid = {line.get_label(): line for line in axis.get_lines() if line.get_linestyle() == "-"}
    (dotted,) = (line for line in axis.get_lines() if line.get_linestyle() == ":")
    assert list(solid) == ["dense", "multitier (paper: 90.0%)"]
    assert set(dotted.get_ydata()) == {0.9}
    assert dotted.get_color() == solid["multitier (paper: 90.0%)"].get_color()


def test_a_figure_trains_its_recipes(work, draw, tmp_path):
    mine = figure_file(tmp_path, 'figure = "mondeq-accuracy"\npublished = { dense = 0.5 }', work / "dense.toml")
    (numbers,) = draw(mine, "phases.0.epochs=1", "--runs", tmp_path)["runs"]
    assert (numbers["run"], numbers["epoch"], numbers["published"]) == ("dense-001", [1], 0.5)
    assert len(list(tmp_path.glob("*/recipe-1/dense-001/result.json"))) == 1


# Figures 2 and F2


@pytest.mark.parametrize(("name", "kind"), [("mondeq/figure2", "multitier"), ("mondeq/figure-f2", "dense")])
def test_iterations_over_training(work, draw, name, kind):
    run = work / f"{kind}-001"
    (numbers,) = draw(name, "--run", run)["runs"]
    assert [record["epoch"] for record in numbers["epochs"]] == [1, 2]
    assert (numbers["samples"], numbers["tolerance"]) == (96, 1e-2)
    for direction in ("forward", "backward"):
        excess = []
        for record in (epoch[direction] for epoch in numbers["epochs"]):
            tried = record["tried"]
            medians = [each["median"] for each in tried]
            assert [each["alpha"] for each in tried] == [0.5**k for k in range(len(tried))]
            assert record["one"] == tried[0]
            assert record["best"]["median"] == min(medians)
            assert tried.index(record["best"]) <= len(tried) - 3  # twice more to be sure
            assert all(each["median"] <= each["max"] < 200 for each in tried)
            assert 0.1 < record["auto"]["alpha"] < 1
            excess.append(record["auto"]["median"] - record["best"]["median"])
        assert numbers["summary"][direction] == {"auto above best": max(excess), "not converged": 0}
        assert max(excess) <= 2
    assert numbers["epochs"][0]["L"] != numbers["epochs"][1]["L"]


def test_steps_are_those_of_a_solve_by_hand(work, draw):
    run = open_run(work / "dense-001")
    (numbers,) = draw("mondeq/figure2", "--run", run.folder)["runs"]
    data = load("digits", folders=(), validation=32).train
    images, labels = data.read(torch.linspace(0, len(data) - 1, 96).round().long())  # data.limit
    for record, (epoch, file) in zip(numbers["epochs"], run.kept(), strict=True):
        assert record["epoch"] == epoch
        model = eq.load(file)
        model.layer.solver = eq.PeacemanRachford(0.5)
        with eq.watch_solves() as solves:
            torch.nn.functional.cross_entropy(model(images / 255), labels).backward()
        for direction, statistics in (("forward", solves[0].stats), ("backward", solves[0].backward)):
            second = record[direction]["tried"][1]
            assert second["median"] == statistics.steps.median()
            assert second["max"] == statistics.steps.max()
            assert second["mean"] == pytest.approx(statistics.steps.double().mean().item())


def test_the_search_goes_on_until_it_has_seen_the_best():
    def tried(*medians, failed=0):
        same = [{"alpha": 0.5**k, "median": m, "mean": m, "failed": failed} for k, m in enumerate(medians)]
        return [{"forward": numbers, "backward": numbers} for numbers in same]

    assert not figures.settled(tried(9, 8, 7), 10)
    assert not figures.settled(tried(9, 8, 7, 8), 10)
    assert figures.settled(tried(9, 8, 7, 8, 9), 10)
    assert figures.settled(tried(7, 8, 9), 10)
    assert not figures.settled(tried(200, 200, 200, failed=9), 10)  # nothing is solved yet
    assert figures.settled(tried(*[200] * 17, failed=9), 10)  # but it ends


# Figure 3


def steeper(run, folder, factor):
    """A copy of the dense run with larger weights, which plain iteration does not solve."""
    shutil.copytree(run, folder)
    file = open_run(folder).best
    tensors, facts = checkpoints.read(file)
    larger = {name: factor * t if name.endswith(("operator.A", "operator.B")) else t for name, t in tensors.items()}
    assert sum(not torch.equal(tensors[name], larger[name]) for name in tensors) == 2
    checkpoints.save(file, larger, facts)
    return folder


@pytest.mark.parametrize("kind", ["dense", "multitier"])
def test_peaceman_rachford_converges_for_every_alpha_and_forward_backward_below_its_bound(work, draw, tmp_path, kind):
    run = work / "multitier-001" if kind == "multitier" else steeper(work / "dense-001", tmp_path / "run", 1.5)
    options = ['figure = "mondeq-convergence"', "samples = 8", "halvings = 5", "relative = 1e-3", "max_steps = 400"]
    (numbers,) = draw(figure_file(tmp_path, "\n".join(options)), "--run", run)["runs"]

    W = eq.load(run).operator.as_matrix().detach().double()
    exact = torch.linalg.matrix_norm(torch.eye(len(W)) - W, ord=2).item()
    limit, certain = numbers["largest alpha"]["measured"], numbers["largest alpha"]["certain"]
    assert numbers["L"]["measured"] == pytest.approx(exact, rel=1e-3)
    assert numbers["L"]["bound"] >= exact * (1 - 1e-6)
    assert (limit, certain) == pytest.approx(tuple(2 / numbers["L"][key] ** 2 for key in ("measured", "bound")))

    reflecting, stepping = numbers["peaceman-rachford"], numbers["forward-backward"]
    assert [curve["alpha"] for curve in reflecting[:-1]] == [0.5**k for k in range(6)]
    assert all(curve["converged"] == 1 for curve in reflecting)
    assert sum(curve["alpha"] < certain for curve in stepping if not curve["auto"]) >= 2
    assert all(curve["converged"] == 1 for curve in stepping if curve["alpha"] < certain)
    for curve in (*reflecting, *stepping):
        assert curve["residual"][0] == pytest.approx(1)  # at z = 0
        if curve["steps"] is not None:
            assert len(curve["residual"]) == curve["steps"]
            assert curve["residual"][-1] <= 1e-3 < min(curve["residual"][:-1])
    automatic = reflecting[-1]
    assert automatic["auto"]
    assert automatic["steps"] <= 2 + min(curve["steps"] for curve in reflecting)
    assert stepping[0]["steps"] is None  # plain iteration
    assert automatic["steps"] < min(curve["steps"] or 400 for curve in stepping)


def test_what_diverges_is_dashed_and_said(work, tmp_path):
    run = open_run(steeper(work / "dense-001", tmp_path / "run", 3))
    figure = figures.convergence([run], Machine(torch.device("cpu")), samples=8, max_steps=60)
    reflecting, stepping = figure.axes
    said = {line.get_label(): line.get_linestyle() for line in stepping.get_lines()}
    assert said["1: diverges"] == "--"
    assert all(line.get_linestyle() in ("-", ":") for line in reflecting.get_lines())  # dotted is the tolerance
    assert sum(label.startswith("auto = ") for label in said) == 1


# What is missing is said


def says(capsys, *words):
    assert main(["figure", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_what_a_run_lacks_is_said(work, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(work / "dense-001", bare, ignore=shutil.ignore_patterns("epoch-*"))
    for name in ("mondeq/figure2", "mondeq/figure-f2"):
        sentence = "bare has no checkpoints of its epochs: train it with training.keep_every=1."
        assert sentence in says(capsys, name, "--run", bare)
    run = open_run(bare)
    log = [{key: value for key, value in record.items() if key != "test"} for record in run.records()]
    run.log.write_text("".join(json.dumps(record) + "\n" for record in log))
    mine = figure_file(tmp_path, 'figure = "mondeq-accuracy"')
    sentence = 'bare has no test accuracy per epoch: train it with training.test="epoch".'
    assert sentence in says(capsys, mine, "--run", bare)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ('direction = "sideways"', "direction is 'sideways'; allowed: 'forward', 'backward'."),
        ("samples = 0", "samples is 0; it must be a whole number of at least 1"),
    ],
)
def test_wrong_options_are_said(work, tmp_path, capsys, option, said):
    mine = figure_file(tmp_path, f'figure = "mondeq-iterations"\n{option}')
    assert said in says(capsys, mine, "--run", work / "dense-001")


def test_other_models_have_no_structure_to_split(tmp_path, capsys):
    small = ["data.limit=32", "data.validation=16", "model.channels=2", "phases.0.epochs=1", "training.keep_every=1"]
    assert main(["train", "core/digits", *small, "--runs", str(tmp_path), "--threads", "1"]) == 0
    for name in ("mondeq/figure2", "mondeq/figure3"):
        assert "this figure requires a model with a MonotoneProblem" in says(
            capsys, name, "--run", tmp_path / "core-digits-001"
        )

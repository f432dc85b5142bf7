"""Figures 6 and 7 of the MDEQ paper, drawn by the command line from small models; their numbers against hand loops."""

import pytest
import torch

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.data import load
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import FigureSpec, Recipe
from equipoise.lab.results.figures import trace_residuals
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine
from equipoise.papers.drawing import levels_reached, per_evaluation, reached
from equipoise.papers.mdeq import figures
from figure_helpers import drawn_figure, figure_file
from training_helpers import train_here

RECIPE = """
title = "A small MDEQ, {name}"
seed = 3

[data]
name = "digits"
limit = 40
validation = 32

[model]
name = "mdeq"
channels = {channels}
head_channels = {heads}
final_channels = 8
groups = 2
dropout = 0.3

[solver]
name = "{solver}"
memory = 3

[tolerance]
relative = 1e-2
max_steps = 8

[optimizer]
lr = {lr}

[training]
batch_size = 20
precision = "float64"

[failures]
share = 1.0

[[phases]]  # a warm-up, which the best weights are of
epochs = 1
solver = {{ name = "picard" }}
"""
OPTIONS = "batches = 3\nbatch_size = 4\nevaluations = 9\n"
FIGURE_6, FIGURE_7 = 'figure = "mdeq-convergence"\n', 'figure = "mdeq-scales"\n'


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with runs of two scales, of one, and of two whose weights stay as they were."""
    folder = tmp_path_factory.mktemp("work")
    for name, channels, lr, solver in (
        ("several", [4, 4], 0.02, "broyden"),
        ("single", [4], 0.02, "broyden"),
        ("still", [4, 4], 0.0, "anderson"),
    ):
        heads = [2] * len(channels)
        train_here(folder, name, RECIPE.format(name=name, channels=channels, heads=heads, lr=lr, solver=solver))
    return folder


@pytest.fixture
def draw(work, tmp_path):
    """Draw a figure by the command line; returns the numbers beside the picture."""
    return lambda text, *runs: drawn_figure(tmp_path, text, runs, [work / f"{run}-001" for run in runs])


# By hand


def random_images(batches, size):
    """Of the test split as data.limit cuts it, in the order that a seed of 0 gives."""
    data = load("digits", folders=(), validation=32).test
    rows = torch.linspace(0, len(data) - 1, 40).round().long()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    return [data.read(rows[order[i * size : (i + 1) * size]])[0].double() / 255 for i in range(batches)]


@torch.no_grad()
def by_hand(model, images, evaluations, memory):
    """Residuals (evaluations, samples, whole and scales) with a dense estimate of the inverse Jacobian.

    ``memory`` is the number of updates until the estimate is -I again; 0 leaves it so, which is plain iteration.
    """
    x, f = model.features(images), model.equilibrium.f
    zeros = f.start((x,))
    sizes = [part[0].numel() for part in zeros]
    found = torch.empty(evaluations, len(images), 1 + len(sizes), dtype=torch.float64)
    for sample in range(len(images)):
        row = (x[sample : sample + 1],)
        z, H = torch.zeros(sum(sizes), dtype=torch.float64), -torch.eye(sum(sizes), dtype=torch.float64)
        before = None
        for k in range(evaluations):
            parts = [part.view(1, *like.shape[1:]) for part, like in zip(z.split(sizes), zeros, strict=True)]
            image = torch.cat([part.flatten() for part in f(tuple(parts), row)])
            g = image - z
            found[k, sample, 0] = g.norm() / image.norm()
            for i, (gap, part) in enumerate(zip(g.split(sizes), image.split(sizes), strict=True), 1):
                found[k, sample, i] = gap.norm() / part.norm()
            if memory and before is not None:
                s, y = z - before[0], g - before[1]
                if (k - 1) % memory == 0:
                    H = -torch.eye(len(z), dtype=torch.float64)
                H = H + torch.outer(s - H @ y, s @ H) / (s @ H @ y)
            before = (z, g)
            z = z - H @ g
    return found


def mean_and_std(model, batches, evaluations, memory):
    """Over batches of the mean over their samples: (evaluations, whole and scales) each."""
    means = torch.stack([by_hand(model, images, evaluations, memory).mean(dim=1) for images in batches])
    spread = ((means - means.mean(dim=0)) ** 2).sum(dim=0) / (len(batches) - 1)
    return means.mean(dim=0), spread.sqrt()


def same(numbers, mean, std):
    assert numbers["mean"] == pytest.approx(mean.tolist(), rel=1e-6)
    assert numbers["std"] == pytest.approx(std.tolist(), rel=1e-5, abs=1e-12)


def test_figure_6_has_the_residuals_of_a_hand_loop(work, draw):
    (numbers,) = draw(FIGURE_6 + OPTIONS, "several")["runs"]
    assert (numbers["batches"], numbers["batch size"], numbers["solver"]) == (3, 4, "Broyden(memory=3)")
    batches = random_images(3, 4)
    initial = eq.load(work / "still-001")
    initial.stem.train()  # by the statistics of the batch
    for weights, model in (("at initialisation", initial), ("trained", eq.load(work / "several-001"))):
        for solver, memory in (("Broyden", 3), ("plain iteration", 0)):
            mean, std = mean_and_std(model, batches, 9, memory)
            same(numbers["curves"][f"{solver}, {weights}"], mean[:, 0], std[:, 0])
    assert len(numbers["curves"]) == 4


def test_figure_7_has_the_residuals_of_each_scale(work, draw):
    several, single = draw(FIGURE_7 + OPTIONS, "several", "single")["runs"]
    batches = random_images(3, 4)
    for numbers, run, scales in ((several, "several", ["8x8", "4x4"]), (single, "single", ["8x8"])):
        mean, std = mean_and_std(eq.load(work / f"{run}-001"), batches, 9, 3)
        assert list(numbers["curves"]) == scales
        for i, scale in enumerate(scales, 1):
            same(numbers["curves"][scale], mean[:, i], std[:, i])


def test_the_summary_says_when_levels_are_reached(draw):
    for run in draw(FIGURE_7 + OPTIONS, "several", "single")["runs"]:
        for name, curve in run["curves"].items():
            below = {level: [i for i, r in enumerate(curve["mean"], 1) if r <= level] for level in (0.1, 0.03, 0.01)}
            assert run["summary"][name] == {str(level): min(at, default=None) for level, at in below.items()}
    assert reached([1.0, 0.2, 0.05, 0.2, 0.01], 0.1) == 3
    assert reached([1.0, 0.2], 0.1) is None


def mean_residuals(layer, x, solver, evaluations):
    """Over the samples, after every evaluation: of the whole state and of its one leaf."""
    tolerance = eq.Tolerance(relative=0.0, max_steps=evaluations, patience=None)
    trace = trace_residuals(layer, (x,), (torch.zeros(2, 1),), solver, tolerance, leaves=True)
    return per_evaluation(trace, evaluations).mean(dim=1)


def test_a_line_search_costs_evaluations():
    layer = eq.Equilibrium(lambda z, x: (x - 3 * z[0],), initial=((1,),))
    x = torch.tensor([[1.0], [2.0]])
    means = mean_residuals(layer, x, eq.Broyden(line_search=2), 6)
    # z = 0; z = x is worse; z = x / 2 is as good; then the secant is exact.
    assert means.tolist() == [[1, 1], [1, 1], [2, 2], [0, 0], [0, 0], [0, 0]]


def test_a_sample_that_diverges_is_not_left_out():
    layer = eq.Equilibrium(lambda z, x: (x * z[0] + 1,), initial=((1,),))
    x = torch.tensor([[0.0], [1e20]])
    means = mean_residuals(layer, x, eq.Picard(), 5)
    assert means[:2].tolist() == [[1, 1], [0.5, 0.5]]
    assert not means[2:].isfinite().any()
    assert levels_reached(means[:, 0].tolist(), figures.LEVELS) == dict.fromkeys(("0.1", "0.03", "0.01"))


def test_broyden_has_its_defaults_where_the_recipe_has_another_solver(work):
    run = open_run(work / "still-001")
    assert figures.broyden_of(run, open_trained(run, Machine(torch.device("cpu")))) == eq.Broyden()


def test_batches_are_smaller_and_fewer_where_samples_are_few(work, draw):
    (numbers,) = draw(FIGURE_6 + "batches = 6\nbatch_size = 32\nevaluations = 2", "several")["runs"]
    assert (numbers["batches"], numbers["batch size"]) == (6, 6)  # of 40
    test = load("digits", folders=(), validation=32).test
    few = figures.random_batches(figures.Subset(test, torch.arange(4)), 5, 32)
    assert [len(batch) for batch in few] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="the test split has a single sample"):
        figures.random_batches(figures.Subset(test, torch.arange(1)), 5, 32)


# What is drawn


def looks(axis):
    return {(str(line.get_color()), line.get_linestyle(), line.get_marker()) for line in axis.get_lines()}


def test_curves_can_be_told_apart_without_their_colours(work):
    machine, runs = Machine(torch.device("cpu")), [open_run(work / f"{name}-001") for name in ("several", "single")]
    (axis,) = figures.scales(runs, machine, batches=2, batch_size=2, evaluations=4).axes
    assert len(axis.get_lines()) == len({look[1:] for look in looks(axis)}) == 3
    labels = [line.get_label().partition(":")[0] for line in axis.get_lines()]
    assert labels == ["8x8", "4x4", "8x8, single scale"]
    panels = figures.convergence(runs, machine, batches=2, batch_size=2, evaluations=4).axes
    assert [panel.get_title() for panel in panels] == ["A small MDEQ, several", "A small MDEQ, single"]
    for panel in panels:
        assert len(panel.get_lines()) == len({look[1:] for look in looks(panel)}) == 4
        assert panel.get_yscale() == "log"
        assert panel.get_ylim() == panels[0].get_ylim()


# The package's own


@pytest.mark.parametrize("name", ["mdeq/figure6", "mdeq/figure7"])
def test_the_paper_s_figures_are_of_mdeqs_solved_by_broyden(name):
    spec = open_recipe(name).read(FigureSpec)
    assert spec.options["batches"] == 5
    for recipe in (open_recipe(recipe).read(Recipe) for recipe in spec.recipes):
        assert (recipe.model.name, recipe.solver.name) == ("mdeq", "broyden")


def test_a_model_begins_as_its_training_did(work, tmp_path):
    origin = work / "several-001"
    words = [str(work / "several.toml"), f"training.init_from={origin}", "--runs", str(tmp_path), "--threads", "1"]
    assert main(["train", *words]) == 0
    machine = Machine(torch.device("cpu"))
    run = open_run(tmp_path / "several-001")
    began = figures.untrained(run, open_trained(run, machine)).model
    for a, b in zip(began.parameters(), eq.load(origin).parameters(), strict=True):
        assert torch.equal(a, b)


# What cannot be drawn is said


def says(capsys, folder, text, *runs):
    given = [word for run in runs for word in ("--run", str(run))]
    assert main(["figure", str(figure_file(folder, text, runs)), *given]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("figure", [FIGURE_6, FIGURE_7])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("batches = 1", "batches is 1; it must be a whole number of at least 2"),
        ("batch_size = 0", "batch_size is 0; it must be a whole number of at least 1"),
        ("evaluations = 2.5", "evaluations is 2.5; it must be a whole number of at least 2"),
    ],
)
def test_wrong_options_are_said(work, tmp_path, capsys, figure, option, said):
    runs = [work / "several-001", work / "single-001"]
    assert said in says(capsys, tmp_path, figure + option, *runs)


def test_figure_7_needs_several_scales_and_one(work, tmp_path, capsys):
    several, single = work / "several-001", work / "single-001"
    for runs, counts in (((single, several), "1, 2"), ((several, several), "2, 2"), ((several,), "2")):
        assert f"models with {counts} scales; give two runs, the first with several" in says(
            capsys, tmp_path, FIGURE_7, *runs
        )


def test_other_models_have_no_scales(tmp_path, capsys):
    small = ["data.limit=32", "data.validation=16", "model.channels=2", "phases.0.epochs=1"]
    assert main(["train", "core/digits", *small, "--runs", str(tmp_path), "--threads", "1"]) == 0
    for figure in (FIGURE_6, FIGURE_7):
        said = says(capsys, tmp_path, figure, tmp_path / "core-digits-001", tmp_path / "core-digits-001")
        assert "this figure requires a model with a MultiscaleCell" in said

"""Figures 2 to 4 of the MOptEq paper, drawn by the command line from small models; their numbers against loops."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.data import load
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import FigureSpec, Recipe
from equipoise.lab.results.reproduce import FIGURE_FACTS, figure_functions
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.papers.drawing import reached, tell_apart
from equipoise.papers.opteq import figures
from equipoise.registry import check_options
from figure_helpers import drawn_figure, figure_file

RECIPE = """
title = "A small {model}"
seed = 3

[data]
name = "digits"
limit = 40
validation = 32

[task]
name = "{task}"

[model]
name = "{model}"
size = "reduced"
channels = 4
stem = 1

[solver]
name = "anderson"

[tolerance]  # tight, so that equilibria are those of any other way to solve
relative = 1e-10
max_steps = 100

[gradient]
name = "phantom"

[optimizer]
lr = 1e-6

[training]
batch_size = 20
evaluation_batch_size = 16
precision = "float64"

[[phases]]
epochs = 1
"""
SCALES = "model.scales=[1, 2, 1]"
QUICK = ["tolerance.relative=1e-2", "optimizer.lr=1e-2"]
RUNS = {  # recipe, changes
    "mopteq": ("mopteq", [SCALES]),
    "popteq": ("popteq", [SCALES]),
    "opteq": ("opteq", []),
    "augmented-default": ("augmented", QUICK),
    "augmented-none": ("augmented", [*QUICK, "task.gamma=0"]),
    "augmented-some": ("augmented", [*QUICK, "task.gamma=1e-7"]),
}
COUPLING, PERTURBATION, ATTACK = (
    'figure = "opteq-coupling"\n',
    'figure = "opteq-perturbation"\n',
    'figure = "opteq-attack"\n',
)
AUGMENTED, DIVERSITY, SOLVERS = (
    'figure = "opteq-augmented"\n',
    'figure = "opteq-diversity"\n',
    'figure = "opteq-solvers"\n',
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a run of each name, float64."""
    folder = tmp_path_factory.mktemp("work")
    for recipe in ("mopteq", "popteq", "opteq"):
        (folder / f"{recipe}.toml").write_text(RECIPE.format(model=recipe, task="classification"))
    (folder / "augmented.toml").write_text(RECIPE.format(model="popteq", task="augmented-classification"))
    for name, (recipe, changes) in RUNS.items():
        if recipe != "augmented":
            changes = [*changes, f"training.init_from={weights(folder, recipe)}"]
        words = ["train", str(folder / f"{recipe}.toml"), *changes, "--runs", str(folder / name), "--threads", "1"]
        assert main(words) == 0
    return folder


@torch.no_grad()
def weights(folder, name):
    """A file of weights that classify: branches at random, and a head by least squares. Training takes far longer."""
    data = load("digits", folders=(), validation=32)
    images, labels = data.train.read(torch.arange(600))
    torch.manual_seed(1)
    scales = {} if name == "opteq" else {"scales": (1, 2, 1)}
    facts = {"shape": (1, 8, 8), "classes": 10, "mean": data.mean, "std": data.std}
    model = eq.create_model(name, **facts, **scales, size="reduced", channels=4, stem=1).double()
    for layer in model.cell.W:
        layer.layer.weight *= 3
    model.stem[1].momentum = 1.0  # all it knows are these images
    model.features(images.double() / 255)
    z = model.eval().branches(model.features(images.double() / 255))
    pooled = torch.cat([part.mean(dim=(2, 3)) for part in z], dim=1)
    ones = torch.ones(len(pooled), 1, dtype=torch.float64)
    wanted = 10 * F.one_hot(labels, 10).double()
    solution = torch.linalg.lstsq(torch.cat([pooled, ones], dim=1), wanted).solution.T
    model.head.weight.copy_(solution[:, :-1])
    model.head.bias.copy_(solution[:, -1])
    file = folder / f"{name}.safetensors"
    facts = {"recipe": name, "folder": "", "tables": {}, "phase": 0, "data": {}}
    checkpoints.save(file, checkpoints.model_tensors(model), facts)
    return file


def folder_of(work, name):
    return work / name / f"{RUNS[name][0]}-001"


@pytest.fixture
def draw(work, tmp_path):
    """Draw a figure by the command line; returns the numbers beside the picture."""
    return lambda text, *runs: drawn_figure(tmp_path, text, runs, [folder_of(work, run) for run in runs])


# By hand


def forty():
    """The test split as data.limit cuts it: images and labels."""
    data = load("digits", folders=(), validation=32).test
    return data.read(torch.linspace(0, len(data) - 1, 40).round().long())


def random_samples(count):
    """In the order that a seed of 0 gives."""
    images, labels = forty()
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:count]
    return images[rows].double() / 255, labels[rows]


class Fixed(nn.Module):
    """A convolution with the weight that a constrained one has on images of some size."""

    def __init__(self, layer, size):
        super().__init__()
        self.kernel = layer.weight(size).detach()

    def forward(self, x):
        return F.conv2d(x, self.kernel, padding=1)

    def adjoint(self, y):
        return F.conv_transpose2d(y, self.kernel, padding=1)


def opened(work, name):
    """The model of a run, its weights made once and for all."""
    model = eq.load(folder_of(work, name)).requires_grad_(False)
    for layers in (model.cell.W, model.cell.U):
        for i, size in enumerate(model.cell.sizes):
            layers[i] = Fixed(layers[i], size)
    return model


def solved(model, g):
    """The equilibrium by plain iteration, which may be differentiated."""
    cell = model.cell
    inputs = cell.prepare(g)
    z, moved = cell.start(*inputs), 1.0
    while moved > 1e-11:
        last, z = z, cell(z, *inputs)
        moved = max(float((a - b).detach().norm()) for a, b in zip(z, last, strict=True))
    return z


def inner(a, b):
    """<a, P b> of two channels: the larger one averaged over blocks to the size of the smaller."""
    if len(a) > len(b):
        return inner(b, a)
    side = len(b) // len(a)
    return sum(
        a[y, x] * b[side * y : side * (y + 1), side * x : side * (x + 1)].mean()
        for y in range(len(a))
        for x in range(len(a))
    )


@torch.no_grad()
def test_figure_2_has_the_averages_of_loops_over_channels(work, draw):
    numbers = draw(COUPLING + "samples = 3", "mopteq", "popteq")["runs"]
    images, _ = random_samples(3)
    for run, name in zip(numbers, ("mopteq", "popteq"), strict=True):
        model = opened(work, name)
        z = [part.numpy() for part in solved(model, model.features(images))]
        for sample in range(3):
            heritage = diversity = 0.0
            for i in range(3):
                for j in ((i + 1) % 3, (i - 1) % 3):
                    for k in range(4):
                        for l in range(4):
                            product = inner(z[i][sample][k], z[j][sample][l])
                            heritage += product if k == l else 0
                            diversity += 0 if k == l else abs(product)
            assert run["average H"][sample] == pytest.approx(heritage / (3 * 4), rel=1e-7)
            assert run["average D"][sample] == pytest.approx(diversity / (3 * (4**2 - 4)), rel=1e-7)
            squares = sum(inner(z[i][sample][k], z[i][sample][k]) for i in range(3) for k in range(4))
            assert run["average square"][sample] == pytest.approx(squares / (3 * 4), rel=1e-7)
            scores = [[abs(inner(z[1][sample][k], z[0][sample][l])) for l in range(4)] for k in range(4)]
            diagonal = [scores[k][k] for k in range(4)]
            ratio = (sum(diagonal) / 4) / ((sum(map(sum, scores)) - sum(diagonal)) / 12)
            assert run["diagonal dominance"][sample] == pytest.approx(ratio, rel=1e-7)
            if sample == 0:
                assert run["heat map"] == [pytest.approx(row, rel=1e-7) for row in scores]
        for key, found in run["summary"].items():
            assert found["mean"] == pytest.approx(torch.tensor(run[key]).mean().item(), rel=1e-6)
            assert found["std"] == pytest.approx(torch.tensor(run[key]).std().item(), rel=1e-5)
        assert (run["samples"], run["branches"], run["channels"]) == (3, 3, 4)
        assert run["recipe"] == name


def test_figure_3a_has_the_accuracies_of_perturbed_features(work, draw):
    eps = [0.1, 1.0, 3.0]
    (run,) = draw(PERTURBATION + f"eps = {eps}\nsamples = 24\ntrials = 2", "opteq")["runs"]
    model = opened(work, "opteq")
    images, labels = random_samples(24)
    generator = torch.Generator().manual_seed(0)

    def right(g, wanted):
        (z,) = solved(model, g)
        return (model.head(model.norm(z.mean(dim=(2, 3)))).argmax(1) == wanted).sum().item()

    counts = {"reconstructed": torch.zeros(1, 3), "bernoulli": torch.zeros(2, 3), "uniform": torch.zeros(2, 3)}
    clean = 0
    for rows in (slice(16), slice(16, 24)):  # evaluation_batch_size
        g = model.features(images[rows]).detach().requires_grad_()
        (z,) = solved(model, g.detach())
        y = F.relu(model.cell.W[0](z) + model.cell.U[0](g) + model.cell.b[0][:, None, None]).detach()
        (back,) = torch.autograd.grad((model.cell.U[0](g) * y).sum(), g)  # U^T y
        g = g.detach()
        with torch.no_grad():
            clean += right(g, labels[rows])
            ways = [("reconstructed", 0, back.sign())]
            for kind in ("bernoulli", "uniform"):
                for trial in range(2):
                    drawn = 2 * torch.rand(g.shape, generator=generator, dtype=torch.float64) - 1
                    ways.append((kind, trial, drawn.sign() if kind == "bernoulli" else drawn))
            for kind, trial, way in ways:
                for i, size in enumerate(eps):
                    counts[kind][trial, i] += right(g - size * way, labels[rows])
    assert (run["samples"], run["clean accuracy"]) == (24, clean / 24)
    for kind, found in counts.items():
        shares = found.double() / 24
        assert run["accuracy"][kind]["trials"] == shares.tolist()
        assert run["accuracy"][kind]["mean"] == pytest.approx(shares.mean(dim=0).tolist())
    spread = counts["uniform"].double() / 24
    assert run["accuracy"]["uniform"]["std"] == pytest.approx((spread[0] - spread[1]).abs().div(2**0.5).tolist())
    assert run["accuracy"]["reconstructed"]["std"] == [0, 0, 0]
    assert len({tuple(share) for kind in counts for share in run["accuracy"][kind]["trials"]}) > 1


def gap(model, x, labels):
    """log sum of exp of the other logits - the label's, by way of recorded plain iteration."""
    logits = model.read(solved(model, model.features(x)))
    others = torch.stack([torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(logits, labels, strict=True)])
    return others.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0], logits


def test_figure_3b_has_the_accuracies_of_attacks_by_hand(work, draw):
    numbers = draw(ATTACK + "iterations = [0, 1, 3]\nradius = 0.08\nstep_size = 0.03\nsamples = 18", "mopteq", "popteq")
    assert (numbers["iterations"], numbers["radius"], numbers["step_size"]) == ([0, 1, 3], 0.08, 0.03)
    images, labels = random_samples(18)
    for run, name in zip(numbers["runs"], ("mopteq", "popteq"), strict=True):
        model, left = opened(work, name), [0, 0, 0]
        for number, rows in enumerate((slice(16), slice(16, 18))):
            x0, wanted = images[rows], labels[rows]
            known = gap(model, x0, wanted)[1].argmax(1) == wanted
            left[0] += int(known.sum())
            for place, steps in ((1, 1), (2, 3)):
                seed_everything("attack", number)
                x = (x0 + torch.empty_like(x0).uniform_(-0.08, 0.08)).clamp(0, 1)
                worst, largest = x0.clone(), torch.full((len(x0),), -torch.inf, dtype=torch.float64)
                for step in range(steps + 1):
                    x = x.detach().requires_grad_()
                    gaps, _ = gap(model, x, wanted)
                    (slope,) = torch.autograd.grad(gaps.sum(), x)
                    for i in range(len(x)):
                        if gaps[i] > largest[i]:
                            worst[i], largest[i] = x[i].detach(), gaps[i].detach()
                    if step < steps:
                        moved = x.detach() + 0.03 * slope.sign()
                        x = torch.max(torch.min(moved, x0 + 0.08), x0 - 0.08).clamp(0, 1)
                left[place] += int((known & (gap(model, worst, wanted)[1].argmax(1) == wanted)).sum())
        assert run["accuracy"] == [n / 18 for n in left]
        assert run["accuracy"][2] < run["accuracy"][0]
        errors = [(n / 18 * (1 - n / 18) / 18) ** 0.5 for n in left]
        assert run["standard error"] == pytest.approx(errors)
        assert run["samples"] == 18


def test_runs_of_one_title_are_told_apart_by_their_settings():
    tables = [{"model": {"name": "mopteq"}, "seed": 0}, {"model": {"name": "mopteq", "perturb": "train"}, "seed": 0}]
    runs = [SimpleNamespace(facts={"tables": each}) for each in (*tables, tables[0])]
    measured = [{"title": title} for title in ("A", "A", "B")]
    tell_apart(measured, runs)
    assert [each["title"] for each in measured] == ["A", "A (model.perturb=train)", "B"]


def test_the_attack_goes_by_the_gradient_of_the_equilibrium(work, monkeypatch):
    seen = []

    def record(model, images, labels, **budget):
        seen.append((repr(model.equilibrium.gradient), budget))
        return images

    monkeypatch.setattr(figures, "pgd", record)
    figures.attack([open_run(folder_of(work, "mopteq"))], Machine(torch.device("cpu")), iterations=[2], samples=3)
    assert seen == [("ImplicitGradient()", {"steps": 2, "radius": 8 / 255, "step_size": 2 / 255})]


@torch.no_grad()
def test_figure_3c_has_the_gammas_in_order(work, draw):
    numbers = draw(AUGMENTED, "mopteq", "augmented-default", "augmented-none", "augmented-some")
    names = ("augmented-none", "augmented-some", "augmented-default")
    assert [run["gamma"] for run in numbers["augmented"]] == [0, 1e-7, 1e-6]
    assert numbers["coupled"]["gamma"] is None
    images, labels = forty()
    for run, name in zip([numbers["coupled"], *numbers["augmented"]], ("mopteq", *names), strict=True):
        accuracy = (eq.load(folder_of(work, name))(images.double() / 255).argmax(1) == labels).double().mean().item()
        assert run["accuracy"] == pytest.approx(accuracy)
        assert run["standard error"] == pytest.approx((accuracy * (1 - accuracy) / 40) ** 0.5)
        assert run["samples"] == 40


# Residuals by hand


def objective_of_coupling(z, lam, t):
    """1/2 sum over edges of lambda D - H, by loops; t is that of every edge, None for the hard sign."""
    total = 0
    for e in range(3):
        a, b = z[e], z[(e + 1) % 3]
        if a.shape[1] > b.shape[1]:
            a = F.avg_pool2d(a, 2)
        elif b.shape[1] > a.shape[1]:
            b = F.avg_pool2d(b, 2)
        for k in range(4):
            for l in range(4):
                m = (a[k] * b[l]).sum()
                if k == l:
                    total = total - m / 2
                else:
                    total = total + lam / 2 * (m.abs() if t is None else (m**2 + t[e] ** 2).sqrt() - t[e])
    return total


def by_hand(model, g, lam, sign, evaluations):
    """Residuals of plain iteration, one branch after the other, for one sample: h is -dG/dz, by autograd."""
    cell = model.cell
    with torch.no_grad():
        x = [
            U(F.avg_pool2d(g, 8 // n)) + b[:, None, None]
            for U, b, (n, _) in zip(cell.U, cell.b, cell.sizes, strict=True)
        ]
        first = [W.adjoint(F.relu(part))[0] for W, part in zip(cell.W, x, strict=True)]
    t = None
    if sign == "smooth":
        t = []
        for e in range(3):
            squares = [
                inner(first[e][k].numpy(), first[(e + 1) % 3][l].numpy()) ** 2
                for k in range(4)
                for l in range(4)
                if k != l
            ]
            t.append(0.05 * (sum(squares) / 16 + 1e-12) ** 0.5)
    z = [torch.zeros_like(part[0]) for part in x]
    found = []
    for _ in range(evaluations):
        new = list(z)
        for i in range(3):
            own = new[i].clone().requires_grad_()
            coupled = objective_of_coupling([own if j == i else new[j] for j in range(3)], lam, t)
            (slope,) = torch.autograd.grad(coupled, own)
            with torch.no_grad():
                new[i] = cell.W[i].adjoint(F.relu(cell.W[i](-slope[None]) + x[i]))[0]
        gap = sum(((a - b) ** 2).sum() for a, b in zip(new, z, strict=True)) ** 0.5
        found.append((gap / sum((a**2).sum() for a in new) ** 0.5).item())
        z = new
    return found


def middle(columns):
    """The median over an odd number of samples, and the lowest and highest."""
    rows = [sorted(row) for row in zip(*columns, strict=True)]
    return [row[1] for row in rows], [row[0] for row in rows], [row[2] for row in rows]


def test_figure_4a_has_the_residuals_of_a_hand_loop(work, draw):
    options = 'lambdas = [0, "1/C", 0.6]\nsamples = 3\nbatch_size = 2\nevaluations = 5\n'
    run = draw(DIVERSITY + options, "mopteq")["run"]
    model = opened(work, "mopteq")
    g = model.features(random_samples(3)[0]).detach()
    panels = {(panel["solver"], panel["sign"]): panel for panel in run["panels"]}
    assert list(panels) == [(s, sign) for s in ("Anderson", "plain iteration") for sign in ("smooth", "hard")]
    for (solver, sign), panel in panels.items():
        assert {name: curve["lambda"] for name, curve in panel["curves"].items()} == {
            "0": 0,
            "1/C = 0.25": 0.25,
            "0.6": 0.6,
        }
        for curve in panel["curves"].values():
            if solver == "plain iteration":
                each = [by_hand(model, g[i : i + 1], curve["lambda"], sign, 5) for i in range(3)]
            else:
                each = anderson(work, g, curve["lambda"], sign, 5)
            for key, wanted in zip(("median", "low", "high"), middle(each), strict=True):
                assert curve[key] == pytest.approx(wanted, rel=1e-6), (solver, sign, curve["lambda"])
    bound = max(
        float(torch.linalg.matrix_norm(dense(W, n), 2))
        for W, (n, _) in zip(model.cell.W, model.cell.sizes, strict=True)
    )
    assert bound <= run["norm of W"] * (1 + 1e-9)
    assert run["norm of W"] <= 0.9 * (1 + 1e-6)
    assert run["factor"]["0.6"] == pytest.approx(run["norm of W"] ** 2 * (1 + 0.6 * 3))
    assert (run["samples"], run["channels"]) == (3, 4)


def dense(W, n):
    """The matrix of a convolution on n x n images of 4 channels."""
    with torch.no_grad():
        return W(torch.eye(4 * n * n, dtype=torch.float64).view(-1, 4, n, n)).flatten(1)


def anderson(work, g, lam, sign, evaluations):
    """Residuals of a model that was made with this lambda and sign, with the run's weights."""
    trained = eq.load(folder_of(work, "mopteq"))
    shape = {"shape": (1, 8, 8), "classes": 10, "size": "reduced", "channels": 4, "stem": 1, "scales": (1, 2, 1)}
    made = eq.create_model("mopteq", **shape, diversity=lam, sign=sign).double()
    made.cell.load_state_dict(trained.cell.state_dict())
    tolerance = eq.Tolerance(relative=0, max_steps=evaluations, patience=None)
    inputs = made.cell.prepare(g)
    with torch.no_grad():
        solution = eq.fixed_point(
            made.cell,
            made.cell.start,
            *inputs,
            solver=eq.Anderson(),
            tolerance=tolerance,
            trace=True,
            on_failure="ignore",
        )
    return solution.stats.trace.T.tolist()


def test_figure_4b_has_the_residuals_of_every_solver(work, draw):
    numbers = draw(SOLVERS + "samples = 3\nbatch_size = 3\nevaluations = 7", "mopteq")
    (run,) = numbers["runs"]
    model = opened(work, "mopteq")
    g = model.features(random_samples(3)[0]).detach()
    plain = middle([by_hand(model, g[i : i + 1], 0.01, "smooth", 7) for i in range(3)])[0]
    assert run["curves"]["plain iteration"]["median"] == pytest.approx(plain, rel=1e-6)
    assert run["curves"]["Anderson"]["median"] == pytest.approx(
        middle(anderson(work, g, 0.01, "smooth", 7))[0], rel=1e-6
    )
    for name, solver, order, wasted in (
        ("Broyden", eq.Broyden(), "gauss-seidel", 0),
        ("proximal gradient (jacobi)", eq.ProximalGradient(), "jacobi", 1),  # it evaluates T at the start by itself
    ):
        model.cell.order = order
        tolerance = eq.Tolerance(relative=0, max_steps=7, patience=None)
        inputs = model.cell.prepare(g)
        with torch.no_grad():
            solution = eq.fixed_point(
                model.cell,
                model.cell.start,
                *inputs,
                solver=solver,
                tolerance=tolerance,
                trace=True,
                on_failure="ignore",
            )
        medians = middle(solution.stats.trace.T.tolist())[0]
        assert run["curves"][name]["median"] == pytest.approx(([medians[0]] * wasted + medians)[:7], rel=1e-6)
    assert (
        list(run["curves"])
        == list(run["solvers"])
        == ["Anderson", "Broyden", "plain iteration", "proximal gradient (jacobi)"]
    )
    assert run["sizes"] == [[8, 8], [4, 4], [8, 8]]


class Scalar:
    """z <- rate z + 1 of every sample; a rate is its g."""

    def prepare(self, g):
        return (g,)

    def start(self, g):
        return (torch.zeros_like(g),)

    def __call__(self, z, g):
        return (g * z[0] + 1,)


def test_residuals_of_samples_that_end_early_or_diverge():
    half, nothing, wild = (torch.tensor([[rate]], dtype=torch.float64) for rate in (0.5, 0.0, 1e200))
    found = figures.residuals(Scalar(), [torch.cat([half, nothing]), wild], eq.Picard(), 5)
    # z of 1/2: 0, 1, 3/2, 7/4, ..., of 0: 0, 1, 1, of the wild one: 0, 1, 1e200, then no number.
    falling = [1, (1 / 2) / (3 / 2), (1 / 4) / (7 / 4), (1 / 8) / (15 / 8), (1 / 16) / (31 / 16)]
    assert found["high"] == pytest.approx([1, 1, *[torch.inf] * 3])
    assert found["median"] == pytest.approx(falling)
    assert found["low"] == pytest.approx([1, 0, 0, 0, 0])
    alone = figures.residuals(Scalar(), [half], eq.Picard(), 5)
    assert alone["median"] == alone["low"] == pytest.approx(falling)
    assert alone["reached"] == {"0.001": None, "1e-06": None, "1e-09": None}
    assert reached([1, 1e-3, 1e-2, 1e-7], 1e-3) == 2
    assert reached([1, 1e-3, 1e-2, 1e-7], 1e-6) == 4


# What is drawn


def looks(axis):
    return {(line.get_linestyle(), line.get_marker()) for line in axis.get_lines()}


def test_curves_can_be_told_apart_without_their_colours(work):
    machine, run = Machine(torch.device("cpu")), open_run(folder_of(work, "mopteq"))
    small = {"samples": 2, "evaluations": 4}
    panels = figures.diversity([run], machine, lambdas=[0, "1/C", 1, 1e150], **small).axes
    assert [panel.get_title() for panel in panels] == [
        "smooth sign, Anderson",
        "hard sign, Anderson",
        "smooth sign, plain iteration",
        "hard sign, plain iteration",
    ]
    for panel in (*panels, *figures.solvers([run], machine, **small).axes):
        assert len(panel.get_lines()) == len(looks(panel)) == 4
        assert panel.get_yscale() == "log"
        assert panel.get_ylim()[1] <= 1e3
    assert len({panel.get_ylim() for panel in panels}) == 1
    assert panels[0].get_lines()[1].get_label().startswith("$\\lambda$ = 1/C = 0.25: ")


def test_the_scatters_of_figure_2_have_the_same_axes(work):
    runs = [open_run(folder_of(work, name)) for name in ("mopteq", "popteq")]
    panels = figures.coupling(runs, Machine(torch.device("cpu")), samples=4).axes
    first, second = panels[:2]
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())
    assert [len(panel.collections[0].get_offsets()) for panel in (first, second)] == [4, 4]
    assert [panel.images[0].get_array().shape for panel in panels[2:4]] == [(4, 4)] * 2


# The package's own


@pytest.mark.parametrize("name", ["figure2", "figure3a", "figure3b", "figure3c", "figure4a", "figure4b"])
def test_the_paper_s_figures_are_of_the_models_they_are_about(name):
    spec = open_recipe(f"opteq/{name}").read(FigureSpec)
    check_options(figure_functions()[spec.figure], spec.options, FIGURE_FACTS, name)
    entries = [entry.split() for entry in spec.recipes]
    recipes = [open_recipe(recipe, None, changes).read(Recipe) for recipe, *changes in entries]
    models = {"figure2": ["mopteq", "popteq"], "figure3a": ["opteq"], "figure3b": ["mopteq", "mopteq"]}
    models["figure3c"] = ["mopteq", *["popteq"] * (len(recipes) - 1)]
    assert [recipe.model.name for recipe in recipes] == models.get(name, ["mopteq"])
    if name == "figure3b":
        assert [recipe.model.options.get("perturb", "off") for recipe in recipes] == ["off", "train"]
    if name == "figure3c":
        tasks = [recipe.task.name for recipe in recipes]
        assert tasks == ["classification", *["augmented-classification"] * (len(recipes) - 1)]
        gammas = [recipe.task.options["gamma"] for recipe in recipes[1:]]
        assert gammas[0] == 0
        assert gammas == sorted(set(gammas))


# What cannot be drawn is said


@pytest.fixture
def says(work, tmp_path, capsys):
    def said(text, *runs):
        given = [word for run in runs for word in ("--run", str(folder_of(work, run)))]
        assert main(["figure", str(figure_file(tmp_path, text, runs)), *given]) == 2
        return capsys.readouterr().err

    return said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (COUPLING + "samples = 1", "samples is 1; it must be a whole number of at least 2"),
        (PERTURBATION + "eps = []", "eps must be a list of numbers, got []"),
        (PERTURBATION + "eps = [0, 0.1]", "eps[0] is 0; it must be a number above 0"),
        (PERTURBATION + "eps = [0.2, 0.1]", "eps must be increasing, got [0.2, 0.1]"),
        (PERTURBATION + "eps = 0.1", "eps must be a list of numbers, got 0.1"),
        (PERTURBATION + "samples = 0", "samples is 0; it must be a whole number of at least 1"),
        (PERTURBATION + "trials = 1", "trials is 1; it must be a whole number of at least 2"),
        (ATTACK + "iterations = [1.5]", "iterations[0] is 1.5; it must be a whole number of at least 0"),
        (ATTACK + "iterations = [3, 3]", "iterations must be increasing, got [3, 3]"),
        (ATTACK + "radius = 0", "radius is 0; it must be a number above 0"),
        (ATTACK + "step_size = -1", "step_size is -1; it must be a number above 0"),
        (ATTACK + "samples = true", "samples is True; it must be a whole number of at least 1"),
        (DIVERSITY + "lambdas = []", "lambdas must be a list of distinct numbers or '1/C', got []"),
        (DIVERSITY + 'lambdas = [0, "C"]', "lambdas[1] (if not '1/C') is 'C'; it must be a number of at least 0"),
        (DIVERSITY + "lambdas = [-0.1]", "lambdas[0] (if not '1/C') is -0.1; it must be a number of at least 0"),
        (DIVERSITY + "lambdas = [0.1, 0.1]", "lambdas must be a list of distinct numbers or '1/C', got [0.1, 0.1]"),
        (DIVERSITY + "evaluations = 1", "evaluations is 1; it must be a whole number of at least 2"),
        (SOLVERS + "batch_size = 0", "batch_size is 0; it must be a whole number of at least 1"),
        (SOLVERS + "samples = 2.0", "samples is 2.0; it must be a whole number of at least 1"),
    ],
    ids=lambda text: text.partition("\n")[2] or None,
)
def test_wrong_options_are_said(says, text, words):
    assert words in says(text, "mopteq")


def test_models_that_a_figure_is_not_about_are_said(says):
    assert "the model has 1 branches of 4 channels" in says(COUPLING, "mopteq", "opteq")
    assert "the model has 3 branches; this figure perturbs what a single branch reconstructs" in says(
        PERTURBATION, "popteq"
    )
    assert "this figure requires one run, got 2." in says(DIVERSITY, "mopteq", "popteq")


def test_figure_3c_needs_a_coupled_run_and_gammas(says):
    for runs in (("mopteq",), ("mopteq", "popteq"), ("augmented-none", "augmented-some")):
        assert "the first must not have the task 'augmented-classification'" in says(AUGMENTED, *runs)
    twice = ("mopteq", "augmented-none", "augmented-some", "augmented-none")
    assert "the runs have the gammas 0, 0, 1e-07; all must differ." in says(AUGMENTED, *twice)


def test_figure_3c_needs_runs_that_have_ended(work, tmp_path):
    run = folder_of(work, "mopteq")
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    with pytest.raises(ValueError, match="has no test accuracy; if training is unfinished"):
        figures.augmented([open_run(tmp_path)])


def test_runs_of_different_data_are_not_compared_sample_by_sample(work, tmp_path):
    other = tmp_path / "run.json"
    facts = json.loads((folder_of(work, "popteq") / "run.json").read_text())
    facts["tables"]["data"]["limit"] = 41
    other.write_text(json.dumps(facts))
    runs = [open_run(folder_of(work, "mopteq")), open_run(tmp_path)]
    with pytest.raises(ValueError, match="the runs were trained on different data"):
        figures.coupling(runs, Machine(torch.device("cpu")))


def test_other_models_have_no_branches(tmp_path, capsys):
    small = ["data.limit=32", "data.validation=16", "model.channels=2", "phases.0.epochs=1"]
    assert main(["train", "core/digits", *small, "--runs", str(tmp_path), "--threads", "1"]) == 0
    for text in (COUPLING, PERTURBATION, ATTACK, DIVERSITY, SOLVERS):
        file = figure_file(tmp_path, text, ["core"])
        assert main(["figure", str(file), "--run", str(tmp_path / "core-digits-001")]) == 2
        said = capsys.readouterr().err
        assert "the model is a ConvEquilibrium; this figure requires an OptEq, POptEq or MOptEq." in said

"""The report is one page that needs nothing beside it, tells what was measured, and says what is missing."""

import base64
import dataclasses
import html
import json
import math
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from equipoise import Anderson, Broyden, Equilibrium, Picard, Result
from equipoise.cli import main
from equipoise.lab.files import write_json
from equipoise.lab.recipes.build import load_data
from equipoise.lab.recipes.reading import Where, change, open_recipe, parse_override, read, recipe_names, to_toml
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.results import figures
from equipoise.lab.results.report import labels, picture, write_report
from equipoise.lab.results.trained import open_trained
from equipoise.lab.runs.folder import Run, create, open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import duration, format_metric
from equipoise.lab.training.sweeps import train_sweep
from equipoise.lab.training.trainer import train_run
from equipoise.lab.trust import NOTHING, Trust

for package in ("sklearn", "matplotlib", "safetensors", "tqdm"):
    pytest.importorskip(package)

MACHINE = Machine(torch.device("cpu"))
VOID = {"meta", "img", "br", "hr", "link", "input"}
HOSTILE = "<script>alert('pwned')</script> | $x_ & \"co\""
PARTS = [
    "Training",
    "Solver during training",
    "Solver on the test split",
    "Solver statistics",
    "Test results",
    "Reproducibility",
    "Recipe",
]

MODULE = """
from torch import nn
import equipoise as eq

class Plain(nn.Module):  # no equilibrium
    def __init__(self, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    def forward(self, images):
        return self.net(images)

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.orthogonal_(self.linear.weight, 0.5)
    def forward(self, z, x):
        return self.linear(z).tanh() + x

class Two(nn.Module):  # two equilibria; the first is solved without calling the layer itself
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.second = eq.Equilibrium(Cell())
        self.first = eq.Equilibrium(Cell(), solver=eq.Broyden(memory=7))
        self.head = nn.Linear(16, classes)
    def forward(self, images):
        return self.head(self.second(self.first.solve(self.stem(images)).value))
"""


def trained(parent: Path, *changes: str, recipe: str = "core/digits", budget: str | None = "smoke", folders=()) -> Path:
    return train_run(open_recipe(recipe, budget, list(changes)), parent, MACHINE, folders)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The page of one run, in which many solves failed and the title is hostile."""
    folder = tmp_path_factory.mktemp("one")
    run = open_run(trained(folder, "training.log_every=1", "tolerance.max_steps=6", f"title={json.dumps(HOSTILE)}"))
    return run, write_report([run], MACHINE)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Trains a model of MODULE, which lies beside its recipe."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "reported_nets.py").write_text(MODULE)
    before = list(sys.path)

    def train(model: str, *changes: str) -> Path:
        small = ["data.limit=8", "phases.0.epochs=2", "training.log_every=1"]
        source = open_recipe("core/digits", "smoke", [*small, *changes])
        tables = {**source.tables, "model": {"name": f"reported_nets:{model}"}}
        del tables["tolerance"]  # a model without equilibrium has none
        source.where.trust = Trust(None, (str(folder),))
        source = dataclasses.replace(source, tables=tables, folder=str(folder))
        return (train_run if source.recipe.seeds == 1 else train_sweep)(source, folder / "runs", MACHINE)

    yield train
    sys.path[:] = before
    sys.modules.pop("reported_nets", None)


@pytest.fixture(scope="module")
def several(outside):
    """The page of two seeds of a model without equilibrium."""
    folder = outside("Plain", "seeds=2")
    runs = [open_run(folder / f"seed-{seed}", trust="reported_nets") for seed in (0, 1)]
    return runs, write_report(runs, MACHINE, out=folder / "both.html")


class Page(HTMLParser):
    """A page's tags, texts and attributes; every tag must be closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open and self.open[-1] != "style":
            self.texts.append((self.open[-1], data))

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def said(self, tag):
        return [text for name, text in self.texts if name == tag]

    @property
    def text(self):
        return " ".join(text for _, text in self.texts)


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def markdown_rows(path: Path) -> list[dict[str, str]]:
    """The first table of a Markdown file, by its headings."""
    lines = [line for line in path.read_text(encoding="utf-8").partition("\n## ")[0].splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert set(cells[1]) == {"---"}
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


# One run


def test_page_has_every_part_in_order(one):
    run, path = one
    page = read_page(path)
    assert path == run.folder / "report.html"
    assert page.said("h3") == PARTS
    captions = page.said("figcaption")
    for title in ("Accuracy", "Loss", "Learning rate", "Gradient norm", "Solver steps during training"):
        assert title in captions
    for title in ("Residual during training", "Unconverged samples", "Solver steps", "Residual"):
        assert title in captions
    for title in ("Convergence by solver", "Confusion matrix", "Worst examples"):
        assert title in captions
    assert "open" in page.of("details")[0]
    assert run.facts["command"] in page.said("pre")
    assert f"equipoise evaluate {run.folder}" in page.said("pre")
    assert run.facts["versions"]["torch"] in page.said("td")


def test_page_needs_nothing_beside_it(one):
    text = one[1].read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links
    assert all(link.startswith("data:image/") for link in links)


def test_every_picture_decodes_and_has_words(one):
    images = read_page(one[1]).of("img")
    kinds = set()
    for image in images:
        kind, _, data = image["src"].partition(";base64,")
        decoded = base64.b64decode(data, validate=True)
        kinds.add(kind)
        if kind == "data:image/png":
            assert decoded.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", decoded[16:24])
            assert width / height == pytest.approx(int(image["width"]) / int(image["height"]), rel=0.01)
        else:
            assert ElementTree.fromstring(decoded).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(image["alt"]) > len(", x")
    assert kinds == {"data:image/png", "data:image/svg+xml"}
    assert len({image["src"] for image in images}) == len(images) == 12


def test_a_hostile_title_is_only_a_title(one):
    _, path = one
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert Page(text).said("h1")[0] == HOSTILE
    first = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()[0]
    assert "<" not in first
    assert html.unescape(first.replace(r"\|", "|")) == f"# {HOSTILE}"


def test_markdown_tells_the_result(one):
    run, path = one
    (row,) = markdown_rows(path.with_suffix(".md"))
    result = run.result
    assert row["run"] == run.folder.name
    assert row["test accuracy"] == f"{result['test']['accuracy']:.2%}"
    assert float(row["test loss"]) == pytest.approx(result["test"]["loss"], rel=1e-3)
    assert row["best validation accuracy"] == f"{result['best']['value']:.2%}"
    assert int(row["parameters"].replace(",", "")) == result["parameters"]
    assert int(row["training steps"]) == result["steps"]
    assert int(row["solver steps"]) == result["test"]["solver"]["forward"]["steps"]["median"]
    assert row["status"] == "finished"


def test_cards_tell_the_result(one):
    run, path = one
    cards = read_page(path).said("b")
    assert f"{run.result['test']['accuracy']:.2%}" in cards
    assert f"{run.result['best']['value']:.2%}" in cards
    assert f"{run.result['parameters']:,}" in cards


def test_failed_solves_are_counted_and_explained(one):
    run, path = one
    forward = run.result["test"]["solver"]["forward"]
    failed = forward["results"]["MAX_STEPS"]
    assert failed / forward["samples"] > 0.01
    notices = [text for text in read_page(path).said("p") if "failed" in text]
    assert notices[0].startswith(f"{failed} of {forward['samples']} forward solves of the test split failed.")
    assert Result.MAX_STEPS.message in notices[0]


def test_solver_table_has_every_split_and_direction(one):
    _, path = one
    cells = read_page(path).said("td")
    table = [cells[i + 1] for i, cell in enumerate(cells) if cell in ("training", "validation", "test")]
    assert table == ["forward", "backward", "forward", "forward"]


def test_the_same_figure_gives_the_same_bytes():
    records = [{"kind": "epoch", "epoch": 1, "phase": 0, "val": {"loss": 0.5, "solver": {}}}]
    first, second = (picture("Loss", dict(figures.training_curves(records))["Loss"], "a") for _ in range(2))
    assert first == second


# Several runs


def test_several_runs_are_compared(several):
    _, path = several
    page = read_page(path)
    assert page.said("h1") == ["Comparison of 2 runs"]
    assert page.said("h2") == ["Results", "Validation metrics", "seed-0", "seed-1"]
    assert page.said("figcaption")[:2] == ["Validation accuracy", "Validation loss"]
    assert all("open" not in attributes for attributes in page.of("details"))
    assert page.said("h3") == 2 * ["Training", "Test results", "Reproducibility", "Recipe"]


def test_seeds_get_mean_and_spread(several):
    runs, path = several
    first, second, mean = markdown_rows(path.with_suffix(".md"))
    values = [run.result["test"]["accuracy"] for run in runs]
    assert [first["seed"], second["seed"], mean["seed"]] == ["0", "1", ""]
    assert [first["test accuracy"], second["test accuracy"]] == [f"{value:.2%}" for value in values]
    assert mean["run"] == "mean of 2 seeds"
    assert mean["test accuracy"] == f"{statistics.fmean(values):.2%} ± {statistics.stdev(values):.2%}"


def test_other_recipes_get_no_mean(several, tmp_path):
    runs = []
    for number, run in enumerate(several[0]):
        shutil.copytree(run.folder, tmp_path / f"run-{number}", ignore=shutil.ignore_patterns("checkpoints"))
        facts = run.facts
        facts["tables"]["optimizer"]["lr"] = 0.1 * number
        write_json(tmp_path / f"run-{number}" / "run.json", facts)
        runs.append(open_run(tmp_path / f"run-{number}"))
    rows = markdown_rows(write_report(runs, MACHINE).with_suffix(".md"))
    assert [row["run"] for row in rows] == ["run-0", "run-1"]


def test_the_command_takes_sweeps_apart(several, capsys, tmp_path):
    runs, _ = several
    for run in runs:  # without checkpoints nothing is measured again
        shutil.copytree(run.folder, tmp_path / "sweep" / run.folder.name, ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"report            {tmp_path / 'page.html'}\n"
    assert "mean of 2 seeds" in read_page(tmp_path / "page.html").text


# What is missing is said


def test_a_run_that_was_never_trained(tmp_path):
    run = create(tmp_path / "fresh", open_recipe("core/digits"))
    page = read_page(write_report([run], MACHINE))
    assert "there is no checkpoint yet" in page.text
    assert f"equipoise resume {run.folder}" in page.said("code")
    assert page.said("h3") == ["Reproducibility", "Recipe"]
    assert page.of("img") == []


def test_no_equilibrium_and_not_finished(outside):
    run = open_run(outside("Plain"), trust="reported_nets")
    (run.folder / "result.json").unlink()  # as if it had been stopped just before the end
    with pytest.raises(ValueError, match="has no equipoise.Equilibrium"):
        figures.convergence([run], MACHINE)
    page = read_page(write_report([run], MACHINE))
    assert page.said("h3") == ["Training", "Test results", "Reproducibility", "Recipe"]
    assert "Training is unfinished: 2 of 2 epochs are done" in page.text
    assert f"equipoise resume {run.folder} --trust reported_nets" in page.said("code")
    assert "solver" not in page.text.partition("Reproducibility")[0]
    assert "best weights" in page.said("span")
    best = max(record["val"]["accuracy"] for record in run.epochs())
    assert f"{best:.2%}" in page.said("b")


def test_a_run_under_way(tmp_path):
    run = create(tmp_path / "busy", open_recipe("core/digits"))
    with run.alone():
        page = read_page(write_report([run], MACHINE))
    assert "running" in page.said("span")
    assert "Training is in progress: 0 of 12 epochs are done" in page.text


def test_data_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    data = tmp_path / "data" / "mnist"
    from official_files import make_idx

    make_idx(data, train=64, test=32)
    changes = ("data.validation=16", "model.channels=4", "model.stride=4", "training.log_every=1")
    run = open_run(trained(tmp_path, *changes, recipe="core/mnist", folders=[tmp_path / "data"]))
    shutil.rmtree(data)
    path = write_report([run], MACHINE)
    page = read_page(path)
    (notice,) = [text for text in page.said("p") if "could not be evaluated" in text]
    assert "equipoise data get mnist" in notice
    assert page.said("h3") == [part for part in PARTS if part not in ("Solver on the test split", "Test results")]
    assert f"{run.result['test']['accuracy']:.2%}" in page.said("b")  # what training measured stays
    assert "equipoise data get mnist" in path.with_suffix(".md").read_text()


def test_a_damaged_checkpoint(one, tmp_path):
    shutil.copytree(one[0].folder, tmp_path / "damaged")
    run = open_run(tmp_path / "damaged")
    run.best.write_bytes(b"no tensors")
    page = read_page(write_report([run], MACHINE))
    assert f"{run.best} is not a safetensors file" in page.text
    assert "Convergence by solver" not in page.said("figcaption")


# The door


def test_refusals(one, tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], MACHINE)
    with pytest.raises(ValueError, match="choose .html"):
        write_report([one[0]], MACHINE, out=tmp_path / "report.md")
    (tmp_path / "notes.md").write_text("my own")
    with pytest.raises(ValueError, match="notes.md, the file of the report.s tables, exists without"):
        write_report([one[0]], MACHINE, out=tmp_path / "notes.html")
    assert (tmp_path / "notes.md").read_text() == "my own"


def test_only_the_leading_process_writes(one, tmp_path):
    second = Machine(torch.device("cpu"), rank=1, world=2)
    assert write_report([one[0]], second, out=tmp_path / "page.html") == tmp_path / "page.html"
    assert list(tmp_path.iterdir()) == []


# Words


def test_labels_tell_runs_apart():
    def of(*paths):
        return labels([Run(Path(path)) for path in paths])

    assert of("runs/a") == ["a"]
    assert of("runs/a/seed-0", "runs/a/seed-1") == ["seed-0", "seed-1"]
    assert of("runs/a/seed-0", "runs/b") == ["a/seed-0", "b"]
    assert of("x/runs/a", "y/runs/a") == ["x/runs/a", "y/runs/a"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "10.0 s"), (19, "19 s"), (59.7, "60 s"), (250, "4 min 10 s"), (7530, "2 h 5 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("test accuracy", 0.98055, "98.06%"),
        ("test accuracy", 1.0, "100%"),
        ("test accuracy", 0.99999, "100.00%"),
        ("test loss", 0.0621161, "0.06212"),
        ("test loss", None, "-"),
        ("parameters", 9322, "9,322"),
        ("time", 19.0, "19 s"),
    ],
)
def test_numbers(name, value, text):
    assert format_metric(name, value) == text


EVERY = [name for name in recipe_names() if "phases" in open_recipe(name).tables]
STRANGE = (
    'gradient={name="implicit", solver={name="gmres", restart=5}, tolerance={relative=1e-6}}',
    'task.names=["a\\"b", "ü\\u007f", "x\\ny"]',
    "phases.0.task={shift=3}",
    "phases.0.optimizer={}",
    "training.clip=1.0",
    "data.limit=10",
)


@pytest.mark.parametrize(("name", "changes"), [*((name, ()) for name in EVERY), ("core/digits", STRANGE)])
def test_the_recipe_shown_is_the_recipe(name, changes):
    source = open_recipe(name)
    for text in changes:
        change(source.tables, *parse_override(text), "test", source.where)
    recipe = source.read(Recipe)
    again = read(Recipe, tomllib.loads(to_toml(recipe)), (), Where("again"))
    assert again == dataclasses.replace(recipe, budget={})


# Figures


def lines(figure):
    return {line.get_label().partition(":")[0]: line for line in figure.axes[0].get_lines()}


def test_convergence_draws_every_solver(one):
    run, _ = one
    figure = figures.convergence([run], MACHINE, samples=20)
    drawn = lines(figure)
    assert list(drawn) == [
        "Picard",
        "Anderson (this run)",
        "Broyden",
        "tolerance of the run",
        "tolerance of this figure",
    ]
    own = drawn["Anderson (this run)"]
    assert own.get_linewidth() > drawn["Picard"].get_linewidth()
    for name in ("Picard", "Anderson (this run)", "Broyden"):
        evaluations, residuals = drawn[name].get_data()
        assert list(evaluations) == list(range(1, len(evaluations) + 1))
        assert residuals[-1] <= 1e-6 < residuals[0]
    assert len(own.get_xdata()) < len(drawn["Picard"].get_xdata())
    assert len(figures.convergence([run, run], MACHINE, samples=2).axes) == 2
    with pytest.raises(ValueError, match="samples is 0"):
        figures.convergence([run], MACHINE, samples=0)


def test_convergence_takes_the_first_equilibrium_that_is_solved(outside):
    opened = open_trained(open_run(outside("Two"), trust="reported_nets"), MACHINE)
    figure = figures.convergence_of([(opened, load_data(opened.recipe, (), NOTHING).test)], samples=5)
    assert list(lines(figure))[:3] == ["Picard", "Anderson", "Broyden (this run)"]  # first.solver
    assert figure.axes[0].get_title().endswith("first of 2 equilibria")
    layers = [layer for layer in opened.model.modules() if isinstance(layer, Equilibrium)]
    assert all("solve" not in vars(layer) for layer in layers)
    assert [type(layer.solver) for layer in layers] == [Anderson, Broyden]


def test_a_trace_counts_every_evaluation():
    class Half(torch.nn.Module):
        def forward(self, z, x):
            return 0.5 * z + x

    from equipoise import NewtonKrylov, Tolerance

    for solver in (Picard(), NewtonKrylov()):
        layer, tolerance = Equilibrium(Half()), Tolerance(relative=1e-6)
        trace = figures.trace_residuals(layer, (torch.ones(3, 2),), None, solver, tolerance)
        assert len(trace.evaluations) == len(trace.residuals)
        assert trace.evaluations[0] == 1
        assert trace.evaluations == sorted(set(trace.evaluations))
        assert trace.evaluations[-1] == trace.statistics.evaluations


def test_curves_leave_gaps_where_numbers_were_not_finite():
    records = [
        {"kind": "step", "step": i, "lr": 0.1, "gradient_norm": norm, "steps": {}}
        for i, norm in enumerate((1, None, 2))
    ]
    drawn = dict(figures.training_curves(records))
    values = drawn["Gradient norm"].axes[0].get_lines()[0].get_ydata()
    assert [math.isnan(value) for value in values] == [False, True, False]
    assert list(figures.solver_curves(records)) == []


def test_residuals_that_never_change_are_drawn():
    record = {"kind": "step", "steps": {"forward": 9}, "residual": {"forward": 1e-4}, "failed_samples": 0}
    drawn = dict(figures.solver_curves([{**record, "step": step} for step in range(3)], tolerance=1e-4))
    low, high = drawn["Residual during training"].axes[0].get_ylim()
    assert (low, high) == pytest.approx((1e-5, 1e-3))
    assert drawn["Unconverged samples"].axes[0].get_ylim()[1] >= 1


def test_histograms_keep_every_count():
    steps, residuals = torch.zeros(1001), torch.zeros(80)
    steps[3], steps[400] = 30, 10
    residuals[20], residuals[47] = 30, 10
    sums = {"forward results": torch.tensor([40.0]), "forward steps": steps, "forward residuals": residuals}
    drawn = dict(figures.histograms(sums))
    for figure in drawn.values():
        values, edges, _ = figure.axes[0].patches[0].get_data()
        assert sum(values) == pytest.approx(1)
        assert max(values) == pytest.approx(0.75)
        assert len(edges) == len(values) + 1 <= 41
    assert drawn["Residual"].axes[0].patches[0].get_data().edges[0] == pytest.approx(1e-11)
    assert list(figures.histograms({})) == []


def test_names_are_drawn_as_they_are():
    records = [{"kind": "epoch", "epoch": 1, "phase": 0, "val": {"accuracy": 0.5, "solver": {}}}]
    figure = dict(figures.comparison({"_a$b": records, "$\\frac$": records}))["Validation accuracy"]
    shown_names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown_names == [r" _a\$b", r"\$\frac\$"]
    figure.canvas.draw()  # a formula would not parse


# A real browser

PROBE = """<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument;
    page.querySelectorAll("details").forEach((part) => { part.open = true; });
    const images = [...page.images];
    return [page.documentElement.scrollWidth, page.documentElement.clientWidth, images.length,
            images.filter((image) => image.naturalWidth > 0 && image.offsetWidth > 100).length];
  });
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("pages", ["one", "several"])
def test_page_fits_wide_and_narrow_windows(pages, request, tmp_path):
    _, path = request.getfixturevalue(pages)
    page = html.escape(path.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe srcdoc="{page}" style="width: {w}px; height: 900px"></iframe>' for w in (1200, 400))
    (tmp_path / "probe.html").write_text(f"<!DOCTYPE html><body>{frames}{PROBE}</body>", encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    address = f"file://{tmp_path / 'probe.html'}"
    run = subprocess.run(["chromium", *flags.split(), address], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(re.search(r"<title>(.*?)</title>", run.stdout)[1])
    assert len(found) == 2
    for scroll, client, images, loaded in found:
        assert scroll == client  # nothing sticks out sideways
        assert images == loaded == len(read_page(path).of("img"))

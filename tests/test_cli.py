"""The command line: help with an example everywhere, a sentence for every mistake, no traceback."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.cli import main, parser
from equipoise.lab.data import MissingData, load
from equipoise.lab.recipes.reading import kind_of, open_recipe, recipe_names
from equipoise.lab.recipes.schema import Recipe
from lab_helpers import timeless
from official_files import make_cityscapes, make_imagenette

ROOT = Path(__file__).parent.parent


def parsers(top=None, path=()):
    """Every command's parser, with the words that lead to it."""
    top = top or parser()
    yield path, top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from parsers(sub, (*path, name))


COMMANDS = [path for path, _ in parsers()]


def test_all_the_commands_are_there():
    names = {path[0] for path in COMMANDS if path}
    assert names == {
        *("train", "resume", "evaluate", "predict", "export", "report", "reproduce"),
        *("figure", "recipes", "runs", "data", "doctor", "segment", "attack", "restore", "sample", "interpolate"),
        *("distance", "weights", "convert", "results", "page"),
    }
    assert {("data", "list"), ("data", "get"), ("data", "check")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*path, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    example = re.search(r"Example: (equipoise .*)", re.sub(r"\s+", " ", text))
    assert example
    first = shlex.split(example[1].split(" && ")[0])[1:]
    _, rest = parser().parse_known_args(first)  # the example is a command that parses
    assert not [word for word in rest if "=" not in word]
    assert first[: len(path)] == list(path)


def test_commands_that_read_no_data_set_ask_for_none(capsys):
    for command in ("predict", "segment", "attack", "restore"):
        assert "there is no argument '--data'" in fails(capsys, command, "runs/x", "image.png", "--data", "here")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small finished run."""
    folder = tmp_path_factory.mktemp("work")
    assert main(["train", "core/digits", "--budget", "smoke", "--runs", str(folder), "--threads", "1"]) == 0
    return folder / "core-digits-001"


def fails(capsys, *words):
    """The one sentence a wrong command prints; its exit code is 2."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "invalid choice 'trian'; did you mean 'train'?"),
        (["data", "gte"], "invalid choice 'gte'; did you mean 'get'?"),
        (["train", "core/digts"], "there is no recipe 'core/digts'; did you mean 'core/digits'?"),
        (["train", "core/digits", "--budgt", "small"], "there is no argument '--budgt'; did you mean '--budget'?"),
        (["train", "core/digits", "--budget", "smal"], "there is no budget 'smal'; did you mean 'small'?"),
        (["train", "core/digits", "optimizer.lrr=1"], "has no option 'lrr'; did you mean 'lr'?"),
        (["train", "core/digits", "optimiser.lr=1"], "there is no key 'optimiser'; did you mean 'optimizer'?"),
        (["train", "core/digits", "model.name=conv-equilibrum"], "did you mean 'conv-equilibrium'?"),
        (["train", "core/digits", "data.name=digit"], "there is no data set 'digit'; did you mean 'digits'?"),
        (["train", "core/digits", "training.batchsize=3"], "did you mean 'batch_size'?"),
        (["train", "core/digits", "phases.7.epochs=3"], "phases.7 does not exist; phases has the entries 0 to 0"),
        (["train", "core/digits", "phases.0.epochs=many"], "phases.0.epochs is 'many'; it must be a whole number"),
        (
            ["train", "core/digits", "phases.0.epochs=0"],
            "phases.0.epochs is 0; it must be a whole number of at least 1",
        ),
        (["train", "core/digits", "nonsense"], "'nonsense' is not a change of a recipe; write key=value"),
        (
            ["train", "core/digits", "optimizer.lr=-1"],
            " and command line, optimizer.lr=-1: optimizer: Invalid learning rate: -1",
        ),
        (
            ["train", "core/digits", "optimizer.lr=abc"],
            "command line, optimizer.lr=abc: optimizer.lr is 'abc'; it must be a number.",
        ),
        (["train", "core/digits", "tolerance.relative=inf"], " and command line, tolerance.relative=inf: tolerance: "),
        (["train", "core/digits", "solver.name=andersen"], "there is no solver 'andersen'; did you mean 'anderson'?"),
        (["train", "core/digits", "tolerance.relative=-1"], "relative is -1"),
        (["train", "core/digits", "solver.name=gmres"], "there is no solver 'gmres'"),
        (["train", "core/digits", "data.name=image-folder"], "data set 'image-folder' needs folder"),
        (["train", "core/digits", "data.name=image-folder", "data.folder=3"], "data.folder is 3; it must be a string"),
        (["train", "core/digits", "--device", "cuda:99"], "--device is 'cuda:99', which this machine cannot use"),
        (["train", "core/digits", "--device", "gpu"], "--device is 'gpu', which this machine cannot use"),
        (["train", "core/digits", "--threads", "0"], "--threads is 0; it must be at least 1"),
        (["train", "core/digits", "--threads", "two"], "--threads is 'two'; it must be a whole number."),
        (["train", "nowhere.toml"], "there is no file nowhere.toml"),
        (["train", "core/table"], "core/table is a table, not a recipe: equipoise reproduce core/table"),
        (
            ["train", "core/table", "--budget", "smoke"],  # of which it has none
            "core/table is a table, not a recipe: equipoise reproduce core/table",
        ),
        (
            ["train", "core/convergence"],
            "core/convergence is a figure, not a recipe: equipoise figure core/convergence",
        ),
        (["reproduce", "core/digits"], "core/digits is a recipe, not a table: equipoise train core/digits"),
        (["figure", "core/digits"], "core/digits is a recipe, not a figure: equipoise train core/digits"),
        (["recipes", "core/digit"], "did you mean 'core/digits'?"),
        (["resume", "runs/none-001"], "there is no folder runs/none-001. `equipoise runs` lists runs."),
        (["evaluate", "src"], "is not a run: it has no run.json"),
        (["report", "runs/none-001"], "there is no folder runs/none-001"),
        (["evaluate", "runs/x", "--data", "no/such"], "argument --data: 'no/such' is not a folder"),
        (["evaluate", "README.md"], "README.md is a file; a run is a folder, and weights are in .safetensors files"),
        (["report", "mondeq/mnist-fc"], "the shipped model of that name has no folder with its training"),
        (["weights", "mondeq/mnist-fc", "--limit", "3"], "--limit is for --add RUN: omit it."),
        (["page", "--port", "-1"], "--port -1: the port must be from 0 to 65535. Give another port;"),
        (["data", "get", "mnits"], "there is no data set 'mnits'; did you mean 'mnist'?"),
        (["data", "get", "imagenet"], "imagenet cannot be downloaded: register at"),
        (["data", "check", "mnits"], "did you mean 'mnist'?"),
        (["figure"], "equipoise figure: the following arguments are required: FIGURE\n"),
        (["train", "core/digits", "lr=0.1"], "there is no key 'lr'; did you mean 'optimizer.lr'?"),
        (["train", "core/digits", "epochs=3"], "there is no key 'epochs'; did you mean 'phases.0.epochs'?"),
        (["train", "core/digits", "batchsize=3"], "there is no key 'batchsize'; did you mean 'training.batch_size'?"),
        (["train", "mdeq/cifar10-small", "epochs=3"], "did you mean 'phases.0.epochs' or 'phases.1.epochs'?"),
        (
            ["train", "core/digits", "--epochs", "3"],
            "there is no argument '--epochs'; change a recipe with key=value: phases.0.epochs=3.",
        ),
        (["train", "core/digits", "--lr=0.1"], "change a recipe with key=value: optimizer.lr=0.1."),
        (["train", "core/digits", "--batch-size", "3"], "change a recipe with key=value: training.batch_size=3."),
        (["reproduce", "core/table", "--epochs", "3"], "change a recipe with key=value: phases.0.epochs=3."),
        (["figure", "core/convergence", "--epochs"], "change a recipe with key=value: phases.0.epochs=VALUE."),
        (["evaluate", "runs/x", "--radius", "3"], "give options of the task as key=value: radius=3."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_a_sentence(words, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert said in fails(capsys, *words)


def test_a_file_of_another_kind_is_named_with_the_command_that_takes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my recipe.toml").write_text('title = "x"\n')
    assert fails(capsys, "reproduce", "my recipe.toml") == (
        "equipoise: my recipe.toml is a recipe, not a table: equipoise train 'my recipe.toml'.\n"
    )


def test_a_figure_takes_the_name_of_a_shipped_model():
    arguments = parser().parse_args(["figure", "core/convergence", "--run", "mondeq/mnist-fc"])
    assert arguments.trained == ["mondeq/mnist-fc"]  # a Path would be a folder


def test_an_error_of_the_system_names_the_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    said = fails(capsys, "train", "core/digits", "--runs", tmp_path / "file")
    assert said == f"equipoise: {tmp_path}/file: File exists.\n"


def test_changes_of_one_command_are_forgotten_in_the_next(capsys):
    for _ in range(2):
        assert fails(capsys, "train", "core/digits", "--threads", "1", "wrong=1").count("wrong=1") == 1
    assert parser().parse_args(["figure", "core/convergence"]).changes == []
    usage = next(made.format_usage() for path, made in parsers() if path == ("figure",))
    assert "FIGURE [key=value ...]" in re.sub(r"\s+", " ", usage)


def test_a_missing_data_set_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EQUIPOISE_DATA", f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}")
    (tmp_path / "given").mkdir()
    said = fails(capsys, "train", "core/cifar10", "--data", tmp_path / "given", "--runs", tmp_path / "runs")
    places = [said.index(str(tmp_path / name)) for name in ("given", "a", "b", "cache")]
    assert places == sorted(places)
    assert "equipoise data get cifar10" in said
    assert not list((tmp_path / "runs").iterdir())  # no run was begun


def test_evaluate_predict_and_list_a_run(run, tmp_path, capsys):
    from PIL import Image

    assert main(["evaluate", str(run), "--json", str(tmp_path / "out.json"), "--limit", "50"]) == 0
    printed = capsys.readouterr().out
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert f"accuracy          {numbers['accuracy']:.2%}" in printed
    assert "forward solves    100.00% of 50 converged" in printed

    Image.new("RGB", (40, 30), "white").save(tmp_path / "white.png")
    assert main(["predict", str(run), str(tmp_path / "white.png"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["image"] == str(tmp_path / "white.png")
    assert 0 < answer["probability"] <= 1
    assert main(["predict", str(run), str(tmp_path / "white.png")]) == 0
    assert f"class {answer['class']}" in capsys.readouterr().out

    assert main(["runs", str(run.parent)]) == 0
    assert re.search(r"core-digits-001 +core/digits +finished +1/1 +[\d.]+% +[\d.]+%", capsys.readouterr().out)
    assert main(["resume", str(run)]) == 0  # it is finished: says its result again
    assert "test accuracy" in capsys.readouterr().out


def test_export_a_run_and_check_it(run, tmp_path, capsys):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    path = tmp_path / "model.onnx"
    words = ("export", str(run), str(path), "--solver", "picard", "--steps", "2", "--check", "--limit", "30")
    assert main([*words, "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"written +\S+model.onnx: [\d.]+ MB, \d+ operations, opset \d+\n", printed)
    assert "inputs            input (batch, 1, 8, 8)\n" in printed
    assert "outputs           output (batch, 10)\n" in printed
    assert "check             30 samples, 100.00% with the same number of steps" in printed
    assert "must end in .onnx" in fails(capsys, "export", str(run), "model.pt")
    assert "did you mean 'anderson'?" in fails(capsys, "export", str(run), str(path), "--solver", "andersen")


@pytest.mark.slow
def test_export_a_generator_and_check_it_on_its_latent_vectors(tmp_path, capsys):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    words = ("export", "jiio/fashion-mnist", str(tmp_path / "clothes.onnx"), "--check", "--limit", "12")
    assert main([*words, "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "inputs            input (batch, 32)\n" in printed
    assert "outputs           output (batch, 1, 28, 28), steps (batch)" in printed
    assert "check             12 samples, " in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--limit", 3], "--limit is for --check, which compares the file with torch on test samples: add"),
        (["RUN", "--data", "."], "--data is for --check"),
        (["RUN", "--opset", 99], "opset is 99; it must be a whole number of at least 18 and at most "),
        (["jiio/omniglot"], "jiio/omniglot learns the classes of a task from a few labelled images before it answers"),
    ],
)
def test_what_cannot_be_exported_gets_a_sentence(run, words, said, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    name, *options = words
    file = tmp_path / "model.onnx"
    assert said in fails(capsys, "export", run if name == "RUN" else name, file, *options)
    assert not file.exists()


def test_the_evaluation_equals_the_result(run, capsys):
    result = json.loads((run / "result.json").read_text())
    main(["evaluate", str(run)])
    assert f"accuracy          {result['test']['accuracy']:.2%}" in capsys.readouterr().out


def test_evaluate_under_another_task(run, capsys):
    words = ["--task", "robustness", "radius=0.2", "steps=3", "--limit", "40"]
    assert main(["evaluate", str(run), *words]) == 0
    printed = capsys.readouterr().out
    accuracy, robust = (
        float(re.search(rf"^{name} +([\d.]+)%", printed, re.M)[1]) for name in ("accuracy", "robust accuracy")
    )
    assert robust <= accuracy
    assert "did you mean 'radius'" in fails(capsys, "evaluate", run, "--task", "robustness", "raduis=0.2")
    assert "did you mean 'robustness'" in fails(capsys, "evaluate", run, "--task", "robustnes")


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n broken"])
def test_what_is_not_an_image_is_named(run, content, tmp_path, capsys):
    (tmp_path / "x.png").write_bytes(content)
    assert f"{tmp_path / 'x.png'} cannot be read: it is not an image that can be read; formats: PNG, JPEG" in fails(
        capsys, "predict", run, tmp_path / "x.png"
    )
    assert "there is no file" in fails(capsys, "predict", run, tmp_path / "none.png")


def test_lists(capsys):
    assert main(["recipes"]) == 0
    assert re.search(r"^core/digits +recipe +core +digits +9,322 ", capsys.readouterr().out, re.M)
    assert main(["recipes", "core/digits"]) == 0
    assert capsys.readouterr().out == (ROOT / "src/equipoise/papers/core/digits.toml").read_text()
    assert main(["data", "list"]) == 0
    assert re.search(r"^digits +1437 \+ 360 +scikit-learn", capsys.readouterr().out, re.M)
    assert main(["data", "check", "digits"]) == 0
    assert "1437 + 360 samples" in capsys.readouterr().out


def test_one_damaged_run_does_not_hide_the_others(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "good")
    for name, text in (("broken", "{"), ("empty", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"good +core/digits +finished", printed)
    assert len(re.findall(" damaged: /", printed)) == 2
    assert "run.json is damaged: recipe and folder and tables and machine are missing" in fails(
        capsys, "report", tmp_path / "empty"
    )


def test_no_runs_yet(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "`equipoise train` creates one" in capsys.readouterr().out


def test_doctor_finds_everything_here(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "MISSING" not in printed
    assert "a solve of 64 samples and its gradient" in printed


def test_doctor_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    assert "MISSING  safetensors (checkpoints): pip install 'equipoise[lab]'" in capsys.readouterr().out


def make_unlabelled(folder, count=24):
    """Pictures of one colour each, where jiio/ffhq looks for them."""
    from PIL import Image

    (folder.parent / "ffhq/00000").mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (20, 20), (10 * i, 100, 255 - 10 * i)).save(folder.parent / f"ffhq/00000/{i:05}.png")


MADE = {
    "imagenet": make_imagenette,
    "cityscapes": partial(make_cityscapes, times=8),
    "unlabelled-images": make_unlabelled,
}


EXPLICIT = ("resnet", "hrnet", "conv-ae", "conv-rae", "conv-vae", "conv4")  # models that solve nothing


@pytest.mark.parametrize("name", [name for name in recipe_names() if kind_of(open_recipe(name)) is Recipe])
def test_every_recipe_trains_within_its_smoke_budget(name, tmp_path, monkeypatch):
    """On the real data, where it is there: in $EQUIPOISE_DATA or in a folder of data beside the repository.

    Sets that are to be had by registration only are made: a few images in the official layout.
    """
    data, section = ROOT.parent / "shared" / "data", open_recipe(name).read(Recipe).data
    wanted, options = section.name, {key: section.options[key] for key in section.options if key == "folder"}
    if wanted in MADE:
        data = tmp_path / "data"
        MADE[wanted](data / wanted)
    try:
        load(wanted, folders=[data], validation=0, **options)
    except MissingData as missing:
        pytest.skip(str(missing))
    words = ["--budget", "smoke", "--runs", str(tmp_path / "runs"), "--data", str(data), "--threads", "1"]
    assert main(["train", name, *words]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    recipe, solver = open_recipe(name).read(Recipe), result["test"]["solver"]
    if recipe.model.name in EXPLICIT:
        assert not solver
        return
    solves = solver["forward"]
    if recipe.failures.share < 1:
        assert result["failed_steps"] == 0
        assert solves["failed"] < 0.01
    else:  # the model is meant to run out of steps
        assert set(solves["results"]) <= {"CONVERGED", "MAX_STEPS", "STALLED"}


def test_a_figure(run, tmp_path, capsys):
    out = tmp_path / "figure.png"
    assert main(["figure", "core/convergence", "--run", str(run), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "must end in .png" in fails(capsys, "figure", "core/convergence", "--run", run, "--out", tmp_path / "x.abc")
    assert "have no effect on them" in fails(capsys, "figure", "core/convergence", "seed=3", "--run", run)
    assert ": max_steps, relative, samples." in fails(capsys, "figure", "core/convergence", "seed=3", "--run", run)
    assert "leave out seeds" in fails(capsys, "figure", "core/convergence", "seeds=2")
    assert main(["figure", "core/convergence", "samples=1", "--run", str(run), "--out", str(out)]) == 0
    assert "samples is 0" in fails(capsys, "figure", "core/convergence", "samples=0", "--run", run)
    assert "requires 1 runs" in fails(capsys, "figure", "core/convergence", "--run", run, "--run", run)
    mistaken = tmp_path / "mistaken.toml"  # said before anything is trained
    mistaken.write_text('title = "x"\nfigure = "convergence"\nrecipes = ["core/digits"]\nbatchez = 3\n')
    assert "has no option 'batchez'" in fails(capsys, "figure", mistaken)


def test_a_recipe_of_a_figure_can_have_changes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = 'title = "x"\nfigure = "convergence"\nrecipes = ["core/digits model.channels=8", "core/digits{}"]\n'
    (tmp_path / "two.toml").write_text(told.format(" optimizer.lrr=3"))  # said before the first one is trained
    assert "lrr" in fails(capsys, "figure", "two.toml", "--budget", "smoke", "--runs", "runs")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "two.toml").write_text(told.format(""))
    assert main(["figure", "two.toml", "--budget", "smoke", "data.limit=64", "--runs", "runs"]) == 0
    made = tmp_path / "runs" / "two-001"
    facts = [json.loads((made / f"recipe-{i}" / "core-digits-001" / "result.json").read_text()) for i in (1, 2)]
    assert facts[0]["parameters"] < facts[1]["parameters"]
    assert (made / "two.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_puts_paper_beside_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text(
        'title = "A table"\n'
        '[[rows]]\nlabel = "one"\nrecipe = "core/digits"\npaper = 0.9\nspread = 0.01\n'
        '[[rows]]\nlabel = "two"\nrecipe = "core/digits"\nchanges = {"model.channels" = 8, seeds = 2}\n'
    )
    assert main(["reproduce", "table.toml", "--budget", "smoke", "data.limit=64", "--runs", "out"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| one \| accuracy \| 0\.9 \+- 0\.01 \| 0\.\d+ \| 9,322 \|$", printed, re.M)
    assert re.search(r"^\| two \| accuracy \| - \| 0\.\d+ \+- [\d.]+ \| [\d,]+ \|$", printed, re.M)
    rows = json.loads((tmp_path / "out" / "table-001" / "table.json").read_text())["rows"]
    assert [row["seeds"] for row in rows] == [1, 2]

    # One row is done, one run of the other is not: only that is trained again.
    folder = tmp_path / "out" / "table-001"
    shutil.rmtree(folder / "row-2" / "core-digits-001" / "seed-1")
    untouched = (folder / "row-1" / "core-digits-001" / "checkpoints" / "last.safetensors").stat().st_mtime_ns
    assert main(["resume", str(folder)]) == 0
    assert timeless(json.loads((folder / "table.json").read_text())["rows"]) == timeless(rows)
    assert (folder / "row-1" / "core-digits-001" / "checkpoints" / "last.safetensors").stat().st_mtime_ns == untouched
    assert (folder / "row-2" / "core-digits-001" / "seed-1" / "result.json").exists()


def test_a_table_that_was_killed_before_a_run_was_described_is_continued(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text('title = "A table"\n[[rows]]\nlabel = "one"\nrecipe = "core/digits"\n')
    assert main(["reproduce", "table.toml", "--budget", "smoke", "data.limit=64", "--runs", "out"]) == 0
    folder = tmp_path / "out" / "table-001"
    shutil.rmtree(folder / "row-1" / "core-digits-001")
    (folder / "row-1" / "core-digits-001").mkdir()  # all that is there at this moment
    for _ in range(2):
        assert main(["resume", str(folder)]) == 0
        assert [path.name for path in sorted(folder.glob("row-1/*/result.json"))] == ["result.json"]


def test_a_table_that_was_edited_is_not_continued_with_the_runs_of_other_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = '[[rows]]\nlabel = "{0} channels"\nrecipe = "core/digits"\nchanges = {{"model.channels" = {0}}}\n'
    (tmp_path / "table.toml").write_text('title = "A table"\n' + row.format(8))
    assert main(["reproduce", "table.toml", "--budget", "smoke", "data.limit=64", "--runs", "out"]) == 0
    (tmp_path / "table.toml").write_text('title = "A table"\n' + row.format(4) + row.format(8))
    said = fails(capsys, "resume", "out/table-001")
    assert "out/table-001/row-1/core-digits-001 was begun with another recipe than core/digits is now" in said


def test_a_number_that_is_not_finite_does_not_end_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text(
        'title = "A table"\n[[rows]]\nlabel = "one"\nrecipe = "core/digits"\nmetric = "loss"\n'
    )
    assert main(["reproduce", "table.toml", "--budget", "smoke", "data.limit=64", "--runs", "out"]) == 0
    folder = tmp_path / "out" / "table-001"
    file = folder / "row-1" / "core-digits-001" / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps({**result, "test": {**result["test"], "loss": None}}))
    capsys.readouterr()
    assert main(["resume", str(folder)]) == 0
    assert "| one | loss | - | - |" in capsys.readouterr().out
    (row,) = json.loads((folder / "table.json").read_text())["rows"]
    assert row["measured"] is None


def test_a_table_and_a_figure_say_what_they_are_about(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = 'title = "X"\n[paper]\naim = "a number"\nnote = "not all"\n[budget.smoke]\n{}\n'
    row = '[[rows]]\nlabel = "one"\nrecipe = "core/digits"\n'
    (tmp_path / "table.toml").write_text(about.format('"phases.0.epochs" = 1') + row)
    top = 'figure = "convergence"\nrecipes = ["core/digits"]\nsamples = 9\n'
    (tmp_path / "figure.toml").write_text(top + about.format("samples = 2"))
    recipe = "data.limit 256; data.validation 240 -> 64; phases.0.epochs 12 -> 1"
    for command, shrunk in (("reproduce", recipe), ("figure", f"samples 9 -> 2; {recipe}")):
        name = {"reproduce": "table.toml", "figure": "figure.toml"}[command]
        assert main([command, name, "--budget", "smoke", "data.limit=32", "--runs", "out"]) == 0
        assert capsys.readouterr().out.startswith(
            f"X\naim               a number\nnote              not all\nbudget smoke      {shrunk}\n"
        )
    assert "\nAim: a number.\n\nNote: not all.\n" in (tmp_path / "out/table-001/table.md").read_text()


def test_the_data_of_all_rows_is_there_before_the_first_is_trained(tmp_path, capsys, monkeypatch):
    from equipoise.lab.data.files import places

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "SYSTEM", tmp_path / "system")
    assert fails(capsys, "reproduce", "core/table", "--budget", "smoke") == (
        "equipoise: 3 data sets are missing or incomplete; to get mnist: equipoise data get mnist; fashion-mnist: "
        "equipoise data get fashion-mnist; cifar10: equipoise data get cifar10.\n"
    )
    assert "the data set cifar10 was not found" in fails(capsys, "figure", "opteq/figure4a", "--budget", "smoke")
    assert not (tmp_path / "runs").exists()


def test_rows_that_differ_in_their_metric_are_of_one_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text(
        'title = "A table"\n'
        '[[rows]]\nlabel = "one"\nrecipe = "core/digits"\n'
        '[[rows]]\nlabel = "another"\nrecipe = "core/digits"\nchanges = {"model.channels" = 8}\n'
        '[[rows]]\nlabel = "the loss of one"\nrecipe = "core/digits"\nmetric = "loss"\n'
    )
    assert main(["reproduce", "table.toml", "--budget", "smoke", "data.limit=64", "--runs", "out"]) == 0
    folder = tmp_path / "out" / "table-001"
    assert sorted(path.name for path in folder.glob("row-*")) == ["row-1", "row-2"]
    one, _, loss = json.loads((folder / "table.json").read_text())["rows"]
    result = json.loads((folder / "row-1" / "core-digits-001" / "result.json").read_text())
    assert (one["measured"], loss["measured"]) == (result["test"]["accuracy"], result["test"]["loss"])


def test_a_sweep_reports_mean_and_spread(tmp_path, capsys):
    words = ["--budget", "smoke", "data.limit=64", "seeds=2", "seed=5", "--runs", str(tmp_path)]
    assert main(["train", "core/digits", *words]) == 0
    result = json.loads((tmp_path / "core-digits-001" / "result.json").read_text())
    values = torch.tensor(result["test"]["accuracy"]["values"], dtype=torch.float64)
    assert result["test"]["accuracy"]["mean"] == pytest.approx(values.mean().item())
    assert result["test"]["accuracy"]["spread"] == pytest.approx(values.std().item())
    assert {p.name for p in (tmp_path / "core-digits-001").glob("seed-*")} == {"seed-5", "seed-6"}
    assert "over 2 seeds" in capsys.readouterr().out


def test_runs_are_never_overwritten(tmp_path):
    for _ in range(2):
        words = ["data.limit=64", "data.validation=0", "--runs", str(tmp_path)]
        assert main(["train", "core/digits", "--budget", "smoke", *words]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["core-digits-001", "core-digits-002"]
    assert not (tmp_path / "core-digits-001" / "checkpoints" / "best.safetensors").exists()  # nothing to choose by
    assert json.loads((tmp_path / "core-digits-001" / "result.json").read_text())["weights"] == "last"


def test_python_m_equipoise_and_a_closed_pipe():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = f"{shlex.quote(sys.executable)} -m equipoise recipes | head -1"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("name")
    assert done.stderr == ""


def test_the_outside_example_trains_resumes_and_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "examples" / "outside" / "denoise.toml"
    assert main(["train", str(recipe), "--budget", "smoke", "--report"]) == 0
    page = (tmp_path / "runs" / "denoise-001" / "report.html").read_text()
    assert "Restored signals" in page
    trusted = [word for module in ("denoiser", "restoration", "signals") for word in ("--trust", module)]
    assert main(["resume", "runs/denoise-001", *trusted]) == 0
    assert main(["evaluate", "runs/denoise-001", *trusted]) == 0
    assert type(eq.load("runs/denoise-001", trust="denoiser")).__name__ == "Denoiser"


def test_data_get_downloads_or_fails_with_a_sentence(tmp_path, capsys, monkeypatch):
    import hashlib
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    from equipoise.lab.data.catalogue import RemoteFile
    from equipoise.lab.results import overview as listing

    served = tmp_path / "served"
    served.mkdir()
    (served / "good.bin").write_bytes(b"12345")
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    md5 = hashlib.md5(b"12345").hexdigest()

    def source(file, checksum):
        monkeypatch.setitem(listing.SOURCES, "mnist", (RemoteFile(file, (f"{address}/{file}",), md5=checksum),))

    source("good.bin", md5)
    assert main(["data", "get", "mnist", "--to", str(tmp_path / "to")]) == 0
    assert (tmp_path / "to" / "mnist" / "good.bin").read_bytes() == b"12345"
    source("none.bin", md5)
    assert "404" in fails(capsys, "data", "get", "mnist", "--to", tmp_path / "a")
    source("good.bin", "0" * 32)
    assert "its md5 is" in fails(capsys, "data", "get", "mnist", "--to", tmp_path / "b")
    assert not [p for name in "ab" for p in (tmp_path / name).rglob("*.bin*")]
    server.shutdown()
    server.server_close()


def test_predict_reads_images_as_training_does(tmp_path):
    from PIL import Image

    from equipoise.lab.data.files.images import read_image_file

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = torch.randint(256, (17 + number, 30 - number, 3), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{number}.png")
    data = load("image-folder", folder=str(tmp_path), size=9, validation=0)
    for row, (file, _) in enumerate(data.train.samples):
        assert torch.equal(data.train.read(torch.tensor([row]))[0][0], read_image_file(tmp_path / file, 3, (9, 9))[0])


def test_a_best_metric_that_is_none_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from equipoise.tasks.classification import Classification\nclass T(Classification): best_metric = 'acuracy'"
    (tmp_path / "misspelt_task.py").write_text(code)
    said = fails(capsys, "train", "core/digits", "--budget", "smoke", "task.name=misspelt_task:T")
    assert "best_metric of the task T is 'acuracy'; it has accuracy, loss." in said


def test_one_bad_image_does_not_discard_the_others(run, tmp_path, capsys, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    for name in ("one.png", "two.png", "three\x1b[2J\n.png"):
        Image.new("L", (8, 8), 255).save(name)
    Path("text.png").write_text("hello")
    words = ["one.png", "none.png", "two.png", "text.png", ".", "three\x1b[2J\n.png"]
    assert main(["predict", str(run), *words]) == 2
    said = capsys.readouterr()
    assert [line.partition(":")[0] for line in said.out.splitlines()] == ["one.png", "two.png", r"three\x1b[2J\n.png"]
    assert said.err.splitlines() == [
        "equipoise: there is no file none.png.",
        "equipoise: text.png cannot be read: it is not an image that can be read; formats: PNG, JPEG, BMP, WEBP, GIF, "
        "TIFF, PPM.",
        "equipoise: . cannot be read: it is not a regular file.",
    ]
    assert main(["predict", str(run), *words, "--json"]) == 2
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3


def test_control_characters_of_a_name_do_not_reach_the_terminal(run, tmp_path, capsys):
    for words in (["predict", run, "x\x1b[31m.png"], ["predict", "no\x1b[2Jrun", "x.png"], ["train", "a\x07b"]):
        assert main(list(map(str, words))) == 2
        said = capsys.readouterr().err
        assert "\\x" in said
        assert not set(said) & set("\x1b\x07")
    folder = tmp_path / "runs"
    shutil.copytree(run, folder / "red\x1b[31m")
    assert main(["runs", str(folder)]) == 0
    assert r"red\x1b[31m" in capsys.readouterr().out
    assert main(["report", str(folder / "red\x1b[31m"), str(run), "--out", str(tmp_path / "page.html")]) == 0
    for file in ("page.html", "page.md"):
        text = (tmp_path / file).read_text()
        assert r"red\x1b[31m" in text
        assert "\x1b" not in text


def test_an_image_of_quite_another_size_is_mentioned(run, tmp_path, capsys):
    from PIL import Image

    Image.new("RGB", (240, 180)).save(tmp_path / "photo.jpg")
    Image.new("L", (20, 20)).save(tmp_path / "small.png")
    assert main(["predict", str(run), str(tmp_path / "photo.jpg"), str(tmp_path / "small.png")]) == 0
    assert capsys.readouterr().err == (
        f"note: {tmp_path}/photo.jpg was cropped in the middle and shrunk from 240 x 180 to 8 x 8, the size of "
        "the images that the run was trained on.\n"
    )


def test_floating_point_images_are_levels_up_to_1_or_up_to_255(run, tmp_path, capsys):
    import numpy as np
    from PIL import Image

    from equipoise.lab.data.files.images import read_image_file

    levels = np.arange(64, dtype=np.float32).reshape(8, 8) * 4
    for name, values in {"unit": levels / 255, "full": levels, "large": levels * 10, "nan": levels * np.nan}.items():
        Image.fromarray(values).save(tmp_path / f"{name}.tif")
    for name in ("unit", "full"):
        assert torch.equal(read_image_file(tmp_path / f"{name}.tif", 1)[0][0], torch.from_numpy(levels).byte())
    assert "large.tif cannot be read: its pixels range from 0 to 2520; they must lie between 0 and 255." in fails(
        capsys, "predict", run, tmp_path / "large.tif"
    )
    assert "nan.tif cannot be read: it has pixels that are NaN or infinite." in fails(
        capsys, "predict", run, tmp_path / "nan.tif"
    )


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "gif"])
def test_what_is_transparent_is_white(kind, tmp_path):
    """A black square on a transparent ground, of which the hidden colour is black as well."""
    from PIL import Image

    from equipoise.lab.data.files.images import read_image_file

    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (2, 2, 6, 6))
    file = tmp_path / ("a.gif" if kind == "gif" else "a.png")
    if kind in ("P", "gif"):
        palette = Image.new("P", (8, 8), 1)
        palette.putpalette([0, 0, 0, 0, 0, 0])
        palette.paste(0, (2, 2, 6, 6))
        palette.save(file, transparency=1)
    else:
        image.convert(kind).save(file)
    for channels in (1, 3):
        seen, note = read_image_file(file, channels)
        assert note == f"{file} has transparent pixels, which were taken as white."
        assert int(seen[:, 2:6, 2:6].max()) == 0
        assert int(seen.long().sum()) == channels * 255 * 48


def test_resuming_a_finished_run_says_so(run, capsys):
    assert main(["resume", str(run)]) == 0
    assert f"{run} is finished, so there is nothing to continue; its result:" in capsys.readouterr().out


def test_training_says_when_the_solver_does_nothing(capsys, tmp_path):
    """A tolerance of 1 is met wherever a solve starts."""
    words = ["train", "core/digits", "--budget", "smoke", "--runs", str(tmp_path), "--threads", "1"]
    assert main([*words, "tolerance.relative=1.0"]) == 0
    captured = capsys.readouterr()
    assert "the solver does nothing: every solve of this epoch" in captured.out + captured.err
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "the solver does nothing" not in captured.out + captured.err

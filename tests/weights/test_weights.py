"""Shipped models: their cards and sizes, how they are found by name and added, and what they measure."""

import hashlib
import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open

import equipoise as eq
from digit_generator import RECIPE
from equipoise.cli import main
from equipoise.lab.data import available, load
from equipoise.lab.data.base import DataSet, TensorSplit
from equipoise.lab.files import DamagedFile, WriteError
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.results import add_weights as adding
from equipoise.lab.results.add_weights import ALL, GENERATES, GENERATOR, ONE, add_weights, differences, training_command
from equipoise.lab.results.weights_page import update_page, weights_table
from equipoise.lab.runs import checkpoints, shipped
from equipoise.lab.runs.folder import Run, RunError, open_run
from equipoise.lab.runs.load import open_weights, start_from
from equipoise.lab.runs.machine import this_machine
from equipoise.lab.runs.shipped import read_card, weights_file, weights_folder
from equipoise.lab.training.evaluate import parameter_count
from equipoise.models.generator.density import fit_density
from equipoise.weights import cifar10_classifier as script

NAMES = eq.list_weights()
MNIST = "mondeq/mnist-fc"
BESIDE = Path(__file__).parents[3] / "shared" / "data"  # a folder of data beside the repository
FOLDERS = [BESIDE] if BESIDE.is_dir() else []


def found(name):
    return any(row.name == name and row.found for row in available(FOLDERS))


# The files and cards of the package


def test_every_model_has_a_card_and_every_card_a_model():
    folder = weights_folder()
    files = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.safetensors")}
    assert {file.removesuffix(".density") for file in files} == set(NAMES) <= files
    assert {MNIST, script.NAME} <= files


def test_the_page_lists_them_all():
    page = Path(__file__).parents[2] / "docs" / "weights.md"
    assert weights_table() in page.read_text(), "docs/weights.md is out of date: python tests/test_docs.py --update"


def test_together_they_are_small():
    assert sum(file.stat().st_size for file in weights_folder().rglob("*.safetensors")) <= ALL


@pytest.mark.parametrize("name", NAMES)
def test_a_card_describes_its_file(name):
    card, file = read_card(name), weights_file(name)
    model, facts, _ = open_weights(open_run(name))
    assert (card.name, card.bytes, card.parameters) == (name, file.stat().st_size, parameter_count(model))
    assert card.bytes <= (GENERATOR if facts["tables"]["task"]["name"] in GENERATES else ONE)
    assert (card.stored == "float16") == facts.get("half", False)
    assert card.training.data == facts["tables"]["data"]["name"]
    assert card.test.command.split()[:3] == ["equipoise", "evaluate", name]
    assert card.test.metric in card.test.metrics.keys() == card.test.as_trained.keys()
    lost = card.test.as_trained[card.test.metric] - card.test.value  # of a metric of which more is better
    assert lost <= 5e-4 * max(1, card.test.value)
    assert card.terms.weights
    assert card.terms.data
    assert "/" not in facts["folder"]
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values() if tensor.is_floating_point())


@pytest.mark.parametrize("name", [name for name in NAMES if read_card(name).training.command.startswith("equipoise")])
def test_the_command_of_a_card_trains_the_recipe_of_its_file(name):
    words = read_card(name).training.command.split()
    assert words[:2] == ["equipoise", "train"]
    budget = words[words.index("--budget") + 1] if "--budget" in words else None
    changes = [word for word in words[3:] if "=" in word]
    facts = checkpoints.read(weights_file(name))[1]
    requested = open_recipe(words[2], budget, changes).recipe
    saved = open_run(name).recipe
    assert (requested.model, requested.task, requested.optimizer) == (saved.model, saved.task, saved.optimizer)
    assert [phase.epochs for phase in requested.phases] == [phase.epochs for phase in saved.phases]
    assert facts["recipe"] == words[2]


@pytest.mark.skipif(not found("mnist"), reason="needs MNIST")
def test_a_shipped_model_has_the_accuracy_of_its_card(capsys):
    card = read_card(MNIST)
    places = [word for folder in FOLDERS for word in ("--data", str(folder))]
    assert main(["evaluate", MNIST, "--threads", "1", *places]) == 0
    assert f"accuracy          {card.test.value:.2%}\n" in capsys.readouterr().out
    assert card.test.value > 0.975
    assert card.test.samples == 10_000


@pytest.mark.skipif(not found("cifar10"), reason="needs CIFAR-10")
def test_the_classifier_has_the_accuracy_of_its_card():
    data, card = load("cifar10", validation=0, folders=FOLDERS), read_card(script.NAME)
    assert len(data.test) == card.test.samples
    assert script.accuracy(eq.load(script.NAME), data.test) == pytest.approx(card.test.value, abs=5e-4)


# Opening one by name


def digit():
    """A seven in two strokes, 28x28 pixels."""
    picture = Image.new("L", (28, 28))
    ImageDraw.Draw(picture).line([(8, 8), (20, 8), (13, 23)], fill=255, width=2)
    return picture


def pixels(picture):
    return torch.tensor(numpy.array(picture)).view(1, 1, 28, 28) / 255


def test_a_name_a_folder_and_a_file_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, image = eq.load(MNIST), pixels(digit())
    assert model(image).argmax() == 7
    assert not model.training
    assert parameter_count(model) == 84_313
    Path("mondeq/mnist-fc").mkdir(parents=True)
    assert isinstance(eq.load(MNIST), type(model))  # the shipped one
    for folder in ("./mondeq/mnist-fc", Path("mondeq/mnist-fc")):
        with pytest.raises(RunError, match="mondeq/mnist-fc is not a run: it has no run.json"):
            eq.load(folder)
    copy = shutil.copy(weights_file(MNIST), tmp_path / "mine.safetensors")
    for name in (copy, str(copy)):
        assert torch.equal(eq.load(name)(image), model(image))


def test_a_typo_gets_a_suggestion():
    with pytest.raises(RunError, match="there is no folder mondeq/mnist-cf, nor a shipped model of that name; did you"):
        eq.load("mondeq/mnist-cf")
    with pytest.raises(
        RunError, match="there is no folder mnist-fc, .*; did you mean 'mondeq/mnist-fc'\\? `equipoise weig"
    ):
        eq.load("mnist-fc")
    with pytest.raises(LookupError, match="there is no shipped model 'mondeq/mnst-fc'; did you mean 'mondeq/mnist-fc'"):
        read_card("mondeq/mnst-fc")
    with pytest.raises(RunError, match="there is no folder runs/x. `equipoise runs` lists runs"):
        eq.load("runs/x")


def test_what_is_no_name_folder_or_file_of_weights(tmp_path):
    with pytest.raises(TypeError, match="path is None; it must be the name of a shipped model, a folder or a"):
        eq.load(None)
    (tmp_path / "weights.pt").touch()
    with pytest.raises(RunError, match=r"weights.pt is a file; a run is a folder, and weights"):
        eq.load(tmp_path / "weights.pt")


def test_there_are_no_last_weights():
    with pytest.raises(RunError, match="mondeq/mnist-fc has a single set of weights, and no last ones"):
        eq.load(MNIST, weights="last")


def test_training_starts_from_a_shipped_model():
    model = eq.models.MonDEQ(shape=(1, 28, 28), classes=10, kind="dense", channels=87)
    assert [name for name in start_from(model, MNIST) if not name.startswith("normalize")] == []
    assert torch.equal(model.head.weight, eq.load(MNIST).head.weight)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of shipped models of its own, with a copy of one."""
    (tmp_path / "weights" / "mondeq").mkdir(parents=True)
    for suffix in (".safetensors", ".toml"):
        shutil.copy(weights_file(MNIST).with_suffix(suffix), tmp_path / "weights" / "mondeq")
    monkeypatch.setattr(shipped, "weights_folder", lambda: tmp_path / "weights")
    monkeypatch.setattr(adding, "weights_folder", lambda: tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights"


def test_a_changed_file_is_refused(elsewhere):
    file = elsewhere / "mondeq" / "mnist-fc.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    for use in (eq.load, open_run):
        with pytest.raises(DamagedFile, match=r"fc.safetensors was changed: its SHA-256 is \w{16}\.\.\., that on"):
            use(MNIST)
    file.unlink()
    with pytest.raises(DamagedFile, match="the weights of mondeq/mnist-fc, are missing: install equipoise again"):
        eq.load(MNIST)


def test_a_damaged_card_is_reported(elsewhere):
    card = elsewhere / "mondeq" / "mnist-fc.toml"
    card.write_text(card.read_text().replace("parameters = ", "parameter = "))
    with pytest.raises(DamagedFile, match=r"the card of mondeq/mnist-fc is damaged: .*line 5: there is no key 'parame"):
        eq.load(MNIST)


# Commands


def test_commands_take_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    digit().save("seven.png")
    assert main(["predict", MNIST, "seven.png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "7"
    assert main(["attack", MNIST, "seven.png", "--attack", "pgd", "--steps", "2", "-o", "panel.png"]) == 0
    assert "panel.png" in capsys.readouterr().out
    for words, said in (
        (["sample", MNIST], "mondeq/mnist-fc holds a MonDEQ, which does not generate images"),
        (["segment", MNIST, "seven.png"], "mondeq/mnist-fc was trained for the task 'classification'"),
        (["report", str(weights_file(MNIST))], "is weights without the folder of a run, and a report is about"),
        (["predict", MNIST, "seven.png", "--weights", "last"], "has a single set of weights"),
        (["resume", str(weights_file(MNIST))], "is weights without the folder of a run, so its training cannot be"),
        (["predict", "mondeq/mnist", "seven.png"], "did you mean 'mondeq/mnist-fc'?"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["panel.png", "seven.png"]


def test_the_list_and_a_card_are_printed(capsys):
    assert main(["weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "model", "data", "parameters", "size", "test"]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert main(["weights", MNIST]) == 0
    assert f'sha256 = "{read_card(MNIST).sha256}"' in capsys.readouterr().out
    assert main(["weights", "mondeq/mnist"]) == 2
    assert "did you mean 'mondeq/mnist-fc'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--add", "runs/x"], "--add RUN and --as NAME go together"),
        (["--as", "core/digits"], "--add RUN and --as NAME go together"),
        (["core/x", "--add", "runs/x", "--as", "core/digits"], "leave NAME out"),
        (["--add", "runs/x", "--as", "core/digits"], "there is no folder runs/x"),
    ],
)
def test_mistakes_in_the_command_get_a_sentence(capsys, words, said):
    assert main(["weights", *words]) == 2
    assert said in capsys.readouterr().err


# Adding one


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    changes = ["optimizer.lr=0.002", "schedule={name='cosine'}"]
    words = ["core/digits", "--budget", "smoke", "--runs", str(folder), "--threads", "1", "phases.0.epochs=2"]
    assert main(["train", *words, *changes]) == 0
    return folder / "core-digits-001"


def test_a_run_is_added_with_a_card(run, elsewhere, capsys):
    assert main(["weights", "--add", str(run), "--as", "core/digits", "--limit", "20", "--note", 'A "note".']) == 0
    printed = capsys.readouterr().out
    assert "accuracy in float32" in printed
    assert "accuracy in float16" in printed
    assert f"{elsewhere / 'core' / 'digits.safetensors'}, digits.toml" in printed
    assert eq.list_weights() == ["core/digits", MNIST]
    card, file = read_card("core/digits"), elsewhere / "core" / "digits.safetensors"
    assert card.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert card.training.command == (
        "equipoise train core/digits --budget smoke optimizer.lr=0.002 'schedule={name = \"cosine\"}' phases.0.epochs=2"
    )
    result = json.loads((run / "result.json").read_text())
    assert (card.training.epochs, card.training.epoch) == (2, result["best"]["epoch"])
    assert card.test.command == "equipoise evaluate core/digits --limit 20"
    assert card.test.samples == 20
    assert card.note == 'A "note".'
    assert str(run) not in file.with_suffix(".toml").read_text()
    assert str(run.parent).encode() not in file.read_bytes()
    first, again = eq.load(run), eq.load("core/digits")
    images = torch.rand(4, 1, 8, 8)
    assert torch.allclose(first(images), again(images), atol=0.05)
    with safe_open(file, "pt") as stored:
        kinds = {stored.get_tensor(name).dtype for name in stored.keys()}  # noqa: SIM118 (not a dict)
    assert (torch.float16 in kinds) == (card.stored == "float16")
    assert main(["evaluate", "core/digits", "--limit", "20"]) == 0
    assert f"{card.test.value:.2%}" in capsys.readouterr().out


def test_a_run_that_is_added_enters_the_page_of_a_clone(run, tmp_path, monkeypatch, capsys):
    folder, page = tmp_path / "src" / "equipoise" / "weights", tmp_path / "docs" / "weights.md"
    for module in (shipped, adding):
        monkeypatch.setattr(module, "weights_folder", lambda: folder)
    assert update_page() is None
    page.parent.mkdir()
    page.write_text("Trained models\n\n<!-- output of: python docs/weights_table.py -->\nold\n<!-- end of output -->\n")
    assert main(["weights", "--add", str(run), "--as", "core/digits", "--limit", "20"]) == 0
    assert f"table             {page}" in capsys.readouterr().out
    name, *_, terms = page.read_text().splitlines()[5].strip("| ").split(" | ")
    assert (name, terms) == ("`core/digits`", read_card("core/digits").terms.data)
    assert "old" not in page.read_text()


def test_parameters_stay_in_float32_if_float16_costs_more_than_it_may(run, elsewhere, monkeypatch):
    monkeypatch.setattr(checkpoints, "halved", lambda model: {n: t * 0 for n, t in tensors_of(model).items()})
    tensors_of = checkpoints.model_tensors
    with this_machine("cpu") as machine:
        added = add_weights(open_run(run), "core/digits", machine)
    assert added.card.stored == "float32"
    assert added.metrics["float16"]["accuracy"] < added.metrics["float32"]["accuracy"]
    assert torch.equal(eq.load("core/digits").head[2].weight, eq.load(run).head[2].weight)


@pytest.mark.parametrize("limit", ["ONE", "ALL"])
def test_what_is_too_large_writes_nothing(run, elsewhere, monkeypatch, limit):
    monkeypatch.setattr(adding, limit, 10_000)
    with this_machine("cpu") as machine, pytest.raises(RunError, match="bytes"):
        add_weights(open_run(run), "core/digits", machine, limit=10)
    assert [path.name for path in elsewhere.rglob("*.*")] in (
        ["mnist-fc.safetensors", "mnist-fc.toml"],
        ["mnist-fc.toml", "mnist-fc.safetensors"],
    )


@pytest.mark.parametrize("limit", [0, -3])
def test_no_samples_are_nothing_to_measure_on(run, elsewhere, limit):
    with (
        this_machine("cpu") as machine,
        pytest.raises(ValueError, match=f"--limit is {limit}; it must be"),
    ):
        add_weights(open_run(run), "core/digits", machine, limit=limit)


def test_a_failure_leaves_neither_file(run, elsewhere, monkeypatch):
    def fail(*_):
        raise WriteError("the disk is full.")

    monkeypatch.setattr(adding, "card_text", fail)
    with this_machine("cpu") as machine, pytest.raises(WriteError):
        add_weights(open_run(run), "core/digits", machine, limit=10)
    assert not list(elsewhere.glob("core/*"))
    assert not list(elsewhere.glob("core/.*"))


def test_a_shipped_generator_draws_without_its_training_data(elsewhere, monkeypatch, capsys):
    Path("digits.toml").write_text(RECIPE)
    assert main(["train", "digits.toml", "--threads", "1"]) == 0
    monkeypatch.setattr(adding, "require_shippable", lambda *_: None)  # the recipe is not one of the package
    monkeypatch.setattr(adding, "training_command", lambda _: "equipoise train digits.toml")
    monkeypatch.setattr(adding, "LATENTS", 40)
    monkeypatch.setattr("equipoise.lab.results.sample.fit_density", partial(fit_density, epochs=1))
    assert main(["weights", "--add", "runs/digits-001", "--as", "jiio/digits", "--limit", "5"]) == 0
    assert "psnr in float16" in capsys.readouterr().out
    monkeypatch.setattr("equipoise.lab.results.sample.data_of", lambda *_: pytest.fail("the training data was read"))
    assert main(["sample", "jiio/digits", "-n", "4", "-o", "digits.png"]) == 0
    assert "density           " in capsys.readouterr().out
    assert Path("digits.png").is_file()
    assert not Path("jiio-digits").exists()


def changed(run, folder, **tables):
    """A copy of a run whose recipe has other sections."""
    shutil.copytree(run, folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["tables"] |= tables
    (folder / "run.json").write_text(json.dumps(facts))
    return Run(folder)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("celeba", "weights trained on celeba are not shipped: its agreement forbids redistribution of the images"),
        ("imagenet", "each user accepts its terms by registration"),
        ("unlabelled-images", "the terms of your images are not known to the package"),
    ],
)
def test_the_terms_of_the_data_decide(run, tmp_path, data, said):
    with this_machine("cpu") as machine, pytest.raises(RunError, match=said):
        add_weights(changed(run, tmp_path / "run", data={"name": data}), "core/digits", machine)


def test_only_finished_runs_of_the_packages_recipes_are_added(run, tmp_path):
    with this_machine("cpu") as machine:
        for name in ("digits", "Core/digits", "core/digits/one", "../digits", "core/a b"):
            with pytest.raises(ValueError, match="it must be of the form mondeq/mnist-fc"):
                add_weights(open_run(run), name, machine)
        with pytest.raises(RunError, match="mondeq/mnist-fc is not a finished run"):
            add_weights(open_run(MNIST), "core/digits", machine)
        shutil.copytree(run, tmp_path / "unfinished")
        (tmp_path / "unfinished" / "result.json").unlink()
        with pytest.raises(RunError, match="is not a finished run: finish it with `equipoise resume`"):
            add_weights(Run(tmp_path / "unfinished"), "core/digits", machine)
        other = changed(run, tmp_path / "other")
        facts = json.loads((other.folder / "run.json").read_text())
        (other.folder / "run.json").write_text(json.dumps({**facts, "recipe": "mine"}))
        with pytest.raises(RunError, match="was trained from 'mine', which is not a recipe of the package"):
            add_weights(other, "core/digits", machine)


def test_the_shortest_command_is_found():
    small = open_recipe("mondeq/mnist-fc", "small", ["seed=3"])
    assert training_command(small) == "equipoise train mondeq/mnist-fc --budget small seed=3"
    small.tables["budget"]["small"]["data.limit"] = 100  # edited since
    assert training_command(small) == "equipoise train mondeq/mnist-fc --budget small seed=3"
    plain = open_recipe("mondeq/mnist-fc", None, ["training.init_from=/home/someone/run"])
    assert training_command(plain) == "equipoise train mondeq/mnist-fc 'training.init_from=\"RUN\"'"
    before, after = {"a": {"name": "x", "k": 1}, "b": [{"n": 1}]}, {"a": {"name": "x", "k": 2}, "b": [{"n": 2}], "c": 1}
    assert list(differences(before, after)) == ["a.k=2", "b.0.n=2", "c=1"]


def test_the_classifiers_script_writes_weights_and_card(tmp_path, monkeypatch, capsys):
    """On a few random images of two classes, which differ in brightness."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 2
    images = torch.randint(100, (128, 3, 32, 32), generator=random, dtype=torch.uint8) + 150 * labels.byte().view(
        -1, 1, 1, 1
    )
    split = TensorSplit(images, labels)
    data = DataSet("two", split, split, (3, 32, 32), class_names=("dark", "light"), mean=(0.5,) * 3, std=(0.3,) * 3)
    monkeypatch.setattr(script, "load", lambda *_, **__: data)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of all tests
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path), "--epochs", "4"])
    script.main()
    loss = float(capsys.readouterr().out.split("epoch 4 of 4: loss ")[1].split()[0])
    assert loss < math.log(2) / 2
    monkeypatch.setattr(shipped, "weights_folder", lambda: tmp_path)
    card = read_card(script.NAME)
    assert (card.training.epochs, card.test.samples) == (4, 128)
    assert script.accuracy(eq.load(script.NAME), split) == card.test.value

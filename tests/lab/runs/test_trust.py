"""A file that was loaded runs no code: what it names is the package's own, or trusted by the caller."""

import importlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.cli import main, parser
from equipoise.lab.recipes.reading import RecipeError
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import open_run
from equipoise.lab.trust import ANYTHING, NOTHING, Trust, UntrustedName
from equipoise.registry import Registry, UnknownName, WrongKind, looking_up
from lab_helpers import latest, run, train, write_recipe

EVIL = "from pathlib import Path\nPath('exploded').touch()\ndef go(*args, **options): ...\nclass Net: ...\n"
HELPFUL = """
import os
import subprocess
from os import system
from pathlib import Path
from subprocess import run

from torch import nn
from equipoise.lab.data import DataSet, TensorSplit
from equipoise.models.conv_equilibrium import ConvEquilibrium


class Net(ConvEquilibrium): ...


class Plain:
    def __init__(self, **options): Path("exploded").touch()


def unsaid(limit=None): Path("exploded").touch()


def other() -> int: Path("exploded").touch()


sneaky = lambda **options: Path("exploded").touch()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small run of the package's own recipe."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["data.limit=48", "phases.0.epochs=1", "training.checkpoint_every=1", "--runs", str(folder)]
    assert main(["train", "core/digits", "--budget", "smoke", *words]) == 0
    return folder / "core-digits-001"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current folder with an evil module and a helpful one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "evil_module.py").write_text(EVIL)
    (tmp_path / "helpful.py").write_text(HELPFUL)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("evil_module", "helpful", "beside"):
        sys.modules.pop(name, None)


@pytest.fixture
def copy(trained, place) -> Path:
    """A run's folder to be damaged, as if training had not ended."""
    shutil.copytree(trained, place / "run")
    (place / "run" / "result.json").unlink()
    return place / "run"


def edit(folder: Path, *path: str | int, to: object) -> None:
    """Change an entry of the recipe in run.json and in every checkpoint."""

    def changed(tables):
        here = tables
        for part in path[:-1]:
            here = here[part] if isinstance(part, int) else here.setdefault(part, {})
        here[path[-1]] = to
        return tables

    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "tables": changed(facts["tables"])}))
    for file in (folder / "checkpoints").glob("*.safetensors"):
        tensors, facts = checkpoints.read(file)
        checkpoints.save(file, tensors, {**facts, "tables": changed(facts["tables"])})


def said(capsys, *words: object) -> str:
    """The one sentence of a command that is refused."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


# What a file may name


@pytest.mark.parametrize(
    "name", ["os:system", "evil_module:go", "evil_module:Net", "equipoise.cli:main", ":", "../x:y"]
)
def test_a_checkpoint_names_no_code(copy, name):
    edit(copy, "model", to={"name": name, "command": "touch exploded"})
    for path in (copy, copy / "checkpoints" / "last.safetensors"):
        with pytest.raises(UntrustedName) as error:
            eq.load(path)
        assert f"model {name!r}" in str(error.value)
        assert "Nothing was imported" in str(error.value)
        assert str(copy) in str(error.value)
    assert not Path("exploded").exists()
    assert "evil_module" not in sys.modules


PLACES = {
    "model": ("model",),
    "solver": ("solver",),
    "gradient": ("gradient",),
    "solver of the gradient": ("gradient", "solver"),
    "task": ("task",),
    "data": ("data",),
    "optimizer": ("optimizer",),
    "schedule": ("schedule",),
    "model of a phase": ("phases", 0, "model"),
    "solver of a phase": ("phases", 0, "gradient", "solver"),
}
USED = {"solver", "gradient", "model", "task"}  # by predict; data too by evaluate and report; the others by resume


@pytest.mark.parametrize("path", PLACES.values(), ids=PLACES)
def test_no_command_runs_what_a_run_names(copy, capsys, path):
    if "gradient" in path and path[-1] == "solver":
        edit(copy, *path[:-1], to={"name": "implicit"})
    edit(copy, *path, to={"name": "evil_module:go"})
    (copy / "image.png").write_bytes(b"")
    commands = [("resume", copy)]
    if path[-1] not in ("optimizer", "schedule"):
        commands += [("evaluate", copy), ("report", copy), ("figure", "core/convergence", "--run", copy)]
    if path[-1] in USED:
        commands += [("predict", copy, copy / "image.png"), ("segment", copy, copy / "image.png")]
        commands += [("attack", copy, copy / "image.png")]
    for words in commands:
        text = said(capsys, *words)
        assert "'evil_module:go'. Nothing was imported" in text
        assert text.endswith(f"run: {shlex.join(['equipoise', *map(str, words), '--trust', 'evil_module'])}\n")
    assert not Path("exploded").exists()
    assert "evil_module" not in sys.modules


def test_an_option_of_a_task_names_no_code(copy, capsys):
    """It is looked up by the task itself."""
    edit(copy, "task", to={"name": "robustness", "attack": "evil_module:go"})
    text = said(capsys, "evaluate", copy)
    assert f"{copy / 'run.json'} names code from outside the package: attack 'evil_module:go'" in text
    assert not Path("exploded").exists()


def test_sweeps_tables_and_figures_name_no_code(copy, place, capsys):
    facts = json.loads((copy / "run.json").read_text())
    facts["tables"]["model"]["name"] = "evil_module:Net"
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "evil.toml").write_text(
        'title = "x"\n[data]\nname = "digits"\n[model]\nname = "evil_module:Net"\n[[phases]]\nepochs = 1\n'
    )
    (place / "elsewhere" / "table.toml").write_text('title = "x"\n[[rows]]\nrecipe = "evil.toml"\nlabel = "row"\n')
    drawn = 'title = "x"\nfigure = "evil_module:go"\nrecipes = ["core/digits"]\n'
    (place / "elsewhere" / "drawn.toml").write_text(drawn)
    asked = {"budget": None, "changes": [], "data": []}
    for file, content in {
        "sweep.json": facts,
        "reproduce.json": {**asked, "name": "../elsewhere/table.toml"},
        "figure.json": {**asked, "name": str(place / "elsewhere" / "drawn.toml")},
    }.items():
        folder = place / file.partition(".")[0]
        folder.mkdir()
        (folder / file).write_text(json.dumps(content))
        os.chdir(folder)
        text = said(capsys, "resume", folder)
        assert "'evil_module:" in text
        assert text.endswith(f"run: equipoise resume {folder} --trust evil_module\n")
    changed = {**asked, "name": "core/table", "changes": ["model.name=evil_module:Net"]}
    (place / "reproduce" / "reproduce.json").write_text(json.dumps(changed))
    assert "'evil_module:Net'" in said(capsys, "resume", place / "reproduce")
    assert not list(place.rglob("exploded"))


# What the caller trusts


def test_a_trusted_model_is_loaded(copy, place, capsys):
    edit(copy, "model", "name", to="helpful:Net")
    assert type(eq.load(copy, trust="helpful")).__name__ == "Net"
    assert type(eq.load(copy / "checkpoints" / "best.safetensors", trust=["json", "helpful"])).__name__ == "Net"
    again = said(capsys, "evaluate", copy).partition(" run: equipoise ")[2]
    assert main(shlex.split(again)) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        ("model", "helpful:system", "it must be a class derived from torch.nn.modules.module.Module"),
        ("model", "helpful:Plain", "it must be a class derived from torch.nn.modules.module.Module"),
        ("model", "helpful:os", "it must be a class derived from torch.nn.modules.module.Module"),
        ("model", "helpful:os.system", "module helpful: there is no attribute 'os.system'"),
        ("model", "helpful:__class__.__base__", "module helpful: there is no attribute"),
        ("task", "helpful:Net", "it must be a class derived from equipoise.tasks.base.Task"),
        ("optimizer", "helpful:Plain", "it must be a class derived from torch.optim.optimizer.Optimizer"),
        ("schedule", "helpful:unsaid", "does not declare that it returns a LRScheduler"),
        ("schedule", "helpful:Plain", "it must be a function from a trusted module"),
        ("data", "helpful:system", "it must be a function from a trusted module"),
        ("data", "helpful:run", "it must be a function from a trusted module"),
        ("data", "helpful:sneaky", "does not declare that it returns a DataSet"),
        (
            "data",
            "helpful:unsaid",
            "does not declare that it returns a DataSet, as a function named in a file must",
        ),
        ("data", "helpful:other", "does not declare that it returns a DataSet"),
        ("data", "helpful:Plain", "it must be a function from a trusted module"),
    ],
)
def test_a_trusted_module_gives_only_what_is_of_the_right_kind(copy, capsys, section, name, words):
    edit(copy, section, to={"name": name})
    assert words in said(capsys, "resume", copy, "--trust", "helpful")
    assert not Path("exploded").exists()


def test_every_kind_that_a_recipe_names_resumes_when_trusted(tmp_path):
    stopped = train(tmp_path, "optimizer.name=torch.optim:Adadelta", TEST_SIGNALS="loss 2 SIGTERM", expect=143)
    text = run(tmp_path, "resume", stopped.folder, "--trust", "lab_helpers", expect=2)
    assert "optimizer 'torch.optim:Adadelta'" in text
    assert "resumed at step 2" in run(tmp_path, *shlex.split(text.partition("run: equipoise ")[2]))


def test_trust_is_exact(place):
    (place / "pack").mkdir()
    (place / "pack" / "__init__.py").write_text("")
    (place / "pack" / "nets.py").write_text("from torch import nn\nclass Net(nn.Identity): ...")
    models = Registry("model", {}, torch.nn.Module)
    for word in ("pack", "pack.net", "nets", "pack.nets.Net"):
        with looking_up(Trust(frozenset({word}), (".",)).find), pytest.raises(UntrustedName):
            models["pack.nets:Net"]
    with looking_up(Trust(frozenset({"pack.nets"}), (".",)).find):
        assert models["pack.nets:Net"].__name__ == "Net"


@pytest.mark.parametrize("word", ["helpful:Net", "../helpful", "", "a b", 3, None])
def test_what_is_trusted_is_a_module(copy, word):
    with pytest.raises(ValueError, match="it must be a module name, such as 'my_module' or 'pkg.nets'"):
        eq.load(copy, trust=[word])


def test_what_a_user_types_is_the_users_own_word(copy, place):
    """A task on the command line, a name in Python: no --trust is needed."""
    (place / "beside.py").write_text("from equipoise.tasks.classification import Classification as Mine\n")
    assert main(["evaluate", str(copy), "--task", "beside:Mine"]) == 0
    assert eq.create_model("helpful:Net", shape=(1, 8, 8), classes=3).__module__ == "helpful"


def test_names_that_are_no_strings(copy):
    for name in (5, None, ["os:system"], {"name": "os"}):
        edit(copy, "model", "name", to=name)
        with pytest.raises(RecipeError, match=r"model\.name is .*; it must be a string"):
            eq.load(copy)


# Where trusted modules come from


def test_the_folder_that_a_file_names_is_not_looked_in_unless_a_trusted_module_is_there(copy, place):
    """Else a package that is not installed, and that something imports if it is there, could be put there."""
    (place / "attack").mkdir()
    (place / "attack" / "not_installed.py").write_text(EVIL)
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**facts, "folder": str(place / "attack")}))
    for file in (copy / "checkpoints").glob("*.safetensors"):
        tensors, facts = checkpoints.read(file)
        checkpoints.save(file, tensors, {**facts, "folder": str(place / "attack")})
    before = list(sys.path)
    eq.load(copy)
    assert sys.path == before
    edit(copy, "model", "name", to="helpful:Net")
    eq.load(copy, trust="helpful")
    assert str(place / "attack") not in sys.path


def test_a_file_does_not_choose_between_two_modules_of_one_name(copy, place):
    (place / "attack").mkdir()
    (place / "attack" / "helpful.py").write_text(EVIL)
    edit(copy, "model", "name", to="helpful:Net")
    for file in (copy / "checkpoints").glob("*.safetensors"):
        tensors, facts = checkpoints.read(file)
        checkpoints.save(file, tensors, {**facts, "folder": str(place / "attack")})
    with pytest.raises(RecipeError, match=r"there are two modules 'helpful', .*attack/helpful\.py and .*/helpful\.py"):
        eq.load(copy, trust="helpful")
    assert not Path("exploded").exists()


def test_the_refusal_says_where_the_module_is(copy, place):
    edit(copy, "model", "name", to="helpful:Net")
    with pytest.raises(UntrustedName) as error:
        eq.load(copy)
    assert f"If you trust helpful ({place / 'helpful.py'}), which may do anything" in str(error.value)
    assert str(error.value).endswith("pass trust='helpful'.")
    edit(copy, "model", "name", to="nowhere_at_all:Net")
    with pytest.raises(UntrustedName, match=r"nowhere_at_all \(not found here\)"):
        eq.load(copy)


def test_a_lock_that_is_a_link_empties_nothing(copy, place):
    (place / "precious").write_text("keep")
    (copy / ".lock").unlink(missing_ok=True)
    (copy / ".lock").symlink_to(place / "precious")
    with open_run(copy).alone():
        pass
    assert (place / "precious").read_text() == "keep"


def test_a_figures_folder_does_not_say_where_the_picture_goes(copy, place, capsys):
    (place / "figure").mkdir()
    asked = {"budget": "smoke", "changes": ["data.limit=48"], "data": [], "name": "core/convergence"}
    target = place / "precious.png"
    target.write_text("keep")
    (place / "figure" / "figure.json").write_text(json.dumps({**asked, "out": str(target)}))
    shutil.copytree(copy, place / "figure" / "recipe-1" / "core-digits-001")
    main(["resume", str(place / "figure")])
    assert target.read_text() == "keep"


# Telling


def test_training_says_which_code_from_outside_it_runs(tmp_path):
    text = run(tmp_path, "train", write_recipe(tmp_path), "phases.0.epochs=1")
    (line,) = [line for line in text.splitlines() if line.startswith("code from outside the package: ")]
    assert line.endswith("lab_helpers.py)")
    assert "code from outside" not in run(tmp_path, "train", "core/digits", "--budget", "smoke", "data.limit=48")


def test_the_help_says_that_a_recipe_is_code(capsys):
    for command, words in {
        "train": "can import modules and run any code",
        "reproduce": "can import modules and run any code",
        "figure": "can import modules and run any code",
        **dict.fromkeys(("resume", "evaluate", "predict", "segment", "attack", "report"), "--trust MODULE"),
    }.items():
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
        assert words in " ".join(capsys.readouterr().out.split())


def test_the_commands_of_a_report_trust_what_they_must(tmp_path):
    trained = train(tmp_path, "phases.0.epochs=1")
    run(tmp_path, "report", trained.folder, "--trust", "lab_helpers")
    page = (latest(tmp_path).folder / "report.html").read_text()
    assert f"equipoise evaluate {trained.folder} --trust lab_helpers" in page
    assert "trust=&#39;lab_helpers&#39;)" in page


def test_outside_of_any_file_everything_is_the_users_own_word():
    assert ANYTHING.allows("os")
    assert not NOTHING.allows("os")
    parts = Registry("part", {}, functions=True)
    assert parts["shlex:join"] is shlex.join
    with looking_up(NOTHING.find), pytest.raises(UntrustedName):
        parts["shlex:join"]
    with looking_up(Trust.of("shlex").find):
        assert parts["shlex:join"] is shlex.join
        assert issubclass(WrongKind, UnknownName)
        with pytest.raises(WrongKind, match="it must be a function"):
            parts["shlex:os"]

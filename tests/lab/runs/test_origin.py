"""Where a result comes from: the commit, and digests of the code that it depends on."""

import ast
import io
import subprocess
import tokenize
from pathlib import Path

import pytest

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.files import read_json, write_json
from equipoise.lab.recipes import build as sources
from equipoise.lab.recipes.build import PACKAGE, ROOMS, code_of, source_digests
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.results.stored import changed_files
from equipoise.lab.runs.folder import CHANGED, commit, open_run, still
from equipoise.lab.runs.machine import processor


def by_tokens(text):
    """The characters of a program without spaces, comments and docstrings, found by Python itself."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            end = node.body[0].end_lineno
            assert end is not None
            lines[node.body[0].lineno - 1 : end] = [""] * (end - node.body[0].lineno + 1)
    found = tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline)
    left_out = (tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    return "".join("".join(t.string.split()) for t in found if t.type not in left_out)


def test_exactly_comments_and_docstrings_do_not_count():
    paths = [path for room in ROOMS for path in (*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py"))]
    assert len(paths) > 60
    for path in paths:
        text = path.read_text()
        assert "".join(code_of(text).split()) == by_tokens(text), path


def test_an_indent_counts_and_an_empty_line_does_not():
    inside, outside = "for x in y:\n    f(x)\n    g(x)\n", "for x in y:\n    f(x)\ng(x)\n"
    assert code_of(inside) != code_of(outside)
    assert code_of(inside) == code_of('"""A loop."""\n\n' + inside.replace("g(x)", "g(x)  # and g"))


def test_digests_follow_what_a_recipe_names():
    monotone, plain = (source_digests(open_recipe(name).tables) for name in ("mondeq/mnist-fc", "core/mnist"))
    for path in ("models/mondeq/model.py", "operators/splitting.py", "solvers/loop.py", "tasks/classification.py"):
        assert path in monotone
    assert "models/conv_equilibrium.py" in plain
    assert not any(path.startswith(("operators/", "models/mondeq", "lab/", "papers/")) for path in plain)
    assert "tasks/drawing.py" not in plain
    robust = source_digests(open_recipe("jiio/mnist-jiio").tables)
    assert {"tasks/robustness.py", "joint/base.py"} <= robust.keys()


def test_a_change_of_code_changes_its_digest_and_no_other(tmp_path, monkeypatch):
    tables = open_recipe("core/mnist").tables
    before = source_digests(tables)
    for path in before:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((PACKAGE / path).read_text())
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    monkeypatch.setattr(sources, "examined", sources.examined.__wrapped__)
    assert source_digests(tables) == before
    model = tmp_path / "models" / "conv_equilibrium.py"
    model.write_text(model.read_text().replace('"""', '"""New words. ', 1) + "\n# the end\n")
    assert source_digests(tables) == before
    model.write_text(model.read_text() + "x = 1\n")
    assert changed_files(before, source_digests(tables)) == ["models/conv_equilibrium.py"]
    assert still(before, source_digests(tables))["models/conv_equilibrium.py"] == CHANGED
    (tmp_path / "solvers" / "ledger.py").unlink()
    assert changed_files(before, source_digests(tables)) == ["models/conv_equilibrium.py", "solvers/ledger.py"]


def test_names_of_the_user_and_damaged_tables_have_no_digest():
    assert source_digests({"model": {"name": "my_module:Net"}, "task": 3, "phases": [7], "solver": {"name": []}}) == {}


def test_a_phase_that_names_another_task_counts():
    tables = {"task": {"name": "classification"}, "phases": [{"task": {"name": "few-shot"}}]}
    assert {"tasks/classification.py", "tasks/few_shot.py"} <= source_digests(tables).keys()


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_package(tmp_path):
    try:
        git(tmp_path, "init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not installed")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert commit(package) is None  # installed inside somebody else's repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit.cache_clear()
    assert commit(package) == git(tmp_path, "rev-parse", "HEAD")
    (package / "__init__.py").write_text("x = 1\n")
    commit.cache_clear()
    assert commit(package) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None


def test_the_processor_has_a_name():
    assert processor().strip()
    assert "\n" not in processor()


def test_runs_and_results_say_where_they_come_from(tmp_path):
    words = ["train", "core/digits", "--budget", "smoke", "--runs", str(tmp_path), "--threads", "1"]
    assert main(words) == 0
    run = open_run(tmp_path / "core-digits-001")
    origin = (run.result or {})["origin"]
    facts = read_json(run.folder / "run.json")
    assert origin["recipe"] == "core/digits"
    assert origin["versions"] == facts["versions"]
    assert origin["versions"]["equipoise"] == eq.__version__
    assert origin["versions"]["commit"] == commit()
    assert origin["sources"] == facts["sources"] == source_digests(facts["tables"])
    assert origin["machine"]["threads"] == 1
    assert origin["machine"]["processor"] == processor()
    assert origin["tables"]["phases"] == facts["tables"]["phases"]
    assert "budget" not in origin["tables"]
    assert str(tmp_path) not in (run.folder / "result.json").read_text().replace(origin["command"], "")
    facts["sources"]["solvers/loop.py"] = "0"  # as if the code had changed between start and end
    write_json(run.folder / "run.json", facts, exact=True)
    assert (run.provenance() or {})["sources"]["solvers/loop.py"] == CHANGED
    del facts["sources"]
    write_json(run.folder / "run.json", facts, exact=True)
    assert run.provenance() is None

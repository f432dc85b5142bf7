"""`equipoise results --add` stores exactly what a result needs, and nothing of the machine it was made on."""

import json
import shutil
from unittest import mock

import pytest

from equipoise.cli import main
from equipoise.lab.files import DamagedFile, read_json
from equipoise.lab.recipes.build import source_digests
from equipoise.lab.results.add_result import add_result, portable, portable_command
from equipoise.lab.results.stored import read_stored
from equipoise.lab.runs.folder import RunError, commit

TABLE = """
title = "Digits twice"

[[rows]]
label = "two seeds"
recipe = "core/digits"
changes = {seeds = 2, "optimizer.lr" = 0.002}

[[rows]]
label = "the loss of the same runs"
recipe = "core/digits"
metric = "loss"
changes = {seeds = 2, "optimizer.lr" = 0.002}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ["train", "core/digits", "--budget", "smoke", "--threads", "1", "--runs", str(folder)]
    with mock.patch("sys.argv", ["equipoise", *words]):  # which a run records
        assert main(words) == 0
    return folder / "core-digits-001"


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    (folder / "pair.toml").write_text(TABLE)
    words = ["reproduce", str(folder / "pair.toml"), "--budget", "smoke", "--threads", "1", "--runs", str(folder)]
    assert main([*words, "phases.0.epochs=2"]) == 0
    return folder / "pair-001"


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_run_is_stored_with_its_log_and_pictures(trained, results, tmp_path, capsys):
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    (run / "core-convergence.png").write_bytes(b"a picture")
    (run / "core-convergence.json").write_text('{"runs": []}')
    page = tmp_path / "docs" / "results.md"
    words = ["results", "--add", str(run), "--as", "core/digits", "--folder", str(results), "--out", str(page)]
    assert main(words) == 0
    names = ["core/digits-convergence.json", "core/digits-convergence.png", "core/digits.log.jsonl"]
    assert files_in(results) == [*names, "core/digits.result.json"]
    assert f"stored            {results / 'core' / 'digits.result.json'}\n" in capsys.readouterr().out
    for file in results.rglob("*.json*"):
        assert str(trained.parent.parent) not in file.read_text()
    stored = read_stored(results).runs["core/digits"]
    assert stored.command == "equipoise train core/digits --budget smoke"
    assert stored.origin is not None
    assert stored.origin["versions"]["commit"] == commit()
    assert stored.origin["sources"] == source_digests(stored.origin["tables"])
    assert stored.moved(stored.recipe_today) == []
    assert (results / "core/digits.log.jsonl").read_bytes() == (trained / "log.jsonl").read_bytes()
    text = page.read_text()
    assert "[digits.result.json](../results/core/digits.result.json), [log](../results/core/digits.log.jsonl)" in text
    assert "| current | `equipoise train core/digits --budget smoke` |" in text


def test_a_table_is_stored_with_mean_spread_and_logs(reproduced, results):
    table = read_json(reproduced / "table.json")
    assert table["name"] == "pair"
    assert [row["epochs"] for row in table["rows"]] == [2, 2]
    assert list(table["origins"]) == ["row-1"]
    add_result(reproduced, "core/pair", results)
    logs = [f"core/pair.row-1.seed-{seed}.log.jsonl" for seed in (0, 1)]
    assert files_in(results) == [*logs, "core/pair.table.json", "core/pair.table.png"]
    assert str(reproduced.parent) not in (results / "core/pair.table.json").read_text()
    ((_, row), _) = read_stored(results).tables[0].rows.items()
    assert row.logs == tuple(logs)
    assert row.numbers["accuracy"].seeds == 2
    values = [read_json(reproduced / f"row-1/core-digits-001/seed-{seed}/result.json")["test"] for seed in (0, 1)]
    assert row.numbers["accuracy"].mean == pytest.approx(sum(value["accuracy"] for value in values) / 2)
    assert row.origin is not None
    assert row.moved(row.origin["tables"]) == []


ROWS = """
title = "Digits, three rows"

[[rows]]
label = "wide"
recipe = "core/digits"

[[rows]]
label = "narrow, fast"
recipe = "core/digits"
changes = {"model.channels" = 4}

[[rows]]
label = "loss of the wide one"
recipe = "core/digits"
metric = "loss"
"""


def test_rows_that_were_trained_apart_become_one_table(results, tmp_path, capsys):
    (tmp_path / "three.toml").write_text(ROWS)
    words = ["reproduce", str(tmp_path / "three.toml"), "--budget", "smoke", "--threads", "1", "phases.0.epochs=2"]
    words += ["data.limit=64", "--runs", str(tmp_path)]
    assert main([*words, "--row", "narrow, fast"]) == 0
    assert main([*words, "--row", "loss of the wide one"]) == 0
    assert "| narrow, fast |" not in capsys.readouterr().out.split("== wide")[1]
    narrow, wide = tmp_path / "three-001", tmp_path / "three-002"
    assert [path.name for path in sorted(narrow.glob("row-*"))] == ["row-2"]  # numbered as in the whole table
    assert [path.name for path in sorted(wide.glob("row-*"))] == ["row-1"]
    assert [row["label"] for row in read_json(wide / "table.json")["rows"]] == ["wide", "loss of the wide one"]
    shutil.rmtree(narrow / "row-2" / "core-digits-001")
    assert main(["resume", str(narrow)]) == 0
    assert [path.name for path in sorted(narrow.glob("row-*"))] == ["row-2"]  # the request is remembered

    stored = results / "core/three.table.json"
    add_result(narrow, "core/three", results)
    alone = (results / "core/three.table.png").read_bytes()
    written = add_result(wide, "core/three", results)
    assert sorted(path.name for path in written) == ["three.row-1.log.jsonl", "three.table.json", "three.table.png"]
    assert (results / "core/three.table.png").read_bytes() != alone  # the picture has both rows
    table, parts = read_json(stored), [read_json(folder / "table.json") for folder in (wide, narrow)]
    assert [row["label"] for row in table["rows"]] == ["wide", "loss of the wide one", "narrow, fast"]
    assert table["rows"] == [*parts[0]["rows"], *parts[1]["rows"]]
    assert list(table["origins"]) == ["row-1", "row-2"]
    ((*_, last),) = [table.rows.values() for table in read_stored(results).tables]
    assert last.logs == ("core/three.row-2.log.jsonl",)
    assert add_result(narrow, "core/three", results)  # once more: its row is replaced, the other two are kept
    assert read_json(stored)["rows"] == table["rows"]

    (tmp_path / "three.toml").write_text(ROWS.replace("narrow, fast", "slim"))
    assert main([*words, "--row", "slim"]) == 0
    with pytest.raises(RunError, match="three.row-1.log.jsonl: part of an earlier result of this name"):
        add_result(tmp_path / "three-003", "core/three", results)  # row 2 has another name now
    (tmp_path / "three.toml").write_text(ROWS)
    assert main([*words, "--row", "wide", "seed=1"]) == 0
    with pytest.raises(RunError, match="three.row-2.log.jsonl: part of an earlier result of this name"):
        add_result(tmp_path / "three-004", "core/three", results)  # by another command
    assert read_json(stored)["rows"] == table["rows"]


def test_a_misspelled_row_gets_the_nearest(tmp_path, capsys):
    (tmp_path / "three.toml").write_text(ROWS)
    assert main(["reproduce", str(tmp_path / "three.toml"), "--row", "narow", "--runs", str(tmp_path)]) == 2
    assert (
        "three has no row 'narow'; did you mean 'narrow, fast'? its rows are 'wide', 'narrow, fast', 'loss of the wide "
        "one'." in capsys.readouterr().err
    )
    assert files_in(tmp_path) == ["three.toml"]


def test_a_sweep_is_stored_seed_by_seed(reproduced, results):
    add_result(reproduced / "row-1" / "core-digits-001", "core/digits", results)
    names = [f"core/digits.seed-{seed}.{kind}" for seed in (0, 1) for kind in ("log.jsonl", "result.json")]
    assert files_in(results) == names
    (run,) = read_stored(results).runs.values()
    assert run.numbers["accuracy"].seeds == 2
    assert run.numbers["accuracy"].spread is not None


def test_an_unfinished_sweep_leaves_the_results_alone(reproduced, results, tmp_path):
    sweep = tmp_path / "sweep"
    shutil.copytree(reproduced / "row-1" / "core-digits-001", sweep)
    shutil.rmtree(sweep / "seed-1")
    with pytest.raises(RunError, match="was trained with 2 seeds and has 1: its folders are not complete"):
        add_result(sweep, "core/digits", results)
    (sweep / "result.json").unlink()
    with pytest.raises(RunError, match="only finished sweeps are added: equipoise resume"):
        add_result(sweep, "core/digits", results)
    assert files_in(results) == []


def test_a_damaged_log_leaves_the_results_alone(trained, results, tmp_path):
    run = tmp_path / "damaged"
    shutil.copytree(trained, run)
    (run / "log.jsonl").write_text("{")
    with pytest.raises(DamagedFile, match="log.jsonl is damaged: line 1"):
        add_result(run, "core/digits", results)
    assert files_in(results) == []


def test_a_result_is_not_mixed_with_an_earlier_one_of_its_name(trained, reproduced, results):
    add_result(reproduced / "row-1" / "core-digits-001", "core/digits", results)
    before = files_in(results)
    with pytest.raises(RunError, match="digits.seed-0.log.jsonl.*part of an earlier result of this name"):
        add_result(trained, "core/digits", results)
    assert files_in(results) == before
    add_result(reproduced / "row-1" / "core-digits-001", "core/digits", results)  # as many seeds: it is replaced
    assert files_in(results) == before
    add_result(trained, "core/digits-2", results)


def test_a_figure_is_stored_with_its_command(trained, results, tmp_path):
    folder = tmp_path / "figure"
    (folder / "recipe-1").mkdir(parents=True)
    shutil.copytree(trained, folder / "recipe-1" / "core-digits-001")
    asked = {"name": "core/convergence", "budget": "smoke", "changes": ["samples=8"], "data": ["/data"]}
    (folder / "figure.json").write_text(json.dumps(asked))
    with pytest.raises(RunError, match="has nothing to add"):
        add_result(folder, "core/digits-convergence", results)
    (folder / "core-convergence.png").write_bytes(b"a picture")
    (folder / "core-convergence.json").write_text('{"runs": [1]}')
    add_result(folder, "core/digits-convergence", results)
    assert files_in(results) == ["core/digits-convergence.json", "core/digits-convergence.png"]
    content = read_json(results / "core/digits-convergence.json")
    assert content["runs"] == [1]
    assert content["origin"]["command"] == "equipoise figure core/convergence --budget smoke samples=8"
    assert content["origin"]["versions"]["commit"] == commit()
    assert read_stored(results).command_of("core/digits-convergence.png") == content["origin"]["command"]


def test_what_cannot_be_stored_is_refused_with_a_sentence(trained, results, tmp_path):
    def refused(folder, name="core/digits", to=results):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            add_result(folder, name, to)
        assert files_in(results) == []
        return str(error.value)

    assert "--as is '../digits'; it must be a name like mondeq/mnist-fc" in refused(trained, "../digits")
    assert "--as is 'digits'" in refused(trained, "digits")
    assert "is not the folder of a run, sweep, table or figure" in refused(tmp_path)
    assert "there is no folder" in refused(trained, to=tmp_path / "nowhere")
    run = tmp_path / "unfinished"
    shutil.copytree(trained, run)
    content = read_json(run / "result.json")
    del content["origin"]
    (run / "result.json").write_text(json.dumps(content))
    assert "does not record where it comes from: an earlier version trained it." in refused(run)
    (run / "result.json").unlink()
    assert "is interrupted; only finished runs are added: equipoise resume" in refused(run)


def test_commands_and_origins_lose_their_places():
    command = "equipoise train core/mnist --budget small --runs /tmp/a --data '/my data' --threads 2 --report seeds=3"
    assert portable_command(command) == "equipoise train core/mnist --budget small seeds=3"
    assert portable_command("equipoise train /home/me/x.toml radius=8/255 training.init_from=../runs/a-001") == (
        "equipoise train x.toml radius=8/255 training.init_from=a-001"
    )
    assert portable_command("equipoise train a/b --runs=/tmp/a --data=/b") == "equipoise train a/b"
    made = {"recipe": "x", "command": "equipoise train /a/x.toml", "tables": {"training": {"init_from": "/a/b"}}}
    assert portable(made)["tables"] == {"training": {"init_from": "b"}}
    assert made["tables"] == {"training": {"init_from": "/a/b"}}

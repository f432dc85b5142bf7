"""The page of all results: generated from stored files, compared with them, and honest about what is missing."""

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.files import DamagedFile
from equipoise.lab.recipes.build import source_digests
from equipoise.lab.recipes.reading import RecipeError, open_recipe, parse_override, recipe_names, recipes_folder
from equipoise.lab.recipes.schema import TableSpec
from equipoise.lab.results.claims import Claim, Comparison, Mark, ValueSpec, judge, read_claims
from equipoise.lab.results.results_page import Writer, difference, results_page
from equipoise.lab.results.stored import Asked, Noted, opened, read_stored, recipe_tables, row_tables, same, stem_of
from equipoise.lab.results.table_rows import cells_of, epochs_of, paper_tables
from equipoise.lab.runs.folder import CHANGED
from equipoise.lab.runs.shipped import weights_folder

ROOT = Path(eq.__file__).parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "results.md"
PAPERS = sorted(path.parent.name for path in recipes_folder().glob("*/table*.toml"))
HERE = pytest.mark.skipif(not RESULTS.is_dir(), reason="the package is not in its repository")


# The page of the repository


@pytest.fixture(scope="module")
def page():
    return results_page(RESULTS, PAGE)


@HERE
def test_the_page_says_what_the_results_say(page):
    sentence = difference(page, PAGE)
    assert not sentence, sentence


@HERE
def test_an_edited_cell_is_found(page, tmp_path):
    out = tmp_path / "results.md"
    assert difference(page, out) == f"{out} does not exist: run equipoise results."
    out.write_text(page.text)
    assert difference(page, out) == ""
    line = next(line for line in page.text.split("\n") if line.startswith("| MNIST, single convolution, 84K |"))
    edited = line.replace("[99.09%]", "[99.19%]")
    assert edited != line
    out.write_text(page.text.replace(line, edited))
    sentence = "differs from the stored results: run equipoise results, and do not edit the page."
    assert f"{sentence}\n- {edited}\n+ {line}" in difference(page, out)
    out.write_text(page.text + "\nAnd another thing.")
    assert "- And another thing.\n+ (end of the page)" in difference(page, out)


@HERE
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the package is not in a clone")
def test_recorded_commits_are_in_the_history():
    """Or in the table of those that landed as others, which are."""
    stored = read_stored(RESULTS)
    results = [file.read_text() for file in RESULTS.rglob("*.json")]
    cards = [file.read_text() for file in weights_folder().rglob("*.toml")]
    recorded = {
        commit for text in (*results, *cards) for commit in re.findall(r'"?commit"?(?:: | = )"([0-9a-f]+)', text)
    }
    assert recorded
    recorded |= {noted.commit for noted in stored.noted.values() if noted.commit}
    named = (recorded - stored.commits.keys()) | set(stored.commits.values())
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "--batch-check"],
        input="\n".join(sorted(named)),
        capture_output=True,
        text=True,
        check=True,
    )
    missing = [line for line in known.stdout.splitlines() if " commit " not in line]
    assert not missing


@HERE
def test_no_file_of_the_results_is_hidden(page):
    for file in read_stored(RESULTS).files:
        assert f"](../results/{file})" in page.text, file


@HERE
def test_every_row_of_every_table_has_a_line(page):
    for paper in PAPERS:
        for _, table in paper_tables(paper):
            for row in table.rows:
                assert f"| {row.label} | {row.metric} | " in page.text


@HERE
def test_what_was_not_run_says_why(page):
    bare = [line for line in page.text.split("\n") if re.search(r"\| not (run|drawn) \|", line)]
    claims_and_counts = [line for line in bare if "| **not run** |" in line or line.startswith("| paper |")]
    assert [line for line in bare if line not in claims_and_counts] == []


def test_an_origin_written_by_hand_is_of_a_file_that_records_none():
    stored = read_stored(RESULTS)
    for name in stored.noted:
        measured = stored.runs.get(name)
        assert measured is None or measured.origin is None, f"{name} records its origin: remove it from origins.toml"


def claimed_rows():
    for path in sorted(recipes_folder().glob("*/claims.toml")):
        for claim in read_claims(path).claims:
            for comparison in claim.holds:
                for spec in (comparison.left, comparison.right):
                    yield from filter(None, (spec.row, (spec.over or {}).get("row", "")))


def test_claims_compare_rows_that_exist():
    for name in claimed_rows():
        table, _, label = name.partition(": ")
        assert table in recipe_names(), name
        assert label in [row["label"] for row in open_recipe(table).tables["rows"]], name


def test_the_command_of_a_row_trains_the_row(tmp_path):
    stored = read_stored(tmp_path)
    for paper in PAPERS:
        for name, table in paper_tables(paper):
            for row in table.rows:
                (cell,) = cells_of(name, table, row, stored)
                asked = Asked.of(cell.command)
                made = recipe_tables(asked.recipe, asked.budget, [parse_override(text) for text in asked.changes])
                assert made is not None, cell.command
                assert same(made, cell.tables), cell.command
                assert epochs_of(cell.tables) > 0


@pytest.mark.parametrize(
    ("name", "budget", "changes"),
    [
        ("core/digits", None, []),
        ("mondeq/mnist-fc", "small", ["optimizer.lr=0.01"]),
        ("jiio/celeba", "small", ["phases.0.epochs=2"]),
        ("opteq/single-mopteq", "small", ["model.perturb=off", "data.limit=7"]),
    ],
)
def test_tables_of_a_recipe_are_those_of_open_recipe(name, budget, changes):
    made = recipe_tables(name, budget, [parse_override(text) for text in changes])
    assert made is not None
    assert same(made, open_recipe(name, budget, changes).tables)
    assert recipe_tables(name, "no such budget") is None
    assert recipe_tables("no/such", None) is None


# Made-up results


def result(accuracy=0.97, seconds=60.0, **entries):
    solver = {"samples": 10, "failed": 0.0, "results": {"CONVERGED": 10}, "residual": {"median": 0.01, "worst": 0.01}}
    solver["steps"] = {"median": 1, "90%": 1, "most": 2}
    test = {"accuracy": accuracy, "loss": 0.1, "solver": {"forward": solver}}
    facts = {"status": "finished", "weights": "best", "parameters": 84313, "steps": 40, "epochs": 12}
    return {**facts, "test": test, "seconds": seconds, **entries}


SMALL_FC = "equipoise train mondeq/mnist-fc --budget small"


def origin(command=SMALL_FC, name="mondeq/mnist-fc", budget: str | None = "small"):
    tables = copy.deepcopy(recipe_tables(name, budget) or {})
    del tables["budget"], tables["paper"]
    versions = {"equipoise": "0.1.0", "commit": "0123456789" * 4, "torch": "2.13.0"}
    machine = {"device": "cpu", "threads": 1, "cores": 2, "processor": "Some Processor"}
    facts = {"recipe": name, "command": command, "started": "2026-01-01T00:00:00+00:00", "versions": versions}
    return {**facts, "tables": tables, "machine": machine, "sources": source_digests(tables)}


def store(folder, file, content):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def line_of(folder, label, table="mondeq/table1"):
    writer = Writer(read_stored(folder), "../results")
    lines = writer.table_part(table, open_recipe(table).read(TableSpec))
    return [line for line in lines if line.startswith(f"| {label} |")]


FC = "MNIST, fully connected, 84K"


def test_a_run_fills_the_row_of_its_recipe(tmp_path):
    store(tmp_path, "mondeq/mnist-fc.result.json", result(0.9812, 90.0, origin=origin()))
    (line,) = line_of(tmp_path, FC)
    assert "| 98.1% ± 0.1% | [98.12%](../results/" in line
    assert "mondeq/mnist-fc.result.json) | 1 | 12 of 40 (small) | 1 min 30 s |" in line
    assert "| 1 thread, Some Processor, torch 2.13.0 | 0123456 | current |" in line
    assert line.endswith("| `equipoise train mondeq/mnist-fc --budget small` |")


def test_what_was_not_run_says_so_and_keeps_its_command(tmp_path):
    (line,) = line_of(tmp_path, FC)
    assert line == (
        f"| {FC} | accuracy | 98.1% ± 0.1% | not run | - | 0 of 40 | - | - | - | - | "
        "`equipoise train mondeq/mnist-fc seeds=3` |"
    )


def test_the_reason_is_that_of_the_row_or_else_that_of_the_table_or_figure(tmp_path):
    (tmp_path / "results").mkdir()
    deqs = "mondeq/plain-deq"
    (slow,) = line_of(tmp_path, "CIFAR-10, multi-tier, monotone", deqs)
    assert "| accuracy | - | not run: takes days of a CPU core | - | 0 of 40 |" in slow
    (quick,) = line_of(tmp_path, "MNIST, single convolution, monotone, Anderson", deqs)
    assert "| not run: takes hours of a CPU core |" in quick
    text = results_page(tmp_path / "results", tmp_path / "docs" / "results.md").text
    assert "| not drawn: takes hours of a CPU core | `equipoise figure mondeq/figure-f2` |" in text


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("equipoise reproduce mondeq/table1 --budget small", "mondeq/mnist-fc"),
        ("equipoise figure mondeq/figure2 --budget small samples=7", "mondeq/mnist-multitier"),
        ("equipoise figure mdeq/figure6 --budget small data.limit=9", "mdeq/camvid-small"),
    ],
)
def test_a_run_of_a_table_or_figure_is_current_while_its_recipe_is(tmp_path, command, name):
    made = origin(command, name)
    if "data.limit=9" in command:
        made["tables"]["data"]["limit"] = 9
    for rate, moved in ((None, []), (0.5, ["recipe"])):
        if rate is not None:
            made["tables"]["optimizer"]["lr"] = rate
        store(tmp_path, f"{name}.result.json", result(0.9812, origin=made))
        run = read_stored(tmp_path).runs[name]
        assert run.moved(run.recipe_today) == moved


def test_a_run_of_a_table_fills_its_row(tmp_path):
    made = origin("equipoise reproduce mondeq/table1 --budget small")
    store(tmp_path, "mondeq/mnist-fc.result.json", result(0.9812, origin=made))
    (line,) = line_of(tmp_path, FC)
    assert "| [98.12%](" in line
    assert "| current | `equipoise reproduce mondeq/table1 --budget small` |" in line


def test_a_command_without_a_recipe_trained_the_default_one(tmp_path):
    made = origin("equipoise train --budget smoke", "core/digits", "smoke")
    store(tmp_path, "core/digits.result.json", result(origin=made))
    run = read_stored(tmp_path).runs["core/digits"]
    assert run.moved(run.recipe_today) == []


def test_other_changes_do_not_fill_a_row(tmp_path):
    command = "equipoise train mondeq/mnist-fc --budget small optimizer.lr=0.5"
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=origin(command)))
    (line,) = line_of(tmp_path, FC)
    assert "| not run |" in line
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=origin(f"{command} --seed 3".partition(" opt")[0])))
    (line,) = line_of(tmp_path, FC)
    assert "[97.00%]" in line


def test_seeds_are_averaged(tmp_path):
    for seed, accuracy in enumerate((0.97, 0.98, 0.99)):
        store(tmp_path, f"mondeq/mnist-fc.seed-{seed}.result.json", result(accuracy, 100.0, origin=origin()))
    (line,) = line_of(tmp_path, FC)
    assert "[98.00% ± 1.00%]" in line
    assert "| 3 | 12 of 40 (small) | 5 min 0 s |" in line


@pytest.mark.parametrize(
    ("second", "made"),
    [
        ("mondeq/mnist-fc.seed-1.result.json", lambda: origin("equipoise train mondeq/mnist-fc", budget=None)),
        ("mondeq/mnist-fc.seed-1.result.json", lambda: None),
        ("mondeq/mnist-fc.result.json", origin),  # a single run, and a seed of an earlier sweep
    ],
)
def test_results_of_one_name_must_be_seeds_of_one_recipe(tmp_path, second, made):
    store(tmp_path, "mondeq/mnist-fc.seed-0.result.json", result(0.97, origin=origin()))
    store(tmp_path, second, result(0.5, **({"origin": made()} if made() else {})))
    with pytest.raises(DamagedFile, match="have the name of one result, but are not seeds of one recipe"):
        read_stored(tmp_path)


def test_one_seed_that_is_out_of_date_makes_the_result_stale(tmp_path):
    old = origin()
    old["sources"]["solvers/loop.py"] = "0"
    store(tmp_path, "mondeq/mnist-fc.seed-0.result.json", result(0.97, origin=origin()))
    store(tmp_path, "mondeq/mnist-fc.seed-1.result.json", result(0.98, origin=old))
    assert "| **stale** (code) |" in line_of(tmp_path, FC)[0]


def test_two_budgets_have_a_line_each(tmp_path):
    store(tmp_path, "mondeq/mnist-fc.result.json", result(0.97, origin=origin()))
    full = origin("equipoise train mondeq/mnist-fc", budget=None)
    store(tmp_path, "mondeq/fc-paper.result.json", result(0.98, epochs=40, origin=full))
    first, second = line_of(tmp_path, FC)
    assert "[98.00%]" in first
    assert "| 40 of 40 |" in first
    assert "[97.00%]" in second
    assert "(small)" in second


def test_the_command_writes_and_checks_the_page(tmp_path, capsys):
    store(tmp_path, "results/mondeq/mnist-fc.result.json", result(0.9812, origin=origin()))
    out = tmp_path / "docs" / "results.md"
    words = ["results", "--folder", str(tmp_path / "results"), "--out", str(out)]
    assert main(words) == 0
    assert re.match(r"claims            1 confirmed, \d+ not run\nrows              2 of \d+ measured\n", said(capsys))
    assert "[98.12%](../results/mondeq/mnist-fc.result.json)" in out.read_text()
    assert main([*words, "--check"]) == 0
    assert said(capsys) == f"up to date        {out}\n"
    out.write_text(out.read_text().replace("**confirmed**", "**refuted**"))
    assert main([*words, "--check"]) == 1
    assert "differs from the stored results" in said(capsys)
    assert main([*words, "--check", "--add", "x", "--as", "y"]) == 2
    assert "--add FOLDER and --as NAME go together, without --check." in capsys.readouterr().err


def said(capsys):
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "state", "moved"),
    [
        (lambda made: None, "current", []),
        (lambda made: made["tables"]["optimizer"].update(lr=0.5), "**stale** (recipe)", ["recipe"]),
        (lambda made: made["tables"]["training"].update(log_every=3), "current", []),
        (lambda made: made["tables"].update(title="Another title"), "current", []),
        (lambda made: made["sources"].update({"solvers/loop.py": "0"}), "**stale** (code)", ["solvers/loop.py"]),
        (lambda made: made["sources"].update({"models/gone.py": "0"}), "**stale** (code)", ["models/gone.py"]),
        (lambda made: made["sources"].pop("solvers/loop.py"), "**stale** (code)", ["solvers/loop.py"]),
        (lambda made: made["sources"].update({"solvers/loop.py": CHANGED}), "**stale** (code)", ["solvers/loop.py"]),
    ],
)
def test_a_change_since_training_makes_a_result_stale(tmp_path, change, state, moved):
    made = origin()
    change(made)
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=made))
    (line,) = line_of(tmp_path, FC)
    assert f"| {state} |" in line
    writer = Writer(read_stored(tmp_path), "..")
    writer.runs_part("mondeq", "monDEQ")
    assert writer.stale == ({"mondeq/mnist-fc.result.json": moved} if moved else {})


def test_both_recipe_and_code_can_be_stale(tmp_path):
    made = origin()
    made["tables"]["optimizer"]["lr"] = 0.5
    made["sources"]["solvers/loop.py"] = "0"
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=made))
    assert "| **stale** (recipe and code) |" in line_of(tmp_path, FC)[0]


def test_a_result_without_an_origin_needs_one_by_hand(tmp_path):
    store(tmp_path, "mondeq/mnist-fc.result.json", result())
    assert "| not run |" in line_of(tmp_path, FC)[0]
    noted = 'command = "equipoise train mondeq/mnist-fc --budget small"\ncommit = "abc1234"\nmachine = "a laptop"\n'
    store(tmp_path, "origins.toml", f'["mondeq/mnist-fc"]\n{noted}')
    assert "| a laptop | abc1234 | not recorded | `equipoise train" in line_of(tmp_path, FC)[0]


def test_a_commit_that_the_history_lacks_names_one_that_has_its_code(tmp_path):
    made = origin()
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=made))
    store(tmp_path, "origins.toml", f'[commits]\n{made["versions"]["commit"]} = "abc1234"\n')
    assert "| 0123456, landed as abc1234 |" in line_of(tmp_path, FC)[0]
    store(tmp_path, "origins.toml", "[commits]\nabc = 1\n")
    with pytest.raises(RecipeError, match=r"origins.toml, line 2: commits.abc"):
        read_stored(tmp_path)


def test_a_table_fills_its_rows(tmp_path):
    row: dict[str, object] = {
        "label": "MOptEq",
        "recipe": "opteq/reduced-mopteq",
        "metric": "accuracy",
        "folder": "row-7/x-001",
    }
    row |= {"measured": 0.5, "spread": 0.02, "seeds": 3, "parameters": 17162, "epochs": 1, "seconds": 600.0}
    row |= {"costs": {"forward evaluations": 4.0, "backward evaluations": 3.5, "peak memory": None}}
    made = origin("equipoise reproduce opteq/reduced --budget small", "opteq/reduced-mopteq")
    content = {"title": "T", "name": "opteq/reduced", "budget": "small", "changes": [], "rows": [row]}
    store(tmp_path, "opteq/reduced.table.json", {**content, "origins": {"row-7": made}})
    store(tmp_path, "opteq/reduced.row-7.seed-0.log.jsonl", "")
    (line,) = line_of(tmp_path, "MOptEq", "opteq/reduced")
    assert "[50.00% ± 2.00%]" in line
    assert "[log](" in line
    assert "| 3 | 1 of 20 (small) | 10 min 0 s | 1 thread, Some Processor, torch 2.13.0 | 0123456 | current |" in line
    (table,) = read_stored(tmp_path).tables
    assert table.rows["MOptEq", "accuracy"].numbers["evaluations per minibatch"].mean == 7.5
    made["tables"]["model"]["diversity"] = 0.7
    store(tmp_path, "opteq/reduced.table.json", {**content, "origins": {"row-7": made}})
    assert "| **stale** (recipe) |" in line_of(tmp_path, "MOptEq", "opteq/reduced")[0]
    store(tmp_path, "opteq/reduced.table.json", {**content, "changes": ["data.limit=9"]})
    assert "| not run |" in line_of(tmp_path, "MOptEq", "opteq/reduced")[0]


def test_a_row_that_names_another_recipe_today_is_not_filled_by_a_table_without_origins(tmp_path):
    row = {"label": "MOptEq", "metric": "accuracy", "measured": 0.5, "seeds": 3}
    for recipe, filled in (("opteq/reduced-mopteq", True), ("opteq/reduced-opteq", False)):
        content = {"title": "T", "name": "opteq/reduced", "budget": "small", "rows": [{**row, "recipe": recipe}]}
        store(tmp_path, "opteq/reduced.table.json", content)
        assert ("[50.00%](" in line_of(tmp_path, "MOptEq", "opteq/reduced")[0]) is filled


def test_an_evaluation_fills_the_rows_that_its_entry_names(tmp_path):
    made = origin("equipoise train jiio/celeba --budget small", "jiio/celeba")
    store(tmp_path, "jiio/celeba.result.json", result(epochs=6, origin=made))
    store(tmp_path, "jiio/celeba-restoration.json", {"median psnr": 21.5, "loss": None})
    entry = 'command = "equipoise evaluate CELEBA"\nfills = "jiio/celeba-restore --budget small"\n'
    store(tmp_path, "origins.toml", f'["jiio/celeba-restoration"]\n{entry}run = "jiio/celeba"\n')
    (line,) = line_of(tmp_path, "JIIO-40, inpainting", "jiio/table4")
    assert "| 15.88 dB | [21.50 dB](" in line
    assert "| 6 of 15 (small) |" in line
    store(tmp_path, "origins.toml", f'["jiio/celeba-restoration"]\n{entry}run = "jiio/nothing"\n')
    with pytest.raises(DamagedFile, match="evaluates 'jiio/nothing', which is not stored"):
        read_stored(tmp_path)


def test_figures_of_the_log_are_shown(tmp_path):
    solver = {"samples": 10, "failed": 0.25, "results": {}, "residual": {"median": 0.01, "worst": 0.01}}
    solver |= {"steps": {"median": 1, "90%": 1, "most": 2}, "evaluations": 60}
    epoch = {"kind": "epoch", "step": 10, "epoch": 1, "phase": 0, "seconds": 30.0, "failed_steps": 0}
    epoch |= {"train": {"solver": {"forward": solver, "backward": solver}}, "peak_memory": 2_000_000}
    lines = "\n".join(json.dumps(line) for line in (epoch, {**epoch, "step": 20, "epoch": 2, "seconds": 50.0}))
    store(tmp_path, "mondeq/mnist-fc.log.jsonl", lines)
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=origin()))
    numbers = read_stored(tmp_path).runs["mondeq/mnist-fc"].numbers
    wanted = {"epochs": 2, "seconds per epoch": 25, "evaluations per minibatch": 12, "failed": 0.25, "converged": 1}
    assert {name: numbers[name].mean for name in wanted} == wanted
    text = "\n".join(Writer(read_stored(tmp_path), "..").runs_part("mondeq", "monDEQ"))
    assert "| accuracy 97.00% | 84,313 | 100% converged, median 1 step | 12.0 | 2 MB | 12 |" in text


@pytest.mark.parametrize(
    ("failed", "said"), [(0.0, "100%"), (1e-6, "99.99%"), (0.004, "99.60%"), (0.9996, "0.04%"), (1.0, "0%")]
)
def test_all_solves_converged_only_if_none_failed(tmp_path, failed, said):
    content = result(origin=origin())
    content["test"]["solver"]["forward"]["failed"] = failed
    store(tmp_path, "mondeq/mnist-fc.result.json", content)
    text = "\n".join(Writer(read_stored(tmp_path), "..").runs_part("mondeq", "monDEQ"))
    assert f"| {said} converged, median 1 step |" in text


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("mondeq/mnist-fc.result.json", "{", "mnist-fc.result.json is damaged: it is not JSON"),
        ("mondeq/mnist-fc.result.json", {"status": "finished"}, "test and weights and parameters"),
        ("mondeq/mnist-fc.result.json", result(origin={}), r"origin.recipe and origin.tables"),
        ("opteq/reduced.table.json", {"title": "T", "budget": "small", "rows": [{}]}, r"rows\[0\].label and"),
        ("mondeq/figure3.json", '{"runs": [', "figure3.json is damaged: it is not JSON"),
        (
            "mondeq/mnist-fc.result.json",
            result(origin={**origin(), "command": "equipoise train 'mondeq/mnist-fc"}),
            "mnist-fc.result.json: its command .* cannot be split into words: No closing quotation",
        ),
        ("origins.toml", "x = ", "origins.toml"),
        ("origins.toml", '["a/b"]\ncommand = "x"\n', "has an entry 'a/b', but there is no such file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, said):
    store(tmp_path, file, content)
    with pytest.raises(DamagedFile, match=said):
        read_stored(tmp_path)


def test_files_that_are_no_text_are_named(tmp_path):
    (tmp_path / "page.md").write_bytes(b"\xff\xfe")
    assert "differs from the stored results" in difference(
        results_page(tmp_path, tmp_path / "page.md"), tmp_path / "page.md"
    )
    (tmp_path / "origins.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedFile, match="origins.toml is not a UTF-8 text file: invalid start byte at byte 0"):
        read_stored(tmp_path)


@pytest.mark.parametrize("accuracies", [(None,), (0.97, None)])
def test_what_was_run_and_is_not_finite_says_so(tmp_path, accuracies):
    for seed, accuracy in enumerate(accuracies):
        store(tmp_path, f"mondeq/mnist-fc.seed-{seed}.result.json", result(accuracy, origin=origin()))
    (line,) = line_of(tmp_path, FC)
    assert "| [not finite](../results/mondeq/mnist-fc.seed-0.result.json) |" in line
    assert f"| {len(accuracies)} | 12 of 40 (small) |" in line
    stored = read_stored(tmp_path)
    assert "| accuracy not finite |" in "\n".join(Writer(stored, "..").runs_part("mondeq", "monDEQ"))
    comparison = Comparison(ValueSpec(row=f"mondeq/table1: {FC}"), "below", ValueSpec(number=2.0))
    verdict = judge(Claim("A sentence.", "table 1", (comparison,), any_budget=True), stored)
    assert verdict.mark == Mark.NOT_RUN
    assert verdict.reasons == [(f"not run: accuracy of {FC}, which is not finite", [])]


def test_a_row_of_a_table_that_is_not_finite_says_so(tmp_path):
    row = {"label": "MOptEq", "recipe": "opteq/reduced-mopteq", "metric": "accuracy", "measured": None, "seeds": 3}
    content = {"title": "T", "name": "opteq/reduced", "budget": "small", "rows": [{**row, "epochs": 1}]}
    store(tmp_path, "opteq/reduced.table.json", content)
    assert "| [not finite](" in line_of(tmp_path, "MOptEq", "opteq/reduced")[0]


def test_true_is_not_an_accuracy(tmp_path):
    store(tmp_path, "mondeq/mnist-fc.result.json", result(True, origin=origin()))
    assert "| not run |" in line_of(tmp_path, FC)[0]


def test_a_damaged_log_is_named(tmp_path):
    store(tmp_path, "mondeq/mnist-fc.result.json", result(origin=origin()))
    store(tmp_path, "mondeq/mnist-fc.log.jsonl", '{"kind": "note", "step": 1}\n{"kind": "ep')
    with pytest.raises(DamagedFile, match="mnist-fc.log.jsonl is damaged: line 2 is not a line of a log"):
        read_stored(tmp_path)


def test_a_misspelled_entry_of_an_origin_is_named(tmp_path):
    store(tmp_path, "origins.toml", '["a/b"]\ncomand = "x"\n')
    with pytest.raises(ValueError, match="line 2: in a/b, there is no key 'comand'; did you mean 'command'"):
        read_stored(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["results", "--folder", str(tmp_path / "no")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_names_of_files():
    assert stem_of("a/b.seed-3.result.json") == stem_of("a/b.log.jsonl") == stem_of("a/b.table.json") == "a/b"
    assert stem_of("a/denoise-0.2.json") == stem_of("a/denoise-0.2.png") == "a/denoise-0.2"


def test_commands_are_read():
    assert Asked.of("equipoise train a/b --budget small --threads 1 x.y=2") == Asked("a/b", "small", ("x.y=2",))
    assert Asked.of("equipoise train a/b --budget=small") == Asked("a/b", "small")
    assert Asked.of("equipoise train a/b --budget paper") == Asked("a/b")
    assert Asked.of("") == Asked("")
    assert opened("no/such") is None
    assert opened("mine.toml") is None
    assert Noted().command == ""


def test_rows_of_a_table_with_a_budget_it_does_not_have():
    ((_, table),) = paper_tables("core")
    assert row_tables(table.rows[0], table, "enormous", []) is None

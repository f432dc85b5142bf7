"""Files that are damaged, of another run, or cannot be written: a sentence, and nothing that was whole is lost."""

import copy
import json
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.files import DEEPEST, WriteError, misfit, parse, whole, write_text
from equipoise.lab.results.trained import evaluate_run
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.checkpoints import CheckpointError
from equipoise.lab.runs.folder import Log, Run, RunError
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.trainer import StopRequest, Trainer
from equipoise.lab.training.trainer import train as train_run
from lab_helpers import (
    PATIENCE,
    STEPS,
    TRUST,
    assert_readable,
    assert_same,
    command,
    environment,
    resume,
    train,
    until,
)

ALONE = Machine(torch.device("cpu"))
PACKAGE = Path(eq.__file__).parent


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A finished run of the package's own recipe, stopped in its last epoch and resumed."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["data.limit=48", "phases.0.epochs=2", "training.log_every=1", "--runs", str(folder)]
    assert main(["train", "core/digits", "--budget", "smoke", "training.batch_size=16", *words]) == 0
    return folder / "core-digits-001"


@pytest.fixture
def damaged(whole_run, tmp_path) -> Path:
    """A copy of it to damage."""
    shutil.copytree(whole_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def reference(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("reference"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object], tensors: dict[str, Any] | None = None) -> None:
    """Change the facts of a checkpoint, its checksum made anew."""
    saved, facts = checkpoints.read(file)
    change(facts)
    checkpoints.save(file, saved if tensors is None else tensors, facts)


# The log


def stopped_run(folder: Path) -> Run:
    return train(folder, "phases.0.epochs=4", TEST_SIGNALS=f"loss {3 * STEPS + 2} SIGTERM", expect=143)


@pytest.mark.parametrize(
    "bad",
    [
        b'{"kind": "epoch", "ep',
        b"\xff\xfe not UTF-8 \x00\x00",
        b'{"kind": "epoch", "step": "four"}',
        b"[1, 2]",
        b"[" * 100_000,
        b'{"kind": "step", "step": 1e999}',
    ],
)
def test_a_damaged_line_of_the_log_costs_that_line_alone(tmp_path, bad):
    stopped = stopped_run(tmp_path)
    lines = stopped.log.read_bytes().splitlines()
    before = stopped.records()
    stopped.log.write_bytes(b"\n".join([*lines[:3], bad, *lines[4:-1], lines[-1][:-5]]))
    assert stopped.records() == before[:3] + before[4:-1]
    text = resume(stopped)
    assert "2 lines of log.jsonl could not be read and were moved to log.damaged; the others are kept" in text
    assert (stopped.folder / "log.damaged").read_bytes() == bad + b"\n" + lines[-1][:-5] + b"\n"
    assert stopped.log.read_bytes().startswith(b"\n".join(lines[:3] + lines[4:-1]) + b"\n")
    assert len(stopped.epochs()) == 4
    resume(stopped)
    assert len((stopped.folder / "log.damaged").read_bytes().splitlines()) == 2


def test_damaged_lines_are_set_aside_once(tmp_path):
    """Also where the process is killed after they were and before the log was written."""
    stopped = stopped_run(tmp_path)
    stopped.log.write_bytes(b"damaged\n" + stopped.log.read_bytes())
    resume(stopped, TEST_SIGNALS=".log.jsonl 1 SIGKILL,.log.damaged 99 SIGKILL", expect=-9)
    assert (stopped.folder / "log.damaged").read_bytes() == b"damaged\n"
    resume(stopped)
    assert (stopped.folder / "log.damaged").read_bytes() == b"damaged\n"
    stopped.log.write_bytes(b"more\n" + stopped.log.read_bytes())
    (stopped.folder / "result.json").unlink()
    resume(stopped)
    assert (stopped.folder / "log.damaged").read_bytes() == b"damaged\nmore\n"


def test_a_lost_checkpoint_does_not_cost_the_log(tmp_path):
    stopped = stopped_run(tmp_path)
    stopped.last.unlink()
    before = stopped.log.read_bytes()
    text = resume(stopped, expect=2)
    assert f"{stopped.last} is missing, though {stopped.log} has 3 epochs: restore it; or, to train from" in text
    assert stopped.log.read_bytes() == before


# Checkpoints


def test_a_checkpoint_of_another_run_is_refused_with_the_difference(tmp_path):
    stopped = train(tmp_path, TEST_SIGNALS="loss 5 SIGTERM", expect=143)
    other = train(tmp_path, "seed=7", "optimizer.lr=0.5", TEST_SIGNALS="loss 5 SIGTERM", expect=143)
    before = stopped.log.read_bytes()
    shutil.copy(other.last, stopped.last)
    text = resume(stopped, expect=2)
    assert f"{stopped.last} belongs to another run than {stopped.folder / 'run.json'}: " in text
    assert "optimizer.lr is 0.5 there and 0.02 here" in text
    assert "seed is 7 there and not set here" in text
    assert stopped.log.read_bytes() == before
    with pytest.raises(CheckpointError, match="belongs to another run"):
        eq.load(stopped.folder, weights="last", trust="lab_helpers")


def test_best_weights_of_another_run_are_refused(tmp_path):
    """They would be tested, and reported, as this run's."""
    changes = ("optimizer.lr=0.0", "schedule.name=constant", "model.norm=false")  # the first epoch is the best
    stopped = train(tmp_path, *changes, TEST_SIGNALS=f"loss {STEPS + 2} SIGTERM", expect=143)
    other = train(tmp_path, *changes, "seed=7")
    whole = stopped.best.read_bytes()
    shutil.copy(other.best, stopped.best)
    assert "seed is 7 there and not set here" in resume(stopped, expect=2)
    stopped.best.write_bytes(whole)
    rewrite(stopped.best, lambda facts: facts["best"].update(epoch=2))
    assert "does not contain the best weights of this run" in resume(stopped, expect=2)
    stopped.best.write_bytes(whole)
    resume(stopped)


def test_the_best_weights_in_the_place_of_the_last(tmp_path):
    stopped = train(tmp_path, TEST_SIGNALS=f"loss {STEPS + 2} SIGTERM", expect=143)
    shutil.copy(stopped.best, stopped.last)
    text = resume(stopped, expect=2)
    assert f"{stopped.last} contains only weights, so training cannot continue from it: is it a copy of best" in text


def test_every_flipped_bit_is_found(damaged, tmp_path):
    """In tensors and header; a file whose flipped bit changes nothing may be read."""
    content = (damaged / "checkpoints" / "best.safetensors").read_bytes()
    tensors, facts = checkpoints.read(damaged / "checkpoints" / "best.safetensors")
    file, places = tmp_path / "flipped.safetensors", random.Random(0)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    bits = [places.randrange(8 * header) for _ in range(300)] + [
        places.randrange(8 * header, 8 * len(content)) for _ in range(100)
    ]
    found = 0
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            again, also = checkpoints.read(file)
        except CheckpointError:
            found += 1
        else:
            assert also == facts
            assert again.keys() == tensors.keys()
            assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert found > 390


def test_a_checkpoint_without_a_checksum_is_read(damaged):
    """Earlier versions wrote none."""
    from safetensors.torch import save_file

    file = damaged / "checkpoints" / "best.safetensors"
    tensors, facts = checkpoints.read(file)
    save_file(tensors, file, metadata={"format": "1", "equipoise": json.dumps(facts)})
    eq.load(file)


TENSORS = {
    "a weight is missing": (lambda t: t.pop("model/head.2.bias"), "Missing key"),
    "a weight too many": (lambda t: t.update({"model/more": torch.zeros(1)}), "Unexpected key"),
    "a weight of another shape": (lambda t: t.update({"model/head.2.bias": torch.zeros(3)}), "size mismatch"),
    "a weight of another type": (
        lambda t: t.update({"model/head.2.bias": t["model/head.2.bias"].half()}),
        "head.2.bias is torch.float16 in the file and torch.float32 in the model",
    ),
    "a weight of no real number": (
        lambda t: t.update({"model/head.2.bias": t["model/head.2.bias"].to(torch.complex64)}),
        "head.2.bias is torch.complex64",
    ),
    "a tensor of nothing": (lambda t: t.update({"odd": torch.zeros(1)}), "its tensor 'odd' has an unknown prefix"),
    "a state of no parameter": (
        lambda t: t.update({"optimizer/99/exp_avg": torch.zeros(1)}),
        "an entry '99/exp_avg', which does not belong to a parameter",
    ),
    "a state without a number": (
        lambda t: t.update({"optimizer/x/y": torch.zeros(1)}),
        "does not belong to a parameter",
    ),
    "a state of another shape": (
        lambda t: t.update({"optimizer/0/exp_avg": torch.zeros(7)}),
        "its optimizer state for parameter 0",
    ),
    "half a state": (lambda t: t.pop("optimizer/0/exp_avg"), "does not fit Adam"),
    "a state unknown": (lambda t: t.update({"optimizer/0/zeal": torch.zeros(1)}), "does not fit Adam"),
}


@pytest.mark.parametrize(("change", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit(damaged, change, words):
    (damaged / "result.json").unlink()
    file = damaged / "checkpoints" / "last.safetensors"
    tensors, facts = checkpoints.read(file)
    change(tensors)
    checkpoints.save(file, tensors, facts)
    before = (damaged / "log.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as error:
        train_run(Run(damaged), ALONE)
    assert words in str(error.value)
    assert str(file) in str(error.value)
    assert (damaged / "log.jsonl").read_bytes() == before


# Every entry of every file, replaced by something of another kind

KINDS = [None, True, -1, 7, 10**30, 1.5, 1e308, "text", "", [], [1, "a"], {}, {"name": "os:system"}, {"a": {"b": [[]]}}]


def entries(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield (*path, key)
        yield from entries(entry, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], by: Any) -> Any:
    """A copy with one entry replaced, or removed if ``by`` is ...."""
    value = copy.deepcopy(value)
    here = value
    for part in path[:-1]:
        here = here[part]
    if by is ...:
        del here[path[-1]]
    else:
        here[path[-1]] = by
    return value


def is_a_sentence(error: BaseException) -> bool:
    """Whether an error is one of the project's own: of its classes, or a plain one that its code raised."""
    if type(error).__module__.startswith("equipoise."):
        return bool(str(error))
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return type(error) in (ValueError, LookupError) and raised.is_relative_to(PACKAGE) and str(error).endswith(".")


def survives(door: Callable[[], object], what: object) -> None:
    try:
        door()
    except Exception as error:
        if not is_a_sentence(error):
            pytest.fail(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")


def cases(value: Any, count: int | None) -> list[tuple[tuple[str | int, ...], Any]]:
    every = [(path, by) for path in entries(value) for by in (..., *KINDS)]
    return every if count is None else random.Random(0).sample(every, min(count, len(every)))


SIZES = pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])


@SIZES
def test_any_entry_of_run_json_may_be_anything(damaged, capsys, count):
    (damaged / "result.json").unlink()
    file = damaged / "run.json"
    facts = json.loads(file.read_text())
    shutil.copytree(damaged, damaged.parent / "runs" / "good")
    for path, by in cases(facts, count):
        file.write_text(json.dumps(replaced(facts, path, by)))
        found = Run(damaged)
        survives(lambda f=found: (f.recipe, f.status, f.data_folders(())), (path, by))
        survives(lambda: eq.load(damaged), (path, by))
        survives(lambda f=found: evaluate_run(f, ALONE, limit=2), (path, by))
        survives(lambda f=found: Trainer(f, ALONE, (), None, StopRequest()), (path, by))
        shutil.copytree(damaged, damaged.parent / "runs" / "bad", dirs_exist_ok=True)
        assert main(["runs", str(damaged.parent / "runs")]) == 0
        assert "good" in capsys.readouterr().out


@SIZES
def test_any_entry_of_result_json_may_be_anything(damaged, capsys, count):
    from equipoise.lab.results.report import write_report

    file = damaged / "result.json"
    result = json.loads(file.read_text())
    (damaged / "checkpoints" / "best.safetensors").unlink()
    (damaged / "checkpoints" / "last.safetensors").unlink()
    for number, (path, by) in enumerate(cases(result, count)):
        file.write_text(json.dumps(replaced(result, path, by)))
        survives(lambda: train_run(Run(damaged), ALONE), (path, by))
        survives(lambda: main(["resume", str(damaged)]), (path, by))
        if number % 20 == 0:  # drawing takes time
            survives(lambda: write_report([Run(damaged)], ALONE), (path, by))
        assert main(["runs", str(damaged)]) == 0
    capsys.readouterr()


@SIZES
def test_any_entry_of_a_sweep_or_a_table_may_be_anything(damaged, tmp_path, capsys, count, monkeypatch):
    from equipoise.lab.results import reproduce
    from equipoise.lab.training import sweeps

    monkeypatch.setattr(sweeps, "train", lambda *_, **__: {"steps": 1})
    monkeypatch.setattr(reproduce, "trained_in", lambda *_: damaged)
    facts = json.loads((damaged / "run.json").read_text())
    asked = {"name": "core/table", "budget": "smoke", "changes": ["data.limit=48"], "data": ["/nowhere"]}
    for name, content in {"sweep.json": facts, "reproduce.json": asked, "figure.json": asked}.items():
        for number, (path, by) in enumerate(cases(content, count)):
            if path == ("tables", "seeds") or path == ("tables", "seed"):
                continue  # as many runs would be made
            folder = tmp_path / name / str(number)
            folder.mkdir(parents=True)
            (folder / name).write_text(json.dumps(replaced(content, path, by)))
            survives(lambda f=folder: main(["resume", str(f)]), (name, path, by))
    capsys.readouterr()


@SIZES
def test_any_fact_of_a_checkpoint_may_be_anything(damaged, count):
    (damaged / "result.json").unlink()
    file = damaged / "checkpoints" / "last.safetensors"
    (damaged / "checkpoints" / "best.safetensors").unlink()
    tensors, facts = checkpoints.read(file)
    log = (damaged / "log.jsonl").read_bytes()
    for path, by in cases(facts, count):
        checkpoints.save(file, tensors, replaced(facts, path, by))
        survives(lambda: eq.load(file), (path, by))
        survives(lambda: eq.load(damaged), (path, by))
        survives(lambda: Trainer(Run(damaged), ALONE, (), None, StopRequest()), (path, by))
        (damaged / "log.jsonl").write_bytes(log)


def test_the_last_weights_do_not_stand_in_for_the_best(damaged):
    (damaged / "checkpoints" / "best.safetensors").unlink()
    with pytest.raises(RunError, match="best.safetensors, the best weights of this run, is missing"):
        eq.load(damaged)
    assert eq.load(damaged, weights="last") is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b"{}",
    ],
    ids=["empty", "null", "list", "number", "string", "cut", "no UTF-8", "deep", "nested", "table"],
)
def test_files_that_are_something_else(damaged, tmp_path, capsys, content):
    shutil.copytree(damaged, tmp_path / "runs" / "good")
    for name in ("run.json", "result.json"):
        bad = tmp_path / "runs" / name.partition(".")[0]
        shutil.copytree(damaged, bad)
        (bad / "result.json").unlink()
        (bad / name).write_bytes(content)
        for words in (["resume"], ["evaluate"], ["report"]) if name == "run.json" else (["resume"], ["report"]):
            assert main([*words, str(bad)]) == 2, words
            assert f"{bad / name} is damaged: " in capsys.readouterr().err
    for name in ("sweep.json", "reproduce.json", "figure.json"):
        (tmp_path / name[:-5]).mkdir()
        (tmp_path / name[:-5] / name).write_bytes(content)
        assert main(["resume", str(tmp_path / name[:-5])]) == 2
        assert f"{tmp_path / name[:-5] / name} is damaged: " in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "finished" in printed
    assert printed.count("  damaged: ") == 2


def test_shapes():
    assert misfit({"epoch": "one"}, {"epoch": int}) == "epoch is 'one', not a whole number"
    assert misfit({"a": [1, None]}, {"a": [int]}) == "a[1] is None, not a whole number"
    assert misfit({"a": True}, {"a": (float, int)}) == "a is True, not a number"
    assert misfit({"a": float("nan")}, {"a": float}) == "a is nan, not a number"
    assert misfit({}, {"a": int, "b": int, "c?": int}) == "a and b are missing"
    assert misfit([], {"a": int}) == "it is [], not a table"
    assert misfit({"a": 1, "x": "y"}, {"a": int, str: str}) == ""
    assert misfit({"a": 1, "x": 2}, {"a": int, str: str}) == "x is 2, not a string"
    for text in ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), '"\\ud800"'):
        with pytest.raises(ValueError):
            parse(text)


# A disk that is full

LIMITED = """
import resource, sys
from equipoise.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


def limited(folder: Path, size: int, *words: object) -> tuple[int, str]:
    """A command in a process that may write no file larger than ``size`` bytes, as on a disk that is full."""
    line = [sys.executable, "-c", LIMITED, str(size), *map(str, words)]
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def test_a_full_disk_while_a_checkpoint_is_written(tmp_path):
    stopped = train(tmp_path, TEST_SIGNALS=f"loss {STEPS + 1} SIGTERM", expect=143)
    last, best, log = stopped.last.read_bytes(), stopped.best.read_bytes(), stopped.log.read_bytes()
    code, text = limited(tmp_path, max(4000, len(log) + 3000), "resume", stopped.folder, *TRUST)
    assert code == 2, text
    assert f"equipoise: {stopped.last} could not be written: " in text
    assert text.rstrip().endswith("The earlier one is untouched.")
    assert "Traceback" not in text
    assert (stopped.last.read_bytes(), stopped.best.read_bytes()) == (last, best)
    assert stopped.log.read_bytes().startswith(log)
    assert_readable(stopped)
    uninterrupted = train(tmp_path)
    resume(stopped)
    assert_same(uninterrupted, stopped)


def test_a_full_disk_while_the_log_is_written(tmp_path):
    uninterrupted = train(tmp_path, "training.checkpoint_every=1000")
    stopped = train(tmp_path, "training.checkpoint_every=1000", TEST_SIGNALS=f"loss {STEPS + 1} SIGTERM", expect=143)
    log = stopped.log.read_bytes()
    code, text = limited(tmp_path, len(log) + 100, "resume", stopped.folder, *TRUST)
    assert code == 2, text
    assert "Traceback" not in text
    assert stopped.log.read_bytes() == log
    resume(stopped)
    assert_same(uninterrupted, stopped)


def test_a_line_of_the_log_is_written_whole_or_not_at_all(damaged, monkeypatch):
    """A disk may take half a line."""
    with Log(Run(damaged), samples=1) as log:
        before = Run(damaged).log.read_bytes()
        file = log.file

        class Full:
            def write(self, line: bytes) -> int:
                return file.write(line[:10])

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        log.file = Full()
        with pytest.raises(WriteError, match=r"log\.jsonl could not be written: No space left on device"):
            log.write(kind="step", step=3)
        assert Run(damaged).log.read_bytes() == before


def test_what_cannot_be_written_is_named_and_the_earlier_file_stays(tmp_path):
    file = tmp_path / "file.txt"
    write_text(file, "first")
    with (
        pytest.raises(WriteError, match=r"file\.txt could not be written: .*\. The earlier one is untouched\."),
        whole(file),
    ):
        raise OSError(28, "No space left on device")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(WriteError, match=r"file\.txt/below could not be written: "):
        write_text(file / "below", "x")


# Ctrl-C


@pytest.mark.parametrize("delay", [0.0, 0.2, 0.5])
def test_an_interrupt_while_torch_is_imported_shows_no_traceback(tmp_path, delay):
    with command("runs", folder=tmp_path) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        until(lambda: process.poll() is not None or "libtorch" in maps.read_text())
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in errors
    assert (process.returncode, errors) in ((130, "interrupted\n"), (0, "")), text  # or it was done by then


def test_a_program_that_uses_the_library_keeps_its_own_interrupts():
    code = "import signal, equipoise; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())

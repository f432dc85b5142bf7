"""Two processes train as one does, and are stopped and resumed like one."""

import shlex
import signal

import pytest

from equipoise.lab.files import read_json
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run
from lab_helpers import (
    PATIENCE,
    STEPS,
    TRUST,
    assert_readable,
    assert_same,
    command,
    latest,
    resume,
    resume_command,
    run,
    run_two,
    same_weights,
    start_two,
    train,
    until,
    write_recipe,
)

# No random masks, no statistics of a batch: what a process computes does not depend on which samples it is given.
# 50 samples in batches of 15: 15 are shared as 8 and 7, and the last 5 as 3 and 2.
PLAIN = (
    "model.dropout=0.0",
    "model.norm=false",
    "task.shift=0",
    "training.precision=float64",
    "training.batch_size=15",
    "tolerance.relative=1e-6",
    "optimizer.eps=1e-4",  # Adam divides by the size of gradients, however small
    "phases.0.epochs=5",
)


def train_two(folder, *changes: str, expect: int = 0, **settings) -> Run:
    run_two(folder, "train", write_recipe(folder), *changes, expect=expect, **settings)
    return latest(folder)


def resume_two(trained: Run, expect: int = 0, **settings) -> str:
    return run_two(trained.folder.parent.parent, "resume", trained.folder, *TRUST, expect=expect, **settings)


def assert_close(first: Run, second: Run, relative: float) -> None:
    """The weights of two runs agree to a relative error, tensor by tensor."""
    a, b = (checkpoints.read(trained.last)[0] for trained in (first, second))
    for name in a:
        if name.startswith("model/") and a[name].is_floating_point():
            assert (a[name] - b[name]).norm() <= relative * a[name].norm(), name


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("one"), *PLAIN)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Run:
    return train_two(tmp_path_factory.mktemp("two"), *PLAIN)


def test_two_processes_train_as_one_does(one, two):
    assert (one.result or {})["steps"] == (two.result or {})["steps"] == 20
    assert_close(one, two, 1e-12)
    for first, second in zip(one.epochs(), two.epochs(), strict=True):
        for split in ("train", "val"):
            assert first[split]["accuracy"] == second[split]["accuracy"]
            assert first[split]["loss"] == pytest.approx(second[split]["loss"], rel=1e-10)
            solves = [record[split]["solver"]["forward"] for record in (first, second)]
            assert solves[0]["samples"] == solves[1]["samples"]
            assert solves[0]["failed"] == solves[1]["failed"] == 0


def test_what_is_logged_at_a_step_is_of_the_whole_batch(one, two):
    for first, second in zip(one.records(), two.records(), strict=True):
        if first["kind"] == "step":
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-10)
            assert first["gradient_norm"] == pytest.approx(second["gradient_norm"], rel=1e-10)


def test_two_processes_measure_as_one_does(one, two, tmp_path):
    words = ("evaluate", two.folder, *TRUST, "--split", "train", "--json", "numbers.json")
    run(tmp_path, *words)
    alone = read_json(tmp_path / "numbers.json")
    run_two(tmp_path, *words)
    together = read_json(tmp_path / "numbers.json")
    assert alone["accuracy"] == together["accuracy"]
    assert alone["loss"] == pytest.approx(together["loss"], rel=1e-13)
    assert alone["solver"]["forward"]["steps"] == together["solver"]["forward"]["steps"]


def test_only_the_leading_process_writes_and_talks(tmp_path):
    processes = start_two(
        tmp_path, "train", write_recipe(tmp_path), "phases.0.epochs=1", second={"TEST_READ_ONLY": "1"}
    )
    assert [process.wait() for process in processes] == [0, 0], processes[1].text
    assert "test accuracy" in processes[0].text
    assert "accuracy" not in processes[1].text


# Random masks and the statistics of batches make it harder; both processes must go on exactly as they would have.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Run:
    return train_two(tmp_path_factory.mktemp("uninterrupted"))


def test_two_processes_are_killed_and_resumed(tmp_path, uninterrupted):
    processes = start_two(tmp_path, "train", write_recipe(tmp_path), TEST_SIGNALS="loss 6 SIGKILL")
    assert -9 in [process.wait() for process in processes]  # the other may have noticed first, and given up
    killed = latest(tmp_path)
    assert_readable(killed)
    resume_two(killed)
    assert_same(uninterrupted, killed)


def test_one_of_two_processes_is_asked_to_stop(tmp_path, uninterrupted):
    """The other one stops at the same step."""
    text = run_two(tmp_path, "train", write_recipe(tmp_path), second={"TEST_SIGNALS": "loss 3 SIGTERM"}, expect=143)
    assert "stopped at step 3 and saved" in text
    stopped = latest(tmp_path)
    assert checkpoints.read(stopped.last)[1]["progress"]["position"]["step"] == 3
    resume_two(stopped)
    assert_same(uninterrupted, stopped)


def test_a_stop_between_the_last_step_and_the_validation(tmp_path, uninterrupted):
    """Running statistics are those of the leading process, whether or not training was stopped before they are used."""
    stopped = train_two(tmp_path, TEST_SIGNALS=f"loss {STEPS} SIGTERM", expect=143)
    resume_two(stopped)
    assert_same(uninterrupted, stopped)


def test_a_run_of_two_processes_goes_on_with_one(one, tmp_path):
    stopped = train_two(tmp_path, *PLAIN, TEST_SIGNALS="loss 10 SIGTERM", expect=143)
    resume(stopped)
    assert_close(one, stopped, 1e-10)
    assert (stopped.result or {})["steps"] == 20


def test_two_processes_train_against_an_adversary(tmp_path):
    changes = ("task.name=robustness", "task.radius=0.05", "task.train_steps=1", "task.steps=2", "phases.0.epochs=1")
    trained = train_two(tmp_path, *changes)
    test = (trained.result or {})["test"]
    assert 0 <= test["robust accuracy"] <= test["accuracy"] <= 1


def test_phases_of_two_processes(tmp_path):
    phases = '[[phases]]\nepochs = 1\ngradient = {name = "unrolled", steps = 5}\n\n[[phases]]\nepochs = 1\n'
    write_recipe(tmp_path, phases)
    run_two(tmp_path, "train", "patterns.toml")
    stopped = run_two(tmp_path, "train", "patterns.toml", TEST_SIGNALS=f"loss {STEPS} SIGTERM", expect=143)
    run_two(tmp_path, *shlex.split(resume_command(stopped)))
    first, second = (Run(tmp_path / "runs" / name) for name in ("patterns-001", "patterns-002"))
    assert same_weights(first.last, second.last)


def test_a_sweep_of_two_processes(tmp_path):
    words = ("train", write_recipe(tmp_path), "seeds=2", "phases.0.epochs=1")
    run_two(tmp_path, *words)
    text = run_two(tmp_path, *words, TEST_SIGNALS=f"loss {STEPS + 2} SIGTERM", expect=143)
    run_two(tmp_path, *shlex.split(resume_command(text)))
    first, second = (tmp_path / "runs" / name for name in ("patterns-001", "patterns-002"))
    for seed in ("seed-0", "seed-1"):
        assert_same(Run(first / seed), Run(second / seed))


def test_failed_steps_are_counted_together(tmp_path):
    changes = ("tolerance.max_steps=1", "tolerance.relative=1e-9", "failures.policy=skip", "failures.stop_after=3")
    processes = start_two(tmp_path, "train", write_recipe(tmp_path), *changes)
    assert [process.wait() for process in processes] == [2, 2]
    assert "3 steps in a row failed" in processes[0].text


def test_a_batch_that_is_broken_for_one_process_is_for_both(tmp_path):
    broken = train_two(tmp_path, "data.poison=7", "data.validation=0", "task.shift=0")
    assert (broken.result or {})["failed_steps"] == 2  # one of every epoch
    tensors, _ = checkpoints.read(broken.last)
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if not name.startswith("sums/"))


def test_a_run_in_use_is_refused_to_two_processes(tmp_path):
    stopped = train(tmp_path, TEST_SIGNALS="loss 2 SIGTERM", expect=143)
    with stopped.alone():
        processes = start_two(tmp_path, "resume", stopped.folder, *TRUST)
        codes = [process.wait() for process in processes]
    assert codes == [2, 2], processes[1].text
    assert processes[0].text.startswith(f"equipoise: {stopped.folder} is being trained by another process")
    assert "Traceback" not in processes[1].text


def test_torchrun_is_asked_to_stop(tmp_path):
    """torchrun hands SIGTERM on to the processes, which stop at the same step; they can be continued."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    words = ("train", write_recipe(tmp_path), "phases.0.epochs=200")
    tries = 3  # on a busy machine, processes of torchrun may wait for its store for ever
    while True:
        with command(*words, python=launcher, folder=tmp_path) as torchrun:
            try:
                until(lambda run=torchrun: run.poll() is not None or latest(tmp_path).records(), patience=60)
            except TimeoutError:
                tries -= 1
                assert tries
                torchrun.terminate()  # which ends its processes
                torchrun.communicate(timeout=PATIENCE)
                continue
            torchrun.send_signal(signal.SIGTERM)
            text, errors = torchrun.communicate(timeout=PATIENCE)
            break
    assert torchrun.returncode, errors
    assert resume_command(text) == "resume runs/patterns-001 --trust lab_helpers"
    assert text.count("stopped at step") == 1
    stopped = latest(tmp_path)
    assert checkpoints.read(stopped.last)[1]["progress"]["position"]["step"] == stopped.records()[-1]["step"]
    step = int(text.partition("stopped at step ")[2].split()[0])
    assert f"resumed at step {step}" in resume_two(stopped, TEST_SIGNALS="loss 1 SIGTERM", expect=143)

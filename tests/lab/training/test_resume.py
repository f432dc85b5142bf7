"""Training that is killed, stopped and resumed ends as if nothing had happened, bit for bit."""

import math
import pickle
import random
import re
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.files import read_json
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.checkpoints import CheckpointError
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training import trainer as training
from equipoise.lab.training.evaluate import add, evaluate
from lab_helpers import (
    EPOCHS,
    PATIENCE,
    STEPS,
    TRUST,
    assert_readable,
    assert_same,
    command,
    latest,
    parts,
    patterns,
    resume,
    resume_command,
    run,
    same_weights,
    start,
    timeless,
    train,
    until,
    write_recipe,
)

NEVER = "training.checkpoint_every=1000"  # only after every epoch


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """The recipe trained without a stop."""
    return train(tmp_path_factory.mktemp("reference"))


# Killed


@pytest.mark.parametrize(("kills", "epochs"), [(3, 8), pytest.param(100, 100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, kills, epochs):
    """Weights, optimizer, log and best weights are those of a run that was left alone, to the bit."""
    changes = (f"phases.0.epochs={epochs}", "training.checkpoint_every=1", "model.ballast=100000")
    uninterrupted = train(tmp_path, *changes)
    result = uninterrupted.result or {}
    moments, pace = random.Random(0), result["seconds"] / result["steps"]
    process = start(tmp_path, "train", write_recipe(tmp_path), *changes)
    killed = Run(tmp_path / "runs" / "patterns-002")
    unfinished, steps, ended = 0, [], False
    for _ in range(kills):
        until(lambda process=process: "training samples" in process.text)
        time.sleep(moments.uniform(0, 4 * pace))
        process.send(signal.SIGKILL)
        code = process.wait()
        if ended := code == 0:  # on a busy machine it may be at its end before that
            break
        assert code == -signal.SIGKILL, process.text
        assert_readable(killed)
        unfinished += len(parts(killed))
        steps.append(checkpoints.read(killed.last)[1]["progress"]["position"]["step"] if killed.last.exists() else 0)
        for part in parts(killed):
            part.write_bytes(b"nobody must read this")
        process = start(tmp_path, "resume", killed.folder, *TRUST)
    assert steps
    assert ended or process.wait() == 0, process.text
    assert_same(uninterrupted, killed)
    assert (killed.folder / "result.json").exists()
    print(
        f"{len(steps)} kills at {len(set(steps))} different steps up to {max(steps)} of {STEPS * epochs}, {unfinished} "
        f"while a file was written: {len(killed.records())} lines of the log, last and best weights the same to the bit"
    )


def test_killed_after_the_epoch_was_logged_and_before_it_was_saved(tmp_path):
    """The log is ahead of the checkpoint, which was written at the very same step."""
    changes = (f"training.checkpoint_every={STEPS}",)
    uninterrupted = train(tmp_path, *changes)
    killed = train(tmp_path, *changes, TEST_SIGNALS="best.safetensors 1 SIGKILL", expect=-9)
    assert len(killed.epochs()) == 1
    resume(killed)
    assert_same(uninterrupted, killed)


def test_killed_before_the_first_checkpoint(tmp_path):
    uninterrupted = train(tmp_path, NEVER)
    killed = train(tmp_path, NEVER, TEST_SIGNALS="loss 3 SIGKILL", expect=-9)
    assert not killed.last.exists()
    assert len(killed.records()) == 2
    with killed.log.open("a") as log:
        log.write('{"kind": "st')  # a line that was cut short
    resume(killed)
    assert_same(uninterrupted, killed)


def test_what_a_killed_process_has_left_unfinished_is_removed(tmp_path):
    killed = train(tmp_path, TEST_SIGNALS="last.safetensors 3 SIGKILL", expect=-9)
    assert len(parts(killed)) == 1
    resume(killed)
    assert not parts(killed)


PHASES = """
[[phases]]
name = "warm-up"
epochs = 1
gradient = {name = "unrolled", steps = 6}

[[phases]]
epochs = 1
model = {activation = "relu"}

[[phases]]
epochs = 1
optimizer = {name = "sgd", lr = 0.05, momentum = 0.9}
schedule = {name = "cosine"}
"""


@pytest.mark.slow
def test_killed_before_every_change_of_a_file(tmp_path):
    uninterrupted = train(tmp_path, phases=PHASES)
    number = 0
    while True:
        number += 1
        process = start(tmp_path, "train", write_recipe(tmp_path, PHASES), TEST_SIGNALS=f"patterns {number} SIGKILL")
        if process.wait() == 0:
            break
        killed = latest(tmp_path)
        if (killed.folder / "run.json").exists():  # there is something to resume
            assert_readable(killed)
            resume(killed)
            assert_same(uninterrupted, killed)
    assert number > 30


# Stopped


@pytest.mark.parametrize(
    ("moment", "code"),
    [
        ("loss 6 SIGINT", 130),
        (f"loss {STEPS} SIGTERM", 143),  # the last step of an epoch
        ("measure 3 SIGTERM", 143),  # validation
        ("measure 6 SIGINT", 130),  # the test of the last weights, when training is done
    ],
)
def test_stopped(tmp_path, reference, moment, code):
    text = run(tmp_path, "train", write_recipe(tmp_path), TEST_SIGNALS=moment, expect=code)
    stopped = latest(tmp_path)
    assert stopped.status == "interrupted"
    assert not parts(stopped)
    run(tmp_path, *shlex.split(resume_command(text)))
    assert_same(reference, stopped)


def test_stopped_in_the_test_of_the_best_weights(tmp_path):
    """Which are those of the first epoch where nothing is learned."""
    changes = ("optimizer.lr=0.0", "schedule.name=constant", "model.norm=false")
    uninterrupted = train(tmp_path, *changes)
    assert (uninterrupted.result or {})["best"]["epoch"] == 1
    stopped = train(tmp_path, *changes, TEST_SIGNALS="measure 9 SIGTERM", expect=143)
    assert stopped.status == "interrupted"
    assert not parts(stopped)
    resume(stopped)
    assert_same(uninterrupted, stopped)


def test_stopped_at_the_step_it_says(tmp_path):
    text = run(tmp_path, "train", write_recipe(tmp_path), TEST_SIGNALS="loss 6 SIGTERM", expect=143)
    assert "stopped at step 6 and saved" in text
    assert checkpoints.read(latest(tmp_path).last)[1]["progress"]["position"]["step"] == 6


def test_the_command_to_continue_works_for_any_folder_name(tmp_path):
    words = ("train", write_recipe(tmp_path), "--runs", "my runs")
    text = run(tmp_path, *words, TEST_SIGNALS="loss 2 SIGINT", expect=130)
    assert "resumed at step 2" in run(tmp_path, *shlex.split(resume_command(text)))


def test_two_interrupts_stop_at_once(tmp_path, reference):
    moment = "loss 6 SIGINT,loss 6 SIGINT"
    text = run(tmp_path, "train", write_recipe(tmp_path), TEST_SIGNALS=moment, expect=130)
    assert text.splitlines()[-1] == "interrupted"
    stopped = latest(tmp_path)
    assert checkpoints.read(stopped.last)[1]["progress"]["position"]["step"] == 4  # that of the epoch
    resume(stopped)
    assert_same(reference, stopped)


def test_stopped_by_a_person(tmp_path):
    """The whole command, from outside."""
    with command("train", write_recipe(tmp_path), "phases.0.epochs=200", folder=tmp_path) as process:
        until(lambda: process.poll() is not None or latest(tmp_path).records())
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, "")
    assert resume_command(text) == "resume runs/patterns-001 --trust lab_helpers"


def test_a_sweep_is_resumed_as_a_whole(tmp_path):
    uninterrupted = train(tmp_path, "seeds=2").folder
    words = ("train", write_recipe(tmp_path), "seeds=2")
    text = run(tmp_path, *words, TEST_SIGNALS="loss 5 SIGTERM", expect=143)  # in the first seed
    stopped = latest(tmp_path).folder
    assert resume_command(text) == f"resume {stopped.relative_to(tmp_path)} --trust lab_helpers"
    text = run(tmp_path, "resume", stopped, *TRUST, TEST_SIGNALS="loss 6 SIGTERM", expect=143)  # in the second
    text = run(tmp_path, *shlex.split(resume_command(text)))
    assert "over 2 seeds" in text
    for seed in ("seed-0", "seed-1"):
        assert_same(Run(uninterrupted / seed), Run(stopped / seed))
    assert timeless(Run(uninterrupted).result) == timeless(Run(stopped).result)
    seeds = [Run(stopped / seed).last for seed in ("seed-0", "seed-1")]
    assert not same_weights(*seeds)


def test_a_sweep_does_not_go_on_after_a_request_at_the_end_of_a_run(tmp_path):
    text = run(tmp_path, "train", write_recipe(tmp_path), "seeds=2", TEST_SIGNALS="result.json 1 SIGTERM", expect=143)
    run(tmp_path, *shlex.split(resume_command(text)))


def test_a_table_that_is_stopped_shows_what_it_has(tmp_path):
    recipe = write_recipe(tmp_path)
    table = "".join(f'[[rows]]\nlabel = "row {i}"\nrecipe = "{recipe}"\nchanges = {{ seed = {i} }}\n' for i in (1, 2))
    (tmp_path / "two.toml").write_text(f'title = "x"\n{table}')
    words = ("reproduce", "two.toml", "phases.0.epochs=1")
    text = run(tmp_path, *words, TEST_SIGNALS=f"loss {STEPS + 2} SIGINT", expect=130)  # in the second row
    assert "1 of 2 rows so far." in text
    assert re.search(r"^\| row 1 \| accuracy \| - \| [\d.]+ \|", text, re.M)
    assert "| row 2 |" not in text
    assert resume_command(text) == "resume runs/two-001 --trust lab_helpers"
    text = run(tmp_path, *shlex.split(resume_command(text)))
    assert "so far" not in text
    assert "| row 2 |" in text
    text = run(tmp_path, *words, TEST_SIGNALS="loss 2 SIGINT", expect=130)  # in the first
    assert "| row" not in text


def test_a_figure_is_resumed_as_a_whole(tmp_path):
    recipe = write_recipe(tmp_path)
    (tmp_path / "two.toml").write_text(
        f'title = "x"\nfigure = "convergence"\nrecipes = ["{recipe}", "{recipe} seed=1"]\nsamples = 4\n'
    )
    words = ("figure", "two.toml", "phases.0.epochs=1", "--out", "drawn.png")
    text = run(tmp_path, *words, TEST_SIGNALS="loss 2 SIGTERM", expect=143)  # in the first training
    again = resume_command(text)
    assert again == "resume runs/two-001 --trust lab_helpers --out drawn.png"
    text = run(tmp_path, *shlex.split(again), TEST_SIGNALS=f"loss {STEPS} SIGTERM", expect=143)  # in the second
    assert not (tmp_path / "drawn.png").exists()
    assert "drawn.png" in run(tmp_path, *shlex.split(resume_command(text)))
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    runs = [Run(tmp_path / "runs" / "two-001" / f"recipe-{i}" / "patterns-001") for i in (1, 2)]
    assert [found.status for found in runs] == ["finished"] * 2
    assert not same_weights(*(found.last for found in runs))


def test_a_finished_run_is_left_as_it_is(tmp_path):
    finished = train(tmp_path, "phases.0.epochs=1")

    def files() -> dict[Path, tuple[bytes, int]]:
        paths = (path for path in finished.folder.rglob("*") if path.is_file() and path.name != ".lock")
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    before = files()
    text = resume(finished)
    assert files() == before
    assert f"test accuracy     {(finished.result or {})['test']['accuracy']:.2%}" in text


def test_a_run_belongs_to_one_process_at_a_time(tmp_path, reference):
    first = start(tmp_path, "train", write_recipe(tmp_path), TEST_SIGNALS="loss 5 SIGSTOP")
    until(lambda: Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")  # it stands still
    held = latest(tmp_path)
    try:
        assert held.status == "running"
        text = resume(held, expect=2)
        assert text.startswith(f"equipoise: {held.folder} is being trained by another process")
    finally:
        first.send(signal.SIGCONT)
    assert first.wait() == 0, first.text
    assert_same(reference, held)


# Phases and schedules


@pytest.mark.parametrize(
    ("moment", "code", "changes", "stops"),
    [
        ("loss 1 SIGTERM", 143, (), 3 * STEPS),  # every process makes one step
        (f"loss {STEPS + 1} SIGKILL", -9, (NEVER,), 2),  # every process starts where an epoch and a phase end
        ("measure 3 SIGTERM", 143, (), 2),  # every process starts before a validation
    ],
)
def test_phases_are_stopped_anywhere(tmp_path, moment, code, changes, stops):
    uninterrupted = train(tmp_path, *changes, phases=PHASES)
    stopped = train(tmp_path, *changes, phases=PHASES, TEST_SIGNALS=moment, expect=code)
    for _ in range(stops - 1):
        resume(stopped, TEST_SIGNALS=moment, expect=code)
    resume(stopped)
    assert_same(uninterrupted, stopped)


def test_phases_change_what_they_say(tmp_path):
    run = train(tmp_path, phases=PHASES)
    rates = [record["lr"] for record in run.records() if record["kind"] == "step"]
    assert rates == pytest.approx(
        [one_cycle(step, 2 * STEPS, 0.02) for step in range(2 * STEPS)]
        + [cosine(step, STEPS, 0.05) for step in range(STEPS)]
    )
    backward = [list(epoch["train"]["solver"]) for epoch in run.epochs()]
    assert backward == [["forward"], ["forward", "backward"], ["forward", "backward"]]
    assert [epoch["phase"] for epoch in run.epochs()] == [0, 1, 2]
    _, facts = checkpoints.read(run.last)
    assert facts["phase"] == 2
    assert facts["learner"]["optimizer"]["groups"][0]["momentum"] == 0.9
    assert "betas" not in facts["learner"]["optimizer"]["groups"][0]


def test_a_phase_after_one_with_an_optimizer_of_its_own(tmp_path):
    phases = EPOCHS + '\n[[phases]]\nepochs = 1\noptimizer = {name = "sgd", lr = 0.1}\n\n[[phases]]\nepochs = 1\n'
    uninterrupted = train(tmp_path, "phases.0.epochs=1", phases=phases)
    stopped = train(tmp_path, "phases.0.epochs=1", phases=phases, TEST_SIGNALS="loss 10 SIGTERM", expect=143)
    resume(stopped)
    assert_same(uninterrupted, stopped)


def test_the_best_weights_are_tested_in_their_own_phase(tmp_path):
    """What the result says of the best weights is what `equipoise evaluate` says of them."""
    worse = 'model = {activation = "cos"}\noptimizer = {lr = 0.0}\nschedule = {name = "constant"}\n'
    trained = train(tmp_path, phases=f"{EPOCHS}\n[[phases]]\nepochs = 1\n{worse}")
    result = trained.result or {}
    assert result["best"]["epoch"] <= 2
    run(tmp_path, "evaluate", trained.folder, "--json", "numbers.json", *TRUST)
    assert read_json(tmp_path / "numbers.json") == result["test"]


@pytest.mark.parametrize("better", [True, False])
def test_weights_that_are_best_and_last_are_tested_once(tmp_path, monkeypatch, better):
    """What was measured already is not measured again: on a slow machine that takes as long as an epoch."""
    measured = []

    def counted(model, task, split, *rest):
        measured.append(len(split))
        found = evaluate(model, task, split, *rest)
        turn = measured.count(15) if better else -measured.count(15)
        return replace(found, metrics={**found.metrics, "accuracy": float(turn)}) if len(split) == 15 else found

    monkeypatch.setattr(training, "evaluate", counted)
    words = ["data={name='digits', limit=50, validation=15}", "phases.0.epochs=2", "--runs", str(tmp_path)]
    assert main(["train", "core/digits", "--budget", "smoke", *words]) == 0
    result = read_json(tmp_path / "core-digits-001" / "result.json")
    assert measured == ([15, 15, 50] if better else [15, 15, 50, 50])
    assert result["weights"] == "best"
    assert result["best"]["epoch"] == (2 if better else 1)
    assert main(["evaluate", str(tmp_path / "core-digits-001"), "--json", str(tmp_path / "numbers.json")]) == 0
    assert read_json(tmp_path / "numbers.json") == result["test"]


def test_the_best_weights_are_best_by_the_task_of_the_last_phase(tmp_path):
    """Accuracy and robust accuracy cannot be compared."""
    attacked = 'task = {name = "robustness", radius = 0.5, steps = 2, train_steps = 1}'
    trained = train(tmp_path, phases=f"{EPOCHS}\n[[phases]]\nepochs = 1\n{attacked}\n")
    assert trained.epochs()[-1]["val"]["robust accuracy"] < trained.epochs()[-2]["val"]["accuracy"]
    assert (trained.result or {})["best"]["metric"] == "robust accuracy"


def cosine(step: float, steps: float, rate: float, final: float = 0.0) -> float:
    return final + (rate - final) * (1 + math.cos(math.pi * step / steps)) / 2


def one_cycle(step: int, steps: int, top: float, start: float = 25.0, end: float = 1e4, warmup: float = 0.3) -> float:
    """Half a cosine up to the top, and another down."""
    turn = warmup * steps - 1
    first, last = top / start, top / start / end
    if step <= turn:
        return cosine(step, turn, first, top) if turn else top
    return cosine(step - turn, steps - 1 - turn, top, last)


TOTAL = 2 * STEPS  # of both epochs


@pytest.mark.parametrize(
    ("schedule", "rate", "momentum"),
    [
        (["schedule.name=constant"], lambda step: 0.1, lambda step: 0.9),
        (
            ["schedule.name=step", "schedule.every=1", "schedule.factor=0.5"],
            lambda step: 0.1 * 0.5 ** (step // STEPS),
            lambda step: 0.9,
        ),
        (
            ["schedule.name=step", "schedule.at=[1]"],
            lambda step: 0.1 if step < STEPS else 0.01,
            lambda step: 0.9,
        ),
        (
            ["schedule.name=cosine", "schedule.final=0.01"],
            lambda step: cosine(step, TOTAL, 0.1, 0.01),
            lambda step: 0.9,
        ),
        (
            ["schedule.name=one-cycle", "schedule.momentum=[0.5, 0.8]", "schedule.start=10", "schedule.end=100"],
            lambda step: one_cycle(step, TOTAL, 0.1, 10, 100),
            lambda step: 1.3 - one_cycle(step, TOTAL, 0.8, 0.8 / 0.5, 1.0),  # between 0.8 and 0.5, the other way
        ),
    ],
    ids=["constant", "step", "step at", "cosine", "one-cycle"],
)
def test_schedules(tmp_path, schedule, rate, momentum):
    """What they say, though training is stopped and resumed in the middle."""
    changes = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.nesterov=true", *schedule)
    stopped = train(tmp_path, *changes, TEST_SIGNALS="loss 3 SIGTERM", expect=143)
    (group,) = checkpoints.read(stopped.last)[1]["learner"]["optimizer"]["groups"]
    assert (group["lr"], group["momentum"]) == pytest.approx((rate(3), momentum(3)))
    resume(stopped)
    rates = [record["lr"] for record in stopped.records() if record["kind"] == "step"]
    assert rates == pytest.approx([rate(step) for step in range(TOTAL)])


# Optimizers, precisions, layouts


@pytest.mark.parametrize(
    "changes",
    [
        "optimizer.name=sgd optimizer.momentum=0.9 schedule.name=step schedule.every=1 training.clip=0.1",
        "optimizer.name=adam optimizer.amsgrad=true training.precision=float64",
        "optimizer.name=nadam training.precision=bfloat16",
        "optimizer.name=rmsprop optimizer.centered=true schedule.name=constant training.precision=float16",
        "optimizer.name=adamw model.name=conv-equilibrium model.channels=8 model.pool=2 training.channels_last=true",
        "optimizer.name=adagrad optimizer.lr_decay=0.1 schedule.name=cosine data.validation=0",
        "optimizer.name=torch.optim:Adadelta schedule.end=inf training.test=epoch",
    ],
)
def test_every_setting_resumes(tmp_path, changes):
    uninterrupted = train(tmp_path, *changes.split())
    stopped = train(tmp_path, *changes.split(), TEST_SIGNALS=f"loss {STEPS + 2} SIGTERM", expect=143)
    resume(stopped, "--trust", "torch.optim")
    assert_same(uninterrupted, stopped)


# Failures

FAILING = ("tolerance.max_steps=1", "tolerance.relative=1e-9", "model.norm=false")


def weights_without_training(folder: Path) -> dict[str, torch.Tensor]:
    """Those that a run starts from: training with a rate of zero."""
    run = train(folder, "optimizer.lr=0.0", "schedule.name=constant", "phases.0.epochs=1", "model.norm=false")
    return {name: value for name, value in checkpoints.read(run.last)[0].items() if name.startswith("model/")}


def test_failed_solves_are_reported_and_trained_on(tmp_path):
    failing = train(tmp_path, *FAILING)
    assert (failing.result or {})["failed_steps"] == 2 * STEPS
    assert failing.epochs()[0]["train"]["solver"]["forward"]["failed"] == 1
    start, end = weights_without_training(tmp_path), checkpoints.read(failing.last)[0]
    assert not torch.equal(start["model/head.weight"], end["model/head.weight"])


def test_failed_steps_are_skipped(tmp_path):
    """No weight moves; the first step is skipped, too, which torch must not take for a mistake."""
    failing = train(tmp_path, *FAILING, "failures.policy=skip")
    assert (failing.result or {})["failed_steps"] == 2 * STEPS
    start, end = weights_without_training(tmp_path), checkpoints.read(failing.last)[0]
    assert all(torch.equal(start[name], end[name]) for name in start)


def test_too_many_failed_steps_end_training(tmp_path):
    words = ("train", write_recipe(tmp_path), *FAILING, "failures.stop_after=5")
    text = run(tmp_path, *words, expect=2)
    failed = latest(tmp_path)
    assert text.splitlines()[-1].startswith("equipoise: 5 steps in a row failed")
    assert "Traceback" not in text
    assert checkpoints.read(failed.last)[1]["progress"]["position"]["step"] == 5
    assert failed.result is None


def test_running_out_of_steps_may_be_meant(tmp_path):
    meant = train(tmp_path, *FAILING, "failures.share=1.0", "failures.stop_after=1")
    assert (meant.result or {})["failed_steps"] == 0
    assert meant.epochs()[0]["train"]["solver"]["forward"]["failed"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        "optimizer.name=sgd optimizer.lr=1e38 schedule.name=constant",
        "model.activation=log",  # loss and gradient are numbers then: a solve that is not finite returns where it began
    ],
)
def test_training_that_has_diverged_ends_even_where_running_out_of_steps_is_meant(tmp_path, changes):
    meant = ("model.norm=false", "failures.share=1.0", "failures.stop_after=3")
    words = ("train", write_recipe(tmp_path), *changes.split(), *meant)
    text = run(tmp_path, *words, expect=2)
    assert text.splitlines()[-1].startswith("equipoise: 3 steps in a row failed")
    assert checkpoints.read(latest(tmp_path).last)[1]["progress"]["position"]["step"] < TOTAL


@pytest.mark.parametrize("norm", ["false", "true"])
def test_a_step_that_is_not_a_number_is_not_made(tmp_path, norm):
    """One image breaks the batch that it is in; nothing of that batch stays in the weights or running statistics."""
    changes = ("data.poison=7", "data.validation=0", "task.shift=0", f"model.norm={norm}")
    broken = train(tmp_path, *changes)
    assert (broken.result or {})["failed_steps"] == 2  # one of every epoch
    losses = [record["loss"] for record in broken.records() if record["kind"] == "step"]
    assert sum(loss is None for loss in losses) == 2
    tensors, _ = checkpoints.read(broken.last)
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if not name.startswith("sums/"))


def test_running_statistics_that_are_no_numbers_are_not_kept(tmp_path):
    """Where a solve gives up, outputs are numbers though inputs were none: the loss does not show it."""
    changes = ("data.poison=7", "data.validation=0", "task.shift=0", "model.honest=false")
    broken = train(tmp_path, *changes)
    losses = [record["loss"] for record in broken.records() if record["kind"] == "step"]
    assert None not in losses
    tensors, _ = checkpoints.read(broken.last)
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if not name.startswith("sums/"))


# Loading


def test_a_trained_model_is_loaded(reference):
    images, labels = patterns().test.read(torch.arange(25))
    model = eq.load(reference.folder, trust="lab_helpers")
    result = reference.result or {}
    with torch.no_grad():
        outputs = model(images / 255)
        assert not model.training
        assert (outputs.argmax(1) == labels).double().mean().item() == result["test"]["accuracy"]
        assert torch.equal(outputs, eq.load(reference.best, trust="lab_helpers")(images / 255))
        last = eq.load(reference.folder, weights="last", trust="lab_helpers")(images / 255)
        assert torch.equal(last, eq.load(reference.last, trust="lab_helpers")(images / 255))
        loss = nn.functional.cross_entropy(last.double(), labels).item()
    assert loss == pytest.approx(result["test_of_last"]["loss"], rel=1e-5)


def test_a_model_beside_its_recipe_is_found(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_net.py").write_text("from lab_helpers import Net\n\n\nclass MyNet(Net): ...\n")
    recipe = write_recipe(tmp_path / "mine")
    run(tmp_path, "train", recipe, "model.name=my_net:MyNet", TEST_SIGNALS="loss 2 SIGTERM", expect=143)
    resume(latest(tmp_path), "--trust", "my_net")
    assert type(eq.load(latest(tmp_path).folder, trust="my_net")).__name__ == "MyNet"


def test_files_that_are_not_checkpoints_are_named(tmp_path, reference):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(reference.last.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors is not a safetensors file, or is damaged"):
        eq.load(damaged)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(3)}, foreign, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"foreign\.safetensors was not written by equipoise"):
        eq.load(foreign)
    for number, metadata in enumerate(({"equipoise": "{"}, {"equipoise": "{}", "format": "one"}, {"equipoise": "{}"})):
        foreign = tmp_path / f"foreign-{number}.safetensors"
        save_file({"weight": torch.zeros(3)}, foreign, metadata={"format": "1", **metadata})
        with pytest.raises(CheckpointError, match=rf"foreign-{number}\.safetensors"):
            eq.load(foreign)
    newer = tmp_path / "newer.safetensors"
    save_file({}, newer, metadata={"format": "2", "equipoise": "{}"})
    with pytest.raises(CheckpointError, match=r"newer\.safetensors was written by a newer equipoise"):
        eq.load(newer)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none\.safetensors"):
        eq.load(tmp_path / "none.safetensors")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_a_pickle_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("plain.safetensors", pickle.dumps(Bomb())),
        ("padded.safetensors", pickle.dumps(Bomb()) + b"\0" * 1000),
    ):
        Path(name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} is not a safetensors file"):
            eq.load(name)
    torch.save({"bomb": Bomb()}, "zip.safetensors")
    with pytest.raises(CheckpointError, match="zip.safetensors is not a safetensors file"):
        eq.load("zip.safetensors")
    assert not Path("exploded").exists()


def test_a_damaged_checkpoint_is_not_resumed(tmp_path):
    stopped = train(tmp_path, TEST_SIGNALS="loss 5 SIGTERM", expect=143)
    stopped.last.write_bytes(b"\x08")
    text = resume(stopped, expect=2)
    assert text.startswith(f"equipoise: {stopped.last} is not a safetensors file, or is damaged")


def test_sums_of_a_run_from_before_a_result_was_added_are_continued():
    total = {"forward results": torch.tensor([3.0, 1.0, 0.0, 0.0]), "loss": torch.tensor(2.0)}
    add(total, {"forward results": torch.ones(5), "loss": torch.tensor(1.0)})
    assert total["forward results"].tolist() == [4, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="the sums 'loss' have the shapes"):
        add(total, {"loss": torch.ones(2)})


def test_a_run_that_is_stopped_before_its_first_line_is_kept(tmp_path):
    """Nothing is logged yet, but there is a checkpoint, and the message says how to continue."""
    machine = Machine(torch.device("cpu"))
    with pytest.raises(training.Stopped), training.folder_to_train_in(tmp_path, "a/run", machine) as folder:
        (folder / "log.jsonl").touch()
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.safetensors").touch()
        raise training.Stopped(folder, 3, signal.SIGTERM, [])
    assert (folder / "checkpoints" / "last.safetensors").exists()
    with pytest.raises(ValueError, match="a mistake"), training.folder_to_train_in(tmp_path, "a/run", machine) as empty:
        raise ValueError("a mistake")
    assert not empty.exists()

"""Figures of few-shot learning, drawn by the command line from a small learner, against numbers worked out here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import Tolerance
from equipoise.cli import main
from equipoise.joint import AdamInput, optimize_input
from equipoise.lab.runs.folder import open_run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.papers.jiio.few_shot_figures import inner_time, opened
from official_files import picture, write

CPU = Machine(torch.device("cpu"))


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A learner of characters that are blots, with the folder of its data."""
    folder, blots = tmp_path_factory.mktemp("few-shot"), np.random.default_rng(0)
    for top, count in (("images_background", 12), ("images_evaluation", 10)):
        for character in range(count):
            blot = blots.integers(0, 2, (4, 4), dtype=np.uint8).repeat(7, 0).repeat(7, 1)
            for drawing in range(4):
                noise = blots.integers(0, 60, (28, 28), dtype=np.uint8)
                file = f"{top}/Made/character{character:02}/{character:04}_{drawing:02}.png"
                write(folder / "omniglot" / file, picture(190 * blot + noise))
    places = ["--data", str(folder), "--runs", str(folder), "--threads", "1"]
    assert main(["train", "jiio/omniglot", "--budget", "smoke", "data.queries=2", *places]) == 0
    return folder / "jiio-omniglot-001", folder


def drawn(name, learner, tmp_path, *changes):
    run, data = learner
    out = tmp_path / "figure.png"
    assert main(["figure", name, *changes, "--run", str(run), "--data", str(data), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    return json.loads(out.with_suffix(".json").read_text())["runs"][0]


def learnt(learner, episodes, solver, steps):
    """Share of right answers for query images after some steps of the inner loop."""
    run, data = learner
    here = opened(open_run(run), CPU, [Path(data)], episodes, episodes)
    model, (support, labels, query, answers) = here.trained.model, here.batches[0]
    with torch.no_grad(), quiet_failures():
        features, x = model.features(support), model.blank(len(support))
        if steps:
            limits = {"tolerance": Tolerance(relative=here.task.tolerance, max_steps=steps), "on_failure": "ignore"}
            start, solver = model.cell.start(x, features), solver or here.task.solver
            x = optimize_input(*here.task.inner(model), x, start, features, labels, solver=solver, **limits).x
        return (model(query, x).argmax(-1) == answers).double().mean().item()


def test_table_7_times_joint_steps_and_adam_on_the_same_episodes(learner, tmp_path):
    changes = ("episodes=6", "repeats=2", "adam_steps=3")
    methods = drawn("jiio/table7", learner, tmp_path, *changes)["methods"]
    assert list(methods) == ["joint, 10 steps", "Adam, 3 steps"]  # those of the task, unless others are asked for
    assert methods["joint, 10 steps"]["accuracy"] == pytest.approx(learnt(learner, 6, None, 10))
    assert methods["Adam, 3 steps"]["accuracy"] == pytest.approx(learnt(learner, 6, AdamInput(lr=0.1), 3))
    methods = drawn("jiio/table7", learner, tmp_path, *changes, "joint_steps=4")["methods"]
    assert list(methods) == ["joint, 4 steps", "Adam, 3 steps"]
    assert methods["joint, 4 steps"]["accuracy"] == pytest.approx(learnt(learner, 6, None, 4))
    for method in methods.values():
        assert len(method["seconds"]) == 2
        assert min(method["seconds"]) > 0
        assert method["median seconds"] == pytest.approx(sum(method["seconds"]) / 2)


def test_accuracy_over_joint_steps(learner, tmp_path):
    numbers = drawn("jiio/omniglot-steps", learner, tmp_path, "episodes=6", "batch_size=6")
    counts, accuracies = numbers["steps"], numbers["accuracy"]
    assert counts[0] == 0
    assert counts[-1] == 10
    for steps, accuracy in zip(counts, accuracies, strict=True):
        assert accuracy == pytest.approx(learnt(learner, 6, None, steps))


@pytest.mark.parametrize("options", [{"episodes": 0}, {"repeats": 0}, {"joint_steps": 0}, {"adam_steps": 0}])
def test_bad_options_get_their_sentence(learner, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is 0"):
        inner_time([open_run(learner[0])], CPU, **options)

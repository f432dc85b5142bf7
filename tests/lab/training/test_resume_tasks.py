"""Tasks that draw random numbers of their own, or new data in every epoch, resume bit for bit in mid-epoch."""

import signal

import pytest
import torch

from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.runs.folder import Run, list_runs
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training import trainer as training
from equipoise.lab.trust import Trust
from lab_helpers import assert_same

MACHINE = Machine(torch.device("cpu"))
DIGITS = 'name = "digits"\nlimit = 12\nvalidation = 4\nevaluation_limit = 4'
EPISODES = 'name = "tiny_episodes:episodes"'
GENERATOR = 'name = "generator"\nlatent = 4\nchannels = [8, 8]\ndownsamplings = 0\nexpansion = 1.0'
AUTOENCODER = 'name = "conv-ae"\nlatent = 4\nchannels = [8, 8, 8]'
VAE = 'name = "conv-vae"\nlatent = 4\nchannels = [8, 8, 8]'
LEARNER = 'name = "few-shot-mdeq"\nchannels = [4, 4]\ngroups = 2\ntask_length = 4'
CONV4 = 'name = "conv4"\nfilters = 4\nlayers = 2'
TASKS = {
    "generation": (DIGITS, GENERATOR, "steps = 4\npenalty_from = 2"),
    "restoration": (DIGITS, GENERATOR, 'problem = "inpaint"\namount = 3\nsteps = 4\njacobian = 0.1\npenalty_from = 2'),
    "vae": (DIGITS, VAE, ""),
    "autoencoding": (DIGITS, AUTOENCODER, "beta = 0.1"),
    "few-shot": (EPISODES, LEARNER, "steps = 3\njacobian = 0.1"),
    "maml": (EPISODES, CONV4, "steps = 2"),
    "reptile": (EPISODES, CONV4, "steps = 2\nminibatch = 4"),
    "imaml": (EPISODES, CONV4, "steps = 2"),
}
RECIPE = """
title = "{task}"
[data]
{data}
[model]
{model}
[task]
name = "{task}"
{options}
[training]
batch_size = 4
evaluation_batch_size = 3
log_every = 1
[[phases]]
epochs = 2
"""


@pytest.mark.parametrize("task", [pytest.param(t, marks=pytest.mark.slow) if t == "restoration" else t for t in TASKS])
def test_a_task_is_resumed_in_the_middle_of_an_epoch(task, tmp_path, monkeypatch):
    data, model, options = TASKS[task]
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE.format(task=task, data=data, model=model, options=options))
    source = open_recipe(str(file))
    whole = Run(training.train_run(source, tmp_path / "whole", MACHINE))
    steps = (whole.result or {})["steps"] // 2
    log_step = training.Trainer.log_step

    def stopping(trainer, *arguments):
        if trainer.state.position.step == steps:  # the first of the second epoch
            trainer.stop.signal = signal.SIGTERM  # after the next one
        log_step(trainer, *arguments)

    with monkeypatch.context() as patch, pytest.raises(training.Stopped):
        patch.setattr(training.Trainer, "log_step", stopping)
        training.train_run(source, tmp_path / "stopped", MACHINE)
    (stopped,) = list_runs(tmp_path / "stopped")
    stopped = Run(stopped.folder, Trust.of("tiny_episodes"))
    assert stopped.status == "interrupted"
    training.finish_run(stopped, MACHINE, [])
    assert_same(whole, stopped)

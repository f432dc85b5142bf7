"""Training: a plain loop over phases, epochs and batches that can be stopped at any moment and resumed bit for bit."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equipoise.fixed_point import Equilibrium, watch_solves
from equipoise.gradients import UnrolledGradient
from equipoise.lab.data import Batch, DataSet, load
from equipoise.lab.data.base import spread
from equipoise.lab.files import write_json
from equipoise.lab.recipes.build import (
    build_model,
    build_optimizer,
    build_schedule,
    build_task,
    check,
    compile_equilibria,
    module_of,
    outside_names,
)
from equipoise.lab.recipes.recipe import Jacobian, Recipe, Source
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.load import start_from
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.batches import batches, own_part, seed_everything, seed_of, training_rows
from equipoise.lab.training.evaluate import Evaluation, Setting, evaluate, parameter_count, quiet_failures
from equipoise.lab.training.jacobian import jittered, penalty, weight_at
from equipoise.lab.training.log import Log
from equipoise.lab.training.statistics import IDLE, add, failed_samples, idle, solve_metrics, solve_sums
from equipoise.registry import Trust, trusting
from equipoise.tasks import Sums, Task


@dataclass
class Position:
    """Where training stands: the next batch to be trained on."""

    phase: int = 0
    epoch: int = 0  # within the phase
    batch: int = 0  # within the epoch
    step: int = 0  # over all


@dataclass
class Progress:
    """What training has found so far, besides the weights."""

    position: Position = field(default_factory=Position)
    sums: Sums = field(default_factory=dict)  # of the epoch so far
    best: dict[str, Any] | None = None
    failed: int = 0  # steps so far
    failed_in_a_row: int = 0
    seconds: float = 0.0


@dataclass
class Learner:
    """What a phase trains, and with what."""

    model: nn.Module
    net: nn.Module  # the model, or what averages its gradients over processes
    task: Task
    jacobian: Jacobian
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler

    @property
    def solves_to_the_end(self) -> bool:
        """Whether solves are meant to converge: a few unrolled steps, as in a warm-up, are not."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, Equilibrium)]
        return not any(isinstance(layer.gradient, UnrolledGradient) for layer in layers)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**checkpoints.model_tensors(self.model), **checkpoints.pack_optimizer(self.optimizer)[0]}

    def facts(self) -> dict[str, Any]:
        return {
            "optimizer": checkpoints.pack_optimizer(self.optimizer)[1],
            "schedule": checkpoints.pack_schedule(self.schedule),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Continue with the optimizer, schedule and scaler of another learner."""
        checkpoints.unpack_optimizer(self.optimizer, tensors, facts["optimizer"])
        checkpoints.unpack_schedule(self.schedule, facts["schedule"])
        if not checkpoints.alike(facts["scaler"], self.scaler.state_dict()):
            raise ValueError("its gradient scaler is not that of the recipe's precision")
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(facts["scaler"])


class StopRequest:
    """Ctrl-C and SIGTERM ask training to stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        def ask(number: int, _: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        before = {}
        with suppress(ValueError):  # not the main thread: whoever runs us there handles signals
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""

    def __init__(self, number: int | None, step: int):
        super().__init__(f"stopped at step {step}")
        self.number, self.step = number or signal.SIGTERM, step  # another process may have got the signal


class TrainingFailed(RuntimeError):
    """Training cannot usefully go on; everything is saved."""


def data_of(run: Run, recipe: Recipe, folders: Sequence[Path]) -> DataSet:
    """The data set of a run, looked for in these folders first."""
    try:
        return load_data(recipe, run.data_folders(folders), run.source.where.trust)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:  # options that are no options
        raise RunError(f"{run.folder / 'run.json'}: data set {recipe.data.name!r}: {error}") from error


def load_data(recipe: Recipe, folders: Sequence[Path], trust: Trust) -> DataSet:
    """The recipe's data set, with its validation split, cut to the recipe's limit."""
    with trusting(trust):
        data = load(recipe.data.name, folders=folders, validation=recipe.data.validation, **recipe.data.options)
    if recipe.data.limit is None:
        return data

    def some(split: Any) -> Any:
        return None if split is None else spread(split, recipe.data.limit or 0)

    return replace(data, train=some(data.train), val=some(data.val), test=some(data.test))


def train(
    run: Run,
    machine: Machine,
    folders: Sequence[Path] = (),
    source: Source | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a run from wherever it stands to its end, and return its result.

    Args:
        run: made by :func:`equipoise.lab.runs.folder.create`; one that was stopped goes on from its last checkpoint.
        machine: where; see :func:`equipoise.lab.runs.machine.this_machine`.
        folders: where to look for data first.
        source: the recipe as it was read, which knows the lines of its file; None reads the run's own copy.
        stop: who listens to signals; None listens while training.

    Raises:
        Interrupted: on Ctrl-C or SIGTERM, once the step is finished and saved.
        TrainingFailed: when too many steps in a row failed.
    """
    if run.result is not None:
        return run.result
    trainer = Trainer(run, machine, folders, source, stop or StopRequest())
    with trainer.stop.listening() if stop is None else nullcontext():
        return trainer.train()


class Trainer:
    """One run being trained."""

    def __init__(self, run: Run, machine: Machine, folders: Sequence[Path], source: Source | None, stop: StopRequest):
        self.run, self.machine, self.stop = run, machine, stop
        self.source = source or run.source
        self.recipe = check(self.source)
        self.data = load_data(self.recipe, run.data_folders(folders), self.source.where.trust)
        for split in (self.data.val, self.data.test):
            if split is not None and len(split) < machine.world:
                raise ValueError(f"a split of {len(split)} samples cannot be shared by {machine.world} processes.")
        self.facts = self.data.facts()
        self.setting = Setting(self.recipe.training, machine)
        size = min(self.recipe.training.batch_size, len(self.data.train))
        self.steps_per_epoch = len(self.rows(epoch=0))
        if not self.steps_per_epoch:
            raise ValueError(f"batches of {size} samples cannot be shared by {machine.world} processes: use fewer.")
        self.epochs_before = [sum(p.epochs for p in self.recipe.phases[:i]) for i in range(len(self.recipe.phases) + 1)]
        self.progress = Progress()
        seed_everything(self.recipe.seed, "model")
        self.learner = self.assemble(0)
        self.new_tensors: list[str] = []  # of a run that starts from the weights of another, those it had to make
        self.damaged_lines = 0  # of the log, when the run was resumed
        if run.last.exists():
            self.resume()
            return
        if len(run.epochs()) > 1:  # a checkpoint is written after every epoch
            raise RunError(
                f"{run.last} is missing, though {run.log} has {len(run.epochs())} epochs: put it back; or, to train "
                f"from the beginning and lose this log, remove {run.log.name}."
            )
        if self.recipe.training.init_from is not None:
            self.new_tensors = start_from(self.learner.model, self.recipe.training.init_from)
        if machine.leads and run.log.exists():
            self.damaged_lines = run.trim(0, 0)  # it was stopped before its first checkpoint

    # What there is to train

    def rows(self, epoch: int) -> list[torch.Tensor]:
        """The rows of every batch of an epoch; one too small to give every process a sample is left out."""
        size, samples = self.recipe.training.batch_size, len(self.data.train)
        every = training_rows(samples, size, self.recipe.seed, epoch)
        return [rows for rows in every if len(rows) >= self.machine.world]

    def assemble(self, phase: int) -> Learner:
        """Model, task, optimizer and schedule as they are at the start of a phase."""
        recipe, where = self.source.phase(phase), self.source.where_in(phase)
        model = self.setting.place(build_model(recipe, self.facts, where))
        if recipe.training.compile:
            compile_equilibria(model, where)
        first, end = self.stretch(phase)
        begun, begun_where = self.source.phase(first), self.source.where_in(first)
        optimizer = build_optimizer(begun, [p for p in model.parameters() if p.requires_grad], begun_where)
        epochs = self.epochs_before[end] - self.epochs_before[first]
        schedule = build_schedule(begun, optimizer, epochs, self.steps_per_epoch, begun_where)
        scaler = torch.amp.GradScaler(self.machine.device.type, enabled=self.recipe.training.precision == "float16")
        net = DistributedDataParallel(model) if self.machine.world > 1 else model
        task = build_task(recipe, self.facts, where)
        return Learner(model, net, task, recipe.jacobian, optimizer, schedule, scaler)

    def steps_before(self, phase: int) -> int:
        return self.epochs_before[phase] * self.steps_per_epoch

    def stretch(self, phase: int) -> tuple[int, int]:
        """The phases, from and to, that share one optimizer and one schedule.

        A phase that states an optimizer or a schedule starts both anew; one that does not continues the last.
        """
        phases = self.recipe.phases
        starts = [i for i, p in enumerate(phases) if i == 0 or p.optimizer is not None or p.schedule is not None]
        first = max(i for i in starts if i <= phase)
        return first, min([i for i in starts if i > phase], default=len(phases))

    def enter(self, phase: int) -> None:
        """Go on to the next phase: the weights stay, and so does the optimizer unless the phase starts a new one."""
        before = self.learner
        self.learner = self.assemble(phase)
        tensors = before.tensors()
        checkpoints.load_model(self.learner.model, tensors, f"phase {phase - 1}")
        if self.stretch(phase)[0] != phase:
            self.learner.restore(tensors, before.facts())

    # The loop

    def train(self) -> dict[str, Any]:
        position, phases = self.progress.position, self.recipe.phases
        started = time.monotonic() - self.progress.seconds
        epoch = len(self.data.train)
        done = (self.epochs_before[position.phase] + position.epoch) * epoch
        done += min(position.batch * self.recipe.training.batch_size, epoch)
        self.log = Log(self.run, self.machine, self.epochs_before[-1] * epoch, done, position.step)
        with quiet_failures(), self.log:
            self.introduce()
            while position.phase < len(phases):
                while position.epoch < phases[position.phase].epochs:
                    self.train_epoch(started)
                    self.finish_epoch(started)
                if position.phase + 1 < len(phases):
                    self.enter(position.phase + 1)
                position.phase, position.epoch = position.phase + 1, 0
            return self.finish(started)

    def train_epoch(self, started: float) -> None:
        """The rest of the epoch, from wherever it stands."""
        position, machine, training = self.progress.position, self.machine, self.recipe.training
        epoch = self.epochs_before[position.phase] + position.epoch
        rows = self.rows(epoch)[position.batch :]
        self.learner.net.train()
        own = [own_part(r, machine) for r in rows]
        for size, batch in zip(map(len, rows), batches(self.data.train, own, machine.device), strict=True):
            stop = self.step(batch, size)
            position.batch += 1
            position.step += 1
            self.progress.seconds = time.monotonic() - started
            if stop:
                self.save()
                raise Interrupted(self.stop.signal, self.progress.position.step)
            if self.failed_too_often():
                self.save()
                raise TrainingFailed(
                    f"{self.progress.failed_in_a_row} steps in a row failed (failures.stop_after): the loss, the "
                    f"gradient or every solve was not finite, or over {self.recipe.failures.share:.0%} of the samples "
                    "were not solved (failures.share). A lower optimizer.lr, training.clip, a looser tolerance or more "
                    f"tolerance.max_steps may help; {self.run.log} has the residuals."
                )
            if training.checkpoint_every and position.step % training.checkpoint_every == 0:
                self.save()

    def step(self, batch: Batch, size: int) -> bool:
        """One optimizer step on a batch of ``size`` samples over all processes; True when asked to stop."""
        recipe, learner, position, machine = self.recipe, self.learner, self.progress.position, self.machine
        generator = seed_everything(recipe.seed, "step", position.step, machine.rank)
        batch = learner.task.augment(self.setting.prepare(learner.task, batch), generator)
        batch = self.setting.lay_out(batch)  # augmentation may have changed it
        learner.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in learner.model.buffers()]
        draw = torch.Generator().manual_seed(seed_of(recipe.seed, "jacobian", position.step))  # the same everywhere
        weight = weight_at(learner.jacobian, position.step - self.steps_before(position.phase), draw)
        jitter = jittered(learner.model, learner.jacobian.jitter, draw) if weight else nullcontext()
        with watch_solves() as solves, self.setting.autocast(), jitter:
            loss, sums = learner.task.loss(learner.net, batch)
            stiffness = penalty(solves, learner.jacobian.probes) if weight else None
        parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
        objective = loss if stiffness is None else loss + weight * stiffness
        if machine.world > 1:
            # Gradients are averaged over processes: one with more samples than another must count for more. And each
            # process must have a gradient of every parameter, also when its solves all failed: the others wait for it.
            objective = objective * (len(batch[0]) * machine.world / size) + 0 * sum(p.sum() for p in parameters)
        learner.scaler.scale(objective).backward()
        learner.scaler.unscale_(learner.optimizer)
        length = nn.utils.clip_grad_norm_(parameters, recipe.training.clip or torch.inf)

        # One exchange between processes: all must decide the same.
        unsolved, lost, solved = failed_samples(solves) if learner.solves_to_the_end else (0, 0, 0)
        # The scaler of float16 looks for gradients that are not finite, and skips them itself: they are normal.
        broken = not torch.isfinite(loss) or not (torch.isfinite(length) or learner.scaler.is_enabled())
        if unsolved:  # where a solve gives up, the loss is a number though running statistics may not be
            broken = broken or not all(buffer.isfinite().all() for buffer in learner.model.buffers())
        mine = [loss.item() * len(batch[0]), unsolved, lost, solved, broken, self.stop.signal is not None]
        summed, unsolved, lost, solved, broken, stop = machine.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        # Running out of steps may be meant; that no solve of a batch is finite never is.
        failed = bool(broken) or (solved > 0 and (unsolved > recipe.failures.share * solved or lost == solved))
        if broken or (failed and recipe.failures.policy == "skip"):
            for buffer, before in zip(learner.model.buffers(), buffers, strict=True):
                buffer.copy_(before)  # nothing of the batch stays, nor in running statistics
        else:
            learner.scaler.step(learner.optimizer)
        learner.scaler.update()
        rate = learner.optimizer.param_groups[0]["lr"]
        learner.schedule.step()
        self.progress.failed += int(failed)
        self.progress.failed_in_a_row = self.progress.failed_in_a_row + 1 if failed else 0

        add(sums := {**sums}, solve_sums(solves))
        add(self.progress.sums, sums)
        facts = {} if stiffness is None else {"jacobian": stiffness.item(), "jacobian_weight": weight}
        self.tell_step(size, summed / size, float(length), rate, sums, int(unsolved), facts)
        return stop > 0

    def failed_too_often(self) -> bool:
        limit = self.recipe.failures.stop_after
        return bool(limit) and self.progress.failed_in_a_row >= limit

    def finish_epoch(self, started: float) -> None:
        """Measure, choose, log and save; then on to the next epoch."""
        progress, position, learner = self.progress, self.progress.position, self.learner
        epoch = self.epochs_before[position.phase] + position.epoch + 1
        totals = self.machine.total(progress.sums)
        record: dict[str, Any] = {"kind": "epoch", "step": position.step, "epoch": epoch, "phase": position.phase}
        record["train"] = {**learner.task.metrics(totals), "solver": solve_metrics(totals)}
        self.machine.spread(learner.model.buffers())  # each process has running statistics of its own part
        if self.data.val is not None:
            record["val"] = self.measure(self.data.val).record()
        if self.recipe.training.test == "epoch":
            record["test"] = self.measure(self.data.test).record()
        record["failed_steps"] = progress.failed
        progress.seconds = time.monotonic() - started
        record["seconds"] = round(progress.seconds, 3)
        self.log.write(**record)
        self.tell_epoch(record)
        position.epoch, position.batch = position.epoch + 1, 0
        progress.sums = {}
        self.keep_best(record, epoch)
        every = self.recipe.training.keep_every
        if every is not None and (epoch - 1) % every == 0:
            self.keep(self.run.epoch(epoch))
        self.save()

    def keep_best(self, record: dict[str, Any], epoch: int) -> None:
        """Keep the weights if their validation metric is the best so far."""
        task = self.learner.task
        if "val" not in record:
            return
        if task.best_metric not in record["val"]:
            metrics = ", ".join(name for name in record["val"] if name != "solver")
            raise ValueError(
                f"best_metric of the task {type(task).__name__} is {task.best_metric!r}; it has {metrics}."
            )
        value, best, phase = record["val"][task.best_metric], self.progress.best, self.progress.position.phase
        if not math.isfinite(value):
            return
        if best is not None and self.source.phase(best["phase"]).task != self.source.phase(phase).task:
            best = None  # of another task, in an earlier phase: they cannot be compared
        if best is None or (value > best["value"] if task.best_is_largest else value < best["value"]):
            self.progress.best = {"metric": task.best_metric, "value": value, "epoch": epoch, "phase": phase}
            self.keep(self.run.best)

    def keep(self, path: Path) -> None:
        """Write the weights, without what training needs to go on."""
        if self.machine.leads:
            facts = {**self.model_facts(), "best": self.progress.best}
            checkpoints.save(path, checkpoints.model_tensors(self.learner.model), facts)

    def finish(self, started: float) -> dict[str, Any]:
        """Measure the test split, with the last weights and with the best, and write the result."""
        progress = self.progress
        result: dict[str, Any] = {"status": "finished", "parameters": parameter_count(self.learner.model)}
        result["test_of_last"] = self.measure(self.data.test, saving=False).record()
        result["test"], result["weights"] = result["test_of_last"], "last"
        if progress.best is not None:
            result["weights"], result["best"] = "best", progress.best
            if progress.best["epoch"] != self.epochs_before[-1]:  # else the best are the last
                self.take_best(progress.best["phase"])
                result["test"] = self.measure(self.data.test, saving=False).record()
        result |= {"steps": progress.position.step, "epochs": self.epochs_before[-1], "failed_steps": progress.failed}
        result["seconds"] = round(time.monotonic() - started, 3)
        if self.machine.leads:
            write_json(self.run.folder / "result.json", result)
        self.machine.wait()
        return result

    def take_best(self, phase: int) -> None:
        """Go back to the best weights, and to the model and the task of their phase."""
        self.machine.wait()  # until the leading process has written them
        tensors, facts = checkpoints.read(self.run.best)
        checkpoints.require_same_recipe(self.run.best, facts, self.source.tables, self.run.folder / "run.json")
        if facts.get("best") != self.progress.best:
            raise checkpoints.CheckpointError(
                f"{self.run.best} does not hold the best weights of this run: it says {facts.get('best')} instead of "
                f"{self.progress.best}."
            )
        if phase != len(self.recipe.phases) - 1:  # the model or the task may be another
            self.learner = self.assemble(phase)
        checkpoints.load_model(self.learner.model, tensors, self.run.best)

    def measure(self, split: Any, saving: bool = True) -> Evaluation:
        """Evaluate; a request to stop is heard between batches when there is one process."""

        def each(_: int) -> None:
            if self.stop.signal is not None and self.machine.world == 1:
                if saving:
                    self.save()
                raise Interrupted(self.stop.signal, self.progress.position.step)

        size, seed = self.recipe.training.evaluation_batch_size, self.recipe.seed
        return evaluate(self.learner.model, self.learner.task, split, self.setting, self.machine, size, seed, each)

    # Stopping and going on

    def model_facts(self) -> dict[str, Any]:
        """What is needed to build the model again, without its data."""
        phase = min(self.progress.position.phase, len(self.recipe.phases) - 1)
        source = {"recipe": self.source.name, "folder": self.source.folder, "tables": self.source.tables}
        return {**source, "phase": phase, "data": self.facts}

    def save(self) -> None:
        """Write the last checkpoint: the sums so far are those of all processes, of which each keeps its own."""
        progress = self.progress
        sums = self.machine.total(progress.sums)
        if self.machine.leads:
            tensors = {**self.learner.tensors(), **{f"sums/{name}": value for name, value in sums.items()}}
            facts = {**self.model_facts(), "learner": self.learner.facts()}
            facts["progress"] = {k: v for k, v in vars(progress).items() if k not in ("position", "sums")}
            facts["progress"]["position"] = asdict(progress.position)
            checkpoints.save(self.run.last, tensors, facts)
        self.machine.wait()

    def resume(self) -> None:
        """Take up training where the last checkpoint left it."""
        tensors, facts = checkpoints.read(self.run.last, training=True)
        checkpoints.require_same_recipe(self.run.last, facts, self.source.tables, self.run.folder / "run.json")
        saved = {name: facts["progress"][name] for name in checkpoints.TRAINING["progress"]}
        position = Position(**{name: saved["position"][name] for name in checkpoints.POSITION})
        self.check_position(position, saved["best"])
        self.progress = Progress(**{**saved, "position": position})
        sums = {name.removeprefix("sums/"): tensor for name, tensor in tensors.items() if name.startswith("sums/")}
        # The saved sums are those of all processes together: one goes on with them, the others from zero.
        self.progress.sums = sums if self.machine.leads else {name: torch.zeros_like(t) for name, t in sums.items()}
        phase = min(position.phase, len(self.recipe.phases) - 1)
        with checkpoints.fitting(self.run.last):
            if phase:
                self.learner = self.assemble(phase)
            checkpoints.load_model(self.learner.model, tensors, self.run.last)
            self.learner.restore(tensors, facts["learner"])
        if self.machine.leads:  # now that the checkpoint is known to be good
            epochs = self.epochs_before[position.phase] + position.epoch
            self.damaged_lines = self.run.trim(position.step, epochs)

    def check_position(self, position: Position, best: dict[str, Any] | None) -> None:
        """Raise for a position, or a phase of the best weights, that this recipe does not have."""
        phases = self.recipe.phases
        if best is not None and not 0 <= best["phase"] < len(phases):
            raise checkpoints.CheckpointError(f"{self.run.last} is damaged: its best weights are of no phase: {best}.")
        epochs = phases[position.phase].epochs if 0 <= position.phase < len(phases) else 0
        inside = 0 <= position.phase <= len(phases) and 0 <= position.epoch <= epochs
        if not inside or not 0 <= position.batch <= self.steps_per_epoch or position.step < 0:
            raise checkpoints.CheckpointError(f"{self.run.last} is damaged: the recipe has no {position}.")

    # Telling

    def introduce(self) -> None:
        count, data, position = parameter_count(self.learner.model), self.data, self.progress.position
        held = f", {len(data.val)} to choose by" if data.val is not None else ""
        self.log.tell(
            f"{self.recipe.title}: {count:,} parameters; {data.name}: {len(data.train)} samples to train on{held}"
        )
        if data.note:
            self.log.tell(f"note: {data.note}")
        if modules := dict.fromkeys(module_of(name) for _, name in outside_names(self.source)):
            places = ", ".join(f"{module} ({self.source.where.trust.place(module)})" for module in modules)
            self.log.tell(f"code from outside the package: {places}")
        if self.damaged_lines:
            lines = "1 line" if self.damaged_lines == 1 else f"{self.damaged_lines} lines"
            self.log.tell(f"{lines} of log.jsonl could not be read, and moved to log.damaged; the others are kept")
        if position.step:
            self.log.tell(f"resumed at step {position.step}")
        elif (origin := self.recipe.training.init_from) is not None:
            new = ", ".join(self.new_tensors) or "none"
            self.log.tell(f"weights from {origin}; tensors that are new: {new}")

    def tell_step(
        self, size: int, loss: float, length: float, rate: float, sums: Sums, unsolved: int, facts: dict[str, float]
    ) -> None:
        """The bar at every step, the log at every so many."""
        position = self.progress.position
        solver = solve_metrics(sums)
        steps = {direction: numbers["steps"]["median"] for direction, numbers in solver.items()}
        metrics = self.learner.task.metrics(sums)
        shown = "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())
        self.log.advance(size, shown + "".join(f"  {direction} {number}" for direction, number in steps.items()))
        if (position.step + 1) % self.recipe.training.log_every == 0:
            residuals = {direction: numbers["residual"]["worst"] for direction, numbers in solver.items()}
            self.log.write(
                kind="step",
                step=position.step + 1,
                loss=loss,
                lr=rate,
                gradient_norm=length,
                steps=steps,
                residual=residuals,
                failed_samples=unsolved,
                **facts,
            )

    def tell_epoch(self, record: dict[str, Any]) -> None:
        text = f"epoch {record['epoch']}/{self.epochs_before[-1]}"
        for split in ("train", "val", "test"):
            if split in record:
                numbers = {name: value for name, value in record[split].items() if name != "solver"}
                text += f"  {split} " + " ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        for direction, numbers in record["train"]["solver"].items():
            text += f"  {direction} {numbers['steps']['median']} steps"
            if numbers["failed"] and self.learner.solves_to_the_end:
                text += f" ({numbers['failed']:.1%} failed)"
        samples = len(self.data.train) * record["epoch"]
        self.log.tell(text + f"  {samples / max(record['seconds'], 1e-9):.0f} samples/s")
        if (forward := record["train"]["solver"].get("forward")) and idle(forward):
            self.log.tell(IDLE)

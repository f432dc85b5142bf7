"""Train a run: a loop over phases, epochs and batches that can be stopped at any moment and resumed bit for bit."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equipoise.fixed_point import Equilibrium, watch_solves
from equipoise.lab.data import Batch, Split
from equipoise.lab.data.base import batches
from equipoise.lab.files import write_json
from equipoise.lab.recipes import build
from equipoise.lab.recipes.reading import RecipeFile
from equipoise.lab.recipes.schema import Jacobian
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Log, Run, RunError, create, new_folder
from equipoise.lab.runs.load import start_from
from equipoise.lab.runs.machine import Machine, peak_memory, processor, reset_peak_memory, seed_everything, seed_of
from equipoise.lab.training.evaluate import (
    IDLE,
    Evaluation,
    Setting,
    add,
    evaluate,
    failed_samples,
    format_metric,
    idle,
    parameter_count,
    quiet_failures,
    solve_metrics,
    solve_sums,
)
from equipoise.lab.training.jacobian import jittered, penalty, weight_at
from equipoise.solution import Solution
from equipoise.tasks import Sums, Task


@dataclass
class Position:
    """The next batch to train on."""

    phase: int = 0
    epoch: int = 0  # within the phase
    batch: int = 0  # within the epoch
    step: int = 0  # over all


@dataclass
class TrainingState:
    """Everything that a checkpoint keeps besides the learner."""

    position: Position = field(default_factory=Position)
    sums: Sums = field(default_factory=dict)  # of the current epoch
    best: dict[str, Any] | None = None
    failed: int = 0  # number of failed steps
    failed_in_a_row: int = 0
    seconds: float = 0.0


@dataclass
class Learner:
    """The model of a phase and what trains it."""

    model: nn.Module
    net: nn.Module  # the model, or a wrapper that averages its gradients over processes
    task: Task
    jacobian: Jacobian
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler

    @property
    def solves_to_the_end(self) -> bool:
        """Whether solves are meant to converge; a fixed number of steps, as in a warm-up, is not."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, Equilibrium)]
        return not any(layer.gradient.decides_value for layer in layers)

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and facts from which another learner can continue."""
        tensors, optimizer = checkpoints.pack_optimizer(self.optimizer)
        schedule, scaler = checkpoints.pack_schedule(self.schedule), self.scaler.state_dict()
        facts = {"optimizer": optimizer, "schedule": schedule, "scaler": scaler}
        return {**checkpoints.model_tensors(self.model), **tensors}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue with the optimizer, schedule and scaler of another learner."""
        checkpoints.unpack_optimizer(self.optimizer, tensors, facts["optimizer"])
        checkpoints.unpack_schedule(self.schedule, facts["schedule"])
        if not checkpoints.alike(facts["scaler"], self.scaler.state_dict()):
            raise ValueError("its gradient scaler does not fit the recipe's precision")
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(facts["scaler"])


@dataclass
class Computed:
    """A batch after its forward and backward pass, in one process."""

    samples: int
    loss: Tensor
    gradient_norm: Tensor
    sums: Sums
    solves: list[Solution]
    buffers: list[Tensor]  # the model's buffers before the batch
    penalty: dict[str, float]  # the Jacobian penalty and its weight, in steps that have one


@dataclass
class Verdict:
    """What all processes decide about a batch."""

    loss: float
    failed_samples: int
    failed: bool
    discard: bool  # do not apply the gradient
    stop: bool  # a process was asked to stop


class StopRequest:
    """A request to stop after the current step, by Ctrl-C or SIGTERM; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        def ask(number: int, _: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        before = {}
        with suppress(ValueError):  # not the main thread: the caller handles signals
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Stopped(Exception):
    """Training was stopped by a signal, and everything is saved; ``resume`` is the command that continues it."""

    def __init__(self, folder: Path, step: int, number: int | None, arguments: Sequence[str]):
        super().__init__(f"stopped at step {step}")
        self.resume = ["equipoise", "resume", str(folder), *arguments]
        self.step, self.number = step, number or signal.SIGTERM  # another process may have got the signal


class TrainingFailed(RuntimeError):
    """Training cannot usefully continue; everything is saved."""


Report = Callable[[list[Run], Path | None], object]  # writes a report on runs; into the run's own folder for None


def train_run(
    source: RecipeFile, parent: Path, machine: Machine, folders: Sequence[Path] = (), report: Report | None = None
) -> Path:
    """Train a checked recipe in a new subfolder of ``parent``; return the folder."""
    with folder_to_train_in(parent, source.name, machine) as folder:
        if machine.leads:
            create(folder, source, **described(machine, folders))
        machine.wait()
        finish_run(Run(folder, source.where.trust), machine, folders, source, report)
    return folder


@contextmanager
def folder_to_train_in(parent: Path, name: str, machine: Machine) -> Iterator[Path]:
    """Yield a new folder, which is removed after an error if nothing was trained in it."""
    folder = machine.share(new_folder(parent, name) if machine.leads else None)
    try:
        yield folder
    except Exception:
        logged = any(log.stat().st_size for log in folder.rglob("log.jsonl"))
        if machine.leads and not logged and not any(folder.rglob("last.safetensors")):
            shutil.rmtree(folder)
        raise


def described(machine: Machine, folders: Sequence[Path]) -> dict[str, Any]:
    """Describe the machine for a run; with another number of threads, results agree only up to rounding."""
    return {
        "device": str(machine.device),
        "processes": machine.world,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": processor(),
        "data": [str(folder.resolve()) for folder in folders],
        "begun_in": str(Path.cwd()),
    }


def median_steps(solver: dict[str, Any]) -> str:
    median = solver["steps"]["median"]
    return f"{median} step{'' if median == 1 else 's'}"


def finish_run(
    run: Run, machine: Machine, folders: Sequence[Path], source: RecipeFile | None = None, report: Report | None = None
) -> None:
    """Train a run to its end, and print its result."""
    result = train(run, machine, folders, source)
    if not machine.leads:
        return
    for name, value in result["test"].items():
        if isinstance(value, int | float):
            print(f"{'test ' + name:<17} {format_metric(name, value)}")
    for direction, numbers in result["test"].get("solver", {}).items():
        print(f"{direction} solves    {1 - numbers['failed']:.1%} converged, median {median_steps(numbers)}")
    print(f"run               {run.folder}")
    if report:
        report([run], None)


def train(
    run: Run,
    machine: Machine,
    folders: Sequence[Path] = (),
    source: RecipeFile | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a run from its last checkpoint, if any, to its end, locked against other processes; return its result.

    Args:
        folders: folders to look for data in first
        source: the recipe as it was opened and checked, which knows the lines of its file; None uses the run's copy
        stop: object that listens to signals already; None listens during training
    """
    with ExitStack() as stack:
        refusal = ""
        if machine.leads:
            try:
                stack.enter_context(run.alone())
            except RunError as error:
                refusal = str(error)
        if refusal := machine.share(refusal):  # all processes end, not only the leading one
            raise RunError(refusal)
        if run.result is not None:
            return run.result
        trainer = Trainer(run, machine, folders, source, stop or StopRequest())
        if stop is None:
            stack.enter_context(trainer.stop.listening())
        return trainer.train()


class Trainer:
    """A run in training."""

    def __init__(
        self, run: Run, machine: Machine, folders: Sequence[Path], source: RecipeFile | None, stop: StopRequest
    ):
        self.run, self.machine, self.stop = run, machine, stop
        if source is None:
            build.check(source := run.source)
        self.source, self.recipe = source, source.recipe
        self.phases = [source.phase(number) for number in range(len(self.recipe.phases))]
        self.data = build.load_data(self.recipe, run.data_folders(folders), source.where.trust)
        for split in (self.data.val, self.data.test):
            if split is not None and len(split) < machine.world:
                raise ValueError(f"a split of {len(split)} samples cannot be shared by {machine.world} processes.")
        self.facts = self.data.facts()
        self.setting = Setting(self.recipe.training, machine)
        self.steps_per_epoch = len(self.rows(epoch=0))
        if not self.steps_per_epoch:
            size = min(self.recipe.training.batch_size, len(self.data.train))
            raise ValueError(f"batches of {size} samples cannot be shared by {machine.world} processes: use fewer.")
        self.epochs_before = [sum(p.epochs for p in self.recipe.phases[:i]) for i in range(len(self.phases) + 1)]
        self.state = TrainingState()
        seed_everything(self.recipe.seed, "model")
        self.learner = self.assemble(0)
        self.new_tensors: list[str] = []  # tensors that training.init_from did not provide
        self.damaged_lines = 0  # of the log of a resumed run
        if run.last.exists():
            self.restore()
        else:
            self.start()

    def start(self) -> None:
        """Prepare a run that has no checkpoint yet."""
        run, origin = self.run, self.recipe.training.init_from
        if len(run.epochs()) > 1:  # a checkpoint is written after every epoch
            raise RunError(
                f"{run.last} is missing, though {run.log} has {len(run.epochs())} epochs: restore it; or, to train "
                f"from the beginning and lose this log, remove {run.log.name}."
            )
        if origin is not None:
            self.new_tensors = start_from(self.learner.model, origin)
        if self.machine.leads and run.log.exists():
            self.damaged_lines = run.trim(0, 0)  # it was stopped before its first checkpoint

    # Phases

    def rows(self, epoch: int) -> list[Tensor]:
        """Return the rows of every batch of an epoch, in its own order; drop a batch too small for all processes."""
        generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, "order", epoch))
        rows = torch.randperm(len(self.data.train), generator=generator).split(self.recipe.training.batch_size)
        return [batch for batch in rows if len(batch) >= self.machine.world]

    def assemble(self, phase: int) -> Learner:
        """Build the model, task, optimizer and schedule for the start of a phase."""
        recipe, where = self.phases[phase], self.source.where_in(phase)
        model = self.setting.place(build.build_model(recipe, self.facts, where))
        if recipe.training.compile:
            build.compile_equilibria(model, where)
        first, end = self.stretch(phase)
        first_recipe, first_where = self.phases[first], self.source.where_in(first)
        optimizer = build.build_optimizer(first_recipe, [p for p in model.parameters() if p.requires_grad], first_where)
        epochs = self.epochs_before[end] - self.epochs_before[first]
        schedule = build.build_schedule(first_recipe, optimizer, epochs, self.steps_per_epoch, first_where)
        scaler = torch.amp.GradScaler(self.machine.device.type, enabled=self.recipe.training.precision == "float16")
        net = DistributedDataParallel(model) if self.machine.world > 1 else model
        task = build.build_task(recipe, self.facts, where)
        return Learner(model, net, task, recipe.jacobian, optimizer, schedule, scaler)

    def stretch(self, phase: int) -> tuple[int, int]:
        """Return the phases, from and to, that share one optimizer and one schedule.

        A phase that specifies an optimizer or a schedule restarts both; otherwise the previous ones continue.
        """
        phases = self.recipe.phases
        starts = [i for i, p in enumerate(phases) if i == 0 or p.optimizer is not None or p.schedule is not None]
        first = max(i for i in starts if i <= phase)
        return first, min([i for i in starts if i > phase], default=len(phases))

    def enter(self, phase: int) -> None:
        """Start the next phase with the same weights, and the same optimizer unless the phase restarts it."""
        tensors, facts = self.learner.saved()
        self.learner = self.assemble(phase)
        checkpoints.load_model(self.learner.model, tensors, f"phase {phase - 1}")
        if self.stretch(phase)[0] != phase:
            self.learner.restore(tensors, facts)

    # The loop

    def train(self) -> dict[str, Any]:
        position, phases = self.state.position, self.recipe.phases
        self.started = time.monotonic() - self.state.seconds
        reset_peak_memory(self.machine.device)
        epoch = len(self.data.train)
        done = (self.epochs_before[position.phase] + position.epoch) * epoch
        done += min(position.batch * self.recipe.training.batch_size, epoch)
        self.log = Log(self.run, self.epochs_before[-1] * epoch, done, position.step, self.machine.leads)
        with quiet_failures(), self.log:
            self.introduce()
            while position.phase < len(phases):
                while position.epoch < phases[position.phase].epochs:
                    self.train_epoch()
                    self.finish_epoch()
                if position.phase + 1 < len(phases):
                    self.enter(position.phase + 1)
                position.phase, position.epoch = position.phase + 1, 0
            return self.finish()

    def train_epoch(self) -> None:
        """Train on the remaining batches of the epoch."""
        state, position, training = self.state, self.state.position, self.recipe.training
        epoch = self.epochs_before[position.phase] + position.epoch
        rows, split = self.rows(epoch)[position.batch :], self.data.train.in_epoch(epoch)
        own = [self.machine.own_part(batch) for batch in rows]
        self.learner.net.train()
        for size, batch in zip(map(len, rows), batches(split, own, self.machine.device), strict=True):
            stop = self.step(batch, size)
            position.batch += 1
            position.step += 1
            state.seconds = time.monotonic() - self.started
            if stop:
                self.save()
                raise self.stopped()
            if 0 < self.recipe.failures.stop_after <= state.failed_in_a_row:
                self.save()
                raise TrainingFailed(
                    f"{state.failed_in_a_row} steps in a row failed (failures.stop_after): the loss, the gradient or "
                    f"every solve was not finite, or more than {self.recipe.failures.share:.0%} of the samples did not "
                    "converge (failures.share). A lower optimizer.lr, training.clip, a looser tolerance or more "
                    f"tolerance.max_steps may help; {self.run.log} has the residuals."
                )
            if training.checkpoint_every and position.step % training.checkpoint_every == 0:
                self.save()

    def step(self, batch: Batch, size: int) -> bool:
        """Train on one batch of ``size`` samples over all processes; return whether training was asked to stop."""
        computed = self.compute(batch, size)
        verdict = self.judge(computed, size)
        rate = self.learner.optimizer.param_groups[0]["lr"]
        self.apply(computed, verdict)
        self.log_step(computed, verdict, size, rate)
        return verdict.stop

    def compute(self, batch: Batch, size: int) -> Computed:
        """Compute loss and gradients of a batch."""
        learner, position, machine, seed = self.learner, self.state.position, self.machine, self.recipe.seed
        generator = seed_everything(seed, "step", position.step, machine.rank)
        batch = learner.task.augment(self.setting.prepare(learner.task, batch), generator)
        batch = self.setting.lay_out(batch)  # augmentation may have changed it
        learner.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in learner.model.buffers()]
        weight, jitter = 0.0, nullcontext()
        if learner.jacobian.weight:
            draw = torch.Generator().manual_seed(seed_of(seed, "jacobian", position.step))  # the same in every process
            first_step = self.epochs_before[position.phase] * self.steps_per_epoch
            weight = weight_at(learner.jacobian, position.step - first_step, draw)
            jitter = jittered(learner.model, learner.jacobian.jitter, draw) if weight else jitter
        with watch_solves() as solves, self.setting.autocast(), jitter:
            loss, sums = learner.task.loss(learner.net, batch)
            stiffness = penalty(solves, learner.jacobian.probes) if weight else None
        parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
        objective = loss if stiffness is None else loss + weight * stiffness
        if machine.world > 1:
            # Gradients are averaged over processes: one with more samples than another must count for more. And each
            # process must have a gradient of every parameter, even if all its solves failed: the others wait for it.
            objective = objective * (len(batch[0]) * machine.world / size) + 0 * sum(p.sum() for p in parameters)
        learner.scaler.scale(objective).backward()
        learner.scaler.unscale_(learner.optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, self.recipe.training.clip or torch.inf)
        logged = {} if stiffness is None else {"jacobian": stiffness.item(), "jacobian_weight": weight}
        return Computed(len(batch[0]), loss, norm, sums, solves, buffers, logged)

    def judge(self, computed: Computed, size: int) -> Verdict:
        """Decide, in one exchange between processes, whether a step failed, is applied, and is the last."""
        learner, failures = self.learner, self.recipe.failures
        unsolved, nonfinite, solved = failed_samples(computed.solves) if learner.solves_to_the_end else (0, 0, 0)
        # With float16, gradients that are not finite are normal: the scaler looks for them and skips the step itself.
        broken = not torch.isfinite(computed.loss)
        broken = broken or not (torch.isfinite(computed.gradient_norm) or learner.scaler.is_enabled())
        if unsolved:  # where a solve gives up, the loss is finite though running statistics may not be
            broken = broken or not all(buffer.isfinite().all() for buffer in learner.model.buffers())
        own_loss, asked = computed.loss.item() * computed.samples, self.stop.signal is not None
        own = torch.tensor([own_loss, unsolved, nonfinite, solved, broken, asked], dtype=torch.float64)
        loss, unsolved, nonfinite, solved, broken, stop = self.machine.sum(own).tolist()
        # Running out of steps may be intended; a batch in which no solve is finite never is.
        failed = bool(broken) or (solved > 0 and (unsolved > failures.share * solved or nonfinite == solved))
        discard = bool(broken) or (failed and failures.policy == "skip")
        return Verdict(loss / size, int(unsolved), failed, discard, stop > 0)

    def apply(self, computed: Computed, verdict: Verdict) -> None:
        """Update the weights, or discard the batch, and count failures."""
        learner, state = self.learner, self.state
        if verdict.discard:
            for buffer, before in zip(learner.model.buffers(), computed.buffers, strict=True):
                buffer.copy_(before)  # undo every effect of the batch, including that on running statistics
        else:
            learner.scaler.step(learner.optimizer)
        learner.scaler.update()
        learner.schedule.step()
        state.failed += int(verdict.failed)
        state.failed_in_a_row = state.failed_in_a_row + 1 if verdict.failed else 0

    def log_step(self, computed: Computed, verdict: Verdict, size: int, rate: float) -> None:
        """Add a batch to the sums of the epoch; update the progress bar, and the log every ``log_every`` steps."""
        add(sums := {**computed.sums}, solve_sums(computed.solves))
        add(self.state.sums, sums)
        solver, step = solve_metrics(sums), self.state.position.step + 1
        steps = {direction: numbers["steps"]["median"] for direction, numbers in solver.items()}
        shown = [f"{name} {value:.3g}" for name, value in self.learner.task.metrics(sums).items()]
        self.log.advance(size, "  ".join([*shown, *(f"{direction} {number}" for direction, number in steps.items())]))
        if step % self.recipe.training.log_every == 0:
            self.log.write(
                kind="step",
                step=step,
                loss=verdict.loss,
                lr=rate,
                gradient_norm=float(computed.gradient_norm),
                steps=steps,
                residual={direction: numbers["residual"]["worst"] for direction, numbers in solver.items()},
                failed_samples=verdict.failed_samples,
                **computed.penalty,
            )

    def finish_epoch(self) -> None:
        """Evaluate, choose the best weights, log and save; then move on to the next epoch."""
        state, position, learner = self.state, self.state.position, self.learner
        epoch = self.epochs_before[position.phase] + position.epoch + 1
        totals = self.machine.total(state.sums)
        record: dict[str, Any] = {"kind": "epoch", "step": position.step, "epoch": epoch, "phase": position.phase}
        record["train"] = {**learner.task.metrics(totals), "solver": solve_metrics(totals)}
        self.machine.spread(learner.model.buffers())  # each process has running statistics of its part only
        if self.data.val is not None:
            record["val"] = self.measure(self.data.val).record()
        if self.recipe.training.test == "epoch":
            record["test"] = self.measure(self.data.test).record()
        record["failed_steps"] = state.failed
        state.seconds = time.monotonic() - self.started
        record["seconds"] = round(state.seconds, 3)
        if (peak := peak_memory(self.machine.device)) is not None:
            record["peak_memory"] = peak
        self.log.write(**record)
        self.show_epoch(record)
        position.epoch, position.batch = position.epoch + 1, 0
        state.sums = {}
        if "val" in record:
            self.keep_best(record["val"], epoch)
        every = self.recipe.training.keep_every
        if every is not None and (epoch - 1) % every == 0:
            self.keep(self.run.epoch(epoch))
        self.save()

    def keep_best(self, metrics: dict[str, Any], epoch: int) -> None:
        """Keep the weights if their validation metric is the best so far."""
        task = self.learner.task
        if task.best_metric not in metrics:
            names = ", ".join(name for name in metrics if name != "solver")
            raise ValueError(f"best_metric of the task {type(task).__name__} is {task.best_metric!r}; it has {names}.")
        value, best, phase = metrics[task.best_metric], self.state.best, self.state.position.phase
        if not math.isfinite(value):
            return
        if best is not None and self.phases[best["phase"]].task != self.phases[phase].task:
            best = None  # the metric of an earlier phase with another task, which cannot be compared
        if best is None or (value > best["value"] if task.best_is_largest else value < best["value"]):
            self.state.best = {"metric": task.best_metric, "value": value, "epoch": epoch, "phase": phase}
            self.keep(self.run.best)

    def finish(self) -> dict[str, Any]:
        """Evaluate on the test split, with the last weights and with the best, and write the result."""
        state = self.state
        result: dict[str, Any] = {"status": "finished", "parameters": parameter_count(self.learner.model)}
        result["test_of_last"] = self.measure(self.data.test, saving=False).record()
        result["test"], result["weights"] = result["test_of_last"], "last"
        if state.best is not None:
            result["weights"], result["best"] = "best", state.best
            if state.best["epoch"] != self.epochs_before[-1]:  # otherwise the best weights are the last
                self.take_best(state.best["phase"])
                result["test"] = self.measure(self.data.test, saving=False).record()
        result |= {"steps": state.position.step, "epochs": self.epochs_before[-1], "failed_steps": state.failed}
        result["seconds"] = round(time.monotonic() - self.started, 3)
        if (origin := self.run.provenance()) is not None:
            result["origin"] = origin
        if self.machine.leads:
            write_json(self.run.folder / "result.json", result)
        self.machine.wait()
        return result

    def measure(self, split: Split, saving: bool = True) -> Evaluation:
        """Evaluate the model; a single process also stops between batches."""

        def each(_: int) -> None:
            if self.stop.signal is not None and self.machine.world == 1:
                if saving:
                    self.save()
                raise self.stopped()

        size, seed = self.recipe.training.evaluation_batch_size, self.recipe.seed
        return evaluate(self.learner.model, self.learner.task, split, self.setting, self.machine, size, seed, each)

    def stopped(self) -> Stopped:
        return Stopped(self.run.folder, self.state.position.step, self.stop.signal, build.trust_words(self.source))

    # Checkpoints

    def model_facts(self) -> dict[str, Any]:
        """Return what is needed to build the model again, without its data."""
        phase = min(self.state.position.phase, len(self.phases) - 1)
        return {**self.source.saved(), "phase": phase, "data": self.facts}

    def keep(self, path: Path) -> None:
        """Write the weights alone."""
        if self.machine.leads:
            facts = {**self.model_facts(), "best": self.state.best}
            checkpoints.save(path, checkpoints.model_tensors(self.learner.model), facts)

    def save(self) -> None:
        """Write the last checkpoint, with the epoch's sums of every process."""
        state = self.state
        shares = self.machine.gather(state.sums)
        if self.machine.leads:
            tensors, learner = self.learner.saved()
            for rank, sums in enumerate(shares):
                tensors |= {f"sums/{rank}/{name}": value for name, value in sums.items()}
            progress = {k: v for k, v in vars(state).items() if k != "sums"} | {"position": asdict(state.position)}
            checkpoints.save(self.run.last, tensors, {**self.model_facts(), "learner": learner, "progress": progress})
        self.machine.wait()

    def open_own(self, path: Path, training: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a checkpoint of this run; raise if it belongs to another."""
        tensors, facts = checkpoints.read(path, training)
        checkpoints.require_same_recipe(path, facts, self.source.tables, self.run.folder / "run.json")
        return tensors, facts

    def restore(self) -> None:
        """Continue from the last checkpoint."""
        tensors, facts = self.open_own(self.run.last, training=True)
        saved = {name: facts["progress"][name] for name in checkpoints.TRAINING["progress"]}
        position = Position(**{name: saved["position"][name] for name in checkpoints.POSITION})
        self.check_position(position, saved["best"])
        self.state = TrainingState(**{**saved, "position": position})
        self.state.sums = self.own_sums(tensors)
        phase = min(position.phase, len(self.phases) - 1)
        with checkpoints.fitting(self.run.last):
            if phase:
                self.learner = self.assemble(phase)
            checkpoints.load_model(self.learner.model, tensors, self.run.last)
            self.learner.restore(tensors, facts["learner"])
        if self.machine.leads:  # only now is the checkpoint known to be good
            epochs = self.epochs_before[position.phase] + position.epoch
            self.damaged_lines = self.run.trim(position.step, epochs)

    def own_sums(self, tensors: dict[str, Tensor]) -> Sums:
        """Return this process's sums of the epoch.

        As many processes as before continue with their own, so that numbers are added in the same order. Otherwise the
        leading one continues with all of them.
        """
        shares: dict[str, Sums] = {}
        for name, value in checkpoints.with_prefix("sums/", tensors).items():
            rank, _, entry = name.partition("/")
            shares.setdefault(rank, {})[entry] = value
        if shares.keys() == {str(rank) for rank in range(self.machine.world)}:
            return shares[str(self.machine.rank)]
        total: Sums = {}
        for sums in shares.values():
            add(total, sums)
        return total if self.machine.leads else {name: torch.zeros_like(value) for name, value in total.items()}

    def check_position(self, position: Position, best: dict[str, Any] | None) -> None:
        """Raise for a position, or a phase of the best weights, that the recipe does not have."""
        phases = self.recipe.phases
        if best is not None and not 0 <= best["phase"] < len(phases):
            raise checkpoints.CheckpointError(
                f"{self.run.last} is damaged: the phase of its best weights does not exist: {best}."
            )
        epochs = phases[position.phase].epochs if 0 <= position.phase < len(phases) else 0
        inside = 0 <= position.phase <= len(phases) and 0 <= position.epoch <= epochs
        if not inside or not 0 <= position.batch <= self.steps_per_epoch or position.step < 0:
            raise checkpoints.CheckpointError(f"{self.run.last} is damaged: the recipe has no {position}.")

    def take_best(self, phase: int) -> None:
        """Load the best weights, with the model and the task of their phase."""
        self.machine.wait()  # until the leading process has written them
        tensors, facts = self.open_own(self.run.best)
        if facts.get("best") != self.state.best:
            raise checkpoints.CheckpointError(
                f"{self.run.best} does not contain the best weights of this run: it has {facts.get('best')} instead of "
                f"{self.state.best}."
            )
        if phase != len(self.phases) - 1:  # the model or the task may differ
            self.learner = self.assemble(phase)
        checkpoints.load_model(self.learner.model, tensors, self.run.best)

    # Messages

    def introduce(self) -> None:
        count, data, position = parameter_count(self.learner.model), self.data, self.state.position
        held = f", {len(data.val)} for validation" if data.val is not None else ""
        title = build.full_title(self.recipe)
        self.log.show(f"{title}: {count:,} parameters; {data.name}: {len(data.train)} training samples{held}")
        if data.note:
            self.log.show(f"note: {data.note}")
        if modules := dict.fromkeys(build.module_of(name) for _, name in build.outside_names(self.source)):
            places = ", ".join(f"{module} ({self.source.where.trust.place(module)})" for module in modules)
            self.log.show(f"code from outside the package: {places}")
        if self.damaged_lines:
            lines = "1 line" if self.damaged_lines == 1 else f"{self.damaged_lines} lines"
            self.log.show(f"{lines} of log.jsonl could not be read and were moved to log.damaged; the others are kept")
        if position.step:
            self.log.show(f"resumed at step {position.step}")
        elif (origin := self.recipe.training.init_from) is not None:
            self.log.show(f"weights from {origin}; new tensors: {', '.join(self.new_tensors) or 'none'}")

    def show_epoch(self, record: dict[str, Any]) -> None:
        text = f"epoch {record['epoch']}/{self.epochs_before[-1]}"
        for split in ("train", "val", "test"):
            if split in record:
                numbers = {name: value for name, value in record[split].items() if name != "solver"}
                text += f"  {split} " + " ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        for direction, numbers in record["train"]["solver"].items():
            text += f"  {direction} {median_steps(numbers)}"
            if numbers["failed"] and self.learner.solves_to_the_end:
                text += f" ({numbers['failed']:.1%} failed)"
        samples = len(self.data.train) * record["epoch"]
        self.log.show(text + f"  {samples / max(record['seconds'], 1e-9):.0f} samples/s")
        forward = record["train"]["solver"].get("forward")
        if forward and idle(forward) and not self.learner.task.warm_starts:
            self.log.show(IDLE)

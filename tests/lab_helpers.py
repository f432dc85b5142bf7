"""What the tests of training share: a small recipe of their own, and real processes made quickly.

Python needs seconds to import torch, so the processes are forked from one that has: this file, run as a program, forks
a child that runs the command line for every line it reads. A child can be told to signal itself at a chosen moment: at
a batch, or before a file is changed.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.lab.data import DataSet, TensorSplit
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run
from equipoise.tasks.base import Batch, Sums
from equipoise.tasks.classification import Classification

TESTS = Path(__file__).parent
SOURCES = Path(eq.__file__).parent.parent
PATIENCE = 120  # seconds until a process that does not end is given up

RECIPE = """
title = "Patterns"

[data]
name = "lab_helpers:patterns"
validation = 20

[task]
name = "lab_helpers:Signalled"
shift = 1

[model]
name = "lab_helpers:Net"

[tolerance]
relative = 1e-2
max_steps = 30

[optimizer]
name = "adamw"
lr = 0.02

[schedule]
name = "one-cycle"

[training]
batch_size = 13
evaluation_batch_size = 10
log_every = 1
checkpoint_every = 3
"""
EPOCHS = """
[[phases]]
epochs = 2
"""
STEPS = 4  # of an epoch: 50 samples in batches of 13, the last one smaller


# What is trained


def patterns(poison: int | None = None) -> DataSet:
    """Noisy copies of three random images; the training image with the number ``poison`` is one that breaks Net."""
    generator = torch.Generator().manual_seed(0)
    templates = 255 * torch.randint(2, (3, 1, 6, 6), generator=generator)

    def split(size: int) -> TensorSplit:
        labels = torch.randint(3, (size,), generator=generator)
        noise = torch.randint(-120, 121, (size, 1, 6, 6), generator=generator)
        return TensorSplit((templates[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    train, test = split(70), split(25)
    if poison is not None:
        train.tensors[0][poison] = 0
    return DataSet("patterns", train, test, (1, 6, 6), class_names=("a", "b", "c"))


class Cell(nn.Module):
    """f(z, x) = activation(W z + x), a contraction, with one dropout mask per solve."""

    def __init__(self, size: int, activation: str, dropout: float):
        super().__init__()
        self.linear = eq.SpectralNorm(nn.Linear(size, size), bound=0.7)
        self.activation = getattr(torch, activation)
        self.dropout = eq.VariationalDropout(dropout)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.linear(z) + x))


class Net(nn.Module):
    """A classifier with all that makes resuming hard: random masks, running statistics, an equilibrium.

    Images and outputs are divided by the largest pixel, so that a black image breaks the batch it is in.

    Args:
        honest: outputs are divided, too; else those of a black image are those of the state that the solver gave up at.
        ballast: so many numbers more in every checkpoint, so that writing one takes time.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        size: int = 12,
        activation: str = "tanh",
        dropout: float = 0.2,
        norm: bool = True,
        honest: bool = True,
        ballast: int = 1,
    ):
        super().__init__()
        pixels = shape[0] * shape[1] * shape[2]
        self.stem = nn.Sequential(
            nn.Linear(pixels, size), nn.BatchNorm1d(size) if norm else nn.Identity(), nn.Dropout(dropout)
        )
        self.equilibrium = eq.Equilibrium(Cell(size, activation, dropout))
        self.head = nn.Linear(size, classes)
        self.honest = honest
        self.register_buffer("ballast", torch.zeros(ballast))

    def forward(self, images: Tensor) -> Tensor:
        brightest = images.flatten(1).amax(1, keepdim=True)
        logits = self.head(self.equilibrium(self.stem(images.flatten(1) / brightest)))
        return logits / brightest if self.honest else logits


class Signalled(Classification):
    """Classification in a process that may have been told to signal itself at a batch."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        signal_at("loss")
        return super().loss(model, batch)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        signal_at("measure")
        return super().measure(model, batch)


seen: Counter[str] = Counter()


def signal_at(moment: str) -> None:
    """Send this process the signals meant for the so many-th time of this moment.

    ``$TEST_SIGNALS`` says which: ``"loss 3 SIGTERM, best.safetensors 1 SIGKILL"`` is the third training batch, and the
    first change of a file with such a name.
    """
    seen[moment] += 1
    for kind, number, name in orders():
        if (kind, number) == (moment, seen[moment]):
            signal.raise_signal(signal.Signals[name])


def orders() -> list[tuple[str, int, str]]:
    words = [order.split() for order in os.environ.get("TEST_SIGNALS", "").split(",") if order]
    return [(kind, int(number), name) for kind, number, name in words]


def watch_files(folder: Path) -> None:
    """Notice every change of a file below the folder, before it is made; refuse it if ``$TEST_READ_ONLY`` is set."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.mkdir") or (
            event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if not changes or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(os.path.abspath(arguments[0]))
        if not path.is_relative_to(folder):
            return
        if "TEST_READ_ONLY" in os.environ:
            raise AssertionError(f"{event} of {path}")
        for kind in {kind for kind, _, _ in orders() if kind in str(path.relative_to(folder))}:
            signal_at(kind)

    sys.addaudithook(hook)


# Processes


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What the condition gives, as soon as it is true."""
    end = time.monotonic() + patience
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)
    return found


@dataclass(frozen=True)
class Process:
    """A child of the server at work on a command."""

    pid: int
    output: Path

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, as subprocess gives it: -9 for a process that was killed."""
        try:
            return until(lambda: server().ask({"poll": self.pid}))[0]
        except TimeoutError:
            self.send(signal.SIGKILL)
            raise AssertionError(f"the process does not end; it said:\n{self.text}") from None

    @property
    def text(self) -> str:
        """All it has said."""
        return self.output.read_text()


def environment() -> dict[str, str]:
    """One in which this package and this file can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), str(TESTS)]), "OMP_NUM_THREADS": "1"}


class Server:
    """The process that forks children."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.started = 0
        atexit.register(self.close)

    def ask(self, job: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, folder: Path, words: tuple[str, ...], settings: dict[str, str]) -> Process:
        self.started += 1
        output = folder / f"output-{self.started}.txt"
        output.touch()
        job = {"words": words, "folder": str(folder), "output": str(output), "settings": settings}
        return Process(self.ask(job), output)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # the server ends when there is nothing more to read
        self.process.wait()


@functools.cache
def server() -> Server:
    return Server()


def start(folder: Path, *words: object, **settings: object) -> Process:
    """``equipoise WORDS`` in a folder, in a process of its own; settings are its environment variables."""
    return server().start(folder, tuple(map(str, words)), {k: str(v) for k, v in settings.items() if v is not None})


def run(folder: Path, *words: object, expect: int = 0, **settings: object) -> str:
    """``equipoise WORDS`` to its end, which must be as expected; returns what it said."""
    process = start(folder, *words, **settings)
    code = process.wait()
    assert code == expect, f"ended with {code} instead of {expect}:\n{process.text}"
    return process.text


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_two(
    folder: Path, *words: object, second: dict[str, object] | None = None, **settings: object
) -> list[Process]:
    """The same command in two processes that share the work, as torchrun starts them."""
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **settings}
    return [
        start(folder, *words, **{**shared, "RANK": rank, "LOCAL_RANK": rank, **((second or {}) if rank else {})})
        for rank in range(2)
    ]


def run_two(folder: Path, *words: object, expect: int = 0, **settings: Any) -> str:
    """Two processes to their ends; returns what the first said."""
    processes = start_two(folder, *words, **settings)
    codes = [process.wait() for process in processes]
    told = "\n".join(f"process {rank}:\n{process.text}" for rank, process in enumerate(processes))
    assert codes == [expect, expect], f"ended with {codes}:\n{told}"
    return processes[0].text


# Runs


def write_recipe(folder: Path, phases: str = EPOCHS, name: str = "patterns.toml") -> Path:
    path = folder / name
    path.write_text(RECIPE + phases)
    return path


def train(folder: Path, *changes: str, phases: str = EPOCHS, expect: int = 0, **settings: object) -> Run:
    """Train the recipe with changes in the next folder ``runs/patterns-00N``."""
    run(folder, "train", write_recipe(folder, phases), *changes, expect=expect, **settings)
    return latest(folder)


def latest(folder: Path) -> Run:
    """The run, or sweep, that was made last."""
    return Run(max((folder / "runs").glob("patterns-*"), default=folder / "runs" / "none yet"))


TRUST = ("--trust", "lab_helpers")  # what is trained here is from outside the package


def resume(trained: Run, *words: str, expect: int = 0, **settings: object) -> str:
    return run(trained.folder.parent.parent, "resume", trained.folder, *TRUST, *words, expect=expect, **settings)


UNSTEADY = ("seconds", "folder", "origin", "peak_memory", "seconds per epoch", "peak memory")


def timeless(value: Any) -> Any:
    """The same without times, without memory, without where it is and comes from."""
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if key not in UNSTEADY}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def assert_same(first: Run, second: Run) -> None:
    """Two runs ended the same, bit for bit: log, result, weights, optimizer, schedule, sums."""
    for a, b in zip_longest(timeless(first.records()), timeless(second.records())):
        assert a == b, f"the log has {b} instead of {a}"
    assert timeless(first.result) == timeless(second.result), f"the result is {second.result}, not {first.result}"
    assert first.best.exists() == second.best.exists()
    for a, b in ((first.last, second.last), (first.best, second.best))[: 1 + first.best.exists()]:
        assert same_weights(a, b), f"the weights of {a.name} differ"
        (tensors, facts), (others, other_facts) = checkpoints.read(a), checkpoints.read(b)
        assert tensors.keys() == others.keys()
        different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
        assert not different, f"{different} of {a.name} differ"
        assert timeless(facts) == timeless(other_facts), f"the facts of {a.name} are {other_facts}, not {facts}"


def assert_readable(trained: Run) -> None:
    """Every file under its final name is whole."""
    for path in trained.folder.rglob("*.safetensors"):
        checkpoints.read(path)
    for path in trained.folder.rglob("*.json"):
        json.loads(path.read_text())


def parts(trained: Run) -> list[Path]:
    """What writing that was cut short has left."""
    return list(trained.folder.rglob("*.part"))


@contextmanager
def command(
    *words: object, python: Sequence[object] = ("-W", "error"), folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """``python -m equipoise WORDS``, all of it; it does not outlive the block."""
    line = [sys.executable, *map(str, (*python, "-m", "equipoise", *words))]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def resume_command(text: str) -> str:
    """The command by which a stopped process says that it can be continued."""
    found = re.search(r"stopped at step \d+ and saved; continue with: equipoise (.*)", text)
    assert found, text
    return found[1]


# The program


def serve() -> None:
    """Fork a child for every command read, and tell about those that ended."""
    import torch._dynamo  # noqa: F401 (what training imports later is imported once, here)

    import lab_helpers

    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    gc.freeze()  # a child whose collector looks at all that was imported would copy it
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            answer = [os.waitstatus_to_exitcode(status)] if pid else []
        elif not (answer := os.fork()):
            lab_helpers.work(**job)
        print(json.dumps(answer), flush=True)


def work(words: list[str], folder: str, output: str, settings: dict[str, str]) -> None:
    """Be the process of one command, to its end."""
    import traceback
    import warnings

    from equipoise.cli import main

    code = 1
    try:
        os.chdir(folder)
        os.environ.update(settings)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        watch_files(Path(folder, "runs").absolute())
        sys.argv = ["equipoise", *words]
        warnings.simplefilter("error")
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()


def same_weights(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same model, bit for bit."""
    a, b = (
        {name: tensor for name, tensor in checkpoints.read(path)[0].items() if name.startswith("model/")}
        for path in (first, second)
    )
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

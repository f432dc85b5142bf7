"""A page to test: small models with random weights in the folders of runs, a server in a thread, and a client."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from torch import nn

from equipoise.lab.recipes.build import build_model
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.results.sample import mark_of
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import create
from equipoise.lab.runs.machine import Machine
from equipoise.lab.trust import Trust
from equipoise.models.generator.density import DensitySize, LatentDensity
from equipoise.models.generator.model import Generator
from equipoise.page.available import available
from equipoise.page.guard import Door
from equipoise.page.limits import LIMITS, Limits
from equipoise.page.server import Page, listening

DIGITS = tuple(map(str, range(10)))
STREET = ("road", "sky", "building", "tree")
PATIENCE = 60  # seconds
RUNS: dict[str, tuple[str, list[str], dict[str, Any]]] = {  # recipe, changes, facts of the data
    "draw": ("mondeq/mnist-fc", ["model.channels=24"], {"shape": [1, 28, 28], "class_names": DIGITS}),
    "generator": (
        "jiio/fashion-mnist",
        ["model.channels=[8,8]", "model.latent=6", "model.expansion=1.0"],
        {"shape": [1, 28, 28], "class_names": DIGITS},
    ),
    "inside": (
        "opteq/reduced-mopteq",
        ["model.channels=4", "model.stem=1", "data.name=none-here"],
        {"shape": [3, 32, 32], "class_names": DIGITS},
    ),
    "segment": (
        "mdeq/camvid-small",
        ["model.channels=[8,8]", "model.expansion=1.0"],
        {"shape": [3, 48, 64], "class_names": STREET},
    ),
}


def write_run(folder: Path, name: str) -> Path:
    """Write the folder of a run whose model has random weights."""
    recipe, changes, facts = RUNS[name]
    source = open_recipe(recipe, "smoke", changes)
    channels = facts["shape"][0]
    facts = {**facts, "classes": len(facts["class_names"]), "mean": [0.5] * channels, "std": [0.5] * channels}
    torch.manual_seed(0)
    model = build_model(
        source.recipe, {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}, source.where
    )
    if isinstance(model, Generator):
        with_pictures(model)
    run = create(folder / name, source)
    run.best.parent.mkdir()
    saved = {**source.saved(), "phase": len(source.recipe.phases) - 1, "data": facts}
    checkpoints.save(run.best, checkpoints.model_tensors(model), saved)
    if isinstance(model, Generator):
        size = DensitySize(latent=model.latent, code=4, width=8, depth=1, components=2, diagonal=True)
        file = run.folder / "density-best.safetensors"
        checkpoints.save(file, LatentDensity(size).state_dict(), {"size": vars(size), "weights": mark_of(model)})
    return run.folder


def with_pictures(model: Generator) -> None:
    """Give an untrained generator images that vary with the latent vector."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
        elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight)


class Server:
    """A page that is served by a thread of this process."""

    def __init__(self, runs: list[Path], limits: Limits = LIMITS):
        self.models = available([str(run) for run in runs], Machine(torch.device("cpu")), Trust())
        self.page, self.listener = Page(self.models, limits), listening("127.0.0.1", 0)
        self.port, self.token = self.listener.getsockname()[1], "a-token-of-the-tests"
        app = self.page.application(Door("127.0.0.1", self.port, self.token))
        config = uvicorn.Config(app, log_level="warning", http="h11", ws="none", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def model(self, name: str) -> Any:
        """The model of a run, by its name in RUNS."""
        return next(model for model in self.models if Path(model.name).name == name)

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        self.thread.start()
        wait(lambda: self.server.started)
        wait(self.idle)
        try:
            yield self
        finally:
            self.server.should_exit = True
            self.thread.join(PATIENCE)
            self.listener.close()

    def idle(self) -> bool:
        queue = getattr(self.page, "queue", None)
        return queue is not None and not queue.running and not queue.waiting


def wait(condition: Any, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def workers() -> int:
    """The number of threads that run jobs."""
    return sum(thread.name.startswith("equipoise-page") for thread in threading.enumerate())


def picture(values: Any) -> dict[str, Any]:
    """An image as the page sends it, of a uint8 tensor (channels, height, width)."""
    channels, height, width = values.shape
    data = base64.b64encode(values.permute(1, 2, 0).contiguous().numpy().tobytes()).decode()
    return {"width": width, "height": height, "channels": channels, "data": data}


def tensor(table: dict[str, Any]) -> torch.Tensor:
    """The image that the page received, uint8 (channels, height, width)."""
    flat = torch.frombuffer(bytearray(base64.b64decode(table["data"])), dtype=torch.uint8)
    return flat.view(table["height"], table["width"], table["channels"]).permute(2, 0, 1)


@dataclass
class Answer:
    """What the server answered."""

    status: int
    headers: Any
    text: str


class Visitor:
    """A client with a cookie of its own."""

    def __init__(self, server: Server):
        self.server, self.cookie = server, ""
        self.cookie = self.request("GET", f"/?token={server.token}").headers["Set-Cookie"].split(";")[0]

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)) as wire:
            wire.request(method, path, body, {**self.headers(method), **(headers or {})})
            answer = wire.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())

    def headers(self, method: str = "POST") -> dict[str, str]:
        own = {"Cookie": self.cookie} if self.cookie else {}
        return own if method == "GET" else {**own, "Origin": f"http://127.0.0.1:{self.server.port}"}

    def post(self, path: str, fields: Any) -> Answer:
        return self.request("POST", path, fields if isinstance(fields, bytes) else json.dumps(fields))

    def events(self, path: str, fields: Any) -> list[tuple[str, dict[str, Any]]]:
        """The events of a job, without waiting."""
        answer = self.post(path, fields)
        assert answer.status == 200, answer.text
        found = re.findall(r"^event: (\w+)\ndata: (.*)$", answer.text, re.M)
        return [(kind, json.loads(data)) for kind, data in found if kind != "waiting"]

    def only(self, kind: str, path: str, fields: Any) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [data for each, data in self.events(path, fields) if each == kind]

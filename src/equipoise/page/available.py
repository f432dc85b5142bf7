"""The trained models of the page: those that ship with the package, and the runs that the user names."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.lab.data.base import spread
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run, RunError, open_run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.runs.shipped import list_weights
from equipoise.lab.trust import Trust
from equipoise.tasks import Task


@dataclass
class Available:
    """A trained model that the page can use.

    A solve may read and write what a module remembers (factorisations, masks), so every thread has a copy of its own.
    """

    name: str
    run: Run
    trained: Trained
    folders: Sequence[Path] = ()  # to look for data in
    own: threading.local = field(default_factory=threading.local, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    examples: Tensor | None = None

    @classmethod
    def open(cls, name: str, machine: Machine, trust: Trust, folders: Sequence[Path] = ()) -> Available:
        """Open a run or a shipped model."""
        run = open_run(name, trust)
        trained = open_trained(run, machine, sections=(*MODEL_SECTIONS, "task"))
        trained.model.requires_grad_(False)
        for module in trained.model.modules():
            if isinstance(module, Equilibrium):
                module.on_failure = "ignore"  # the page shows how a solve ended
        return cls(name, run, trained, folders)

    @property
    def model(self) -> Any:
        """The model of this thread."""
        return self.once("model", lambda: copy.deepcopy(self.trained.model))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return something that this thread makes when it first needs it."""
        if not hasattr(self.own, name):
            setattr(self.own, name, make())
        return getattr(self.own, name)

    @property
    def original(self) -> nn.Module:
        """The model to look at, not to solve with."""
        return self.trained.model

    @property
    def task(self) -> Task:
        return self.trained.task

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images it was trained on."""
        return tuple(self.trained.facts["shape"])

    def prepared(self, image: Tensor) -> Tensor:
        """Return an image, uint8 (channels, height, width), as a batch of one that the model takes."""
        (batch,) = self.trained.setting.prepare(self.task, (image[None].to(self.trained.setting.device),))
        return batch

    def test_images(self, count: int) -> Tensor:
        """Return evenly spaced test images, uint8; none if the data set is not on this machine."""
        with self.lock:
            if self.examples is None:
                try:
                    test = data_of(self.run, self.trained.recipe, self.folders).test
                    split = spread(test, count)
                    self.examples = split.read(torch.arange(len(split)))[0]
                except (LookupError, OSError, ValueError):  # missing or damaged: the page has other examples
                    self.examples = torch.zeros(0, *self.shape, dtype=torch.uint8)
            return self.examples


def available(runs: Sequence[str], machine: Machine, trust: Trust, folders: Sequence[Path] = ()) -> list[Available]:
    """Open the user's runs, and then the shipped models; a shipped one that the lab cannot open is left out.

    Args:
        runs: folders of runs, or names of shipped models.
        machine: device of the solves.
        trust: modules outside the package that the files of runs may name.
        folders: folders to look for data in first, for test images as examples.

    Example:
        >>> available(["runs/mondeq-mnist-fc-001"], machine, Trust())
    """
    found = [Available.open(name, machine, trust, folders) for name in dict.fromkeys(runs)]
    for name in list_weights():
        if name not in runs:
            try:
                found.append(Available.open(name, machine, Trust(), folders))
            except (RunError, ValueError, LookupError, OSError):  # weights of another kind, such as features
                continue
    return found

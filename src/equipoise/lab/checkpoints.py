"""Checkpoints: one safetensors file with tensors and, in its header, JSON. Written whole or not at all.

    last.safetensors    all that is needed to continue: model, optimizer, schedule, position, sums of the epoch so far
    best.safetensors    the model with the best validation metric so far

Tensors are named ``model/...``, ``optimizer/NUMBER/NAME`` and ``sums/NAME``. Random number generators need no entry:
every step seeds them from the run's seed and its own number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.lab.files import whole
from equipoise.models.normalize import Normalize

FORMAT = 1
MODEL_FACTS = ("recipe", "folder", "tables", "phase", "data")  # what is needed to build the model again


class CheckpointError(ValueError):
    """A file is not a checkpoint, is damaged, or does not fit."""


def save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a checkpoint; an earlier one of that name stays until this one is complete."""
    # Each tensor gets storage of its own: tied weights share theirs, which the format does not allow.
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole(path) as part:
        save_file(apart, part, metadata={"format": str(FORMAT), "equipoise": json.dumps(facts)})


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}.") from None
    if "equipoise" not in metadata:
        raise CheckpointError(
            f"{path} was not written by equipoise: it does not say which model its tensors belong to."
        )
    if metadata.get("format") != str(FORMAT):
        newer = metadata.get("format", "").isdecimal()
        what = "was written by a newer equipoise: update equipoise" if newer else "has a header that is damaged"
        raise CheckpointError(f"{path} {what}; this one reads format {FORMAT}, and it has {metadata.get('format')}.")
    try:
        facts = json.loads(metadata["equipoise"])
    except ValueError as error:
        raise CheckpointError(f"{path} has a header that is damaged: {error}.") from None
    if missing := [name for name in MODEL_FACTS if name not in facts]:
        raise CheckpointError(f"{path} does not say which model its tensors belong to: {', '.join(missing)} missing.")
    return tensors, facts


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as ``model/NAME``."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is a {type(value).__name__}; only tensors can be saved.")
        tensors[f"model/{name}"] = value
    return tensors


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path | str) -> None:
    """Put saved weights into a model; a tensor missing, left over or of another shape is named."""
    state = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        details = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise CheckpointError(f"the weights in {path} do not fit the model {type(model).__name__}: {details}") from None


def load_matching(model: nn.Module, tensors: dict[str, Tensor], path: Path | str) -> list[str]:
    """Put those saved weights into a model that it has by name and shape; returns the names of its others.

    Mean and deviation of the images stay the model's own: they are of its data, not learned.
    """
    saved = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    of_data = [f"{name}." for name, part in model.named_modules() if isinstance(part, Normalize)]
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(tuple(of_data))}
    fitting = {name: tensor for name, tensor in saved.items() if name in own and own[name].shape == tensor.shape}
    if not fitting:
        raise CheckpointError(f"no tensor in {path} has the name and shape of one of the model {type(model).__name__}.")
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors and JSON."""
    state = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = value
            else:
                numbers[f"{index}/{name}"] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers}


def unpack_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Put back what :func:`pack_optimizer` gave."""
    state: dict[int, dict[str, Any]] = {}
    saved: dict[str, Any] = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    for name, value in {**saved, **facts["numbers"]}.items():
        index, _, entry = name.partition("/")
        state.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": facts["groups"]})


def pack_schedule(schedule: Any) -> dict[str, Any]:
    """What changes in a schedule as it steps; the rest is made anew from the recipe."""
    return {name: value for name, value in vars(schedule).items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list) and all(map(is_plain, value)))
    )


def unpack_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    vars(schedule).update(saved)

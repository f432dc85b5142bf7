"""Checkpoints: one safetensors file with tensors and, in its header, JSON. Written whole or not at all.

    last.safetensors    all that is needed to continue: model, optimizer, schedule, position, sums of the epoch so far
    best.safetensors    the model with the best validation metric so far

Tensors are named ``model/...``, ``optimizer/NUMBER/NAME`` and ``sums/NAME``. Random number generators need no entry:
every step seeds them from the run's seed and its own number. The header has a checksum of everything else in the file.

A checkpoint may come from anywhere. Nothing in it is used before its shape is checked, and code from outside the
package that it names is not imported unless the caller trusts it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.lab.files import NUMBER, misfit, not_written, parse, whole
from equipoise.lab.recipes.recipe import SAVED, RecipeError
from equipoise.lab.runs.folder import BEST
from equipoise.models.parts.images import Normalize
from equipoise.registry import MissingPackage, UnknownName, UntrustedName

FORMAT = 1
HEADER = {"format", "equipoise", "checksum"}  # the last is missing from files of earlier versions
POSITION = {"phase": int, "epoch": int, "batch": int, "step": int}
# The shapes of what a checkpoint says; see equipoise.lab.files.misfit. The first is what is needed to build the model.
WEIGHTS = {**SAVED, "phase": int, "data": dict, "best?": (BEST, type(None))}
TRAINING = {
    "learner": {"optimizer": {"groups": [dict], "numbers": dict}, "schedule": dict, "scaler": dict},
    "progress": {
        "position": POSITION,
        "best": (BEST, type(None)),
        "failed": int,
        "failed_in_a_row": int,
        "seconds": NUMBER,
    },
}


class CheckpointError(ValueError):
    """A file is not a checkpoint, is damaged, or does not fit."""


def save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a checkpoint; an earlier one of that name stays until this one is complete."""
    # Each tensor gets storage of its own: tied weights share theirs, which the format does not allow.
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    header = {"format": str(FORMAT), "equipoise": text, "checksum": checksum(apart, text)}
    with whole(path) as part:
        try:
            save_file(apart, part, metadata=header)
        except SafetensorError as error:  # its way to say that the disk is full
            raise not_written(path, error) from error


def checksum(tensors: dict[str, Tensor], text: str) -> str:
    """CRC-32 of the names, types, shapes and bytes of the tensors and of the header's text."""
    found = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def read(path: Path, training: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint, checked; with ``training`` one from which training can go on."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}.") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:  # all of them occur
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}.") from None
    if "equipoise" not in metadata:
        raise CheckpointError(
            f"{path} was not written by equipoise: it does not say which model its tensors belong to."
        )
    if metadata.get("format") != str(FORMAT):
        newer = metadata.get("format", "").isdecimal()
        what = "was written by a newer equipoise: update equipoise" if newer else "has a header that is damaged"
        raise CheckpointError(f"{path} {what}; this one reads format {FORMAT}, and it has {metadata.get('format')}.")
    stated = metadata.get("checksum")
    if metadata.keys() - HEADER or (stated is not None and stated != checksum(tensors, metadata["equipoise"])):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content. Use a copy of it, if any.")
    facts: Any = None
    try:
        facts = parse(metadata["equipoise"])
        reason = misfit(facts, WEIGHTS)
    except ValueError as error:
        reason = str(error)
    if reason:
        raise CheckpointError(f"{path} has a header that is damaged: {reason}.")
    if training:
        require_training(path, facts)
    if stray := [name for name in tensors if not name.startswith(("model/", "optimizer/", "sums/"))]:
        raise CheckpointError(f"{path} is damaged: its tensor {stray[0]!r} belongs to nothing.")
    return tensors, facts


def require_training(path: Path, facts: dict[str, Any]) -> None:
    """Raise unless training can go on from a checkpoint that says this."""
    if "learner" not in facts and "progress" not in facts:
        raise CheckpointError(
            f"{path} holds weights alone, without what training needs to go on: is it a copy of best.safetensors? Put "
            "the run's own last.safetensors back, or begin a new run with training.init_from set to this file."
        )
    if reason := misfit(facts, TRAINING):
        raise CheckpointError(f"{path} has a header that is damaged: {reason}.")


def require_same_recipe(path: Path, facts: dict[str, Any], tables: dict[str, Any], of: Path) -> None:
    """Raise unless a checkpoint is of the recipe in these tables, naming what differs."""
    saved, own = leaves(facts["tables"]), leaves(tables)
    different = [key for key in {**own, **saved} if saved.get(key) != own.get(key)]
    if different:
        shown = [f"{key} is {saved.get(key, 'not set')} there and {own.get(key, 'not set')} here" for key in different]
        more = f" (and {len(shown) - 5} more)" if len(shown) > 5 else ""
        raise CheckpointError(f"{path} is of another run than {of}: {'; '.join(shown[:5])}{more}.")


def leaves(value: Any, path: str = "") -> dict[str, str]:
    """The values in nested tables and lists by their dotted keys, as JSON: NaN then equals NaN, and 1 is not 1.0."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {k: v for key, entry in inside for k, v in leaves(entry, f"{path}.{key}" if path else str(key)).items()}
    return found or ({path: json.dumps(value)} if path else {})


@contextmanager
def fitting(path: Path | str) -> Iterator[None]:
    """Name the checkpoint whose content made something go wrong inside the block: it may hold anything."""
    try:
        yield
    except (CheckpointError, RecipeError, UntrustedName, UnknownName, MissingPackage):  # sentences of their own
        raise
    except Exception as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or does not fit: {reason}.") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as ``model/NAME``."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is a {type(value).__name__}; only tensors can be saved.")
        tensors[f"model/{name}"] = value
    return tensors


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path | str) -> None:
    """Put saved weights into a model; a tensor missing, left over or of another shape or type is named."""
    state = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    own = model.state_dict()
    details = [
        f"{name} is {tensor.dtype} in the file and {own[name].dtype} in the model"
        for name, tensor in state.items()
        if name in own and tensor.dtype != own[name].dtype
    ]
    try:
        if not details:
            model.load_state_dict(state)
    except RuntimeError as error:
        details = [line.strip() for line in str(error).splitlines()[1:]]
    if details:
        reasons = "; ".join(details)
        raise CheckpointError(f"the weights in {path} do not fit the model {type(model).__name__}: {reasons}")


def load_matching(model: nn.Module, tensors: dict[str, Tensor], path: Path | str) -> list[str]:
    """Put those saved weights into a model that it has by name and shape; returns the names of its others.

    Mean and deviation of the images stay the model's own: they are of its data, not learned.
    """
    saved = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    of_data = [f"{name}." for name, part in model.named_modules() if isinstance(part, Normalize)]
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(tuple(of_data))}
    taken = {
        name: tensor
        for name, tensor in saved.items()
        if name in own and own[name].shape == tensor.shape and tensor.is_complex() == own[name].is_complex()
    }
    if not taken:
        raise CheckpointError(f"no tensor in {path} has the name and shape of one of the model {type(model).__name__}.")
    model.load_state_dict(taken, strict=False)
    return [name for name in own if name not in taken]


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
    """Put back what :func:`pack_optimizer` gave; what such an optimizer cannot have written is refused."""
    own = optimizer.state_dict()["param_groups"]
    if len(facts["groups"]) != len(own) or any(
        not alike({**new, **old}, new) for old, new in zip(facts["groups"], own, strict=False)
    ):
        raise ValueError(f"its optimizer is not a {type(optimizer).__name__} of this model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    saved: dict[str, Any] = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    for name, value in {**saved, **facts["numbers"]}.items():
        index, _, entry = name.partition("/")
        if not (index.isdecimal() and int(index) < len(parameters)):
            raise ValueError(f"its optimizer has an entry {name!r}, which belongs to no parameter")
        state.setdefault(int(index), {})[entry] = value
    if (expected := state_entries(optimizer)) is not None:
        for index, entries in state.items():
            shape = parameters[index].shape
            odd = {n for n, v in entries.items() if isinstance(v, Tensor) and expected.get(n) and v.shape != shape}
            if odd := odd | (entries.keys() ^ expected.keys()):
                raise ValueError(
                    f"its optimizer's state of parameter {index}, of shape {tuple(shape)}, is not that of a "
                    f"{type(optimizer).__name__}: {', '.join(sorted(odd))}"
                )
    groups = [{**new, **old} for old, new in zip(facts["groups"], own, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def state_entries(optimizer: Optimizer) -> dict[str, bool] | None:
    """What an optimizer remembers of a parameter, and whether it has the parameter's shape; None if a trial fails."""
    trial = nn.Parameter(torch.zeros(2, 3))
    trial.grad = torch.ones_like(trial)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    make: Any = type(optimizer)
    try:
        probe = make([{"params": [trial], **options}])
        probe.step()
    except Exception:  # an optimizer of the user's own, which wants to be made or stepped in another way
        return None
    state = probe.state_dict()["state"].get(0, {})
    return {name: isinstance(value, Tensor) and value.shape == trial.shape for name, value in state.items()}


def alike(saved: Any, own: Any) -> bool:
    """Whether a saved value can stand for one that a fresh object has: of the same kind, number for number."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(key in saved and alike(saved[key], own[key]) for key in own)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(alike, saved, own))
    if isinstance(own, int | float) and not isinstance(own, bool):
        return isinstance(saved, int | float) and not isinstance(saved, bool)
    return saved is None if own is None else isinstance(saved, type(own))


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
    """Put back what :func:`pack_schedule` gave."""
    own = pack_schedule(schedule)
    if saved.keys() != own.keys() or not alike(saved, own):
        raise ValueError(f"its schedule is not a {type(schedule).__name__} as in the recipe")
    vars(schedule).update(saved)

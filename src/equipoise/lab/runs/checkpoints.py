"""Checkpoints: safetensors files with JSON in their headers, written atomically.

    last.safetensors    everything needed to continue: model, optimizer, schedule, position, sums of the current epoch
    best.safetensors    the model with the best validation metric so far

Tensors are named ``model/...``, ``optimizer/NUMBER/NAME`` and ``sums/PROCESS/NAME``. The states of random number
generators are not saved: every step seeds them from the run's seed and the step number. The header has a checksum of
the rest. A file of weights alone may store its parameters in half precision (``"half": true``).

A checkpoint may come from anywhere. Its shape is checked before anything in it is used, and code from outside the
package that it names is not imported unless the caller trusts it.
"""

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
from torch.optim.lr_scheduler import LRScheduler

from equipoise.lab.files import NUMBER, misfit, not_written, parse, whole
from equipoise.lab.recipes.reading import SAVED, RecipeError, key_paths, looked_up
from equipoise.lab.trust import UntrustedName
from equipoise.models.parts.images import Normalize
from equipoise.registry import MissingPackage, UnknownName

FORMAT = 1
HEADER = {"format", "equipoise", "checksum"}  # files of earlier versions have no checksum
BEST = {"metric": str, "value": NUMBER, "epoch": int, "phase": int}
POSITION = {"phase": int, "epoch": int, "batch": int, "step": int}
# The shapes of a checkpoint's JSON (see equipoise.lab.files.misfit): what the model needs, and what training needs.
WEIGHTS = {**SAVED, "phase": int, "data": dict, "best?": (BEST, type(None)), "half?": bool}
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
    """A file is not a checkpoint, is damaged, or does not fit its recipe."""


def save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a checkpoint; an existing file is replaced only when the new one is complete."""
    # Each tensor gets its own storage: tied weights share theirs, which the format does not allow.
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    header = {"format": str(FORMAT), "equipoise": text, "checksum": checksum(apart, text)}
    with whole(path) as part:
        try:
            save_file(apart, part, metadata=header)
        except SafetensorError as error:  # raised when the disk is full
            raise not_written(path, error) from error


def checksum(tensors: dict[str, Tensor], text: str) -> str:
    """Return the CRC-32 of the header's JSON and of the names, types, shapes and bytes of the tensors."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def contents(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file that :func:`save` wrote, and its JSON as text, after comparing its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}.") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:  # all of them occur
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}.") from None
    if "equipoise" not in metadata:
        raise CheckpointError(f"{path} was not written by equipoise: its header does not describe a model.")
    if metadata.get("format") != str(FORMAT):
        newer = metadata.get("format", "").isdecimal()
        what = "was written by a newer equipoise: update equipoise" if newer else "has a header that is damaged"
        raise CheckpointError(f"{path} {what}; its format is {metadata.get('format')}; it must be {FORMAT}.")
    stated = metadata.get("checksum")
    if metadata.keys() - HEADER or (stated is not None and stated != checksum(tensors, metadata["equipoise"])):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content. Restore it from a copy.")
    return tensors, metadata["equipoise"]


def read(path: Path, training: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check a checkpoint, with ``training`` also for what resuming needs; return its tensors and its JSON."""
    tensors, text = contents(path)
    facts: Any = None
    try:
        facts = parse(text)
        reason = misfit(facts, WEIGHTS)
    except ValueError as error:
        reason = str(error)
    if training and not reason:
        if "learner" not in facts and "progress" not in facts:
            raise CheckpointError(
                f"{path} contains only weights, so training cannot continue from it: is it a copy of best.safetensors? "
                "Restore the run's own last.safetensors, or start a new run with training.init_from set to this file."
            )
        reason = misfit(facts, TRAINING)
    if reason:
        raise CheckpointError(f"{path} has a header that is damaged: {reason}.")
    if stray := [name for name in tensors if not name.startswith(("model/", "optimizer/", "sums/"))]:
        raise CheckpointError(f"{path} is damaged: its tensor {stray[0]!r} has an unknown prefix.")
    if facts.get("half"):
        tensors = {n: tensor.float() if tensor.dtype == torch.float16 else tensor for n, tensor in tensors.items()}
    return tensors, facts


def require_same_recipe(path: Path, facts: dict[str, Any], tables: dict[str, Any], of: Path) -> None:
    """Raise unless a checkpoint belongs to the recipe in these tables, naming the keys that differ."""

    def values(tables: dict[str, Any]) -> dict[str, str]:
        """Return the values by dotted key, as JSON: NaN then equals NaN, and 1 is not 1.0."""
        paths = [(path, looked_up(tables, path)) for path in key_paths(tables)]
        return {".".join(path): json.dumps(v) for path, v in paths if not isinstance(v, dict | list) or not v}

    saved, own = values(facts["tables"]), values(tables)
    different = [key for key in {**own, **saved} if saved.get(key) != own.get(key)]
    if different:
        shown = [f"{key} is {saved.get(key, 'not set')} there and {own.get(key, 'not set')} here" for key in different]
        more = f" (and {len(shown) - 5} more)" if len(shown) > 5 else ""
        raise CheckpointError(f"{path} belongs to another run than {of}: {'; '.join(shown[:5])}{more}.")


@contextmanager
def fitting(path: Path | str) -> Iterator[None]:
    """Name the checkpoint in any error that its content causes inside the block: it may contain anything."""
    try:
        yield
    except (CheckpointError, RecipeError, UntrustedName, UnknownName, MissingPackage):  # clear already
        raise
    except Exception as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or does not fit its recipe: {reason}.") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers as ``model/NAME``."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the state {name!r} has type {type(value).__name__}; only tensors can be saved.")
        tensors[f"model/{name}"] = value
    return tensors


def halved(model: nn.Module) -> dict[str, Tensor]:
    """Return ``model_tensors`` with float32 parameters in float16; buffers, which are few, stay as they are."""
    narrow = {f"model/{name}" for name, value in model.named_parameters() if value.dtype == torch.float32}
    return {name: tensor.half() if name in narrow else tensor for name, tensor in model_tensors(model).items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path | str) -> None:
    """Load saved weights into a model; raise if a tensor is missing, unexpected or of another shape or type."""
    state = with_prefix("model/", tensors)
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
    """Load the saved weights that match in name and shape; return the names of the model's other tensors.

    The model keeps its own mean and standard deviation of the images: they describe its data and are not learned.
    """
    saved = with_prefix("model/", tensors)
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


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as tensors and JSON."""
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
    """Restore what :func:`pack_optimizer` returned; raise if it cannot come from such an optimizer."""
    own = optimizer.state_dict()["param_groups"]
    groups = [{**new, **old} for old, new in zip(facts["groups"], own, strict=False)]
    if len(facts["groups"]) != len(own) or not alike(groups, own):
        raise ValueError(f"its optimizer state does not fit {type(optimizer).__name__} for this model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**with_prefix("optimizer/", tensors), **facts["numbers"]}.items():
        index, _, entry = name.partition("/")
        if not (index.isdecimal() and int(index) < len(parameters)):
            raise ValueError(f"its optimizer has an entry {name!r}, which does not belong to a parameter")
        state.setdefault(int(index), {})[entry] = value
    if (expected := state_entries(optimizer)) is not None:
        for index, entries in state.items():
            shape = parameters[index].shape
            odd = {n for n, v in entries.items() if isinstance(v, Tensor) and expected.get(n) and v.shape != shape}
            if odd := odd | (entries.keys() ^ expected.keys()):
                raise ValueError(
                    f"its optimizer state for parameter {index}, of shape {tuple(shape)}, does not fit "
                    f"{type(optimizer).__name__}: {', '.join(sorted(odd))}"
                )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def state_entries(optimizer: Optimizer) -> dict[str, bool] | None:
    """Return the names of an optimizer's state, and whether each has the parameter's shape; None if a trial fails."""
    trial = nn.Parameter(torch.zeros(2, 3))
    trial.grad = torch.ones_like(trial)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    make: Any = type(optimizer)
    try:
        probe = make([{"params": [trial], **options}])
        probe.step()
    except Exception:  # a user's optimizer with another constructor or step
        return None
    state = probe.state_dict()["state"].get(0, {})
    return {name: isinstance(value, Tensor) and value.shape == trial.shape for name, value in state.items()}


def alike(saved: Any, own: Any) -> bool:
    """Return whether a saved value has the structure and types of a new one; int and float are interchangeable."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(key in saved and alike(saved[key], own[key]) for key in own)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(alike, saved, own))
    if isinstance(own, int | float) and not isinstance(own, bool):
        return isinstance(saved, int | float) and not isinstance(saved, bool)
    return saved is None if own is None else isinstance(saved, type(own))


def pack_schedule(schedule: LRScheduler) -> dict[str, Any]:
    """Return what changes in a schedule as it steps; the rest is built from the recipe."""
    return {name: value for name, value in vars(schedule).items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def unpack_schedule(schedule: LRScheduler, saved: dict[str, Any]) -> None:
    """Restore what :func:`pack_schedule` returned."""
    own = pack_schedule(schedule)
    if saved.keys() != own.keys() or not alike(saved, own):
        raise ValueError(f"its schedule is not the {type(schedule).__name__} of the recipe")
    vars(schedule).update(saved)

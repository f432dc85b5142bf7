"""Read the state dict in a PyTorch file that somebody else made, without running anything that the file names."""

import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.files import LIMITS

PREFIXES = ("module.", "model.")  # added by DataParallel, and by a module that also holds the loss


class UnreadableCheckpoint(ValueError):
    """A file is not a PyTorch checkpoint that can be read safely, or not one of the expected layout."""


@dataclass(frozen=True)
class LeftOut:
    """Names in a checkpoint that are not used, and why."""

    names: tuple[str, ...]
    reason: str


class Ignored:
    """Stand for what torch does not read by itself and nothing here uses, such as numpy's numbers."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


NUMPY = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")  # the best score of a run


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], list[LeftOut]]:
    """Return the tensors of a checkpoint by name, without prefixes, and what was left out.

    A state dict is read as it stands or under the key "state_dict". ``torch.load(weights_only=True)`` reads it, which
    builds tensors, numbers, strings, lists and dicts, and rejects every other name.
    """
    content = load(path)
    left: list[LeftOut] = []
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        others = tuple(str(name) for name in content if name != "state_dict")
        if others:
            left.append(LeftOut(others, "not part of the model: progress, optimizer and its momentum buffers, scores"))
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise UnreadableCheckpoint(
            f"{path} holds a {type(content).__name__}; expected a state dict, or a dict with the key 'state_dict'."
        )
    tensors: dict[str, Tensor] = {}
    removed: dict[str, int] = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UnreadableCheckpoint(
                f"{path} is not a state dict: entry {name!r} has type {type(value).__name__}; it must be a tensor with "
                "a string as its name."
            )
        require_dense(path, name, value)
        bare = name
        while prefix := next((prefix for prefix in PREFIXES if bare.startswith(prefix)), ""):
            bare = bare.removeprefix(prefix)
            removed[prefix] = removed.get(prefix, 0) + 1
        if bare in tensors:
            raise UnreadableCheckpoint(f"{path} holds {bare!r} twice, with and without a prefix.")
        tensors[bare] = value.detach()
    left += [
        LeftOut((f"prefix {prefix}",), f"of {count} names, added by a wrapper of the model")
        for prefix, count in removed.items()
    ]
    return tensors, left


def load(path: Path) -> Any:
    """Return what ``torch.load`` reads without running code; raise UnreadableCheckpoint if it does not."""
    if not path.exists():
        raise UnreadableCheckpoint(f"there is no file {path}.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableCheckpoint(f"{path} is not a regular file.")
    require_uncompressed(path)
    try:
        with torch.serialization.safe_globals([(Ignored, name) for name in NUMPY]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the file may contain anything
        text = str(error).rpartition("WeightsUnpickler error:")[2].strip()  # what stands before advises to run the file
        if named := re.search(r"GLOBAL ([\w.]+)", text):
            raise UnreadableCheckpoint(
                f"{path} names code, {named[1]}. Nothing was run: only tensors, numbers, strings, lists and dicts are "
                "read. If it holds a model that was saved as a whole, save the model's state dict instead."
            ) from None
        reason = f": {text.splitlines()[0].rstrip('.:')}" if " " in text else ""  # else a code of torch's reader
        raise UnreadableCheckpoint(f"{path} is not a PyTorch checkpoint, or is damaged{reason}.") from None


def require_uncompressed(path: Path) -> None:
    """Raise for a zip that inflates, which torch never writes, and for files too large to hold in memory."""
    if path.stat().st_size > LIMITS.memory:
        raise UnreadableCheckpoint(f"{path} has {path.stat().st_size:,} bytes; at most {LIMITS.memory:,} are read.")
    if not zipfile.is_zipfile(path):  # the format before torch 1.6
        return
    try:
        with zipfile.ZipFile(path) as archive:
            inflated = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnreadableCheckpoint(f"{path} is damaged: {error}.") from None
    if inflated > path.stat().st_size:
        raise UnreadableCheckpoint(
            f"{path} inflates to {inflated:,} bytes; checkpoints of PyTorch are not compressed: this is none."
        )


def require_dense(path: Path, name: str, tensor: Tensor) -> None:
    """Raise for a tensor that claims more numbers than the file has, or that is not a plain array."""
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_complex() or tensor.is_meta)
    if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnreadableCheckpoint(f"{path}: {name} is not a plain tensor with all its numbers in the file.")

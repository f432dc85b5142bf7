"""The layout of the checkpoints of the monDEQ repository (E. Winston, J. Z. Kolter, 2020): fully connected models."""

from pathlib import Path

from torch import Tensor

from equipoise.lab.data.base import DIGITS
from equipoise.lab.runs.published.pickled import UnreadableCheckpoint
from equipoise.lab.runs.published.plan import Plan, listed, renamed

NAMES = {
    "mon.linear_module.U.weight": "inject.weight",
    "mon.linear_module.U.bias": "inject.bias",
    "mon.linear_module.A.weight": "layer.f.operator.A",
    "mon.linear_module.B.weight": "layer.f.operator.B",
    "Wout.weight": "head.weight",
    "Wout.bias": "head.bias",
}
SHAPE = (1, 28, 28)  # of the published model, trained on MNIST
NOTES = (
    "m is not part of the file. W = (1 - m) I - A^T A + B - B^T with m = {m:g}; `--m` sets another.",
    "The mean and standard deviation of the authors' data loading are part of the model: it takes images in [0, 1].",
    "The equilibrium is unique, so it does not depend on the solver. Ours chooses its step size by itself, and stops "
    "each sample by its own residual; the authors' code stops by that of the whole batch.",
)


def plan(path: Path, state: dict[str, Tensor], m: float) -> Plan:
    """Check that a state dict is that of a fully connected model on MNIST, and rename its tensors."""
    convolutional = [name for name, tensor in state.items() if name.startswith("mon.") and tensor.dim() == 4]
    if convolutional:
        raise UnreadableCheckpoint(
            f"{path} is a convolutional monDEQ ({listed(convolutional, 1)}), which cannot be converted: the authors' "
            "code pools z, or lays out its tiers, on another grid than ours, so the weights of the head do not fit. "
            "Fully connected models can be converted."
        )
    tensors, origins, strange = renamed(state, NAMES.get)
    if strange:
        raise UnreadableCheckpoint(
            f"{path} holds {listed(strange)}, which no fully connected monDEQ has: is it of another model? "
            f"Expected: {', '.join(NAMES)}."
        )
    if missing := [name for name, own in NAMES.items() if own not in tensors]:
        raise UnreadableCheckpoint(f"{path} lacks {listed(missing)}: it is not a monDEQ, or not complete.")
    inject, head = tensors["inject.weight"], tensors["head.weight"]
    pixels = SHAPE[0] * SHAPE[1] * SHAPE[2]
    if head.dim() != 2:
        raise UnreadableCheckpoint(
            f"{path}: Wout.weight has shape {tuple(head.shape)}; it must be (classes, features)."
        )
    if inject.dim() != 2 or inject.shape[1] != pixels:
        raise UnreadableCheckpoint(
            f"{path}: mon.linear_module.U.weight has shape {tuple(inject.shape)}; it must be (features, {pixels}), for "
            "images of MNIST, on which the published model was trained."
        )
    features, classes = inject.shape[0], head.shape[0]
    for name in ("A", "B"):
        if (found := tuple(tensors[f"layer.f.operator.{name}"].shape)) != (features, features):
            raise UnreadableCheckpoint(
                f"{path}: mon.linear_module.{name}.weight has shape {found}; it must be ({features}, {features}), as "
                "mon.linear_module.U.weight has that number of rows."
            )
    names = DIGITS if classes == len(DIGITS) else tuple(map(str, range(classes)))
    facts = {"shape": SHAPE, "classes": classes, "class_names": names, "mean": (0.1307,), "std": (0.3081,)}
    changes = (f"model.channels={features}", f"model.m={m!r}")
    notes = tuple(note.format(m=m) for note in NOTES)
    title = f"monDEQ, fully connected, {features} features, {classes} classes"
    return Plan(title, "mondeq/mnist-fc", changes, facts, tensors, origins, notes=notes)

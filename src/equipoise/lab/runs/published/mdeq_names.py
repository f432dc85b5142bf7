"""The layout of the checkpoints of the MDEQ repository (S. Bai, V. Koltun, J. Z. Kolter, 2020)."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.lab.data.sets.cifar import CIFAR10
from equipoise.lab.data.sets.folders import IMAGENET_MEAN, IMAGENET_STD
from equipoise.lab.data.sets.scenes import CITYSCAPES
from equipoise.lab.recipes.reading import recipe_names
from equipoise.lab.runs.published.pickled import LeftOut, UnreadableCheckpoint
from equipoise.lab.runs.published.plan import Plan, listed, renamed
from equipoise.models.mdeq.model import SIZES

CELL = "equilibrium.f"
RULES = [  # names there -> names here; a weight-normalised convolution keeps its scale and its direction apart
    (r"downsample\.(.+)", r"stem.\1"),
    (r"stage0\.(.+)", r"inject.\1"),
    (r"fullstage\.branches\.(\d+)\.blocks\.(\d+)\.conv(\d)\.weight_g", rf"{CELL}.blocks.\1.\2.conv\3.scale"),
    (r"fullstage\.branches\.(\d+)\.blocks\.(\d+)\.conv(\d)\.weight_v", rf"{CELL}.blocks.\1.\2.conv\3.layer.weight"),
    (r"fullstage\.branches\.(\d+)\.blocks\.(\d+)\.gn(\d)\.(\w+)", rf"{CELL}.blocks.\1.\2.norm\3.\4"),
    (r"fullstage\.fuse_layers\.(\d+)\.(\d+)\.net\.(\d+)\.conv\.weight", rf"{CELL}.fuse.\1.\2.convs.\3.weight"),
    (r"fullstage\.fuse_layers\.(\d+)\.(\d+)\.net\.(\d+)\.gnorm\.(\w+)", rf"{CELL}.fuse.\1.\2.norms.\3.\4"),
    (r"fullstage\.fuse_layers\.(\d+)\.(\d+)\.net\.conv\.weight", rf"{CELL}.fuse.\1.\2.convs.0.weight"),
    (r"fullstage\.fuse_layers\.(\d+)\.(\d+)\.net\.gnorm\.(\w+)", rf"{CELL}.fuse.\1.\2.norms.0.\3"),
    (r"fullstage\.post_fuse_layers\.(\d+)\.conv\.weight_g", rf"{CELL}.post.\1.scale"),
    (r"fullstage\.post_fuse_layers\.(\d+)\.conv\.weight_v", rf"{CELL}.post.\1.layer.weight"),
    (r"fullstage\.post_fuse_layers\.(\d+)\.gnorm\.(\w+)", rf"{CELL}.norms.\1.\2"),
    (r"incre_modules\.(\d+)\.0\.downsample\.(\d)\.(.+)", r"head.widen.\1.shortcut.\2.\3"),
    *((rf"incre_modules\.(\d+)\.0\.conv{n}\.(\w+)", rf"head.widen.\1.inner.{3 * n - 3}.\2") for n in (1, 2, 3)),
    *((rf"incre_modules\.(\d+)\.0\.bn{n}\.(\w+)", rf"head.widen.\1.inner.{3 * n - 2}.\2") for n in (1, 2, 3)),
    (r"downsamp_modules\.(\d+)\.(\d)\.(\w+)", r"head.merge.\1.\2.\3"),
    (r"final_layer\.(\d)\.(\w+)", r"head.final.\1.\2"),
    (r"classifier\.(\w+)", r"head.classify.\1"),
    (r"last_layer\.([01])\.(\w+)", r"head.mix.\1.\2"),
    (r"last_layer\.3\.(\w+)", r"head.classify.\1"),
]
COPIES = ("fullstage_copy.", "deq.")  # f a second time, for the backward pass of the older repository
LOSS = ("loss.",)

CIFAR_STD = (0.2023, 0.1994, 0.2010)  # of the authors' data loading
DATA: dict[str, dict[str, Any]] = {
    "cifar10": {"shape": (3, 32, 32), "class_names": CIFAR10, "mean": (0.4914, 0.4822, 0.4465), "std": CIFAR_STD},
    "imagenet": {"shape": (3, 224, 224), "class_names": tuple(map(str, range(1000)))},
    "cityscapes": {"shape": (3, 1024, 2048), "class_names": tuple(CITYSCAPES.values())},
}
NOTES = (
    "The mean and standard deviation of the authors' data loading are part of the model: it takes images in [0, 1].",
    "Each sample is solved to its own relative tolerance. The authors' code stops by the residual of the whole batch, "
    "absolute on ImageNet and Cityscapes, so its answer depends on the batch. Where both converge, the logits agree.",
)


def rename(name: str) -> str | None:
    """Return the name of a published tensor in our model, or None."""
    return next((re.sub(f"^{there}$", here, name) for there, here in RULES if re.fullmatch(there, name)), None)


def plan(path: Path, state: dict[str, Tensor]) -> Plan:
    """Recognise the model of a state dict by its shapes, and rename its tensors."""
    copies = tuple(name for name in state if name.startswith(COPIES))
    loss = tuple(name for name in state if name.startswith(LOSS))
    left = [LeftOut(copies, "a second copy of f, with the same weights")] if copies else []
    left += [LeftOut(loss, "weights of the loss")] if loss else []
    tensors, origins, strange = renamed({n: t for n, t in state.items() if n not in {*copies, *loss}}, rename)
    if strange:
        raise UnreadableCheckpoint(
            f"{path} holds {listed(strange)}, which no checkpoint of the MDEQ repository has: is it of another model?"
        )
    size, notes = size_of(path, tensors)
    recipe = f"mdeq/{size}" if f"mdeq/{size}" in recipe_names() else f"mdeq/{size.removesuffix('-regularized')}"
    data = size.partition("-")[0]
    facts = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, **DATA[data]}
    classes = tensors["head.classify.weight"].shape[0]
    if classes != len(facts["class_names"]):
        facts["class_names"] = tuple(map(str, range(classes)))
    facts["classes"] = classes
    title = f"MDEQ of the size {size}, {classes} classes"
    return Plan(title, recipe, (f"model.size={size}",), facts, tensors, origins, left, (*notes, *NOTES))


def size_of(path: Path, tensors: dict[str, Tensor]) -> tuple[str, tuple[str, ...]]:
    """Return the key of ``SIZES`` whose shapes are those of the tensors, and a note if there are several."""
    segments = "head.mix.0.weight" in tensors
    found: dict[str, Any] = {
        "channels": rows(tensors, f"{CELL}.blocks.{{}}.0.conv2.layer.weight"),
        "widened": rows(tensors, f"{CELL}.blocks.{{}}.0.conv1.layer.weight"),
        "blocks": 1 + max((int(n.split(".")[4]) for n in tensors if n.startswith(f"{CELL}.blocks.")), default=-1),
        "post_affine": f"{CELL}.norms.0.weight" in tensors,
    }
    if not segments:
        found["head_channels"] = rows(tensors, "head.widen.{}.inner.0.weight")
        found["final_channels"] = sum(rows(tensors, "head.final.{}.weight")[:1])
    if "head.classify.weight" not in tensors or not tensors["head.classify.weight"].dim():
        raise UnreadableCheckpoint(f"{path} has no last layer: neither classifier.weight nor last_layer.3.weight.")
    matching = []
    for name, size in SIZES.items():
        own = {key: getattr(size, key) for key in found if key != "widened"}
        own["widened"] = tuple(int(size.expansion * channels) for channels in size.channels)
        if own == found and name.startswith("cityscapes") == segments:
            matching.append(name)
    if not matching:
        shown = ", ".join(f"{key} {value}" for key, value in found.items())
        raise UnreadableCheckpoint(
            f"{path} is an MDEQ of no published size: {shown}. Known sizes: {', '.join(SIZES)} "
            "(equipoise.models.mdeq.model)."
        )
    others = matching[1:]
    note = f"It also fits {', '.join(others)}, which has another dropout: that has no effect on a trained model."
    return matching[0], (note,) if others else ()


def rows(tensors: dict[str, Tensor], template: str) -> tuple[int, ...]:
    """Return the number of rows of numbered tensors, from 0 on until one is missing."""
    counts: list[int] = []
    while (name := template.format(len(counts))) in tensors and tensors[name].dim():
        counts.append(tensors[name].shape[0])
    return tuple(counts)

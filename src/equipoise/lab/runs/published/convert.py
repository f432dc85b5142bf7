"""Convert a published PyTorch checkpoint into one that :func:`equipoise.load` opens."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from equipoise.lab.recipes.build import build_model
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.published import mdeq_names, mondeq_names
from equipoise.lab.runs.published.pickled import LeftOut, UnreadableCheckpoint, read_state_dict
from equipoise.lab.runs.published.plan import Plan, listed
from equipoise.options import require_number

KINDS = ("mdeq", "mondeq")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Args:
        file: checkpoint that was written.
        title: what the model is.
        parameters: number of trainable parameters.
        used: names in the published file whose tensors were used.
        left_out: other names in it, and why they were not used.
        added: names in our model that the file does not have.
        notes: what the converted model computes, where that is not obvious.
    """

    file: Path
    title: str
    parameters: int
    used: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    added: tuple[str, ...]
    notes: tuple[str, ...]


def convert(path: Path, kind: str, out: Path | None = None, *, m: float = 1.0) -> Converted:
    """Convert a checkpoint of the MDEQ or monDEQ repository; nothing in the file is run.

    Args:
        path: PyTorch file, as the authors distribute it or as their code writes it.
        kind: "mdeq" or "mondeq".
        out: file to write, which must not exist; None for the name of ``path`` in the current folder.
        m: strong monotonicity of a monDEQ, which its file does not contain.

    Example:
        >>> convert(Path("MDEQ_TINY_Cls.pkl"), "mdeq", Path("mdeq.safetensors"))
        >>> model = eq.load("mdeq.safetensors")
    """
    if kind not in KINDS:
        raise ValueError(f"--as is {kind!r}; allowed: {', '.join(KINDS)}.")
    require_number("m", m, above=0)
    out = out or Path(f"{path.name.partition('.')[0]}.safetensors")
    if out.suffix != ".safetensors":
        raise ValueError(f"the file to write is {out}; its name must end in .safetensors.")
    if out.exists():
        raise FileExistsError(f"{out} exists already, and is not overwritten: name another file with -o.")
    state, left_out = read_state_dict(path)
    plan = mdeq_names.plan(path, state) if kind == "mdeq" else mondeq_names.plan(path, state, float(m))
    source = open_recipe(plan.recipe, overrides=plan.changes)
    phase = len(source.recipe.phases) - 1
    model = build_model(source.phase(phase), plan.facts, source.where)
    added = fill(path, model, plan)
    checkpoints.save(out, checkpoints.model_tensors(model), {**source.saved(), "phase": phase, "data": plan.facts})
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    left = (*left_out, *plan.left_out)
    return Converted(out, plan.title, count, tuple(plan.origins.values()), left, added, plan.notes)


def fill(path: Path, model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Put the tensors into the model; return the names of those that it keeps. All mistakes are reported at once."""
    own = model.state_dict()
    mistakes = [f"{plan.origins[name]} is not part of this model" for name in plan.tensors if name not in own]
    values: dict[str, Tensor] = {}
    for name, tensor in own.items():
        given = plan.tensors.get(name)
        if given is None:
            if not name.startswith("normalize.") and not name.endswith(".num_batches_tracked"):
                mistakes.append(f"no tensor for {name}")
        elif given.shape != tensor.shape:
            shapes = f"{tuple(given.shape)} instead of {tuple(tensor.shape)}"
            mistakes.append(f"{plan.origins[name]} has shape {shapes}")
        elif given.is_floating_point() != tensor.is_floating_point():
            mistakes.append(f"{plan.origins[name]} is {given.dtype} instead of {tensor.dtype}")
        else:
            values[name] = given.to(tensor.dtype)
    if mistakes:
        raise UnreadableCheckpoint(f"{path} does not fit {plan.title}: {listed(mistakes, 5)}.")
    model.load_state_dict(values, strict=False)
    return tuple(name for name in own if name not in values)

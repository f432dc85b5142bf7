"""Add the model of a finished run to those that ship with the package: weights, and a card that describes them."""

import copy
import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.base import spread
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.files import whole
from equipoise.lab.recipes.build import outside_names
from equipoise.lab.recipes.reading import RecipeFile, open_recipe, plain, recipe_names, toml_lines, toml_value
from equipoise.lab.results.sample import LATENTS, new_density, save_density, shipped_density
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run, RunError, commit
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.runs.shipped import Card, Measured, Terms, Training, list_weights, weights_folder
from equipoise.lab.training.evaluate import evaluate, parameter_count
from equipoise.options import require_number
from equipoise.tasks.latent_vectors import generator_in

COST = 0.0005  # largest loss due to float16: 0.05 points of an accuracy, or this share of a metric above 1
ONE, GENERATOR, ALL = 1_200_000, 5_000_000, 12_000_000  # bytes: limits of a model, a generator, all
GENERATES = ("generation", "vae", "restoration")  # tasks of models that generate images
LICENCE = "MIT, as the package"


@dataclass(frozen=True)
class Added:
    """A model that was added: its card, and its metrics with parameters as trained and in float16."""

    card: Card
    file: Path
    metrics: dict[str, dict[str, float]]


def add_weights(
    run: Run,
    name: str,
    machine: Machine,
    folders: Sequence[Path] = (),
    *,
    weights: str = "best",
    limit: int | None = None,
    note: str = "",
) -> Added:
    """Write the weights of a finished run and their card into the package.

    The model is measured on its test split with its parameters as trained and rounded to float16. They are stored in
    float16 if that costs less than ``COST``. A generator also gets the density of its latent vectors. An entry of the
    same name is replaced.

    Args:
        name: name for ``eq.load``, such as "mondeq/mnist-fc".
        weights: "best" or "last".
        limit: number of test samples to measure on; None measures on all.
        note: remark for the card.
    """
    require_shippable(run, name)
    if limit is not None:
        require_number("--limit", limit, at_least=1, whole=True)
    trained = open_trained(run, machine, weights)
    recipe = trained.recipe
    data = data_of(run, recipe, folders)
    test = data.test if limit is None else spread(data.test, limit)
    stored = {"float32": checkpoints.model_tensors(trained.model), "float16": checkpoints.halved(trained.model)}
    models = {kind: copy.deepcopy(trained.model) for kind in stored}
    metrics: dict[str, dict[str, float]] = {}
    for kind, model in models.items():
        model.load_state_dict(checkpoints.with_prefix("model/", stored[kind]))
        arguments = model, trained.task, test, trained.setting, machine, recipe.training.evaluation_batch_size
        metrics[kind] = evaluate(*arguments, recipe.seed).metrics
    kind = "float16" if cost(trained, metrics) < COST else "float32"
    trained = replace(trained, model=models[kind])
    saved = checkpoints.read(trained.file)[1]
    facts = {key: saved[key] for key in ("recipe", "folder", "phase", "data")}
    facts |= {"tables": portable(saved["tables"]), "half": kind == "float16"}
    measured = Measured(
        command=f"equipoise evaluate {name}" + (f" --limit {limit}" if limit is not None else ""),
        samples=len(test),
        metric=trained.task.best_metric,
        metrics=metrics[kind],
        as_trained=metrics["float32"],
        commit=commit() or "",
    )
    card = Card(
        name=name,
        title=recipe.title,
        model=recipe.model.name,
        parameters=parameter_count(trained.model),
        stored=kind,
        training=training_of(run, trained, weights, len(data.train)),
        test=measured,
        terms=Terms(LICENCE, ABOUT[recipe.data.name].licence),
        note=note,
    )
    beside = 0
    with ExitStack() as stack:
        if recipe.task.name == "generation":  # so that it draws images without its training data
            generator = generator_in(trained.model)
            density = new_density(run, trained, generator, LATENTS, folders)
            place = shipped_density(weights_folder() / f"{name}.safetensors")
            save_density(part := stack.enter_context(whole(place)), density, generator, LATENTS, half=True)
            beside = part.stat().st_size
        card, file = write_entry(card, stored[kind], facts, beside=beside)
    return Added(card, file, metrics)


def write_entry(
    card: Card, tensors: dict[str, Tensor], facts: dict[str, Any], folder: Path | None = None, beside: int = 0
) -> tuple[Card, Path]:
    """Write weights and their card, both or neither; return the card with the size and hash of the file, and the file.

    Args:
        tensors, facts: content of the checkpoint, see :func:`~equipoise.lab.runs.checkpoints.save`.
        folder: folder to write to; None for that of the package.
        beside: size of another file of the entry.
    """
    file = (folder or weights_folder()) / f"{card.name}.safetensors"
    with whole(file) as part, whole(file.with_suffix(".toml")) as card_part:
        checkpoints.save(part, tensors, facts)
        content = part.read_bytes()
        require_room(card.name, len(content) + beside, facts["tables"].get("task", {}).get("name", ""))
        card = replace(card, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        card_part.write_text(card_text(card), encoding="utf-8")
    return card, file


def require_shippable(run: Run, name: str) -> None:
    """Raise unless the model of a run may and can be shipped."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*/[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"--as is {name!r}; it must be of the form mondeq/mnist-fc, in lower-case letters and digits.")
    if run.file is not None or run.result is None:
        raise RunError(f"{run} is not a finished run: finish it with `equipoise resume`, or name another.")
    source = run.source
    if source.name not in recipe_names() or source.folder or outside_names(source):
        raise RunError(
            f"{run} was trained from {source.name!r}, which is not a recipe of the package, so that nobody else could "
            "train it again: add the recipe to src/equipoise/papers first."
        )
    about = ABOUT[source.recipe.data.name]
    if about.no_weights is not None:
        raise RunError(
            f"weights trained on {source.recipe.data.name} are not shipped: {about.no_weights} ({about.licence})."
        )


def require_room(name: str, size: int, task: str) -> None:
    """Raise if a file is too large to be part of the package, alone or with the others."""
    most = GENERATOR if task in GENERATES else ONE
    if size > most:
        raise RunError(f"the weights of {name} have {size:,} bytes; a model of the task {task!r} may have {most:,}.")
    file = weights_folder() / f"{name}.safetensors"
    own = (file, shipped_density(file))
    others = sum(other.stat().st_size for other in weights_folder().rglob("*.safetensors") if other not in own)
    if others + size > ALL:
        raise RunError(f"with {name}, of {size:,} bytes, shipped models have {others + size:,} bytes, above {ALL:,}.")


def cost(trained: Trained, metrics: dict[str, dict[str, float]]) -> float:
    """Return how much rounding to float16 worsens the quoted metric; relative to it if it is above 1."""
    full, half = (metrics[kind][trained.task.best_metric] for kind in ("float32", "float16"))
    worse = full - half if trained.task.best_is_largest else half - full
    return worse / max(1.0, abs(full))


def training_of(run: Run, trained: Trained, weights: str, samples: int) -> Training:
    recipe, result = run.recipe, run.result or {}
    epochs = sum(phase.epochs for phase in recipe.phases)
    best = result.get("best") if weights == "best" else None
    return Training(
        command=training_command(run.source),
        data=recipe.data.name,
        samples=samples,
        epochs=epochs,
        epoch=epochs if best is None else best["epoch"],
        seed=recipe.seed,
        seconds=round(result["seconds"]),
        torch=run.facts.get("versions", {}).get("torch", torch.__version__),
    )


def training_command(source: RecipeFile) -> str:
    """Return the shortest command that trains a changed recipe: a budget, and the changes that differ from it."""
    tables = portable(source.tables)
    budgets = tables.pop("budget", {})  # may have changed since; they are not part of what was trained
    choices = []
    for budget in (None, *budgets):
        words = ["equipoise", "train", source.name, *(("--budget", budget) if budget else ())]
        changes = list(differences(open_recipe(source.name, budget).tables, tables))
        choices.append((len(changes), [*words, *changes]))
    return shlex.join(min(choices, key=lambda choice: choice[0])[1])


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the changes, as ``key=value``, that lead from one set of tables to another; keys cannot be removed."""
    for key, value in after.items():
        old = before.get(key)
        if value == old:
            continue
        same = isinstance(value, dict) and isinstance(old, dict) and value.get("name") == old.get("name")
        if same:
            yield from differences(old, value, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif isinstance(value, list) and isinstance(old, list) and len(value) == len(old):
            yield from differences(numbered(old), numbered(value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={toml_value(value)}"


def numbered(entries: list[Any]) -> dict[str, Any]:
    return {str(number): entry for number, entry in enumerate(entries)}


def portable(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe without the place of a run on this machine."""
    training = dict(tables.get("training", {}))
    if training.get("init_from", "") not in ("", *list_weights()):
        training["init_from"] = "RUN"
    return {**tables, **({"training": training} if training else {})}


def card_text(card: Card) -> str:
    """Return the text of a card's file."""
    heading = f"# Card of {card.name.rpartition('/')[2]}.safetensors, written by `equipoise weights --add`."
    return "\n".join([heading, *toml_lines(plain(card))]) + "\n"

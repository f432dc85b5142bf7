"""Rows of the lists that the command line prints: recipes, runs and data sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.lab.data import DATA_SETS, FACTS, available, cache_folder, check, load
from equipoise.lab.data.catalogue import ABOUT, SOURCES, how_to_get
from equipoise.lab.data.get.download import get
from equipoise.lab.recipes import reading
from equipoise.lab.recipes.build import build_model
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs.folder import Run, list_runs
from equipoise.lab.runs.shipped import list_weights, read_card, weights_file
from equipoise.lab.training.evaluate import duration, format_metric, parameter_count
from equipoise.options import unknown, unknown_of_many


def recipe_rows() -> list[tuple[str, ...]]:
    """Return name, kind, paper, data set, parameters and title of every recipe, table and figure in the package."""
    rows = []
    for name in reading.recipe_names():
        source = reading.open_recipe(name)
        kind = reading.kind_of(source)
        spec: Any = source.read(kind)
        data, size = (spec.data.name, parameters(source, spec)) if kind is Recipe else ("-", "-")
        rows.append((name, reading.KINDS[kind][0], spec.paper.system, data, size, spec.title))
    return rows


def parameters(source: reading.RecipeFile, recipe: Recipe) -> str:
    """Count the parameters of a recipe's model without allocating them."""
    about = ABOUT.get(recipe.data.name)
    if about is None or about.shape is None or about.classes is None:
        return "?"
    names, channels = tuple(map(str, range(about.classes))), (0.5,) * about.shape[0]
    values = (tuple(about.shape), about.classes, names, channels, channels)
    with torch.device("meta"):
        model = build_model(recipe, dict(zip(FACTS, values, strict=True)), source.where)
    return f"{parameter_count(model):,}"


def recipe_text(name: str) -> str:
    """Return the text of a recipe's file."""
    if name not in (known := reading.recipe_names()):
        raise reading.RecipeError(unknown_of_many("recipe", name, known, "equipoise recipes"))
    return (reading.recipes_folder() / f"{name}.toml").read_text(encoding="utf-8")


def run_rows(parent: Path) -> list[tuple[str, ...]]:
    """Return folder, recipe, status, epochs, validation and test metric, and training time of every run in a folder."""
    rows = []
    for run in list_runs(parent):
        try:
            rows.append(run_row(run))
        except (ValueError, KeyError, TypeError) as error:  # a damaged run must not hide the others
            rows.append((str(run.folder), "-", f"damaged: {error}", "-", "-", "-", "-"))
    return rows


def run_row(run: Run) -> tuple[str, ...]:
    epochs, result = run.epochs(), run.result
    last = epochs[-1] if epochs else {}
    done = f"{last.get('epoch', 0)}/{sum(phase.epochs for phase in run.recipe.phases)}"
    validation = headline(last.get("val", {}))
    if result and "best" in result:
        validation = format_metric(result["best"]["metric"], result["best"]["value"])
    seconds = result["seconds"] if result else last.get("seconds", 0)
    test = headline(result["test"]) if result else "-"
    return (str(run.folder), run.facts["recipe"], run.status, done, validation, test, duration(seconds))


def headline(metrics: dict[str, Any]) -> str:
    """Format the first metric, which is the one usually quoted."""
    numbers = (format_metric(name, value) for name, value in metrics.items() if isinstance(value, int | float))
    return next(numbers, "-")


def weights_rows() -> list[tuple[str, ...]]:
    """Return name, model, data set, parameters, size and headline metric of every shipped model."""
    rows = []
    for card in map(read_card, list_weights()):
        test = f"{card.test.metric} {format_metric(card.test.metric, card.test.value)}"
        size = f"{card.bytes / 1e6:.2f} MB, {card.stored}"
        rows.append((card.name, card.model, card.training.data, f"{card.parameters:,}", size, test))
    return rows


def card_of(name: str) -> str:
    """Return the text of a shipped model's card, after comparing the file with its SHA-256."""
    return weights_file(name).with_suffix(".toml").read_text(encoding="utf-8")


def data_rows(folders: Sequence[Path]) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Return name, samples, place and licence of every data set, and how to get those that are missing."""
    listed = available(folders)
    rows = [(row.name, row.samples or "-", row.found or "-", row.licence) for row in listed]
    return rows, {row.name: row.get for row in listed if not row.found}


def get_data(name: str, to: Path | None) -> list[Path]:
    """Download a data set, and return its files."""
    if name not in SOURCES:
        known = f"{name} cannot be downloaded: {how_to_get(name)}."
        raise LookupError(known if name in DATA_SETS else unknown("data set", name, DATA_SETS))
    return get(name, SOURCES[name], to or cache_folder())


def check_rows(name: str | None, folders: Sequence[Path]) -> tuple[list[tuple[str, ...]], bool]:
    """Return a verdict on every file of one data set, or of all that are found, and whether all of them can be read."""
    rows: list[tuple[str, ...]] = []
    readable = True
    for each in [name] if name else [row.name for row in available(folders) if row.found]:
        rows += [(each, str(file.path or file.file), file.verdict) for file in check(each, folders)]
        try:
            data = load(each, folders=folders, validation=0)
            for split in (data.train, data.test):
                split.read(torch.arange(1))
            verdict = f"{len(data.train)} + {len(data.test)} samples" + (f"; {data.note}" if data.note else "")
        except (ValueError, LookupError) as error:
            verdict, readable = str(error), False
        rows.append((each, "read", verdict))
    return rows, readable

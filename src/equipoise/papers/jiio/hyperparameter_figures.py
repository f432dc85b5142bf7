"""Table 9 of the JIIO paper: hyperparameters of the recipes beside those of the paper. Nothing is trained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from equipoise.joint.anderson import JointAnderson
from equipoise.joint.optimize_input import SOLVER
from equipoise.lab.data.base import FACTS
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.files import write_text
from equipoise.lab.recipes.build import build_model, build_optimizer, build_task
from equipoise.lab.recipes.reading import RecipeFile
from equipoise.lab.recipes.schema import Recipe
from equipoise.options import unknown
from equipoise.papers.drawing import write_numbers
from equipoise.stability import WeightNorm
from equipoise.tasks import Task
from equipoise.tasks.few_shot import FewShot
from equipoise.tasks.generation import Generation
from equipoise.tasks.joint_attack import attack_solver
from equipoise.tasks.robustness import Budget, Robustness

CHANNELS = {"celeba": 3, "omniglot-episodes": 1, "unlabelled-images": 3}  # of data sets without an official shape
DIFFERENT, MISPRINT = "#f6c9a8", "#fdf3c4"


@dataclass(frozen=True)
class Built:
    """A recipe in its last phase, and what it builds; the model's parameters are not allocated."""

    recipe: Recipe
    model: Any
    task: Task
    optimizer: dict[str, Any]
    shape: tuple[int, ...]

    @property
    def joint(self) -> tuple[JointAnderson, int, float]:
        """The joint solver, its number of steps in training, and the weight of the Jacobian penalty."""
        task = self.task
        if isinstance(task, Robustness):
            budget = Budget(radius=task.budget.radius, norm=task.budget.norm, steps=max(1, task.train_steps))
            return attack_solver(budget), task.train_steps, self.recipe.jacobian.weight
        if isinstance(task, FewShot | Generation):
            return task.solver if isinstance(task, FewShot) else SOLVER, task.steps, task.jacobian
        raise ValueError(f"the task {self.recipe.task.name!r} has no joint steps; choose a recipe of generation, "
                         "few-shot learning or robustness.")  # fmt: skip

    @property
    def step_sizes(self) -> list[Any]:
        """The step sizes of x, at first and later; "auto" or "none" where there is no number."""
        rule = self.joint[0].step_size
        if isinstance(rule, int | float | str):
            return [rule, "none"]
        first = getattr(rule, "size", None) or getattr(rule, "length", "auto")
        return [first, getattr(rule, "later", None) or "none"]


SETTINGS: dict[str, Callable[[Built], Any]] = {
    "Image size": lambda built: built.shape[1],
    "Batch size": lambda built: built.recipe.training.batch_size,
    "Optimizer": lambda built: built.recipe.optimizer.name,
    "Learning rate": lambda built: built.optimizer["lr"],
    "Momentum (beta 1 of Adam)": lambda built: built.optimizer["betas"][0] if "betas" in built.optimizer else "none",
    "Weight decay": lambda built: built.optimizer.get("weight_decay", 0),
    "Scales": lambda built: built.model.size.scales,
    "Channels": lambda built: list(built.model.size.channels),
    "Width expansion": lambda built: built.model.size.expansion,
    "Groups of GroupNorm": lambda built: built.model.size.groups,
    "Weight normalisation": lambda built: any(isinstance(part, WeightNorm) for part in built.model.modules()),
    "Downsamplings before the equilibrium": lambda built: built.model.size.downsamplings,
    "Solver": lambda built: type(built.model.equilibrium.solver).__name__,
    "Forward steps": lambda built: built.model.equilibrium.tolerance.max_steps,
    "Backward steps": lambda built: built.model.equilibrium.gradient.tolerance.max_steps,
    "Solver memory": lambda built: built.model.equilibrium.solver.memory,
    "JIIO memory": lambda built: built.joint[0].memory,
    "JIIO step sizes of z and mu": lambda built: [round(1 - share, 6) for share in built.joint[0].damping],
    "JIIO step size of x": lambda built: built.step_sizes[0],
    "JIIO step size of x, later": lambda built: built.step_sizes[1],
    "JIIO iterations": lambda built: built.joint[1],
    "Jacobian penalty": lambda built: built.joint[2],
    "Dropout": lambda built: built.model.size.dropout,
}


def hyperparameters(
    recipes: Sequence[RecipeFile],
    published: dict[str, list[Any]],
    corrected: dict[str, list[Any]] | None = None,
    path: Path | None = None,
) -> Figure:
    """Print and draw the hyperparameters of recipes beside the paper's, and mark where they differ.

    The table is also written as Markdown and JSON beside the picture. A recipe with several phases has the values of
    its last one.

    Args:
        recipes: recipes, one column each.
        published: the paper's values by name, a key of ``SETTINGS``: one per recipe, "" for those it does not specify.
        corrected: values by name to compare with instead of misprints.
    """
    for name in (*published, *(corrected or {})):
        if name not in SETTINGS:
            raise ValueError(unknown("hyperparameter", name, SETTINGS))
    for name, values in {**published, **{f"corrected {name}": row for name, row in (corrected or {}).items()}}.items():
        if len(values) != len(recipes):
            raise ValueError(f"{name} has {len(values)} values; it must have {len(recipes)}, one per recipe.")
    columns, rows = [built(source) for source in recipes], []
    for name, printed in published.items():
        meant = (corrected or {}).get(name, printed)
        found = [SETTINGS[name](column) for column in columns]
        cells = [compared(*entry) for entry in zip(found, printed, meant, strict=True)]
        rows.append({"name": name, "cells": cells})
    names = [source.name for source in recipes]
    text = markdown(names, rows)
    print(text)
    write_numbers(path, {"recipes": names, "rows": rows})
    if path is not None:
        write_text(path.with_suffix(".md"), text)
    return drawn(names, rows)


def built(source: RecipeFile) -> Built:
    """Build the model and the task of a recipe's last phase, without allocating parameters."""
    last = len(source.recipe.phases) - 1
    recipe, where = source.phase(last), source.where_in(last)
    about, options = ABOUT[recipe.data.name], recipe.data.options
    channels, *sides = about.shape or [CHANNELS[recipe.data.name]]
    shape = (channels, *[options["size"]] * 2) if "size" in options else (channels, *sides)
    classes = about.classes or options.get("ways", 0)
    names, levels = tuple(map(str, range(classes))), (0.5,) * channels
    facts: dict[str, Any] = dict(zip(FACTS, (shape, classes, names, levels, levels), strict=True))
    with torch.device("meta"):
        model = build_model(recipe, facts, where)
    optimizer = build_optimizer(recipe, [nn.Parameter(torch.zeros(1))], where).defaults
    return Built(recipe, model, build_task(recipe, facts, where), optimizer, shape)


def compared(found: Any, printed: Any, meant: Any) -> dict[str, Any]:
    """Return a value with the paper's, and whether they differ; "" is a value that the paper does not specify."""
    return {"recipe": found, "printed": printed, "meant": meant, "differs": meant != "" and not same(found, meant)}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, str) or isinstance(second, str):
        return str(first).lower() == str(second).lower()
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second


def shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, int | float) else str(value) or "-"


def cell_text(cell: dict[str, Any], differs: str = "**{}**") -> str:
    """Return a cell's value, and the paper's if it differs or is a misprint."""
    remarks = [f"paper {shown(cell['meant'])}"] if cell["differs"] else []
    remarks += [f"printed {shown(cell['printed'])}"] if not same(cell["printed"], cell["meant"]) else []
    value = shown(cell["recipe"])
    return (differs.format(value) if cell["differs"] else value) + (f" ({'; '.join(remarks)})" if remarks else "")


def markdown(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| |" + "".join(f" {name} |" for name in names), "|---|" + "---|" * len(names)]
    lines += [f"| {row['name']} |" + "".join(f" {cell_text(cell)} |" for cell in row["cells"]) for row in rows]
    count = sum(cell["differs"] for row in rows for cell in row["cells"])
    verdict = f"{count} of {sum(len(row['cells']) for row in rows)} values differ from the paper's"
    return "\n".join(lines) + f'\n\nBold: {verdict}; "printed" is a misprint of the paper\'s table.\n'


def drawn(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the table, with differences in orange and misprints in yellow."""
    figure = Figure(figsize=(3 + 2.1 * len(names), 0.6 + 0.3 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    texts = [[cell_text(cell, "{}") for cell in row["cells"]] for row in rows]
    colors = [
        [DIFFERENT if cell["differs"] else "white" if same(cell["printed"], cell["meant"]) else MISPRINT
         for cell in row["cells"]]
        for row in rows
    ]  # fmt: skip
    table = axis.table(
        texts, cellColours=colors, rowLabels=[row["name"] for row in rows], colLabels=list(names), loc="center"
    )
    table.auto_set_font_size(False)
    table.set_fontsize(7)
    table.scale(1, 1.3)
    return figure

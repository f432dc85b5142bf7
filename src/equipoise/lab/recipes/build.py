"""Check and build what a recipe names (data, model, task, solver, optimizer, schedule), and list the code behind it.

Errors name the line of the recipe.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

import equipoise
from equipoise.fixed_point import Equilibrium
from equipoise.gradients import GradientRule
from equipoise.lab.data import DATA_SETS, FACTS, DataSet, load
from equipoise.lab.data.base import spread
from equipoise.lab.recipes.reading import RecipeError, RecipeFile, Where
from equipoise.lab.recipes.schema import Named, Recipe
from equipoise.lab.trust import Trust, UntrustedName
from equipoise.models import MODELS
from equipoise.options import UnknownOption
from equipoise.registry import Registry, UnknownName, call, check_options, looking_up, parameters
from equipoise.solvers import Solver
from equipoise.tasks import TASKS, Task
from equipoise.tolerance import Tolerance

SOLVERS = Registry(
    "solver",
    {
        "picard": "equipoise.solvers:Picard",
        "anderson": "equipoise.solvers:Anderson",
        "broyden": "equipoise.solvers:Broyden",
        "newton-krylov": "equipoise.solvers:NewtonKrylov",
        "proximal-gradient": "equipoise.models.opteq.descent:ProximalGradient",
        "fista": "equipoise.models.opteq.descent:FISTA",
        "forward-backward": "equipoise.operators.splitting:ForwardBackward",
        "peaceman-rachford": "equipoise.operators.splitting:PeacemanRachford",
        "douglas-rachford": "equipoise.operators.splitting:DouglasRachford",
    },
    Solver,
)
LINEAR_SOLVERS = {"gmres": "equipoise.solvers:GMRES", "bicgstab": "equipoise.solvers:BiCGStab"}
BACKWARD_SOLVERS = Registry("solver", {**SOLVERS.entries, **LINEAR_SOLVERS}, Solver)  # the backward problem is linear
RULE_NAMES = ("Implicit", "Phantom", "Reversible", "Unrolled")
RULES = {name.lower(): f"equipoise.gradients:{name}Gradient" for name in RULE_NAMES}
GRADIENTS = Registry("gradient", RULES, GradientRule)
OPTIMIZER_CLASSES = ("SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad")
OPTIMIZERS = Registry("optimizer", {name.lower(): f"torch.optim:{name}" for name in OPTIMIZER_CLASSES}, Optimizer)
SCHEDULE_NAMES = ("constant", "step", "cosine", "one-cycle")
SCHEDULES = Registry(
    "schedule",
    {name: f"equipoise.lab.recipes.build:{name.replace('-', '_')}_schedule" for name in SCHEDULE_NAMES},
    LRScheduler,
    functions=True,
)
MODEL_SECTIONS = ("model", "solver", "gradient")  # sections that a model is built from
USE_SECTIONS = (*MODEL_SECTIONS, "task", "data")  # sections that it is evaluated with
NAMED_SECTIONS = (*USE_SECTIONS, "optimizer", "schedule")
MAX_GRAPHS = 64  # graphs that torch may compile for one function before it gives up


# Names and trust


@contextmanager
def located(where: Where, *path: str) -> Iterator[None]:
    """Look up names under the recipe's trust, and report errors raised in the block with the line of a section."""
    try:
        with looking_up(where.trust.find):
            yield
    except RecipeError:  # located already
        raise
    except UntrustedName as error:
        raise UntrustedName(error.names, error.trust, where.name) from None
    except UnknownOption as error:
        raise where.error((*path, error.option), str(error)) from None
    except UnknownName as error:
        raise where.error((*path, "name"), str(error)) from None
    except (TypeError, ValueError) as error:
        raise where.error(path, f"{'.'.join(path)}: {error}") from error
    except Exception as error:
        # In a user's own recipe this is a bug in the user's code, for which the traceback is best. In a file that was
        # loaded it may be anything; messages about names that cannot be imported are clear already.
        clear = isinstance(error, LookupError | ImportError) and not isinstance(error, KeyError | IndexError)
        if where.trust.modules is None or clear:
            raise
        raise where.error(path, f"{'.'.join(path)}: {error or type(error).__name__}") from error


def make(registry: Registry, named: Named, facts: dict[str, Any], where: Where, *path: str) -> Any:
    """Build what a section of the recipe names, with the section's options."""
    with located(where, *path):
        return call(registry[named.name], named.options, facts, f"{registry.kind} {named.name!r}")


def outside_names(source: RecipeFile, sections: Sequence[str] = NAMED_SECTIONS) -> list[tuple[str, str]]:
    """Return each section, of a recipe and its phases, that names something outside the package, with the name."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(name := value.get("name"), str) and ":" in name:
                yield name
            for entry in value.values():
                yield from names(entry)

    tables = with_phases(source.tables)
    pairs = [(section, name) for table in tables for section in sections for name in names(table.get(section))]
    return list(dict.fromkeys(pairs))


def with_phases(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a recipe's tables and those of its phases, as far as they are tables."""
    phases = tables.get("phases")
    return [table for table in [tables, *(phases if isinstance(phases, list) else [])] if isinstance(table, dict)]


def require_trust(source: RecipeFile, sections: Sequence[str] = NAMED_SECTIONS) -> None:
    """Raise for a recipe that names untrusted code, listing all of it so that one more attempt is enough.

    Safety does not depend on this: every name is checked again where it is looked up.
    """
    trust = source.where.trust
    untrusted = [
        (section, name) for section, name in outside_names(source, sections) if not trust.allows(module_of(name))
    ]
    if untrusted:
        raise UntrustedName(untrusted, trust, source.where.name)


def trust_words(*sources: RecipeFile) -> list[str]:
    """Return the command-line arguments needed to open runs of these recipes."""
    modules = dict.fromkeys(module_of(name) for source in sources for _, name in outside_names(source))
    return [word for module in modules for word in ("--trust", module)]


def module_of(name: str) -> str:
    return name.partition(":")[0]


# Checking


def full_title(recipe: Recipe) -> str:
    """Return the title of a recipe, followed by the size of its images if they are resized and it does not say so."""
    size = recipe.data.options.get("size")
    told = not isinstance(size, int) or f"{size}x{size}" in recipe.title
    return recipe.title if told else f"{recipe.title}, images of {size}x{size}"


def check(source: RecipeFile) -> Recipe:
    """Read a recipe and build everything that needs no data, so that mistakes show before anything is loaded."""
    require_trust(source)
    recipe = source.recipe
    if recipe.training.compile:
        require_compiler(source.where)
    with located(source.where, "data"):
        owner = f"data set {recipe.data.name!r}"
        check_options(DATA_SETS[recipe.data.name], recipe.data.options, {"places"}, owner)
        if missing := parameters(DATA_SETS[recipe.data.name])[1] - recipe.data.options.keys() - {"places"}:
            raise ValueError(f"{owner} needs {', '.join(sorted(missing))}.")
    for number in range(len(recipe.phases)):
        phase, where = source.phase(number), source.where_in(number)
        equilibrium_settings(phase, where)
        optimizer = build_optimizer(phase, [nn.Parameter(torch.zeros(1))], where)
        build_schedule(phase, optimizer, phase.phases[number].epochs, 10, where)
        for registry, named, section in ((MODELS, phase.model, "model"), (TASKS, phase.task, "task")):
            with located(where, section):
                check_options(registry[named.name], named.options, FACTS, f"{section} {named.name!r}")
    return recipe


# Building


def load_data(recipe: Recipe, folders: Sequence[Path], trust: Trust) -> DataSet:
    """Load the recipe's data set, with its validation split, reduced to the recipe's limit."""
    with looking_up(trust.find):
        data = load(recipe.data.name, folders=folders, validation=recipe.data.validation, **recipe.data.options)
    if (limit := recipe.data.evaluation_limit) is not None:
        validation = None if data.val is None else spread(data.val, limit)
        data = replace(data, val=validation, test=spread(data.test, limit))
    if (limit := recipe.data.limit) is None:
        return data
    validation = None if data.val is None else spread(data.val, limit)
    return replace(data, train=spread(data.train, limit), val=validation, test=spread(data.test, limit))


def build_model(recipe: Recipe, facts: dict[str, Any], where: Where) -> nn.Module:
    """Build the model, with the recipe's solver, tolerance and gradient set on every Equilibrium in it."""
    model: nn.Module = make(MODELS, recipe.model, facts, where, "model")
    settings = equilibrium_settings(recipe, where)
    layers = [layer for layer in model.modules() if isinstance(layer, Equilibrium)]
    if settings and not layers:
        section = next(iter(settings))
        raise where.error(
            (section,), f"{section}: the model {recipe.model.name!r} has no equipoise.Equilibrium to set it for."
        )
    for layer in layers:
        for name, value in settings.items():
            setattr(layer, name, value)
    return model


def equilibrium_settings(recipe: Recipe, where: Where) -> dict[str, Any]:
    """Build the solver, tolerance and gradient rule that the recipe names; the model keeps its own for the others."""
    settings: dict[str, Any] = {}
    if recipe.solver is not None:
        settings["solver"] = nested(SOLVERS, recipe.solver, where, "solver")
    if recipe.tolerance is not None:
        with located(where, "tolerance"):
            settings["tolerance"] = call(Tolerance, recipe.tolerance, {}, "tolerance")
    if recipe.gradient is not None:
        settings["gradient"] = nested(GRADIENTS, recipe.gradient, where, "gradient")
    return settings


def nested(registry: Registry, named: Named, where: Where, section: str) -> Any:
    """Build something whose options may be solvers or tolerances: ``gradient = {solver = {name = "gmres"}}``."""
    options = dict(named.options)
    for key, value in named.options.items():
        if isinstance(value, dict) and "name" in value:
            inner = Named(value["name"], {k: v for k, v in value.items() if k != "name"})
            options[key] = make(BACKWARD_SOLVERS, inner, {}, where, section, key)
        elif isinstance(value, dict):
            with located(where, section, key):
                options[key] = call(Tolerance, value, {}, f"{section}.{key}")
    return make(registry, Named(named.name, options), {}, where, section)


def build_task(recipe: Recipe, facts: dict[str, Any], where: Where) -> Task:
    task: Task = make(TASKS, recipe.task, facts, where, "task")
    if not hasattr(task, "best_metric"):
        raise where.error(("task", "name"), f"task {recipe.task.name!r} does not define best_metric.")
    return task


def build_optimizer(recipe: Recipe, parameters: Iterable[Tensor], where: Where) -> Optimizer:
    for name, value in recipe.optimizer.options.items():  # torch compares numbers with it, and says no more
        if isinstance(value, str) and recipe.optimizer.name in OPTIMIZERS.entries:
            raise where.error(("optimizer", name), f"optimizer.{name} is {value!r}; it must be a number.")
    return make(OPTIMIZERS, recipe.optimizer, {"params": list(parameters)}, where, "optimizer")


def compile_equilibria(model: nn.Module, where: Where) -> None:
    """Have the f of every Equilibrium compiled when it is first called, in place: tensors keep their names."""
    layers = [layer for layer in model.modules() if isinstance(layer, Equilibrium)]
    if not layers:
        raise where.error(
            ("training", "compile"), "training.compile is true; the model has no equipoise.Equilibrium to compile."
        )
    for layer in layers:
        if isinstance(layer.f, nn.Module):
            layer.f.compile()
        else:
            layer.f = torch.compile(layer.f)
    torch._dynamo.reset()  # drop the graphs of an earlier model, phase or seed
    # torch gives up on a function after 8 graphs; training, evaluation and layers of one class share them.
    config: Any = torch._dynamo.config
    config.cache_size_limit = max(config.cache_size_limit, MAX_GRAPHS)


def require_compiler(where: Where) -> None:
    """Raise RecipeError if torch.compile does not work here, by compiling something small."""
    try:
        torch.compile(torch.cos)(torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as error:  # torch raises a different one for everything that may be missing
        reason = str(error).strip().partition("\n")[0]
        raise where.error(
            ("training", "compile"),
            "training.compile is true, but torch.compile does not work here: it needs a C++ compiler such as g++ and "
            f"Python's header files. Install them, or set training.compile = false. torch reports: {reason}",
        ) from None


# Digests of the code that a result depends on, which show later whether it may have moved. They cover the files of a
# recipe's model, task, solver and gradient rule, and everything of the package that these import, down to the solvers.
# Comments, docstrings, empty lines and the code of pictures do not count, nor does the lab: it reads data and counts
# epochs.

PACKAGE = Path(equipoise.__file__).parent
ROOMS = ("problem", "solvers", "gradients", "fixed_point", "stability", "operators", "joint", "models", "tasks")
UNCOUNTED = ("tasks/drawing.py", "tasks/__init__.py", "models/__init__.py")  # pictures, and tables of all names
NAMED = {"model": MODELS, "task": TASKS, "solver": SOLVERS, "gradient": GRADIENTS}

IMPORT = re.compile(r"^[ \t]*from equipoise\.([\w.]+) import (\([^)]*\)|.*)", re.M)
NAME = re.compile(r'"equipoise\.([\w.]+):\w+"')  # in a table of names
DOCSTRING = re.compile(r'(?:\A|(?<=:\n))[ \t]*r?"""(?:[^"\\]|\\.|"(?!""))*"""', re.S)
COMMENT = re.compile(r"(?:^[ \t]*|  )#(?: .*|!.*)?$", re.M)


def source_digests(tables: dict[str, Any]) -> dict[str, str]:
    """Return a digest of every file that a recipe's computation depends on, by its path in the package.

    Args:
        tables: tables of the recipe after all changes.
    """
    found: dict[str, str] = {}
    waiting = [file for module in named_modules(tables) for file in files_of(module)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path], imported = examined(path)
            waiting += imported
    return dict(sorted(found.items()))


def named_modules(tables: dict[str, Any]) -> Iterator[str]:
    """Yield the modules, without the package's name, of what a recipe and its phases name."""
    for table in with_phases(tables):
        for section, registry in NAMED.items():
            named = table.get(section)
            name = named.get("name") if isinstance(named, dict) else None
            if isinstance(name, str) and name in registry.entries:  # else the user's own
                yield registry.entries[name].partition(":")[0].removeprefix("equipoise.")


def files_of(module: str) -> list[str]:
    """Return the file of a module, as its path in the package; an empty list if it does not count."""
    if module.partition(".")[0] not in ROOMS:
        return []
    stem = module.replace(".", "/")
    return [
        path for path in (f"{stem}.py", f"{stem}/__init__.py") if path not in UNCOUNTED and (PACKAGE / path).exists()
    ]


@cache
def examined(path: str) -> tuple[str, list[str]]:
    """Return the digest of a file, and the files that it imports, anywhere in it."""
    text = (PACKAGE / path).read_text(encoding="utf-8")
    imported: list[str] = []
    for module, names in [*IMPORT.findall(text), *((module, "") for module in NAME.findall(text))]:
        inside = [f"{module}.{name}" for name in re.findall(r"\w+", names)]
        imported += [file for each in (module, *inside) for file in files_of(each)]
    return hashlib.blake2b(code_of(text).encode(), digest_size=6).hexdigest(), imported


def code_of(text: str) -> str:
    """Return the code of a file in the package's format without comments, docstrings and empty lines."""
    lines = DOCSTRING.sub("", COMMENT.sub("", text)).split("\n")
    return "\n".join(line for line in map(str.rstrip, lines) if line)


# Learning-rate schedules: torch's own, stepped once per optimizer step, with lengths in epochs


def build_schedule(recipe: Recipe, optimizer: Optimizer, epochs: int, steps: int, where: Where) -> LRScheduler:
    """Build the schedule over ``epochs`` epochs of ``steps`` steps each."""
    facts = {"optimizer": optimizer, "epochs": epochs, "steps": steps}
    return make(SCHEDULES, recipe.schedule, facts, where, "schedule")


def constant_schedule(optimizer: Optimizer) -> LRScheduler:
    """Keep the optimizer's learning rate."""
    return LambdaLR(optimizer, lambda _: 1.0)


def step_schedule(
    optimizer: Optimizer,
    steps: int,
    epochs: int,
    *,
    every: int | None = None,
    at: list[int] | None = None,
    factor: float = 0.1,
) -> LRScheduler:
    """Multiply the rate by ``factor`` after every ``every`` epochs, or after the given ones: ``at = [100, 150]``."""
    if (every is None) == (at is None):
        raise ValueError(
            f"a step schedule needs one of every = EPOCHS (given: {every}) and at = [EPOCH, ...] (given: {at})."
        )
    if every is not None and every < 1:
        raise ValueError(f"every is {every}; it must be at least 1 epoch.")
    at = list(range(every, epochs, every)) if every is not None else at or []
    return MultiStepLR(optimizer, [epoch * steps for epoch in at], factor)


def cosine_schedule(optimizer: Optimizer, steps: int, epochs: int, *, final: float = 0.0) -> LRScheduler:
    """Decrease the optimizer's rate to ``final`` along half a cosine."""
    return CosineAnnealingLR(optimizer, steps * epochs, eta_min=final)


def one_cycle_schedule(
    optimizer: Optimizer,
    steps: int,
    epochs: int,
    *,
    warmup: float = 0.3,
    start: float = 25.0,
    end: float = 1e4,
    momentum: list[float] | None = None,
) -> LRScheduler:
    """Raise the rate from lr / start to lr over the share ``warmup`` of the steps, then lower it to lr / start / end.

    Momentum (Adam's first beta) moves the other way, within ``momentum = [lowest, highest]`` (default 0.85 and 0.95).
    L. N. Smith, N. Topin, "Super-convergence" (2018).
    """
    if start <= 0 or end <= 0:
        raise ValueError(f"start is {start} and end is {end}; both must be above 0.")
    if momentum is not None and len(momentum) != 2:
        raise ValueError(f"momentum is {momentum}; it must be two numbers, [lowest, highest].")
    lowest, highest = momentum or (0.85, 0.95)
    total = max(2, steps * epochs)
    return OneCycleLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=total,
        pct_start=warmup if warmup * total > 1 else 1.5 / total,  # torch divides by warmup * total - 1
        div_factor=start,
        final_div_factor=end,
        cycle_momentum="momentum" in optimizer.defaults or "betas" in optimizer.defaults,
        base_momentum=lowest,
        max_momentum=highest,
    )

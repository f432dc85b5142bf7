"""From a recipe's words to objects: model, task, solver, optimizer, schedule. Mistakes are named with their line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equipoise.fixed_point import Equilibrium
from equipoise.gradients import GradientRule
from equipoise.lab.data import DATA_SETS, FACTS
from equipoise.lab.recipes.recipe import Named, Recipe, RecipeError, Source, Where
from equipoise.models import MODELS
from equipoise.registry import (
    Registry,
    UnknownName,
    UnknownOption,
    UntrustedName,
    call,
    check_options,
    parameters,
    trusting,
)
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
BACKWARD_SOLVERS = Registry(  # the backward problem is linear
    "solver",
    {**SOLVERS.entries, "gmres": "equipoise.solvers:GMRES", "bicgstab": "equipoise.solvers:BiCGStab"},
    Solver,
)
GRADIENTS = Registry(
    "gradient",
    {
        "implicit": "equipoise.gradients:ImplicitGradient",
        "phantom": "equipoise.gradients:PhantomGradient",
        "unrolled": "equipoise.gradients:UnrolledGradient",
    },
    GradientRule,
)
OPTIMIZERS = Registry(
    "optimizer",
    {
        "sgd": "torch.optim:SGD",
        "adam": "torch.optim:Adam",
        "adamw": "torch.optim:AdamW",
        "nadam": "torch.optim:NAdam",
        "rmsprop": "torch.optim:RMSprop",
        "adagrad": "torch.optim:Adagrad",
    },
    Optimizer,
)
SCHEDULES = Registry(
    "schedule",
    {
        "constant": "equipoise.lab.training.schedules:constant",
        "step": "equipoise.lab.training.schedules:step",
        "cosine": "equipoise.lab.training.schedules:cosine",
        "one-cycle": "equipoise.lab.training.schedules:one_cycle",
    },
    LRScheduler,
    functions=True,
)
MODEL_SECTIONS = ("model", "solver", "gradient")  # of a recipe: what its model is built from
USE_SECTIONS = (*MODEL_SECTIONS, "task", "data")  # and what it is measured with
NAMED_SECTIONS = (*USE_SECTIONS, "optimizer", "schedule")


GRAPHS = 64  # that torch may compile for one function before it gives up


@contextmanager
def located(where: Where, *path: str) -> Iterator[None]:
    """Make a section's thing: its names are looked up under the recipe's trust, its mistakes named with their line."""
    try:
        with trusting(where.trust):
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
        # In a recipe of the user's own it is a defect of the user's code, best seen as it is. In a file that was loaded
        # it may be anything; sentences of what cannot be found or imported stay as they are.
        found = isinstance(error, LookupError | ImportError) and not isinstance(error, KeyError | IndexError)
        if where.trust.modules is None or found:
            raise
        raise where.error(path, f"{'.'.join(path)}: {error or type(error).__name__}") from error


def make(registry: Registry, named: Named, facts: dict[str, Any], where: Where, *path: str) -> Any:
    """The thing that a section of the recipe names, made with the section's options."""
    with located(where, *path):
        return call(registry[named.name], named.options, facts, f"{registry.kind} {named.name!r}")


def outside_names(source: Source, sections: Sequence[str] = NAMED_SECTIONS) -> list[tuple[str, str]]:
    """The names from outside the package in some sections of a recipe and its phases, each with its section."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(name := value.get("name"), str) and ":" in name:
                yield name
            for entry in value.values():
                yield from names(entry)

    phases = source.tables.get("phases")
    tables = [
        source.tables,
        *(phase for phase in (phases if isinstance(phases, list) else []) if isinstance(phase, dict)),
    ]
    found = [(section, name) for table in tables for section in sections for name in names(table.get(section))]
    return list(dict.fromkeys(found))


def require_trust(source: Source, sections: Sequence[str] = NAMED_SECTIONS) -> None:
    """Refuse a recipe that names code which is not trusted: all of it at once, so that one more try is enough.

    That nothing else is imported does not rest on this: every name is checked again where it is looked up.
    """
    trust = source.where.trust
    untrusted = [
        (section, name) for section, name in outside_names(source, sections) if not trust.allows(module_of(name))
    ]
    if untrusted:
        raise UntrustedName(untrusted, trust, source.where.name)


def trust_words(*sources: Source) -> list[str]:
    """What to write on the command line to open runs of these recipes."""
    modules = dict.fromkeys(module_of(name) for source in sources for _, name in outside_names(source))
    return [word for module in modules for word in ("--trust", module)]


def module_of(name: str) -> str:
    return name.partition(":")[0]


def build_model(recipe: Recipe, facts: dict[str, Any], where: Where) -> nn.Module:
    """The model, every Equilibrium in it solved as the recipe says."""
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
    torch._dynamo.reset()  # the graphs of a model before this one, of an earlier phase or seed, serve no more
    # torch gives up on a function after 8 graphs; training, evaluation and layers of one class share them.
    config: Any = torch._dynamo.config
    config.cache_size_limit = max(config.cache_size_limit, GRAPHS)


def require_compiler(where: Where) -> None:
    """Compile something small: what torch.compile needs and cannot find shows now, in one sentence."""
    try:
        torch.compile(torch.cos)(torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as error:  # torch has a different one for every thing that may be missing
        reason = str(error).strip().partition("\n")[0]
        raise where.error(
            ("training", "compile"),
            "training.compile is true, but torch.compile does not work here: it needs a C++ compiler such as g++ and "
            f"Python's header files. Install them, or set training.compile = false. torch says: {reason}",
        ) from None


def equilibrium_settings(recipe: Recipe, where: Where) -> dict[str, Any]:
    """The solver, tolerance and gradient rule that the recipe names; what it does not name stays the model's own."""
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
    """A thing with solvers or tolerances among its options: ``gradient = {solver = {name = "gmres"}}``."""
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
    """The task of the recipe."""
    task: Task = make(TASKS, recipe.task, facts, where, "task")
    if not hasattr(task, "best_metric"):
        raise where.error(("task", "name"), f"task {recipe.task.name!r} does not say its best_metric.")
    return task


def build_optimizer(recipe: Recipe, parameters: Iterable[Tensor], where: Where) -> Optimizer:
    return make(OPTIMIZERS, recipe.optimizer, {"params": list(parameters)}, where, "optimizer")


def build_schedule(recipe: Recipe, optimizer: Optimizer, epochs: int, steps: int, where: Where) -> LRScheduler:
    """The schedule over ``epochs`` epochs of ``steps`` steps each."""
    facts = {"optimizer": optimizer, "epochs": epochs, "steps": steps}
    return make(SCHEDULES, recipe.schedule, facts, where, "schedule")


def check(source: Source) -> Recipe:
    """Read a recipe and build all that needs no data, so that mistakes show before anything is loaded."""
    require_trust(source)
    recipe: Recipe = source.read(Recipe)
    limits(recipe, source.where)
    if recipe.training.compile:
        require_compiler(source.where)
    with located(source.where, "data"):
        owner = f"data set {recipe.data.name!r}"
        check_options(DATA_SETS[recipe.data.name], recipe.data.options, {"places"}, owner)
        if missing := parameters(DATA_SETS[recipe.data.name])[1] - recipe.data.options.keys() - {"places"}:
            raise ValueError(f"{owner} needs {', '.join(sorted(missing))}.")
    for number in range(len(recipe.phases)):
        phase, where = source.phase(number), source.where_in(number)
        limits(phase, where)
        equilibrium_settings(phase, where)
        optimizer = build_optimizer(phase, [nn.Parameter(torch.zeros(1))], where)
        build_schedule(phase, optimizer, max(1, phase.phases[number].epochs), 10, where)
        for registry, named, section in ((MODELS, phase.model, "model"), (TASKS, phase.task, "task")):
            with located(where, section):
                check_options(registry[named.name], named.options, FACTS, f"{section} {named.name!r}")
    return recipe


def none_or_one(number: int | None) -> bool:
    return number is None or number >= 1


def limits(recipe: Recipe, where: Where) -> None:
    """Numbers that make no sense are refused at the door."""
    for path, allowed, sentence in (
        (("seeds",), recipe.seeds >= 1, "at least 1"),
        (("seed",), recipe.seed >= 0, "0 or more"),
        (("data", "validation"), 0 <= recipe.data.validation < math.inf, "0 or more: a share, or a number of samples"),
        (("data", "limit"), recipe.data.limit is None or recipe.data.limit >= 1, "at least 1"),
        (("training", "batch_size"), recipe.training.batch_size >= 1, "at least 1"),
        (("training", "evaluation_batch_size"), recipe.training.evaluation_batch_size >= 1, "at least 1"),
        (("training", "clip"), recipe.training.clip is None or recipe.training.clip > 0, "above 0"),
        (("training", "log_every"), recipe.training.log_every >= 1, "at least 1"),
        (("training", "checkpoint_every"), none_or_one(recipe.training.checkpoint_every), "at least 1"),
        (("training", "keep_every"), none_or_one(recipe.training.keep_every), "at least 1"),
        (("jacobian", "weight"), recipe.jacobian.weight >= 0, "0 (none) or more"),
        (("jacobian", "share"), 0 <= recipe.jacobian.share <= 1, "between 0 and 1"),
        (("jacobian", "probes"), recipe.jacobian.probes >= 1, "at least 1"),
        (("jacobian", "growth_every"), none_or_one(recipe.jacobian.growth_every), "at least 1"),
        (("jacobian", "jitter"), recipe.jacobian.jitter >= 0, "0 or more"),
        (("failures", "share"), 0 <= recipe.failures.share <= 1, "between 0 and 1"),
        (("failures", "stop_after"), recipe.failures.stop_after >= 0, "0 (never) or more"),
        *(((("phases", str(i), "epochs")), phase.epochs >= 1, "at least 1") for i, phase in enumerate(recipe.phases)),
    ):
        if not allowed:
            value: Any = recipe
            for part in path:
                value = value[int(part)] if part.isdecimal() else getattr(value, part)
            raise where.error(path, f"{'.'.join(path)} is {value}; it must be {sentence}.")

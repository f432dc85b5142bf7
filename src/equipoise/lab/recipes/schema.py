"""The schema of recipes: one dataclass per section, whose fields are the keys of the TOML file."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from equipoise.options import require_number

# Numbers within bounds, checked when a recipe is read
Count = Annotated[int, partial(require_number, at_least=1, whole=True)]
Whole = Annotated[int, partial(require_number, at_least=0, whole=True)]
NonNegative = Annotated[float, partial(require_number, at_least=0)]
Share = Annotated[float, partial(require_number, at_least=0, at_most=1)]


@dataclass(frozen=True)
class Paper:
    """Where the experiment comes from."""

    system: str = ""  # "mondeq", "mdeq", ...
    aim: str = ""  # the number to reach, and where it is printed
    note: str = ""
    not_run: str = ""  # why rows of a table, or a figure, without a stored result were not run


@dataclass(frozen=True)
class Named:
    """Something chosen by name, with its options: every key of the section other than ``name``."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """The data set; its options are the section's other keys."""

    name: str
    validation: NonNegative = 0.1  # share or number of training samples held out to choose the best weights; 0: none
    limit: Count | None = None  # largest number of samples per split (for trying things out)
    options: dict[str, Any] = field(default_factory=dict)
    evaluation_limit: Count | None = None  # largest number of samples of the validation split and of the test split


@dataclass(frozen=True)
class Training:
    """The training loop."""

    batch_size: Count = 128  # over all processes together
    evaluation_batch_size: Count = 250
    clip: Annotated[float, partial(require_number, above=0)] | None = None  # maximum gradient norm
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"  # the last two with autocast
    channels_last: bool = False
    compile: bool = False  # torch.compile for the f of every Equilibrium, which needs a C++ compiler
    test: Literal["end", "epoch"] = "end"  # measured for the record only; the best weights are chosen on validation
    log_every: Count = 20  # steps between two lines of the log
    checkpoint_every: Count | None = None  # steps between two checkpoints, in addition to one after every epoch
    keep_every: Count | None = None  # epochs between two sets of weights that are kept permanently, from the first on
    init_from: str | None = None  # a run, or a weights file: tensors of the same name and shape are taken from it
    sync_batch_norm: bool = False  # BatchNorm over the batch of all processes; GPUs only


@dataclass(frozen=True)
class Jacobian:
    """A penalty on the Jacobian of f at the equilibrium, ||df/dz||_F^2 / numel(z), added to the loss of some steps."""

    weight: NonNegative = 0.0
    share: Share = 1.0  # fraction of the steps, chosen at random
    probes: Count = 2  # random vectors that estimate the norm
    growth: float = 0.0  # increase of the weight after every ``growth_every`` steps of the phase
    growth_every: Count | None = None
    jitter: Whole = 0  # in steps with a penalty, a random number from -jitter to 1 is added to tolerance.max_steps


@dataclass(frozen=True)
class Failures:
    """What happens when solves fail during training. A step with a non-finite loss or gradient is never applied."""

    policy: Literal["report", "skip"] = "report"  # "skip" does not apply the gradient of a failed step
    share: Share = 0.5  # a step fails when more than this share of its samples did not converge; 1 for never
    stop_after: Whole = 50  # consecutive failed steps that end the training run, checkpoint saved; 0 for never


@dataclass(frozen=True)
class Phase:
    """A number of epochs. A section given here overrides the recipe's for the duration of the phase."""

    epochs: Count
    name: str = ""
    task: dict[str, Any] | None = None
    model: dict[str, Any] | None = None  # the model is rebuilt with these options and keeps its weights
    solver: dict[str, Any] | None = None
    tolerance: dict[str, Any] | None = None
    gradient: dict[str, Any] | None = None
    jacobian: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None  # stating an optimizer or a schedule restarts both


@dataclass(frozen=True)
class Recipe:
    """One experiment."""

    title: str
    data: Data
    model: Named
    phases: tuple[Phase, ...]
    paper: Paper = Paper()
    task: Named = Named("classification")
    solver: Named | None = None  # for every Equilibrium in the model; None keeps the model's own
    tolerance: dict[str, Any] | None = None
    gradient: Named | None = None
    jacobian: Jacobian = Jacobian()
    optimizer: Named = Named("adam")
    schedule: Named = Named("constant")
    training: Training = Training()
    failures: Failures = Failures()
    seed: Whole = 0
    seeds: Count = 1  # number of runs, with seed, seed + 1, ...
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes by dotted key: smoke, small, ...


@dataclass(frozen=True)
class Row:
    """One row of a table: a recipe, with changes, beside the number printed in the paper."""

    recipe: str
    label: str
    metric: str = "accuracy"
    paper: float | None = None
    spread: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""  # why this row was not run, if it is not for the reason of the table


@dataclass(frozen=True)
class TableSpec:
    """A published table: recipes side by side."""

    title: str
    rows: tuple[Row, ...]
    distances: Literal["classifier", "inception"] | None = None  # features whose distances are further metrics
    paper: Paper = Paper()
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes to every row, after the row's own
    columns: tuple[Literal["time", "evaluations", "memory", "failed"], ...] = ()  # what training cost, from the logs


@dataclass(frozen=True)
class FigureSpec:
    """A published figure: a function that draws it from trained recipes, or from the recipes themselves."""

    title: str
    figure: str  # a name of equipoise.lab.results.figures, or "my_module:draw"
    recipes: tuple[str, ...]  # each may be followed by changes as on the command line: "core/mnist optimizer.lr=0.1"
    paper: Paper = Paper()
    options: dict[str, Any] = field(default_factory=dict)
    budget: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes to the figure's own options
    fewest_runs: Count | None = None  # number of trained runs that suffice for --run; None for one per recipe

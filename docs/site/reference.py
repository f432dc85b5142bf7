"""Write the pages of the API reference: a page per table of ``docs/api.md`` and one per package of public names."""

import re
from pathlib import Path

from sphinx.application import Sphinx

import equipoise as eq
from equipoise.models import MODELS
from equipoise.tasks import TASKS

DOCS = Path(__file__).parents[1]
PAGES = DOCS / "reference"
MODULES = ("joint", "lab", "models", "operators", "tasks")
TUTORIALS = [
    "own_layer", "per_sample_stopping", "compare_solvers", "guarantee", "multiscale", "objective", "restore",
    "generate", "attack_and_defend", "one_example", "sudoku", "two_processes", "export",
]  # fmt: skip
TASK_PARTS = [
    "equipoise.tasks.latent_vectors:fit",
    "equipoise.tasks.restore_images:restore",
    *(f"equipoise.tasks.physics:{name}" for name in ("Identity", "Mask", "GaussianBlur", "Downsampling")),
    *(f"equipoise.tasks.physics:{name}" for name in ("MatrixOperator", "GaussianNoise", "square_masks")),
    "equipoise.tasks.robustness:pgd",
    "equipoise.tasks.joint_attack:jiio",
    "equipoise.tasks.frechet:frechet_distance",
]
LAB_PARTS = [
    "equipoise.lab.runs.load:load",
    *(f"equipoise.lab.data:{name}" for name in ("load", "DataSet", "TensorSplit", "FileSplit", "Places")),
    "equipoise.lab.recipes.reading:open_recipe",
    *(f"equipoise.lab.recipes.schema:{name}" for name in ("Recipe", "Data", "Training", "Phase", "Jacobian")),
    *(f"equipoise.lab.recipes.schema:{name}" for name in ("Failures", "TableSpec", "FigureSpec")),
    "equipoise.lab.training.trainer:train_run",
    *(f"equipoise.lab.results.{name}" for name in ("trained:open_trained", "trained:evaluate_run")),
    *(f"equipoise.lab.results.{name}" for name in ("predict:predict_images", "report:write_report")),
    *(f"equipoise.lab.results.{name}" for name in ("reproduce:reproduce_table", "reproduce:draw_figure")),
]


class TutorialOrder:
    """The order of the tutorials: that of ``TUTORIALS``, then by name."""

    def __init__(self, folder: str):
        pass

    def __call__(self, file: str) -> tuple[int, str]:
        name = Path(file).stem
        return (TUTORIALS.index(name) if name in TUTORIALS else len(TUTORIALS), name)


def tables() -> dict[str, list[str]]:
    """Return the public names of each table of ``docs/api.md``, by the table's heading."""
    found: dict[str, list[str]] = {}
    for table in re.findall(r"^\| ([^|]+?) \| \|\n\|[-| ]+\n((?:\|.*\n)+)", (DOCS / "api.md").read_text(), re.M):
        heading = re.sub(r" \(.*", "", table[0])
        first_cells = [row.split(" | ")[0] for row in table[1].splitlines()]
        names = [name for cell in first_cells for name in re.findall(r"`eq\.([A-Za-z_]\w*)", cell)]
        found[heading] = [name for name in dict.fromkeys(names) if name not in MODULES]
    return found


def entry(path: str) -> str:
    """Return the directive for an object such as "equipoise:Anderson" or "equipoise.tasks:Task"."""
    module, _, name = path.partition(":")
    value = getattr(__import__(module, fromlist=[name]), name)
    full = f"{module}.{name}"
    if isinstance(value, type):
        return f".. autoclass:: {full}\n   :members:\n   :show-inheritance:\n"
    return f".. autofunction:: {full}\n" if callable(value) else f".. autodata:: {full}\n"


def page(title: str, paths: list[str], *, module: str = "", text: str = "") -> str:
    """Return a page of the reference."""
    head = f".. module:: {module}\n\n" if module else ""
    return f"{head}{title}\n{'=' * len(title)}\n\n{text}\n\n" + "\n".join(map(entry, paths))


def pages() -> dict[str, str]:
    """Return the content of every page by its name."""
    written: dict[str, str] = {}
    for heading, names in tables().items():
        if names:
            written[re.sub(r"\W+", "-", heading)] = page(
                heading[0].upper() + heading[1:], [f"equipoise:{name}" for name in names]
            )
    public = [name for names in tables().values() for name in names]
    missing = set(eq.__all__) - set(public) - set(MODULES)
    assert not missing, f"docs/api.md has no row for {', '.join(sorted(missing))}"
    packages = {
        "operators": [f"equipoise.operators:{name}" for name in eq.operators.__all__],
        "joint": [f"equipoise.joint:{name}" for name in eq.joint.__all__ if name not in public],
        "models": list(MODELS.entries.values()),
        "tasks": ["equipoise.tasks:Task", *TASKS.entries.values(), *TASK_PARTS],
        "lab": LAB_PARTS,
    }
    for name, paths in packages.items():
        module = getattr(eq, name)
        written[f"equipoise-{name}"] = page(f"equipoise.{name}", paths, module=f"equipoise.{name}", text=module.__doc__)
    return written


def write(app: Sphinx) -> None:
    """Write the pages that have changed, and remove those that are no longer there."""
    contents = pages()
    listed = "\n   ".join(contents)
    title = "API reference"
    contents["index"] = (
        f"{title}\n{'=' * len(title)}\n\nGenerated from the docstrings. :doc:`Public names </docs/api>` lists every "
        f"name with one line each.\n\n.. toctree::\n\n   {listed}\n"
    )
    PAGES.mkdir(exist_ok=True)
    for file in PAGES.glob("*.rst"):
        if file.stem not in contents:
            file.unlink()
    for name, content in contents.items():
        file = PAGES / f"{name}.rst"
        if not file.exists() or file.read_text() != content:
            file.write_text(content)


def escape(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep norms such as ||f(z) - z|| and arguments such as *inputs in docstrings as they are written."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith(">>>"):
            parts = re.split(r"(``.*?``|\*\*\w.*?\*\*)", line)
            parts[::2] = [re.sub(r"(\||(?<!\w)\*(?=\w))", r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("autodoc-process-docstring", escape, priority=100)  # before napoleon reads the sections
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""``equipoise doctor``: is everything here that a run needs?"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import equipoise
from equipoise.fixed_point import fixed_point

NEEDED = {
    "safetensors": "checkpoints",
    "tqdm": "progress bars",
    "matplotlib": "pictures",
    "PIL": "image files",
    "sklearn": "digits",
    "scipy": "SVHN",
    "jinja2": "reports",
}
OPTIONAL = {"tensorboard": "curves in TensorBoard", "foolbox": "independent attacks", "onnx": "export"}


def examine(folders: Sequence[Path] = ()) -> bool:
    """Print one line per check; True when nothing needed is missing."""
    sound = True
    for good, text in findings(folders):
        print(("ok       " if good else "MISSING  " if good is False else "note     ") + text)
        sound &= good is not False
    return sound


def findings(folders: Sequence[Path]) -> Iterator[tuple[bool | None, str]]:
    """Checks as (True, False, or None for a remark; what was found)."""
    yield True, f"equipoise {equipoise.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    for package, purpose in NEEDED.items():
        there = importlib.util.find_spec(package) is not None
        yield there, f"{package} ({purpose})" + ("" if there else ": pip install 'equipoise[lab]'")
    for package, purpose in OPTIONAL.items():
        there = importlib.util.find_spec(package) is not None
        yield (True if there else None), f"{package} ({purpose})" + ("" if there else ": not installed, optional")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield True, f"devices: cpu ({torch.get_num_threads()} threads)" + "".join(f", {gpu}" for gpu in gpus)
    yield from data_findings(folders)
    yield solve_finding()


def data_findings(folders: Sequence[Path]) -> Iterator[tuple[bool | None, str]]:
    """Where data is looked for, and which sets are there."""
    from equipoise.lab.data import available, search_path

    places = [f"{path}" + ("" if path.is_dir() else " (not there)") for path in search_path(tuple(folders))]
    yield None, "data is looked for in " + ", ".join(places)
    found = [row.name for row in available(tuple(folders)) if row.found]
    yield True, f"data sets found: {', '.join(found)}"


def solve_finding() -> tuple[bool, str]:
    """A short solve and its gradient, against the closed form of a linear fixed point."""
    torch.manual_seed(0)
    W = torch.randn(32, 32, dtype=torch.float64) / 16
    x = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    solution = fixed_point(
        lambda z, x: z @ W + x, torch.zeros_like(x), x, tolerance=equipoise.Tolerance(relative=1e-10)
    )
    exact = torch.linalg.solve((torch.eye(32, dtype=torch.float64) - W).T, x.detach().T).T
    solution.value.sum().backward()
    slope = torch.linalg.solve(torch.eye(32, dtype=torch.float64) - W, torch.ones(32, dtype=torch.float64))
    error = max(
        (solution.value - exact).abs().max().item(), ((x.grad if x.grad is not None else x) - slope).abs().max().item()
    )
    good = bool(solution.converged.all()) and error < 1e-6
    return good, f"a solve of 64 samples and its gradient: {solution.stats.evaluations} evaluations, error {error:.0e}"

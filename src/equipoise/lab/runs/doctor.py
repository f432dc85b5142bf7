"""``equipoise doctor``: check that everything a run needs is installed and works."""

import importlib.util
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import equipoise
from equipoise.lab.data import available, search_path

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
    """Print one line per check; return whether everything needed is there."""
    sound = True
    for good, text in findings(folders):
        print(("ok       " if good else "MISSING  " if good is False else "note     ") + text)
        sound &= good is not False
    return sound


def findings(folders: Sequence[Path]) -> Iterator[tuple[bool | None, str]]:
    """Yield checks: True, False, or None for a remark, with a description."""
    yield True, f"equipoise {equipoise.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    for package, purpose in {**NEEDED, **OPTIONAL}.items():
        if importlib.util.find_spec(package) is not None:
            yield True, f"{package} ({purpose})"
        elif package in NEEDED:
            yield False, f"{package} ({purpose}): pip install 'equipoise[lab]'"
        else:
            yield None, f"{package} ({purpose}): not installed, optional"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield True, f"devices: cpu ({torch.get_num_threads()} threads)" + "".join(f", {gpu}" for gpu in gpus)
    places = [f"{path}" + ("" if path.is_dir() else " (does not exist)") for path in search_path(tuple(folders))]
    yield None, "data folders, in order: " + ", ".join(places)
    yield True, f"data sets found: {', '.join(row.name for row in available(tuple(folders)) if row.found)}"
    yield solve_check()


def solve_check() -> tuple[bool, str]:
    """Compare a short solve and its gradient with the closed form of a linear fixed point."""
    torch.manual_seed(0)
    W = torch.randn(32, 32, dtype=torch.float64) / 16
    x = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    tolerance = equipoise.Tolerance(relative=1e-10)
    solution = equipoise.fixed_point(lambda z, x: z @ W + x, torch.zeros_like(x), x, tolerance=tolerance)
    (gradient,) = torch.autograd.grad(solution.value.sum(), x)
    difference = torch.eye(32, dtype=torch.float64) - W
    value_error = (solution.value - torch.linalg.solve(difference.T, x.detach().T).T).abs().max()
    gradient_error = (gradient - torch.linalg.solve(difference, torch.ones_like(W[0]))).abs().max()
    error = max(value_error.item(), gradient_error.item())
    good = bool(solution.converged.all()) and error < 1e-6
    return good, f"a solve of 64 samples and its gradient: {solution.stats.evaluations} evaluations, error {error:.0e}"

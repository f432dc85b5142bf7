"""Training with a penalty on the Jacobian, from the weights of another run, with BatchNorm over processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.lab.recipes.reading import RecipeError, open_recipe
from equipoise.lab.recipes.schema import Jacobian, Training
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import create
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import Setting
from equipoise.lab.training.jacobian import jittered, penalty, weight_at
from equipoise.lab.training.trainer import train
from equipoise.models.parts.images import Normalize
from lab_helpers import EPOCHS, RECIPE


def run_of(folder: Path, recipe: str, *changes: str) -> Any:
    file = folder / "recipe.toml"
    file.write_text(recipe)
    number = len(list(folder.glob("run-*")))
    return create(folder / f"run-{number}", open_recipe(str(file), overrides=list(changes)))


def records(run: Any, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.log.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


# --- how often, how much ----------------------------------------------------------------------------------------------


def test_the_weight_grows_and_comes_as_often_as_it_should() -> None:
    jacobian = Jacobian(weight=0.5, share=0.25, growth=0.1, growth_every=100)
    draw = torch.Generator().manual_seed(0)
    weights = [weight_at(jacobian, step, draw) for step in range(4000)]
    assert 0.22 < sum(w > 0 for w in weights) / len(weights) < 0.28
    for step, weight in enumerate(weights):
        assert weight == 0 or weight == pytest.approx(0.5 + 0.1 * (step // 100))
    assert weight_at(Jacobian(), 10, draw) == 0


def test_jitter_moves_max_steps_from_minus_jitter_to_one_and_puts_it_back() -> None:
    layer = eq.Equilibrium(nn.Identity(), tolerance=eq.Tolerance(max_steps=2, relative=0.1))
    seen = set()
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        with jittered(nn.Sequential(layer), 1, draw):
            seen.add(layer.tolerance.max_steps)
            assert layer.tolerance.relative == 0.1
    assert seen == {1, 2, 3}
    with jittered(layer, 5, draw):
        assert layer.tolerance.max_steps >= 1
    with pytest.raises(KeyError), jittered(layer, 1, draw):
        raise KeyError
    assert layer.tolerance.max_steps == 2


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.drop = eq.VariationalDropout(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(0.5 * self.linear(z) + x))


def test_the_penalty_is_that_of_the_solve_with_its_dropout() -> None:
    torch.manual_seed(0)
    f, x = Dropped(), torch.randn(3, 4, dtype=torch.float64)
    with eq.watch_solves() as solves:
        z = eq.Equilibrium(f, tolerance=eq.Tolerance(relative=1e-10))(x)
    kept = solves[0].solved.problem.scope.per_sample
    (mask,) = kept.values()
    assert set(mask.unique().tolist()) == {0.0, 2.0}

    def plain(value: Tensor) -> Tensor:
        return mask * torch.tanh(0.5 * f.linear(value) + x)

    torch.manual_seed(1)
    found = penalty(solves, probes=4000)
    dense = torch.autograd.functional.jacobian(plain, z.detach())  # (3, 4, 3, 4)
    torch.testing.assert_close(found, dense.square().sum() / z.numel(), rtol=0.05, atol=0)
    assert torch.autograd.grad(found, list(f.parameters()))[0].abs().sum() > 0


def test_training_with_the_penalty_makes_the_jacobian_smaller(tmp_path: Path) -> None:
    runs = {}
    for weight in (0.0, 30.0):
        run = run_of(tmp_path, RECIPE + EPOCHS, f"jacobian.weight={weight}", "jacobian.share=0.9", "phases.0.epochs=6")
        train(run, Machine(torch.device("cpu")))
        steps = records(run, "step")
        runs[weight] = [step["jacobian"] for step in steps if "jacobian" in step]
        assert all(step["jacobian_weight"] == weight for step in steps if "jacobian" in step)
    assert runs[0.0] == []
    assert 15 <= len(runs[30.0]) <= 24
    assert runs[30.0][-1] < 0.7 * runs[30.0][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("jacobian.weight=-1", "jacobian.weight is -1"),
        ("jacobian.share=2", "jacobian.share is 2"),
        ("jacobian.probes=0", "jacobian.probes is 0"),
        ("jacobian.growth_every=0", "jacobian.growth_every is 0"),
        ("jacobian.jitter=-2", "jacobian.jitter is -2"),
        ("jacobian.wieght=1", "wieght"),
        ("phases.0.jacobian.weight=-1", "jacobian.weight is -1"),
    ],
    ids=["weight", "share", "probes", "growth", "jitter", "typo", "phase"],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        train(run_of(tmp_path, RECIPE + EPOCHS, change), Machine(torch.device("cpu")))


# --- from the weights of another run ----------------------------------------------------------------------------------


def test_init_from_takes_what_fits_and_names_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(torch.device("cpu"))
    first = run_of(tmp_path, RECIPE + EPOCHS)
    train(first, machine)
    capsys.readouterr()
    second = run_of(tmp_path, RECIPE + EPOCHS, f"training.init_from={first.folder}", "optimizer.lr=1e-30")
    train(second, machine)
    printed = capsys.readouterr()
    assert f"weights from {first.folder}; new tensors: none" in printed.out + printed.err
    before, after = (eq.load(run.folder, trust="lab_helpers") for run in (first, second))
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)

    third = run_of(tmp_path, RECIPE + EPOCHS, f"training.init_from={first.folder}", "model.ballast=5")
    train(third, machine)
    printed = capsys.readouterr()
    assert "new tensors: ballast" in printed.out + printed.err


def test_mean_and_deviation_stay_those_of_the_data():
    def model(mean: float) -> nn.Module:
        return nn.Sequential(Normalize((mean,), (mean,)), nn.Conv2d(1, 2, 3))

    old, new = model(0.1), model(0.7)
    assert checkpoints.load_matching(new, checkpoints.model_tensors(old), "old") == []
    assert new[0].mean.item() == pytest.approx(0.7)
    assert torch.equal(new[1].weight, old[1].weight)


def test_a_file_from_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match="no tensor in other has the name and shape"):
        checkpoints.load_matching(
            nn.Linear(2, 3), {"model/weight": torch.zeros(2, 2), "model/b": torch.ones(3)}, "other"
        )


# --- BatchNorm over processes -----------------------------------------------------------------------------------------


def test_sync_batch_norm_needs_gpus() -> None:
    with pytest.raises(ValueError, match="sync_batch_norm needs GPUs"):
        Setting(Training(sync_batch_norm=True), Machine(torch.device("cpu")))


def test_the_stem_and_head_of_mdeq_have_batch_norms_that_torch_can_synchronise() -> None:
    model = eq.create_model("mdeq", shape=(3, 32, 32), classes=10)
    names = set(model.state_dict())
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in synced.modules()) == 18
    assert set(synced.state_dict()) == names

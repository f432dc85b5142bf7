"""Compare the time to read and augment a batch with a training step of the smallest CIFAR-10 recipe.

    python benchmarks/loader.py [--rounds N] [--threads N]

Both run in turns in one process, on the same batches; the median ratio is printed. The images are random, since their
content does not matter.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch

from equipoise.lab.data import TensorSplit
from equipoise.lab.data.base import batches
from equipoise.lab.recipes.build import build_model, build_optimizer, build_task
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import Setting


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the loader against the smallest CIFAR-10 recipe.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    source = open_recipe("core/cifar10")
    recipe: Recipe = source.read(Recipe)
    names = tuple(map(str, range(10)))
    facts = {"shape": (3, 32, 32), "classes": 10, "class_names": names, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    machine = Machine(torch.device("cpu"))
    setting, task = Setting(recipe.training, machine), build_task(recipe, facts, source.where)
    model = setting.place(build_model(recipe, facts, source.where))
    optimizer = build_optimizer(recipe, model.parameters(), source.where)
    split = TensorSplit(torch.randint(256, (50000, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (50000,)))
    rows = torch.randperm(len(split)).split(recipe.training.batch_size)

    def read(count: int) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return the seconds per augmented batch, and the last batch."""
        start, batch = perf_counter(), ()
        for step, batch in enumerate(batches(split, rows[:count], machine.device)):
            batch = task.augment(setting.prepare(task, batch), seed_everything(0, "step", step))
        return (perf_counter() - start) / count, batch

    def train(batch: tuple[torch.Tensor, ...]) -> float:
        """Return the seconds of a training step."""
        start = perf_counter()
        optimizer.zero_grad()
        task.loss(model, batch)[0].backward()
        optimizer.step()
        return perf_counter() - start

    reading, training = [], []
    for _ in range(arguments.rounds + 1):
        seconds, batch = read(40)
        reading.append(seconds)
        training.append(train(batch))
    reading, training = reading[1:], training[1:]  # the first round warms up
    ratio = median(step / batch for step, batch in zip(training, reading, strict=True))
    print(f"augmented batch of {recipe.training.batch_size}  {1e3 * median(reading):8.2f} ms")
    print(f"training step            {1e3 * median(training):8.2f} ms")
    print(f"ratio                    {ratio:8.1f}")


if __name__ == "__main__":
    main()

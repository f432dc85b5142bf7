"""Episodes: what all few-shot learners have in common, from their batches to their metrics and figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.options import require
from equipoise.tasks.base import Batch, Sums, Task
from equipoise.tasks.drawing import image_grid
from equipoise.tasks.wrapped import unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = (0, 1, 2, 5, 10, 20, 50, 100)  # inner steps after which the accuracy is plotted
DRAWN = 200  # episodes behind that figure, at most
SHOWN = 3  # episodes whose images are drawn
INTERVAL = "95% interval of accuracy (±)"

Classifier = Callable[[Tensor], Tensor]  # images (tasks, images, channels, height, width) to logits


class EpisodeTask(Task):
    """Learn from the support images of each task of a batch, and classify its query images.

    Batches are (support, labels, query, labels), with images (tasks, images, channels, height, width) and labels
    (tasks, images). The metric "95% interval of accuracy (±)" is half the width of the 95% confidence interval of the
    accuracy, from its standard deviation over tasks.

    Args:
        class_names: names of the classes of a task, indexed by label.
        steps: number of inner steps that learn a task in evaluation.
    """

    best_metric = "accuracy"

    def __init__(self, class_names: tuple[str, ...], steps: int):
        if not class_names:
            raise ValueError("the data set has no classes: choose another data set, or another task.")
        self.class_names, self.steps = class_names, steps
        require(self, "steps", at_least=0, whole=True)

    @abstractmethod
    def learn(self, model: nn.Module, support: Tensor, labels: Tensor, steps: int | None = None) -> Classifier:
        """Return the classifier of each task, learned from its support images.

        Args:
            model: model, not wrapped.
            support, labels: support images and their labels.
            steps: number of inner steps; None for the task's.
        """

    @abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Raise unless a model can be trained by this task."""

    def prepare(self, batch: Batch, dtype: torch.dtype) -> Batch:
        return tuple(t.to(dtype) / 255 if t.dtype == torch.uint8 else t for t in batch)

    def checked(self, model: nn.Module, batch: Batch) -> Batch:
        """Return the batch; raise unless the model and the data set are made for episodes."""
        self.check_model(unwrapped(model))
        episodes = len(batch) == 4 and batch[0].dim() == 5 and batch[2].dim() == 5
        if not episodes or batch[1].shape != batch[0].shape[:2] or batch[3].shape != batch[2].shape[:2]:
            raise ValueError(
                f"the batch has tensors of shapes {[tuple(t.shape) for t in batch]}; few-shot needs support images "
                "(tasks, images, channels, height, width), their labels (tasks, images), query images and their "
                "labels: choose a data set of episodes, such as 'omniglot-episodes'."
            )
        highest = max(int(batch[1].max()), int(batch[3].max()))
        if highest >= len(self.class_names):
            raise ValueError(f"the batch has the label {highest}; the task has {len(self.class_names)} classes.")
        return batch

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        support, labels, query, answers = self.checked(model, batch)
        classify = self.learn(unwrapped(model), support, labels)
        sums = self.sums(classify(query), answers)
        return {**sums, "support": accuracies(classify(support), labels).sum()}

    def sums(self, logits: Tensor, labels: Tensor) -> Sums:
        accuracy = accuracies(logits, labels)
        return {
            "episodes": torch.tensor(len(labels)),
            "loss": task_losses(logits.double(), labels).sum(),
            "accuracy": accuracy.sum(),
            "squares": accuracy.square().sum(),
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = sums["episodes"].item()
        mean = sums["accuracy"].item() / count
        variance = max(0.0, sums["squares"].item() / count - mean**2) * count / max(1, count - 1)
        metrics = {"accuracy": mean, "loss": sums["loss"].item() / count}
        if "support" in sums:
            metrics["support accuracy"] = sums["support"].item() / count
            metrics[INTERVAL] = 1.96 * (variance / count) ** 0.5
        return metrics

    # Pictures

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, Figure]]:
        yield "Accuracy over inner steps", accuracy_figure(*self.curve(model, batches()))
        yield "Episodes", self.episode_figure(model, next(batches()))

    @torch.no_grad()
    def curve(self, model: nn.Module, batches: Iterator[Batch], most: int = DRAWN) -> tuple[list[int], list[Any]]:
        """Return numbers of inner steps, and (accuracy, half its 95% interval) of the query images after each."""
        counts = [steps for steps in STEPS if steps < self.steps] + [self.steps]
        totals: list[Sums] = [{} for _ in counts]
        done = 0
        for batch in batches:
            support, labels, query, answers = (t[: most - done] for t in batch)
            for steps, total in zip(counts, totals, strict=True):
                logits = self.learn(unwrapped(model), support, labels, steps)(query)
                for name, value in self.sums(logits, answers).items():
                    total[name] = total[name] + value if name in total else value
            done += len(support)
            if done >= most:
                break
        measured = [self.metrics({**total, "support": torch.tensor(0.0)}) for total in totals]
        return counts, [(metrics["accuracy"], metrics[INTERVAL]) for metrics in measured]

    @torch.no_grad()
    def episode_figure(self, model: nn.Module, batch: Batch) -> Figure:
        """Draw episodes: support images with their classes, then query images with the answers and their truth."""
        support, labels, query, answers = (t[:SHOWN] for t in batch)
        logits = self.learn(unwrapped(model), support, labels)(query)
        probabilities, guesses = logits.softmax(dim=-1).max(dim=-1)
        ways, entries = len(self.class_names), []
        for task in range(len(support)):
            for image, label in zip(support[task], labels[task], strict=True):
                entries.append((image.float().cpu(), f"learn {self.class_names[int(label)]}"))
            entries += [(torch.ones_like(support[task, 0]).float().cpu(), "")] * (-len(support[task]) % ways)
            order = answers[task].argsort(stable=True)
            asked = order.view(ways, -1)[:, :2].T.flatten() if len(order) % ways == 0 else order[: 2 * ways]
            for i in asked.tolist():
                truth, guess = (self.class_names[int(t[task, i])] for t in (answers, guesses))
                verdict = f"{guess}, right" if truth == guess else f"{guess}, not {truth}"
                caption = f"{verdict} ({probabilities[task, i].item():.0%})"
                entries.append((query[task, i].float().cpu(), caption))
            entries += [(torch.ones_like(support[task, 0]).float().cpu(), "")] * (-len(asked) % ways)
        return image_grid(entries, columns=ways)


def task_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of each task, in single precision at least."""
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    losses = functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.unflatten(0, labels.shape).mean(dim=1)


def accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the share of correct answers of each task."""
    return (logits.argmax(dim=-1) == labels).double().mean(dim=1)


def accuracy_figure(counts: Sequence[int], points: Sequence[tuple[float, float]]) -> Figure:
    """Draw the accuracy of query images over the number of inner steps, with 95% intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    means, halves = zip(*points, strict=True)
    axis.errorbar(range(len(counts)), means, yerr=halves, marker="o", capsize=3)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set(xlabel="inner steps", ylabel="accuracy of query images", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    return figure

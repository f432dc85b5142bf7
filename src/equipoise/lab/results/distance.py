"""Distances between the test images of a generator's run and the images that it makes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.data.base import spread
from equipoise.lab.files import write_json
from equipoise.lab.results.features import Features, open_features
from equipoise.lab.results.sample import (
    BATCH,
    LARGEST_SEED,
    STEPS,
    decoded,
    drawn_latents,
    latent_vectors,
    open_generator,
    prepared,
)
from equipoise.lab.results.trained import progress_bar
from equipoise.lab.runs.folder import Run, open_run
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.generator.autoencoder import Autoencoder
from equipoise.models.generator.model import Generator
from equipoise.options import require_number
from equipoise.tasks.drawing import shown
from equipoise.tasks.frechet import FeatureStatistics, frechet_distance
from equipoise.tasks.latent_vectors import fit, squared_error

IMAGES = 1000  # test images by default
PER_FEATURE = 10  # images per feature that are enough for their covariance


@dataclass(frozen=True)
class Distances:
    """Fréchet distances between test images and other images.

    Args:
        distance: name of the distance.
        features: what the features are.
        images: number of test images, and of samples.
        training_images: number of training images.
        reconstructions, samples, training: distance of each set of images from the test images. An autoencoder
            reconstructs images by its encoder, other generators by joint steps.
        optimised: distance of reconstructions by joint steps, of an autoencoder whose decoder is an equilibrium; None
            for other models.
        note: remark on the number of images, or an empty string.
    """

    distance: str
    features: str
    images: int
    training_images: int
    reconstructions: float
    samples: float
    training: float
    optimised: float | None = None
    note: str = ""

    def record(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """Return the distances, each by a name that says what it is."""
        named = {
            "samples": self.samples,
            "reconstructions": self.reconstructions,
            "reconstructions by joint steps": self.optimised,
            "training images": self.training,
        }
        return {f"{self.distance} of {name}": value for name, value in named.items() if value is not None}


def run_distances(
    run: Run,
    machine: Machine,
    features: str = "classifier",
    images: int = IMAGES,
    *,
    seed: int = 0,
    weights: str = "best",
    latents: int | None = None,
    folders: Sequence[Path] = (),
) -> Distances:
    """Compare test images with their reconstructions, with samples, and with training images.

    The distance between training and test images shows how small a distance can get with that many images.

    Args:
        features: "classifier" or "inception", see :func:`~equipoise.lab.results.features.open_features`.
        images: number of test images, evenly spaced; all if there are fewer. As many samples are drawn, and as many
            training images taken.
        seed: seed of the samples.
        latents: see :func:`~equipoise.lab.results.sample.sample_images`.
        folders: folders to look for the data in first.

    Example:
        >>> with this_machine() as machine:
        ...     print(run_distances(open_run("runs/jiio-celeba-001"), machine).samples)
    """
    require_number("images", images, at_least=2, whole=True)
    require_number("seed", seed, at_least=0, at_most=LARGEST_SEED, whole=True)
    trained, model = open_generator(run, machine, weights)
    network = open_features(features, folders)
    network.network.to(trained.setting.device)
    data = data_of(run, trained.recipe, folders)
    test = spread(data.test, images)
    train = spread(data.train, len(test))
    x, _ = drawn_latents(run, trained, len(test), seed=seed, weights=weights, latents=latents, folders=folders)
    truth, reconstructions, samples, training, optimised = (FeatureStatistics() for _ in range(5))
    joint = isinstance(trained.model, Autoencoder) and isinstance(model, Generator)
    with progress_bar("distances", (2 + joint) * len(test) + len(train)) as bar:

        def add(statistics: FeatureStatistics, images: Tensor) -> None:
            statistics.add(network(as_files(images).to(trained.setting.device)))
            bar.update(0 if statistics is truth else len(images))

        for batch in prepared(trained, test):
            add(truth, batch)
            add(reconstructions, decoded(trained, model, latent_vectors(trained, model, batch)))
            if joint:
                with quiet_failures(), torch.no_grad():
                    found = fit(model, squared_error, batch, steps=STEPS).x
                add(optimised, decoded(trained, model, found))
        for rows in x.split(BATCH):
            add(samples, decoded(trained, model, rows))
        for batch in prepared(trained, train):
            add(training, batch)
    return Distances(
        network.distance,
        network.about,
        len(test),
        len(train),
        *(frechet_distance(truth, other) for other in (reconstructions, samples, training)),
        optimised=frechet_distance(truth, optimised) if joint else None,
        note=few(network, len(test)),
    )


def add_distances(folder: Path, machine: Machine, features: str, folders: Sequence[Path] = ()) -> None:
    """Measure the distances of a finished run, or of the runs of a sweep, and add them to the test metrics of each.

    The FID of too few images is too large to be compared with a published one, so that it takes 20,480, or all there
    are.
    """
    network = open_features(features, folders)
    kind, images = network.distance, max(IMAGES, PER_FEATURE * network.count)
    for run in [Run(path) for path in sorted(folder.glob("seed-*"))] or [open_run(folder)]:
        result = run.result
        if result is not None and not any(name.startswith(kind) for name in result["test"]):
            found = run_distances(run, machine, features, images, folders=folders).metrics()
            write_json(run.folder / "result.json", {**result, "test": {**result["test"], **found}})


def as_files(images: Tensor) -> Tensor:
    """Return images in [-1, 1] as images in [0, 1] of 256 levels, which image files have."""
    return (255 * shown(images)).round() / 255


def few(network: Features, images: int) -> str:
    if images > network.count:
        return ""
    return (
        f"{images} images are too few for the covariance of {network.count} features: the distance is too large. Use "
        f"-n {PER_FEATURE * network.count} or more if there are as many test images."
    )

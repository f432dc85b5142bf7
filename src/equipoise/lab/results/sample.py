"""Sample a trained generator, and interpolate between the latent vectors of two image files."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.base import Split, batches, spread
from equipoise.lab.data.files.images import MODES, read_image_file
from equipoise.lab.files import parse
from equipoise.lab.recipes.build import USE_SECTIONS
from equipoise.lab.results.png_files import new_png, write_grid
from equipoise.lab.results.trained import Trained, open_trained, progress_bar
from equipoise.lab.runs import checkpoints
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.load import data_of
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.generator.autoencoder import Autoencoder, VariationalAutoencoder
from equipoise.models.generator.decoder import Decoder
from equipoise.models.generator.density import FEWEST, DensitySize, LatentDensity, fit_density
from equipoise.options import require_number
from equipoise.tasks.latent_vectors import fit, generator_in, squared_error

DENSITY = "density-{}.safetensors"  # in the run's folder; {} is "best" or "last", the weights it belongs to
STEPS = 40  # joint steps that find the latent vector of an image
LATENTS = 2000  # number of training images that a density of latent vectors is fitted to
BATCH = 50
MOST_IMAGES = 10_000  # in a picture
LARGEST_SEED = 2**63 - 1  # the largest that torch accepts


def open_generator(
    run: Run, machine: Machine, weights: str, sections: Sequence[str] = USE_SECTIONS, files: bool = False
) -> tuple[Trained, Decoder]:
    """Return a trained run and its generator, or its decoder; raise RunError for a run of another model.

    Args:
        sections: see :func:`~equipoise.lab.results.trained.open_trained`.
        files: whether its images must be those of image files, with 1 or 3 channels.
    """
    trained = open_trained(run, machine, weights, sections=sections)
    try:
        generator = generator_in(trained.model)
    except ValueError:
        raise RunError(
            f"{run} holds a {type(trained.model).__name__}, which does not generate images: give a run of the "
            "model 'generator' or 'mdeq-vae', such as one of the recipe jiio/celeba."
        ) from None
    if files and generator.shape[0] not in MODES:
        raise RunError(f"the run's images have {generator.shape[0]} channels; image files require 1 or 3.")
    return trained, generator


def sample_images(
    run: Run,
    machine: Machine,
    out: Path,
    samples: int = 64,
    *,
    seed: int = 0,
    weights: str = "best",
    latents: int | None = None,
    folders: Sequence[Path] = (),
) -> LatentDensity | None:
    """Draw images and write them as one grid (.png).

    A VAE is sampled from its prior, N(0, I), unless ``latents`` is given. Otherwise, the first call fits a density to
    the latent vectors of training images, see :func:`latent_vectors`, and keeps it in the run's folder; so does a later
    call with another number of ``latents``.

    Args:
        out: file to write; it must not exist.
        samples: number of images.
        seed: seed of the samples.
        latents: number of training images whose latent vectors the density is fitted to. None: 2000, or the prior of
            a VAE.
        folders: folders to look for the training images in first.

    Returns:
        The density, or None for the prior of a VAE.

    Example:
        >>> with this_machine() as machine:
        ...     sample_images(open_run("runs/jiio-celeba-001"), machine, Path("faces.png"))
    """
    require_number("samples", samples, at_least=1, at_most=MOST_IMAGES, whole=True)
    require_number("seed", seed, at_least=0, at_most=LARGEST_SEED, whole=True)
    new_png(out)
    trained, model = open_generator(run, machine, weights)
    x, density = drawn_latents(run, trained, samples, seed=seed, weights=weights, latents=latents, folders=folders)
    write_grid(out, decoded(trained, model, x))
    return density


def drawn_latents(
    run: Run,
    trained: Trained,
    samples: int,
    *,
    seed: int = 0,
    weights: str = "best",
    latents: int | None = None,
    folders: Sequence[Path] = (),
) -> tuple[Tensor, LatentDensity | None]:
    """Draw latent vectors as :func:`sample_images` does; return them with the density they were drawn from."""
    model, draws = generator_in(trained.model), torch.Generator().manual_seed(seed)
    if latents is None and isinstance(trained.model, VariationalAutoencoder):
        return torch.randn(samples, model.latent, generator=draws).to(trained.setting.device), None
    if latents is not None:
        require_number("latents", latents, at_least=FEWEST, whole=True)
    density = density_of(run, trained, model, weights, latents, folders)
    return density.sample(samples, draws), density


def density_of(
    run: Run, trained: Trained, model: Decoder, weights: str, latents: int | None, folders: Sequence[Path]
) -> LatentDensity:
    """Return the density kept in the run's folder or shipped, or fit it, if ``latents`` is another number than then."""
    if (kept := kept_density(run, trained, model, weights, latents)) is not None:
        return kept
    latents = LATENTS if latents is None else latents
    density = new_density(run, trained, model, latents, folders)
    save_density(run.folder / DENSITY.format(weights), density, model, latents)
    return density


def shipped_density(weights: Path) -> Path:
    """Return the file of the density that belongs to a file of weights."""
    return weights.with_suffix(".density.safetensors")


def mark_of(model: Decoder) -> str:
    """Return a checksum of the weights that a density belongs to."""
    return checkpoints.checksum(checkpoints.model_tensors(model), "")


def save_density(file: Path, density: LatentDensity, model: Decoder, latents: int, half: bool = False) -> None:
    """Write a density, with the number of ``latents`` that it was to be fitted to.

    Args:
        half: whether to write matrices in float16, which loading widens.
    """
    tensors = {name: t.half() if half and t.dim() > 1 else t for name, t in density.state_dict().items()}
    checkpoints.save(file, tensors, {"size": asdict(density.size), "weights": mark_of(model), "latents": latents})


def new_density(run: Run, trained: Trained, model: Decoder, latents: int, folders: Sequence[Path]) -> LatentDensity:
    """Fit a density to the latent vectors of training images."""
    found = latents_of(run, trained, model, latents, folders)
    if len(found) < FEWEST:
        raise RunError(
            f"{run} was trained on {len(found)} images; the density of latent vectors requires at least "
            f"{FEWEST}: use a run with a larger data.limit."
        )
    with progress_bar("density", 1) as bar:
        return fit_density(found, each=lambda _: bar.refresh())


def kept_density(
    run: Run, trained: Trained, model: Decoder, weights: str, latents: int | None = None
) -> LatentDensity | None:
    """Return the density kept in the run's folder or shipped, or None if no density belongs to these weights.

    Args:
        latents: number of latent vectors that it must have been fitted to; None for any.
    """
    for file in (run.folder / DENSITY.format(weights), *(() if run.file is None else (shipped_density(run.file),))):
        if file.exists():
            tensors, text = checkpoints.contents(file)
            with checkpoints.fitting(file):
                facts = parse(text)
                count = facts.get("latents", LATENTS)  # earlier versions do not record it
                if facts["weights"] == mark_of(model) and latents in (None, count):
                    density = LatentDensity(DensitySize(**facts["size"])).to(trained.setting.device)
                    density.load_state_dict(tensors)
                    return density.eval()
    return None


def latents_of(run: Run, trained: Trained, model: Decoder, count: int, folders: Sequence[Path]) -> Tensor:
    """Return the latent vectors of evenly spaced training images."""
    images = spread(data_of(run, trained.recipe, folders).train, count)
    found = []
    with progress_bar("latent vectors", len(images)) as bar:
        for truth in prepared(trained, images):
            found.append(latent_vectors(trained, model, truth))
            bar.update(len(truth))
    return torch.cat(found)


def latent_vectors(trained: Trained, model: Decoder, images: Tensor) -> Tensor:
    """Return the latent vectors of images: from the encoder of an autoencoder, otherwise by joint steps."""
    with quiet_failures(), torch.no_grad():
        if isinstance(trained.model, Autoencoder):
            with trained.setting.autocast():
                return trained.model.codes(images).to(images.dtype)
        return fit(model, squared_error, images, steps=STEPS).x


def prepared(trained: Trained, images: Split) -> Iterator[Tensor]:
    """Yield the images of a split in batches, as the model makes them: in [-1, 1], on its device."""
    for batch in batches(images, torch.arange(len(images)).split(BATCH), trained.setting.device):
        yield trained.setting.prepare(trained.task, batch)[0]


def interpolate_images(
    run: Run, machine: Machine, first: Path, second: Path, out: Path, frames: int = 8, weights: str = "best"
) -> list[str]:
    """Write a strip: an image file, images between its latent vector and that of another, and the other file.

    Args:
        first, second: image files, cropped and resized to the images of the generator.
        out: file to write (.png); it must not exist.
        frames: number of images from one latent vector to the other, both included.

    Returns:
        Remarks on how the files were changed.
    """
    require_number("frames", frames, at_least=2, at_most=MOST_IMAGES, whole=True)
    new_png(out)
    trained, model = open_generator(run, machine, weights, files=True)
    read = [
        read_image_file(file, model.shape[0], (model.shape[1], model.shape[2]), note_above=1)
        for file in (first, second)
    ]
    given = torch.stack([image for image, _ in read]).to(trained.setting.device)
    truth = trained.setting.prepare(trained.task, (given,))[0]
    ends = latent_vectors(trained, model, truth)
    weight = torch.linspace(0, 1, frames, device=ends.device)[:, None]
    between = decoded(trained, model, (1 - weight) * ends[0] + weight * ends[1])
    write_grid(out, torch.cat([truth[:1].cpu(), between, truth[1:].cpu()]), columns=frames + 2)
    return [note for _, note in read if note]


def decoded(trained: Trained, model: Decoder, x: Tensor) -> Tensor:
    """Return the images of latent vectors, on the CPU."""
    with quiet_failures(), torch.no_grad(), trained.setting.autocast():
        return torch.cat([model(rows.to(trained.setting.dtype)).cpu() for rows in x.split(BATCH)])

"""Train, store and load the small networks on which `joint.py` measures input optimisation.

    python benchmarks/joint_nets.py [--folder FOLDER] [--again] [--threads N] [NAME ...]

There are four equilibrium networks: two decoders of 16x16 digits, one whose plain iteration converges fast ("easy") and
one where it converges slowly ("hard"); a classifier of MNIST; and an adapter, whose input is a task vector. Each one is
trained once from a fixed seed, in one or two minutes, and its weights are kept in FOLDER (`runs/joint` by default).

Every network has a map `f(z, x, *inputs)` with a tuple of tensors z, a zero initial state `z0(batch)` and a `head(z)`;
x is the input to optimise. `problem(name, index)` returns one of six problems on a batch of held-out data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from time import process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.lab import data
from equipoise.lab.files import whole
from problems import conv, norm, relative_residual
from tables import Row, show

FOLDER = Path(__file__).parents[1] / "runs" / "joint"
SEED = 0
STEPS_OF_RESIDUAL = 8  # plain iterations from zero, after which the table reports the residual
SETTINGS: dict[str, dict[str, float]] = {  # weights trained with other settings are trained again
    "easy": {"gain": 1.0, "penalty": 4.0, "steps": 600, "batch": 16, "lr": 4e-3},
    "hard": {"gain": 6.0, "penalty": 0.0, "steps": 600, "batch": 16, "lr": 4e-3},
}

State = tuple[Tensor, ...]


class Block(nn.Module):
    """A residual block with an injection before its second norm and, optionally, FiLM after its first.

    Args:
        gain: initial weight of the first norm: the larger, the more the state outweighs the injection.
    """

    def __init__(self, channels: int, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.inner, self.outer = norm(4, channels, gain), norm(4, channels)

    def forward(self, z: Tensor, injection: Tensor | float, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y = self.inner(self.first(z))
        if film is not None:
            y = film[0] * y + film[1]
        return torch.relu(self.outer(self.second(torch.relu(y)) + injection) + z)


class TwoBranches(nn.Module):
    """A multiscale map: a residual block on each of two resolutions, then each is fused into the other (MDEQ)."""

    def __init__(self, fine: int, coarse: int, gain: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(channels, gain) for channels in (fine, coarse))
        self.up, self.down = conv(coarse, fine, 1), conv(fine, coarse, stride=2)
        self.norms = nn.ModuleList(norm(4, channels) for channels in (fine, coarse))

    def forward(self, z: State, injections: tuple[Tensor | float, ...]) -> State:
        fine, coarse = (block(*parts) for block, *parts in zip(self.blocks, z, injections, strict=True))
        fused = fine + F.interpolate(self.up(coarse), scale_factor=2.0), coarse + self.down(fine)
        return tuple(normalise(part) for normalise, part in zip(self.norms, fused, strict=True))


def merged(z: State) -> Tensor:
    """Return both branches at the finer resolution, as channels of one tensor."""
    return torch.cat([z[0], F.interpolate(z[1], scale_factor=2.0, mode="bilinear")], dim=1)


class Decoder(nn.Module):
    """Images of 16x16 pixels in [-1, 1] from a latent vector x of 24 numbers, which is injected into both branches."""

    latent = 24
    shapes = ((8, 16, 16), (16, 8, 8))

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.map = TwoBranches(8, 16, gain)
        self.inject = nn.ModuleList(nn.Linear(self.latent, c * h * w) for c, h, w in self.shapes)
        self.to_image = nn.Sequential(conv(24, 16), norm(4, 16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh())

    def f(self, z: State, x: Tensor, *inputs: Tensor) -> State:
        pairs = zip(self.inject, self.shapes, strict=True)
        return self.map(z, tuple(linear(x).view(-1, *shape) for linear, shape in pairs))

    def z0(self, batch: int) -> State:
        return tuple(torch.zeros(batch, *shape) for shape in self.shapes)

    def head(self, z: State) -> Tensor:
        return self.to_image(merged(z))


Net = Decoder


# --- data -------------------------------------------------------------------------------------------------------------


@cache
def images(name: str, size: int, held_out: bool) -> tuple[Tensor, Tensor]:
    """Return the images of a split, pixels in [0, 1], and their labels."""
    found = data.load(name, validation=0)
    split = found.test if held_out else found.train
    pixels, labels = split.read(torch.arange(len(split)))
    pixels = pixels.float() / 255
    return (pixels if pixels.shape[-1] == size else F.interpolate(pixels, size=size, mode="bilinear")), labels


def digits(held_out: bool) -> Tensor:
    """Return scikit-learn's digits at 16x16, pixels in [-1, 1]."""
    return 2 * images("digits", 16, held_out)[0] - 1


# --- training ---------------------------------------------------------------------------------------------------------

Objective = Callable[[], tuple[Tensor, State, tuple[Tensor, ...]]]  # a loss, the equilibrium, and the inputs of f


def equilibrium(net: Net, *inputs: Tensor) -> State:
    """Return z* for training: at most 12 steps of Anderson acceleration, then 4 recorded ones for the gradient."""
    limit, gradient = eq.Tolerance(relative=1e-3, max_steps=12), eq.PhantomGradient(steps=4)
    z0 = net.z0(len(inputs[0]))
    return eq.fixed_point(net.f, z0, *inputs, tolerance=limit, gradient=gradient, on_failure="ignore").value


def solved(net: Net, *inputs: Tensor) -> State:
    """Return z* for scoring: 60 plain iterations at most."""
    limit = eq.Tolerance(relative=1e-5, max_steps=60)
    z0 = net.z0(len(inputs[0]))
    with torch.no_grad():
        return eq.fixed_point(net.f, z0, *inputs, solver=eq.Picard(), tolerance=limit, on_failure="ignore").value


def residual(net: Net, *inputs: Tensor) -> float:
    """Return the mean relative residual after eight plain iterations from zero."""
    with torch.no_grad():
        z = net.z0(len(inputs[0]))
        for _ in range(STEPS_OF_RESIDUAL):
            z = net.f(z, *inputs)
        return float(relative_residual(z, net.f(z, *inputs)).mean())


def fit(name: str, net: Net, objective: Objective, extra: nn.Module | None = None) -> None:
    """Minimise the objective with Adam; `extra` is a module that is trained along and thrown away."""
    from tqdm import tqdm

    settings = SETTINGS[name]
    parameters = [*net.parameters(), *(extra.parameters() if extra is not None else ())]
    steps = int(settings["steps"])
    optimizer = torch.optim.Adam(parameters, lr=settings["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings["lr"], total_steps=steps)
    bar = tqdm(range(steps), desc=name, unit="step", disable=not sys.stderr.isatty(), leave=False)
    for _ in bar:
        loss, z, inputs = objective()
        bar.set_postfix(loss=f"{loss.item():.4f}")
        if settings["penalty"]:
            point, fixed = tuple(part.detach() for part in z), (part.detach() for part in inputs)
            loss = loss + settings["penalty"] * eq.jacobian_penalty(net.f, point, *fixed)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def train_decoder(name: str) -> tuple[Net, Row]:
    """Train a decoder together with a small convolutional encoder."""
    net, batch, train, test = Decoder(SETTINGS[name]["gain"]), int(SETTINGS[name]["batch"]), digits(False), digits(True)
    encoder = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, net.latent)),
    )

    def objective() -> tuple[Tensor, State, tuple[Tensor, ...]]:
        targets = train[torch.randint(len(train), (batch,))]
        x = encoder(targets)
        z = equilibrium(net, x)
        return F.mse_loss(net.head(z), targets), z, (x,)

    fit(name, net, objective, encoder)
    with torch.no_grad():
        x = encoder(test)
        loss = F.mse_loss(net.head(solved(net, x)), test)
    return net, {"data": "digits 16x16", "held-out loss": loss.item(), "residual": residual(net, x)}


TRAINERS: dict[str, Callable[[str], tuple[Net, Row]]] = {"easy": train_decoder, "hard": train_decoder}


def make(name: str) -> Net:
    return Decoder(SETTINGS[name]["gain"])


def stored(name: str, folder: Path = FOLDER, again: bool = False) -> tuple[Net, Row]:
    """Return a trained network, frozen, and its row of the table; train and store it if it is not in the folder."""
    file = folder / f"{name}.pt"
    content = torch.load(file, weights_only=True) if file.exists() and not again else {}
    if content.get("settings") != SETTINGS[name]:
        torch.manual_seed(SEED)
        began = process_time()
        net, row = TRAINERS[name](name)
        row = {"network": name, **row, "seconds": process_time() - began}
        content = {"settings": SETTINGS[name], "row": row, "weights": net.state_dict()}
        with whole(file) as part:
            torch.save(content, part)
    net = make(name)
    net.load_state_dict(content["weights"])
    return net.eval().requires_grad_(False), content["row"]


@cache
def load(name: str, folder: Path = FOLDER) -> Net:
    return stored(name, folder)[0]


def decoder(name: str, folder: Path = FOLDER) -> Net:
    """Return the trained decoder "easy" or "hard"."""
    return load(name, folder)


# --- problems ---------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Arguments of an input optimisation: `min_x loss(z, x, *inputs)` subject to `z = f(z, x, *inputs)`."""

    f: Callable[..., State]
    loss: Callable[..., Tensor]  # one cost per sample
    x0: Tensor
    z0: State
    inputs: tuple[Tensor, ...]
    constraint: str | None = None  # name of a constraint of equipoise


def batch_of(samples: Tensor, index: int, size: int) -> Tensor:
    if not 0 <= index < len(samples) // size:
        raise ValueError(f"index must be from 0 to {len(samples) // size - 1}, got {index}.")
    return samples[index * size : (index + 1) * size]


def mean_square(difference: Tensor) -> Tensor:
    return difference.flatten(1).square().mean(dim=1)


def blur(pictures: Tensor) -> Tensor:
    """Return the images convolved with a 5x5 Gaussian kernel of standard deviation 1."""
    weights = torch.exp(-torch.arange(-2.0, 3.0).square() / 2)
    kernel = torch.outer(weights, weights) / weights.sum() ** 2
    return F.conv2d(F.pad(pictures, (2, 2, 2, 2), mode="replicate"), kernel[None, None])


def reconstruction(name: str, index: int, folder: Path) -> Problem:
    """Find the latent vectors of eight digits: whole, without a square of 6x6 pixels, or blurred."""
    net = decoder({"inpainting": "hard", "deblurring": "easy"}.get(name, name), folder)
    targets = batch_of(digits(True), index, 8)
    start = torch.zeros(8, net.latent), net.z0(8)
    if name == "inpainting":
        mask, random = torch.ones_like(targets), torch.Generator().manual_seed(index)
        for sample, (row, column) in zip(mask, torch.randint(11, (8, 2), generator=random).tolist(), strict=True):
            sample[:, row : row + 6, column : column + 6] = 0

        def masked(z: State, x: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
            return mean_square(mask * net.head(z) - seen)

        return Problem(net.f, masked, *start, (mask * targets, mask))
    if name == "deblurring":
        return Problem(net.f, lambda z, x, seen: mean_square(blur(net.head(z)) - seen), *start, (blur(targets),))
    return Problem(net.f, lambda z, x, seen: mean_square(net.head(z) - seen), *start, (targets,))


PROBLEMS: dict[str, Callable[[str, int, Path], Problem]] = {
    **dict.fromkeys(("easy", "hard", "inpainting", "deblurring"), reconstruction),
}


def problem(name: str, index: int, folder: Path = FOLDER) -> Problem:
    """Return a problem on one batch of held-out data; batches with different indices share no sample.

    Args:
        name: key of `PROBLEMS`.
        index: number of the batch, from 0.
        folder: folder of the trained networks.
    """
    return PROBLEMS[name](name, index, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the networks of the benchmark of input optimisation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"networks: {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the weights (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="train again, even if weights are stored")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SETTINGS):
        parser.error(f"unknown network {', '.join(sorted(unknown))}; allowed: {', '.join(SETTINGS)}.")
    torch.set_num_threads(arguments.threads)
    names = arguments.names or list(SETTINGS)
    rows = [stored(name, arguments.folder, arguments.again)[1] for name in names]
    show(f"Trained networks; residual after {STEPS_OF_RESIDUAL} plain iterations, processor seconds", rows)


if __name__ == "__main__":
    main()

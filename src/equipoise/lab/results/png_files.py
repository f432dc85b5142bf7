"""PNG files: a new one for a command to write, an image without conversion, a grid of images."""

from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.files import whole
from equipoise.lab.printable import printable
from equipoise.tasks.drawing import shown


def new_png(out: Path) -> Path:
    """Return the file for the option ``--out``; raise ValueError if it exists or does not end in .png."""
    if out.suffix != ".png":
        raise ValueError(f"--out is {printable(out)}; it must be a file that ends in .png.")
    if out.exists():
        raise ValueError(f"{printable(out)} already exists: remove it, or give another file with --out.")
    return out


def write_png(path: Path, values: Tensor) -> None:
    """Write an image (height, width) or (height, width, 3) without conversion."""
    from PIL import Image

    Image.fromarray(values.contiguous().numpy()).save(path, "PNG")


def write_grid(out: Path, images: Tensor, columns: int | None = None, scale: int | None = None) -> None:
    """Write images in [-1, 1] side by side, enlarged if they are small, with a narrow white border."""
    columns = columns or max(1, round(len(images) ** 0.5))
    height, width = images.shape[2:]
    scale = scale or max(1, 96 // max(height, width))
    pixels = (255 * shown(images)).round().byte().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]
    rows = -(-len(images) // columns)
    high, wide = height * scale + 2, width * scale + 2
    grid = torch.full((rows * high + 2, columns * wide + 2, 3), 255, dtype=torch.uint8)
    for i, image in enumerate(pixels):
        top, left = 2 + i // columns * high, 2 + i % columns * wide
        grid[top : top + high - 2, left : left + wide - 2] = image.permute(1, 2, 0)
    with whole(out) as part:
        write_png(part, grid)

"""Street scenes drawn by the page itself, as examples that need no data set."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.lab.data.files.images import MODES, pixels

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Color = tuple[int, int, int]

SKIES: tuple[Color, ...] = ((150, 185, 220), (205, 205, 210), (235, 190, 150), (120, 160, 215))
WALLS: tuple[Color, ...] = ((150, 110, 90), (180, 165, 140), (110, 100, 105), (170, 130, 110), (125, 120, 110))
CARS: tuple[Color, ...] = ((170, 40, 40), (40, 60, 130), (220, 220, 220), (50, 50, 55), (200, 170, 60))
PAVEMENT, ROAD, LINE, POLE, SIGN = (150, 145, 145), (95, 95, 100), (225, 225, 220), (110, 110, 105), (200, 60, 50)
GRAIN = 5.0  # standard deviation of the noise of a pixel


def drawn(count: int, shape: tuple[int, int, int]) -> Tensor:
    """Return scenes, uint8 (count, channels, height, width), the same ones at every call."""
    from PIL import Image

    channels, height, width = shape
    images = []
    for seed in range(count):
        resized = Scene(seed).image.resize((width, height), Image.Resampling.BILINEAR)
        image = pixels(resized.convert(MODES[channels])).float()
        grain = torch.randn(1, height, width, generator=torch.Generator().manual_seed(seed))
        images.append((image + GRAIN * grain).round().clamp(0, 255).byte())
    return torch.stack(images)


class Scene:
    """A street that leads to the horizon: sky, houses, pavement, road, trees, cars, people, a sign.

    Things shrink towards the vanishing point: ``near`` is 1 at the sides of the image and 0 there.
    """

    def __init__(self, seed: int, width: int = 480, height: int = 360):
        from PIL import Image, ImageDraw

        self.random, self.width, self.height = random.Random(seed), width, height
        self.horizon = int(height * self.random.uniform(0.42, 0.5))
        self.middle = int(width * self.random.uniform(0.42, 0.58))
        self.image: Image = Image.new("RGB", (width, height), self.random.choice(SKIES))
        self.draw: ImageDraw = ImageDraw.Draw(self.image)
        for side in (-1, 1):
            self.houses(side)
        self.ground()
        for thing, most in ((self.tree, 4), (self.car, 3), (self.person, 3)):
            for _ in range(self.random.randint(1, most)):
                thing()
        x = self.random.choice((0.12, 0.88)) * width
        self.draw.rectangle((x - 2, self.horizon - 90, x + 2, self.horizon + 60), POLE)
        self.draw.ellipse((x - 14, self.horizon - 104, x + 14, self.horizon - 76), SIGN)

    def houses(self, side: int) -> None:
        """Draw a row of houses from one edge of the image to the vanishing point."""
        tall = self.height * self.random.uniform(0.3, 0.45)
        at = self.width if side > 0 else 0
        while (near := (at - self.middle) * side / (self.width / 2)) > 0.05:
            wide = max(8.0, self.random.uniform(60, 100) * near)
            left, right = sorted((at, at - side * wide))
            top, bottom = self.horizon - tall * near * self.random.uniform(0.8, 1.2), self.horizon + 44 * near
            wall = self.random.choice(WALLS)
            self.draw.rectangle((left, top, right, bottom), wall)
            self.windows((left, top, right, bottom), 9 * near, wall)
            at -= side * wide

    def windows(self, house: tuple[float, float, float, float], size: float, wall: Color) -> None:
        left, top, right, bottom = house
        shade = (wall[0] // 2, wall[1] // 2, wall[2] // 2)
        y = top + size
        while size >= 3 and y + size < bottom - size:
            x = left + size
            while x + size < right:
                self.draw.rectangle((x, y, x + size, y + 1.3 * size), shade)
                x += 2.2 * size
            y += 2.6 * size

    def ground(self) -> None:
        width, height, horizon, middle = self.width, self.height, self.horizon, self.middle
        edge = horizon + 40
        self.draw.polygon([(0, height), (0, edge), (middle, horizon), (width, edge), (width, height)], PAVEMENT)
        half = width * self.random.uniform(0.55, 0.7)
        corners = [(middle - half, height), (middle - 4, horizon), (middle + 4, horizon), (middle + half, height)]
        self.draw.polygon(corners, ROAD)
        for k in range(7):
            top, bottom = (horizon + (height - horizon) * ((k + part) / 7) ** 2 for part in (0.15, 0.6))
            wide = 2 + k / 2
            corners = [(middle - 1, top), (middle + 1, top), (middle + wide, bottom), (middle - wide, bottom)]
            self.draw.polygon(corners, LINE)

    def tree(self) -> None:
        near = self.random.uniform(0.35, 0.9)
        x = self.middle + self.random.choice((-1, 1)) * near * self.width * 0.46
        ground, r = self.horizon + 34 * near, 34 * near
        self.draw.rectangle((x - 3 * near, ground - 2.4 * r, x + 3 * near, ground), (80, 65, 50))
        for _ in range(7):
            dx, dy = (0.7 * self.random.uniform(-r, r) for _ in range(2))
            green = self.random.randint(50, 85), self.random.randint(90, 125), self.random.randint(40, 65)
            self.circle(x + dx, ground - 3 * r + dy, 0.7 * r, green)

    def car(self) -> None:
        near = self.random.uniform(0.2, 0.85)
        y, w = self.horizon + (self.height - self.horizon) * near * 0.8, 95 * near
        x = self.middle + self.random.choice((-1, 1)) * self.width * 0.28 * near
        paint = self.random.choice(CARS)

        def across(half_low: float, low: float, half_high: float, high: float) -> list[tuple[float, float]]:
            sides = ((-half_low, low), (-half_high, high), (half_high, high), (half_low, low))
            return [(x + dx * w, y - dy * w) for dx, dy in sides]

        self.draw.ellipse((x - w / 2, y - 0.06 * w, x + w / 2, y + 0.1 * w), (60, 60, 62))
        self.draw.rounded_rectangle((x - w / 2, y - 0.42 * w, x + w / 2, y), 0.1 * w, paint)
        self.draw.polygon(across(0.36, 0.4, 0.28, 0.68), paint)
        self.draw.polygon(across(0.3, 0.42, 0.24, 0.63), (70, 85, 100))
        for wheel in (x - 0.34 * w, x + 0.34 * w):
            self.draw.rectangle((wheel - 0.08 * w, y - 0.06 * w, wheel + 0.08 * w, y + 0.06 * w), (30, 30, 30))

    def person(self) -> None:
        near = self.random.uniform(0.4, 1.0)
        x = self.middle + self.random.choice((-1, 1)) * self.width * 0.42 * near
        ground, h = self.horizon + 48 * near, 62 * near
        coat = self.random.randint(40, 130), self.random.randint(40, 90), self.random.randint(50, 120)
        self.draw.rectangle((x - 0.09 * h, ground - 0.45 * h, x + 0.09 * h, ground), (45, 45, 60))
        self.draw.rounded_rectangle((x - 0.13 * h, ground - 0.85 * h, x + 0.13 * h, ground - 0.4 * h), 0.06 * h, coat)
        self.circle(x, ground - 0.93 * h, 0.09 * h, (205, 165, 140))

    def circle(self, x: float, y: float, r: float, color: Color) -> None:
        self.draw.ellipse((x - r, y - r, x + r, y + r), color)

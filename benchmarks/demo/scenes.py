"""Draws the pictures that the demo model is trained and measured on: one to three shapes on a plain background."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle")
POSITIONS = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
BACKGROUNDS = ("white", "black", "gray")
COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 30, 30), (214, 39, 40), (200, 10, 20)),
    "green": ((0, 128, 0), (0, 255, 0), (44, 160, 44), (30, 180, 60)),
    "blue": ((0, 0, 255), (30, 60, 220), (31, 100, 190), (20, 30, 160)),
    "yellow": ((255, 255, 0), (240, 215, 30), (255, 225, 25), (250, 230, 60)),
    "orange": ((255, 165, 0), (255, 127, 14), (255, 140, 0), (240, 120, 20)),
    "purple": ((128, 0, 128), (135, 40, 170), (148, 90, 190), (150, 30, 210)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (245, 245, 245)),
    "gray": ((128, 128, 128), (110, 110, 115), (150, 150, 150)),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One drawn shape; the centre and the radius are fractions of the width, the height and the shorter side."""

    kind: str
    color: str
    row: int
    column: int
    x: float
    y: float
    radius: float

    @property
    def position(self) -> str:
        """The word for the shape's cell in the 3 x 3 grid."""
        return POSITIONS[self.row][self.column]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The contents of a picture: its shapes in reading order and its background colour."""

    shapes: tuple[Shape, ...]
    background: str


@dataclass(frozen=True, kw_only=True)
class Scene(Layout):
    """A layout and its picture."""

    image: Image.Image


def draw_scene(rng: random.Random, width: int = 320, height: int = 240, *, crowded: bool = False) -> Scene:
    """Draw a random scene; the same generator state gives the same picture."""
    layout = random_layout(rng, width / height, crowded=crowded)
    image = render(layout, rng, width, height)
    return Scene(shapes=layout.shapes, background=layout.background, image=_wear(image, rng))


def random_layout(rng: random.Random, aspect: float = 1.0, *, crowded: bool = False) -> Layout:
    """Place one to three shapes, or up to six, in different cells, each with its centre well inside its cell."""
    background = rng.choices(BACKGROUNDS, (70, 15, 15))[0]
    palette = [color for color in COLORS if color != background]
    count = rng.randint(3, 6) if crowded else rng.choices((1, 2, 3), (3, 3, 4))[0]
    if count == 1 and rng.random() < 0.4:
        x, y = rng.uniform(0.46, 0.54), rng.uniform(0.46, 0.54)
        big = _random_shape(rng, palette, 1, 1, rng.uniform(0.2, 0.43), x, y)
        return Layout(shapes=(big,), background=background)
    shapes: list[Shape] = []
    for cell in sorted(rng.sample(range(9), count)):
        for _ in range(20):
            shape = _place(rng, palette, *divmod(cell, 3), aspect)
            if not any(_touch(shape, other, aspect) for other in shapes):
                shapes.append(shape)
                break
    return Layout(shapes=tuple(shapes), background=background)


def render(layout: Layout, rng: random.Random, width: int, height: int) -> Image.Image:
    """Draw the layout with slightly varied colours, angles and outlines."""
    image = Image.new("RGB", (width, height), _shade(layout.background, rng))
    canvas = ImageDraw.Draw(image)
    side = min(width, height)
    outline = rng.random() < 0.15
    for shape in layout.shapes:
        fill = _shade(shape.color, rng)
        edge = (
            rng.choice(((0, 0, 0), (60, 60, 60), (fill[0] // 2, fill[1] // 2, fill[2] // 2))) if outline else fill
        )
        stroke = rng.randint(1, max(1, side // 110))
        x, y, r = shape.x * width, shape.y * height, shape.radius * side
        if shape.kind == "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=edge, width=stroke)
        else:
            canvas.polygon(_corners(shape.kind, rng, x, y, r), fill=fill, outline=edge, width=stroke)
    return image


def _random_shape(
    rng: random.Random, palette: list[str], row: int, column: int, radius: float, x: float, y: float
) -> Shape:
    kind, color = rng.choice(SHAPES), rng.choice(palette)
    return Shape(kind=kind, color=color, row=row, column=column, x=x, y=y, radius=radius)


def _place(rng: random.Random, palette: list[str], row: int, column: int, aspect: float) -> Shape:
    radius = rng.uniform(0.11, 0.15) if rng.random() < 0.6 else rng.uniform(0.15, 0.23)
    x = _within(rng, column, radius / max(aspect, 1.0))
    y = _within(rng, row, radius * min(aspect, 1.0))
    return _random_shape(rng, palette, row, column, radius, x, y)


def _within(rng: random.Random, cell: int, reach: float) -> float:
    """A coordinate near the middle of a third, pushed inwards where the shape would leave the picture."""
    middle = (cell + 0.5 + rng.uniform(-0.26, 0.26)) / 3
    return min(max(middle, reach + 0.01), 0.99 - reach)


def _touch(a: Shape, b: Shape, aspect: float) -> bool:
    across, down = (aspect, 1.0) if aspect > 1 else (1.0, 1 / aspect)
    distance = math.hypot((a.x - b.x) * across, (a.y - b.y) * down)
    return distance < 1.12 * (a.radius + b.radius)


def _corners(kind: str, rng: random.Random, x: float, y: float, r: float) -> list[tuple[float, float]]:
    if kind == "square":
        half = r * 0.86
        corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
    else:
        half, foot = r * rng.uniform(0.85, 1.05), r * rng.uniform(0.65, 0.85)
        corners = [(0.0, -r), (half, foot), (-half, foot)]
    angle = math.radians(rng.uniform(-12, 12)) if rng.random() < 0.5 else 0.0
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x + cos * dx - sin * dy, y + sin * dx + cos * dy) for dx, dy in corners]


def _shade(color: str, rng: random.Random) -> RGB:
    red, green, blue = (min(255, max(0, level + rng.randint(-10, 10))) for level in rng.choice(COLORS[color]))
    return red, green, blue


def _wear(image: Image.Image, rng: random.Random) -> Image.Image:
    """Now and then, the marks that real pictures carry: JPEG artefacts or grain."""
    chance = rng.random()
    if chance < 0.1:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(55, 95))
        return Image.open(buffer).convert("RGB")
    if chance < 0.2:
        grain = np.frombuffer(rng.randbytes(image.width * image.height * 3), np.uint8) % rng.randint(4, 24)
        pixels = np.asarray(image).astype(np.int16) + grain.reshape(image.height, image.width, 3) - 8
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return image

"""Scenes: six objects, one of each colour, on a white square of 75 × 75 pixels.

An object is a square of 11 × 11 pixels, or the disc of the pixels at most 5 from its centre. Objects are drawn in the
order of ``COLOURS``, later ones over earlier ones. Centres are at least 10 apart, so objects may touch or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.random import RandomState

PIXELS = 75
RADIUS = 5
PATCH = 15
APART = 2 * RADIUS  # least distance of two centres
WHITE = 255
#: RGB.
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "orange": (255, 156, 0),
    "gray": (128, 128, 128),
    "yellow": (255, 255, 0),
}


class Thing(NamedTuple):
    """An object with its centre, column ``x`` and row ``y``; a square, or else a disc."""

    x: int
    y: int
    square: bool


#: One object of each colour, in the order of ``COLOURS``.
Scene = tuple[Thing, ...]


class Stream:
    """The published stream of draws: Python's generator and numpy's frozen legacy one, both from one seed.

    Python's draws shapes, and the colours and subtypes of questions; numpy's draws centres and the pairs of ternary
    questions.
    """

    def __init__(self, seed: int) -> None:
        self.python, self.numpy = Random(seed), RandomState(seed)


def free_centre(stream: Stream, taken: list[Thing], cells: np.ndarray) -> tuple[int, int]:
    """Uniform where the object is within the image, drawn again until it is ``APART`` from all others."""
    while True:
        x, y = stream.numpy.randint(RADIUS, PIXELS - RADIUS, 2).tolist()
        if all((x - other.x) ** 2 + (y - other.y) ** 2 >= APART**2 for other in taken):
            return x, y


def grid_centre(stream: Stream, taken: list[Thing], cells: np.ndarray) -> tuple[int, int]:
    """The middle of the next cell of ``cells``: each object has one of the 5 × 5 patches of 15 × 15 pixels."""
    row, column = divmod(int(cells[len(taken)]), PIXELS // PATCH)
    return PATCH * column + PATCH // 2, PATCH * row + PATCH // 2


PLACEMENTS: Mapping[str, Callable[[Stream, list[Thing], np.ndarray], tuple[int, int]]] = {
    "free": free_centre,
    "grid": grid_centre,
}


def draw_scene(stream: Stream, placement: str) -> Scene:
    """Draws the centre and then the shape of every object."""
    # The published stream has no draw for cells.
    cells = stream.numpy.permutation((PIXELS // PATCH) ** 2) if placement == "grid" else np.empty(0, int)
    things: list[Thing] = []
    for _ in COLOURS:
        x, y = PLACEMENTS[placement](stream, things, cells)
        things.append(Thing(x, y, square=stream.python.random() < 0.5))
    return tuple(things)


def paint(scene: Scene) -> np.ndarray:
    """The image, uint8 (75, 75, 3): rows, columns, RGB."""
    image = np.full((PIXELS, PIXELS, 3), WHITE, np.uint8)
    offsets = np.arange(-RADIUS, RADIUS + 1)
    disc = offsets[:, None] ** 2 + offsets**2 <= RADIUS**2  # (11, 11)
    for thing, colour in zip(scene, COLOURS.values(), strict=True):
        window = image[thing.y - RADIUS : thing.y + RADIUS + 1, thing.x - RADIUS : thing.x + RADIUS + 1]
        window[... if thing.square else disc] = colour
    return image

"""Rendering of the tasks: filled shapes on an array of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Frame: TypeAlias = NDArray[np.uint8]
Color: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]

BLACK, GREY, LIGHT, RED, GREEN, BLUE, BROWN = (
    (30, 30, 30),
    (150, 150, 150),
    (230, 230, 230),
    (204, 60, 60),
    (60, 160, 80),
    (60, 90, 190),
    (202, 152, 101),
)


class Canvas:
    """White canvas to draw filled shapes on.

    Args:
        width: width in pixels.
        height: height in pixels.

    Attributes:
        pixels: the image, uint8 ``[height, width, 3]``.

    Points are pairs of x (rightwards) and y (downwards), in pixels. Shapes are clipped to the canvas.

    Example:
        >>> canvas = Canvas(4, 2)
        >>> canvas.rectangle((0, 0), (2, 1), BLACK)
        >>> (canvas.pixels[..., 0] == 30).astype(int)
        array([[1, 1, 0, 0],
               [0, 0, 0, 0]])
    """

    def __init__(self, width: int = 300, height: int = 200) -> None:
        self.pixels: Frame = np.full((height, width, 3), 255, dtype=np.uint8)
        self._y, self._x = np.mgrid[:height, :width] + 0.5

    def polygon(self, corners: Sequence[Point], color: Color) -> None:
        """Fill a convex polygon, with corners in clockwise or counterclockwise order."""
        points = np.asarray(corners, dtype=np.float64)
        edges = np.roll(points, -1, 0) - points
        sides = np.stack(
            [dx * (self._y - y) - dy * (self._x - x) for (x, y), (dx, dy) in zip(points, edges, strict=True)]
        )
        self.pixels[(sides >= 0).all(0) | (sides <= 0).all(0)] = color

    def rectangle(self, corner: Point, opposite: Point, color: Color) -> None:
        """Fill an axis-aligned rectangle."""
        (left, top), (right, bottom) = corner, opposite
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], color)

    def circle(self, center: Point, radius: float, color: Color) -> None:
        """Fill a circle."""
        self.pixels[(self._x - center[0]) ** 2 + (self._y - center[1]) ** 2 <= radius**2] = color

    def line(self, start: Point, end: Point, width: float, color: Color) -> None:
        """Draw a thick line with flat ends."""
        (x, y), (to_x, to_y) = start, end
        length = max(float(np.hypot(to_x - x, to_y - y)), 1e-9)
        across, down = -(to_y - y) / length * width / 2, (to_x - x) / length * width / 2
        self.polygon(
            [
                (x + across, y + down),
                (to_x + across, to_y + down),
                (to_x - across, to_y - down),
                (x - across, y - down),
            ],
            color,
        )

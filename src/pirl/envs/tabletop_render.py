"""Pictures of many tables at once: flat boxes on a square, painted from back to front.

A picture is first painted as numbers of colours, one byte a pixel and all tables together, and coloured at the end.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pirl.records import Array

COLOURS: dict[str, tuple[int, int, int]] = {
    "table": (245, 240, 230),
    "red": (220, 40, 40),
    "blue": (50, 80, 230),
    "green": (30, 150, 70),
    "yellow": (240, 200, 40),
    "left": (190, 190, 200),
    "right": (170, 185, 175),
    "top": (200, 185, 185),
    "cyan": (150, 215, 220),
    "pink": (240, 180, 205),
    "olive": (175, 175, 110),
    "closed": (20, 20, 20),
    "open": (120, 120, 120),
    "beyond": (60, 60, 70),
}
"""What there is to see: the table and what is beyond it, blocks, zones by their names, the gripper closed and open."""
NUMBERS = {name: number for number, name in enumerate(COLOURS)}
"""The number of each colour."""
_PALETTE = np.array(list(COLOURS.values()), np.uint8)

ZONE_HALF, BLOCK_HALF, GRIPPER_HALF = 0.12, 0.085, 0.04
"""Half the width of each box; the table's is 0.5."""
WRIST_REACH = 0.2
"""How far the wrist camera sees from the gripper's centre."""


class Scene(NamedTuple):
    """Objects on n tables. Places are (x, y) in [0, 1]; colours are numbers of `NUMBERS`."""

    zones: Float[Array, "n Z 2"]
    zone_colours: Int[Array, "Z"]
    blocks: Float[Array, "n K 2"]
    block_colours: Int[Array, "n K"]
    gripper: Float[Array, "n 2"]
    closed: Bool[Array, "n"]


def table_pictures(scene: Scene, size: int) -> UInt8[Array, "n size size 3"]:
    """The whole tables from above: x to the right, y down."""
    pixels = np.broadcast_to(_pixels(size), (len(scene.gripper), size))
    return _PALETTE[_paint(scene, pixels, pixels)]


def wrist_pictures(scene: Scene, size: int) -> UInt8[Array, "n size size 3"]:
    """What is around the grippers, at the same orientation; beyond the table it is dark."""
    offsets = (2 * _pixels(size) - 1) * np.float32(WRIST_REACH)
    columns, rows = scene.gripper[:, :1] + offsets, scene.gripper[:, 1:] + offsets
    numbers = _paint(scene, columns, rows)
    beyond = ((columns < 0) | (columns > 1))[:, None, :] | ((rows < 0) | (rows > 1))[:, :, None]
    numbers[beyond] = NUMBERS["beyond"]
    return _PALETTE[numbers]


def _pixels(size: int) -> Float[Array, "size"]:
    """The middle of each pixel."""
    return (np.arange(size, dtype=np.float32) + 0.5) / size


def _paint(scene: Scene, columns: Float[Array, "n W"], rows: Float[Array, "n H"]) -> UInt8[Array, "n H W"]:
    """The colour of every pixel, given where its column and its row are on the table."""
    numbers = np.full((len(rows), rows.shape[1], columns.shape[1]), NUMBERS["table"], np.uint8)

    def box(centre: Array, half: float, number: Array) -> None:
        inside = (np.abs(rows - centre[:, 1:]) < half)[:, :, None] & (np.abs(columns - centre[:, :1]) < half)[:, None]
        np.copyto(numbers, number.astype(np.uint8).reshape(-1, 1, 1), where=inside)

    for zone, number in enumerate(scene.zone_colours):
        box(scene.zones[:, zone], ZONE_HALF, np.full(len(rows), number))
    for block in range(scene.blocks.shape[1]):
        box(scene.blocks[:, block], BLOCK_HALF, scene.block_colours[:, block])
    box(scene.gripper, GRIPPER_HALF, np.where(scene.closed, NUMBERS["closed"], NUMBERS["open"]))
    return numbers

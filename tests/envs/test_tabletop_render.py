"""Pictures of the tabletop against a painter that paints one pixel at a time."""

import numpy as np
import pytest

from pirl.envs.config import TabletopConfig
from pirl.envs.tabletop import LEVELS, Tabletop
from pirl.envs.tabletop_render import COLOURS
from pirl.records import Context

NAMES = list(COLOURS)


def scene(level: str, size: int, count: int = 6, **options: object) -> Tabletop:
    table = Tabletop(TabletopConfig(level=level, image_size=size, **options), count)
    table.begin(range(count), [Context(table.tasks[i % len(table.tasks)], i) for i in range(count)])
    rng = np.random.default_rng(0)
    table.state.gripper[:] = rng.uniform(0, 1, (count, 2))  # near the edges too
    table.state.closed[::2] = True
    return table


def colour_at(table: Tabletop, slot: int, x: float, y: float) -> tuple[int, int, int]:
    """What is on top at a point of a table: the last box that covers it."""
    state, name = table.state, "table"
    boxes = [(place, 0.12, word) for place, word in zip(state.zones[slot], table.level.zones, strict=True)]
    boxes += [(p, 0.085, NAMES[c]) for p, c in zip(state.blocks[slot], state.colours[slot], strict=True)]
    boxes.append((state.gripper[slot], 0.04, "closed" if state.closed[slot] else "open"))
    for (centre_x, centre_y), half, word in boxes:
        if abs(np.float32(x) - centre_x) < half and abs(np.float32(y) - centre_y) < half:
            name = word
    return COLOURS[name]


@pytest.mark.parametrize("level", LEVELS)
def test_camera_sees_what_is_on_the_table(level: str) -> None:
    size = 24
    table = scene(level, size)
    middles = (np.arange(size, dtype=np.float32) + 0.5) / size
    for slot, observation in enumerate(table.observe(range(6))):
        wanted = [[colour_at(table, slot, x, y) for x in middles] for y in middles]
        picture = observation["observation/image"]
        assert picture.dtype == np.uint8
        np.testing.assert_array_equal(picture, np.array(wanted))


def test_any_size_shows_the_same_table() -> None:
    """Each pixel of 24 x 24 is the middle one of 5 x 5 at 120 x 120; the picture for people has y up."""
    small, large = scene("two_blocks", 24), scene("two_blocks", 120)
    for slot in range(6):
        coarse, fine = (t.observe([slot])[0]["observation/image"] for t in (small, large))
        np.testing.assert_array_equal(fine[2::5, 2::5], coarse)
        np.testing.assert_array_equal(small.picture(slot, size=120)[::-1], fine)
    assert small.picture(0).shape == (160, 160, 3)


def test_wrist_camera_is_a_crop_around_the_gripper() -> None:
    size = 20
    table = scene("colours", size, wrist_camera=True)
    offsets = (2 * (np.arange(size) + 0.5) / size - 1) * 0.2
    compared = beyond = 0
    for slot, observation in enumerate(table.observe(range(6))):
        picture, (x, y) = observation["observation/wrist_image"], table.state.gripper[slot].astype(float)
        assert picture.shape == (size, size, 3)
        for row, dy in enumerate(offsets):
            for column, dx in enumerate(offsets):
                inside = 0 <= x + dx <= 1 and 0 <= y + dy <= 1
                wanted = colour_at(table, slot, x + dx, y + dy) if inside else COLOURS["beyond"]
                compared += tuple(picture[row, column]) == wanted
                beyond += not inside
    assert compared >= 6 * size * size - 6  # a pixel on the very edge of a box may fall to either side
    assert beyond > 100
    assert "observation/wrist_image" not in scene("colours", size).observe([0])[0]


def test_looking_at_some_slots_is_looking_at_all() -> None:
    table = scene("stitch", 24)
    every = table.observe(range(6))
    for slots in ([4], [5, 0, 2]):
        for slot, seen in zip(slots, table.observe(slots), strict=True):
            assert all(np.array_equal(seen[key], every[slot][key]) for key in seen)
    assert table.observe([]) == []

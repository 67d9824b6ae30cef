"""Films show what happened: every step, large enough to see, or else what the policy saw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from pirl.envs.config import TabletopConfig
from pirl.envs.tabletop import FILM_SIZE, TabletopEnv
from pirl.envs.tabletop_expert import PERFECT, demonstrate
from pirl.records import Context, Rollout
from pirl.rollout.films import (
    GREEN,
    RED,
    Film,
    Highlights,
    enlarge,
    film,
    filmstrip,
    write_filmstrip,
    write_video,
)

CONFIG = TabletopConfig()


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return demonstrate(CONFIG, [Context("red block to top zone", 3)], dials=PERFECT, seed=0)[0]


def ended(rollout: Rollout, number: int, *, success: bool) -> Rollout:
    return replace(rollout, number=number, episode=replace(rollout.episode, success=success))


def test_the_first_of_each_end_are_kept_whenever_they_come(rollout: Rollout) -> None:
    highlights = Highlights(2)
    for number in (7, 3, 9, 1, 2, 8, 4):
        highlights.add(ended(rollout, number, success=number % 2 == 1))
    assert [one.number for one in highlights.rollouts] == [1, 3, 2, 4]
    nothing = Highlights(0)
    nothing.add(rollout)
    assert nothing.rollouts == []


@pytest.mark.parametrize("seed", range(4))
def test_the_first_episodes_are_filmed_whatever_the_policy(rollout: Rollout, seed: int) -> None:
    """So every policy has films of the same episodes, which a report sets beside each other."""
    rng = np.random.default_rng(seed)
    highlights = Highlights(3)
    for number, success in zip(rng.permutation(20), rng.random(20) < seed / 3, strict=True):
        highlights.add(ended(rollout, int(number), success=bool(success)))
    assert {0, 1, 2} <= {one.number for one in highlights.rollouts}


def test_an_episode_is_acted_out_again_for_a_larger_picture(rollout: Rollout) -> None:
    env = TabletopEnv(CONFIG)
    shown = film(rollout, env, fps=5)
    assert shown is not None
    assert shown.frames.shape == (len(rollout.episode) + 1, FILM_SIZE, FILM_SIZE, 3)
    assert (shown.fps, shown.success, shown.name) == (5, True, "success-0000")
    assert shown.caption == f"0: red block to top zone: success, {len(rollout.episode)} steps"
    env.begin(rollout.context)
    np.testing.assert_array_equal(shown.frames[0], env.render())
    for action in rollout.episode.actions:
        env.act(action)
    np.testing.assert_array_equal(shown.frames[-1], env.render())


class Blind(TabletopEnv):
    """Draws nothing for people."""

    render_mode = None


def test_without_a_picture_for_people_cameras_are_shown_side_by_side() -> None:
    config = TabletopConfig(wrist_camera=True)
    one = demonstrate(config, [Context("blue block to left zone", 1)], dials=PERFECT, seed=0)[0]
    shown = film(one, Blind(config), fps=5)
    assert shown is not None
    assert shown.frames.shape == (len(one.episode) + 1, 24, 48, 3)
    np.testing.assert_array_equal(shown.frames[:-1, :, :24], one.frames["observation/image"])
    np.testing.assert_array_equal(shown.frames[:-1, :, 24:], one.frames["observation/wrist_image"])


@pytest.mark.parametrize("what", ["another end", "an environment elsewhere", "another context"])
def test_what_does_not_repeat_itself_is_shown_as_it_was_seen(what: str, rollout: Rollout) -> None:
    looked = rollout.frame_steps[::2]
    seen = replace(rollout, frames={"observation/image": rollout.frames["observation/image"][::2]}, frame_steps=looked)
    env: Any = None if what == "an environment elsewhere" else TabletopEnv(CONFIG)
    if what == "another end":
        seen = replace(seen, episode=replace(seen.episode, actions=-seen.episode.actions))
    if what == "another context":
        seen = replace(seen, context=Context("no such task", 0))
    shown = film(seen, env, fps=10)
    assert shown is not None
    np.testing.assert_array_equal(shown.frames, seen.frames["observation/image"])
    assert shown.fps == round(10 * len(looked) / len(rollout.episode))
    assert film(replace(seen, frames={}, frame_steps=looked[:0]), None, fps=10) is None


def test_pixels_are_repeated_and_sides_even() -> None:
    frames = np.arange(2 * 5 * 7 * 3, dtype=np.uint8).reshape(2, 5, 7, 3)
    large = enlarge(frames, 15)
    assert large.shape == (2, 16, 22, 3)
    np.testing.assert_array_equal(large[:, 1:15:3, 1:21:3], frames)
    np.testing.assert_array_equal(large[:, 15], large[:, 14])
    assert enlarge(frames, 4).shape == (2, 6, 8, 3)
    assert enlarge(np.zeros((1, 200, 300, 3), np.uint8)).shape == (1, 200, 300, 3)


def painted(values: list[int], *, success: bool = True, size: int = 24) -> Film:
    frames = np.stack([np.full((size, size, 3), value, np.uint8) for value in values])
    return Film(frames=frames, fps=4, success=success, number=12, caption="12: a task")


def test_videos_play_every_frame_and_hold_the_last(tmp_path: Path) -> None:
    file = write_video(painted([10, 90, 200]), tmp_path / "out")
    assert file.name == "success-0012.mp4"
    with av.open(str(file)) as container:
        assert container.streams.video[0].codec.canonical_name == "h264"
        assert container.streams.video[0].average_rate == 4
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert frames[0].shape == (168, 168, 3)
    means = [round(float(frame.mean())) for frame in frames]
    assert means == pytest.approx([10, 90, 200, 200, 200, 200, 200], abs=2)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_filmstrip_has_a_row_per_film_and_a_border_that_tells_the_end(tmp_path: Path) -> None:
    films = [painted([0, 50, 100, 150, 200]), painted([255, 0], success=False)]
    strip = filmstrip(films, columns=3)
    cell = 96 + 2 * 3
    assert strip.size == (4 + 3 * (cell + 4), 4 + 2 * (cell + 16 + 4))
    for row, (colour, values) in enumerate([(GREEN, [0, 100, 200]), (RED, [255, 0])]):
        top = 4 + row * (cell + 16 + 4) + 16
        for column, value in enumerate(values):
            left = 4 + column * (cell + 4)
            assert strip.getpixel((left, top)) == colour
            assert strip.getpixel((left + cell // 2, top + cell // 2)) == (value,) * 3
    assert strip.getpixel((4 + 2 * (cell + 4) + 50, strip.height - 50)) == (255, 255, 255)  # a film of two frames
    caption = np.asarray(strip.crop((4, 4, 100, 18)))
    assert (caption < 255).any()
    file = write_filmstrip(films, tmp_path / "deep/strip.png")
    with Image.open(file) as stored:
        assert stored.size == filmstrip(films).size
    assert [path.name for path in file.parent.iterdir()] == ["strip.png"]

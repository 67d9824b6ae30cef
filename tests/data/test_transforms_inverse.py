"""What goes in comes out: the way back inverts the way in, for every robot; and bad input is named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pirl.data.aloha_units import aloha_actions_from_pi, aloha_actions_to_pi, aloha_state_to_pi
from pirl.data.normalize import NormStats
from pirl.data.resize import fit, letterbox
from pirl.data.robots import ROBOTS, Robot, aloha, delta_mask, get_robot, libero, make_robot
from pirl.data.tokenizer import ByteTokenizer
from pirl.data.transforms import Transform, parse_image
from pirl.errors import ConfigError, DataError
from pirl.names import CAMERAS


def stats_of(dim: int, seed: int = 0) -> NormStats:
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=dim), rng.uniform(0.05, 2.0, size=dim)
    return NormStats(mean=mean, std=std, q01=mean - 2 * std, q99=mean + 3 * std)


def transform_for(robot: Robot, **options: object) -> Transform:
    stats = {"state": stats_of(robot.state_dim), "actions": stats_of(robot.action_dim, 1)}
    # π₀ has room for 32; the larger states are those of policies that read nothing else.
    room = {"state_dim": robot.state_dim} if robot.name in ROBOTS and robot.state_dim > 32 else {}
    settings: dict = {"norm_stats": stats, "tokenizer": ByteTokenizer(), "token_len": 120, **room, **options}
    return Transform(robot=robot, **settings)


shapes = hnp.array_shapes(min_dims=1, max_dims=3, max_side=3)
joints = st.floats(-3.2, 3.2)
shares = st.floats(0.0, 0.999)  # a gripper between closed and open; fully open is where the arcsine ends


@st.composite
def aloha_poses(draw: st.DrawFn) -> np.ndarray:
    lead = draw(shapes)
    pose = draw(hnp.arrays(np.float64, (*lead, 14), elements=joints))
    pose[..., [6, 13]] = draw(hnp.arrays(np.float64, (*lead, 2), elements=shares))
    return pose


@given(pose=aloha_poses())
def test_aloha_units_and_back(pose: np.ndarray) -> None:
    np.testing.assert_allclose(aloha_actions_from_pi(aloha_actions_to_pi(pose)), pose, rtol=0, atol=1e-12)


def test_aloha_units_in_numbers() -> None:
    """Ends of the gripper's range, computed by hand from ALOHA's and Interbotix' constants."""
    pose = np.zeros(14)
    pose[[0, 1, 2, 8, 9]] = 0.5
    state = aloha_state_to_pi(pose)
    assert state[[0, 1, 2, 8, 9]].tolist() == [0.5, -0.5, -0.5, -0.5, -0.5]
    sine = (0.022**2 + 0.01844**2 - 0.036**2) / (2 * 0.022 * 0.01844)
    np.testing.assert_allclose(state[[6, 13]], (np.arcsin(sine) - 0.5476) / (1.6296 - 0.5476))
    np.testing.assert_allclose(aloha_actions_to_pi(pose)[[6, 13]], -0.6213 - 0.5476)
    pose[[6, 13]] = 1.0
    np.testing.assert_allclose(aloha_actions_to_pi(pose)[[6, 13]], 1.4910 - 0.5476)
    pose[[6, 13]] = 50.0
    np.testing.assert_allclose(aloha_state_to_pi(pose)[[6, 13]], (np.pi / 2 - 0.5476) / (1.6296 - 0.5476))


@given(data=st.data())
def test_relative_actions_and_back(data: st.DataObject) -> None:
    lead = data.draw(shapes)
    runs = data.draw(st.lists(st.sampled_from([1, 2, -1, -2]), max_size=2))
    robot = make_robot(name="arm", state_dim=5, action_dim=4, relative=tuple(runs))
    actions = data.draw(hnp.arrays(np.float64, (*lead, 3, 4), elements=joints))
    state = data.draw(hnp.arrays(np.float64, (*lead, 5), elements=joints))
    untouched = actions.copy()
    encoded = robot.encode_actions(actions, state)
    np.testing.assert_array_equal(actions, untouched)
    for dim, relative in enumerate(robot.delta_mask):
        wanted = actions[..., dim] - state[..., None, dim] if relative else actions[..., dim]
        np.testing.assert_array_equal(encoded[..., dim], wanted)
    np.testing.assert_allclose(robot.decode_actions(encoded, state), actions, rtol=0, atol=1e-14)


def test_delta_mask_counts_runs() -> None:
    assert delta_mask(2, -2, 1) == (True, True, False, False, True)
    assert get_robot("aloha").delta_mask == (*[True] * 6, False, *[True] * 6, False)


@pytest.mark.parametrize("name", ROBOTS)
@pytest.mark.parametrize("quantile", [False, True])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_actions_come_back_from_the_model(name: str, quantile: bool, data: st.DataObject) -> None:
    """Robot -> low_dim -> robot_actions is the identity up to float32, and padding stays zero."""
    robot = get_robot(name)
    transform = transform_for(robot, quantile=quantile, discrete_state=quantile)
    size, horizon = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    state = data.draw(hnp.arrays(np.float32, (size, robot.state_dim), elements=st.floats(0, 1, width=32)))
    actions = data.draw(hnp.arrays(np.float32, (size, horizon, robot.action_dim), elements=st.floats(-3, 3, width=32)))
    batch = transform.low_dim(state, actions, ["lift"] * size)
    assert batch["state"].shape == (size, max(32, robot.state_dim))
    assert batch["actions"].shape == (size, horizon, 32)
    assert not batch["actions"][..., robot.action_dim :].any()
    assert not batch["state"][..., robot.state_dim :].any()
    assert batch["tokenized_prompt"].shape == batch["tokenized_prompt_mask"].shape == (size, 120)
    kinds = {key: value.dtype.name for key, value in batch.items()}
    assert kinds == {
        "state": "float32",
        "actions": "float32",
        "tokenized_prompt": "int32",
        "tokenized_prompt_mask": "bool",
    }
    back = transform.robot_actions(batch["actions"], state)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, actions, rtol=0, atol=2e-5)


def pictures(robot: Robot, choice: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        keys[min(choice, len(keys) - 1)]: rng.integers(0, 256, (6, 8, 3), np.uint8) for keys in robot.cameras.values()
    }


def observation_of(robot: Robot, choice: int = 0) -> dict:
    keys = robot.state_keys[min(choice, len(robot.state_keys) - 1)]
    parts = np.split(np.linspace(0.1, 0.9, robot.state_dim), [robot.state_dim - 1])
    values = parts if len(keys) == 2 else [np.concatenate(parts)]
    return {**pictures(robot, choice), **dict(zip(keys, values, strict=True)), "prompt": "lift"}


@pytest.mark.parametrize("name", [name for name, robot in ROBOTS.items() if robot.cameras])
def test_every_robot_under_every_name_of_its_inputs(name: str) -> None:
    """The same values under inference keys and under dataset keys give the same model input."""
    robot = get_robot(name)
    transform = transform_for(robot, image_size=(16, 16))
    first = transform.observation(observation_of(robot))
    assert first["state"].shape == (32,)
    assert tuple(first["image"]) == CAMERAS
    assert {slot for slot, mask in first["image_mask"].items() if mask} == set(robot.cameras)
    for choice in range(1, 5):
        other = transform.observation(observation_of(robot, choice))
        np.testing.assert_array_equal(other["state"], first["state"])
        for slot in CAMERAS:
            np.testing.assert_array_equal(other["image"][slot], first["image"][slot])


def test_robots_have_openpis_dimensions() -> None:
    dims = {name: (robot.state_dim, robot.action_dim, sum(robot.delta_mask)) for name, robot in ROBOTS.items()}
    assert {name: found for name, found in dims.items() if not name.startswith("ogbench")} == {
        "aloha": (14, 14, 12),
        "aloha_sim": (14, 14, 0),
        "libero": (8, 7, 0),
        "libero_delta": (8, 7, 6),
        "droid": (8, 8, 0),
        "droid_joint_position": (8, 8, 7),
        "aloha_sim_full": (21, 14, 0),  # ours from here on, not OpenPI's
        "aloha_sim_full_insertion": (28, 14, 0),
        "metaworld": (4, 4, 0),
        "metaworld_full": (39, 4, 0),
        "metaworld_mt10": (49, 4, 0),
        "metaworld_mt50": (89, 4, 0),
        "tabletop": (4, 3, 0),
        "synthetic": (2, 2, 0),
    }


def test_state_only_robot_without_tokenizer_or_statistics() -> None:
    robot = make_robot(name="point", state_dim=6, action_dim=2, state_keys=("qpos",))
    transform = Transform(robot=robot, norm_stats=None, tokenizer=None, action_dim=2, state_dim=6)
    got = transform.observation({"qpos": np.arange(6.0)})
    assert got["image"] == got["image_mask"] == {}
    assert set(got) == {"image", "image_mask", "state"}
    np.testing.assert_array_equal(got["state"], np.arange(6.0))
    np.testing.assert_array_equal(transform.robot_actions(np.ones((3, 2)), np.zeros(6)), np.ones((3, 2)))


def test_absent_optional_camera_is_black_and_masked() -> None:
    transform = transform_for(aloha(), image_size=(8, 8))
    raw = {"images": {"cam_high": np.full((3, 8, 8), 7, np.uint8), "cam_low": np.zeros((3, 8, 8), np.uint8)}}
    images, masks = transform.images(raw)
    assert {slot: bool(mask) for slot, mask in masks.items()} == dict(zip(CAMERAS, (True, False, False), strict=True))
    assert (images["base_0_rgb"] == 7).all()
    assert not images["left_wrist_0_rgb"].any()


def test_letterbox_of_a_wide_picture() -> None:
    picture = np.full((2, 8, 3), 9, np.uint8)
    assert fit(picture, (5, 4)).shape == (1, 4, 3)
    out = letterbox(picture, (5, 4))
    assert out[:, 0, 0].tolist() == [0, 0, 9, 0, 0]
    assert fit(picture, (2, 8)) is picture


def test_prompt_falls_back_on_defaults() -> None:
    robot = libero(prompt="from the robot")
    raw = observation_of(robot)
    del raw["prompt"]

    def text(transform: Transform, raw: dict) -> str:
        out = transform.observation(raw)
        ids = out["tokenized_prompt"][out["tokenized_prompt_mask"]]
        return bytes((ids[1:] - 3).astype(np.uint8)).decode()

    assert text(transform_for(robot), raw) == "from the robot\n"
    assert text(transform_for(robot, default_prompt="from the recipe"), raw) == "from the recipe\n"
    assert text(transform_for(robot, default_prompt="from the recipe"), {**raw, "task": b"its own"}) == "its own\n"
    assert text(transform_for(robot), {**raw, "prompt": np.asarray("an_array")}) == "an array\n"
    assert text(transform_for(robot), {**raw, "prompt": None}) == "from the robot\n"


def broken(**changes: object) -> dict:
    raw = observation_of(libero())
    for key, value in changes.items():
        key = {"picture": "observation/image", "state": "observation/state"}.get(key, key)
        if value is None:
            del raw[key]
        else:
            raw[key] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (broken(state=np.zeros(9)), r"observation/state has shape \(9,\), expected 8"),
        (broken(state=np.zeros((1, 8))), r"observation/state has shape \(1, 8\), expected one vector"),
        (broken(state=np.full(8, np.nan)), r"observation/state of shape \(8,\) is not finite, first at index \(0,\)"),
        (broken(state="up"), "observation/state is str, expected numbers"),
        (broken(state=None), "no state; looked for observation/state or state or observation.state; found .*prompt"),
        (broken(prompt=None), "no instruction; looked for prompt or task; found observation/image"),
        (broken(prompt=np.array(["a", "b"])), "no instruction; looked for prompt or task; found observation/image"),
        (broken(picture=None), r"base_0_rgb \(looked for observation/image, image, .*found .*observation/wrist_image"),
        (broken(picture=np.zeros((1, 6, 8, 3), np.uint8)), r"observation/image has shape \(1, 6, 8, 3\), expected"),
        (broken(picture=np.zeros((6, 8, 4), np.uint8)), r"observation/image has shape \(6, 8, 4\), expected"),
        (broken(picture=np.full((6, 8, 3), 255.0)), "observation/image has values from 255.0 to 255.0, expected"),
        (broken(picture=np.full((6, 8, 3), np.nan)), "observation/image has values from nan to nan"),
        (broken(picture=np.zeros((6, 8, 3), np.int64)), "observation/image is int64, expected uint8"),
    ],
)
def test_bad_observations_are_named(raw: dict, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        transform_for(libero()).observation(raw)
    assert caught.value.hint


def test_bad_training_samples_are_named() -> None:
    transform = transform_for(libero())
    with pytest.raises(DataError, match="no actions; looked for actions or action"):
        transform.train_sample(broken())
    with pytest.raises(DataError, match=r"actions has shape \(5, 8\), expected 7"):
        transform.train_sample(broken(actions=np.zeros((5, 8))))
    with pytest.raises(DataError, match=r"actions has shape \(7,\), expected \[horizon, action\]"):
        transform.train_sample(broken(actions=np.zeros(7)))
    actions = np.zeros((4, 5, 7), np.float32)
    actions[2, 3, 1] = np.inf
    with pytest.raises(DataError, match=r"actions .* not finite, first at index \(2, 3, 1\)"):
        transform.low_dim(np.zeros((4, 8)), actions, ["a"] * 4)
    with pytest.raises(DataError, match="3 prompts for 4 states"):
        transform.low_dim(np.zeros((4, 8)), None, ["a"] * 3)


def test_bad_model_actions_never_reach_the_robot() -> None:
    transform = transform_for(libero())
    with pytest.raises(DataError, match=r"\(5, 6\) for robot 'libero'; expected at least 7"):
        transform.robot_actions(np.zeros((5, 6)), np.zeros(8))
    with pytest.raises(DataError, match=r"model actions .* not finite"):
        transform.robot_actions(np.full((5, 32), np.nan), np.zeros(8))
    with pytest.raises(DataError, match=r"state has shape \(7,\), expected 8"):
        transform.robot_actions(np.zeros((5, 32)), np.zeros(7))


def test_misspelt_camera_is_not_taken_for_an_absent_one() -> None:
    raw = {"images": {name: np.zeros((3, 4, 4), np.uint8) for name in ("cam_high", "cam_left_wirst")}}
    with pytest.raises(
        DataError, match=r"left_wrist_0_rgb \(looked for .*found images/cam_high, images/cam_left_wirst"
    ):
        transform_for(aloha()).images(raw)
    columns = ["observation.images.top", "observation.images.left_wrist"]
    assert aloha().find_cameras(columns) == {"base_0_rgb": columns[0], "left_wrist_0_rgb": columns[1]}


def test_statistics_must_fit_the_robot() -> None:
    robot = libero()
    with pytest.raises(DataError, match="statistics of actions are missing; robot 'libero' needs 7"):
        transform_for(robot, norm_stats={"state": stats_of(8)})
    with pytest.raises(DataError, match="statistics of state have 7 dimensions; robot 'libero' needs 8"):
        transform_for(robot, norm_stats={"state": stats_of(7), "actions": stats_of(7)})
    bare = NormStats(mean=np.zeros(8), std=np.ones(8))
    with pytest.raises(DataError, match="needs 8 with q01 and q99"):
        transform_for(robot, norm_stats={"state": bare, "actions": bare}, quantile=True)
    padded = transform_for(robot, norm_stats={"state": stats_of(32), "actions": stats_of(32)})
    assert padded.real_action_dim == 7


def test_impossible_robots_and_transforms_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown robot 'alohaa'\n  hint: did you mean: aloha"):
        get_robot("alohaa")
    with pytest.raises(ConfigError, match="camera slot of robot 'x'"):
        make_robot(name="x", state_dim=1, action_dim=1, cameras={"base_rgb": "front"})
    with pytest.raises(ConfigError, match="not among its cameras"):
        make_robot(name="x", state_dim=1, action_dim=1, optional_cameras=("base_0_rgb",))
    with pytest.raises(ConfigError, match="delta mask of 3 dimensions"):
        make_robot(name="x", state_dim=2, action_dim=4, relative=(3,))
    with pytest.raises(ConfigError, match="adapt_to_pi is for ALOHA"):
        dataclasses.replace(libero(), adapt_to_pi=True)
    with pytest.raises(ConfigError, match="have 8 dimensions, the model has room for 7"):
        transform_for(libero(), action_dim=7)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        transform_for(libero(), tokenizer=None, discrete_state=True)


def test_pictures_are_parsed_as_openpi_parses_them() -> None:
    floats = np.array([0.0, 0.5, 0.999, 1.0], np.float32).reshape(1, 4, 1).repeat(3, axis=2)
    assert parse_image(floats, "k")[0, :, 0].tolist() == [0, 127, 254, 255]
    chw = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)
    np.testing.assert_array_equal(parse_image(chw, "k"), chw.transpose(1, 2, 0))

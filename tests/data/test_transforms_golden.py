"""The transforms against OpenPI's own, run on the same observations (tests/golden/openpi/transforms)."""

import dataclasses
import json

import numpy as np
import pytest

from golden_data import TRANSFORMS as GOLDEN
from pirl.data.normalize import NormStats, normalize
from pirl.data.resize import letterbox
from pirl.data.robots import Robot, aloha, droid, libero
from pirl.data.tokenizer import tokenize_prompt
from pirl.data.transforms import Transform

CASES = json.loads((GOLDEN / "transforms.json").read_text())
ARRAYS = np.load(GOLDEN / "transforms.npz", allow_pickle=False)

OVERWRITTEN = [tag for tag in CASES if tag.endswith(("delta1_adapt0_train", "extradelta1_train", "jointpos_train"))]

# OpenPI's results are float64, ours float32 after the same float64 arithmetic: one rounding, 6e-8 relative.
TOLERANCE = {"rtol": 1.2e-7, "atol": 1e-7}


class FakeTokenizer:
    """The byte-level stand-in with which the golden tokens were made; remembers what it was given."""

    bos_id = 2
    vocab_size = 253

    def __init__(self, *, digits_stand_alone: bool) -> None:
        self.digits_stand_alone = digits_stand_alone
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [3 + byte % 250 for byte in text.encode()]


def robot_of(tag: str) -> Robot:
    name = tag.split("/")[1]
    if name == "aloha_default_prompt":
        return aloha()
    if name.startswith("aloha"):
        return aloha(use_delta="delta1" in name, adapt_to_pi="adapt1" in name)
    if name.startswith("libero"):
        return libero(delta="extradelta1" in name)
    assert name.startswith("droid")
    return droid(joint_position="jointpos" in name)


def entries(tag: str, part: str) -> dict[str, np.ndarray]:
    prefix = f"{tag}/{part}/"
    return {key.removeprefix(prefix): ARRAYS[key] for key in ARRAYS.files if key.startswith(prefix)}


def inputs(tag: str) -> dict[str, np.ndarray]:
    """The golden input, with its actions as they were before OpenPI saw them.

    OpenPI subtracts the state from the caller's own array, so where nothing copied it before (ALOHA's `adapt_to_pi`
    does) the stored actions are the relative ones already. `test_stored_actions_are_the_overwritten_ones` checks that.
    """
    raw = entries(tag, "in")
    robot = robot_of(tag)
    if tag in OVERWRITTEN:
        dims = len(robot.delta_mask)
        actions = raw["actions"].astype(np.float64)
        actions[:, :dims] += np.where(robot.delta_mask, robot.find_state(raw)[:dims], 0.0)
        raw["actions"] = actions
    return raw


def transform_of(tag: str, *, digits_stand_alone: bool = True) -> Transform:
    case = CASES[tag]
    stats = {
        key: NormStats(**{name: np.array(values) for name, values in entry.items()})
        for key, entry in case["norm_stats"].items()
    }
    return Transform(
        robot=robot_of(tag),
        norm_stats=stats,
        quantile=case["quantile"],
        tokenizer=FakeTokenizer(digits_stand_alone=digits_stand_alone),
        action_dim=case["action_dim"],
        token_len=case["max_token_len"],
        discrete_state=case["model_type"] == "pi05",
        default_prompt="default prompt" if tag.endswith("default_prompt") else None,
    )


def test_every_case_has_arrays() -> None:
    assert sorted({key.split("/in/")[0] for key in ARRAYS.files if "/in/" in key}) == sorted(CASES)
    assert len(CASES) >= 26


@pytest.mark.parametrize("tag", OVERWRITTEN)
def test_stored_actions_are_the_overwritten_ones(tag: str) -> None:
    stats = transform_of(tag).norm_stats
    assert stats is not None
    stored = entries(tag, "in")["actions"]
    normal = normalize(stored, stats["actions"], quantile=CASES[tag]["quantile"])
    np.testing.assert_array_equal(normal, entries(tag, "model_in")["actions"][:, : stored.shape[1]])


@pytest.mark.parametrize("tag", CASES)
def test_model_input_is_openpis(tag: str) -> None:
    raw = inputs(tag)
    wanted = entries(tag, "model_in")
    transform = transform_of(tag)
    got = transform.train_sample(raw) if "actions" in raw else transform.observation(raw)

    compared = set()
    for key, value in wanted.items():
        name, _, view = key.partition("@")
        parts = name.split("/")
        compared.add(name)
        mine = got[parts[0]][parts[1]] if len(parts) == 2 else got[name]
        if view == "every4":
            np.testing.assert_array_equal(mine[::4, ::4], value)
        elif view == "meta":
            assert [*mine.shape, int(mine.sum(dtype=np.int64))] == value.tolist()
        elif value.dtype == np.float64:
            assert mine.dtype == np.float32
            np.testing.assert_allclose(mine, value, **TOLERANCE)
        else:
            np.testing.assert_array_equal(mine, value)
    mine_names = {
        f"{key}/{slot}" if isinstance(value, dict) else key
        for key, value in got.items()
        for slot in (value if isinstance(value, dict) else [""])
    }
    assert mine_names == compared


@pytest.mark.parametrize("tag", CASES)
def test_nested_observation_is_read_like_a_flat_one(tag: str) -> None:
    flat = entries(tag, "in")
    nested: dict = {}
    for key, value in flat.items():
        *levels, last = key.split("/")
        inner = nested
        for level in levels:
            inner = inner.setdefault(level, {})
        inner[last] = value
    transform = transform_of(tag)
    one, other = transform.observation(flat), transform.observation(nested)
    for key in ("state", "tokenized_prompt"):
        np.testing.assert_array_equal(one[key], other[key])
    for slot, image in one["image"].items():
        np.testing.assert_array_equal(image, other["image"][slot])


@pytest.mark.parametrize("tag", CASES)
def test_actions_for_the_robot_are_openpis(tag: str) -> None:
    transform = transform_of(tag)
    wanted = entries(tag, "env_out")["actions"]
    model = entries(tag, "model_out")["actions"]
    state = transform.robot.find_state(entries(tag, "in"))
    got = transform.robot_actions(model, state)
    assert got.shape == (CASES[tag]["action_horizon"], transform.real_action_dim)
    np.testing.assert_allclose(got, wanted, rtol=1.2e-7, atol=1e-6)
    batched = transform.robot_actions(np.stack([model, 2 * model]), np.stack([state, state]))
    np.testing.assert_array_equal(batched[0], got)


@pytest.mark.parametrize("tag", CASES)
def test_tokenizer_is_given_openpis_words(tag: str) -> None:
    """Sample by sample, and in the batch path where the text is put together from cached parts."""
    transform = transform_of(tag, digits_stand_alone=False)
    transform.observation(entries(tag, "in"))
    assert isinstance(transform.tokenizer, FakeTokenizer)
    assert transform.tokenizer.texts == [text for text, _ in CASES[tag]["tokenizer_calls"]]
    assert [bos for _, bos in CASES[tag]["tokenizer_calls"]] == [True, False][: len(transform.tokenizer.texts)]

    raw = entries(tag, "in")
    normal = transform.observation(raw)["state"][: transform.robot.state_dim]
    state = normal if transform.discrete_state else None
    tokens, mask = tokenize_prompt(
        FakeTokenizer(digits_stand_alone=False),
        transform.robot.find_prompt(raw, transform.default_prompt),
        transform.token_len,
        state,
    )
    np.testing.assert_array_equal(tokens, entries(tag, "model_in")["tokenized_prompt"])
    np.testing.assert_array_equal(mask, entries(tag, "model_in")["tokenized_prompt_mask"])


def test_batches_equal_single_samples() -> None:
    """`low_dim` on a batch of several golden samples of one robot gives each of them."""
    for model in ("pi0", "pi05"):
        tags = [f"{model}/libero_extradelta1_train", f"{model}/libero_extradelta1_infer"]
        transform = transform_of(tags[0])
        raws = [entries(tag, "in") for tag in tags]
        states = np.stack([transform.robot.find_state(raw) for raw in raws])
        actions = np.stack([raws[0]["actions"], 0.5 * raws[0]["actions"]]).astype(np.float64)
        batch = transform.low_dim(states, actions, [transform.robot.find_prompt(raw) for raw in raws])
        for i, raw in enumerate(raws):
            single = transform.train_sample({**raw, "actions": actions[i]})
            for key in ("state", "actions", "tokenized_prompt", "tokenized_prompt_mask"):
                np.testing.assert_array_equal(batch[key][i], single[key])


def test_float_pictures_equal_their_bytes() -> None:
    tag = "pi0/libero_extradelta0_infer"
    raw = entries(tag, "in")
    transform = dataclasses.replace(transform_of(tag), image_size=(64, 64))
    as_float = {
        **raw,
        "observation/image": np.moveaxis((raw["observation/image"] + 0.5) / 255.5, -1, 0).astype(np.float32),
    }
    np.testing.assert_array_equal(transform.images(as_float)[0]["base_0_rgb"], transform.images(raw)[0]["base_0_rgb"])


def test_letterbox_is_openpis_pil_resize() -> None:
    arrays = np.load(GOLDEN / "pil_resize.npz")
    cases = sorted({key.split("/")[0] for key in arrays.files})
    assert len(cases) >= 5
    for case in cases:
        height, width = arrays[f"{case}/target"].tolist()
        np.testing.assert_array_equal(letterbox(arrays[f"{case}/in"], (height, width)), arrays[f"{case}/out"])

"""Robots as data: where to find cameras, state and actions, and the conversion between their units and the model's.

A robot's units are those of its driver and datasets; the model's are those π₀ was pretrained on. Normalisation and
padding come after (see `transforms`). To add a robot, add an entry here or call `make_robot(...)` in your own module.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from pirl.data.aloha_units import aloha_actions_from_pi, aloha_actions_to_pi, aloha_state_to_pi
from pirl.errors import ConfigError, DataError, did_you_mean
from pirl.names import (
    ACTIONS,
    BASE_CAMERA,
    CAMERAS,
    IMAGE,
    LEFT_WRIST_CAMERA,
    LEROBOT_ACTION,
    LEROBOT_IMAGES,
    LEROBOT_STATE,
    PROMPT,
    RIGHT_WRIST_CAMERA,
    STATE,
)
from pirl.records import Array
from pirl.trust import load_object


@dataclass(frozen=True, kw_only=True)
class Robot:
    """One kind of robot. Keys are paths: "/" separates the levels of nested observations."""

    name: str
    """Name in the registry and in messages."""
    cameras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Model camera slot -> candidate image keys in order of preference, those of inference before those of datasets.
    Unlisted slots do not exist on this robot: black and masked. Empty: the policy sees no images."""
    optional_cameras: tuple[str, ...] = ()
    """Slots whose image may be absent; they are then black and masked."""
    unused_cameras: tuple[str, ...] = ()
    """Known image keys that the policy ignores."""
    state_keys: tuple[tuple[str, ...], ...] = ((f"observation/{STATE}",), (STATE,), (LEROBOT_STATE,))
    """Possible keys of the state, best first; the values of one entry's keys are joined."""
    action_keys: tuple[str, ...] = (ACTIONS, LEROBOT_ACTION)
    """Possible keys of the actions, best first."""
    prompt_keys: tuple[str, ...] = (PROMPT, "task")
    """Possible keys of the instruction, best first."""
    state_dim: int
    """Size of the state."""
    action_dim: int
    """Size of an action."""
    delta_mask: tuple[bool, ...] = ()
    """True for dimensions whose model actions are relative to the current state; dimensions beyond are absolute."""
    adapt_to_pi: bool = False
    """ALOHA: convert joints and grippers to the space π₀ was pretrained in."""
    prompt: str | None = None
    """Default instruction for observations without one."""

    def __post_init__(self) -> None:
        if unknown := set(self.cameras) - set(CAMERAS):
            raise did_you_mean(min(unknown), CAMERAS, kind=f"camera slot of robot {self.name!r}")
        if stray := set(self.optional_cameras) - set(self.cameras):
            raise ConfigError(f"robot {self.name!r}: optional cameras {sorted(stray)} are not among its cameras")
        if len(self.delta_mask) > min(self.state_dim, self.action_dim):
            raise ConfigError(
                f"robot {self.name!r}: a delta mask of {len(self.delta_mask)} dimensions for a state of "
                f"{self.state_dim} and actions of {self.action_dim}",
                hint="only dimensions that state and action share can be relative",
            )
        if self.adapt_to_pi and (self.state_dim, self.action_dim) != (14, 14):
            raise ConfigError(f"robot {self.name!r}: adapt_to_pi is for ALOHA's 14 dimensions, not {self.action_dim}")

    def find_cameras(self, keys: Collection[str], pictures: Collection[str] | None = None) -> dict[str, str]:
        """Map each slot to its key among `keys` (an observation's or a dataset's); omits slots without an image.

        `pictures` are the keys known to hold images. Raises if a required camera is missing, or an optional one while
        an unknown image is present, because then the camera's name is probably misspelt.
        """
        found = {slot: key for slot, names in self.cameras.items() if (key := _first(names, keys)) is not None}
        missing = [slot for slot in self.cameras if slot not in found]
        known = {key for names in self.cameras.values() for key in names} | set(self.unused_cameras)
        strangers = sorted(set(keys if pictures is None else pictures) - known)
        needed = [slot for slot in missing if slot not in self.optional_cameras]
        if needed or (missing and strangers):
            wanted = "; ".join(f"{slot} (looked for {', '.join(self.cameras[slot])})" for slot in needed or missing)
            raise DataError(
                f"robot {self.name!r}: no picture for camera {wanted}; found {', '.join(sorted(keys)) or 'nothing'}",
                hint="rename the pictures, or declare where they are in the robot's `cameras` (or `unused_cameras`)",
            )
        return found

    def find_state(self, raw: Mapping[str, object]) -> Float[Array, "S"]:
        """The state of a flat observation."""
        for keys in self.state_keys:
            if all(key in raw for key in keys):
                values = [_numbers(raw[key], key, ndim=1) for key in keys]
                return self.check(np.concatenate(values), " + ".join(keys), self.state_dim)
        wanted = " or ".join(" + ".join(keys) for keys in self.state_keys)
        raise self._absent("state", wanted, raw)

    def find_actions(self, raw: Mapping[str, object]) -> Float[Array, "H A"]:
        """The action chunk of a flat training sample."""
        key = _first(self.action_keys, raw)
        if key is None:
            raise self._absent("actions", " or ".join(self.action_keys), raw)
        return self.check(_numbers(raw[key], key, ndim=2), key, self.action_dim)

    def find_prompt(self, raw: Mapping[str, object], default: str | None = None) -> str:
        """The instruction of a flat observation, or the default."""
        key = _first(self.prompt_keys, [key for key, value in raw.items() if value is not None])
        value: object = self.prompt if default is None else default
        if key is not None:
            array = np.asarray(raw[key])
            value = array.item() if array.size == 1 else array
            value = value.decode() if isinstance(value, bytes) else value
        if not isinstance(value, str):
            raise self._absent("instruction", " or ".join(self.prompt_keys), raw)
        return value

    def check(self, x: Float[Array, "*B D"], key: str, dim: int) -> Float[Array, "*B D"]:
        """Return the array; raises unless its last axis has `dim` finite numbers."""
        if x.shape[-1] != dim:
            raise DataError(
                f"robot {self.name!r}: {key} has shape {x.shape}, expected {dim} in the last axis",
                hint="is this the right robot for the dataset or environment?",
            )
        if not np.isfinite(x).all():
            where = tuple(np.argwhere(~np.isfinite(x))[0].tolist())
            raise DataError(
                f"robot {self.name!r}: {key} of shape {x.shape} is not finite, first at index {where}",
                hint="a sensor that drops out must not reach the policy: repair or leave out that step",
            )
        return x

    def _absent(self, what: str, wanted: str, raw: Mapping[str, object]) -> DataError:
        return DataError(
            f"robot {self.name!r}: no {what}; looked for {wanted}; found {', '.join(sorted(raw)) or 'nothing'}",
            hint="rename the keys, declare them in the robot, or set a default prompt",
        )

    def encode_state(self, state: Float[Array, "*B S"]) -> Float[Array, "*B S"]:
        """Convert a state from the robot's units to the model's."""
        state = np.asarray(state, np.float64)
        return aloha_state_to_pi(state) if self.adapt_to_pi else state

    def encode_actions(self, actions: Float[Array, "*B H A"], state: Float[Array, "*B S"]) -> Float[Array, "*B H A"]:
        """Convert a chunk from the robot's units to the model's; `state` precedes it and is in the model's units."""
        actions = aloha_actions_to_pi(actions) if self.adapt_to_pi else np.array(actions, np.float64)
        return self._shift(actions, state, -1.0)

    def decode_actions(self, actions: Float[Array, "*B H A"], state: Float[Array, "*B S"]) -> Float[Array, "*B H A"]:
        """Inverse of `encode_actions`."""
        actions = self._shift(np.array(actions, np.float64), state, 1.0)
        return aloha_actions_from_pi(actions) if self.adapt_to_pi else actions

    def _shift(self, actions: Array, state: Array, sign: float) -> Array:
        """Add or subtract the same state at every step of the chunk in the dimensions of `delta_mask`; in place."""
        dims = len(self.delta_mask)
        if dims:
            actions[..., :dims] += sign * np.where(self.delta_mask, state[..., :dims], 0.0)[..., None, :]
        return actions


def _first(names: Collection[str], keys: Collection[str]) -> str | None:
    return next((name for name in names if name in keys), None)


def _numbers(value: object, key: str, *, ndim: int) -> Array:
    """`value` as float64 of `ndim` axes; a scalar counts as a vector of one (DROID's gripper)."""
    try:
        if np.asarray(value).dtype.kind in "mMSU":  # NumPy would convert times and text to numbers
            raise TypeError
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{key} is {type(value).__name__}, expected numbers", hint="convert it to an array") from None
    if array.ndim == 0 and ndim == 1:
        array = array[None]
    if array.ndim != ndim:
        raise DataError(
            f"{key} has shape {array.shape}, expected {'one vector' if ndim == 1 else '[horizon, action]'}",
            hint="observations are given one at a time, without a batch axis",
        )
    return array


def delta_mask(*dims: int) -> tuple[bool, ...]:
    """A mask from run lengths: `delta_mask(6, -1)` is six relative dimensions and one absolute."""
    return tuple(dim > 0 for dim in dims for _ in range(abs(dim)))


def aloha(*, name: str = "aloha", adapt_to_pi: bool = True, use_delta: bool = True, prompt: str | None = None) -> Robot:
    """ALOHA: two arms of six joints and a gripper. Requires only the upper camera and ignores the lower one."""

    def keys(camera: str, *more: str) -> tuple[str, ...]:
        return (f"images/{camera}", f"{LEROBOT_IMAGES}.{camera}", *more)

    return Robot(
        name=name,
        cameras={
            BASE_CAMERA: keys("cam_high", f"{LEROBOT_IMAGES}.top", f"{LEROBOT_IMAGES}.high"),
            LEFT_WRIST_CAMERA: keys("cam_left_wrist", f"{LEROBOT_IMAGES}.left_wrist"),
            RIGHT_WRIST_CAMERA: keys("cam_right_wrist", f"{LEROBOT_IMAGES}.right_wrist"),
        },
        optional_cameras=(LEFT_WRIST_CAMERA, RIGHT_WRIST_CAMERA),
        unused_cameras=keys("cam_low", f"{LEROBOT_IMAGES}.low"),
        state_keys=((STATE,), (LEROBOT_STATE,)),
        state_dim=14,
        action_dim=14,
        delta_mask=delta_mask(6, -1, 6, -1) if use_delta else (),
        adapt_to_pi=adapt_to_pi,
        prompt=prompt,
    )


def libero(*, name: str = "libero", delta: bool = False, prompt: str | None = None) -> Robot:
    """One Franka arm in simulation. Its actions are already relative; `delta` subtracts the state once more, as in the
    training of the released π₀ (not π₀.₅) LIBERO checkpoint.
    """
    return Robot(
        name=name,
        cameras={
            BASE_CAMERA: ("observation/image", "image", f"{LEROBOT_IMAGES}.image"),
            LEFT_WRIST_CAMERA: (
                "observation/wrist_image",
                "wrist_image",
                f"{LEROBOT_IMAGES}.wrist_image",
                f"{LEROBOT_IMAGES}.image2",
            ),
        },
        state_dim=8,
        action_dim=7,
        delta_mask=delta_mask(6, -1) if delta else (),
        prompt=prompt,
    )


def droid(*, name: str = "droid", joint_position: bool = False, prompt: str | None = None) -> Robot:
    """One Franka arm; actions are joint velocities (or joint positions, made relative) and a gripper position."""
    return Robot(
        name=name,
        cameras={
            BASE_CAMERA: (
                "observation/exterior_image_1_left",
                "exterior_image_1_left",
                "observation/image",
                f"{LEROBOT_IMAGES}.exterior_image_1_left",
                f"{LEROBOT_IMAGES}.exterior_1_left",
            ),
            LEFT_WRIST_CAMERA: (
                "observation/wrist_image_left",
                "wrist_image_left",
                "observation/wrist_image",
                f"{LEROBOT_IMAGES}.wrist_image_left",
                f"{LEROBOT_IMAGES}.wrist_left",
            ),
        },
        state_keys=(
            ("observation/joint_position", "observation/gripper_position"),
            ("joint_position", "gripper_position"),
            (LEROBOT_STATE,),
        ),
        state_dim=8,
        action_dim=8,
        delta_mask=delta_mask(7, -1) if joint_position else (),
        prompt=prompt,
    )


def make_robot(
    *,
    name: str,
    state_dim: int,
    action_dim: int,
    cameras: Mapping[str, str | tuple[str, ...]] | None = None,
    optional_cameras: tuple[str, ...] = (),
    relative: tuple[int, ...] = (),
    state_keys: tuple[str, ...] = (),
    action_keys: tuple[str, ...] = (),
    prompt: str | None = None,
) -> Robot:
    """Your own robot: its sizes, and the image key of each camera slot.

    `relative` gives run lengths as in `delta_mask`; your keys take precedence over the usual ones.
    """
    usual = Robot(name=name, state_dim=state_dim, action_dim=action_dim)
    named = {slot: (keys,) if isinstance(keys, str) else keys for slot, keys in (cameras or {}).items()}
    return Robot(
        name=name,
        cameras=named,
        optional_cameras=optional_cameras,
        state_keys=(*((key,) for key in state_keys), *usual.state_keys),
        action_keys=(*action_keys, *usual.action_keys),
        state_dim=state_dim,
        action_dim=action_dim,
        delta_mask=delta_mask(*relative),
        prompt=prompt,
    )


_OGBENCH_STATES = {
    "cube_single": 28,
    "cube_double": 37,
    "cube_triple": 46,
    "cube_quadruple": 55,
    "cube_octuple": 91,
    "scene": 40,
    "puzzle_3x3": 55,
    "puzzle_4x4": 83,
    "puzzle_4x5": 99,
    "puzzle_4x6": 115,
}

ROBOTS: Mapping[str, Robot] = {
    robot.name: robot
    for robot in (
        aloha(),
        aloha(name="aloha_sim", use_delta=False, prompt="Transfer cube"),
        # The same without images: joints, then position and quaternion of the cube, or of peg and socket.
        make_robot(name="aloha_sim_full", state_dim=21, action_dim=14),
        make_robot(name="aloha_sim_full_insertion", state_dim=28, action_dim=14),
        libero(),
        libero(name="libero_delta", delta=True),
        droid(),
        droid(name="droid_joint_position", joint_position=True),
        # The embedded simulator, `envs.tabletop`.
        make_robot(
            name="tabletop",
            state_dim=4,
            action_dim=3,
            cameras={
                BASE_CAMERA: ("observation/image", "image", f"{LEROBOT_IMAGES}.image"),
                LEFT_WRIST_CAMERA: ("observation/wrist_image", "wrist_image", f"{LEROBOT_IMAGES}.wrist_image"),
            },
            optional_cameras=(LEFT_WRIST_CAMERA,),
        ),
        # Meta-World: hand, gripper and images; or instead its full observation with objects and goal,
        # plus a one-hot task of the suite.
        make_robot(
            name="metaworld",
            state_dim=4,
            action_dim=4,
            cameras={
                BASE_CAMERA: (IMAGE, f"{LEROBOT_IMAGES}.{IMAGE}"),
                LEFT_WRIST_CAMERA: ("wrist_image", f"{LEROBOT_IMAGES}.wrist_image"),
            },
            optional_cameras=(LEFT_WRIST_CAMERA,),
        ),
        make_robot(name="metaworld_full", state_dim=39, action_dim=4),
        make_robot(name="metaworld_mt10", state_dim=49, action_dim=4),
        make_robot(name="metaworld_mt50", state_dim=89, action_dim=4),
        # OGBench: one arm, but the state also holds the objects, whose number varies; images replace them.
        *(make_robot(name=f"ogbench_{world}", state_dim=dim, action_dim=5) for world, dim in _OGBENCH_STATES.items()),
        make_robot(
            name="ogbench_visual",
            state_dim=19,
            action_dim=5,
            cameras={BASE_CAMERA: (IMAGE, f"{LEROBOT_IMAGES}.{IMAGE}")},
        ),
        # The point on a plane of `data.synthetic`, for tests and demos.
        make_robot(name="synthetic", state_dim=2, action_dim=2, cameras={BASE_CAMERA: IMAGE}),
    )
}


def get_robot(name: str) -> Robot:
    """A robot by name; `module:NAME` imports the object NAME from your own module."""
    module, _, own = name.rpartition(":")
    if module:
        return _imported(module, own)
    if name not in ROBOTS:
        raise did_you_mean(name, ROBOTS, kind="robot")
    return ROBOTS[name]


def _imported(module: str, name: str) -> Robot:
    """Import a robot named as `module:NAME`, as in gymnasium's ids."""
    found = load_object(f"{module}:{name}", what="robot")
    if not isinstance(found, Robot):
        raise ConfigError(
            f"robot {module}:{name}: that is a {type(found).__name__}",
            hint=f"{module}.py makes one: {name} = pirl.data.robots.make_robot(...)",
        )
    return found

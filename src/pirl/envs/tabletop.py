"""The embedded simulator: a gripper, blocks and zones on a square table, many tables at once, in NumPy.

"red block to left zone": fetch the named block and release it in the named zone. An action is (dx, dy, grip) in
[-1, 1]: the gripper moves by up to `SPEED`, carries what it holds, then closes (grip > 0) or opens. A closed gripper
within the level's `reach` of a block holds it. Whatever is released inside a zone ends the episode: the named block in
the named zone is the success, anything else the failure. What is released beside the zones may be fetched again.

Levels differ only in what is on the table. What makes them worth learning is in the demonstrations, whose errors are
choices (see `tabletop_expert`); precision is easy on purpose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from jaxtyping import Bool, Float, Float32, Int64, UInt8

from pirl.envs.config import TabletopConfig, TabletopLevel
from pirl.envs.env import Outcome, Outcomes, RobotEnv
from pirl.envs.tabletop_render import NUMBERS, Scene, table_pictures, wrist_pictures
from pirl.errors import EnvError
from pirl.records import Array, Context

SPEED, ZONE_RADIUS = 0.12, 0.16
ROBOT, FPS, ACTION_DIM, FILM_SIZE = "tabletop", 5, 3, 160
STATE, IMAGE, WRIST_IMAGE = "observation/state", "observation/image", "observation/wrist_image"

Area = tuple[tuple[float, float], tuple[float, float]]
"""Two opposite corners."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Objects on the table, and the length of an episode."""

    blocks: int
    """Blocks on the table, of different colours."""
    colours: tuple[str, ...]
    """Colours a block may have; each can be named, unless places name the blocks."""
    zones: Mapping[str, tuple[float, float] | None]
    """Zones by the word that names them, and where they are; None: anywhere."""
    area: Area = ((0.32, 0.2), (0.68, 0.6))
    """Area in which blocks start, and zones without a fixed place."""
    places: Mapping[str, Area] | None = None
    """Start of each block, by the word that names it; None: anywhere in `area`, named by colour."""
    reach: float = 0.10
    """A gripper that closes within this of a block holds it."""
    max_steps: int
    """Steps a policy has: enough to go straight, too few for a detour."""

    @property
    def names(self) -> tuple[str, ...]:
        """Possible names of a block."""
        return self.colours if self.places is None else tuple(self.places)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every instruction there is."""
        return tuple(f"{name} block to {zone} zone" for name in self.names for zone in self.zones)


_SIDES = {"left": (0.12, 0.5), "right": (0.88, 0.5), "top": (0.5, 0.88)}
LEVELS: Mapping[TabletopLevel, Level] = {
    "easy": Level(blocks=1, colours=("red", "blue"), zones=_SIDES, max_steps=12),
    "colours": Level(blocks=2, colours=("red", "blue"), zones=_SIDES, max_steps=12),
    "two_blocks": Level(
        blocks=2,
        colours=("red", "blue", "green", "yellow"),
        zones={"cyan": None, "pink": None, "olive": None},
        area=((0.14, 0.14), (0.86, 0.86)),
        max_steps=14,
    ),
    "stitch": Level(
        blocks=2,
        colours=("red", "red"),
        zones=_SIDES,
        area=((0.32, 0.16), (0.68, 0.62)),
        # Far apart, so that both are easily grasped: this level is about choices, which outcomes teach. Demonstrations
        # never miss a grasp, so nothing in them teaches a policy that does.
        places={"near": ((0.32, 0.16), (0.68, 0.24)), "far": ((0.32, 0.54), (0.68, 0.62))},
        reach=0.15,
        max_steps=20,
    ),
}
_GRIPPER_AREA: Area = ((0.3, 0.05), (0.7, 0.75))
_APART = {("block", "zone"): ZONE_RADIUS + 0.06, ("zone", "zone"): 2 * ZONE_RADIUS + 0.01}
_TRIES = 32


@dataclass
class State:
    """All there is to know of the tables, one row each; plain numbers, so that a row can be stored as JSON."""

    gripper: Float32[Array, "n 2"]
    """Positions of the grippers."""
    closed: Bool[Array, "n"]
    """Are they closed?"""
    held: Int64[Array, "n"]
    """Which block each holds; -1: none."""
    blocks: Float32[Array, "n K 2"]
    """Positions of the blocks."""
    colours: Int64[Array, "n K"]
    """Numbers of their colours."""
    zones: Float32[Array, "n Z 2"]
    """Positions of the zones."""
    block: Int64[Array, "n"]
    """The block that the instruction names."""
    zone: Int64[Array, "n"]
    """The zone that it names."""
    steps: Int64[Array, "n"]
    """Actions so far; -1: no episode was begun."""
    ended: Bool[Array, "n"]
    """Something was released in a zone."""
    success: Bool[Array, "n"]
    """It was the right thing in the right zone."""
    luck: Int64[Array, "n"]
    """The seed of what slips."""

    @classmethod
    def empty(cls, level: Level, size: int) -> "State":
        """Tables on which nothing was begun."""
        return cls(
            gripper=np.zeros((size, 2), np.float32),
            closed=np.zeros(size, bool),
            held=np.full(size, -1, np.int64),
            blocks=np.zeros((size, level.blocks, 2), np.float32),
            colours=np.zeros((size, level.blocks), np.int64),
            zones=np.zeros((size, len(level.zones), 2), np.float32),
            block=np.zeros(size, np.int64),
            zone=np.zeros(size, np.int64),
            steps=np.full(size, -1, np.int64),
            ended=np.zeros(size, bool),
            success=np.zeros(size, bool),
            luck=np.zeros(size, np.int64),
        )


def draw(level: Level, context: Context) -> dict[str, Any]:
    """The first state of one table. The task says what is named, the seed everything else."""
    rng = np.random.default_rng(context.init)
    gripper = rng.uniform(*_GRIPPER_AREA)
    places = _places(level, rng)
    name, _, _, zone, _ = context.task.split()
    if level.places is None:
        others = [other for other in rng.permutation(level.colours).tolist() if other != name]
        block = int(rng.integers(level.blocks))
        colours = [*others[:block], name, *others[block : level.blocks - 1]]
    else:
        block, colours = level.names.index(name), list(level.colours)
    return dict(
        gripper=gripper,
        closed=False,
        held=-1,
        blocks=places[: level.blocks],
        colours=[NUMBERS[colour] for colour in colours],
        zones=places[level.blocks :],
        block=block,
        zone=list(level.zones).index(zone),
        steps=0,
        ended=False,
        success=False,
        luck=context.init,
    )


def _places(level: Level, rng: np.random.Generator) -> Float[Array, "P 2"]:
    """Places of the blocks and then of the zones: the first of many drawn layouts in which nothing is too close.

    No point is within reach of two blocks, zones do not share a point, and no block starts where it can be released.
    """
    kinds = ["block"] * level.blocks + ["zone"] * len(level.zones)
    least = {**_APART, ("block", "block"): 2 * level.reach + 0.02}
    apart = np.array([[least[min(a, b), max(a, b)] for b in kinds] for a in kinds])
    np.fill_diagonal(apart, 0)
    while True:
        layouts = rng.uniform(*level.area, (_TRIES, len(kinds), 2))
        for zone, place in enumerate(level.zones.values(), level.blocks):
            if place is not None:
                layouts[:, zone] = place
        for block, area in enumerate((level.places or {}).values()):
            layouts[:, block] = rng.uniform(*area, (_TRIES, 2))
        distances = np.linalg.norm(layouts[:, :, None] - layouts[:, None], axis=-1)
        good = np.flatnonzero((distances >= apart).all(axis=(1, 2)))
        if len(good):
            return layouts[good[0]]


class Tabletop:
    """An `EnvBatch` of tables. An episode that ended stands still until its slot is given a context."""

    robot, fps, action_dim = ROBOT, FPS, ACTION_DIM
    num_inits: int | None = None

    def __init__(self, config: TabletopConfig, size: int) -> None:
        if size < 1:
            raise EnvError(f"a batch of {size} tables", hint="it has at least one")
        self.config = config
        self.level = LEVELS[config.level]
        self.size = size
        self.tasks = self.level.tasks
        self.max_steps = config.max_steps or self.level.max_steps
        self.state = State.empty(self.level, size)
        self._prompts = [""] * size
        self._zone_colours = np.array([NUMBERS[name] for name in self.level.zones])

    def begin(self, slots: Sequence[int], contexts: Sequence[Context]) -> None:
        """Start an episode in each of the slots."""
        self._rows(slots)
        for context in contexts:
            if context.task not in self.tasks:
                raise EnvError(f"unknown task {context.task!r}", hint=f"the tasks are: {'; '.join(self.tasks)}")
            if context.init < 0:
                raise EnvError(f"no initial state {context.init}", hint="it is 0 or more")
        for slot, context in zip(slots, contexts, strict=True):
            self._prompts[slot] = context.task
            self._set(slot, draw(self.level, context))

    def hand(self, slot: int, block: int) -> None:
        """Go on as if the gripper had just grasped this block where it lies."""
        self._set(slot, {"gripper": self.state.blocks[slot, block], "closed": True, "held": block})

    def act(self, slots: Sequence[int], actions: Float[Array, "n A"]) -> Outcomes:
        """One action in each of the slots; the others stand still, and so do those whose episode is over."""
        rows = self._begun(slots)
        if actions.shape != (len(rows), ACTION_DIM) or not np.isfinite(actions).all():
            finite = np.isfinite(actions).all(axis=-1)
            raise EnvError(
                f"actions of shape {actions.shape}, finite in {finite.sum()} of {len(finite)} rows; "
                f"expected {len(rows)} x {ACTION_DIM} finite numbers",
                hint="is the policy for this robot, and was its output brought to the robot's units?",
            )
        reward = np.zeros(len(rows), np.float32)
        live = ~self._over(rows)
        reward[live] = self._step(rows[live], np.clip(actions[live], -1, 1).astype(np.float32))
        ended = self.state.ended[rows]
        return Outcomes(reward, ended, self._over(rows) & ~ended, self.state.success[rows])

    def _step(self, rows: Int64[Array, "m"], actions: Float32[Array, "m 3"]) -> Bool[Array, "m"]:
        """Move, carry, then open or close; which of them succeeded."""
        state, every = self.state, np.arange(len(rows))
        moves = actions[:, :2] + self._slips(rows) if self.config.slip else actions[:, :2]
        gripper = np.clip(state.gripper[rows] + np.float32(SPEED) * moves, 0, 1)
        blocks, held, close = state.blocks[rows], state.held[rows], actions[:, 2] > 0
        holds = held >= 0
        blocks[every[holds], held[holds]] = gripper[holds]
        distance = np.linalg.norm(blocks - gripper[:, None], axis=-1)
        nearest = distance.argmin(axis=1)
        grasps = close & ~holds & (distance[every, nearest] < self.level.reach)
        blocks[every[grasps], nearest[grasps]] = gripper[grasps]

        # What is held is where the gripper is, so a release happens there.
        inside = np.linalg.norm(state.zones[rows] - gripper[:, None], axis=-1) < ZONE_RADIUS
        released = holds & ~close
        success = released & (held == state.block[rows]) & inside[every, state.zone[rows]]
        state.gripper[rows], state.blocks[rows], state.closed[rows] = gripper, blocks, close
        state.held[rows] = np.where(close, np.where(grasps, nearest, held), -1)
        state.steps[rows] += 1
        state.ended[rows] = released & inside.any(axis=1)
        state.success[rows] = success
        return success

    def _slips(self, rows: Int64[Array, "m"]) -> Float32[Array, "m 2"]:
        """Noise of this step's moves: a function of the episode's start and the step, so that snapshots stay exact."""
        keys = zip(self.state.luck[rows].tolist(), self.state.steps[rows].tolist(), strict=True)
        drawn = np.array([np.random.default_rng(key).standard_normal(2) for key in keys]).reshape(-1, 2)
        return (self.config.slip * drawn).astype(np.float32)

    def observe(self, slots: Sequence[int], *, pictures: bool = True) -> list[dict[str, Any]]:
        """Observation of each of the slots."""
        columns = self.look(slots, pictures=pictures)
        seen = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [{**observation, "prompt": self._prompts[slot]} for slot, observation in zip(slots, seen, strict=True)]

    def look(self, slots: Sequence[int], *, pictures: bool = True) -> dict[str, Array]:
        """`observe`, as one array for each key, without the prompt."""
        rows, state = self._begun(slots), self.state
        flags = np.stack([state.closed[rows], state.held[rows] >= 0], axis=1)
        columns = {STATE: np.concatenate([2 * state.gripper[rows] - 1, flags], axis=1, dtype=np.float32)}
        if pictures:
            scene = self._scene(rows)
            columns[IMAGE] = table_pictures(scene, self.config.image_size)
            if self.config.wrist_camera:
                columns[WRIST_IMAGE] = wrist_pictures(scene, self.config.image_size)
        return columns

    def picture(self, slot: int, *, size: int = FILM_SIZE) -> UInt8[Array, "size size 3"]:
        """One table for people to look at: y up, so that the top zone is above. Cameras have it below."""
        return np.ascontiguousarray(table_pictures(self._scene(self._begun([slot])), size)[0, ::-1])

    def snapshot(self, slot: int) -> dict[str, Any]:
        """Everything about a slot, as JSON can store it; `restore` brings it back exactly."""
        row = int(self._begun([slot])[0])
        values = {field.name: getattr(self.state, field.name)[row].tolist() for field in fields(State)}
        return {"level": self.config.level, "task": self._prompts[slot], **values}

    def restore(self, slot: int, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot, taken of any slot of any batch of the same level."""
        self._rows([slot])
        shapes = {field.name: getattr(self.state, field.name).shape[1:] for field in fields(State)}
        found = {name: np.shape(snapshot[name]) for name in shapes if name in snapshot}
        level, task = snapshot.get("level"), snapshot.get("task")
        if found != shapes or level != self.config.level or task not in self.tasks:
            raise EnvError(
                f"a snapshot of level {level!r}, task {task!r}, with values of shapes {found}; "
                f"expected level {self.config.level!r} with {shapes}",
                hint="restore what `snapshot` of the same level returned",
            )
        self._set(slot, {name: snapshot[name] for name in shapes})
        self._prompts[slot] = task

    def close(self) -> None:
        """Nothing is held."""

    def _set(self, row: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            getattr(self.state, name)[row] = value

    def _over(self, rows: Int64[Array, "n"]) -> Bool[Array, "n"]:
        return self.state.ended[rows] | (self.state.steps[rows] >= self.max_steps)

    def _scene(self, rows: Int64[Array, "n"]) -> Scene:
        state = self.state
        return Scene(
            zones=state.zones[rows],
            zone_colours=self._zone_colours,
            blocks=state.blocks[rows],
            block_colours=state.colours[rows],
            gripper=state.gripper[rows],
            closed=state.closed[rows],
        )

    def _rows(self, slots: Sequence[int]) -> Int64[Array, "n"]:
        """The slots as an index, each at most once."""
        if len(set(slots)) != len(slots) or not all(0 <= slot < self.size for slot in slots):
            raise EnvError(f"slots {list(slots)}", hint=f"each is named once, and is 0 to {self.size - 1}")
        return np.array(slots, np.int64)

    def _begun(self, slots: Sequence[int]) -> Int64[Array, "n"]:
        rows = self._rows(slots)
        if (unused := rows[self.state.steps[rows] < 0]).size:
            raise EnvError(f"no episode was begun in slots {unused.tolist()}", hint="give them a context: begin(...)")
        return rows


class TabletopEnv(RobotEnv):
    """One table, as a `gymnasium.Env`."""

    robot, fps, action_dim = ROBOT, FPS, ACTION_DIM
    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012 (gymnasium's name and type)
    render_mode = "rgb_array"

    def __init__(self, config: TabletopConfig) -> None:
        self.table = Tabletop(config, 1)
        self.tasks, self.max_steps = self.table.tasks, self.table.max_steps
        size = config.image_size
        picture = spaces.Box(0, 255, (size, size, 3), np.uint8)
        words = spaces.Text(max(map(len, self.tasks)), charset=frozenset("".join(self.tasks)))
        seen: dict[str, spaces.Space] = {STATE: spaces.Box(-1, 1, (4,), np.float32), IMAGE: picture}
        if config.wrist_camera:
            seen[WRIST_IMAGE] = picture
        self.observation_space = cast(spaces.Space[dict[str, Any]], spaces.Dict({**seen, "prompt": words}))
        self.action_space = spaces.Box(-1, 1, (ACTION_DIM,), np.float32)

    def begin(self, context: Context) -> None:
        """Start an episode; the same context always starts alike, whatever happened before."""
        self.table.begin([0], [context])

    def act(self, action: Float[Array, "A"]) -> Outcome:
        """Execute one action, without looking."""
        reward, terminated, truncated, success = self.table.act([0], action[None])
        return Outcome(float(reward[0]), bool(terminated[0]), bool(truncated[0]), bool(success[0]))

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """Look: state and prompt always, pictures if asked for."""
        return self.table.observe([0], pictures=pictures)[0]

    def render(self) -> UInt8[Array, "size size 3"]:
        """A picture for people."""
        return self.table.picture(0)

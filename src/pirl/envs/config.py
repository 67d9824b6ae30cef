"""Settings of the environments, one dataclass per simulator. Imports no simulator."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, Count, Natural

TabletopLevel = Literal["easy", "colours", "two_blocks", "stitch"]
"""`easy`: one block, three zones. `colours`: two blocks, the named one counts. `two_blocks`: two blocks of four
colours, random zones. `stitch`: two blocks, named by their positions; no demonstration that begins at the table
succeeds, so that only bootstrapped values know which block to take."""


LiberoSuite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
"""LIBERO's task suites."""


@dataclass(frozen=True, kw_only=True)
class TabletopConfig(Checked):
    """The embedded tabletop (`envs.tabletop`): NumPy only, thousands of steps per second with images."""

    level: TabletopLevel = "easy"
    """Difficulty."""
    image_size: Annotated[int, Bounds(low=8)] = 24
    """Height and width of the images."""
    wrist_camera: bool = False
    """Also render a camera that moves with the gripper."""
    slip: Annotated[float, Bounds(low=0)] = 0.0
    """Stochastic physics: standard deviation of the noise on each move, as a share of the longest move. Each initial
    state has its own noise."""
    max_steps: Count | None = None
    """Episode length in steps. None: the level's default."""


AlohaCamera = Literal["top", "left_wrist", "right_wrist", "front_close", "angle", "left_pillar", "right_pillar"]
"""gym-aloha's cameras; OpenPI calls the first four cam_high, cam_left_wrist, cam_right_wrist and cam_low."""


@dataclass(frozen=True, kw_only=True)
class AlohaConfig(Checked):
    """gym-aloha's bimanual tasks (extra `aloha`)."""

    task: Literal["transfer", "insertion"] = "transfer"
    """Hand a cube from arm to arm, or insert a peg into a socket."""
    cameras: tuple[AlohaCamera, ...] = ("top",)
    """Cameras to render; OpenPI's evaluation uses `top` alone."""
    render_size: tuple[Count, Count] = (168, 224)
    """Height and width of the images. gym-aloha renders 480x640; 168x224 has the same aspect ratio and costs less."""
    fast_render: bool = False
    """No shadows, reflections or multisampling: ten times faster, but not what released checkpoints were trained on."""
    full_state: bool = False
    """The state also holds position and quaternion of the objects, 21 numbers (transfer) or 28, and there are no
    images."""
    staged_reward: bool = False
    """Reward each step with the stage reached (grasped, lifted, ...), from 0 to 1, instead of success alone."""
    max_steps: Count = 300
    """Episode length in steps, as in OpenPI's evaluation."""


@dataclass(frozen=True, kw_only=True)
class OGBenchConfig(Checked):
    """OGBench's manipulation tasks (extra `ogbench`)."""

    task: str = "cube-single-play-singletask-task1-v0"
    """OGBench's environment name; the prefix `visual-` renders images."""
    sparse: bool = False
    """Reward -1 until everything is solved, instead of minus the number of unsolved parts."""
    render_size: Count = 64
    """Height and width of the images of visual tasks."""
    fast_render: bool = True
    """No shadows, reflections or multisampling: five times faster, but not what OGBench's own datasets show."""


@dataclass(frozen=True, kw_only=True)
class LiberoConfig(Checked):
    """LIBERO, with OpenPI's conventions (extra `libero`, and LIBERO's assets)."""

    suite: LiberoSuite = "libero_goal"
    """The task suite."""
    task_ids: tuple[int, ...] | None = None
    """Use only these tasks of the suite. None: all."""
    assets: str | None = None
    """Folder of LIBERO's assets. None: $PIRL_LIBERO_ASSETS, otherwise the package's own or downloaded ones."""
    render_size: Count = 256
    """Rendered height and width; OpenPI's evaluation uses 256."""
    fast_render: bool = False
    """No shadows, reflections or multisampling: three times faster, but not what released checkpoints were trained
    on."""
    wait_steps: Natural = 10
    """Steps to let objects settle before the episode counts."""
    max_steps: Count | None = None
    """Episode length in steps. None: the suite's limit, as in OpenPI's evaluation."""
    seed: int = 7
    """Simulator seed, which places fixtures; the index of the initial state is added to it. OpenPI uses 7."""
    keep_tasks: Count = 2
    """Simulators to keep, one per task. Each costs about 200 MB; building one takes a second or two."""


@dataclass(frozen=True, kw_only=True)
class MetaWorldConfig(Checked):
    """Meta-World: a Sawyer arm at a table, fifty tasks named by instructions (extra `metaworld`)."""

    suite: Literal["MT10", "MT50"] = "MT10"
    """The task suite."""
    tasks: tuple[str, ...] | None = None
    """Use only these tasks, by Meta-World's names, such as reach-v3; any of the fifty. None: all of the suite."""
    wrist_camera: bool = False
    """Also render the camera at the gripper."""
    near_camera: bool = True
    """Move the camera `corner2` closer to the table, as in published visual results and LeRobot. At Meta-World's own
    position a puck is only a few pixels wide."""
    render_size: Count = 112
    """Height and width of the images."""
    fast_render: bool = True
    """No shadows, reflections or multisampling: ten times faster, but not what published policies were trained on."""
    full_state: bool = False
    """The state is Meta-World's observation of 39 numbers, with objects and goal, and there are no images."""
    one_hot: bool = False
    """Append the task of the suite as a one-hot vector, as Meta-World's multi-task benchmarks do: for policies that
    read no text. Needs `full_state`."""
    dense_reward: bool = False
    """Reward each step with Meta-World's shaped reward, scaled to 0 to 1, instead of success alone."""
    end_at_success: bool = True
    """Success ends the episode, as in Meta-World's own evaluation. Otherwise the episode lasts `max_steps`, and any
    success during it counts."""
    max_steps: Count = 200
    """Episode length in steps; Meta-World allows 500."""
    spare_simulators: Count = 16
    """Simulators, over all tasks, that a process keeps for later episodes. Each costs 10 to 20 MB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.one_hot and not self.full_state:
            raise ConfigError("one_hot is set and full_state is not", hint="pictures come with an instruction")


@dataclass(frozen=True, kw_only=True)
class GymConfig(Checked):
    """Any gymnasium environment, adapted by `envs.gym`."""

    id: str
    """Registered name; `module:name` imports the module first."""
    robot: str
    """The robot: a name in `data.robots`, or `module:NAME` for your own."""
    prompt: str = ""
    """Instruction and task name; empty: the id. The environment's own `prompt` observation takes precedence."""
    options: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Arguments for `gymnasium.make` as pairs, such as [[obs_type, pixels_agent_pos]]."""
    observation_keys: tuple[tuple[str, str], ...] = ()
    """Pairs of robot key and environment key, such as [[state, agent_pos]]; "/" separates levels of a nested
    observation. Empty: keep all keys; a plain vector becomes `state`."""
    render_key: str | None = None
    """Pass the output of `render` to the robot under this key. None: use the images in the observation."""
    success_key: str | None = "is_success"
    """Entry of `info` that reports success ("/" between levels). None: termination means success."""
    max_steps: Count | None = None
    """Episode length in steps. None: the registered limit."""
    fps: Count = 10
    """Control steps per second, for videos."""


EnvConfig = TabletopConfig | AlohaConfig | OGBenchConfig | LiberoConfig | MetaWorldConfig | GymConfig

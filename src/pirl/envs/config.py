"""Settings of the environments, one dataclass per simulator. Imports no simulator."""

from dataclasses import dataclass
from typing import Literal

from pirl.errors import ConfigError

TabletopLevel = Literal["easy", "colours", "two_blocks", "stitch"]
"""`easy`: one block, three zones. `colours`: two blocks, the named one counts. `two_blocks`: two blocks of four
colours, zones that move. `stitch`: as `colours`, but demonstrations choose block and zone apart and rarely get both
right."""


@dataclass(frozen=True, kw_only=True)
class TabletopConfig:
    """The embedded tabletop (`envs.tabletop`): NumPy only, thousands of steps per second with images."""

    level: TabletopLevel = "easy"
    """Difficulty."""
    image_size: int = 24
    """Height and width of the images."""
    wrist_camera: bool = False
    """Also render a camera that moves with the gripper."""
    max_steps: int | None = None
    """Episode length in steps. None: the level's default."""

    def __post_init__(self) -> None:
        if self.image_size < 8 or (self.max_steps is not None and self.max_steps < 1):
            raise ConfigError(
                f"tabletop: image_size is {self.image_size}, max_steps is {self.max_steps}",
                hint="pictures of at least 8 pixels, episodes of at least one step",
            )


AlohaCamera = Literal["top", "left_wrist", "right_wrist", "front_close", "angle", "left_pillar", "right_pillar"]
"""gym-aloha's cameras; OpenPI calls the first four cam_high, cam_left_wrist, cam_right_wrist and cam_low."""


@dataclass(frozen=True, kw_only=True)
class AlohaConfig:
    """gym-aloha's bimanual tasks (extra `aloha`)."""

    task: Literal["transfer", "insertion"] = "transfer"
    """Hand a cube from arm to arm, or insert a peg into a socket."""
    cameras: tuple[AlohaCamera, ...] = ("top",)
    """Cameras to render; OpenPI's evaluation uses `top` alone."""
    render_size: tuple[int, int] = (168, 224)
    """Height and width of the images. gym-aloha renders 480x640; 168x224 has the same aspect ratio and costs less."""
    fast_render: bool = False
    """No shadows, reflections or multisampling: ten times faster, but not what released checkpoints were trained on."""
    staged_reward: bool = False
    """Reward each step with the stage reached (grasped, lifted, ...), from 0 to 1, instead of success alone."""
    max_steps: int = 300
    """Episode length in steps, as in OpenPI's evaluation."""

    def __post_init__(self) -> None:
        _check_sizes("AlohaConfig", *self.render_size, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class OGBenchConfig:
    """OGBench's manipulation tasks (extra `ogbench`)."""

    task: str = "cube-single-play-singletask-task1-v0"
    """OGBench's environment name; the prefix `visual-` renders images."""
    sparse: bool = False
    """Reward -1 until everything is solved, instead of minus the number of unsolved parts."""
    render_size: int = 64
    """Height and width of the images of visual tasks."""
    fast_render: bool = True
    """No shadows, reflections or multisampling: five times faster, but not what OGBench's own datasets show."""

    def __post_init__(self) -> None:
        _check_sizes("OGBenchConfig", self.render_size)


def _check_sizes(name: str, *sizes: int) -> None:
    if min(sizes) < 1:
        raise ConfigError(f"{name}: a size or number of steps is {min(sizes)}", hint="it is at least 1")


@dataclass(frozen=True, kw_only=True)
class LiberoConfig:
    """LIBERO, with OpenPI's conventions (extra `libero`, and LIBERO's assets)."""

    suite: Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"] = "libero_goal"
    """The task suite."""
    task_ids: tuple[int, ...] | None = None
    """Use only these tasks of the suite. None: all."""
    assets: str | None = None
    """Folder of LIBERO's assets. None: $PIRL_LIBERO_ASSETS, otherwise the package's own or downloaded ones."""
    render_size: int = 256
    """Rendered height and width; OpenPI's evaluation uses 256."""
    fast_render: bool = False
    """No shadows, reflections or multisampling: three times faster, but not what released checkpoints were trained
    on."""
    wait_steps: int = 10
    """Steps to let objects settle before the episode counts."""
    max_steps: int | None = None
    """Episode length in steps. None: the suite's limit, as in OpenPI's evaluation."""
    seed: int = 7
    """Simulator seed, which places fixtures; the index of the initial state is added to it. OpenPI uses 7."""
    keep_tasks: int = 2
    """Simulators to keep, one per task. Each costs about 200 MB; building one takes a second or two."""

    def __post_init__(self) -> None:
        if self.keep_tasks < 1 or self.render_size < 1 or self.wait_steps < 0:
            raise ConfigError(
                f"env: keep_tasks {self.keep_tasks}, render_size {self.render_size}, wait_steps {self.wait_steps}",
                hint="at least one simulator and one pixel, and no negative number of steps",
            )


@dataclass(frozen=True, kw_only=True)
class GymConfig:
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
    max_steps: int | None = None
    """Episode length in steps. None: the registered limit."""
    fps: int = 10
    """Control steps per second, for videos."""


EnvConfig = TabletopConfig | AlohaConfig | OGBenchConfig | LiberoConfig | GymConfig

"""A scripted operator for the tabletop, with deliberate errors.

It moves straight to where it wants to be (with a little noise), stands still for one step to close, open or think, and
ends the episode with its last release, whatever came of it. An episode has at most one kind of error, drawn from the
seed: wrong zone, wrong block, a detour over a wrong zone, or a release half-way.

Detours are what separates value learning from imitating successes: they succeed, but too late for a policy.

With the `stitch` dials no episode that begins at the table succeeds: either the right block goes to a wrong zone, or a
wrong block is fetched. The others begin with the right block in the gripper, as if it had just been grasped there, and
go to the right zone or to a wrong one. So outcomes tell which zone is right, but not which block: every return of that
stage is 0. With the block in hand nothing tells how the episode began, so values that bootstrap there carry the success
of one kind of episode back to the beginning of the other. No choice among episodes or chunks by their outcomes does,
nor do values of observed returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from pirl.envs.config import TabletopConfig, TabletopLevel
from pirl.envs.tabletop import SPEED, STATE, Tabletop
from pirl.errors import ConfigError, EnvError
from pirl.ranges import Checked, NotNegative, Share
from pirl.records import Array, Context, Episode, Rollout

OPERATOR_STEPS = 36
"""Steps the operator has; a policy has fewer (`Level.max_steps`)."""
ARRIVED = 0.03
"""The operator is where it wants to be when it is nearer than this."""


@dataclass(frozen=True, kw_only=True)
class Dials(Checked):
    """How often the operator errs, and in which way."""

    wrong: Share = 0.0
    """Share of episodes that deliver to a wrong zone: a failure."""
    wrong_block: Share = 0.0
    """Share that takes a wrong block, to the named zone: a failure."""
    any_zone: bool = False
    """Whether a wrong block goes to any zone."""
    detour: Share = 0.0
    """Share that carries to a wrong zone first, and then to the right one: a late success."""
    early: Share = 0.0
    """Share that releases between 0.4 and 0.6 of the way: a failure, unless the zone was so near that this is in it."""
    noise: NotNegative = 0.05
    """Standard deviation of the moves, as a share of the longest; moves that arrive have none."""
    mislabelled: Share = 0.0
    """Share of episodes, of any kind, whose recorded outcome is the wrong one: labels are not always right."""
    handed: Share = 0.0
    """Share that begins with the right block in the gripper, whichever it would have taken; independent of the errors
    that follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wrong + self.wrong_block + self.detour + self.early > 1:
            raise ConfigError(f"dials of the operator: {self}", hint="the kinds of episodes are at most 1 together")


PERFECT = Dials()
"""Always the right choice."""
DEMONSTRATION: Mapping[TabletopLevel, Dials] = {
    "easy": Dials(wrong=0.25, detour=0.25, early=0.08),
    "colours": Dials(wrong=0.15, wrong_block=0.2, detour=0.2, early=0.05),
    "two_blocks": Dials(wrong=0.15, wrong_block=0.15, detour=0.2, early=0.05),
    "stitch": Dials(wrong=0.4, wrong_block=0.6, any_zone=True, handed=0.6),
}
"""The imperfect demonstrations of each level."""

_CLOSE, _OPEN = 1.0, -1.0
_LEGS = 3


class Route(NamedTuple):
    """The operator's plan for one table."""

    route: Float[Array, "legs 3"]
    """Places in order, and whether the gripper closes or opens there; the episode ends with the last."""
    noise: Float[Array, "T 2"]
    """Noise added to each move."""
    handed: int | None
    """The block in the gripper at the start."""


def plan(table: Tabletop, slot: int, *, dials: Dials, rng: np.random.Generator) -> Route:
    """The operator's plan for an episode that has just begun. The same numbers are drawn whatever the dials are."""
    state = table.state
    blocks, zones = state.blocks[slot].astype(float), state.zones[slot].astype(float)
    right_block, right_zone = int(state.block[slot]), int(state.zone[slot])
    choice, handed, share = rng.random(), rng.random() < dials.handed, rng.uniform(0.4, 0.6)
    other_zone = (right_zone + int(rng.integers(1, len(zones)))) % len(zones)
    other_block = (right_block + int(rng.integers(1, max(len(blocks), 2)))) % len(blocks)
    noise = dials.noise * rng.standard_normal((OPERATOR_STEPS, 2))
    any_zone = int(rng.integers(len(zones)))

    edges = np.cumsum([dials.wrong, dials.detour, dials.early, dials.wrong_block])
    wrong, detour, early, wrong_block = np.arange(4) == np.searchsorted(edges, choice, side="right")
    strays = wrong_block and not handed
    block = blocks[other_block if strays else right_block]
    zone = zones[other_zone if wrong else any_zone if strays and dials.any_zone else right_zone]

    route = [] if handed else [(*block, _CLOSE)]
    if detour:
        route.append((*zones[other_zone], _CLOSE))
    route.append((*(block + share * (zone - block) if early else zone), _OPEN))
    return Route(np.array(route), noise, right_block if handed else None)


class Operator:
    """Acts out plans, one on each table of a batch."""

    def __init__(self, table: Tabletop, plans: Sequence[Route]) -> None:
        self._table = table
        self._lengths = np.array([len(one.route) for one in plans])
        self._routes = np.stack([np.pad(one.route, ((0, _LEGS - len(one.route)), (0, 0))) for one in plans])
        self._noise = np.stack([one.noise for one in plans])
        self._leg = np.zeros(len(plans), int)

    def act(self, slots: Int[Array, "n"]) -> tuple[Float32[Array, "n 3"], Bool[Array, "n"]]:
        """One action for each of the slots, and where it is the operator's last."""
        leg, state = self._leg[slots], self._table.state
        goal = self._routes[slots, leg]
        offset = goal[:, :2] - state.gripper[slots]
        distance = np.linalg.norm(offset, axis=1, keepdims=True)
        there = distance < ARRIVED
        noise = self._noise[slots, state.steps[slots]] * (distance > SPEED)
        move = np.where(there, 0.0, np.clip(offset / np.maximum(distance, SPEED) + noise, -1, 1))
        before = np.where(leg > 0, self._routes[slots, leg - 1, 2], np.where(state.closed[slots], _CLOSE, _OPEN))
        grip = np.where(there[:, 0], goal[:, 2], before)
        self._leg[slots] += there[:, 0]
        actions = np.concatenate([move, grip[:, None]], axis=1, dtype=np.float32)
        return actions, self._leg[slots] >= self._lengths[slots]


def demonstrate(
    config: TabletopConfig, contexts: Sequence[Context], *, dials: Dials | None = None, seed: int
) -> list[Rollout]:
    """One demonstration of each context, all at once, with a picture of every step; `dials` None: the level's own.

    Episode i depends on the seed, i and its context alone. It is terminated by its last release: also one beside the
    zones, after which the table itself would go on.
    """
    if not contexts:
        raise EnvError("no contexts to demonstrate", hint="give at least one")
    table = Tabletop(replace(config, max_steps=OPERATOR_STEPS), len(contexts))
    dials = DEMONSTRATION[config.level] if dials is None else dials
    if dials.wrong_block and table.level.blocks < 2:
        raise ConfigError(f"wrong_block is {dials.wrong_block} at level {config.level!r}", hint="it has one block only")
    table.begin(range(table.size), contexts)
    plans = [plan(table, slot, dials=dials, rng=np.random.default_rng((seed, slot))) for slot in range(table.size)]
    for slot, one in enumerate(plans):
        if one.handed is not None:
            table.hand(slot, one.handed)
    operator = Operator(table, plans)
    live = np.arange(table.size)
    columns: dict[str, list[Array]] = {}
    while len(live):
        slots = live.tolist()
        seen = table.look(slots)
        actions, last = operator.act(live)
        outcomes = table.act(slots, actions)
        terminated = outcomes.terminated | last
        step = dict(slot=live, actions=actions, rewards=outcomes.reward, terminated=terminated)
        step.update(truncated=outcomes.truncated & ~terminated, success=outcomes.success)
        for name, values in {**seen, **step}.items():
            columns.setdefault(name, []).append(values)
        live = live[~(terminated | outcomes.truncated)]
    rollouts = _split({name: np.concatenate(values) for name, values in columns.items()}, contexts)
    wrong = [np.random.default_rng((seed, slot, 1)).random() < dials.mislabelled for slot in range(table.size)]
    return [_mislabelled(one) if is_wrong else one for one, is_wrong in zip(rollouts, wrong, strict=True)]


def _mislabelled(rollout: Rollout) -> Rollout:
    """The same episode with the other outcome, in its last reward as well."""
    episode = rollout.episode
    rewards = episode.rewards.copy()
    rewards[-1] = float(not episode.success)
    return replace(rollout, episode=replace(episode, rewards=rewards, success=not episode.success))


def _split(columns: dict[str, Array], contexts: Sequence[Context]) -> list[Rollout]:
    """From columns of all steps, in the order they happened, to episodes."""
    order = np.argsort(columns["slot"], kind="stable")
    ends = np.cumsum(np.bincount(columns["slot"], minlength=len(contexts)))[:-1]
    parts = {name: np.split(values[order], ends) for name, values in columns.items()}
    pictures = [name for name, values in columns.items() if values.ndim == 4]
    rollouts = []
    for number, context in enumerate(contexts):
        steps = {name: values[number] for name, values in parts.items()}
        low: dict[str, Any] = {name: steps[name] for name in ("actions", "rewards", "terminated", "truncated")}
        every = np.arange(len(steps["slot"]))
        rollouts.append(
            Rollout(
                context=context,
                number=number,
                episode=Episode(task=context.task, state=steps[STATE], success=bool(steps["success"][-1]), **low),
                starts=every,
                frames={name: steps[name] for name in pictures},
                frame_steps=every,
            )
        )
    return rollouts

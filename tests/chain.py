"""A chain with known optimal values, on which the real loader, `update` and `act` are compared with the truth.

Positions 0 … 7; beyond the last one is the goal (reward 1, terminal). A positive action moves ahead. A negative action
stays, except at odd positions, which are cliffs: there it falls, a failure that ends the task. On a slippery chain one
in four moves ahead stays in place. The data act randomly (N(½, 1)) and are truncated after 24 steps. Chunks have two
actions, so a chunk has one of four sign patterns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import TrainState
from pirl.agents.config import ACRLPDConfig
from pirl.agents.learner import Learner
from pirl.data.config import DataConfig, Failure
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.outcomes import OutcomeRule, derive
from pirl.data.replay import MemorySource
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import CriticInputs, make_critic
from pirl.models.critic_config import CriticConfig, LossKind
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.names import NEXT_TRUNCATED
from pirl.records import Episode

LENGTH, HORIZON, LIMIT, SLIP, DISCOUNT = 8, 2, 24, 0.25, 0.98
SIGNS = np.array(list(product((1.0, -1.0), repeat=HORIZON)))
STATES = np.eye(LENGTH, dtype=np.float32)
POLICY = MLPFlow(MLPFlowConfig(state_dim=LENGTH, action_dim=1, horizon=HORIZON, hidden=(32, 32)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dataset."""

    discount: float = DISCOUNT
    """Discount per step."""
    slip: float = 0.0
    """Probability that a move ahead stays in place."""
    failure: Failure = "terminal"
    """Meaning of a labelled failure."""
    shuffled: bool = False
    """Whether outcomes are permuted between episodes."""
    episodes: int = 400
    seed: int = 0


class Identity:
    """A transform without normalisation."""

    def low_dim(self, state, actions, prompts):
        return {"state": state} if actions is None else {"state": state, "actions": actions}


def recorded(case: Case) -> MemorySource:
    """Episodes with their outcomes as `data.outcomes` derives them from labels."""
    rng = np.random.default_rng(case.seed)
    walks = [walk(rng, case.slip) for _ in range(case.episodes)]
    ends = [(success, cut) for _, _, success, cut in walks]
    if case.shuffled:
        ends = [ends[i] for i in rng.permutation(len(ends))]
    rule = OutcomeRule(rule="sparse_success", success_file="labels", failure=case.failure)
    episodes = []
    for (positions, actions, *_), (success, cut) in zip(walks, ends, strict=True):
        length = len(actions)
        truncated = (np.arange(length) == length - 1) & cut
        outcome = derive({NEXT_TRUNCATED: truncated}, rule, length=length, label=success)
        episodes.append(
            Episode(
                task="",
                state=STATES[positions],
                actions=np.float32(actions)[:, None],
                rewards=outcome.rewards,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                success=outcome.success,
            )
        )
    return MemorySource(cameras=(), items=[(episode, {}) for episode in episodes])


def walk(rng: np.random.Generator, slip: float) -> tuple[list[int], list[float], bool, bool]:
    """(positions, actions, success, truncated) of one episode."""
    position, positions, actions = int(rng.integers(LENGTH)), [], []
    while len(actions) < LIMIT:
        positions.append(position)
        actions.append(rng.normal(0.5, 1.0))
        if actions[-1] > 0:
            position += rng.random() >= slip
        elif position % 2:
            return positions, actions, False, False
        if position == LENGTH:
            return positions, actions, True, False
    return positions, actions, False, True


def best_values(case: Case) -> np.ndarray:
    """Q*(position, signs) [LENGTH, 4] of a policy that replans after every chunk, by dynamic programming."""
    q = np.zeros((LENGTH, len(SIGNS)))
    for _ in range(2000):
        v = q.max(1)
        q = np.array([[ahead(s, signs, v, case.slip, case.discount) for signs in SIGNS] for s in range(LENGTH)])
        if np.abs(q.max(1) - v).max() < 1e-9:
            break
    return q


def ahead(position: int, signs: np.ndarray, v: np.ndarray, slip: float, discount: float) -> float:
    """The expected return of the rest of a chunk."""
    if position == LENGTH:
        return 1 / discount  # the reward of the step that arrived here
    if not len(signs):
        return v[position]
    if signs[0] < 0:
        return 0.0 if position % 2 else discount * ahead(position, signs[1:], v, slip, discount)
    moved, stayed = (ahead(s, signs[1:], v, slip, discount) for s in (position + 1, position))
    return discount * ((1 - slip) * moved + slip * stayed)


def batches(cases: list[Case], *, steps: int = 240, size: int = 64) -> dict:
    """[case, step, ...]: every batch of a run, drawn by the real loader."""

    def drawn(case: Case) -> dict:
        loading = {"config": DataConfig(seed=case.seed, prefetch=0), "batch_size": size, "horizon": HORIZON}
        with ACRLPDDataLoader(recorded(case), Identity(), discount=case.discount, **loading) as loader:
            found = jax.tree.map(lambda *x: np.stack(x), *(loader.sample_batch() for _ in range(steps)))
        # All cases share the agent's discount: rescale lengths, so that its power equals the case's discounting.
        found["length"] = np.float32(found["length"] * np.log(case.discount) / np.log(DISCOUNT))
        return found

    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *map(drawn, cases))


def make_agent(*, loss: LossKind = "hl_gauss", **changes) -> ACRLPD:
    """An agent with small networks; other settings are those of the main recipes."""
    settings = {"actor": "best_of_n", "num_action_samples": 6, "flow_steps": 2, "target_update_rate": 0.05}
    config = ACRLPDConfig(discount=DISCOUNT, **(settings | changes))
    critic = make_critic(
        CriticConfig(num_critics=2, hidden=(64, 64), bins=51, loss=loss, action_clip=4.0),
        feature_width=None,
        state_dim=LENGTH,
        real_action_dim=1,
        critic_horizon=HORIZON,
    )
    learner = Learner(tx=optax.adam(3e-3), ema_decay=0.96)
    return ACRLPD(
        policy=POLICY,
        critic=replace(critic, heads=config.heads),
        config=config,
        policy_learner=learner,
        critic_learner=learner,
    )


def training(agent: ACRLPD, begin=lambda agent, key: agent.init(key)):
    """A function (data, key) -> (states, metrics [case, step]) that trains all cases in one program."""

    def run(data, key):
        steps = jax.random.split(key, len(data["length"]))
        return jax.lax.scan(lambda state, inputs: agent.update(state, *inputs), begin(agent, key), (data, steps))

    return jax.jit(jax.vmap(run, (0, None)), compiler_options={"xla_backend_optimization_level": 1})


@dataclass(frozen=True)
class Found:
    """A critic's values of every chunk, and the chunks that acting picks."""

    q: np.ndarray
    """[LENGTH, 4]: mean value over chunks with these signs."""
    picks: np.ndarray
    """[LENGTH, 4]: share of best-of-8 chunks with these signs."""
    samples: np.ndarray
    """[LENGTH, 4]: share of plain samples with these signs."""

    def error(self, truth: np.ndarray, where: np.ndarray | None = None) -> float:
        """Root mean square error of q, over all chunks or those selected by `where`."""
        return float(np.sqrt(np.square(self.q - truth)[... if where is None else where].mean()))

    def rank(self, truth: np.ndarray) -> float:
        """Spearman's correlation of q with the truth over all positions and signs."""
        x, y = (ranks(z.ravel()) for z in (self.q, truth))
        return float(np.corrcoef(x, y)[0, 1])

    def optimal(self, truth: np.ndarray, how: np.ndarray, slack: float = 0.02) -> float:
        """Probability of a chunk within `slack` of the optimum; mean over positions."""
        good = truth >= truth.max(1, keepdims=True) - slack
        return float((how * good).sum(1).mean())


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; ties (to nine digits) share their mean rank."""
    x = np.round(x, 9)
    return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) + 1) / 2


def looking(agent: ACRLPD, *, draws: int = 64) -> Callable[[TrainState], Found]:
    """A function that queries a state's critic and `act` at every position."""
    rng = np.random.default_rng(5)
    sizes = np.abs(rng.normal(0.5, 1.0, (1, 1, 32, HORIZON))) + 0.1
    chunks = np.float32(sizes * SIGNS[None, :, None]).reshape(1, -1, HORIZON, 1).repeat(LENGTH, 0)

    @jax.jit
    def asked(state: TrainState):
        critic = state.ema.get("critic", state.params["critic"])
        embedding = agent.critic.embed(critic, CriticInputs(state=jnp.asarray(STATES)))
        values = agent.values(critic, embedding, jnp.asarray(chunks)).mean(0)
        repeated = jnp.repeat(jnp.asarray(STATES), draws, 0)
        keys = jax.random.split(jax.random.key(11), len(repeated))
        seen = Observation(images={}, image_masks={}, state=repeated)
        return values, *(agent.act(state, seen, keys, best_of=n) for n in (8, 1))

    def shares(chosen) -> np.ndarray:
        which = (np.asarray(chosen)[..., 0] < 0) @ (2 ** np.arange(HORIZON)[::-1])
        return np.stack([np.bincount(row, minlength=len(SIGNS)) / draws for row in which.reshape(LENGTH, draws)])

    def look(state: TrainState) -> Found:
        values, best, plain = asked(state)
        return Found(np.asarray(values).reshape(LENGTH, len(SIGNS), -1).mean(-1), shares(best), shares(plain))

    return look


def of_case(states, number: int):
    """One case's state from states of all cases."""
    return jax.tree.map(lambda x: x[number], states)


def fatal() -> np.ndarray:
    """[LENGTH, 4]: chunks whose first action falls."""
    return np.outer(np.arange(LENGTH) % 2 == 1, SIGNS[:, 0] < 0)

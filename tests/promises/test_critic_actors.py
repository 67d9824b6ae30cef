"""Other actors on Q-chunking's critic learn on the chain, and from outcomes dealt at random they learn nothing."""

import functools
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import chain
from chain import Case
from pirl.agents.config import CriticNFTConfig, QCFQLConfig
from pirl.agents.critic_nft import CriticNFT
from pirl.agents.learner import Learner
from pirl.agents.q_chunking import QChunking
from pirl.agents.qc_fql import QCFQL

CASES = [Case(), Case(shuffled=True, episodes=1600)]
STEPS, WARMUP = 480, 120
SETTINGS = {"discount": chain.DISCOUNT, "flow_steps": 4, "flow_draws": 2, "target_update_rate": 0.05}


def make(name: str, warmup: int = WARMUP) -> QChunking:
    critic = chain.make_agent().critic
    learner = Learner(tx=optax.adam(3e-3), ema_decay=0.96)
    common = {"policy": chain.POLICY, "critic": critic, "policy_learner": learner, "critic_learner": learner}
    shared = SETTINGS | {"actor_warmup_steps": warmup}
    if name == "critic_nft":
        return CriticNFT(config=CriticNFTConfig(num_action_samples=4, old_rate=0.01, **shared), **common)
    return QCFQL(config=QCFQLConfig(alpha=0.3, **shared), **common)


@functools.cache
def data() -> dict:
    return chain.batches(CASES, steps=STEPS)


@functools.cache
def optimal(name: str, warmup: int = WARMUP) -> tuple[np.ndarray, dict]:
    """How often a plain sample is as good as the best chunk, case by case; and what was logged."""
    agent = make(name, warmup)
    states, metrics = chain.training(agent)(data(), jax.random.key(1))
    look, truth = chain.looking(agent), chain.best_values(CASES[0])
    found = [look(chain.of_case(states, number)) for number in range(len(CASES))]
    return np.array([one.optimal(truth, one.samples) for one in found]), jax.device_get(metrics)

"""A critic that can be trusted: on a chain with known values, through the real loader, `update` and `act`.

A failure must be worth nothing, whatever the discount, the loss or the luck of the steps: with failures taken for
time-outs, as before `data.failure`, the same run believes in the chunks that fall.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

import chain
from chain import SLIP, Case

LOSSES = ("hl_gauss", "mse")
CASES = [
    Case(discount=discount, **settings)
    for discount in (0.9, 0.98, 0.998)
    for settings in ({}, {"slip": SLIP}, {"slip": SLIP, "failure": "timeout"})
]


@functools.cache
def data() -> dict:
    return chain.batches(CASES)


@functools.cache
def learned(loss: str) -> list[chain.Found]:
    """What is believed after 240 steps, case by case."""
    agent = chain.make_agent(loss=loss)
    states, _ = chain.training(agent)(data(), jax.random.key(1))
    look = chain.looking(agent)
    return [look(chain.of_case(states, number)) for number in range(len(CASES))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", [case for case in CASES if case.failure == "terminal"], ids=str)
def test_values_are_those_of_the_chain(loss: str, case: Case):
    """Within .12 of dynamic programming, in its order; the best of 8 goes ahead where a sample often falls."""
    found, truth = learned(loss)[CASES.index(case)], chain.best_values(case)
    assert found.error(truth) < 0.12
    assert found.error(truth, chain.fatal()) < 0.08
    assert found.rank(truth) > 0.75
    assert found.optimal(truth, found.picks) > 0.9
    assert found.optimal(truth, found.samples) < 0.8


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", [case for case in CASES if case.failure == "timeout"], ids=str)
def test_failures_taken_for_time_outs_are_believed_in(loss: str, case: Case):
    """The bounds above tell the two meanings apart."""
    found, truth = learned(loss)[CASES.index(case)], chain.best_values(case)
    assert found.error(truth) > 0.3
    assert found.error(truth, chain.fatal()) > 0.5
    assert found.rank(truth) < 0.6
    told = learned(loss)[CASES.index(replace(case, failure="terminal"))]
    assert found.optimal(truth, found.picks) < told.optimal(truth, told.picks) - 0.08


def test_the_chain_is_what_it_says():
    """Dynamic programming against walking: the best policy from the first position, step by step."""
    case = Case(slip=SLIP, discount=0.9)
    rng, returns = np.random.default_rng(0), []
    best = chain.best_values(case).argmax(1)
    for _ in range(4000):
        position, step = 0, 0
        while position < chain.LENGTH:
            for sign in chain.SIGNS[best[position]]:
                assert sign > 0  # nothing is gained by resting
                position, step = position + (rng.random() >= SLIP), step + 1
                if position == chain.LENGTH:
                    break
        returns.append(0.9 ** (step - 1))
    assert abs(np.mean(returns) - chain.best_values(case)[0].max()) < 0.01


# Options and controls


OPTIONS = {
    "a learned value": ({"value": "expectile", "expectile": 0.9}, 0.9, 0.9),
    "a partial critic": ({"partial_horizon": 1, "expectile": 0.9}, 0.65, 0.75),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_other_critics_choose_what_dynamic_programming_chooses(option: str):
    """Their values are those of the data's better chunks, not of the best ones; their order is that of the truth."""
    changes, rank, optimal = OPTIONS[option]
    cases = [Case(), Case(slip=SLIP)]
    agent = chain.make_agent(**changes)
    states, _ = chain.training(agent)(chain.batches(cases), jax.random.key(1))
    look = chain.looking(agent)
    for number, case in enumerate(cases):
        found, truth = look(chain.of_case(states, number)), chain.best_values(case)
        assert found.rank(truth) > rank
        assert found.optimal(truth, found.picks) > optimal
        assert found.picks[1::2, 2:].sum(1).max() < 0.05  # nothing falls


def weighed(**changes) -> tuple[list[chain.Found], np.ndarray]:
    """(what the actor does, effective sample size) of true and of shuffled outcomes, two runs each."""
    cases = [Case(discount=0.998, seed=seed, shuffled=shuffled) for shuffled in (False, True) for seed in (0, 1)]
    settings = {"actor": "awr", "bc_loss_weight": 0.0, "target_ess": 0.3, "actor_warmup_steps": 60}
    agent = chain.make_agent(**(settings | changes))
    states, metrics = chain.training(agent)(chain.batches(cases), jax.random.key(1))
    look = chain.looking(agent, draws=256)
    found = [look(chain.of_case(states, number)) for number in range(len(cases))]
    return found, np.asarray(metrics["actor/ess"])[:, -60:].mean(1)


def test_outcomes_dealt_at_random_leave_the_policy_where_it_is():
    """With the defaults. Critics that learn from the same episodes agree about their noise; the policy follows it."""
    cloned, _ = weighed(actor_warmup_steps=10**6)
    (halved, even), (agreeing, greedy) = weighed(), weighed(members="all")

    def moved(after: list[chain.Found]) -> np.ndarray:
        """Total variation between what the two policies do, mean over positions."""
        pairs = zip(after, cloned, strict=True)
        return np.array([np.abs(a.samples - b.samples).sum(1).mean() / 2 for a, b in pairs])

    falls = [found.samples[1::2, 2:].sum(1).mean() for found in halved]
    assert max(falls[:2]) < 0.05 < 0.2 < min(found.samples[1::2, 2:].sum(1).mean() for found in cloned)
    assert max(moved(halved)[2:]) < 0.14
    assert min(moved(agreeing)[2:]) > 0.18
    assert min(even[2:]) > 0.8
    assert max(greedy[2:]) < 0.5

"""Held-out episodes: some of every outcome, the same whatever is recorded later, and never in a training batch."""

import numpy as np
import pytest

from pirl.data.config import DataConfig
from pirl.data.create import create_acrlpd_data_loader
from pirl.data.dataset import MixedSource
from pirl.data.held_out import choose, describe, split
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.pool import fingerprint
from pirl.data.replay import MemorySource
from pirl.errors import ConfigError, PirlWarning
from pirl.records import Episode


def outcomes_of(seed: int, count: int) -> list[bool | None]:
    return [(True, False, None)[kind] for kind in np.random.default_rng(seed).choice(3, count, p=[0.7, 0.2, 0.1])]


def source_of(outcomes: list[bool | None], first: int = 0) -> MemorySource:
    """Episodes of four steps whose states say which one they are."""
    items = []
    for number, success in enumerate(outcomes, first):
        last = np.arange(4) == 3
        episode = Episode(
            task="",
            state=np.full((4, 1), number, np.float32),
            actions=np.full((4, 1), number, np.float32),
            rewards=(last & bool(success)).astype(np.float32),
            terminated=last & bool(success),
            truncated=last & (not success),
            success=success,
        )
        items.append((episode, {}))
    return MemorySource(cameras=(), items=items)


class Plain:
    def low_dim(self, state, actions, prompts):
        return {"state": state} if actions is None else {"state": state, "actions": actions}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5])
def test_every_outcome_gives_its_share(share: float) -> None:
    outcomes = outcomes_of(0, 400)
    chosen = choose(outcomes, share)
    for kind in (True, False, None):
        alike = [i for i, outcome in enumerate(outcomes) if outcome is kind]
        assert abs(len(set(alike) & set(chosen.tolist())) - share * len(alike)) <= 1


@pytest.mark.parametrize("held_out", [0.1, 0.25, 3.0])
def test_episodes_recorded_later_change_nothing(held_out: float) -> None:
    outcomes = outcomes_of(1, 90)
    whole = choose(outcomes, held_out, seed=5)
    for count in range(90):
        found = choose(outcomes[:count], held_out, seed=5)
        # An outcome joins with its fourth episode; until then none of it is apart.
        early = [i for i in whole if i < count and outcomes[:count].count(outcomes[i]) >= 4]
        assert found.tolist() == early


def test_a_rare_outcome_is_measured_and_a_rarer_one_left_alone() -> None:
    assert len(choose([True] * 50 + [False] * 4, 0.02)) == 1 + 1
    assert max(choose([True] * 50 + [False] * 3, 0.02)) < 50


def test_a_count_is_of_each_outcome_and_at_most_a_quarter() -> None:
    outcomes: list[bool | None] = [True] * 40 + [False] * 9
    chosen = choose(outcomes, 5)
    assert (chosen < 40).sum() == 5
    assert (chosen >= 40).sum() in (2, 3)


def test_the_seed_decides_which() -> None:
    outcomes = outcomes_of(2, 200)
    assert choose(outcomes, 0.1, 0).tolist() == choose(outcomes, 0.1, 0).tolist() != choose(outcomes, 0.1, 1).tolist()


def test_mixed_datasets_are_split_one_by_one_in_any_order() -> None:
    a, b = source_of(outcomes_of(3, 60)), source_of(outcomes_of(4, 40), first=1000)

    def apart(*sources: MemorySource) -> set[float]:
        _, held = split(MixedSource(sources), 0.1, 7)
        assert held is not None
        return {float(held.episode(i).state[0, 0]) for i in range(len(held))}

    alone = set()
    for source in (a, b):
        _, held = split(source, 0.1, 7)
        assert held is not None
        alone |= {float(held.episode(i).state[0, 0]) for i in range(len(held))}
    assert apart(a, b) == apart(b, a) == alone


def test_no_batch_holds_a_row_of_an_episode_apart() -> None:
    train, held = split(source_of(outcomes_of(5, 30)), 0.3)
    assert held is not None
    apart = {float(held.episode(i).state[0, 0]) for i in range(len(held))}
    with ACRLPDDataLoader(train, Plain(), config=DataConfig(prefetch=0), batch_size=64, horizon=2, discount=0.9) as got:
        seen = {float(x) for _ in range(8) for x in got.sample_batch()["observations"]["state"][:, 0]}
    assert not seen & apart
    assert len(seen | apart) == 30


def test_the_split_is_part_of_the_fingerprint() -> None:
    source = source_of(outcomes_of(6, 60))
    prints = {
        fingerprint(split(source, held_out, seed)[0]) for held_out, seed in ((0, 0), (0.1, 0), (0.1, 1), (0.2, 0))
    }
    assert len(prints) == 4


def test_a_run_trains_on_the_rest_alone() -> None:
    """Through the function that training calls."""
    from pirl.data.create import create_source, create_transform

    config = DataConfig(
        repo_ids=("synthetic",), robot="synthetic", cameras=(), tokenizer="none", held_out=0.1, prefetch=0
    )
    transform = create_transform(config, horizon=3, action_dim=2, state_dim=2, image_size=24)
    whole = create_source(config, transform.robot, image_size=24)
    with create_acrlpd_data_loader(config, transform=transform, horizon=3, discount=0.9, batch_size=8) as loader:
        episodes = loader.get_dataset_statistics()["offline"].episodes
    assert len(whole) == 200
    assert 178 <= episodes <= 181


def test_nothing_to_keep_apart_is_said() -> None:
    source = source_of([True, True, False])
    with pytest.warns(PirlWarning, match="nothing is held out"):
        train, held = split(source, 0.1)
    assert (train, held) == (source, None)


def test_inspection_names_the_episodes() -> None:
    outcomes: list[bool | None] = [True] * 10 + [False] * 4
    text = describe(outcomes, range(100, 114), 0.1)
    assert "keeps 2 of 14 episodes apart (1 success, 1 failure): 10" in text
    assert describe([True], [0], 0.1).endswith("keeps 0 of 1 episodes apart: no outcome has 4")


@pytest.mark.parametrize("held_out", [-0.1, 0.7, 2.5])
def test_shares_and_counts_that_mean_nothing_are_refused(held_out: float) -> None:
    with pytest.raises(ConfigError, match="held_out"):
        DataConfig(held_out=held_out)

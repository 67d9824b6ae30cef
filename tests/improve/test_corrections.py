"""The words by which a loop's training uses corrections, as docs/robot.md gives them, are those of `pirl train`."""

import json
import re
from pathlib import Path

import pytest

from pirl import recipes
from pirl.agents.agent_config import AgentConfig
from pirl.agents.config import ACRLPDConfig, DAggerConfig
from pirl.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs/robot.md"


def test_the_words_of_the_page_make_corrections_count() -> None:
    told = [json.loads(words) for words in re.findall(r"^\| `(\[.*?\])`", PAGE.read_text(), re.MULTILINE)]
    kinds: list[type[AgentConfig]] = [DAggerConfig, ACRLPDConfig]
    for words, kind in zip(told, kinds, strict=True):
        run = recipes.cli(["acrlpd_tabletop", "--exp-name", "x", "--data-path", "demos", "episodes", *words])
        assert isinstance(run.agent, kind)
        assert run.agent.heeds_corrections
        assert run.data.takeover_window == 4


@pytest.mark.parametrize("cost", [None, -50.0])
def test_being_taken_over_must_not_pay(cost: float | None) -> None:
    """Where every step costs something, an end at no cost is the best there is."""
    words = ["--data.outcome", "step_penalty", "--data.takeover", "failure", "--agent.no-reward-once"]
    words += ["--agent.reward-low", "-51", "--agent.reward-high", "0"]
    words += [] if cost is None else ["--data.takeover-reward", str(cost)]
    if cost is None:
        with pytest.raises(ConfigError, match="being taken over would pay"):
            recipes.cli(["acrlpd_tabletop", "--exp-name", "x", *words])
    else:
        assert recipes.cli(["acrlpd_tabletop", "--exp-name", "x", *words]).data.reward_range == (-51.0, 0.0)

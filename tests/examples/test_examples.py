"""The programs in `examples/` do what they say, at their smallest; and what they rest on refuses what it should."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pirl.checkpoints.weights import load_openpi
from pirl.data.robots import get_robot
from pirl.errors import ConfigError
from pirl.models.params import flatten

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
Example = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    """Runs an example by its number, all of them in one folder; gives what it left in its variables.

    What one of them compiled is not compiled again for the next.
    """
    folder = tmp_path_factory.mktemp("examples")
    found: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in found}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PIRL_HOME", str(folder / "home"))
        patch.syspath_prepend(str(ROOT / "examples"))
        for name, value in found.items():
            jax.config.update(name, value)

        def run(number: int, *words: str) -> SimpleNamespace:
            (file,) = (path for path in EXAMPLES if path.name.startswith(f"{number:02}_"))
            patch.setattr(sys, "argv", [str(file), *words])
            return SimpleNamespace(**runpy.run_path(str(file), run_name="__main__"))

        yield run
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def practised(example: Example) -> SimpleNamespace:
    """Example 06, which 09 goes on from."""
    return example(6)


def test_01_samples_the_same_chunk_for_the_same_seed(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    left = example(1)
    assert left.chunk.shape == (4, 3)
    assert np.isfinite(left.chunk).all()
    assert capsys.readouterr().out.count("chunk: True") == 2


def test_01_reads_another_checkpoint(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    first = example(1).chunk
    np.testing.assert_array_equal(example(1, "example_runs/tiny_pi0").chunk, first)


def test_02_chunks_end_where_episodes_end(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    left = example(2)
    row, batch = left.ends[0], left.batch
    length = int(batch["length"][row])
    assert batch["valid"][row].tolist() == [1.0] * length + [0.0] * (4 - length)
    assert batch["masks"][row, length - 1] == 0
    assert "its target is the reward alone" in capsys.readouterr().out


def test_03_successes_and_failures_are_read_back(example: Example) -> None:
    left = example(3)
    episodes = [left.source.episode(index) for index in range(len(left.source))]
    assert len(episodes) == 19
    assert {episode.success for episode in episodes} == {True, False}
    for episode in episodes:
        assert episode.terminated[-1] == episode.success
        assert episode.truncated[-1] != episode.success
        assert episode.rewards.sum() == float(episode.success)


def test_04_improves_the_clone_and_not_what_is_frozen(example: Example) -> None:
    left = example(4, "--demos", "16", "--bc-steps", "2", "--acrlpd-steps", "2", "--episodes", "6")
    assert len(left.result.trials) == 6
    cloned, improved = (flatten(load_openpi(config.run_dir)) for config in (left.bc, left.acrlpd))
    # Frozen weights are kept in bfloat16, all others in float32: equal up to that.
    same = {name for name in cloned if np.array_equal(cloned[name].astype(improved[name].dtype), improved[name])}
    assert "PaliGemma/llm/layers/mlp/linear" in same
    assert "PaliGemma/llm/layers/mlp_1/linear" not in same


def test_05_tells_a_good_policy_from_a_bad_one(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    left = example(5, "--episodes", "64")
    assert left.steady.success.value == 1.0
    assert left.shaky.success.interval[1] < left.steady.success.interval[0]
    assert left.pairs.p_value < 1e-6
    assert "no fault found" in capsys.readouterr().out


def test_06_practice_helps(practised: SimpleNamespace) -> None:
    lines = (practised.config.run_dir / "metrics.jsonl").read_text().splitlines()
    rates = [rate for line in lines if (rate := json.loads(line)["values"].get("eval/success_rate")) is not None]
    assert len(rates) == 3
    assert rates[-1] > rates[0] + 0.3


def test_07_actions_come_back_as_they_were(example: Example) -> None:
    left = example(7)
    np.testing.assert_allclose(left.back, left.raw["actions"], atol=1e-6)
    assert left.sample["actions"].shape == (10, 32)
    assert left.stats["actions"].std[5] > 2 * left.stats["actions"].std[:5].max()  # absolute, hence wider


def test_08_smooth_is_smoother(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example(8, "--steps", "150")
    plain, smooth = (float(number) for number in re.findall(r"of 64 chunks ([\d.]+)", capsys.readouterr().out))
    assert smooth < 0.9 * plain


def test_09_the_last_checkpoint_is_better(practised: SimpleNamespace, example: Example) -> None:
    left = example(9, "--episodes", "100")
    assert [one.found.step for one in left.checkpoints] == [1, 20]
    assert left.pairs.difference > 0.3
    assert left.pairs.p_value < 1e-3
    assert 'content="pirl report"' in Path("example_runs/report.html").read_text()


def test_10_exports_are_equal_to_the_bit(example: Example) -> None:
    left = example(10)
    assert left.found.keys() == left.expected.keys()
    assert (left.torch / "model.safetensors").is_file()
    assert (left.openpi / "assets/tabletop/norm_stats.json").is_file()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_are_short_and_listed(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) < 70
    assert f"python examples/{file.name}" in text.split('"""')[1]
    for page in (ROOT / "examples/README.md", ROOT / "docs/examples.md"):
        assert file.name in page.read_text()


def test_robots_of_ones_own_are_named_by_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert get_robot("my_simulator:POINT").state_dim == 4
    with pytest.raises(ConfigError, match="my_simulator has no POIMT"):
        get_robot("my_simulator:POIMT")
    with pytest.raises(ConfigError, match="that is a GymConfig"):
        get_robot("my_simulator:REACH")
    with pytest.raises(ConfigError, match="cannot be imported"):
        get_robot("no_such_module:POINT")

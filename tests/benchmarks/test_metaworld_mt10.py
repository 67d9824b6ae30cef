"""The ladder of Meta-World: rows whose commands pirl takes, and a table per task."""

from pathlib import Path
from types import ModuleType

import pytest

from pirl.envs.config import MetaWorldConfig
from pirl.envs.metaworld_tasks import INSTRUCTIONS
from pirl.recipes import cli
from pirl.records import Context
from pirl.rollout.evaluate import Evaluation, Rate, Trial
from pirl.rollout.record import parse_dials

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RESULTS))
    import metaworld_mt10

    return metaworld_mt10


@pytest.mark.parametrize("name", ["pictures", "state"])
def test_every_row_is_a_run_that_starts_from_an_earlier_one(ladder: ModuleType, name: str) -> None:
    task = ladder.TASKS[name]
    seen: list[str] = []
    sizes = set()
    for row in task.rows:
        config = cli([row.recipe, *task.given, *row.settings])
        assert isinstance(config.env, MetaWorldConfig)
        assert config.env.full_state == (name == "state")
        assert config.horizon == task.horizon
        assert config.data.robot == task.robot
        if row.name not in ("untrained", "bc"):
            assert (row.of or row.start) in seen
            assert name == "state" or config.freeze == "vlm_frozen" or config.agent.freezes_policy
            if "ript" not in row.name:
                sizes.add((config.num_train_steps, config.batch_size))
        seen.append(row.name)
    assert len(sizes) == 1  # what is compared makes as many updates of the same size
    dials = parse_dials(MetaWorldConfig(), ladder.DIALS[1:])
    assert (dials.wrong, dials.detour) == (0.5, 0.25)
    assert cli([word for word in ladder.MT10_TASK.record if word not in ladder.DIALS]).env.max_steps == 200


def test_success_is_shown_per_task_over_all_seeds(ladder: ModuleType) -> None:
    reach = INSTRUCTIONS["reach-v3"]
    results = [{"method": "bc", "tasks": {reach: {"successes": successes, "trials": 50}}} for successes in (10, 20)]
    lines = ladder.by_task(results, ladder.MT10_TASK.rows).splitlines()
    assert lines[0] == "| task | BC |"
    assert lines[2] == "| reach-v3 | 30 [22, 40] |"
    assert lines[3] == "| push-v3 | – |"
    assert ladder.by_task([], ladder.MT10_TASK.rows) == ""


def test_an_evaluation_reaches_both_tables_of_the_page(
    ladder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [
        Trial(context=Context(INSTRUCTIONS["window-open-v3"], init), success=init < 3, reward=0.0, length=9)
        for init in range(4)
    ]
    climb = ladder.Ladder(task=ladder.MT10_TASK, run=tmp_path, share=0.5)
    found = Evaluation(trials=trials)
    climb.note("demos", 0, Rate(successes=1, trials=2))
    climb.note("acrlpd_best", 2000, found.success, found.to_json()["tasks"])
    page = tmp_path / "metaworld.md"
    page.write_text((ladder.DOCS / "metaworld.md").read_text())
    monkeypatch.setattr(ladder, "PAGE", page)
    monkeypatch.setattr(ladder, "RAW", tmp_path / "metaworld.jsonl")
    for _ in range(2):  # the second time adds nothing
        ladder.report(tmp_path)
    text = page.read_text()
    assert text.count("| the demonstrations themselves | 0 | 0.500 [0.09, 0.91] | 0.500 (one seed) |") == 1
    assert text.count("| – best of 8 by its critic | 2,000 | 0.750 [0.30, 0.95] | 0.750 (one seed) |") == 1
    assert "Success on 4 test states." in text
    assert text.count("| window-open-v3 | 75 [30, 95] |") == 1
    assert len((tmp_path / "metaworld.jsonl").read_text().splitlines()) == 2

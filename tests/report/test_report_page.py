"""The page: closed HTML that asks nothing of other places, with the right numbers, whatever runs are called."""

import base64
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pirl.report import films
from pirl.report.markup import VOID
from pirl.report.page import build_page
from pirl.report.run import read_run, read_runs
from pirl.report.tables import config_changes
from run_folders import MP4, PNG, rate, write_evaluation, write_records

MakeRun = Callable[..., Path]
HOSTILE = """"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"""


class Page(HTMLParser):
    """Reads a page, and notices what no page should have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        for tag, attributes in self.tags:
            assert tag not in ("link", "iframe", "object", "embed", "base", "form")
            assert not [name for name in attributes if name.startswith("on")]
            for name in ("src", "href", "poster", "srcset", "data", "action"):
                where = attributes.get(name) or "#"
                assert where.startswith(("data:image/png;base64,", "data:video/mp4;base64,", "#")), (tag, where[:40])
                if where != "#" and where.startswith("#"):
                    assert where[1:] in ids
        assert [tag for tag, _ in self.tags].count("script") == 1
        assert "http:" not in text
        assert "https:" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"<{tag}> says something twice"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and all(attributes.get(key.rstrip("_")) == value for key, value in wanted.items())
        ]

    @property
    def sections(self) -> list[str]:
        return [str(attributes["id"]) for attributes in self.all("section")]


def page_of(*folders: Path, recipes: dict | None = None) -> Page:
    return Page(build_page([read_run(folder) for folder in folders], recipes or {}))


def test_one_run(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "first_batch.png").write_bytes(PNG)
    page = page_of(folder, recipes={"debug": {"num_train_steps": 300, "agent": {"type": "ACRLPD"}, "seed": 42}})
    assert page.sections == ["success", "losses", "memory", "settings", "pictures", "about"]
    assert "20 % → 90 %" in page.text
    assert "success at step 0 → 60; now 80 to 95 %" in page.text
    assert "384" in page.text
    assert "1 min 20 s" in page.text
    assert "last record 2023-11-14 22:14 UTC" in page.text
    assert "code 0123456789ab" in page.text
    assert ["num_train_steps", "300", "60"] in page.rows
    assert ["seed", "42", "(not set)"] in page.rows
    assert ["agent.type", "ACRLPD", "ACRLPD"] not in page.rows
    (picture,) = page.all("img")
    assert base64.b64decode(str(picture["src"]).split(",")[1]) == PNG


def test_a_run_without_an_environment_has_no_success(make_run: MakeRun) -> None:
    page = page_of(make_run(success=False))
    assert page.sections == ["losses", "memory", "settings", "about"]
    assert "success" not in page.text
    assert "There is no recipe debug here to compare with." in page.text


def test_success_has_its_interval(make_run: MakeRun) -> None:
    page = page_of(make_run())
    (band,) = page.all("path", class_="band c0 r0")
    # From (step 0: 10 to 25 %) to (step 60: 80 to 95 %), in thousandths from the top.
    assert str(band["d"]).startswith("M0 750L")
    assert "L1000 50L1000 200L" in str(band["d"])
    assert str(band["d"]).endswith("L0 900Z")


def test_runs_are_compared(make_run: MakeRun) -> None:
    folders = [make_run("bc/first"), make_run("ript/first", 6)]
    write_records(folders[1] / "metrics.jsonl", [(6, {"critic/loss": 1.0, "new/metric": 1.0})])
    page = page_of(*folders)
    assert page.sections[:2] == ["runs", "success"]
    head, bc, ript = page.rows[:3]
    assert head == ["run", "algorithm", "before", "after", "change", "steps", "episodes", "time"]
    assert bc[0] == "bc"
    assert bc[2].startswith("20 %")
    assert bc[3].startswith("90 %")
    assert "80 to 95 %" in bc[3]
    assert bc[4] == "+70.0 points"
    assert ript[2:5] == ["–", "–", "–"]
    assert "drawn over the share of each" in page.text, "6 steps cannot be seen beside 60"
    assert page.all("input", id="show1")
    assert "body:has(#show1:not(:checked)) .r1{display:none}" in build_page([read_run(f) for f in folders], {})
    assert "new/metric" in page.text, "a metric that nobody foresaw is shown all the same"
    assert "others" in page.sections


def test_names_are_short_while_they_differ(make_run: MakeRun) -> None:
    a, b, c = make_run("bc/a"), make_run("bc/b"), make_run("ript/a")

    def title(*folders: Path) -> str:
        return page_of(*folders).text.split(" – pirl report")[0]

    assert title(a) == "bc/a"
    assert title(a, b) == "a · b"
    assert title(a, c) == "bc · ript"
    assert title(a, b, c) == "bc/a · bc/b · ript/a"
    assert title(a, a) == "bc/a (1) · bc/a (2)"


def test_the_same_files_give_the_same_page(make_run: MakeRun) -> None:
    folder = make_run()
    assert build_page([read_run(folder)], {}) == build_page([read_run(folder)], {})


def test_hostile_text_is_only_text(make_run: MakeRun) -> None:
    quoted = json.dumps(HOSTILE)
    folder = make_run(config=f"name: {quoted}\nexp_name: {quoted}\nagent: {{type: {quoted}}}\n{quoted}: {quoted}\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 60, "time": 0, "values": {HOSTILE: 1.0}}) + "\n" + HOSTILE)
    evaluation = write_evaluation(
        folder, [True, False, True], films={0: MP4}, recipe=HOSTILE, split=HOSTILE, best_of=HOSTILE
    )
    content = json.loads((evaluation / "eval.json").read_text())
    content["result"]["tasks"] = {HOSTILE: rate(1, 2), "other": rate(1, 2)}
    content["result"]["episodes"][0]["task"] = HOSTILE
    (evaluation / "eval.json").write_text(json.dumps(content))
    (folder / "60" / "extra" / "metadata.json").write_text(
        json.dumps({"revision": HOSTILE, "versions": {"x": HOSTILE}})
    )
    page = page_of(folder, recipes={HOSTILE: {HOSTILE: "other"}})
    assert not page.all("img")
    assert page.text.count("<script>alert(1)</script>") > 8


def test_only_its_own_script_may_run(make_run: MakeRun) -> None:
    (policy,) = page_of(make_run()).all("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy["content"]).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert "unsafe" not in rules["script-src"]


def test_evaluations_by_task(make_run: MakeRun) -> None:
    folder = make_run()
    write_evaluation(folder, [True, False, True, True], films={})
    write_evaluation(folder, [True, True, True, True], films={}, name="b", best_of=8)
    write_evaluation(folder, [True] * 6, films={}, name="c")
    page = page_of(folder)
    assert "Tabletop test states, 4 episodes" in page.text
    assert "Tabletop test states, 6 episodes" in page.text, "another question, another table"
    (first, _) = [row for row in page.rows if row[0] == "task"]
    assert first == ["task", "step 60", "step 60, best of 8"]
    rows = [row for row in page.rows if row[0] in ("all tasks", "red")]
    assert rows[0][1] == "75 % (3/4) 25 to 75 %"
    assert rows[1][1:] == ["100 % (2/2) 25 to 75 %"] * 2


def test_a_comparison_is_told_and_the_other_policy_shown_once(make_run: MakeRun) -> None:
    bc, rl = make_run("bc/first"), make_run("rl/first")
    theirs = json.loads((write_evaluation(bc, [True, False], films={}) / "eval.json").read_text())
    file = write_evaluation(rl, [True, True], films={1: MP4 + b"a1"}) / "eval.json"
    (file.parent / "compared_with").mkdir()
    (file.parent / "compared_with" / "failure-0001.mp4").write_bytes(MP4 + b"b1")
    comparison = {"difference": 0.5, "p_value": 1.0, "both": 1, "neither": 0, "only_this": 1, "only_other": 0}
    content = json.loads(file.read_text()) | {"compared_with": {**theirs, "comparison": comparison}}
    file.write_text(json.dumps(content))
    alone, both = page_of(rl), page_of(bc, rl)
    assert ["task", "bc/first, step 60", "step 60"] in alone.rows
    assert ["task", "bc, step 60", "rl, step 60"] in both.rows
    assert "rl, step 60 against bc, step 60, state by state: +50.0 points, p = 1" in both.text
    labels = ["bc/first, step 60: failure after 8 steps", "step 60: success after 8 steps"]
    assert [video["aria-label"] for video in alone.all("video")] == labels
    assert len(both.all("video")) == 1, "on a page of its own runs, those have their own films"


def test_films_of_one_state_stand_together(make_run: MakeRun) -> None:
    before, after = make_run("bc/first"), make_run("rl/first")
    write_evaluation(before, [False, True, False], films={0: MP4 + b"b0", 1: MP4 + b"b1"})
    write_evaluation(after, [True, True, True], films={0: MP4 + b"a0", 2: MP4 + b"a2"})
    paired, alone, missing = films.choose([read_run(before), read_run(after)])
    assert [[take.film.file.read_bytes()[-2:] for take in row.takes] for row in paired] == [[b"b0", b"a0"]]
    assert [row.takes[0].film.number for row in alone] == [1, 2]
    assert missing == 0
    page = page_of(before, after)
    shown = [base64.b64decode(str(video["src"]).split(",")[1])[-2:] for video in page.all("video")]
    assert shown == [b"b0", b"a0", b"b1", b"a2"]
    assert [video["aria-label"] for video in page.all("video")][:2] == [
        "bc, step 60: failure after 7 steps",
        "rl, step 60: success after 7 steps",
    ]
    assert "red (episode 0)" in page.text


def test_states_of_other_environments_are_other_states(make_run: MakeRun) -> None:
    before, after = make_run("bc/first"), make_run("rl/first")
    write_evaluation(before, [True], films={0: MP4})
    write_evaluation(after, [True], films={0: MP4}, env={"type": "Tabletop", "level": "hard"})
    assert films.choose([read_run(before), read_run(after)])[0] == []


def test_films_keep_to_the_budget_pairs_first_then_small_ones(make_run: MakeRun) -> None:
    before, after = make_run("bc/first"), make_run("rl/first")
    write_evaluation(before, [True] * 4, films={0: MP4 + bytes(400), 1: MP4, 2: MP4 + bytes(100), 3: MP4 + bytes(900)})
    write_evaluation(after, [True] * 4, films={0: MP4 + bytes(400), 3: MP4 + bytes(900)})
    runs = [read_run(before), read_run(after)]
    paired, alone, missing = films.choose(runs, budget=1100)
    assert [row.takes[0].film.number for row in paired] == [0]
    assert [row.takes[0].film.number for row in alone] == [1]
    assert missing == 3


def test_films_that_are_none_or_not_of_this_evaluation_are_left_out(make_run: MakeRun) -> None:
    folder = make_run()
    evaluation = write_evaluation(folder, [True, False], films={0: b"not a film at all", 1: MP4})
    (evaluation / "success-0001.mp4").write_bytes(MP4)
    (evaluation / "failure-0007.mp4").write_bytes(MP4)
    page = page_of(folder)
    assert len(page.all("video")) == 1
    assert "60-test/success-0000.mp4 is not a file of type video/mp4" in page.text
    for name in ("success-0001", "failure-0007"):
        assert f"evaluations/60-test/{name}.mp4 is not of this evaluation" in page.text


def test_pictures_that_are_none_or_too_large_are_left_out(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run()
    (folder / "first_batch.png").write_bytes(b"GIF89a")
    assert "first_batch.png is not a file of type image/png" in page_of(folder).text
    (folder / "first_batch.png").write_bytes(PNG)
    monkeypatch.setattr(films, "LARGEST_PICTURE", 10)
    page = page_of(folder)
    assert "first_batch.png is larger than" in page.text
    assert "pictures" not in page.sections


def test_settings_are_compared_leaf_by_leaf() -> None:
    recipe = {"name": "r", "exp_name": "run", "agent": {"type": "BC", "x": [1, 2]}, "env": None, "lr": 1}
    config = {
        "name": "r",
        "exp_name": "mine",
        "agent": {"type": "BC", "x": [1, 3]},
        "env": {"level": "easy"},
        "lr": 1.0,
    }
    assert config_changes(recipe, config) == [
        ("agent.x", "[1, 2]", "[1, 3]"),
        ("env", "null", "(not set)"),
        ("env.level", "(not set)", "easy"),
    ]


def test_an_evaluation_kept_elsewhere_joins_its_run(make_run: MakeRun, tmp_path: Path) -> None:
    bc, rl = make_run("bc/first"), make_run("rl/first")
    elsewhere = []
    for run in (bc, rl):
        write_evaluation(run, [True, False], films={0: MP4}).rename(tmp_path / run.parent.name / "kept")
        elsewhere.append(tmp_path / run.parent.name / "kept")
    runs = read_runs([elsewhere[1], bc, rl, elsewhere[0]])
    assert [(run.recipe, run.last_step, len(run.evaluations)) for run in runs] == [("bc", 60, 1), ("rl", 60, 1)]
    page = Page(build_page(runs, {}))
    assert ["task", "bc, step 60", "rl, step 60"] in page.rows
    assert len(page.all("video")) == 2
    assert [run.recipe for run in read_runs([elsewhere[1], bc])] == ["rl", "bc"], "without its run it stands alone"


def test_the_folder_of_one_evaluation_will_do(make_run: MakeRun, tmp_path: Path) -> None:
    evaluation = write_evaluation(make_run("bc/first"), [True, False], films={0: MP4})
    page = page_of(evaluation)
    assert page.text.startswith("bc/first")
    assert page.sections == ["evaluations", "films", "about"]

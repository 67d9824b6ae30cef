"""The loop's page in a real browser: it needs nothing from elsewhere, shows what happened, and renews itself."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pirl.improve import page
from pirl.improve.config import LoopConfig
from pirl.improve.state import Generation, State

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'pirl[browser]'")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium")

FIRST = Generation(
    number=1,
    policy="checkpoints/<b>start</b>",
    candidate="runs/generation-001/800",
    collected={"episodes": 60, "successes": 32, "corrected": 9, "successes_alone": 27},
    held_out={"rate": 0.875, "low": 0.82, "high": 0.91},
    comparison={"successes": [13, 23], "episodes": [24, 24], "low": 0.08, "high": 0.72},
    decision="promote",
)


def test_the_page_shows_generations_and_follows_the_loop(tmp_path: Path) -> None:
    config = LoopConfig(folder=str(tmp_path), recipe="acrlpd_tabletop", start="checkpoints/<b>start</b>", generations=2)
    begun = State(policy=config.start, base=config.start)
    page.write(config, begun, doing="generation 1: collect 60 episodes with <script>alert(1)</script>")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened: Any = browser.new_page()
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("dialog", lambda dialog: problems.append(dialog.message))
        opened.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
        opened.goto((tmp_path / page.FILE).as_uri())
        assert "collect 60 episodes with <script>alert(1)</script>" in opened.inner_text("body")
        assert "No generation has finished yet." in opened.inner_text("body")
        assert opened.inner_text("code") == "checkpoints/<b>start</b>"

        done = State(policy=FIRST.candidate, base=FIRST.candidate, finished=(FIRST,))
        page.write(config, done, doing="generation 2: train")
        opened.wait_for_selector("td", timeout=30_000)  # the page loads itself again
        cells = opened.locator("td").all_inner_texts()
        assert cells[:3] == ["1", "27 of 51 succeed alone; 9 corrected", "88%"]
        assert cells[3] == "current 13/24, candidate 23/24; difference +0.08 to +0.72"
        assert opened.inner_text(".promote") == "promote"

        page.write(LoopConfig(**{**vars(config), "generations": 1}), done, doing="")
        opened.reload()
        assert "Finished." in opened.inner_text("body")
        assert opened.locator("meta[http-equiv=refresh]").count() == 0
        assert problems == []
        browser.close()

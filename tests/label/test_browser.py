"""The page in a real browser: keys, films, undo, and a server that dies in between."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pirl.data import labels
from pirl.label.server import LabelServer

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'pirl[browser]'")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, server: LabelServer) -> Iterator[Any]:
    context = browser.new_context()
    opened = context.new_page()
    opened.problems = []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.goto(server.url)
    opened.wait_for_selector("#list button.here")
    yield opened
    context.close()
    assert opened.problems == []


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def verdicts(dataset: Path, server: LabelServer) -> dict[int, labels.Verdict]:
    return labels.newest(labels.read(dataset, server.lengths))


def test_label_by_keys(page: Any, server: LabelServer, dataset: Path) -> None:
    assert page.input_value("#name") == "ann"
    page.keyboard.press("4")  # quality first, then the outcome, then on to the next
    page.keyboard.press("s")
    until(lambda: page.text_content("#title").startswith("episode 1"))
    page.keyboard.press("f")
    page.keyboard.press("u")
    until(lambda: len(verdicts(dataset, server)) == 3)
    assert [verdicts(dataset, server)[index].labels[0].outcome for index in range(3)] == [
        "success",
        "failure",
        "unsure",
    ]
    assert verdicts(dataset, server)[0].labels[0].quality == 4
    page.keyboard.press("z")  # the last one was a slip
    until(lambda: 2 not in verdicts(dataset, server))
    assert page.text_content("#title").startswith("episode 2")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("m")
    until(lambda: 2 in verdicts(dataset, server))
    assert verdicts(dataset, server)[2].moment == 3
    page.keyboard.press("n")
    assert page.text_content("#title").startswith("episode 3")
    assert "3 of 5" in page.text_content("#count")


def test_the_film_shows_the_episode_and_not_its_neighbours(page: Any, server: LabelServer) -> None:
    """Several episodes share a file: each begins at its own frame of it, in every camera."""
    episode = server.meta.episodes[1]
    page.click("#list button:nth-child(2)")
    until(lambda: page.evaluate("[...document.querySelectorAll('video')].every(film => film.readyState >= 2)"))
    for number, camera in enumerate(server.meta.cameras):
        begin = episode.cameras[camera].first / server.meta.fps
        at = page.evaluate(f"document.querySelectorAll('video')[{number}].currentTime")
        assert begin <= at < begin + 1 / server.meta.fps
    page.keyboard.press("e")
    assert f"frame {episode.length - 1} of {episode.length - 1}" in page.text_content("#frame")
    page.keyboard.press("Space")  # from the start again, to the end of the episode and no further
    until(lambda: page.evaluate(f"Number(document.getElementById('time').value) === {episode.length - 1}"))
    last = (episode.cameras[server.meta.cameras[0]].first + episode.length) / server.meta.fps
    until(lambda: page.evaluate("document.querySelector('video').paused"))
    assert page.evaluate("document.querySelector('video').currentTime") <= last + 1 / server.meta.fps


@pytest.mark.parametrize("dataset", ["v21_image"], indirect=True)
def test_pictures_instead_of_films(page: Any) -> None:
    until(lambda: page.evaluate("[...document.querySelectorAll('figure img')].every(one => one.naturalWidth === 128)"))
    page.keyboard.press("e")
    until(lambda: page.evaluate("document.querySelector('figure img').src.endsWith('/36')"))


def test_another_persons_label_appears_as_a_conflict(page: Any, server: LabelServer, dataset: Path) -> None:
    page.keyboard.press("s")
    labels.append(dataset, labels.Label(episode_index=0, by="bob", outcome="failure"))
    page.wait_for_selector("#list button.conflict", timeout=15_000)
    assert "bob: failure" in page.get_attribute("#list button.conflict", "title")


def test_labels_survive_a_server_and_a_browser_that_die(
    browser: Any, server: LabelServer, dataset: Path, tmp_path: Path
) -> None:
    """What was given while the server was away is sent by the next page that finds it again."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#list button.here")
    page.route("**/labels", lambda route: route.abort())
    page.keyboard.press("s")
    until(lambda: page.evaluate("document.getElementById('problem').textContent.includes('not stored')"))
    assert verdicts(dataset, server) == {}
    page.close(run_before_unload=False)
    again = context.new_page()
    again.goto(server.url)
    until(lambda: 0 in verdicts(dataset, server))
    assert verdicts(dataset, server)[0].success is True
    context.close()


def test_a_name_is_asked_for(browser: Any, dataset: Path) -> None:
    with LabelServer(dataset) as nameless:
        thread = threading.Thread(target=nameless.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        page = browser.new_page()
        page.goto(nameless.url)
        page.wait_for_selector("#list button.here")
        page.keyboard.press("s")
        assert "your name" in page.text_content("#problem")
        assert not (dataset / labels.LABELS_FILE).exists()
        page.close()
        nameless.shutdown()
        thread.join()

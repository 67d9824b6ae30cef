"""The labelling server over HTTP: what it serves, what it stores, and whom it answers."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from pirl.data import labels, lerobot, video
from pirl.errors import DataError
from pirl.label.server import LabelServer

HIGH = "observation.images.cam_high"


def ask(
    server: LabelServer, path: str, *, token: str | None = None, body: Any = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    where = f"/{server.token if token is None else token}/{path}"
    kind = {"Content-Type": "application/json"} if body is not None else {}
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", where, sent, {**kind, **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def give(server: LabelServer, index: int, by: str, outcome: str | None, **more: Any) -> dict[str, Any]:
    status, body, _ = ask(server, "labels", body={"episode_index": index, "by": by, "outcome": outcome, **more})
    assert status == 200, body
    return json.loads(body)


def test_the_page_needs_nothing_from_elsewhere(server: LabelServer) -> None:
    status, body, headers = ask(server, "")
    text = body.decode()
    assert status == 200
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    nonce = headers["Content-Security-Policy"].split("script-src 'nonce-")[1].rstrip("'")
    assert text.count(nonce) == 2
    facts = json.loads(ask(server, "facts")[1])
    assert [one["length"] for one in facts["episodes"]] == list(server.lengths.values())
    assert facts["name"] == "ann"


def test_only_who_has_the_token_is_answered(server: LabelServer, dataset: Path) -> None:
    label = {"episode_index": 0, "by": "eve", "outcome": "success"}
    assert ask(server, "facts", token="wrong")[0] == 403
    assert ask(server, "facts", token="")[0] == 403
    assert ask(server, "labels", token="wrong", body=label)[0] == 403
    assert ask(server, "facts", Host="evil.example")[0] == 403  # another name that points here
    assert ask(server, "labels", body=label, Origin="http://evil.example")[0] == 403
    assert ask(server, "labels", body=json.dumps(label).encode(), **{"Content-Type": "text/plain"})[0] == 400
    assert server.server_address[0] == "127.0.0.1"
    assert not (dataset / labels.LABELS_FILE).exists()


@pytest.mark.parametrize(
    "path", ["film/../../meta/info.json", "film/0/99", "film/99/0", "film/0/..", "frame/0/0/0", "meta/info.json", "x"]
)
def test_nothing_else_is_served(server: LabelServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_films_come_whole_and_in_parts(server: LabelServer, tmp_path: Path) -> None:
    path = server.episodes[1].cameras[HIGH].path
    camera = server.meta.cameras.index(HIGH)
    content = path.read_bytes()
    status, body, headers = ask(server, f"film/1/{camera}")
    assert (status, body, headers["Accept-Ranges"]) == (200, content, "bytes")
    for wanted, part in {"bytes=10-19": content[10:20], "bytes=100-": content[100:], "bytes=-7": content[-7:]}.items():
        status, body, headers = ask(server, f"film/1/{camera}", Range=wanted)
        assert (status, body) == (206, part)
        assert headers["Content-Range"].endswith(f"/{len(content)}")
    assert ask(server, f"film/1/{camera}", Range=f"bytes={len(content)}-")[0] == 416
    (tmp_path / "film.mp4").write_bytes(content)
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert film.streams.video[0].codec_context.name in ("libdav1d", "av1", "h264")


@pytest.mark.parametrize("dataset", ["v21_image"], indirect=True)
def test_pictures_of_an_image_dataset(server: LabelServer, tmp_path: Path) -> None:
    camera = server.meta.cameras.index(HIGH)
    frames = video.read_frames(server.meta, server.meta.episodes[2], HIGH, size=None)
    for number in (0, len(frames) - 1):
        status, body, headers = ask(server, f"frame/2/{camera}/{number}")
        (tmp_path / "one.png").write_bytes(body)
        assert (status, headers["Content-Type"]) == (200, "image/png")
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "one.png").convert("RGB")), frames[number])
    assert ask(server, f"frame/2/{camera}/{len(frames)}")[0] == 404
    assert ask(server, f"film/2/{camera}")[0] == 404


def test_a_label_is_on_the_disk_when_it_is_answered(server: LabelServer, dataset: Path) -> None:
    give(server, 0, "ann", "success", moment=5, quality=4)
    give(server, 0, "bob", "failure")
    give(server, 1, "ann", "unsure")
    table = give(server, 1, "ann", None)  # undone
    assert table == {
        "0": [
            {"by": "ann", "outcome": "success", "moment": 5, "quality": 4, "score": None},
            {"by": "bob", "outcome": "failure", "moment": None, "quality": None, "score": None},
        ]
    }
    assert len((dataset / labels.LABELS_FILE).read_text().splitlines()) == 4  # what was said stays readable
    assert labels.newest(labels.read(dataset, server.lengths))[0].conflict
    assert json.loads(ask(server, "labels")[1]) == table


def test_the_page_gets_the_classifiers_score(server: LabelServer, dataset: Path) -> None:
    said = {"episode_index": 0, "by": "classifier", "outcome": "success", "score": 0.97}
    (dataset / labels.LABELS_FILE).write_text(json.dumps(said) + "\n")
    assert [one["score"] for one in server.label_table()["0"]] == [0.97]


@pytest.mark.parametrize(
    "wrong",
    [
        {"episode_index": 77},
        {"episode_index": "0"},
        {"by": " "},
        {"by": "a\nb"},
        {"outcome": "yes"},
        {"moment": 10_000},
        {"moment": -1},
        {"outcome": "failure", "moment": 3},
        {"quality": 6},
        {"quality": True},
    ],
)
def test_wrong_labels_are_refused(server: LabelServer, dataset: Path, wrong: dict[str, Any]) -> None:
    status, body, _ = ask(server, "labels", body={"episode_index": 0, "by": "ann", "outcome": "success"} | wrong)
    assert status == 400
    assert json.loads(body)["error"]
    assert not (dataset / labels.LABELS_FILE).exists()


def test_bodies_that_are_no_labels(server: LabelServer) -> None:
    for body in (b"", b"{", b"[" * 5000, b"[1]", b"x" * 20_000):
        assert ask(server, "labels", body=body)[0] == 400


def test_two_labellers_at_once_lose_nothing(server: LabelServer, dataset: Path) -> None:
    """Two servers on one dataset, as two people on one machine have it, and every label of both arrives."""
    with LabelServer(dataset) as other, ThreadPoolExecutor(8) as threads:
        import threading

        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        jobs = [
            threads.submit(give, who, index % 5, name, ("success", "failure")[index % 2], quality=index % 6)
            for index in range(20)
            for who, name in ((server, "ann"), (other, "bob"))
        ]
        for job in jobs:
            job.result()
        other.shutdown()
        thread.join()
    found = labels.read(dataset, server.lengths)
    assert sorted(one.by for one in found) == ["ann"] * 20 + ["bob"] * 20
    assert set(labels.newest(found)) == set(range(5))


def test_a_dataset_without_cameras_is_refused(dataset: Path) -> None:
    path = dataset / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"] = {key: one for key, one in info["features"].items() if "images" not in key}
    path.write_text(json.dumps(info))
    assert not lerobot.read_meta(dataset).cameras
    with pytest.raises(DataError, match="no cameras"):
        LabelServer(dataset)

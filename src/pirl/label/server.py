"""The local server behind `pirl label`: serves the episodes' videos, and syncs labels to disk before it replies.

It listens only on 127.0.0.1 and only answers addresses that begin with a random token, so that neither other machines
nor other pages in the browser can read videos or store labels. Requests name files by numbers in the dataset's
metadata, never by paths.
"""

import json
import re
import secrets
import threading
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pirl.data import labels, lerobot, video
from pirl.errors import DataError
from pirl.label.page import page

HOST = "127.0.0.1"
_PIECE = 1 << 20  # bytes of a video sent at a time
_LONGEST = 10_000  # most bytes of a request


class LabelServer(ThreadingHTTPServer):
    """Serves one dataset until `shutdown`."""

    daemon_threads = True

    def __init__(self, dataset: str | Path, *, name: str = "", port: int = 0) -> None:
        """Open a dataset folder or repo id; port 0 picks a free one. `name` is the default annotator."""
        self.meta = lerobot.read_meta(lerobot.resolve(dataset))
        lerobot.check_files(self.meta, self.meta.cameras)
        if not self.meta.cameras:
            raise DataError(f"{self.meta.root}: has no cameras, so there is nothing to see", hint="give a success_file")
        self.lengths = {one.index: one.length for one in self.meta.episodes}
        self.episodes = {one.index: one for one in self.meta.episodes}
        self.name, self.token = name, secrets.token_urlsafe(16)
        self.read_labels()  # report an unreadable file before the browser opens
        self.pictures = lru_cache(maxsize=8)(self._pictures)
        self._decoding = threading.Lock()
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The address to open in a browser on this machine."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def read_labels(self) -> dict[int, labels.Verdict]:
        """The current labels on disk; other annotators may write too."""
        return labels.newest(labels.read(self.meta.root, self.lengths))

    def facts(self) -> dict[str, Any]:
        """The dataset's facts for the page."""
        return {
            "dataset": self.meta.root.name,
            "fps": self.meta.fps,
            "name": self.name,
            "cameras": [
                {"name": key.removeprefix("observation.images."), "kind": self.meta.features[key].dtype}
                for key in self.meta.cameras
            ],
            "episodes": [
                {
                    "index": one.index,
                    "length": one.length,
                    "task": "; ".join(one.tasks),
                    "first": [one.cameras[key].first for key in self.meta.cameras],
                }
                for one in self.meta.episodes
            ],
            "labels": self.label_table(),
        }

    def label_table(self) -> dict[str, list[dict[str, Any]]]:
        """The newest label of each annotator, by episode."""
        return {
            str(index): [
                {"by": one.by, "outcome": one.outcome, "moment": one.moment, "quality": one.quality}
                for one in verdict.labels
            ]
            for index, verdict in self.read_labels().items()
        }

    def picture(self, episode: int, camera: int, frame: int) -> bytes:
        """One frame as PNG, for datasets that store images."""
        with self._decoding:
            return self.pictures(episode, camera)[frame]

    def _pictures(self, episode: int, camera: int) -> list[bytes]:
        return video.stored_pictures(self.meta, self.episodes[episode], self.meta.cameras[camera])


class _Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: LabelServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Serve the page, the facts, the labels, a video or a frame."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Store a label."""
        self._answer(self._post)

    def _answer(self, respond: Any) -> None:
        try:
            if (path := self._allowed()) is None:
                self._send(HTTPStatus.FORBIDDEN, {"error": "open the address that `pirl label` printed"})
            elif not respond(path):
                self._send(HTTPStatus.NOT_FOUND, {"error": "there is no such thing here"})
        except DataError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except (BrokenPipeError, ConnectionResetError):  # the browser moved on to another video
            self.close_connection = True

    def _allowed(self) -> str | None:
        """The path after the token; None if token, host or origin is wrong."""
        here = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        _, token, *rest = (*urlsplit(self.path).path.split("/", 2), "", "")[:3]
        fits = secrets.compare_digest(token.encode(), self.server.token.encode())
        if not fits or self.headers.get("Host") not in here or (origin and urlsplit(origin).netloc not in here):
            return None
        return rest[0]

    def _get(self, path: str) -> bool:
        if path == "":
            nonce = secrets.token_urlsafe(12)
            own = f"connect-src 'self'; img-src 'self' data:; media-src 'self'; style-src 'nonce-{nonce}'"
            headers = {"Content-Security-Policy": f"default-src 'none'; {own}; script-src 'nonce-{nonce}'"}
            self._send(HTTPStatus.OK, page(nonce).encode(), "text/html; charset=utf-8", headers)
        elif path == "facts":
            self._send(HTTPStatus.OK, self.server.facts())
        elif path == "labels":
            self._send(HTTPStatus.OK, self.server.label_table())
        elif (span := self._numbers(r"film/(\d+)/(\d+)", path)) is not None and self._kind(span[1]) == "video":
            episode, camera = self.server.episodes[span[0]], self.server.meta.cameras[span[1]]
            self._film(episode.cameras[camera].path)
        elif (span := self._numbers(r"frame/(\d+)/(\d+)/(\d+)", path)) is not None and self._kind(span[1]) == "image":
            if span[2] >= self.server.lengths[span[0]]:
                return False
            self._send(HTTPStatus.OK, self.server.picture(*span[:3]), "image/png", {"Cache-Control": "max-age=3600"})
        else:
            return False
        return True

    def _numbers(self, pattern: str, path: str) -> tuple[int, ...] | None:
        """The path's numbers (episode, camera, ...); None if it does not match or they do not exist."""
        match = re.fullmatch(pattern, path, re.ASCII)
        if match is None or max(map(len, match.groups())) > 18:
            return None
        found = tuple(map(int, match.groups()))
        return found if found[0] in self.server.episodes and found[1] < len(self.server.meta.cameras) else None

    def _kind(self, camera: int) -> str:
        return self.server.meta.features[self.server.meta.cameras[camera]].dtype

    def _post(self, path: str) -> bool:
        if path != "labels":
            return False
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST:
            self.close_connection = True  # its body is not read
            raise DataError(f"a request of {length or 'unknown'} bytes", hint=f"a label has less than {_LONGEST}")
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":
            raise DataError("the request is not application/json", hint="send a label as JSON")
        try:
            entry = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the label is not JSON ({error})", hint="send a label as JSON") from error
        if isinstance(entry, dict):
            entry.pop("at", None)  # the server sets the time
            entry.pop("score", None)  # only the classifier sets scores
        labels.append(self.server.meta.root, labels.parse(entry, where="the label", lengths=self.server.lengths))
        self._send(HTTPStatus.OK, self.server.label_table())
        return True

    def _film(self, path: Path) -> None:
        """Send a video, or the requested byte range of it."""
        with path.open("rb") as film:
            size = film.seek(0, 2)
            begin, end = _range(self.headers.get("Range"), size)
            if begin >= end:
                self._send(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", headers={"Content-Range": f"bytes */{size}"}
                )
                return
            partial = self.headers.get("Range") is not None
            headers = {"Accept-Ranges": "bytes", "Cache-Control": "max-age=3600"}
            if partial:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            self._head(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK, end - begin, "video/mp4", headers)
            film.seek(begin)
            while begin < end and (piece := film.read(min(_PIECE, end - begin))):
                self.wfile.write(piece)
                begin += len(piece)

    def _send(
        self,
        status: HTTPStatus,
        body: bytes | Mapping[str, Any],
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        self._head(status, len(data), kind, {"Cache-Control": "no-store", **(headers or {})})
        self.wfile.write(data)

    def _head(self, status: HTTPStatus, length: int, kind: str, headers: Mapping[str, str]) -> None:
        fixed = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(length), **fixed, **headers}.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: the terminal shows only the address."""


def _range(header: str | None, size: int) -> tuple[int, int]:
    """The half-open byte range of a Range header; the whole file without one."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "", re.ASCII)
    if match is None or not any(match.groups()):
        return 0, size
    first, last = match.groups()
    if not first:  # a suffix range: the last N bytes
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size

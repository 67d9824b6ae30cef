"""Workarounds for Orbax and TensorStore: long tracebacks after a failed save, and two leaks."""

import functools
import logging
import os
import sys
from typing import Any

import tensorstore as ts


@functools.cache
def quieten_orbax() -> None:
    """Suppress tracebacks that Orbax logs for exceptions it also raises; `PIRL_DEBUG=1` keeps them."""
    if os.environ.get("PIRL_DEBUG", "0") not in ("", "0"):
        return
    logging.getLogger("absl").addFilter(_is_news)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # TensorStore writes to an event loop that ended with the first failed write.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


@functools.cache
def stop_leaks() -> None:
    """Avoid two calls of Orbax at every save whose answers TensorStore 0.1.86 never frees.

    Metrics, only to log them: 11 kB a call, 3 to 6 MB a minute in runs that save often. And the JSON of the folder, for
    every array: four strings a call, 80 kB a save of 250 arrays.
    """
    ts.experimental_collect_matching_metrics = lambda *_, **__: []
    to_json = ts.KvStore.Spec.to_json

    def without_leak(spec: Any, *words: Any, **settings: Any) -> Any:
        plain = {"driver": "file", "path": spec.path}
        if words or settings or spec != ts.KvStore.Spec(plain):
            return to_json(spec, *words, **settings)
        return plain

    ts.KvStore.Spec.to_json = without_leak  # type: ignore[method-assign, assignment]


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "/orbax/" not in record.pathname.replace(os.sep, "/")

"""Two workarounds for Orbax: long tracebacks after a failed save, and a leak."""

import functools
import logging
import os
import sys
from typing import Any

import tensorstore as ts


@functools.cache
def quieten_orbax() -> None:
    """Drop tracebacks that Orbax logs of exceptions it raises as well; `PIRL_DEBUG=1` keeps them."""
    if os.environ.get("PIRL_DEBUG", "0") not in ("", "0"):
        return
    logging.getLogger("absl").addFilter(_is_news)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # TensorStore reports a write to an event loop that ended with the first write that failed.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


@functools.cache
def stop_metrics_leak() -> None:
    """Orbax asks TensorStore for metrics at every save, only to log them, and each answer is never freed.

    With TensorStore 0.1.86 that is 11 kB a call, which was 3 to 6 MB a minute in runs that save often.
    """
    ts.experimental_collect_matching_metrics = lambda *_, **__: []


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "/orbax/" not in record.pathname.replace(os.sep, "/")

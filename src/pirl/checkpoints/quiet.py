"""What Orbax and TensorStore say of a save that failed: hundreds of lines, before pirl says why in two."""

import functools
import logging
import os
import sys
from typing import Any


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


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "/orbax/" not in record.pathname.replace(os.sep, "/")

"""The loop's status page: one self-contained HTML file, rewritten at every change."""

import math
from datetime import datetime

from pirl.files import write_text
from pirl.improve.config import LoopConfig
from pirl.improve.state import Generation, State
from pirl.report.markup import Markup, element, join

FILE = "loop.html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .4rem .8rem .4rem 0 }
th, td { border-bottom: 1px solid #ccc; vertical-align: top } .number { font-variant-numeric: tabular-nums }
.promote { color: #14713d } .back { color: #a32020 } code { font-size: 13px }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #ddd } .promote { color: #6cc993 }
.back { color: #ff8f8f } th, td { border-color: #444 } }
"""


def write(config: LoopConfig, now: State, *, doing: str) -> None:
    """Write the page atomically. `doing`: the current activity."""
    write_text(config.path / FILE, render(config, now, doing=doing))


def render(config: LoopConfig, now: State, *, doing: str) -> str:
    """The page as HTML."""
    time = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    heads = ("generation", "collected", "held out", "blind comparison", "decision", "candidate")
    rows = [element("tr", [element("td", cell) for cell in _cells(one)]) for one in now.finished]
    table = element("table", element("tr", [element("th", head) for head in heads]), rows)
    done = len(now.finished) >= config.generations
    body = join(
        element("h1", f"pirl improve: {config.path.name}"),
        element("p", "Robot's policy: ", element("code", now.policy)),
        element("p", "Finished." if done else f"Now: {doing or 'between two parts'} ({time})"),
        table if rows else element("p", "No generation has finished yet."),
    )
    refresh = None if done else element("meta", http_equiv="refresh", content="10")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        refresh,
        element("title", "pirl improve"),
        element("style", Markup(_STYLE)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _cells(one: Generation) -> tuple[str | Markup, ...]:
    c, found = one.collected, one.comparison
    alone = c["episodes"] - c["corrected"]
    collected = f"{c['successes_alone']} of {alone} succeed alone"
    if c["corrected"]:
        collected += f"; {c['corrected']} corrected"
    held = f"{one.held_out['rate']:.0%}" if one.held_out else "–"
    compared = "–"
    if found is not None:
        (a, b), (n, m) = found["successes"], found["episodes"]
        low, high = (f"{math.copysign(abs(x), x):+.2f}" for x in (found["low"], found["high"]))
        compared = f"current {a}/{n}, candidate {b}/{m}; difference {low} to {high}"
    colour = {"promote": "promote", "roll back": "back"}.get(one.decision)
    decision = element("b", one.decision, class_=colour)
    return str(one.number), collected, held, compared, decision, element("code", one.candidate)

"""Human-readable metrics: grouped on a terminal, otherwise one line with the most important ones.

The run's files hold all numbers.
"""

import textwrap
from collections.abc import Mapping
from datetime import timedelta

HEADLINES = (
    *("eval/success_rate", "online/success_rate", "ript/success_rate", "held_out/action_error", "held_out/auc"),
    *(
        "policy/loss",
        "actor/loss",
        "critic/loss",
        "ript/loss",
        "ppo/loss",
        "bc/loss",
        "actor/flow_loss",
        "critic/q_mean",
    ),
    *("actor/grad_norm", "policy/grad_norm", "ript/grad_norm", "policy/learning_rate"),
)
"""Metrics shown on the one line, in this order, where a run logs them."""
SHOWN = 8
"""Number of metrics shown of a record without any headline metric."""


def heading(step: int, total: int | None, seconds_per_step: float | None) -> str:
    """`step 20/300 (0:01:10 left)`, without the parts that are unknown."""
    if not total:
        return f"step {step:,}"
    text = f"step {step:,}/{total:,}"
    if seconds_per_step is None or step >= total:
        return text
    return f"{text} ({timedelta(seconds=round((total - step) * seconds_per_step))} left)"


def one_line(head: str, values: Mapping[str, float]) -> str:
    """`step 20/300 (0:01:10 left)  policy/loss 1.35  0.046 s/step`."""
    names = [name for name in HEADLINES if name in values]
    if not any(not name.startswith("time/") for name in names):
        names = [name for name in values if not name.startswith(("time/", "memory/"))][:SHOWN]
    return "  ".join([head, *(f"{name} {number(values[name])}" for name in names), *_speed(values)])


def grouped(head: str, values: Mapping[str, float], width: int) -> str:
    """The head, then one line per group of metrics (the part of the name before the last slash)."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        group, _, rest = name.rpartition("/")
        groups.setdefault(group, []).append(f"{rest} {number(value)}")
    indent = max((len(group) for group in groups), default=0) + 4
    lines = [head]
    for group, entries in groups.items():
        text = "  ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in entries)
        lines.append(
            textwrap.fill(
                text,
                width=max(40, width),
                initial_indent=f"  {group}".ljust(indent),
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def _speed(values: Mapping[str, float]) -> list[str]:
    said = []
    if "time/step_seconds" in values:
        said.append(f"{number(values['time/step_seconds'])} s/step")
    if values.get("time/stall_fraction", 0.0) > 0.1:
        said.append(f"waits for data {values['time/stall_fraction']:.0%}")
    if "memory/device_gib" in values:
        said.append(f"{values['memory/device_gib']:.1f} GiB")
    return said

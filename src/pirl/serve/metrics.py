"""The server's counters and stage latencies: Prometheus text, and a table."""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
from jaxtyping import Int

STAGES = ("prepare", "wait", "plan", "send", "total")
"""prepare: unpack and transform the observation. wait: for the device and for other requests of the batch. plan: run
the model. send: pack and send the reply. total: from the request's last byte to the reply's."""
KEPT = 10_000
"""Number of latest requests whose times are kept for percentiles."""
NOVELTY_BOUNDS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_HELP = {
    "requests": "Requests answered with a chunk.",
    "errors": "Requests answered with an error, by kind.",
    "refused": "Connections and requests refused, by reason.",
    "connections": "Connections so far.",
    "throttled": "Requests delayed by the rate limit.",
    "batches": "Batches planned, by size.",
    "limited": "Chunks that the safety net changed, refused or warned of, by rule.",
    "reloads": "Checkpoint changes, by result.",
    "records": "Calls of the recording hook, by result.",
}


class Metrics:
    """Thread-safe counters and latency histograms."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._times: dict[str, deque[float]] = {stage: deque(maxlen=KEPT) for stage in STAGES}
        self._buckets = {stage: np.zeros(len(BOUNDS) + 1, np.int64) for stage in STAGES}
        self._sums = dict.fromkeys(STAGES, 0.0)
        self._novelty = np.zeros(len(NOVELTY_BOUNDS) + 1, np.int64)
        self._novelty_sum = 0.0

    def count(self, name: str, label: str = "", value: str = "") -> None:
        """Increment a counter."""
        with self._lock:
            self._counts[name, label, value] += 1

    def counted(self, name: str, value: str = "") -> int:
        """A counter's value, by default summed over all label values."""
        with self._lock:
            return sum(n for (found, _, of), n in self._counts.items() if found == name and value in ("", of))

    def took(self, stage: str, seconds: float) -> None:
        """Record the duration of a stage of one request."""
        with self._lock:
            self._times[stage].append(seconds)
            self._sums[stage] += seconds
            self._buckets[stage][int(np.searchsorted(BOUNDS, seconds))] += 1

    def novel(self, score: float) -> None:
        """Record an observation's novelty."""
        with self._lock:
            self._novelty_sum += score
            self._novelty[int(np.searchsorted(NOVELTY_BOUNDS, score))] += 1

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Time the block as a stage."""
        start = perf_counter()
        yield
        self.took(stage, perf_counter() - start)

    def percentiles(self) -> dict[str, tuple[float, float, int]]:
        """(p50, p99, number) of each stage over the latest requests, in seconds."""
        with self._lock:
            times = {stage: np.array(kept) for stage, kept in self._times.items() if kept}
        return {s: (float(np.quantile(x, 0.5)), float(np.quantile(x, 0.99)), len(x)) for s, x in times.items()}

    def table(self) -> str:
        """p50 and p99 of each stage, in milliseconds."""
        lines = [f"{'stage':<10}{'p50 ms':>10}{'p99 ms':>10}{'requests':>10}"]
        for stage, (half, most, number) in self.percentiles().items():
            lines.append(f"{stage:<10}{1000 * half:>10.2f}{1000 * most:>10.2f}{number:>10}")
        return "\n".join(lines)

    def prometheus(self, *, open_connections: int, policy: str) -> str:
        """All metrics in Prometheus's text format."""
        lines: list[str] = []
        with self._lock:
            for name in sorted(_HELP):
                lines += [f"# HELP pirl_{name}_total {_HELP[name]}", f"# TYPE pirl_{name}_total counter"]
                found = {key: n for key, n in self._counts.items() if key[0] == name}
                lines += [f"pirl_{name}_total{_label(*key[1:])} {n}" for key, n in sorted(found.items())]
                lines += [f"pirl_{name}_total 0"] * (not found)
            lines += ["# HELP pirl_latency_seconds Time per stage.", "# TYPE pirl_latency_seconds histogram"]
            for stage, buckets in self._buckets.items():
                label = f'stage="{stage}"'
                lines += _histogram("pirl_latency_seconds", label, BOUNDS, buckets, self._sums[stage])
            if self._novelty.any():
                lines += ["# HELP pirl_novelty Distance of observations from the training data, in limits."]
                lines += ["# TYPE pirl_novelty histogram"]
                lines += _histogram("pirl_novelty", "", NOVELTY_BOUNDS, self._novelty, self._novelty_sum)
        lines += ["# HELP pirl_open_connections Connections now.", "# TYPE pirl_open_connections gauge"]
        lines += [f"pirl_open_connections {open_connections}"]
        lines += ["# HELP pirl_policy_info The policy that new episodes get.", "# TYPE pirl_policy_info gauge"]
        lines += [f"pirl_policy_info{_label('policy', policy)} 1"]
        return "\n".join(lines) + "\n"


def _histogram(
    name: str, label: str, bounds: Sequence[float], buckets: Int[np.ndarray, "n"], total: float
) -> list[str]:
    ends = [*(str(bound) for bound in bounds), "+Inf"]
    before, alone = (f"{label},", f"{{{label}}}") if label else ("", "")
    lines = [
        f'{name}_bucket{{{before}le="{end}"}} {n}' for end, n in zip(ends, np.cumsum(buckets).tolist(), strict=True)
    ]
    return [*lines, f"{name}_sum{alone} {total:.6f}", f"{name}_count{alone} {int(buckets.sum())}"]


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{escaped}"}}' if name else ""

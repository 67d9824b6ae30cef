"""Early stopping: patience on one metric."""

from collections.abc import Mapping
from typing import Any

from pirl.config import EarlyStop


class Patience:
    """Counts measurements without improvement; its state is checkpointed."""

    def __init__(self, config: EarlyStop | None, state: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._best: float | None = (state or {}).get("best")
        self._waited: int = (state or {}).get("waited", 0)

    def state(self) -> dict[str, Any]:
        """The state to checkpoint."""
        return {"best": self._best, "waited": self._waited}

    def __str__(self) -> str:
        if self._config is None or self._best is None:
            return "nothing was measured"
        metric, delta = self._config.metric, self._config.min_delta
        return f"{metric} was {self._best:.4g} at best, and {self._waited} times not better by {delta:g}"

    def exhausted(self, values: Mapping[str, float]) -> bool:
        """Record new measurements; True if the run should end."""
        if self._config is None or self._config.metric not in values:
            return False
        sign = 1 if self._config.mode == "max" else -1
        value = values[self._config.metric]
        if self._best is None or sign * (value - self._best) > self._config.min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self._config.patience

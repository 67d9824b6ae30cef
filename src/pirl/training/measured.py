"""Per-row results on held-out episodes: as metrics for the log, and as details for files and reports."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from pirl.training.held_out_metrics import (
    AUC,
    Bin,
    auc,
    calibration,
    calibration_gap,
    masked_means,
    rank_correlation,
    rank_correlation_by_chance,
)

Array = np.ndarray
AUC_OF_PHASES = (
    "held_out/auc_phase_1",
    "held_out/auc_phase_2",
    "held_out/auc_phase_3",
    "held_out/auc_phase_4",
    "held_out/auc_phase_5",
)
"""AUC within each fifth of an episode."""
PHASES = len(AUC_OF_PHASES)
FILE = "held_out.json"
"""File in the run's folder with the latest measurement."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Per-row results. Values come from the acting weights and are ensemble means."""

    episode: Int[Array, "n"]
    """Episode number in the dataset."""
    step: Int[Array, "n"]
    length: Int[Array, "n"]
    """Number of steps of the episode."""
    outcome: Int[Array, "n"]
    """1 success, 0 failure, -1 unlabelled."""
    returns: Float[Array, "n"]
    """Returns to go, including failures that were cut; NaN if unknown."""
    ended: Bool[Array, "n"]
    """Whether the task ended, so the return is exact."""
    error: Float[Array, "n H A"]
    """|planned - recorded|, in the model's normalised units."""
    robot_error: Float[Array, "n H A"]
    """|planned - recorded| in robot units."""
    valid: Float[Array, "n H"]
    """1 inside the episode, else 0."""
    numbers: Mapping[str, Float[Array, "n"]]
    """Network outputs: `flow_loss`, and with a critic `q`, `q_spread`, `td_error`, ..."""

    @property
    def has_values(self) -> bool:
        """Whether the agent has a critic."""
        return "q" in self.numbers

    @property
    def action_error(self) -> Float[Array, "n"]:
        """Mean normalised error per row, over dimensions and steps inside the episode."""
        total: Array = (self.error.mean(2) * self.valid).sum(1) / np.maximum(self.valid.sum(1), 1)
        return total

    @property
    def auc(self) -> AUC:
        """AUC of successes against failures."""
        known = self.outcome >= 0
        phase = np.minimum(self.step * PHASES // self.length, PHASES - 1)
        return auc(self.numbers["q"][known], self.outcome[known] == 1, self.episode[known], phase[known], PHASES)

    @property
    def calibration(self) -> tuple[Bin, ...]:
        """Bins of values against returns, over rows whose task ended."""
        return calibration(self.numbers["q"][self.ended], self.returns[self.ended])

    def metrics(self) -> dict[str, float]:
        """Metrics for the log, without those that are undefined on these episodes."""
        return {name: float(value) for name, value in self._all().items() if math.isfinite(value)}

    def _all(self) -> dict[str, float]:
        return {**self._of_policy(), **(self._of_critic() if self.has_values else {})}

    def _of_policy(self) -> dict[str, float]:
        error = {kind: masked_means(self.error[kept], self.valid[kept])[0] for kind, kept in self._kinds.items()}
        loss = self.numbers.get("flow_loss", np.full(len(self.step), math.nan))
        return {
            "held_out/action_error": error["not_failed"],
            "held_out/action_error_failures": error["failures"],
            "held_out/flow_loss": _mean(loss[self._kinds["not_failed"]]),
            "held_out/flow_loss_failures": _mean(loss[self._kinds["failures"]]),
        }

    @property
    def _kinds(self) -> dict[str, Bool[Array, "n"]]:
        return {"not_failed": self.outcome != 0, "failures": self.outcome == 0}

    def _of_critic(self) -> dict[str, float]:
        n, auc, known = self.numbers, self.auc, np.isfinite(self.returns)
        good, bad, learns = self.outcome == 1, self.outcome == 0, n["learns"] > 0
        better = n["q"] - n["candidate_mean"]
        closer = n["candidate_error"] - n["chosen_error"]
        return {
            "held_out/auc": auc.value,
            "held_out/auc_by_chance": auc.by_chance if math.isfinite(auc.value) else math.nan,
            **dict(zip(AUC_OF_PHASES, auc.by_phase, strict=True)),
            "held_out/rank_correlation": rank_correlation(n["q"][known], self.returns[known]),
            "held_out/rank_correlation_by_chance": rank_correlation_by_chance(len(np.unique(self.episode[known]))),
            "held_out/calibration_gap": calibration_gap(self.calibration),
            "held_out/value_bias": _mean((n["q"] - self.returns)[self.ended]),
            "held_out/td_error": math.sqrt(_mean(np.square(n["td_error"][learns]))),
            "held_out/q_mean": _mean(n["q"]),
            "held_out/q_spread": _mean(n["q_spread"]),
            "held_out/candidate_gain": _mean(n["candidate_best"] - n["candidate_mean"]),
            "held_out/data_advantage_successes": _mean(better[good]),
            "held_out/data_advantage_failures": _mean(better[bad]),
            "held_out/best_of_n_closer": _mean(closer[good]),
        }

    def to_json(self) -> dict[str, Any]:
        """Everything a report draws, as JSON; unknown values are null."""
        details: dict[str, Any] = {
            "metrics": self.metrics(),
            "rows": len(self.step),
            "episodes": [self._episode(number) for number in np.unique(self.episode).tolist()],
            "action_error": {name: self._errors(rows) for name, rows in self._kinds.items() if rows.any()},
        }
        if self.has_values:
            details["auc_by_phase"] = [_plain(x) for x in self.auc.by_phase]
            details["calibration"] = [
                {"predicted": one.predicted, "returned": one.returned, "count": one.count} for one in self.calibration
            ]
        return details

    def samples(self) -> dict[str, list[Any]]:
        """All per-row numbers as columns, to find the samples with large losses."""
        index = {"episode": self.episode, "step": self.step, "outcome": self.outcome, "return": self.returns}
        return {
            name: x.tolist() for name, x in (index | {"action_error": self.action_error} | dict(self.numbers)).items()
        }

    def _errors(self, rows: Bool[Array, "n"]) -> dict[str, Any]:
        _, by_dimension, _ = masked_means(self.robot_error[rows], self.valid[rows])
        _, normalised, by_step = masked_means(self.error[rows], self.valid[rows])
        names = {"robot_units": by_dimension, "normalised": normalised, "by_step": by_step}
        return {name: [_plain(x) for x in values] for name, values in names.items()}

    def _episode(self, number: int) -> dict[str, Any]:
        rows = self.episode == number
        outcome = int(self.outcome[rows][0])
        traced = {name: self.numbers[name][rows] for name in ("q", "q_spread", "flow_loss") if name in self.numbers}
        traced |= {"returns": self.returns[rows], "action_error": self.action_error[rows]}
        return {
            "episode": number,
            "success": None if outcome < 0 else bool(outcome),
            "length": int(self.length[rows][0]),
            "steps": self.step[rows].tolist(),
            **{name: [_plain(x) for x in values] for name, values in traced.items()},
        }


def metric_names(*, values: bool) -> set[str]:
    """Names of all metrics a measurement may log, for an agent with or without a critic."""
    row, said = np.zeros(1), ("q_spread", "td_error", "candidate_mean", "candidate_best", "candidate_error")
    names = ("q", *said, "chosen_error", "learns") if values else ()
    whole, one = np.zeros(1, np.int64), np.zeros((1, 1, 1))
    index = {"episode": whole, "step": whole, "length": whole + 1, "outcome": whole}
    arrays = {"returns": row, "ended": row > 0, "error": one, "robot_error": one, "valid": one[0]}
    return set(Measured(**index, **arrays, numbers=dict.fromkeys(names, row))._all())


def _mean(x: Float[Array, "n"]) -> float:
    return float(x.mean()) if len(x) else math.nan


def _plain(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None

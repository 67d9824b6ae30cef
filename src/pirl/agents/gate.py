"""When the actor may use the critic: decided by the critic's quality on held-out episodes.

    opens    ρ > max(gate, ρ_chance)  and  AUC > AUC_chance
    shuts    ρ < HYSTERESIS · gate    or   AUC < 1/2

ρ is the rank correlation of values and returns over all held-out rows. It may be high merely because values rise
towards the end of every episode; AUC compares successes with failures at the same phase, so it is immune to that.
Without successes or without failures there is no AUC, and ρ decides alone. Chance levels: an uninformed critic stays
below them in 95 of 100 data sets with as many episodes. Between the two conditions the gate keeps its state.
"""

from collections.abc import Mapping

from pirl.ranges import Share

HYSTERESIS = 0.75
"""The gate shuts when ρ falls below this fraction of the opening threshold."""
RANK, AUC = "held_out/rank_correlation", "held_out/auc"


def stays_open(measured: Mapping[str, float], gate: Share, *, was_open: bool) -> bool:
    """Whether the actor may use the critic. If ρ is undefined, because returns do not vary, the gate opens."""
    if RANK not in measured:
        return True
    rank, auc = measured[RANK], measured.get(AUC)
    if was_open:
        return rank >= HYSTERESIS * gate and (auc is None or auc >= 0.5)
    above_chance = rank > measured[f"{RANK}_by_chance"] and (auc is None or auc > measured[f"{AUC}_by_chance"])
    return rank > gate and above_chance


def said(measured: Mapping[str, float], *, is_open: bool) -> str:
    """The gate's decision with its reason, as one line."""
    found = [f"{name} {measured[name]:.3g}" for name in (RANK, AUC) if name in measured]
    reason = ", ".join(found) or f"{RANK} is unknown: there are no held-out episodes, or their returns do not vary"
    return f"{reason}: the actor {'follows the critic' if is_open else 'imitates, the critic does not know enough'}"


def final_word(measured: Mapping[str, float], gate: Share, *, was_open: bool, did: str) -> str:
    """What a run says of itself that ends with its gate shut; `did`: what its actor did meanwhile."""
    needed = {AUC: measured.get(f"{AUC}_by_chance"), RANK: max(gate, measured.get(f"{RANK}_by_chance", 0.0))}
    known = {name: least for name, least in needed.items() if name in measured and least is not None}
    found = ", ".join(
        f"{name} {measured[name]:.2f} where more than {least:.2f} is needed" for name, least in known.items()
    )
    ranked = "successes above failures" if AUC in known and measured[AUC] <= known[AUC] else "returns"
    last = f"no longer ranks held-out {ranked}; in the end the actor {did}"
    word = last if was_open else f"never ranked held-out {ranked}; the actor only {did}"
    return (
        f"the critic {word}: {found}. Are the outcomes right, are there enough successes and failures, does the "
        "discount reach them? --agent.gate None trusts the critic anyway"
    )

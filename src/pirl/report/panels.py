"""Assigns metrics to charts and sections, with hints on what to look for. Unlisted metrics come last."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of one or a few metrics of the same unit."""

    metrics: tuple[str, ...]
    hint: str = ""
    title: str = ""
    """Heading; if empty, the first metric's name."""
    share: bool = False
    """Whether values are shares, drawn in per cent."""

    @property
    def heading(self) -> str:
        """The chart's heading."""
        return self.title or self.metrics[0]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts about one question."""

    id: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    folded: bool = False
    """Whether it is collapsed at first."""


def _each(*metrics: str) -> tuple[Panel, ...]:
    return tuple(Panel(metrics=(name,)) for name in metrics)


SUCCESS_RATES = ("eval/success_rate", "ript/success_rate", "online/success_rate")

EVALUATED = (
    Panel(metrics=("eval/return",), hint="mean return of the evaluated episodes"),
    Panel(metrics=("eval/length",), hint="mean steps of the evaluated episodes"),
)
"""Charts shown below the success chart."""

SECTIONS = (
    Section(
        id="losses",
        title="Losses",
        about="Means over the interval of a record. Compare a loss only within one algorithm and one setting.",
        panels=(
            Panel(metrics=("policy/loss",), hint="falls, then flattens"),
            Panel(metrics=("actor/loss",), hint="what the actor minimises"),
            Panel(metrics=("actor/flow_loss",), hint="rising steadily: the actor leaves the data"),
            Panel(metrics=("critic/loss",), hint="hl_gauss has a floor of 1.20, not 0"),
            Panel(metrics=("ript/loss",), hint="what the rollouts' part minimises"),
            Panel(metrics=("ppo/loss",), hint="near 0: it does not measure progress"),
            Panel(metrics=("value/loss",), hint="hl_gauss has a floor of 1.20, not 0"),
            Panel(metrics=("ript/flow_loss",), hint="near 0: the policy always does the same"),
            Panel(metrics=("bc/loss",), hint="on demonstrations; rising: the policy leaves them"),
            Panel(metrics=("critic/calql",), hint="Cal-QL penalty"),
            Panel(metrics=("policy/loss_std",), hint="large: a few hard or broken samples"),
        ),
    ),
    Section(
        id="values",
        title="Q calibration",
        about="Does the critic know how episodes end? While the correlation is low, the actor follows noise.",
        panels=(
            Panel(metrics=("critic/mc_correlation",), hint="of Q and the observed return; the first thing to look at"),
            Panel(metrics=("critic/mc_gap",), hint="Q minus the observed return; large: overestimation"),
            Panel(metrics=("critic/q_mean", "critic/y"), title="Q and its target", hint="close to each other"),
            Panel(metrics=("critic/q_std",), hint="near 0: the critic does not discriminate"),
            Panel(metrics=("value/explained_variance",), hint="of the returns; 0: the value is uninformative"),
            Panel(metrics=("critic/candidate_gain",), hint="what best-of-N would gain; growing without end: errors"),
            Panel(metrics=("critic/action_slope",), hint="near 0: actions are ignored"),
        ),
    ),
    Section(
        id="held-out-curves",
        title="On held-out episodes",
        about="Episodes that training never draws, always the same rows. What the critic has learned, not memorised.",
        panels=(
            Panel(
                metrics=("held_out/auc", "held_out/auc_by_chance"),
                title="held_out/auc",
                hint="successes worth more than failures at the same phase, and what chance stays below",
                share=True,
            ),
            Panel(
                metrics=("held_out/rank_correlation", "held_out/rank_correlation_by_chance"),
                title="held_out/rank_correlation",
                hint="of value and return, and what chance stays below",
            ),
            Panel(metrics=("held_out/flow_loss", "held_out/flow_loss_failures"), title="held_out/flow_loss"),
            Panel(metrics=("held_out/action_error", "held_out/action_error_failures"), title="held_out/action_error"),
            Panel(metrics=("held_out/calibration_gap",), hint="distance of value and return"),
            Panel(metrics=("held_out/value_bias",), hint="above 0: the critic is too optimistic"),
            Panel(metrics=("held_out/td_error",), hint="rising: the critic diverges off its data"),
            Panel(
                metrics=("held_out/candidate_gain", "held_out/q_spread"),
                title="Gain of the best candidate, and spread of the ensemble",
                hint="a spread above the gain: choosing is guessing",
            ),
            Panel(metrics=("held_out/best_of_n_closer",), hint="above 0: the critic prefers what worked"),
            Panel(
                metrics=("held_out/data_advantage_successes", "held_out/data_advantage_failures"),
                title="Recorded chunks against the policy's",
                hint="successes above failures",
            ),
        ),
    ),
    Section(
        id="actor",
        title="Health of the actor",
        about="How selectively it learns, and how far it moves.",
        panels=(
            Panel(
                metrics=("actor/ess",), hint="effective sample size of the weights; near agent.target_ess", share=True
            ),
            Panel(metrics=("actor/beta",), hint="temperature of the weights; stable is good"),
            Panel(metrics=("actor/advantage",), hint="near 0"),
            Panel(metrics=("ript/drift",), hint="distance to the policy that rolled out"),
            Panel(metrics=("ript/ess",), hint="effective sample size of the weights", share=True),
            Panel(metrics=("ript/negative_share",), hint="of the weights, those that push away", share=True),
            Panel(metrics=("ript/ratio",), hint="near 1"),
            Panel(metrics=("ript/ratio_clipped",), hint="high: the policy moved far in one round", share=True),
            Panel(metrics=("ppo/kl",), hint="divergence from the policy that rolled out"),
            Panel(metrics=("ppo/held",), hint="near 1: most updates teach the policy nothing", share=True),
            Panel(metrics=("ppo/ratio",), hint="near 1"),
            Panel(metrics=("ppo/ratio_clipped",), hint="high: the policy moved far in one round", share=True),
            Panel(metrics=("ppo/entropy",), hint="of the exploration; falling to its bound: it ends"),
            *_each("policy/grad_norm", "actor/grad_norm", "critic/grad_norm", "ript/grad_norm", "ppo/grad_norm"),
            *_each("policy/learning_rate", "critic/learning_rate"),
        ),
    ),
    Section(
        id="curriculum",
        title="Curriculum and practice",
        about="Which initial states were practised, and how many episodes that took.",
        panels=(
            Panel(metrics=("curriculum/success_mean",), hint="estimated success over all of them", share=True),
            Panel(
                metrics=("curriculum/solved_share", "curriculum/hopeless_share"),
                title="Solved and hopeless",
                hint="above 90 %, below 10 % success",
                share=True,
            ),
            Panel(metrics=("curriculum/entropy",), hint="100 %: all are drawn alike", share=True),
            Panel(
                metrics=("ript/attempted_groups", "ript/accepted_groups"),
                title="Groups of a round",
                hint="attempted, and accepted because outcomes differed",
            ),
            Panel(metrics=("ript/rows", "ript/collected_rows"), title="Rows of a round", hint="of a batch, and in all"),
            Panel(metrics=("ript/updates",), hint="updates of a round"),
            *_each("ript/env_steps", "online/episodes", "online/env_steps", "online/replay_episodes"),
        ),
    ),
    Section(
        id="throughput",
        title="Throughput",
        about="Where the time goes. The first step, which compiles, is left out.",
        panels=(
            Panel(metrics=("time/step_seconds",), hint="seconds a step"),
            Panel(metrics=("time/samples_per_second",)),
            Panel(
                metrics=("time/stall_fraction",), hint="waiting for data; above 10 %: look at the loader", share=True
            ),
            Panel(metrics=("time/mfu",), hint="of the devices' peak", share=True),
            Panel(metrics=("time/env_steps_per_second",), hint="environment steps while collecting"),
            Panel(
                metrics=("time/env_share", "time/policy_share"),
                title="Time of a collection",
                hint="in environments, in the policy",
                share=True,
            ),
            Panel(metrics=("time/occupancy",), hint="of the policy's batch", share=True),
            Panel(metrics=("rollout/lost_episodes",), hint="given up after retries"),
        ),
    ),
    Section(
        id="memory",
        title="Memory",
        about="GiB: of the process, and of the fullest device.",
        panels=(
            Panel(metrics=("memory/host_gib",), hint="growing without end: a leak"),
            Panel(metrics=("memory/device_gib", "memory/device_peak_gib"), title="Device", hint="now, and most so far"),
        ),
    ),
)

_PANELS = (*EVALUATED, *(panel for section in SECTIONS for panel in section.panels))
_KNOWN = {name for panel in _PANELS for name in panel.metrics}
_KNOWN |= {*SUCCESS_RATES, "eval/success_low", "eval/success_high", "held_out/q_mean"}
_KNOWN |= {f"held_out/auc_phase_{number}" for number in range(1, 6)}  # drawn by phase, of the latest


def sections(metrics: Iterable[str]) -> Iterator[Section]:
    """The sections and panels that have metrics, then a section with all unlisted metrics."""
    there = sorted(set(metrics))
    for section in SECTIONS:
        panels = tuple(
            replace(panel, metrics=shown, title=panel.title if len(shown) > 1 else "")
            for panel in section.panels
            if (shown := tuple(name for name in panel.metrics if name in there))
        )
        if panels:
            yield replace(section, panels=panels)
    if others := [name for name in there if name not in _KNOWN]:
        yield Section(id="others", title="Other metrics", about="", panels=_each(*others), folded=True)

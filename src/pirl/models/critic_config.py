"""Settings of the critic. No jax here: `pirl --help` reads this module."""

from dataclasses import dataclass, replace
from typing import Literal

from pirl.errors import ConfigError, did_you_mean
from pirl.models.config import DType
from pirl.ranges import Checked, Count, Decay, Positive

LossKind = Literal["hl_gauss", "huber", "mse"]
"""`hl_gauss`: classify a histogram of the return. `huber`, `mse`: regress the mean."""
Aggregation = Literal["mean", "min", "random_pair"]
"""How to combine ensemble members; `random_pair`: the minimum of two random members (REDQ)."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked):
    """An ensemble of Q(s, a_0 … a_{h-1}). The data determines chunk length and action size."""

    num_critics: Count = 2
    """Ensemble size."""
    hidden: tuple[Count, ...] = (512, 512, 512)
    """Widths of the hidden layers."""
    loss: LossKind = "hl_gauss"
    """Predict a histogram of the return (hl_gauss) or its mean (huber, mse)."""
    bins: Count = 101
    """Bins of the histogram (hl_gauss)."""
    sigma_ratio: float = 0.75
    """Standard deviation of a target's Gaussian, in bins (hl_gauss)."""
    huber_delta: float = 10.0
    """Errors beyond this are penalised linearly (huber)."""
    dtype: DType = "float32"
    """Type of the hidden layers' matmuls. `bfloat16` is faster when scoring many candidates from states."""
    dropout: Decay = 0.0
    """Dropout rate of the hidden layers."""
    action_clip: Positive = 1.5
    """Clip normalised actions to ± this before scoring. Above 1, because z-scored data exceed 1;
    inf does not clip."""
    num_queries: Count = 8
    """Learned queries that attend to the prefix, one summary each (critics on prefix features)."""
    pool_width: Count = 1024
    """Size of a query's summary, over all heads."""
    pool_heads: Count = 8
    """Attention heads per query."""
    embedding_width: Count = 512
    """Size of the joint embedding of prefix and proprioception."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden:
            raise ConfigError(
                "the critic has no hidden layer", hint="actions enter at hidden layers: give at least one"
            )
        if self.pool_width % self.pool_heads:
            raise ConfigError(f"pool_width {self.pool_width} is not divisible by {self.pool_heads} pool_heads")

    @property
    def outputs(self) -> int:
        """Outputs per member and chunk."""
        return self.bins if self.loss == "hl_gauss" else 1


_PAIR = CriticConfig()

CRITIC_PRESETS: dict[str, CriticConfig] = {
    "pair": _PAIR,
    "ten": replace(_PAIR, num_critics=10, dropout=0.1, num_queries=4, pool_width=256, pool_heads=4),
    "q_chunking": replace(_PAIR, hidden=(512, 512, 512, 512), loss="mse"),
    "tiny": replace(_PAIR, hidden=(64, 64), bins=51, num_queries=4, pool_width=32, pool_heads=2, embedding_width=64),
}
"""Named sizes: two members of 9.5M parameters each on π₀'s prefix, ten of 2.6M with dropout, Q-chunking's own for a
state, and one for a CPU."""


def get_critic_preset(name: str) -> CriticConfig:
    """A preset by name; an unknown name raises with the nearest matches."""
    if name not in CRITIC_PRESETS:
        raise did_you_mean(name, CRITIC_PRESETS, kind="critic preset")
    return CRITIC_PRESETS[name]

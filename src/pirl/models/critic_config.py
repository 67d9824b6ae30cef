"""What a critic can be told. No jax here: `pirl --help` reads these."""

from dataclasses import dataclass, replace
from typing import Literal

from pirl.errors import ConfigError, did_you_mean
from pirl.models.config import DType

LossKind = Literal["hl_gauss", "huber", "mse"]
"""`hl_gauss`: a histogram of the return, by cross-entropy. `huber`, `mse`: one number, by regression."""
Aggregation = Literal["mean", "min", "random_pair"]
"""How the opinions of an ensemble become one value; `random_pair` is the lower of two random members (REDQ)."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """An ensemble of Q(s, a_0 … a_{h-1}). How many actions of which size it scores is not said here: the data says."""

    num_critics: int = 2
    """Members of the ensemble."""
    hidden: tuple[int, ...] = (512, 512, 512)
    """Widths of the hidden layers."""
    loss: LossKind = "hl_gauss"
    """What a member predicts: a histogram of the return (hl_gauss), or its mean (huber, mse)."""
    bins: int = 101
    """Bins of the histogram (hl_gauss)."""
    sigma_ratio: float = 0.75
    """How far a target is smeared over the histogram, in bins (hl_gauss)."""
    huber_delta: float = 10.0
    """Errors beyond this count linearly (huber)."""
    dtype: DType = "float32"
    """What the hidden layers are multiplied in. `bfloat16` is faster where many candidates are scored from states."""
    dropout: float = 0.0
    """Share of the hidden units left out while training."""
    action_clip: float = 1.5
    """Normalised actions are clipped to ± this before scoring. Not 1: z-scored data lie beyond it."""
    num_queries: int = 8
    """Learned queries that read the prefix, each with its own summary (a critic on prefix features only)."""
    pool_width: int = 1024
    """Size of one query's summary of the prefix, all heads together."""
    pool_heads: int = 8
    """Attention heads of a query."""
    embedding_width: int = 512
    """Size of the joint embedding of prefix and proprioception."""

    def __post_init__(self) -> None:
        sizes = {
            "num_critics": self.num_critics,
            "bins": self.bins,
            "num_queries": self.num_queries,
            "pool_width": self.pool_width,
            "pool_heads": self.pool_heads,
            "embedding_width": self.embedding_width,
        }
        for name, size in (*sizes.items(), *(("a hidden layer", width) for width in self.hidden)):
            if size < 1:
                raise ConfigError(f"the critic's {name} is {size}", hint="it must be at least 1")
        if not self.hidden:
            raise ConfigError(
                "the critic has no hidden layer", hint="actions enter at hidden layers: give at least one"
            )
        if self.pool_width % self.pool_heads:
            raise ConfigError(f"pool_width {self.pool_width} is not divisible by {self.pool_heads} pool_heads")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}", hint="it is a share of the units: 0 to below 1")
        if not self.action_clip > 0:
            raise ConfigError(f"action_clip is {self.action_clip}", hint="it must be positive; inf does not clip")

    @property
    def outputs(self) -> int:
        """Numbers a member predicts per chunk."""
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
    """A named size; a typo is answered with the nearest names."""
    if name not in CRITIC_PRESETS:
        raise did_you_mean(name, CRITIC_PRESETS, kind="critic preset")
    return CRITIC_PRESETS[name]

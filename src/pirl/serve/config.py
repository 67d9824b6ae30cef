"""Settings of the server. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, Count, Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Checked):
    """Where the server listens, which clients it accepts, and how it plans."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all network interfaces."""
    port: Annotated[int, Bounds(low=0, high=2**16 - 1)] = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send (`Authorization: Api-Key KEY`). None: no authentication."""
    tls_cert: Path | None = None
    """Certificate chain (PEM): clients connect with wss://. None: no encryption."""
    tls_key: Path | None = None
    """The certificate's private key (PEM), if it is in a separate file."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that clients get when they connect, such as ALOHA's `reset_pose`."""
    seed: Natural = 0
    """Seed of the flow's noise."""
    max_batch: Count = 4
    """Most requests per batch. Batches of 1, 2, 4, ... up to this are compiled before the server listens."""
    batch_window: NotNegative = 0.003
    """Longest time a request waits for others to share its batch, in seconds. A single robot never waits."""
    real_time: bool = False
    """Real-time chunking: make a chunk consistent with the previous one, for requests that state how much of it was
    executed."""
    real_time_limit: Positive = 5.0
    """Real-time chunking: largest guidance weight towards the previous chunk."""
    max_message: Count = 16 * 2**20
    """Largest request, in bytes."""
    max_rate: Positive = 100.0
    """Most requests per second and connection; further ones are delayed."""
    max_connections: Count = 64
    """Most simultaneous connections; further ones are refused."""
    episode_gap: Positive = 10.0
    """Idle time after which the next request starts a new episode, in seconds, for clients that do not send one."""
    drain: Positive = 10.0
    """Longest time for pending requests on shutdown, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("serve: a private key without a certificate", hint="name both: --tls-cert, --tls-key")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("serve: the API key is empty", hint="leave it out, or choose a long one")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Compiled batch sizes: powers of two, and the largest."""
        powers = [2**i for i in range(self.max_batch.bit_length()) if 2**i < self.max_batch]
        return (*powers, self.max_batch)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("127.0.0.1", "::1", "localhost")

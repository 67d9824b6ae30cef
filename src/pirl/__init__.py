"""pirl ("pearl": π + RL): reinforcement learning for π₀ and π₀.₅ robot policies.

Importing pirl imports neither jax nor a simulator, so that `pirl --help` and environment workers start at once.
"""

__version__ = "0.1.0"

"""Rollouts: pools of environments, one batched policy, episodes with outcomes."""

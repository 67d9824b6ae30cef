"""Environments: robots in simulation. No jax here, so that a worker process starts fast and stays small."""

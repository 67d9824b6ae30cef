"""Algorithms as pure functions over pytrees. Nothing here jits, shards, logs or touches the disk."""

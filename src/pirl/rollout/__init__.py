"""Policies that act: environments in many places, one batched policy, episodes with their outcomes."""

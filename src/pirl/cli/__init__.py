"""The `pirl` command: one small file per verb. Imports jax only inside the verbs that need it."""

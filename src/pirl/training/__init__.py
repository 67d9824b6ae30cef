"""Training: the loop, batch streams, evaluation, metrics, checks before a run, recovery, acting from checkpoints."""

"""LeRobot datasets in, Q-chunk batches out. NumPy only: no jax here."""

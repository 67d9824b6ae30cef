"""Memory and FLOPs of a run, from shapes alone."""

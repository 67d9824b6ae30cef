"""Every format of weights and checkpoints: read, write, compare, inspect."""

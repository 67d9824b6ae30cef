"""Infrastructure of training: the loop, sharding, checkpoints, optimizers, metrics, memory."""
